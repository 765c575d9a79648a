"""One update of the weights: loss, gradient, clipping, optimizer, moving average."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from regard import recipe as recipes
from regard.data.batching import Batch
from regard.inference.precision import autocast
from regard.nn.dropout import seeded
from regard.nn.loss import TrainingLoss, portion_loss
from regard.nn.positions import reach
from regard.training.optimizers import set_rate


class Numbers(NamedTuple):
    """What differs from step to step; tensors where a recorded update is to see them."""

    share: float | Tensor
    """what a token counts in the gradient"""
    rate: float | Tensor
    drift: float | Tensor = 1.0
    """how far the moving average goes towards the weights"""


class TrainStep:
    """Batches in, the weights a step further; the loss of a token out."""

    def __init__(
        self,
        objective: nn.Module,
        optimizer: optim.Optimizer,
        training: recipes.Training,
        device: torch.device,
    ) -> None:
        self.objective, self.optimizer = objective, optimizer
        self.training, self.device = training, device
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.moving: tuple[list[Tensor], list[Tensor]] | None = None
        """a moving average, and the weights it follows"""

    def __call__(self, batches: Sequence[Batch], numbers: Numbers) -> Tensor:
        set_rate(self.optimizer, numbers.rate)
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches, 1):
            with self._in_step_with_others(number == len(batches)):
                loss = self.loss(self.objective, batch.to(self.device))
                torch.autograd.backward(loss * numbers.share)
            total += loss.detach()
        if self.training.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.training.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._move(numbers.drift)
        return total * numbers.share

    def loss(self, objective: nn.Module, batch: Batch) -> Tensor:
        """Summed over the tokens of the batch."""
        with autocast(self.training.precision, self.device):
            places = () if batch.position_info is None else (batch.position_info,)
            loss: Tensor = objective(batch.source, batch.target, batch.labels, *places)
        return loss

    def _in_step_with_others(self, last: bool) -> AbstractContextManager[None]:
        """Gradients are shared among processes once a step, with its last batch."""
        if isinstance(self.objective, DistributedDataParallel) and not last:
            return self.objective.no_sync()
        return nullcontext()

    @torch.no_grad()
    def _move(self, drift: float | Tensor) -> None:
        if self.moving is None:
            return
        means, weights = self.moving
        way = torch._foreach_sub(weights, means)
        torch._foreach_mul_(way, drift)
        torch._foreach_add_(means, way)


EAGER_STEPS = 3
"""before the record: what is compiled, allocated or chosen at the first use must be there"""


class CUDAGraphStep:
    """The same update on a GPU: layers compiled, then all of it recorded as one CUDA graph and played from then on.

    A small network spends most of a step waiting for Python to start the next kernel; a graph starts them all. It
    needs batches of one and the same shape: packed rows.
    """

    def __init__(self, update: TrainStep, network: nn.Module) -> None:
        self.update, self.network = update, network
        self.seeds = seeded(layers_of(network), update.device)
        self.steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batches: list[Batch] = []
        self.tables: list[Tensor] = []
        """over positions; the record reads these, whatever longer ones a validation makes"""
        self.places = [torch.zeros((), device=update.device) for _ in Numbers._fields]

    def __call__(self, batches: Sequence[Batch], numbers: Numbers) -> Tensor:
        for place, number in zip(self.places, numbers, strict=True):
            place.fill_(number)
        self.steps += 1
        if self.graph is None:  # before a layer is compiled, or recorded
            longest = max(side.shape[1] for one in batches for side in (one.source, one.target))
            self.tables = reach(self.network, longest, self.update.device)
        if self.steps <= EAGER_STEPS:
            return self._in_a_side_stream(batches)
        if self.graph is None:
            self._record(batches)
        assert self.graph is not None
        for own, batch in zip(self.batches, batches, strict=True):
            own.fill(batch)
        self.graph.replay()
        return self.loss.clone()

    def _in_a_side_stream(self, batches: Sequence[Batch]) -> Tensor:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = self._learn(batches)
        torch.cuda.current_stream().wait_stream(stream)
        return loss

    def _record(self, batches: Sequence[Batch]) -> None:
        self.batches = [batch.to(self.update.device) for batch in batches]
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # What another thread asks of the GPU meanwhile, memory for the next batches, is none of the record.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.loss = self._learn(self.batches)

    def _learn(self, batches: Sequence[Batch]) -> Tensor:
        self.seeds.random_()
        with compiled(self.network, self.update.objective):
            return self.update(batches, Numbers(*self.places))


def layers_of(network: Any) -> list[nn.Module]:
    return [*network.encoder.layers, *network.decoder.layers]


@contextmanager
def compiled(network: Any, objective: nn.Module) -> Iterator[None]:
    """Layers and loss compiled for the time of the with-block; layers of one kind share one compilation."""
    assert isinstance(objective, TrainingLoss)
    layers = layers_of(network)
    for layer in layers:
        layer.forward = MethodType(_compiled(type(layer).forward), layer)
    objective.of_portion = _compiled(portion_loss)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
        objective.of_portion = portion_loss


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True)
