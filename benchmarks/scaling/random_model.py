"""Training steps of a Transformer with random weights on random tokens, for its memory and time."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.data.batching import Batch
from regard.nn.architectures import ARCHITECTURES
from regard.nn.loss import Seq2SeqLoss
from regard.recipe import Recipe
from regard.training.optimizers import OPTIMIZERS
from regard.training.sharding import local_part
from regard.training.train_step import StepScalars, TrainStep

VOCABULARY = 32_000


class RandomModel(NamedTuple):
    """A model that can be trained."""

    loss_fn: Seq2SeqLoss
    optimizer: torch.optim.Optimizer
    step: TrainStep

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        device: torch.device,
        change: Callable[[Seq2SeqLoss], object],
        vocab_size: int = VOCABULARY,
    ) -> "RandomModel":
        """``change`` is applied before there are weights, so a process need never hold all of them."""
        with torch.device("meta"):
            network = ARCHITECTURES["transformer"](recipe.model, vocab_size, vocab_size)
        loss_fn = Seq2SeqLoss(network, recipe.training)
        change(loss_fn)
        loss_fn.to_empty(device=device)
        for parameter in loss_fn.parameters():
            torch.nn.init.normal_(local_part(parameter.detach()), std=0.02)
        optimizer = OPTIMIZERS[recipe.training.optimizer](loss_fn, recipe.training)
        return cls(loss_fn, optimizer, TrainStep(loss_fn, optimizer, recipe.training, device))

    def train(self, ids: Tensor, scalars: StepScalars) -> Tensor:
        """One step on a batch whose sources and targets are these ids; its loss."""
        return self.step([Batch(ids, ids, ids)], scalars)
