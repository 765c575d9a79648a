"""Weight quantization (GPTQ, YAQA): weights rounded to integers of few bits, with little effect on the outputs.

The network reads texts, the *calibration* texts, and what is observed there decides two things:

- Every matrix has its own step, the distance between two values that it can have. A matrix gets a smaller step if its
  errors have a larger effect, which is measured by derivatives.
- The weights of a linear map are rounded one after another, and each one corrects the errors of those before it, as far
  as the inputs of the map are correlated (GPTQ, Frantar and others 2022) and as far as its outputs have the same effect
  (YAQA, Tseng and others 2025).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from regard.data.special_tokens import PAD
from regard.interop.verification import SampleBatch
from regard.nn.multi_head_attention import record_attention
from regard.nn.transformer import Transformer

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int32]

BATCH_SIZE = 16
GRADIENT_BATCHES = 16
"""batches for the derivatives; the others are only for the inputs of the linear maps"""
LOG_PROBABILITY_WEIGHT = 2.0
"""weight of the errors of log-probabilities, relative to those of attention weights"""
DAMPING = 0.1
"""added to the moments, relative to their mean: what is rare in the calibration texts also counts"""
MIN_LEVELS = 16
"""values of a matrix, even if its errors have no effect"""
ROWS = 32
"""rows that are rounded together, and do not correct each other"""


class Moments(NamedTuple):
    """The damped second moments of one linear map in the calibration texts."""

    inputs: Doubles
    """[input, input]"""
    effects: Doubles
    """[output, output], of the derivatives with respect to the outputs"""

    @property
    def gain(self) -> float:
        """The squared effect of the errors with feedback, relative to that without."""
        return float(
            np.prod(
                [(_factor(moments)[1].diagonal() ** 2).sum() / moments.trace() for moments in self]
            )
        )


@dataclass(frozen=True)
class RoundingCalibration:
    """What was observed in the calibration texts."""

    sensitivity: dict[str, float]
    """of each matrix: the squared effect of an error of a weight, averaged over its weights"""
    moments: dict[str, Moments]
    """of each matrix that is a linear map"""

    def relative_steps(self) -> dict[str, float]:
        """Steps of all matrices in the best proportion to each other: errors of equal effect per weight."""
        steps = {}
        for name, effect in self.sensitivity.items():
            if name in self.moments:
                effect *= self.moments[name].gain
            steps[name] = 1 / math.sqrt(effect) if effect > 0 else math.inf
        return steps

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


def round_with_feedback(matrix: Floats, step: float, moments: Moments) -> Integers:
    """Round so that the effect of all errors is small, not each error.

    With E the errors, ``inputs = L L^T`` and ``effects = M M^T``, the squared effect is the norm of ``M^T E L``. Both
    factors are lower triangular, so rows and columns are rounded from the last to the first: an element of the product
    depends on the error of its own weight and on those that are already known.
    """
    columns, input_factor = _factor(moments.inputs)
    rows, output_factor = _factor(moments.effects)
    exact = matrix[np.ix_(rows, columns)].astype(np.float64)
    integers, errors = np.empty_like(exact), np.zeros_like(exact)
    for end in range(len(rows), 0, -ROWS):
        block = slice(max(0, end - ROWS), end)
        feedback = output_factor[end:, block].T @ errors[end:]
        corrected = exact[block] + np.linalg.solve(output_factor[block, block].T, feedback)
        integers[block] = _round_columns(corrected, step, input_factor)
        errors[block] = exact[block] - integers[block] * step
    result = np.empty(exact.shape, np.int32)
    result[np.ix_(rows, columns)] = integers
    return result


def _factor(moments: Doubles) -> tuple[npt.NDArray[np.intp], Doubles]:
    """An order, and the Cholesky factor in this order. What matters most comes last, to be rounded first."""
    order = np.argsort(moments.diagonal(), kind="stable")
    factor = np.linalg.cholesky(moments[np.ix_(order, order)]).astype(np.float64)
    return order, factor


def _round_columns(exact: Doubles, step: float, factor: Doubles) -> Doubles:
    """Rows that are rounded from the last column to the first, each column with the errors of those after it."""
    correction = factor / factor.diagonal()
    corrected, integers = exact.copy(), np.empty_like(exact)
    for column in reversed(range(len(factor))):
        integers[:, column] = np.rint(corrected[:, column] / step)
        error = exact[:, column] - integers[:, column] * step
        corrected[:, :column] += np.outer(error, correction[column, :column])
    return integers


# ---------------------------------------------------------------------------------------------
# Calibration


def calibrate_rounding(network: Transformer, texts: SampleBatch) -> RoundingCalibration:
    """Run the network on texts, and observe its linear maps and the effect of each matrix."""
    network.eval()
    matrices = {
        name: parameter for name, parameter in network.named_parameters() if parameter.ndim == 2
    }
    squares = dict.fromkeys(matrices, 0.0)
    effects: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    batches = _batches(texts)
    stride = math.ceil(len(batches) / GRADIENT_BATCHES)
    with _observe_linear_maps(network) as observed:
        for number, (source, target) in enumerate(batches):
            observed.outputs.clear()
            if number % stride:
                with torch.no_grad():
                    network(source, target)
                continue
            with torch.enable_grad():
                probe = _random_projection(network, source, target, generator)
                tensors = {**matrices, **observed.outputs}
                derivatives = torch.autograd.grad(probe, list(tensors.values()), allow_unused=True)
            gradients = dict(zip(tensors, derivatives, strict=True))
            for name in matrices:
                if (gradient := gradients[name]) is not None:
                    squares[name] += float(gradient.double().square().mean())
            for name in observed.outputs:
                if (gradient := gradients[name]) is not None:
                    effects[name] = _add_moments(effects.get(name), gradient)
    moments = {
        f"{name}.weight": Moments(_damped(inputs), _damped(effects[name]))
        for name, inputs in observed.inputs.items()
        if name in effects
    }
    return RoundingCalibration(squares, moments)


def _random_projection(
    network: Transformer, source: Tensor, target: Tensor, generator: torch.Generator
) -> Tensor:
    """The sum of all attention weights and log-probabilities with random factors.

    The expected square of its derivative is the sum of the squared derivatives of all of them.
    """
    sites = network.attentions()
    with record_attention(layer for layers in sites.values() for layer in layers) as recorded:
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


@dataclass
class _LinearMaps:
    """The linear maps of a network, by the name of their module."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    """the sum of x x^T over all inputs x"""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """of the last batch"""


@contextmanager
def _observe_linear_maps(network: nn.Module) -> Iterator[_LinearMaps]:
    observed = _LinearMaps()
    names: dict[nn.Module, str] = {
        module: name for name, module in network.named_modules() if isinstance(module, nn.Linear)
    }

    def observe(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        name = names[module]
        observed.inputs[name] = _add_moments(observed.inputs.get(name), inputs[0].detach())
        observed.outputs[name] = output

    hooks = [module.register_forward_hook(observe) for module in names]
    try:
        yield observed
    finally:
        for hook in hooks:
            hook.remove()


def _add_moments(sum_: Tensor | None, vectors: Tensor) -> Tensor:
    rows = vectors.flatten(0, -2)
    return rows.T @ rows if sum_ is None else sum_ + rows.T @ rows


def _damped(moments: Tensor) -> Doubles:
    mean = float(moments.diagonal().mean())
    damping = DAMPING * mean if mean > 0 else 1.0
    return np.asarray(moments.double().numpy() + damping * np.eye(len(moments)))


def _batches(texts: SampleBatch) -> list[tuple[Tensor, Tensor]]:
    """Source and target of each batch: texts of similar length, without the padding that all of them have."""
    lengths = texts.source_mask.sum(1) + texts.target_mask.sum(1)
    return [
        (_trimmed(texts.source[rows]), _trimmed(texts.target[rows]))
        for rows in torch.split(torch.argsort(lengths, stable=True), BATCH_SIZE)
    ]


def _trimmed(ids: Tensor) -> Tensor:
    return ids[:, : int((ids != PAD).sum(1).max())]
