"""Where the keys and values of the words said so far stand, for all layers and all hypotheses of a beam."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from regard.nn.attention import KeysValues

FIRST = 32
"""slots of a sentence to begin with"""


@dataclass(frozen=True)
class Slots:
    """One slot holds a word's key and value; the hypotheses of a sentence share its slots.

    Each step fills one slot for each hypothesis. A hypothesis sees the slots of its own words: ``bias`` says so. When
    the beam is reordered only the bias is. Hypotheses of a beam have most of their past in common, so a slot that
    nobody sees any more, that of a hypothesis given up, is soon there to be filled again.

    All is written in place: of one ``Slots`` only one other may be made.
    """

    rooms: list[Float[Tensor, "2 most h C dk"]]
    """for each layer, keys and values, in C slots for each sentence; the first ``sentences`` are in use.

    One for all layers would be so large that its memory came anew from the system each time: 8% of a search.
    """
    sentences: int
    beams: int
    """hypotheses of each sentence"""
    used: int
    """of the C slots"""
    bias: Float[Tensor, "S 1 B used"] | None
    """zero where a hypothesis sees a slot, else minus infinity; None: each sees all"""
    newest: Int[Tensor, " S*h*B"] | None = None
    """the slots to be filled, counted through a layer's keys"""

    @classmethod
    def empty(cls, layers: int, like: Float[Tensor, "S h K dk"]) -> Slots:
        """For the sentences of a memory, and words with such keys."""
        sentences, heads, _, width = like.shape
        # Zeros: a slot not yet filled weighs nothing, but nothing times whatever was there may be no number.
        rooms = [like.new_zeros(2, sentences, heads, FIRST, width) for _ in range(layers)]
        return cls(rooms, sentences, beams=1, used=0, bias=None)

    def wider(self) -> Slots:
        """With a slot, to be filled, for the next word of each hypothesis."""
        rooms, bias, used, beams = self.rooms, self.bias, self.used, self.beams
        device = rooms[0].device
        if bias is None:
            free = torch.full((self.sentences, 1), used, device=device)
            used += 1
        else:
            seen = (bias == 0).any(2).squeeze(1)
            if int(seen.sum(1).max()) + beams > used:
                bias, seen = F.pad(bias, (0, beams), value=-math.inf), F.pad(seen, (0, beams))
                used += beams
            free = seen.byte().argsort(dim=1, stable=True)[:, :beams]
            own = torch.full((beams, beams), -math.inf, device=device).fill_diagonal_(0.0)
            which = free[:, None, None].expand(-1, 1, beams, -1)
            bias = bias.scatter(3, which, own.expand(self.sentences, 1, -1, -1))
        if used > rooms[0].shape[3]:
            rooms = [_larger(room[:, : self.sentences]) for room in rooms]
        _, _, heads, capacity, _ = rooms[0].shape
        first = torch.arange(0, self.sentences * heads * capacity, capacity, device=device)
        newest = first.view(self.sentences, heads, 1) + free[:, None]
        return Slots(rooms, self.sentences, beams, used, bias, newest.flatten())

    def put(
        self, layer: int, key: Float[Tensor, "S h B dk"], value: Float[Tensor, "S h B dk"]
    ) -> KeysValues:
        """Write a layer's newest keys and values; all there are then."""
        assert self.newest is not None
        keys, values = self.rooms[layer][:, : self.sentences]
        for room, new in ((keys, key), (values, value)):
            row = dense(new, room.dtype).flatten(0, 2)
            room.flatten(0, 2).index_copy_(0, self.newest, row)
        return KeysValues(keys[:, :, : self.used], values[:, :, : self.used])

    def select(self, parents: Int[Tensor, "sentences beams"]) -> Slots:
        """Each sentence goes on with these of its hypotheses."""
        beams = parents.shape[1]
        if self.bias is None and self.beams == beams == 1:
            return self
        if self.bias is None:
            assert self.beams == 1, "only a single hypothesis sees all"
            bias = torch.zeros(self.sentences, 1, beams, self.used, device=parents.device)
        else:
            which = parents[:, None, :, None].expand(-1, -1, -1, self.used)
            bias = self.bias.gather(2, which)
        return replace(self, beams=beams, bias=bias)

    def keep(self, order: Int[Tensor, " fewer"], moves: list[tuple[int, int]]) -> Slots:
        """Only these sentences; moves says which of them go to another place, from where and to where."""
        for room in self.rooms:
            for old, new in moves:
                room[:, new, :, : self.used] = room[:, old, :, : self.used]
        bias = None if self.bias is None else self.bias.index_select(0, order)
        return replace(self, sentences=len(order), bias=bias)


def dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In this number format and without gaps, in one pass."""
    if x.dtype is dtype:
        return x.contiguous()
    return x.to(dtype, memory_format=torch.contiguous_format)


def _larger(room: Float[Tensor, "2 S h C dk"]) -> Float[Tensor, "2 S h C*2 dk"]:
    return torch.cat([room, torch.zeros_like(room)], dim=3)
