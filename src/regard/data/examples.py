"""Example sentences: a few sources of a recipe's data that show what a model does."""

from __future__ import annotations

from itertools import islice

from regard.data.corpus import read_pairs
from regard.errors import RegardError
from regard.recipe import Recipe

EXAMPLES = 4
"""example sentences on the page"""
EXAMPLE_CHARACTERS = range(20, 121)
"""length of a good example"""


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
