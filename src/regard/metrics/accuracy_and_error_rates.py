"""Accuracy and macro F1 of labels; word and phoneme error rate (WER, PER)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from regard.metrics.base import (
    CountFunction,
    CountMetric,
    Lines,
    check_same_length,
    count_each_line,
    register_metric,
)
from regard.metrics.bootstrap import Counts, Floats, percentage

# ---------------------------------------------------------------------------------------------
# Word and phoneme error rate, for models that turn a word into its pronunciation
#
# A word may have several correct pronunciations. Lines with the same source are one word, counted once, and their
# references are its pronunciations. The hypothesis is that of its first line.

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


# ---------------------------------------------------------------------------------------------
# Accuracy and macro F1: predicted labels against reference labels, one or several per line, separated by spaces.
#
# accuracy  the percentage of labels that are correct
# macro F1  F1 = 2 P R / (P + R) of each label that occurs in the references; the mean over the labels, times 100


def _count_correct(hypothesis: str, reference: str) -> tuple[int, int]:
    predicted, expected = hypothesis.split(), reference.split()
    check_same_length(predicted, expected)
    return sum(one == other for one, other in zip(predicted, expected, strict=True)), len(expected)


def _count_by_label(systems: Sequence[Lines], references: Lines, sources: Lines) -> list[Counts]:
    """For each line and each label of the references: how often it is correct, predicted, and expected."""
    columns = {label: n for n, label in enumerate(sorted(set(" ".join(references).split())))}
    all_counts = []
    for lines in systems:
        counts = np.zeros((len(lines), len(columns), 3))
        for row, (line, reference) in enumerate(zip(lines, references, strict=True)):
            predicted, expected = line.split(), reference.split()
            check_same_length(predicted, expected)
            for one, other in zip(predicted, expected, strict=True):
                counts[row, columns[other], 2] += 1
                if one in columns:
                    counts[row, columns[one], 1] += 1
                counts[row, columns[other], 0] += one == other
        all_counts.append(counts.reshape(len(lines), -1))
    return all_counts


def macro_f1(sums: Floats) -> float:
    """2 correct / (predicted + expected), which is 2 P R / (P + R). Labels missing from a resample are skipped."""
    correct, predicted, expected = sums.reshape(-1, 3).T
    present = predicted + expected > 0
    return float(100 * np.mean(2 * correct[present] / (predicted + expected)[present]))


ACCURACY = register_metric(
    CountMetric(
        "accuracy",
        "accuracy",
        count_each_line(_count_correct),
        percentage,
        signature="unit:label",
        scored_on="labels",
    )
)
MACRO_F1 = register_metric(
    CountMetric(
        "f1",
        "macro F1",
        _count_by_label,
        macro_f1,
        signature="unit:label|mean:labels",
        scored_on="labels",
    )
)
