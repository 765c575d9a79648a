"""Sequence-level distillation and back-translation: a model translates sources, and the pairs become training data.

A non-autoregressive or small student learns far better from the translations of a teacher than from human
translations: they vary less, so there is less to choose between (Kim and Rush 2016).

With a model of the opposite direction and the two sides swapped, the pairs are back-translations: the source is written
by a model, the target by people (Sennrich et al. 2016).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from regard.data.corpus import fingerprint, read_pairs
from regard.data.pairs import language_of
from regard.data.text_files import read_lines
from regard.errors import RegardError
from regard.storage.atomic_files import check_distinct_files
from regard.storage.resumable_output import ResumableOutput, model_resume_key
from regard.storage.run_dir import sha256
from regard.tasks import Translator
from regard.training.progress import SECONDS_BETWEEN_LINES

CHUNK_SIZE = 4096
"""Number of sources in memory at a time: enough to batch sources of similar length."""

LocatedText = tuple[str, str]
"""where a text comes from, for error messages, and the text"""
PairFormatter = Callable[[str, str, str], str]
"""turns where a pair comes from, its source and its target into a line"""


def distill(
    model: Translator,
    output: Path,
    sources: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
    back_translation: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> int:
    """Write one pair of source and translation for every source, in order, and return their number.

    ``sources`` is a text file; by default the sources that the model was trained on. ``report`` is called with
    progress messages. With ``back_translation``, the translation becomes the source of the pair and the text its
    target. ``options`` are decoding options of ``Translator.translate``. If the process is killed, the same call
    resumes, unless ``overwrite`` is set.
    """
    to_line = _formatter(output)
    for role, path in _input_files(model, sources):
        check_distinct_files({role: path, "--output": output})
    total = 0
    for where, text in _read_sources(model, sources):
        to_line(where, text, "")  # raise now, not after hours, if a source cannot be written
        total += 1
    report(f"{total:,} sources to translate")
    key = _resume_key(model, sources, back_translation, options)
    with ResumableOutput([output], key, overwrite) as file:
        if file.done:
            report(f"{output}: resuming after source {file.done:,}")
        advance = _progress(file.done, total, report)
        remaining = islice(_read_sources(model, sources), file.done, None)
        while chunk := list(islice(remaining, CHUNK_SIZE)):
            translations = model.translate([text for _, text in chunk], **options)
            lines = [
                to_line(where, translation, text)
                if back_translation
                else to_line(where, text, translation)
                for (where, text), translation in zip(chunk, translations, strict=True)
            ]
            file.add(len(chunk), ["".join(lines)])
            advance(file.done)
    return total


def _input_files(model: Translator, sources: Path | None) -> list[tuple[str, Path]]:
    """The file of sources and the training files of the model, none of which may be overwritten, by role."""
    train = model.recipe.data.train
    roles = {"source": train.source, "target": train.target, "pairs": train.pairs}
    training_files = [
        (f"data.train.{role}", model.recipe.data.path(name))
        for role, names in roles.items()
        for name in names or ()
    ]
    return training_files if sources is None else [("--input", sources), *training_files]


def _resume_key(
    model: Translator, sources: Path | None, back_translation: bool, options: dict[str, Any]
) -> dict[str, Any] | None:
    """Everything that the pairs depend on; None for a model without a run folder, which cannot be resumed."""
    if model.run is None:
        return None
    data = model.recipe.data
    content = sha256(sources) if sources else fingerprint(data.train, data)
    all_options = {**options, "back_translation": back_translation}
    return {"input": content, **model_resume_key(model), "options": all_options}


def _read_sources(model: Translator, sources: Path | None) -> Iterator[LocatedText]:
    if sources is not None:
        return ((f"{sources}:{number}", text) for number, text in enumerate(read_lines(sources), 1))
    data = model.recipe.data
    pairs = read_pairs(data.train, data, "data.train")
    return (
        (f"data.train, pair {number}", pair.source)
        for number, pair in enumerate(pairs, 1)
        if model.language in (None, language_of(pair))
    )


# ---------------------------------------------------------------------------------------------
# Output formats


def _to_tsv(where: str, source: str, target: str) -> str:
    if "\t" in source or "\t" in target:
        raise RegardError(
            f"{where}: the text contains a tab, which separates columns in a .tsv file; "
            "give --output a name that ends in .jsonl"
        )
    return f"{source}\t{target}\n"


def _to_jsonl(where: str, source: str, target: str) -> str:
    return json.dumps({"source": source, "target": target}, ensure_ascii=False) + "\n"


FORMATTERS: dict[str, PairFormatter] = {".tsv": _to_tsv, ".jsonl": _to_jsonl}


def _formatter(output: Path) -> PairFormatter:
    if output.suffix not in FORMATTERS:
        raise RegardError(f"{output}: the name of a file of pairs must end in .tsv or .jsonl")
    return FORMATTERS[output.suffix]


def _progress(start: int, total: int, report: Callable[[str], None]) -> Callable[[int], None]:
    """A function that takes the number of finished sources and reports it from time to time.

    ``start`` sources were finished by an earlier process.
    """
    start_time = last = time.monotonic()

    def advance(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > SECONDS_BETWEEN_LINES or done == total:
            last, each = now, (now - start_time) / (done - start)
            left = timedelta(seconds=round(each * (total - done)))
            report(f"{done:,} of {total:,}, {1 / each:,.1f} per second, {left} left")

    return advance
