"""A likelihood-ratio test: is the target of a pair a translation of its source, or does it belong to another source?

The evidence is how strong the best translation of each word is (``ibm_model1.py``), the ratio of the lengths, and the
last characters. How often each kind of evidence occurs in translations is counted in the pairs of the corpus. How often
it occurs in unrelated texts is counted in the same pairs with their targets shuffled. The log-odds of a pair are the
sum of the logarithms of these ratios (naive Bayes). They are high for a word with a frequent, reliable translation that
is there, and low if it is missing; a word without a reliable translation says little.

Shuffled pairs also tell how many of the pairs below a threshold are unrelated. A corpus of good but free translations
therefore loses few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from regard.data.ibm_model1 import Floats, Lexicon, WordVocabulary
from regard.data.pairs import Pair
from regard.data.text_features import Ints, Mask, PairBatch, character_set


def final_character_classes(*classes: str) -> Ints:
    """A table of the class of each character, from 1; 0 for characters of no class."""
    marked = [number * character_set(one) for number, one in enumerate(classes, 1)]
    return np.asarray(np.sum(marked, axis=0), np.int64)


CALIBRATION_PAIRS = 10_000
"""pairs in which evidence is counted, at most"""
_STRENGTHS = np.digitize(np.arange(256), [1, 2, 4, 7, 12, 20, 32, 50, 75, 110, 150, 200])
"""the class of each strength of a translation"""
_RELIABILITY = np.arange(256) // 26
"""the class of each reliability of a word"""
_CHANCES = (0.01, 0.03, 0.06, 0.12, 0.25)
"""bounds between the classes of how much of a word's translations is in an unrelated text"""
_LENGTHS, _RATIOS = 8, 40
"""classes of source lengths and of ratios of the lengths"""
_FINAL = final_character_classes(".。।", "?？؟", "!！", ":：", ",;，；、", "…")
"""the class of each last character of a text"""

_GROUPS, _VALUES = 64, 40
"""more than any evidence has"""


class Observations(NamedTuple):
    """One observation of each word of some pairs, or of each pair."""

    pairs: Ints
    """the number of the pair"""
    groups: Ints
    """what is compared only with its like, such as words of the same reliability"""
    values: Ints


class LikelihoodRatio:
    """Computes the log-odds of pairs, as counted in a sample of a corpus."""

    def __init__(self, lexicon: Lexicon, sample: Sequence[Pair]) -> None:
        self.lexicon = lexicon
        self.word_groups = [_word_groups(one) for one in (lexicon.source, lexicon.target)]
        batch = PairBatch(sample[:: 1 + len(sample) // CALIBRATION_PAIRS])
        count = len(batch)
        aligned = self._evidence(batch)
        # Not shifted: the same texts may come again after some lines.
        shuffled = self._evidence(batch, np.random.default_rng(0).permutation(count))
        self.threshold = -np.inf
        """pairs with lower log-odds are unrelated"""
        self.tables: list[Floats] = []
        counted = np.ones(count, np.bool_)
        for _ in range(2):  # then without the pairs that look unrelated
            self.tables = [
                _log_ratios(one, counted, other)
                for one, other in zip(aligned, shuffled, strict=True)
            ]
            self.aligned, self.shuffled = self._sum(aligned, count), self._sum(shuffled, count)
            counted = self.aligned >= 0

    def log_odds(self, batch: PairBatch) -> Floats:
        """The log-odds that each target is a translation of its source, in nats."""
        return self._sum(self._evidence(batch), len(batch))

    def set_threshold(self, precision: float, max_log_odds: float) -> None:
        """Set the threshold: as high as possible, if at least this share of the pairs below it is unrelated."""
        self.threshold = min(self._threshold_for(precision), max_log_odds)

    def _threshold_for(self, precision: float) -> float:
        """The largest log-odds below which at least this share of the pairs is unrelated.

        The share of unrelated pairs in the corpus is estimated from the pairs below the median of shuffled ones, which
        is hardly ever reached by a translation (Storey 2002).
        """
        shuffled, aligned = np.sort(self.shuffled), np.sort(self.aligned)
        unrelated = 2 * float((aligned < np.median(shuffled)).mean()) if len(aligned) else 0.0
        expected = unrelated * np.searchsorted(shuffled, aligned, "right") / max(1, len(shuffled))
        found = np.arange(1, len(aligned) + 1) / max(1, len(aligned))
        enough = np.flatnonzero(expected >= precision * found)
        return float(aligned[enough[-1]]) if len(enough) else -np.inf

    def _sum(self, evidence: Sequence[Observations], count: int) -> Floats:
        total = np.zeros(count)
        for table, (pairs, groups, values) in zip(self.tables, evidence, strict=True):
            total += np.bincount(pairs, table[groups, values], count)
        return total

    def _evidence(self, batch: PairBatch, targets: Ints | None = None) -> list[Observations]:
        """The evidence in a batch; with ``targets``, in its sources with the targets of these pairs."""
        words, best = batch.alignment(self.lexicon)[:2]
        every = np.arange(len(batch))
        if targets is not None:
            words = words.take(every, targets)
            best = self.lexicon.best_translations(words)
        others = every if targets is None else targets
        found = [
            Observations(side.texts, groups[side.ids], _STRENGTHS[strengths])
            for side, groups, strengths in zip(words[:2], self.word_groups, best, strict=True)
        ]
        source, target = np.log2(batch.source.widths + 8), np.log2(batch.target.widths + 8)[others]
        ratios = np.clip((4 * (target - source)).astype(np.int64) + _RATIOS // 2, 0, _RATIOS - 1)
        lengths = np.clip(source.astype(np.int64) - 3, 0, _LENGTHS - 1)
        first, last = (_FINAL[one.last_characters] for one in (batch.source, batch.target))
        return [
            *found,
            Observations(every, lengths, ratios),
            Observations(every, first, last[others]),
        ]


def _word_groups(vocabulary: WordVocabulary) -> Ints:
    """The group of each word: words that are equally reliable, and occur equally often in unrelated texts."""
    chances = np.digitize(vocabulary.chance, _CHANCES)
    return np.asarray(_RELIABILITY[vocabulary.reliability] * (len(_CHANCES) + 1) + chances)


def _log_ratios(aligned: Observations, counted: Mask, shuffled: Observations) -> Floats:
    """[group, value] the logarithm of how much more frequent a value is in translations than in unrelated texts.

    counted: marks the pairs that count as translations.
    """
    which = counted[aligned.pairs]
    ours = _counts(aligned.groups[which], aligned.values[which])
    theirs = _counts(shuffled.groups, shuffled.values)
    # Exactly zero for equal counts, so that pairs without evidence still count as translations.
    first, second = (np.log(one / one.sum(1, keepdims=True)) for one in (ours, theirs))
    return np.asarray(first - second)


def _counts(groups: Ints, values: Ints) -> Floats:
    """[group, value] counts, with a pseudo-count."""
    keys = groups * _VALUES + values
    counts = np.bincount(keys, minlength=_GROUPS * _VALUES).reshape(_GROUPS, _VALUES)
    return np.asarray(counts + 0.5, np.float64)
