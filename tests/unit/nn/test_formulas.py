"""Scores, weightings, positions and norms against their formulas, written out token by token in NumPy."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from regard.data.special_tokens import PAD
from regard.nn.attention import WEIGHTINGS, AttentionIntermediates
from regard.nn.attention_mask import AttentionMask
from regard.nn.layers import NORM_ORDERS, RESIDUALS
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.norms import NORMS, BatchNorm, RMSNorm
from regard.nn.positions import Index, Relative, Rotary
from regard.nn.transformer import Transformer
from regard.recipe import Recipe

Array = npt.NDArray[np.float64]
SmallRecipe = Callable[..., Recipe]
SIZES = {"d_model": 6, "heads": 2, "d_k": 4, "d_v": 3}
LENGTHS = [7, 4]


def random_heads(recipe: Recipe) -> MultiHeadAttention:
    """A float64 module in which every weight and bias is random."""
    module = MultiHeadAttention(recipe.model, "encoder").double().eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_()
    return module


def softmax(scores: Array) -> Array:
    exponentials = np.exp(scores - scores.max())
    result: Array = exponentials / exponentials.sum()
    return result


def mean_of_positive(scores: Array) -> Array:
    """ReLU weighting: max(0, score) / number of keys."""
    return np.array([max(0.0, score) / len(scores) for score in scores])


def numpy_of(tensor: Any) -> Array:
    array: Array = tensor.detach().numpy()
    return array


def written_out(
    layer: MultiHeadAttention,
    x: Array,
    *,
    causal: bool = False,
    score: Callable[[int, int, int, Array, Array], float] | None = None,
    weigh: Callable[[Array], Array] = softmax,
    extra: Callable[[int, int], Array] | None = None,
) -> Array:
    """Multi-head attention of one sentence without padding, one pair of tokens at a time.

    score: a function of head, query position, key position, query and key. extra: a vector to add to a value, by query
    and key position.
    """
    heads, kv_heads = layer.heads, layer.kv_heads
    query, key, value = (
        x @ numpy_of(part.weight).T for part in (layer.query, layer.key, layer.value)
    )
    query = query.reshape(len(x), heads, -1)
    key, value = key.reshape(len(x), kv_heads, -1), value.reshape(len(x), kv_heads, -1)
    joined = np.zeros((len(x), heads, value.shape[2]))
    for h in range(heads):
        g = h * kv_heads // heads
        for i in range(len(x)):
            keys = range(i + 1 if causal else len(x))
            if score is None:
                scores = [query[i, h] @ key[j, g] / math.sqrt(key.shape[2]) for j in keys]
            else:
                scores = [score(h, i, j, query[i, h], key[j, g]) for j in keys]
            weights = weigh(np.array(scores))
            for j, weight in zip(keys, weights, strict=True):
                joined[i, h] += weight * (value[j, g] + (extra(i, j) if extra else 0))
    result: Array = joined.reshape(len(x), -1) @ numpy_of(layer.output.weight).T
    return result


def assert_equals(layer: MultiHeadAttention, formula: Callable[[Array, bool], Array]) -> None:
    """Both paths equal the formula for each sentence by itself, with padding and with a causal mask."""
    x = torch.randn(len(LENGTHS), max(LENGTHS), 6, dtype=torch.float64)
    non_pad = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    for mask in (AttentionMask(non_pad), AttentionMask(non_pad, causal=True)):
        fast = numpy_of(layer(x, layer.keys_values(x, non_pad), mask))
        recorded: list[AttentionIntermediates] = []
        layer.observer = recorded.append
        explicit = numpy_of(layer(x, layer.keys_values(x, non_pad), mask))
        layer.observer = None
        assert len(recorded) == 1
        for row, length in enumerate(LENGTHS):
            expected = formula(x[row, :length].numpy(), mask.causal)
            np.testing.assert_allclose(fast[row, :length], expected, rtol=1e-10, atol=1e-10)
            np.testing.assert_allclose(explicit[row, :length], expected, rtol=1e-10, atol=1e-10)


# Scores and weightings


def test_the_additive_score_is_one_hidden_layer(small_recipe: SmallRecipe) -> None:
    layer = random_heads(small_recipe(model={**SIZES, "attention": {"score": "additive"}}))
    hidden: Any = layer.attention.score
    weight, bias = numpy_of(hidden.weight), numpy_of(hidden.bias).reshape(2, 4)

    def score(h: int, _i: int, _j: int, q: Array, k: Array) -> float:
        return float(sum(weight[h, n] * math.tanh(q[n] + k[n] + bias[h, n]) for n in range(4)))

    assert_equals(layer, lambda x, causal: written_out(layer, x, causal=causal, score=score))


def test_relu_weighting_is_the_positive_part_over_the_number_of_keys(
    small_recipe: SmallRecipe,
) -> None:
    layer = random_heads(small_recipe(model={**SIZES, "attention": {"weighting": "relu"}}))
    assert_equals(
        layer, lambda x, causal: written_out(layer, x, causal=causal, weigh=mean_of_positive)
    )


def test_dot_product_has_no_scale(small_recipe: SmallRecipe) -> None:
    layer = random_heads(small_recipe(model={**SIZES, "attention": {"score": "dot_product"}}))
    assert_equals(
        layer,
        lambda x, causal: written_out(
            layer, x, causal=causal, score=lambda _h, _i, _j, q, k: float(q @ k)
        ),
    )


# Grouped-query attention


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_neighbouring_heads_share_keys_and_values(small_recipe: SmallRecipe, kv_heads: int) -> None:
    sizes = {**SIZES, "heads": 4, "attention": {"key_value_heads": kv_heads}}
    layer = random_heads(small_recipe(model=sizes))
    assert layer.key.weight.shape == (kv_heads * 4, 6)
    assert layer.value.weight.shape == (kv_heads * 3, 6)
    assert layer.keys_values(torch.randn(1, 5, 6).double()).key.shape == (1, kv_heads, 5, 4)
    assert_equals(layer, lambda x, causal: written_out(layer, x, causal=causal))


def test_as_many_key_value_heads_as_heads_is_plain_attention(small_recipe: SmallRecipe) -> None:
    plain = random_heads(small_recipe(model=SIZES))
    grouped = random_heads(small_recipe(model={**SIZES, "attention": {"key_value_heads": 2}}))
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    assert torch.equal(
        plain(x, plain.keys_values(x), AttentionMask()),
        grouped(x, grouped.keys_values(x), AttentionMask()),
    )


# Rotary


def rotated(x: Array, position: int) -> npt.NDArray[np.complex128]:
    """Pairs of features as complex numbers, times e^(i position theta)."""
    pairs = x[0::2] + 1j * x[1::2]
    theta = 10000.0 ** (-2 * np.arange(len(pairs)) / len(x))
    result: npt.NDArray[np.complex128] = pairs * np.exp(1j * position * theta)
    return result


def test_rotary_is_multiplication_by_complex_numbers(small_recipe: SmallRecipe) -> None:
    layer = random_heads(small_recipe(model={**SIZES, "position": "rotary"}))

    def score(_h: int, i: int, j: int, q: Array, k: Array) -> float:
        return float((rotated(q, i) * rotated(k, j).conj()).sum().real / math.sqrt(len(q)))

    assert_equals(layer, lambda x, causal: written_out(layer, x, causal=causal, score=score))


@settings(max_examples=30)
@given(
    query=st.integers(0, 3000),
    key=st.integers(0, 3000),
    shift=st.integers(0, 3000),
    half=st.integers(1, 6),
)
def test_a_rotary_product_depends_on_the_distance_alone(
    small_recipe: SmallRecipe, query: int, key: int, shift: int, half: int
) -> None:
    rotary = Rotary(small_recipe(model={"position": "rotary", "d_k": 2 * half}).model)
    q, k = (torch.randn(1, 1, 1, 2 * half, dtype=torch.float64) for _ in range(2))

    def product(i: int, j: int) -> float:
        return float((rotary.rotate(q, i) * rotary.rotate(k, j)).sum())

    assert product(query, key) == pytest.approx(product(query + shift, key + shift), abs=1e-9)
    assert float(rotary.rotate(q, query).norm()) == pytest.approx(float(q.norm()), rel=1e-12)
    assert torch.equal(rotary.rotate(q, 0), q)


def test_a_rotary_product_depends_on_the_sign_of_the_distance(small_recipe: SmallRecipe) -> None:
    rotary = Rotary(small_recipe(model={"position": "rotary", "d_k": 2}).model)
    q, k = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[[0.0, 1.0]]]])
    ahead = (rotary.rotate(q, 0) * rotary.rotate(k, 1)).sum()
    behind = (rotary.rotate(q, 1) * rotary.rotate(k, 0)).sum()
    assert ahead.item() == pytest.approx(-math.sin(1), abs=1e-6)
    assert behind.item() == pytest.approx(math.sin(1), abs=1e-6)


# Relative


@pytest.mark.parametrize("max_distance", [1, 3, 16])
def test_relative_positions_equal_the_formula_of_shaw_et_al(
    small_recipe: SmallRecipe, max_distance: int
) -> None:
    layer = random_heads(
        small_recipe(model={**SIZES, "position": "relative", "max_distance": max_distance})
    )
    assert isinstance(layer.position, Relative)
    keys, values = numpy_of(layer.position.keys), numpy_of(layer.position.values)
    assert keys.shape == (2 * max_distance + 1, 4)
    assert values.shape == (2 * max_distance + 1, 3)

    def index(i: int, j: int) -> int:
        return max(-max_distance, min(max_distance, j - i)) + max_distance

    def score(_h: int, i: int, j: int, q: Array, k: Array) -> float:
        return float(q @ (k + keys[index(i, j)]) / math.sqrt(4))

    assert_equals(
        layer,
        lambda x, causal: written_out(
            layer, x, causal=causal, score=score, extra=lambda i, j: values[index(i, j)]
        ),
    )


# No position, and the index as position


def encoder(recipe: Recipe) -> Transformer:
    torch.manual_seed(1)
    return Transformer(recipe.model, 30, 30).double().eval()


def test_without_positions_a_permuted_input_gives_the_permuted_output(
    small_recipe: SmallRecipe,
) -> None:
    source = torch.randint(PAD + 1, 30, (2, 9))
    order = torch.randperm(9)
    network = encoder(small_recipe(model={"position": "none"}))
    states, permuted = network.encode(source).states, network.encode(source[:, order]).states
    torch.testing.assert_close(permuted, states[:, order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["index", "sinusoidal", "learned", "rotary", "relative"])
def test_with_positions_a_permuted_input_gives_another_output(
    small_recipe: SmallRecipe, name: str
) -> None:
    source = torch.arange(5, 14)[None]
    order = torch.arange(8, -1, -1)
    network = encoder(small_recipe(model={"position": name}))
    states, permuted = network.encode(source).states, network.encode(source[:, order]).states
    assert float((permuted - states[:, order]).detach().abs().max()) > 0.01


def test_the_index_dominates_the_embedding_in_long_texts(small_recipe: SmallRecipe) -> None:
    section = small_recipe(model={"position": "index", "d_model": 64}).model
    x = torch.randn(2, 1001, 64, dtype=torch.float64)
    found = Index(section)(x, start=3)
    expected = x.numpy() + np.arange(3, 1004)[None, :, None]
    np.testing.assert_array_equal(found.numpy(), expected)
    # Two different tokens become almost parallel far from the start.
    first, last = (
        float(torch.cosine_similarity(found[0, t], found[1, t], dim=0)) for t in (0, 1000)
    )
    assert first < 0.97
    assert last > 0.9999


# Norms


def padded_states(lengths: list[int], width: int) -> tuple[Tensor, Tensor]:
    """Random states and the padding mask. Padding is huge, so that a test fails if it is used."""
    x = 3 * torch.randn(len(lengths), max(lengths), width, dtype=torch.float64) + 2
    non_pad = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return torch.where(non_pad[..., None], x, 1e6), non_pad


def randomized(module: nn.Module) -> Any:
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_()
    return module.double()


def test_rms_norm_divides_by_the_root_of_the_mean_square() -> None:
    norm = randomized(RMSNorm(6))
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    expected = np.empty((2, 3, 6))
    for b, t in np.ndindex(2, 3):
        vector = x[b, t].numpy()
        expected[b, t] = vector / math.sqrt(sum(v * v for v in vector) / 6 + 1e-6)
    expected *= numpy_of(norm.weight)
    np.testing.assert_allclose(numpy_of(norm(x)), expected, rtol=0, atol=1e-12)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


def test_batch_norm_is_torchs_without_the_padding() -> None:
    torch.manual_seed(1)
    mine, other = randomized(BatchNorm(5)), nn.BatchNorm1d(5).double()
    with torch.no_grad():
        other.weight.copy_(mine.weight)
        other.bias.copy_(mine.bias)
    for lengths in ([4, 1, 6], [3, 3], [1, 2]):
        x, non_pad = padded_states(lengths, 5)
        x.requires_grad_()
        found, expected = mine(x, non_pad), other(x[non_pad])
        torch.testing.assert_close(found[non_pad], expected, rtol=0, atol=1e-12)
        weights = torch.randn_like(expected)
        (one,) = torch.autograd.grad((found[non_pad] * weights).sum(), x)
        (two,) = torch.autograd.grad((expected * weights).sum(), x)
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
        torch.testing.assert_close(mine.running_mean, other.running_mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(mine.running_var, other.running_var, rtol=0, atol=1e-12)
    mine.eval()
    other.eval()
    x, non_pad = padded_states([4, 2], 5)
    together = mine(x, non_pad)
    torch.testing.assert_close(together[non_pad], other(x[non_pad]), rtol=0, atol=1e-12)
    # One token at a time gives the same, and does not change the running statistics.
    before = mine.running_mean.clone()
    for row, length in enumerate([4, 2]):
        for t in range(length):
            alone = mine(x[row : row + 1, t : t + 1])
            torch.testing.assert_close(alone[0, 0], together[row, t], rtol=0, atol=1e-12)
    assert torch.equal(mine.running_mean, before)


def test_batch_norm_of_two_processes_has_the_statistics_of_their_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two processes with the same tokens, or one of them without any."""
    from torch.distributed.nn import functional

    monkeypatch.setattr(functional, "all_reduce", lambda sums: 2 * sums)
    norm, tokens = BatchNorm(5), 3 + torch.randn(7, 5)
    twice = torch.cat([tokens, tokens])
    mean, variance, unbiased = norm._synchronized_statistics(tokens)
    torch.testing.assert_close(mean, twice.mean(0))
    torch.testing.assert_close(variance, twice.var(0, correction=0))
    torch.testing.assert_close(unbiased, twice.var(0, correction=1))
    norm.idle = True
    theirs = torch.cat([tokens.sum(0), tokens.square().sum(0), torch.tensor([7.0])])
    monkeypatch.setattr(functional, "all_reduce", lambda sums: sums + theirs)
    mean, variance, _ = norm._synchronized_statistics(torch.full((1, 5), 1e6))
    torch.testing.assert_close(mean, tokens.mean(0))
    torch.testing.assert_close(variance, tokens.var(0, correction=0), atol=1e-4, rtol=1e-4)


def test_batch_norm_of_one_token_is_finite() -> None:
    norm = BatchNorm(3)
    y = norm(torch.tensor([[[1.0, 2.0, 3.0]]]))
    assert torch.equal(y, torch.zeros(1, 1, 3))
    assert all(bool(buffer.isfinite().all()) for buffer in norm.buffers())


def test_no_norm_changes_nothing_and_has_no_weights(small_recipe: SmallRecipe) -> None:
    x = torch.randn(1, 2, 16)
    assert NORMS["none"](16)(x) is x
    for order, residual in product(NORM_ORDERS, RESIDUALS):
        config = small_recipe(model={"norm": "none", "residual": residual}).model
        sublayer = NORM_ORDERS[order](config)
        assert not list(sublayer.parameters())
        expected = 2 * x if residual == "none" else 3 * x
        assert torch.equal(sublayer(x, lambda y: 2 * y, None), expected)


# Weightings


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_weights_are_zero_where_masked_and_softmax_alone_sums_to_one(
    small_recipe: SmallRecipe, weighting: str
) -> None:
    layer = random_heads(small_recipe(model={**SIZES, "attention": {"weighting": weighting}}))
    x = torch.randn(1, 6, 6, dtype=torch.float64)
    recorded: list[AttentionIntermediates] = []
    layer.observer = recorded.append
    layer(x, layer.keys_values(x), AttentionMask(causal=True))
    weights = numpy_of(recorded[0].weights)
    assert not weights[..., *np.triu_indices(6, 1)].any()
    assert (weights >= 0).all()
    ones = np.allclose(weights.sum(-1), 1, rtol=0, atol=1e-12)
    assert ones == (weighting == "softmax")
