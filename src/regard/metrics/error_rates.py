"""Word and phoneme error rate, for models that turn a word into its sounds.

A word may have several right pronunciations: the lines that share a source are one word, counted
once, and their references are its pronunciations. Its hypothesis is the one of its first line.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from regard import __version__
from regard.metrics.base import Comparison, Result
from regard.metrics.bootstrap import RESAMPLES, SEED, Counts, interval, p_value, percentage

NAMES: dict[str, str] = {"wer": "WER", "per": "PER"}
Symbols = list[str]


@dataclass(frozen=True)
class Word:
    hypothesis: Symbols
    references: list[Symbols]


def result(
    measure: str,
    hypotheses: Sequence[str],
    references: Sequence[str],
    sources: Sequence[str],
    intervals: bool,
) -> Result:
    counts = _counts(measure, _words(hypotheses, references, sources))
    low, high = interval(counts, percentage) if intervals else (None, None)
    return Result(
        measure=measure,
        name=NAMES[measure],
        value=percentage(counts.sum(axis=0)),
        low=low,
        high=high,
        signature=_signature(measure, len(counts), intervals),
        higher_is_better=False,
    )


def comparison(
    measure: str,
    system: Sequence[str],
    baseline: Sequence[str],
    references: Sequence[str],
    sources: Sequence[str],
) -> Comparison:
    both = [_counts(measure, _words(lines, references, sources)) for lines in (system, baseline)]
    rates = [percentage(counts.sum(axis=0)) for counts in both]
    return Comparison(
        measure=measure,
        name=NAMES[measure],
        system=rates[0],
        baseline=rates[1],
        p_value=p_value(both[0], both[1], percentage),
        signature=_signature(measure, len(both[0]), resampled=True),
        higher_is_better=False,
    )


def edit_distance(one: Symbols, other: Symbols) -> int:
    """Fewest symbols to insert, delete or replace to turn one into the other (Levenshtein)."""
    previous = list(range(len(other) + 1))
    for row, symbol in enumerate(one, start=1):
        current = [row]
        for column, opposite in enumerate(other, start=1):
            replaced = previous[column - 1] + (symbol != opposite)
            current.append(min(replaced, previous[column] + 1, current[-1] + 1))
        previous = current
    return previous[-1]


def _words(
    hypotheses: Sequence[str], references: Sequence[str], sources: Sequence[str]
) -> list[Word]:
    """The distinct sources, each with all its references; symbols stand between spaces."""
    words: dict[str, Word] = {}
    for hypothesis, reference, source in zip(hypotheses, references, sources, strict=True):
        said, right = (line.split() for line in (hypothesis, reference))
        words.setdefault(source, Word(said, [])).references.append(right)
    return list(words.values())


def _counts(measure: str, words: Sequence[Word]) -> Counts:
    """For each word its errors, and out of how many."""
    errors = _word_errors if measure == "wer" else _phoneme_errors
    return np.array([errors(word) for word in words], dtype=np.float64)


def _word_errors(word: Word) -> tuple[int, int]:
    """The line is right as a whole, by any reference, or it is wrong."""
    return int(word.hypothesis not in word.references), 1


def _phoneme_errors(word: Word) -> tuple[int, int]:
    """Distance to the suggest reference, and its length."""
    # Of equally near ones the longest, so that the order of the lines does not matter.
    distance, negative_length = min(
        (edit_distance(word.hypothesis, reference), -len(reference))
        for reference in word.references
    )
    return distance, -negative_length


def _signature(measure: str, words: int, resampled: bool) -> str:
    parts = {
        "words": words,
        **({"bs": RESAMPLES, "seed": SEED} if resampled else {}),
        "case": "mixed",
        "refs": "any" if measure == "wer" else "suggest",
        "unit": "line" if measure == "wer" else "symbol",
        "regard": __version__,
    }
    return "|".join(f"{key}:{value}" for key, value in parts.items())
