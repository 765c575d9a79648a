"""Confidence: the features, the logistic regression, the area under the ROC curve, and the section of the card."""

from math import exp, log
from random import Random

import numpy as np
import pytest
from hypothesis import given, strategies as st

from regard.errors import RegardError
from regard.inference.confidence import (
    FEATURES,
    ConfidenceCalibration,
    features,
    fit_logistic,
    geometric_mean,
    roc_auc,
    sigmoid,
)


def examples(count: int, seed: int = 1) -> tuple[list[list[float]], list[float]]:
    """Features of random translations, and chrF that rises with the mean log-probability."""
    rng = Random(seed)
    rows, chrf = [], []
    for _ in range(count):
        mean = -rng.random() * 3
        values = [mean * (0.5 + rng.random()) for _ in range(rng.randrange(2, 20))]
        rows.append(features(values, rng.randrange(1, 20)))
        chrf.append(60 + 25 * mean + rng.gauss(0, 10))
    return rows, chrf


def test_features_of_a_translation() -> None:
    found = dict(zip(FEATURES, features([log(0.5), log(0.125)], 3), strict=True))
    assert found["mean_log_probability"] == pytest.approx(log(0.25))
    assert found["mean_probability"] == pytest.approx(0.3125)
    assert found["log_probability"] == pytest.approx(log(0.0625))
    assert found["log_length_ratio"] == pytest.approx(log(2 / 4))
    assert found["absolute_log_length_ratio"] == pytest.approx(log(2))
    assert all(map(np.isfinite, features([-np.inf, 0.0], 0)))
    assert geometric_mean([log(0.5), log(0.125)]) == pytest.approx(0.25)
    assert geometric_mean([]) == 1.0
    assert 0 < geometric_mean([-np.inf]) < 1e-8


def test_the_regression_has_a_gradient_of_zero() -> None:
    rng = np.random.default_rng(1)
    matrix = rng.normal(size=(300, 3)) * [1, 10, 0.1] + [0, 5, 1]
    positive = rng.random(300) < sigmoid(matrix[:, 0] - (matrix[:, 1] - 5) / 10)
    coefficients, intercept = fit_logistic(matrix, positive)
    residuals = sigmoid(matrix @ coefficients + intercept) - positive
    # Of the penalized objective: the penalty pulls the coefficients of standardized features towards zero.
    scales = matrix.std(0)
    standardized = (matrix - matrix.mean(0)) / scales
    assert residuals.sum() == pytest.approx(0, abs=1e-6)
    assert standardized.T @ residuals == pytest.approx(-coefficients * scales, abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=30))
def test_roc_auc_counts_pairs(examples: list[tuple[int, bool]]) -> None:
    scores = [score for score, _ in examples]
    positive = np.array([one for _, one in examples])
    if positive.all() or not positive.any():
        return
    pairs = [
        (a > b) + (a == b) / 2 for a, good in examples if good for b, other in examples if not other
    ]
    assert roc_auc(scores, positive) == pytest.approx(sum(pairs) / len(pairs))


def test_a_calibration_separates_good_from_bad() -> None:
    calibration = ConfidenceCalibration.fit(*examples(600))
    assert calibration is not None
    assert calibration.auc > 0.9
    rows, chrf = examples(600, seed=2)
    high, low = calibration([log(0.95)] * 8, 8), calibration([log(0.05)] * 8, 8)
    assert 0 < low < 0.2 < 0.8 < high < 1
    # The mean confidence is close to the share of good translations, also on other data.
    weights = np.array(calibration.coefficients)
    mean = float(sigmoid(np.array(rows) @ weights + calibration.intercept).mean())
    assert mean == pytest.approx(np.mean(np.array(chrf) >= 30), abs=0.05)


def test_too_few_bad_translations_give_no_calibration() -> None:
    rows, _ = examples(300)
    assert ConfidenceCalibration.fit(rows, [80.0] * 290 + [10.0] * 10) is None


def test_a_calibration_is_stored_in_the_card() -> None:
    calibration = ConfidenceCalibration.fit(*examples(200))
    assert calibration is not None
    stored = calibration.to_json()
    assert list(stored["coefficients"]) == [*FEATURES]
    assert ConfidenceCalibration.from_json(stored, "card.json") == calibration
    assert "at least 30" in calibration.summary
    del stored["coefficients"]["log_length"]
    with pytest.raises(RegardError, match=r"^card\.json: damaged"):
        ConfidenceCalibration.from_json(stored, "card.json")
    with pytest.raises(RegardError, match="damaged"):
        ConfidenceCalibration.from_json({"coefficients": 3}, "card.json")


def test_extreme_values_do_not_overflow() -> None:
    huge = ConfidenceCalibration((1e6,) * len(FEATURES), 0.0, 100, 50, 0.9)
    assert huge([-15.0] * 100, 1) == pytest.approx(0)
    assert exp(0) >= huge([0.0] * 100, 1) > 0.99
