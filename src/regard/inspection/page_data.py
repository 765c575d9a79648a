"""What the page shows besides a trace: the lenses of one translation, and facts about the model.

``lenses_for`` computes all lenses of a file (``regard look --lenses``): the logit lens and the DecoderLens for what
would be said at each depth, attribution for why a token and not another, patching for what makes two sentences differ.
``validation_sample`` has the pairs for the table of what each head is worth (``regard look --heads``). ``model_info``
has the languages, scores and example sentences of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from regard.data.corpus import example_sources, valid_pairs
from regard.data.language_identification import LANGUAGE_NAMES
from regard.data.pairs import Pair, language_of
from regard.errors import RegardError
from regard.inspection.activations import architecture_json
from regard.inspection.attribution import Attribution, attribute_token
from regard.inspection.display_tables import text_table
from regard.inspection.logit_lens import DepthLens, decoder_lens_of, logit_lens_of
from regard.inspection.patching import PatchMap, patch
from regard.inspection.teacher_forcing import ForcedTranslation, check_supported, force_ids
from regard.recipe import Recipe
from regard.storage.run_dir import RunDir
from regard.tasks import Translator

ATTRIBUTION_WORK = 2e11
"""limit of parameters times tokens for the attributions of all tokens of a file: about a minute on two CPU cores"""

SAMPLE = 50
"""validation pairs on which heads are ablated"""
SAMPLED_FROM = 2_000
"""the sample is spread over this many pairs, from the first one on: files are often sorted"""
SAMPLE_CHARACTERS = 400
"""limit of a source or target in the sample, for time and memory"""


def supports_lenses(model: Translator) -> bool:
    try:
        check_supported(model)
    except RegardError:
        return False
    return True


@dataclass(frozen=True)
class Lenses:
    """The lenses of one translation."""

    logit_lens: DepthLens
    decoder_lens: DepthLens
    attributions: list[Attribution]
    """of each token; empty if the model is too large for them"""
    patching: PatchMap | None
    """what makes the translation of another sentence differ, if one was given"""
    architecture: dict[str, Any]
    """the activations of every sub-layer, as the page reads them"""

    def to_json(self) -> dict[str, Any]:
        """``LensesJson`` of lenses.js."""
        return {
            "logit_lens": self.logit_lens.to_json(),
            "decoder_lens": self.decoder_lens.to_json(),
            "attributions": [attribution.to_json() for attribution in self.attributions],
            "patching": self.patching and self.patching.to_json(),
            "architecture": self.architecture,
        }

    def __str__(self) -> str:
        """A report for terminals."""
        depths = zip(self.decoder_lens.depths, self.decoder_lens.translations, strict=True)
        parts = [
            "The most probable token after each layer of the decoder (logit lens):",
            str(self.logit_lens),
            "The translation if the decoder reads each layer of the encoder (DecoderLens):",
            text_table([[depth, text or "(empty)"] for depth, text in depths]),
        ]
        if self.attributions:
            parts += [
                "Why this token and not the second best: the words with the largest shares (integrated gradients):",
                text_table([["token", "and not", "because of"], *map(_reason, self.attributions)]),
            ]
        if self.patching:
            parts += [
                "What makes the two sentences differ (activation patching):",
                str(self.patching),
            ]
        return "\n\n".join(parts)


def _reason(attribution: Attribution) -> list[str]:
    words = attribution.strongest_words("integrated_gradients")
    return [
        attribution.token.text,
        attribution.foil.text,
        ", ".join(f"{word} {share:+.2f}" for word, share in words) or "(no single word)",
    ]


def lenses_for(
    model: Translator, text: str, outputs: Sequence[int], against: str | None = None
) -> Lenses:
    """The lenses of a file.

    against: another sentence, for activation patching. Attributions are left out if the model is too large for them.
    """
    patching = None if against is None else patch(model, text, against)
    forced = force_ids(model, model.request(text), outputs)
    rows = 64 * len(forced.outputs)  # of integrated gradients
    work = rows * (len(forced.source) + len(forced.inputs)) * _parameters(model)
    attributions = []
    if work <= ATTRIBUTION_WORK:
        attributions = [
            attribute_token(model, forced, position) for position in range(len(forced.outputs))
        ]
    return Lenses(
        logit_lens=logit_lens_of(model, forced),
        decoder_lens=decoder_lens_of(model, text, forced),
        attributions=attributions,
        patching=patching,
        architecture=architecture_json(model, forced),
    )


def depth_lenses(model: Translator, text: str, forced: ForcedTranslation) -> dict[str, Any]:
    """What would be said at each depth."""
    return {
        "logit_lens": logit_lens_of(model, forced).to_json(),
        "decoder_lens": decoder_lens_of(model, text, forced).to_json(),
    }


def _parameters(model: Translator) -> int:
    return sum(parameter.numel() for parameter in model.network.parameters())


# ---------------------------------------------------------------------------------------------
# What each head is worth


def validation_sample(model: Translator) -> list[Pair]:
    """At most ``SAMPLE`` validation pairs in the target language of the model, without long ones, evenly spaced."""
    multilingual = model.recipe.data.targets
    pairs = (
        pair
        for pair in valid_pairs(model.recipe.data)
        if (not multilingual or language_of(pair) == model.language)
        and all(side.strip() and len(side) <= SAMPLE_CHARACTERS for side in pair)
    )
    candidates = list(islice(pairs, SAMPLED_FROM))
    if not candidates:
        raise RegardError("the validation data have no pair that heads can be measured on")
    count = min(len(candidates), SAMPLE)
    return [candidates[number * len(candidates) // count] for number in range(count)]


# ---------------------------------------------------------------------------------------------
# The model


def model_info(model: Translator, name: str) -> dict[str, Any]:
    """What the page says about a model: ``ModelInfo`` of model_info.js."""
    recipe = model.recipe
    return {
        "name": name,
        "languages": dict(zip(("source", "target"), language_names(recipe), strict=True)),
        "parameters": _parameters(model),
        "scores": test_scores(model.run),
        "examples": examples_of(model.run, recipe),
        "lenses": supports_lenses(model),
    }


def language_names(recipe: Recipe) -> list[str | None]:
    """The names of both languages; the code of one without a name, None of one that is not known."""
    if not recipe.data.named:
        return [None, None]
    return [LANGUAGE_NAMES.get(code, code) for code in recipe.data.language_pair]


def test_scores(run: RunDir | None) -> list[str]:
    """The scores on the test sets, or on the validation set, in words."""
    if run is None or not run.card_file.is_file():
        return []
    card = run.card()
    return [f"{result['name']} {result['value']:.1f}" for result in card.get("test") or ()][:1]


def examples_of(run: RunDir | None, recipe: Recipe) -> list[str]:
    """A few sources to try: those in the card, which are there without the data, else of the data."""
    card = run.card() if run is not None and run.card_file.is_file() else {}
    return list(card.get("examples") or example_sources(recipe))
