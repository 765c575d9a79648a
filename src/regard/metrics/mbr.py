"""Minimum Bayes risk (MBR): choose the text that is most similar, by chrF (Popović 2015), to all other samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ORDER = 6
"""character n-grams of up to this length; whitespace is ignored"""
BETA = 2
"""recall weighs BETA times as much as precision"""

Floats = npt.NDArray[np.float64]


def mbr_rank(texts: Sequence[str]) -> list[tuple[int, float]]:
    """The distinct texts by expected chrF, best first: the index where each occurs first, and its mean chrF.

    A text that occurs k times counts k times as a reference: the mean is the expected chrF against a random sample.
    """
    counts = Counter(texts)
    means = pairwise_chrf(list(counts)) @ np.array(list(counts.values())) / len(texts)
    ranked = [(texts.index(text), float(mean)) for text, mean in zip(counts, means, strict=True)]
    return sorted(ranked, key=lambda ranking: -ranking[1])


def pairwise_chrf(texts: Sequence[str]) -> Floats:
    """[hypothesis, reference]: the sentence chrF of every pair of texts, as in sacreBLEU, but from 0 to 1."""
    letters = ["".join(text.split()) for text in texts]
    precision, recall, orders = np.zeros((3, len(texts), len(texts)))
    for n in range(1, ORDER + 1):
        counts = _count_ngrams(letters, n)
        total = counts.sum(1, dtype=np.float64)
        matches = np.stack(
            [np.minimum(ngrams, counts).sum(1, dtype=np.float64) for ngrams in counts]
        )
        comparable = (total[:, None] > 0) & (total[None] > 0)
        precision += matches / np.maximum(total, 1)[:, None]
        recall += matches / np.maximum(total, 1)[None]
        orders += comparable
    precision, recall = precision / np.maximum(orders, 1), recall / np.maximum(orders, 1)
    denominator = BETA**2 * precision + recall
    numerator = (1 + BETA**2) * precision * recall
    return np.asarray(numerator / np.where(denominator > 0, denominator, 1))


def _count_ngrams(texts: Sequence[str], n: int) -> npt.NDArray[np.int32]:
    """[text, n-gram]"""
    ngrams = [Counter(text[i : i + n] for i in range(len(text) - n + 1)) for text in texts]
    columns = {
        ngram: column
        for column, ngram in enumerate(dict.fromkeys(g for counter in ngrams for g in counter))
    }
    counts = np.zeros((len(texts), max(1, len(columns))), dtype=np.int32)
    for row, counter in enumerate(ngrams):
        counts[row, [columns[ngram] for ngram in counter]] = list(counter.values())
    return counts
