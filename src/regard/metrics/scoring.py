"""Scores texts by the names of metrics."""

from collections.abc import Mapping, Sequence

from regard.errors import RegardError
from regard.metrics.base import METRICS as METRICS, Comparison, Lines, MetricResult
from regard.recipe import suggest

# Importing these modules registers their metrics. The order is that of lists of metrics.
# isort: off
from regard.metrics import sacrebleu, error_rates, rouge, labels, perplexity  # noqa: F401
# isort: on

MODEL_METRICS = {name for name, metric in METRICS.items() if metric.scored_on == "model"}
"""metrics that only a model can compute, not from texts"""

TEXT_METRICS = tuple(name for name, metric in METRICS.items() if metric.scored_on == "text")
"""metrics of output texts against reference texts"""


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
        if name in MODEL_METRICS:
            raise RegardError(f"{name} cannot be computed from texts, only by a model")
    counts = {role: len(some) for role, some in lines.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} {role}" for role, count in counts.items())
        raise RegardError(f"scoring needs equal numbers of lines, but got {listed}")
    if not all(counts.values()):
        raise RegardError("nothing to score: there are no lines")
