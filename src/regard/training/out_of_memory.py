"""Out of memory: which errors mean it, how much memory is available, and micro-batches.

A batch that does not fit into memory is split into micro-batches, and their gradients are summed. The batch stays the
same: its rows, the tokens its loss is averaged over, and its place in the epoch. Only the order of summation and the
random draws of dropout change, so the weights differ from those of the unsplit batch by rounding and by dropout, not in
what they are trained on. The number of micro-batches is saved in every checkpoint; a resumed run uses the same one. If
memory runs out during training, ``Trainer`` doubles it and continues.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from regard.data.batching import Batch, Lengths
from regard.data.token_dataset import RowIndices

if TYPE_CHECKING:
    from regard.training.train_step import TrainStep

OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")
"""Parts of the messages of torch's errors when memory runs out; on a CPU they have no class of their own."""
ACTIVATION_MEMORY_FACTOR = 1.5
"""A step needs about this many times the memory of the activations that are saved for the backward pass."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the memory of the machine or of the GPU is exhausted."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


def available_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes that this process may still allocate, by the machine and by the limit of its container; None: unknown."""
    limits = []
    try:
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        limits.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, ValueError, KeyError):  # not Linux
        return None
    try:
        most, used = ((cgroup / f"memory.{name}").read_text() for name in ("max", "current"))
        limits.append(int(most) - int(used))
    except (OSError, ValueError):  # no container, or "max"
        pass
    return min(limits)


# ---------------------------------------------------------------------------------------------
# Micro-batches: the parts of a batch that does not fit into memory


def few_rows(rows: int) -> int:
    """How many of these rows are enough to estimate the memory of all: one in 16."""
    return max(1, rows // 16)


def split_rows(rows: RowIndices, micro_batches: int) -> list[RowIndices]:
    """The rows of a batch in up to this many parts of equal size."""
    return np.array_split(rows, min(micro_batches, len(rows)))


def largest_batch(
    plan: Sequence[RowIndices], source_lengths: Lengths, target_lengths: Lengths
) -> RowIndices:
    """The batch with the most tokens, padding included."""

    def size(rows: RowIndices) -> int:
        longest = (int(lengths[rows].max()) + 1 for lengths in (source_lengths, target_lengths))
        return len(rows) * sum(longest)

    return max(plan, key=size)


def fits_in_memory(train_step: TrainStep, micro_batches: Sequence[Batch]) -> bool:
    """Try the forward and backward pass of micro-batches, with room for the state of the optimizer.

    The gradients are discarded, and the weights do not change.
    """
    try:
        optimizer_state = [torch.empty_like(p) for p in train_step.parameters for _ in range(2)]
        train_step.compute_gradients(micro_batches, 0.0, sync=False)
        del optimizer_state
        fits = True
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        fits = False
    # Here, and not above: the error holds the tensors of the pass that failed.
    release_memory(train_step)
    return fits


def release_memory(train_step: TrainStep) -> None:
    """Free the gradients, and what a GPU has cached."""
    train_step.zero_grad()
    if train_step.device.type == "cuda":
        torch.cuda.empty_cache()


def estimate_micro_batches(
    train_step: TrainStep, few: Batch, largest: Batch, texts: int, parallel: int = 1
) -> int:
    """The number of micro-batches that the ``largest`` batch, of this many texts, needs on a CPU: a power of two.

    A few rows go through the network, and the memory of their activations is extrapolated to all rows: the first rows
    of a padded batch, or a smaller packed batch (``few``). A batch that is too large cannot be tried: Linux would kill
    the process, or another one.

    parallel: how many micro-batches are computed at the same time.
    """
    some = few_rows(len(few.source))
    few = few.map(lambda tensor: tensor[:some])
    with count_saved_bytes() as saved:
        train_step.accumulate(few, 0.0, last=False)
    release_memory(train_step)
    positions = [one.source.numel() + one.target.numel() for one in (largest, few)]
    activations = ACTIVATION_MEMORY_FACTOR * sum(saved.values()) * positions[0] / positions[1]
    needed, available = parallel * activations, available_memory()
    if parallel > 1 and available is not None:  # each has gradients of its own, and sums of them
        available -= 2 * parallel * sum(weight.nbytes for weight in train_step.parameters)
    micro_batches = 1
    while available is not None and micro_batches < texts and needed / micro_batches > available:
        micro_batches *= 2
    return micro_batches


@contextmanager
def count_saved_bytes() -> Iterator[dict[int, int]]:
    """The bytes of each storage that autograd saves for the backward pass, by its address."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
