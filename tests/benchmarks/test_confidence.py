"""The benchmark of confidence."""

import numpy as np
import pytest

from tests.scripts import load_script


def test_the_calibration_error_is_the_gap_in_each_bin() -> None:
    benchmark = load_script("benchmarks/confidence.py")
    good = np.array([True, True, True, False, False, False])
    confidences = np.array([0.95, 0.95, 1.0, 0.05, 0.05, 0.05])
    assert benchmark.calibration_error(confidences, good) == pytest.approx(
        0.5 * 0.1 / 3 + 0.5 * 0.05
    )
    assert benchmark.calibration_error(good.astype(float), good) == 0
