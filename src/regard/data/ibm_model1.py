"""A word-by-word translation model, learned from a sample of the corpus itself: IBM Model 1 (Brown et al. 1993).

It is far too weak to translate, but it tells in microseconds whether two texts can be translations of each other, and
in which of the two languages a text is. So misaligned pairs and swapped sides are found in any pair of languages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.data.pairs import Pair
from regard.data.text_features import Hashes, Ints, TextBatch, Words

Floats = NDArray[np.float64]

SAMPLE_SIZE = 50_000
"""pairs that the model is learned from, at least, if there are as many"""
MIN_PAIRS = 500
"""pairs without which there is no model"""
VOCABULARY = 8_192
"""words of each side whose translations are learned; the table of these takes 64 MB"""
MAX_COMBINATIONS = 4_000_000
"""of a source word and a target word, to learn from; it bounds the time and memory for long texts"""
MAX_SHARE = 0.1
"""words that occur in more of the texts say nothing about what a text means"""
MIN_COUNT = 4
"""Rarer words would be translations of whatever they occur with."""
ITERATIONS = 3
MAX_LOG_ODDS = 4.0


class PairSample:
    """Every n-th pair of a stream, where n grows with the stream: at most ``2 * size`` pairs, spread over all of it."""

    def __init__(self, size: int = SAMPLE_SIZE) -> None:
        self.size, self.step, self.seen = size, 1, 0
        self.pairs: list[Pair] = []

    def read(self, pairs: Iterable[Pair], chunk: int = 8_192) -> None:
        """Read all pairs of a stream."""
        stream = iter(pairs)
        while some := list(islice(stream, chunk)):
            self.pairs += some[-self.seen % self.step :: self.step]
            self.seen += len(some)
            while len(self.pairs) >= 2 * self.size:
                del self.pairs[1::2]
                self.step *= 2


class WordIds(NamedTuple):
    """The known words of several texts, one text after another."""

    ids: Ints
    counts: Ints
    """number of known words of each text"""

    @property
    def texts(self) -> Ints:
        """The number of the text of each word."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def take(self, texts: Ints) -> WordIds:
        """The words of some of the texts, in the given order."""
        starts = np.cumsum(self.counts) - self.counts
        counts = self.counts[texts]
        return WordIds(self.ids[_ranges(starts[texts], counts)], counts)


class HashIndex:
    """Finds the ids of hashes."""

    bits = 20

    def __init__(self, hashes: Hashes) -> None:
        self.hashes = hashes
        self.slots = np.full(1 << self.bits, -1, np.int32)
        """the id of the first hash with these leading bits; the few others are not found"""
        self.slots[self._slots(hashes)[::-1]] = np.arange(len(hashes))[::-1]

    def _slots(self, hashes: Hashes) -> Hashes:
        return hashes >> np.uint64(64 - self.bits)

    def find(self, hashes: Hashes) -> Ints:
        """The id of each hash; -1 for an unknown one."""
        ids = self.slots[self._slots(hashes)].astype(np.int64)
        known = ids >= 0
        known[known] = self.hashes[ids[known]] == hashes[known]
        return np.where(known, ids, -1)


class WordVocabulary:
    """The most informative words of one side."""

    def __init__(self, words: Words) -> None:
        texts = len(words.counts)
        hashes, counts = np.unique(words.hashes, return_counts=True)
        useful = (counts >= MIN_COUNT) & (counts <= MAX_SHARE * texts)
        hashes, counts = hashes[useful], counts[useful]
        order = np.argsort(-counts, kind="stable")[:VOCABULARY]
        self.index = HashIndex(hashes[order])
        self.weights: Floats = np.log(texts / np.maximum(counts[order], 1))
        """information of each word, in nats"""

    def __len__(self) -> int:
        return len(self.weights)

    def encode(self, words: Words) -> WordIds:
        """The ids of the known words of each text."""
        ids = self.index.find(words.hashes)
        texts = np.repeat(np.arange(len(words.counts)), words.counts)[ids >= 0]
        return WordIds(ids[ids >= 0], np.bincount(texts, minlength=len(words.counts)))


class Lexicon:
    """The model: how strongly each source word and target word are translations of each other."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        source = TextBatch([pair.source for pair in pairs]).words
        target = TextBatch([pair.target for pair in pairs]).words
        self.source, self.target = WordVocabulary(source), WordVocabulary(target)
        sources, targets = self.source.encode(source), self.target.encode(target)
        combinations = int((sources.counts * targets.counts).sum())
        step = 1 + combinations // MAX_COMBINATIONS
        learned = np.arange(0, len(pairs), step)
        self.table = self._learn(sources.take(learned), targets.take(learned))
        some = np.arange(0, len(pairs), 1 + len(pairs) // 5_000)
        scores = self.scores(sources.take(some), targets.take(some))
        self.typical_score = float(np.median(scores)) if len(pairs) else 0.0
        self.sides, self.log_odds = _side_log_odds(source, target)

    def _learn(self, sources: WordIds, targets: WordIds) -> NDArray[np.uint8]:
        """The geometric mean of p(target word | source word) and its reverse, in 1/255."""
        width = max(1, len(self.target))
        first, second, source_word, target_word = cross_product(sources, targets)
        combinations = (first * width + second).astype(np.int32)
        ordered = np.sort(combinations)  # np.unique with return_inverse takes five times as long
        keys = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
        numbers = np.empty(max(1, len(self.source)) * width, np.int32)
        numbers[keys] = np.arange(len(keys))
        entry = numbers[combinations]
        rows, columns = keys // width, keys % width
        both = np.ones(len(keys))
        # Each occurrence of a word is explained by the words on the other side of its pair.
        for given, explained in ((rows, target_word), (columns, source_word)):
            probability = np.ones(len(keys))
            for _ in range(ITERATIONS):
                now = probability[entry]
                share = now / np.bincount(explained, now)[explained]
                counts = np.bincount(entry, share, len(keys))
                probability = counts / np.bincount(given, counts)[given]
            both *= probability
        table = np.zeros((len(self.source), width), np.uint8)
        table[rows, columns] = np.minimum(np.sqrt(both) * 255, 255)
        return table

    def scores(self, sources: WordIds, targets: WordIds) -> Floats:
        """How well the words of each pair explain each other, from 0 to 1; 0 if no word is known."""
        total, possible = np.zeros(len(sources.counts)), np.full(len(sources.counts), 1e-6)
        for side, other, table, vocabulary in (
            (sources, targets, self.table, self.source),
            (targets, sources, self.table.T, self.target),
        ):
            weights, texts = vocabulary.weights[side.ids], side.texts
            best = _best_translations(table, side, other)
            total += np.bincount(texts, weights * best, len(total))
            possible += np.bincount(texts, weights, len(total))
        return np.asarray(total / possible)

    def information(self, sources: WordIds, targets: WordIds) -> Floats:
        """The information in the known words of each pair: that of its poorer side, in nats."""
        size = len(sources.counts)
        return np.minimum(
            np.bincount(sources.texts, self.source.weights[sources.ids], size),
            np.bincount(targets.texts, self.target.weights[targets.ids], size),
        )

    def target_log_odds(self, words: Words) -> Floats:
        """How much more each text looks like a target than like a source, in nats; negative for sources."""
        ids = self.sides.find(words.hashes)
        odds = np.where(ids >= 0, self.log_odds[ids], 0.0)
        texts = np.repeat(np.arange(len(words.counts)), words.counts)
        return np.asarray(np.bincount(texts, odds, len(words.counts)), np.float64)


def _side_log_odds(source: Words, target: Words) -> tuple[HashIndex, Floats]:
    """For the words of both sides, the logarithm of how much more frequent each is in targets than in sources."""
    hashes, inverse = np.unique(np.concatenate([source.hashes, target.hashes]), return_inverse=True)
    split = len(source.hashes)
    ours, theirs = (
        np.bincount(part, minlength=len(hashes)) + 0.5
        for part in (inverse[:split], inverse[split:])
    )
    common = np.argsort(-(ours + theirs), kind="stable")[: 8 * VOCABULARY]
    common = common[(ours + theirs)[common] > 3]
    odds = np.log(theirs[common] / ours[common])
    return HashIndex(hashes[common]), np.clip(odds, -MAX_LOG_ODDS, MAX_LOG_ODDS)


def _best_translations(table: NDArray[np.uint8], side: WordIds, other: WordIds) -> Floats:
    """For each word of one side, the strength of its best translation among the words of the other side."""
    first, second, _, _ = cross_product(side, other)
    strength = table[first, second]
    repeats = np.repeat(other.counts, side.counts)
    best = np.zeros(len(side.ids))
    if len(strength):
        starts = (np.cumsum(repeats) - repeats)[repeats > 0]
        best[repeats > 0] = np.maximum.reduceat(strength, starts) / 255
    return best


def cross_product(sources: WordIds, targets: WordIds) -> tuple[Ints, Ints, Ints, Ints]:
    """All combinations of a source word and a target word of the same pair: their ids, and their places in the list."""
    repeats = np.repeat(targets.counts, sources.counts)  # of each source word
    source_word = np.repeat(np.arange(len(sources.ids)), repeats)
    starts = np.cumsum(targets.counts) - targets.counts
    target_word = _ranges(np.repeat(starts, sources.counts), repeats)
    return sources.ids[source_word], targets.ids[target_word], source_word, target_word


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """start, start + 1, … for each start, as many as its count, in one array."""
    offsets = np.cumsum(counts) - counts
    return np.asarray(np.arange(int(counts.sum())) + np.repeat(starts - offsets, counts))
