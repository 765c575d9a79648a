"""The parts of a layer, with packed weights. Rows are words, of all sentences and beams, one under the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.fast.slots import dense
from regard.nn.attention import KeysValues
from regard.nn.feedforward import FeedForward, Gated
from regard.nn.heads import MultiHeadAttention
from regard.nn.layers import EncoderLayer, NormAfter, NormBefore
from regard.nn.norms import LayerNorm, NoNorm
from regard.nn.positions import Rotary

States = Float[Tensor, "rows d"]
Bias = Float[Tensor, "S 1 #Q K"] | None
"""added to the scores of attention: minus infinity where a query may not look; None: all look everywhere"""
See = Callable[[Float[Tensor, "3 S h T dk"]], tuple[Float[Tensor, "S h T dk"], KeysValues]]
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

    def __init__(self, residual: NormAfter) -> None:
        self.norm = plain_norm(residual.norm)
        self.before = isinstance(residual, NormBefore)

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
    def __init__(self, attention: MultiHeadAttention, residual: NormAfter, pack: Format) -> None:
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


def each_other(joined: Float[Tensor, "3 S h T dk"]) -> tuple[Tensor, KeysValues]:
    """The words at hand are all there is to see."""
    query, key, value = joined
    return query, KeysValues(key, value)


class MemoryAttention(Sublayer):
    """Encoder-decoder attention. The beams of a sentence are queries side by side."""

    def __init__(self, attention: MultiHeadAttention, residual: NormAfter, pack: Format) -> None:
        super().__init__(residual)
        self.query = pack.join(attention.query, scale=attention.attention.score.scale)
        self.joined = pack.join(attention.key, attention.value)
        self.output = pack.join(attention.output)
        self.heads = attention.heads

    def offer(self, memory: States, sentences: int) -> KeysValues:
        """What there is to see, once for each sentence."""
        joined = self.joined(memory).view(
            sentences, memory.shape[0] // sentences, 2, self.heads, -1
        )
        key, value = joined.permute(2, 0, 3, 1, 4).contiguous()
        return KeysValues(key, value)

    def inside(self, x: States, seen: KeysValues, bias: Bias) -> States:
        sentences = seen.key.shape[0]
        query = self.query(x).view(sentences, x.shape[0] // sentences, self.heads, -1)
        return self.output(attend(query.transpose(1, 2), seen, bias))


def without_detours(device: torch.device) -> AbstractContextManager[None]:
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


def attend(query: Float[Tensor, "S h Q dk"], seen: KeysValues, bias: Bias) -> States:
    """Attention; the scale is in the queries already. Keys, values and bias have one number format."""
    sentences, heads, queries, _ = query.shape
    dtype = seen.key.dtype
    if query.is_cuda and queries <= FEW and sentences >= LARGE:
        from regard.nn.kernels.few import attend_few

        return attend_few(query.to(dtype), *seen, bias).flatten(0, 1)
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


class Thinking(Sublayer):
    """The feed-forward network; where its activation is ReLU the kernel has it inside."""

    def __init__(self, feedforward: FeedForward, residual: NormAfter, pack: Format) -> None:
        super().__init__(residual)
        relu = feedforward.activation is F.relu
        self.inner = pack.join(feedforward.inner, relu=relu)
        self.outer = pack.join(feedforward.outer)
        self.activation = None if relu else feedforward.activation

    def inside(self, x: States, *_: Any) -> States:
        inner = self.inner(x)
        return self.outer(inner if self.activation is None else self.activation(inner))


class GatedThinking(Sublayer):
    """SwiGLU, its gate and its inner map as one."""

    def __init__(self, feedforward: Gated, residual: NormAfter, pack: Format) -> None:
        super().__init__(residual)
        self.joined = pack.join(feedforward.gate, feedforward.inner)
        self.outer = pack.join(feedforward.outer)

    def inside(self, x: States, *_: Any) -> States:
        gate, inner = self.joined(x).chunk(2, dim=-1)
        return self.outer(F.silu(gate) * inner)


def thinking(layer: EncoderLayer, pack: Format) -> Sublayer:
    feedforward, residual = layer.feedforward, layer.feedforward_residual
    if isinstance(feedforward, Gated):
        return GatedThinking(feedforward, residual, pack)
    assert isinstance(feedforward, FeedForward)
    return Thinking(feedforward, residual, pack)


def plain_norm(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """A norm as a plain function where there is one: to call a module takes as long as a small norm."""
    if isinstance(norm, NoNorm):
        return lambda x: x
    if not isinstance(norm, LayerNorm):
        return lambda x: norm(x[None])[0]
    shape, weight, bias, epsilon = norm.normalized_shape, norm.weight, norm.bias, norm.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, epsilon)
