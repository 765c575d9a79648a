"""Batching: which rows of a dataset go into a batch, and how they become tensors.

A padded batch costs its number of rows times its longest row, so rows of similar length go together (bucketing by
length). A packed batch has no padding: its texts follow each other in one long row (sequence packing). The plan of an
epoch depends only on the seed and the epoch: a run that is resumed, or uses more processes, gets the same batches.

A corpus of up to ``POOL_ROWS`` rows is shuffled and sorted as a whole. A larger one is planned in pools of that size,
so that memory does not grow with the corpus: blocks of neighbouring rows are distributed over the pools by a keyed
permutation, and each pool is shuffled, sorted and split like a small corpus.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from regard.data.dependency_trees import TokenTree, depth_and_distance
from regard.data.special_tokens import BOS, EOS, PAD
from regard.data.token_dataset import IntArray, ListLengths, RowIndices, TokenDataset

Lengths: TypeAlias = npt.NDArray[np.integer] | ListLengths
"""the length of each row, in memory or on disk"""
TILE = 128
"""packed rows are a multiple of this: the tile size of GPU matrix products"""
CPU_TILE = 64
"""the same on a CPU, so that there are few sizes: oneDNN makes a kernel for each"""
TreeTensors = tuple[Int[Tensor, "B S"], Int[Tensor, "B S S"]]
"""depth and distance of the source tokens in their dependency trees"""
PackingTensors = tuple[Int[Tensor, "_ _"], ...]
"""Start and end (exclusive) of texts within a packed row, four times two tensors: for each source token its own text,
for each target token its own text, for each target token the source text, for each source token the target text."""


@dataclass(frozen=True)
class Batch:
    source: Int[Tensor, "B S"]
    """encoder input: text and EOS"""
    target: Int[Tensor, "B T"]
    """decoder input: BOS and text"""
    labels: Int[Tensor, "B T"]
    """what the decoder must predict at each position: text and EOS"""
    position_info: TreeTensors | PackingTensors | None = None
    """dependency trees or packing, if a row is more than one plain text"""

    @property
    def tokens(self) -> int:
        """The number of labels without padding."""
        return int((self.labels != PAD).sum())

    def to(self, device: torch.device | str) -> Batch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()))

    def fill(self, other: Batch) -> None:
        """Copy the values of another batch of the same shape into this one."""
        for destination, source in zip(self.tensors(), other.tensors(), strict=True):
            destination.copy_(source, non_blocking=True)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.source, self.target, self.labels, *(self.position_info or ())

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply a function to every tensor."""
        source, target, labels, *position_info = map(function, self.tensors())
        return Batch(source, target, labels, tuple(position_info) or None)


# ---------------------------------------------------------------------------------------------
# Planning


POOL_ROWS = 2**20
"""rows that are shuffled, sorted by length and split into batches together"""
BLOCK_ROWS = 64
"""Neighbouring rows that are in the same pool, a divisor of ``POOL_ROWS``. They fill about two pages of the file, so
that each page is read once in an epoch."""

PoolPlanner: TypeAlias = Callable[[Lengths, Lengths, int, int], list[RowIndices]]
"""the batches of the rows with these lengths, by seed and epoch: ``plan_batches`` or ``plan_packed``"""


class EpochPlan:
    """The batches of an epoch, planned one pool at a time.

    The position of a batch is ``pool * POOL_ROWS + number in the pool``: a pool never has more batches than rows, so a
    run is resumed at any position by planning one pool. Of a corpus with a single pool, positions count the batches.
    """

    def __init__(
        self,
        source_lengths: Lengths,
        target_lengths: Lengths,
        planner: PoolPlanner,
        seed: int,
        epoch: int,
        rows: EpochRows | None = None,
    ) -> None:
        """``planner``: plans the batches of a pool. ``rows``: which rows are used; by default all, once."""
        self.lengths = source_lengths, target_lengths
        self.planner, self.seed, self.epoch = planner, seed, epoch
        self.rows = rows
        self.count = len(source_lengths) if rows is None else len(rows)
        self.blocks = -(-self.count // BLOCK_ROWS)
        self.pools = max(1, -(-self.blocks // (POOL_ROWS // BLOCK_ROWS)))

    def pool(self, number: int) -> list[RowIndices]:
        """The rows of each batch of a pool."""
        rows = self._pool_rows(number)
        seed = self.seed if number == 0 else _mix_seed(self.seed, number)
        source, target = self.lengths
        plan = self.planner(source[rows], target[rows], seed, self.epoch)
        return [rows[batch] for batch in plan]

    def batches(self, position: int = 0) -> Iterator[tuple[int, RowIndices]]:
        """The batches from a position on: the position after each batch, and its rows."""
        first_pool, skipped = divmod(position, POOL_ROWS)
        for number in range(first_pool, self.pools):
            for index, rows in enumerate(self.pool(number)[skipped:], skipped + 1):
                yield number * POOL_ROWS + index, rows
            skipped = 0

    def _pool_rows(self, number: int) -> RowIndices:
        """The rows of a pool: random blocks of neighbouring rows."""
        if self.pools == 1:
            chosen = np.arange(self.count)
        else:
            start, stop = (self.blocks * index // self.pools for index in (number, number + 1))
            permuted = permute(np.arange(start, stop), self.blocks, (self.seed, self.epoch))
            chosen = (permuted[:, None] * BLOCK_ROWS + np.arange(BLOCK_ROWS)).ravel()
            chosen = chosen[chosen < self.count]
        return chosen if self.rows is None else self.rows[chosen]


def _mix_seed(seed: int, pool: int) -> int:
    """A seed for the shuffling of a pool other than the first."""
    return int(np.random.SeedSequence([seed, pool]).generate_state(1, np.uint64)[0])


def permute(numbers: RowIndices, size: int, key: Sequence[int]) -> RowIndices:
    """The images of some numbers below ``size`` under a random permutation that depends on the key alone.

    A Feistel network permutes the numbers of an even number of bits; a number that leaves the range is permuted again
    until it is back (cycle walking). So any part of the permutation is computed without the rest.
    """
    half_bits = max(1, -(-(size - 1).bit_length() // 2))
    mask = np.uint64((1 << half_bits) - 1)
    keys = np.random.SeedSequence([*key, size]).generate_state(_FEISTEL_ROUNDS, np.uint64)
    permuted = numbers.astype(np.uint64)
    outside = np.ones(len(permuted), np.bool_)
    while outside.any():
        walking = permuted[outside]
        left, right = walking >> np.uint64(half_bits), walking & mask
        for round_key in keys:
            left, right = right, left ^ (_scramble(right ^ round_key) & mask)
        permuted[outside] = left << np.uint64(half_bits) | right
        outside = permuted >= size
    return permuted.astype(np.int64)


_FEISTEL_ROUNDS = 6


def _scramble(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A hash of each value: the finalizer of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def plan_batches(
    source_lengths: Lengths, target_lengths: Lengths, tokens_per_batch: int, seed: int, epoch: int
) -> list[RowIndices]:
    """The row indices of each batch of an epoch, in random order; every row occurs once.

    Rows times the longest source, and rows times the longest target, are at most ``tokens_per_batch``, EOS included. A
    row that is longer gets a batch of its own.
    """
    rng = np.random.default_rng([seed, epoch])
    # The sort below is stable: rows of equal lengths keep this random order.
    shuffled = rng.permutation(len(source_lengths))
    order = shuffled[_by_length(source_lengths[shuffled], target_lengths[shuffled])]
    batches = _split(order, source_lengths, target_lengths, tokens_per_batch)
    return [batches[number] for number in rng.permutation(len(batches))]


def plan_sorted(
    source_lengths: Lengths, target_lengths: Lengths, tokens_per_batch: int, workers: int = 1
) -> list[RowIndices]:
    """Batches without randomness, shortest rows first.

    With several workers, the batches are as small as possible without taking more rounds of ``workers`` batches. So no
    worker waits long for the others at the end.
    """
    order = _by_length(np.asarray(source_lengths), np.asarray(target_lengths))
    split = partial(_split, order, source_lengths, target_lengths)
    batches = split(tokens_per_batch)
    if workers == 1:
        return batches
    max_batches = workers * -(-len(batches) // workers)
    smallest = bisect_left(
        range(tokens_per_batch), True, key=lambda tokens: len(split(tokens)) <= max_batches
    )
    return split(smallest)


class PackedSize(NamedTuple):
    """The number of tokens in a packed row, the EOS of each text included."""

    source: int
    target: int


def packed_size(
    source_lengths: Lengths, target_lengths: Lengths, tokens_per_batch: int
) -> PackedSize:
    """The size of packed rows for a dataset.

    The side with more tokens gets ``tokens_per_batch``, the other side proportionally less, so that both fill up. The
    size is at least that of the longest text.
    """
    return common_packed_size([(source_lengths, target_lengths)], tokens_per_batch)


def common_packed_size(
    datasets: Sequence[tuple[Lengths, Lengths]], tokens_per_batch: int
) -> PackedSize:
    """The size of packed rows for several datasets, given the lengths of each."""
    tokens_of = [[side.sum() + len(side) for side in lengths] for lengths in datasets]
    totals = np.array(tokens_of).sum(axis=0)
    # 1%: two standard deviations of the difference between a batch of a few hundred texts and the mean.
    fractions = np.minimum(1.0, 1.01 * totals / totals.max())
    longest = [max(side.max() for side in sides) + 1 for sides in zip(*datasets, strict=True)]
    tokens = np.maximum(fractions * tokens_per_batch, longest)
    return PackedSize(*(int(-(-count // TILE) * TILE) for count in tokens))


def plan_packed(
    source_lengths: Lengths, target_lengths: Lengths, size: PackedSize, seed: int, epoch: int
) -> list[RowIndices]:
    """Batches of rows of all lengths, in random order, each with as many rows as fit into ``size``."""
    order = np.random.default_rng([seed, epoch]).permutation(len(source_lengths))
    ends = [np.cumsum(lengths[order] + 1) for lengths in (source_lengths, target_lengths)]
    batches, start = [], 0
    while start < len(order):
        offsets = [end[start - 1] if start else 0 for end in ends]
        stop = min(
            int(np.searchsorted(end, offset + tokens, side="right"))
            for end, offset, tokens in zip(ends, offsets, size, strict=True)
        )
        batches.append(order[start:stop])
        start = stop
    return batches


class RowRange(NamedTuple):
    """Consecutive rows of a dataset, and how many of them an epoch uses."""

    first: int
    rows: int
    drawn: int | None = None
    """the number of rows that are drawn at random in each epoch; None: all rows, in order"""

    @property
    def per_epoch(self) -> int:
        return self.rows if self.drawn is None else self.drawn


class EpochRows:
    """The rows that an epoch uses: of each range all rows, or a number of rows that may be larger.

    Rows are drawn in random order, each once before any is drawn again, over all epochs. This depends only on the seed
    and the epoch.
    """

    def __init__(self, ranges: Sequence[RowRange], seed: int, epoch: int) -> None:
        self.ranges = [row_range for row_range in ranges if row_range.rows and row_range.per_epoch]
        self.seed, self.epoch = seed, epoch
        self.ends = np.cumsum([row_range.per_epoch for row_range in self.ranges])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, indices: RowIndices) -> RowIndices:
        """The rows at these indices of the epoch."""
        rows = np.empty(len(indices), np.int64)
        number = np.searchsorted(self.ends, indices, side="right")
        for index, row_range in enumerate(self.ranges):
            chosen = number == index
            drawn = indices[chosen] - (self.ends[index] - row_range.per_epoch)
            if row_range.drawn is not None:
                drawn = self._draw(drawn + self.epoch * row_range.drawn, row_range.rows)
            rows[chosen] = row_range.first + drawn
        return rows

    def _draw(self, numbers: RowIndices, rows: int) -> RowIndices:
        """The row of each draw; the draws of all epochs are numbered."""
        drawn = np.empty(len(numbers), np.int64)
        cycle = numbers // rows
        for value in np.unique(cycle).tolist():
            chosen = cycle == value
            number = numbers[chosen] - value * rows
            if rows <= POOL_ROWS:
                order = np.random.default_rng([self.seed, value, rows]).permutation(rows)
                drawn[chosen] = order[number]
            else:
                blocks, offset_in_block = rows // BLOCK_ROWS, number % BLOCK_ROWS
                block = np.where(number < blocks * BLOCK_ROWS, number // BLOCK_ROWS, 0)
                permuted = permute(block, blocks, (self.seed, value)) * BLOCK_ROWS + offset_in_block
                drawn[chosen] = np.where(number < blocks * BLOCK_ROWS, permuted, number)
        return drawn


def share_of_old_rows(new_rows: int, old_rows: int, share: float) -> list[RowRange]:
    """The rows of an epoch of fine-tuning: all new rows, and old ones that make up ``share`` of the epoch.

    The old rows follow the new ones in the dataset.
    """
    return [
        RowRange(0, new_rows),
        RowRange(new_rows, old_rows, round(new_rows * share / (1 - share))),
    ]


def rows_by_share(rows: Sequence[int], shares: Sequence[float]) -> list[RowRange]:
    """The rows of an epoch of several corpora, one after the other in the dataset, with these shares of the epoch."""
    starts = np.cumsum([0, *rows[:-1]]).tolist()
    total = sum(rows)
    return [
        RowRange(start, count, max(1, round(share * total)))
        for start, count, share in zip(starts, rows, shares, strict=True)
    ]


def _by_length(
    source_lengths: npt.NDArray[np.integer], target_lengths: npt.NDArray[np.integer]
) -> RowIndices:
    """Sort by the length of the longer side, which determines the cost, then by the difference of the sides.

    The second key alternates between ascending and descending, so that a batch that spans two lengths of the longer
    side has rows that are similar in the shorter side as well.
    """
    longer = np.maximum(source_lengths, target_lengths)
    difference = target_lengths.astype(np.int64) - source_lengths
    return np.lexsort((np.where(longer % 2, difference, -difference), longer))


def _split(
    order: RowIndices, source_lengths: Lengths, target_lengths: Lengths, tokens_per_batch: int
) -> list[RowIndices]:
    """Split the sorted rows into batches, each as large as ``tokens_per_batch`` allows."""
    # The longer side increases along the order, so the last row of a batch is always its longest.
    costs = 1 + np.maximum(source_lengths[order], target_lengths[order])
    batches, start = [], 0
    for end, cost in enumerate(costs.tolist(), start=1):
        if (end - start) * cost > tokens_per_batch and end - start > 1:
            batches.append(order[start : end - 1])
            start = end - 1
    if start < len(order):
        batches.append(order[start:])
    return batches


# ---------------------------------------------------------------------------------------------
# Collating


def collate(dataset: TokenDataset, rows: RowIndices, rank: int = 0, ranks: int = 1) -> Batch:
    """The tensors of a batch, or the shard of process ``rank`` out of ``ranks``.

    A process for which no row is left gets the first row without labels: it takes the same steps as the others and
    contributes nothing.
    """
    own_rows, idle = rows_of_rank(rows, rank, ranks)
    source, labels = pad_sources(dataset, own_rows), pad_targets(dataset, own_rows)
    target = np.empty_like(labels)
    target[:, 0] = BOS
    target[:, 1:] = np.where(labels[:, :-1] == EOS, PAD, labels[:, :-1])
    if idle:
        labels[:] = PAD
    trees = _dataset_trees(dataset, own_rows) if dataset.has_trees else None
    return Batch(*as_tensors(source, target, labels), trees)


def rows_of_rank(rows: RowIndices, rank: int, ranks: int) -> tuple[RowIndices, bool]:
    """The rows of one process out of ``ranks``; True if none is left and it gets a row to be idle with."""
    own_rows = rows[rank::ranks]
    return (own_rows, False) if len(own_rows) else (rows[:1], True)


def pad_sources(dataset: TokenDataset, rows: RowIndices) -> RowIndices:
    """The sources of some rows, each with EOS, padded to the longest."""
    return _pad_texts(dataset.ids, dataset.source_starts[rows], dataset.source_lengths[rows])


def pad_targets(dataset: TokenDataset, rows: RowIndices, end: int = EOS) -> RowIndices:
    """The targets of some rows, each with ``end``, padded to the longest."""
    return _pad_texts(dataset.ids, dataset.target_starts[rows], dataset.target_lengths[rows], end)


def as_tensors(
    source: RowIndices, target: RowIndices, labels: RowIndices
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.from_numpy(source), torch.from_numpy(target), torch.from_numpy(labels)


def _pad_texts(ids: IntArray, starts: RowIndices, lengths: IntArray, end: int = EOS) -> RowIndices:
    """[row, position]: the ids of each text, then ``end``, then padding."""
    texts = _pad_lists(ids, starts, lengths, PAD)
    texts[np.arange(len(lengths)), lengths] = end
    return texts


def _pad_lists(ids: IntArray, starts: RowIndices, lengths: IntArray, padding: int) -> RowIndices:
    """[row, position]: one row for each start and length, one position longer than the longest."""
    position = np.arange(lengths.max() + 1)
    inside = position < lengths[:, None]
    rows = np.full(inside.shape, padding, dtype=np.int64)
    rows[inside] = ids[(starts[:, None] + position)[inside]]
    return rows


# ---------------------------------------------------------------------------------------------
# Packing: the texts of a batch concatenated in one row


def pack(dataset: TokenDataset, rows: RowIndices, size: PackedSize) -> Batch:
    """The texts of some rows concatenated in one row, with padding after the last."""
    source_lengths = dataset.source_lengths[rows] + 1
    target_lengths = dataset.target_lengths[rows] + 1
    source = _concatenate(dataset.ids, dataset.source_starts[rows], source_lengths, size.source)
    labels = _concatenate(dataset.ids, dataset.target_starts[rows], target_lengths, size.target)
    target = np.roll(labels, 1)
    target[np.cumsum(target_lengths) - target_lengths] = BOS
    target[target_lengths.sum() :] = PAD
    packing = (
        *_text_bounds(source_lengths, source_lengths, size.source),
        *_text_bounds(target_lengths, target_lengths, size.target),
        *_text_bounds(source_lengths, target_lengths, size.target),
        *_text_bounds(target_lengths, source_lengths, size.source),
    )
    return Batch(*as_tensors(source[None], target[None], labels[None]), packing)


def pack_equal(ids: Int[Tensor, "texts length"]) -> Batch:
    """A packed row of pairs of equal length, whose source, target and labels are all ``ids``: to measure a step."""
    texts, length = ids.shape
    lengths = np.full(texts, length, dtype=np.int32)
    row = ids.reshape(1, -1)
    return Batch(row, row, row, _text_bounds(lengths, lengths, row.numel()) * 4)


def pack_evenly(
    dataset: TokenDataset,
    rows: RowIndices,
    row_tokens: int,
    parallel: int = 1,
    min_row_tokens: int = 1,
    micro_batches: int = 1,
) -> list[Batch]:
    """Some rows in as few packed rows of up to about ``row_tokens`` tokens as possible, all of similar size.

    On a CPU: a long packed row does not fit into the cache, and a kernel is made for each size of row.

    parallel: the number of packed rows is a multiple of this, unless they would have fewer than ``min_row_tokens``.
    micro_batches: how many times as many packed rows there are, each smaller by this factor, to save memory.
    """
    sides = dataset.source_lengths[rows] + 1, dataset.target_lengths[rows] + 1
    tokens = max(int(side.sum()) for side in sides)
    parallel = max(1, min(parallel, tokens // min_row_tokens))
    row_count = -(-tokens // (row_tokens * parallel)) * parallel * micro_batches
    row_count = min(len(rows), row_count)
    owners, batches = row_owners(*sides, row_count), []
    for row_number in range(row_count):
        in_row = owners == row_number
        size = [-(-int(side[in_row].sum()) // CPU_TILE) * CPU_TILE for side in sides]
        batches.append(pack(dataset, rows[in_row], PackedSize(*size)))
    return batches


def row_owners(source_lengths: Lengths, target_lengths: Lengths, ranks: int) -> RowIndices:
    """The part of each row of a batch, or the process that gets it, given the lengths of the rows.

    The rows are sorted by length and dealt in the order 0 1 2 2 1 0 0 1 …, so that all get about the same tokens.
    """
    tokens = np.asarray(source_lengths, np.int64) + np.asarray(target_lengths)
    order = np.argsort(-tokens, kind="stable")
    number = np.arange(len(order)) % max(1, 2 * ranks)
    owners = np.empty(len(order), dtype=np.int64)
    owners[order] = np.minimum(number, 2 * ranks - 1 - number)
    return owners


def _concatenate(ids: IntArray, starts: RowIndices, lengths: IntArray, size: int) -> RowIndices:
    """Each text and EOS, then padding; the lengths include EOS."""
    row = np.full(size, PAD, dtype=np.int64)
    ends = np.cumsum(lengths)
    row[: ends[-1]] = ids[_token_indices(starts, lengths)]
    row[ends - 1] = EOS
    return row


def _token_indices(starts: RowIndices, lengths: IntArray) -> RowIndices:
    """The index in the dataset of every token; EOS, which is not stored, gets an arbitrary one."""
    ends = np.cumsum(lengths)
    indices = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    indices[ends - 1] = starts
    return cast(RowIndices, indices)


def _text_bounds(lengths: IntArray, token_lengths: IntArray, size: int) -> PackingTensors:
    """Start and end of the texts of ``lengths``, for each token of the texts of ``token_lengths``."""
    ends, count = np.cumsum(lengths), int(token_lengths.sum())
    start, end = (np.arange(size, dtype=np.int32) for _ in range(2))  # padding: an empty text
    start[:count] = np.repeat(ends - lengths, token_lengths)
    end[:count] = np.repeat(ends, token_lengths)
    return torch.from_numpy(start)[None], torch.from_numpy(end)[None]


# ---------------------------------------------------------------------------------------------
# Dependency trees


def collate_trees(trees: Sequence[TokenTree]) -> TreeTensors:
    """Depth and distance of the tokens of some trees."""
    return _tree_tensors(*(_pad_columns(lists) for lists in zip(*trees, strict=True)))


def _dataset_trees(dataset: TokenDataset, rows: RowIndices) -> TreeTensors:
    words = _pad_lists(dataset.ids, dataset.word_starts[rows], dataset.word_lengths[rows], 0)
    heads = _pad_lists(dataset.ids, dataset.head_starts[rows], dataset.head_lengths[rows], 0)
    return _tree_tensors(words, heads)


def _pad_columns(lists: Sequence[Sequence[int]]) -> RowIndices:
    lengths = np.array([len(values) for values in lists], dtype=np.int32)
    flat = np.fromiter(chain.from_iterable(lists), dtype=np.int32)
    return _pad_lists(flat, np.cumsum(lengths) - lengths, lengths, 0)


def _tree_tensors(words: RowIndices, heads: RowIndices) -> TreeTensors:
    """Depth and distance. EOS and padding belong to word 0, the root.

    Every row of ``heads`` ends in the 0 of its padding; rolled to the front, it becomes the head of word 0.
    """
    depth, distance = depth_and_distance(words, np.roll(heads, 1, axis=1))
    return torch.from_numpy(depth), torch.from_numpy(distance)
