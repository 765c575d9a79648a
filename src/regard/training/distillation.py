"""Knowledge distillation: a student learns from the translations of a teacher, or from its token probabilities.

Sequence-level (``distill``): a model translates sources, and the pairs become training data. Back-translation is the
same in the opposite direction. Token-level (``read_teacher``): the teacher runs next to the student in training, and
the loss compares their probabilities.

A non-autoregressive or small student learns far better from the translations of a teacher than from human
translations: they vary less, so there is less to choose between (Kim and Rush 2016).

With a model of the opposite direction and the two sides swapped, the pairs are back-translations: the source is written
by a model, the target by people (Sennrich et al. 2016).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from regard.data.corpus import fingerprint, read_pairs
from regard.data.formats.writers import json_line, one_field, tsv_line
from regard.data.pairs import Pair, language_of
from regard.data.text_files import read_lines
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.nn.network import Network
from regard.recipe import Recipe, model_choices
from regard.storage.atomic_files import check_distinct_files
from regard.storage.resumable_output import WHOLE, ResumableOutput, Shard, model_resume_key
from regard.storage.run_dir import RunDir, sha256
from regard.tasks import Translator
from regard.tasks.base import read_ensemble
from regard.training.progress import ProgressLine

CHUNK_SIZE = 4096
"""Number of sources in memory at a time: enough to batch sources of similar length."""

LocatedText = tuple[str, str]
"""where a text comes from, for error messages, and the text"""
PairFormatter = Callable[[str, str, str], str]
"""turns where a text comes from, the text and its translation into a line"""


def distill(
    model: Translator,
    output: Path,
    sources: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
    back_translation: bool = False,
    overwrite: bool = False,
    shard: Shard = WHOLE,
    **options: Any,
) -> int:
    """Write one pair of source and translation for every source, in order, and return their number.

    ``sources`` is a text file; by default the sources that the model was trained on. ``report`` is called with
    progress messages. With ``back_translation``, the translation becomes the source of the pair and the text its
    target. ``options`` are decoding options of ``Translator.translate``. If the process is killed, the same call
    resumes, unless ``overwrite`` is set. ``shard``: write only the pairs of one share of the sources, to a file of its
    own; the files of all shards one after the other are those of the whole.
    """
    to_line = _formatter(output, back_translation)
    output = shard.path(output)
    for role, path in _input_files(model, sources):
        check_distinct_files({role: path, "--output": output})
    total = changed = 0
    for where, text in _read_sources(model, sources):
        to_line(where, text, "")  # raise now, not after hours, if a source cannot be written
        total += 1
        changed += _without_line_breaks(text) != text
    if changed and output.suffix == ".tsv":
        report(
            f"{changed:,} of {total:,} sources contain a carriage return or a line feed, which is written as a space; "
            "an --output name that ends in .jsonl keeps it"
        )
    first, last = shard.bounds(total, CHUNK_SIZE)
    total = last - first
    report(f"{total:,} sources to translate")
    key = _resume_key(model, sources, back_translation, options)
    if key is not None and shard != WHOLE:
        key["shard"] = str(shard)
    with ResumableOutput([output], key, overwrite, report) as file:
        if file.done:
            report(f"{output}: resuming after source {file.done:,}")
        progress = ProgressLine("", total, file.done, report)
        remaining = islice(_read_sources(model, sources), first + file.done, last)
        while chunk := list(islice(remaining, CHUNK_SIZE)):
            translations = model.translate([text for _, text in chunk], **options)
            lines = [
                to_line(where, text, translation)
                for (where, text), translation in zip(chunk, translations, strict=True)
            ]
            file.add(len(chunk), ["".join(lines)])
            progress.advance(file.done)
        report(progress.describe(file.done, time.monotonic()))
    return total


def _input_files(model: Translator, sources: Path | None) -> list[tuple[str, Path]]:
    """The file of sources and the training files of the model, none of which may be overwritten, by role."""
    train = model.recipe.data.train
    roles = {"source": train.source, "target": train.target, "pairs": train.pairs}
    training_files = [
        (f"data.train.{role}", Path(model.recipe.data.location(name)))
        for role, names in roles.items()
        for name in names or ()
    ]
    return training_files if sources is None else [("--input", sources), *training_files]


def _resume_key(
    model: Translator, sources: Path | None, back_translation: bool, options: dict[str, Any]
) -> dict[str, Any] | None:
    """Everything that the pairs depend on; None for a model without a run folder, which cannot be resumed."""
    if not model.runs:
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
# Token-level distillation: training.teacher


def teacher_tokenizer(recipe: Recipe) -> Tokenizer:
    """The tokenizer of the teacher, which the student must share."""
    assert recipe.training.teacher
    run = RunDir(Path(recipe.training.teacher[0]))
    theirs = run.recipe()
    if theirs.tokenizer != recipe.tokenizer:
        raise RegardError(
            f"training.teacher: the tokenizer section of {run} differs from that of this recipe; they must be the same"
        )
    return run.tokenizer(theirs)


def read_teacher(recipe: Recipe, run: RunDir, device: torch.device) -> Network:
    """The network of the teacher, or an ensemble, for the training of a student in the folder ``run``."""
    assert recipe.training.teacher
    runs = [RunDir(Path(folder)) for folder in recipe.training.teacher]
    files = {path.name: path.read_bytes() for path in run.tokenizer_files()}
    for one in runs:
        theirs = one.recipe()
        if {path.name: path.read_bytes() for path in one.tokenizer_files()} != files:
            raise RegardError(
                f"training.teacher: the tokenizer of {one} differs from that of {run}"
            )
        unpackable = [
            choice.name for _, choice in model_choices(theirs.model) if not choice.packed_batches
        ]
        if recipe.training.batching == "packed" and unpackable:
            raise RegardError(
                f"training.teacher: {one} does not support training.batching: packed ({unpackable[0]}); "
                "set it to padded"
            )
    teacher = read_ensemble(runs, run.tokenizer(recipe)).to(device).eval()
    return teacher.requires_grad_(False)


# ---------------------------------------------------------------------------------------------
# Output formats


def _formatter(output: Path, back_translation: bool) -> PairFormatter:
    """The function that formats the lines of a file with this name."""

    def pair_of(text: str, translation: str) -> Pair:
        return Pair(translation, text) if back_translation else Pair(text, translation)

    def to_tsv(where: str, text: str, translation: str) -> str:
        # A tab in a text is refused: the sources may be a file of pairs.
        pair = pair_of(_without_line_breaks(text), one_field(translation))
        return tsv_line(pair, where) + "\n"

    if output.suffix == ".tsv":
        return to_tsv
    if output.suffix == ".jsonl":
        return lambda where, text, translation: json_line(pair_of(text, translation)) + "\n"
    raise RegardError(f"{output}: the name of a file of pairs must end in .tsv or .jsonl")


def _without_line_breaks(text: str) -> str:
    """A text in which line breaks are spaces; a line of a text file may contain carriage returns."""
    return text.replace("\n", " ").replace("\r", " ")
