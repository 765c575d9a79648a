"""Finds stretches of pairs that are misaligned by a few lines, such as after a line that one file lacks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from regard.data.ibm_model1 import Floats, Lexicon
from regard.data.text_features import Alignment, Ints, Mask


class Stretch(NamedTuple):
    """Consecutive pairs whose targets belong to other sources."""

    first: int
    """number of the first pair, from 1"""
    last: int
    shift: int
    """source n belongs to target n + shift"""


def find_stretches(
    lexicon: Lexicon, alignment: Alignment, max_shift: int, min_pairs: int, switch_cost: float
) -> Iterator[Stretch]:
    """The misaligned stretches of at least ``min_pairs`` pairs.

    ``switch_cost``: by how much the scores of a stretch must be better in sum, at each of its ends.
    """
    if len(alignment.scores) < min_pairs:
        return
    for start, stop in _suspicious(alignment.scores, lexicon.typical_score, min_pairs):
        shifts = _best_shifts(lexicon, alignment, np.arange(start, stop), max_shift, switch_cost)
        for first, last in runs(shifts):
            if shifts[first] and last - first >= min_pairs:
                yield Stretch(start + first + 1, start + last, int(shifts[first]))


def _suspicious(scores: Floats, typical: float, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of pairs whose scores are low on average, with some pairs around them."""
    means = around(scores, width) / around(np.ones(len(scores)), width)
    low = around(means < 0.5 * typical, 4 * width) > 0
    return ((first, last) for first, last in runs(low) if low[first])


def _best_shifts(
    lexicon: Lexicon, alignment: Alignment, pairs: Ints, max_shift: int, switch_cost: float
) -> Ints:
    """The most probable shift of each of these consecutive pairs."""
    words, aligned = alignment.words, alignment.scores
    shifts = [0, *(sign * n for n in range(1, max_shift + 1) for sign in (1, -1))]
    scores = np.zeros((len(pairs), len(shifts)))
    scores[:, 0] = aligned[pairs]
    for column, shift in enumerate(shifts[1:], 1):
        others = pairs + shift
        inside = (others >= 0) & (others < len(aligned))
        scores[inside, column] = lexicon.scores(words.take(pairs[inside], others[inside]))
    return np.array(shifts)[viterbi(scores, switch_cost)]


def viterbi(scores: Floats, switch_cost: float) -> Ints:
    """The sequence of states with the best sum of scores [step, state], where a change of state has a cost.

    The first and the last state are 0.
    """
    total = scores[0].copy()
    total[1:] -= switch_cost
    came_from = np.empty(scores.shape, np.int64)
    stay = np.arange(scores.shape[1])
    for step in range(1, len(scores)):
        best = int(total.argmax())
        switches = total[best] - switch_cost > total
        came_from[step] = np.where(switches, best, stay)
        total = np.maximum(total, total[best] - switch_cost) + scores[step]
    total[1:] -= switch_cost
    path = np.empty(len(scores), np.int64)
    path[-1] = total.argmax()
    for step in range(len(scores) - 1, 0, -1):
        path[step - 1] = came_from[step, path[step]]
    return path


def around(values: Floats | Mask, width: int) -> Floats:
    """The sum of the values around each place."""
    return np.convolve(values, np.ones(width), "full")[width // 2 : width // 2 + len(values)]


def runs(values: Ints | Mask) -> list[tuple[int, int]]:
    """The ranges of equal values: start and end."""
    changes = np.flatnonzero(values[1:] != values[:-1]) + 1
    bounds = [0, *changes.tolist(), len(values)]
    return [(first, last) for first, last in itertools.pairwise(bounds) if first < last]
