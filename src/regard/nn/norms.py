"""Normalisation of the features. Each takes the states and which of them are words; most look at one word only."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.recipe import FORMATS, Registry

Real = Bool[Tensor, "B T"] | None
"""False at padding; None: all are words"""


NORMS: Registry[Callable[[int], nn.Module]] = Registry("model.norm")


@NORMS.register("layer", packed=True, fused=True, formats=FORMATS)
class LayerNorm(nn.LayerNorm):
    """(x - mean) / sqrt(biased variance + eps) * gain + bias, over the features of one position."""

    def forward(self, x: Float[Tensor, "B T d"], real: Real = None) -> Float[Tensor, "B T d"]:
        if torch.compiler.is_compiling() and x.is_cuda and torch.is_autocast_enabled("cuda"):
            from regard.nn.kernels.layer_norm import (
                layer_norm,  # Triton comes with torch for CUDA only
            )

            return layer_norm(x, self.weight, self.bias, self.eps)
        return super().forward(x)


@NORMS.register("rms", packed=True, fused=True, formats=("ctranslate2", "onnx"))
class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean square + eps) * gain: no mean is taken away (Zhang and Sennrich 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)

    def forward(self, x: Float[Tensor, "B T d"], real: Real = None) -> Float[Tensor, "B T d"]:
        assert self.weight is not None
        # Autocast, which knows LayerNorm, leaves it to us.
        return super().forward(x.to(self.weight.dtype))


@NORMS.register("batch", fused=True, formats=("onnx",))
class BatchNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * gain + bias, each feature over all words of the batch.

    Padding is no word. For inference the running mean and variance take the place of the batch's, so a sentence is
    the same alone and among others.
    """

    mean: Float[Tensor, " d"]
    variance: Float[Tensor, " d"]

    def __init__(self, width: int, momentum: float = 0.1, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def forward(self, x: Float[Tensor, "B T d"], real: Real = None) -> Float[Tensor, "B T d"]:
        mean, variance = self.mean, self.variance
        if self.training:
            words = (x.flatten(0, 1) if real is None else x[real]).to(self.mean.dtype)
            mean, variance = words.mean(0), words.var(0, correction=0)
            self.remember(mean.detach(), words.detach().var(0, correction=min(1, len(words) - 1)))
        scale = self.weight * (variance + self.epsilon).rsqrt()
        return ((x - mean) * scale + self.bias).to(x.dtype)

    @torch.no_grad()
    def remember(self, mean: Float[Tensor, " d"], variance: Float[Tensor, " d"]) -> None:
        self.mean.lerp_(mean, self.momentum)
        self.variance.lerp_(variance, self.momentum)


@NORMS.register("none", packed=True, fused=True, formats=("onnx",))
class NoNorm(nn.Module):
    """x as it is: what the norms are there to mend."""

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, x: Float[Tensor, "B T d"], real: Real = None) -> Float[Tensor, "B T d"]:
        return x
