"""DataFiles cut into pieces at random: BPE-dropout (Provilkov et al. 2020) and subword regularization (Kudo 2018).

SentencePiece can do both, but what it draws differs from process to process, whatever its seed is, and a training could
not be done again. SamplingVocabulary is done here, then, from SentencePiece's pieces and their scores. No piece holds a blank
inside, so the words of a text, each with the blank before it, are cut one by one and independently.
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

DRAWS_OF_A_WORD = 512
"""from so many draws on, a word that comes again gets one of them: any of them is as likely as a new one"""
WORDS_REMEMBERED = 2**16
"""their draws; where no blanks are set a sentence is a word, and all of them would be the whole corpus"""
LATTICES_KEPT = 2**14
LONGEST_KEPT = 24
"""signs of a word whose lattice is kept: a longer one is a sentence, which hardly comes again"""
UNKNOWN_PENALTY = 10.0
"""of unigram: how much less likely than the least likely piece a letter is that has no piece; SentencePiece's figure"""

_WORD = re.compile(f"{SPACE_SYMBOL}?[^{SPACE_SYMBOL}]+|{SPACE_SYMBOL}")
Cut = tuple[int, ...]
"""the ids of a word"""
Lattice = list[tuple[list[float], list[int]]]


class SubwordSampler(ABC):
    """A way to cut a word at random."""

    def __init__(self, vocabulary: Vocabulary, alpha: float) -> None:
        self.alpha = alpha
        self.pieces = vocabulary.scores()
        """each piece of text with its id and its score"""
        self.longest = max(map(len, self.pieces))
        self.bytes = vocabulary.byte_ids

    @abstractmethod
    def __call__(self, word: str, random: Random) -> Cut: ...

    def ids(self, piece: str) -> Cut:
        """Of a piece; of a letter that has none, its bytes."""
        if piece in self.pieces:
            return (self.pieces[piece][0],)
        return tuple(self.bytes[byte] for byte in piece.encode("utf-8"))


class BpeDropout(SubwordSampler):
    """bpe: letters are joined, best pair first; each pair that comes up is left out with probability alpha."""

    def __call__(self, word: str, random: Random) -> Cut:
        parts, after = list(word), list(range(1, len(word) + 1))
        before = list(range(-1, len(word) - 1))
        pairs = [
            entry for left in range(len(parts) - 1) if (entry := self._pair(parts, left, left + 1))
        ]
        heapify(pairs)
        draw, alpha = random.random, self.alpha
        while pairs:
            _, left, right, size = heappop(pairs)
            if not parts[left] or not parts[right] or len(parts[left]) + len(parts[right]) != size:
                continue  # one of them was joined with another meanwhile
            if alpha and draw() < alpha:
                continue
            parts[left] += parts[right]
            parts[right] = ""
            after[left] = after[right]
            if after[left] < len(parts):
                before[after[left]] = left
                if entry := self._pair(parts, left, after[left]):
                    heappush(pairs, entry)
            if before[left] >= 0 and (entry := self._pair(parts, before[left], left)):
                heappush(pairs, entry)
        return tuple(i for part in parts if part for i in self.ids(part))

    def _pair(self, parts: list[str], left: int, right: int) -> tuple[float, int, int, int] | None:
        joined = parts[left] + parts[right]
        found = self.pieces.get(joined)
        return None if found is None else (-found[1], left, right, len(joined))


class UnigramSampler(SubwordSampler):
    """unigram: a way to cut the word is as likely as the product of its pieces' probabilities, to the power alpha."""

    def __init__(self, vocabulary: Vocabulary, alpha: float) -> None:
        super().__init__(vocabulary, alpha)
        self.unknown = min(score for _, score in self.pieces.values()) - UNKNOWN_PENALTY
        self._lattice = lru_cache(LATTICES_KEPT)(self._new_lattice)

    def __call__(self, word: str, random: Random) -> Cut:
        lattice = self._new_lattice(word) if len(word) > LONGEST_KEPT else self._lattice(word)
        end, found = len(word), list[Cut]()
        while end:
            shares, starts = lattice[end]
            start = starts[bisect(shares, random.random() * shares[-1], hi=len(starts) - 1)]
            found.append(self.ids(word[start:end]))
            end = start
        return tuple(i for cut in reversed(found) for i in cut)

    def _new_lattice(self, word: str) -> Lattice:
        """For each place: where the piece that ends there can begin, and how likely each is, summed up."""
        ways, lattice = [1.0], [([1.0], [0])]
        for end in range(1, len(word) + 1):
            starts, weights = list[int](), list[float]()
            for start in range(max(0, end - self.longest), end):
                found = self.pieces.get(word[start:end])
                if found is None and start < end - 1:
                    continue
                score = self.unknown if found is None else found[1]
                starts.append(start)
                weights.append(ways[start - end] * exp(self.alpha * score))
            shares = list(accumulate(weights))
            lattice.append((shares, starts))
            # Only their proportions count, so those still needed are scaled: a long text would underflow.
            ways = [way / shares[-1] for way in ways[-self.longest :]] + [1.0]
        return lattice


SUBWORD_SAMPLERS: dict[str, type[SubwordSampler]] = {
    "bpe": BpeDropout,
    "unigram": UnigramSampler,
}


class SamplingVocabulary(Vocabulary):
    """A vocabulary that cuts texts at random. What it draws follows from the seed and from what it was asked before."""

    def __init__(self, plain: Vocabulary, kind: str, alpha: float, seed: Sequence[int]) -> None:
        super().__init__(plain.model, plain.normalization)
        self._draw = SUBWORD_SAMPLERS[kind](plain, alpha)
        self._random = Random(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]))
        self._drawn: OrderedDict[str, list[Cut]] = OrderedDict()
        """of words, those met last at the end"""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        words = (_WORD.findall(self.spelled(text)) for text in texts)
        return [[i for word in some for i in self._cut(word)] for some in words]

    def _cut(self, word: str) -> Cut:
        drawn = self._drawn.setdefault(word, [])
        self._drawn.move_to_end(word)
        if len(self._drawn) > WORDS_REMEMBERED:
            self._drawn.popitem(last=False)
        if len(drawn) < DRAWS_OF_A_WORD:
            drawn.append(self._draw(word, self._random))
            return drawn[-1]
        return drawn[int(self._random.random() * DRAWS_OF_A_WORD)]


@dataclass(frozen=True)
class SamplingTokenizer(Tokenizer):
    """A tokenizer that cuts texts at random; labels stay as they are."""

    certain: Tokenizer

    @classmethod
    def of(
        cls,
        plain: Tokenizer,
        kind: str,
        alpha: float,
        seed: Sequence[int],
        labels: bool = False,
    ) -> SamplingTokenizer:
        source = SamplingVocabulary(plain.source, kind, alpha, [*seed, 0])
        target = (
            plain.target if labels else SamplingVocabulary(plain.target, kind, alpha, [*seed, 1])
        )
        return cls(source, target, plain)

    @property
    def plain(self) -> Tokenizer:
        return self.certain
