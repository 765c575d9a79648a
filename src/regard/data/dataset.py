"""The ids of all pairs at rest: one Arrow file, memory-mapped.

A text is tokenized once. Training then reads any pair at any time without holding the corpus in
memory, and processes on one machine share the pages.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from regard.data.corpus import Pair, tags_of
from regard.data.dependency_trees import TokenTree
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.recipe import Cleaning

IntArray = npt.NDArray[np.int32]
RowIndices = npt.NDArray[np.int64]

ROWS_PER_RECORD_BATCH = 65_536
PAIRS_PER_ENCODING = 8_192
TREE = ("words", "heads")
"""columns of the trees: the word of each piece, the head of each word"""


@dataclass(frozen=True)
class Counts:
    """What became of the pairs read: kept, or left out for the first of these reasons that held."""

    read: int = 0
    kept: int = 0
    empty: int = 0
    """one side is blank"""
    duplicates: int = 0
    """seen before, both sides"""
    too_long: int = 0
    """one side has more tokens than ``clean.max_tokens``"""
    ratio: int = 0
    """one side has more than ``clean.max_ratio`` times the tokens of the other"""

    @property
    def sentence(self) -> str:
        """Such as “28,990 of 29,000 pairs kept (4 empty, 6 too long)”."""
        if self.kept == self.read:
            return f"all {self.read:,} pairs kept"
        removed = {
            "empty": self.empty,
            "duplicate": self.duplicates,
            "too long": self.too_long,
            "of unlike length": self.ratio,
        }
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in removed.items() if count)
        return f"{self.kept:,} of {self.read:,} pairs kept ({reasons})"


class EncodedPair(NamedTuple):
    source: list[int]
    target: list[int]
    tree: TokenTree | None = None
    """of the source, where trees are stored"""


# ---------------------------------------------------------------------------------------------
# Writing


Encode = Callable[[Sequence[Pair], Tokenizer], Iterable[EncodedPair]]
"""The ids of some pairs, one row for each."""
Rows = Callable[[Iterable[Pair], Tokenizer, Cleaning | None, Counter[str]], Iterator[EncodedPair]]
"""The rows that pairs become; the tally counts as they go by."""


def encode_pairs(pairs: Sequence[Pair], tokenizer: Tokenizer) -> Iterator[EncodedPair]:
    sources = tokenizer.source.encode([pair.source for pair in pairs])
    tagged = map(tokenizer.source.tagged, sources, map(tags_of, pairs))
    targets = tokenizer.target.encode([pair.target for pair in pairs])
    return map(EncodedPair, tagged, targets)


def cleaned(
    pairs: Iterable[Pair],
    tokenizer: Tokenizer,
    clean: Cleaning | None,
    tally: Counter[str],
    encode: Encode = encode_pairs,
) -> Iterator[EncodedPair]:
    """The ids of the pairs to keep; ``tally`` counts as the pairs go by.

    Where pieces are drawn at random, the plain ones decide what is kept, so that it is the same in every copy; and
    they stand in where drawn ones are too many.
    """
    seen = set[int]()
    pairs = iter(pairs)
    while chunk := list(islice(pairs, PAIRS_PER_ENCODING)):
        tally["read"] += len(chunk)
        if clean is not None:
            chunk = [pair for pair in chunk if _is_wanted(pair, tokenizer, clean, seen, tally)]
        for ids, drawn in _plain_and_drawn(chunk, tokenizer, encode):
            if clean is None or _fits(ids, clean, tally):
                tally["kept"] += 1
                too_long = clean is not None and max(map(len, drawn[:2])) > clean.max_tokens
                yield ids if too_long else drawn


def _plain_and_drawn(
    pairs: Sequence[Pair], tokenizer: Tokenizer, encode: Encode
) -> Iterator[tuple[EncodedPair, EncodedPair]]:
    plain = encode(pairs, tokenizer.plain)
    if tokenizer.plain is tokenizer:
        return ((ids, ids) for ids in plain)
    return zip(plain, encode(pairs, tokenizer), strict=True)


def write_dataset(
    path: Path,
    pairs: Iterable[Pair],
    tokenizer: Tokenizer,
    clean: Cleaning | None,
    rows: Rows = cleaned,
) -> Counts:
    """Tokenize the pairs into a file that is there whole or not at all.

    With ``clean`` unsuitable pairs are left out; without it every pair stays, even an empty one, so
    that row n is line n. ``rows`` makes something else of them, if the task needs it.
    """
    tally = Counter[str]()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            _write(file, rows(pairs, tokenizer, clean, tally))
            file.flush()
            os.fsync(file.fileno())
        counts = Counts(**tally)
        if counts.kept == 0:
            raise RegardError(
                f"{path}: no pair is left to store; {counts.sentence}; see data.clean in the recipe"
                if counts.read
                else f"{path}: no pair is left to store; none was read"
            )
        unfinished.replace(path)
    except OSError as error:
        raise RegardError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return counts


def _is_wanted(
    pair: Pair, tokenizer: Tokenizer, clean: Cleaning, seen: set[int], tally: Counter[str]
) -> bool:
    """What the text alone can tell, before the work of tokenizing it."""
    if not pair.source.strip() or not pair.target.strip():
        tally["empty"] += 1
        return False
    if clean.keep_duplicates:
        return True
    # Int8Linear bytes stand for the pair: among a million, two meet by chance once in 10^7 corpora.
    sides = tokenizer.source.normalize(pair.source), tokenizer.target.normalize(pair.target)
    text = "\n".join((*sides, *tags_of(pair)))
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    key = int.from_bytes(digest, "big")
    if key in seen:
        tally["duplicates"] += 1
        return False
    seen.add(key)
    return True


def _fits(ids: EncodedPair, clean: Cleaning, tally: Counter[str]) -> bool:
    shorter, longer = sorted((len(ids.source), len(ids.target)))
    if longer > clean.max_tokens:
        tally["too_long"] += 1
        return False
    if clean.max_ratio is not None and longer > clean.max_ratio * shorter:
        tally["ratio"] += 1
        return False
    return True


def _write(file: object, rows: Iterable[EncodedPair]) -> None:
    rows = iter(rows)
    first = list(islice(rows, 1))
    trees = any(row.tree is not None for row in first)  # all rows have one, or none has
    rows = chain(first, rows)
    ids = pa.list_(pa.int32())
    names = ("source", "target", *(TREE if trees else ()))
    schema = pa.schema([pa.field(name, ids, nullable=False) for name in names])
    with pa.ipc.new_file(file, schema) as writer:
        # Flat arrays from the start: as lists of Python ints the ids take ten times the memory.
        while True:
            columns = [_Column() for _ in names]
            for row in islice(rows, ROWS_PER_RECORD_BATCH):
                for column, numbers in zip(columns, (*row[:2], *(row.tree or ())), strict=True):
                    column.append(numbers)
            if len(columns[0].ends) == 1:
                return
            arrays = [column.to_arrow() for column in columns]
            writer.write_batch(pa.record_batch(arrays, schema=schema))


class _Column:
    """Lists of ids laid end to end, as Arrow has them."""

    def __init__(self) -> None:
        self.ids = array("i")
        self.ends = array("i", [0])

    def append(self, ids: list[int]) -> None:
        self.ids.extend(ids)
        self.ends.append(len(self.ids))

    def to_arrow(self) -> pa.ListArray:
        return pa.ListArray.from_arrays(np.array(self.ends), np.array(self.ids))


# ---------------------------------------------------------------------------------------------
# Reading


class TokenDataset:
    """A written store; opening it reads the lengths, the ids stay on disk until they are asked for.

    ``ids`` is the whole file seen as int32. Row n of the source is the ``source_lengths[n]``
    numbers from ``source_starts[n]`` on: one index into one array, wherever Arrow put its batches.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with pa.memory_map(str(path)) as file:
                self._buffer = file.read_buffer()
            reader = pa.ipc.open_file(self._buffer)
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
            for batch in batches:
                batch.validate()
            self.ids: IntArray = np.frombuffer(self._buffer, np.int32, self._buffer.size // 4)
            self.source_starts, self.source_lengths = self._column(batches, "source")
            self.target_starts, self.target_lengths = self._column(batches, "target")
            self.trees = TREE[0] in reader.schema.names
            """whether each source comes with its tree"""
            if self.trees:
                self.word_starts, self.word_lengths = self._column(batches, "words")
                self.head_starts, self.head_lengths = self._column(batches, "heads")
        except FileNotFoundError:
            raise RegardError(f"{path}: no such file") from None
        except OSError as error:
            # Arrow raises OSError for much that is wrong inside a file, without an errno.
            reason = f"cannot be read: {error.strerror}" if error.errno else "damaged"
            raise RegardError(f"{path}: {reason}; prepare the data again") from None
        except (pa.ArrowException, KeyError, ValueError, AttributeError):
            raise RegardError(f"{path}: damaged, or no store; prepare the data again") from None

    def __len__(self) -> int:
        return len(self.source_lengths)

    def _column(self, batches: list[pa.RecordBatch], name: str) -> tuple[RowIndices, IntArray]:
        """Where each list of ids starts in ``ids``, and how long it is."""
        starts, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        for batch in batches:
            column = batch.column(name)
            offsets = column.offsets.to_numpy()
            address: int = column.values.buffers()[1].address
            start = (address - self._buffer.address) // self.ids.itemsize
            starts.append(start + offsets[:-1].astype(np.int64))
            lengths.append(np.diff(offsets))
            if offsets[0] < 0 or lengths[-1].min() < 0 or offsets[-1] > len(column.values):
                raise ValueError("the offsets do not rise")
        return np.concatenate(starts), np.concatenate(lengths)
