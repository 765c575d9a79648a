"""Where words are in a text, in scripts with spaces and without."""

from __future__ import annotations

import re
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


def as_words(text: str, any_case: bool = False) -> re.Pattern[str]:
    """Finds a text where it stands as words, not inside a longer one."""
    before = rf"(?<!{_LETTER})" if joins(text[0]) else ""
    after = rf"(?!{_LETTER})" if joins(text[-1]) else ""
    blanks = r"\s+".join(map(re.escape, text.split()))
    return re.compile(before + blanks + after, re.IGNORECASE if any_case else 0)
