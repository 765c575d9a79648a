"""The backward pass of LayerNorm as a GPU kernel, written in Triton.

The gradients of gain and bias are sums over all tokens; the gradient of the input needs sums over the features of each
token: sums along both axes of one matrix. Each program processes some of the tokens, writes the gradient of each, and
accumulates its share of the gradients of gain and bias. The shares of all programs are added at the end.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

PROGRAMS = 528
"""four for each multiprocessor of an H100 or H200"""
TOKENS = 4
"""tokens that a program processes at a time: one for each of its warps"""


@triton.jit
def backward_kernel(
    grad_output, inputs, means, scales, gain, grad_inputs, grad_sums, count,
    width: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    features = tl.arange(0, WIDTH)
    valid = features < width
    g = tl.load(gain + features, mask=valid, other=0.0).to(tl.float32)[None, :]
    grad_gain = tl.zeros([TOKENS, WIDTH], tl.float32)
    grad_bias = tl.zeros([TOKENS, WIDTH], tl.float32)
    for first in range(program * TOKENS, count, programs * TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        inside = tokens < count
        both = inside[:, None] & valid[None, :]
        indices = tokens[:, None] * width + features[None, :]
        grad_y = tl.load(grad_output + indices, mask=both, other=0.0).to(tl.float32)
        x = tl.load(inputs + indices, mask=both, other=0.0).to(tl.float32)
        mean = tl.load(means + tokens, mask=inside, other=0.0)[:, None]
        scale = tl.load(scales + tokens, mask=inside, other=0.0)[:, None]
        normed = tl.where(valid[None, :], (x - mean) * scale, 0.0)
        grad_normed = grad_y * g
        projection = tl.sum(grad_normed * normed, 1)[:, None] / width
        grad_mean = tl.sum(grad_normed, 1)[:, None] / width
        grad_x = (grad_normed - grad_mean - normed * projection) * scale
        tl.store(grad_inputs + indices, grad_x.to(grad_inputs.dtype.element_ty), mask=both)
        grad_gain += grad_y * normed
        grad_bias += grad_y
    own = grad_sums + program * width + features
    tl.store(own, tl.sum(grad_gain, 0), mask=valid)
    tl.store(own + programs * width, tl.sum(grad_bias, 0), mask=valid)


@torch.library.custom_op("regard::layer_norm_backward", mutates_args=())
def layer_norm_backward(
    grad_output: Tensor, inputs: Tensor, means: Tensor, scales: Tensor, gain: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of the inputs, and the share of each program in the gradients of gain and bias."""
    width = inputs.shape[-1]
    grad_output, inputs = grad_output.contiguous(), inputs.contiguous()
    grad_inputs = torch.empty_like(inputs)
    grad_sums = inputs.new_empty(2, PROGRAMS, width, dtype=torch.float32)
    backward_kernel[(PROGRAMS,)](
        grad_output, inputs, means, scales, gain, grad_inputs, grad_sums, inputs.numel() // width,
        width=width, WIDTH=triton.next_power_of_2(width), TOKENS=TOKENS,
    )  # fmt: skip
    return grad_inputs, grad_sums


@layer_norm_backward.register_fake
def _(grad_output, inputs, means, scales, gain):
    return (
        torch.empty_like(inputs, memory_format=torch.contiguous_format),
        inputs.new_empty(2, PROGRAMS, inputs.shape[-1], dtype=torch.float32),
    )


class CompiledLayerNorm(torch.autograd.Function):
    """LayerNorm for torch.compile: the forward pass is fused with its surroundings, the backward pass is the kernel."""

    @staticmethod
    def forward(ctx, x, gain, bias, epsilon):
        inputs = x.float()
        variance, mean = torch.var_mean(inputs, -1, keepdim=True, correction=0)
        scale = torch.rsqrt(variance + epsilon)
        ctx.save_for_backward(x, mean, scale, gain)
        return ((inputs - mean) * scale * gain + bias).to(torch.bfloat16)

    @staticmethod
    def backward(ctx, grad_output):
        grad_x, grad_sums = layer_norm_backward(grad_output, *ctx.saved_tensors)
        grad_gain, grad_bias = grad_sums.sum(1)
        return grad_x, grad_gain, grad_bias, None


def layer_norm(
    x: Float[Tensor, "B T d"], gain: Float[Tensor, " d"], bias: Float[Tensor, " d"], epsilon: float
) -> Float[Tensor, "B T d"]:
    """LayerNorm with output in bfloat16, the data type of the layers that follow."""
    normed: Tensor = CompiledLayerNorm.apply(x, gain, bias, epsilon)
    return normed
