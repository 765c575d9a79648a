"""A bundle: the files of a run that are needed to use it, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from regard.errors import RegardError
from regard.interop.ctranslate2 import export_ctranslate2
from regard.interop.files import whole
from regard.interop.huggingface import export_huggingface, import_huggingface
from regard.interop.onnx import export_onnx
from regard.interop.pytorch import export_torch, import_torch
from regard.interop.verification import compare, inputs, our_side
from regard.nn.transformer import Transformer
from regard.recipe import suggest
from regard.storage.run_dir import RunDir
from regard.tasks import Translator


def export_bundle(folder: Path, out: Path) -> list[str]:
    run, model = RunDir(folder), Translator.load(folder, "cpu")
    given = inputs(model.recipe, model.tokenizer)
    files = [run.recipe_file, *run.tokenizer_files(), run.weights_file]
    with whole(out) as partial:
        for path in [*files, *([run.card_file] if run.card_file.is_file() else [])]:
            shutil.copyfile(path, partial / path.name)
        copied = Translator.load(partial, "cpu").network
        lines = []
        if isinstance(model.network, Transformer) and isinstance(copied, Transformer):
            sides = our_side(model.network, given), our_side(copied, given)
            lines.append(str(compare(str(folder), *sides, given)))
        size = sum(path.stat().st_size for path in partial.iterdir())
    return [*lines, f"{out}: {size / 1e6:.1f} MB, all that is needed to use the model"]


# ---------------------------------------------------------------------------------------------
# The formats by name.


IMPORTS: dict[str, Callable[[Path, Path, Path | None], list[str]]] = {
    "huggingface": import_huggingface,
    "torch": import_torch,
}
EXPORTS: dict[str, Callable[[Path, Path], list[str]]] = {
    "huggingface": export_huggingface,
    "ctranslate2": export_ctranslate2,
    "ctranslate2-int8": partial(export_ctranslate2, quantization="int8"),
    "onnx": export_onnx,
    "torch": export_torch,
    "bundle": export_bundle,
}


def import_model(what: Path, kind: str, out: Path, like: Path | None = None) -> list[str]:
    """Make a run folder of a model from elsewhere; lines that say what was proved."""
    if kind not in IMPORTS:
        raise RegardError(f"--from {kind}: no such format{suggest(kind, IMPORTS)}")
    return IMPORTS[kind](what, out, like)


def export_model(run: Path, kind: str, out: Path) -> list[str]:
    """Write a run for others to open; lines that say what was proved."""
    if kind not in EXPORTS:
        raise RegardError(f"--to {kind}: no such format{suggest(kind, EXPORTS)}")
    return EXPORTS[kind](run, out)
