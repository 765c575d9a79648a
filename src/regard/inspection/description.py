"""What users see about a model: its scores, and sentences to try."""

from __future__ import annotations

from regard.data.examples import example_sources
from regard.recipe import Recipe
from regard.storage.run_dir import RunDir


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
