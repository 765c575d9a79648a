"""The position-wise feed-forward network (section 3.3 of the paper)."""

from collections.abc import Callable
from functools import partial

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from regard import recipe
from regard.nn.dropout import Dropout


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2, the same at every position: two convolutions of kernel size 1."""

    def __init__(self, section: recipe.Model, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(section.width, section.feedforward)
        self.outer = nn.Linear(section.feedforward, section.width)
        self.activation = activation
        self.dropout = Dropout(section.feedforward_dropout)

    def forward(self, x: Float[Tensor, "B T d"]) -> Float[Tensor, "B T d"]:
        y: Float[Tensor, "B T d"] = self.outer(self.dropout(self.activation(self.inner(x))))
        return y


class Gated(nn.Module):
    """(swish(x W1) * x V) W2: SwiGLU (Shazeer 2020), with two thirds of d_ff, so that the size stays the same."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()
        inner = max(1, round(section.feedforward * 2 / 3))
        self.gate = nn.Linear(section.width, inner, bias=False)
        self.inner = nn.Linear(section.width, inner, bias=False)
        self.outer = nn.Linear(inner, section.width, bias=False)
        self.dropout = Dropout(section.feedforward_dropout)

    def forward(self, x: Float[Tensor, "B T d"]) -> Float[Tensor, "B T d"]:
        y: Float[Tensor, "B T d"] = self.outer(self.dropout(F.silu(self.gate(x)) * self.inner(x)))
        return y


ACTIVATIONS: dict[recipe.Activation, Callable[[recipe.Model], nn.Module]] = {
    "relu": partial(FeedForward, activation=F.relu),
    "gelu": partial(FeedForward, activation=F.gelu),
    "swish": partial(FeedForward, activation=F.silu),
    "swiglu": Gated,
}
"""the whole network by the name of its activation"""
