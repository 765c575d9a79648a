"""The word-by-word translation model; tests/unit/data/test_quality.py has what it finds in a corpus."""

from math import log

import numpy as np
import pytest

from regard.data.ibm_model1 import HashIndex, WordIds, _best, _side_log_odds
from regard.data.text_features import Hashes, Words


def hashes(*numbers: int) -> Hashes:
    """Hashes that differ in their leading bits."""
    return np.array(numbers, np.uint64) << np.uint64(64 - HashIndex.bits)


def test_hashes_are_found_by_their_ids() -> None:
    index = HashIndex(hashes(7, 3, 5))
    assert index.find(hashes(5, 7, 4, 3)).tolist() == [2, 0, -1, 1]
    assert index.find(hashes(7) + np.uint64(1)).tolist() == [-1]  # the same leading bits


def test_words_of_one_side_have_odds() -> None:
    """Half an occurrence is added to each count; odds of more than e^4 count as e^4, rare words not at all."""
    texts = {1: (9, 1), 2: (1, 9), 3: (2, 0), 4: (0, 1000)}  # word: occurrences in sources, targets
    source, target = (
        hashes(*(word for word, counts in texts.items() for _ in range(counts[side])))
        for side in (0, 1)
    )
    index, odds = _side_log_odds(
        Words(source, np.array([len(source)])), Words(target, np.array([len(target)]))
    )
    found = index.find(hashes(1, 2, 4, 3))
    assert odds[found[:3]] == pytest.approx([log(1.5 / 9.5), log(9.5 / 1.5), 4.0])
    assert found[3] == -1


def test_the_best_translation_is_in_the_same_pair() -> None:
    """Two pairs and one without words: the strong translation of the first word is in the other pair."""
    table = np.array([[51, 255], [102, 204]], np.uint8)
    sources = WordIds(np.array([0, 1, 1]), np.array([2, 0, 1]))
    targets = WordIds(np.array([0, 0, 1]), np.array([1, 0, 2]))
    rows = 2 * sources.ids
    best = _best(table.ravel(), rows, sources.counts, targets.ids, targets.counts)
    assert best.tolist() == [51, 102, 204]
