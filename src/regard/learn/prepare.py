"""From text files to ids on disk: tokenizer, cleaning, stores. Done once for a run; found again when it goes on."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from regard.errors import RegardError
from regard.learn.checkpoint import checkpoint_files
from regard.learn.copies import copy_files, write_copies
from regard.learn.report import Report
from regard.learn.start import starting_tokenizer
from regard.marks import MARKS
from regard.recipe import Recipe
from regard.run import Run, sha256, write_text
from regard.score import NOT_OF_TEXT, score
from regard.text.corpus import (
    Pair,
    fingerprint,
    paths_of,
    read_pairs,
    tags_of,
    train_pairs,
    valid_pairs,
)
from regard.text.forms import FORMS
from regard.text.store import Counts, Store, write_store
from regard.text.tokenizer import Tokenizer, normalize

FACTS = "facts.json"
"""what the prepared text is of; written last, so that whoever finds it finds the rest"""


@dataclass(frozen=True)
class Prepared:
    tokenizer: Tokenizer
    train: Store
    valid: Store
    facts: dict[str, Any]
    """data fingerprints and counts, for the card"""
    copies: Sequence[Store] = ()
    """the training text cut at random, several times; the same pairs in the same order"""

    def of_epoch(self, epoch: int) -> Store:
        """What an epoch learns from."""
        return self.copies[epoch % len(self.copies)] if self.copies else self.train


def check_files(recipe: Recipe) -> None:
    """Refuse a recipe whose data are not there."""
    for name, texts in recipe.data.texts.items():
        paths_of(texts, recipe.data, f"data.{name}")


def prepare(run: Run, recipe: Recipe, report: Report) -> None:
    """Make tokenizer and stores, unless they are there and belong to the same data."""
    _check_scoring(recipe)
    identity = identity_of(recipe)
    known = _read_facts(run)
    if known.get("identity") == identity:
        return
    if checkpoint_files(run.checkpoints):
        raise RegardError(
            f"{run}: the data have changed since this run began; put them back, or choose another --out"
        )
    start = time.monotonic()
    run.data.mkdir(parents=True, exist_ok=True)
    (run.data / FACTS).unlink(missing_ok=True)  # they would tell of ids that are about to go
    report.say(f"Reading {', '.join(_names(recipe))}")
    tokenizer = starting_tokenizer(recipe, lambda: train_pairs(recipe.data))
    tokenizer.save(run.folder)
    report.say(f"Tokenizer: {_sizes(tokenizer, recipe)}")
    rows = FORMS[recipe.task](recipe).rows
    repeats = Repeats(recipe)
    pairs = repeats.watch(train_pairs(recipe.data))
    train = write_store(run.data / "train.arrow", pairs, tokenizer, recipe.data.clean, rows)
    report.say(f"Training pairs: {train.sentence}")
    if recipe.training.sampling:
        write_copies(run, recipe, train.read)
        report.say(f"Cut at random {recipe.training.copies} times")
    if next(valid_pairs(recipe.data), None) is None:
        raise RegardError(
            "no pair was held out for validation, because there are too few different sources; "
            "give data.valid, or a greater data.hold_out"
        )
    valid = write_store(run.data / "valid.arrow", valid_pairs(recipe.data), tokenizer, None, rows)
    report.say(f"Validation pairs: {valid.read:,}")
    for sentence in repeats.told():
        report.say(sentence)
    _check_lengths(recipe, Store(run.data / "valid.arrow"))
    _check_test(recipe, tokenizer)
    _write_facts(run, identity, train, valid, time.monotonic() - start)


def _check_scoring(recipe: Recipe) -> None:
    """What only the end of training needs is looked at before it begins."""
    measures = [measure for measure in recipe.score.measures if measure not in NOT_OF_TEXT]
    score(measures, ["a"], ["a"], ["a"], tokenize=recipe.score.tokenize)
    if recipe.data.test is not None:
        for _ in read_pairs(recipe.data.test, recipe.data, "data.test"):
            pass


class Repeats:
    """The sources of validation and test, and which of them are in the training text as well."""

    def __init__(self, recipe: Recipe) -> None:
        # What is held out of the training text is not in it; and lines of plain text repeat each other.
        alone = recipe.task in ("mask", "continue")
        self.asked = {
            name: {_plain(pair) for pair in read_pairs(texts, recipe.data, f"data.{name}")} - {""}
            for name, texts in recipe.data.texts.items()
            if name != "train" and not alone
        }
        self.met: set[str] = set()

    def watch(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        asked = set().union(*self.asked.values())
        for pair in pairs:
            if asked and (source := _plain(pair)) in asked:
                self.met.add(source)
            yield pair

    def told(self) -> Iterator[str]:
        """When all of the training text has gone by."""
        for name, sources in self.asked.items():
            if both := len(sources & self.met):
                yield (
                    f"Sources of data.{name} that are in the training text, too: {both:,} of "
                    f"{len(sources):,}; there the model may answer from memory"
                )


def _plain(pair: Pair) -> str:
    """The source, however it is written."""
    return normalize(pair.source, "nfc").strip()


def _check_lengths(recipe: Recipe, valid: Store) -> None:
    most = recipe.model.longest
    if most is None or recipe.task in ("mask", "continue"):
        return  # there is no longest text, or it was cut
    longest = int(max(valid.source_lengths.max(), valid.target_lengths.max())) + 1
    if recipe.model.architecture == "decoder":
        longest = int((valid.source_lengths + valid.target_lengths).max()) + 2
    if longest > most:
        raise RegardError(
            f"data.valid has a text of {longest} tokens, marks counted, but the model can "
            f"read only {most}: raise model.max_length, or cut it"
        )


def _check_test(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """The test is read when all is learned, which is late to find a source too long for the model."""
    most, data = recipe.model.longest, recipe.data
    if most is None or data.test is None or recipe.task in ("mask", "continue"):
        return
    cut = FORMS[recipe.task](recipe).cut
    pairs = list(read_pairs(data.test, data, "data.test"))
    encoded = tokenizer.source.encode([pair.source for pair in pairs])
    for number, (pair, ids) in enumerate(zip(pairs, encoded, strict=True), 1):
        length = len(tags_of(pair)) + len(ids[:cut]) + 1
        if length > most:
            raise RegardError(
                f"data.test: source {number} has {length} tokens, END counted, but the model can "
                f"read only {most}: raise model.max_length, or cut it"
            )


def open_prepared(run: Run, recipe: Recipe) -> Prepared:
    train, valid = Store(run.data / "train.arrow"), Store(run.data / "valid.arrow")
    copies = [Store(path) for path in copy_files(run, recipe)]
    return Prepared(run.tokenizer(recipe), train, valid, _read_facts(run), copies)


def identity_of(recipe: Recipe) -> dict[str, str]:
    """What the ids on disk depend on."""
    data = recipe.data
    choices = [recipe.task, recipe.tokenizer.identity, data.clean.model_dump_json()]
    choices.append(str(recipe.training.start_from))
    if data.valid is None:
        choices.append(str(data.hold_out))
    if recipe.training.sampling:
        choices.append(recipe.training.model_dump_json(include={"sampling", "copies", "seed"}))
    found = {"train": fingerprint(data.train, data)}
    if data.valid is not None:
        found["valid"] = fingerprint(data.valid, data)
    found["choices"] = hashlib.sha256("\n".join(choices).encode()).hexdigest()
    return found


def _read_facts(run: Run) -> dict[str, Any]:
    path = run.data / FACTS
    facts: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    whole = facts.get("tokenizer") == {p.name: sha256(p) for p in run.tokenizer_files()}
    return facts if whole else {}


def _write_facts(
    run: Run, identity: dict[str, str], train: Counts, valid: Counts, seconds: float
) -> None:
    facts = {
        "identity": identity,
        "tokenizer": {path.name: sha256(path) for path in run.tokenizer_files()},
        "train": asdict(train),
        "valid": asdict(valid),
        "seconds": round(seconds, 1),
    }
    text = json.dumps(facts, indent=2) + "\n"
    write_text(run.data / FACTS, text)


def _names(recipe: Recipe) -> list[str]:
    train = recipe.data.train
    roles = (train.source, train.target, train.pairs, train.conllu, train.text)
    return [str(recipe.data.path(name)) for names in roles if names for name in names]


def _sizes(tokenizer: Tokenizer, recipe: Recipe) -> str:
    kind = recipe.tokenizer.kind
    if of_target := recipe.tokenizer.target_kind:
        return (
            f"{kind}, {tokenizer.source.size:,} entries; {of_target}, {tokenizer.target.size:,} "
            "entries for the target"
        )
    if recipe.labelled:
        labels = tokenizer.target.size - len(MARKS)
        return f"{kind}, {tokenizer.source.size:,} entries; {labels:,} labels"
    if recipe.tokenizer.shared:
        return f"{kind}, {tokenizer.source.size:,} entries, shared by source and target"
    return f"{kind}, {tokenizer.source.size:,} source and {tokenizer.target.size:,} target entries"
