"""Norms, feed-forward network, residual connections, dropout; and that every name in a recipe has its class."""

import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard import recipe
from regard.nn.architectures import ARCHITECTURES
from regard.nn.attention import SCORES, WEIGHTINGS, Mask
from regard.nn.feed_forward import ACTIVATIONS, FeedForward, Gated
from regard.nn.layers import (
    RESIDUALS,
    Cache,
    EncoderLayer,
    PostNorm,
    PreNorm,
    final_norm,
    initialize,
)
from regard.nn.loss import LABEL_SMOOTHINGS
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.norms import NORMS, LayerNorm
from regard.nn.positions import POSITIONS
from regard.nn.sparse_attention import PATTERNS
from regard.nn.transformer import Transformer
from regard.recipe import Recipe
from regard.tasks.base import MODELS
from regard.training.optimizers import OPTIMIZERS, SCHEDULES

Array = npt.NDArray[np.float64]
SmallRecipe = Callable[..., Recipe]


def randomize(module: nn.Module, seed: int = 1) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_()


CHOICES: list[tuple[Any, Any]] = [
    (recipe.Task, MODELS),
    (recipe.Architecture, ARCHITECTURES),
    (recipe.Score, SCORES),
    (recipe.Weighting, WEIGHTINGS),
    (recipe.Pattern, PATTERNS),
    (recipe.Position, POSITIONS),
    (recipe.Norm, NORMS),
    (recipe.NormOrder, RESIDUALS),
    (recipe.Activation, ACTIVATIONS),
    (recipe.Optimizer, OPTIMIZERS),
    (recipe.Schedule, SCHEDULES),
    (recipe.Smoothing, LABEL_SMOOTHINGS),
]


@pytest.mark.parametrize(
    ("names", "registry"), CHOICES, ids=[str(get_args(names)) for names, _ in CHOICES]
)
def test_recipe_names_and_registry_are_the_same_list(names: Any, registry: dict[str, Any]) -> None:
    assert set(get_args(names)) == registry.keys()


# Norms


def test_layer_norm_of_the_heights() -> None:
    heights = torch.tensor([[[140.0, 150.0, 160.0, 170.0, 180.0]]])
    found = NORMS["layer"](5)(heights)[0, 0].tolist()
    assert [round(value, 3) for value in found] == [-1.414, -0.707, 0, 0.707, 1.414]


def numpy_norm(x: Array, norm: Any) -> Array:
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    gain, bias = norm.weight.detach().numpy(), norm.bias.detach().numpy()
    result: Array = (x - mean) / np.sqrt(variance + norm.eps) * gain + bias
    return result


def test_layer_norm_is_over_the_features_of_one_position() -> None:
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
def test_feed_forward_with_each_activation_is_its_formula(
    small_recipe: SmallRecipe, name: recipe.Activation
) -> None:
    network = ACTIVATIONS[name](small_recipe(model={"activation": name}).model).double()
    randomize(network)
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    w = numpy_of(network)
    inner = FORMULAS[name](x.numpy() @ w["inner.weight"].T + w["inner.bias"])
    wanted = inner @ w["outer.weight"].T + w["outer.bias"]
    np.testing.assert_allclose(network(x).detach().numpy(), wanted, rtol=0, atol=1e-11)


def test_swiglu_is_its_formula_and_as_large_as_the_others(small_recipe: SmallRecipe) -> None:
    assert ACTIVATIONS.keys() == {*FORMULAS, "swiglu"}
    section = small_recipe(model={"d_ff": 48, "activation": "swiglu"}).model
    network = ACTIVATIONS["swiglu"](section).double()
    assert isinstance(network, Gated)
    randomize(network)
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    w = numpy_of(network)
    assert set(w) == {"gate.weight", "inner.weight", "outer.weight"}
    gate = swish(x.numpy() @ w["gate.weight"].T)
    wanted = (gate * (x.numpy() @ w["inner.weight"].T)) @ w["outer.weight"].T
    np.testing.assert_allclose(network(x).detach().numpy(), wanted, rtol=0, atol=1e-11)
    # Three matrices of two thirds of the width are as large as two of the whole.
    assert sum(part.size for part in w.values()) == 2 * 16 * 48


# Residuals


def linear(x: Tensor) -> Tensor:
    return 3 * x + 1


def test_norm_after_is_the_papers_formula(small_recipe: SmallRecipe) -> None:
    residual = PostNorm(small_recipe().model).double()
    randomize(residual)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    wanted = numpy_norm(x.numpy() + (3 * x.numpy() + 1), residual.norm)
    np.testing.assert_allclose(residual(x, linear, None).detach().numpy(), wanted, atol=1e-12)


def test_norm_before_is_its_formula(small_recipe: SmallRecipe) -> None:
    residual = PreNorm(small_recipe().model).double()
    randomize(residual)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    wanted = x.numpy() + 3 * numpy_norm(x.numpy(), residual.norm) + 1
    np.testing.assert_allclose(residual(x, linear, None).detach().numpy(), wanted, atol=1e-12)


def test_only_norm_before_needs_a_norm_at_the_end(small_recipe: SmallRecipe) -> None:
    """Unless it is given: torch's Transformer has one after norms, too."""
    before = small_recipe(model={"norm_order": "pre"}).model
    given = small_recipe(model={"final_norm": True}).model
    assert isinstance(final_norm(small_recipe().model), NORMS["none"])
    assert isinstance(final_norm(before), NORMS["layer"])
    assert isinstance(final_norm(given), NORMS["layer"])


# Dropout


def test_sublayer_output_is_dropped_before_it_is_added(small_recipe: SmallRecipe) -> None:
    residual = PreNorm(small_recipe(model={"dropout": 0.25}).model)
    torch.manual_seed(1)
    x = torch.full((4, 50, 16), 10.0)
    y = residual(x, lambda _: torch.full_like(x, 3.0), None)
    dropped, kept = y == 10, torch.isclose(y, torch.tensor(14.0))  # 3 / (1 - 0.25) = 4
    assert bool((dropped | kept).all())
    assert float(dropped.float().mean()) == pytest.approx(0.25, abs=0.03)
    assert torch.equal(residual.eval()(x, lambda _: torch.full_like(x, 3.0), None), x + 3)


def test_embedding_and_position_are_dropped_together(small_recipe: SmallRecipe) -> None:
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


@pytest.mark.parametrize("place", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_acts_in_training_only(small_recipe: SmallRecipe, place: str) -> None:
    none = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    layer = EncoderLayer(small_recipe(model={**none, place: 0.5}).model)
    without = EncoderLayer(small_recipe(model=none).model)
    without.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, 16)
    layer.train()
    assert not torch.equal(layer(x, Mask()), layer(x, Mask()))
    layer.eval()
    assert torch.equal(layer(x, Mask()), without(x, Mask()))
    without.train()
    assert torch.equal(without(x, Mask()), without(x, Mask()))


def test_dropped_attention_weights_keep_their_mean(small_recipe: SmallRecipe) -> None:
    section = small_recipe(model={"attention_dropout": 0.5, "d_model": 2, "heads": 1}).model
    layer = MultiHeadAttention(section, "encoder")
    with torch.no_grad():
        for part in (layer.value, layer.output):
            part.weight.copy_(torch.eye(2))
    torch.manual_seed(1)
    x = torch.ones(2000, 4, 2)  # four like keys: each has weight 1/4, dropped 0 or 1/2
    y = layer.train()(x, layer.keys_values(x), Mask())
    torch.testing.assert_close(2 * y, (2 * y).round(), rtol=0, atol=1e-6)
    assert set((2 * y).round().unique().tolist()) == {0, 1, 2, 3, 4}
    assert y.detach().mean().item() == pytest.approx(1, abs=0.02)


# Beginnings


def test_linear_maps_begin_with_glorots_uniform_weights_and_no_bias() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(300, 100)
    initialize(nn.Sequential(nn.ReLU(), linear))
    bound = math.sqrt(6 / 400)
    weights = linear.weight.detach().numpy()
    assert np.abs(weights).max() <= bound
    assert weights.std() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert not linear.bias.detach().numpy().any()


def test_an_empty_cache_can_be_selected_from() -> None:
    assert Cache().select(torch.tensor([0, 0, 1])).seen is None
