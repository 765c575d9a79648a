"""The decoder-only Transformer: one causal stack reads the source and then generates the target.

    source ids, target ids -> embedding + position -> N causal layers -> projection -> logits

Notable:
- The sources of a batch differ in length, and the target must follow each source directly. So sources are padded on the
  left, nothing attends to the padding, and positions count from the first token of each row: a row has the same output
  alone and in a batch.
- Search reads the whole source in one pass and then continues token by token with the KV cache.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard import recipe
from regard.data.special_tokens import PAD
from regard.nn.attention_mask import AttentionMask
from regard.nn.dropout import Dropout
from regard.nn.kv_cache import KVCache
from regard.nn.layers import Embedding, EncoderLayer, final_norm, initialize
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.network import Network
from regard.nn.positions import POSITIONS, PositionInfo


@dataclass(frozen=True)
class Prompt:
    """Left-padded sources. S may be 0: a language model has no source."""

    ids: Int[Tensor, "B S"]

    @property
    def non_pad(self) -> Bool[Tensor, "B S"]:
        return self.ids != PAD

    @property
    def padding(self) -> Int[Tensor, "B 1"]:
        """The number of padding positions of each row."""
        return (self.ids == PAD).sum(1, keepdim=True)


@dataclass(frozen=True)
class DecoderOnlyState:
    """The state between two decoding steps. Rows are sentences x beams."""

    caches: Sequence[KVCache]
    non_pad: Bool[Tensor, "R K"]
    """True at positions so far that are not padding"""
    padding: Int[Tensor, "R 1"]
    """the number of padding positions of each row"""

    def select(self, rows: Int[Tensor, "sentences beams"]) -> "DecoderOnlyState":
        indices = rows.flatten()
        return DecoderOnlyState(
            [cache.select(indices) for cache in self.caches],
            self.non_pad.index_select(0, indices),
            self.padding.index_select(0, indices),
        )


class DecoderOnlyTransformer(Network):
    """One embedding, N causal layers without cross-attention, one projection."""

    def __init__(self, config: recipe.ModelConfig, source_vocab: int, target_vocab: int) -> None:
        super().__init__()
        assert source_vocab == target_vocab, "source and target share one vocabulary"
        self.embedding = Embedding(target_vocab, config.d_model)
        self.position = POSITIONS[config.position].for_site("decoder").embedding(config)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(
            EncoderLayer(config, "decoder") for _ in range(config.decoder_layers)
        )
        self.norm = final_norm(config)
        tied = config.tie_output
        self.projection = self.embedding if tied else Embedding(target_vocab, config.d_model)
        initialize(self)

    @property
    def max_length(self) -> int | None:
        """Source and target share the positions: half of them for each."""
        limit = self.position.max_length
        return None if limit is None else limit // 2

    def encode(self, source: Int[Tensor, "B S"], position_info: PositionInfo = None) -> Prompt:
        """Move the padding to the left. The layers run later, over source and target together."""
        assert position_info is None, "no trees and no packed rows in a decoder-only model"
        order = (source != PAD).int().argsort(dim=1, stable=True)
        return Prompt(source.gather(1, order))

    def decode(self, target: Int[Tensor, "B T"], prompt: Prompt) -> Float[Tensor, "B T d"]:
        states = self._run_layers(
            torch.cat([prompt.ids, target], dim=1), prompt, [None] * len(self.layers)
        )
        return states[:, prompt.ids.shape[1] :]

    def start(self, prompt: Prompt) -> DecoderOnlyState:
        caches = [KVCache() for _ in self.layers]
        if prompt.ids.shape[1]:
            self._run_layers(prompt.ids, prompt, caches)
        return DecoderOnlyState(caches, prompt.non_pad, prompt.padding)

    def step(
        self, tokens: Int[Tensor, "R"], state: DecoderOnlyState
    ) -> tuple[Float[Tensor, "R V"], DecoderOnlyState]:
        x = self.embedding(tokens[:, None])
        x = self.position(x, state.non_pad.shape[1] - state.padding)
        newest = torch.ones_like(state.padding, dtype=torch.bool)
        non_pad = torch.cat([state.non_pad, newest], dim=1)
        caches = [KVCache(cache.kv) for cache in state.caches]  # the old state stays valid
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, AttentionMask(non_pad, causal=True), None, cache)
        return self.project(self.norm(x)[:, 0]), DecoderOnlyState(caches, non_pad, state.padding)

    def attentions(self) -> dict[str, list[MultiHeadAttention]]:
        layers = cast(Iterable[EncoderLayer], self.layers)
        return {
            "encoder": [],
            "decoder": [layer.attention for layer in layers],
            "cross_attention": [],
        }

    def _run_layers(
        self, ids: Int[Tensor, "B T"], prompt: Prompt, caches: Sequence[KVCache | None]
    ) -> Float[Tensor, "B T d"]:
        """All positions at once. The rows of ids begin with the prompt."""
        non_pad = ids != PAD
        # Without a source there is no padding on the left, and the causal mask hides the padding on the right.
        mask = AttentionMask(non_pad if prompt.ids.shape[1] else None, causal=True)
        start = -prompt.padding if prompt.ids.shape[1] else 0
        x = self.dropout(self.position(self.embedding(ids), start))
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, mask, non_pad, cache)
        y: Float[Tensor, "B T d"] = self.norm(x, non_pad)
        return y
