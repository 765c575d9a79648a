"""The decoder by itself: one causal stack that reads the source and then says the target.

    source ids, target ids -> embedding + position -> N layers, each word sees those before it -> projection -> logits

What is notable:
- Sources of a batch differ in length, and the target must follow each at once. So the padding of sources stands in
  front, no word sees it, and each row counts its positions from its own first word: a row is the same alone and in
  a batch.
- Search reads the whole source in one pass and then goes on word by word with the keys and values it has seen.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard import recipe
from regard.data.special_tokens import PAD
from regard.nn.attention import Mask
from regard.nn.dropout import Dropout
from regard.nn.embeddings import Embedding
from regard.nn.layers import Cache, EncoderLayer, final_norm, initialize
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.network import Network
from regard.nn.positions import POSITIONS, PositionInfo


@dataclass(frozen=True)
class Prompt:
    """Sources with their padding in front; of a source without words there may be nothing."""

    ids: Int[Tensor, "B S"]

    @property
    def real(self) -> Bool[Tensor, "B S"]:
        return self.ids != PAD

    @property
    def padding(self) -> Int[Tensor, "B 1"]:
        """How many positions of each row are no words."""
        return (self.ids == PAD).sum(1, keepdim=True)


@dataclass(frozen=True)
class ReadState:
    """What one step of search hands to the next. Rows are sentences times beams."""

    caches: Sequence[Cache]
    real: Bool[Tensor, "R K"]
    """which of the positions read are words"""
    padding: Int[Tensor, "R 1"]

    def select(self, rows: Int[Tensor, "sentences beams"]) -> "ReadState":
        kept = rows.flatten()
        caches = [cache.select(kept) for cache in self.caches]
        return ReadState(
            caches, self.real.index_select(0, kept), self.padding.index_select(0, kept)
        )


class DecoderOnlyTransformer(Network):
    """One embedding, N layers without encoder-decoder attention, one projection."""

    def __init__(self, section: recipe.Model, source_size: int, target_size: int) -> None:
        super().__init__()
        assert source_size == target_size, "one vocabulary for both sides"
        self.embedding = Embedding(target_size, section.d_model)
        self.position = POSITIONS[section.position].on("decoder").embedding(section)
        self.dropout = Dropout(section.dropout)
        self.layers = nn.ModuleList(
            EncoderLayer(section, "decoder") for _ in range(section.decoder_layers)
        )
        self.norm = final_norm(section)
        tied = section.tie_output
        self.projection = self.embedding if tied else Embedding(target_size, section.d_model)
        initialize(self)

    @property
    def longest(self) -> int | None:
        """Source and target share the positions, half of them each."""
        longest = self.position.longest
        return None if longest is None else longest // 2

    def encode(self, source: Int[Tensor, "B S"], places: PositionInfo = None) -> Prompt:
        """Only the padding goes to the front; what the words mean is found out with the target."""
        assert places is None, "a decoder knows neither trees nor packed rows"
        order = (source != PAD).int().argsort(dim=1, stable=True)
        return Prompt(source.gather(1, order))

    def decode(self, target: Int[Tensor, "B T"], memory: Prompt) -> Float[Tensor, "B T d"]:
        states = self._read(torch.cat([memory.ids, target], dim=1), memory, [None] * self.depth)
        return states[:, memory.ids.shape[1] :]

    def start(self, memory: Prompt) -> ReadState:
        caches = [Cache() for _ in self.layers]
        if memory.ids.shape[1]:
            self._read(memory.ids, memory, caches)
        return ReadState(caches, memory.real, memory.padding)

    def step(
        self, tokens: Int[Tensor, "R"], state: ReadState
    ) -> tuple[Float[Tensor, "R V"], ReadState]:
        x = self.embedding(tokens[:, None])
        x = self.position(x, state.real.shape[1] - state.padding)
        real = torch.cat([state.real, torch.ones_like(state.padding, dtype=torch.bool)], dim=1)
        caches = [Cache(cache.seen) for cache in state.caches]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, Mask(real, causal=True), None, cache)
        return self.project(self.norm(x)[:, 0]), ReadState(caches, real, state.padding)

    def attentions(self) -> dict[str, list[MultiHeadAttention]]:
        layers = cast(Iterable[EncoderLayer], self.layers)
        return {
            "encoder": [],
            "decoder": [layer.attention for layer in layers],
            "cross_attention": [],
        }

    @property
    def depth(self) -> int:
        return len(self.layers)

    def _read(
        self, ids: Int[Tensor, "B T"], memory: Prompt, caches: Sequence[Cache | None]
    ) -> Float[Tensor, "B T d"]:
        """All positions at once; the rows begin with the prompt."""
        real = ids != PAD
        # Without a source there is no padding in front, and the causal mask hides what stands behind.
        mask = Mask(real, causal=True) if memory.ids.shape[1] else Mask(causal=True)
        start = -memory.padding if memory.ids.shape[1] else 0
        x = self.dropout(self.position(self.embedding(ids), start))
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, mask, real, cache)
        y: Float[Tensor, "B T d"] = self.norm(x, real)
        return y
