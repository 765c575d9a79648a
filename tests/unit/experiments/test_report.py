"""Figures: round ticks that cover the data, and points at the right places."""

import re
import xml.etree.ElementTree as ElementTree
from math import log10

import pytest

from regard.experiments.report import (
    Curve,
    IntervalRow,
    curve_plot,
    interval_plot,
    log_ticks,
    ticks,
)
from regard.experiments.results import Estimate


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 6, [0, 1, 2, 3, 4, 5, 6]), (-0.3, 0.9, [-0.4, -0.2, 0, 0.2, 0.4, 0.6, 0.8, 1.0])],
)
def test_ticks_are_round_and_cover_the_range(
    low: float, high: float, expected: list[float]
) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_logarithmic_ticks_cover_the_range() -> None:
    assert [round(10**one) for one in log_ticks(log10(8), log10(512))] == [
        *(5, 10, 20, 50, 100, 200, 500, 1000)
    ]
    assert log_ticks(-3.5, 2.5) == [-4, -3, -2, -1, 0, 1, 2, 3]
    assert log_ticks(0.0, 0.0) == [0.0]


def test_equal_values_have_an_axis() -> None:
    found = ticks(5.0, 5.0)
    assert found[0] <= 5 <= found[-1]
    ElementTree.fromstring(interval_plot("one", "BLEU", [IntervalRow("a", Estimate(5.0))]))


def test_intervals_are_drawn_to_scale() -> None:
    rows = [IntervalRow("a & b", Estimate(5.0, 0.0, 10.0), [0.0, 10.0])]
    plot = interval_plot("title", "BLEU", rows, zero=True)
    seeds = [float(x) for x in re.findall(r'class="seed" cx="([\d.]+)"', plot)]
    (mean,) = (float(x) for x in re.findall(r'class="mean" cx="([\d.]+)"', plot))
    assert mean == pytest.approx(sum(seeds) / 2, abs=0.1)
    assert 'class="zero"' in plot
    assert "a &amp; b" in plot


def test_a_power_law_is_a_straight_line_on_logarithmic_axes() -> None:
    curve = Curve("square", [(10, 100), (100, 10_000), (1000, 1_000_000)])
    plot = curve_plot("title", "length", "seconds", [curve], log=True)
    points = re.search(r'<polyline points="([^"]+)"', plot)
    assert points is not None
    (x1, y1), (x2, y2), (x3, y3) = (map(float, one.split(",")) for one in points[1].split())
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y2 - y1 == pytest.approx(y3 - y2, abs=0.2)
