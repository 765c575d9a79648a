"""Which rows go together, and what they look like as tensors.

A batch costs rows times its longest row, padding included, so rows of like length go together. The
plan of an epoch follows from the seed and the epoch alone: a training that goes on after a stop, or
with other processes beside it, sees the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from regard.marks import END, PAD, START
from regard.text.store import Ints, Places, Store
from regard.text.trees import TokenTree, depth_and_distance

Lengths = npt.NDArray[np.integer]
TreeTensors = tuple[Int[Tensor, "B S"], Int[Tensor, "B S S"]]


@dataclass(frozen=True)
class Batch:
    source: Int[Tensor, "B S"]
    """text and END: what the encoder reads"""
    target: Int[Tensor, "B T"]
    """START and text: what the decoder reads"""
    wanted: Int[Tensor, "B T"]
    """text and END: what the decoder must say at each place"""
    tree: TreeTensors | None = field(default=None, kw_only=True)
    """depth and distance of the source tokens in their dependency trees"""

    @property
    def tokens(self) -> int:
        """How many tokens the decoder must say; padding does not count."""
        return int((self.wanted != PAD).sum())

    def to(self, device: torch.device | str) -> Batch:
        sides = (part.to(device) for part in (self.source, self.target, self.wanted))
        tree = self.tree and (self.tree[0].to(device), self.tree[1].to(device))
        return Batch(*sides, tree=tree)


# ---------------------------------------------------------------------------------------------
# Planning


def plan_batches(
    source_lengths: Lengths, target_lengths: Lengths, tokens_per_batch: int, seed: int, epoch: int
) -> list[Places]:
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


def plan_in_order(
    source_lengths: Lengths, target_lengths: Lengths, tokens_per_batch: int
) -> list[Places]:
    """The same without chance, shortest first: for validation."""
    order = _by_length(source_lengths, target_lengths)
    return _cut(order, source_lengths, target_lengths, tokens_per_batch)


def _by_length(source_lengths: Lengths, target_lengths: Lengths) -> Places:
    """Sort by the longer side, on which the budget is spent, then by how far the sides differ.

    The second key runs up and down in turn, so that a batch that spans two lengths of the longer
    side finds its neighbours alike in the shorter one as well.
    """
    longer = np.maximum(source_lengths, target_lengths)
    difference = target_lengths.astype(np.int64) - source_lengths
    return np.lexsort((np.where(longer % 2, difference, -difference), longer))


def _cut(
    order: Places, source_lengths: Lengths, target_lengths: Lengths, tokens_per_batch: int
) -> list[Places]:
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
# Filling


def collate(store: Store, rows: Places, part: int = 0, parts: int = 1) -> Batch:
    """The tensors of a batch, or of one of its ``parts`` when as many processes share it.

    A part for which no row is left gets the first one with nothing wanted of it: its process takes
    the same steps as the others and counts for nothing.
    """
    mine, idle = share(rows, part, parts)
    source, wanted = sources(store, mine), targets(store, mine)
    target = np.empty_like(wanted)
    target[:, 0] = START
    target[:, 1:] = np.where(wanted[:, :-1] == END, PAD, wanted[:, :-1])
    if idle:
        wanted[:] = PAD
    tree = _trees(store, mine) if store.trees else None
    return Batch(*map(torch.from_numpy, (source, target, wanted)), tree=tree)


def share(rows: Places, part: int, parts: int) -> tuple[Places, bool]:
    """The rows of one of the processes; True if none is left for it and it gets one to be idle with."""
    mine = rows[part::parts]
    return (mine, False) if len(mine) else (rows[:1], True)


def sources(store: Store, rows: Places) -> Places:
    return _texts(store.ids, store.source_starts[rows], store.source_lengths[rows])


def targets(store: Store, rows: Places, end: int = END) -> Places:
    return _texts(store.ids, store.target_starts[rows], store.target_lengths[rows], end)


def _texts(ids: Ints, starts: Places, lengths: Ints, end: int = END) -> Places:
    """Text, END and padding: one row for each start and length."""
    texts = _rows(ids, starts, lengths, PAD)
    texts[np.arange(len(lengths)), lengths] = end
    return texts


def _rows(ids: Ints, starts: Places, lengths: Ints, filling: int) -> Places:
    """One row for each start and length, one place longer than the longest."""
    place = np.arange(lengths.max() + 1)
    inside = place < lengths[:, None]
    rows = np.full(inside.shape, filling, dtype=np.int64)
    rows[inside] = ids[(starts[:, None] + place)[inside]]
    return rows


# ---------------------------------------------------------------------------------------------
# Trees


def _trees(store: Store, rows: Places) -> TreeTensors:
    words = _rows(store.ids, store.word_starts[rows], store.word_lengths[rows], 0)
    heads = _rows(store.ids, store.head_starts[rows], store.head_lengths[rows], 0)
    return _tree_tensors(words, heads)


def collate_trees(trees: Sequence[TokenTree]) -> TreeTensors:
    """Depth and distance of texts that lie in no store."""
    return _tree_tensors(*(_side_by_side(lists) for lists in zip(*trees, strict=True)))


def _side_by_side(lists: Sequence[Sequence[int]]) -> Places:
    lengths = np.array([len(numbers) for numbers in lists], dtype=np.int32)
    flat = np.fromiter(chain.from_iterable(lists), dtype=np.int32)
    return _rows(flat, np.cumsum(lengths) - lengths, lengths, 0)


def _tree_tensors(words: Places, heads: Places) -> TreeTensors:
    """END and padding belong to word 0, the root, with which the heads must begin; at their ends stands a 0."""
    depth, distance = depth_and_distance(words, np.roll(heads, 1, axis=1))
    return torch.from_numpy(depth), torch.from_numpy(distance)
