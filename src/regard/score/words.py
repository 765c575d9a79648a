"""Word and phoneme error rate, for models that turn a word into its sounds.

A word may have several right pronunciations: the lines that share a source are one word, counted
once, and their references are its pronunciations. Its hypothesis is the one of its first line.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from regard.recipe import Measure
from regard.score.result import Comparison, Result
from regard.version import __version__

NAMES: dict[Measure, str] = {"wer": "WER", "per": "PER"}
RESAMPLES = 1000
SEED = 12345
"""sacreBLEU's own"""

Counts = npt.NDArray[np.float64]
"""one line a word: errors, and out of how many"""
Symbols = list[str]


@dataclass(frozen=True)
class Word:
    hypothesis: Symbols
    references: list[Symbols]


def result(
    measure: Measure,
    hypotheses: Sequence[str],
    references: Sequence[str],
    sources: Sequence[str],
    interval: bool,
) -> Result:
    counts = _counts(measure, _words(hypotheses, references, sources))
    low = high = None
    if interval:
        low, high = np.percentile(_resampled([counts])[0], [2.5, 97.5]).tolist()
    return Result(
        measure=measure,
        name=NAMES[measure],
        value=_rate(counts),
        low=low,
        high=high,
        signature=_signature(measure, len(counts), interval),
        higher_is_better=False,
    )


def comparison(
    measure: Measure,
    system: Sequence[str],
    baseline: Sequence[str],
    references: Sequence[str],
    sources: Sequence[str],
) -> Comparison:
    both = [_counts(measure, _words(lines, references, sources)) for lines in (system, baseline)]
    rates = [_rate(counts) for counts in both]
    return Comparison(
        measure=measure,
        name=NAMES[measure],
        system=rates[0],
        baseline=rates[1],
        p_value=_p_value(abs(rates[0] - rates[1]), *_resampled(both)),
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


def _counts(measure: Measure, words: Sequence[Word]) -> Counts:
    errors = _word_errors if measure == "wer" else _phoneme_errors
    return np.array([errors(word) for word in words], dtype=np.float64)


def _word_errors(word: Word) -> tuple[int, int]:
    """The line is right as a whole, by any reference, or it is wrong."""
    return int(word.hypothesis not in word.references), 1


def _phoneme_errors(word: Word) -> tuple[int, int]:
    """Distance to the nearest reference, and its length."""
    # Of equally near ones the longest, so that the order of the lines does not matter.
    distance, negative_length = min(
        (edit_distance(word.hypothesis, reference), -len(reference))
        for reference in word.references
    )
    return distance, -negative_length


def _rate(counts: Counts) -> float:
    errors, total = counts.sum(axis=0).tolist()
    return float(100 * errors / max(total, 1))


def _resampled(systems: Sequence[Counts]) -> list[npt.NDArray[np.float64]]:
    """The rates of each system on the same random draws of words."""
    chance = np.random.default_rng(SEED)
    words = len(systems[0])
    draws = (chance.integers(words, size=words) for _ in range(RESAMPLES))
    rates = [[_rate(counts[drawn]) for counts in systems] for drawn in draws]
    return list(np.array(rates).T)


def _p_value(
    difference: float, system: npt.NDArray[np.float64], baseline: npt.NDArray[np.float64]
) -> float:
    """The share of draws that stray from their mean by more than the difference, as sacreBLEU's."""
    if difference == 0:
        return 1.0  # no draw differs by less
    differences = np.abs(system - baseline)
    strayed = int(np.sum(differences - differences.mean() > difference))
    return (strayed + 1) / (len(differences) + 1)


def _signature(measure: Measure, words: int, resampled: bool) -> str:
    parts = {
        "words": words,
        **({"bs": RESAMPLES, "seed": SEED} if resampled else {}),
        "case": "mixed",
        "refs": "any" if measure == "wer" else "nearest",
        "unit": "line" if measure == "wer" else "symbol",
        "regard": __version__,
    }
    return "|".join(f"{key}:{value}" for key, value in parts.items())
