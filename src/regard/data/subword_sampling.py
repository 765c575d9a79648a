"""Subword sampling: BPE-dropout (Provilkov et al. 2020) and subword regularization (Kudo 2018).

SentencePiece implements both, but its samples differ from process to process whatever the seed, so a training run could
not be repeated. The sampling is therefore done here, from SentencePiece's pieces and their scores. No piece has a space
inside, so the words of a text, each with the space before it, are segmented independently.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import exp
from random import Random

import numpy as np

from regard.data.special_tokens import SPACE_SYMBOL
from regard.data.tokenizer import Tokenizer, Vocabulary

MAX_SAMPLES_PER_WORD = 512
"""After this many samples of a word, one of them is reused: each is as likely as a new one."""
MAX_CACHED_WORDS = 2**16
"""Words whose samples are cached. In scripts without spaces a sentence is one word, so the cache needs a limit."""
MAX_CACHED_LATTICES = 2**15
MAX_CACHED_LATTICE_LENGTH = 24
"""Characters of a word whose lattice is cached. A longer one is probably a sentence, which rarely repeats."""
UNKNOWN_PENALTY = 10.0
"""unigram: how much lower than the lowest piece score a character without a piece is scored; SentencePiece's value"""

_WORD = re.compile(f"{SPACE_SYMBOL}?[^{SPACE_SYMBOL}]+|{SPACE_SYMBOL}")
WordIds = tuple[int, ...]
"""the token ids of a word"""
Lattice = list[tuple[list[float], list[int]]]


class SubwordSampler(ABC):
    """Segments a word at random. ``alpha`` is the parameter of the method."""

    def __init__(self, vocabulary: Vocabulary, alpha: float) -> None:
        self.alpha = alpha
        self.pieces = vocabulary.piece_scores()
        """the id and score of each piece"""
        self.longest = max(map(len, self.pieces))
        self.byte_ids = vocabulary.byte_ids

    @abstractmethod
    def __call__(self, word: str, rng: Random) -> WordIds: ...

    def ids(self, piece: str) -> WordIds:
        """The id of a piece, or the ids of the bytes of a character that has no piece."""
        if piece in self.pieces:
            return (self.pieces[piece][0],)
        return tuple(self.byte_ids[byte] for byte in piece.encode("utf-8"))


class BpeDropout(SubwordSampler):
    """BPE dropout (BPE-dropout): characters are merged, best pair first; each is skipped with probability alpha."""

    def __call__(self, word: str, rng: Random) -> WordIds:
        symbols, following = list(word), list(range(1, len(word) + 1))
        preceding = list(range(-1, len(word) - 1))
        merges = [
            entry
            for left in range(len(symbols) - 1)
            if (entry := self._merge(symbols, left, left + 1))
        ]
        heapify(merges)
        draw, alpha = rng.random, self.alpha
        while merges:
            _, left, right, size = heappop(merges)
            if (
                not symbols[left]
                or not symbols[right]
                or len(symbols[left]) + len(symbols[right]) != size
            ):
                continue  # one of them has been merged with another symbol
            if alpha and draw() < alpha:
                continue
            symbols[left] += symbols[right]
            symbols[right] = ""
            following[left] = following[right]
            if following[left] < len(symbols):
                preceding[following[left]] = left
                if entry := self._merge(symbols, left, following[left]):
                    heappush(merges, entry)
            if preceding[left] >= 0 and (entry := self._merge(symbols, preceding[left], left)):
                heappush(merges, entry)
        return tuple(i for symbol in symbols if symbol for i in self.ids(symbol))

    def _merge(
        self, symbols: list[str], left: int, right: int
    ) -> tuple[float, int, int, int] | None:
        """The heap entry for merging two neighbouring symbols, or None if there is no such piece."""
        merged = symbols[left] + symbols[right]
        piece = self.pieces.get(merged)
        return None if piece is None else (-piece[1], left, right, len(merged))


class UnigramSampler(SubwordSampler):
    """Subword regularization: P(segmentation) is proportional to the product of its pieces' probabilities ** alpha."""

    def __init__(self, vocabulary: Vocabulary, alpha: float) -> None:
        super().__init__(vocabulary, alpha)
        self.unknown_score = min(score for _, score in self.pieces.values()) - UNKNOWN_PENALTY
        self._cached_lattice = lru_cache(MAX_CACHED_LATTICES)(self._lattice)

    def __call__(self, word: str, rng: Random) -> WordIds:
        """Forward filtering, backward sampling: from the end of the word, draw where each piece starts."""
        cached = len(word) <= MAX_CACHED_LATTICE_LENGTH
        lattice = self._cached_lattice(word) if cached else self._lattice(word)
        end, ids = len(word), list[WordIds]()
        while end:
            weights, starts = lattice[end]
            start = starts[bisect(weights, rng.random() * weights[-1], hi=len(starts) - 1)]
            ids.append(self.ids(word[start:end]))
            end = start
        return tuple(i for piece in reversed(ids) for i in piece)

    def _lattice(self, word: str) -> Lattice:
        """For each position: cumulative weights of the pieces that end there, and where each piece starts."""
        forward, lattice = [1.0], [([1.0], [0])]
        for end in range(1, len(word) + 1):
            starts, weights = list[int](), list[float]()
            for start in range(max(0, end - self.longest), end):
                piece = self.pieces.get(word[start:end])
                if piece is None and start < end - 1:
                    continue
                score = self.unknown_score if piece is None else piece[1]
                starts.append(start)
                weights.append(forward[start - end] * exp(self.alpha * score))
            cumulative = list(accumulate(weights))
            lattice.append((cumulative, starts))
            # Only ratios matter. The values that are still needed are rescaled, or a long text would underflow.
            forward = [value / cumulative[-1] for value in forward[-self.longest :]] + [1.0]
        return lattice


SUBWORD_SAMPLERS: dict[str, type[SubwordSampler]] = {"bpe": BpeDropout, "unigram": UnigramSampler}


class SamplingVocabulary(Vocabulary):
    """A vocabulary that segments texts at random. The samples depend on the seed and on all texts encoded before."""

    def __init__(self, base: Vocabulary, sampler: SubwordSampler, seed: Sequence[int]) -> None:
        super().__init__(base.model, base.normalization)
        self._sampler = sampler
        self._rng = Random(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]))
        self._samples: OrderedDict[str, list[WordIds]] = OrderedDict()
        """the samples of each word; least recently used words first"""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        words = (_WORD.findall(self.escape(text)) for text in texts)
        return [[i for word in text_words for i in self._sample(word)] for text_words in words]

    def _sample(self, word: str) -> WordIds:
        samples = self._samples.setdefault(word, [])
        self._samples.move_to_end(word)
        if len(self._samples) > MAX_CACHED_WORDS:
            self._samples.popitem(last=False)
        if len(samples) < MAX_SAMPLES_PER_WORD:
            samples.append(self._sampler(word, self._rng))
            return samples[-1]
        return samples[int(self._rng.random() * MAX_SAMPLES_PER_WORD)]


Samplers = tuple[SubwordSampler, SubwordSampler]
"""for sources and for targets"""


def subword_samplers(tokenizer: Tokenizer, kind: str, alpha: float) -> Samplers:
    """The samplers of a tokenizer. One is used for both sides if they share a vocabulary, so that it caches more.

    kind: the kind of the tokenizer, bpe or unigram.
    """
    source, target = tokenizer.source, tokenizer.target
    sampler = SUBWORD_SAMPLERS[kind](source, alpha)
    shared = source.model == target.model and source.normalization == target.normalization
    return sampler, sampler if shared else SUBWORD_SAMPLERS[kind](target, alpha)


@dataclass(frozen=True)
class SamplingTokenizer(Tokenizer):
    """A tokenizer that segments texts at random; labels are not affected."""

    base: Tokenizer

    @classmethod
    def wrap(
        cls, base: Tokenizer, samplers: Samplers, seed: Sequence[int], labels: bool = False
    ) -> SamplingTokenizer:
        """``labels``: the targets are labels."""
        source = SamplingVocabulary(base.source, samplers[0], [*seed, 0])
        target = base.target if labels else SamplingVocabulary(base.target, samplers[1], [*seed, 1])
        return cls(source, target, base)

    @property
    def deterministic(self) -> Tokenizer:
        return self.base
