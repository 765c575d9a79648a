"""Validation and scoring in several processes: each computes a share, and the main process gets all results in order.

The main process decides what is computed, because only it knows the time left and the selected weights. The others
wait in ``assist`` and compute their share of whatever it requests, until it calls ``dismiss``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.data.pairs import Pair
from regard.data.token_dataset import RowIndices
from regard.nn.network import copy_weights, named_weights
from regard.recipe import Precision, Recipe

if TYPE_CHECKING:
    from regard.training.trainer import Trainer


class LossRequest(NamedTuple):
    """Compute the summed loss of each batch of the validation data."""

    items: Sequence[RowIndices]
    """the rows of each batch"""

    def compute(self, trainer: Trainer, share: slice) -> list[float]:
        return [trainer.summed_validation_loss(rows) for rows in self.items[share]]


class OutputRequest(NamedTuple):
    """Compute the output for the source of each pair."""

    items: Sequence[Pair]
    quick: bool
    recipe: Recipe
    """its decoding section may have changed since training began"""
    precision: Precision

    def compute(self, trainer: Trainer, share: slice) -> list[str]:
        model, pairs = trainer.model, self.items[share]
        model.recipe = self.recipe
        model.set_precision(self.precision)
        return model.predict_pairs(pairs, quick=self.quick) if pairs else []


class DistributedEvaluation:
    """Losses and outputs of a trainer's network, computed by all processes together."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.group = trainer, trainer.group

    # -----------------------------------------------------------------------------------------
    # The main process; with the weights and in the mode that its network has at the moment

    def losses(self, batches: Sequence[RowIndices]) -> list[float]:
        """The summed loss of each batch of validation rows."""
        return self._share(LossRequest(batches))

    def outputs(self, pairs: Sequence[Pair], *, quick: bool = False) -> list[str]:
        """As ``Model.predict_pairs``: in fp32 an output does not depend on the pairs beside it."""
        model = self.trainer.model
        return self._share(OutputRequest(pairs, quick, model.recipe, model.precision))

    def dismiss(self) -> None:
        """Let the other processes return from ``assist``."""
        self.group.broadcast(None)

    def _share(self, request: LossRequest | OutputRequest) -> list[Any]:
        assert self.group.is_main
        return self._compute(self.group.broadcast(request))

    # -----------------------------------------------------------------------------------------
    # The other processes

    def assist(self) -> None:
        """Compute shares for the main process until it dismisses this one; afterwards all is as before."""
        assert not self.group.is_main
        trainer = self.trainer
        network, model = trainer.network, trainer.model
        weights = {name: weight.clone() for name, weight in named_weights(network).items()}
        recipe, precision = model.recipe, model.precision
        trainer.distributed_loss_fn.eval()
        while True:
            request: LossRequest | OutputRequest | None = None
            request = self.group.broadcast(request)
            if request is None:
                break
            self._compute(request)
        trainer.distributed_loss_fn.train()
        copy_weights(network, weights, "the weights")
        model.recipe = recipe
        model.set_precision(precision)

    # -----------------------------------------------------------------------------------------
    # All processes

    def _compute(self, request: LossRequest | OutputRequest) -> list[Any]:
        """The results for all items, in their order."""
        rank, size = self.group.rank, self.group.size
        self.group.broadcast_tensors(named_weights(self.trainer.network).values())
        shares: list[list[Any]] = self.group.gather(
            request.compute(self.trainer, slice(rank, None, size))
        )
        return [shares[number % size][number // size] for number in range(len(request.items))]
