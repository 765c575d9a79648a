"""Student's t for means over seeds, and for differences between such means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import fmean, variance
from typing import Any

import numpy as np
import numpy.typing as npt

POINTS = 200_001
"""of the numerical integration of the density of t"""


@dataclass(frozen=True)
class Estimate:
    """A mean, or a difference of means, with its 95% interval over seeds; without one if there are too few seeds."""

    value: float
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    """two-sided, for the hypothesis that the value is 0"""

    @property
    def significant(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    @property
    def bound(self) -> float | None:
        """The largest absolute value in the interval."""
        if self.low is None or self.high is None:
            return None
        return max(abs(self.low), abs(self.high))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _angles(freedom: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Angles a from 0 to pi/2, and the probability that |t| is below sqrt(freedom) tan(a).

    With t = sqrt(n) tan(a) the density of t becomes cos(a)^(n-1), up to a factor.
    """
    angles = np.linspace(0.0, np.pi / 2, POINTS)
    heights = np.cos(angles) ** (freedom - 1)
    areas = np.concatenate([[0.0], np.cumsum(heights[1:] + heights[:-1])])
    return angles, areas / areas[-1]


@cache
def student_t(freedom: float) -> float:
    """The 97.5% quantile of Student's t distribution with this many degrees of freedom."""
    angles, areas = _angles(freedom)
    return float(np.sqrt(freedom) * np.tan(np.interp(0.95, areas, angles)))


def two_sided_p(t: float, freedom: float) -> float:
    """The probability that the absolute value of Student's t exceeds this one."""
    angles, areas = _angles(freedom)
    angle = np.arctan(abs(t) / np.sqrt(freedom))
    return float(1 - np.interp(angle, angles, areas))


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """The mean with its interval."""
    return contrast([(1.0, values)])


def contrast(groups: Sequence[tuple[float, Sequence[float]]]) -> Estimate:
    """A weighted sum of the means of groups, with Welch's interval: the variances of the groups may differ.

    ``groups``: a weight and the scores of the seeds of each group; weights 1 and -1 give a difference of two means.
    """
    value = sum(weight * fmean(values) for weight, values in groups)
    if min(len(values) for _, values in groups) < 2:
        return Estimate(value)
    terms = [
        (weight**2 * variance(values) / len(values), len(values) - 1) for weight, values in groups
    ]
    squared = sum(term for term, _ in terms)
    if squared == 0:
        return Estimate(value, value, value, 0.0 if value else 1.0)
    freedom = squared**2 / sum(term**2 / degrees for term, degrees in terms)
    margin = student_t(freedom) * squared**0.5
    p_value = two_sided_p(value / squared**0.5, freedom)
    return Estimate(value, value - margin, value + margin, p_value)


def pooled_deviation(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """The standard deviation between seeds if it is the same in all groups, and its degrees of freedom."""
    squares = sum((x - fmean(group)) ** 2 for group in groups for x in group)
    freedom = sum(len(group) - 1 for group in groups)
    return (squares / freedom) ** 0.5 if freedom else 0.0, freedom


def block_deviation(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """The standard deviation that groups and seeds do not explain, and its degrees of freedom.

    A randomized block design: a value is the effect of its group plus the effect of its seed plus noise, which is the
    same in all groups. Each group has the values of the same seeds in the same order. With two groups, this is the
    paired t-test.
    """
    values = np.asarray(groups, dtype=np.float64)
    residuals = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    freedom = (values.shape[0] - 1) * (values.shape[1] - 1)
    return (float((residuals**2).sum()) / freedom) ** 0.5 if freedom else 0.0, freedom


def block_difference(
    ours: Sequence[float], theirs: Sequence[float], deviation: float, freedom: int
) -> Estimate:
    """The difference of two groups of a randomized block design, with its interval."""
    value = fmean(ours) - fmean(theirs)
    if not freedom:
        return Estimate(value)
    error = deviation * (2 / len(ours)) ** 0.5
    if error == 0:
        return Estimate(value, value, value, 0.0 if value else 1.0)
    margin = student_t(freedom) * error
    return Estimate(value, value - margin, value + margin, two_sided_p(value / error, freedom))
