"""What the page shows besides a trace: the lenses of one translation, and facts about the model.

``lenses_for`` has all lenses of a file (``regard look --lenses``): the logit lens and the DecoderLens for what would be
said at each depth, attribution for why a token and not another, patching for what makes two sentences differ.
``model_info`` has the languages, scores and example sentences of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regard.data.corpus import example_sources
from regard.data.language_identification import LANGUAGE_NAMES
from regard.errors import RegardError
from regard.inspection.activations import architecture_json
from regard.inspection.attribution import attribute_token
from regard.inspection.logit_lens import decoder_lens_of, logit_lens_of
from regard.inspection.patching import patch
from regard.inspection.teacher_forcing import ForcedTranslation, check_supported, force_ids
from regard.recipe import Recipe
from regard.storage.run_dir import RunDir
from regard.tasks import Translator

ATTRIBUTION_WORK = 2e11
"""limit of parameters times tokens for the attributions of all tokens of a file: about a minute on two CPU cores"""


def supports_lenses(model: Translator) -> bool:
    try:
        check_supported(model)
    except RegardError:
        return False
    return True


def lenses_for(
    model: Translator, text: str, outputs: Sequence[int], against: str | None = None
) -> dict[str, Any]:
    """The lenses of a file: ``LensesJson`` of lenses.js.

    against: another sentence, for activation patching. Attributions are left out if the model is too large for them.
    """
    patching = None if against is None else patch(model, text, against).to_json()
    forced = force_ids(model, model.request(text), outputs)
    rows = 64 * len(forced.outputs)  # of integrated gradients
    work = rows * (len(forced.source) + len(forced.inputs)) * _parameters(model)
    attributions = []
    if work <= ATTRIBUTION_WORK:
        attributions = [
            attribute_token(model, forced, position).to_json()
            for position in range(len(forced.outputs))
        ]
    return {
        **depth_lenses(model, text, forced),
        "attributions": attributions,
        "patching": patching,
        "architecture": architecture_json(model, forced),
    }


def depth_lenses(model: Translator, text: str, forced: ForcedTranslation) -> dict[str, Any]:
    """What would be said at each depth."""
    return {
        "logit_lens": logit_lens_of(model, forced).to_json(),
        "decoder_lens": decoder_lens_of(model, text, forced).to_json(),
    }


def _parameters(model: Translator) -> int:
    return sum(one.numel() for one in model.network.parameters())


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
    names = {code: name.capitalize() for name, code in LANGUAGE_NAMES.items()}
    return [names.get(code, code) for code in recipe.data.language_pair]


def test_scores(run: RunDir | None) -> list[str]:
    """The scores on the test sets, or on the validation set, in words."""
    if run is None or not run.card_file.is_file():
        return []
    card = run.card()
    return [f"{one['name']} {one['value']:.1f}" for one in card.get("test") or ()][:1]


def examples_of(run: RunDir | None, recipe: Recipe) -> list[str]:
    """A few sources to try: those in the card, which are there without the data, else of the data."""
    card = run.card() if run is not None and run.card_file.is_file() else {}
    return list(card.get("examples") or example_sources(recipe))
