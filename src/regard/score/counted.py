"""Measures that are made of counts, one line of numbers a sentence; resampling draws the lines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from regard.errors import RegardError
from regard.recipe import Measure
from regard.score.bootstrap import (
    RESAMPLES,
    SEED,
    Counts,
    Statistic,
    interval,
    p_value,
)
from regard.score.result import Comparison, Result
from regard.version import __version__

Lines = Sequence[str]


@dataclass(frozen=True)
class Counted:
    """A measure: what is counted in each line, and what the sums say."""

    measure: Measure
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
