"""Batching: which rows of a dataset go into a batch, and how they become tensors.

A padded batch costs its number of rows times its longest row, so rows of similar length go together
(bucketing by length). The plan of an epoch depends only on the seed and the epoch: a run that is resumed, or uses more
processes, gets the same batches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from regard.data.dataset import IntArray, RowIndices, TokenDataset
from regard.data.dependency_trees import TokenTree, depth_and_distance
from regard.data.special_tokens import BOS, EOS, PAD

Lengths = npt.NDArray[np.integer]
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
        for own, others in zip(self.tensors(), other.tensors(), strict=True):
            own.copy_(others, non_blocking=True)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.source, self.target, self.labels, *(self.position_info or ())

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply a function to every tensor."""
        source, target, labels, *position_info = map(function, self.tensors())
        return Batch(source, target, labels, tuple(position_info) or None)


# ---------------------------------------------------------------------------------------------
# Planning


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
    order = _by_length(source_lengths, target_lengths)
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
    totals = np.array([source_lengths.sum(), target_lengths.sum()]) + len(source_lengths)
    # 1%: two standard deviations of the difference between a batch of a few hundred texts and the mean.
    fractions = np.minimum(1.0, 1.01 * totals / totals.max())
    longest = [lengths.max() + 1 for lengths in (source_lengths, target_lengths)]
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
        before = [end[start - 1] if start else 0 for end in ends]
        stop = min(
            int(np.searchsorted(end, used + tokens, side="right"))
            for end, used, tokens in zip(ends, before, size, strict=True)
        )
        batches.append(order[start:stop])
        start = stop
    return batches


def mix_rows(new: int, old: int, share: float, seed: int, epoch: int) -> RowIndices:
    """The rows of an epoch of fine-tuning: all ``new`` rows, and old ones that make up ``share`` of the epoch.

    The ``old`` rows follow the new ones in the dataset. They are used in random order, each once before any is used
    again, over all epochs. This depends only on the seed and the epoch.
    """
    count = round(new * share / (1 - share)) if old else 0
    start = epoch * count
    drawn = [np.empty(0, np.int64)]
    for cycle in range(start // old, -(-(start + count) // old)) if count else ():
        order = np.random.default_rng([seed, cycle, old]).permutation(old)
        first, last = max(start - cycle * old, 0), min(start + count - cycle * old, old)
        drawn.append(order[first:last])
    return np.concatenate([np.arange(new), new + np.concatenate(drawn)])


def _by_length(source_lengths: Lengths, target_lengths: Lengths) -> RowIndices:
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
    own_rows, idle = shard_rows(rows, rank, ranks)
    source, labels = pad_sources(dataset, own_rows), pad_targets(dataset, own_rows)
    target = np.empty_like(labels)
    target[:, 0] = BOS
    target[:, 1:] = np.where(labels[:, :-1] == EOS, PAD, labels[:, :-1])
    if idle:
        labels[:] = PAD
    trees = _dataset_trees(dataset, own_rows) if dataset.has_trees else None
    return Batch(*as_tensors(source, target, labels), trees)


def shard_rows(rows: RowIndices, rank: int, ranks: int) -> tuple[RowIndices, bool]:
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


def pack_evenly(dataset: TokenDataset, rows: RowIndices, row_tokens: int) -> list[Batch]:
    """Some rows in as few packed rows of up to about ``row_tokens`` tokens as possible, all of similar size.

    On a CPU: a long packed row does not fit into the cache, and a kernel is made for each size of row.
    """
    sides = dataset.source_lengths[rows] + 1, dataset.target_lengths[rows] + 1
    parts = min(len(rows), -(-max(int(side.sum()) for side in sides) // max(1, row_tokens)))
    owners, batches = row_owners(*sides, parts), []
    for part in range(parts):
        own = owners == part
        tokens = [-(-int(side[own].sum()) // CPU_TILE) * CPU_TILE for side in sides]
        batches.append(pack(dataset, rows[own], PackedSize(*tokens)))
    return batches


def row_owners(source_lengths: Lengths, target_lengths: Lengths, ranks: int) -> RowIndices:
    """The part of each row of a batch, or the process that gets it, given the lengths of the rows.

    The rows are sorted by length and dealt in the order 0 1 2 2 1 0 0 1 …, so that all get about the same tokens.
    """
    order = np.argsort(-(source_lengths.astype(np.int64) + target_lengths), kind="stable")
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
