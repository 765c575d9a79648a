"""The results of an experiment: scores of all training runs, means over seeds, differences, effects and verdicts.

``results.json`` has the design, the training runs and the summary, so it can be read without the run folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from regard import __version__
from regard.errors import RegardError
from regard.experiments.jobs import split_pairs
from regard.metrics import MODEL_METRICS, compare
from regard.metrics.base import SIGNIFICANCE_LEVEL
from regard.storage.atomic_files import write_text

if TYPE_CHECKING:
    from regard.experiments.experiment import Design, Factor, TrainingJob, Variant

# ---------------------------------------------------------------------------------------------
# Statistics: Student's t for means over seeds, and for differences between such means


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


# ---------------------------------------------------------------------------------------------
# Summary of an experiment


RESULTS = "results.json"


@dataclass(frozen=True)
class TrainingResult:
    """One training run, scored with the decoding options of one variant."""

    variant: str
    seed: int
    score: float | None
    """None: training diverged"""
    run: str
    """name of the run folder"""
    details: Mapping[str, Any] = field(default_factory=dict)
    """loss, steps, seconds, parameters, hardware, curve; or diverged, with the message"""


@dataclass(frozen=True)
class VariantSummary:
    """One row of the table."""

    name: str
    seeds: int
    diverged: int
    mean: Estimate | None
    difference: Estimate | None
    """from the baseline, over seeds; None for the baseline itself"""
    paired_p: float | None
    """paired bootstrap test on the same sentences, the outputs of all common seeds together"""
    verdict: str
    loss: float | None
    seconds: float | None
    parameters: int | None


@dataclass(frozen=True)
class EffectSummary:
    """What one value of a factor changes in a grid, on average over all values of the other factors."""

    level: str
    baseline: str
    difference: Estimate
    smallest: float
    largest: float
    """of the differences at single values of the other factors"""
    verdict: str


@dataclass(frozen=True)
class ExperimentSummary:
    """All that is computed from the training runs."""

    variants: list[VariantSummary]
    effects: list[EffectSummary]
    deviation: float | None
    """standard deviation between seeds, pooled over the variants"""
    detectable: float | None
    """the smallest significant difference of two variants with that deviation"""


def collect(
    jobs: Sequence[TrainingJob], scores_by_job: Mapping[str, Mapping[str, Any]]
) -> list[TrainingResult]:
    """The results of finished training runs. scores_by_job: the contents of scores.json by the name of the job."""
    results = []
    for job in jobs:
        if job.name not in scores_by_job:
            continue
        details = dict(scores_by_job[job.name])
        scores = details.pop("scores", {})
        for variant in job.variants:
            variant_scores = scores.get(variant, {})
            extra = {name: value for name, value in variant_scores.items() if name != "score"}
            result = TrainingResult(
                variant, job.seed, variant_scores.get("score"), job.name, details | extra
            )
            results.append(result)
    return results


def summarize_experiment(
    design: Design, results: Sequence[TrainingResult], paired: Mapping[str, float]
) -> ExperimentSummary:
    """Means, differences and effects. ``paired``: p-values of the paired tests by variant."""
    scores = {
        variant.name: [
            result
            for result in results
            if result.variant == variant.name and result.score is not None
        ]
        for variant in design.variants
    }
    values = [_values(variant_results) for variant_results in scores.values() if variant_results]
    rows = [_row(design, variant, results, scores, paired) for variant in design.variants]
    deviation, freedom = pooled_deviation(values)
    detectable = None
    if freedom:
        count = max(map(len, values))
        detectable = student_t(freedom) * deviation * (2 / count) ** 0.5
    effects = list(_effects(design, scores)) if len(design.factors) > 1 else []
    return ExperimentSummary(rows, effects, deviation if freedom else None, detectable)


def _values(results: Sequence[TrainingResult]) -> list[float]:
    return [result.score for result in results if result.score is not None]


def _difference(
    ours: Sequence[TrainingResult], theirs: Sequence[TrainingResult], weight: float = 1.0
) -> list[tuple[float, Sequence[float]]]:
    """The groups of a contrast. Variants that share their training runs are compared seed by seed."""
    by_run = {result.run: result for result in theirs}
    shared = [(result, by_run[result.run]) for result in ours if result.run in by_run]
    if shared:
        return [(weight, [a - b for a, b in (_values(pair) for pair in shared)])]
    return [(weight, _values(ours)), (-weight, _values(theirs))]


def _row(
    design: Design,
    variant: Variant,
    results: Sequence[TrainingResult],
    scores: Mapping[str, list[TrainingResult]],
    paired: Mapping[str, float],
) -> VariantSummary:
    variant_results = [result for result in results if result.variant == variant.name]
    values, base = scores[variant.name], scores[design.baseline.name]
    diverged = sum(result.score is None for result in variant_results)
    difference = None
    if variant != design.baseline and values and base:
        difference = contrast(_difference(values, base))
    p = paired.get(variant.name)
    return VariantSummary(
        name=variant.name,
        seeds=len(variant_results),
        diverged=diverged,
        mean=mean_over_seeds(_values(values)) if values else None,
        difference=difference,
        paired_p=p,
        verdict=_verdict(design, variant.name, difference, p, diverged, len(variant_results)),
        loss=_mean_of(variant_results, "loss"),
        seconds=_mean_of(variant_results, "seconds"),
        parameters=next((result.details.get("parameters") for result in variant_results), None),
    )


def _mean_of(results: Sequence[TrainingResult], key: str) -> float | None:
    values = [result.details[key] for result in results if result.details.get(key) is not None]
    return fmean(values) if values else None


def _effects(design: Design, scores: Mapping[str, list[TrainingResult]]) -> Iterator[EffectSummary]:
    """The main effects of a grid; cells that are not trained yet are left out, with their counterparts."""
    cells = {variant.levels: scores[variant.name] for variant in design.variants if variant.levels}
    for position, factor in enumerate(design.factors):
        for index in range(1, len(factor.levels)):
            effect = _effect(design, cells, factor, position, index)
            if effect is not None:
                yield effect


def _effect(
    design: Design,
    cells: Mapping[tuple[int, ...], list[TrainingResult]],
    factor: Factor,
    position: int,
    index: int,
) -> EffectSummary | None:
    matched = []
    for levels, values in cells.items():
        other = cells.get((*levels[:position], 0, *levels[position + 1 :]), [])
        if levels[position] == index and values and other:
            matched.append((values, other))
    if not matched:
        return None
    weight = 1 / len(matched)
    groups: list[tuple[float, Sequence[float]]] = []
    for values, other in matched:
        groups += _difference(values, other, weight)
    difference = contrast(groups)
    differences = [fmean(_values(values)) - fmean(_values(other)) for values, other in matched]
    label, baseline = factor.levels[index].label, factor.levels[0].label
    verdict = _verdict(design, label, difference, None, 0, 0)
    return EffectSummary(label, baseline, difference, min(differences), max(differences), verdict)


# ---------------------------------------------------------------------------------------------
# Verdicts: words with numbers


def _verdict(
    design: Design,
    name: str,
    difference: Estimate | None,
    paired_p: float | None,
    diverged: int,
    seeds: int,
) -> str:
    """One sentence for a variant; empty for the baseline and for variants without scores."""
    if diverged:
        return f"{name}: {diverged} of {seeds} training runs diverged"
    if difference is None:
        return ""
    return describe_difference(
        name, difference, design.metric.display_name, design.metric.higher_is_better, paired_p
    )


def describe_difference(
    name: str,
    difference: Estimate,
    metric: str,
    higher_is_better: bool = True,
    paired_p: float | None = None,
    decimals: int = 1,
) -> str:
    """A difference in words.

    For example "pre +1.2 BLEU (0.4 to 2.0)", or "pre: no difference beyond 0.6 BLEU (+0.2, -0.2 to 0.6)".
    """
    value, bound = round(difference.value, decimals) + 0.0, difference.bound  # never -0.0
    word = "" if higher_is_better else f", {'better' if value < 0 else 'worse'}"
    shown = f"{value:+.{decimals}f}"
    if bound is None:
        test = "" if paired_p is None else f", paired bootstrap p = {paired_p:.3f}"
        if paired_p is not None and paired_p >= SIGNIFICANCE_LEVEL:
            return f"{name}: no significant difference ({shown} {metric}, one seed{test})"
        return f"{name} {shown} {metric}{word} (one seed, so no interval{test})"
    interval = f"{difference.low:.{decimals}f} to {difference.high:.{decimals}f}"
    if difference.significant:
        return f"{name} {shown} {metric}{word} ({interval})"
    return f"{name}: no difference beyond {bound:.{decimals}f} {metric} ({shown}, {interval})"


# ---------------------------------------------------------------------------------------------
# Paired tests


def paired_tests(design: Design, results: Sequence[TrainingResult], runs: Path) -> dict[str, float]:
    """The p-value of each variant against the baseline: paired bootstrap on the outputs of all common seeds."""
    recipe = design.recipe(design.baseline, design.seeds[0])
    if recipe.text_only or design.metric.name in MODEL_METRICS:
        return {}
    pairs = split_pairs(recipe, design.split)
    outputs = {
        (result.variant, result.seed): _read_outputs(runs / result.run / result.details["outputs"])
        for result in results
        if result.score is not None and result.details.get("outputs")
    }
    comparisons = {}
    for variant in design.variants[1:]:
        seeds = [
            seed
            for seed in design.seeds
            if {(variant.name, seed), (design.baseline.name, seed)} <= outputs.keys()
        ]
        if not seeds:
            continue
        ours = [line for seed in seeds for line in outputs[variant.name, seed]]
        theirs = [line for seed in seeds for line in outputs[design.baseline.name, seed]]
        targets = [pair.target for pair in pairs] * len(seeds)
        sources = [pair.source for pair in pairs] * len(seeds)
        tokenize = recipe.evaluation.tokenize
        (test,) = compare([design.metric.name], ours, theirs, targets, sources, tokenize=tokenize)
        comparisons[variant.name] = test.p_value
    return comparisons


def _read_outputs(file: Path) -> list[str]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


# ---------------------------------------------------------------------------------------------
# results.json


def design_to_json(design: Design) -> dict[str, Any]:
    """What ``results.json`` stores about the design."""
    recipe = design.recipe(design.baseline, design.seeds[0])
    metric = design.metric
    return {
        "base": design.base,
        "changes": list(design.changes),
        "factors": {
            factor.name: [list(level.changes) for level in factor.levels]
            for factor in design.factors
        },
        "variants": [
            {"name": variant.name, "changes": list(variant.changes), "levels": list(variant.levels)}
            for variant in design.variants
        ],
        "seeds": list(design.seeds),
        "split": design.split,
        "metric": {
            "metric": metric.name,
            "name": metric.display_name,
            "higher_is_better": metric.higher_is_better,
        },
        "recipe": json.loads(recipe.model_dump_json()),
    }


def to_json(
    design: Design,
    results: Sequence[TrainingResult],
    summary: ExperimentSummary,
    planned: int,
    command: str,
) -> dict[str, Any]:
    return {
        "regard": __version__,
        "command": command,
        **design_to_json(design),
        "planned_trainings": planned,
        "trainings": [asdict(result) for result in results],
        "summary": asdict(summary),
    }


def write_results(out: Path, content: Mapping[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / RESULTS, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_results(out: Path) -> dict[str, Any]:
    """The contents of results.json of an experiment."""
    file = out / RESULTS
    if not file.is_file():
        raise RegardError(f"{out}: no experiment (no {RESULTS}); regard experiment creates one")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        missing = [
            key
            for key in ("variants", "planned_trainings", "trainings", "summary")
            if key not in content
        ]
    except (ValueError, TypeError, RecursionError):
        missing = ["results"]
    if missing or not isinstance(content, dict):
        raise RegardError(f"{file}: damaged, it has no {' and no '.join(missing)}")
    return content


def estimate_of(values: Mapping[str, Any] | None) -> Estimate | None:
    """An estimate from results.json."""
    return None if values is None else Estimate(**values)


def number_of_runs(content: Mapping[str, Any]) -> tuple[int, int]:
    """The number of finished training runs, and of all that are planned; several variants can share one."""
    return len({run["run"] for run in content["trainings"]}), content["planned_trainings"]
