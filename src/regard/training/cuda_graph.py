"""The training step captured as a CUDA graph, for packed batches on a GPU, whose shape is constant.

``CUDAGraphStep`` captures a whole step; ``DistributedCUDAGraphStep`` captures it as two graphs, around the exchange of
gradients between processes. The layers and the loss are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from regard.data.batching import Batch
from regard.nn.dropout import attach_dropout_seeds
from regard.nn.loss import TrainingLoss, chunk_loss
from regard.nn.positions import grow_tables
from regard.training.train_step import StepScalars, TrainStep

EAGER_STEPS = 3
"""Steps before the capture: compilation, allocation and kernel selection happen at first use and cannot be captured."""


class CUDAGraphStep:
    """``TrainStep`` on a GPU, with compiled layers, captured as one CUDA graph that later steps replay.

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
