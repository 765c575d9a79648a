"""What users see about a model: its scores, and sentences to try."""

from __future__ import annotations

from itertools import islice

from regard.data.corpus import read_pairs
from regard.errors import RegardError
from regard.recipe import Recipe
from regard.storage.run_dir import RunDir

EXAMPLES = 4
"""example sentences on the page"""
EXAMPLE_CHARACTERS = range(20, 121)
"""length of a good example"""


def test_scores(run: RunDir | None) -> list[str]:
    """The scores on the test sets, or on the validation set, in words."""
    if run is None or not run.card_file.is_file():
        return []
    card = run.card()
    return [f"{one['name']} {one['value']:.1f}" for one in card.get("test") or ()][:1]


def example_sources(recipe: Recipe) -> list[str]:
    """A few sources to try: of the test data, else of the validation or training data; none if no file is there."""
    for split in ("test", "valid", "train"):
        files = recipe.data.splits.get(split)
        if files is None:
            continue
        try:
            pairs = islice(read_pairs(files, recipe.data, f"data.{split}"), 100)
            good = (one.source for one in pairs if len(one.source) in EXAMPLE_CHARACTERS)
            return list(islice(dict.fromkeys(good), EXAMPLES))
        except RegardError:
            continue
    return []
