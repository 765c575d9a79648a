"""Import and export by the name of the format; and bundles, the files of a run that are needed to use it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from regard.errors import RegardError
from regard.interop.ctranslate2 import export_ctranslate2
from regard.interop.html_export import export_html
from regard.interop.huggingface import export_huggingface, import_huggingface
from regard.interop.onnx import export_onnx
from regard.interop.pytorch import export_torch, import_torch
from regard.interop.verification import compare, our_activations, sample_batch
from regard.nn.transformer import Transformer
from regard.recipe import suggest
from regard.storage.atomic_files import atomic_folder
from regard.storage.run_dir import RunDir
from regard.tasks import Translator


def export_bundle(folder: Path, out: Path) -> list[str]:
    """Copy the recipe, tokenizer, weights and card of a run."""
    run, model = RunDir(folder), Translator.load(folder, "cpu")
    batch = sample_batch(model.recipe, model.tokenizer)
    files = [run.recipe_file, *run.tokenizer_files(), run.weights_file]
    with atomic_folder(out) as partial:
        for path in [*files, *([run.card_file] if run.card_file.is_file() else [])]:
            shutil.copyfile(path, partial / path.name)
        copied = Translator.load(partial, "cpu").network
        lines = []
        if isinstance(model.network, Transformer) and isinstance(copied, Transformer):
            activations = our_activations(model.network, batch), our_activations(copied, batch)
            lines.append(str(compare(str(folder), *activations, batch)))
        size = sum(path.stat().st_size for path in partial.iterdir())
    return [*lines, f"{out}: {size / 1e6:.1f} MB, everything that is needed to use the model"]


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
    "html": export_html,
    "bundle": export_bundle,
}


def import_model(source: Path, format: str, out: Path, like: Path | None = None) -> list[str]:
    """Convert a model of another library into a run folder. Returns lines for the user.

    like: a run whose recipe and tokenizer are used, for formats that hold only weights.
    """
    if format not in IMPORTS:
        raise RegardError(f"--from {format}: no such format{suggest(format, IMPORTS)}")
    return IMPORTS[format](source, out, like)


def export_model(run: Path, format: str, out: Path) -> list[str]:
    """Convert a run into another format. Returns lines for the user."""
    if format not in EXPORTS:
        raise RegardError(f"--to {format}: no such format{suggest(format, EXPORTS)}")
    return EXPORTS[format](run, out)
