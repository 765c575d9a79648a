"""Hooks into a network: record its attention while a text passes through it, or change it.

``observe`` runs one forward pass and returns logits and attention, ``node_attention`` the cross-attention of the nodes
of a beam, ``mute_heads`` switches heads off, and ``occlude`` leaves out one source word at a time. All of them use the
plain network, not the packed one. A network is unchanged afterwards, even if an error was raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from regard.data.special_tokens import EOS
from regard.decoding.beam_tree import Node
from regard.errors import RegardError
from regard.inference.engine import Request
from regard.inference.network_decoder import pad_rows
from regard.nn.attention import AttentionIntermediates
from regard.nn.multi_head_attention import MultiHeadAttention, record_attention
from regard.recipe import AttentionSite
from regard.tasks import Translator

SITES: tuple[AttentionSite, ...] = get_args(AttentionSite)
"""where a network has attention"""

MAX_OCCLUSION_LOGITS = 1 << 24
"""logits of one batch of ``occlude``: 64 MiB in float32"""

Floats = npt.NDArray[np.float32]


class Head(NamedTuple):
    """One attention head. Layers and heads are counted from 0."""

    site: AttentionSite
    layer: int
    head: int

    @classmethod
    def parse(cls, name: str) -> Head:
        """The head with a name such as ``cross_attention.0.1``: site, layer, head."""
        site, _, numbers = name.partition(".")
        layer, _, head = numbers.partition(".")
        if site not in SITES or not layer.isdecimal() or not head.isdecimal():
            raise RegardError(
                f"head {name!r}: must be SITE.LAYER.HEAD, such as cross_attention.0.1, with a site of "
                f"{', '.join(SITES)}, and layer and head counted from 0"
            )
        return cls(site, int(layer), int(head))

    def __str__(self) -> str:
        return f"{self.site}.{self.layer}.{self.head}"


class Projections(NamedTuple):
    """The projections of the heads of one attention site: an array for each layer."""

    query: list[Floats]
    """[head, query, d_k]"""
    key: list[Floats]
    """[head, key, d_k]"""
    value: list[Floats]
    """[head, key, d_v]"""
    output: list[Floats]
    """[head, d_v, d]: the rows of W_O that belong to each head"""
    scale: float
    """the factor of the dot products of queries and keys"""


class Observation(NamedTuple):
    """The result of one forward pass. Rows are decoder inputs, also if a decoder reads the source before them."""

    logits: Tensor
    """[target, V]"""
    weights: dict[AttentionSite, Floats]
    """[layer, head, query, key] of each site"""
    projections: dict[AttentionSite, Projections]
    """of the sites whose weights are the softmax of scaled dot products, without any other term"""
    compressed: set[AttentionSite]
    """the sites whose keys are mixtures of tokens (Linformer), not tokens"""


def attentions(model: Translator) -> dict[AttentionSite, list[MultiHeadAttention]]:
    """The attention modules of each site, layer by layer; empty for a site that the network does not have."""
    sites = model.network.attentions()
    return {site: sites.get(site, []) for site in SITES}


@contextmanager
def mute_heads(model: Translator, heads: Iterable[Head]) -> Iterator[None]:
    """Multiply the output of these heads by 0 inside the with-block."""
    modules = attentions(model)
    gates: dict[MultiHeadAttention, Tensor | None] = {}
    try:
        for site, layer, head in heads:
            layers = modules[site]
            if not 0 <= layer < len(layers):
                raise RegardError(
                    f"{site} layer {layer}: there are {len(layers)} layers, counted from 0"
                )
            module = layers[layer]
            if not 0 <= head < module.heads:
                raise RegardError(
                    f"{site} head {head}: there are {module.heads} heads, counted from 0"
                )
            gates.setdefault(module, module.gate)
            gate = module.gate
            if gate is None:
                gate = torch.ones(module.heads, device=model.device)
            module.gate = gate.clone()
            module.gate[head] = 0
        yield
    finally:
        for module, gate in gates.items():
            module.gate = gate


def observe(model: Translator, request: Request, inputs: Sequence[int]) -> Observation:
    """One forward pass with teacher forcing; ``inputs`` are the ids that the decoder reads."""
    sites = attentions(model)
    source = pad_rows([[*request.source, EOS]], model.device)
    target = torch.tensor([list(inputs)], device=model.device)
    with record_attention(module for layers in sites.values() for module in layers) as recorded:
        logits = model.network(source, target, model.engine.trees([request]))[0]
    rows = {"encoder": source.shape[1], "decoder": len(inputs), "cross_attention": len(inputs)}
    weights = {site: _weights(layers, recorded, rows[site]) for site, layers in sites.items()}
    projections = {
        site: _projections(layers, recorded, rows[site])
        for site, layers in sites.items()
        if layers and all(module.attention.uses_sdpa for module in layers)
    }
    compressed = {
        site
        for site, layers in sites.items()
        if not all(module.pattern.keeps_tokens for module in layers)
    }
    return Observation(logits, weights, projections, compressed)


def _weights(
    layers: Sequence[MultiHeadAttention],
    recorded: Mapping[nn.Module, AttentionIntermediates],
    rows: int,
) -> Floats:
    """[layer, head, query, key] of the last ``rows`` queries."""
    if not layers:
        return np.zeros((0, 0, 0, 0), dtype=np.float32)
    return np.stack([_array(recorded[module].weights[0][:, -rows:]) for module in layers])


def _projections(
    layers: Sequence[MultiHeadAttention],
    recorded: Mapping[nn.Module, AttentionIntermediates],
    rows: int,
) -> Projections:
    return Projections(
        query=[_array(recorded[module].query[0][:, -rows:]) for module in layers],
        key=[_array(recorded[module].key[0]) for module in layers],
        value=[_array(recorded[module].value[0]) for module in layers],
        output=[_output_by_head(module) for module in layers],
        scale=layers[0].attention.score.scale,
    )


def _output_by_head(module: MultiHeadAttention) -> Floats:
    """[head, d_v, d]: a copy of W_O, because training may continue."""
    weight = module.output.weight.detach().clone()
    return _array(weight.view(len(weight), module.heads, -1).permute(1, 2, 0))


def _array(tensor: Tensor) -> Floats:
    array: Floats = tensor.float().cpu().numpy()
    return array


MAX_NODE_WEIGHTS = 1 << 24
"""attention weights of beam nodes in memory at once: 64 MiB in float32"""


@torch.inference_mode()
def node_attention(model: Translator, request: Request, nodes: Sequence[Node]) -> dict[int, Floats]:
    """[layer, head, source] cross-attention of every beam node that was continued, by its id.

    The paths of the beam are read again with teacher forcing, in batches of bounded size. A decoder is causal, so the
    attention at a position does not depend on what follows.
    """
    cross = attentions(model)["cross_attention"]
    parents = {node.parent for node in nodes if node.parent is not None}
    if not cross or not parents:
        return {}
    paths = {node: _path(nodes, node) for node in sorted(parents)}
    inner = {node for path in paths.values() for node in path[:-1]}
    leaves = [node for node in paths if node not in inner]
    source = pad_rows([[*request.source, EOS]], model.device)
    memory = model.network.encode(source, model.engine.trees([request]))
    width = max(len(paths[leaf]) for leaf in leaves)
    row_size = width * source.shape[1] * sum(module.heads for module in cross)
    batch_size = max(1, MAX_NODE_WEIGHTS // row_size)
    by_node: dict[int, Floats] = {}
    for first in range(0, len(leaves), batch_size):
        batch = leaves[first : first + batch_size]
        tokens = [[nodes[node].token for node in paths[leaf]] for leaf in batch]
        target = pad_rows(tokens, model.device)
        with record_attention(cross) as recorded:
            model.network.decode(target, memory)
        # The rows of one sentence are queries side by side: [1, head, row * position, source].
        weights = np.stack([_array(recorded[module].weights[0]) for module in cross])
        weights = weights.reshape(*weights.shape[:2], *target.shape, -1)
        for row, leaf in enumerate(batch):
            for position, node in enumerate(paths[leaf]):
                if node not in by_node:
                    by_node[node] = weights[:, :, row, position].copy()
    return {node: by_node[node] for node in sorted(parents)}


def _path(nodes: Sequence[Node], node: int) -> list[int]:
    """The ids from the root to a node."""
    path = [node]
    while (parent := nodes[path[-1]].parent) is not None:
        path.append(parent)
    return path[::-1]


class DecoderPass(NamedTuple):
    """One pass of the decoder over all positions: the only one, or one for each mask-predict iteration."""

    inputs: list[int]
    outputs: list[int]
    positions: list[int]
    """the positions whose output is final, that is, not masked again in a later iteration"""


@torch.inference_mode()
def occlude(
    model: Translator,
    request: Request,
    words: Sequence[Sequence[int]],
    passes: Sequence[DecoderPass],
) -> Floats:
    """[word, target]: the probability of each output token if one source word is left out.

    words: the positions of the tokens of each word. The decoder inputs are given (teacher forcing), so all words are
    computed in one batch, or in several if the logits of one would not fit into memory.
    """
    rows = len(passes[0].inputs)
    batch_size = max(1, MAX_OCCLUSION_LOGITS // (rows * model.tokenizer.target.size))
    requests = [_without(request, word) for word in words]
    occlusion = np.zeros((len(words), rows), dtype=np.float32)
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        source = pad_rows([[*occluded.source, EOS] for occluded in batch], model.device)
        memory = model.network.encode(source, model.engine.trees(batch))
        for decoder_pass in passes:
            inputs, outputs = torch.tensor(
                [decoder_pass.inputs, decoder_pass.outputs], device=model.device
            )
            states = model.network.decode(inputs.expand(len(batch), -1), memory)
            probabilities = model.network.project(states).float().softmax(-1)
            index = outputs.expand(len(batch), -1).unsqueeze(2)
            of_outputs = _array(probabilities.gather(2, index).squeeze(2))
            positions = decoder_pass.positions
            occlusion[start : start + batch_size, positions] = of_outputs[:, positions]
    return occlusion


def _without(request: Request, word: Sequence[int]) -> Request:
    """The request without the tokens at these positions.

    The word stays in the dependency tree, because the path between two others may lead through it.
    """
    positions = [position for position in range(len(request.source)) if position not in set(word)]
    tree = request.tree
    if tree is not None:
        tree = tree._replace(words=[tree.words[position] for position in positions])
    source = [request.source[position] for position in positions]
    return request._replace(source=source, tree=tree)
