"""The report of ``regard data check``: how many pairs each rule finds, with examples, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from regard.data.misalignment import Stretch
from regard.data.pairs import Pair
from regard.data.quality import (
    QUALITY_RULES,
    Misaligned,
    RuleSet,
)
from regard.data.text_features import Ints, KeyCounter, PairBatch, batches

EXAMPLES = 3
LENGTH_BINS = [*range(0, 300, 20), 300]
"""characters"""
RATIO_BINS = [0.0, 0.25, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0]
"""length of the target divided by that of the source"""


@dataclass(frozen=True)
class NoiseExample:
    """A pair that a rule finds."""

    number: int
    """of the pair, from 1"""
    source: str
    target: str
    explanation: str


@dataclass
class Finding:
    """What one rule found."""

    rule: str
    meaning: str
    rejects: bool
    """whether ``regard data clean`` drops these pairs"""
    advice: str
    count: int = 0
    share: float = 0.0
    """of all pairs"""
    examples: list[NoiseExample] = field(default_factory=list)


@dataclass
class Histogram:
    """How many values are in each bin; the last bin has no upper bound."""

    name: str
    bounds: list[float]
    """lower bounds of the bins"""
    counts: list[int]


@dataclass
class HeldOutSplit:
    """Validation or test data, compared with the training data."""

    name: str
    sources: int
    """distinct sources"""
    overlap: int
    """of them, those that are also in the training data, up to case and punctuation"""
    unknown_words: float
    """share of the running words of its sources that are not in the training sources"""
    distance: float
    """Jensen-Shannon divergence of the words of its sources from those of the training data, from 0 to 1"""


@dataclass
class QualityReport:
    """Everything that ``regard data check`` tells."""

    files: list[str]
    languages: tuple[str, str] | None
    pairs: int = 0
    rejected: int = 0
    """pairs that ``regard data clean`` would drop"""
    findings: list[Finding] = field(default_factory=list)
    """worst first: rules that reject, then those that only report, each by count"""
    not_applied: dict[str, str] = field(default_factory=dict)
    """rules that could not be applied, and why"""
    skipped_lines: list[str] = field(default_factory=list)
    """what readers left out"""
    stretches: list[Stretch] = field(default_factory=list)
    """misaligned stretches"""
    held_out: list[HeldOutSplit] = field(default_factory=list)
    histograms: list[Histogram] = field(default_factory=list)
    next_steps: list[str] = field(default_factory=list)
    """what to do, with commands"""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "stretches": [stretch._asdict() for stretch in self.stretches]}


class Histograms:
    """Lengths of both sides and their ratios, counted batch by batch."""

    def __init__(self) -> None:
        self.source, self.target = (np.zeros(len(LENGTH_BINS), np.int64) for _ in range(2))
        self.ratio = np.zeros(len(RATIO_BINS), np.int64)

    def add(self, batch: PairBatch) -> None:
        source, target = batch.source.widths, batch.target.widths
        self.source += _bin(source, LENGTH_BINS)
        self.target += _bin(target, LENGTH_BINS)
        both = (source > 0) & (target > 0)
        self.ratio += _bin(target[both] / source[both], RATIO_BINS)

    def results(self) -> list[Histogram]:
        return [
            Histogram("length of the source in characters", [*LENGTH_BINS], self.source.tolist()),
            Histogram("length of the target in characters", [*LENGTH_BINS], self.target.tolist()),
            Histogram("length of the target / source", [*RATIO_BINS], self.ratio.tolist()),
        ]


def _bin(values: Any, bounds: Sequence[float]) -> Ints:
    places = np.searchsorted(np.array(bounds), values, side="right") - 1
    return np.bincount(places, minlength=len(bounds))


def make_report(
    pairs: Iterable[Pair],
    rules: RuleSet,
    files: Sequence[str],
    languages: tuple[str, str] | None,
    held_out: Mapping[str, Iterable[Pair]] | None = None,
) -> QualityReport:
    """Apply all rules to the pairs and collect what they find."""
    findings = {name: _empty_finding(name) for name in rules.rules}
    histograms, words, sources = Histograms(), Counter[int](), KeyCounter()
    report = QualityReport([*files], languages, not_applied=rules.skipped)
    for batch in batches(pairs):
        for name, marks in rules.apply(batch):
            finding = findings[name]
            finding.count += int(marks.sum())
            room = EXAMPLES - len(finding.examples)
            for number in np.flatnonzero(marks)[:room].tolist():
                pair = batch.pairs[number]
                why = rules.rules[name].explain(pair)
                number += batch.start + 1
                finding.examples.append(NoiseExample(number, pair.source, pair.target, why))
        histograms.add(batch)
        report.pairs += len(batch)
        report.rejected += int(batch.rejected.sum())
        if held_out:
            sources.add(batch.source.folded_keys)
            words.update(batch.source.words.hashes.tolist())
    for finding in findings.values():
        finding.share = finding.count / max(1, report.pairs)
    found = (finding for finding in findings.values() if finding.count)
    report.findings = sorted(found, key=lambda one: (not one.rejects, -one.count))
    report.histograms = histograms.results()
    report.stretches = _merged(rules)
    report.held_out = [
        _compare(name, split, sources, words) for name, split in (held_out or {}).items()
    ]
    return report


def _empty_finding(name: str) -> Finding:
    kind = QUALITY_RULES[name]
    return Finding(name, QUALITY_RULES.choices[name].summary, kind.rejects, kind.advice)


def _merged(rules: RuleSet) -> list[Stretch]:
    """The misaligned stretches; one that continues in the next batch is one stretch."""
    rule = rules.rules.get("misaligned")
    merged: list[Stretch] = []
    for stretch in rule.stretches if isinstance(rule, Misaligned) else ():
        if merged and stretch.shift == merged[-1].shift and stretch.first - merged[-1].last <= 8:
            merged[-1] = merged[-1]._replace(last=stretch.last)
        else:
            merged.append(stretch)
    return merged


def _compare(
    name: str, pairs: Iterable[Pair], sources: KeyCounter, words: Counter[int]
) -> HeldOutSplit:
    """Compare the sources of a split with those of the training data."""
    distinct, overlap = KeyCounter(), 0
    theirs: Counter[int] = Counter()
    for batch in batches(pairs):
        keys = batch.source.folded_keys
        new = distinct.add(keys) == 0
        overlap += int((sources.contains(keys) & new).sum())
        theirs.update(batch.source.words.hashes.tolist())
    unknown = sum(count for word, count in theirs.items() if word not in words)
    return HeldOutSplit(
        name,
        len(distinct),
        overlap,
        unknown / max(1, theirs.total()),
        jensen_shannon(words, theirs),
    )


def jensen_shannon(first: Counter[int], second: Counter[int]) -> float:
    """The Jensen-Shannon divergence of two distributions of words, in bits: 0 if they are equal, at most 1."""
    if not first or not second:
        return 1.0
    keys = [*{**first, **second}]
    counts = np.array([[first[key] for key in keys], [second[key] for key in keys]], np.float64)
    p = counts / counts.sum(axis=1, keepdims=True)
    mean = p.mean(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(p > 0, p * np.log2(p / mean), 0.0)
    return float(terms.sum() / 2)


# ---------------------------------------------------------------------------------------------
# What to do


def next_steps(report: QualityReport, given: str, options: str) -> list[str]:
    """What to do, one line each. ``given`` are the files as the user gave them, ``options`` how they are read."""
    steps = []
    found = {finding.rule: finding for finding in report.findings}
    command = " ".join(filter(None, ["regard data clean", given, options]))
    if report.rejected:
        share = report.rejected / report.pairs
        steps.append(
            f"{command} --output clean.tsv --report rejected.tsv  drops {report.rejected:,} pairs ({share:.1%})"
        )
        steps.append("regard train clean.tsv  trains on the others")
    else:
        steps.append(f"regard train {given}  can use the data as they are")
    for first, last, shift in report.stretches[:3]:
        steps.append(
            f"pairs {first:,} to {last:,}: source n belongs to target n {'+' if shift > 0 else '-'} {abs(shift)}; "
            "add or delete a line at both ends instead of losing these pairs"
        )
    if report.rejected > 0.5 * report.pairs:
        steps.append(
            "more than half of the pairs would be dropped: look at rejected.tsv first; --skip RULE turns a rule off"
        )
    if "encoding" in found:
        steps.append("export the original texts again as UTF-8 if you can: damaged pairs are lost")
    for split in report.held_out:
        if split.overlap:
            steps.append(
                f"{split.overlap:,} of {split.sources:,} sources of {split.name} are in the training data, so the "
                "scores will be too good; the first command drops them from the training data"
            )
        if split.unknown_words > 0.1:
            steps.append(
                f"{split.unknown_words:.0%} of the words of {split.name} are not in the training data: "
                "expect low scores, or add texts of that kind"
            )
    if report.pairs and report.rejected < 0.5 * report.pairs:
        steps.append(
            f"regard data score {given} --output scored.tsv  ranks the pairs by models trained on them"
        )
    return steps
