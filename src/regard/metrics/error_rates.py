"""Word and phoneme error rate (WER, PER), for models that turn a word into its pronunciation.

A word may have several correct pronunciations. Lines with the same source are one word, counted once, and their
references are its pronunciations. The hypothesis is that of its first line.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from regard.metrics.base import CountFunction, CountMetric, Lines, register_metric
from regard.metrics.bootstrap import Counts, percentage

Symbols = list[str]


@dataclass(frozen=True)
class Word:
    hypothesis: Symbols
    references: list[Symbols]


def edit_distance(one: Symbols, other: Symbols) -> int:
    """The number of symbols to insert, delete or replace to turn one sequence into the other (Levenshtein)."""
    previous = list(range(len(other) + 1))
    for row, symbol in enumerate(one, start=1):
        current = [row]
        for column, other_symbol in enumerate(other, start=1):
            replaced = previous[column - 1] + (symbol != other_symbol)
            current.append(min(replaced, previous[column] + 1, current[-1] + 1))
        previous = current
    return previous[-1]


def _word_errors(word: Word) -> tuple[int, int]:
    """1 if the hypothesis equals none of the references, out of 1."""
    return int(word.hypothesis not in word.references), 1


def _phoneme_errors(word: Word) -> tuple[int, int]:
    """The edit distance to the nearest reference, and the length of that reference."""
    # Of equally near references the longest, so that the order of the lines does not matter.
    distance, negative_length = min(
        (edit_distance(word.hypothesis, reference), -len(reference))
        for reference in word.references
    )
    return distance, -negative_length


def _group_by_source(hypotheses: Lines, references: Lines, sources: Lines) -> list[Word]:
    """The distinct sources, each with all its references; symbols are separated by spaces."""
    words: dict[str, Word] = {}
    for hypothesis, reference, source in zip(hypotheses, references, sources, strict=True):
        word = words.setdefault(source, Word(hypothesis.split(), []))
        word.references.append(reference.split())
    return list(words.values())


def _count_each_word(errors: Callable[[Word], tuple[int, int]]) -> CountFunction:
    def count(systems: Sequence[Lines], references: Lines, sources: Lines) -> list[Counts]:
        return [
            np.array(
                [errors(word) for word in _group_by_source(lines, references, sources)],
                dtype=np.float64,
            )
            for lines in systems
        ]

    return count


WORD_ERROR_RATE = register_metric(
    CountMetric(
        "wer",
        "WER",
        _count_each_word(_word_errors),
        percentage,
        signature="case:mixed|refs:any|unit:line",
        higher_is_better=False,
        row_name="words",
    )
)
PHONEME_ERROR_RATE = register_metric(
    CountMetric(
        "per",
        "PER",
        _count_each_word(_phoneme_errors),
        percentage,
        signature="case:mixed|refs:nearest|unit:symbol",
        higher_is_better=False,
        row_name="words",
    )
)
