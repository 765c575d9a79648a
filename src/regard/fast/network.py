"""A trained Transformer made ready for search: the same function, its weights packed and its past in one place.

What is notable:
- Queries, keys and values of a layer are one product; so are the keys and values of the source.
- The keys and values of the words said so far stand in slots that all hypotheses of a sentence share: when the beam
  is reordered none of them moves (``slots.py``).
- Its weights are what the network's were when it was made. It cannot learn, be watched or be interfered with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.fast.layers import (
    Bias,
    Format,
    MemoryAttention,
    Packed,
    SelfAttention,
    States,
    each_other,
    plain_norm,
    thinking,
)
from regard.fast.slots import Slots, move
from regard.marks import PAD
from regard.nn.attention import KeysValues
from regard.nn.layers import DecoderLayer, EncoderLayer
from regard.nn.positions import Tree
from regard.nn.transformer import Decoder, Encoder, Transformer

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
class FastState:
    """What one step of search hands to the next. It serves once: what comes after is written in its place.

    A sentence that is done leaves its place to the last one, so that only one has to move. So the places of sentences
    are in another order than the rows of the search.
    """

    memory: list[KeysValues]
    """for each layer, once for each sentence however many beams it has"""
    bias: Bias
    past: Slots
    length: int = 0
    """words said so far"""
    places: Int[Tensor, " sentences"] | None = None
    """of each sentence of the search; None: in its order"""
    many: torch.dtype = torch.float32
    """what the keys and values of many hypotheses are kept in"""

    def select(self, rows: Int[Tensor, "sentences beams"]) -> FastState:
        """Keep these rows, in this order; each line of the matrix belongs to one sentence."""
        sentences = rows[:, 0] // self.past.beams
        parents = rows - sentences[:, None] * self.past.beams
        here = self if len(rows) == self.past.sentences else self._keep(sentences)
        if here.places is not None:
            parents = parents.index_select(0, here.places.argsort())
        if self.past.beams < parents.shape[1]:
            here = here._in(self.many)
        return replace(here, past=here.past.select(parents))

    def _in(self, dtype: torch.dtype) -> FastState:
        """Keys and values in this number format."""
        memory = [KeysValues(layer.key.to(dtype), layer.value.to(dtype)) for layer in self.memory]
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, memory=memory, bias=bias, past=self.past.to(dtype))

    def _keep(self, sentences: Int[Tensor, " fewer"]) -> FastState:
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
        return FastState(
            [KeysValues(layer.key[:count], layer.value[:count]) for layer in self.memory],
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


class Fast:
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

    def suited(self, sentences: int) -> Fast:
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
        """What is remembered of the source; END closes each row, padding follows."""
        sentences, length = source.shape
        bias = _hiding(source == PAD, self.gives)
        words = self.source.embedding(source.flatten()).view(sentences, length, -1)
        x = (words + self.source.places(length)[:length]).flatten(0, 1)
        for layer in self.encoder:
            x = layer.think(layer.attention(x, sentences, slice(0, length), each_other, bias))
        return Memory(self.encoder_norm(x), sentences, bias)

    def start(self, memory: Memory) -> FastState:
        """The state before the first word: keys and values of the source are computed here, once."""
        seen = [layer.memory.offer(memory.states, memory.sentences) for layer in self.decoder]
        past = Slots.empty(len(seen), seen[0].key)
        return FastState(seen, memory.bias, past, many=self.many)

    def step(
        self, tokens: Int[Tensor, " R"], state: FastState
    ) -> tuple[Float[Tensor, "R V"], FastState]:
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
        self.think = thinking(layer, pack)


class DecoderPart(EncoderPart):
    def __init__(self, layer: DecoderLayer, pack: Format) -> None:
        super().__init__(layer, pack)
        self.memory = MemoryAttention(layer.memory_attention, layer.memory_residual, pack)


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
