"""The Transformer (figure 1 of the paper): ids in, logits over the vocabulary out.

    source ids -> embedding + position -> N encoder layers -> memory
    target ids -> embedding + position -> N decoder layers (looking at memory) -> projection -> logits

Learning calls ``forward``: one pass gives all T predictions at once. Search calls ``encode`` once and then ``step``
for each word; ``step`` computes only the newest position.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard import recipe
from regard.data.special_tokens import PAD
from regard.nn.attention import KeyValue, Mask, Spans
from regard.nn.dropout import Dropout
from regard.nn.embeddings import Embedding
from regard.nn.layers import Cache, DecoderLayer, EncoderLayer, final_norm, initialize
from regard.nn.multi_head_attention import MultiHeadAttention, at_once, split
from regard.nn.network import Network
from regard.nn.positions import POSITIONS, Packing, PositionInfo, Span, Start, Tree


@dataclass(frozen=True)
class Memory:
    """What the encoder made of a batch of sources."""

    states: Float[Tensor, "B S d"]
    real: Bool[Tensor, "B S"]
    """False at padding"""
    packing: Packing | None = None
    """of packed rows"""


class Encoder(nn.Module):
    """Embedding and position, then N layers in which every word sees every other."""

    layer: ClassVar[type[nn.Module]] = EncoderLayer

    def __init__(self, section: recipe.Model, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.position = POSITIONS[section.position].on("encoder").embedding(section)
        self.dropout = Dropout(section.dropout)
        self.layers = nn.ModuleList(self.layer(section) for _ in range(section.encoder_layers))
        self.norm = final_norm(section)

    def forward(self, source: Int[Tensor, "B S"], places: PositionInfo = None) -> Memory:
        real = source != PAD
        packing = places if isinstance(places, Packing) else None
        tree = places if isinstance(places, Tree) else None
        mask = Mask(real, tree=None if tree is None else tree.distance)
        start: Start = 0
        if packing is not None:
            mask = Mask(spans=Spans(*packing.source, *packing.source))
            start = -packing.source.start
        x = self.position(self.embedding(source), start, tree)
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, mask, real)
        return Memory(self.norm(x, real), real, packing)

    def attentions(self) -> list[MultiHeadAttention]:
        return _named("attention", self.layers)


@runtime_checkable
class Past(Protocol):
    """What a layer keeps of the words it has read, one line for each row."""

    def select(self, rows: Tensor) -> "Past": ...


@dataclass(frozen=True)
class DecoderState:
    """What one step of search hands to the next. Rows are sentences times beams, the beams of one side by side."""

    memory: Sequence[KeyValue]
    """for each layer, once for each sentence however many beams it has"""
    memory_mask: Mask
    caches: Sequence[Past]
    """for each layer, one line for each row"""
    length: int
    """words said so far"""
    beams: int = 1
    """rows for each sentence"""

    def select(self, rows: Int[Tensor, "sentences beams"]) -> "DecoderState":
        """Keep these rows, in this order; each line of the matrix belongs to one sentence."""
        caches = [cache.select(rows.flatten()) for cache in self.caches]
        beams = rows.shape[1]
        if len(rows) == len(self.memory[0].key):  # in the order they had, so all are still there
            return DecoderState(self.memory, self.memory_mask, caches, self.length, beams)
        sentences = rows[:, 0] // self.beams
        assert self.memory_mask.real is not None
        return DecoderState(
            [layer.select(sentences) for layer in self.memory],
            Mask(self.memory_mask.real.index_select(0, sentences)),
            caches,
            self.length,
            beams,
        )


class Decoder(nn.Module):
    """Embedding and position, then N layers in which a word sees those before it, and the memory."""

    layer: ClassVar[type[nn.Module]] = DecoderLayer
    cache: ClassVar[type[Past]] = Cache

    def __init__(self, section: recipe.Model, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.position = POSITIONS[section.position].on("decoder").embedding(section)
        self.dropout = Dropout(section.dropout)
        self.layers = nn.ModuleList(self.layer(section) for _ in range(section.decoder_layers))
        self.norm = final_norm(section)

    def forward(
        self, target: Int[Tensor, "B T"], memory: Memory, causal: bool = True
    ) -> Float[Tensor, "B T d"]:
        if memory.packing is not None:
            assert causal
            return self.read_packed(target, memory, memory.packing)
        return self.read(target, self.start(memory), causal)

    def read(
        self, target: Int[Tensor, "R T"], state: DecoderState, causal: bool
    ) -> Float[Tensor, "R T d"]:
        """All words of each row at once; rows of one sentence stand side by side."""
        real = target != PAD
        # Padding stands at the end of a target, where the causal mask hides it from every word.
        mask = Mask(causal=True) if causal else Mask(real)
        return self.rise(self.position(self.embedding(target)), mask, state, real)

    def read_packed(
        self, target: Int[Tensor, "B T"], memory: Memory, packing: Packing
    ) -> Float[Tensor, "B T d"]:
        """All words of many sentences in each row."""
        x = self.position(self.embedding(target), -packing.target.start)
        mask = Mask(spans=earlier_in_text(packing.target))
        memory_mask = Mask(spans=Spans(*packing.read, *packing.written))
        state = replace(self.start(memory), memory_mask=memory_mask)
        return self.rise(x, mask, state, target != PAD)

    def rise(
        self, x: Float[Tensor, "R T d"], mask: Mask, state: DecoderState, real: Bool[Tensor, "R T"]
    ) -> Float[Tensor, "R T d"]:
        """Through all layers."""
        x = self.dropout(x)
        for layer, seen in zip(self.layers, state.memory, strict=True):
            x = layer(x, mask, seen, state.memory_mask, real)
        y: Float[Tensor, "R T d"] = self.norm(x, real)
        return y

    def look_up(self, memory: Memory) -> list[KeyValue]:
        """The keys and values every layer sees of the source."""
        parts = self.attentions()["cross_attention"]
        if memory.packing is not None:  # many words, of which all layers together make one product
            made = at_once(
                [each for part in parts for each in (part.key, part.value)], memory.states
            )
            heads = [split(one, parts[0].groups) for one in made]
            return [KeyValue(*pair) for pair in zip(heads[::2], heads[1::2], strict=True)]
        return [part.keys_values(memory.states, memory.real) for part in parts]

    def start(self, memory: Memory) -> DecoderState:
        """The state before the first word: encoder-decoder keys and values are computed here, once."""
        caches = [self.cache() for _ in self.layers]
        return DecoderState(self.look_up(memory), Mask(memory.real), caches, 0)

    def step(
        self, tokens: Int[Tensor, "R"], state: DecoderState
    ) -> tuple[Float[Tensor, "R d"], DecoderState]:
        """Read one more token in each row; what comes of it."""
        x = self.position(self.embedding(tokens[:, None]), state.length)
        caches = [copy(cache) for cache in state.caches]  # the state before stays as it was
        for layer, seen, cache in zip(self.layers, state.memory, caches, strict=True):
            x = layer(x, Mask(causal=True), seen, state.memory_mask, cache=cache)
        return self.norm(x)[:, 0], replace(state, caches=caches, length=state.length + 1)

    def attentions(self) -> dict[str, list[MultiHeadAttention]]:
        return {
            "decoder": _named("attention", self.layers),
            "cross_attention": _named("cross_attention", self.layers),
        }


def _named(name: str, layers: Iterable[nn.Module]) -> list[MultiHeadAttention]:
    """The attention of this name in each layer; a layer may have none."""
    parts = [getattr(layer, name, None) for layer in layers]
    return [part for part in parts if isinstance(part, MultiHeadAttention)]


def earlier_in_text(own: Span) -> Spans:
    """Each word sees those before it in its own text, and itself."""
    place = torch.arange(own.end.shape[1], dtype=own.end.dtype, device=own.end.device)
    place = place.expand_as(own.end).contiguous()
    return Spans(own.start, torch.minimum(place + 1, own.end), place, own.end)


class EncoderDecoder(Network):
    """Two stacks of layers and what joins them. Of what the layers are made, each kind of network says itself."""

    encoder_stack: ClassVar[type[Encoder]]
    decoder_stack: ClassVar[type[Decoder]]

    def __init__(self, section: recipe.Model, source_size: int, target_size: int) -> None:
        super().__init__()
        tied, bias = section.tie_output, section.output_bias
        target = Embedding(target_size, section.d_model, bias and tied)
        source = target if section.tie_embeddings else Embedding(source_size, section.d_model)
        self.encoder = self.encoder_stack(section, source)
        self.decoder = self.decoder_stack(section, target)
        self.projection = target if tied else Embedding(target_size, section.d_model, bias)
        initialize(self)

    @property
    def longest(self) -> int | None:
        parts = [*self.encoder.attentions(), *self.decoder.attentions()["cross_attention"]]
        limits = [self.encoder.position.longest, *(part.pattern.longest for part in parts)]
        return min((limit for limit in limits if limit is not None), default=None)

    def encode(self, source: Int[Tensor, "B S"], places: PositionInfo = None) -> Memory:
        memory: Memory = self.encoder(source, places)
        return memory

    def decode(self, target: Int[Tensor, "B T"], memory: Memory) -> Float[Tensor, "B T d"]:
        states: Float[Tensor, "B T d"] = self.decoder(target, memory)
        return states

    def start(self, memory: Memory) -> DecoderState:
        return self.decoder.start(memory)

    def step(
        self, tokens: Int[Tensor, "R"], state: DecoderState
    ) -> tuple[Float[Tensor, "R V"], DecoderState]:
        states, state = self.decoder.step(tokens, state)
        return self.project(states), state

    def attentions(self) -> dict[str, list[MultiHeadAttention]]:
        return {"encoder": self.encoder.attentions(), **self.decoder.attentions()}


class Transformer(EncoderDecoder):
    """Attention in both stacks."""

    encoder_stack = Encoder
    decoder_stack = Decoder
