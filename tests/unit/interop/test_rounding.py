"""Rounding of weights: steps by sensitivity, and feedback of errors."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from regard.interop import rounding
from regard.interop.rounding import Calibration, calibrate, limit_step, round_with_feedback
from regard.interop.verification import SampleBatch, sample_batch
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


def test_feedback_makes_the_error_of_the_outputs_smaller() -> None:
    random = np.random.default_rng(1)
    mixing = random.normal(size=(6, 24))

    def correlated(count: int) -> npt.NDArray[np.float64]:
        return random.normal(size=(count, 6)) @ mixing + 0.1 * random.normal(size=(count, 24))

    x, unseen = correlated(2000), correlated(500)
    matrix, step = random.normal(size=(10, 24)).astype(np.float32), 0.1
    integers, nearest = round_with_feedback(matrix, step, x.T @ x), np.rint(matrix / step)
    error, plain = (((matrix - one * step) @ unseen.T).std() for one in (integers, nearest))
    assert error < plain / 3
    assert np.abs(matrix - integers * step).max() < 20 * step


def test_feedback_of_uncorrelated_inputs_is_rounding_to_the_nearest() -> None:
    random = np.random.default_rng(2)
    matrix = random.normal(size=(5, 8)).astype(np.float32)
    integers = round_with_feedback(matrix, 0.25, np.diag(random.uniform(1, 9, 8)))
    np.testing.assert_array_equal(integers, np.rint(matrix / 0.25))


def test_moments_are_those_of_the_inputs_of_each_linear_map(
    model: Translator, texts: SampleBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "BATCH_SIZE", 1)  # so that there is no padding
    monkeypatch.setattr(rounding, "DAMPING", 0.0)
    network = model.network
    seen: list[torch.Tensor] = []
    module = network.get_submodule("decoder.layers.1.feed_forward.outer")
    hook = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    assert isinstance(network, Transformer)
    found = calibrate(network, texts).moments["decoder.layers.1.feed_forward.outer.weight"]
    hook.remove()
    x = torch.cat(seen).double().detach().numpy()
    assert len(x) == texts.target_mask.sum()
    np.testing.assert_allclose(found, x.T @ x, rtol=1e-4, atol=1e-4)


def test_sensitivity_predicts_the_effect_of_errors(
    model: Translator, texts: SampleBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean squared change of attention and log-probabilities by noise, matrix by matrix."""
    monkeypatch.setattr(rounding, "BATCH_SIZE", 1)  # more random projections, more exact means
    monkeypatch.setattr(rounding, "GRADIENT_BATCHES", 1000)
    network = model.network
    assert isinstance(network, Transformer)
    sensitivity = calibrate(network, texts).sensitivity
    names = [f"{one}.weight" for one in ("encoder.layers.0.attention.query", "encoder.embedding")]
    names += [f"decoder.layers.1.{one}.weight" for one in ("attention.value", "feed_forward.outer")]
    generator = torch.Generator().manual_seed(3)
    attention, log_probabilities = outputs(network, texts)
    importance = rounding.LOG_PROBABILITY_WEIGHT * (log_probabilities / 2).exp()
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
    calibration = Calibration({"some": 0.0}, {})
    step = calibration.relative_steps()["some"]
    assert step == math.inf
    integers = calibration.round("some", matrix, limit_step(matrix, step))
    assert rounding.MIN_LEVELS - 1 <= len(np.unique(integers)) <= rounding.MIN_LEVELS
    assert limit_step(matrix, 0.01) == 0.01
    assert limit_step(np.zeros((2, 2), np.float32), math.inf) == 1


def test_calibration_changes_nothing(model: Translator, texts: SampleBatch) -> None:
    network = model.network
    assert isinstance(network, Transformer)
    before = {name: one.clone() for name, one in network.state_dict().items()}
    calibrate(network, texts)
    assert all(torch.equal(one, before[name]) for name, one in network.state_dict().items())
    assert all(one.grad is None for one in network.parameters())
    assert not any(module._forward_pre_hooks for module in network.modules())
