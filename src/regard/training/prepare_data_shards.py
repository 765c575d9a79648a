"""The training data in parts, so that they are prepared by many processes, on one machine or several.

The pairs of ``data.train`` are numbered in the order in which they are read; part n has ``PART_PAIRS`` of them. A part
is tokenized independently of all others, and skipped if it is there already. Every process reads the files from the
beginning and tokenizes only its own parts: reading is much cheaper than tokenizing, and works for every format.

When all parts are there, duplicates are found by the hashes of the pairs, and the parts are copied into one dataset
without them. The dataset is byte for byte that of a single process, and memory does not grow with the corpus.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.data.cleaning import (
    CleaningCounts,
    CleaningOutcome,
    Hashes,
    KnownDuplicates,
    RecordedPairs,
    SeenPairs,
    find_duplicates,
    read_duplicates,
    write_distinct,
)
from regard.data.corpus import data_paths, read_pairs, select_train_pairs
from regard.data.formats.base import Skipped
from regard.data.pairs import Pair
from regard.data.text_files import RemoteFile
from regard.data.token_dataset import (
    RowIndices,
    TokenDataset,
    check_not_empty,
    copy_rows,
    new_file,
    write_rows,
)
from regard.errors import RegardError
from regard.inference.worker_pool import available_cores
from regard.recipe import Recipe
from regard.storage.atomic_files import write_text
from regard.storage.resumable_output import WHOLE, Shard
from regard.storage.run_dir import RunDir, sha256
from regard.tasks import TASKS
from regard.training.fine_tuning import old_train_pairs
from regard.training.train_test_overlap import SourceOverlap, record_sources

PART_PAIRS = 2**16
"""pairs of a part: they take about two seconds to tokenize"""
BYTES_PER_PAIR = 100
"""of a training file, to estimate the number of its pairs"""
TRAIN, OLD = "train", "old"
"""the pairs of data.train, and with ``training.mix`` those of the run to start from; duplicates are found in each"""


# ---------------------------------------------------------------------------------------------
# Parts on disk


class Part(NamedTuple):
    """What is known of the pairs of a part; its rows are in a dataset of its own, duplicates included."""

    read: int
    empty: int
    keys: Hashes
    """the hash of each pair that is not blank; none if duplicates are kept"""
    outcomes: np.ndarray[Any, np.dtype[np.uint8]]
    """what becomes of each pair that is not blank, unless it is a duplicate"""
    sources: Hashes
    """the hash of each source, for the overlap with test data"""


class PartFiles:
    """The folder with the parts of one run."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.folder = run.data / "parts"
        self.lock_file = run.data / ".tokenizer.lock"

    def begin(self, identity: dict[str, str]) -> bool:
        """Make the folder, empty unless its parts are of the same data; whether they are and the tokenizer exists."""
        try:
            stored = json.loads(self._identity_file.read_text())
        except (OSError, ValueError):
            stored = None
        if stored == {"identity": identity, "tokenizer": self._tokenizer_hashes()}:
            return True
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return False

    def save_identity(self, identity: dict[str, str]) -> None:
        """Record which data and tokenizer the parts belong to."""
        stored = {"identity": identity, "tokenizer": self._tokenizer_hashes()}
        write_text(self._identity_file, json.dumps(stored) + "\n")

    @property
    def _identity_file(self) -> Path:
        return self.folder / "identity.json"

    def _tokenizer_hashes(self) -> dict[str, str]:
        return {path.name: sha256(path) for path in self.run.tokenizer_files()}

    def rows_file(self, corpus: str, number: int) -> Path:
        return self.folder / f"{corpus}-{number:06d}.arrow"

    def part_file(self, corpus: str, number: int) -> Path:
        """Written last, so its existence says that a part is complete."""
        return self.folder / f"{corpus}-{number:06d}.npz"

    def save(self, corpus: str, number: int, part: Part) -> None:
        with new_file(self.part_file(corpus, number)) as file:
            np.savez(file, **part._asdict())

    def load(self, corpus: str, number: int) -> Part:
        path = self.part_file(corpus, number)
        try:
            with np.load(path) as arrays:
                values = {name: arrays[name] for name in Part._fields}
        except (OSError, ValueError, KeyError):
            raise RegardError(f"{path}: damaged; remove it and prepare the data again") from None
        return Part(**values)

    def save_total(self, corpus: str, parts: int, skipped: Skipped) -> None:
        """Record how many parts a corpus has, once it has been read to its end."""
        total = {"parts": parts, "skipped": skipped.messages()}
        write_text(self.folder / f"{corpus}.json", json.dumps(total) + "\n")

    def total(self, corpus: str) -> tuple[int | None, list[str]]:
        """The number of parts of a corpus, None if it is not known, and messages about what was left out."""
        try:
            total = json.loads((self.folder / f"{corpus}.json").read_text())
        except (OSError, ValueError):
            return None, []
        return int(total["parts"]), list(total["skipped"])

    def missing(self, corpus: str, shard: Shard) -> bool:
        """Whether parts of a shard are missing, as far as known."""
        parts, _ = self.total(corpus)
        return parts is None or any(
            shard.has(number) and not self.part_file(corpus, number).exists()
            for number in range(parts)
        )

    def duplicates_file(self, group: str) -> Path:
        return self.folder / f"{group}.duplicates"

    def seen(self, recipe: Recipe, group: str) -> SeenPairs | None:
        """The duplicates among the pairs of a group, when they have been found."""
        if recipe.data.clean.keep_duplicates:
            return None
        return KnownDuplicates(chain.from_iterable(self._flags(self.duplicates_file(group))))

    def _flags(self, path: Path) -> Iterator[list[bool]]:
        for start in range(0, path.stat().st_size, PART_PAIRS):
            yield read_duplicates(path, start, PART_PAIRS).tolist()

    def remove(self) -> None:
        """Remove all parts, when they are merged."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.lock_file.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------
# Writing parts


@dataclass(frozen=True)
class TrainingCorpus:
    """Pairs that are read one after another and divided into parts."""

    name: str
    group: str
    read: Callable[[Skipped], Iterator[Pair]]
    """all pairs, as they are in the files"""
    select: Callable[[Iterator[Pair]], Iterator[Pair]] = iter
    """those of some pairs that are trained on"""


def training_corpora(recipe: Recipe) -> list[TrainingCorpus]:
    """The corpora in the order of their rows in the dataset."""
    data = recipe.data
    files = data.train.single_files if data.train.mixed else [data.train]
    corpora = [
        TrainingCorpus(
            f"{TRAIN}.{number}",
            TRAIN,
            partial(read_pairs, some, data, "data.train"),
            partial(select_train_pairs, data=data),
        )
        for number, some in enumerate(files)
    ]
    if recipe.training.mix:
        corpora.append(TrainingCorpus(OLD, OLD, lambda _: old_train_pairs(recipe)))
    return corpora


def write_parts(run: RunDir, recipe: Recipe, shard: Shard, part_pairs: int) -> None:
    """Write the missing parts of a shard; each part has ``part_pairs`` pairs of the files."""
    parts, tokenizer = PartFiles(run), run.tokenizer(recipe)
    for corpus in training_corpora(recipe):
        if not parts.missing(corpus.name, shard):
            continue
        skipped, number = Skipped(), 0
        pairs = corpus.read(skipped)
        while first := list(islice(pairs, 1)):
            some = chain(first, islice(pairs, part_pairs - 1))
            if shard.has(number) and not parts.part_file(corpus.name, number).exists():
                sources, encoder = array("Q"), TASKS[recipe.task].encoder(recipe)
                recorded = encoder.seen = RecordedPairs()
                tally = Counter[str]()
                chosen = record_sources(corpus.select(some), sources)
                with new_file(parts.rows_file(corpus.name, number)) as file:
                    write_rows(file, encoder.rows(chosen, tokenizer, recipe.data.clean, tally))
                part = Part(
                    tally["read"],
                    tally["empty"],
                    np.array(recorded.hashes, np.uint64),
                    np.frombuffer(bytes(recorded.outcomes), np.uint8),
                    np.array(sources, np.uint64),
                )
                parts.save(corpus.name, number, part)
            else:
                deque(some, maxlen=0)
            number += 1
        parts.save_total(corpus.name, number, skipped)


def default_workers(recipe: Recipe) -> int:
    """As many processes as there are cores, but none that would have less than a part to do."""
    paths = chain.from_iterable(data_paths(recipe.data.train, recipe.data, "data.train").values())
    size = sum(
        path.size() if isinstance(path, RemoteFile) else path.stat().st_size
        for path in paths
        if path.is_file()
    )
    return min(available_cores(), 1 + size // BYTES_PER_PAIR // PART_PAIRS)


PART_PROCESS = """
import os, sys, threading
# First of all, since imports take long: end when the process at the other end of standard input ends.
threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()
from regard.training.prepare_data_shards import write_parts_of
write_parts_of(*sys.argv[1:])
"""
"""The program of a process that writes parts; its arguments are the run folder, the shard and the size of a part."""


def write_parts_of(run: str, shard: str, part_pairs: str) -> None:
    """Write the missing parts of a shard, in a process of its own."""
    folder = RunDir(run)
    write_parts(folder, folder.recipe(), Shard.parse(shard), int(part_pairs))


def write_parts_in_processes(
    run: RunDir, recipe: Recipe, shard: Shard = WHOLE, workers: int | None = None
) -> None:
    """Write the missing parts of a shard in several processes; recipe and tokenizer are in the run folder."""
    if not any(PartFiles(run).missing(corpus.name, shard) for corpus in training_corpora(recipe)):
        return
    own, *others = shard.split(workers or default_workers(recipe))
    run_processes(
        PART_PROCESS,
        [[str(run), str(other), str(PART_PAIRS)] for other in others],
        lambda: write_parts(run, recipe, own, PART_PAIRS),
        f"{run.data}: preparing a part of the data failed",
    )


def run_processes(
    program: str, arguments: Sequence[Sequence[str]], own: Callable[[], None], failure: str
) -> None:
    """Run a program once for each list of arguments, and ``own`` in this process; return when all have finished."""
    # Not multiprocessing: it would import the user's main script in each process, or fork one that has threads.
    command = [sys.executable, "-c", program]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    workers = [
        subprocess.Popen(
            [*command, *some],
            env={**os.environ, **path},
            stdin=subprocess.PIPE,  # closed when this process ends, however it ends
            stderr=subprocess.PIPE,
        )
        for some in arguments
    ]
    try:
        own()
        for process in workers:
            assert process.stderr is not None
            stderr = process.stderr.read()  # not communicate(), which would close standard input
            process.wait()
            if process.returncode:
                last_line = stderr.decode(errors="replace").strip().split("\n")[-1]
                raise RegardError(f"{failure}: {last_line.removeprefix(_ERROR_CLASS)}")
    finally:
        for process in workers:
            process.kill()  # no effect on a process that has ended
            with process:  # waits for it and closes its pipe
                pass


_ERROR_CLASS = f"{RegardError.__module__}.{RegardError.__name__}: "


# ---------------------------------------------------------------------------------------------
# Merging parts


class MergedParts(NamedTuple):
    """What became of the pairs of all parts."""

    counts: dict[str, CleaningCounts]
    """by group"""
    rows: dict[str, int]
    """rows of the dataset by corpus, in their order"""
    skipped: list[str]
    """messages about what was left out of the files"""


def merge_parts(run: RunDir, recipe: Recipe, overlap: SourceOverlap) -> MergedParts:
    """Write ``train.arrow`` and the hashes of the training sources from all parts, which must be complete."""
    parts, corpora = PartFiles(run), training_corpora(recipe)
    numbers: list[tuple[TrainingCorpus, int]] = []
    skipped: list[str] = []
    for corpus in corpora:
        total, messages = parts.total(corpus.name)
        assert total is not None, "all parts are written"
        numbers += [(corpus, number) for number in range(total)]
        skipped += messages
    merger = _Merger(parts, numbers, recipe)
    path = run.data / "train.arrow"
    with new_file(path) as file:
        copy_rows(file, merger.rows())
        counts = {group: CleaningCounts(**tally) for group, tally in merger.tallies.items()}
        check_not_empty(path, counts[TRAIN])
    hashes = (parts.load(corpus.name, number).sources for corpus, number in numbers)
    write_distinct(_watched(hashes, overlap), merger.sources, run.train_sources_file)
    return MergedParts(
        counts, {corpus.name: merger.kept[corpus.name] for corpus in corpora}, skipped
    )


def _watched(hashes: Iterator[Hashes], overlap: SourceOverlap) -> Iterator[Hashes]:
    for some in hashes:
        overlap.add(some)
        yield some


class _Merger:
    """Selects the rows of all parts that are not duplicates, and counts what becomes of all pairs."""

    def __init__(
        self, parts: PartFiles, numbers: list[tuple[TrainingCorpus, int]], recipe: Recipe
    ) -> None:
        self.parts, self.numbers = parts, numbers
        self.keep_duplicates = recipe.data.clean.keep_duplicates
        groups = dict.fromkeys(corpus.group for corpus, _ in numbers)
        self.tallies = {group: Counter[str]() for group in {TRAIN: None, **groups}}
        self.kept = Counter[str]()
        """rows of each corpus"""
        self.sources = 0
        for group in () if self.keep_duplicates else groups:
            chosen = [(corpus.name, number) for corpus, number in numbers if corpus.group == group]
            count = sum(len(parts.load(*part).keys) for part in chosen)
            keys = (parts.load(*part).keys for part in chosen)
            find_duplicates(keys, count, parts.duplicates_file(group))

    def rows(self) -> Iterator[tuple[TokenDataset, RowIndices]]:
        """The dataset of each part, and its rows that are not duplicates."""
        done = Counter[str]()
        for corpus, number in self.numbers:
            part, tally = self.parts.load(corpus.name, number), self.tallies[corpus.group]
            duplicate = np.zeros(len(part.outcomes), np.bool_)
            if not self.keep_duplicates:
                path, start = self.parts.duplicates_file(corpus.group), done[corpus.group]
                duplicate = read_duplicates(path, start, len(part.outcomes))
            done[corpus.group] += len(part.outcomes)
            self.sources += len(part.sources)
            tally.update(
                read=int(part.read), empty=int(part.empty), duplicates=int(duplicate.sum())
            )
            for outcome in CleaningOutcome:
                tally[outcome.name] += int(((part.outcomes == outcome) & ~duplicate).sum())
            rows = np.flatnonzero(~duplicate[part.outcomes == CleaningOutcome.kept])
            self.kept[corpus.name] += len(rows)
            if len(rows):
                yield TokenDataset(self.parts.rows_file(corpus.name, number)), rows
