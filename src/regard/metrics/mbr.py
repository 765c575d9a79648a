"""How alike texts are by chrF (Popović 2015), each with each: what minimum Bayes risk asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ORDER = 6
"""n-grams of up to so many letters; white space does not count"""
BETA = 2
"""recall counts BETA times as much as precision"""

Floats = npt.NDArray[np.float64]


def pairwise_chrf(texts: Sequence[str]) -> Floats:
    """[hypothesis, reference]: sentence chrF as sacreBLEU has it, from 0 to 1, of every two of the texts."""
    letters = ["".join(text.split()) for text in texts]
    precision, recall, orders = np.zeros((3, len(texts), len(texts)))
    for n in range(1, ORDER + 1):
        counts = _counts(letters, n)
        total = counts.sum(1, dtype=np.float64)
        matches = np.stack([np.minimum(own, counts).sum(1, dtype=np.float64) for own in counts])
        both = (total[:, None] > 0) & (total[None] > 0)
        precision += matches / np.maximum(total, 1)[:, None]
        recall += matches / np.maximum(total, 1)[None]
        orders += both
    precision, recall = precision / np.maximum(orders, 1), recall / np.maximum(orders, 1)
    below = BETA**2 * precision + recall
    return np.asarray((1 + BETA**2) * precision * recall / np.where(below > 0, below, 1))


def _counts(texts: Sequence[str], n: int) -> npt.NDArray[np.int32]:
    """[text, n-gram]"""
    grams = [Counter(text[i : i + n] for i in range(len(text) - n + 1)) for text in texts]
    places = {
        gram: place for place, gram in enumerate(dict.fromkeys(g for one in grams for g in one))
    }
    counts = np.zeros((len(texts), max(1, len(places))), dtype=np.int32)
    for row, one in enumerate(grams):
        counts[row, [places[gram] for gram in one]] = list(one.values())
    return counts


def mbr_rank(texts: Sequence[str]) -> list[tuple[int, float]]:
    """The different ones of the texts, by the place where each stands first, with its mean chrF; the best first.

    A text that comes often counts as often: the mean is the expected chrF, had a reference been drawn likewise.
    """
    often = Counter(texts)
    means = pairwise_chrf(list(often)) @ np.array(list(often.values())) / len(texts)
    found = [(texts.index(text), float(mean)) for text, mean in zip(often, means, strict=True)]
    return sorted(found, key=lambda one: -one[1])
