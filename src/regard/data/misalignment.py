"""Finds pairs that are not translations of each other: IBM Model 1, a likelihood-ratio test, and misaligned stretches.

**IBM Model 1** (``Lexicon``; Brown et al. 1993) is a word-by-word translation model, learned from a sample of the
corpus itself. It is far too weak to translate, but it tells in microseconds whether two texts can be translations of
each other, and in which of the two languages a text is. So misaligned pairs and swapped sides are found in any pair of
languages. A wrong pair teaches the model that its words are translations of each other, and would then look right.
Therefore the model is cross-fitted: it has two tables, each learned from one half of the pairs, and a pair is judged by
the table of the other half.

**The likelihood-ratio test** (``LikelihoodRatio``): is the target of a pair a translation of its source, or does it
belong to another source? The evidence is how strong the best translation of each word is in the lexicon, the ratio of
the lengths, and the last characters. How often each kind of evidence occurs in translations is counted in the pairs of
the corpus. How often it occurs in unrelated texts is counted in the same pairs with their targets shuffled. The
log-odds of a pair are the sum of the logarithms of these ratios (naive Bayes). They are high for a word with a
frequent, reliable translation that is there, and low if it is missing; a word without a reliable translation says
little. Shuffled pairs also tell how many of the pairs below a threshold are unrelated. A corpus of good but free
translations therefore loses few of them.

**Stretches** (``find_stretches``): consecutive pairs that are misaligned by a few lines, such as after a line that one
file lacks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.data.pairs import Pair
from regard.data.text_features import Alignment, Hashes, Ints, Mask, PairBatch, Words, character_set

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
        while batch := list(islice(stream, chunk)):
            self.pairs += batch[-self.seen % self.step :: self.step]
            self.seen += len(batch)
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
        target_rows = pairs if targets is None else targets
        return EncodedPairs(
            self.sources.take(pairs), self.targets.take(target_rows), self.folds[pairs]
        )


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
        is_known = ids >= 0
        is_known[is_known] = self.hashes[ids[is_known]] == hashes[is_known]
        return np.where(is_known, ids, -1)


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
        source_ids, target_ids, source_word, target_word = cross_product(
            pairs.sources, pairs.targets
        )
        combinations = (source_ids * width + target_ids).astype(np.int32)
        ordered = np.sort(combinations)  # np.unique with return_inverse takes five times as long
        keys = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
        numbers = np.empty(max(1, len(self.source)) * width, np.int32)
        numbers[keys] = np.arange(len(keys))
        entry = numbers[combinations]
        rows, columns = keys // width, keys % width
        product = np.ones(len(keys))
        # Each occurrence of a word is explained by the words on the other side of its pair.
        for condition, explained in ((rows, target_word), (columns, source_word)):
            probability = np.ones(len(keys))
            for _ in range(ITERATIONS):
                current = probability[entry]
                share = current / np.bincount(explained, current)[explained]
                counts = np.bincount(entry, share, len(keys))
                probability = counts / np.bincount(condition, counts)[condition]
            product *= probability
        strengths = np.minimum(np.sqrt(product) * 255, 255).astype(np.uint8)
        self.tables[fold, rows, columns] = strengths
        for vocabulary, words, other_words, frequencies in (
            (self.source, rows, columns, self.target.frequencies),
            (self.target, columns, rows, self.source.frequencies),
        ):
            np.maximum.at(vocabulary.reliability, words, strengths)
            chances = strengths / 255 * frequencies[other_words]
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
            _strongest(table, rows, sources.counts, targets.ids, targets.counts),
            _strongest(table, columns, targets.counts, sources.ids * width, sources.counts),
        )

    def scores(
        self, pairs: EncodedPairs, best_strengths: tuple[Strengths, Strengths] | None = None
    ) -> Floats:
        """How well the words of each pair explain each other, from 0 to 1; 0 if no word is known.

        best_strengths: the result of ``best_translations``, if it was computed before.
        """
        total, possible = np.zeros(len(pairs.folds)), np.full(len(pairs.folds), 1e-6)
        for word_ids, vocabulary, strengths in zip(
            pairs[:2],
            (self.source, self.target),
            best_strengths or self.best_translations(pairs),
            strict=True,
        ):
            weights, texts = vocabulary.weights[word_ids.ids], word_ids.texts
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
    source_counts, target_counts = (
        np.bincount(ids, minlength=len(hashes)) + 0.5 for ids in (inverse[:split], inverse[split:])
    )
    common = np.argsort(-(source_counts + target_counts), kind="stable")[: 8 * VOCABULARY]
    common = common[(source_counts + target_counts)[common] > 3]
    odds = np.log(target_counts[common] / source_counts[common])
    return HashIndex(hashes[common]), np.clip(odds, -MAX_LOG_ODDS, MAX_LOG_ODDS)


def _strongest(
    table: Strengths, words: Ints, counts: Ints, other_words: Ints, other_counts: Ints
) -> Strengths:
    """For each word, the largest entry of the table for it and one of the other words of the same pair.

    counts, other_counts: the number of words in each pair.
    """
    repeats = np.repeat(other_counts, counts)
    starts = np.cumsum(other_counts) - other_counts
    candidates = other_words[_ranges(np.repeat(starts, counts), repeats)]
    strengths = table[np.repeat(words, repeats) + candidates]
    strongest = np.zeros(len(words), np.uint8)
    if len(strengths):
        firsts = (np.cumsum(repeats) - repeats)[repeats > 0]
        strongest[repeats > 0] = np.maximum.reduceat(strengths, firsts)
    return strongest


def cross_product(sources: WordIds, targets: WordIds) -> tuple[Ints, Ints, Ints, Ints]:
    """All combinations of a source word and a target word of the same pair: their ids, and their list indices."""
    repeats = np.repeat(targets.counts, sources.counts)  # of each source word
    source_word = np.repeat(np.arange(len(sources.ids)), repeats)
    starts = np.cumsum(targets.counts) - targets.counts
    target_word = _ranges(np.repeat(starts, sources.counts), repeats)
    return sources.ids[source_word], targets.ids[target_word], source_word, target_word


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """start, start + 1, … for each start, as many as its count, in one array."""
    offsets = np.cumsum(counts) - counts
    return np.asarray(np.arange(int(counts.sum())) + np.repeat(starts - offsets, counts))


def final_character_classes(*classes: str) -> Ints:
    """A table of the class of each character, from 1; 0 for characters of no class."""
    marked = [number * character_set(characters) for number, characters in enumerate(classes, 1)]
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
        self.word_groups = [
            _word_groups(vocabulary) for vocabulary in (lexicon.source, lexicon.target)
        ]
        batch = PairBatch(sample[:: 1 + len(sample) // CALIBRATION_PAIRS])
        count = len(batch)
        aligned = self._evidence(batch)
        # Shuffled, not shifted: the same texts may occur again some lines later.
        shuffled = self._evidence(batch, np.random.default_rng(0).permutation(count))
        self.threshold = -np.inf
        """pairs with lower log-odds are unrelated"""
        self.tables: list[Floats] = []
        counted = np.ones(count, np.bool_)
        for _ in range(2):  # the second time without the pairs that look unrelated
            self.tables = [
                _log_ratios(observed, counted, baseline)
                for observed, baseline in zip(aligned, shuffled, strict=True)
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
        cumulative = np.arange(1, len(aligned) + 1) / max(1, len(aligned))
        precise = np.flatnonzero(expected >= precision * cumulative)
        return float(aligned[precise[-1]]) if len(precise) else -np.inf

    def _sum(self, evidence: Sequence[Observations], count: int) -> Floats:
        total = np.zeros(count)
        for table, (pairs, groups, values) in zip(self.tables, evidence, strict=True):
            total += np.bincount(pairs, table[groups, values], count)
        return total

    def _evidence(self, batch: PairBatch, targets: Ints | None = None) -> list[Observations]:
        """The evidence in a batch; with ``targets``, in its sources with the targets of these pairs."""
        words, best_strengths = batch.alignment(self.lexicon)[:2]
        all_pairs = np.arange(len(batch))
        if targets is not None:
            words = words.take(all_pairs, targets)
            best_strengths = self.lexicon.best_translations(words)
        target_rows = all_pairs if targets is None else targets
        word_evidence = [
            Observations(word_ids.texts, groups[word_ids.ids], _STRENGTHS[strengths])
            for word_ids, groups, strengths in zip(
                words[:2], self.word_groups, best_strengths, strict=True
            )
        ]
        source, target = (
            np.log2(batch.source.widths + 8),
            np.log2(batch.target.widths + 8)[target_rows],
        )
        ratios = np.clip((4 * (target - source)).astype(np.int64) + _RATIOS // 2, 0, _RATIOS - 1)
        lengths = np.clip(source.astype(np.int64) - 3, 0, _LENGTHS - 1)
        source_ends, target_ends = (
            _FINAL[texts.last_characters] for texts in (batch.source, batch.target)
        )
        return [
            *word_evidence,
            Observations(all_pairs, lengths, ratios),
            Observations(all_pairs, source_ends, target_ends[target_rows]),
        ]


def _word_groups(vocabulary: WordVocabulary) -> Ints:
    """The group of each word: words that are equally reliable, and occur equally often in unrelated texts."""
    chances = np.digitize(vocabulary.chance, _CHANCES)
    return np.asarray(_RELIABILITY[vocabulary.reliability] * (len(_CHANCES) + 1) + chances)


def _log_ratios(aligned: Observations, counted: Mask, shuffled: Observations) -> Floats:
    """[group, value] the logarithm of how much more frequent a value is in translations than in unrelated texts.

    counted: marks the pairs that count as translations.
    """
    is_counted = counted[aligned.pairs]
    in_translations = _counts(aligned.groups[is_counted], aligned.values[is_counted])
    in_unrelated = _counts(shuffled.groups, shuffled.values)
    # Exactly zero for equal counts, so that pairs without evidence still count as translations.
    log_translations, log_unrelated = (
        np.log(counts / counts.sum(1, keepdims=True)) for counts in (in_translations, in_unrelated)
    )
    return np.asarray(log_translations - log_unrelated)


def _counts(groups: Ints, values: Ints) -> Floats:
    """[group, value] counts, with a pseudo-count."""
    keys = groups * _VALUES + values
    counts = np.bincount(keys, minlength=_GROUPS * _VALUES).reshape(_GROUPS, _VALUES)
    return np.asarray(counts + 0.5, np.float64)


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
        targets = pairs + shift
        inside = (targets >= 0) & (targets < len(aligned))
        scores[inside, column] = lexicon.scores(words.take(pairs[inside], targets[inside]))
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
        best_state = int(total.argmax())
        switches = total[best_state] - switch_cost > total
        came_from[step] = np.where(switches, best_state, stay)
        total = np.maximum(total, total[best_state] - switch_cost) + scores[step]
    total[1:] -= switch_cost
    path = np.empty(len(scores), np.int64)
    path[-1] = total.argmax()
    for step in range(len(scores) - 1, 0, -1):
        path[step - 1] = came_from[step, path[step]]
    return path


def around(values: Floats | Mask, width: int) -> Floats:
    """The sum of the values around each position."""
    return np.convolve(values, np.ones(width), "full")[width // 2 : width // 2 + len(values)]


def runs(values: Ints | Mask) -> list[tuple[int, int]]:
    """The ranges of equal values: start and end."""
    changes = np.flatnonzero(values[1:] != values[:-1]) + 1
    bounds = [0, *changes.tolist(), len(values)]
    return [(first, last) for first, last in itertools.pairwise(bounds) if first < last]
