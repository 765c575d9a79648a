"""Norms, feed-forward networks, residual connections, dropout and initialization; and the registries."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.nn.attention_mask import AttentionMask
from regard.nn.kv_cache import KVCache
from regard.nn.layers import (
    FEED_FORWARDS,
    EncoderLayer,
    FeedForward,
    PostNorm,
    PreNorm,
    SwiGLU,
    final_norm,
    initialize,
)
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.norms import NORMS, LayerNorm, NoNorm
from regard.nn.transformer import Transformer
from regard.recipe import Recipe
from regard.recipe.registry import LOCATIONS, allowed_names, find_registry

Array = npt.NDArray[np.float64]
SmallRecipe = Callable[..., Recipe]


def randomize(module: nn.Module, seed: int = 1) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_()


@pytest.mark.parametrize("key", LOCATIONS)
def test_every_name_a_recipe_accepts_is_registered_with_a_summary(key: str) -> None:
    registry = find_registry(key)
    assert allowed_names(key)
    assert set(allowed_names(key)) <= registry.keys()
    assert find_registry(registry.key) is registry
    for choice in registry.choices.values():
        assert choice.summary, f"{key}: {choice.name}"
        assert "\n" not in choice.summary


# Norms


def test_layer_norm_of_five_values() -> None:
    values = torch.tensor([[[140.0, 150.0, 160.0, 170.0, 180.0]]])
    found = NORMS["layer"](5)(values)[0, 0].tolist()
    assert [round(value, 3) for value in found] == [-1.414, -0.707, 0, 0.707, 1.414]


def numpy_norm(x: Array, norm: Any) -> Array:
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    gain, bias = norm.weight.detach().numpy(), norm.bias.detach().numpy()
    result: Array = (x - mean) / np.sqrt(variance + norm.eps) * gain + bias
    return result


def test_layer_norm_normalizes_the_features_of_each_position() -> None:
    norm = LayerNorm(6).double()
    randomize(norm)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    np.testing.assert_allclose(norm(x).detach().numpy(), numpy_norm(x.numpy(), norm), atol=1e-12)


# Feed-forward


def test_feed_forward_is_two_convolutions_of_kernel_size_one(small_recipe: SmallRecipe) -> None:
    network = FeedForward(small_recipe().model, F.relu).double()
    randomize(network)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    channels = x.transpose(1, 2)
    inner = F.conv1d(channels, network.inner.weight[:, :, None], network.inner.bias)
    outer = F.conv1d(inner.clamp(min=0), network.outer.weight[:, :, None], network.outer.bias)
    assert inner.shape == (2, 32, 7)
    torch.testing.assert_close(network(x), outer.transpose(1, 2), rtol=0, atol=1e-12)


def swish(x: Array) -> Array:
    result: Array = x / (1 + np.exp(-x))
    return result


FORMULAS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(0, x),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "swish": swish,
}


def numpy_of(module: nn.Module) -> dict[str, Array]:
    return {name: tensor.detach().numpy() for name, tensor in module.named_parameters()}


@pytest.mark.parametrize("name", FORMULAS)
def test_feed_forward_equals_its_formula_with_each_activation(
    small_recipe: SmallRecipe, name: str
) -> None:
    network = FEED_FORWARDS[name](small_recipe(model={"activation": name}).model).double()
    randomize(network)
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    w = numpy_of(network)
    inner = FORMULAS[name](x.numpy() @ w["inner.weight"].T + w["inner.bias"])
    expected = inner @ w["outer.weight"].T + w["outer.bias"]
    np.testing.assert_allclose(network(x).detach().numpy(), expected, rtol=0, atol=1e-11)


def test_swiglu_equals_its_formula_and_has_as_many_weights(small_recipe: SmallRecipe) -> None:
    assert FEED_FORWARDS.keys() == {*FORMULAS, "swiglu"}
    section = small_recipe(model={"d_ff": 48, "activation": "swiglu"}).model
    network = FEED_FORWARDS["swiglu"](section).double()
    assert isinstance(network, SwiGLU)
    randomize(network)
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    w = numpy_of(network)
    assert set(w) == {"gate.weight", "inner.weight", "outer.weight"}
    gate = swish(x.numpy() @ w["gate.weight"].T)
    expected = (gate * (x.numpy() @ w["inner.weight"].T)) @ w["outer.weight"].T
    np.testing.assert_allclose(network(x).detach().numpy(), expected, rtol=0, atol=1e-11)
    # Three matrices of two thirds of d_ff have as many weights as two of d_ff.
    assert sum(part.size for part in w.values()) == 2 * 16 * 48


# Residuals


def linear(x: Tensor) -> Tensor:
    return 3 * x + 1


def test_post_norm_is_the_papers_formula(small_recipe: SmallRecipe) -> None:
    residual = PostNorm(small_recipe().model).double()
    randomize(residual)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    expected = numpy_norm(x.numpy() + (3 * x.numpy() + 1), residual.norm)
    np.testing.assert_allclose(residual(x, linear, None).detach().numpy(), expected, atol=1e-12)


def test_pre_norm_equals_its_formula(small_recipe: SmallRecipe) -> None:
    residual = PreNorm(small_recipe().model).double()
    randomize(residual)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    expected = x.numpy() + 3 * numpy_norm(x.numpy(), residual.norm) + 1
    np.testing.assert_allclose(residual(x, linear, None).detach().numpy(), expected, atol=1e-12)


def test_without_residual_connections_the_input_is_not_added(small_recipe: SmallRecipe) -> None:
    config = small_recipe(model={"residual": "none"}).model
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    post, pre = PostNorm(config).double(), PreNorm(config).double()
    randomize(post)
    randomize(pre)
    expected = numpy_norm(3 * x.numpy() + 1, post.norm)
    np.testing.assert_allclose(post(x, linear, None).detach().numpy(), expected, atol=1e-12)
    expected = 3 * numpy_norm(x.numpy(), pre.norm) + 1
    np.testing.assert_allclose(pre(x, linear, None).detach().numpy(), expected, atol=1e-12)


def test_pre_norm_has_a_final_norm_by_default(small_recipe: SmallRecipe) -> None:
    """Post-norm has one only if the recipe says so; torch's Transformer has one in both cases."""
    pre_norm = small_recipe(model={"norm_order": "pre"}).model
    given = small_recipe(model={"final_norm": True}).model
    assert isinstance(final_norm(small_recipe().model), NoNorm)
    assert isinstance(final_norm(pre_norm), LayerNorm)
    assert isinstance(final_norm(given), LayerNorm)


# Dropout


def test_dropout_applies_to_the_output_of_a_sublayer(small_recipe: SmallRecipe) -> None:
    residual = PreNorm(small_recipe(model={"dropout": 0.25}).model)
    torch.manual_seed(1)
    x = torch.full((4, 50, 16), 10.0)
    y = residual(x, lambda _: torch.full_like(x, 3.0), None)
    dropped, kept = y == 10, torch.isclose(y, torch.tensor(14.0))  # 3 / (1 - 0.25) = 4
    assert bool((dropped | kept).all())
    assert float(dropped.float().mean()) == pytest.approx(0.25, abs=0.03)
    assert torch.equal(residual.eval()(x, lambda _: torch.full_like(x, 3.0), None), x + 3)


def test_dropout_applies_to_the_sum_of_embedding_and_position(small_recipe: SmallRecipe) -> None:
    network = Transformer(small_recipe(model={"dropout": 0.25, "d_model": 64}).model, 50, 50)
    inputs: list[Tensor] = []
    for stack in (network.encoder, network.decoder):
        stack.layers[0].register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach()))
    ids = torch.randint(5, 50, (4, 30))
    torch.manual_seed(1)
    network.train()(ids, ids)
    network.eval()(ids, ids)
    for dropped, whole in zip(inputs[:2], inputs[2:], strict=True):
        gone = dropped == 0
        assert float(gone.float().mean()) == pytest.approx(0.25, abs=0.02)
        torch.testing.assert_close(dropped[~gone], whole[~gone] / 0.75)


@pytest.mark.parametrize("key", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_acts_in_training_only(small_recipe: SmallRecipe, key: str) -> None:
    none = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    layer = EncoderLayer(small_recipe(model={**none, key: 0.5}).model)
    without = EncoderLayer(small_recipe(model=none).model)
    without.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, 16)
    layer.train()
    assert not torch.equal(layer(x, AttentionMask()), layer(x, AttentionMask()))
    layer.eval()
    assert torch.equal(layer(x, AttentionMask()), without(x, AttentionMask()))
    without.train()
    assert torch.equal(without(x, AttentionMask()), without(x, AttentionMask()))


def test_dropout_of_attention_weights_keeps_the_mean(small_recipe: SmallRecipe) -> None:
    section = small_recipe(model={"attention_dropout": 0.5, "d_model": 2, "heads": 1}).model
    layer = MultiHeadAttention(section, "encoder")
    with torch.no_grad():
        for part in (layer.value, layer.output):
            part.weight.copy_(torch.eye(2))
    torch.manual_seed(1)
    x = torch.ones(2000, 4, 2)  # four equal keys: each weight is 1/4, after dropout 0 or 1/2
    y = layer.train()(x, layer.keys_values(x), AttentionMask())
    torch.testing.assert_close(2 * y, (2 * y).round(), rtol=0, atol=1e-6)
    assert set((2 * y).round().unique().tolist()) == {0, 1, 2, 3, 4}
    assert y.detach().mean().item() == pytest.approx(1, abs=0.02)


# Initialization


def test_linear_layers_are_initialized_with_glorot_uniform_weights_and_zero_biases() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(300, 100)
    initialize(nn.Sequential(nn.ReLU(), linear))
    bound = math.sqrt(6 / 400)
    weights = linear.weight.detach().numpy()
    assert np.abs(weights).max() <= bound
    assert weights.std() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert not linear.bias.detach().numpy().any()


def test_an_empty_cache_can_be_selected_from() -> None:
    assert KVCache().select(torch.tensor([0, 0, 1])).kv is None
