"""One optimizer step: loss, gradient accumulation, gradient clipping, optimizer, moving average of the weights (EMA).

``TrainStep`` runs it eagerly. ``CUDAGraphStep`` captures it as one CUDA graph, for batches of constant shape;
``DistributedCUDAGraphStep`` captures it as two, around the exchange of gradients between processes.

A batch that does not fit into memory is split into micro-batches, and their gradients are summed. The batch stays the
same: its rows, the tokens its loss is averaged over, and its place in the epoch. Only the order of summation and the
random draws of dropout change, so the weights differ from those of the unsplit batch by rounding and by dropout, not in
what they are trained on. The number of micro-batches is saved in every checkpoint; a resumed run uses the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from regard import recipe as recipes
from regard.data.batching import Batch
from regard.inference.precision import autocast
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
        """whether a step has begun to change the weights; if it fails after that, they are inconsistent"""

    def __call__(self, micro_batches: Sequence[Batch], scalars: StepScalars) -> Tensor:
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(micro_batches, 1):
            total += self.accumulate(batch, scalars.grad_scale, number == len(micro_batches))
        if self.gradients is not None:
            self.gradients.average()
        self.update(scalars)
        return total * scalars.grad_scale

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
