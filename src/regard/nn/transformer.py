"""The Transformer (figure 1 of the paper): ids in, logits over the vocabulary out.

    source ids -> embedding + position -> N encoder layers -> memory
    target ids -> embedding + position -> N decoder layers (looking at memory) -> projection -> logits

Learning calls ``forward``: one pass gives all T predictions at once. Search calls ``encode`` once and then ``step``
for each word; ``step`` computes only the newest position.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard import recipe
from regard.marks import PAD
from regard.nn.attention import KeysValues, Mask, MultiHeadAttention
from regard.nn.layers import RESIDUALS, Cache, DecoderLayer, EncoderLayer, initialize
from regard.nn.positions import POSITIONS


class Embedding(nn.Module):
    """Ids to vectors, times sqrt(d) (section 3.4), so that positions do not drown the words."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, width))
        nn.init.normal_(self.weight, std=width**-0.5)

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T d"]:
        return F.embedding(ids, self.weight) * math.sqrt(self.weight.shape[1])


@dataclass(frozen=True)
class Memory:
    """What the encoder made of a batch of sources."""

    states: Float[Tensor, "B S d"]
    real: Bool[Tensor, "B S"]
    """False at padding"""


@dataclass(frozen=True)
class DecoderState:
    """What one step of search hands to the next. Rows are sentences times beams, the beams of one side by side."""

    memory: Sequence[KeysValues]
    """for each layer, once for each sentence however many beams it has"""
    memory_mask: Mask
    caches: Sequence[Cache]
    """for each layer, one line for each row"""
    length: int
    """words said so far"""

    def select(self, rows: Int[Tensor, "sentences beams"]) -> "DecoderState":
        """Keep these rows, in this order; each line of the matrix belongs to one sentence."""
        before = len(self.memory[0].key)
        seen = self.caches[0].seen
        beams = 1 if seen is None else len(seen.key) // before
        caches = [cache.select(rows.flatten()) for cache in self.caches]
        if len(rows) == before:  # sentences keep their order, so all are still there
            return DecoderState(self.memory, self.memory_mask, caches, self.length)
        sentences = rows[:, 0] // beams
        assert self.memory_mask.real is not None
        return DecoderState(
            [layer.select(sentences) for layer in self.memory],
            Mask(self.memory_mask.real.index_select(0, sentences)),
            caches,
            self.length,
        )


class Transformer(nn.Module):
    def __init__(self, section: recipe.Model, source_size: int, target_size: int) -> None:
        super().__init__()
        self.target_embedding = Embedding(target_size, section.width)
        self.source_embedding = (
            self.target_embedding
            if section.tie_embeddings
            else Embedding(source_size, section.width)
        )
        self.source_position = POSITIONS[section.position](section)
        self.target_position = POSITIONS[section.position](section)
        self.dropout = nn.Dropout(section.dropout)
        self.encoder = nn.ModuleList(EncoderLayer(section) for _ in range(section.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(section) for _ in range(section.decoder_layers))
        self.encoder_norm = RESIDUALS[section.norm_place].last(section)
        self.decoder_norm = RESIDUALS[section.norm_place].last(section)
        self.projection = (
            self.target_embedding if section.tie_output else Embedding(target_size, section.width)
        )
        initialize(self)

    @property
    def longest(self) -> int | None:
        """The longest text its positions reach, marks counted; None: they have no end."""
        return self.source_position.longest

    def attentions(self) -> dict[str, list[MultiHeadAttention]]:
        """Every attention by its place, layer by layer: what a trace watches, and what can be muted."""
        encoder = cast(Sequence[EncoderLayer], self.encoder)
        decoder = cast(Sequence[DecoderLayer], self.decoder)
        return {
            "encoder": [layer.attention for layer in encoder],
            "decoder": [layer.attention for layer in decoder],
            "cross": [layer.memory_attention for layer in decoder],
        }

    def forward(
        self, source: Int[Tensor, "B S"], target: Int[Tensor, "B T"]
    ) -> Float[Tensor, "B T V"]:
        """Teacher forcing: the logits after each target word, all positions in parallel."""
        return self.project(self.decode(target, self.encode(source)))

    def encode(self, source: Int[Tensor, "B S"]) -> Memory:
        real = source != PAD
        x = self.dropout(self.source_position(self.source_embedding(source)))
        for layer in self.encoder:
            x = layer(x, Mask(real))
        return Memory(self.encoder_norm(x), real)

    def decode(self, target: Int[Tensor, "B T"], memory: Memory) -> Float[Tensor, "B T d"]:
        # Padding stands at the end of a target, where the causal mask hides it from every word.
        x = self.dropout(self.target_position(self.target_embedding(target)))
        for layer, seen in zip(self.decoder, self.look_up(memory), strict=True):
            x = layer(x, seen, Mask(memory.real))
        y: Float[Tensor, "B T d"] = self.decoder_norm(x)
        return y

    def project(self, states: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows V"]:
        return F.linear(states, self.projection.weight)

    def look_up(self, memory: Memory) -> list[KeysValues]:
        """The keys and values every decoder layer sees of the source."""
        layers = cast(Iterable[DecoderLayer], self.decoder)
        return [layer.memory_attention.keys_values(memory.states) for layer in layers]

    def start(self, memory: Memory) -> DecoderState:
        """The state before the first word: encoder-decoder keys and values are computed here, once."""
        caches = [Cache() for _ in self.decoder]
        return DecoderState(self.look_up(memory), Mask(memory.real), caches, 0)

    def step(
        self, tokens: Int[Tensor, "R"], state: DecoderState
    ) -> tuple[Float[Tensor, "R V"], DecoderState]:
        """Read one more token in each row; the logits of the next."""
        x = self.target_position(self.target_embedding(tokens[:, None]), state.length)
        caches = [Cache(cache.seen) for cache in state.caches]
        for layer, seen, cache in zip(self.decoder, state.memory, caches, strict=True):
            x = layer(x, seen, state.memory_mask, cache)
        state = DecoderState(state.memory, state.memory_mask, caches, state.length + 1)
        return self.project(self.decoder_norm(x)[:, 0]), state
