"""A word-by-word translation model, learned from a sample of the corpus itself: IBM Model 1 (Brown et al. 1993).

It is far too weak to translate, but it tells in microseconds whether two texts can be translations of each other, and
in which of the two languages a text is. So misaligned pairs and swapped sides are found in any pair of languages.

A wrong pair teaches the model that its words are translations of each other, and would then look right. Therefore the
model is cross-fitted: it has two tables, each learned from one half of the pairs, and a pair is judged by the table of
the other half.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.data.pairs import Pair
from regard.data.text_features import Hashes, Ints, PairBatch, Words

Floats = NDArray[np.float64]
Strengths = NDArray[np.uint8]

SAMPLE_SIZE = 50_000
"""pairs that the model is learned from, at least, if there are as many"""
MIN_PAIRS = 500
"""pairs without which there is no model"""
VOCABULARY = 8_192
"""words of each side whose translations are learned; the two tables of these take 64 MB each"""
MAX_COMBINATIONS = 3_000_000
"""of a source word and a target word, to learn from; it bounds the time and memory for long texts"""
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


class EncodedPairs(NamedTuple):
    """The known words of some pairs."""

    sources: WordIds
    targets: WordIds
    folds: Ints
    """0 or 1: the half of the corpus that each pair belongs to"""

    def take(self, pairs: Ints, targets: Ints | None = None) -> EncodedPairs:
        """Some of the pairs; with ``targets``, their sources with the targets of these pairs."""
        others = pairs if targets is None else targets
        return EncodedPairs(self.sources.take(pairs), self.targets.take(others), self.folds[pairs])


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
    """The most frequent words of one side."""

    def __init__(self, words: Words) -> None:
        texts = len(words.counts)
        hashes, counts = np.unique(words.hashes, return_counts=True)
        hashes, counts = hashes[counts >= MIN_COUNT], counts[counts >= MIN_COUNT]
        order = np.argsort(-counts, kind="stable")[:VOCABULARY]
        self.index = HashIndex(hashes[order])
        self.frequencies: Floats = counts[order] / max(1, texts)
        """how often each word occurs in a text"""
        self.weights: Floats = np.maximum(0, -np.log(self.frequencies))
        """information of each word, in nats"""
        self.reliability: Strengths = np.zeros(len(order), np.uint8)
        """the strength of the best translation of each word, in 1/255"""
        self.chance: Floats = np.zeros(len(order))
        """the sum of the strengths of its translations in an unrelated text, on average"""

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
        batch = PairBatch(pairs)
        source, target = batch.source.words, batch.target.words
        self.source, self.target = WordVocabulary(source), WordVocabulary(target)
        self.tables = np.zeros((2, len(self.source), len(self.target)), np.uint8)
        """[fold, source word, target word]: how strongly they are translations of each other, learned from the pairs
        of the other fold: the geometric mean of p(target word | source word) and its reverse, in 1/255"""
        words = self.encode(batch)
        combinations = int((words.sources.counts * words.targets.counts).sum())
        step = 1 + combinations // MAX_COMBINATIONS
        for fold in (0, 1):
            learned = np.flatnonzero(words.folds != fold)[::step]
            self._learn(words.take(learned), fold)
        scores = self.scores(words.take(np.arange(0, len(pairs), 1 + len(pairs) // 2_000)))
        self.typical_score = float(np.median(scores)) if len(pairs) else 0.0
        self.sides, self.log_odds = _side_log_odds(source, target)

    def encode(self, batch: PairBatch) -> EncodedPairs:
        """The known words of some pairs."""
        source, target = batch.source.words, batch.target.words
        return EncodedPairs(self.source.encode(source), self.target.encode(target), batch.folds)

    def _learn(self, pairs: EncodedPairs, fold: int) -> None:
        """Learn the table of a fold."""
        width = max(1, len(self.target))
        first, second, source_word, target_word = cross_product(pairs.sources, pairs.targets)
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
        strengths = np.minimum(np.sqrt(both) * 255, 255).astype(np.uint8)
        self.tables[fold, rows, columns] = strengths
        for vocabulary, words, others, frequencies in (
            (self.source, rows, columns, self.target.frequencies),
            (self.target, columns, rows, self.source.frequencies),
        ):
            np.maximum.at(vocabulary.reliability, words, strengths)
            chances = strengths / 255 * frequencies[others]
            vocabulary.chance += np.bincount(words, chances, len(vocabulary)) / 2

    def best_translations(self, pairs: EncodedPairs) -> tuple[Strengths, Strengths]:
        """For each source word and each target word, the strength of its best translation in its pair, in 1/255."""
        sources, targets, folds = pairs
        _, height, width = self.tables.shape
        fold = folds * (height * width)
        table = self.tables.reshape(-1)
        rows = fold[sources.texts] + sources.ids * width
        columns = fold[targets.texts] + targets.ids
        return (
            _best(table, rows, sources.counts, targets.ids, targets.counts),
            _best(table, columns, targets.counts, sources.ids * width, sources.counts),
        )

    def scores(
        self, pairs: EncodedPairs, best: tuple[Strengths, Strengths] | None = None
    ) -> Floats:
        """How well the words of each pair explain each other, from 0 to 1; 0 if no word is known.

        best: the result of ``best_translations``, if it is known.
        """
        total, possible = np.zeros(len(pairs.folds)), np.full(len(pairs.folds), 1e-6)
        for side, vocabulary, strengths in zip(
            pairs[:2],
            (self.source, self.target),
            best or self.best_translations(pairs),
            strict=True,
        ):
            weights, texts = vocabulary.weights[side.ids], side.texts
            total += np.bincount(texts, weights * strengths, len(total)) / 255
            possible += np.bincount(texts, weights, len(total))
        return np.asarray(total / possible)

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


def _best(
    table: Strengths, ours: Ints, counts: Ints, theirs: Ints, their_counts: Ints
) -> Strengths:
    """For each of our words, the largest entry of the table for it and one of their words in the same pair."""
    repeats = np.repeat(their_counts, counts)
    starts = np.cumsum(their_counts) - their_counts
    others = theirs[_ranges(np.repeat(starts, counts), repeats)]
    strengths = table[np.repeat(ours, repeats) + others]
    best = np.zeros(len(ours), np.uint8)
    if len(strengths):
        firsts = (np.cumsum(repeats) - repeats)[repeats > 0]
        best[repeats > 0] = np.maximum.reduceat(strengths, firsts)
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
