"""Numbers as people write them."""

from collections.abc import Callable

import pytest

from regard.errors import RegardError
from regard.recipe import Recipe, decoding_overrides, parse_recipe

RECIPE = """
data: {train: {pairs: pairs.tsv}}
training: {steps: 2e3, learning_rate: 1e-4, schedule: cosine}
"""


@pytest.mark.parametrize(
    ("change", "steps"), [("1e3", 1000), ("2.5e3", 2500), ("1E+4", 10_000), ("300", 300)]
)
def test_whole_numbers_may_have_an_exponent(change: str, steps: int) -> None:
    recipe = parse_recipe(RECIPE, "test", [f"training.steps={change}"])
    assert recipe.training.steps == steps
    assert type(recipe.training.steps) is int
    assert parse_recipe(RECIPE, "test").training.steps == 2000
    assert parse_recipe(RECIPE, "test").training.learning_rate == 1e-4


def test_a_part_of_a_step_is_refused() -> None:
    with pytest.raises(RegardError, match=r"training.steps: 1.5 must be an integer"):
        parse_recipe(RECIPE, "test", ["training.steps=15e-1"])
    with pytest.raises(RegardError, match=r"training.steps: 'e3' must be an integer"):
        parse_recipe(RECIPE, "test", ["training.steps=e3"])


def test_names_that_look_like_numbers_can_be_quoted(small_recipe: Callable[..., Recipe]) -> None:
    quoted = "data.train.pairs='1e3'"
    assert parse_recipe(RECIPE, "test", [quoted]).data.train.pairs == ("1e3",)
    assert decoding_overrides(["max_length=1e2"]) == {"max_length": 100.0}
    assert small_recipe(decoding={"max_length": 1e2}).decoding.max_length == 100
