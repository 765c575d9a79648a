"""Attention patterns: the fast path and the explicit formula against loops in NumPy, in float64."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from regard.data.special_tokens import PAD
from regard.errors import RegardError
from regard.nn.attention import Attention
from regard.nn.attention_mask import AttentionMask
from regard.nn.attention_patterns import PATTERNS, BigBird, FullAttention, Linformer, SlidingWindow
from regard.nn.kv_cache import KeyValue
from regard.nn.positions import POSITIONS
from regard.nn.transformer import Transformer
from regard.recipe import Recipe
from regard.recipe.registry import allowed_names

Array = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.bool_]
SmallRecipe = Callable[..., Recipe]
HEADS, WIDTH = 2, 4


def make(
    recipe: Recipe, name: str, position: str = "sinusoidal"
) -> tuple[FullAttention, Attention]:
    encoding = POSITIONS[position].for_site("decoder").attention(recipe.model)
    pattern = PATTERNS[name](recipe.model, "encoder")
    return pattern.double(), Attention(recipe.model, encoding).double().eval()


def vectors(batch: int, length: int, seed: int) -> tuple[Tensor, KeyValue]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(batch, HEADS, length, WIDTH, generator=generator, dtype=torch.float64)
        for _ in range(3)
    )
    return query, KeyValue(key, value)


def numpy_attention(query: Tensor, kv: KeyValue, allowed: Matrix) -> Array:
    """Softmax attention of one head of one sentence; row i of ``allowed`` marks the keys of query i."""
    rows = []
    for q, keys in zip(query.numpy(), allowed, strict=True):
        exponentials = np.array([math.exp(q @ k / math.sqrt(len(q))) for k in kv.key.numpy()[keys]])
        rows.append(exponentials / exponentials.sum() @ kv.value.numpy()[keys])
    return np.array(rows)


def assert_attends(
    recipe: Recipe, name: str, mask: AttentionMask, lengths: list[int], attends: Callable[..., bool]
) -> None:
    """Both paths attention to exactly the pairs of positions for which ``attends(length, i, j)`` is true."""
    pattern, attention = make(recipe, name)
    query, kv = vectors(len(lengths), max(lengths), seed=len(lengths) * max(lengths))
    fast = pattern(attention, query, kv, mask)
    explicit = pattern.attention_with_weights(attention, query, kv, mask)
    for row, length in enumerate(lengths):
        allowed = np.array([[attends(length, i, j) for j in range(length)] for i in range(length)])
        weights = explicit.weights[row, :, :length].numpy()
        assert np.array_equal(weights[..., :length] > 0, np.stack([allowed] * HEADS))
        assert not weights[..., length:].any()
        for head in range(HEADS):
            text = KeyValue(*(part[row, head, :length] for part in kv))
            expected = numpy_attention(query[row, head, :length], text, allowed)
            np.testing.assert_allclose(fast[row, head, :length].numpy(), expected, atol=1e-12)
            found = explicit.output[row, head, :length].numpy()
            np.testing.assert_allclose(found, expected, atol=1e-12)


def masks(lengths: list[int], causal: bool) -> AttentionMask:
    if len(set(lengths)) == 1:
        return AttentionMask(causal=causal)
    return AttentionMask(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None], causal)


texts = st.lists(st.integers(1, 40), min_size=1, max_size=3)
long_texts = st.lists(st.integers(1, 100), min_size=1, max_size=2)


# SlidingWindow


@settings(max_examples=50)
@given(lengths=long_texts, size=st.integers(1, 40), causal=st.booleans())
def test_window_attention_equals_the_formula(
    small_recipe: SmallRecipe, lengths: list[int], size: int, causal: bool
) -> None:
    recipe = small_recipe(
        model={"d_k": WIDTH, "attention": {"encoder": "window", "window_size": size}}
    )

    def attends(_length: int, i: int, j: int) -> bool:
        return abs(i - j) <= size and (j <= i or not causal)

    assert_attends(recipe, "window", masks(lengths, causal), lengths, attends)


@settings(max_examples=30)
@given(length=st.integers(1, 20), size=st.integers(1, 8), position=st.sampled_from([*POSITIONS]))
def test_a_decoding_step_with_a_window_equals_all_positions_at_once(
    small_recipe: SmallRecipe, length: int, size: int, position: str
) -> None:
    sizes = {"d_k": WIDTH, "d_v": WIDTH}
    recipe = small_recipe(model={**sizes, "attention": {"encoder": "window", "window_size": size}})
    pattern, attention = make(recipe, "window", position)
    query, kv = vectors(2, length, seed=length)
    whole = pattern(attention, query, kv, AttentionMask(causal=True))
    for i in range(length):
        before = KeyValue(*(part[:, :, : i + 1] for part in kv))
        newest = pattern(attention, query[:, :, i : i + 1], before, AttentionMask(causal=True))
        torch.testing.assert_close(newest, whole[:, :, i : i + 1], rtol=0, atol=1e-12)


def test_a_window_as_wide_as_the_text_is_full_attention(small_recipe: SmallRecipe) -> None:
    recipe = small_recipe(
        model={"d_k": WIDTH, "attention": {"encoder": "window", "window_size": 9}}
    )
    query, kv = vectors(2, 10, seed=1)
    (window, attention), (full, _) = make(recipe, "window"), make(recipe, "full")
    for mask in (AttentionMask(), AttentionMask(causal=True)):
        found, expected = (pattern(attention, query, kv, mask) for pattern in (window, full))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@settings(max_examples=50)
@given(lengths=texts, size=st.integers(1, 40), causal=st.booleans(), left_padded=st.booleans())
def test_the_spans_of_a_window_equal_its_matrix(
    small_recipe: SmallRecipe, lengths: list[int], size: int, causal: bool, left_padded: bool
) -> None:
    """The spans for the GPU kernel, by query and by key."""
    window = SlidingWindow(
        small_recipe(model={"attention": {"encoder": "window", "window_size": size}}).model,
        "encoder",
    )
    mask = masks(lengths, causal)
    if left_padded and mask.non_pad is not None:
        mask = AttentionMask(mask.non_pad.flip(1), causal)
    shape = len(lengths), max(lengths)
    spans = window.spans(mask, *shape, torch.device("cpu"))
    position = torch.arange(max(lengths))
    by_queries = spans.matrix()[:, 0]
    by_keys = position[:, None] >= spans.query_start[:, None]
    by_keys &= position[:, None] < spans.query_end[:, None]
    distance = position - position[:, None]
    near = (distance.abs() <= size) & ((distance <= 0) | (not causal))
    non_pad = torch.ones(shape, dtype=torch.bool) if mask.non_pad is None else mask.non_pad
    pairs = non_pad[:, :, None] & non_pad[:, None]
    assert torch.equal(by_queries & non_pad[:, :, None], near & pairs)
    assert torch.equal(by_keys & pairs, near & pairs)


# BigBird


def hashed(block: int, slot: int) -> int:
    """The hash of the random blocks, in Python integers."""
    number = (block * 0x9E3779B1 + slot * 0x85EBCA77 + 1) % 2**32
    number = (number ^ number >> 16) * 0x45D9F3B % 2**32
    number = (number ^ number >> 16) * 0x45D9F3B % 2**32
    return number ^ number >> 16


@settings(max_examples=60)
@given(
    lengths=texts,
    size=st.integers(1, 5),
    global_blocks=st.integers(0, 3),
    random_blocks=st.integers(0, 4),
)
def test_bigbird_attends_to_neighbours_global_and_random_blocks(
    small_recipe: SmallRecipe, lengths: list[int], size: int, global_blocks: int, random_blocks: int
) -> None:
    options: dict[str, Any] = {"encoder": "bigbird", "block_size": size}
    options |= {"global_blocks": global_blocks, "random_blocks": random_blocks}
    recipe = small_recipe(model={"d_k": WIDTH, "attention": options})

    def attends(length: int, i: int, j: int) -> bool:
        query, key, count = i // size, j // size, math.ceil(length / size)
        random = {hashed(query, slot) % count for slot in range(random_blocks)}
        return abs(query - key) <= 1 or min(query, key) < global_blocks or key in random

    assert_attends(recipe, "bigbird", masks(lengths, causal=False), lengths, attends)


def test_random_blocks_are_spread_over_the_whole_text(small_recipe: SmallRecipe) -> None:
    options = {"encoder": "bigbird", "block_size": 1, "global_blocks": 0, "random_blocks": 3}
    pattern, _ = make(small_recipe(model={"attention": options}), "bigbird")
    assert isinstance(pattern, BigBird)
    chosen = pattern.visible_blocks(torch.ones(1, 1000, dtype=torch.bool))[0, :, 3:]
    counts = np.histogram(chosen[chosen >= 0].numpy(), bins=10, range=(0, 1000))[0]
    assert counts.sum() > 2950  # a few are neighbours, or chosen twice
    assert counts.min() > 240  # even: 295 each, standard deviation 16
    assert counts.max() < 350
    # Random blocks are short cuts: a few layers connect almost every pair of blocks.
    dense = pattern.allowed(AttentionMask(), 1000, 1000, torch.device("cpu"))
    assert dense is not None
    step = dense[0, 0].numpy().astype(np.float32)
    reached = step > 0
    for _ in range(5):
        reached = (reached.astype(np.float32) @ step) > 0
    assert reached.mean() > 0.95


# SlidingWindow and BigBird


@settings(max_examples=40)
@given(
    name=st.sampled_from(["window", "bigbird"]),
    position=st.sampled_from(["sinusoidal", "relative"]),
    score=st.sampled_from(["scaled_dot_product", "additive"]),
    weighting=st.sampled_from(["softmax", "relu"]),
    kv_heads=st.sampled_from([1, 2]),
    lengths=long_texts,
)
def test_the_fast_path_equals_the_explicit_formula_with_any_score_and_position(
    small_recipe: SmallRecipe,
    name: str,
    position: str,
    score: str,
    weighting: str,
    kv_heads: int,
    lengths: list[int],
) -> None:
    sizes: dict[str, dict[str, int]] = {
        "window": {"window_size": 3},
        "bigbird": {"block_size": 2, "global_blocks": 1, "random_blocks": 2},
    }
    options = {"encoder": name, "score": score, "weighting": weighting, **sizes[name]}
    recipe = small_recipe(model={"d_k": WIDTH, "d_v": WIDTH, "attention": options})
    pattern, attention = make(recipe, name, position)
    query, kv = vectors(len(lengths), max(lengths), seed=3)
    kv = KeyValue(*(part[:, :kv_heads] for part in kv))
    mask = masks(lengths, causal=False)
    fast, explicit = (
        pattern(attention, query, kv, mask),
        pattern.attention_with_weights(attention, query, kv, mask),
    )
    for row, length in enumerate(lengths):
        torch.testing.assert_close(
            fast[row, :, :length], explicit.output[row, :, :length], rtol=0, atol=1e-12
        )


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the largest number of elements of any tensor."""

    found = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else [result]:
            if isinstance(part, Tensor):
                self.found = max(self.found, part.numel())
        return result


@pytest.mark.parametrize("name", allowed_names("model.attention.encoder"))
def test_only_full_attention_builds_a_quadratic_matrix(
    small_recipe: SmallRecipe, name: str
) -> None:
    length = 1024
    # ReLU weighting has no fused kernel, which would hide the matrix.
    size = {"window": "window_size", "bigbird": "block_size", "linformer": "linformer_k"}.get(name)
    options = {"encoder": name, "weighting": "relu", **({size: 16} if size else {})}
    recipe = small_recipe(model={"d_model": 8, "attention": options})
    network = Transformer(recipe.model, 30, 30)
    source = torch.randint(PAD + 1, 30, (1, length))
    source[0, 1000:] = PAD
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        torch.autograd.backward(network.encode(source).states.sum())
    if name == "full":
        assert largest.found == HEADS * length * length
    else:  # BigBird is the largest: 2 + 3 + 3 blocks of 16 tokens
        assert largest.found <= HEADS * length * 8 * 16 < length * length


# Linformer


def test_linformer_equals_its_formula(small_recipe: SmallRecipe) -> None:
    options = {
        "d_k": WIDTH,
        "max_length": 300,
        "attention": {"encoder": "linformer", "linformer_k": 3},
    }
    pattern, attention = make(small_recipe(model=options), "linformer")
    assert isinstance(pattern, Linformer)
    keys, values = (part.detach().numpy() for part in (pattern.keys, pattern.values))
    assert keys.shape == values.shape == (3, 300)
    lengths = [7, 4]
    query, kv = vectors(2, 7, seed=1)
    mask = masks(lengths, causal=False)
    rows = pattern.project_kv(kv, mask.non_pad)
    fast = pattern(attention, query, rows, mask).detach().numpy()
    explicit = pattern.attention_with_weights(attention, query, rows, mask)
    assert explicit.weights.shape == (2, HEADS, 7, 3)  # weights over rows, not over tokens
    for row, head in np.ndindex(2, HEADS):
        length = lengths[row]
        q, k, v = (part[row, head, :length].numpy() for part in (query, *kv))
        scores = q @ (keys[:, :length] @ k).T / math.sqrt(WIDTH)
        weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        expected = weights @ (values[:, :length] @ v)
        np.testing.assert_allclose(fast[row, head, :length], expected, atol=1e-11)
        found = explicit.output.detach()[row, head, :length].numpy()
        np.testing.assert_allclose(found, expected, atol=1e-11)


@pytest.mark.parametrize("site", ["encoder", "cross_attention"])
def test_a_text_too_long_for_linformer_is_an_error(small_recipe: SmallRecipe, site: str) -> None:
    recipe = small_recipe(
        model={"max_length": 300, "attention": {site: "linformer", "linformer_k": 3}}
    )
    network = Transformer(recipe.model, 30, 30)
    assert network.max_length == 300
    target = torch.ones(1, 2, dtype=torch.long)
    assert network(torch.ones(1, 300, dtype=torch.long), target).shape == (1, 2, 30)
    with pytest.raises(
        RegardError,
        match=r"301 tokens is longer than the 300 positions of linformer \(model.max_length",
    ):
        network(torch.ones(1, 301, dtype=torch.long), target)


def test_linformer_projects_the_memory_once_per_source(small_recipe: SmallRecipe) -> None:
    recipe = small_recipe(model={"attention": {"cross_attention": "linformer", "linformer_k": 3}})
    network = Transformer(recipe.model, 30, 30).eval()
    state = network.start(network.encode(torch.randint(PAD + 1, 30, (2, 9))))
    assert [kv.key.shape for kv in state.cross_kv] == [(2, 2, 3, 8)] * 2
    _, state = network.step(torch.tensor([1, 1]), state)
    state = state.select(torch.tensor([[0, 0], [1, 1]]))
    memory = state.cross_kv
    _, state = network.step(torch.tensor([1, 2, 3, 4]), state)
    assert state.cross_kv is memory
    assert [kv.key.shape for kv in state.select(torch.tensor([[2, 3]])).cross_kv] == [
        (1, 2, 3, 8)
    ] * 2


# Recipes that are refused


def refusal(small_recipe: SmallRecipe, **model: Any) -> str:
    with pytest.raises(RegardError) as caught:
        small_recipe(model=model)
    return str(caught.value)


@pytest.mark.parametrize("position", ["rotary", "relative"])
def test_linformer_refuses_positions_that_need_distances(
    small_recipe: SmallRecipe, position: str
) -> None:
    message = refusal(small_recipe, position=position, attention={"encoder": "linformer"})
    assert f"model.position: {position} needs the distance between two tokens" in message
    assert "set position: sinusoidal or learned, or attention.encoder: window or bigbird" in message
    small_recipe(model={"position": position, "attention": {"cross_attention": "linformer"}})


@pytest.mark.parametrize("site", ["encoder", "cross_attention"])
def test_linformer_must_be_as_long_as_the_longest_text(
    small_recipe: SmallRecipe, site: str
) -> None:
    message = refusal(small_recipe, max_length=256, attention={site: "linformer"})
    assert "model.max_length: 256 is shorter than the longest training text: 257" in message


@pytest.mark.parametrize("option", ["window_size", "linformer_k", "block_size"])
def test_a_size_of_zero_is_refused(small_recipe: SmallRecipe, option: str) -> None:
    message = refusal(small_recipe, attention={option: 0})
    assert f"model.attention.{option}: 0 must be greater than or equal to 1" in message


@pytest.mark.parametrize(
    ("site", "name"),
    [("decoder", "linformer"), ("decoder", "bigbird"), ("cross_attention", "window")],
)
def test_a_pattern_is_refused_where_it_is_not_supported(
    small_recipe: SmallRecipe, site: str, name: str
) -> None:
    assert f"model.attention.{site}: '{name}' must be 'full'" in refusal(
        small_recipe, attention={site: name}
    )
