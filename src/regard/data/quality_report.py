"""The report of ``regard data check``: how many pairs each rule finds, with examples, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

import numpy as np

from regard.data.misalignment import Stretch
from regard.data.pairs import Pair
from regard.data.quality import QUALITY_RULES, Misaligned, RuleSet
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
        nonempty = (source > 0) & (target > 0)
        self.ratio += _bin(target[nonempty] / source[nonempty], RATIO_BINS)

    def results(self) -> list[Histogram]:
        return [
            Histogram("length of the source in characters", [*LENGTH_BINS], self.source.tolist()),
            Histogram("length of the target in characters", [*LENGTH_BINS], self.target.tolist()),
            Histogram("length of the target / source", [*RATIO_BINS], self.ratio.tolist()),
        ]


def _bin(values: Any, bounds: Sequence[float]) -> Ints:
    bins = np.searchsorted(np.array(bounds), values, side="right") - 1
    return np.bincount(bins, minlength=len(bounds))


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
    fallback_examples: dict[str, list[NoiseExample]] = {name: [] for name in findings}
    for batch in batches(pairs):
        for name, marks in rules.apply(batch):
            finding = findings[name]
            finding.count += int(marks.sum())
            # A pair that an earlier rule found, such as an empty one, is an example only if there is no other.
            for examples, candidates in (
                (finding.examples, marks & ~batch.rejected),
                (fallback_examples[name], marks & batch.rejected),
            ):
                for number in np.flatnonzero(candidates)[: EXAMPLES - len(examples)].tolist():
                    pair = batch.pairs[number]
                    explanation = rules.rules[name].explain(pair)
                    number += batch.start + 1
                    examples.append(NoiseExample(number, pair.source, pair.target, explanation))
        histograms.add(batch)
        report.pairs += len(batch)
        report.rejected += int(batch.rejected.sum())
        if held_out:
            sources.add(batch.source.folded_keys)
            words.update(batch.source.words.hashes.tolist())
    for name, finding in findings.items():
        finding.share = finding.count / max(1, report.pairs)
        finding.examples = (finding.examples + fallback_examples[name])[:EXAMPLES]
    nonempty = (finding for finding in findings.values() if finding.count)
    report.findings = sorted(nonempty, key=lambda finding: (not finding.rejects, -finding.count))
    report.histograms = histograms.results()
    report.stretches = _merged(rules)
    report.held_out = [
        _compare(name, split, sources, words) for name, split in (held_out or {}).items()
    ]
    return report


def _empty_finding(name: str) -> Finding:
    rule_class = QUALITY_RULES[name]
    return Finding(name, QUALITY_RULES.choices[name].summary, rule_class.rejects, rule_class.advice)


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
    split_words: Counter[int] = Counter()
    for batch in batches(pairs):
        keys = batch.source.folded_keys
        is_new = distinct.add(keys) == 0
        overlap += int((sources.contains(keys) & is_new).sum())
        split_words.update(batch.source.words.hashes.tolist())
    unknown = sum(count for word, count in split_words.items() if word not in words)
    return HeldOutSplit(
        name,
        len(distinct),
        overlap,
        unknown / max(1, split_words.total()),
        jensen_shannon(words, split_words),
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


def next_steps(report: QualityReport, files: str, cleaning: str = "") -> list[str]:
    """What to do, one line each.

    ``files``: the files as the user passed them, with the options that say how to read them. ``cleaning``: the other
    options of the command that ``regard data clean`` has as well.
    """
    steps = []
    findings = {finding.rule: finding for finding in report.findings}
    command = f"regard data clean {files} {cleaning}".strip()
    if report.rejected:
        share = report.rejected / report.pairs
        steps.append(
            f"{command} --output clean.tsv --report rejected.tsv  drops "
            f"{_pairs(report.rejected)} ({share:.1%})"
        )
        languages = f" --languages {','.join(report.languages)}" if report.languages else ""
        if report.rejected < report.pairs:
            steps.append(f"regard train clean.tsv{languages}  trains on the remaining pairs")
    else:
        steps.append(f"regard train {files}  can use the data as they are")
    for first, last, shift in report.stretches[:3]:
        steps.append(
            f"pairs {first:,} to {last:,}: source n belongs to target n {'+' if shift > 0 else '-'} {abs(shift)}; "
            "add or delete a line at both ends instead of losing these pairs"
        )
    if report.rejected > 0.5 * report.pairs:
        steps.append(
            "more than half of the pairs would be dropped: look at rejected.tsv first; --skip RULE turns a rule off"
        )
        if skipped := _rules_of_translations(findings.values()):
            options = " ".join(f"--skip {rule}" for rule in skipped)
            steps.append(
                f"{command} {options} --output clean.tsv  if these are not translations, but summaries or corrections"
            )
    if "encoding" in findings:
        steps.append("export the original texts again as UTF-8 if you can: damaged pairs are lost")
    for split in report.held_out:
        if split.overlap:
            steps.append(
                f"{split.overlap:,} of {split.sources:,} sources of {split.name} are in the training data, so the "
                "scores will be too high; the first command drops them from the training data"
            )
        if split.unknown_words > 0.1:
            steps.append(
                f"{split.unknown_words:.0%} of the words of {split.name} are not in the training data: "
                "expect low scores, or add texts of that kind"
            )
    if report.pairs and report.rejected < 0.5 * report.pairs:
        steps.append(
            f"regard data score {files} --output scored.tsv  ranks the pairs, using models trained on them"
        )
    return steps


NOT_TRANSLATION = ("ratio", "copy")
"""Rules that most pairs of other tasks break: summaries are short, corrected texts are almost copies."""
TRANSLATION_RULES = (
    *("ratio", "copy", "untranslated", "unrelated", "language"),
    *("numbers", "placeholders", "length"),
)
"""Rules that hold for translations only. In other tasks, texts may also be long."""
MANY = 0.5
"""share of the pairs"""


def _rules_of_translations(findings: Iterable[Finding]) -> list[str]:
    """The rules to turn off if most pairs break one of ``NOT_TRANSLATION``."""
    found = {finding.rule: finding.share for finding in findings if finding.rejects}
    if all(found.get(rule, 0) <= MANY for rule in NOT_TRANSLATION):
        return []
    return [rule for rule in TRANSLATION_RULES if rule in found]


def _pairs(count: int) -> str:
    return "1 pair" if count == 1 else f"{count:,} pairs"


# ---------------------------------------------------------------------------------------------
# The report as one self-contained HTML file, without scripts


STYLE = """
:root { color-scheme: light dark; --text: #1c2026; --dim: #5d6673; --back: #fff; --card: #f5f6f8; --line: #d9dde3;
  --bar: #3b6fd4; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ee; --dim: #9aa4b2; --back: #14171c; --card: #1d2229;
  --line: #333a45; --bar: #7aa5ff; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--back); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
.dim { color: var(--dim); }
.total { display: flex; flex-wrap: wrap; gap: 0.75rem; padding: 0; list-style: none; }
.total li { flex: 1 1 5rem; max-width: 14rem; background: var(--card); border-radius: 0.5rem; padding: 0.5rem 1rem; }
.total b { display: block; font-size: 1.4rem; }
details { background: var(--card); border-radius: 0.5rem; margin: 0.5rem 0; padding: 0.5rem 1rem; }
summary { cursor: pointer; } summary b { display: inline-block; min-width: min(11.5rem, 40vw); }
.share { display: inline-block; height: 0.6rem; background: var(--bar); border-radius: 0.3rem; }
.rejects .share { background: var(--bad); }
dl { margin: 0.5rem 0; border-top: 1px solid var(--line); padding-top: 0.5rem; }
dt { color: var(--dim); font-size: 0.85rem; } dd { margin: 0 0 0.25rem; white-space: pre-wrap; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border-radius: 0.5rem; padding: 0.75rem; }
figcaption { font-size: 0.9rem; color: var(--dim); }
svg { width: 100%; height: auto; display: block; } rect { fill: var(--bar); }
text { fill: var(--dim); font-size: 11px; }
code { background: var(--card); border-radius: 0.3rem; padding: 0.1rem 0.3rem; }
table { border-collapse: collapse; overflow-wrap: normal; }
td, th { padding: 0.25rem 0.75rem 0.25rem 0; text-align: left; vertical-align: bottom; }
"""


def html_report(report: QualityReport) -> str:
    """The report as HTML."""
    languages = f", {report.languages[0]} to {report.languages[1]}" if report.languages else ""
    share = report.rejected / max(1, report.pairs)
    files = escape(", ".join(report.files))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="content-security-policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Data report: {files}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>Data report</h1>
<p class="dim">{files}{escape(languages)}</p>
<ul class="total">
<li><b>{report.pairs:,}</b> pairs</li>
<li><b>{report.rejected:,}</b> would be dropped ({share:.1%})</li>
<li><b>{report.pairs - report.rejected:,}</b> would be kept</li>
</ul>
<h2>What to do</h2>
<ul>{"".join(f"<li>{_step(step)}</li>" for step in report.next_steps)}</ul>
<h2>What was found</h2>
{"".join(_finding(finding, finding is report.findings[0]) for finding in report.findings) or "<p>Nothing.</p>"}
{_held_out(report.held_out)}
<h2>Lengths</h2>
<div class="plots">{"".join(map(_plot, report.histograms))}</div>
{_not_applied(report)}
</main>
</body>
</html>
"""


def _step(step: str) -> str:
    command, separator, explanation = step.partition("  ")
    if separator and command.startswith("regard "):
        return f"<code>{escape(command)}</code> {escape(explanation)}"
    return escape(step)


def _finding(finding: Finding, is_open: bool) -> str:
    action = "dropped by regard data clean" if finding.rejects else "only reported"
    width = max(0.3, 12 * finding.share)
    return f"""<details class="{"rejects" if finding.rejects else "reports"}"{" open" * is_open}>
<summary><b>{escape(finding.rule)}</b> {finding.count:,} ({finding.share:.2%})
<span class="share" style="width:{width:.2f}rem"></span><br>
<span class="dim">{escape(finding.meaning)}</span></summary>
<p>{escape(finding.advice)} <span class="dim">({action})</span></p>
{"".join(map(_example, finding.examples))}
</details>
"""


def _example(example: NoiseExample) -> str:
    explanation = (
        f"<dt>why</dt><dd>{escape(example.explanation)}</dd>" if example.explanation else ""
    )
    return (
        f"<dl><dt>pair {example.number:,}</dt><dd>{escape(_visible(example.source))}</dd>"
        f"<dd>{escape(_visible(example.target))}</dd>{explanation}</dl>"
    )


def _visible(text: str) -> str:
    """A text in which control characters are shown as escapes."""
    visible = "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text[:400]
    )
    return visible or "(empty)"


def _held_out(splits: list[HeldOutSplit]) -> str:
    if not splits:
        return ""
    rows = "".join(
        f"<tr><td>{escape(split.name)}</td><td>{split.overlap:,} of {split.sources:,}</td>"
        f"<td>{split.unknown_words:.1%}</td><td>{split.distance:.3f}</td></tr>"
        for split in splits
    )
    return (
        "<h2>Validation and test data</h2><table><tr><th>split</th><th>sources also in the training data</th>"
        f"<th>unknown words</th><th>vocabulary distance (0 to 1)</th></tr>{rows}</table>"
    )


def _plot(histogram: Histogram) -> str:
    """A histogram as an SVG."""
    highest = max(1, *histogram.counts)
    step = 300 / len(histogram.counts)
    bars, labels = [], []
    bounds = [f"{bound:g}" for bound in histogram.bounds]
    for number, count in enumerate(histogram.counts):
        height = 90 * count / highest
        is_last = number == len(bounds) - 1
        title = (
            f"{bounds[number]} or more" if is_last else f"{bounds[number]} to {bounds[number + 1]}"
        )
        bars.append(
            f'<rect x="{number * step + 1:.1f}" y="{95 - height:.1f}" width="{step - 2:.1f}" '
            f'height="{height:.1f}"><title>{title}: {count:,}</title></rect>'
        )
        if is_last:
            labels.append(f'<text x="299" y="107" text-anchor="end">{bounds[number]}</text>')
        elif number % 3 == 0 and number < len(bounds) - 2:
            labels.append(f'<text x="{number * step + 1:.1f}" y="107">{bounds[number]}</text>')
    return (
        f'<figure><svg viewBox="0 0 300 112" role="img" aria-label="{escape(histogram.name)}">'
        f"{''.join(bars)}{''.join(labels)}</svg><figcaption>{escape(histogram.name)}</figcaption></figure>"
    )


def _not_applied(report: QualityReport) -> str:
    items = [
        f"<b>{escape(rule)}</b>: {escape(reason)}" for rule, reason in report.not_applied.items()
    ]
    items += map(escape, report.skipped_lines)
    if not items:
        return ""
    return f"<h2>Not checked</h2><ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"
