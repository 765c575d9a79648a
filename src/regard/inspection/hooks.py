"""To look into a network while a text passes through it, and to interfere: record_attention, muting, occlusion.

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

from regard.data.special_tokens import EOS
from regard.decoding.beam_tree import Node
from regard.errors import RegardError
from regard.inference.engine import Request, pad_rows
from regard.nn.attention import AttentionIntermediates
from regard.nn.multi_head_attention import MultiHeadAttention, record_attention
from regard.tasks import Translator

Place = Literal["encoder", "decoder", "cross_attention"]
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
            raise RegardError(f"head {name!r}: not of the form cross_attention.0.1, counted from 0")
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


class Observation(NamedTuple):
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
def mute_heads(model: Translator, heads: Iterable[Head]) -> Iterator[None]:
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


def observe(model: Translator, request: Request, read: Sequence[int]) -> Observation:
    """One pass the shown way: the logits at each row, the weights of all heads, and their parts."""
    places = attentions(model)
    source = pad_rows([[*request.source, EOS]], model.device)
    target = torch.tensor([list(read)], device=model.device)
    with record_attention(part for layers in places.values() for part in layers) as shown:
        logits = model.network(source, target, model.engine.trees([request]))[0]
    rows = {"encoder": source.shape[1], "decoder": len(read), "cross_attention": len(read)}
    weights = {place: _weights(layers, shown, rows[place]) for place, layers in places.items()}
    mixed = {
        place
        for place, layers in places.items()
        if not all(layer.pattern.keeps_tokens for layer in layers)
    }
    parts = {
        place: _parts(layers, shown, rows[place])
        for place, layers in places.items()
        if layers and all(layer.attention.fused for layer in layers)
    }
    return Observation(logits, weights, parts, mixed)


def _weights(
    layers: Sequence[MultiHeadAttention],
    shown: Mapping[nn.Module, AttentionIntermediates],
    rows: int = 0,
) -> Floats:
    """The last so many rows of each layer; 0 means all."""
    if not layers:
        return np.zeros((0, 0, 0, 0), dtype=np.float32)
    return np.stack([_floats(shown[layer].weights[0][:, -rows:]) for layer in layers])


def _parts(
    layers: Sequence[MultiHeadAttention],
    shown: Mapping[nn.Module, AttentionIntermediates],
    rows: int,
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


@torch.inference_mode()
def node_attention(model: Translator, request: Request, nodes: Sequence[Node]) -> dict[int, Floats]:
    """[layer, head, source] cross-attention of every beam node that was continued, by its id.

    The paths of the beam are read again in one batch, with teacher forcing. A decoder is causal, so the attention at a
    position does not depend on what follows.
    """
    cross = attentions(model)["cross_attention"]
    parents = {node.parent for node in nodes if node.parent is not None}
    if not cross or not parents:
        return {}
    paths = {node: _path(nodes, node) for node in sorted(parents)}
    inner = {node for path in paths.values() for node in path[:-1]}
    leaves = [node for node in paths if node not in inner]
    tokens = [[nodes[node].token for node in paths[leaf]] for leaf in leaves]
    target = pad_rows(tokens, model.device)
    source = pad_rows([[*request.source, EOS]], model.device).expand(len(leaves), -1)
    trees = model.engine.trees([request] * len(leaves))
    with record_attention(cross) as recorded:
        model.network(source, target, trees)
    found: dict[int, Floats] = {}
    for row, leaf in enumerate(leaves):
        weights = np.stack([_floats(recorded[layer].weights[row]) for layer in cross])
        for position, node in enumerate(paths[leaf]):
            found.setdefault(node, weights[:, :, position])
    return {node: found[node] for node in sorted(parents)}


def _path(nodes: Sequence[Node], node: int) -> list[int]:
    """The ids from the root to a node."""
    path = [node]
    while (parent := nodes[path[-1]].parent) is not None:
        path.append(parent)
    return path[::-1]


class Reading(NamedTuple):
    """One pass of the decoder: all there is, word after word; one for each round where all are said at once."""

    read: list[int]
    said: list[int]
    places: list[int]
    """where what was said is what stands in the end"""


@torch.inference_mode()
def occlude(
    model: Translator, request: Request, words: Sequence[Sequence[int]], readings: Sequence[Reading]
) -> Floats:
    """[word, target]: the probability of each token said when one word of the source is left out.

    What is read is given (teacher forcing), so all words are done side by side in one batch; only where the
    logits would not fit into memory at once are there several.
    """
    rows = len(readings[0].read)
    at_once = max(1, LOGITS_AT_ONCE // (rows * model.tokenizer.target.size))
    left = [_without(request, word) for word in words]
    found = np.zeros((len(words), rows), dtype=np.float32)
    for start in range(0, len(left), at_once):
        batch = left[start : start + at_once]
        source = pad_rows([[*one.source, EOS] for one in batch], model.device)
        memory = model.network.encode(source, model.engine.trees(batch))
        for one in readings:
            read, said = torch.tensor([one.read, one.said], device=model.device)
            states = model.network.decode(read.expand(len(batch), -1), memory)
            shares = model.network.project(states).float().softmax(-1)
            each = shares.gather(2, said.expand(len(batch), -1).unsqueeze(2)).squeeze(2)
            found[start : start + at_once, one.places] = _floats(each)[:, one.places]
    return found


def _without(request: Request, word: Sequence[int]) -> Request:
    """The tokens at these places left out; in the tree the word stays, for it may be on the way between others."""
    kept = [place for place in range(len(request.source)) if place not in set(word)]
    tree = request.tree
    if tree is not None:
        tree = tree._replace(words=[tree.words[place] for place in kept])
    return request._replace(source=[request.source[place] for place in kept], tree=tree)
