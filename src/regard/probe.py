"""To look into a network while a text passes through it, and to interfere: watching, muting, occlusion.

Nothing here outlives its with-block: a network is the same after it as before, whatever happened inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.marks import END
from regard.model import Translator
from regard.model.writer import Asked
from regard.nn.attention import Shown
from regard.nn.heads import MultiHeadAttention, watching
from regard.search import Tree
from regard.search.tree import Looked

Place = Literal["encoder", "decoder", "cross"]
PLACES: tuple[Place, ...] = get_args(Place)

LOGITS_AT_ONCE = 1 << 24
"""of all rows, when words are left out: 64 MiB in float32"""

Floats = npt.NDArray[np.float32]


class Head(NamedTuple):
    """One head, by where it is; layers and heads count from 0."""

    place: Place
    layer: int
    head: int

    @classmethod
    def named(cls, name: str) -> Head:
        place, _, numbers = name.partition(".")
        layer, _, head = numbers.partition(".")
        if place not in PLACES or not layer.isdecimal() or not head.isdecimal():
            raise RegardError(f"head {name!r}: not of the form cross.0.1, counted from 0")
        return cls(place, int(layer), int(head))

    def __str__(self) -> str:
        return f"{self.place}.{self.layer}.{self.head}"


class Parts(NamedTuple):
    """What the weights of one place were made of, and what became of them: an array for each layer."""

    query: list[Floats]
    """[head, query, d_k]"""
    key: list[Floats]
    """[head, key, d_k]"""
    value: list[Floats]
    """[head, key, d_v]"""
    output: list[Floats]
    """[head, d_v, d]: the rows of W_O that belong to each head"""
    scale: float
    """what a product of query and key is multiplied by"""


class Seen(NamedTuple):
    """Rows are what the decoder read: a decoder that reads the source as well shows the rows after it."""

    logits: Tensor
    """[target, V]"""
    weights: dict[Place, Floats]
    """[layer, head, query, key] of each place"""
    parts: dict[Place, Parts]
    """of the places whose weights are the softmax of products of query and key, and of nothing else"""
    mixed: set[Place]
    """the places where a key is a mixture of words, not a word"""


def attentions(model: Translator) -> dict[Place, list[MultiHeadAttention]]:
    """By place, layer by layer; a network may have none somewhere."""
    found = model.network.attentions()
    return {place: found.get(place, []) for place in PLACES}


@contextmanager
def muting(model: Translator, heads: Iterable[Head]) -> Iterator[None]:
    """These heads say nothing for the time of the with-block: what they found is multiplied by 0."""
    known = attentions(model)
    before: dict[MultiHeadAttention, Tensor | None] = {}
    try:
        for place, layer, head in heads:
            layers = known[place]
            if not 0 <= layer < len(layers):
                raise RegardError(f"{place} layer {layer}: there are {len(layers)}, from 0")
            part = layers[layer]
            if not 0 <= head < part.heads:
                raise RegardError(f"{place} head {head}: there are {part.heads}, from 0")
            before.setdefault(part, part.gate)
            gate = torch.ones(part.heads, device=model.device) if part.gate is None else part.gate
            part.gate = gate.clone()
            part.gate[head] = 0
        yield
    finally:
        for part, was in before.items():
            part.gate = was


def observe(model: Translator, asked: Asked, read: Sequence[int]) -> Seen:
    """One pass the shown way: the logits at each row, the weights of all heads, and their parts."""
    places = attentions(model)
    source = model.padded([[*asked.source, END]])
    target = torch.tensor([list(read)], device=model.device)
    with watching(part for layers in places.values() for part in layers) as shown:
        logits = model.network(source, target, model.places([asked]))[0]
    rows = {"encoder": source.shape[1], "decoder": len(read), "cross": len(read)}
    weights = {place: _weights(layers, shown, rows[place]) for place, layers in places.items()}
    mixed = {
        place
        for place, layers in places.items()
        if not all(layer.pattern.keeps_words for layer in layers)
    }
    parts = {
        place: _parts(layers, shown, rows[place])
        for place, layers in places.items()
        if layers and all(layer.attention.fused for layer in layers)
    }
    return Seen(logits, weights, parts, mixed)


def _weights(
    layers: Sequence[MultiHeadAttention], shown: Mapping[nn.Module, Shown], rows: int = 0
) -> Floats:
    """The last so many rows of each layer; 0 means all."""
    if not layers:
        return np.zeros((0, 0, 0, 0), dtype=np.float32)
    return np.stack([_floats(shown[layer].weights[0][:, -rows:]) for layer in layers])


def _parts(
    layers: Sequence[MultiHeadAttention], shown: Mapping[nn.Module, Shown], rows: int
) -> Parts:
    return Parts(
        query=[_floats(shown[layer].query[0][:, -rows:]) for layer in layers],
        key=[_floats(shown[layer].key[0]) for layer in layers],
        value=[_floats(shown[layer].value[0]) for layer in layers],
        output=[_by_head(layer) for layer in layers],
        scale=layers[0].attention.score.scale,
    )


def _by_head(layer: MultiHeadAttention) -> Floats:
    weight = layer.output.weight.detach().clone()  # a network may go on learning
    return _floats(weight.view(len(weight), layer.heads, -1).permute(1, 2, 0))


def _floats(tensor: Tensor) -> Floats:
    array: Floats = tensor.float().cpu().numpy()
    return array


class Rows:
    """Watches a beam search: where each hypothesis that was continued looked in the source just then."""

    def __init__(
        self, tree: Tree, cross: Sequence[MultiHeadAttention], shown: Mapping[nn.Module, Shown]
    ) -> None:
        self.tree = tree
        self.cross = cross
        self.shown = shown
        self.rows: dict[int, Floats] = {}
        """[layer, head, key], by the node that was continued"""

    def __call__(self, looked: Looked) -> None:
        live, old = list(self.tree.live), len(self.tree.nodes)
        self.tree(looked)
        parents = {node.parent for node in self.tree.nodes[old:]}
        # The beams of a sentence are queries side by side: [layer, head, beam, key].
        weights = _weights(self.cross, self.shown)
        if len(weights):
            self.rows |= {
                node: weights[:, :, beam] for beam, node in enumerate(live) if node in parents
            }


class Reading(NamedTuple):
    """One pass of the decoder: all there is, word after word; one for each round where all are said at once."""

    read: list[int]
    said: list[int]
    places: list[int]
    """where what was said is what stands in the end"""


@torch.inference_mode()
def occlude(
    model: Translator, asked: Asked, words: Sequence[Sequence[int]], readings: Sequence[Reading]
) -> Floats:
    """[word, target]: the probability of each token said when one word of the source is left out.

    What is read is given (teacher forcing), so all words are done side by side in one batch; only where the
    logits would not fit into memory at once are there several.
    """
    rows = len(readings[0].read)
    at_once = max(1, LOGITS_AT_ONCE // (rows * model.tokenizer.target.size))
    left = [_without(asked, word) for word in words]
    found = np.zeros((len(words), rows), dtype=np.float32)
    for start in range(0, len(left), at_once):
        batch = left[start : start + at_once]
        source = model.padded([[*one.source, END] for one in batch])
        memory = model.network.encode(source, model.places(batch))
        for one in readings:
            read, said = torch.tensor([one.read, one.said], device=model.device)
            states = model.network.decode(read.expand(len(batch), -1), memory)
            shares = model.network.project(states).float().softmax(-1)
            each = shares.gather(2, said.expand(len(batch), -1).unsqueeze(2)).squeeze(2)
            found[start : start + at_once, one.places] = _floats(each)[:, one.places]
    return found


def _without(asked: Asked, word: Sequence[int]) -> Asked:
    """The tokens at these places left out; in the tree the word stays, for it may be on the way between others."""
    kept = [place for place in range(len(asked.source)) if place not in set(word)]
    tree = asked.tree
    if tree is not None:
        tree = tree._replace(words=[tree.words[place] for place in kept])
    return asked._replace(source=[asked.source[place] for place in kept], tree=tree)
