"""The data loader of training: which rows form the batches of each epoch, and their tensors.

The order of an epoch depends only on the seed and the epoch, and a position in it is two numbers (``DataCursor``), so a
resumed run reads the same batches. ``data/batching.py`` plans batches of some rows and makes tensors of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch

from regard.data.batching import (
    Batch,
    EpochPlan,
    EpochRows,
    Lengths,
    PackedSize,
    common_packed_size,
    pack,
    pack_evenly,
    packed_size,
    plan_batches,
    plan_packed,
    plan_sorted,
    row_owners,
    rows_by_share,
    share_of_old_rows,
)
from regard.data.token_dataset import RowIndices, TokenDataset
from regard.recipe import PACKED_CHUNKS, Recipe, model_choices
from regard.tasks.base import PairEncoder
from regard.training.cpu_kernels import CPU_ROW_TOKENS, has_cpu_kernels
from regard.training.distributed import ProcessGroup, share_size
from regard.training.optimizers import OPTIMIZERS
from regard.training.out_of_memory import split_rows
from regard.training.prepare_data import PreparedData
from regard.training.train_step import MIN_ROW_TOKENS


class DataCursor(NamedTuple):
    """A position in the training data."""

    epoch: int
    batch: int
    """position after the last batch, see ``EpochPlan``"""


class TrainingBatch(NamedTuple):
    """One batch from the training data."""

    micro_batches: list[Batch]
    """processed one after the other, their gradients summed"""
    tokens: int
    """target tokens of the whole batch, over all processes"""
    cursor: DataCursor
    """the position after this batch"""


class TrainingDataLoader:
    """An endless stream of batches of the training data, for one of several processes."""

    packs_on_gpu = False
    """whether a batch is one packed row of a fixed size, which a CUDA graph needs"""
    packs_on_cpu = False
    """whether batches are packed rows for the native kernels of a CPU"""
    parallel_rows = 1
    """packed rows that are computed at the same time on a CPU"""
    balances_tokens = False
    """whether the processes share a batch by its tokens; otherwise every process gets every n-th row of it"""

    def __init__(
        self, recipe: Recipe, prepared: PreparedData, encoder: PairEncoder, group: ProcessGroup
    ) -> None:
        self.recipe, self.training = recipe, recipe.training
        self.prepared, self.encoder, self.group = prepared, encoder, group

    def batches(self, cursor: DataCursor, micro_batches: int) -> Iterator[TrainingBatch]:
        """The batches after a position, each in this many parts, epoch after epoch."""
        epoch, first = cursor
        while True:
            dataset = self.prepared.dataset_for_epoch(epoch)
            for position, rows in self.plan_epoch(dataset, epoch).batches(first):
                tokens = self.encoder.count_labels(dataset, rows)
                parts = self.collate(dataset, rows, micro_batches)
                yield TrainingBatch(parts, tokens, DataCursor(epoch, position))
            epoch, first = epoch + 1, 0

    # -----------------------------------------------------------------------------------------
    # Which rows form a batch

    def plan_epoch(self, dataset: TokenDataset, epoch: int) -> EpochPlan:
        """The batches of an epoch."""
        training, new, rows = self.training, self.prepared.new_rows, None
        if new is not None:
            ranges = share_of_old_rows(new, len(dataset) - new, training.mix)
            rows = EpochRows(ranges, training.seed, epoch)
        elif (file_rows := self.prepared.file_rows) is not None:
            shares = self.recipe.data.train.sampling_shares(file_rows)
            rows = EpochRows(rows_by_share(file_rows, shares), training.seed, epoch)
        lengths = dataset.source_lengths, dataset.target_lengths
        return EpochPlan(*lengths, self._plan_pool, training.seed, epoch, rows)

    def _plan_pool(
        self, source_lengths: Lengths, target_lengths: Lengths, seed: int, epoch: int
    ) -> list[RowIndices]:
        """The batches of some rows of an epoch."""
        if self.training.batching == "packed":
            return plan_packed(source_lengths, target_lengths, self.packed_size, seed, epoch)
        return plan_batches(source_lengths, target_lengths, self.recipe.batch_tokens, seed, epoch)

    @cached_property
    def packed_size(self) -> PackedSize:
        """The size of packed rows, the same for all copies of the training data."""
        datasets = self.prepared.copies or [self.prepared.train]
        lengths = [(dataset.source_lengths, dataset.target_lengths) for dataset in datasets]
        return common_packed_size(lengths, self.recipe.batch_tokens)

    @cached_property
    def packed_share_size(self) -> PackedSize:
        """The size of the packed rows of one of several processes; in a few batches a process needs two."""
        dataset = self.prepared.dataset_for_epoch(0)
        plan, processes = self.plan_epoch(dataset, 0).pool(0), self.group.size
        size = share_size(plan, dataset.source_lengths, dataset.target_lengths, processes)
        for copy in self.prepared.copies:  # the longest text of each must fit
            size = PackedSize(
                *map(max, size, packed_size(copy.source_lengths, copy.target_lengths, 1))
            )
        return size

    # -----------------------------------------------------------------------------------------
    # The tensors of a batch

    def collate(self, dataset: TokenDataset, rows: RowIndices, micro_batches: int) -> list[Batch]:
        """The share of this process of a batch: packed rows, padded chunks of similar length, or padded batches.

        Of packed batches the share may be empty.
        """
        rank, processes, tokens = self.group.rank, self.group.size, self.recipe.batch_tokens
        if self.balances_tokens:
            lengths = dataset.source_lengths[rows], dataset.target_lengths[rows]
            rows = rows[row_owners(*lengths, processes) == rank]
            rank, processes, tokens = 0, 1, -(-tokens // processes)
        if self.packs_on_gpu:
            return self._pack_for_gpu(dataset, rows)
        if self.packs_on_cpu:
            sizes = CPU_ROW_TOKENS, self.parallel_rows, MIN_ROW_TOKENS, micro_batches
            return pack_evenly(dataset, rows, *sizes)
        if self.training.batching == "packed":
            lengths = dataset.source_lengths[rows], dataset.target_lengths[rows]
            plan = plan_sorted(*lengths, -(-tokens // (PACKED_CHUNKS * micro_batches)))
            chunks = [rows[chunk] for chunk in plan]
        else:
            chunks = split_rows(rows, micro_batches)
        return [self.encoder.collate(dataset, chunk, rank, processes) for chunk in chunks]

    def _pack_for_gpu(self, dataset: TokenDataset, rows: RowIndices) -> list[Batch]:
        """One packed row; of several processes possibly none, or two."""
        chunks, size = [rows], self.packed_size
        if self.balances_tokens:
            lengths = dataset.source_lengths[rows], dataset.target_lengths[rows]
            size = self.packed_share_size
            plan = plan_packed(*lengths, size, self.training.seed, 0)
            chunks = [rows[chunk] for chunk in plan]
        return [pack(dataset, part, size).map(torch.Tensor.pin_memory) for part in chunks]


# ---------------------------------------------------------------------------------------------
# Which recipes can be packed


def unpackable_choices(recipe: Recipe) -> list[str]:
    """The choices of a recipe that do not support packed rows, such as ``model.norm: batch``."""
    optimizer = OPTIMIZERS.choices[recipe.training.optimizer]
    choices = [("training.optimizer", optimizer), *model_choices(recipe.model)]
    return [f"{key}: {choice.name}" for key, choice in choices if not choice.packed_batches]


def can_pack(recipe: Recipe) -> bool:
    """Whether the batches of a recipe are planned for packing, and all of its choices support packed rows."""
    return recipe.training.batching == "packed" and not unpackable_choices(recipe)


def packs_on_cpu(recipe: Recipe, device: torch.device) -> bool:
    """Whether batches are packed for the native kernels of a CPU."""
    return device.type == "cpu" and can_pack(recipe) and has_cpu_kernels()
