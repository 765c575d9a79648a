"""The words of a text, in scripts with and without spaces between words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import NamedTuple

# Chinese characters, and Japanese kana.
_IDEOGRAPHS = r"\u2e80-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U000323af"
# Scripts without spaces between words: every character is a unit of its own.
UNSPACED = rf"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff{_IDEOGRAPHS}"
_WORD_CHARACTER = rf"[^\W{UNSPACED}]"
_UNSPACED_CHARACTER = f"[{UNSPACED}]"
_WORD_OR_SYMBOL = re.compile(rf"[{UNSPACED}]|{_WORD_CHARACTER}+|[^\w\s]")
_BETWEEN_SPACES = re.compile(r"\S+")


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """A pattern that most commands do not need: these classes of characters take 2 ms to compile."""
    return re.compile(pattern)


class Span(NamedTuple):
    """A range of characters; ``end`` is exclusive."""

    start: int
    end: int


def word_and_symbol_spans(text: str) -> list[Span]:
    """The words of a text; punctuation, symbols and characters of unspaced scripts count as words by themselves."""
    return [Span(*match.span()) for match in _WORD_OR_SYMBOL.finditer(text)]


def word_spans(text: str) -> list[Span]:
    """The words of a text, separated by whitespace."""
    return [Span(*match.span()) for match in _BETWEEN_SPACES.finditer(text)]


def is_word_character(character: str) -> bool:
    """Whether two such characters side by side belong to one word: letters and digits of scripts with spaces."""
    return _compiled(_WORD_CHARACTER).fullmatch(character) is not None


def is_unspaced_script(character: str) -> bool:
    """Whether a character belongs to a script that is written without spaces between words."""
    return _compiled(_UNSPACED_CHARACTER).fullmatch(character) is not None


def count_ideographs(text: str) -> int:
    """The number of Chinese and Japanese characters."""
    return 0 if text.isascii() else len(_compiled(f"[{_IDEOGRAPHS}]").findall(text))


class WholeWordPattern(NamedTuple):
    """Finds a text as whole words, not inside a longer word. It has the methods of an ``re`` pattern.

    The neighbouring characters are checked here: an equivalent regular expression takes a thousand times as long to
    compile.
    """

    pattern: re.Pattern[str]
    starts_with_word: bool
    """whether a word character before a match would make it part of a longer word"""
    ends_with_word: bool

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        start = 0
        while match := self.pattern.search(text, start):
            is_whole = self._is_whole(match)
            start = match.end() if is_whole else match.start() + 1
            if is_whole:
                yield match

    def _is_whole(self, match: re.Match[str]) -> bool:
        start, end, text = match.start(), match.end(), match.string
        if self.starts_with_word and start > 0 and is_word_character(text[start - 1]):
            return False
        return not (self.ends_with_word and end < len(text) and is_word_character(text[end]))

    def search(self, text: str) -> re.Match[str] | None:
        return next(self.finditer(text), None)

    def findall(self, text: str) -> list[str]:
        return [match[0] for match in self.finditer(text)]

    def sub(self, replacement: Callable[[re.Match[str]], str], text: str) -> str:
        parts, start = list[str](), 0
        for match in self.finditer(text):
            parts += [text[start : match.start()], replacement(match)]
            start = match.end()
        return "".join([*parts, text[start:]])


@lru_cache(maxsize=2**14)
def whole_word_pattern(text: str, ignore_case: bool = False) -> WholeWordPattern:
    """A pattern that finds a text as whole words, with any whitespace between them."""
    pattern = re.compile(
        r"\s+".join(map(re.escape, text.split())), re.IGNORECASE if ignore_case else 0
    )
    return WholeWordPattern(pattern, is_word_character(text[0]), is_word_character(text[-1]))


def fold_case(text: str) -> str:
    """Maps texts that ``re.IGNORECASE`` considers equal to the same text, character by character."""
    if text.isascii():
        return text.upper()
    # Some characters become two. The first one is enough, because the result is only used to rule out candidates.
    return "".join(character.lower()[0].upper()[0] for character in text)
