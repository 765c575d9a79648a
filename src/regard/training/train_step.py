"""One optimizer step: loss, gradient accumulation, gradient clipping, optimizer, moving average of the weights (EMA).

``TrainStep`` runs it eagerly. ``ThreadedTrainStep`` computes several micro-batches at the same time, each on a CPU core
of its own. ``CUDAGraphStep`` captures it as one CUDA graph, for batches of constant shape;
``DistributedCUDAGraphStep`` captures it as two, around the exchange of gradients between processes.

Micro-batches are the parts of a batch that does not fit into memory (``out_of_memory.py``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from regard import recipe as recipes
from regard.data.batching import Batch
from regard.inference.precision import autocast
from regard.nn.dropout import thread_random
from regard.nn.torch_internals import foreach_lerp_
from regard.training.distributed import FlatGradients
from regard.training.optimizers import set_learning_rate


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
        """whether a step has begun to change the weights; if it fails after that, they are inconsistent"""

    def __call__(self, micro_batches: Sequence[Batch], scalars: StepScalars) -> Tensor:
        total = self.compute_gradients(micro_batches, scalars.grad_scale)
        if self.gradients is not None:
            self.gradients.average()
        self.update(scalars)
        return total * scalars.grad_scale

    def compute_gradients(
        self, micro_batches: Sequence[Batch], grad_scale: float | Tensor, sync: bool = True
    ) -> Tensor:
        """The gradients of all micro-batches, summed; returns their summed loss.

        sync: whether processes exchange them.
        """
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(micro_batches, 1):
            last = sync and number == len(micro_batches)
            total += self.accumulate(batch, grad_scale, last)
        return total

    def update(self, scalars: StepScalars) -> None:
        """Gradient clipping, the update of the weights and their moving average; the gradients become zero."""
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
        """Gradient accumulation: add the gradients of a micro-batch to those before it; returns its summed loss."""
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


# ---------------------------------------------------------------------------------------------
# Data parallelism in the threads of one process

MAX_WORKERS = 4
"""Threads that compute micro-batches: Python's lock limits how many small operators run at the same time.

On 16 Intel cores, in tokens/s of tiny and base: 44,406 and 7,737 with 4 threads, 33,913 and 7,584 with 8, 16,363 and
6,746 with 16."""
MIN_ROW_TOKENS = 256
"""Smaller packed rows take longer in total than they gain by running at the same time."""


def parallel_rows() -> int:
    """How many packed rows ``ThreadedTrainStep`` computes at the same time on this CPU."""
    # OMP_PROC_BIND binds this thread to a core, and threads that it starts stay there.
    bound = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == 1
    threads = 1 if bound else torch.get_num_threads()
    if threads <= MAX_WORKERS:
        return threads
    # As many as divide the threads with the smallest remainder: 3 x 2 for 6.
    return max(MAX_WORKERS, MAX_WORKERS - 1, key=lambda workers: workers * (threads // workers))


class ThreadedTrainStep(TrainStep):
    """Computes several micro-batches at the same time, each in its own thread with its share of the cores.

    On a CPU, the operators of a small model are too short to be divided among cores. Two packed rows on two cores take
    half the time of one row after the other. The gradients are summed in a fixed order, and the random numbers of a
    micro-batch depend only on the step and its position, so the same number of threads gives the same weights.
    """

    def __init__(
        self,
        loss_fn: nn.Module,
        optimizer: optim.Optimizer,
        training: recipes.TrainingConfig,
        device: torch.device,
    ) -> None:
        super().__init__(loss_fn, optimizer, training, device)
        self.workers = parallel_rows()
        self.threads_of_worker = max(1, torch.get_num_threads() // self.workers)
        self.pool = ThreadPoolExecutor(self.workers, thread_name_prefix="micro-batch")

    def compute_gradients(
        self, micro_batches: Sequence[Batch], grad_scale: float | Tensor, sync: bool = True
    ) -> Tensor:
        """The gradients of all micro-batches, summed; returns their summed loss."""
        workers = min(self.workers, len(micro_batches))
        if workers < 2:
            return super().compute_gradients(micro_batches, grad_scale, sync)
        seeds = torch.randint(2**62, (len(micro_batches),)).tolist()
        seeded = [*zip(micro_batches, seeds, strict=True)]
        shares: list[Future[tuple[Tensor, Gradients]]] = []
        try:
            with num_threads(self.threads_of_worker):
                for first in range(workers):
                    shares.append(
                        self.pool.submit(self._gradients, seeded[first::workers], grad_scale)
                    )
                wait(shares)
            total, sums = shares[0].result()
            for share in shares[1:]:
                loss, gradients = share.result()
                total = total + loss
                add_gradients(sums, gradients)
        finally:
            wait(shares)  # after Ctrl-C: no thread may compute on
            shares.clear()  # an error that is raised must not keep the gradients of other threads
        for parameter, gradient in zip(self.parameters, sums, strict=True):
            parameter.grad = gradient
        return total

    def _gradients(
        self, seeded: Sequence[tuple[Batch, int]], grad_scale: float | Tensor
    ) -> tuple[Tensor, Gradients]:
        """The summed loss of some micro-batches with their seeds, and the gradient of each parameter."""
        if torch.get_num_threads() != self.threads_of_worker:  # a new thread
            torch.set_num_threads(self.threads_of_worker)
        total, sums = torch.zeros(()), Gradients()
        for batch, seed in seeded:
            thread_random.generator = torch.Generator().manual_seed(seed)
            loss = self.compute_loss(self.loss_fn, batch)
            gradients = torch.autograd.grad(loss * grad_scale, self.parameters, allow_unused=True)
            total += loss.detach()
            add_gradients(sums, list(gradients))
        return total, sums


Gradients = list[Tensor | None]
"""The gradient of each parameter; None if the parameter has no effect on the loss."""


def add_gradients(sums: Gradients, gradients: Gradients) -> None:
    """Add the gradients to the sums, which may be empty at first. Each gradient is freed when it has been added."""
    sums += [None] * (len(gradients) - len(sums))
    for index, total in enumerate(sums):
        gradient, gradients[index] = gradients[index], None
        if total is None:
            sums[index] = None if gradient is None else gradient.contiguous()
        elif gradient is not None:
            sums[index] = total + gradient


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Let torch use this many threads for an operator in the with-block, in this thread and in new ones."""
    usual = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
