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
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np
import torch

from regard.data.conllu import ParsedSentence
from regard.data.special_tokens import BOS, EOS, MASK, PAD, SPACE_SYMBOL, SPECIAL_TOKENS
from regard.data.tokenizer import SILENT, Vocabulary
from regard.data.words import unspaced
from regard.decoding import mask_predict
from regard.decoding.beam_tree import BeamTree, Node
from regard.decoding.hypotheses import Hypothesis
from regard.decoding.length_penalty import LENGTH_NORMALIZATIONS
from regard.errors import RegardError
from regard.inference.engine import Request
from regard.inspection.hooks import (
    PLACES,
    Floats,
    Head,
    Observation,
    Parts,
    Place,
    Reading,
    mute_heads,
    node_attention,
    observe,
    occlude,
)
from regard.tasks import DecodingOptions, Translator

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
    """a mark such as EOS, no text"""


class Iteration(NamedTuple):
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
    """what the encoder read; EOS last"""
    read: list[Token]
    """what the decoder read, row by row; BOS first, or all places, MASK where the word was not known"""
    said: list[Token]
    """what it said there; EOS last, unless it was cut off, or all places"""
    encoder: Floats
    """[layer, head, source, source]"""
    decoder: Floats
    """[layer, head, target, target]"""
    cross_attention: Floats
    """[layer, head, target, source]"""
    probabilities: list[float]
    """of each token said"""
    candidates: list[list[Candidate]]
    """the most probable tokens at each row, best first"""
    beam: list[Node]
    """the search as a tree, its root first; none where all words are said at once"""
    tokens: dict[int, Token]
    """the tokens of the tree"""
    options: dict[str, float | None]
    """beam, alpha, temperature, seed, and how many tokens were forced; or rounds"""
    iterations: list[Iteration] = field(default_factory=list)
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
            "iterations": [
                {"read": _plain(one.read), "said": _plain(one.said)} for one in self.iterations
            ],
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
        from regard.inspection.html import page

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
        if not self.cross_attention.size or "cross_attention" in self.mixed:
            return {"most": [], "whole": []}
        average = self.cross_attention.mean((0, 1))
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
        begins = token.text.startswith(SPACE_SYMBOL) or _STOP.fullmatch(token.text)
        joins = words and words[-1][-1] == place - 1 and not begins
        if joins and not (unspaced(token.text[0]) or unspaced(tokens[place - 1].text[-1])):
            words[-1].append(place)
        else:
            words.append([place])
    return words


# ---------------------------------------------------------------------------------------------
# How a trace is made: one sentence is translated while it is watched, and read again to look inside.


CANDIDATES = 8
"""the most probable tokens kept for each row"""
OCCLUSION_WORK = {"cpu": 5e10, "cuda": 5e12}
"""the network's parameters times the tokens it reads, with each word left out: some two seconds on two available_cores"""


@torch.inference_mode()
def trace(
    model: Translator,
    text: str,
    *,
    prefix: str = "",
    forced: Sequence[int] = (),
    mute: Sequence[Head] = (),
    parse: ParsedSentence | None = None,
    length: int | None = None,
    **options: Unpack[DecodingOptions],
) -> Trace:
    """Translate one text and record everything.

    prefix, forced: the translation begins with the tokens ``forced``, then with the text ``prefix``. mute: heads whose
    output is set to zero. parse: the dependency tree, for ``position: tree``. options: as in ``Translator.search``.
    """
    target = model.tokenizer.target
    begin = [*_checked(forced, target), *target.encode([prefix])[0]]
    with mute_heads(model, mute):
        found = generate(model, text, begin, parse, length, bool(mute), options)
        seen = [observe(model, found.request, one.read) for one in found.readings]
        occlusion = _occlusion(model, found.request, found.readings)
        rows = {} if model.non_autoregressive else node_attention(model, found.request, found.beam)
    last, passed = found.readings[-1], seen[-1]
    shares = _shares(found.readings, seen)
    return Trace(
        text=text,
        translation=found.translation,
        source=named(model.tokenizer.source, [*found.request.source, EOS]),
        read=named(target, last.read),
        said=named(target, last.said),
        encoder=passed.weights["encoder"],
        decoder=passed.weights["decoder"],
        cross_attention=passed.weights["cross_attention"],
        probabilities=shares[range(len(last.said)), last.said].tolist(),
        candidates=_candidates(shares, target),
        beam=found.beam,
        tokens={i: named(target, [i])[0] for i in {node.token for node in found.beam}},
        options=found.options,
        iterations=[
            Iteration(named(target, one.read), named(target, one.said)) for one in found.readings
        ]
        if model.non_autoregressive
        else [],
        muted=list(mute),
        rows=rows,
        parts=passed.parts,
        mixed=passed.mixed,
        occlusion=occlusion,
    )


@dataclass(frozen=True)
class TracedTranslation:
    """A translation, and how it was decoded."""

    translation: str
    request: Request
    readings: list[Reading]
    """the last one is shown"""
    options: dict[str, float | None]
    beam: list[Node] = field(default_factory=list)


def generate(
    model: Translator,
    text: str,
    begin: Sequence[int],
    parse: ParsedSentence | None,
    length: int | None,
    plain: bool,
    options: DecodingOptions,
) -> TracedTranslation:
    """Translate a text as ``Translator.search`` does, then decode its best request again with an observer."""
    (found,) = model.generate(
        [text],
        prefixes=[begin] if begin else None,
        parses=None if parse is None else [parse],
        length=length,
        plain=plain,
        **options,
    )
    if not found:
        raise RegardError("the text is blank: there is nothing to trace")
    best = found[0]
    decoding = model.decoding_for(options)
    steps: list[mask_predict.Iteration] = []
    tree = BeamTree(BOS)
    sampled = decoding.samples or bool(decoding.mbr)
    if model.non_autoregressive:
        model.engine.generate(
            [best.request], decoding, length=length, observer=steps.append, plain=plain
        )
        readings = _iterations(best.hypothesis, steps)
        told: dict[str, float | None] = {"iterations": len(readings), "forced": 0}
        return TracedTranslation(best.translation.text, best.request, readings, told)
    if sampled:
        penalty = LENGTH_NORMALIZATIONS[decoding.length_normalization].penalty
        tree.add_path(best.hypothesis, EOS, lambda length: penalty(length, decoding.length_penalty))
    else:
        model.engine.generate([best.request], decoding, observer=tree, plain=plain)
    tokens = best.hypothesis.tokens
    said = [*tokens, EOS] if best.hypothesis.finished else tokens
    reading = Reading(model.network.reading(said), said, list(range(len(said))))
    told = {
        "beam": decoding.beam,
        "length_penalty": decoding.length_penalty,
        "temperature": decoding.temperature,
        "seed": decoding.seed,
        "forced": len(begin),
    }
    return TracedTranslation(best.translation.text, best.request, [reading], told, tree.nodes)


def _iterations(best: Hypothesis, steps: Sequence[mask_predict.Iteration]) -> list[Reading]:
    """What the decoder read and predicted in each mask-predict iteration, for the best length candidate."""
    last = steps[-1]
    rows: list[list[int]] = last.said.tolist()
    count = len(best.tokens)
    row = next(
        number
        for number, said in enumerate(rows)
        if said[:count] == best.tokens and said[count : count + 1] in ([], [PAD], [EOS])
    )
    length = int((last.said[row] != PAD).sum())
    readings: list[Reading] = []
    later: set[int] = set()
    for step in reversed(steps):
        read: list[int] = step.read[row, :length].tolist()
        said: list[int] = step.said[row, :length].tolist()
        masked = {position for position, token in enumerate(read) if token == MASK}
        readings.insert(0, Reading(read, said, sorted(masked - later)))
        later |= masked
    return readings


def _checked(forced: Sequence[int], vocabulary: Vocabulary) -> Sequence[int]:
    for token in forced:
        if not 0 <= token < vocabulary.size or token in SILENT:
            raise RegardError(
                f"forced token {token}: must be from 0 to {vocabulary.size - 1}, "
                "and not a padding, BOS or EOS token"
            )
    return forced


def _occlusion(
    model: Translator, request: Request, readings: Sequence[Reading]
) -> Occlusion | None:
    words = words_of(named(model.tokenizer.source, request.source))
    tokens = len(words) * (len(request.source) + 1 + sum(len(one.read) for one in readings))
    work = tokens * sum(part.numel() for part in model.network.parameters())
    if work > OCCLUSION_WORK[model.device.type]:
        return None
    return Occlusion(words, occlude(model, request, words, readings))


def _shares(readings: Sequence[Reading], seen: Sequence[Observation]) -> torch.Tensor:
    """[target, V]: the probabilities at each place, in the pass that said what stands there."""
    shares = seen[-1].logits.float().softmax(-1)
    for reading, this in zip(readings, seen, strict=True):
        shares[reading.places] = this.logits[reading.places].float().softmax(-1)
    return shares


def _candidates(shares: torch.Tensor, vocabulary: Vocabulary) -> list[list[Candidate]]:
    best = shares.topk(min(CANDIDATES, shares.shape[1]))
    return [
        [Candidate(*one) for one in zip(named(vocabulary, ids), values, strict=True)]
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def named(vocabulary: Vocabulary, ids: Sequence[int]) -> list[Token]:
    """Ids as something to look at."""
    pieces = vocabulary.pieces(ids)
    return [Token(i, text, i in SPECIAL_TOKENS) for i, text in zip(ids, pieces, strict=True)]
