"""One optimizer step: loss, gradient accumulation, gradient clipping, optimizer, moving average of the weights (EMA).

``TrainStep`` runs it eagerly. ``CUDAGraphStep`` captures it as one CUDA graph, for batches of constant shape;
``DistributedCUDAGraphStep`` captures it as two, around the exchange of gradients between processes.

A batch that does not fit into memory is split into micro-batches, and their gradients are summed. The batch stays the
same: its rows, the tokens its loss is averaged over, and its place in the epoch. Only the order of summation and the
random draws of dropout change, so the weights differ from those of the unsplit batch by rounding and by dropout, not in
what they are trained on. The number of micro-batches is saved in every checkpoint; a resumed run uses the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from regard import recipe as recipes
from regard.data.batching import Batch, Lengths
from regard.data.token_dataset import RowIndices
from regard.inference.precision import autocast
from regard.nn.dropout import attach_dropout_seeds
from regard.nn.loss import TrainingLoss, chunk_loss
from regard.nn.positions import grow_tables
from regard.nn.torch_internals import foreach_lerp_
from regard.training.distributed import FlatGradients
from regard.training.optimizers_and_schedules import set_learning_rate


class StepScalars(NamedTuple):
    """The scalars that differ between steps; tensors on the device if a CUDA graph reads them."""

    grad_scale: float | Tensor
    """factor on the summed loss, and so on its gradient: 1 / tokens for a mean over tokens"""
    learning_rate: float | Tensor
    ema_rate: float | Tensor = 1.0
    """1 - decay: how far the moving average moves towards the weights"""


class TrainStep:
    """Updates the weights from a list of micro-batches and returns the mean loss per token.

    ``loss_fn`` is the network with its training loss, possibly wrapped in DistributedDataParallel. If it is not, and
    several processes train together, they have ``gradients``.
    """

    def __init__(
        self,
        loss_fn: nn.Module,
        optimizer: optim.Optimizer,
        training: recipes.TrainingConfig,
        device: torch.device,
        gradients: FlatGradients | None = None,
    ) -> None:
        self.loss_fn, self.optimizer, self.gradients = loss_fn, optimizer, gradients
        self.training, self.device = training, device
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.ema: tuple[list[Tensor], list[Tensor]] | None = None
        """an exponential moving average, and the weights that it averages"""
        self.updating = False
        """whether a step has begun to change the weights; if it fails after that, they belong to no step"""

    def __call__(self, micro_batches: Sequence[Batch], scalars: StepScalars) -> Tensor:
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(micro_batches, 1):
            total += self.accumulate(batch, scalars.grad_scale, number == len(micro_batches))
        if self.gradients is not None:
            self.gradients.average()
        self.update(scalars)
        return total * scalars.grad_scale

    def update(self, scalars: StepScalars) -> None:
        """Clip the gradients, update the weights and their moving average, and set the gradients to zero."""
        set_learning_rate(self.optimizer, scalars.learning_rate)
        if self.training.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.training.clip_norm)
        self.updating = True
        self.optimizer.step()
        self.zero_grad()
        self._update_ema(scalars.ema_rate)
        self.updating = False

    def zero_grad(self) -> None:
        """Set the gradients to zero; free them, unless they are views of a buffer."""
        if self.gradients is not None:
            self.gradients.zero()
        else:
            self.optimizer.zero_grad(set_to_none=True)

    def accumulate(self, batch: Batch, grad_scale: float | Tensor, last: bool) -> Tensor:
        """Add the gradients of a micro-batch to those before it; returns its summed loss."""
        with self._gradient_sync(last):
            loss = self.compute_loss(self.loss_fn, batch.to(self.device))
            torch.autograd.backward(loss * grad_scale)
        return loss.detach()

    def compute_loss(self, loss_fn: nn.Module, batch: Batch) -> Tensor:
        """The loss summed over the tokens of a batch."""
        with autocast(self.training.precision, self.device):
            position_info = () if batch.position_info is None else (batch.position_info,)
            loss: Tensor = loss_fn(batch.source, batch.target, batch.labels, *position_info)
        return loss

    def _gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        """Processes exchange gradients once per step, with the last micro-batch."""
        if isinstance(self.loss_fn, DistributedDataParallel) and not last:
            return self.loss_fn.no_sync()
        if self.gradients is not None and last:
            return self.gradients.overlap()
        return nullcontext()

    @torch.no_grad()
    def _update_ema(self, rate: float | Tensor) -> None:
        if self.ema is None:
            return
        means, weights = self.ema
        foreach_lerp_(means, weights, rate)


EAGER_STEPS = 3
"""Steps before the capture: compilation, allocation and kernel selection happen at first use and cannot be captured."""


class CUDAGraphStep:
    """The same step on a GPU, with compiled layers, captured as one CUDA graph that later steps replay.

    A small network spends most of a step waiting for Python to launch the next kernel; a graph launches them all at
    once. It needs batches of constant shape: packed rows.
    """

    def __init__(self, train_step: TrainStep, network: nn.Module) -> None:
        self.train_step, self.network = train_step, network
        self.dropout_seeds = attach_dropout_seeds(stacked_layers(network), train_step.device)
        self.steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batches: list[Batch] = []
        """the inputs of the graph: each step copies its batches here"""
        self.position_tables: list[Tensor] = []
        """the tables that the graph reads; kept alive because a validation may replace them with longer ones"""
        self.scalars = [torch.zeros((), device=train_step.device) for _ in StepScalars._fields]

    def __call__(self, batches: Sequence[Batch], scalars: StepScalars) -> Tensor:
        for tensor, value in zip(self.scalars, scalars, strict=True):
            tensor.fill_(value)
        if self.graph is None:
            if not batches:  # one of several processes, for which the batch has no rows
                return self._run_in_side_stream(batches)
            # The tables must be long enough before a layer is compiled or captured.
            longest = max(side.shape[1] for one in batches for side in (one.source, one.target))
            self.position_tables = grow_tables(self.network, longest, self.train_step.device)
            self.steps += 1
            if self.steps <= EAGER_STEPS:
                return self._run_in_side_stream(batches)
            self._capture(batches)
        return self._replay(batches)

    def _run_in_side_stream(self, batches: Sequence[Batch]) -> Tensor:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = self._run(batches)
        torch.cuda.current_stream().wait_stream(stream)
        return loss

    def _capture(self, batches: Sequence[Batch]) -> None:
        self.batches = [batch.to(self.train_step.device) for batch in batches]
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: the prefetch thread may allocate GPU memory for the next batches meanwhile.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.loss = self._run(self.batches)

    def _replay(self, batches: Sequence[Batch]) -> Tensor:
        assert self.graph is not None
        for own, batch in zip(self.batches, batches, strict=True):
            own.fill(batch)
        self.graph.replay()
        return self.loss.clone()

    def _run(self, batches: Sequence[Batch]) -> Tensor:
        self.dropout_seeds.random_()
        with compiled(self.network, self.train_step.loss_fn):
            return self.train_step(batches, StepScalars(*self.scalars))


class DistributedCUDAGraphStep(CUDAGraphStep):
    """The same in several processes: one graph adds the gradients of a packed row, another one updates the weights.

    The processes average their gradients outside of the graphs, but while the first one runs: it records an event when
    the gradients of a bucket are complete, and the all-reduce of the bucket waits for this event only.

    A process replays the first graph once for each of its packed rows: usually one, two if its share of a batch is
    larger than usual, none if nothing is left for it. No graph contains communication, so processes need not capture
    at the same step.
    """

    def _capture(self, batches: Sequence[Batch]) -> None:
        device, gradients = self.train_step.device, self.train_step.gradients
        assert gradients is not None
        self.batches = [batches[0].to(device)]
        self.loss = torch.zeros((), device=device)
        self.graph, self.update = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.ready = [
            torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
            for _ in gradients.buckets
        ]
        scalars = StepScalars(*self.scalars)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.dropout_seeds.random_()
            with (
                compiled(self.network, self.train_step.loss_fn),
                gradients.watch(lambda bucket: self.ready[bucket].record()),
            ):
                self.loss += self.train_step.accumulate(
                    self.batches[0], scalars.grad_scale, last=False
                )
        with torch.cuda.graph(self.update, capture_error_mode="thread_local"):
            self.train_step.update(scalars)

    def _replay(self, batches: Sequence[Batch]) -> Tensor:
        gradients = self.train_step.gradients
        assert self.graph is not None
        assert gradients is not None
        self.loss.zero_()
        for batch in batches:
            self.batches[0].fill(batch)
            self.graph.replay()
        gradients.average(self.ready if batches and gradients.overlaps else ())
        self.update.replay()
        return self.loss * self.scalars[0]


def stacked_layers(network: Any) -> list[nn.Module]:
    """The encoder and decoder layers of a network."""
    return [*network.encoder.layers, *network.decoder.layers]


@contextmanager
def compiled(network: Any, loss_fn: nn.Module) -> Iterator[None]:
    """Compile layers and loss for the duration of the with-block; layers of one class share one compilation."""
    assert isinstance(loss_fn, TrainingLoss)
    layers = stacked_layers(network)
    for layer in layers:
        layer.forward = MethodType(_compiled(type(layer).forward), layer)
    loss_fn.chunk_loss = _compiled(chunk_loss)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
        loss_fn.chunk_loss = chunk_loss


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True)


# ---------------------------------------------------------------------------------------------
# Micro-batches


OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")
"""Parts of the messages of torch's errors when memory runs out; on a CPU they have no class of their own."""
SAFETY = 1.5
"""A step needs about this many times the memory of the activations that are saved for the backward pass."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the memory of the machine or of the GPU is exhausted."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


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


def fits_in_memory(train_step: TrainStep, batch: Batch) -> bool:
    """Try the forward and backward pass of a batch, with room for the state of the optimizer.

    The gradients are discarded, and the weights do not change.
    """
    try:
        optimizer_state = [torch.empty_like(p) for p in train_step.parameters for _ in range(2)]
        train_step.accumulate(batch, 0.0, last=False)
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


def estimate_micro_batches(train_step: TrainStep, few: Batch, largest: Batch, texts: int) -> int:
    """The number of micro-batches that the ``largest`` batch, of this many texts, needs on a CPU: a power of two.

    A few rows go through the network, and the memory of their activations is extrapolated to all rows: the first rows
    of a padded batch, or a smaller packed batch (``few``). A batch that is too large cannot be tried: Linux would kill
    the process, or another one.
    """
    some = max(1, len(few.source) // 16)
    few = few.map(lambda tensor: tensor[:some])
    with count_saved_bytes() as saved:
        train_step.accumulate(few, 0.0, last=False)
    release_memory(train_step)
    positions = [one.source.numel() + one.target.numel() for one in (largest, few)]
    needed, available = (
        SAFETY * sum(saved.values()) * positions[0] / positions[1],
        available_memory(),
    )
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
