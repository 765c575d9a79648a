"""What a metric is, the results it returns, and ``score`` and ``compare``, which take metrics by name.

``Metric`` is the interface. ``CountMetric`` covers every metric that is a function of sums over lines (error counts,
matches, log-probabilities): it adds bootstrap confidence intervals and the paired significance test. Only sacreBLEU's
metrics implement the interface themselves.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from regard import __version__
from regard.errors import RegardError
from regard.metrics.bootstrap import (
    RESAMPLES,
    SEED,
    Counts,
    Statistic,
    confidence_interval,
    paired_bootstrap_p_value,
)
from regard.recipe import Registry, suggest

SIGNIFICANCE_LEVEL = 0.05
"""p-values below this are called significant"""

Lines = Sequence[str]


@dataclass(frozen=True)
class MetricResult:
    """The value of one metric for one system."""

    metric: str
    """its name in recipes: bleu, chrf …"""
    name: str
    """its name in print: BLEU, chrF2 …"""
    value: float
    low: float | None
    """lower end of the 95% bootstrap confidence interval; None if not computed"""
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
    """One metric for a system and for a baseline on the same sentences."""

    metric: str
    name: str
    system: float
    baseline: float
    p_value: float
    """probability of a difference this large if the two were equally good: paired bootstrap"""
    signature: str
    higher_is_better: bool

    @property
    def difference(self) -> float:
        return self.system - self.baseline

    @property
    def significant(self) -> bool:
        return self.p_value < SIGNIFICANCE_LEVEL

    @property
    def better(self) -> bool:
        """The system has the better value, significantly or not."""
        return self.difference > 0 if self.higher_is_better else self.difference < 0

    def __str__(self) -> str:
        word = "better" if self.better else "worse"
        verdict = f"significantly {word}" if self.significant else "no significant difference"
        return (
            f"{self.name} {self.system:.2f} against {self.baseline:.2f} "
            f"({self.difference:+.2f}, p = {self.p_value:.4f}: {verdict})  {self.signature}"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"difference": self.difference, "significant": self.significant}


@dataclass(frozen=True)
class Metric(ABC):
    """A metric that compares the lines of a system with reference lines."""

    name: str
    """its name in recipes"""
    display_name: str
    """its name in print"""

    @property
    @abstractmethod
    def higher_is_better(self) -> bool: ...

    @property
    @abstractmethod
    def scored_on(self) -> Literal["text", "labels", "model"]:
        """What it is computed from: output texts, output labels, or probabilities that only a model can provide."""

    @abstractmethod
    def score(
        self,
        hypotheses: Lines,
        references: Lines,
        sources: Lines,
        *,
        tokenize: str = "13a",
        intervals: bool = True,
    ) -> MetricResult:
        """Score a system.

        ``tokenize`` is sacreBLEU's tokenizer for BLEU. ``intervals``: also compute the confidence interval.
        """

    @abstractmethod
    def compare(
        self,
        system: Lines,
        baseline: Lines,
        references: Lines,
        sources: Lines,
        *,
        tokenize: str = "13a",
    ) -> Comparison:
        """Compare two systems by paired bootstrap resampling."""


METRICS: Registry[Metric] = Registry("evaluation.metrics")

M = TypeVar("M", bound=Metric)


def register_metric(metric: M) -> M:
    """Add a metric to the registry under its own name."""
    return METRICS.register(metric.name, summary=metric.display_name)(metric)


# ---------------------------------------------------------------------------------------------
# Metrics made of counts: one row of values for each line, summed over the lines

CountFunction = Callable[[Sequence[Lines], Lines, Lines], list[Counts]]
"""(the lines of each system, references, sources) -> the counts of each system"""


@dataclass(frozen=True)
class CountMetric(Metric):
    """A metric computed from sums of counts."""

    count: CountFunction
    statistic: Statistic
    """the metric as a function of the summed counts"""
    signature: str
    """the part of the signature that says how it is computed"""
    higher_is_better: bool = True
    scored_on: Literal["text", "labels", "model"] = "text"
    row_name: str = "lines"
    """what a row of counts stands for, in the signature"""

    def score(
        self,
        hypotheses: Lines,
        references: Lines,
        sources: Lines,
        *,
        tokenize: str = "13a",
        intervals: bool = True,
    ) -> MetricResult:
        (counts,) = self.count([hypotheses], references, sources)
        return self.score_counts(counts, intervals)

    def score_counts(
        self, counts: Counts, intervals: bool = True, details: str = ""
    ) -> MetricResult:
        """Score counts that a model computed itself. ``details`` is added to the signature."""
        low, high = confidence_interval(counts, self.statistic) if intervals else (None, None)
        return MetricResult(
            metric=self.name,
            name=self.display_name,
            value=self.statistic(counts.sum(axis=0)),
            low=low,
            high=high,
            signature=self._full_signature(len(counts), intervals, details),
            higher_is_better=self.higher_is_better,
        )

    def compare(
        self,
        system: Lines,
        baseline: Lines,
        references: Lines,
        sources: Lines,
        *,
        tokenize: str = "13a",
    ) -> Comparison:
        ours, theirs = self.count([system, baseline], references, sources)
        return Comparison(
            metric=self.name,
            name=self.display_name,
            system=self.statistic(ours.sum(axis=0)),
            baseline=self.statistic(theirs.sum(axis=0)),
            p_value=paired_bootstrap_p_value(ours, theirs, self.statistic),
            signature=self._full_signature(len(ours), resampled=True),
            higher_is_better=self.higher_is_better,
        )

    def _full_signature(self, rows: int, resampled: bool, details: str = "") -> str:
        bootstrap = f"bs:{RESAMPLES}|seed:{SEED}" if resampled else ""
        parts = (f"{self.row_name}:{rows}", bootstrap, self.signature, details)
        return "|".join([*filter(None, parts), f"regard:{__version__}"])


def count_each_line(count: Callable[[str, str], Sequence[float]]) -> CountFunction:
    """A count function that looks at one hypothesis and its reference at a time."""

    def count_all(systems: Sequence[Lines], references: Lines, sources: Lines) -> list[Counts]:
        return [
            np.array([count(*pair) for pair in zip(lines, references, strict=True)], np.float64)
            for lines in systems
        ]

    return count_all


def check_same_length(hypothesis: list[str], reference: list[str]) -> None:
    """Refuse a line with more or fewer labels than its reference."""
    if len(hypothesis) != len(reference):
        raise RegardError(
            f"{len(hypothesis)} labels, but the reference has {len(reference)}: "
            f"{' '.join(hypothesis)[:40]!r} against {' '.join(reference)[:40]!r}"
        )


# ---------------------------------------------------------------------------------------------
# Scores of texts by the names of metrics


def score(
    metrics: Sequence[str],
    hypotheses: Lines,
    references: Lines,
    sources: Lines,
    *,
    tokenize: str = "13a",
    intervals: bool = True,
) -> list[MetricResult]:
    """Score hypotheses against references, line by line.

    ``tokenize`` is sacreBLEU's tokenizer for BLEU. ``sources`` tell ``wer`` and ``per`` which lines are the same word.
    ``intervals=False`` skips the confidence intervals, which is faster.
    """
    lines = {"hypotheses": hypotheses, "references": references, "sources": sources}
    _check(metrics, lines)
    return [
        METRICS[name].score(hypotheses, references, sources, tokenize=tokenize, intervals=intervals)
        for name in metrics
    ]


def compare(
    metrics: Sequence[str],
    system: Lines,
    baseline: Lines,
    references: Lines,
    sources: Lines,
    *,
    tokenize: str = "13a",
) -> list[Comparison]:
    """Test whether a system differs significantly from a baseline.

    Paired bootstrap resampling (Koehn 2004): both are scored on the same resampled sentences.
    """
    lines = {"system": system, "baseline": baseline}
    _check(metrics, {**lines, "references": references, "sources": sources})
    return [
        METRICS[name].compare(system, baseline, references, sources, tokenize=tokenize)
        for name in metrics
    ]


def _check(metrics: Sequence[str], lines: Mapping[str, Lines]) -> None:
    for name in metrics:
        if name not in METRICS:
            raise RegardError(f"unknown metric {name}{suggest(name, list(METRICS))}")
        if METRICS[name].scored_on == "model":
            raise RegardError(f"{name} cannot be computed from texts, only by a model")
    counts = {role: len(role_lines) for role, role_lines in lines.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} {role}" for role, count in counts.items())
        raise RegardError(f"scoring needs equal numbers of lines, but got {listed}")
    if not all(counts.values()):
        raise RegardError("nothing to score: there are no lines")
