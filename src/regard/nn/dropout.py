"""Dropout: each value is zeroed with probability p, the others are divided by 1 - p (section 5.4 of the paper)."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """torch's dropout. With a seed, the mask is a hash of seed and index, which compiles into the kernels around it.

    On a GPU, torch's random numbers cost more than the layers around them, and the mask is stored for the backward
    pass. A hash takes a few integer operations and is computed again in the backward pass.
    """

    seed: Int[Tensor, "1"] | None = None
    """set by ``attach_dropout_seeds``; its owner draws a new value before each step"""

    def forward(self, input: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        if self.seed is None or not self.training or self.p == 0:
            return super().forward(input)
        return torch.where(keep_mask(input.shape, self.p, self.seed), input / (1 - self.p), 0.0)


LOWBIAS32 = ((16, 0x7FEB352D), (15, 0x046CA68B))
"""rounds of Wellons' lowbias32, with the second multiplier cut to 31 bits: torch's int32 is signed"""


def keep_mask(shape: torch.Size, p: float, seed: Int[Tensor, "1"]) -> Bool[Tensor, "*shape"]:
    """The dropout mask: False with probability p, as a hash of seed and index."""
    index = torch.arange(shape.numel(), dtype=torch.int32, device=seed.device)
    x = mix_bits(index ^ seed, LOWBIAS32) & 0x7FFFFFFF
    return (x >= int(p * 2**31)).view(shape)


def attach_dropout_seeds(
    layers: Sequence[nn.Module], device: torch.device
) -> Int[Tensor, "dropouts 4"]:
    """Give every dropout of these layers a seed. All seeds are in one tensor, each in an aligned row of its own."""
    dropouts = [part for layer in layers for part in layer.modules() if isinstance(part, Dropout)]
    seeds = torch.zeros(len(dropouts), 4, dtype=torch.int32, device=device)
    for dropout, seed in zip(dropouts, seeds, strict=True):
        dropout.seed = seed[:1]
    return seeds


def mix_bits(x: Int[Tensor, "*shape"], rounds: Sequence[tuple[int, int]]) -> Int[Tensor, "*shape"]:
    """Mix the bits of 32-bit integers: xor with a right shift, multiply, repeat (a multiply-xorshift hash).

    rounds: shift and multiplier of each round. int32 tensors wrap around by themselves; int64 tensors hold values
    below 2^32 and are truncated to 32 bits. The Triton kernels need a copy of their own (``kernels/packed_attention``):
    a kernel cannot call a function on tensors.
    """
    for shift, multiplier in rounds:
        x = (x ^ (x >> shift)) * multiplier
        if x.dtype == torch.int64:
            x = x & 0xFFFFFFFF
    return x ^ (x >> 16)
