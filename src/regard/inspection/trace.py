"""Traces: everything that can be seen while one text is translated. The only interface between Python and the page.

``trace`` translates a text with the engine, exactly as ``Translator.translate`` does, then decodes the best hypothesis
again with an observer and reads it with teacher forcing, to record attention and probabilities. ``Trace.to_json`` is
what the page reads.

Attention arrays are [layer, head, query, key]. A row of the decoder is one decoder input; its output is the next token.
A network without attention at some site has zero layers there. Keys need not be tokens: ``Trace.columns`` names them.

A non-autoregressive model has mask-predict iterations instead of a beam, and an output stands at the same position as
its input. Attention is that of the last iteration; probabilities and candidates are those of the iteration that
predicted the token.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack, cast

import numpy as np
import torch

from regard.data.dependency_trees import ParsedSentence
from regard.data.special_tokens import BOS, EOS, MASK, PAD, SPACE_SYMBOL, SPECIAL_TOKENS, UNK
from regard.data.tokenizer import SKIPPED_TOKENS, Vocabulary
from regard.data.words import is_unspaced_script
from regard.decoding import mask_predict
from regard.decoding.beam_tree import BeamTree, Node
from regard.decoding.hypothesis import Hypothesis
from regard.decoding.length_penalty_and_stopping import LENGTH_NORMALIZATIONS
from regard.errors import RegardError
from regard.inference.engine import Request
from regard.inspection.hooks import (
    SITES,
    DecoderPass,
    Floats,
    Head,
    Observation,
    Projections,
    mute_heads,
    node_attention,
    observe,
    occlude,
)
from regard.recipe import AttentionSite, DecodingOptions, abbreviate
from regard.tasks import Translator

if TYPE_CHECKING:
    from regard.inspection.head_ablation import HeadTable
    from regard.inspection.page_data import Lenses

CANDIDATES = 8
"""the most probable tokens recorded for each position"""
OCCLUSION_WORK = {"cpu": 5e10, "cuda": 5e12}
"""limit of parameters times tokens read by occlusion: about two seconds on two CPU cores"""

MAX_FLOAT_BYTES = 8 << 20
"""bytes of float32 attention that a file holds exactly; more is quantized to 8 bits"""
MAX_NODE_BYTES = 4 << 20
"""bytes of 8-bit attention of beam nodes in a file; more is left out"""
MAX_PROJECTION_BYTES = 4 << 20
"""bytes of queries, keys and values in a file, and again of W_O; more is left out"""

Detail = Literal["full", "file", "attention", "minimal"]
"""What JSON holds: everything; what fits well into a file; attention without projections; neither of the two."""


# ---------------------------------------------------------------------------------------------
# The trace


class Token(NamedTuple):
    id: int
    text: str
    special: bool
    """a special token, such as EOS"""


class TracedIteration(NamedTuple):
    """The tokens at all positions before and after one mask-predict iteration."""

    inputs: list[Token]
    outputs: list[Token]


class Candidate(NamedTuple):
    token: Token
    probability: float


@dataclass(frozen=True)
class Occlusion:
    """How much each source word matters: the probabilities of the translation without it."""

    words: list[list[int]]
    """the positions of each word's tokens in the source"""
    probabilities: Floats
    """[word, target] of each output token, if the word is left out"""


@dataclass(frozen=True)
class Trace:
    text: str
    translation: str
    source: list[Token]
    """what the encoder reads; EOS last"""
    inputs: list[Token]
    """what the decoder reads: BOS and the tokens before; or all positions, with MASK where a token is predicted"""
    outputs: list[Token]
    """what it predicts there; EOS last, unless the translation was cut off"""
    encoder: Floats
    """[layer, head, source, source]"""
    decoder: Floats
    """[layer, head, target, target]"""
    cross_attention: Floats
    """[layer, head, target, source]"""
    probabilities: list[float]
    """of each output token"""
    candidates: list[list[Candidate]]
    """the most probable tokens at each position, best first"""
    beam: list[Node]
    """beam search as a tree, its root first; empty for a non-autoregressive model"""
    tokens: dict[int, Token]
    """the tokens of the tree, by id"""
    options: dict[str, float | None]
    """beam, length_penalty, temperature, seed and the number of forced tokens; or the number of iterations"""
    iterations: list[TracedIteration] = field(default_factory=list)
    """the iterations of mask-predict, for a non-autoregressive model"""
    muted: list[Head] = field(default_factory=list)
    node_attention: dict[int, Floats] = field(default_factory=dict)
    """[layer, head, source] cross-attention of each node of the tree that was continued, by its id"""
    projections: dict[AttentionSite, Projections] = field(default_factory=dict)
    compressed: set[AttentionSite] = field(default_factory=set)
    """the sites whose keys are mixtures of tokens (Linformer), not tokens"""
    occlusion: Occlusion | None = None
    """None if the text is too long for it, given the model's size"""
    history: dict[str, Any] | None = None
    """how the model was trained (``training_history.py``), if requested"""
    lenses: Lenses | None = None
    """what would be said at each depth, and why (``page_data.py``), if requested"""
    head_table: HeadTable | None = None
    """what each head of the model is worth (``head_ablation.py``), if it was computed"""

    def weights(self, site: AttentionSite) -> Floats:
        array: Floats = getattr(self, site)
        return array

    @property
    def nodes(self) -> Floats:
        """[layer, head, node, source]: ``node_attention`` in the order of the node ids."""
        if not self.node_attention:
            return np.zeros((0, 0, 0, 0), dtype=np.float32)
        rows = [self.node_attention[node] for node in sorted(self.node_attention)]
        return np.stack(rows, axis=2)

    @property
    def attention_bytes(self) -> int:
        nodes = sum(row.nbytes for row in self.node_attention.values())
        return sum(self.weights(site).nbytes for site in SITES) + nodes

    def columns(self, site: AttentionSite) -> list[Token]:
        """The names of a site's keys: tokens, or numbers if they are mixtures of tokens."""
        keys = self.weights(site).shape[3]
        if site in self.compressed:
            return [Token(-1, str(number), True) for number in range(1, keys + 1)]
        if site != "decoder":
            return self.source
        # A decoder-only model reads the source first, then its own output.
        return [*self.source, *self.inputs] if keys > len(self.inputs) else self.inputs

    def to_json(self, detail: Detail = "full") -> dict[str, Any]:
        """Plain values; arrays as base64 of little-endian floats, with their shape."""
        return {
            "text": self.text,
            "translation": self.translation,
            "source": _plain(self.source),
            "inputs": _plain(self.inputs),
            "outputs": _plain(self.outputs),
            **self._attention(detail),
            "columns": {site: _plain(self.columns(site)) for site in SITES},
            "coverage": self._coverage(),
            "probabilities": self.probabilities,
            "candidates": [
                [
                    {**candidate.token._asdict(), "probability": candidate.probability}
                    for candidate in row
                ]
                for row in self.candidates
            ],
            "beam": [asdict(node) for node in self.beam],
            "iterations": [
                {"inputs": _plain(iteration.inputs), "outputs": _plain(iteration.outputs)}
                for iteration in self.iterations
            ],
            "parents": sorted(self.node_attention),
            "tokens": {str(i): token._asdict() for i, token in self.tokens.items()},
            "options": self.options,
            "muted": list(map(str, self.muted)),
            "projections": self._projections(detail),
            "occlusion": self.occlusion
            and {
                "words": self.occlusion.words,
                "probabilities": pack(self.occlusion.probabilities),
            },
            "history": self.history,
            "lenses": self.lenses and self.lenses.to_json(),
            "head_table": self.head_table and self.head_table.to_json(),
        }

    def _repr_html_(self) -> str:
        """The page in a sandboxed frame, for notebooks: its script runs but cannot touch anything outside."""
        from regard.inspection.html_page import page

        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{escape(page(self))}" title="Regard" '
            'style="box-sizing: border-box; width: 100%; height: 48rem; '
            'border: 1px solid #8884; border-radius: 12px"></iframe>'
        )

    def _attention(self, detail: Detail) -> dict[str, Any]:
        arrays: dict[str, Floats] = {site: self.weights(site) for site in SITES}
        arrays["nodes"] = self.nodes
        if detail == "minimal":
            return {name: omitted(array.shape) for name, array in arrays.items()}
        if detail in ("full", "attention") or self.attention_bytes <= MAX_FLOAT_BYTES:
            return {name: pack(array) for name, array in arrays.items()}
        packed = {name: pack_uint8(array) for name, array in arrays.items()}
        if arrays["nodes"].size > MAX_NODE_BYTES:
            packed["nodes"] = omitted(arrays["nodes"].shape)
        return packed

    def _projections(self, detail: Detail) -> dict[str, Any]:
        sizes = {
            name: sum(
                array.nbytes
                for projections in self.projections.values()
                for array in getattr(projections, name)
            )
            for name in ("query", "key", "value", "output")
        }
        included = dict.fromkeys(sizes, detail == "full")
        if detail == "file":
            heads = sizes["query"] + sizes["key"] + sizes["value"]
            included = dict.fromkeys(sizes, heads <= MAX_PROJECTION_BYTES)
            included["output"] = sizes["output"] <= MAX_PROJECTION_BYTES
        return {
            site: {
                "scale": projections.scale,
                **{name: _layers(projections, name, included[name]) for name in included},
            }
            for site, projections in self.projections.items()
        }

    def _coverage(self) -> dict[str, list[float]]:
        """The attention each source token receives, averaged over layers and heads: maximum and sum over outputs."""
        if not self.cross_attention.size or "cross_attention" in self.compressed:
            return {"max": [], "sum": []}
        average = self.cross_attention.mean((0, 1))
        return {"max": average.max(0).tolist(), "sum": average.sum(0).tolist()}


# ---------------------------------------------------------------------------------------------
# Arrays and tokens in JSON


def pack(array: Floats) -> dict[str, Any]:
    """An array in JSON: base64 of little-endian float32, with the shape."""
    return _packed(array, "float32", array.astype("<f4").tobytes())


def pack_uint8(array: Floats) -> dict[str, Any]:
    """An array of non-negative values in 8 bits: the square root of each, relative to the maximum.

    The root keeps small weights accurate: one between 0 and 1 is off by at most 0.004, one of 0.01 by 0.0004.
    """
    maximum = max(1.0, float(array.max(initial=0)))
    roots = np.round(255 * np.sqrt(array.clip(0) / maximum)).astype(np.uint8)
    return {**_packed(array, "uint8", roots.tobytes()), "max": maximum}


def omitted(shape: Sequence[int]) -> dict[str, Any]:
    """An array of which JSON holds only the shape."""
    return {"shape": list(shape), "format": "float32", "data": None}


def _packed(array: Floats, dtype: str, data: bytes) -> dict[str, Any]:
    text = base64.b64encode(data).decode("ascii")
    return {"shape": list(array.shape), "format": dtype, "data": text}


def _plain(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    return [token._asdict() for token in tokens]


def _layers(projections: Projections, name: str, included: bool) -> dict[str, Any]:
    layers: list[Floats] = getattr(projections, name)
    return pack(np.stack(layers)) if included else omitted((len(layers), *layers[0].shape))


_PUNCTUATION = re.compile(r"[.,;:!?…。，、；：！？]+")


def is_punctuation(token: Token) -> bool:
    return _PUNCTUATION.fullmatch(token.text.removeprefix(SPACE_SYMBOL)) is not None


def group_words(tokens: Sequence[Token]) -> list[list[int]]:
    """The positions of the tokens of each word, without special tokens.

    A word begins after a space and at punctuation. In scripts without spaces, every token is a word.
    """
    words: list[list[int]] = []
    for position, token in enumerate(tokens):
        if token.special:
            continue
        begins = token.text.startswith(SPACE_SYMBOL) or _PUNCTUATION.fullmatch(token.text)
        joins = words and words[-1][-1] == position - 1 and not begins
        if joins and not (
            is_unspaced_script(token.text[0]) or is_unspaced_script(tokens[position - 1].text[-1])
        ):
            words[-1].append(position)
        else:
            words.append([position])
    return words


def to_tokens(vocabulary: Vocabulary, ids: Sequence[int]) -> list[Token]:
    pieces = vocabulary.pieces(ids)
    return [Token(i, text, i in SPECIAL_TOKENS) for i, text in zip(ids, pieces, strict=True)]


# ---------------------------------------------------------------------------------------------
# Building a trace


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
    output is set to zero. parse: the dependency tree, for ``position: tree``. length: the number of output tokens, for
    non-autoregressive models. options: as for ``Translator.translate``.
    """
    target = model.tokenizer.target
    for name, value in (("prefix", prefix), ("forced", forced)):
        if value and model.non_autoregressive:
            raise RegardError(
                f"{name} {abbreviate(value)}: not supported by a non-autoregressive model"
            )
    begin: str | list[int] = [*_checked(forced, target), *model.encode_translation(prefix, text)]
    if not forced and UNK not in begin:
        begin = prefix  # as text, so that it keeps its case in a translation that is upper-cased
    with mute_heads(model, mute):
        decoded = _decode(model, text, begin, parse, length, bool(mute), options)
        request, passes = decoded.request, decoded.passes
        observed = [observe(model, request, decoder_pass.inputs) for decoder_pass in passes]
        occlusion = _occlusion(model, request, passes)
        rows = node_attention(model, request, decoded.beam) if decoded.searched else {}
    last, observation = passes[-1], observed[-1]
    cross = observation.weights["cross_attention"]
    # A sample is a path: node n reads input n.
    if decoded.beam and not decoded.searched and cross.size:
        rows = {node: cross[:, :, node] for node in range(len(last.inputs))}
    probabilities = _probabilities(passes, observed)
    return Trace(
        text=text,
        translation=decoded.translation,
        source=to_tokens(model.tokenizer.source, [*request.source, EOS]),
        inputs=to_tokens(target, last.inputs),
        outputs=to_tokens(target, last.outputs),
        encoder=observation.weights["encoder"],
        decoder=observation.weights["decoder"],
        cross_attention=cross,
        probabilities=probabilities[range(len(last.outputs)), last.outputs].tolist(),
        candidates=_candidates(probabilities, target),
        beam=decoded.beam,
        tokens={i: to_tokens(target, [i])[0] for i in {node.token for node in decoded.beam}},
        options=decoded.options,
        iterations=[
            TracedIteration(
                to_tokens(target, decoder_pass.inputs), to_tokens(target, decoder_pass.outputs)
            )
            for decoder_pass in passes
            if model.non_autoregressive
        ],
        muted=list(mute),
        node_attention=rows,
        projections=observation.projections,
        compressed=observation.compressed,
        occlusion=occlusion,
    )


def _checked(forced: Sequence[int], vocabulary: Vocabulary) -> Sequence[int]:
    for token in forced:
        if not 0 <= token < vocabulary.size or token in SKIPPED_TOKENS:
            raise RegardError(
                f"forced token {token}: must be between 0 and {vocabulary.size - 1}, "
                "and not a padding, BOS or EOS token"
            )
    return forced


@dataclass(frozen=True)
class TracedTranslation:
    """A translation and how it was decoded."""

    translation: str
    request: Request
    passes: list[DecoderPass]
    """the last one is shown"""
    options: dict[str, float | None]
    beam: list[Node] = field(default_factory=list)
    searched: bool = False
    """the beam comes from beam search; a sample is a single path"""


def _decode(
    model: Translator,
    text: str,
    begin: str | list[int],
    parse: ParsedSentence | None,
    length: int | None,
    plain: bool,
    options: DecodingOptions,
) -> TracedTranslation:
    """Translate a text as ``Translator.translate`` does, then decode its best request again with an observer."""
    (generated,) = model.generate(
        [text],
        prefixes=cast(list[str] | list[list[int]], [begin]) if begin else None,
        parses=None if parse is None else [parse],
        length=length,
        plain=plain,
        **options,
    )
    if not generated:
        raise RegardError("the text is blank: there is nothing to trace")
    translation, request, hypothesis = generated[0]
    decoding = model.decoding_for(options)
    if model.non_autoregressive:
        steps: list[mask_predict.Iteration] = []
        model.engine.generate(
            [request], decoding, length=length, observer=steps.append, plain=plain
        )
        passes = _mask_predict_passes(hypothesis, steps)
        return TracedTranslation(
            translation.text, request, passes, {"iterations": len(passes), "forced": 0}
        )
    tree = BeamTree(BOS)
    searched = not decoding.is_sampling
    if not searched:
        rule = LENGTH_NORMALIZATIONS[decoding.length_normalization]
        tree.add_path(hypothesis, EOS, rule.penalty_with(decoding.length_penalty))
    else:
        model.engine.generate([request], decoding, observer=tree, plain=plain)
    outputs = [*hypothesis.tokens, EOS] if hypothesis.finished else hypothesis.tokens
    single_pass = DecoderPass(
        model.network.decoder_input(outputs), outputs, list(range(len(outputs)))
    )
    shown: dict[str, float | None] = {
        "beam": decoding.beam,
        "length_penalty": decoding.length_penalty,
        "temperature": decoding.temperature,
        "seed": decoding.seed,
        "forced": len(request.prefix),
    }
    return TracedTranslation(translation.text, request, [single_pass], shown, tree.nodes, searched)


def _mask_predict_passes(
    best: Hypothesis, steps: Sequence[mask_predict.Iteration]
) -> list[DecoderPass]:
    """What the decoder read and predicted in each mask-predict iteration, for the best length candidate."""
    last = steps[-1]
    rows: list[list[int]] = last.tokens.tolist()
    count = len(best.tokens)
    row = next(
        number
        for number, outputs in enumerate(rows)
        if outputs[:count] == best.tokens and outputs[count : count + 1] in ([], [PAD], [EOS])
    )
    length = int((last.tokens[row] != PAD).sum())
    passes: list[DecoderPass] = []
    masked_later: set[int] = set()
    for step in reversed(steps):
        inputs: list[int] = step.inputs[row, :length].tolist()
        outputs: list[int] = step.tokens[row, :length].tolist()
        masked = {position for position, token in enumerate(inputs) if token == MASK}
        passes.insert(0, DecoderPass(inputs, outputs, sorted(masked - masked_later)))
        masked_later |= masked
    return passes


def _occlusion(
    model: Translator, request: Request, passes: Sequence[DecoderPass]
) -> Occlusion | None:
    words = group_words(to_tokens(model.tokenizer.source, request.source))
    tokens = len(words) * (
        len(request.source) + 1 + sum(len(decoder_pass.inputs) for decoder_pass in passes)
    )
    work = tokens * sum(parameter.numel() for parameter in model.network.parameters())
    if work > OCCLUSION_WORK[model.device.type]:
        return None
    return Occlusion(words, occlude(model, request, words, passes))


def _probabilities(passes: Sequence[DecoderPass], observed: Sequence[Observation]) -> torch.Tensor:
    """[target, V] at each position, in the pass that predicted its final token."""
    probabilities = observed[-1].logits.float().softmax(-1)
    for decoder_pass, observation in zip(passes, observed, strict=True):
        logits = observation.logits[decoder_pass.positions]
        probabilities[decoder_pass.positions] = logits.float().softmax(-1)
    return probabilities


def _candidates(probabilities: torch.Tensor, vocabulary: Vocabulary) -> list[list[Candidate]]:
    best = probabilities.topk(min(CANDIDATES, probabilities.shape[1]))
    return [
        [
            Candidate(*candidate)
            for candidate in zip(to_tokens(vocabulary, ids), values, strict=True)
        ]
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
