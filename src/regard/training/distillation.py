"""Distill: a teacher translates sources, and its translations become what a student learns from.

A student that says all words at once, or a small one, learns far better from the translations of a teacher than from
those of people: they are less varied, so there is less to choose between (Kim and Rush 2016).

Turned round, the pairs of a model of the other direction are back-translations: what a model wrote is the source, what
people wrote is the target (Sennrich et al. 2016).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from regard.data.corpus import fingerprint, language_of, read_lines, read_pairs
from regard.errors import RegardError
from regard.storage.resumable_output import ResumableOutput, asked_of
from regard.storage.run_dir import check_distinct_files, sha256
from regard.tasks import Translator
from regard.training.progress import QUIET_SECONDS

PAIRS_AT_ONCE = 4096
"""sources in memory at a time: enough to find neighbours of like length"""

Source = tuple[str, str]
"""where it stands, and the text"""
Shape = Callable[[str, str, str], str]
"""where it stands, source and target in, a line out"""


def distill(
    model: Translator,
    output: Path,
    sources: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
    turned: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> int:
    """Write pairs of source and translation; how many. Sources: the lines of a file, or those the model learned from.

    Every source gives one pair, in order, repeats too; turned: the translation is its source, the text its target.
    options are those of ``Translator.search``. Killed, the same call goes on where it was; overwrite: it starts anew.
    """
    shape = _shape(output)
    for role, path in _files(model, sources):
        check_distinct_files({role: path, "--output": output})
    total = 0
    for where, text in _sources(model, sources):
        shape(where, text, "")  # what cannot be written is refused before the work begins
        total += 1
    tell(f"{total:,} sources to translate")
    with ResumableOutput([output], _asked(model, sources, turned, options), overwrite) as journal:
        if journal.done:
            tell(f"{output}: goes on after source {journal.done:,}")
        progress = _progress(journal.done, total, tell)
        rest = islice(_sources(model, sources), journal.done, None)
        while portion := list(islice(rest, PAIRS_AT_ONCE)):
            translations = model.translate([text for _, text in portion], **options)
            lines = [
                shape(where, translation, text) if turned else shape(where, text, translation)
                for (where, text), translation in zip(portion, translations, strict=True)
            ]
            journal.add(len(portion), ["".join(lines)])
            progress(journal.done)
    return total


def _files(model: Translator, file: Path | None) -> list[tuple[str, Path]]:
    """What is read, and what the model learned from, which is nothing to write over either; by role."""
    train = model.recipe.data.train
    roles = {"source": train.source, "target": train.target, "pairs": train.pairs}
    learned = [
        (f"data.train.{role}", model.recipe.data.path(name))
        for role, names in roles.items()
        for name in names or ()
    ]
    return learned if file is None else [("--input", file), *learned]


def _asked(
    model: Translator, file: Path | None, turned: bool, options: dict[str, Any]
) -> dict[str, Any] | None:
    """All that the pairs depend on; nobody can go on with those of a model that lies in no folder."""
    if model.run is None:
        return None
    data = model.recipe.data
    content = sha256(file) if file else fingerprint(data.train, data)
    return {"input": content, **asked_of(model), "options": {**options, "turned": turned}}


def _sources(model: Translator, file: Path | None) -> Iterator[Source]:
    if file is not None:
        return ((f"{file}:{number}", text) for number, text in enumerate(read_lines(file), 1))
    data = model.recipe.data
    pairs = read_pairs(data.train, data, "data.train")
    return (
        (f"data.train, pair {number}", pair.source)
        for number, pair in enumerate(pairs, 1)
        if model.language in (None, language_of(pair))
    )


# How a pair is written


def _as_tsv(where: str, source: str, target: str) -> str:
    if "\t" in source or "\t" in target:
        raise RegardError(
            f"{where}: a tab in the text, which would end it in a .tsv file; "
            "write a .jsonl file with --output"
        )
    return f"{source}\t{target}\n"


def _as_json(where: str, source: str, target: str) -> str:
    return json.dumps({"source": source, "target": target}, ensure_ascii=False) + "\n"


SHAPES: dict[str, Shape] = {".tsv": _as_tsv, ".jsonl": _as_json}


def _shape(output: Path) -> Shape:
    if output.suffix not in SHAPES:
        raise RegardError(f"{output}: pairs are written to a file that ends in .tsv or .jsonl")
    return SHAPES[output.suffix]


def _progress(before: int, total: int, tell: Callable[[str], None]) -> Callable[[int], None]:
    """Tells now and then how far it is; before were done by others."""
    start = last = time.monotonic()

    def advance(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > QUIET_SECONDS or done == total:
            last, each = now, (now - start) / (done - before)
            left = timedelta(seconds=round(each * (total - done)))
            tell(f"{done:,} of {total:,}, {1 / each:,.1f} a second, {left} left")

    return advance
