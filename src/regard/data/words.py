"""Where words are in a text, in scripts with spaces and without."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

# Chinese characters, and the signs of kana.
_IDEOGRAPHS = r"\u2e80-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U000323af"
# Scripts that set no spaces: a sign is a unit of its own.
_UNSPACED = rf"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff{_IDEOGRAPHS}"
_LETTER = rf"[^\W{_UNSPACED}]"
_UNIT = re.compile(rf"[{_UNSPACED}]|{_LETTER}+|[^\w\s]")
_SIGN = re.compile(rf"[{_UNSPACED}]")
_IDEOGRAPH = re.compile(f"[{_IDEOGRAPHS}]")
_WORD = re.compile(r"\S+")
_ONE_LETTER = re.compile(_LETTER)


class Span(NamedTuple):
    start: int
    end: int


def units(text: str) -> list[Span]:
    """What a tag may stand around: words, and signs by themselves."""
    return [Span(*found.span()) for found in _UNIT.finditer(text)]


def words(text: str) -> list[Span]:
    """What stands between blanks."""
    return [Span(*found.span()) for found in _WORD.finditer(text)]


def joins(sign: str) -> bool:
    """Whether a sign beside another such makes one word of the two: letters and digits, where spaces part words."""
    return _ONE_LETTER.fullmatch(sign) is not None


def unspaced(sign: str) -> bool:
    """Whether it is of a script that sets no spaces."""
    return _SIGN.fullmatch(sign) is not None


def count_ideographs(text: str) -> int:
    """How many signs of Chinese and Japanese it has."""
    return 0 if text.isascii() else len(_IDEOGRAPH.findall(text))


class AsWords(NamedTuple):
    """Finds a text where it stands as words; asked as a pattern of ``re`` is.

    That no letter stands beside it is seen here: a pattern that says so takes a thousand times as long to make.
    """

    pattern: re.Pattern[str]
    opens: bool
    """whether a letter before it would make a longer word of it"""
    closes: bool

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        place = 0
        while found := self.pattern.search(text, place):
            alone = self._stands_alone(found)
            place = found.end() if alone else found.start() + 1
            if alone:
                yield found

    def _stands_alone(self, found: re.Match[str]) -> bool:
        start, end, text = found.start(), found.end(), found.string
        if self.opens and start > 0 and joins(text[start - 1]):
            return False
        return not (self.closes and end < len(text) and joins(text[end]))

    def search(self, text: str) -> re.Match[str] | None:
        return next(self.finditer(text), None)

    def findall(self, text: str) -> list[str]:
        return [found[0] for found in self.finditer(text)]

    def sub(self, other: Callable[[re.Match[str]], str], text: str) -> str:
        """The text with others in their place."""
        parts, place = list[str](), 0
        for found in self.finditer(text):
            parts += [text[place : found.start()], other(found)]
            place = found.end()
        return "".join([*parts, text[place:]])


@lru_cache(maxsize=2**14)
def as_words(text: str, any_case: bool = False) -> AsWords:
    """Finds a text where it stands as words, not inside a longer one."""
    blanks = r"\s+".join(map(re.escape, text.split()))
    pattern = re.compile(blanks, re.IGNORECASE if any_case else 0)
    return AsWords(pattern, joins(text[0]), joins(text[-1]))


def caseless(text: str) -> str:
    """The same, sign for sign, for texts that ``re.IGNORECASE`` takes for the same."""
    if text.isascii():
        return text.upper()
    # Some signs become two, of which the first will do: what is needed is that nothing is missed.
    return "".join(sign.lower()[0].upper()[0] for sign in text)
