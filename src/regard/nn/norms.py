"""Normalization of the features. Each norm takes the states and ``non_pad``; only batch norm needs the latter."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, distributed, nn

from regard.recipe import FORMATS, Registry

NonPad = Bool[Tensor, "B T"] | None
"""True at tokens that are not padding; None: there is no padding"""


NORMS: Registry[Callable[[int], nn.Module]] = Registry("model.norm")


@NORMS.register("layer", packed_batches=True, fast_inference=True, formats=FORMATS)
class LayerNorm(nn.LayerNorm):
    """Layer norm: (x - mean) / sqrt(biased variance + eps) * gain + bias, over the features of each position."""

    def forward(self, x: Float[Tensor, "B T d"], non_pad: NonPad = None) -> Float[Tensor, "B T d"]:
        if torch.compiler.is_compiling() and x.is_cuda and torch.is_autocast_enabled("cuda"):
            # Imported here because Triton comes only with torch for CUDA.
            from regard.nn.triton_kernels import layer_norm

            return layer_norm(x, self.weight, self.bias, self.eps)
        return super().forward(x)


@NORMS.register(
    "rms", packed_batches=True, fast_inference=True, formats=("ctranslate2", "onnx", "html")
)
class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean square + eps) * gain, without subtracting the mean (Zhang and Sennrich 2019)."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model, eps=1e-6)

    def forward(self, x: Float[Tensor, "B T d"], non_pad: NonPad = None) -> Float[Tensor, "B T d"]:
        assert self.weight is not None
        # Autocast computes LayerNorm in float32, but does not know RMSNorm.
        return super().forward(x.to(self.weight.dtype))


@NORMS.register("batch", fast_inference=True, formats=("onnx", "html"))
class BatchNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * gain + bias, for each feature over all tokens of the batch.

    Padding is left out. Inference uses the running mean and variance, so the output for a sentence does not depend on
    the rest of its batch. If several processes train together, the statistics are those of their whole batch.
    """

    running_mean: Float[Tensor, " d"]
    running_var: Float[Tensor, " d"]
    idle = False
    """whether this process has no rows in the current batch, so that its placeholder row must not be counted"""

    def __init__(self, d_model: int, momentum: float = 0.1, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))
        self.register_buffer("running_mean", torch.zeros(d_model))
        self.register_buffer("running_var", torch.ones(d_model))

    def forward(self, x: Float[Tensor, "B T d"], non_pad: NonPad = None) -> Float[Tensor, "B T d"]:
        mean, variance = self.running_mean, self.running_var
        if self.training:
            tokens = x.flatten(0, 1) if non_pad is None else x[non_pad]
            tokens = tokens.to(self.running_mean.dtype)
            if in_several_processes():
                mean, variance, unbiased = self._synchronized_statistics(tokens)
            else:
                mean, variance = tokens.mean(0), tokens.var(0, correction=0)
                unbiased = tokens.detach().var(0, correction=min(1, len(tokens) - 1))
            self._update_running_statistics(mean.detach(), unbiased)
        scale = self.weight * (variance + self.epsilon).rsqrt()
        return ((x - mean) * scale + self.bias).to(x.dtype)

    def _synchronized_statistics(
        self, tokens: Float[Tensor, "N d"]
    ) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"], Float[Tensor, " d"]]:
        """Mean, variance and unbiased variance over the tokens of all processes.

        Gradients flow to all processes: the backward pass of an all-reduce is an all-reduce of the gradients, which
        gives the gradient of the sum of all losses. DistributedDataParallel averages the gradients of the weights, and
        the loss is scaled by the number of processes for that reason.
        """
        # Imported here because it imports torch's RPC, which only this needs.
        from torch.distributed.nn import functional

        all_reduce: Callable[[Tensor], Tensor] = functional.all_reduce
        if self.idle:
            tokens = tokens[:0]
        # Relative to the running mean, which is equal in all processes: a sum of squares of values far from 0 would
        # lose precision.
        shifted = tokens - self.running_mean
        count = shifted.new_full((1,), len(tokens))
        sums = all_reduce(torch.cat([shifted.sum(0), shifted.square().sum(0), count]))
        total, squares = sums[:-1].chunk(2)
        count = sums[-1].detach()
        offset = total / count
        variance = squares / count - offset.square()
        unbiased = variance.detach() * (count / (count - 1).clamp(min=1))
        return self.running_mean + offset, variance, unbiased

    @torch.no_grad()
    def _update_running_statistics(
        self, mean: Float[Tensor, " d"], variance: Float[Tensor, " d"]
    ) -> None:
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)


def in_several_processes() -> bool:
    """Whether this process trains together with others."""
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


@NORMS.register(
    "none",
    ignores=["model.final_norm", "model.norm_order"],
    packed_batches=True,
    fast_inference=True,
    formats=("onnx", "html"),
)
class NoNorm(nn.Module):
    """x unchanged."""

    def __init__(self, d_model: int) -> None:
        super().__init__()

    def forward(self, x: Float[Tensor, "B T d"], non_pad: NonPad = None) -> Float[Tensor, "B T d"]:
        return x
