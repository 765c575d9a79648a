"""Which measure is computed where, and what all of them ask of their input."""

from collections.abc import Sequence
from typing import get_args

from regard.errors import RegardError
from regard.recipe import Measure, nearest
from regard.score import sacre, words
from regard.score.counted import Counted
from regard.score.labels import LABELS
from regard.score.likelihood import LIKELIHOODS
from regard.score.result import Comparison, Result
from regard.score.rouge import ROUGE

COUNTED: dict[Measure, Counted] = {one.measure: one for one in (*ROUGE, *LABELS)}
NOT_OF_TEXT = {one.measure for one in LIKELIHOODS}
"""measures that a model computes by itself"""


def score(
    measures: Sequence[Measure],
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
        COUNTED[measure].result(hypotheses, references, intervals)
        if measure in COUNTED
        else words.result(measure, hypotheses, references, sources, intervals)
        if measure in words.NAMES
        else sacre.result(measure, hypotheses, references, tokenize, intervals)
        for measure in measures
    ]


def compare(
    measures: Sequence[Measure],
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
        COUNTED[measure].comparison(system, baseline, references)
        if measure in COUNTED
        else words.comparison(measure, system, baseline, references, sources)
        if measure in words.NAMES
        else sacre.comparison(measure, system, baseline, references, tokenize)
        for measure in measures
    ]


def _check(measures: Sequence[Measure], lines: dict[str, Sequence[str]]) -> None:
    for measure in measures:
        if measure not in get_args(Measure):
            raise RegardError(f"unknown measure {measure}{nearest(measure, get_args(Measure))}")
        if measure in NOT_OF_TEXT:
            raise RegardError(f"{measure} cannot be had of texts, only of a model")
    counts = {name: len(some) for name, some in lines.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise RegardError(f"scoring needs as many lines of each: there are {told}")
    if not all(counts.values()):
        raise RegardError("there is nothing to score: no lines")
