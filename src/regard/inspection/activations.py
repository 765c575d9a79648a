"""Inside one translation: the residual stream after each sub-layer, feed-forward neurons, and embeddings.

``activations`` records them for one sentence while the model reads its translation (teacher forcing); a forward hook
on each sub-layer captures its output. ``embeddings`` returns nearest neighbours and a 2-D map (principal components) of
the vectors of the vocabulary. The view Architecture of the page shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.special_tokens import EOS, SPECIAL_TOKENS
from regard.data.tokenizer import Vocabulary
from regard.errors import RegardError
from regard.inspection.display_tables import POSITIVE, Cell, heat_table
from regard.inspection.hooks import Floats
from regard.inspection.teacher_forcing import ForcedTranslation, check_supported, force
from regard.inspection.trace import Token, pack, to_tokens
from regard.nn.transformer import Transformer
from regard.tasks import Translator

NEIGHBOURS = 6
"""nearest neighbours of each token of a sentence"""
MAP_TOKENS = 2_000
"""tokens of the 2-D map: the first ones of the vocabulary, which are the most frequent"""


class StackActivations(NamedTuple):
    """The activations of the encoder or of the decoder."""

    stages: list[str]
    """``embedding``, then ``0.attention``, ``0.cross_attention``, ``0.feed_forward`` … in the order of the data"""
    stream: Floats
    """[stage, position, d_model]: the residual stream after each stage"""
    hidden: Floats
    """[layer, position, d_ff]: the neurons of the feed-forward networks, after the activation function"""


@dataclass(frozen=True)
class Activations:
    """What flows through the network while it reads a sentence and its translation."""

    source: list[Token]
    inputs: list[Token]
    outputs: list[Token]
    encoder: StackActivations
    decoder: StackActivations

    def changes(self, stack: str) -> Floats:
        """[stage, position]: how far each sub-layer moves the residual stream, relative to its norm before."""
        stream = getattr(self, stack).stream
        before = np.linalg.norm(stream[:-1], axis=2)
        moved: Floats = np.linalg.norm(stream[1:] - stream[:-1], axis=2) / np.maximum(before, 1e-9)
        return moved

    def _repr_html_(self) -> str:
        tables = []
        for stack, tokens in (("encoder", self.source), ("decoder", self.inputs)):
            changes = self.changes(stack)
            cells = [[Cell(f"{value:.2f}", min(value, 1.0)) for value in row] for row in changes]
            names = getattr(self, stack).stages[1:]
            title = f"How far each sub-layer of the {stack} moves the residual stream, relative to its norm"
            tables.append(heat_table(title, names, [token.text for token in tokens], cells))
        return "".join(tables)


def activations(model: Translator, text: str, translation: str | None = None) -> Activations:
    """Read a text and a translation of it (by default the model's own), and record what flows through the network."""
    return activations_of(model, force(model, text, translation))


@torch.inference_mode()
def activations_of(model: Translator, forced: ForcedTranslation) -> Activations:
    """The activations of one translation."""
    network = check_supported(model)
    recorded: dict[str, dict[str, Tensor]] = {"encoder": {}, "decoder": {}}
    hidden: dict[str, list[Tensor]] = {"encoder": [], "decoder": []}
    handles = [
        handle
        for stack in ("encoder", "decoder")
        for handle in _hooks(network, stack, recorded, hidden)
    ]
    source = torch.tensor([[token.id for token in forced.source]], device=model.device)
    inputs = torch.tensor([[token.id for token in forced.inputs]], device=model.device)
    try:
        network.decode(inputs, network.encode(source))
    finally:
        for handle in handles:
            handle.remove()
    stacks = {
        stack: StackActivations(
            list(recorded[stack]),
            np.stack([_array(x) for x in recorded[stack].values()]),
            np.stack([_array(x) for x in hidden[stack]]),
        )
        for stack in recorded
    }
    return Activations(forced.source, forced.inputs, forced.outputs, **stacks)


def _hooks(
    network: Transformer,
    stack: str,
    recorded: dict[str, dict[str, Tensor]],
    hidden: dict[str, list[Tensor]],
) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks that record one stack: the input of its first layer, the output of each sub-layer, the hidden neurons."""
    layers: Sequence[nn.Module] = list(getattr(network, stack).layers)

    def save(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, args, output: recorded[stack].__setitem__(name, output)

    first = layers[0].get_submodule("attention_residual")
    handles = [
        first.register_forward_pre_hook(
            lambda module, args: recorded[stack].__setitem__("embedding", args[0])
        )
    ]
    for number, layer in enumerate(layers):
        names = ["attention", "cross_attention", "feed_forward"]
        for name in names if stack == "decoder" else [names[0], names[2]]:
            residual = layer.get_submodule(f"{name}_residual")
            handles.append(residual.register_forward_hook(save(f"{number}.{name}")))
        outer = layer.get_submodule("feed_forward.outer")
        handles.append(
            outer.register_forward_pre_hook(lambda module, args: hidden[stack].append(args[0]))
        )
    return handles


def _array(tensor: Tensor) -> Floats:
    array: Floats = tensor[0].float().cpu().numpy()
    return array


def parameters_by_part(network: Transformer) -> dict[str, int]:
    """The number of weights of each part, such as ``encoder.0.attention``; norms count with their sub-layer."""
    counts: dict[str, int] = {}
    for name, weight in network.named_parameters():
        part = name.replace(".layers.", ".").replace("_residual.", ".")
        pieces = part.split(".")
        length = 3 if len(pieces) > 2 and pieces[1].isdigit() else 2
        key = ".".join(pieces[:length]) if pieces[0] in ("encoder", "decoder") else pieces[0]
        counts[key] = counts.get(key, 0) + weight.numel()
    return counts


# ---------------------------------------------------------------------------------------------
# Embeddings


class Neighbour(NamedTuple):
    token: Token
    cosine: float


@dataclass(frozen=True)
class Embeddings:
    """The vectors of a vocabulary."""

    vocabulary: Vocabulary
    vectors: Floats
    """[V, d_model]"""

    def neighbours(self, id: int, count: int = NEIGHBOURS) -> list[Neighbour]:
        """The tokens whose vectors have the largest cosine with that of a token; bytes and special tokens left out."""
        norms = np.linalg.norm(self.vectors, axis=1) + 1e-9
        cosines = self.vectors @ self.vectors[id] / (norms * norms[id])
        texts = self._texts()
        order = [index for index in np.argsort(-cosines) if index != id and index in texts][:count]
        tokens = to_tokens(self.vocabulary, [int(index) for index in order])
        return [Neighbour(token, float(cosines[token.id])) for token in tokens]

    def map(self, also: Sequence[int] = ()) -> tuple[list[Token], Floats, list[float]]:
        """Tokens, their first two principal components [token, 2], and the share of the variance of each component.

        The components are those of the tokens of the map. also: ids that are on the map in any case.
        """
        ids = sorted({*list(self._texts())[:MAP_TOKENS], *also})
        vectors = self.vectors[ids].astype(np.float64)
        centred = vectors - vectors.mean(0)
        values, axes = np.linalg.eigh(centred.T @ centred)
        best = axes[:, ::-1][:, :2]
        # The largest entry is positive.
        best = best * np.sign(best[np.abs(best).argmax(0), range(2)])
        shares = [float(share) for share in values[::-1][:2] / values.sum()]
        return to_tokens(self.vocabulary, ids), (centred @ best).astype(np.float32), shares

    def _repr_html_(self) -> str:
        """The map for notebooks: a dot for each token, whose name appears under the pointer."""
        tokens, points, shares = self.map()
        low, high = points.min(0), points.max(0)
        places = 8 + (points - low) / np.maximum(high - low, 1e-9) * (504, 364)
        dots = "".join(
            f'<circle cx="{x:.1f}" cy="{380 - y:.1f}" r="2.5"><title>{escape(token.text)}</title></circle>'
            for token, (x, y) in zip(tokens, places, strict=True)
        )
        return (
            f"<p>{len(tokens):,} of {self.vocabulary.size:,} tokens, by the first two principal components "
            f"({shares[0]:.1%} and {shares[1]:.1%} of the variance)</p>"
            f'<svg viewBox="0 0 520 380" width="520" fill="rgb({POSITIVE})">{dots}</svg>'
        )

    def _texts(self) -> dict[int, str]:
        """Tokens that stand for text."""
        pieces = self.vocabulary.pieces(range(self.vocabulary.size))
        return {
            id: piece
            for id, piece in enumerate(pieces)
            if id not in SPECIAL_TOKENS and not (piece.startswith("<") and piece.endswith(">"))
        }

    def to_json(self, ids: Sequence[int]) -> dict[str, Any]:
        """``EmbeddingsJson`` of activations.js: the map, and the neighbours of some tokens."""
        tokens, points, shares = self.map(ids)
        return {
            "tokens": [token._asdict() for token in tokens],
            "points": pack(points),
            "variance": shares,
            "size": self.vocabulary.size,
            "neighbours": {
                str(id): [
                    {**neighbour.token._asdict(), "cosine": neighbour.cosine}
                    for neighbour in self.neighbours(id)
                ]
                for id in dict.fromkeys(ids)
            },
        }


def embeddings(model: Translator, side: str = "source") -> Embeddings:
    """The embeddings of the source or of the target language."""
    network = check_supported(model)
    if side not in ("source", "target"):
        raise RegardError(f"side {side}: must be source or target")
    stack = network.encoder if side == "source" else network.decoder
    vectors = stack.embedding.weight.detach().float().cpu().numpy()
    return Embeddings(getattr(model.tokenizer, side), vectors)


def architecture_json(model: Translator, forced: ForcedTranslation) -> dict[str, Any]:
    """What the view Architecture shows: ``ArchitectureJson`` of activations.js."""
    network, config = check_supported(model), model.recipe.model
    recorded = activations_of(model, forced)
    ids = {
        "source": [token.id for token in forced.source if token.id != EOS],
        "target": [token.id for token in forced.outputs if token.id != EOS],
    }
    return {
        "d_model": config.d_model,
        "d_ff": recorded.encoder.hidden.shape[2],
        "heads": config.heads,
        "d_k": config.d_k,
        "pre_norm": config.norm_order == "pre",
        "activation": config.activation,
        "position": config.position,
        "parameters": parameters_by_part(network),
        **{
            stack: {
                "stages": activations_of_stack.stages,
                "stream": pack(activations_of_stack.stream),
                "hidden": pack(activations_of_stack.hidden),
            }
            for stack, activations_of_stack in (
                ("encoder", recorded.encoder),
                ("decoder", recorded.decoder),
            )
        },
        "embeddings": {
            side: embeddings(model, side).to_json(side_ids) for side, side_ids in ids.items()
        },
    }
