"""Every score, weighting, position and norm against its formula, written out in NumPy float64 by loops."""

import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from regard.data.special_tokens import PAD
from regard.nn.attention import AttentionIntermediates, Mask
from regard.nn.layers import RESIDUALS
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.norms import NORMS, BatchNorm, RMSNorm
from regard.nn.positions import Index, Relative, Rotary
from regard.nn.transformer import Transformer
from regard.recipe import NormOrder, Recipe, Weighting

Array = npt.NDArray[np.float64]
SmallRecipe = Callable[..., Recipe]
SIZES = {"d_model": 6, "heads": 2, "d_k": 4, "d_v": 3}
LENGTHS = [7, 4]


def random_heads(recipe: Recipe) -> MultiHeadAttention:
    """In float64, every weight and bias random."""
    made = MultiHeadAttention(recipe.model, "encoder").double().eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_()
    return made


def softmax(scores: Array) -> Array:
    raised = np.exp(scores - scores.max())
    result: Array = raised / raised.sum()
    return result


def mean_of_positive(scores: Array) -> Array:
    """ReLU in place of softmax."""
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
    """Multi-head attention of one sentence without padding, a pair of words at a time.

    score takes head, places of query and key, query and key; extra is added to a value.
    """
    heads, groups = layer.heads, layer.groups
    query, key, value = (
        x @ numpy_of(part.weight).T for part in (layer.query, layer.key, layer.value)
    )
    query = query.reshape(len(x), heads, -1)
    key, value = key.reshape(len(x), groups, -1), value.reshape(len(x), groups, -1)
    joined = np.zeros((len(x), heads, value.shape[2]))
    for h in range(heads):
        g = h * groups // heads
        for i in range(len(x)):
            seen = range(i + 1 if causal else len(x))
            if score is None:
                scores = [query[i, h] @ key[j, g] / math.sqrt(key.shape[2]) for j in seen]
            else:
                scores = [score(h, i, j, query[i, h], key[j, g]) for j in seen]
            weights = weigh(np.array(scores))
            for j, weight in zip(seen, weights, strict=True):
                joined[i, h] += weight * (value[j, g] + (extra(i, j) if extra else 0))
    result: Array = joined.reshape(len(x), -1) @ numpy_of(layer.output.weight).T
    return result


def assert_is(layer: MultiHeadAttention, formula: Callable[[Array, bool], Array]) -> None:
    """Both ways, with padding or causal, are the formula for each sentence alone."""
    x = torch.randn(len(LENGTHS), max(LENGTHS), 6, dtype=torch.float64)
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    for mask in (Mask(real), Mask(real, causal=True)):
        fast = numpy_of(layer(x, layer.keys_values(x, real), mask))
        seen: list[AttentionIntermediates] = []
        layer.watch = seen.append
        shown = numpy_of(layer(x, layer.keys_values(x, real), mask))
        layer.watch = None
        assert len(seen) == 1
        for row, length in enumerate(LENGTHS):
            wanted = formula(x[row, :length].numpy(), mask.causal)
            np.testing.assert_allclose(fast[row, :length], wanted, rtol=1e-10, atol=1e-10)
            np.testing.assert_allclose(shown[row, :length], wanted, rtol=1e-10, atol=1e-10)


# Scores and weightings


def test_additive_score_is_one_hidden_layer(small_recipe: SmallRecipe) -> None:
    layer = random_heads(small_recipe(model={**SIZES, "attention": {"score": "additive"}}))
    hidden: Any = layer.attention.score
    weight, bias = numpy_of(hidden.weight), numpy_of(hidden.bias).reshape(2, 4)

    def score(h: int, _i: int, _j: int, q: Array, k: Array) -> float:
        return float(sum(weight[h, n] * math.tanh(q[n] + k[n] + bias[h, n]) for n in range(4)))

    assert_is(layer, lambda x, causal: written_out(layer, x, causal=causal, score=score))


def test_relu_weighting_is_the_positive_part_over_the_number_of_keys(
    small_recipe: SmallRecipe,
) -> None:
    layer = random_heads(small_recipe(model={**SIZES, "attention": {"weighting": "relu"}}))
    assert_is(layer, lambda x, causal: written_out(layer, x, causal=causal, weigh=mean_of_positive))


def test_unscaled_is_the_product_alone(small_recipe: SmallRecipe) -> None:
    layer = random_heads(small_recipe(model={**SIZES, "attention": {"score": "dot_product"}}))
    assert_is(
        layer,
        lambda x, causal: written_out(
            layer, x, causal=causal, score=lambda _h, _i, _j, q, k: float(q @ k)
        ),
    )


# Grouped keys and values


@pytest.mark.parametrize("beam_groups", [1, 2, 4])
def test_neighbouring_heads_share_keys_and_values(small_recipe: SmallRecipe, groups: int) -> None:
    sizes = {**SIZES, "heads": 4, "attention": {"key_value_heads": groups}}
    layer = random_heads(small_recipe(model=sizes))
    assert layer.key.weight.shape == (groups * 4, 6)
    assert layer.value.weight.shape == (groups * 3, 6)
    assert layer.keys_values(torch.randn(1, 5, 6).double()).key.shape == (1, groups, 5, 4)
    assert_is(layer, lambda x, causal: written_out(layer, x, causal=causal))


def test_as_many_groups_as_heads_is_plain_attention(small_recipe: SmallRecipe) -> None:
    plain = random_heads(small_recipe(model=SIZES))
    grouped = random_heads(small_recipe(model={**SIZES, "attention": {"key_value_heads": 2}}))
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    assert torch.equal(
        plain(x, plain.keys_values(x), Mask()), grouped(x, grouped.keys_values(x), Mask())
    )


# Rotary


def turned(x: Array, place: int) -> npt.NDArray[np.complex128]:
    """Pairs of features as complex numbers, times e^(i place theta)."""
    pairs = x[0::2] + 1j * x[1::2]
    theta = 10000.0 ** (-2 * np.arange(len(pairs)) / len(x))
    result: npt.NDArray[np.complex128] = pairs * np.exp(1j * place * theta)
    return result


def test_rotary_is_multiplication_by_complex_numbers(small_recipe: SmallRecipe) -> None:
    layer = random_heads(small_recipe(model={**SIZES, "position": "rotary"}))

    def score(_h: int, i: int, j: int, q: Array, k: Array) -> float:
        return float((turned(q, i) * turned(k, j).conj()).sum().real / math.sqrt(len(q)))

    assert_is(layer, lambda x, causal: written_out(layer, x, causal=causal, score=score))


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
        return float((rotary.turn(q, i) * rotary.turn(k, j)).sum())

    assert product(query, key) == pytest.approx(product(query + shift, key + shift), abs=1e-9)
    assert float(rotary.turn(q, query).norm()) == pytest.approx(float(q.norm()), rel=1e-12)
    assert torch.equal(rotary.turn(q, 0), q)


def test_a_rotary_product_knows_the_direction(small_recipe: SmallRecipe) -> None:
    rotary = Rotary(small_recipe(model={"position": "rotary", "d_k": 2}).model)
    q, k = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[[0.0, 1.0]]]])
    ahead = (rotary.turn(q, 0) * rotary.turn(k, 1)).sum()
    behind = (rotary.turn(q, 1) * rotary.turn(k, 0)).sum()
    assert ahead.item() == pytest.approx(-math.sin(1), abs=1e-6)
    assert behind.item() == pytest.approx(math.sin(1), abs=1e-6)


# Relative


@pytest.mark.parametrize("farthest", [1, 3, 16])
def test_relative_positions_are_shaws_formula(small_recipe: SmallRecipe, farthest: int) -> None:
    layer = random_heads(
        small_recipe(model={**SIZES, "position": "relative", "max_distance": farthest})
    )
    assert isinstance(layer.relation, Relative)
    keys, values = numpy_of(layer.relation.keys), numpy_of(layer.relation.values)
    assert keys.shape == (2 * farthest + 1, 4)
    assert values.shape == (2 * farthest + 1, 3)

    def which(i: int, j: int) -> int:
        return max(-farthest, min(farthest, j - i)) + farthest

    def score(_h: int, i: int, j: int, q: Array, k: Array) -> float:
        return float(q @ (k + keys[which(i, j)]) / math.sqrt(4))

    assert_is(
        layer,
        lambda x, causal: written_out(
            layer, x, causal=causal, score=score, extra=lambda i, j: values[which(i, j)]
        ),
    )


# No position, and its number


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
def test_with_positions_it_does_not(small_recipe: SmallRecipe, name: str) -> None:
    source = torch.arange(5, 14)[None]
    order = torch.arange(8, -1, -1)
    network = encoder(small_recipe(model={"position": name}))
    states, permuted = network.encode(source).states, network.encode(source[:, order]).states
    assert float((permuted - states[:, order]).detach().abs().max()) > 0.01


def test_index_adds_the_number_and_swamps_the_word(small_recipe: SmallRecipe) -> None:
    section = small_recipe(model={"position": "index", "d_model": 64}).model
    x = torch.randn(2, 1001, 64, dtype=torch.float64)
    found = Index(section)(x, start=3)
    wanted = x.numpy() + np.arange(3, 1004)[None, :, None]
    np.testing.assert_array_equal(found.numpy(), wanted)
    # Two different words look alike far from the start: the cosine of the angle between them.
    first, last = (
        float(torch.cosine_similarity(found[0, at], found[1, at], dim=0)) for at in (0, 1000)
    )
    assert first < 0.97
    assert last > 0.9999


# Norms


def words_of(lengths: list[int], width: int) -> tuple[Tensor, Tensor]:
    """Random states; what stands at padding is enormous, so that it cannot enter unseen."""
    x = 3 * torch.randn(len(lengths), max(lengths), width, dtype=torch.float64) + 2
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return torch.where(real[..., None], x, 1e6), real


def randomized(module: nn.Module) -> Any:
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_()
    return module.double()


def test_rms_norm_divides_by_the_root_of_the_mean_square() -> None:
    norm = randomized(RMSNorm(6))
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    wanted = np.empty((2, 3, 6))
    for b, t in np.ndindex(2, 3):
        vector = x[b, t].numpy()
        wanted[b, t] = vector / math.sqrt(sum(v * v for v in vector) / 6 + 1e-6)
    wanted *= numpy_of(norm.weight)
    np.testing.assert_allclose(numpy_of(norm(x)), wanted, rtol=0, atol=1e-12)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


def test_batch_norm_is_torchs_over_the_words_alone() -> None:
    torch.manual_seed(1)
    mine, other = randomized(BatchNorm(5)), nn.BatchNorm1d(5).double()
    with torch.no_grad():
        other.weight.copy_(mine.weight)
        other.bias.copy_(mine.bias)
    for lengths in ([4, 1, 6], [3, 3], [1, 2]):
        x, real = words_of(lengths, 5)
        x.requires_grad_()
        found, wanted = mine(x, real), other(x[real])
        torch.testing.assert_close(found[real], wanted, rtol=0, atol=1e-12)
        weights = torch.randn_like(wanted)
        (one,) = torch.autograd.grad((found[real] * weights).sum(), x)
        (two,) = torch.autograd.grad((wanted * weights).sum(), x)
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
        torch.testing.assert_close(mine.mean, other.running_mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(mine.variance, other.running_var, rtol=0, atol=1e-12)
    mine.eval()
    other.eval()
    x, real = words_of([4, 2], 5)
    together = mine(x, real)
    torch.testing.assert_close(together[real], other(x[real]), rtol=0, atol=1e-12)
    # Alone, a word at a time: the same, and nothing is remembered.
    before = mine.mean.clone()
    for row, length in enumerate([4, 2]):
        for t in range(length):
            alone = mine(x[row : row + 1, t : t + 1])
            torch.testing.assert_close(alone[0, 0], together[row, t], rtol=0, atol=1e-12)
    assert torch.equal(mine.mean, before)


def test_batch_norm_of_one_word_stays_a_number() -> None:
    norm = BatchNorm(3)
    y = norm(torch.tensor([[[1.0, 2.0, 3.0]]]))
    assert torch.equal(y, torch.zeros(1, 1, 3))
    assert all(bool(buffer.isfinite().all()) for buffer in norm.buffers())


def test_no_norm_changes_nothing_and_has_no_weights(small_recipe: SmallRecipe) -> None:
    x = torch.randn(1, 2, 16)
    assert NORMS["none"](16)(x) is x
    for place in get_args(NormOrder):
        residual = RESIDUALS[place](small_recipe(model={"norm": "none"}).model)
        assert not list(residual.parameters())
        assert torch.equal(residual(x, lambda y: 2 * y, None), 3 * x)


# What stays true whatever the weighting


@pytest.mark.parametrize("weighting", get_args(Weighting))
def test_weights_are_zero_where_masked_and_softmax_alone_sums_to_one(
    small_recipe: SmallRecipe, weighting: Weighting
) -> None:
    layer = random_heads(small_recipe(model={**SIZES, "attention": {"weighting": weighting}}))
    x = torch.randn(1, 6, 6, dtype=torch.float64)
    seen: list[AttentionIntermediates] = []
    layer.watch = seen.append
    layer(x, layer.keys_values(x), Mask(causal=True))
    weights = numpy_of(seen[0].weights)
    assert not weights[..., *np.triu_indices(6, 1)].any()
    assert (weights >= 0).all()
    ones = np.allclose(weights.sum(-1), 1, rtol=0, atol=1e-12)
    assert ones == (weighting == "softmax")
