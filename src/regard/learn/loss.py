"""What is made small: cross-entropy with smoothed labels (section 5.4 of the paper).

The logits of a batch are by far its largest tensor: 8,192 tokens times 32,000 entries are a gigabyte, and torch would
keep several copies. So projection and loss are one function here that goes through the tokens in portions and computes
the gradient on the way: the logits never exist all at once.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard import recipe
from regard.marks import PAD
from regard.nn.network import Network

SMOOTHINGS: dict[recipe.Smoothing, Callable[[float, int], float]] = {
    # Over all K classes, the right one too: it keeps 1 - eps + eps/K. This is torch's convention.
    "all": lambda epsilon, classes: epsilon,
    # Over the K - 1 others: the right one keeps 1 - eps. The same family with eps' = eps K / (K - 1).
    "others": lambda epsilon, classes: epsilon * classes / (classes - 1),
}

LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**27}
"""numbers, on each kind of device; small enough for the processor's cache, large enough to fill a GPU"""


class Objective(nn.Module):
    """A network with what is wanted of it: source, target and wanted tokens in, the summed loss out."""

    def __init__(self, network: Network, training: recipe.Training) -> None:
        super().__init__()
        self.network = network
        self.smoothing = training.label_smoothing
        self.over: recipe.Smoothing = training.smoothing_over

    def forward(
        self, source: Int[Tensor, "B S"], target: Int[Tensor, "B T"], wanted: Int[Tensor, "B T"]
    ) -> Float[Tensor, ""]:
        states = self.network.decode(target, self.network.encode(source))
        smoothing = self.smoothing if self.training else 0.0
        weight, bias = self.network.projection.weight, self.network.projection.bias
        return cross_entropy(states, weight, wanted, smoothing, self.over, bias)


OBJECTIVES: dict[recipe.Task, Callable[[Any, recipe.Training], nn.Module]] = {
    "translate": Objective,
}


def cross_entropy(
    states: Float[Tensor, "B T d"],
    projection: Float[Tensor, "V d"],
    wanted: Int[Tensor, "B T"],
    smoothing: float = 0.0,
    over: recipe.Smoothing = "all",
    bias: Float[Tensor, " V"] | None = None,
) -> Float[Tensor, ""]:
    """The sum over all real tokens; divide by their number for the mean. Padding counts nothing."""
    epsilon = SMOOTHINGS[over](smoothing, len(projection))
    loss: Tensor = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        states.flatten(0, 1), projection, bias, wanted.flatten(), epsilon, torch.is_grad_enabled()
    )
    return loss


class _ProjectedCrossEntropy(torch.autograd.Function):
    """Loss and gradient of softmax(states projection^T + bias), portion by portion."""

    @staticmethod
    def forward(
        context: Any,
        states: Float[Tensor, "N d"],
        projection: Float[Tensor, "V d"],
        bias: Float[Tensor, " V"] | None,
        wanted: Int[Tensor, "N"],
        epsilon: float,
        learning: bool,
    ) -> Float[Tensor, ""]:
        kind = _number_format(states)
        rows, weight = states.to(kind), projection.to(kind)
        loss = torch.zeros((), dtype=_sum_format(states), device=states.device)
        state_gradient = torch.empty_like(states if learning else states[:0])
        weight_gradient = torch.zeros_like(projection if learning else projection[:0])
        bias_gradient = None if bias is None else torch.zeros_like(bias)
        for part in _portions(len(states), len(projection), states.device):
            logits = (rows[part] @ weight.T).to(_sum_format(states))
            if bias is not None:
                logits += bias
            total, gradient = _smoothed(logits, wanted[part], epsilon, learning)
            loss += total
            if learning:
                if bias_gradient is not None:
                    bias_gradient += gradient.sum(0)
                gradient = gradient.to(kind)
                state_gradient[part] = (gradient @ weight).to(states.dtype)
                weight_gradient += (gradient.T @ rows[part]).to(projection.dtype)
        context.save_for_backward(state_gradient, weight_gradient, bias_gradient)
        return loss

    @staticmethod
    def backward(context: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        of_states, of_weight, of_bias = context.saved_tensors
        of_bias = None if of_bias is None else of_bias * above[0]
        return of_states * above[0], of_weight * above[0], of_bias, None, None, None


def _smoothed(
    logits: Float[Tensor, "n V"], wanted: Int[Tensor, "n"], epsilon: float, learning: bool
) -> tuple[Float[Tensor, ""], Float[Tensor, "n V"]]:
    """The loss of a portion, and its gradient: softmax minus the smoothed target, nothing at padding."""
    classes = logits.shape[1]
    real = (wanted != PAD).to(logits.dtype)
    index = wanted[:, None]
    log_probabilities = logits.log_softmax(-1)
    right = log_probabilities.gather(1, index)[:, 0]
    spread = log_probabilities.mean(-1) if epsilon else right
    loss = -(((1 - epsilon) * right + epsilon * spread) * real).sum()
    if not learning:
        return loss, logits
    gradient = log_probabilities.exp_()
    gradient -= epsilon / classes
    gradient.scatter_add_(1, index, gradient.new_full(index.shape, epsilon - 1))
    return loss, gradient.mul_(real[:, None])


def _portions(rows: int, classes: int, device: torch.device) -> Iterator[slice]:
    step = max(1, LOGITS_AT_ONCE[device.type] // classes)
    return (slice(start, start + step) for start in range(0, rows, step))


def _number_format(states: Tensor) -> torch.dtype:
    """The format of matrix products: what autocast says, for a function that autocast cannot see into."""
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


def _sum_format(states: Tensor) -> torch.dtype:
    return torch.float64 if states.dtype == torch.float64 else torch.float32
