"""The parts of a layer, with packed weights. Rows are words, of all sentences and beams, one under the other."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.data.special_tokens import PAD
from regard.inference.kv_cache import BeamKVCache, dense, move
from regard.nn.attention import KeyValue
from regard.nn.feed_forward import FeedForward, Gated
from regard.nn.layers import DecoderLayer, EncoderLayer, PostNorm, PreNorm
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.norms import LayerNorm, NoNorm
from regard.nn.positions import Rotary, Tree
from regard.nn.transformer import Decoder, Encoder, Transformer

States = Float[Tensor, "rows d"]
Bias = Float[Tensor, "S 1 #Q K"] | None
"""added to the scores of attention: minus infinity where a query may not look; None: all look everywhere"""
See = Callable[[Float[Tensor, "3 S h T dk"]], tuple[Float[Tensor, "S h T dk"], KeyValue]]
"""queries, keys and values of the words at hand to the queries, and the keys and values of all words in sight"""


class Packed(Protocol):
    """A weight in the form its kernel wants."""

    bytes: int

    def __call__(self, x: Tensor, /) -> Tensor: ...


class Format(NamedTuple):
    """How weights are packed."""

    linear: Callable[[Tensor, Tensor | None, bool], Packed]
    """from a weight, its bias, and whether ReLU follows"""
    embedding: Callable[[Tensor, float], Packed]
    """from a weight, and what it is multiplied by"""
    keys: torch.dtype = torch.float32
    """what keys and values are kept in where there are many"""
    gives: torch.dtype = torch.float32
    """what linear maps give, and so what keys and values are in at first"""

    def join(self, *maps: nn.Linear, relu: bool = False, scale: float = 1.0) -> Packed:
        """Several maps of the same input as one; what the first gives is multiplied by scale."""
        weight = torch.cat([maps[0].weight * scale, *(one.weight for one in maps[1:])])
        bias = None
        if maps[0].bias is not None:
            bias = torch.cat([maps[0].bias * scale, *(one.bias for one in maps[1:])])
        return self.linear(weight, bias, relu)


class Sublayer(ABC):
    """A part of a layer with the residual connection around it."""

    def __init__(self, residual: PostNorm) -> None:
        self.norm = plain_norm(residual.norm)
        self.before = isinstance(residual, PreNorm)

    def __call__(self, x: States, *context: Any) -> States:
        if self.before:
            return added(self.inside(self.norm(x), *context), x)
        return self.norm(added(self.inside(x, *context), x))

    @abstractmethod
    def inside(self, x: States, *context: Any) -> States:
        """What is added to x; it may be written over."""


def added(y: States, x: States) -> States:
    """The residual connection, in float32; y may be written over."""
    return y.add_(x) if y.dtype is x.dtype else x + y


class SelfAttention(Sublayer):
    def __init__(self, attention: MultiHeadAttention, residual: PostNorm, pack: Format) -> None:
        super().__init__(residual)
        scale = attention.attention.score.scale
        self.joined = pack.join(attention.query, attention.key, attention.value, scale=scale)
        self.output = pack.join(attention.output)
        self.heads = attention.heads
        self.rotary = attention.relation if isinstance(attention.relation, Rotary) else None

    def inside(self, x: States, sentences: int, places: slice, see: See, bias: Bias) -> States:
        joined = self.joined(x).view(sentences, x.shape[0] // sentences, 3, self.heads, -1)
        joined = joined.permute(2, 0, 3, 1, 4)
        if self.rotary is not None:  # queries and keys, in their place
            joined[:2] = self.rotary.turn_at(joined[:2], places)
        return self.output(attend(*see(joined), bias))


def each_other(joined: Float[Tensor, "3 S h T dk"]) -> tuple[Tensor, KeyValue]:
    """The words at hand are all there is to see."""
    query, key, value = joined
    return query, KeyValue(key, value)


class CrossAttention(Sublayer):
    """Encoder-decoder attention. The beams of a sentence are queries side by side."""

    def __init__(self, attention: MultiHeadAttention, residual: PostNorm, pack: Format) -> None:
        super().__init__(residual)
        self.query = pack.join(attention.query, scale=attention.attention.score.scale)
        self.joined = pack.join(attention.key, attention.value)
        self.output = pack.join(attention.output)
        self.heads = attention.heads

    def offer(self, memory: States, sentences: int) -> KeyValue:
        """What there is to see, once for each sentence."""
        joined = self.joined(memory).view(
            sentences, memory.shape[0] // sentences, 2, self.heads, -1
        )
        key, value = joined.permute(2, 0, 3, 1, 4).contiguous()
        return KeyValue(key, value)

    def inside(self, x: States, seen: KeyValue, bias: Bias) -> States:
        sentences = seen.key.shape[0]
        query = self.query(x).view(sentences, x.shape[0] // sentences, self.heads, -1)
        return self.output(attend(query.transpose(1, 2), seen, bias))


def inference_context(device: torch.device) -> AbstractContextManager[None]:
    """For the time of a search. On a GPU: torch's own attention, not cuDNN's, which is made for many queries.

    On a CPU: torch does not ask its arguments whether they are of a kind that overrides it. A packed weight of int8
    answers by an exception, thrown and caught inside of torch: 8 microseconds, more than many a product.
    """
    if device.type == "cpu":
        plainly: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
        return plainly
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


FEW = 16
"""queries of a sentence: up to here two products and a softmax are faster than the fused kernel of a CPU"""
LARGE = 2048
"""sentences with few queries: from here on our own kernel is faster than torch's for a GPU; it takes longer to call"""


def attend(query: Float[Tensor, "S h Q dk"], seen: KeyValue, bias: Bias) -> States:
    """Attention; the scale is in the queries already. Keys, values and bias have one number format."""
    sentences, heads, queries, _ = query.shape
    dtype = seen.key.dtype
    if query.is_cuda and queries <= FEW and sentences >= LARGE:
        from regard.nn.kernels.decode_attention import decode_attention

        return decode_attention(query.to(dtype), *seen, bias).flatten(0, 1)
    if queries > FEW or query.is_cuda:
        found = F.scaled_dot_product_attention(query.to(dtype), *seen, bias, scale=1.0)
    else:
        key, value = seen.key.flatten(0, 1), seen.value.flatten(0, 1)
        asked = dense(query, dtype).view(-1, queries, query.shape[3])
        scores = torch.bmm(asked, key.transpose(1, 2))
        if bias is not None:
            scores.view(sentences, heads, queries, -1).add_(bias)
        weights = scores.softmax(-1, dtype=torch.float32).to(dtype)
        found = torch.bmm(weights, value).view(sentences, heads, queries, -1)
    wanted = dtype if found.is_cuda else torch.float32  # by the map that follows
    return dense(found.transpose(1, 2), wanted).view(sentences * queries, -1)


class PackedFeedForward(Sublayer):
    """The feed-forward network; where its activation is ReLU the kernel has it inside."""

    def __init__(self, feed_forward: FeedForward, residual: PostNorm, pack: Format) -> None:
        super().__init__(residual)
        relu = feed_forward.activation is F.relu
        self.inner = pack.join(feed_forward.inner, relu=relu)
        self.outer = pack.join(feed_forward.outer)
        self.activation = None if relu else feed_forward.activation

    def inside(self, x: States, *_: Any) -> States:
        inner = self.inner(x)
        return self.outer(inner if self.activation is None else self.activation(inner))


class PackedGatedFeedForward(Sublayer):
    """SwiGLU, its gate and its inner map as one."""

    def __init__(self, feed_forward: Gated, residual: PostNorm, pack: Format) -> None:
        super().__init__(residual)
        self.joined = pack.join(feed_forward.gate, feed_forward.inner)
        self.outer = pack.join(feed_forward.outer)

    def inside(self, x: States, *_: Any) -> States:
        gate, inner = self.joined(x).chunk(2, dim=-1)
        return self.outer(F.silu(gate) * inner)


def packed_feed_forward(layer: EncoderLayer, pack: Format) -> Sublayer:
    feed_forward, residual = layer.feed_forward, layer.feed_forward_residual
    if isinstance(feed_forward, Gated):
        return PackedGatedFeedForward(feed_forward, residual, pack)
    assert isinstance(feed_forward, FeedForward)
    return PackedFeedForward(feed_forward, residual, pack)


def plain_norm(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """A norm as a plain function where there is one: to call a module takes as long as a small norm."""
    if isinstance(norm, NoNorm):
        return lambda x: x
    if not isinstance(norm, LayerNorm):
        return lambda x: norm(x[None])[0]
    shape, weight, bias, epsilon = norm.normalized_shape, norm.weight, norm.bias, norm.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, epsilon)


# ---------------------------------------------------------------------------------------------
# A trained Transformer made ready for search: the same function, its weights packed and its past in one place.
#
# What is notable:
# - Queries, keys and values of a layer are one product; so are the keys and values of the source.
# - The keys and values of the words said so far stand in slots that all hypotheses of a sentence share: when the beam
#   is reordered none of them moves (``slots.py``).
# - Its weights are what the network's were when it was made. It cannot learn, be watched or be interfered with.


MANY = 4
"""sentences: from here on several hypotheses of each are sooner compared with keys of bfloat16. Keys and values of
float32 come from memory, not from a cache, and most of the time of attention is spent waiting for them."""


@dataclass(frozen=True)
class Memory:
    """What the encoder made of a batch of sources."""

    states: States
    sentences: int
    bias: Bias


@dataclass(frozen=True)
class PackedDecoderState:
    """What one step of search hands to the next. It serves once: what comes after is written in its place.

    A sentence that is done leaves its place to the last one, so that only one has to move. So the places of sentences
    are in another order than the rows of the search.
    """

    memory: list[KeyValue]
    """for each layer, once for each sentence however many beams it has"""
    bias: Bias
    past: BeamKVCache
    length: int = 0
    """words said so far"""
    places: Int[Tensor, " sentences"] | None = None
    """of each sentence of the search; None: in its order"""
    many: torch.dtype = torch.float32
    """what the keys and values of many hypotheses are kept in"""

    def select(self, rows: Int[Tensor, "sentences beams"]) -> PackedDecoderState:
        """Keep these rows, in this order; each line of the matrix belongs to one sentence."""
        sentences = rows[:, 0] // self.past.beams
        parents = rows - sentences[:, None] * self.past.beams
        here = self if len(rows) == self.past.sentences else self._keep(sentences)
        if here.places is not None:
            parents = parents.index_select(0, here.places.argsort())
        if self.past.beams < parents.shape[1]:
            here = here._in(self.many)
        return replace(here, past=here.past.select(parents))

    def _in(self, dtype: torch.dtype) -> PackedDecoderState:
        """Keys and values in this number format."""
        memory = [KeyValue(layer.key.to(dtype), layer.value.to(dtype)) for layer in self.memory]
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, memory=memory, bias=bias, past=self.past.to(dtype))

    def _keep(self, sentences: Int[Tensor, " fewer"]) -> PackedDecoderState:
        old = sentences if self.places is None else self.places.index_select(0, sentences)
        places, count = old.tolist(), len(old)
        free = iter(sorted({*range(count)} - {*places}))
        new = [place if place < count else next(free) for place in places]
        moves = [(one, other) for one, other in zip(places, new, strict=True) if one != other]
        for layer in self.memory:
            move(layer.key, moves)
            move(layer.value, moves)
        now = torch.tensor(new, dtype=torch.long, device=sentences.device)
        order = old.index_select(0, now.argsort())
        return PackedDecoderState(
            [KeyValue(layer.key[:count], layer.value[:count]) for layer in self.memory],
            None if self.bias is None else self.bias.index_select(0, order),
            self.past.keep(order, moves),
            self.length,
            now,
            self.many,
        )

    def placed(self, tokens: Int[Tensor, " rows"]) -> Int[Tensor, " rows"]:
        """Rows of the search in the order of their places."""
        if self.places is None:
            return tokens
        return tokens.view(len(self.places), -1).index_select(0, self.places.argsort()).flatten()

    def searched(self, x: States) -> States:
        """The way back."""
        if self.places is None:
            return x
        lines = x.view(len(self.places), -1, x.shape[1])
        return lines.index_select(0, self.places).flatten(0, 1)


class PackedTransformer:
    """What search asks of a network: ``encode``, ``start``, ``step``, ``longest``."""

    def __init__(self, network: Transformer, form: Format) -> None:
        self.longest, self.many, self.gives = network.longest, form.keys, form.gives
        self.weights: list[Packed] = []
        """all that was packed"""
        pack = form._replace(
            linear=_noted(form.linear, self.weights), embedding=_noted(form.embedding, self.weights)
        )
        self.source, self.target = Words(network.encoder, pack), Words(network.decoder, pack)
        if network.encoder.embedding is network.decoder.embedding:
            self.weights.remove(self.target.embedding)
            self.target.embedding = self.source.embedding
        self.encoder = [EncoderPart(layer, pack) for layer in _layers(network.encoder)]
        self.encoder_norm = plain_norm(network.encoder.norm)
        self.decoder = [DecoderPart(layer, pack) for layer in _layers(network.decoder)]
        self.decoder_norm = plain_norm(network.decoder.norm)
        self.projection = pack.linear(network.projection.weight, network.projection.bias, False)

    def suited(self, sentences: int) -> PackedTransformer:
        """For so many sentences, all in all: not for each batch, so that none of them depends on how they are cut."""
        if sentences >= MANY:
            return self
        few = copy(self)
        few.many = self.gives
        return few

    @property
    def bytes(self) -> int:
        """What the matrices take."""
        return sum(weight.bytes for weight in self.weights)

    def encode(self, source: Int[Tensor, "S K"], tree: Tree | None = None) -> Memory:
        """What is remembered of the source; EOS closes each row, padding follows."""
        sentences, length = source.shape
        bias = _hiding(source == PAD, self.gives)
        words = self.source.embedding(source.flatten()).view(sentences, length, -1)
        x = (words + self.source.places(length)[:length]).flatten(0, 1)
        for layer in self.encoder:
            x = layer.think(layer.attention(x, sentences, slice(0, length), each_other, bias))
        return Memory(self.encoder_norm(x), sentences, bias)

    def start(self, memory: Memory) -> PackedDecoderState:
        """The state before the first word: keys and values of the source are computed here, once."""
        seen = [layer.memory.offer(memory.states, memory.sentences) for layer in self.decoder]
        past = BeamKVCache.empty(len(seen), seen[0].key)
        return PackedDecoderState(seen, memory.bias, past, many=self.many)

    def step(
        self, tokens: Int[Tensor, " R"], state: PackedDecoderState
    ) -> tuple[Float[Tensor, "R V"], PackedDecoderState]:
        """Read one more token in each row; the logits of the next."""
        length, past = state.length, state.past.wider()
        newest = slice(length, length + 1)
        x = self.target.embedding(state.placed(tokens)) + self.target.places(length + 1)[newest]
        for number, (layer, memory) in enumerate(zip(self.decoder, state.memory, strict=True)):
            x = layer.attention(x, past.sentences, newest, partial(past.put, number), past.bias)
            x = layer.think(layer.memory(x, memory, state.bias))
        logits = self.projection(state.searched(self.decoder_norm(x)))
        return logits, replace(state, past=past, length=length + 1)


class Words:
    """Embeddings and positions."""

    def __init__(self, stack: Encoder | Decoder, pack: Format) -> None:
        weight = stack.embedding.weight
        self.embedding = pack.embedding(weight, math.sqrt(weight.shape[1]))
        self.position = stack.position
        self.table = weight.new_empty(0, weight.shape[1])

    def places(self, end: int) -> Float[Tensor, "T d"]:
        """What is added to the words at all positions before end, and perhaps more."""
        table = self.table  # another thread may exchange it meanwhile
        if end > len(table):
            more = max(end, min(2 * end, self.position.longest or 2 * end))
            table = self.table = self.position(table.new_zeros(1, more, table.shape[1]))[0]
        return table


class EncoderPart:
    def __init__(self, layer: EncoderLayer, pack: Format) -> None:
        self.attention = SelfAttention(layer.attention, layer.attention_residual, pack)
        self.think = packed_feed_forward(layer, pack)


class DecoderPart(EncoderPart):
    def __init__(self, layer: DecoderLayer, pack: Format) -> None:
        super().__init__(layer, pack)
        self.memory = CrossAttention(layer.cross_attention, layer.cross_attention_residual, pack)


def _layers(stack: Encoder | Decoder) -> Iterable[Any]:
    return cast(Iterable[Any], stack.layers)


def _noted(make: Callable[..., Packed], packed: list[Packed]) -> Callable[..., Packed]:
    """Make, and write down what was made."""

    def noted(*arguments: Any) -> Packed:
        packed.append(make(*arguments))
        return packed[-1]

    return noted


def _hiding(padding: Bool[Tensor, "S K"], dtype: torch.dtype) -> Bias:
    if not padding.any():
        return None
    bias = torch.zeros(padding.shape, dtype=dtype, device=padding.device)
    bias.masked_fill_(padding, -math.inf)
    return bias[:, None, None, :]
