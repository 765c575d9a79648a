"""Augmentation of training pairs: upper case, title case, typos and missing final punctuation (``training.augment``).

A model that saw only well-edited sentences translates ``A MAN IN A BLUE SHIRT`` badly. Augmentation changes a small
fraction of the training pairs in each epoch. An upper-cased source is recased, as in translation (``recasing.py``): its
capitals are lost, and the target stays as it is. Title case is on both sides, because the translation of such a text
should be in title case. Typos and missing punctuation are only in the source: the target stays correct.

An augmented pair depends only on the seed, the number of the copy of the training data, and the pair itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from random import Random

from regard.data.pairs import ContextPair, Pair, TaggedPair, context_of, tags_of
from regard.data.protected_spans import ProtectedSpans
from regard.data.recasing import is_all_caps, is_upper_case, sentence_case, upper_case
from regard.recipe import AugmentConfig

TYPO_RATE = 0.1
"""fraction of the words that get a typo in a source with typos; it has at least one"""
MIN_WORD_LENGTH = 4
"""shorter words get no typo, because it could turn them into another word"""

_FIRST_LETTERS = re.compile(r"(?<![\w'’])[^\W\d_]")
_FINAL_PUNCTUATION = re.compile(r"\s*[.!?…。！？]+\s*$")
_WORDS = re.compile(rf"[^\W\d_]{{{MIN_WORD_LENGTH},}}")
_PLACEHOLDERS = ProtectedSpans(("placeholders",))
"""placeholders, tags and URLs are never changed"""

_HASH_BYTES = 8
_HASH_RANGE = 2.0**64
_HASHES = 4
"""one for each choice: case, typos, punctuation, and where the typos are"""


class Augmenter:
    """Augments pairs for one of several copies of the training data.

    The choices for a pair are spread evenly over the copies: with ``upper: 0.05`` and 20 copies, every pair is
    upper-cased in exactly one of them.
    """

    def __init__(self, config: AugmentConfig, seed: int, copy: int, copies: int) -> None:
        assert 0 <= copy < copies
        self.config = config
        self.copy, self.copies = copy, copies
        self._key = seed.to_bytes(8, "big")

    def __call__(self, pair: Pair) -> Pair:
        config = self.config
        case, typos, punctuation, typo_seed = self._hashes(pair)
        source, target = pair.source, pair.target
        draw = self._draw(punctuation)
        if draw < config.no_final_punctuation:
            source = without_final_punctuation(source)
        if self._draw(typos) < config.typos:
            source = with_typos(source, Random(typo_seed + self.copy))
        draw = self._draw(case)
        if draw < config.upper:
            source, target = in_capitals(source, target)
        elif draw < config.upper + config.title:
            source, target = title_case(source), title_case(target)
        augmented = Pair(source, target)
        if tags := tags_of(pair):
            augmented = TaggedPair.from_pair(augmented, tags)
        if context := context_of(pair):
            augmented = ContextPair.with_context(augmented, context)
        return augmented

    def _hashes(self, pair: Pair) -> list[int]:
        text = f"{pair.source}\n{pair.target}".encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(text, digest_size=_HASHES * _HASH_BYTES, key=self._key).digest()
        offsets = range(0, len(digest), _HASH_BYTES)
        return [int.from_bytes(digest[start : start + _HASH_BYTES], "big") for start in offsets]

    def _draw(self, number: int) -> float:
        """A number in [0, 1) for this copy. Over all copies, the numbers of a pair are equally spaced."""
        return (number / _HASH_RANGE + self.copy / self.copies) % 1


def in_capitals(source: str, target: str) -> Pair:
    """What the model reads and writes if the source is in capitals.

    That is the recased source and the original target, which is upper-cased after translation. A source that is too
    short for recasing is upper-cased, and so is its target. One in a script without case has no capitals.
    """
    capitals = upper_case(source)
    if is_all_caps(capitals):
        return Pair(sentence_case(capitals), target)
    return Pair(capitals, upper_case(target)) if is_upper_case(capitals) else Pair(source, target)


def title_case(text: str) -> str:
    """The text with the first letter of each word in upper case; ``str.title`` would write Don'T."""
    return _PLACEHOLDERS.map_outside(text, _upper_first_letters)


def without_final_punctuation(text: str) -> str:
    """The text without the punctuation at its end; unchanged if nothing else is left."""
    return _FINAL_PUNCTUATION.sub("", text) or text


def with_typos(text: str, rng: Random) -> str:
    """The text with a typo in about ``TYPO_RATE`` of its longer words, and in at least one of them."""
    return _PLACEHOLDERS.map_outside(text, lambda segment: _add_typos(segment, rng))


def _add_typos(text: str, rng: Random) -> str:
    spans = [match.span() for match in _WORDS.finditer(text)]
    count = max(1, round(TYPO_RATE * len(text.split())))
    for start, end in sorted(rng.sample(spans, min(count, len(spans))), reverse=True):
        text = text[:start] + _misspell(text[start:end], rng) + text[end:]
    return text


def _misspell(word: str, rng: Random) -> str:
    """The word with one typo. Its first letter stays, as in most real typos."""
    return rng.choice(_TYPOS)(word, rng.randrange(1, len(word) - 1))


def _swap(word: str, i: int) -> str:
    return word[:i] + word[i + 1] + word[i] + word[i + 2 :]


def _delete(word: str, i: int) -> str:
    return word[:i] + word[i + 1 :]


def _double(word: str, i: int) -> str:
    return word[: i + 1] + word[i:]


def _replace(word: str, i: int) -> str:
    """The letter becomes the one before it: the letters of the script in use need not be known."""
    return word[:i] + word[i - 1] + word[i + 1 :]


_TYPOS: list[Callable[[str, int], str]] = [_swap, _delete, _double, _replace]


def _upper_first_letters(text: str) -> str:
    return _FIRST_LETTERS.sub(lambda match: match[0].upper(), text)
