"""Attention against an example worked by hand and against the formula written out in NumPy."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from regard.nn.attention import SCORES, Attention, AttentionIntermediates
from regard.nn.attention_mask import AttentionMask
from regard.nn.attention_patterns import FullAttention
from regard.nn.kv_cache import KeyValue
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.positions import AttentionPosition
from regard.recipe import Recipe

Array = npt.NDArray[np.float64]
SmallRecipe = Callable[..., Recipe]

# An example worked by hand: 3 tokens, d_model = 4, one head with d_k = 2, and W^V = W^O = 1.
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
DOT_PRODUCTS = ("scaled_dot_product", "dot_product")


def attention(recipe: Recipe, seed: int = 1) -> MultiHeadAttention:
    """A float64 module in which every weight and bias is random."""
    torch.manual_seed(seed)
    module = MultiHeadAttention(recipe.model, "encoder").double().eval()
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_()
    return module


class BothPaths:
    """Full attention, by the fast path and by the explicit formula."""

    def __init__(
        self, small_recipe: SmallRecipe, d_k: int, score: str = "scaled_dot_product"
    ) -> None:
        section = small_recipe(model={"heads": 1, "d_k": d_k, "attention": {"score": score}}).model
        self.pattern = FullAttention(section, "encoder")
        self.attention = Attention(section, AttentionPosition(section)).eval()

    def fast(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
        output: Tensor = self.pattern(self.attention, query, KeyValue(key, value), mask)
        return output

    def explicit(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask
    ) -> AttentionIntermediates:
        return self.pattern.attention_with_weights(
            self.attention, query, KeyValue(key, value), mask
        )


def numpy_softmax(scores: Array) -> Array:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    result: Array = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return result


def numpy_attention(
    query: Array, key: Array, value: Array, allowed: npt.NDArray[np.bool_]
) -> Array:
    """One head of one sentence, query by query."""
    rows = []
    for q, may_attend in zip(query, allowed, strict=True):
        scores = np.array([q @ k for k in key]) / math.sqrt(len(q))
        rows.append(numpy_softmax(np.where(may_attend, scores, -np.inf)) @ value)
    return np.array(rows)


@st.composite
def inputs(
    draw: st.DrawFn,
) -> tuple[Tensor, Tensor, Tensor, AttentionMask, npt.NDArray[np.bool_]]:
    """Query, key and value in float64, a mask, and the same mask as a NumPy matrix."""
    sizes = st.integers(1, 5)
    batch, heads, queries, keys, d_k, d_v = (draw(sizes) for _ in range(6))
    padded, causal = draw(st.booleans()), draw(st.booleans())
    if causal:  # the queries are the last of the keys
        keys = max(queries, keys)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    query = torch.randn(batch, heads, queries, d_k, generator=generator, dtype=torch.float64)
    key = torch.randn(batch, heads, keys, d_k, generator=generator, dtype=torch.float64)
    value = torch.randn(batch, heads, keys, d_v, generator=generator, dtype=torch.float64)
    lengths = draw(st.lists(st.integers(1, keys), min_size=batch, max_size=batch))
    non_pad = np.arange(keys)[None] < np.array(lengths)[:, None]
    allowed = np.ones((batch, 1, queries, keys), dtype=np.bool_)
    if padded:
        allowed &= non_pad[:, None, None, :]
    if causal:
        allowed &= np.arange(keys)[None] <= np.arange(keys - queries, keys)[:, None]
    mask = AttentionMask(torch.from_numpy(non_pad) if padded else None, causal)
    return query, key, value, mask, np.broadcast_to(allowed, (batch, heads, queries, keys))


# The example worked by hand


def test_every_intermediate_of_the_worked_example(small_recipe: SmallRecipe) -> None:
    recipe = small_recipe(model={"d_model": 4, "heads": 1, "d_k": 2, "d_v": 4})
    one_head = attention(recipe)
    with torch.no_grad():
        one_head.query.weight.copy_(torch.tensor(W_Q, dtype=torch.float64).T)
        one_head.key.weight.copy_(torch.tensor(W_K, dtype=torch.float64).T)
        one_head.value.weight.copy_(torch.eye(4))
        one_head.output.weight.copy_(torch.eye(4))
    recorded: list[AttentionIntermediates] = []
    one_head.observer = recorded.append
    tokens = torch.tensor([E], dtype=torch.float64)
    output = one_head(tokens, one_head.keys_values(tokens), AttentionMask())
    (result,) = recorded

    def error(value: Tensor, expected: list[list[float]]) -> float:
        return float(np.abs(value.detach().numpy().squeeze() - np.array(expected)).max())

    assert error(result.query, Q) <= EIGHT_DECIMALS
    assert error(result.key, K) <= EIGHT_DECIMALS
    assert error(result.value, E) == 0
    assert error(result.products, PRODUCTS) <= THREE_DECIMALS
    assert error(result.scores, SCALED) <= THREE_DECIMALS
    assert error(result.masked, SCALED) <= THREE_DECIMALS
    assert error(result.weights, WEIGHTS) <= THREE_DECIMALS
    assert error(result.output, OUTPUT) <= THREE_DECIMALS
    assert error(output, OUTPUT) <= THREE_DECIMALS


def test_the_fast_path_on_the_worked_example(small_recipe: SmallRecipe) -> None:
    query, key, value = (torch.tensor([[part]]) for part in (Q, K, E))
    output = BothPaths(small_recipe, 2).fast(query, key, value, AttentionMask())
    assert np.abs(output.numpy()[0, 0] - np.array(OUTPUT)).max() <= THREE_DECIMALS


def test_shapes_with_two_heads_and_different_d_k_and_d_v(small_recipe: SmallRecipe) -> None:
    two_heads = attention(small_recipe(model={"d_model": 4, "heads": 2, "d_k": 4, "d_v": 8}))
    # torch stores W transposed.
    assert two_heads.query.weight.T.shape == two_heads.key.weight.T.shape == (4, 8)
    assert two_heads.value.weight.T.shape == (4, 16)
    assert two_heads.output.weight.T.shape == (16, 4)
    tokens = torch.randn(1, 3, 4, dtype=torch.float64)
    assert two_heads.query(tokens).shape == two_heads.key(tokens).shape == (1, 3, 8)
    assert two_heads.value(tokens).shape == (1, 3, 16)
    recorded: list[AttentionIntermediates] = []
    two_heads.observer = recorded.append
    joined: list[tuple[int, ...]] = []
    two_heads.output.register_forward_pre_hook(lambda _, inputs: joined.append(inputs[0].shape))
    output = two_heads(tokens, two_heads.keys_values(tokens), AttentionMask())
    (result,) = recorded
    assert result.query.shape == result.key.shape == (1, 2, 3, 4)
    assert result.value.shape == (1, 2, 3, 8)
    assert result.weights.shape == (1, 2, 3, 3)
    assert joined == [(1, 3, 16)]
    assert output.shape == (1, 3, 4)


# The formula


@given(example=inputs())
def test_both_paths_equal_the_formula(
    small_recipe: SmallRecipe,
    example: tuple[Tensor, Tensor, Tensor, AttentionMask, npt.NDArray[np.bool_]],
) -> None:
    query, key, value, mask, allowed = example
    paths = BothPaths(small_recipe, query.shape[-1])
    explicit, fast = (
        paths.explicit(query, key, value, mask),
        paths.fast(query, key, value, mask),
    )
    for b, h in np.ndindex(*query.shape[:2]):
        expected = numpy_attention(
            query[b, h].numpy(), key[b, h].numpy(), value[b, h].numpy(), allowed[b, h]
        )
        np.testing.assert_allclose(explicit.output[b, h].numpy(), expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(fast[b, h].numpy(), expected, rtol=0, atol=1e-12)


@given(example=inputs())
def test_the_fast_path_equals_the_explicit_formula_in_single_precision(
    small_recipe: SmallRecipe,
    example: tuple[Tensor, Tensor, Tensor, AttentionMask, npt.NDArray[np.bool_]],
) -> None:
    query, key, value = (part.float() for part in example[:3])
    mask = example[3]
    for score in DOT_PRODUCTS:
        paths = BothPaths(small_recipe, query.shape[-1], score)
        explicit = paths.explicit(query, key, value, mask).output
        torch.testing.assert_close(paths.fast(query, key, value, mask), explicit, rtol=0, atol=3e-6)


@given(example=inputs())
def test_weights_sum_to_one_and_are_zero_where_masked(
    small_recipe: SmallRecipe,
    example: tuple[Tensor, Tensor, Tensor, AttentionMask, npt.NDArray[np.bool_]],
) -> None:
    query, key, value, mask, allowed = example
    explicit = BothPaths(small_recipe, query.shape[-1]).explicit(query, key, value, mask)
    weights = explicit.weights.numpy()
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=0, atol=1e-14)
    assert (weights[~allowed] == 0).all()
    assert (weights[allowed] > 0).all()
    assert (explicit.masked.numpy()[~allowed] == -np.inf).all()
    assert np.array_equal(explicit.masked.numpy()[allowed], explicit.scores.numpy()[allowed])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_multi_head_attention_equals_the_formula(
    small_recipe: SmallRecipe, bias: bool, causal: bool
) -> None:
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
    non_pad = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    output = layer(x, layer.keys_values(x), AttentionMask(non_pad, causal)).detach().numpy()

    def linear(part: torch.nn.Linear, values: Array) -> Array:
        product: Array = values @ part.weight.detach().numpy().T
        return product + part.bias.detach().numpy() if bias else product

    for b in range(2):
        tokens = x[b].numpy()
        query, key, value = (linear(part, tokens) for part in (layer.query, layer.key, layer.value))
        allowed = np.array(
            [[non_pad[b, j] and (j <= i or not causal) for j in range(7)] for i in range(7)]
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
        expected = linear(layer.output, np.concatenate(found, axis=1))
        np.testing.assert_allclose(output[b], expected, rtol=1e-12, atol=1e-12)


def test_cross_attention_with_another_number_of_keys_than_queries(
    small_recipe: SmallRecipe,
) -> None:
    layer = attention(small_recipe(model={"d_model": 4, "heads": 1}))
    queries, others = (torch.randn(1, n, 4, dtype=torch.float64) for n in (2, 5))
    output = layer(queries, layer.keys_values(others), AttentionMask()).detach().numpy()[0]
    query, key, value, out = (
        part.weight.detach().numpy().T
        for part in (layer.query, layer.key, layer.value, layer.output)
    )
    x, memory = queries.numpy()[0], others.numpy()[0]
    expected = numpy_softmax(x @ query @ (memory @ key).T / 2) @ memory @ value @ out
    np.testing.assert_allclose(output, expected, rtol=1e-12, atol=1e-12)


# Masks


@pytest.mark.parametrize("length", [2, 9, 70])
@pytest.mark.parametrize("padded", [False, True])
def test_a_later_token_changes_no_earlier_output(
    small_recipe: SmallRecipe, length: int, padded: bool
) -> None:
    layer = attention(small_recipe()).float()
    x = torch.randn(3, length, 16)
    mask = AttentionMask(torch.ones(3, length, dtype=torch.bool) if padded else None, causal=True)
    before = layer(x, layer.keys_values(x), mask)
    for changed in {1, length // 2, length - 1}:
        y = x.clone()
        y[:, changed] = 100 * torch.randn(3, 16)
        after = layer(y, layer.keys_values(y), mask)
        assert torch.equal(before[:, :changed], after[:, :changed])
        assert not torch.isclose(before[:, changed], after[:, changed]).all()


# Recording


def test_recording_does_not_change_the_output(small_recipe: SmallRecipe) -> None:
    torch.manual_seed(1)
    layer = MultiHeadAttention(small_recipe().model, "encoder")
    x = torch.randn(2, 5, 16)
    mask = AttentionMask(torch.tensor([[True] * 5, [True] * 3 + [False] * 2]))
    plain = layer(x, layer.keys_values(x), mask)
    recorded: list[AttentionIntermediates] = []
    layer.observer = recorded.append
    observed = layer(x, layer.keys_values(x), mask)
    assert len(recorded) == 1
    assert isinstance(recorded[0], AttentionIntermediates)
    assert recorded[0].weights.shape == (2, 2, 5, 5)
    torch.testing.assert_close(observed, plain, rtol=0, atol=1e-6)


# Keys and values


def test_keys_and_values_are_selected_by_row_and_concatenated_by_position() -> None:
    first, then = (KeyValue(torch.rand(3, 2, n, 4), torch.rand(3, 2, n, 5)) for n in (2, 1))
    joined = first.concat(then)
    assert joined.key.shape == (3, 2, 3, 4)
    assert torch.equal(joined.value[:, :, :2], first.value)
    assert torch.equal(joined.key[:, :, 2:], then.key)
    chosen = joined.select(torch.tensor([2, 0, 2]))
    assert torch.equal(chosen.key, joined.key[[2, 0, 2]])
    assert torch.equal(chosen.value, joined.value[[2, 0, 2]])


# The scale


@pytest.mark.parametrize("d_k", [4, 64, 1024])
def test_the_scale_keeps_the_variance_of_the_scores_at_one(
    small_recipe: SmallRecipe, d_k: int
) -> None:
    torch.manual_seed(d_k)
    arguments: Any = (
        torch.randn(64, 1, 32, d_k),
        torch.randn(64, 1, 32, d_k),
        torch.randn(64, 1, 32, 1),
        AttentionMask(),
    )
    unscaled = BothPaths(small_recipe, d_k, "dot_product").explicit(*arguments)
    scaled = BothPaths(small_recipe, d_k, "scaled_dot_product").explicit(*arguments)
    assert torch.equal(unscaled.products, unscaled.scores)
    assert float(unscaled.scores.var()) == pytest.approx(d_k, rel=0.1)
    assert float(scaled.scores.var()) == pytest.approx(1, rel=0.1)


def test_without_the_scale_softmax_saturates_and_its_gradient_shrinks(
    small_recipe: SmallRecipe,
) -> None:
    torch.manual_seed(1)
    arguments: Any = (*(torch.randn(8, 1, 32, 512) for _ in range(3)), AttentionMask())
    largest, slope = {}, {}
    for name in DOT_PRODUCTS:
        weights = BothPaths(small_recipe, 512, name).explicit(*arguments).weights
        largest[name] = float(weights.amax(dim=-1).mean())
        # The derivative of softmax is diag(w) - w w^T; its trace is 1 - sum of squares.
        slope[name] = float((1 - weights.square().sum(dim=-1)).mean())
    assert largest["dot_product"] > 0.9
    assert largest["scaled_dot_product"] < 0.25
    assert slope["dot_product"] < slope["scaled_dot_product"] / 5


@settings(max_examples=20)
@given(width=st.integers(1, 4096))
def test_the_scale_is_the_root_of_the_key_width(small_recipe: SmallRecipe, width: int) -> None:
    section = small_recipe(model={"d_k": width}).model
    assert SCORES["scaled_dot_product"](section).scale == pytest.approx(width**-0.5, rel=1e-15)
    assert SCORES["dot_product"](section).scale == 1
