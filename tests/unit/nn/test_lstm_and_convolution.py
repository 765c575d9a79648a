"""The networks the Transformer is compared with, against loops in NumPy, and step by step against all at once."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from regard import recipe
from regard.data.special_tokens import PAD
from regard.errors import RegardError
from regard.nn.architectures import ARCHITECTURES
from regard.nn.attention import AttentionIntermediates
from regard.nn.network import Network
from regard.nn.state_dict import named_weights
from regard.recipe import Recipe, load_recipe
from regard.storage.run_dir import write_tensors

Array = npt.NDArray[np.float64]
SmallRecipe = Callable[..., Recipe]

V = 30
ARCHITECTURES = ["recurrent", "convolution"]
USUAL: dict[str, dict[str, Any]] = {"recurrent": {}, "convolution": {"kernel_size": 4}}
SIZES = {"encoder_layers": 2, "decoder_layers": 3, "d_model": 12, "heads": 2}


@pytest.fixture(scope="session")
def small(small_recipe: SmallRecipe) -> Callable[..., Network]:
    """A small network of an architecture, at rest."""

    def make(architecture: str, **model: Any) -> Network:
        torch.manual_seed(1)
        feedforward = {"preset": "tiny", "d_ff": 256}  # the preset's: there is none here
        section = small_recipe(
            model={**SIZES, **feedforward, "architecture": architecture}
            | USUAL[architecture]
            | {"norm_order": "pre", **model}
        ).model
        return ARCHITECTURES[section.architecture](section, V, V).eval()

    return make


def ids(*shape: int) -> Tensor:
    return torch.randint(1, V, shape)


def padded() -> tuple[Tensor, Tensor]:
    """Sources and targets of several lengths."""
    source, target = ids(4, 9), ids(4, 7)
    for row, (s, t) in enumerate([(1, 4), (6, 1), (9, 7), (3, 3)]):
        source[row, s:] = target[row, t:] = PAD
    return source, target


def test_every_architecture_has_its_network() -> None:
    assert set(get_args(recipe.Architecture)) == ARCHITECTURES.keys()


# Against NumPy


def numbers(module: nn.Module) -> dict[str, Array]:
    return {name: weight.detach().numpy() for name, weight in module.named_parameters()}


def sigmoid(x: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-x))
    return result


def norm(x: Array, part: nn.Module) -> Array:
    weights = numbers(part)
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    result: Array = scaled * weights["weight"] + weights["bias"]
    return result


def lstm(words: Array, weights: dict[str, Array], ending: str = "") -> Array:
    """Word after word: i, f, g, o from the word and the state before."""
    inner, carried = weights[f"weight_ih_l0{ending}"], weights[f"weight_hh_l0{ending}"]
    bias = weights[f"bias_ih_l0{ending}"] + weights[f"bias_hh_l0{ending}"]
    h = c = np.zeros(carried.shape[1])
    states = []
    for word in words:
        i, f, g, o = np.split(inner @ word + carried @ h + bias, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        states.append(h)
    return np.array(states)


def gated_window(words: Array, weights: dict[str, Array], before: int) -> Array:
    """a * sigmoid(b), where a and b are sums over the taps of a window that begins so many words before."""
    kernel = weights["convolution.weight"]  # [2d, d, k]
    states = []
    for place in range(len(words)):
        total = weights["convolution.bias"].copy()
        for tap in range(kernel.shape[2]):
            at = place - before + tap
            if 0 <= at < len(words):
                total += kernel[:, :, tap] @ words[at]
        a, b = np.split(total, 2)
        states.append(a * sigmoid(b))
    return np.array(states)


def attend(words: Array, memory: Array, part: Any) -> Array:
    """Multi-head attention, head after head."""
    weights, heads = numbers(part), []
    for head in range(part.heads):
        query, key, value = (
            x @ np.split(weights[f"{name}.weight"], part.heads)[head].T
            for name, x in (("query", words), ("key", memory), ("value", memory))
        )
        scores = query @ key.T / np.sqrt(query.shape[1])
        likely = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(likely / likely.sum(-1, keepdims=True) @ value)
    result: Array = np.concatenate(heads, axis=-1) @ weights["output.weight"].T
    return result


def read(layer: Any, words: Array, *, both_ways: bool) -> Array:
    """The sub-layer in which words of one side meet."""
    if hasattr(layer, "window"):
        kernel = layer.window.kernel
        return gated_window(words, numbers(layer.window), kernel // 2 if both_ways else kernel - 1)
    weights = numbers(layer.lstm)
    if not both_ways:
        return lstm(words, weights)
    backwards = lstm(words[::-1], weights, "_reverse")[::-1]
    return np.concatenate([lstm(words, weights), backwards], axis=-1)


def logits(network: Any, source: Array, target: Array, waves: Array) -> Array:
    """One pair through a network whose norms stand before its sub-layers."""
    table = numbers(network.projection)["weight"]
    x, y = (table[row] * np.sqrt(12) + waves[: len(row)] for row in (source, target))
    for layer in network.encoder.layers:
        x = x + read(layer, norm(x, layer.residual.norm), both_ways=True)
    memory = norm(x, network.encoder.norm)
    for layer in network.decoder.layers:
        y = y + read(layer, norm(y, layer.residual.norm), both_ways=False)
        y = y + attend(norm(y, layer.cross_attention_residual.norm), memory, layer.cross_attention)
    result: Array = norm(y, network.decoder.norm) @ table.T
    return result


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_loops_in_numpy(architecture: str, small: Callable[..., Network]) -> None:
    network = small(architecture).double()
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)  # biases and norms that matter
    waves = np.zeros((9, 12))
    if architecture == "convolution":
        angle = np.arange(9)[:, None] / 10000 ** (np.arange(0, 12, 2) / 12)
        waves[:, 0::2], waves[:, 1::2] = np.sin(angle), np.cos(angle)
    source, target = padded()
    found = network(source, target).detach().numpy()
    for row in range(4):
        words, said = (ids[row][ids[row] != PAD].numpy() for ids in (source, target))
        wanted = logits(network, words, said, waves)
        assert wanted.std() > 0.1
        # All but our waves, which are stored in float32, is float64.
        np.testing.assert_allclose(found[row, : len(said)], wanted, atol=1e-5)


# Padding and order


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_changes_nothing(
    architecture: str, place: str, small: Callable[..., Network]
) -> None:
    network = small(architecture, norm_order=place)
    source, target = padded()
    together = network(source, target)
    for row in range(4):
        one, two = (ids[row][ids[row] != PAD][None] for ids in (source, target))
        alone = network(one, two)[0]
        torch.testing.assert_close(together[row, : len(alone)], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_future_target_tokens_change_no_earlier_logit(
    architecture: str, small: Callable[..., Network]
) -> None:
    network = small(architecture)
    source, target = ids(3, 6), ids(3, 8)
    before = network(source, target)
    for changed in range(1, 8):
        other = target.clone()
        other[:, changed:] = ids(3, 8 - changed)
        other[:, changed] = target[:, changed] % (V - 1) + 1  # another word, not PAD
        after = network(source, other)
        assert torch.equal(before[:, :changed], after[:, :changed])
        assert not torch.equal(before[:, changed], after[:, changed])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_target_position_sees_every_source_word(
    architecture: str, small: Callable[..., Network]
) -> None:
    network = small(architecture)
    source, target = ids(1, 6), ids(1, 4)
    before = network(source, target)
    for changed in range(6):
        other = source.clone()
        other[0, changed] = source[0, changed] % (V - 1) + 1
        moved = (network(other, target) - before).abs().amax(dim=-1)
        assert bool((moved > 1e-6).all())


# Step by step


@settings(max_examples=10)
@given(
    architecture=st.sampled_from(ARCHITECTURES),
    model=st.sampled_from(
        [{}, {"norm_order": "post", "attention": {"score": "additive"}}, {"norm": "rms"}]
    ),
    chance=st.randoms(use_true_random=False),
    sentences=st.integers(1, 4),
)
def test_steps_equal_all_at_once_through_any_selection(
    small: Callable[..., Network],
    architecture: str,
    model: dict[str, Any],
    chance: random.Random,
    sentences: int,
) -> None:
    network = small(architecture, **model)
    source = torch.tensor([[chance.randrange(1, V) for _ in range(6)] for _ in range(sentences)])
    for row in range(sentences):
        source[row, chance.randint(1, 6) :] = PAD
    with torch.inference_mode():
        state = network.start(network.encode(source))
        rows: list[tuple[int, list[int]]] = [(sentence, []) for sentence in range(sentences)]
        for _ in range(6):
            said = [chance.randrange(1, V) for _ in rows]
            rows = [(s, [*prefix, word]) for (s, prefix), word in zip(rows, said, strict=True)]
            found, state = network.step(torch.tensor(said), state)
            wanted = network(source[[s for s, _ in rows]], torch.tensor([p for _, p in rows]))
            torch.testing.assert_close(found, wanted[:, -1], rtol=0, atol=1e-5)
            # As a beam search would: any rows of a sentence, in any order; some sentences end.
            alive = sorted({s for s, _ in rows})
            kept = sorted(chance.sample(alive, chance.randint(1, len(alive))))
            beams = chance.randint(1, 3)
            own = {s: [row for row, (owner, _) in enumerate(rows) if owner == s] for s in kept}
            chosen = [chance.choices(own[s], k=beams) for s in kept]
            state = state.select(torch.tensor(chosen))
            rows = [rows[row] for line in chosen for row in line]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_step_leaves_the_state_it_came_from_as_it_was(
    architecture: str, small: Callable[..., Network]
) -> None:
    network = small(architecture)
    _, state = network.step(ids(2), network.start(network.encode(ids(2, 5))))
    token = ids(2)
    first, _ = network.step(token, state)
    network.step(ids(2), state)
    again, _ = network.step(token, state)
    assert torch.equal(first, again)


def test_a_window_of_one_word_keeps_nothing(small: Callable[..., Network]) -> None:
    network = small("convolution", kernel=1)
    source, target = ids(2, 5), ids(2, 3)
    with torch.inference_mode():
        state = network.start(network.encode(source))
        for place in range(3):
            found, state = network.step(target[:, place], state)
    assert state.caches[0].inputs.shape == (2, 0, 12)
    torch.testing.assert_close(found, network(source, target)[:, -1], rtol=0, atol=1e-5)


# What learning, the page and a person ask


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_only_attention_is_that_to_the_memory_and_it_can_be_watched(
    architecture: str, small: Callable[..., Network]
) -> None:
    network = small(architecture)
    parts = network.attentions()
    assert {kind: len(some) for kind, some in parts.items()} == {
        "encoder": 0,
        "decoder": 0,
        "cross_attention": 3,
    }
    source, target = padded()
    unwatched = network(source, target)
    shown: list[AttentionIntermediates] = []
    for part in parts["cross_attention"]:
        part.watch = shown.append
    torch.testing.assert_close(network(source, target), unwatched, rtol=0, atol=1e-5)
    for one in shown:
        assert one.weights.shape == (4, 2, 7, 9)
        torch.testing.assert_close(one.weights.sum(-1), torch.ones(4, 2, 7))
        assert not one.weights[0, :, :, 1:].any()  # padding


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_weights_learn_and_dropout_acts(
    architecture: str, small: Callable[..., Network]
) -> None:
    network = small(architecture, dropout=0.5).train()
    source, target = padded()
    one = network(source, target)
    assert not torch.equal(one, network(source, target))
    one[target != PAD].logsumexp(-1).sum().backward()
    for name, weight in network.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.any()), name


def test_an_lstm_stays_in_float32_under_autocast(small: Callable[..., Network]) -> None:
    network: Any = small("recurrent")
    found: list[torch.dtype] = []
    for part in network.modules():
        if isinstance(part, nn.LSTM):
            part.register_forward_hook(
                lambda _, given, made: found.extend([given[0].data.dtype, made[0].data.dtype])
            )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert network(*padded()).isfinite().all()
    assert set(found) == {torch.float32}


def test_weights_in_one_buffer_as_a_gpu_wants_them_are_written(
    small: Callable[..., Network], tmp_path: Path
) -> None:
    weights = named_weights(small("recurrent"))
    buffer = torch.cat([weight.flatten() for weight in weights.values()])
    parts = torch.split(buffer, [weight.numel() for weight in weights.values()])
    views = {name: part.view_as(weights[name]) for name, part in zip(weights, parts, strict=True)}
    write_tensors(tmp_path / "weights", views, {})
    found = load_file(tmp_path / "weights")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("name", ["multi30k-recurrent", "multi30k-convolution"])
def test_the_baselines_are_as_large_as_the_transformer(name: str) -> None:
    sizes = []
    for one in (name, "multi30k"):
        section = load_recipe(one).model
        with torch.device("meta"):
            network = ARCHITECTURES[section.architecture](section, 8000, 8000)
        sizes.append(sum(weight.numel() for weight in network.parameters()))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.03)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"architecture": "lstm", "d_ff": 512}, "model.d_ff: 512 is of no use"),
        ({"architecture": "lstm", "activation": "gelu"}, "model.activation: gelu"),
        ({"architecture": "lstm", "position": "sinusoidal"}, "reads the words in their order"),
        ({"architecture": "lstm", "d_model": 15, "heads": 3}, "width 15 must be even"),
        (
            {"architecture": "convolution", "attention": {"encoder": "window"}},
            "model.attention.encoder: window is of no use to architecture: convolution",
        ),
        ({"architecture": "convolution", "position": "rotary"}, "allowed: none, index, sinusoidal"),
        (
            {"architecture": "convolution", "kernel_size": 0},
            "model.kernel_size: 0 must be greater than",
        ),
        ({"kernel_size": 5}, "model.kernel_size: 5 is of no use to architecture: transformer"),
    ],
    ids=str,
)
def test_what_would_be_ignored_is_refused(
    model: dict[str, Any], words: str, small_recipe: SmallRecipe
) -> None:
    usual = {"preset": "tiny", "d_ff": 256}
    with pytest.raises(RegardError, match=words):
        small_recipe(model={**usual, **model})


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "transformer"])
def test_a_recipe_written_out_is_read_again(architecture: str) -> None:
    values = {"data": {"train": {"pairs": "x.tsv"}}, "model": {"architecture": architecture}}
    first = recipe.make_recipe(values, "test")
    assert recipe.parse_recipe(first.to_yaml(), "test") == first
