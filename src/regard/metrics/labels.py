"""Accuracy and macro F1: labels against labels, one or several a line, blanks between them.

accuracy  the share of labels that are right, times 100
macro F1  for each label that stands in the references, F1 = 2 P R / (P + R); their mean, times 100
"""

from collections.abc import Sequence

import numpy as np

from regard.metrics.base import CountMetric, Lines, each_line, same_number
from regard.metrics.bootstrap import Counts, Floats, percentage


def _right(hypothesis: str, reference: str) -> tuple[int, int]:
    said, wanted = hypothesis.split(), reference.split()
    same_number(said, wanted)
    return sum(one == other for one, other in zip(said, wanted, strict=True)), len(wanted)


def _confusions(systems: Sequence[Lines], references: Lines) -> list[Counts]:
    """For each line and each label of the references: how often it is right, said, and wanted."""
    labels = {label: place for place, label in enumerate(sorted(set(" ".join(references).split())))}
    found = []
    for lines in systems:
        counts = np.zeros((len(lines), len(labels), 3))
        for row, (line, reference) in enumerate(zip(lines, references, strict=True)):
            said, wanted = line.split(), reference.split()
            same_number(said, wanted)
            for one, other in zip(said, wanted, strict=True):
                counts[row, labels[other], 2] += 1
                if one in labels:
                    counts[row, labels[one], 1] += 1
                counts[row, labels[other], 0] += one == other
        found.append(counts.reshape(len(lines), -1))
    return found


def macro_f1(sums: Floats) -> float:
    """2 right / (said + wanted) is 2 P R / (P + R). A draw without a label leaves it out."""
    right, said, wanted = sums.reshape(-1, 3).T
    there = said + wanted > 0
    return float(100 * np.mean(2 * right[there] / (said + wanted)[there]))


ACCURACY = CountMetric("accuracy", "accuracy", each_line(_right), percentage, "unit:label")
LABELS = (
    ACCURACY,
    CountMetric("f1", "macro F1", _confusions, macro_f1, "unit:label|mean:labels"),
)
