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

from regard.errors import RegardError
from regard.model import Translator
from regard.run import write_whole
from regard.text.corpus import language_of, read_lines, read_pairs

PAIRS_AT_ONCE = 4096
"""sources in memory at a time: enough to find neighbours of like length"""
QUIET_SECONDS = 20.0
"""between two lines that tell how far it is"""

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
    **options: Any,
) -> int:
    """Write pairs of source and translation; how many. Sources: the lines of a file, or those the model learned from.

    Every source gives one pair, in order, repeats too; turned: the translation is its source, the text its target.
    options are those of ``Translator.search``.
    """
    shape = _shape(output)
    total = sum(1 for _ in _sources(model, sources))
    tell(f"{total:,} sources to translate")
    progress = _progress(total, tell)
    lines = _distilled(model, _sources(model, sources), shape, turned, progress, options)

    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(lines)

    write_whole(output, write)
    return total


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


def _distilled(
    model: Translator,
    sources: Iterator[Source],
    shape: Shape,
    turned: bool,
    progress: Callable[[int], None],
    options: dict[str, Any],
) -> Iterator[str]:
    while portion := list(islice(sources, PAIRS_AT_ONCE)):
        translations = model.translate([text for _, text in portion], **options)
        for (where, text), translation in zip(portion, translations, strict=True):
            yield shape(where, translation, text) if turned else shape(where, text, translation)
        progress(len(portion))


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


def _progress(total: int, tell: Callable[[str], None]) -> Callable[[int], None]:
    """Tells now and then how far it is."""
    start = last = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal last, done
        done += count
        now = time.monotonic()
        if now - last > QUIET_SECONDS or done == total:
            last, each = now, (now - start) / done
            left = timedelta(seconds=round(each * (total - done)))
            tell(f"{done:,} of {total:,}, {1 / each:,.1f} a second, {left} left")

    return advance
