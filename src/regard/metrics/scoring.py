"""Which measure is computed where, and what all of them ask of their input."""

from collections.abc import Sequence

from regard.errors import RegardError
from regard.metrics import error_rates, sacrebleu
from regard.metrics.base import Comparison, CountMetric, Result
from regard.metrics.labels import LABELS
from regard.metrics.perplexity import LIKELIHOODS
from regard.metrics.rouge import ROUGE
from regard.recipe import Registry, suggest

COUNT_METRICS: dict[str, CountMetric] = {one.measure: one for one in (*ROUGE, *LABELS)}
MODEL_METRICS = {one.measure for one in LIKELIHOODS}
"""measures that a model computes by itself"""

TEXT_METRICS = (*sacrebleu.NAMES, *error_rates.NAMES, *(one.measure for one in ROUGE))
"""metrics of texts against reference texts"""

METRICS: Registry[str] = Registry("evaluation.metrics")
for _name, _title in [
    *sacrebleu.NAMES.items(),
    *error_rates.NAMES.items(),
    *((one.measure, one.name) for one in (*ROUGE, *LABELS, *LIKELIHOODS)),
]:
    METRICS.register(_name, summary=_title)(_title)


def score(
    measures: Sequence[str],
    hypotheses: Sequence[str],
    references: Sequence[str],
    sources: Sequence[str],
    *,
    tokenize: str = "13a",
    intervals: bool = True,
) -> list[Result]:
    """Score line by line against the references; ``intervals=False`` is quicker, for validation.

    ``tokenize`` is BLEU's; the sources tell ``wer`` and ``per`` which lines are one word.
    """
    lines = {"hypotheses": hypotheses, "references": references, "sources": sources}
    _check(measures, lines)
    return [
        COUNT_METRICS[measure].result(hypotheses, references, intervals)
        if measure in COUNT_METRICS
        else error_rates.result(measure, hypotheses, references, sources, intervals)
        if measure in error_rates.NAMES
        else sacrebleu.result(measure, hypotheses, references, tokenize, intervals)
        for measure in measures
    ]


def compare(
    measures: Sequence[str],
    system: Sequence[str],
    baseline: Sequence[str],
    references: Sequence[str],
    sources: Sequence[str],
    *,
    tokenize: str = "13a",
) -> list[Comparison]:
    """Is the system better than the baseline, or could the difference be chance?

    Paired bootstrap resampling (Koehn, 2004): both are scored on the same resampled sentences.
    """
    lines = {"system": system, "baseline": baseline}
    _check(measures, {**lines, "references": references, "sources": sources})
    return [
        COUNT_METRICS[measure].comparison(system, baseline, references)
        if measure in COUNT_METRICS
        else error_rates.comparison(measure, system, baseline, references, sources)
        if measure in error_rates.NAMES
        else sacrebleu.comparison(measure, system, baseline, references, tokenize)
        for measure in measures
    ]


def _check(measures: Sequence[str], lines: dict[str, Sequence[str]]) -> None:
    for measure in measures:
        if measure not in METRICS:
            raise RegardError(f"unknown measure {measure}{suggest(measure, list(METRICS))}")
        if measure in MODEL_METRICS:
            raise RegardError(f"{measure} cannot be had of texts, only of a model")
    counts = {name: len(some) for name, some in lines.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise RegardError(f"scoring needs as many lines of each: there are {told}")
    if not all(counts.values()):
        raise RegardError("there is nothing to score: no lines")
