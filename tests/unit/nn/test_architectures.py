"""LSTM and convolutional networks: against loops in NumPy, and decoding step by step against all positions at once."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

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
from regard.nn.network import Network, named_weights
from regard.recipe import Recipe, load_recipe
from regard.recipe.registry import allowed_names
from regard.storage.atomic_files import write_tensors

Array = npt.NDArray[np.float64]
SmallRecipe = Callable[..., Recipe]

V = 30
BASELINES = ["lstm", "convolution"]
OPTIONS: dict[str, dict[str, Any]] = {"lstm": {}, "convolution": {"kernel_size": 4}}
SIZES = {"encoder_layers": 2, "decoder_layers": 3, "d_model": 12, "heads": 2}


@pytest.fixture(scope="session")
def small(small_recipe: SmallRecipe) -> Callable[..., Network]:
    """A small network of an architecture, in eval mode."""

    def make(architecture: str, **model: Any) -> Network:
        torch.manual_seed(1)
        feedforward = {
            "preset": "tiny",
            "d_ff": 256,
        }  # the default: any other value would be refused
        section = small_recipe(
            model={**SIZES, **feedforward, "architecture": architecture}
            | OPTIONS[architecture]
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


def test_every_architecture_is_registered() -> None:
    assert set(allowed_names("model.architecture")) == ARCHITECTURES.keys()


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


def lstm(tokens: Array, weights: dict[str, Array], ending: str = "") -> Array:
    """Token by token: the gates i, f, g, o from the token and the previous state."""
    inner, carried = weights[f"weight_ih_l0{ending}"], weights[f"weight_hh_l0{ending}"]
    bias = weights[f"bias_ih_l0{ending}"] + weights[f"bias_hh_l0{ending}"]
    h = c = np.zeros(carried.shape[1])
    states = []
    for token in tokens:
        i, f, g, o = np.split(inner @ token + carried @ h + bias, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        states.append(h)
    return np.array(states)


def gated_convolution(tokens: Array, weights: dict[str, Array], before: int) -> Array:
    """a * sigmoid(b), where a and b are sums over a window that begins ``before`` positions to the left."""
    kernel = weights["convolution.weight"]  # [2d, d, k]
    states = []
    for t in range(len(tokens)):
        total = weights["convolution.bias"].copy()
        for tap in range(kernel.shape[2]):
            index = t - before + tap
            if 0 <= index < len(tokens):
                total += kernel[:, :, tap] @ tokens[index]
        a, b = np.split(total, 2)
        states.append(a * sigmoid(b))
    return np.array(states)


def attend(tokens: Array, memory: Array, part: Any) -> Array:
    """Multi-head attention, head by head."""
    weights, heads = numbers(part), []
    for head in range(part.heads):
        query, key, value = (
            x @ np.split(weights[f"{name}.weight"], part.heads)[head].T
            for name, x in (("query", tokens), ("key", memory), ("value", memory))
        )
        scores = query @ key.T / np.sqrt(query.shape[1])
        exponentials = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(exponentials / exponentials.sum(-1, keepdims=True) @ value)
    result: Array = np.concatenate(heads, axis=-1) @ weights["output.weight"].T
    return result


def read(layer: Any, tokens: Array, *, bidirectional: bool) -> Array:
    """The sub-layer in which the tokens of one side interact."""
    if hasattr(layer, "convolution"):
        kernel = layer.convolution.kernel_size
        return gated_convolution(
            tokens, numbers(layer.convolution), kernel // 2 if bidirectional else kernel - 1
        )
    weights = numbers(layer.lstm)
    if not bidirectional:
        return lstm(tokens, weights)
    backwards = lstm(tokens[::-1], weights, "_reverse")[::-1]
    return np.concatenate([lstm(tokens, weights), backwards], axis=-1)


def logits(network: Any, source: Array, target: Array, positions: Array) -> Array:
    """The logits of one pair, for a pre-norm network."""
    table = numbers(network.projection)["weight"]
    x, y = (table[row] * np.sqrt(12) + positions[: len(row)] for row in (source, target))
    for layer in network.encoder.layers:
        x = x + read(layer, norm(x, layer.residual.norm), bidirectional=True)
    memory = norm(x, network.encoder.norm)
    for layer in network.decoder.layers:
        y = y + read(layer, norm(y, layer.residual.norm), bidirectional=False)
        y = y + attend(norm(y, layer.cross_attention_residual.norm), memory, layer.cross_attention)
    result: Array = norm(y, network.decoder.norm) @ table.T
    return result


@pytest.mark.parametrize("architecture", BASELINES)
def test_equals_loops_in_numpy(architecture: str, small: Callable[..., Network]) -> None:
    network = small(architecture).double()
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)  # so that biases and norms have an effect
    positions = np.zeros((9, 12))
    if architecture == "convolution":
        angle = np.arange(9)[:, None] / 10000 ** (np.arange(0, 12, 2) / 12)
        positions[:, 0::2], positions[:, 1::2] = np.sin(angle), np.cos(angle)
    source, target = padded()
    found = network(source, target).detach().numpy()
    for row in range(4):
        words, outputs = (ids[row][ids[row] != PAD].numpy() for ids in (source, target))
        expected = logits(network, words, outputs, positions)
        assert expected.std() > 0.1
        # Everything is float64 but our sinusoids, which are stored in float32.
        np.testing.assert_allclose(found[row, : len(outputs)], expected, atol=1e-5)


# Padding and order


@pytest.mark.parametrize("norm_order", ["pre", "post"])
@pytest.mark.parametrize("architecture", BASELINES)
def test_padding_does_not_change_the_logits(
    architecture: str, norm_order: str, small: Callable[..., Network]
) -> None:
    network = small(architecture, norm_order=norm_order)
    source, target = padded()
    together = network(source, target)
    for row in range(4):
        one, two = (ids[row][ids[row] != PAD][None] for ids in (source, target))
        alone = network(one, two)[0]
        torch.testing.assert_close(together[row, : len(alone)], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", BASELINES)
def test_later_target_tokens_do_not_change_earlier_logits(
    architecture: str, small: Callable[..., Network]
) -> None:
    network = small(architecture)
    source, target = ids(3, 6), ids(3, 8)
    before = network(source, target)
    for changed in range(1, 8):
        other = target.clone()
        other[:, changed:] = ids(3, 8 - changed)
        other[:, changed] = target[:, changed] % (V - 1) + 1  # another token, not PAD
        after = network(source, other)
        assert torch.equal(before[:, :changed], after[:, :changed])
        assert not torch.equal(before[:, changed], after[:, changed])


@pytest.mark.parametrize("architecture", BASELINES)
def test_every_target_position_depends_on_every_source_token(
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
    architecture=st.sampled_from(BASELINES),
    model=st.sampled_from(
        [{}, {"norm_order": "post", "attention": {"score": "additive"}}, {"norm": "rms"}]
    ),
    random=st.randoms(use_true_random=False),
    sentences=st.integers(1, 4),
)
def test_decoding_step_by_step_equals_all_positions_at_once(
    small: Callable[..., Network],
    architecture: str,
    model: dict[str, Any],
    random: Random,
    sentences: int,
) -> None:
    network = small(architecture, **model)
    source = torch.tensor([[random.randrange(1, V) for _ in range(6)] for _ in range(sentences)])
    for row in range(sentences):
        source[row, random.randint(1, 6) :] = PAD
    with torch.inference_mode():
        state = network.start(network.encode(source))
        rows: list[tuple[int, list[int]]] = [(sentence, []) for sentence in range(sentences)]
        for _ in range(6):
            tokens = [random.randrange(1, V) for _ in rows]
            rows = [(s, [*prefix, token]) for (s, prefix), token in zip(rows, tokens, strict=True)]
            found, state = network.step(torch.tensor(tokens), state)
            expected = network(source[[s for s, _ in rows]], torch.tensor([p for _, p in rows]))
            torch.testing.assert_close(found, expected[:, -1], rtol=0, atol=1e-5)
            # Like beam search: keep any rows of a sentence, in any order; some sentences are finished.
            active = sorted({s for s, _ in rows})
            remaining = sorted(random.sample(active, random.randint(1, len(active))))
            beams = random.randint(1, 3)
            own = {s: [row for row, (owner, _) in enumerate(rows) if owner == s] for s in remaining}
            chosen = [random.choices(own[s], k=beams) for s in remaining]
            state = state.select(torch.tensor(chosen))
            rows = [rows[row] for line in chosen for row in line]


@pytest.mark.parametrize("architecture", BASELINES)
def test_a_step_does_not_change_the_previous_state(
    architecture: str, small: Callable[..., Network]
) -> None:
    network = small(architecture)
    _, state = network.step(ids(2), network.start(network.encode(ids(2, 5))))
    token = ids(2)
    first, _ = network.step(token, state)
    network.step(ids(2), state)
    again, _ = network.step(token, state)
    assert torch.equal(first, again)


def test_a_convolution_of_width_one_needs_no_cache(small: Callable[..., Network]) -> None:
    network = small("convolution", kernel_size=1)
    source, target = ids(2, 5), ids(2, 3)
    with torch.inference_mode():
        state = network.start(network.encode(source))
        for t in range(3):
            found, state = network.step(target[:, t], state)
    assert state.caches[0].inputs.shape == (2, 0, 12)
    torch.testing.assert_close(found, network(source, target)[:, -1], rtol=0, atol=1e-5)


# Attention, training and recipes


@pytest.mark.parametrize("architecture", BASELINES)
def test_the_only_attention_is_cross_attention_and_it_can_be_recorded(
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
    plain = network(source, target)
    recorded: list[AttentionIntermediates] = []
    for part in parts["cross_attention"]:
        part.observer = recorded.append
    torch.testing.assert_close(network(source, target), plain, rtol=0, atol=1e-5)
    for one in recorded:
        assert one.weights.shape == (4, 2, 7, 9)
        torch.testing.assert_close(one.weights.sum(-1), torch.ones(4, 2, 7))
        assert not one.weights[0, :, :, 1:].any()  # padding


@pytest.mark.parametrize("architecture", BASELINES)
def test_every_weight_gets_a_gradient_and_dropout_has_an_effect(
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
    network: Any = small("lstm")
    found: list[torch.dtype] = []
    for part in network.modules():
        if isinstance(part, nn.LSTM):
            part.register_forward_hook(
                lambda _, inputs, outputs: found.extend(
                    [inputs[0].data.dtype, outputs[0].data.dtype]
                )
            )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert network(*padded()).isfinite().all()
    assert set(found) == {torch.float32}


def test_weights_that_share_one_buffer_can_be_saved(
    small: Callable[..., Network], tmp_path: Path
) -> None:
    weights = named_weights(small("lstm"))
    buffer = torch.cat([weight.flatten() for weight in weights.values()])
    parts = torch.split(buffer, [weight.numel() for weight in weights.values()])
    views = {name: part.view_as(weights[name]) for name, part in zip(weights, parts, strict=True)}
    write_tensors(tmp_path / "weights", views, {})
    found = load_file(tmp_path / "weights")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("name", ["multi30k-lstm", "multi30k-convolution"])
def test_the_baselines_are_as_large_as_the_transformer(name: str) -> None:
    sizes = []
    for one in (name, "multi30k"):
        section = load_recipe(one).model
        with torch.device("meta"):
            network = ARCHITECTURES[section.architecture](section, 8000, 8000)
        sizes.append(sum(weight.numel() for weight in network.parameters()))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.03)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"architecture": "lstm", "d_ff": 512},
            "model.d_ff: 512 has no effect with model.architecture: lstm",
        ),
        ({"architecture": "lstm", "activation": "gelu"}, "model.activation: gelu has no effect"),
        (
            {"architecture": "lstm", "position": "sinusoidal"},
            "model.position: sinusoidal has no effect",
        ),
        (
            {"architecture": "lstm", "d_model": 15, "heads": 3},
            "needs an even model.d_model, not 15",
        ),
        (
            {"architecture": "convolution", "attention": {"encoder": "window"}},
            "model.attention.encoder: window has no effect with model.architecture: convolution",
        ),
        ({"architecture": "convolution", "position": "rotary"}, "allowed: none, index, sinusoidal"),
        (
            {"architecture": "convolution", "kernel_size": 0},
            "model.kernel_size: 0 must be greater than",
        ),
        (
            {"kernel_size": 5},
            "model.kernel_size: 5 has no effect; it only applies to model.architecture: convolution",
        ),
    ],
    ids=str,
)
def test_options_without_effect_are_refused(
    model: dict[str, Any], message: str, small_recipe: SmallRecipe
) -> None:
    usual = {"preset": "tiny", "d_ff": 256}
    with pytest.raises(RegardError, match=message):
        small_recipe(model={**usual, **model})


@pytest.mark.parametrize("architecture", [*BASELINES, "transformer"])
def test_a_recipe_survives_writing_and_reading(architecture: str) -> None:
    values = {"data": {"train": {"pairs": "x.tsv"}}, "model": {"architecture": architecture}}
    first = recipe.make_recipe(values, "test")
    assert recipe.parse_recipe(first.to_yaml(), "test") == first
