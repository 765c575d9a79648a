"""Trace: everything seen while one sentence passed through the model. The only contract with the page.

Attention is kept as ``[layer, head, query, key]``: rows are queries, columns are keys. A decoder row is the token read
there; what the model said there is the token that follows. A model without attention in a place has no layers there,
and keys need not be tokens: ``columns`` names them.

A model that says all words at once has rounds in place of a beam, and what it said at a row stands at that very place.
Attention is that of the last round; probabilities and candidates are those of the round in which a word was said.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, Literal, NamedTuple

import numpy as np

from regard.marks import BLANK
from regard.probe import (
    PLACES,
    Floats,
    Head,
    Parts,
    Place,
)
from regard.search import Node
from regard.text.words import unspaced

WHOLE_BYTES = 8 << 20
"""of attention as float32 that go into a file as they are; more is rounded to 8 bits"""
NODES_BYTES = 4 << 20
"""of the tree's attention in 8 bits; more stays out of a file"""
PARTS_BYTES = 4 << 20
"""of all queries, keys and values in a file, and as many of all W_O; more stays out"""
Form = Literal["whole", "file", "attention", "apart"]
"""What goes into JSON: everything; what fits well into a file; attention without its parts; neither of the two."""


def pack(numbers: Floats) -> dict[str, Any]:
    """Numbers as JSON carries them: base64 of little-endian float32, with the shape."""
    return _packed(numbers, "float32", numbers.astype("<f4").tobytes())


def pack_small(numbers: Floats) -> dict[str, Any]:
    """In 8 bits: the root of each as a share of the greatest, so that small weights lose least.

    A weight from 0 to 1 comes back within 0.004, one of 0.01 within 0.0004.
    """
    greatest = max(1.0, float(numbers.max(initial=0)))
    roots = np.round(255 * np.sqrt(numbers.clip(0) / greatest)).astype(np.uint8)
    return {**_packed(numbers, "uint8", roots.tobytes()), "greatest": greatest}


def left_out(shape: Sequence[int]) -> dict[str, Any]:
    return {"shape": list(shape), "format": "float32", "data": None}


def _packed(numbers: Floats, name: str, data: bytes) -> dict[str, Any]:
    text = base64.b64encode(data).decode("ascii")
    return {"shape": list(numbers.shape), "format": name, "data": text}


class Token(NamedTuple):
    id: int
    text: str
    special: bool
    """a mark such as END, no text"""


class Round(NamedTuple):
    """What stood at each place before and after it."""

    read: list[Token]
    said: list[Token]


class Candidate(NamedTuple):
    token: Token
    probability: float


@dataclass(frozen=True)
class Occlusion:
    """What each word of the source is needed for: the translation's probabilities without it."""

    words: list[list[int]]
    """the places of each word's tokens in the source"""
    probabilities: Floats
    """[word, target] of each token said, when the word is left out"""


@dataclass(frozen=True)
class Trace:
    text: str
    translation: str
    source: list[Token]
    """what the encoder read; END last"""
    read: list[Token]
    """what the decoder read, row by row; START first, or all places, MASK where the word was not known"""
    said: list[Token]
    """what it said there; END last, unless it was cut off, or all places"""
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
    """the search as a tree, its root first; none where all words are said at once"""
    tokens: dict[int, Token]
    """the tokens of the tree"""
    options: dict[str, float]
    """beam, alpha, temperature, seed, and how many tokens were forced; or rounds"""
    rounds: list[Round] = field(default_factory=list)
    """how all words came to be said, where they were at once"""
    muted: list[Head] = field(default_factory=list)
    rows: dict[int, Floats] = field(default_factory=dict)
    """[layer, head, source] by node of the tree that was continued: its cross attention while it was"""
    parts: dict[Place, Parts] = field(default_factory=dict)
    mixed: set[Place] = field(default_factory=set)
    """the places where a key is a mixture of words, not a word"""
    occlusion: Occlusion | None = None
    """None where the sentence is too long for it, given the model's size"""
    course: dict[str, Any] | None = None
    """how the model learned (course.py), where the trace was asked to bring it along"""

    def weights(self, place: Place) -> Floats:
        array: Floats = getattr(self, place)
        return array

    @property
    def nodes(self) -> Floats:
        """[layer, head, node, source]: the rows of the tree, in the order of their nodes."""
        if not self.rows:
            return np.zeros((0, 0, 0, 0), dtype=np.float32)
        return np.stack([self.rows[node] for node in sorted(self.rows)], axis=2)

    @property
    def bytes_of_attention(self) -> int:
        return sum(self.weights(place).nbytes for place in PLACES) + self.bytes_of_rows

    @property
    def bytes_of_rows(self) -> int:
        return sum(row.nbytes for row in self.rows.values())

    def columns(self, place: Place) -> list[Token]:
        """What the keys of a place are called: tokens, or numbers where they are mixtures of tokens."""
        keys = self.weights(place).shape[3]
        if place in self.mixed:
            return [Token(-1, str(number), True) for number in range(1, keys + 1)]
        if place != "decoder":
            return self.source
        # A decoder without an encoder reads the source first, then what it says itself.
        return [*self.source, *self.read] if keys > len(self.read) else self.read

    def to_json(self, form: Form = "whole") -> dict[str, Any]:
        """Plain values; numbers of many dimensions as base64 of little-endian floats, with the shape."""
        return {
            "text": self.text,
            "translation": self.translation,
            **{name: _plain(getattr(self, name)) for name in ("source", "read", "said")},
            **self._attention(form),
            "columns": {place: _plain(self.columns(place)) for place in PLACES},
            "coverage": self._coverage(),
            "probabilities": self.probabilities,
            "candidates": [
                [{**one.token._asdict(), "probability": one.probability} for one in row]
                for row in self.candidates
            ],
            "beam": [asdict(node) for node in self.beam],
            "rounds": [{"read": _plain(one.read), "said": _plain(one.said)} for one in self.rounds],
            "parents": sorted(self.rows),
            "tokens": {str(i): token._asdict() for i, token in self.tokens.items()},
            "options": self.options,
            "muted": list(map(str, self.muted)),
            "parts": self._parts(form),
            "occlusion": self.occlusion
            and {
                "words": self.occlusion.words,
                "probabilities": pack(self.occlusion.probabilities),
            },
            "course": self.course,
        }

    def _repr_html_(self) -> str:
        """The page in a frame of its own, for a notebook: it runs its script and can touch nothing else."""
        from regard.look import page

        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{escape(page(self))}" title="Regard" '
            'style="box-sizing: border-box; width: 100%; height: 48rem; '
            'border: 1px solid #8884; border-radius: 12px"></iframe>'
        )

    def _attention(self, form: Form) -> dict[str, Any]:
        arrays: dict[str, Floats] = {place: self.weights(place) for place in PLACES}
        arrays["nodes"] = self.nodes
        if form == "apart":
            return {name: left_out(array.shape) for name, array in arrays.items()}
        if form in ("whole", "attention") or self.bytes_of_attention <= WHOLE_BYTES:
            return {name: pack(array) for name, array in arrays.items()}
        packed = {name: pack_small(array) for name, array in arrays.items()}
        if arrays["nodes"].size > NODES_BYTES:
            packed["nodes"] = left_out(arrays["nodes"].shape)
        return packed

    def _parts(self, form: Form) -> dict[str, Any]:
        sizes = {
            name: sum(array.nbytes for one in self.parts.values() for array in getattr(one, name))
            for name in ("query", "key", "value", "output")
        }
        inputs = sizes["query"] + sizes["key"] + sizes["value"]
        fit = dict.fromkeys(sizes, form == "whole")
        if form == "file":
            fit = dict.fromkeys(sizes, inputs <= PARTS_BYTES)
            fit["output"] = sizes["output"] <= PARTS_BYTES
        return {
            place: {"scale": one.scale, **{name: _layers(one, name, fit[name]) for name in fit}}
            for place, one in self.parts.items()
        }

    def _coverage(self) -> dict[str, list[float]]:
        """The attention each source token got, in the average of all layers and heads: most, and in all."""
        if not self.cross.size or "cross" in self.mixed:
            return {"most": [], "whole": []}
        average = self.cross.mean((0, 1))
        return {"most": average.max(0).tolist(), "whole": average.sum(0).tolist()}


def _plain(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    return [token._asdict() for token in tokens]


def _layers(parts: Parts, name: str, fits: bool) -> dict[str, Any]:
    layers: list[Floats] = getattr(parts, name)
    return pack(np.stack(layers)) if fits else left_out((len(layers), *layers[0].shape))


_STOP = re.compile(r"[.,;:!?…。，、；：！？]+")


def words_of(tokens: Sequence[Token]) -> list[list[int]]:
    """The places of the tokens of each word; marks are no words.

    A word begins where a space stood, and at a point or comma. Where a script has no spaces, each piece is one.
    """
    words: list[list[int]] = []
    for place, token in enumerate(tokens):
        if token.special:
            continue
        begins = token.text.startswith(BLANK) or _STOP.fullmatch(token.text)
        joins = words and words[-1][-1] == place - 1 and not begins
        if joins and not (unspaced(token.text[0]) or unspaced(tokens[place - 1].text[-1])):
            words[-1].append(place)
        else:
            words.append([place])
    return words
