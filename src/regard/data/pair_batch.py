"""Some consecutive pairs, with what rules compute from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from regard.data.ibm_model1 import Floats, Lexicon, WordIds
from regard.data.pairs import Pair
from regard.data.text_batch import Hashes, Mask, TextBatch

BATCH = 8_192
"""pairs that are checked at a time"""


class Alignment(NamedTuple):
    """What a lexicon says about a batch."""

    sources: WordIds
    targets: WordIds
    scores: Floats
    """from 0 to 1"""


class PairBatch:
    """Some consecutive pairs."""

    def __init__(self, pairs: Sequence[Pair], start: int = 0) -> None:
        self.pairs, self.start = pairs, start
        """``start``: the number of pairs before them"""
        self.source = TextBatch([pair.source for pair in pairs])
        self.target = TextBatch([pair.target for pair in pairs])
        self.rejected = np.zeros(len(pairs), np.bool_)
        """pairs that an earlier rule rejects"""
        self._alignment: Alignment | None = None

    def __len__(self) -> int:
        return len(self.pairs)

    def where(self, candidates: Iterable[int], test: Callable[[Pair], object]) -> Mask:
        """Marks those of the candidates that pass a test."""
        marks = np.zeros(len(self), np.bool_)
        for number in candidates:
            marks[number] = bool(test(self.pairs[number]))
        return marks

    def matching(self, pattern: re.Pattern[str]) -> list[int]:
        """The pairs in which a pattern may occur, on either side."""
        both = np.union1d(self.source.matching(pattern), self.target.matching(pattern))
        return [int(number) for number in both]

    @property
    def pair_keys(self) -> Hashes:
        return combine_keys(self.source.keys, self.target.keys)

    def alignment(self, lexicon: Lexicon) -> Alignment:
        """The known words of both sides, and how well they explain each other."""
        if self._alignment is None:
            sources = lexicon.source.encode(self.source.words)
            targets = lexicon.target.encode(self.target.words)
            self._alignment = Alignment(sources, targets, lexicon.scores(sources, targets))
        return self._alignment


def combine_keys(source: Hashes, target: Hashes) -> Hashes:
    """The key of a pair from those of its sides."""
    return np.asarray(source * np.uint64(0x9E3779B97F4A7C15) ^ (target >> np.uint64(7)) ^ target)


def batches(pairs: Iterable[Pair], size: int = BATCH) -> Iterator[PairBatch]:
    """The pairs of a stream, some at a time."""
    stream, start = iter(pairs), 0
    while some := list(islice(stream, size)):
        yield PairBatch(some, start)
        start += len(some)
