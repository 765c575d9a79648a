"""The key-value cache of beam search: keys and values of the generated tokens, shared by the beams of a sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from regard.nn.kv_cache import KeyValue

SLOT_INCREMENT = 16
"""slots per sentence at first; when they run out, a multiple of this number is added"""
GPU_CAPACITY = 64
"""slots per sentence that are allocated at first on a GPU, where copying the buffers costs more than unused memory"""


@dataclass(frozen=True)
class BeamKVCache:
    """The keys and values of all decoder layers. One slot holds the key and value of one token.

    Each step fills one slot for each hypothesis. The hypotheses of a sentence share its slots; the attention bias says
    which slots belong to the tokens of which hypothesis. So when the beam is reordered, only the bias is reordered, and
    no key or value is copied. The hypotheses of a beam have most of their tokens in common, so slots of pruned
    hypotheses, which no hypothesis attends to any more, are soon free for reuse.

    Attention runs over all slots, including free ones: a product of non-adjacent keys would have to copy them first.

    The buffers are written in place, so use a cache only once: for the cache that follows it.

    Shape letters: S sentences, B beams, C slots per sentence, h heads, dk features of a key or value.
    """

    buffers: list[Float[Tensor, "2 allocated h capacity dk"]]
    """For each layer, keys and values. The first ``sentences`` of the allocated ones are in use, and C slots of each.

    One buffer for all layers would be so large that the system allocates fresh memory each time: 8% of a search.
    """
    sentences: int
    beams: int
    """hypotheses per sentence"""
    bias: Float[Tensor, "#S 1 B C"]
    """0 where a hypothesis attends to a slot, else minus infinity; one row for all sentences while each has one beam"""
    most_used: int = 0
    """upper bound for the number of used slots of a sentence: counting them would wait for the GPU"""
    write_slots: int | Int[Tensor, " 2*S*h*B"] = 0
    """the slots to fill in this step: one number if all sentences use the same, else indices into a flat buffer"""

    @classmethod
    def empty(cls, layers: int, like: Float[Tensor, "S h K dk"]) -> BeamKVCache:
        """An empty cache for as many sentences as ``like``, with keys of the same shape and data type."""
        sentences, heads, _, width = like.shape
        # Zeros, because free slots get weight 0, and 0 times uninitialized memory may be NaN.
        capacity = GPU_CAPACITY if like.is_cuda else SLOT_INCREMENT
        buffers = [like.new_zeros(2, sentences, heads, capacity, width) for _ in range(layers)]
        bias = like.new_full((1, 1, 1, SLOT_INCREMENT), -math.inf)
        return cls(buffers, sentences, beams=1, bias=bias)

    @property
    def dtype(self) -> torch.dtype:
        return self.bias.dtype

    def to(self, dtype: torch.dtype) -> BeamKVCache:
        """The same cache in another data type."""
        return replace(
            self, buffers=[buffer.to(dtype) for buffer in self.buffers], bias=self.bias.to(dtype)
        )

    def allocate(self) -> BeamKVCache:
        """The cache with a slot for the next token of each hypothesis; ``write`` fills them."""
        buffers, bias, beams = self.buffers, self.bias, self.beams
        is_used = (bias == 0).any(2).squeeze(1)
        most_used = self.most_used
        if most_used + beams > is_used.shape[1]:
            most_used = int(is_used.sum(1).max())
        if (missing_slots := most_used + beams - is_used.shape[1]) > 0:
            added = -(-missing_slots // SLOT_INCREMENT) * SLOT_INCREMENT
            bias = F.pad(bias, (0, added), value=-math.inf)
            is_used = F.pad(is_used, (0, added))
            buffers = self._with_capacity(is_used.shape[1])
        if beams == 1:  # no hypothesis was pruned: the slots of all sentences are filled in order
            bias = bias.clone()
            bias[..., most_used] = 0.0
            return BeamKVCache(
                buffers, self.sentences, beams, bias, most_used + 1, write_slots=most_used
            )
        free_slots = is_used.byte().argsort(dim=1, stable=True)[:, :beams]
        own_slot = bias.new_full((beams, beams), -math.inf).fill_diagonal_(0.0)
        columns = free_slots[:, None, None].expand(-1, 1, beams, -1)
        bias = bias.scatter(3, columns, own_slot.expand(self.sentences, 1, -1, -1))
        write_slots = self._flat_indices(buffers[0], free_slots)
        return BeamKVCache(
            buffers, self.sentences, beams, bias, most_used + beams, write_slots=write_slots
        )

    def _with_capacity(self, slots: int) -> list[Tensor]:
        """The buffers, enlarged if they have fewer slots per sentence; on a GPU to at least twice their size."""
        capacity = self.buffers[0].shape[3]
        if slots <= capacity:
            return self.buffers
        capacity = max(slots, 2 * capacity) if self.bias.is_cuda else slots
        padding = (0, 0, 0, capacity - self.buffers[0].shape[3])
        return [F.pad(buffer[:, : self.sentences], padding) for buffer in self.buffers]

    def _flat_indices(
        self, buffer: Float[Tensor, "2 allocated h capacity dk"], slots: Int[Tensor, "S B"]
    ) -> Int[Tensor, " 2*S*h*B"]:
        """The indices of these slots of each sentence in a buffer whose first four dimensions are flattened."""
        _, allocated, heads, capacity, _ = buffer.shape
        offsets = torch.arange(0, 2 * allocated * heads * capacity, capacity, device=slots.device)
        offsets = offsets.view(2, allocated, heads, 1)[:, : self.sentences]
        return (offsets + slots[:, None]).flatten()

    def write(
        self, layer: int, qkv: Float[Tensor, "3 S h B dk"]
    ) -> tuple[Float[Tensor, "S h B dk"], KeyValue]:
        """Store the new keys and values of a layer. Returns the queries, and the keys and values of all slots."""
        buffer, qkv = self.buffers[layer], contiguous(qkv, self.dtype)
        if isinstance(self.write_slots, int):
            buffer[:, : self.sentences, :, self.write_slots] = qkv[1:, :, :, 0]
        else:
            rows, new_rows = as_wide(buffer).flatten(0, 3), as_wide(qkv[1:]).flatten(0, 3)
            rows.index_copy_(0, self.write_slots, new_rows)
        return qkv[0], KeyValue(*buffer[:, : self.sentences, :, : self.bias.shape[3]])

    def select_beams(self, parents: Int[Tensor, "sentences beams"]) -> BeamKVCache:
        """Continue each sentence with these of its hypotheses."""
        beams = parents.shape[1]
        if self.beams == beams == 1:
            return self
        rows = parents[:, None, :, None].expand(-1, -1, -1, self.bias.shape[3])
        bias = self.bias.expand(self.sentences, -1, -1, -1).gather(2, rows)
        return replace(self, beams=beams, bias=bias)

    def keep_sentences(
        self, order: Int[Tensor, " fewer"], moves: list[tuple[int, int]]
    ) -> BeamKVCache:
        """Keep these sentences. moves: (from, to) of each sentence that changes its place in the buffers."""
        for buffer in self.buffers:
            move_rows(buffer.transpose(0, 1), moves)
        bias = self.bias if len(self.bias) == 1 else self.bias.index_select(0, order)
        return replace(self, sentences=len(order), bias=bias)


def move_rows(x: Float[Tensor, " S *rest"], moves: list[tuple[int, int]]) -> None:
    """Copy rows in place, (from, to) each. No row is both a source and a destination."""
    if not x.is_cuda:  # on a CPU, copying by index is slower than row by row
        for source, destination in moves:
            x[destination] = x[source]
    elif moves:
        sources, destinations = torch.tensor(moves, device=x.device).unbind(1)
        x[destinations] = x[sources]


def contiguous(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, contiguous and in this data type, in one pass."""
    if x.dtype is dtype:
        return x.contiguous()
    return x.to(dtype, memory_format=torch.contiguous_format)


def as_wide(x: Float[Tensor, "*rows n"]) -> Tensor:
    """The same bytes as elements of 16 bytes, if they divide evenly: torch copies rows by index element by element."""
    return x.view(torch.complex128) if x.shape[-1] * x.itemsize % 16 == 0 else x
