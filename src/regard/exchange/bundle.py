"""A bundle: the files of a run that are needed to use it, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

from regard.exchange.folder import whole
from regard.exchange.proof import compare, inputs, our_side
from regard.model import Translator
from regard.nn.transformer import Transformer
from regard.run import Run


def export_bundle(folder: Path, out: Path) -> list[str]:
    run, model = Run(folder), Translator.load(folder, "cpu")
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
