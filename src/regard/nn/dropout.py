"""Dropout: each number is left out with probability p, the others are divided by 1 - p (section 5.4 of the paper)."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """torch's; or, once it has a seed, a hash of seed and place, which compiles into the kernels around it.

    torch's random numbers cost a GPU more than the layers they stand between, and are kept for the way back. A hash
    is a few integer operations, done again on the way back.
    """

    seed: Int[Tensor, "1"] | None = None
    """drawn anew before each step by whoever set it"""

    def forward(self, input: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        if self.seed is None or not self.training or self.p == 0:
            return super().forward(input)
        return torch.where(kept(input.shape, self.p, self.seed), input / (1 - self.p), 0.0)


def kept(shape: torch.Size, p: float, seed: Int[Tensor, "1"]) -> Bool[Tensor, "*shape"]:
    """Which numbers stay. The hash mixes the bits of a place twice by multiplication (as Wellons' lowbias32)."""
    x = torch.arange(shape.numel(), dtype=torch.int32, device=seed.device) ^ seed
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x046CA68B
    x = (x ^ (x >> 16)) & 0x7FFFFFFF
    return (x >= int(p * 2**31)).view(shape)


def seeded(layers: Sequence[nn.Module], device: torch.device) -> Int[Tensor, "sites 4"]:
    """A seed for each dropout in these layers, all in one tensor, each at an address that kernels like."""
    sites = [part for layer in layers for part in layer.modules() if isinstance(part, Dropout)]
    seeds = torch.zeros(len(sites), 4, dtype=torch.int32, device=device)
    for site, seed in zip(sites, seeds, strict=True):
        site.seed = seed[:1]
    return seeds
