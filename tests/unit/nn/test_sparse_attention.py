"""Patterns: the fast way is the shown way, and both see whom they should, by loops in NumPy float64."""

import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from regard.data.special_tokens import PAD
from regard.errors import RegardError
from regard.nn.attention import Attention, KeyValue, Mask
from regard.nn.positions import POSITIONS
from regard.nn.sparse_attention import PATTERNS, BigBird, Full, Linformer, Window
from regard.nn.transformer import Transformer
from regard.recipe import EncoderPattern, Pattern, Position, Recipe

Array = npt.NDArray[np.float64]
Observation = npt.NDArray[np.bool_]
SmallRecipe = Callable[..., Recipe]
HEADS, WIDTH = 2, 4


def make(
    recipe: Recipe, name: Pattern, position: Position = "sinusoidal"
) -> tuple[Full, Attention]:
    relation = POSITIONS[position].on("decoder").attention(recipe.model)
    pattern = PATTERNS[name](recipe.model, "encoder")
    return pattern.double(), Attention(recipe.model, relation).double().eval()


def vectors(batch: int, length: int, seed: int) -> tuple[Tensor, KeyValue]:
    numbers = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(batch, HEADS, length, WIDTH, generator=numbers, dtype=torch.float64)
        for _ in range(3)
    )
    return query, KeyValue(key, value)


def numpy_attention(query: Tensor, seen: KeyValue, allowed: Observation) -> Array:
    """Softmax attention of one head of one sentence; row i of allowed says whom query i sees."""
    rows = []
    for q, may in zip(query.numpy(), allowed, strict=True):
        raised = np.array([math.exp(q @ k / math.sqrt(len(q))) for k in seen.key.numpy()[may]])
        rows.append(raised / raised.sum() @ seen.value.numpy()[may])
    return np.array(rows)


def assert_sees(
    recipe: Recipe, name: Pattern, mask: Mask, lengths: list[int], sees: Callable[..., bool]
) -> None:
    """Both ways are attention over exactly the pairs of words for which sees(length, i, j) is true."""
    pattern, attend = make(recipe, name)
    query, seen = vectors(len(lengths), max(lengths), seed=len(lengths) * max(lengths))
    fast = pattern(attend, query, seen, mask)
    shown = pattern.show(attend, query, seen, mask)
    for row, length in enumerate(lengths):
        allowed = np.array([[sees(length, i, j) for j in range(length)] for i in range(length)])
        weights = shown.weights[row, :, :length].numpy()
        assert np.array_equal(weights[..., :length] > 0, np.stack([allowed] * HEADS))
        assert not weights[..., length:].any()
        for head in range(HEADS):
            words = KeyValue(*(part[row, head, :length] for part in seen))
            wanted = numpy_attention(query[row, head, :length], words, allowed)
            np.testing.assert_allclose(fast[row, head, :length].numpy(), wanted, atol=1e-12)
            found = shown.output[row, head, :length].numpy()
            np.testing.assert_allclose(found, wanted, atol=1e-12)


def masks(lengths: list[int], causal: bool) -> Mask:
    if len(set(lengths)) == 1:
        return Mask(causal=causal)
    return Mask(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None], causal)


texts = st.lists(st.integers(1, 40), min_size=1, max_size=3)
long_texts = st.lists(st.integers(1, 100), min_size=1, max_size=2)


# Window


@settings(max_examples=50)
@given(lengths=long_texts, reach=st.integers(1, 40), causal=st.booleans())
def test_a_window_sees_as_far_as_it_reaches(
    small_recipe: SmallRecipe, lengths: list[int], reach: int, causal: bool
) -> None:
    recipe = small_recipe(model={"d_k": WIDTH, "attention": {"window_size": reach}})

    def sees(_length: int, i: int, j: int) -> bool:
        return abs(i - j) <= reach and (j <= i or not causal)

    assert_sees(recipe, "window", masks(lengths, causal), lengths, sees)


@settings(max_examples=30)
@given(length=st.integers(1, 20), reach=st.integers(1, 8), position=st.sampled_from([*POSITIONS]))
def test_the_newest_word_sees_what_it_would_see_among_all(
    small_recipe: SmallRecipe, length: int, reach: int, position: Position
) -> None:
    sizes = {"d_k": WIDTH, "d_v": WIDTH}
    recipe = small_recipe(model={**sizes, "attention": {"window_size": reach}})
    pattern, attend = make(recipe, "window", position)
    query, seen = vectors(2, length, seed=length)
    whole = pattern(attend, query, seen, Mask(causal=True))
    for i in range(length):
        before = KeyValue(*(part[:, :, : i + 1] for part in seen))
        newest = pattern(attend, query[:, :, i : i + 1], before, Mask(causal=True))
        torch.testing.assert_close(newest, whole[:, :, i : i + 1], rtol=0, atol=1e-12)


def test_a_window_that_reaches_everywhere_is_full(small_recipe: SmallRecipe) -> None:
    recipe = small_recipe(model={"d_k": WIDTH, "attention": {"window_size": 9}})
    query, seen = vectors(2, 10, seed=1)
    (window, attend), (full, _) = make(recipe, "window"), make(recipe, "full")
    for mask in (Mask(), Mask(causal=True)):
        found, wanted = (pattern(attend, query, seen, mask) for pattern in (window, full))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@settings(max_examples=50)
@given(lengths=texts, reach=st.integers(1, 40), causal=st.booleans(), in_front=st.booleans())
def test_a_window_is_one_span_for_each_place(
    small_recipe: SmallRecipe, lengths: list[int], reach: int, causal: bool, in_front: bool
) -> None:
    """What the kernel of a GPU is told, from the side of the queries and from that of the keys."""
    window = Window(small_recipe(model={"attention": {"window_size": reach}}).model, "encoder")
    mask = masks(lengths, causal)
    if in_front and mask.real is not None:
        mask = Mask(mask.real.flip(1), causal)
    size = len(lengths), max(lengths)
    spans = window.spans(mask, *size, torch.device("cpu"))
    place = torch.arange(max(lengths))
    by_queries = spans.matrix()[:, 0]
    by_keys = (place[:, None] >= spans.first[:, None]) & (place[:, None] < spans.last[:, None])
    apart = place - place[:, None]
    near = (apart.abs() <= reach) & ((apart <= 0) | (not causal))
    real = torch.ones(size, dtype=torch.bool) if mask.real is None else mask.real
    pairs = real[:, :, None] & real[:, None]
    assert torch.equal(by_queries & real[:, :, None], near & pairs)
    assert torch.equal(by_keys & pairs, near & pairs)


# BigBird


def scrambled(block: int, slot: int) -> int:
    """The fixed hash, in Python's own integers."""
    number = (block * 0x9E3779B1 + slot * 0x85EBCA77 + 1) % 2**32
    number = (number ^ number >> 16) * 0x45D9F3B % 2**32
    number = (number ^ number >> 16) * 0x45D9F3B % 2**32
    return number ^ number >> 16


@settings(max_examples=60)
@given(
    lengths=texts,
    size=st.integers(1, 5),
    general=st.integers(0, 3),
    anywhere=st.integers(0, 4),
)
def test_bigbird_sees_neighbours_global_and_random_blocks(
    small_recipe: SmallRecipe, lengths: list[int], size: int, general: int, anywhere: int
) -> None:
    options = {"block_size": size, "global_blocks": general, "random_blocks": anywhere}
    recipe = small_recipe(model={"d_k": WIDTH, "attention": options})

    def sees(length: int, i: int, j: int) -> bool:
        query, key, count = i // size, j // size, math.ceil(length / size)
        random = {scrambled(query, slot) % count for slot in range(anywhere)}
        return abs(query - key) <= 1 or min(query, key) < general or key in random

    assert_sees(recipe, "bigbird", masks(lengths, causal=False), lengths, sees)


def test_random_blocks_are_spread_over_the_whole_text(small_recipe: SmallRecipe) -> None:
    options = {"block_size": 1, "global_blocks": 0, "random_blocks": 3}
    pattern, _ = make(small_recipe(model={"attention": options}), "bigbird")
    assert isinstance(pattern, BigBird)
    chosen = pattern.chosen(torch.ones(1, 1000, dtype=torch.bool))[0, :, 3:]
    counts = np.histogram(chosen[chosen >= 0].numpy(), bins=10, range=(0, 1000))[0]
    assert counts.sum() > 2950  # a few fall on neighbours or on one another
    assert counts.min() > 240  # even: 295 each, standard deviation 16
    assert counts.max() < 350
    # Some way leads from each block to any other in a few layers, because chance is a short cut.
    dense = pattern.allowed(Mask(), 1000, 1000, torch.device("cpu"))
    assert dense is not None
    step = dense[0, 0].numpy().astype(np.float32)
    reached = step > 0
    for _ in range(5):
        reached = (reached.astype(np.float32) @ step) > 0
    assert reached.mean() > 0.95


# All that cut


@settings(max_examples=40)
@given(
    name=st.sampled_from(["window", "bigbird"]),
    position=st.sampled_from(["sinusoidal", "relative"]),
    score=st.sampled_from(["scaled", "additive"]),
    weighting=st.sampled_from(["softmax", "relu"]),
    groups=st.sampled_from([1, 2]),
    lengths=long_texts,
)
def test_fast_is_shown_whatever_the_score_and_the_distance(
    small_recipe: SmallRecipe,
    name: Pattern,
    position: Position,
    score: str,
    weighting: str,
    groups: int,
    lengths: list[int],
) -> None:
    options = {"window_size": 3, "block_size": 2, "global_blocks": 1, "random_blocks": 2}
    options |= {"score": score, "weighting": weighting}  # type: ignore[dict-item]
    recipe = small_recipe(model={"d_k": WIDTH, "d_v": WIDTH, "attention": options})
    pattern, attend = make(recipe, name, position)
    query, seen = vectors(len(lengths), max(lengths), seed=3)
    seen = KeyValue(*(part[:, :groups] for part in seen))
    mask = masks(lengths, causal=False)
    fast, shown = pattern(attend, query, seen, mask), pattern.show(attend, query, seen, mask)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(
            fast[row, :, :length], shown.output[row, :, :length], rtol=0, atol=1e-12
        )


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the greatest number of elements any tensor had."""

    found = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else [result]:
            if isinstance(part, Tensor):
                self.found = max(self.found, part.numel())
        return result


@pytest.mark.parametrize("name", get_args(EncoderPattern))
def test_only_full_attention_builds_a_matrix_of_all_with_all(
    small_recipe: SmallRecipe, name: Pattern
) -> None:
    length = 1024
    # ReLU has no fused kernel that could hide a matrix.
    options = {
        "encoder": name,
        "weighting": "relu",
        "window_size": 16,
        "block_size": 16,
        "linformer_k": 16,
    }
    recipe = small_recipe(model={"d_model": 8, "attention": options})
    network = Transformer(recipe.model, 30, 30)
    source = torch.randint(PAD + 1, 30, (1, length))
    source[0, 1000:] = PAD
    with Largest() as largest:  # type: ignore[no-untyped-call]
        torch.autograd.backward(network.encode(source).states.sum())
    if name == "full":
        assert largest.found == HEADS * length * length
    else:  # BigBird sees the most: 2 + 3 + 3 blocks of 16 words
        assert largest.found <= HEADS * length * 8 * 16 < length * length


# Linformer


def test_linformer_is_its_formula(small_recipe: SmallRecipe) -> None:
    options = {"d_k": WIDTH, "max_length": 300, "attention": {"linformer_k": 3}}
    pattern, attend = make(small_recipe(model=options), "linformer")
    assert isinstance(pattern, Linformer)
    keys, values = (part.detach().numpy() for part in (pattern.keys, pattern.values))
    assert keys.shape == values.shape == (3, 300)
    lengths = [7, 4]
    query, seen = vectors(2, 7, seed=1)
    mask = masks(lengths, causal=False)
    rows = pattern.condense(seen, mask.real)
    fast = pattern(attend, query, rows, mask).detach().numpy()
    shown = pattern.show(attend, query, rows, mask)
    assert shown.weights.shape == (2, HEADS, 7, 3)  # rows are looked at, not words
    for row, head in np.ndindex(2, HEADS):
        length = lengths[row]
        q, k, v = (part[row, head, :length].numpy() for part in (query, *seen))
        scores = q @ (keys[:, :length] @ k).T / math.sqrt(WIDTH)
        weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        wanted = weights @ (values[:, :length] @ v)
        np.testing.assert_allclose(fast[row, head, :length], wanted, atol=1e-11)
        found = shown.output.detach()[row, head, :length].numpy()
        np.testing.assert_allclose(found, wanted, atol=1e-11)


@pytest.mark.parametrize("place", ["encoder", "memory"])
def test_linformer_ends_with_a_clear_error(small_recipe: SmallRecipe, place: str) -> None:
    recipe = small_recipe(
        model={"max_length": 300, "attention": {place: "linformer", "linformer_k": 3}}
    )
    network = Transformer(recipe.model, 30, 30)
    assert network.longest == 300
    target = torch.ones(1, 2, dtype=torch.long)
    assert network(torch.ones(1, 300, dtype=torch.long), target).shape == (1, 2, 30)
    with pytest.raises(
        RegardError,
        match=r"301 tokens is longer than the 300 linformer can read \(model.max_length",
    ):
        network(torch.ones(1, 301, dtype=torch.long), target)


def test_rows_of_the_memory_are_computed_once_for_each_source(small_recipe: SmallRecipe) -> None:
    recipe = small_recipe(model={"attention": {"memory": "linformer", "linformer_k": 3}})
    network = Transformer(recipe.model, 30, 30).eval()
    state = network.start(network.encode(torch.randint(PAD + 1, 30, (2, 9))))
    assert [seen.key.shape for seen in state.memory] == [(2, 2, 3, 8)] * 2
    _, state = network.step(torch.tensor([1, 1]), state)
    state = state.select(torch.tensor([[0, 0], [1, 1]]))
    memory = state.memory
    _, state = network.step(torch.tensor([1, 2, 3, 4]), state)
    assert state.memory is memory
    assert [seen.key.shape for seen in state.select(torch.tensor([[2, 3]])).memory] == [
        (1, 2, 3, 8)
    ] * 2


# What is refused


def refusal(small_recipe: SmallRecipe, **model: Any) -> str:
    with pytest.raises(RegardError) as caught:
        small_recipe(model=model)
    return str(caught.value)


@pytest.mark.parametrize("position", ["rotary", "relative"])
def test_linformer_has_no_distances(small_recipe: SmallRecipe, position: str) -> None:
    message = refusal(small_recipe, position=position, attention={"encoder": "linformer"})
    assert f"model.position: {position} needs the distance of two words" in message
    assert (
        "take position: sinusoidal or learned, or attention.encoder: window or bigbird" in message
    )
    small_recipe(model={"position": position, "attention": {"memory": "linformer"}})


@pytest.mark.parametrize("place", ["encoder", "memory"])
def test_linformer_must_reach_the_longest_text(small_recipe: SmallRecipe, place: str) -> None:
    message = refusal(small_recipe, max_length=256, attention={place: "linformer"})
    assert "model.max_length 256 is shorter than the data may be: 257" in message


@pytest.mark.parametrize("option", ["window_size", "rows", "block_size"])
def test_nothing_of_size_zero(small_recipe: SmallRecipe, option: str) -> None:
    message = refusal(small_recipe, attention={option: 0})
    assert f"model.attention.{option}: 0 must be greater than or equal to 1" in message


@pytest.mark.parametrize(
    ("place", "name"), [("decoder", "linformer"), ("decoder", "bigbird"), ("memory", "window")]
)
def test_a_pattern_stands_only_where_it_can(
    small_recipe: SmallRecipe, place: str, name: str
) -> None:
    assert f"model.attention.{place}: '{name}' must be 'full'" in refusal(
        small_recipe, attention={place: name}
    )
