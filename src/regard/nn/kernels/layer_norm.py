"""The way back through LayerNorm as one kernel for a GPU, written in Triton.

Gain and bias get their gradients summed over all words, the states theirs over their own features: sums along both
sides of one matrix. A program goes through some of the words, gives each its gradient, and keeps the other sums to
itself until it is done; those of all programs are then added up.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

PROGRAMS = 528
"""four to each processor of an H100 or H200"""
WORDS = 4
"""that a program looks at together: one for each of its warps"""


@triton.jit
def backward_kernel(
    above, states, means, scales, gain, of_states, sums, count,
    width: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    features = tl.arange(0, WIDTH)
    there = features < width
    g = tl.load(gain + features, mask=there, other=0.0).to(tl.float32)[None, :]
    of_gain = tl.zeros([WORDS, WIDTH], tl.float32)
    of_bias = tl.zeros([WORDS, WIDTH], tl.float32)
    for first in range(program * WORDS, count, programs * WORDS):
        words = first + tl.arange(0, WORDS)
        inside = words < count
        both = inside[:, None] & there[None, :]
        places = words[:, None] * width + features[None, :]
        a = tl.load(above + places, mask=both, other=0.0).to(tl.float32)
        x = tl.load(states + places, mask=both, other=0.0).to(tl.float32)
        mean = tl.load(means + words, mask=inside, other=0.0)[:, None]
        scale = tl.load(scales + words, mask=inside, other=0.0)[:, None]
        normed = tl.where(there[None, :], (x - mean) * scale, 0.0)
        of_normed = a * g
        along = tl.sum(of_normed * normed, 1)[:, None] / width
        level = tl.sum(of_normed, 1)[:, None] / width
        of_x = (of_normed - level - normed * along) * scale
        tl.store(of_states + places, of_x.to(of_states.dtype.element_ty), mask=both)
        of_gain += a * normed
        of_bias += a
    own = sums + program * width + features
    tl.store(own, tl.sum(of_gain, 0), mask=there)
    tl.store(own + programs * width, tl.sum(of_bias, 0), mask=there)


@torch.library.custom_op("regard::norm_backward", mutates_args=())
def norm_backward(
    above: Tensor, states: Tensor, means: Tensor, scales: Tensor, gain: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of the states; and of gain and bias, what each program summed."""
    width = states.shape[-1]
    above, states = above.contiguous(), states.contiguous()
    of_states = torch.empty_like(states)
    sums = states.new_empty(2, PROGRAMS, width, dtype=torch.float32)
    backward_kernel[(PROGRAMS,)](
        above, states, means, scales, gain, of_states, sums, states.numel() // width,
        width=width, WIDTH=triton.next_power_of_2(width), WORDS=WORDS,
    )  # fmt: skip
    return of_states, sums


@norm_backward.register_fake
def _(above, states, means, scales, gain):
    return (
        torch.empty_like(states, memory_format=torch.contiguous_format),
        states.new_empty(2, PROGRAMS, states.shape[-1], dtype=torch.float32),
    )


class LayerNormed(torch.autograd.Function):
    """LayerNorm for torch.compile: forward melts into what stands around it, backward is the kernel."""

    @staticmethod
    def forward(ctx, x, gain, bias, epsilon):
        states = x.float()
        variance, mean = torch.var_mean(states, -1, keepdim=True, correction=0)
        scale = torch.rsqrt(variance + epsilon)
        ctx.save_for_backward(x, mean, scale, gain)
        return ((states - mean) * scale * gain + bias).to(torch.bfloat16)

    @staticmethod
    def backward(ctx, above):
        of_x, sums = norm_backward(above, *ctx.saved_tensors)
        of_gain, of_bias = sums.sum(1)
        return of_x, of_gain, of_bias, None


def layer_norm(
    x: Float[Tensor, "B T d"], gain: Float[Tensor, " d"], bias: Float[Tensor, " d"], epsilon: float
) -> Float[Tensor, "B T d"]:
    """In bfloat16, in which what follows computes."""
    normed: Tensor = LayerNormed.apply(x, gain, bias, epsilon)
    return normed
