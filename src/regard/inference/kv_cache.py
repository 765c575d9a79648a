"""Where the keys and values of the words said so far stand, for all layers and all hypotheses of a beam."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from regard.nn.attention import KeyValue

MORE = 16
"""slots of a sentence to begin with, and how many there are more whenever they do not suffice"""


@dataclass(frozen=True)
class BeamKVCache:
    """One slot holds a word's key and value; the hypotheses of a sentence share its slots.

    Each step fills one slot for each hypothesis. A hypothesis sees the slots of its own words: ``bias`` says so. When
    the beam is reordered only the bias is. Hypotheses of a beam have most of their past in common, so a slot that
    nobody sees any more, that of a hypothesis given up, is soon there to be filled again.

    Attention goes over all slots, the empty ones too: a product of keys with gaps between them would first copy them.

    All is written in place: of one ``BeamKVCache`` only one other may be made.
    """

    rooms: list[Float[Tensor, "2 most h C dk"]]
    """for each layer, keys and values, in C slots for each sentence; the first ``sentences`` are in use.

    One for all layers would be so large that its memory came anew from the system each time: 8% of a search.
    """
    sentences: int
    beams: int
    """hypotheses of each sentence"""
    bias: Float[Tensor, "#S 1 B C"]
    """zero where a hypothesis sees a slot, else minus infinity; one for all sentences while each has one hypothesis"""
    newest: int | Int[Tensor, " 2*S*h*B"] = 0
    """the slot to be filled; or all, counted through a layer's room, if they are not the same for all sentences"""

    @classmethod
    def empty(cls, layers: int, like: Float[Tensor, "S h K dk"]) -> BeamKVCache:
        """For the sentences of a memory, and words with such keys."""
        sentences, heads, _, width = like.shape
        # Zeros: a slot not yet filled weighs nothing, but nothing times whatever was there may be no number.
        rooms = [like.new_zeros(2, sentences, heads, MORE, width) for _ in range(layers)]
        return cls(rooms, sentences, beams=1, bias=like.new_full((1, 1, 1, MORE), -math.inf))

    @property
    def dtype(self) -> torch.dtype:
        return self.bias.dtype

    def to(self, dtype: torch.dtype) -> BeamKVCache:
        """In this number format."""
        return replace(
            self, rooms=[room.to(dtype) for room in self.rooms], bias=self.bias.to(dtype)
        )

    def wider(self) -> BeamKVCache:
        """With a slot, to be filled, for the next word of each hypothesis."""
        rooms, bias, beams = self.rooms, self.bias, self.beams
        seen = (bias == 0).any(2).squeeze(1)
        most = int(seen.sum(1).max())
        if most + beams > seen.shape[1]:
            rooms = [F.pad(room[:, : self.sentences], (0, 0, 0, MORE)) for room in rooms]
            bias, seen = F.pad(bias, (0, MORE), value=-math.inf), F.pad(seen, (0, MORE))
        if beams == 1:  # nothing was given up: the slots of all sentences are filled in order
            bias = bias.clone()
            bias[..., most] = 0.0
            return BeamKVCache(rooms, self.sentences, beams, bias, most)
        free = seen.byte().argsort(dim=1, stable=True)[:, :beams]
        own = bias.new_full((beams, beams), -math.inf).fill_diagonal_(0.0)
        which = free[:, None, None].expand(-1, 1, beams, -1)
        bias = bias.scatter(3, which, own.expand(self.sentences, 1, -1, -1))
        return BeamKVCache(rooms, self.sentences, beams, bias, self._counted(rooms[0], free))

    def _counted(
        self, room: Float[Tensor, "2 most h C dk"], free: Int[Tensor, "S B"]
    ) -> Int[Tensor, " 2*S*h*B"]:
        """Where these slots of each sentence stand in a room."""
        _, most, heads, capacity, _ = room.shape
        first = torch.arange(0, 2 * most * heads * capacity, capacity, device=free.device)
        first = first.view(2, most, heads, 1)[:, : self.sentences]
        return (first + free[:, None]).flatten()

    def put(
        self, layer: int, joined: Float[Tensor, "3 S h B dk"]
    ) -> tuple[Float[Tensor, "S h B dk"], KeyValue]:
        """Write a layer's newest keys and values; the queries, and all there is to see then."""
        room, joined = self.rooms[layer], dense(joined, self.dtype)
        if isinstance(self.newest, int):
            room[:, : self.sentences, :, self.newest] = joined[1:, :, :, 0]
        else:
            into, new = in_large(room).flatten(0, 3), in_large(joined[1:]).flatten(0, 3)
            into.index_copy_(0, self.newest, new)
        return joined[0], KeyValue(*room[:, : self.sentences])

    def select(self, parents: Int[Tensor, "sentences beams"]) -> BeamKVCache:
        """Each sentence goes on with these of its hypotheses."""
        beams = parents.shape[1]
        if self.beams == beams == 1:
            return self
        which = parents[:, None, :, None].expand(-1, -1, -1, self.bias.shape[3])
        bias = self.bias.expand(self.sentences, -1, -1, -1).gather(2, which)
        return replace(self, beams=beams, bias=bias)

    def keep(self, order: Int[Tensor, " fewer"], moves: list[tuple[int, int]]) -> BeamKVCache:
        """Only these sentences; moves says which of them go to another place, from where and to where."""
        for room in self.rooms:
            move(room.transpose(0, 1), moves)
        bias = self.bias if len(self.bias) == 1 else self.bias.index_select(0, order)
        return replace(self, sentences=len(order), bias=bias)


def move(x: Float[Tensor, " S *rest"], moves: list[tuple[int, int]]) -> None:
    """Sentences from old places to new ones, in place. No place is both."""
    if not x.is_cuda:  # where torch moves by index more slowly than line by line
        for old, new in moves:
            x[new] = x[old]
    elif moves:
        olds, news = torch.tensor(moves, device=x.device).unbind(1)
        x[news] = x[olds]


def dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In this number format and without gaps, in one pass."""
    if x.dtype is dtype:
        return x.contiguous()
    return x.to(dtype, memory_format=torch.contiguous_format)


def in_large(x: Float[Tensor, "*rows n"]) -> Tensor:
    """The same bytes as numbers of 16 bytes, if they come out even: torch moves rows by index number by number."""
    return x.view(torch.complex128) if x.shape[-1] * x.itemsize % 16 == 0 else x
