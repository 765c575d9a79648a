"""PackedTransformer: a trained Transformer prepared for decoding, with packed weights and one key-value cache.

It computes the same function as ``nn.Transformer``. Notable:

- The queries, keys and values of a layer are one matrix product; so are the keys and values of cross-attention.
- The hypotheses of a sentence share one key-value cache. Reordering the beam moves none of it (``beam_kv_cache.py``).
- Rows of the hidden states are tokens: those of all sentences and beams, one below the other.
- The weights are a copy, made when it is built. It cannot be trained, traced or changed.

Shape letters: S sentences, K source length, T tokens, Q queries, h heads, dk features of a head, d features of a token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.data.special_tokens import PAD
from regard.inference.beam_kv_cache import BeamKVCache, contiguous, move_rows
from regard.nn.ensemble import EnsembleState, mean_log_probabilities
from regard.nn.kv_cache import KeyValue
from regard.nn.layers import (
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    PreNorm,
    SublayerConnection,
    SwiGLU,
)
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.norms import LayerNorm, NoNorm
from regard.nn.positions import Rotary, Tree
from regard.nn.torch_internals import without_torch_function
from regard.nn.transformer import Decoder, Encoder, Transformer

States = Float[Tensor, "rows d"]
AttentionBias = Float[Tensor, "S 1 #Q K"] | None
"""Added to the attention scores: minus infinity where a query must not attend. None: no key is masked."""
KeyValueSource = Callable[[Float[Tensor, "3 S h T dk"]], tuple[Float[Tensor, "S h T dk"], KeyValue]]
"""Queries, keys and values of the present tokens, to the queries and all keys and values to attend to."""

# ---------------------------------------------------------------------------------------------
# How weights are packed


class Packed(Protocol):
    """A weight in the layout that its kernel needs."""

    bytes: int

    def __call__(self, x: Tensor, /) -> Tensor: ...


class PackFormat(NamedTuple):
    """How the weights of a precision are packed."""

    linear: Callable[[Tensor, Tensor | None, bool], Packed]
    """packs the weight and bias of a linear map; the flag says whether ReLU follows"""
    embedding: Callable[[Tensor, float], Packed]
    """packs an embedding table; the number is a factor for all of it"""
    kv_dtype: torch.dtype = torch.float32
    """data type of cached keys and values when there are many hypotheses"""
    output_dtype: torch.dtype = torch.float32
    """data type of the outputs of linear maps, and so of keys and values at first"""
    unbounded_linear: Callable[[Tensor, Tensor | None, bool], Packed] | None = None
    """packs linear maps whose inputs have no bound, if ``linear`` needs one; None: ``linear`` needs none"""

    def fuse(self, *linears: nn.Linear, relu: bool = False, scale: float = 1.0) -> Packed:
        """Several linear maps of the same input as one. ``scale`` multiplies the output of the first."""
        weight = torch.cat([linears[0].weight * scale, *(linear.weight for linear in linears[1:])])
        bias = None
        if linears[0].bias is not None:
            bias = torch.cat([linears[0].bias * scale, *(linear.bias for linear in linears[1:])])
        return self.linear(weight, bias, relu)

    def recording(self, packed: list[Packed]) -> PackFormat:
        """The same format, which appends everything it packs to a list."""

        def record(pack: Callable[..., Packed]) -> Callable[..., Packed]:
            def pack_and_record(*arguments: Any) -> Packed:
                packed.append(pack(*arguments))
                return packed[-1]

            return pack_and_record

        return self._replace(
            linear=record(self.linear),
            embedding=record(self.embedding),
            unbounded_linear=self.unbounded_linear and record(self.unbounded_linear),
        )

    def for_unbounded_inputs(self) -> PackFormat:
        """The format for linear maps whose inputs have no bound."""
        return self._replace(linear=self.unbounded_linear or self.linear)


# ---------------------------------------------------------------------------------------------
# Sub-layers


class Sublayer(ABC):
    """A sub-layer with its residual connection and norm."""

    def __init__(self, residual: SublayerConnection, pack: PackFormat) -> None:
        self.norm = norm_function(residual.norm, pack.output_dtype)
        self.pre_norm = isinstance(residual, PreNorm)

    def __call__(self, x: States, *context: Any) -> States:
        if self.pre_norm:
            return add_residual(x, self.forward(self.norm(x), *context))
        return self.norm(x, self.forward(x, *context))

    @abstractmethod
    def forward(self, x: States, *context: Any) -> States:
        """The output to add to x; it may be overwritten."""


def add_residual(x: States, y: States) -> States:
    """x + y in float32; y may be overwritten."""
    return y.add_(x) if y.dtype is x.dtype else x + y


class NormFunction(Protocol):
    """A norm of x, or of x + y, where y may be overwritten."""

    def __call__(self, x: States, y: States | None = None, /) -> States: ...


def norm_function(norm: nn.Module, dtype: torch.dtype) -> NormFunction:
    """A norm with its addition. dtype: what linear maps return.

    On a GPU, LayerNorm returns bfloat16 if the linear maps around it compute in it. With ``norm_order: pre`` the
    residual connection stays float32, because its sums grow from layer to layer.
    """
    if isinstance(norm, LayerNorm) and norm.weight.is_cuda and dtype is torch.bfloat16:
        from regard.nn.triton_kernels import add_layer_norm

        gain, shift, epsilon = norm.weight, norm.bias, norm.eps
        return lambda x, y=None: add_layer_norm(x, y, gain, shift, epsilon)
    apply_norm = _plain_norm(norm)
    return lambda x, y=None: apply_norm(x if y is None else add_residual(x, y))


def _plain_norm(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """A norm as a plain function if possible: calling a module takes as long as a small norm."""
    if isinstance(norm, NoNorm):
        return lambda x: x
    if not isinstance(norm, LayerNorm):
        return lambda x: norm(x[None])[0]
    shape, weight, bias, epsilon = norm.normalized_shape, norm.weight, norm.bias, norm.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, epsilon)


class SelfAttention(Sublayer):
    """Self-attention, with queries, keys and values in one product."""

    def __init__(
        self, attention: MultiHeadAttention, residual: SublayerConnection, pack: PackFormat
    ) -> None:
        super().__init__(residual, pack)
        scale = attention.attention.score.scale
        self.qkv = pack.fuse(attention.query, attention.key, attention.value, scale=scale)
        self.output = pack.fuse(attention.output)
        self.heads = attention.heads
        self.rotary = attention.position if isinstance(attention.position, Rotary) else None

    def forward(
        self,
        x: States,
        sentences: int,
        positions: slice,
        keys_values: KeyValueSource,
        bias: AttentionBias,
    ) -> States:
        qkv = self.qkv(x).view(sentences, x.shape[0] // sentences, 3, self.heads, -1)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        if self.rotary is not None:  # rotate queries and keys in place
            qkv[:2] = self.rotary.rotate_at(qkv[:2], positions)
        return self.output(dot_product_attention(*keys_values(qkv), bias))


def own_keys_values(qkv: Float[Tensor, "3 S h T dk"]) -> tuple[Tensor, KeyValue]:
    """Attend to the present tokens only: the encoder."""
    query, key, value = qkv
    return query, KeyValue(key, value)


class CrossAttention(Sublayer):
    """Cross-attention. The beams of a sentence are its queries."""

    def __init__(
        self, attention: MultiHeadAttention, residual: SublayerConnection, pack: PackFormat
    ) -> None:
        super().__init__(residual, pack)
        self.query = pack.fuse(attention.query, scale=attention.attention.score.scale)
        self.key_value = pack.fuse(attention.key, attention.value)
        self.output = pack.fuse(attention.output)
        self.heads = attention.heads

    def keys_values(self, encoded: States, sentences: int) -> KeyValue:
        """The keys and values of the encoder output, once per sentence."""
        length = encoded.shape[0] // sentences
        kv = self.key_value(encoded).view(sentences, length, 2, self.heads, -1)
        key, value = kv.permute(2, 0, 3, 1, 4).contiguous()
        return KeyValue(key, value)

    def forward(self, x: States, kv: KeyValue, bias: AttentionBias) -> States:
        sentences = kv.key.shape[0]
        query = self.query(x).view(sentences, x.shape[0] // sentences, self.heads, -1)
        return self.output(dot_product_attention(query.transpose(1, 2), kv, bias))


class PackedFeedForward(Sublayer):
    """The feed-forward network. If its activation is ReLU, the kernel of the first map applies it."""

    def __init__(
        self, feed_forward: FeedForward, residual: SublayerConnection, pack: PackFormat
    ) -> None:
        super().__init__(residual, pack)
        relu = feed_forward.activation is F.relu
        self.inner = pack.fuse(feed_forward.inner, relu=relu)
        self.outer = pack.fuse(feed_forward.outer)
        self.activation = None if relu else feed_forward.activation

    def forward(self, x: States, *_: Any) -> States:
        inner = self.inner(x)
        return self.outer(inner if self.activation is None else self.activation(inner))


class PackedGatedFeedForward(Sublayer):
    """SwiGLU, with its gate and its inner map in one product."""

    def __init__(
        self, feed_forward: SwiGLU, residual: SublayerConnection, pack: PackFormat
    ) -> None:
        super().__init__(residual, pack)
        self.gate_inner = pack.fuse(feed_forward.gate, feed_forward.inner)
        self.outer = pack.fuse(feed_forward.outer)

    def forward(self, x: States, *_: Any) -> States:
        gate, inner = self.gate_inner(x).chunk(2, dim=-1)
        return self.outer(F.silu(gate) * inner)


def pack_feed_forward(layer: EncoderLayer, pack: PackFormat) -> Sublayer:
    feed_forward, residual = layer.feed_forward, layer.feed_forward_residual
    if isinstance(feed_forward, SwiGLU):
        return PackedGatedFeedForward(feed_forward, residual, pack)
    assert isinstance(feed_forward, FeedForward)
    return PackedFeedForward(feed_forward, residual, pack)


# ---------------------------------------------------------------------------------------------
# Attention


FEW_QUERIES = 16
"""queries per sentence up to which two products and a softmax are faster than the fused kernel on a CPU"""
LARGE_BATCH = 512
"""sentences with few queries from which on ``decode_attention`` is faster than torch's kernels on a GPU"""


def dot_product_attention(
    query: Float[Tensor, "S h Q dk"], kv: KeyValue, bias: AttentionBias
) -> States:
    """Dot-product attention. The queries are already scaled. Keys, values and bias have the same data type."""
    sentences, heads, queries, _ = query.shape
    dtype = kv.key.dtype
    if query.is_cuda and queries <= FEW_QUERIES and sentences >= LARGE_BATCH:
        from regard.nn.triton_kernels import decode_attention

        return decode_attention(query.to(dtype), *kv, bias).flatten(0, 1)
    if queries > FEW_QUERIES or query.is_cuda:
        output = F.scaled_dot_product_attention(query.to(dtype), *kv, bias, scale=1.0)
    else:
        key, value = kv.key.flatten(0, 1), kv.value.flatten(0, 1)
        flat_query = contiguous(query, dtype).view(-1, queries, query.shape[3])
        scores = torch.bmm(flat_query, key.transpose(1, 2))
        if bias is not None:
            scores.view(sentences, heads, queries, -1).add_(bias)
        weights = scores.softmax(-1, dtype=torch.float32).to(dtype)
        output = torch.bmm(weights, value).view(sentences, heads, queries, -1)
    output_dtype = dtype if output.is_cuda else torch.float32  # what the next linear map reads
    return contiguous(output.transpose(1, 2), output_dtype).view(sentences * queries, -1)


def inference_context(device: torch.device) -> AbstractContextManager[None]:
    """The context to decode in. GPU: no cuDNN attention, which is made for many queries. CPU: fewer checks per call."""
    if device.type == "cpu":
        return without_torch_function()
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


# ---------------------------------------------------------------------------------------------
# Embeddings and layers


class PackedEmbedding:
    """Token embeddings and positions."""

    def __init__(self, stack: Encoder | Decoder, pack: PackFormat) -> None:
        weight = stack.embedding.weight
        self.embedding = pack.embedding(weight, math.sqrt(weight.shape[1]))
        self.position = stack.position
        self.table = weight.new_empty(0, weight.shape[1])

    def positions(self, end: int) -> Float[Tensor, "T d"]:
        """What is added to the tokens at all positions before ``end``, and possibly more."""
        table = self.table  # another thread may replace it meanwhile
        if end > len(table):
            length = max(end, min(2 * end, self.position.max_length or 2 * end))
            table = self.table = self.position(table.new_zeros(1, length, table.shape[1]))[0]
        return table


class PackedEncoderLayer:
    """Self-attention and feed-forward network."""

    def __init__(self, layer: EncoderLayer, pack: PackFormat, bounded_inputs: bool) -> None:
        """bounded_inputs: whether the inputs of the layer have a bound, see ``has_bounded_inputs``."""
        # Without a norm before attention, its output is as large as its input.
        attention_pack = pack if bounded_inputs else pack.for_unbounded_inputs()
        self.self_attention = SelfAttention(
            layer.attention, layer.attention_residual, attention_pack
        )
        self.feed_forward = pack_feed_forward(layer, pack)


class PackedDecoderLayer(PackedEncoderLayer):
    """Self-attention, cross-attention and feed-forward network."""

    def __init__(self, layer: DecoderLayer, pack: PackFormat, bounded_inputs: bool) -> None:
        super().__init__(layer, pack, bounded_inputs)
        self.cross_attention = CrossAttention(
            layer.cross_attention, layer.cross_attention_residual, pack
        )


Layer = TypeVar("Layer", bound=PackedEncoderLayer)


def pack_layers(
    layer_class: type[Layer], stack: Encoder | Decoder, pack: PackFormat
) -> list[Layer]:
    layers = cast(Iterable[Any], stack.layers)
    return [
        layer_class(layer, pack, number > 0 or has_bounded_inputs(stack))
        for number, layer in enumerate(layers)
    ]


def has_bounded_inputs(stack: Encoder | Decoder) -> bool:
    """Whether the first linear map of a stack has bounded inputs: normalized, or with bounded positions."""
    return isinstance(stack.layers[0].attention_residual, PreNorm) or stack.position.bounded


# ---------------------------------------------------------------------------------------------
# The network


MANY_SENTENCES = 4
"""Number of sentences from which on beams attend to keys and values of bfloat16. In float32 these come from memory
instead of a cache, and attention spends most of its time waiting for them."""


@dataclass(frozen=True)
class PackedEncoderOutput:
    """The encoder output of a batch."""

    states: States
    sentences: int
    bias: AttentionBias
    """masks padding"""


@dataclass(frozen=True)
class PackedDecoderState:
    """What the decoder carries from one decoding step to the next. Use it once: the next state overwrites its buffers.

    When a sentence is done, the last one takes its place in the buffers, so that only one has to move. Therefore the
    order of sentences in the buffers differs from the order of rows in the search.
    """

    cross_kv: list[KeyValue]
    """for each layer, the keys and values of the source, once per sentence"""
    bias: AttentionBias
    """masks source padding"""
    cache: BeamKVCache
    """keys and values of the generated tokens"""
    length: int = 0
    """number of generated tokens"""
    buffer_rows: Int[Tensor, " sentences"] | None = None
    """the row of each sentence of the search in the buffers; None: the same order"""
    beam_dtype: torch.dtype = torch.float32
    """data type of keys and values once sentences have several hypotheses"""

    def select(self, rows: Int[Tensor, "sentences beams"]) -> PackedDecoderState:
        """Keep these rows, in this order; each line has the rows of one sentence."""
        sentences = rows[:, 0] // self.cache.beams
        parents = rows - sentences[:, None] * self.cache.beams
        state = self if len(rows) == self.cache.sentences else self._keep_sentences(sentences)
        if state.buffer_rows is not None:
            parents = parents.index_select(0, state.buffer_rows.argsort())
        if self.cache.beams < parents.shape[1]:
            state = state._to(self.beam_dtype)
        return replace(state, cache=state.cache.select_beams(parents))

    def _to(self, dtype: torch.dtype) -> PackedDecoderState:
        """The state with keys and values in this data type."""
        cross_kv = [KeyValue(layer.key.to(dtype), layer.value.to(dtype)) for layer in self.cross_kv]
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, cross_kv=cross_kv, bias=bias, cache=self.cache.to(dtype))

    def _keep_sentences(self, sentences: Int[Tensor, " fewer"]) -> PackedDecoderState:
        """Keep these sentences: move those at the end of the buffers to the rows that become free."""
        rows = sentences
        if self.buffer_rows is not None:
            rows = self.buffer_rows.index_select(0, sentences)
        current_rows, count = rows.tolist(), len(rows)
        free_rows = iter(sorted({*range(count)} - {*current_rows}))
        new_rows = [row if row < count else next(free_rows) for row in current_rows]
        moves = [
            (source, destination)
            for source, destination in zip(current_rows, new_rows, strict=True)
            if source != destination
        ]
        for layer in self.cross_kv:
            move_rows(layer.key, moves)
            move_rows(layer.value, moves)
        buffer_rows = torch.tensor(new_rows, dtype=torch.long, device=sentences.device)
        order = rows.index_select(0, buffer_rows.argsort())
        return PackedDecoderState(
            [KeyValue(layer.key[:count], layer.value[:count]) for layer in self.cross_kv],
            None if self.bias is None else self.bias.index_select(0, order),
            self.cache.keep_sentences(order, moves),
            self.length,
            buffer_rows,
            self.beam_dtype,
        )

    def to_buffer_order(self, tokens: Int[Tensor, " rows"]) -> Int[Tensor, " rows"]:
        """Rows of the search in the order of the buffers."""
        if self.buffer_rows is None:
            return tokens
        by_sentence = tokens.view(len(self.buffer_rows), -1)
        return by_sentence.index_select(0, self.buffer_rows.argsort()).flatten()

    def to_search_order(self, x: States) -> States:
        """Rows of the buffers in the order of the search."""
        if self.buffer_rows is None:
            return x
        by_sentence = x.view(len(self.buffer_rows), -1, x.shape[1])
        return by_sentence.index_select(0, self.buffer_rows).flatten(0, 1)


class PackedTransformer:
    """The part of a network that decoding needs: ``encode``, ``start``, ``step`` and ``max_length``."""

    def __init__(self, network: Transformer, pack_format: PackFormat) -> None:
        self.max_length = network.max_length
        self.output_dtype, self.beam_dtype = pack_format.output_dtype, pack_format.kv_dtype
        self.weights: list[Packed] = []
        """everything that was packed"""
        pack = pack_format.recording(self.weights)
        self.source = PackedEmbedding(network.encoder, pack)
        self.target = PackedEmbedding(network.decoder, pack)
        if network.encoder.embedding is network.decoder.embedding:
            self.weights.remove(self.target.embedding)
            self.target.embedding = self.source.embedding
        self.encoder = pack_layers(PackedEncoderLayer, network.encoder, pack)
        self.encoder_norm = norm_function(network.encoder.norm, pack_format.output_dtype)
        self.decoder = pack_layers(PackedDecoderLayer, network.decoder, pack)
        self.decoder_norm = norm_function(network.decoder.norm, pack_format.output_dtype)
        self.projection = pack.linear(network.projection.weight, network.projection.bias, False)

    def for_sentences(self, sentences: int) -> PackedTransformer:
        """The network with the cache data type that is fastest for this many sentences.

        Give the number of all sentences, not of a batch, so that results do not depend on how batches are formed.
        """
        if sentences >= MANY_SENTENCES:
            return self
        network = copy(self)
        network.beam_dtype = self.output_dtype
        return network

    @property
    def bytes(self) -> int:
        """Size of the packed weights."""
        return sum(weight.bytes for weight in self.weights)

    def encode(self, source: Int[Tensor, "S K"], tree: Tree | None = None) -> PackedEncoderOutput:
        """Run the encoder. Each row of the source ends with EOS, then padding."""
        sentences, length = source.shape
        bias = _padding_bias(source == PAD, self.output_dtype)
        tokens = self.source.embedding(source.flatten()).view(sentences, length, -1)
        x = (tokens + self.source.positions(length)[:length]).flatten(0, 1)
        positions = slice(0, length)
        for layer in self.encoder:
            x = layer.self_attention(x, sentences, positions, own_keys_values, bias)
            x = layer.feed_forward(x)
        return PackedEncoderOutput(self.encoder_norm(x), sentences, bias)

    def start(self, encoder_output: PackedEncoderOutput) -> PackedDecoderState:
        """The state before the first token. The keys and values of the source are computed here, once."""
        kv = [
            layer.cross_attention.keys_values(encoder_output.states, encoder_output.sentences)
            for layer in self.decoder
        ]
        cache = BeamKVCache.empty(len(kv), kv[0].key)
        return PackedDecoderState(kv, encoder_output.bias, cache, beam_dtype=self.beam_dtype)

    def step(
        self, tokens: Int[Tensor, " R"], state: PackedDecoderState
    ) -> tuple[Float[Tensor, "R V"], PackedDecoderState]:
        """Read one token in each row. Returns the logits of the next token and the new state."""
        length, cache = state.length, state.cache.allocate()
        position = slice(length, length + 1)
        embedded = self.target.embedding(state.to_buffer_order(tokens))
        x = embedded + self.target.positions(length + 1)[position]
        for number, (layer, kv) in enumerate(zip(self.decoder, state.cross_kv, strict=True)):
            write = partial(cache.write, number)
            x = layer.self_attention(x, cache.sentences, position, write, cache.bias)
            x = layer.feed_forward(layer.cross_attention(x, kv, state.bias))
        logits = self.projection(state.to_search_order(self.decoder_norm(x)))
        return logits, replace(state, cache=cache, length=length + 1)


def _padding_bias(padding: Bool[Tensor, "S K"], dtype: torch.dtype) -> AttentionBias:
    """The attention bias that masks padding; None if there is none."""
    if not padding.any():
        return None
    bias = torch.zeros(padding.shape, dtype=dtype, device=padding.device)
    bias.masked_fill_(padding, -math.inf)
    return bias[:, None, None, :]


# ---------------------------------------------------------------------------------------------
# Several packed networks that decode together, see ``nn/ensemble.py``


class PackedEnsemble:
    """The same function as ``nn.ensemble.Ensemble``, with the interface of ``PackedTransformer``."""

    def __init__(self, members: Sequence[PackedTransformer]) -> None:
        self.members = members

    def for_sentences(self, sentences: int) -> PackedEnsemble:
        """The ensemble with the cache data type that is fastest for this many sentences."""
        return PackedEnsemble([member.for_sentences(sentences) for member in self.members])

    @property
    def bytes(self) -> int:
        """Size of the packed weights."""
        return sum(member.bytes for member in self.members)

    def encode(
        self, source: Int[Tensor, "S K"], tree: Tree | None = None
    ) -> list[PackedEncoderOutput]:
        """The encoder output of each member."""
        return [member.encode(source, tree) for member in self.members]

    def start(self, encoder_outputs: list[PackedEncoderOutput]) -> EnsembleState:
        """The state before the first token."""
        pairs = zip(self.members, encoder_outputs, strict=True)
        return EnsembleState([member.start(encoded) for member, encoded in pairs])

    def step(
        self, tokens: Int[Tensor, " R"], state: EnsembleState
    ) -> tuple[Float[Tensor, "R V"], EnsembleState]:
        """Read one token in each row. Returns the log-probabilities of the next token and the new state."""
        states = cast(Sequence[PackedDecoderState], state.states)
        pairs = zip(self.members, states, strict=True)
        steps: list[tuple[Tensor, Any]] = [
            member.step(tokens, member_state) for member, member_state in pairs
        ]
        logits = mean_log_probabilities([member_logits for member_logits, _ in steps])
        return logits, EnsembleState([new_state for _, new_state in steps])
