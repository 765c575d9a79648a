"""The dataset on disk: the token ids of all pairs in one memory-mapped Arrow file.

Every text is tokenized once. Training then reads any pair at any time without holding the corpus in memory, and
processes on one machine share the pages.
"""

from __future__ import annotations

import gc
import os
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, Generic, NamedTuple, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from regard.data.cleaning import CleaningCounts, EncodedPair, clean_and_encode
from regard.data.pairs import Pair
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.recipe import CleaningConfig

IntArray = npt.NDArray[np.int32]
RowIndices = npt.NDArray[np.int64]
Integers = TypeVar("Integers", IntArray, RowIndices)

ROWS_PER_RECORD_BATCH = 65_536
TREE_COLUMNS = ("words", "heads")
"""columns of dependency trees: the word of each token, the head of each word"""


# ---------------------------------------------------------------------------------------------
# Writing

RowFunction = Callable[
    [Iterable[Pair], Tokenizer, CleaningConfig | None, Counter[str]], Iterator[EncodedPair]
]
"""Turns pairs into rows of the dataset; updates the counter while the pairs are read."""


def write_dataset(
    path: Path,
    pairs: Iterable[Pair],
    tokenizer: Tokenizer,
    clean: CleaningConfig | None,
    rows: RowFunction = clean_and_encode,
) -> CleaningCounts:
    """Tokenize the pairs and write the file atomically.

    With ``clean``, unsuitable pairs are dropped. Without it all pairs are kept, even empty ones, so row n is line n.
    ``rows``: how pairs become rows, if the task differs from translation.
    """
    tally = Counter[str]()
    with new_file(path) as file:
        write_rows(file, rows(pairs, tokenizer, clean, tally))
        counts = CleaningCounts(**tally)
        check_not_empty(path, counts)
    return counts


def check_not_empty(path: Path, counts: CleaningCounts) -> None:
    """Raise if no pairs were kept."""
    if counts.kept == 0:
        why = f"{counts.summary}; see data.clean in the recipe" if counts.read else "none were read"
        if counts.too_long:
            why += ", or keep longer texts, for example with --set data.clean.max_tokens=1000"
        raise RegardError(f"{path}: no pairs to store; {why}")


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which replaces the one at ``path`` at the end, unless there was an error."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise RegardError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def write_rows(file: BinaryIO, rows: Iterable[EncodedPair]) -> None:
    """Write rows as record batches of an Arrow file."""
    rows = iter(rows)
    first_rows = list(islice(rows, 1))
    has_trees = any(row.tree is not None for row in first_rows)  # all rows have one, or none has
    rows = chain(first_rows, rows)
    with _new_dataset(file, has_trees) as writer:
        while True:
            columns = [_Column() for _ in writer.schema.names]
            with _paused_garbage_collection():
                for row in islice(rows, ROWS_PER_RECORD_BATCH):
                    columns[0].append(row.source)
                    columns[1].append(row.target)
                    for column, values in zip(columns[2:], row.tree or (), strict=True):
                        column.append(values)
            if len(columns[0].ends) == 1:
                return
            writer.write([column.to_arrow() for column in columns])


@contextmanager
def _paused_garbage_collection() -> Iterator[None]:
    """Pause the collector of reference cycles, which takes a third of the time to tokenize and finds none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def copy_rows(file: BinaryIO, selections: Iterable[tuple[TokenDataset, RowIndices]]) -> None:
    """Write some rows of several datasets, one after the other: the same file as ``write_rows`` writes.

    selections: a dataset and the rows to copy, in order.
    """
    selections = iter(selections)
    first_selection = list(islice(selections, 1))
    has_trees = any(dataset.has_trees for dataset, _ in first_selection)
    with _new_dataset(file, has_trees) as writer:
        unwritten = [(np.empty(0, np.int32), np.empty(0, np.int32)) for _ in writer.schema.names]
        """lengths and values of the rows of each column that are not written yet"""
        for dataset, rows in chain(first_selection, selections):
            for start in range(0, len(rows), ROWS_PER_RECORD_BATCH):
                chunk = rows[start : start + ROWS_PER_RECORD_BATCH]
                columns = [dataset.lists(name, chunk) for name in writer.schema.names]
                unwritten = [
                    (np.concatenate([lists[0], added[0]]), np.concatenate([lists[1], added[1]]))
                    for lists, added in zip(unwritten, columns, strict=True)
                ]
                if len(unwritten[0][0]) >= ROWS_PER_RECORD_BATCH:
                    cut = [_split_lists(*column, ROWS_PER_RECORD_BATCH) for column in unwritten]
                    writer.write([_to_arrow(*full) for full, _ in cut])
                    unwritten = [remaining for _, remaining in cut]
        if len(unwritten[0][0]):
            writer.write([_to_arrow(*column) for column in unwritten])


Lists = tuple[IntArray, IntArray]
"""the lengths of lists, and their values one list after another"""


def _split_lists(lengths: IntArray, values: IntArray, count: int) -> tuple[Lists, Lists]:
    """The first ``count`` lists, and the others."""
    end = int(lengths[:count].sum())
    return (lengths[:count], values[:end]), (lengths[count:], values[end:])


def _to_arrow(lengths: IntArray, values: IntArray) -> pa.ListArray:
    ends = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
    return pa.ListArray.from_arrays(ends, values.copy())


class _DatasetWriter:
    """Writes record batches with one list of ids per column and row."""

    def __init__(self, schema: pa.Schema, writer: pa.ipc.RecordBatchFileWriter) -> None:
        self.schema, self.writer = schema, writer

    def write(self, columns: list[pa.ListArray]) -> None:
        self.writer.write_batch(pa.record_batch(columns, schema=self.schema))


@contextmanager
def _new_dataset(file: BinaryIO, has_trees: bool) -> Iterator[_DatasetWriter]:
    names = ("source", "target", *(TREE_COLUMNS if has_trees else ()))
    ids = pa.list_(pa.int32())
    schema = pa.schema([pa.field(name, ids, nullable=False) for name in names])
    with pa.ipc.new_file(file, schema) as writer:
        yield _DatasetWriter(schema, writer)


class _Column:
    """Lists of integers, concatenated as Arrow stores them.

    They are flat arrays from the start: as lists of Python ints the ids take ten times the memory.
    """

    def __init__(self) -> None:
        self.values = array("i")
        self.ends = array("i", [0])

    def append(self, values: list[int]) -> None:
        self.values.extend(values)
        self.ends.append(len(self.values))

    def to_arrow(self) -> pa.ListArray:
        return pa.ListArray.from_arrays(np.array(self.ends), np.array(self.values))


# ---------------------------------------------------------------------------------------------
# Reading


class ListLayout(NamedTuple):
    """Where the record batches of a file store the lists of one column."""

    rows: RowIndices
    """the number of rows before each record batch, and of all rows"""
    offsets: RowIndices
    """the index in ``ids`` of the first offset of each record batch"""
    values: RowIndices
    """the index in ``ids`` that the offsets of each record batch count from"""
    total: int
    """the number of values of all lists"""
    longest: int
    """the number of values of the longest list"""


class ListColumn(ABC, Generic[Integers]):
    """One integer for each row of a dataset, about the row's list in one column of the file.

    The integers are computed from the offsets in the memory-mapped file when rows are selected, by an array of row
    indices, a slice or one index. So an open dataset takes no memory that grows with its rows.
    """

    def __init__(self, ids: IntArray, layout: ListLayout) -> None:
        self.ids, self.layout = ids, layout

    def __len__(self) -> int:
        return int(self.layout.rows[-1])

    @overload
    def __getitem__(self, rows: RowIndices | slice) -> Integers: ...

    @overload
    def __getitem__(self, rows: int) -> int: ...

    def __getitem__(self, rows: RowIndices | slice | int) -> Integers | int:
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        chosen = np.asarray(rows, np.int64)
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < len(self):
            raise IndexError(f"row {chosen.min()} or {chosen.max()} of {len(self)} rows")
        batch = np.searchsorted(self.layout.rows, chosen, side="right") - 1
        offset = self.layout.offsets[batch] + (chosen - self.layout.rows[batch])
        values = self._values(batch, offset)
        return int(values) if isinstance(rows, int) else values

    @abstractmethod
    def _values(self, batch: RowIndices, offset: RowIndices) -> Integers:
        """The integers of some rows, given their record batches and the indices of their offsets in ``ids``."""

    def __iter__(self) -> Iterator[int]:
        for start in range(0, len(self), ROWS_PER_RECORD_BATCH):
            yield from self[start : start + ROWS_PER_RECORD_BATCH].tolist()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Integers:
        return cast(Integers, np.asarray(self[:], dtype))


class ListStarts(ListColumn[RowIndices]):
    """Where the list of each row starts in ``ids``."""

    def _values(self, batch: RowIndices, offset: RowIndices) -> RowIndices:
        return np.asarray(self.layout.values[batch] + self.ids[offset])


class ListLengths(ListColumn[IntArray]):
    """The length of the list of each row."""

    def _values(self, batch: RowIndices, offset: RowIndices) -> IntArray:
        return np.asarray(self.ids[offset + 1] - self.ids[offset])

    def sum(self) -> int:
        """The sum of all lengths."""
        return self.layout.total

    def max(self) -> int:
        """The largest length."""
        return self.layout.longest


class TokenDataset:
    """A dataset on disk. Opening it checks the offsets; lengths and ids stay on disk until they are used.

    ``ids`` is the whole file as an int32 array. The source of row n is the ``source_lengths[n]`` values from
    ``source_starts[n]`` on: one index into one array, wherever Arrow put its record batches.
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
            self.has_trees = TREE_COLUMNS[0] in reader.schema.names
            """whether every source has a dependency tree"""
            names = ("source", "target", *(TREE_COLUMNS if self.has_trees else ()))
            self.columns = {name: self._column(batches, name) for name in names}
            self.source_starts, self.source_lengths = self.columns["source"]
            self.target_starts, self.target_lengths = self.columns["target"]
            if self.has_trees:
                self.word_starts, self.word_lengths = self.columns["words"]
                self.head_starts, self.head_lengths = self.columns["heads"]
        except FileNotFoundError:
            raise RegardError(f"{path}: no such file") from None
        except OSError as error:
            # Arrow raises OSError without an errno for many defects inside a file.
            reason = f"cannot be read: {error.strerror}" if error.errno else "damaged"
            raise RegardError(f"{path}: {reason}; prepare the data again") from None
        except (pa.ArrowException, KeyError, ValueError, AttributeError):
            raise RegardError(
                f"{path}: damaged, or not a dataset; prepare the data again"
            ) from None

    def __len__(self) -> int:
        return len(self.source_lengths)

    def lists(self, name: str, rows: RowIndices) -> tuple[IntArray, IntArray]:
        """The lengths of the lists of some rows in a column, and their values one list after another."""
        starts, lengths = self.columns[name]
        chosen = lengths[rows]
        ends = np.cumsum(chosen, dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        indices = np.arange(total) + np.repeat(starts[rows] - (ends - chosen), chosen)
        return chosen, self.ids[indices]

    def _column(self, batches: list[pa.RecordBatch], name: str) -> tuple[ListStarts, ListLengths]:
        """Where each list of a column starts in ``ids``, and the length of each list."""
        rows, starts, total, longest = [0], [], 0, 0
        for batch in batches:
            column = batch.column(name)
            offsets = column.offsets.to_numpy()
            lengths = np.diff(offsets)
            if offsets[0] < 0 or lengths.min() < 0 or offsets[-1] > len(column.values):
                raise ValueError("the offsets are not increasing")
            rows.append(rows[-1] + len(batch))
            starts.append([self._index(column.offsets), self._index(column.values)])
            total += int(offsets[-1]) - int(offsets[0])
            longest = max(longest, int(lengths.max()))
        offsets, values = np.array(starts, np.int64).reshape(-1, 2).T
        layout = ListLayout(np.array(rows, np.int64), offsets, values, total, longest)
        return ListStarts(self.ids, layout), ListLengths(self.ids, layout)

    def _index(self, values: pa.Array) -> int:
        """The index in ``ids`` of the first of these int32 values."""
        address: int = values.buffers()[1].address + values.offset * self.ids.itemsize
        if address % self.ids.itemsize:
            raise ValueError("the values are not aligned")
        start: int = self._buffer.address
        return (address - start) // self.ids.itemsize
