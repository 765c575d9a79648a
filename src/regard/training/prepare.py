"""The training text cut into pieces at random, several times over: BPE-dropout, and sampling from a unigram model.

A GPU goes through a small corpus in a second, faster than one process can cut it. So the copies are made beforehand, by
several processes, and each epoch learns from the next one. What is drawn follows from the seed alone, and what is on
disk does not change: a training that goes on, or with others beside it, sees the same pieces.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from regard.data.corpus import (
    Pair,
    fingerprint,
    paths_of,
    read_pairs,
    tags_of,
    train_pairs,
    valid_pairs,
)
from regard.data.dataset import Counts, TokenDataset, write_dataset
from regard.data.special_tokens import SPECIAL_TOKENS
from regard.data.subword_sampling import SamplingTokenizer
from regard.data.tokenizer import Tokenizer, normalize
from regard.errors import RegardError
from regard.inference.worker_pool import available_cores
from regard.metrics import MODEL_METRICS, score
from regard.recipe import Recipe, max_sequence_length
from regard.storage.run_dir import RunDir, sha256, write_text
from regard.tasks import TASKS
from regard.training.checkpoint import checkpoint_files
from regard.training.fine_tuning import initial_tokenizer
from regard.training.progress import ProgressReporter

PAIRS_WORTH_A_PROCESS = 100_000
"""takes about as long to cut, some 4 seconds, as a process needs to start"""


def copy_files(run: RunDir, recipe: Recipe) -> list[Path]:
    count = recipe.training.subword_copies if recipe.training.subword_sampling else 0
    return [run.data / f"train-{number:03d}.arrow" for number in range(count)]


def write_copies(run: RunDir, recipe: Recipe, pairs: int) -> None:
    """Write all copies; the run has its recipe and tokenizer, and so many pairs."""
    copies = len(copy_files(run, recipe))
    processes = min(copies, available_cores(), 1 + pairs * copies // PAIRS_WORTH_A_PROCESS)
    shares = [range(first, copies, processes) for first in range(processes)]
    # Not multiprocessing: it would run the user's own script once more in each process, or fork one with threads.
    command = [sys.executable, "-m", "regard.training.prepare", str(run)]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    others = [
        subprocess.Popen(
            [*command, *map(str, share)], env={**os.environ, **path}, stderr=subprocess.PIPE
        )
        for share in shares[1:]
    ]
    try:
        _write(run, recipe, shares[0])
        for process in others:
            _, told = process.communicate()
            if process.returncode:
                last = told.decode(errors="replace").strip().split("\n")[-1]
                raise RegardError(f"{run.data}: a copy of the training text was not made: {last}")
    finally:
        for process in others:
            process.kill()  # those that have ended do not mind
            with process:  # waits, and closes its pipe
                pass


def _write(run: RunDir, recipe: Recipe, numbers: range | list[int]) -> None:
    plain, training, files = run.tokenizer(recipe), recipe.training, copy_files(run, recipe)
    for number in numbers:
        seed = (training.seed, number)
        kind, labels = recipe.tokenizer.kind, recipe.has_labels
        tokenizer = SamplingTokenizer.of(plain, kind, training.subword_sampling, seed, labels)
        rows = TASKS[recipe.task].encoder(recipe).rows
        write_dataset(files[number], train_pairs(recipe.data), tokenizer, recipe.data.clean, rows)


# ---------------------------------------------------------------------------------------------
# From text files to ids on disk: tokenizer, cleaning, stores. Done once for a run; found again when it goes on.


FACTS = "facts.json"
"""what the prepared text is of; written last, so that whoever finds it finds the rest"""


@dataclass(frozen=True)
class PreparedData:
    tokenizer: Tokenizer
    train: TokenDataset
    valid: TokenDataset
    facts: dict[str, Any]
    """data fingerprints and counts, for the card"""
    copies: Sequence[TokenDataset] = ()
    """the training text cut at random, several times; the same pairs in the same order"""

    def of_epoch(self, epoch: int) -> TokenDataset:
        """What an epoch learns from."""
        return self.copies[epoch % len(self.copies)] if self.copies else self.train


def check_files(recipe: Recipe) -> None:
    """Refuse a recipe whose data are not there."""
    for name, texts in recipe.data.splits.items():
        paths_of(texts, recipe.data, f"data.{name}")


def prepare(run: RunDir, recipe: Recipe, report: ProgressReporter) -> None:
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
    tokenizer = initial_tokenizer(recipe, lambda: train_pairs(recipe.data))
    tokenizer.save(run.folder)
    report.say(f"Tokenizer: {_sizes(tokenizer, recipe)}")
    rows = TASKS[recipe.task].encoder(recipe).rows
    repeats = Repeats(recipe)
    pairs = repeats.watch(train_pairs(recipe.data))
    train = write_dataset(run.data / "train.arrow", pairs, tokenizer, recipe.data.clean, rows)
    report.say(f"Training pairs: {train.sentence}")
    if recipe.training.subword_sampling:
        write_copies(run, recipe, train.read)
        report.say(f"Cut at random {recipe.training.subword_copies} times")
    if next(valid_pairs(recipe.data), None) is None:
        raise RegardError(
            "no pair was held out for validation, because there are too few different sources; "
            "give data.valid, or a greater data.hold_out"
        )
    valid = write_dataset(run.data / "valid.arrow", valid_pairs(recipe.data), tokenizer, None, rows)
    report.say(f"Validation pairs: {valid.read:,}")
    for sentence in repeats.told():
        report.say(sentence)
    _check_lengths(recipe, TokenDataset(run.data / "valid.arrow"))
    _check_test(recipe, tokenizer)
    _write_facts(run, identity, train, valid, time.monotonic() - start)


def _check_scoring(recipe: Recipe) -> None:
    """What only the end of training needs is looked at before it begins."""
    measures = [measure for measure in recipe.evaluation.metrics if measure not in MODEL_METRICS]
    score(measures, ["a"], ["a"], ["a"], tokenize=recipe.evaluation.tokenize)
    if recipe.data.test is not None:
        for _ in read_pairs(recipe.data.test, recipe.data, "data.test"):
            pass


class Repeats:
    """The sources of validation and test, and which of them are in the training text as well."""

    def __init__(self, recipe: Recipe) -> None:
        # What is held out of the training text is not in it; and lines of plain text repeat each other.
        alone = recipe.text_only
        self.asked = {
            name: {_plain(pair) for pair in read_pairs(texts, recipe.data, f"data.{name}")} - {""}
            for name, texts in recipe.data.splits.items()
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


def _check_lengths(recipe: Recipe, valid: TokenDataset) -> None:
    most = max_sequence_length(recipe.model)
    if most is None or recipe.text_only:
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
    most, data = max_sequence_length(recipe.model), recipe.data
    if most is None or data.test is None or recipe.text_only:
        return
    cut = TASKS[recipe.task].encoder(recipe).truncate
    pairs = list(read_pairs(data.test, data, "data.test"))
    encoded = tokenizer.source.encode([pair.source for pair in pairs])
    for number, (pair, ids) in enumerate(zip(pairs, encoded, strict=True), 1):
        length = len(tags_of(pair)) + len(ids[:cut]) + 1
        if length > most:
            raise RegardError(
                f"data.test: source {number} has {length} tokens, EOS counted, but the model can "
                f"read only {most}: raise model.max_length, or cut it"
            )


def open_prepared(run: RunDir, recipe: Recipe) -> PreparedData:
    train, valid = TokenDataset(run.data / "train.arrow"), TokenDataset(run.data / "valid.arrow")
    copies = [TokenDataset(path) for path in copy_files(run, recipe)]
    return PreparedData(run.tokenizer(recipe), train, valid, _read_facts(run), copies)


def identity_of(recipe: Recipe) -> dict[str, str]:
    """What the ids on disk depend on."""
    data = recipe.data
    choices = [recipe.task, recipe.tokenizer.identity, data.clean.model_dump_json()]
    choices.append(str(recipe.training.init_from))
    if data.valid is None:
        choices.append(str(data.hold_out))
    if recipe.training.subword_sampling:
        choices.append(
            recipe.training.model_dump_json(include={"subword_sampling", "subword_copies", "seed"})
        )
    found = {"train": fingerprint(data.train, data)}
    if data.valid is not None:
        found["valid"] = fingerprint(data.valid, data)
    found["choices"] = hashlib.sha256("\n".join(choices).encode()).hexdigest()
    return found


def _read_facts(run: RunDir) -> dict[str, Any]:
    path = run.data / FACTS
    facts: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    whole = facts.get("tokenizer") == {p.name: sha256(p) for p in run.tokenizer_files()}
    return facts if whole else {}


def _write_facts(
    run: RunDir, identity: dict[str, str], train: Counts, valid: Counts, seconds: float
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
    if recipe.has_labels:
        labels = tokenizer.target.size - len(SPECIAL_TOKENS)
        return f"{kind}, {tokenizer.source.size:,} entries; {labels:,} labels"
    if recipe.tokenizer.shared:
        return f"{kind}, {tokenizer.source.size:,} entries, shared by source and target"
    return f"{kind}, {tokenizer.source.size:,} source and {tokenizer.target.size:,} target entries"


if __name__ == "__main__":
    _run = RunDir(sys.argv[1])
    _write(_run, _run.recipe(), [int(number) for number in sys.argv[2:]])
