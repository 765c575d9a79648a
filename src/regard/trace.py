"""Trace: everything seen while one sentence passed through the model. The only contract with the page.

Attention is kept as ``[layer, head, query, key]``: rows are queries, columns are keys, rows sum to 1. A decoder row is
the token read there; what the model said there is the token that follows.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from regard.marks import END, MARKS, START
from regard.model import Translator
from regard.nn.attention import Shown
from regard.nn.heads import MultiHeadAttention
from regard.search import Node, Tree
from regard.text.tokenizer import Vocabulary

CANDIDATES = 8
"""the most probable tokens kept for each row"""

Floats = npt.NDArray[np.float32]


class Token(NamedTuple):
    id: int
    text: str
    special: bool
    """a mark such as END, no text"""


class Candidate(NamedTuple):
    token: Token
    probability: float


@dataclass(frozen=True)
class Trace:
    text: str
    translation: str
    source: list[Token]
    """what the encoder read; END last"""
    read: list[Token]
    """what the decoder read, row by row; START first"""
    said: list[Token]
    """what it said there; END last, unless it was cut off"""
    encoder: Floats
    """[layer, head, source, source]"""
    decoder: Floats
    """[layer, head, target, target]"""
    cross: Floats
    """[layer, head, target, source]"""
    probabilities: list[float]
    """of each token said"""
    candidates: list[list[Candidate]]
    """the most probable tokens at each row, best first"""
    beam: list[Node]
    """the search as a tree, its root first"""
    tokens: dict[int, Token]
    """the tokens of the tree"""
    options: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Plain values; attention as base64 of little-endian float32, with its shape."""
        plain = asdict(self)
        for name in ("encoder", "decoder", "cross"):
            weights: Floats = getattr(self, name)
            data = base64.b64encode(weights.astype("<f4").tobytes()).decode("ascii")
            plain[name] = {"shape": list(weights.shape), "data": data}
        for name in ("source", "read", "said"):
            plain[name] = [token._asdict() for token in getattr(self, name)]
        plain["tokens"] = {str(i): token._asdict() for i, token in self.tokens.items()}
        plain["candidates"] = [
            [{**one.token._asdict(), "probability": one.probability} for one in row]
            for row in self.candidates
        ]
        return plain


@torch.inference_mode()
def trace(
    model: Translator,
    text: str,
    *,
    beam: int | None = None,
    alpha: float | None = None,
    prefix: str = "",
) -> Trace:
    """Translate one text and keep everything. prefix: how the translation must begin."""
    options = model.recipe.search
    beam = options.beam if beam is None else beam
    alpha = options.alpha if alpha is None else alpha
    tree = Tree(START)
    hypothesis = model.find(text, prefix, beam=beam, alpha=alpha, watch=tree)
    said = [*hypothesis.tokens, END] if hypothesis.finished else hypothesis.tokens
    read = [START, *said[:-1]]
    (source,) = model.tokenizer.source.encode([text])
    seen = observe(model, [*source, END], read)
    probabilities = seen.logits.float().softmax(-1)
    best = probabilities.topk(min(CANDIDATES, probabilities.shape[1]))
    target = model.tokenizer.target
    return Trace(
        text=text,
        translation=target.decode([hypothesis.tokens])[0],
        source=named(model.tokenizer.source, [*source, END]),
        read=named(target, read),
        said=named(target, said),
        encoder=seen.encoder,
        decoder=seen.decoder,
        cross=seen.cross,
        probabilities=probabilities[range(len(said)), said].tolist(),
        candidates=[
            [Candidate(*one) for one in zip(named(target, ids), values, strict=True)]
            for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ],
        beam=tree.nodes,
        tokens={i: named(target, [i])[0] for i in {node.token for node in tree.nodes}},
        options={"beam": beam, "alpha": alpha},
    )


class Seen(NamedTuple):
    logits: Tensor
    """[target, V]"""
    encoder: Floats
    decoder: Floats
    cross: Floats


def observe(model: Translator, source: Sequence[int], read: Sequence[int]) -> Seen:
    """One pass the shown way: the logits at each row, and the weights of all heads."""
    network = model.network
    kinds = network.attentions()
    ids = (torch.tensor([list(row)], device=model.device) for row in (source, read))
    with watching([part for parts in kinds.values() for part in parts]) as shown:
        logits = network(*ids)[0]
    weights = {
        kind: torch.stack([shown[part].weights[0] for part in parts]).float().cpu().numpy()
        for kind, parts in kinds.items()
    }
    return Seen(logits, **weights)


@contextmanager
def watching(parts: Sequence[MultiHeadAttention]) -> Iterator[dict[nn.Module, Shown]]:
    """Attention goes the shown way for the time of the with-block; what each part showed, by part."""
    shown: dict[nn.Module, Shown] = {}
    try:
        for part in parts:
            part.watch = lambda seen, part=part: shown.__setitem__(part, seen)
        yield shown
    finally:
        for part in parts:
            part.watch = None


def named(vocabulary: Vocabulary, ids: Sequence[int]) -> list[Token]:
    """Ids as something to look at."""
    pieces = vocabulary.pieces(ids)
    return [Token(i, text, i in MARKS) for i, text in zip(ids, pieces, strict=True)]
