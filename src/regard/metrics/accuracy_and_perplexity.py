"""Accuracy and macro F1 of labels; perplexity.

Predicted labels are compared with reference labels, one or several per line, separated by spaces:

accuracy  the percentage of labels that are correct
macro F1  F1 = 2 P R / (P + R) of each label that occurs in the references; the mean over the labels, times 100

Perplexity is exp of the mean negative log-probability of the tokens, or of the words. It cannot be computed from output
texts. The model provides the counts: for each line the sum of the negative log-probabilities, and the number of tokens
or words.
"""

import math
from collections.abc import Sequence

import numpy as np

from regard.errors import RegardError
from regard.metrics.base import (
    CountMetric,
    Lines,
    check_same_length,
    count_each_line,
    register_metric,
)
from regard.metrics.bootstrap import Counts, Floats, percentage


def _count_correct(hypothesis: str, reference: str) -> tuple[int, int]:
    predicted, expected = hypothesis.split(), reference.split()
    check_same_length(predicted, expected)
    return sum(
        predicted_label == expected_label
        for predicted_label, expected_label in zip(predicted, expected, strict=True)
    ), len(expected)


def _count_by_label(systems: Sequence[Lines], references: Lines, sources: Lines) -> list[Counts]:
    """For each line and each label of the references: how often it is correct, predicted, and expected."""
    columns = {label: n for n, label in enumerate(sorted(set(" ".join(references).split())))}
    all_counts = []
    for lines in systems:
        counts = np.zeros((len(lines), len(columns), 3))
        for row, (line, reference) in enumerate(zip(lines, references, strict=True)):
            predicted, expected = line.split(), reference.split()
            check_same_length(predicted, expected)
            for predicted_label, expected_label in zip(predicted, expected, strict=True):
                counts[row, columns[expected_label], 2] += 1
                if predicted_label in columns:
                    counts[row, columns[predicted_label], 1] += 1
                counts[row, columns[expected_label], 0] += predicted_label == expected_label
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


MAX_EXPONENT = 700.0
"""exp of more overflows a float"""


def _perplexity(sums: Floats) -> float:
    total, count = sums.tolist()
    return math.exp(min(total / count, MAX_EXPONENT))


def _no_counts(systems: Sequence[Lines], references: Lines, sources: Lines) -> list[Counts]:
    raise RegardError("perplexity cannot be computed from texts, only by a model")


TOKEN_PERPLEXITY = register_metric(
    CountMetric(
        "perplexity",
        "perplexity per token",
        _no_counts,
        _perplexity,
        signature="unit:token",
        higher_is_better=False,
        scored_on="model",
    )
)
WORD_PERPLEXITY = register_metric(
    CountMetric(
        "word_perplexity",
        "perplexity per word",
        _no_counts,
        _perplexity,
        signature="unit:word",
        higher_is_better=False,
        scored_on="model",
    )
)
