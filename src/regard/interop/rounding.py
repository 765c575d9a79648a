"""Rounding the weights of a Transformer to integers, so that few bits change little of what it computes.

The network reads texts, the *calibration* texts, and what is observed there decides two things:

- Every matrix has its own step, the distance between two values that it can have. A matrix gets a smaller step if its
  errors have a larger effect, which is measured by derivatives.
- The columns of a matrix are rounded one after another, and each one corrects the errors of those before it, as far as
  the inputs of the linear map are correlated (GPTQ: Frantar and others, 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from regard.data.special_tokens import PAD
from regard.interop.verification import SampleBatch
from regard.nn.multi_head_attention import record_attention
from regard.nn.transformer import Transformer

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int32]

BATCH_SIZE = 16
GRADIENT_BATCHES = 8
"""batches for the derivatives; the others are only for the moments of the inputs"""
LOG_PROBABILITY_WEIGHT = 0.5
"""an error of a log-probability counts as an error of an attention weight that is this much as large"""
DAMPING = 0.1
"""added to the moments, relative to their mean: inputs that are rare in the calibration texts also count"""
MIN_LEVELS = 16
"""values of a matrix, even if its errors have no effect"""


@dataclass(frozen=True)
class Calibration:
    """What was observed in the calibration texts."""

    sensitivity: dict[str, float]
    """of each matrix: the squared effect of an error of a weight, averaged over its weights"""
    moments: dict[str, npt.NDArray[np.float64]]
    """of each linear map: the damped second moments of its inputs, [input, input]"""

    def relative_steps(self) -> dict[str, float]:
        """Steps of all matrices in the best proportion to each other: errors of equal effect per weight."""
        found = {}
        for name, effect in self.sensitivity.items():
            if name in self.moments:
                effect *= _feedback_gain(self.moments[name])
            found[name] = 1 / math.sqrt(effect) if effect > 0 else math.inf
        return found

    def round(self, name: str, matrix: Floats, step: float) -> Integers:
        """The integers whose products with the step replace the matrix."""
        if name not in self.moments:
            rounded: Integers = np.rint(matrix / step).astype(np.int32)
            return rounded
        return round_with_feedback(matrix, step, self.moments[name])


def limit_step(matrix: Floats, step: float) -> float:
    """The step, or a smaller one with which the matrix has at least ``MIN_LEVELS`` values."""
    largest = float(np.abs(matrix).max())
    return min(step, 2 * largest / (MIN_LEVELS - 1)) if largest > 0 else 1.0


def round_with_feedback(matrix: Floats, step: float, moments: npt.NDArray[np.float64]) -> Integers:
    """Round so that the outputs of a linear map, not its weights, have the smallest error.

    With E the error and ``moments = L L^T``, the squared error of the outputs is the norm of ``E L``. L is lower
    triangular, so its columns are made small from the last to the first: each one by the rounding of one column.
    """
    order = np.argsort(moments.diagonal(), kind="stable")  # large inputs last, to be rounded first
    factor = np.linalg.cholesky(moments[np.ix_(order, order)])
    correction = factor / factor.diagonal()
    exact = matrix[:, order].astype(np.float64)
    wanted, integers = exact.copy(), np.empty(exact.shape)
    for column in reversed(range(len(order))):
        integers[:, column] = np.rint(wanted[:, column] / step)
        error = exact[:, column] - integers[:, column] * step
        wanted[:, :column] += np.outer(error, correction[column, :column])
    result = np.empty(exact.shape, np.int32)
    result[:, order] = integers
    return result


def _feedback_gain(moments: npt.NDArray[np.float64]) -> float:
    """The squared error of the outputs with feedback, relative to that without."""
    conditional = np.linalg.cholesky(moments).diagonal() ** 2
    return float(conditional.mean() / moments.diagonal().mean())


# ---------------------------------------------------------------------------------------------
# Calibration


def calibrate(network: Transformer, texts: SampleBatch) -> Calibration:
    """Run the network on texts, and observe the inputs of its linear maps and the effect of each matrix."""
    network.eval()
    matrices = {name: one for name, one in network.named_parameters() if one.ndim == 2}
    squares = dict.fromkeys(matrices, 0.0)
    generator = torch.Generator().manual_seed(1)
    with _input_moments(network) as moments:
        batches = _batches(texts)
        every = math.ceil(len(batches) / GRADIENT_BATCHES)
        for number, (source, target) in enumerate(batches):
            if number % every:
                with torch.no_grad():
                    network(source, target)
                continue
            with torch.enable_grad():
                probe = _random_projection(network, source, target, generator)
                gradients = torch.autograd.grad(probe, list(matrices.values()), allow_unused=True)
            for name, gradient in zip(matrices, gradients, strict=True):
                if gradient is not None:
                    squares[name] += float(gradient.double().square().mean())
    damped = {name: _damped(one.double().numpy()) for name, one in moments.items()}
    return Calibration(squares, damped)


def _random_projection(
    network: Transformer, source: Tensor, target: Tensor, generator: torch.Generator
) -> Tensor:
    """The sum of all attention weights and log-probabilities with random factors.

    The expected square of its derivative is the sum of the squared derivatives of all of them.
    """
    sites = network.attentions()
    with record_attention(one for layers in sites.values() for one in layers) as recorded:
        logits = network(source, target)

    def projected(values: Tensor) -> Tensor:
        return (values * torch.randn(values.shape, generator=generator)).sum()

    total = torch.zeros(())
    for site, layers in sites.items():
        rows = (source if site == "encoder" else target) != PAD
        for module in layers:
            total = total + projected(recorded[module].weights.transpose(1, 2)[rows])
    log_probabilities = logits.log_softmax(-1)[target != PAD]
    importance = log_probabilities.detach().div(2).exp()  # the square root of the probability
    return total + LOG_PROBABILITY_WEIGHT * projected(log_probabilities * importance)


@contextmanager
def _input_moments(network: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Collect the sum of x x^T over all inputs x of each linear map, by the name of its weight."""
    moments: dict[str, Tensor] = {}

    def observer(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def observe(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach().flatten(0, -2)
            moments[name] = moments.get(name, 0) + x.T @ x

        return observe

    hooks = [
        module.register_forward_pre_hook(observer(f"{name}.weight"))
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        yield moments
    finally:
        for hook in hooks:
            hook.remove()


def _damped(moments: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    mean = moments.diagonal().mean()
    return moments + (DAMPING * mean if mean > 0 else 1.0) * np.eye(len(moments))


def _batches(texts: SampleBatch) -> list[tuple[Tensor, Tensor]]:
    """Source and target of each batch: texts of similar length, without the padding that all of them have."""
    lengths = texts.source_mask.sum(1) + texts.target_mask.sum(1)
    return [
        (_trimmed(texts.source[rows]), _trimmed(texts.target[rows]))
        for rows in torch.split(torch.argsort(lengths, stable=True), BATCH_SIZE)
    ]


def _trimmed(ids: Tensor) -> Tensor:
    return ids[:, : int((ids != PAD).sum(1).max())]
