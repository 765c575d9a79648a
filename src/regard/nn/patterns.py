"""Patterns: who is compared with whom. Full attention compares all with all; the others cost only T times a constant.

A pattern stands between a sub-layer and ``Attention``. Its fast way, ``forward``, cuts queries and keys into parts and
calls the same attention on each, so every score, weighting and position works with every pattern. Its shown way,
``show``, compares all with all and masks what the pattern leaves out: quadratic, but it can be looked at, and a test
holds the two equal.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard import recipe
from regard.nn.attention import Attention, KeysValues, Mask, Shown


class Full(nn.Module):
    """All with all."""

    def __init__(self, section: recipe.Model, place: recipe.Place) -> None:
        super().__init__()

    def condense(self, seen: KeysValues, real: Bool[Tensor, "B K"] | None) -> KeysValues:
        """What is kept of keys and values, once for all queries."""
        return seen

    def allowed(
        self, mask: Mask, queries: int, keys: int, device: torch.device
    ) -> Bool[Tensor, "#B 1 #Q K"] | None:
        """The whole pattern as a matrix, to be looked at."""
        return mask.matrix(queries, keys, device)

    def forward(
        self, attend: Attention, query: Float[Tensor, "B h Q dk"], seen: KeysValues, mask: Mask
    ) -> Float[Tensor, "B h Q dv"]:
        sizes = query.shape[2], seen.key.shape[2]
        # A purely causal square goes by flag: the kernel then skips what lies above the diagonal.
        if attend.fused and mask.causal and mask.real is None and sizes[0] == sizes[1]:
            return cast(Tensor, attend(query, *seen, None, causal=True))
        allowed = mask.matrix(*sizes, query.device)
        return cast(Tensor, attend(query, *seen, allowed, distances(attend, query, seen, mask)))

    def show(
        self, attend: Attention, query: Float[Tensor, "B h Q dk"], seen: KeysValues, mask: Mask
    ) -> Shown:
        sizes = query.shape[2], seen.key.shape[2]
        allowed = self.allowed(mask, *sizes, query.device)
        return attend.show(query, *seen, allowed, distances(attend, query, seen, mask))


def distances(
    attend: Attention, query: Float[Tensor, "B h Q dk"], seen: KeysValues, mask: Mask
) -> Int[Tensor, "#B Q K"] | None:
    """Only where a position asks for them: between two texts there are none."""
    if not attend.relation.in_scores:
        return None
    return mask.distance(query.shape[2], seen.key.shape[2], query.device)


class Window(Full):
    """Position i sees i - reach … i + reach. Queries go in blocks, each with the keys around it."""

    def __init__(self, section: recipe.Model, place: recipe.Place) -> None:
        super().__init__(section, place)
        self.reach = section.attention.reach

    def allowed(
        self, mask: Mask, queries: int, keys: int, device: torch.device
    ) -> Bool[Tensor, "#B 1 #Q K"] | None:
        distance = replace(mask, tree=None).distance(queries, keys, device)
        near = (distance.abs() <= self.reach)[:, None]
        inside = mask.matrix(queries, keys, device)
        return never_blind(near if inside is None else near & inside)

    def forward(
        self, attend: Attention, query: Float[Tensor, "B h Q dk"], seen: KeysValues, mask: Mask
    ) -> Float[Tensor, "B h Q dv"]:
        if query.shape[2] == 1:  # the newest word, in search: it needs the last few keys only
            last = KeysValues(*(part[:, :, -self.reach - 1 :] for part in seen))
            return super().forward(attend, query, last, replace(mask, real=None))
        length, reach = query.shape[2], self.reach
        assert seen.key.shape[2] == length, "a window is for self-attention"
        ahead = 0 if mask.causal else reach
        cut = Blocks(length, size=reach, before=reach, after=ahead)
        distance = cut.distance(query.device)
        near = (distance >= -reach) & (distance <= ahead)
        real = torch.ones(len(query), length, dtype=torch.bool, device=query.device)
        real = cut.keys((real if mask.real is None else mask.real)[:, None, :, None])[
            :, :, None, :, 0
        ]
        allowed = never_blind(near & real)
        heads = attend(
            cut.queries(query), *(cut.keys(part) for part in seen), allowed, distance[None]
        )
        return cut.together(heads)


class Blocks:
    """A sequence cut into blocks of queries, each with the keys from ``before`` it to ``after`` it.

    The blocks stand side by side in the batch: to attention they are sentences of their own.
    """

    def __init__(self, length: int, size: int, before: int, after: int) -> None:
        self.length, self.size, self.before, self.after = length, size, before, after
        self.count = -(-length // size)
        self.missing = self.count * size - length

    def queries(self, x: Float[Tensor, "B h T dx"]) -> Float[Tensor, "Bn h size dx"]:
        padded = F.pad(x, (0, 0, 0, self.missing))
        blocks = padded.view(*x.shape[:2], self.count, self.size, x.shape[3])
        return blocks.transpose(1, 2).flatten(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        """[B, h, T, d] to [B n, h, before + size + after, d]; beyond the ends stand zeros."""
        padded = F.pad(x, (0, 0, self.before, self.missing + self.after))
        wide = self.before + self.size + self.after
        return padded.unfold(2, wide, self.size).permute(0, 2, 1, 4, 3).flatten(0, 1)

    def distance(self, device: torch.device) -> Int[Tensor, "size wide"]:
        key = torch.arange(-self.before, self.size + self.after, device=device)
        return key - torch.arange(self.size, device=device)[:, None]

    def together(self, x: Float[Tensor, "Bn h size dx"]) -> Float[Tensor, "B h T dx"]:
        blocks = x.view(-1, self.count, *x.shape[1:])
        whole = blocks.transpose(1, 2).flatten(2, 3)
        return whole[:, :, : self.length]


def never_blind(allowed: Bool[Tensor, "B 1 Q K"]) -> Bool[Tensor, "B 1 Q K"]:
    """A query that sees nothing, being padding itself, sees all: nobody looks at it, but it must stay a number."""
    return allowed | ~allowed.any(-1, keepdim=True)


PATTERNS: dict[recipe.Pattern, Callable[[recipe.Model, recipe.Place], Full]] = {
    "full": Full,
    "window": Window,
}
