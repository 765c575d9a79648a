"""What the study notes say of positions beside the formulas: those are in test_positions.py and test_choices.py."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.nn.norms import LayerNorm
from regard.nn.positions import POSITIONS, Index, Rotary, sinusoids
from regard.recipe import Recipe

SmallRecipe = Callable[..., Recipe]


# Index


def with_index(small_recipe: SmallRecipe, words: Tensor, start: int) -> Tensor:
    module = Index(small_recipe(model={"d_model": 64}).model)
    found: Tensor = module(words, start)
    return found


def test_the_index_does_not_extrapolate(small_recipe: SmallRecipe) -> None:
    """Beyond the lengths seen in training stand numbers that no weight has met; those of sinusoids are all known."""
    zero = torch.zeros(1, 1, 64)
    near = [float(with_index(small_recipe, zero, start).abs().max()) for start in range(50)]
    far = float(with_index(small_recipe, zero, 500).abs().max())
    assert far > 10 * max(near)
    table = sinusoids(501, 64)
    assert float(table[500].abs().max()) <= 1


def test_a_layer_norm_takes_the_index_away_again(small_recipe: SmallRecipe) -> None:
    """One number added to all features is their mean, and a norm before the first layer takes the mean away."""
    words = torch.randn(1, 1, 64, dtype=torch.float64)
    norm = LayerNorm(64).double()
    first, far = (norm(with_index(small_recipe, words, start)) for start in (0, 100))
    torch.testing.assert_close(first, far, rtol=0, atol=1e-9)


# Sinusoids and rotations


def test_fast_waves_stand_at_low_features_and_slow_ones_at_high() -> None:
    table = sinusoids(2000, 32).numpy()
    crossings = (np.diff(np.sign(table[:, 0::2]), axis=0) != 0).sum(0)
    assert (np.diff(crossings) <= 0).all()
    assert crossings[0] > 600  # half a period is pi positions
    assert crossings[-1] == 1  # at position 0, where every sine begins


def test_direction_is_lost_in_the_product_of_two_sinusoids() -> None:
    table = sinusoids(101, 64).numpy().astype(np.float64)
    ahead, behind = table[50] @ table[50:].T, table[50] @ table[50::-1].T
    np.testing.assert_allclose(ahead, behind, atol=1e-5)


def test_a_rotary_product_depends_on_the_distance_alone_and_keeps_the_direction(
    small_recipe: SmallRecipe,
) -> None:
    torch.manual_seed(1)
    rotary = Rotary(small_recipe(model={"d_k": 8, "d_v": 8}).model)
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def product(at: int, other: int) -> float:
        return float((rotary.turn(query, at) * rotary.turn(key, other)).sum())

    assert product(3, 10) == pytest.approx(product(503, 510), abs=1e-9)
    assert product(3, 3) == pytest.approx(float((query * key).sum()), abs=1e-9)
    assert abs(product(3, 10) - product(10, 3)) > 0.01


def test_what_needs_no_longest_length_has_none(small_recipe: SmallRecipe) -> None:
    ends = {name: acts.embedding(small_recipe().model).longest for name, acts in POSITIONS.items()}
    assert {name for name, longest in ends.items() if longest is not None} == {"learned"}
