"""Positions against the formula in float64 and the facts the study notes state."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, strategies as st

from regard.errors import RegardError
from regard.nn.positions import Learned, Rotary, Sinusoidal, sinusoids
from regard.recipe import Recipe

Array = npt.NDArray[np.float64]
SmallRecipe = Callable[..., Recipe]
SINGLE = 1e-6


def formula(position: int, width: int) -> Array:
    """PE of one position, feature by feature."""
    features = []
    for i in range(width // 2):
        angle = position / 10000 ** (2 * i / width)
        features += [math.sin(angle), math.cos(angle)]
    return np.array(features)


def waves(length: int, width: int) -> Array:
    """The module's table, in float64 for what is computed from it."""
    return sinusoids(length, width).numpy().astype(np.float64)


# Sinusoidal


def test_worked_table_of_the_notes() -> None:
    table = waves(5, 4)
    assert table[0].tolist() == [0, 1, 0, 1]
    np.testing.assert_allclose(table[4], [-0.7568, -0.6536, 0.0400, 0.9992], rtol=0, atol=5e-5)


@given(position=st.integers(0, 5000), half=st.integers(1, 40))
def test_sinusoids_are_the_formula(position: int, half: int) -> None:
    table = waves(position + 1, 2 * half)
    np.testing.assert_allclose(table[position], formula(position, 2 * half), rtol=0, atol=1e-7)


@given(position=st.integers(0, 2000), distance=st.integers(0, 500))
def test_a_shift_is_a_rotation(position: int, distance: int) -> None:
    width = 16
    rotation = np.zeros((width, width))
    for i in range(0, width, 2):
        angle = distance / 10000 ** (i / width)
        c, s = math.cos(angle), math.sin(angle)
        rotation[i : i + 2, i : i + 2] = [[c, s], [-s, c]]
    table = waves(position + distance + 1, width)
    np.testing.assert_allclose(
        table[position + distance], rotation @ table[position], rtol=0, atol=SINGLE
    )


def test_product_of_two_positions_depends_on_their_distance_alone() -> None:
    width, length = 64, 200
    table = waves(length, width)
    products = table @ table.T
    distances = np.abs(np.arange(length)[:, None] - np.arange(length)[None])
    frequencies = [10000 ** (-2 * j / width) for j in range(width // 2)]
    wanted = sum(np.cos(frequency * distances) for frequency in frequencies)
    # Symmetric in the distance, as cosine is: which of the two comes first is lost.
    np.testing.assert_allclose(products, wanted, rtol=0, atol=1e-5)


def test_every_position_has_the_same_norm() -> None:
    norms = np.linalg.norm(waves(1000, 512), axis=1)
    np.testing.assert_allclose(norms, 16, rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(waves(50, 6), axis=1), math.sqrt(3), atol=1e-6)


def test_after_projections_the_product_depends_on_more_than_distance() -> None:
    width, length, distance = 64, 200, 5
    table = waves(length, width)
    numbers = np.random.default_rng(1)
    query, key = (numbers.normal(scale=width**-0.5, size=(width, width)) for _ in range(2))

    def spread(products: Array) -> float:
        """How much the product at one distance varies with the place."""
        return float(np.diagonal(products, distance).std())

    assert spread(table @ table.T) < 1e-5
    projected = (table @ query) @ (table @ key).T
    assert spread(projected) > 0.5
    asymmetry = np.abs(np.diagonal(projected, distance) - np.diagonal(projected, -distance))
    assert asymmetry.mean() > 0.5


@pytest.mark.parametrize(("start", "length"), [(0, 512), (0, 513), (0, 1500), (511, 2), (3000, 1)])
def test_no_longest_length(small_recipe: SmallRecipe, start: int, length: int) -> None:
    module = Sinusoidal(small_recipe(model={"d_model": 8}).model)
    x = torch.randn(2, length, 8)
    added = (module(x, start).double() - x.double()).numpy()
    for offset in {0, length // 2, length - 1}:
        wanted = np.tile(formula(start + offset, 8), (2, 1))
        np.testing.assert_allclose(added[:, offset], wanted, rtol=0, atol=SINGLE)


def test_growing_keeps_the_near_positions(small_recipe: SmallRecipe) -> None:
    module = Sinusoidal(small_recipe().model)
    x = torch.zeros(1, 20, 16)
    before = module(x)
    module(torch.zeros(1, 2000, 16))
    assert torch.equal(module(x), before)


def test_a_table_that_grew_in_use_serves_learning(small_recipe: SmallRecipe) -> None:
    rotary = Rotary(small_recipe(model={"position": "rotary"}).model)
    x = torch.randn(1, 1, 600, rotary.waves.table.shape[1] * 2, dtype=torch.float64)
    with torch.inference_mode():
        rotary.turn(x, 0)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(rotary.turn(x, 0).square().sum(), x)
    torch.testing.assert_close(gradient, 2 * x)  # to turn changes no length


@pytest.mark.parametrize("kind", [Sinusoidal, Learned])
def test_start_counts_the_positions_before(
    small_recipe: SmallRecipe, kind: type[Sinusoidal] | type[Learned]
) -> None:
    module = kind(small_recipe().model)
    x = torch.randn(1, 10, 16)
    assert torch.equal(module(x[:, 7:], 7), module(x)[:, 7:])


def test_sinusoids_have_no_weights_to_store(small_recipe: SmallRecipe) -> None:
    module = Sinusoidal(small_recipe().model)
    assert not list(module.parameters())
    assert not module.state_dict()


# Learned


def test_learned_positions_are_added_and_learn(small_recipe: SmallRecipe) -> None:
    module = Learned(small_recipe(model={"position": "learned", "max_length": 300}).model)
    x = torch.randn(2, 300, 16)
    y = module(x)
    assert torch.equal(y, x + module.vectors)
    y.sum().backward()
    assert module.vectors.grad is not None
    assert torch.equal(module.vectors.grad, torch.full((300, 16), 2.0))


@pytest.mark.parametrize(("start", "length"), [(0, 301), (300, 1), (299, 2)])
def test_learned_positions_end_with_a_clear_error(
    small_recipe: SmallRecipe, start: int, length: int
) -> None:
    module = Learned(small_recipe(model={"position": "learned", "max_length": 300}).model)
    with pytest.raises(RegardError, match="a text of 301 tokens is longer than the 300 learned"):
        module(torch.zeros(1, length, 16), start)
