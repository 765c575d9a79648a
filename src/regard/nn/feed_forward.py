"""The position-wise feed-forward network (section 3.3 of the paper)."""

from collections.abc import Callable
from functools import partial

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from regard import recipe
from regard.nn.dropout import Dropout
from regard.recipe import FORMATS, Registry


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2 at every position, or with another activation than ReLU."""

    def __init__(self, config: recipe.ModelConfig, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_ff)
        self.outer = nn.Linear(config.d_ff, config.d_model)
        self.activation = activation
        self.dropout = Dropout(config.activation_dropout)

    def forward(self, x: Float[Tensor, "B T d"]) -> Float[Tensor, "B T d"]:
        y: Float[Tensor, "B T d"] = self.outer(self.dropout(self.activation(self.inner(x))))
        return y


class Gated(nn.Module):
    """(swish(x W1) * x V) W2: SwiGLU (Shazeer 2020), with 2/3 of d_ff so that the number of weights stays the same."""

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__()
        inner = max(1, round(config.d_ff * 2 / 3))
        self.gate = nn.Linear(config.d_model, inner, bias=False)
        self.inner = nn.Linear(config.d_model, inner, bias=False)
        self.outer = nn.Linear(inner, config.d_model, bias=False)
        self.dropout = Dropout(config.activation_dropout)

    def forward(self, x: Float[Tensor, "B T d"]) -> Float[Tensor, "B T d"]:
        y: Float[Tensor, "B T d"] = self.outer(self.dropout(F.silu(self.gate(x)) * self.inner(x)))
        return y


ACTIVATIONS: Registry[Callable[[recipe.ModelConfig], nn.Module]] = Registry("model.activation")
"""the feed-forward network, by the name of its activation"""

ACTIVATIONS.register(
    "relu",
    summary="max(0, x), as in the paper",
    packed_batches=True,
    fast_inference=True,
    formats=FORMATS,
)(partial(FeedForward, activation=F.relu))
ACTIVATIONS.register(
    "gelu",
    summary="x Phi(x) (Hendrycks and Gimpel 2016)",
    packed_batches=True,
    fast_inference=True,
    formats=FORMATS,
)(partial(FeedForward, activation=F.gelu))
ACTIVATIONS.register(
    "swish",
    summary="x sigmoid(x), also called SiLU",
    packed_batches=True,
    fast_inference=True,
    formats=("huggingface", "ctranslate2", "onnx", "html"),
)(partial(FeedForward, activation=F.silu))
ACTIVATIONS.register(
    "swiglu", packed_batches=True, fast_inference=True, formats=("ctranslate2", "onnx", "html")
)(Gated)
