"""Features of many texts at once, which the rules of ``quality.py`` compare: lengths, scripts, words, hashes.

A ``TextBatch`` is many texts as one array of code points, so that features of all of them are computed with numpy,
without a loop. A ``PairBatch`` has one for the sources and one for the targets.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.data.pairs import Pair
from regard.data.words import is_unspaced_script

if TYPE_CHECKING:
    from regard.data.misalignment import EncodedPairs, Floats, Lexicon, Strengths

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
Hashes = NDArray[np.uint64]

LETTER, UPPER, LOWER, DIGIT, CONTROL, UNSPACED, WIDE = (1 << bit for bit in range(7))
"""classes of characters, as bits: UNSPACED are letters that are words by themselves, WIDE count three times"""

WIDTH = 3
"""A Chinese, Japanese or Korean character says as much as three Latin letters (measured: docs/your_data.md)."""
STEM = 6
"""letters of a word that count: most inflected forms are then one word"""
MAX_WORDS = 32
"""words of a text that are looked at: enough to recognise its language and its translation"""

_TABLE_SIZE = 0x10002
"""the Basic Multilingual Plane, and two entries for all other code points"""
_OTHER, _OTHER_IDEOGRAPH = 0x10000, 0x10001
_IDEOGRAPHS = range(0x3400, 0xA000)
_HANGUL = range(0xAC00, 0xD7A4)
HAN = "Chinese and Japanese"
_CONTROLS = "\ufeff\ufff9\ufffa\ufffb\ufffc\u2028\u2029"
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class CharacterTable(NamedTuple):
    """What is known of each code point."""

    classes: NDArray[np.uint8]
    scripts: NDArray[np.uint8]
    """index into ``names``; 0 for characters of no script"""
    lower: NDArray[np.uint32]
    names: list[str]


@lru_cache(maxsize=1)
def character_table() -> CharacterTable:
    """The table of all characters, made once."""
    classes = np.zeros(_TABLE_SIZE, np.uint8)
    scripts = np.zeros(_TABLE_SIZE, np.uint8)
    lower = np.arange(_TABLE_SIZE, dtype=np.uint32)
    names = ["none"]
    numbers: dict[str, int] = {}
    for code in range(_TABLE_SIZE):
        character = chr(0x20000 if code == _OTHER_IDEOGRAPH else code)
        category = "So" if code == _OTHER else unicodedata.category(character)
        if category[0] == "L":
            script = _script(character)
            if script not in numbers and len(names) < 256:
                numbers[script] = len(names)
                names.append(script)
            scripts[code] = numbers.get(script, 0)
            classes[code] = LETTER | _case(category)
            if script in (HAN, "HANGUL"):
                classes[code] |= WIDE
            if is_unspaced_script(character):
                classes[code] |= UNSPACED
            lower[code] = ord(character.lower()[0]) if code < _OTHER else code
        elif category[0] == "M":
            classes[code] = LETTER  # an accent belongs to its word
        elif category == "Nd":
            classes[code] = DIGIT
        elif category in ("Cc", "Cn", "Co", "Cs"):
            classes[code] = CONTROL
    for character in _CONTROLS:
        classes[ord(character)] = CONTROL
    return CharacterTable(classes, scripts, lower, names)


def _script(character: str) -> str:
    """The script of a letter: the first word of its name, apart from some variants."""
    if ord(character) in _HANGUL:
        return "HANGUL"
    if ord(character) in _IDEOGRAPHS:
        return HAN
    words = unicodedata.name(character, "none").split()
    if words[0] in ("CJK", "HIRAGANA", "KATAKANA", "IDEOGRAPHIC", "KATAKANA-HIRAGANA"):
        return HAN
    return words[1] if words[0] in ("FULLWIDTH", "HALFWIDTH") and len(words) > 1 else words[0]


def _case(category: str) -> int:
    return {"Lu": UPPER, "Lt": UPPER, "Ll": LOWER}.get(category, 0)


def character_set(characters: Iterable[str]) -> Mask:
    """A table that is true for some characters of the Basic Multilingual Plane."""
    table = np.zeros(_TABLE_SIZE, np.bool_)
    table[[ord(character) for character in characters]] = True
    return table


class Words(NamedTuple):
    """The words of several texts, one text after another, each as the hash of its stem in lower case."""

    hashes: Hashes
    counts: Ints
    """number of words of each text"""


class TextBatch:
    """Texts with the properties that the rules of ``quality.py`` need, computed when they are first used."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.lengths: Ints = np.fromiter(map(len, texts), np.int64, len(texts))
        self.ends: Ints = np.cumsum(self.lengths)

    @cached_property
    def joined(self) -> str:
        return "".join(self.texts)

    @cached_property
    def codes(self) -> NDArray[np.uint32]:
        """The code points of all texts, one text after another."""
        order = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"
        codes = np.frombuffer(self.joined.encode(order, "surrogatepass"), np.uint32)
        if int(codes.max(initial=0)) < _OTHER:
            return codes
        ideograph = (codes >= 0x20000) & (codes < 0x32400)
        return np.where(codes < _OTHER, codes, _OTHER + ideograph).astype(np.uint32)

    @cached_property
    def classes(self) -> NDArray[np.uint8]:
        """The class of each character."""
        return character_table().classes[self.codes]

    def count(self, marks: Mask) -> Ints:
        """How many characters of each text are marked."""
        totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(marks)])
        return np.asarray(totals[self.ends] - totals[self.ends - self.lengths])

    @cached_property
    def letters(self) -> Ints:
        return self.count(self.classes & LETTER > 0)

    @cached_property
    def digits(self) -> Ints:
        return self.count(self.classes & DIGIT > 0)

    @cached_property
    def widths(self) -> Ints:
        """The lengths of the texts in characters, where wide characters count as ``WIDTH``."""
        return self.lengths + (WIDTH - 1) * self.count(self.classes & WIDE > 0)

    @cached_property
    def words(self) -> Words:
        """The words of each text."""
        table = character_table()
        is_letter = self.classes & LETTER > 0
        unspaced = self.classes & UNSPACED > 0
        begins = is_letter.copy()
        begins[1:] &= ~is_letter[:-1] | unspaced[1:] | unspaced[:-1]
        firsts = self.ends[:-1]
        firsts = firsts[firsts < len(begins)]
        begins[firsts] |= is_letter[firsts]
        starts = np.flatnonzero(begins)
        texts = np.searchsorted(self.ends, starts, side="right")
        counts = np.bincount(texts, minlength=len(self.texts))
        position = np.arange(len(starts)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts, texts = starts[position < MAX_WORDS], texts[position < MAX_WORDS]
        counts = np.minimum(counts, MAX_WORDS)
        # A word ends before the next character that is no letter, or that begins another word.
        lower = np.concatenate([table.lower[self.codes], np.zeros(STEM, np.uint32)])
        inside = np.concatenate([is_letter & ~begins, np.zeros(STEM, np.bool_)])
        hashes = lower[starts].astype(np.uint64) * _HASH_FACTOR
        in_word = np.ones(len(starts), np.bool_)
        for offset in range(1, STEM):
            in_word &= inside[starts + offset]
            mixed = hashes ^ (hashes >> np.uint64(29)) ^ lower[starts + offset].astype(np.uint64)
            hashes = np.where(in_word, mixed * _HASH_FACTOR, hashes)
        return Words(hashes, counts)

    @cached_property
    def last_characters(self) -> NDArray[np.uint32]:
        """The code point of the last character of each text; 0 for an empty one."""
        return np.append(self.codes, np.uint32(0))[np.where(self.lengths > 0, self.ends - 1, -1)]

    def matching(self, pattern: re.Pattern[str]) -> Ints:
        """The numbers of the texts in which a pattern occurs, found by one search over all of them.

        A match may begin in one text and end in the next, so these are only candidates.
        """
        starts = [match.start() for match in pattern.finditer(self.joined)]
        return np.unique(np.searchsorted(self.ends, np.array(starts, np.int64), side="right"))

    @cached_property
    def keys(self) -> Hashes:
        """A hash of each text."""
        return self._hash(self.codes, self.lengths)

    @cached_property
    def folded_keys(self) -> Hashes:
        """A hash of the letters and digits of each text, in lower case."""
        is_text = self.classes & (LETTER | DIGIT) > 0
        return self._hash(character_table().lower[self.codes[is_text]], self.count(is_text))

    @staticmethod
    def _hash(codes: NDArray[np.uint32], counts: Ints) -> Hashes:
        """A polynomial hash of each sequence of code points; ``counts`` are their lengths."""
        ends = np.cumsum(counts)
        position = np.arange(len(codes)) - np.repeat(ends - counts, counts)
        terms = _random_numbers()[codes] * _powers(int(counts.max(initial=0)))[position]
        totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
        sums = totals[ends] - totals[ends - counts] + counts.astype(np.uint64)
        return np.asarray((sums ^ (sums >> np.uint64(31))) * _HASH_FACTOR)


@lru_cache(maxsize=1)
def _random_numbers() -> Hashes:
    """One number for each code point."""
    draw = np.random.default_rng(0)
    return draw.integers(0, 2**64, _TABLE_SIZE, np.uint64) | np.uint64(1)


def _powers(count: int) -> Hashes:
    """The first powers of an odd number, modulo 2^64."""
    factors = np.full(count + 1, 0xD6E8FEB86659FD93, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


class KeyCounter:
    """Counts 64-bit keys of a stream, in 12 bytes for each distinct one."""

    def __init__(self) -> None:
        self.runs: list[tuple[Hashes, NDArray[np.int32]]] = []
        """sorted keys with their counts; each run is at most half as long as the one before it"""

    def add(self, keys: Hashes) -> Ints:
        """Count the keys, and return how often each occurred before."""
        distinct, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
        earlier_counts = np.zeros(len(distinct), np.int64)
        for run, run_counts in self.runs:
            index = np.minimum(np.searchsorted(run, distinct), len(run) - 1)
            earlier_counts += np.where(run[index] == distinct, run_counts[index], 0)
        order = np.argsort(inverse, kind="stable")
        rank = np.empty(len(keys), np.int64)
        rank[order] = np.arange(len(keys)) - np.repeat(np.cumsum(counts) - counts, counts)
        if len(distinct):
            self._append(distinct, counts.astype(np.int32))
        return np.asarray(earlier_counts[inverse] + rank)

    def contains(self, keys: Hashes) -> Mask:
        """Whether each key was counted."""
        contained = np.zeros(len(keys), np.bool_)
        for run, _ in self.runs:
            contained |= run[np.minimum(np.searchsorted(run, keys), len(run) - 1)] == keys
        return contained

    def __len__(self) -> int:
        return sum(len(run) for run, _ in self.runs)

    def _append(self, keys: Hashes, counts: NDArray[np.int32]) -> None:
        while self.runs and len(self.runs[-1][0]) < 2 * len(keys):
            run, run_counts = self.runs.pop()
            keys, inverse = np.unique(np.concatenate([run, keys]), return_inverse=True)
            all_counts = np.concatenate([run_counts, counts])
            counts = np.bincount(inverse, all_counts, len(keys)).astype(np.int32)
        self.runs.append((keys, counts))


# ---------------------------------------------------------------------------------------------
# Pairs

BATCH = 8_192
"""pairs that are checked at a time"""


class Alignment(NamedTuple):
    """What a lexicon says about a batch."""

    words: EncodedPairs
    best_strengths: tuple[Strengths, Strengths]
    """the strength of the best translation of each source word and each target word"""
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
        numbers = np.union1d(self.source.matching(pattern), self.target.matching(pattern))
        return [int(number) for number in numbers]

    @property
    def pair_keys(self) -> Hashes:
        return combine_keys(self.source.keys, self.target.keys)

    @property
    def folds(self) -> Ints:
        """0 or 1 for each pair, at random; pairs with the same source are always in the same fold."""
        hashes, counts = self.source.words
        totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes, dtype=np.uint64)])
        ends = np.cumsum(counts)
        sums = totals[ends] - totals[ends - counts]
        return np.asarray(sums >> np.uint64(63), np.int64)

    def alignment(self, lexicon: Lexicon) -> Alignment:
        """The known words of both sides, and how well they explain each other."""
        if self._alignment is None:
            words = lexicon.encode(self)
            strengths = lexicon.best_translations(words)
            self._alignment = Alignment(words, strengths, lexicon.scores(words, strengths))
        return self._alignment


def combine_keys(source: Hashes, target: Hashes) -> Hashes:
    """The key of a pair from those of its sides."""
    return np.asarray(source * np.uint64(0x9E3779B97F4A7C15) ^ (target >> np.uint64(7)) ^ target)


def batches(pairs: Iterable[Pair], size: int = BATCH) -> Iterator[PairBatch]:
    """The pairs of a stream, ``size`` at a time."""
    stream, start = iter(pairs), 0
    while chunk := list(islice(stream, size)):
        yield PairBatch(chunk, start)
        start += len(chunk)
