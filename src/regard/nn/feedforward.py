"""The position-wise feed-forward network (section 3.3 of the paper)."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from regard import recipe

ACTIVATIONS: dict[recipe.Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "swish": F.silu,
}


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2, the same at every position: two convolutions of kernel size 1."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()
        self.inner = nn.Linear(section.width, section.feedforward)
        self.outer = nn.Linear(section.feedforward, section.width)
        self.activation = ACTIVATIONS[section.activation]
        self.dropout = nn.Dropout(section.feedforward_dropout)

    def forward(self, x: Float[Tensor, "B T d"]) -> Float[Tensor, "B T d"]:
        y: Float[Tensor, "B T d"] = self.outer(self.dropout(self.activation(self.inner(x))))
        return y
