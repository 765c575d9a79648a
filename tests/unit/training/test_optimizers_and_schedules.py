"""Each optimizer against its update rule in NumPy; each learning-rate schedule against its formula."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn, optim

from regard.recipe import Recipe, TrainingConfig
from regard.training.optimizers_and_schedules import OPTIMIZERS, learning_rate

Array = npt.NDArray[np.float64]
SmallRecipe = Callable[..., Recipe]
STEPS, RATE = 5, 0.1
INITIAL = np.array([3.0, -2.0, 0.5])
CURVES = np.array([1.0, 4.0, 0.3])
"""f(x) = sum of c x^2 / 2, so the gradient is c x"""


def by_torch(name: str, training: TrainingConfig) -> list[Array]:
    x = nn.Parameter(torch.tensor(INITIAL))
    optimizer = OPTIMIZERS[name](nn.ParameterList([x]), training)
    found = []
    for _ in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE
        optimizer.zero_grad()
        torch.autograd.backward((torch.tensor(CURVES) * x.square() / 2).sum())
        optimizer.step()
        found.append(x.detach().numpy().copy())
    return found


def adam(decay: float, decoupled: bool) -> Iterator[Array]:
    x, first, second = INITIAL, np.zeros(3), np.zeros(3)
    for t in range(1, STEPS + 1):
        g = CURVES * x + (0 if decoupled else decay * x)
        first, second = 0.9 * first + 0.1 * g, 0.98 * second + 0.02 * g**2
        corrected = first / (1 - 0.9**t), second / (1 - 0.98**t)
        shrunk = x * (1 - RATE * decay) if decoupled else x
        x = shrunk - RATE * corrected[0] / (np.sqrt(corrected[1]) + 1e-9)
        yield x


def sgd(momentum: float, decay: float) -> Iterator[Array]:
    x, velocity = INITIAL, np.zeros(3)
    for _ in range(STEPS):
        velocity = momentum * velocity + CURVES * x + decay * x
        x = x - RATE * velocity
        yield x


def adagrad(decay: float) -> Iterator[Array]:
    x, squares = INITIAL, np.zeros(3)
    for _ in range(STEPS):
        g = CURVES * x + decay * x
        squares = squares + g**2
        x = x - RATE * g / (np.sqrt(squares) + 1e-10)
        yield x


def rmsprop(decay: float) -> Iterator[Array]:
    x, squares = INITIAL, np.zeros(3)
    for _ in range(STEPS):
        g = CURVES * x + decay * x
        squares = 0.99 * squares + 0.01 * g**2
        x = x - RATE * g / (np.sqrt(squares) + 1e-8)
        yield x


@pytest.mark.parametrize(
    ("name", "decay", "rule"),
    [
        ("adam", 0.0, lambda: adam(0.0, False)),
        ("adam", 0.2, lambda: adam(0.2, False)),
        ("adamw", 0.2, lambda: adam(0.2, True)),
        ("sgd", 0.0, lambda: sgd(0.0, 0.0)),
        ("sgd", 0.2, lambda: sgd(0.0, 0.2)),
        ("momentum", 0.0, lambda: sgd(0.9, 0.0)),
        ("momentum", 0.2, lambda: sgd(0.9, 0.2)),
        ("adagrad", 0.0, lambda: adagrad(0.0)),
        ("adagrad", 0.2, lambda: adagrad(0.2)),
        ("rmsprop", 0.0, lambda: rmsprop(0.0)),
        ("rmsprop", 0.2, lambda: rmsprop(0.2)),
    ],
)
def test_optimizer_follows_its_rule(
    small_recipe: SmallRecipe, name: str, decay: float, rule: Callable[[], Iterator[Array]]
) -> None:
    training = small_recipe(training={"optimizer": name, "weight_decay": decay}).training
    np.testing.assert_allclose(by_torch(name, training), list(rule()), rtol=1e-12, atol=1e-12)


def test_adam_reads_betas_and_epsilon_of_the_recipe(small_recipe: SmallRecipe) -> None:
    training = small_recipe(training={"betas": [0.8, 0.95], "epsilon": 1e-6}).training
    built = OPTIMIZERS["adam"](nn.ParameterList([torch.zeros(1)]), training)
    assert built.defaults["betas"] == (0.8, 0.95)
    assert built.defaults["eps"] == 1e-6


def test_sgd_fits_a_line_as_computed_by_hand(small_recipe: SmallRecipe) -> None:
    x = torch.arange(5, dtype=torch.float64)
    y = 2 * x + 1
    w, b = (nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(2))
    optimizer: optim.Optimizer = OPTIMIZERS["sgd"](
        nn.ParameterList([w, b]), small_recipe().training
    )
    optimizer.param_groups[0]["lr"] = 0.01
    printed = []
    for step in range(81):
        optimizer.zero_grad()
        loss = (w * x + b - y).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        if step % 20 == 0:
            printed.append(f"{w.item():.2f} {b.item():.2f} {loss.item():.3f}")
    assert printed == [
        "0.28 0.10 33.000",
        "1.98 0.73 0.123",
        "2.07 0.79 0.015",
        "2.06 0.82 0.012",
        "2.06 0.84 0.009",
    ]


@pytest.fixture
def training(small_recipe: SmallRecipe) -> Callable[..., TrainingConfig]:
    def make(**section: Any) -> TrainingConfig:
        return small_recipe(training=section).training

    return make


@pytest.mark.parametrize("step", [1, 2, 399, 3999, 4000, 4001, 16_000, 100_000])
def test_noam_schedule_follows_the_formula_of_the_paper(
    training: Callable[..., TrainingConfig], step: int
) -> None:
    expected = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
    assert learning_rate(step, training(), 512) == pytest.approx(expected, rel=1e-12)
    doubled = learning_rate(step, training(learning_rate=2.0), 512)
    assert doubled == pytest.approx(2 * expected, rel=1e-12)


def test_noam_schedule_peaks_at_the_end_of_warmup(training: Callable[..., TrainingConfig]) -> None:
    rates = [learning_rate(step, training(), 512) for step in range(1, 12_001)]
    assert rates.index(max(rates)) + 1 == 4000
    assert max(rates) == pytest.approx(6.9877e-4, rel=1e-4)


def test_noam_schedule_without_warmup_only_decays(training: Callable[..., TrainingConfig]) -> None:
    for step in (1, 4, 100):
        rate = learning_rate(step, training(warmup=0), 64)
        assert rate == pytest.approx(1 / math.sqrt(64 * step), rel=1e-12)


def test_cosine_rises_to_the_learning_rate_and_ends_at_zero(
    training: Callable[..., TrainingConfig],
) -> None:
    section = training(schedule="cosine", learning_rate=0.4, warmup=100, steps=1100)
    found = {step: learning_rate(step, section, 512) for step in (1, 50, 100, 350, 600, 1100)}
    quarter = 0.4 * (1 + math.sqrt(0.5)) / 2
    expected = {1: 0.004, 50: 0.2, 100: 0.4, 350: quarter, 600: 0.2, 1100: 0.0}
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_cosine_stays_at_zero_after_the_last_step(training: Callable[..., TrainingConfig]) -> None:
    section = training(schedule="cosine", learning_rate=0.4, warmup=10, steps=100)
    assert learning_rate(150, section, 512) == pytest.approx(0, abs=1e-12)


def test_constant_warms_up_and_stays(training: Callable[..., TrainingConfig]) -> None:
    section = training(schedule="constant", learning_rate=0.5, warmup=10)
    assert learning_rate(1, section, 512) == pytest.approx(0.05)
    assert learning_rate(10, section, 512) == learning_rate(9999, section, 512) == 0.5
    assert learning_rate(1, training(schedule="constant", learning_rate=0.5, warmup=0), 512) == 0.5


@given(
    schedule=st.sampled_from(["noam", "constant", "cosine"]),
    warmup=st.integers(0, 50),
    steps=st.integers(1, 100),
)
def test_no_learning_rate_is_negative_and_the_first_is_positive(
    small_recipe: SmallRecipe, schedule: str, warmup: int, steps: int
) -> None:
    # Copied, not validated: a recipe with a warmup longer than its steps would be refused.
    section = small_recipe(training={"schedule": schedule}).training.model_copy(
        update={"warmup": warmup, "steps": steps + 1}
    )
    rates = [learning_rate(step, section, 16) for step in range(1, steps + 2)]
    assert min(rates) >= 0
    assert rates[0] > 0
