"""An integer hash in place of random numbers: the same input always gives the same value, on every device."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor


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
