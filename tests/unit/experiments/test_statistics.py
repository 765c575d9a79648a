"""Intervals over seeds agree with tables of Student's t and with calculations by hand."""

import math

import numpy as np
import pytest

from regard.experiments.statistics import (
    block_deviation,
    block_difference,
    contrast,
    mean_over_seeds,
    pooled_deviation,
    student_t,
    two_sided_p,
)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (4, 2.776), (30, 2.042)]
)
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, abs=2e-3)
    assert two_sided_p(quantile, freedom) == pytest.approx(0.05, abs=2e-4)


def test_a_mean_has_an_interval_from_two_seeds_on() -> None:
    assert mean_over_seeds([3.0]).low is None
    found = mean_over_seeds([1.0, 2.0, 3.0])
    margin = 4.3027 / math.sqrt(3)
    assert found.value == 2.0
    assert found.low == pytest.approx(2 - margin, abs=1e-3)
    assert found.high == pytest.approx(2 + margin, abs=1e-3)


def test_a_difference_is_that_of_welch() -> None:
    # s^2 / n is 1/3 for both, so the degrees of freedom are 4 and the error is sqrt(2/3).
    found = contrast([(1.0, [11.0, 12.0, 13.0]), (-1.0, [1.0, 2.0, 3.0])])
    assert found.value == 10
    assert found.high == pytest.approx(10 + 2.776 * math.sqrt(2 / 3), abs=2e-3)
    assert found.significant
    assert found.p_value is not None
    assert found.p_value < 0.001
    same = contrast([(1.0, [1.0, 2.0, 3.0]), (-1.0, [1.0, 2.0, 3.1])])
    assert not same.significant
    assert same.bound == pytest.approx(max(-(same.low or 0), same.high or 0))


def test_equal_seeds_have_no_width() -> None:
    found = contrast([(1.0, [2.0, 2.0]), (-1.0, [1.0, 1.0])])
    assert (found.low, found.high, found.p_value) == (1.0, 1.0, 0.0)


def test_deviation_is_pooled_within_groups() -> None:
    deviation, freedom = pooled_deviation([[1.0, 3.0], [101.0, 103.0]])
    assert deviation == pytest.approx(math.sqrt(2))
    assert freedom == 2
    assert pooled_deviation([[1.0]]) == (0.0, 0)


def test_a_block_design_of_two_groups_is_the_paired_test() -> None:
    ours, theirs = [1.0, 2.5, 2.0, 4.0], [0.5, 1.0, 1.8, 2.0]
    paired = contrast([(1.0, [a - b for a, b in zip(ours, theirs, strict=True)])])
    found = block_difference(ours, theirs, *block_deviation([ours, theirs]))
    assert found.value == pytest.approx(paired.value)
    assert (found.low, found.high) == pytest.approx((paired.low, paired.high))
    assert found.p_value == pytest.approx(paired.p_value, abs=1e-6)


def test_a_block_design_finds_the_noise() -> None:
    """Effects of groups and of seeds are not noise."""
    rng = np.random.default_rng(1)
    values = (
        rng.normal(size=(40, 1)) * 5 + rng.normal(size=30) * 3 + rng.normal(size=(40, 30)) * 0.5
    )
    deviation, freedom = block_deviation(values.tolist())
    assert deviation == pytest.approx(0.5, rel=0.05)
    assert freedom == 39 * 29
    assert block_deviation([[1.0, 2.0], [2.0, 3.0]]) == (0.0, 1)
