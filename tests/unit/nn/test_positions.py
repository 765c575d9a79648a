"""Positional encodings against their formulas in float64, and their properties."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from regard.errors import RegardError
from regard.nn.norms import LayerNorm
from regard.nn.positions import (
    POSITIONS,
    Index,
    Learned,
    Rotary,
    Sinusoidal,
    end_position,
    sinusoids,
)
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


def table_of(length: int, width: int) -> Array:
    """The table of the module, as float64."""
    return sinusoids(length, width).numpy().astype(np.float64)


# Sinusoidal


def test_sinusoids_of_width_four() -> None:
    table = table_of(5, 4)
    assert table[0].tolist() == [0, 1, 0, 1]
    np.testing.assert_allclose(table[4], [-0.7568, -0.6536, 0.0400, 0.9992], rtol=0, atol=5e-5)


@given(position=st.integers(0, 5000), half=st.integers(1, 40))
def test_sinusoids_are_the_formula(position: int, half: int) -> None:
    table = table_of(position + 1, 2 * half)
    np.testing.assert_allclose(table[position], formula(position, 2 * half), rtol=0, atol=1e-7)


@given(position=st.integers(0, 2000), distance=st.integers(0, 500))
def test_a_shift_is_a_rotation(position: int, distance: int) -> None:
    width = 16
    rotation = np.zeros((width, width))
    for i in range(0, width, 2):
        angle = distance / 10000 ** (i / width)
        c, s = math.cos(angle), math.sin(angle)
        rotation[i : i + 2, i : i + 2] = [[c, s], [-s, c]]
    table = table_of(position + distance + 1, width)
    np.testing.assert_allclose(
        table[position + distance], rotation @ table[position], rtol=0, atol=SINGLE
    )


def test_product_of_two_positions_depends_on_their_distance_alone() -> None:
    width, length = 64, 200
    table = table_of(length, width)
    products = table @ table.T
    distances = np.abs(np.arange(length)[:, None] - np.arange(length)[None])
    frequencies = [10000 ** (-2 * j / width) for j in range(width // 2)]
    expected = sum(np.cos(frequency * distances) for frequency in frequencies)
    # Symmetric in the distance, like the cosine: the product does not depend on the order of the two.
    np.testing.assert_allclose(products, expected, rtol=0, atol=1e-5)


def test_every_position_has_the_same_norm() -> None:
    norms = np.linalg.norm(table_of(1000, 512), axis=1)
    np.testing.assert_allclose(norms, 16, rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(table_of(50, 6), axis=1), math.sqrt(3), atol=1e-6)


def test_after_projections_the_product_depends_on_more_than_distance() -> None:
    width, length, distance = 64, 200, 5
    table = table_of(length, width)
    generator = np.random.default_rng(1)
    query, key = (generator.normal(scale=width**-0.5, size=(width, width)) for _ in range(2))

    def spread(products: Array) -> float:
        """The standard deviation, over positions, of the product at one distance."""
        return float(np.diagonal(products, distance).std())

    assert spread(table @ table.T) < 1e-5
    projected = (table @ query) @ (table @ key).T
    assert spread(projected) > 0.5
    asymmetry = np.abs(np.diagonal(projected, distance) - np.diagonal(projected, -distance))
    assert asymmetry.mean() > 0.5


@pytest.mark.parametrize(("start", "length"), [(0, 512), (0, 513), (0, 1500), (511, 2), (3000, 1)])
def test_sinusoids_have_no_maximum_length(
    small_recipe: SmallRecipe, start: int, length: int
) -> None:
    module = Sinusoidal(small_recipe(model={"d_model": 8}).model)
    x = torch.randn(2, length, 8)
    added = (module(x, start).double() - x.double()).numpy()
    for offset in {0, length // 2, length - 1}:
        expected = np.tile(formula(start + offset, 8), (2, 1))
        np.testing.assert_allclose(added[:, offset], expected, rtol=0, atol=SINGLE)


def test_a_longer_text_does_not_change_the_first_positions(small_recipe: SmallRecipe) -> None:
    module = Sinusoidal(small_recipe().model)
    x = torch.zeros(1, 20, 16)
    before = module(x)
    module(torch.zeros(1, 2000, 16))
    assert torch.equal(module(x), before)


def test_a_table_that_grew_in_inference_mode_can_be_used_in_training(
    small_recipe: SmallRecipe,
) -> None:
    rotary = Rotary(small_recipe(model={"position": "rotary"}).model)
    x = torch.randn(1, 1, 600, rotary.rotations.table.shape[1] * 2, dtype=torch.float64)
    with torch.inference_mode():
        rotary.rotate(x, 0)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(rotary.rotate(x, 0).square().sum(), x)
    torch.testing.assert_close(gradient, 2 * x)  # rotation keeps the length


@pytest.mark.parametrize("kind", [Sinusoidal, Learned])
def test_start_is_the_position_of_the_first_token(
    small_recipe: SmallRecipe, kind: type[Sinusoidal] | type[Learned]
) -> None:
    module = kind(small_recipe().model)
    x = torch.randn(1, 10, 16)
    assert torch.equal(module(x[:, 7:], 7), module(x)[:, 7:])


def test_sinusoids_have_no_weights(small_recipe: SmallRecipe) -> None:
    module = Sinusoidal(small_recipe().model)
    assert not list(module.parameters())
    assert not module.state_dict()


# Learned


def test_learned_positions_are_added_and_get_gradients(small_recipe: SmallRecipe) -> None:
    module = Learned(small_recipe(model={"position": "learned", "max_length": 300}).model)
    x = torch.randn(2, 300, 16)
    y = module(x)
    assert torch.equal(y, x + module.embedding)
    y.sum().backward()
    assert module.embedding.grad is not None
    assert torch.equal(module.embedding.grad, torch.full((300, 16), 2.0))


@pytest.mark.parametrize(("start", "length"), [(0, 301), (300, 1), (299, 2)])
def test_a_text_longer_than_the_learned_positions_is_an_error(
    small_recipe: SmallRecipe, start: int, length: int
) -> None:
    module = Learned(small_recipe(model={"position": "learned", "max_length": 300}).model)
    with pytest.raises(RegardError, match="a text of 301 tokens is longer than the 300 learned"):
        module(torch.zeros(1, length, 16), start)


# Index


def with_index(small_recipe: SmallRecipe, embeddings: Tensor, start: int) -> Tensor:
    module = Index(small_recipe(model={"d_model": 64}).model)
    found: Tensor = module(embeddings, start)
    return found


def test_the_index_does_not_extrapolate(small_recipe: SmallRecipe) -> None:
    """Positions beyond the lengths of training give larger values than any before; sinusoids stay in [-1, 1]."""
    zero = torch.zeros(1, 1, 64)
    near = [float(with_index(small_recipe, zero, start).abs().max()) for start in range(50)]
    far = float(with_index(small_recipe, zero, 500).abs().max())
    assert far > 10 * max(near)
    table = sinusoids(501, 64)
    assert float(table[500].abs().max()) <= 1


def test_layer_norm_removes_the_index(small_recipe: SmallRecipe) -> None:
    """The index is added to all features, so it changes only their mean, which a norm subtracts."""
    embeddings = torch.randn(1, 1, 64, dtype=torch.float64)
    norm = LayerNorm(64).double()
    first, far = (norm(with_index(small_recipe, embeddings, start)) for start in (0, 100))
    torch.testing.assert_close(first, far, rtol=0, atol=1e-9)


# Sinusoids and rotations


def test_frequencies_decrease_with_the_index_of_the_feature() -> None:
    table = sinusoids(2000, 32).numpy()
    crossings = (np.diff(np.sign(table[:, 0::2]), axis=0) != 0).sum(0)
    assert (np.diff(crossings) <= 0).all()
    assert crossings[0] > 600  # half a period is pi positions
    assert crossings[-1] == 1  # at position 0


def test_the_product_of_two_sinusoids_does_not_depend_on_the_direction() -> None:
    table = sinusoids(101, 64).numpy().astype(np.float64)
    ahead, behind = table[50] @ table[50:].T, table[50] @ table[50::-1].T
    np.testing.assert_allclose(ahead, behind, atol=1e-5)


def test_a_rotary_product_depends_on_the_distance_and_its_sign(
    small_recipe: SmallRecipe,
) -> None:
    torch.manual_seed(1)
    rotary = Rotary(small_recipe(model={"d_k": 8, "d_v": 8}).model)
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def product(i: int, j: int) -> float:
        return float((rotary.rotate(query, i) * rotary.rotate(key, j)).sum())

    assert product(3, 10) == pytest.approx(product(503, 510), abs=1e-9)
    assert product(3, 3) == pytest.approx(float((query * key).sum()), abs=1e-9)
    assert abs(product(3, 10) - product(10, 3)) > 0.01


def test_only_learned_positions_have_a_maximum_length(small_recipe: SmallRecipe) -> None:
    limits = {
        name: spec.embedding(small_recipe().model).max_length for name, spec in POSITIONS.items()
    }
    assert {name for name, limit in limits.items() if limit is not None} == {"learned"}


def test_the_end_of_a_row_is_after_its_last_position() -> None:
    x = torch.zeros(2, 4, 1)
    assert end_position(x, 3) == 7
    assert end_position(x, torch.tensor([[3], [5]])) == 9  # the rows begin at different positions
    packed = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 0]]) - torch.arange(4)
    assert end_position(x, packed) == 4
