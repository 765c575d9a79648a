"""A score with all it takes to say what it means."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from regard import __version__
from regard.errors import RegardError
from regard.metrics.bootstrap import (
    RESAMPLES,
    SEED,
    Counts,
    Statistic,
    interval,
    p_value,
)

SIGNIFICANT = 0.05
"""p-values below this are called significant"""


@dataclass(frozen=True)
class Result:
    """One measure of one system."""

    measure: str
    """as recipes name it: bleu, chrf …"""
    name: str
    """as people write it: BLEU, chrF2 …"""
    value: float
    low: float | None
    """the 95 % interval, by bootstrap; None if not computed"""
    high: float | None
    signature: str
    """how it was computed, so that others can compute the same"""
    higher_is_better: bool

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.name} {self.value:.2f}{interval}  {self.signature}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """One measure of a system and of a baseline on the same sentences."""

    measure: str
    name: str
    system: float
    baseline: float
    p_value: float
    """chance of a difference as large as this if the two were equally good: paired bootstrap"""
    signature: str
    higher_is_better: bool

    @property
    def difference(self) -> float:
        return self.system - self.baseline

    @property
    def significant(self) -> bool:
        return self.p_value < SIGNIFICANT

    @property
    def better(self) -> bool:
        """The system's value is the better one, significantly or not."""
        return self.difference > 0 if self.higher_is_better else self.difference < 0

    def __str__(self) -> str:
        word = "better" if self.better else "worse"
        verdict = f"significantly {word}" if self.significant else "no significant difference"
        return (
            f"{self.name} {self.system:.2f} against {self.baseline:.2f} "
            f"({self.difference:+.2f}, p = {self.p_value:.4f}: {verdict})  {self.signature}"
        )

    def to_json(self) -> dict[str, Any]:
        found = {"difference": self.difference, "significant": self.significant}
        return asdict(self) | found


# ---------------------------------------------------------------------------------------------
# Measures that are made of counts, one line of numbers a sentence; resampling draws the lines.


Lines = Sequence[str]


@dataclass(frozen=True)
class CountMetric:
    """A measure: what is counted in each line, and what the sums say."""

    measure: str
    name: str
    count: Callable[[Sequence[Lines], Lines], list[Counts]]
    """the systems' lines and the references to the counts of each system"""
    statistic: Statistic
    signature: str
    """how it is computed"""
    higher_is_better: bool = True

    def result(self, hypotheses: Lines, references: Lines, intervals: bool) -> Result:
        (counts,) = self.count([hypotheses], references)
        return self.of_counts(counts, intervals)

    def of_counts(self, counts: Counts, intervals: bool = True, more: str = "") -> Result:
        """more: what else is to be said of how it was computed."""
        low, high = interval(counts, self.statistic) if intervals else (None, None)
        return Result(
            measure=self.measure,
            name=self.name,
            value=self.statistic(counts.sum(axis=0)),
            low=low,
            high=high,
            signature=self._signed(len(counts), intervals, more),
            higher_is_better=self.higher_is_better,
        )

    def comparison(self, system: Lines, baseline: Lines, references: Lines) -> Comparison:
        ours, theirs = self.count([system, baseline], references)
        return Comparison(
            measure=self.measure,
            name=self.name,
            system=self.statistic(ours.sum(axis=0)),
            baseline=self.statistic(theirs.sum(axis=0)),
            p_value=p_value(ours, theirs, self.statistic),
            signature=self._signed(len(ours), True),
            higher_is_better=self.higher_is_better,
        )

    def _signed(self, lines: int, drawn: bool, more: str = "") -> str:
        draws = f"bs:{RESAMPLES}|seed:{SEED}" if drawn else ""
        parts = (f"lines:{lines}", draws, self.signature, more, f"regard:{__version__}")
        return "|".join(filter(None, parts))


def each_line(
    count: Callable[[str, str], Sequence[float]],
) -> Callable[[Sequence[Lines], Lines], list[Counts]]:
    """A count that needs to know one line and its reference only."""

    def of_all(systems: Sequence[Lines], references: Lines) -> list[Counts]:
        return [
            np.array([count(*both) for both in zip(lines, references, strict=True)], np.float64)
            for lines in systems
        ]

    return of_all


def same_number(hypothesis: list[str], reference: list[str]) -> None:
    if len(hypothesis) != len(reference):
        raise RegardError(
            f"{len(hypothesis)} labels where there are {len(reference)}: "
            f"{' '.join(hypothesis)[:40]!r} against {' '.join(reference)[:40]!r}"
        )
