"""Attention against the study notes' worked numbers and against the formula written out in NumPy."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from regard.nn.attention import SCORES, Attention, AttentionIntermediates, KeyValue, Mask
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.positions import AttentionPosition
from regard.nn.sparse_attention import Full
from regard.recipe import Recipe, Score

Array = npt.NDArray[np.float64]
SmallRecipe = Callable[..., Recipe]

# Worked example 1 of the mission.
E = [
    [1.0333236, -0.07687391, 1.94313157, -1.26162928],
    [1.18221604, -0.0298283, -1.46568319, 1.37369452],
    [-0.13959719, -0.50792964, -0.88052409, 1.52022357],
]
W_Q = [[0.2, 0.1], [0.3, 0.5], [0.4, 0.6], [0.1, 0.2]]
W_K = [[0.1, 0.3], [0.2, 0.4], [0.5, 0.7], [0.1, 0.2]]
Q = [[0.83469225, 0.97844849], [-0.22140911, -0.50136356], [-0.38048561, -0.49219428]]
K = [[0.93336044, 1.38711376], [-0.4832162, -0.40850584], [-0.40378534, -0.55737316]]
PRODUCTS = [[2.136, -0.803, -0.882], [-0.902, 0.312, 0.369], [-1.038, 0.385, 0.428]]
SCALED = [[1.511, -0.568, -0.624], [-0.638, 0.220, 0.261], [-0.734, 0.272, 0.303]]
WEIGHTS = [[0.804, 0.101, 0.095], [0.172, 0.406, 0.422], [0.153, 0.417, 0.430]]
OUTPUT = [
    [0.937, -0.113, 1.331, -0.732],
    [0.598, -0.240, -0.632, 0.982],
    [0.591, -0.243, -0.694, 1.035],
]
THREE_DECIMALS = 0.0005
EIGHT_DECIMALS = 0.5e-8
DOT_PRODUCTS: tuple[Score, ...] = ("scaled", "unscaled")


def attention(recipe: Recipe, seed: int = 1) -> MultiHeadAttention:
    """In float64, every weight and bias random."""
    torch.manual_seed(seed)
    made = MultiHeadAttention(recipe.model, "encoder").double().eval()
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_()
    return made


class Both:
    """Full attention, by the fast way and by the shown way."""

    def __init__(self, small_recipe: SmallRecipe, d_k: int, score: Score = "scaled") -> None:
        section = small_recipe(model={"heads": 1, "d_k": d_k, "attention": {"score": score}}).model
        self.pattern = Full(section, "encoder")
        self.attend = Attention(section, AttentionPosition(section)).eval()

    def fast(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        output: Tensor = self.pattern(self.attend, query, KeyValue(key, value), mask)
        return output

    def show(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> AttentionIntermediates:
        return self.pattern.show(self.attend, query, KeyValue(key, value), mask)


def numpy_softmax(scores: Array) -> Array:
    raised = np.exp(scores - scores.max(axis=-1, keepdims=True))
    result: Array = raised / raised.sum(axis=-1, keepdims=True)
    return result


def numpy_attention(
    query: Array, key: Array, value: Array, allowed: npt.NDArray[np.bool_]
) -> Array:
    """One head of one sentence, a query at a time."""
    rows = []
    for q, may_look in zip(query, allowed, strict=True):
        scores = np.array([q @ k for k in key]) / math.sqrt(len(q))
        rows.append(numpy_softmax(np.where(may_look, scores, -np.inf)) @ value)
    return np.array(rows)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Mask, npt.NDArray[np.bool_]]:
    """Query, key, value in float64, a mask, and the same mask as a matrix made by NumPy."""
    sizes = st.integers(1, 5)
    batch, heads, queries, keys, d_k, d_v = (draw(sizes) for _ in range(6))
    padded, causal = draw(st.booleans()), draw(st.booleans())
    if causal:  # the queries are the last of the keys
        keys = max(queries, keys)
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    query = torch.randn(batch, heads, queries, d_k, generator=numbers, dtype=torch.float64)
    key = torch.randn(batch, heads, keys, d_k, generator=numbers, dtype=torch.float64)
    value = torch.randn(batch, heads, keys, d_v, generator=numbers, dtype=torch.float64)
    lengths = draw(st.lists(st.integers(1, keys), min_size=batch, max_size=batch))
    real = np.arange(keys)[None] < np.array(lengths)[:, None]
    allowed = np.ones((batch, 1, queries, keys), dtype=np.bool_)
    if padded:
        allowed &= real[:, None, None, :]
    if causal:
        allowed &= np.arange(keys)[None] <= np.arange(keys - queries, keys)[:, None]
    mask = Mask(torch.from_numpy(real) if padded else None, causal)
    return query, key, value, mask, np.broadcast_to(allowed, (batch, heads, queries, keys))


# The worked examples


def test_worked_example_1_step_by_step(small_recipe: SmallRecipe) -> None:
    recipe = small_recipe(model={"d_model": 4, "heads": 1, "d_k": 2, "d_v": 4})
    one_head = attention(recipe)
    with torch.no_grad():
        one_head.query.weight.copy_(torch.tensor(W_Q, dtype=torch.float64).T)
        one_head.key.weight.copy_(torch.tensor(W_K, dtype=torch.float64).T)
        one_head.value.weight.copy_(torch.eye(4))
        one_head.output.weight.copy_(torch.eye(4))
    seen: list[AttentionIntermediates] = []
    one_head.watch = seen.append
    tokens = torch.tensor([E], dtype=torch.float64)
    output = one_head(tokens, one_head.keys_values(tokens), Mask())
    (shown,) = seen

    def off(value: Tensor, printed: list[list[float]]) -> float:
        return float(np.abs(value.detach().numpy().squeeze() - np.array(printed)).max())

    assert off(shown.query, Q) <= EIGHT_DECIMALS
    assert off(shown.key, K) <= EIGHT_DECIMALS
    assert off(shown.value, E) == 0
    assert off(shown.products, PRODUCTS) <= THREE_DECIMALS
    assert off(shown.scores, SCALED) <= THREE_DECIMALS
    assert off(shown.masked, SCALED) <= THREE_DECIMALS
    assert off(shown.weights, WEIGHTS) <= THREE_DECIMALS
    assert off(shown.output, OUTPUT) <= THREE_DECIMALS
    assert off(output, OUTPUT) <= THREE_DECIMALS


def test_worked_example_1_by_the_fast_way(small_recipe: SmallRecipe) -> None:
    query, key, value = (torch.tensor([[part]]) for part in (Q, K, E))
    output = Both(small_recipe, 2).fast(query, key, value, Mask())
    assert np.abs(output.numpy()[0, 0] - np.array(OUTPUT)).max() <= THREE_DECIMALS


def test_worked_example_2_shapes(small_recipe: SmallRecipe) -> None:
    two_heads = attention(small_recipe(model={"d_model": 4, "heads": 2, "d_k": 4, "d_v": 8}))
    # torch keeps W transposed.
    assert two_heads.query.weight.T.shape == two_heads.key.weight.T.shape == (4, 8)
    assert two_heads.value.weight.T.shape == (4, 16)
    assert two_heads.output.weight.T.shape == (16, 4)
    tokens = torch.randn(1, 3, 4, dtype=torch.float64)
    assert two_heads.query(tokens).shape == two_heads.key(tokens).shape == (1, 3, 8)
    assert two_heads.value(tokens).shape == (1, 3, 16)
    seen: list[AttentionIntermediates] = []
    two_heads.watch = seen.append
    joined: list[tuple[int, ...]] = []
    two_heads.output.register_forward_pre_hook(lambda _, inputs: joined.append(inputs[0].shape))
    output = two_heads(tokens, two_heads.keys_values(tokens), Mask())
    (shown,) = seen
    assert shown.query.shape == shown.key.shape == (1, 2, 3, 4)
    assert shown.value.shape == (1, 2, 3, 8)
    assert shown.weights.shape == (1, 2, 3, 3)
    assert joined == [(1, 3, 16)]
    assert output.shape == (1, 3, 4)


# The formula


@given(situation=situations())
def test_both_ways_are_the_formula(
    small_recipe: SmallRecipe,
    situation: tuple[Tensor, Tensor, Tensor, Mask, npt.NDArray[np.bool_]],
) -> None:
    query, key, value, mask, allowed = situation
    ways = Both(small_recipe, query.shape[-1])
    shown, fast = ways.show(query, key, value, mask), ways.fast(query, key, value, mask)
    for b, h in np.ndindex(*query.shape[:2]):
        wanted = numpy_attention(
            query[b, h].numpy(), key[b, h].numpy(), value[b, h].numpy(), allowed[b, h]
        )
        np.testing.assert_allclose(shown.output[b, h].numpy(), wanted, rtol=0, atol=1e-12)
        np.testing.assert_allclose(fast[b, h].numpy(), wanted, rtol=0, atol=1e-12)


@given(situation=situations())
def test_fast_way_equals_shown_way_in_single_precision(
    small_recipe: SmallRecipe,
    situation: tuple[Tensor, Tensor, Tensor, Mask, npt.NDArray[np.bool_]],
) -> None:
    query, key, value = (part.float() for part in situation[:3])
    mask = situation[3]
    for score in DOT_PRODUCTS:
        ways = Both(small_recipe, query.shape[-1], score)
        shown = ways.show(query, key, value, mask).output
        torch.testing.assert_close(ways.fast(query, key, value, mask), shown, rtol=0, atol=3e-6)


@given(situation=situations())
def test_weights_sum_to_one_and_are_zero_where_masked(
    small_recipe: SmallRecipe,
    situation: tuple[Tensor, Tensor, Tensor, Mask, npt.NDArray[np.bool_]],
) -> None:
    query, key, value, mask, allowed = situation
    shown = Both(small_recipe, query.shape[-1]).show(query, key, value, mask)
    weights = shown.weights.numpy()
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=0, atol=1e-14)
    assert (weights[~allowed] == 0).all()
    assert (weights[allowed] > 0).all()
    assert (shown.masked.numpy()[~allowed] == -np.inf).all()
    assert np.array_equal(shown.masked.numpy()[allowed], shown.scores.numpy()[allowed])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_multi_head_is_the_formula(small_recipe: SmallRecipe, bias: bool, causal: bool) -> None:
    heads, d_k, d_v = 3, 4, 5
    recipe = small_recipe(
        model={
            "d_model": 6,
            "heads": heads,
            "d_k": d_k,
            "d_v": d_v,
            "attention": {"bias": bias},
        }
    )
    layer = attention(recipe)
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    real = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    output = layer(x, layer.keys_values(x), Mask(real, causal)).detach().numpy()

    def linear(part: torch.nn.Linear, values: Array) -> Array:
        product: Array = values @ part.weight.detach().numpy().T
        return product + part.bias.detach().numpy() if bias else product

    for b in range(2):
        tokens = x[b].numpy()
        query, key, value = (linear(part, tokens) for part in (layer.query, layer.key, layer.value))
        allowed = np.array(
            [[real[b, j] and (j <= i or not causal) for j in range(7)] for i in range(7)]
        )
        found = [
            numpy_attention(
                query[:, h * d_k : (h + 1) * d_k],
                key[:, h * d_k : (h + 1) * d_k],
                value[:, h * d_v : (h + 1) * d_v],
                allowed,
            )
            for h in range(heads)
        ]
        wanted = linear(layer.output, np.concatenate(found, axis=1))
        np.testing.assert_allclose(output[b], wanted, rtol=1e-12, atol=1e-12)


def test_another_number_of_keys_than_queries_of_another_text(small_recipe: SmallRecipe) -> None:
    layer = attention(small_recipe(model={"d_model": 4, "heads": 1}))
    queries, others = (torch.randn(1, n, 4, dtype=torch.float64) for n in (2, 5))
    output = layer(queries, layer.keys_values(others), Mask()).detach().numpy()[0]
    query, key, value, out = (
        part.weight.detach().numpy().T
        for part in (layer.query, layer.key, layer.value, layer.output)
    )
    looked, seen = queries.numpy()[0], others.numpy()[0]
    wanted = numpy_softmax(looked @ query @ (seen @ key).T / 2) @ seen @ value @ out
    np.testing.assert_allclose(output, wanted, rtol=1e-12, atol=1e-12)


# Masks


@pytest.mark.parametrize("length", [2, 9, 70])
@pytest.mark.parametrize("padded", [False, True])
def test_a_later_token_changes_no_earlier_output(
    small_recipe: SmallRecipe, length: int, padded: bool
) -> None:
    layer = attention(small_recipe()).float()
    x = torch.randn(3, length, 16)
    mask = Mask(torch.ones(3, length, dtype=torch.bool) if padded else None, causal=True)
    before = layer(x, layer.keys_values(x), mask)
    for changed in {1, length // 2, length - 1}:
        y = x.clone()
        y[:, changed] = 100 * torch.randn(3, 16)
        after = layer(y, layer.keys_values(y), mask)
        assert torch.equal(before[:, :changed], after[:, :changed])
        assert not torch.isclose(before[:, changed], after[:, changed]).all()


def test_mask_truth_table() -> None:
    real = torch.tensor([[True, True, False], [True, False, False]])
    here = torch.device("cpu")
    assert Mask().matrix(3, 3, here) is None
    padding = Mask(real).matrix(3, 3, here)
    causal = Mask(causal=True).matrix(3, 3, here)
    both = Mask(real, causal=True).matrix(3, 3, here)
    assert padding is not None
    assert causal is not None
    assert both is not None
    assert padding.tolist() == [[[[True, True, False]]], [[[True, False, False]]]]
    lower = [[True, False, False], [True, True, False], [True, True, True]]
    assert causal.tolist() == [[lower]]
    assert both.tolist() == [
        [[[True, False, False], [True, True, False], [True, True, False]]],
        [[[True, False, False], [True, False, False], [True, False, False]]],
    ]
    # Fewer queries than keys: they are the last ones.
    newest = Mask(causal=True).matrix(2, 3, here)
    assert newest is not None
    assert newest.tolist() == [[[[True, True, False], [True, True, True]]]]
    assert Mask(causal=True).matrix(1, 3, here) is None


# Looking on


def test_watching_receives_every_step_and_changes_nothing(small_recipe: SmallRecipe) -> None:
    torch.manual_seed(1)
    layer = MultiHeadAttention(small_recipe().model, "encoder")
    x = torch.randn(2, 5, 16)
    mask = Mask(torch.tensor([[True] * 5, [True] * 3 + [False] * 2]))
    unwatched = layer(x, layer.keys_values(x), mask)
    seen: list[AttentionIntermediates] = []
    layer.watch = seen.append
    watched = layer(x, layer.keys_values(x), mask)
    assert len(seen) == 1
    assert isinstance(seen[0], AttentionIntermediates)
    assert seen[0].weights.shape == (2, 2, 5, 5)
    torch.testing.assert_close(watched, unwatched, rtol=0, atol=1e-6)


# Keys and values


def test_keys_and_values_are_selected_and_joined_by_row_and_position() -> None:
    first, then = (KeyValue(torch.rand(3, 2, n, 4), torch.rand(3, 2, n, 5)) for n in (2, 1))
    joined = first.followed_by(then)
    assert joined.key.shape == (3, 2, 3, 4)
    assert torch.equal(joined.value[:, :, :2], first.value)
    assert torch.equal(joined.key[:, :, 2:], then.key)
    chosen = joined.select(torch.tensor([2, 0, 2]))
    assert torch.equal(chosen.key, joined.key[[2, 0, 2]])
    assert torch.equal(chosen.value, joined.value[[2, 0, 2]])


# Why the scale (A2)


@pytest.mark.parametrize("d_k", [4, 64, 1024])
def test_variance_of_products_grows_with_the_width_and_the_scale_mends_it(
    small_recipe: SmallRecipe, d_k: int
) -> None:
    torch.manual_seed(d_k)
    arguments: Any = (
        torch.randn(64, 1, 32, d_k),
        torch.randn(64, 1, 32, d_k),
        torch.randn(64, 1, 32, 1),
        Mask(),
    )
    unscaled = Both(small_recipe, d_k, "unscaled").show(*arguments)
    scaled = Both(small_recipe, d_k, "scaled").show(*arguments)
    assert torch.equal(unscaled.products, unscaled.scores)
    assert float(unscaled.scores.var()) == pytest.approx(d_k, rel=0.1)
    assert float(scaled.scores.var()) == pytest.approx(1, rel=0.1)


def test_without_the_scale_softmax_saturates_and_its_gradient_shrinks(
    small_recipe: SmallRecipe,
) -> None:
    torch.manual_seed(1)
    arguments: Any = (*(torch.randn(8, 1, 32, 512) for _ in range(3)), Mask())
    largest, slope = {}, {}
    for name in DOT_PRODUCTS:
        weights = Both(small_recipe, 512, name).show(*arguments).weights
        largest[name] = float(weights.amax(dim=-1).mean())
        # The derivative of softmax is diag(w) - w w^T; its trace is 1 - sum of squares.
        slope[name] = float((1 - weights.square().sum(dim=-1)).mean())
    assert largest["unscaled"] > 0.9
    assert largest["scaled"] < 0.25
    assert slope["unscaled"] < slope["scaled"] / 5


@settings(max_examples=20)
@given(width=st.integers(1, 4096))
def test_the_scale_is_the_root_of_the_key_width(small_recipe: SmallRecipe, width: int) -> None:
    section = small_recipe(model={"d_k": width}).model
    assert SCORES["scaled"](section).scale == pytest.approx(width**-0.5, rel=1e-15)
    assert SCORES["unscaled"](section).scale == 1
