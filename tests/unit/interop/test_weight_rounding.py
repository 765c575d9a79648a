"""Rounding of weights: steps by sensitivity, and feedback of errors."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from regard.interop import weight_rounding
from regard.interop.verification import SampleBatch, sample_batch
from regard.interop.weight_rounding import (
    Moments,
    RoundingCalibration,
    calibrate_rounding,
    limit_step,
    round_with_feedback,
)
from regard.nn.multi_head_attention import record_attention
from regard.nn.transformer import Transformer
from regard.tasks import Translator

MakeRun = Callable[..., Path]


@pytest.fixture(scope="module")
def model(make_run: MakeRun) -> Translator:
    return Translator.load(make_run(), "cpu")


@pytest.fixture
def texts(model: Translator) -> SampleBatch:
    return sample_batch(model.recipe, model.tokenizer, 40)


def correlated(random: np.random.Generator, width: int) -> npt.NDArray[np.float64]:
    """Vectors near a subspace with a quarter of the dimensions."""
    few = random.normal(size=(2000, width // 4)) @ random.normal(size=(width // 4, width))
    return few + 0.1 * random.normal(size=(2000, width))


@pytest.mark.parametrize("rows", [1, 8, 100])
def test_feedback_makes_the_effect_of_errors_smaller(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(weight_rounding, "ROWS", rows)
    random = np.random.default_rng(1)
    x, gradients = correlated(random, 24), correlated(random, 20)
    matrix, step = random.normal(size=(20, 24)).astype(np.float32), 0.1
    moments = Moments(*(one[:1000].T @ one[:1000] for one in (x, gradients)))
    nearest, both = np.rint(matrix / step), round_with_feedback(matrix, step, moments)
    inputs_only = round_with_feedback(matrix, step, moments._replace(effects=np.eye(20)))
    # on vectors that were not observed
    plain, one_sided, two_sided = (
        (gradients[1000:] @ (matrix - one * step) @ x[1000:].T).std()
        for one in (nearest, inputs_only, both)
    )
    assert one_sided < plain / 2
    assert two_sided < one_sided / (1.5 if rows < 20 else 0.99)
    assert np.abs(matrix - both * step).max() < 50 * step


def test_the_gain_is_that_of_the_feedback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_rounding, "ROWS", 1)
    random = np.random.default_rng(3)
    x, gradients = correlated(random, 24), correlated(random, 40)
    moments = Moments(*(one.T @ one for one in (x, gradients)))
    matrix, step = random.normal(size=(40, 24)).astype(np.float32), 0.1

    def effect(integers: npt.NDArray[Any]) -> float:
        error = matrix - integers * step
        return float(np.trace(moments.effects @ error @ moments.inputs @ error.T))

    gain = effect(round_with_feedback(matrix, step, moments)) / effect(np.rint(matrix / step))
    # An estimate: it assumes that the errors of rounding are independent of each other.
    assert moments.gain / 2 < gain < 2 * moments.gain < 0.01


def test_feedback_of_uncorrelated_vectors_is_rounding_to_the_nearest() -> None:
    random = np.random.default_rng(2)
    matrix = random.normal(size=(5, 8)).astype(np.float32)
    moments = Moments(*(np.diag(random.uniform(1, 9, size)) for size in (8, 5)))
    integers = round_with_feedback(matrix, 0.25, moments)
    np.testing.assert_array_equal(integers, np.rint(matrix / 0.25))


def test_moments_are_those_of_the_inputs_of_each_linear_map(
    model: Translator, texts: SampleBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_rounding, "BATCH_SIZE", 1)  # so that there is no padding
    monkeypatch.setattr(weight_rounding, "DAMPING", 0.0)
    network = model.network
    seen: list[torch.Tensor] = []
    module = network.get_submodule("decoder.layers.1.feed_forward.outer")
    hook = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    assert isinstance(network, Transformer)
    found = calibrate_rounding(network, texts).moments["decoder.layers.1.feed_forward.outer.weight"]
    hook.remove()
    x = torch.cat(seen).double().detach().numpy()
    assert len(x) == texts.target_mask.sum()
    np.testing.assert_allclose(found.inputs, x.T @ x, rtol=1e-4, atol=1e-4)
    assert found.effects.shape == (model.recipe.model.d_model,) * 2


def test_sensitivity_predicts_the_effect_of_errors(
    model: Translator, texts: SampleBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean squared change of attention and log-probabilities by noise, matrix by matrix."""
    monkeypatch.setattr(
        weight_rounding, "BATCH_SIZE", 1
    )  # more random projections, more exact means
    monkeypatch.setattr(weight_rounding, "GRADIENT_BATCHES", 1000)
    network = model.network
    assert isinstance(network, Transformer)
    sensitivity = calibrate_rounding(network, texts).sensitivity
    names = [f"{one}.weight" for one in ("encoder.layers.0.attention.query", "encoder.embedding")]
    names += [f"decoder.layers.1.{one}.weight" for one in ("attention.value", "feed_forward.outer")]
    generator = torch.Generator().manual_seed(3)
    attention, log_probabilities = outputs(network, texts)
    importance = weight_rounding.LOG_PROBABILITY_WEIGHT * (log_probabilities / 2).exp()
    measured = dict.fromkeys(names, 0.0)
    for name in names:
        weight = network.get_parameter(name)
        for _ in range(8):
            noise = torch.randn(weight.shape, generator=generator) * 1e-3
            with torch.no_grad():
                weight.add_(noise)
                changed = outputs(network, texts)
                weight.sub_(noise)
            effect = (changed[0] - attention).square().sum()
            effect += ((changed[1] - log_probabilities) * importance).square().sum()
            measured[name] += float(effect) / weight.numel()
    shares = [
        np.array([one[name] for name in names]) / sum(one[name] for name in names)
        for one in (measured, sensitivity)
    ]
    assert np.abs(np.log(shares[0] / shares[1])).max() < math.log(1.5), shares


def outputs(network: Transformer, texts: SampleBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """All attention weights, and all log-probabilities."""
    sites = network.attentions()
    with (
        torch.no_grad(),
        record_attention(one for layers in sites.values() for one in layers) as recorded,
    ):
        log_probabilities = network.eval()(texts.source, texts.target).log_softmax(-1)
    attention = [
        recorded[module]
        .weights.transpose(1, 2)[texts.source_mask if site == "encoder" else texts.target_mask]
        .flatten()
        for site, layers in sites.items()
        for module in layers
    ]
    return torch.cat(attention).double(), log_probabilities[texts.target_mask].double()


def test_a_matrix_without_effect_keeps_a_few_values() -> None:
    matrix = np.linspace(-1, 1, 30, dtype=np.float32).reshape(5, 6)
    calibration = RoundingCalibration({"some": 0.0}, {})
    step = calibration.relative_steps()["some"]
    assert step == math.inf
    integers = calibration.round("some", matrix, limit_step(matrix, step))
    assert weight_rounding.MIN_LEVELS - 1 <= len(np.unique(integers)) <= weight_rounding.MIN_LEVELS
    assert limit_step(matrix, 0.01) == 0.01
    assert limit_step(np.zeros((2, 2), np.float32), math.inf) == 1


def test_calibration_changes_nothing(model: Translator, texts: SampleBatch) -> None:
    network = model.network
    assert isinstance(network, Transformer)
    before = {name: one.clone() for name, one in network.state_dict().items()}
    calibrate_rounding(network, texts)
    assert all(torch.equal(one, before[name]) for name, one in network.state_dict().items())
    assert all(one.grad is None for one in network.parameters())
    assert not any(module._forward_hooks for module in network.modules())
