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
from regard.nn.transformer import Transformer

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

    def __init__(self, network: Transformer, training: recipe.Training) -> None:
        super().__init__()
        self.network = network
        self.smoothing = training.label_smoothing
        self.over: recipe.Smoothing = training.smoothing_over

    def forward(
        self, source: Int[Tensor, "B S"], target: Int[Tensor, "B T"], wanted: Int[Tensor, "B T"]
    ) -> Float[Tensor, ""]:
        states = self.network.decode(target, self.network.encode(source))
        smoothing = self.smoothing if self.training else 0.0
        return cross_entropy(states, self.network.projection.weight, wanted, smoothing, self.over)


def cross_entropy(
    states: Float[Tensor, "B T d"],
    projection: Float[Tensor, "V d"],
    wanted: Int[Tensor, "B T"],
    smoothing: float = 0.0,
    over: recipe.Smoothing = "all",
) -> Float[Tensor, ""]:
    """The sum over all real tokens; divide by their number for the mean. Padding counts nothing."""
    epsilon = SMOOTHINGS[over](smoothing, len(projection))
    loss: Tensor = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        states.flatten(0, 1), projection, wanted.flatten(), epsilon, torch.is_grad_enabled()
    )
    return loss


class _ProjectedCrossEntropy(torch.autograd.Function):
    """Loss and gradient of softmax(states projection^T), portion by portion."""

    @staticmethod
    def forward(
        context: Any,
        states: Float[Tensor, "N d"],
        projection: Float[Tensor, "V d"],
        wanted: Int[Tensor, "N"],
        epsilon: float,
        learning: bool,
    ) -> Float[Tensor, ""]:
        kind = _number_format(states)
        rows, weight = states.to(kind), projection.to(kind)
        loss = torch.zeros((), dtype=_sum_format(states), device=states.device)
        state_gradient = torch.empty_like(states if learning else states[:0])
        weight_gradient = torch.zeros_like(projection if learning else projection[:0])
        for part in _portions(len(states), len(projection), states.device):
            logits = (rows[part] @ weight.T).to(_sum_format(states))
            total, gradient = smoothed_loss(logits, wanted[part], epsilon, learning)
            loss += total
            if learning:
                gradient = gradient.to(kind)
                state_gradient[part] = (gradient @ weight).to(states.dtype)
                weight_gradient += (gradient.T @ rows[part]).to(projection.dtype)
        context.save_for_backward(state_gradient, weight_gradient)
        return loss

    @staticmethod
    def backward(context: Any, *above: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        state_gradient, weight_gradient = context.saved_tensors
        return state_gradient * above[0], weight_gradient * above[0], None, None, None


def smoothed_loss(
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


def smoothed_target(epsilon: float, classes: int, over: recipe.Smoothing) -> tuple[float, float]:
    """What the right class and each other one are wanted to be, read off the gradient itself."""
    logits = torch.zeros(1, classes, dtype=torch.float64)
    wanted = torch.tensor([classes - 1])
    kept = SMOOTHINGS[over](epsilon, classes)
    _, gradient = smoothed_loss(logits.clone(), wanted, kept, learning=True)
    target = logits.softmax(-1) - gradient
    return float(target[0, -1]), float(target[0, 0])


def _portions(rows: int, classes: int, device: torch.device) -> Iterator[slice]:
    step = max(1, LOGITS_AT_ONCE[device.type] // classes)
    return (slice(start, start + step) for start in range(0, rows, step))


def _number_format(states: Tensor) -> torch.dtype:
    """The format of matrix products: what autocast says, for a function that autocast cannot see into."""
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


def _sum_format(states: Tensor) -> torch.dtype:
    return torch.float64 if states.dtype == torch.float64 else torch.float32
