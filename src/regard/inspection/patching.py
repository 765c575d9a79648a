"""Activation patching: which activations make the outputs for two sentences differ.

Two sentences differ in a word, and so do their translations: *tired* gives *er*, *wide* gives *sie*. The network reads
the second sentence, but at one place, a depth and a position of the residual stream, it gets the vector of the first.
If the translation then changes as if the first sentence had been read, that place carries the information (Meng et al.
2022). ``patch`` does this for every place, ``patch_heads`` for the output of every head at every position, and
``find_carriers`` finds the heads that matter for many pairs of sentences.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import RegardError
from regard.inspection.display_tables import Cell, heat_table
from regard.inspection.head_ablation import (
    Doubles,
    HeadOutput,
    by_head,
    head_outputs,
    mean_ablated,
    mean_outputs,
)
from regard.inspection.hooks import Floats, attentions
from regard.inspection.teacher_forcing import (
    STACKS,
    ForcedTranslation,
    Stack,
    check_supported,
    depth_names,
    edit_stream,
    force,
    residual_streams,
)
from regard.inspection.trace import Token, pack
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.transformer import Decoder, Encoder
from regard.recipe import AttentionSite, abbreviate
from regard.tasks import Translator

SAME_EFFECT = 0.02
"""effects that differ by less count as equal"""


class Contrast(NamedTuple):
    """Two sentences, and the first choice in which their translations differ."""

    texts: tuple[str, str]
    reads: tuple[ForcedTranslation, ForcedTranslation]
    """both translations up to the token in which they differ"""
    choice: tuple[int, int]
    """the ids of these tokens"""


def contrast(
    model: Translator, text: str, other: str, translations: tuple[str, str] | None = None
) -> Contrast:
    """The contrast of two sentences with the same number of tokens and different translations.

    translations: of both; the model's own by default.
    """
    first, second = translations or (None, None)
    pair = force(model, text, first), force(model, other, second)
    sizes = [len(sentence.source) for sentence in pair]
    if sizes[0] != sizes[1]:
        raise RegardError(
            f"patching needs sentences with the same number of tokens: {abbreviate(text)} has {sizes[0]}, "
            f"{abbreviate(other)} has {sizes[1]}"
        )
    outputs = [[token.id for token in sentence.outputs] for sentence in pair]
    at = next((i for i, ids in enumerate(zip(*outputs, strict=False)) if ids[0] != ids[1]), None)
    if at is None:
        raise RegardError(
            f"{abbreviate(text)} and {abbreviate(other)}: both have the same translation"
        )
    before, after = (
        ForcedTranslation(
            sentence.request, sentence.source, sentence.inputs[: at + 1], sentence.outputs[: at + 1]
        )
        for sentence in pair
    )
    return Contrast((text, other), (before, after), (outputs[0][at], outputs[1][at]))


def contrasts(model: Translator, pairs: Sequence[tuple[str, str]]) -> list[Contrast]:
    """The contrasts of all pairs that can be compared; there must be one."""
    comparable = []
    for text, other in pairs:
        try:
            comparable.append(contrast(model, text, other))
        except RegardError:
            continue
    if not comparable:
        raise RegardError(
            "none of the pairs can be compared: each needs two sentences with the same number of tokens and "
            "different translations"
        )
    return comparable


@dataclass(frozen=True)
class PatchMap:
    """How far each place moves the choice between two tokens from the second sentence's to the first's."""

    texts: tuple[str, str]
    tokens: tuple[Token, Token]
    """the first token in which the two translations differ"""
    differences: tuple[float, float]
    """log-odds of the first token against the second, for each sentence"""
    position: int
    """the position of the token in the translation"""
    labels: dict[Stack, list[tuple[Token, Token]]]
    """the tokens at each position, of both sentences"""
    effects: dict[Stack, Floats]
    """[depth, position]: 0 if patching changes nothing, 1 if the first sentence is restored"""

    def best(self) -> tuple[Stack, int, int]:
        """Stack, depth and position of the largest effect; the deepest of those that differ by less than 0.02.

        Without the embedding, which is given, and the last position of the decoder, where the choice is made.
        """
        candidates = [
            (float(effects[depth, position]), depth, stack, position)
            for stack, effects in self.effects.items()
            for depth, position in np.ndindex(effects.shape)
            if depth and not (stack == "decoder" and position == effects.shape[1] - 1)
        ]
        largest = max(candidates)[0]
        _, depth, stack, position = max(
            (candidate for candidate in candidates if candidate[0] > largest - SAME_EFFECT),
            key=lambda candidate: candidate[1],
        )
        return stack, depth, position

    def __str__(self) -> str:
        """One sentence for terminals: the place with the largest effect."""
        stack, depth, position = self.best()
        effect = min(1.0, float(self.effects[stack][depth, position]))
        return (
            f"{self.tokens[0].text} instead of {self.tokens[1].text}: the vector of "
            f"{self.labels[stack][position][0].text} after {stack} layer {depth} alone restores "
            f"{effect:.0%} of the difference"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values, as the page reads them."""
        return {
            "texts": list(self.texts),
            "tokens": [token._asdict() for token in self.tokens],
            "differences": list(self.differences),
            "position": self.position,
            "labels": {
                stack: [[token._asdict() for token in pair] for pair in pairs]
                for stack, pairs in self.labels.items()
            },
            "effects": {stack: pack(effects) for stack, effects in self.effects.items()},
        }

    def _repr_html_(self) -> str:
        """A table for notebooks and each stack: depths in rows, positions in columns."""
        title = f"{self.tokens[0].text} instead of {self.tokens[1].text}"
        tables = []
        for stack, effects in self.effects.items():
            columns = [first.text for first, _ in self.labels[stack]]
            rows = depth_names(len(effects) - 1)
            cells = [[Cell(f"{value:.2f}", float(value)) for value in row] for row in effects]
            tables.append(heat_table(f"{title}, {stack}", rows[::-1], columns, cells[::-1]))
        return "".join(tables)


def patch(model: Translator, text: str, other: str) -> PatchMap:
    """Patch every place of ``other`` with the vectors of ``text``.

    Both must have the same number of tokens, and translations that differ.
    """
    return patch_contrast(model, contrast(model, text, other))


@torch.inference_mode()
def patch_contrast(model: Translator, between: Contrast) -> PatchMap:
    """``patch`` for a contrast."""
    network = check_supported(model)
    texts, reads, choice = between
    streams: dict[Stack, list[dict[int, Tensor]]] = {"encoder": [], "decoder": []}
    differences: list[float] = []
    for read in reads:
        with (
            residual_streams(network.encoder) as encoder,
            residual_streams(network.decoder) as decoder,
        ):
            differences.append(float(_log_odds(model, read, choice)[0]))
        streams["encoder"].append(encoder)
        streams["decoder"].append(decoder)
    total = differences[0] - differences[1]
    if abs(total) < 1e-6:
        raise RegardError(
            f"{abbreviate(' / '.join(texts))}: both sentences give the same probabilities"
        )
    effects: dict[Stack, Floats] = {}
    for stack in STACKS:
        depths = len(streams[stack][0])
        patched = [
            _patched(model, reads[1], choice, stack, depth, streams[stack][0][depth])
            for depth in range(depths)
        ]
        effects[stack] = ((np.stack(patched) - differences[1]) / total).astype(np.float32)
    return PatchMap(
        texts=texts,
        tokens=(reads[0].outputs[-1], reads[1].outputs[-1]),
        differences=(differences[0], differences[1]),
        position=len(reads[0].outputs) - 1,
        labels={
            stack: list(zip(reads[0].tokens(stack), reads[1].tokens(stack), strict=True))
            for stack in STACKS
        },
        effects=effects,
    )


def _log_odds(
    model: Translator, read: ForcedTranslation, choice: tuple[int, int], rows: int = 1
) -> Float[Tensor, " rows"]:
    """Log-odds of the first token of the choice against the second at the last position."""
    logits: Tensor = model.network(*read.batch(model, rows))[:, -1]
    return logits[:, choice[0]] - logits[:, choice[1]]


def _patched(
    model: Translator,
    read: ForcedTranslation,
    choice: tuple[int, int],
    stack: Stack,
    depth: int,
    clean: Float[Tensor, "1 T d"],
) -> Doubles:
    """[position]: the log-odds if the stream at one position is that of the clean run; one row for each position."""
    positions = torch.arange(clean.shape[1], device=clean.device)

    def edit(stream: Tensor) -> Tensor:
        edited = stream.clone()
        edited[positions, positions] = clean[0]
        return edited

    with edit_stream(_stack(model, stack), depth, edit):
        patched = _log_odds(model, read, choice, len(positions))
    return np.asarray(patched.cpu().numpy(), dtype=np.float64)


def _stack(model: Translator, stack: Stack) -> Encoder | Decoder:
    network = check_supported(model)
    return network.encoder if stack == "encoder" else network.decoder


# ---------------------------------------------------------------------------------------------
# Heads


@torch.inference_mode()
def patch_heads(model: Translator, between: Contrast) -> dict[AttentionSite, Floats]:
    """[layer, head, position]: the effect of the output of one head at one position, as in ``PatchMap.effects``."""
    network, sites = check_supported(model), attentions(model)
    _, reads, choice = between
    outputs, differences = [], []
    for read in reads:
        with head_outputs(network) as head_values:
            differences.append(float(_log_odds(model, read, choice)[0]))
        outputs.append(head_values)
    total = differences[0] - differences[1]
    effects: dict[AttentionSite, Floats] = {}
    for site, modules in sites.items():
        layers = [
            [
                _patched_head(model, reads[1], choice, module, head, outputs[0][module][0, :, head])
                for head in range(module.heads)
            ]
            for module in modules
        ]
        effects[site] = ((np.array(layers) - differences[1]) / (total or 1)).astype(np.float32)
    return effects


def _patched_head(
    model: Translator,
    read: ForcedTranslation,
    choice: tuple[int, int],
    module: MultiHeadAttention,
    head: int,
    clean: Float[Tensor, "T dv"],
) -> Doubles:
    positions = torch.arange(len(clean), device=clean.device)

    def edit(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        output = by_head(inputs[0], module.heads).clone()
        output[positions, positions, head] = clean
        return output.reshape(inputs[0].shape)

    handle = module.output.register_forward_pre_hook(edit)
    try:
        patched = _log_odds(model, read, choice, len(positions))
    finally:
        handle.remove()
    return np.asarray(patched.cpu().numpy(), dtype=np.float64)


class Carrier(NamedTuple):
    """A head at a token, and how much of the choice it carries."""

    place: HeadOutput
    token: Token
    effect: float
    """mean effect of patching it"""


def find_carriers(model: Translator, compared: Sequence[Contrast]) -> list[Carrier]:
    """The mean effect of every head at every token, over many pairs of sentences; largest first.

    Only tokens that both sentences of most pairs have in common, such as *it*: a place must be the same in all of them.
    """
    effects: defaultdict[HeadOutput, list[float]] = defaultdict(list)
    names: dict[HeadOutput, Token] = {}
    for pair in compared:
        for site, values in patch_heads(model, pair).items():
            sides = [read.source if site == "encoder" else read.inputs for read in pair.reads]
            for position, (token, same) in enumerate(zip(*sides, strict=True)):
                if token != same:
                    continue
                for layer, head in np.ndindex(values.shape[:2]):
                    place = HeadOutput(site, layer, head, token.id)
                    effects[place].append(float(values[layer, head, position]))
                    names[place] = token
    carriers = [
        Carrier(place, names[place], float(np.mean(values)))
        for place, values in effects.items()
        if len(values) > len(compared) / 2
    ]
    return sorted(carriers, key=lambda carrier: -carrier.effect)


class Ablated(NamedTuple):
    """Places whose ablation breaks a choice."""

    means: dict[HeadOutput, Float[Tensor, " dv"]]
    """for ``mean_ablated``"""
    carriers: list[Carrier]
    broken: float
    """the share of the sentences for which the model then prefers the token of the other sentence"""


@torch.inference_mode()
def break_choice(
    model: Translator,
    compared: Sequence[Contrast],
    carriers: Sequence[Carrier],
    share: float = 0.4,
    most: int = 8,
) -> Ablated:
    """The fewest places, in the order of their effects, whose mean ablation breaks this share of the choices.

    At most ``most`` places. A mean over both sentences of every pair does not tell which of the two was read, so a
    choice that depends on these places alone is broken for half of the sentences.
    """
    forced = [read for pair in compared for read in pair.reads]
    ablated_carriers: list[Carrier] = []
    means: dict[HeadOutput, Tensor] = {}
    broken = 0.0
    for carrier in carriers[:most]:
        ablated_carriers.append(carrier)
        means |= mean_outputs(model, [carrier.place], forced)
        with mean_ablated(model, means):
            odds = [
                sign * float(_log_odds(model, read, pair.choice)[0])
                for pair in compared
                for sign, read in zip((1, -1), pair.reads, strict=True)
            ]
        broken = float(np.mean(np.array(odds) < 0))
        if broken >= share:
            break
    return Ablated(means, ablated_carriers, broken)
