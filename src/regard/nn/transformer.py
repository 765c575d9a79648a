"""The Transformer (figure 1 of the paper): token ids in, logits over the vocabulary out.

    source ids -> embedding + position -> N encoder layers -> encoder output
    target ids -> embedding + position -> N decoder layers with cross-attention -> projection -> logits

Notable:
- Training calls ``forward``: one pass gives the predictions at all T positions.
- Search calls ``encode`` once and then ``step`` for each token. A step computes only the newest position: keys and
  values of earlier ones are in a KV cache, and those of the encoder output are computed once per sentence, not once per
  beam.
- A row may hold one sentence, or many sentences end to end (``Packing``), which a GPU processes without padding.
- ``Encoder``, ``Decoder`` and ``EncoderDecoder`` work with any kind of layer: see ``lstm`` and ``convolution``.
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
from regard.nn.attention_mask import AttentionMask, AttentionSpans
from regard.nn.dropout import Dropout
from regard.nn.kv_cache import KeyValue, KVCache
from regard.nn.layers import DecoderLayer, Embedding, EncoderLayer, final_norm, initialize
from regard.nn.multi_head_attention import MultiHeadAttention, fused_linear, split_heads
from regard.nn.network import Network
from regard.nn.positions import POSITIONS, Packing, PositionInfo, RowSpan, Start, Tree

# Encoder


@dataclass(frozen=True)
class EncoderOutput:
    """The output of the encoder for a batch of sources."""

    states: Float[Tensor, "B S d"]
    non_pad: Bool[Tensor, "B S"]
    """True at tokens that are not padding"""
    packing: Packing | None = None
    """how the rows are packed; None for one sentence per row"""


class Encoder(nn.Module):
    """Embedding and position, then N layers in which every token attends to every other."""

    layer: ClassVar[type[nn.Module]] = EncoderLayer

    def __init__(self, config: recipe.ModelConfig, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.position = POSITIONS[config.position].for_site("encoder").embedding(config)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(self.layer(config) for _ in range(config.encoder_layers))
        self.norm = final_norm(config)

    def forward(
        self, source: Int[Tensor, "B S"], position_info: PositionInfo = None
    ) -> EncoderOutput:
        non_pad = source != PAD
        packing = position_info if isinstance(position_info, Packing) else None
        tree = position_info if isinstance(position_info, Tree) else None
        mask = AttentionMask(non_pad, tree_distance=None if tree is None else tree.distance)
        start: Start = 0
        if packing is not None:
            mask = AttentionMask(spans=AttentionSpans(*packing.source, *packing.source))
            start = -packing.source.start
        x = self.dropout(self.position(self.embedding(source), start, tree))
        for layer in self.layers:
            x = layer(x, mask, non_pad)
        return EncoderOutput(self.norm(x, non_pad), non_pad, packing)

    def attentions(self) -> dict[str, list[MultiHeadAttention]]:
        """The self-attention of each layer."""
        return {"encoder": _attentions_named("attention", self.layers)}


# Decoder


@runtime_checkable
class LayerCache(Protocol):
    """What a decoder layer stores of the tokens decoded so far: a KV cache in the Transformer."""

    def select(self, rows: Tensor) -> "LayerCache": ...


@dataclass(frozen=True)
class DecoderState:
    """What the decoder carries from one decoding step to the next.

    Rows are sentences x beams, with the beams of a sentence side by side.
    """

    cross_kv: Sequence[KeyValue]
    """for each layer, the cross-attention keys and values: one row per sentence, for any number of beams"""
    cross_mask: AttentionMask
    caches: Sequence[LayerCache]
    """for each layer, its cache: one row per beam"""
    length: int
    """number of tokens decoded so far"""
    beams: int = 1
    """rows per sentence"""

    def select(self, rows: Int[Tensor, "sentences beams"]) -> "DecoderState":
        """Keep these rows, in this order. Each row of the matrix has rows of one sentence."""
        caches = [cache.select(rows.flatten()) for cache in self.caches]
        beams = rows.shape[1]
        if len(rows) == len(self.cross_kv[0].key):  # no sentence was dropped
            return DecoderState(self.cross_kv, self.cross_mask, caches, self.length, beams)
        sentences = rows[:, 0] // self.beams
        assert self.cross_mask.non_pad is not None
        return DecoderState(
            [kv.select(sentences) for kv in self.cross_kv],
            AttentionMask(self.cross_mask.non_pad.index_select(0, sentences)),
            caches,
            self.length,
            beams,
        )


class Decoder(nn.Module):
    """Embedding and position, then N layers in which a token attends to earlier tokens and to the encoder output."""

    layer: ClassVar[type[nn.Module]] = DecoderLayer
    cache: ClassVar[type[LayerCache]] = KVCache

    def __init__(self, config: recipe.ModelConfig, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.position = POSITIONS[config.position].for_site("decoder").embedding(config)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(self.layer(config) for _ in range(config.decoder_layers))
        self.norm = final_norm(config)

    # All positions at once

    def forward(
        self, target: Int[Tensor, "B T"], encoder_output: EncoderOutput, causal: bool = True
    ) -> Float[Tensor, "B T d"]:
        """The states at all positions, from the encoder output. causal: no token attends to later ones."""
        state = self.start(encoder_output)
        if encoder_output.packing is not None:
            assert causal
            return self.decode_packed(target, state, encoder_output.packing)
        return self.decode_padded(target, state, causal)

    def decode_padded(
        self, target: Int[Tensor, "R T"], state: DecoderState, causal: bool
    ) -> Float[Tensor, "R T d"]:
        """The states at all positions of each row. Rows of the same sentence are side by side."""
        non_pad = target != PAD
        # Targets are padded at the end, where the causal mask hides the padding from every token.
        mask = AttentionMask(causal=True) if causal else AttentionMask(non_pad)
        return self._run_layers(self.position(self.embedding(target)), mask, state, non_pad)

    def decode_packed(
        self, target: Int[Tensor, "B T"], state: DecoderState, packing: Packing
    ) -> Float[Tensor, "B T d"]:
        """Like ``decode_padded``, for packed rows, which hold many sentences."""
        x = self.position(self.embedding(target), -packing.target.start)
        mask = AttentionMask(spans=causal_spans(packing.target))
        cross_spans = AttentionSpans(*packing.source_of_target, *packing.target_of_source)
        state = replace(state, cross_mask=AttentionMask(spans=cross_spans))
        return self._run_layers(x, mask, state, target != PAD)

    def _run_layers(
        self,
        x: Float[Tensor, "R T d"],
        mask: AttentionMask,
        state: DecoderState,
        non_pad: Bool[Tensor, "R T"],
    ) -> Float[Tensor, "R T d"]:
        x = self.dropout(x)
        for layer, kv in zip(self.layers, state.cross_kv, strict=True):
            x = layer(x, mask, kv, state.cross_mask, non_pad)
        y: Float[Tensor, "R T d"] = self.norm(x, non_pad)
        return y

    # Step by step

    def start(self, encoder_output: EncoderOutput) -> DecoderState:
        """The state before the first token. Cross-attention keys and values are computed here, once."""
        caches = [self.cache() for _ in self.layers]
        return DecoderState(
            self.cross_attention_kv(encoder_output),
            AttentionMask(encoder_output.non_pad),
            caches,
            0,
        )

    def cross_attention_kv(self, encoder_output: EncoderOutput) -> list[KeyValue]:
        """The cross-attention keys and values of each layer."""
        modules = self.attentions()["cross_attention"]
        if encoder_output.packing is None:
            return [
                module.keys_values(encoder_output.states, encoder_output.non_pad)
                for module in modules
            ]
        # A packed row is long: one matrix product for all layers is faster.
        linear = [layer for module in modules for layer in (module.key, module.value)]
        projected = fused_linear(linear, encoder_output.states)
        heads = [split_heads(states, modules[0].kv_heads) for states in projected]
        return [KeyValue(*pair) for pair in zip(heads[::2], heads[1::2], strict=True)]

    def step(
        self, tokens: Int[Tensor, "R"], state: DecoderState
    ) -> tuple[Float[Tensor, "R d"], DecoderState]:
        """Feed one more token of each row; returns its state, and the new decoder state."""
        x = self.position(self.embedding(tokens[:, None]), state.length)
        caches = [copy(cache) for cache in state.caches]  # the old state stays valid
        for layer, kv, cache in zip(self.layers, state.cross_kv, caches, strict=True):
            x = layer(x, AttentionMask(causal=True), kv, state.cross_mask, cache=cache)
        return self.norm(x)[:, 0], replace(state, caches=caches, length=state.length + 1)

    def attentions(self) -> dict[str, list[MultiHeadAttention]]:
        """The self-attention and the cross-attention of each layer."""
        return {
            "decoder": _attentions_named("attention", self.layers),
            "cross_attention": _attentions_named("cross_attention", self.layers),
        }


def causal_spans(text: RowSpan) -> AttentionSpans:
    """The causal mask of packed rows: each token attends to itself and to earlier tokens of its own text."""
    position = torch.arange(text.end.shape[1], dtype=text.end.dtype, device=text.end.device)
    position = position.expand_as(text.end).contiguous()
    return AttentionSpans(text.start, torch.minimum(position + 1, text.end), position, text.end)


def _attentions_named(name: str, layers: Iterable[nn.Module]) -> list[MultiHeadAttention]:
    """The attention module of this name in each layer that has one."""
    modules = [getattr(layer, name, None) for layer in layers]
    return [module for module in modules if isinstance(module, MultiHeadAttention)]


# Encoder and decoder


class EncoderDecoder(Network):
    """An encoder, a decoder, embeddings and the output projection, which may be one matrix (weight tying, section 3.4).

    Subclasses select the kind of layer.
    """

    encoder_class: ClassVar[type[Encoder]]
    decoder_class: ClassVar[type[Decoder]]

    def __init__(self, config: recipe.ModelConfig, source_vocab: int, target_vocab: int) -> None:
        super().__init__()
        tied, bias = config.tie_output, config.output_bias
        target = Embedding(target_vocab, config.d_model, bias and tied)
        source = target if config.tie_embeddings else Embedding(source_vocab, config.d_model)
        self.encoder = self.encoder_class(config, source)
        self.decoder = self.decoder_class(config, target)
        self.projection = target if tied else Embedding(target_vocab, config.d_model, bias)
        initialize(self)

    @property
    def max_length(self) -> int | None:
        attentions = self.attentions()
        modules = [*attentions["encoder"], *attentions["cross_attention"]]
        limits = [self.encoder.position.max_length]
        limits += [module.pattern.max_length for module in modules]
        return min((limit for limit in limits if limit is not None), default=None)

    def encode(
        self, source: Int[Tensor, "B S"], position_info: PositionInfo = None
    ) -> EncoderOutput:
        encoder_output: EncoderOutput = self.encoder(source, position_info)
        return encoder_output

    def decode(
        self, target: Int[Tensor, "B T"], encoder_output: EncoderOutput
    ) -> Float[Tensor, "B T d"]:
        states: Float[Tensor, "B T d"] = self.decoder(target, encoder_output)
        return states

    def start(self, encoder_output: EncoderOutput) -> DecoderState:
        return self.decoder.start(encoder_output)

    def step(
        self, tokens: Int[Tensor, "R"], state: DecoderState
    ) -> tuple[Float[Tensor, "R V"], DecoderState]:
        states, state = self.decoder.step(tokens, state)
        return self.project(states), state

    def attentions(self) -> dict[str, list[MultiHeadAttention]]:
        return {**self.encoder.attentions(), **self.decoder.attentions()}


class Transformer(EncoderDecoder):
    """The encoder-decoder Transformer of the paper."""

    encoder_class = Encoder
    decoder_class = Decoder
