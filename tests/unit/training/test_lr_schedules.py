"""Each learning-rate schedule against its formula."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from regard.recipe import Recipe, TrainingConfig
from regard.training.lr_schedules import learning_rate

SmallRecipe = Callable[..., Recipe]


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
