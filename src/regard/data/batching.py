"""Which rows go together, and what they look like as tensors.

A batch costs rows times its longest row, padding included, so rows of like length go together. The
plan of an epoch follows from the seed and the epoch alone: a training that goes on after a stop, or
with other processes beside it, sees the same batches.
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
"""rows of matrices that a GPU works on at once"""
TreeTensors = tuple[Int[Tensor, "B S"], Int[Tensor, "B S S"]]
"""depth and distance of the source tokens in their dependency trees"""
PackingTensors = tuple[Int[Tensor, "_ _"], ...]
"""four times where a text begins and one past where it ends: the own text of each source and of each target token, the
source of each target token, the target of each source token"""


@dataclass(frozen=True)
class Batch:
    source: Int[Tensor, "B S"]
    """text and EOS: what the encoder reads"""
    target: Int[Tensor, "B T"]
    """BOS and text: what the decoder reads"""
    labels: Int[Tensor, "B T"]
    """text and EOS: what the decoder must say at each place"""
    position_info: TreeTensors | PackingTensors | None = None
    """where the words stand, if not simply one text to a row"""

    @property
    def tokens(self) -> int:
        """How many tokens the decoder must say; padding does not count."""
        return int((self.labels != PAD).sum())

    def to(self, device: torch.device | str) -> Batch:
        return self.map(lambda part: part.to(device, non_blocking=part.is_pinned()))

    def fill(self, other: Batch) -> None:
        """Take the numbers of another batch of the same shape."""
        for own, others in zip(self.tensors(), other.tensors(), strict=True):
            own.copy_(others, non_blocking=True)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.source, self.target, self.labels, *(self.position_info or ())

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same for every tensor."""
        source, target, labels, *places = map(change, self.tensors())
        return Batch(source, target, labels, tuple(places) or None)


# ---------------------------------------------------------------------------------------------
# Planning


def plan_batches(
    source_lengths: Lengths, target_lengths: Lengths, tokens_per_batch: int, seed: int, epoch: int
) -> list[RowIndices]:
    """The row numbers of each batch of an epoch, every row once.

    Rows times the longest source, and rows times the longest target, stay within
    ``tokens_per_batch``, the mark of each row counted. A row longer than that stands alone.
    """
    random = np.random.default_rng([seed, epoch])
    # The sort below is stable: rows of equal lengths keep the random order they come in.
    shuffled = random.permutation(len(source_lengths))
    order = shuffled[_by_length(source_lengths[shuffled], target_lengths[shuffled])]
    batches = _cut(order, source_lengths, target_lengths, tokens_per_batch)
    return [batches[number] for number in random.permutation(len(batches))]


def plan_sorted(
    source_lengths: Lengths, target_lengths: Lengths, tokens_per_batch: int, workers: int = 1
) -> list[RowIndices]:
    """The same without chance, shortest first.

    Several workers get as many batches each, as small as that allows: so none waits long for the others at the end.
    """
    order = _by_length(source_lengths, target_lengths)
    cut = partial(_cut, order, source_lengths, target_lengths)
    batches = cut(tokens_per_batch)
    if workers == 1:
        return batches
    most = workers * -(-len(batches) // workers)
    enough = bisect_left(range(tokens_per_batch), True, key=lambda room: len(cut(room)) <= most)
    return cut(enough)


class Room(NamedTuple):
    """Tokens that a packed row has room for, the mark of each text counted."""

    source: int
    target: int


def room(source_lengths: Lengths, target_lengths: Lengths, tokens_per_batch: int) -> Room:
    """The side with more tokens gets all the room; the other as much less as it has fewer, so that both fill up.

    A text longer than all of it would be lost: it makes room for itself.
    """
    totals = np.array([source_lengths.sum(), target_lengths.sum()]) + len(source_lengths)
    # Two standard deviations of how much a batch of a few hundred texts differs from the mean.
    shares = np.minimum(1.0, 1.01 * totals / totals.max())
    longest = [lengths.max() + 1 for lengths in (source_lengths, target_lengths)]
    tokens = np.maximum(shares * tokens_per_batch, longest)
    return Room(*(int(-(-count // TILE) * TILE) for count in tokens))


def plan_packed(
    source_lengths: Lengths, target_lengths: Lengths, room: Room, seed: int, epoch: int
) -> list[RowIndices]:
    """Rows of all lengths in each batch, as many as there is room for; every row once."""
    order = np.random.default_rng([seed, epoch]).permutation(len(source_lengths))
    ends = [np.cumsum(lengths[order] + 1) for lengths in (source_lengths, target_lengths)]
    batches, start = [], 0
    while start < len(order):
        before = [end[start - 1] if start else 0 for end in ends]
        stop = min(
            int(np.searchsorted(end, so_far + space, side="right"))
            for end, so_far, space in zip(ends, before, room, strict=True)
        )
        batches.append(order[start:stop])
        start = stop
    return batches


def _by_length(source_lengths: Lengths, target_lengths: Lengths) -> RowIndices:
    """Sort by the longer side, on which the budget is spent, then by how far the sides differ.

    The second key runs up and down in turn, so that a batch that spans two lengths of the longer
    side finds its neighbours alike in the shorter one as well.
    """
    longer = np.maximum(source_lengths, target_lengths)
    difference = target_lengths.astype(np.int64) - source_lengths
    return np.lexsort((np.where(longer % 2, difference, -difference), longer))


def _cut(
    order: RowIndices, source_lengths: Lengths, target_lengths: Lengths, tokens_per_batch: int
) -> list[RowIndices]:
    """Cut the sorted rows into batches, each as large as the budget allows."""
    # The longer side rises along the order, so the last row of a batch is always its longest.
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
# MaskFilling


def collate(store: TokenDataset, rows: RowIndices, part: int = 0, parts: int = 1) -> Batch:
    """The tensors of a batch, or of one of its ``parts`` when as many processes shard_rows it.

    A part for which no row is left gets the first one with nothing labels of it: its process takes
    the same steps as the others and counts for nothing.
    """
    mine, idle = shard_rows(rows, part, parts)
    source, labels = sources(store, mine), targets(store, mine)
    target = np.empty_like(labels)
    target[:, 0] = BOS
    target[:, 1:] = np.where(labels[:, :-1] == EOS, PAD, labels[:, :-1])
    if idle:
        labels[:] = PAD
    tree = _trees(store, mine) if store.trees else None
    return Batch(*as_tensors(source, target, labels), tree)


def pack(store: TokenDataset, rows: RowIndices, room: Room) -> Batch:
    """The texts of a batch end to end in one row, padding after the last."""
    of_source, of_target = store.source_lengths[rows] + 1, store.target_lengths[rows] + 1
    source = _end_to_end(store.ids, store.source_starts[rows], of_source, room.source)
    labels = _end_to_end(store.ids, store.target_starts[rows], of_target, room.target)
    target = np.roll(labels, 1)
    target[np.cumsum(of_target) - of_target] = BOS
    target[of_target.sum() :] = PAD
    spans = (
        *_spans(of_source, of_source, room.source),
        *_spans(of_target, of_target, room.target),
        *_spans(of_source, of_target, room.target),
        *_spans(of_target, of_source, room.source),
    )
    return Batch(*as_tensors(source[None], target[None], labels[None]), spans)


def _end_to_end(ids: IntArray, starts: RowIndices, lengths: IntArray, room: int) -> RowIndices:
    """Each text and EOS, then padding; the lengths count EOS."""
    row = np.full(room, PAD, dtype=np.int64)
    ends = np.cumsum(lengths)
    row[: ends[-1]] = ids[_inside(starts, lengths)]
    row[ends - 1] = EOS
    return row


def _inside(starts: RowIndices, lengths: IntArray) -> RowIndices:
    """The places of all tokens; EOS, which is not stored, has that of the token before it."""
    ends = np.cumsum(lengths)
    places = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    places[ends - 1] = starts  # any place will do
    return cast(RowIndices, places)


def _spans(lengths: IntArray, at: IntArray, room: int) -> PackingTensors:
    """Where texts of these lengths begin and end, said at each token of texts of the lengths ``at``."""
    ends, count = np.cumsum(lengths), int(at.sum())
    start, end = (np.arange(room, dtype=np.int32) for _ in range(2))  # empty, right there
    start[:count], end[:count] = np.repeat(ends - lengths, at), np.repeat(ends, at)
    return torch.from_numpy(start)[None], torch.from_numpy(end)[None]


def as_tensors(
    source: RowIndices, target: RowIndices, labels: RowIndices
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.from_numpy(source), torch.from_numpy(target), torch.from_numpy(labels)


def shard_rows(rows: RowIndices, part: int, parts: int) -> tuple[RowIndices, bool]:
    """The rows of one of the processes; True if none is left for it and it gets one to be idle with."""
    mine = rows[part::parts]
    return (mine, False) if len(mine) else (rows[:1], True)


def sources(store: TokenDataset, rows: RowIndices) -> RowIndices:
    return _texts(store.ids, store.source_starts[rows], store.source_lengths[rows])


def targets(store: TokenDataset, rows: RowIndices, end: int = EOS) -> RowIndices:
    return _texts(store.ids, store.target_starts[rows], store.target_lengths[rows], end)


def _texts(ids: IntArray, starts: RowIndices, lengths: IntArray, end: int = EOS) -> RowIndices:
    """Text, EOS and padding: one row for each start and length."""
    texts = _rows(ids, starts, lengths, PAD)
    texts[np.arange(len(lengths)), lengths] = end
    return texts


def _rows(ids: IntArray, starts: RowIndices, lengths: IntArray, filling: int) -> RowIndices:
    """One row for each start and length, one place longer than the longest."""
    place = np.arange(lengths.max() + 1)
    inside = place < lengths[:, None]
    rows = np.full(inside.shape, filling, dtype=np.int64)
    rows[inside] = ids[(starts[:, None] + place)[inside]]
    return rows


# ---------------------------------------------------------------------------------------------
# Trees


def _trees(store: TokenDataset, rows: RowIndices) -> TreeTensors:
    words = _rows(store.ids, store.word_starts[rows], store.word_lengths[rows], 0)
    heads = _rows(store.ids, store.head_starts[rows], store.head_lengths[rows], 0)
    return _tree_tensors(words, heads)


def collate_trees(trees: Sequence[TokenTree]) -> TreeTensors:
    """Depth and distance of texts that lie in no store."""
    return _tree_tensors(*(_side_by_side(lists) for lists in zip(*trees, strict=True)))


def _side_by_side(lists: Sequence[Sequence[int]]) -> RowIndices:
    lengths = np.array([len(numbers) for numbers in lists], dtype=np.int32)
    flat = np.fromiter(chain.from_iterable(lists), dtype=np.int32)
    return _rows(flat, np.cumsum(lengths) - lengths, lengths, 0)


def _tree_tensors(words: RowIndices, heads: RowIndices) -> TreeTensors:
    """EOS and padding belong to word 0, the root, with which the heads must begin; at their ends stands a 0."""
    depth, distance = depth_and_distance(words, np.roll(heads, 1, axis=1))
    return torch.from_numpy(depth), torch.from_numpy(distance)
