"""Recasing (truecasing): a text in capitals becomes one in sentence case, which a model reads as well as any other.

The words of ``A MAN IN A BLUE SHIRT`` are segmented into rare subwords, so a model translates them badly. A model that
was trained with ``training.augment.upper`` reads ``A man in a blue shirt`` instead, and its translation is upper-cased
(``Translator.match_case``). Which words had a capital is no longer known; the model learns to do without it.

Placeholders, tags, URLs and e-mail addresses keep their case everywhere. ``inspection/web/model/recasing.js`` does the
same in a browser.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect
from collections.abc import Sequence
from functools import cache

from regard.data.protected_spans import ProtectedSpans
from regard.data.words import Span, whole_word_pattern

MIN_WORDS = 2
"""words with two capitals or more in an all-caps text; one alone may be an acronym, such as NATO"""
_WORD_OR_END = re.compile(r"(?P<word>\w+)|[.!?…]['\"”’»)\]]*\s")
"""a word, or the end of a sentence"""


@cache
def _placeholders() -> ProtectedSpans:
    return ProtectedSpans(("placeholders",))


def is_upper_case(text: str) -> bool:
    """Whether a text has letters and all of them are capitals. It has no letter of a script without case."""
    if text.islower():
        return False
    outside = _placeholders().remove(text)
    if outside != outside.upper() or outside == outside.lower():
        return False
    return outside.isascii() or not any(map(_has_no_case, outside))


def _has_no_case(character: str) -> bool:
    return unicodedata.category(character) == "Lo" and not character.islower()


def is_all_caps(text: str) -> bool:
    """Whether a text is in upper case and long enough to be no acronym."""
    if not is_upper_case(text):
        return False
    words = _placeholders().remove(text).split()
    return sum(sum(map(str.isupper, word)) > 1 for word in words) >= MIN_WORDS


def restore_case(text: str) -> str:
    """An all-caps text in sentence case; other texts unchanged."""
    return sentence_case(text) if is_all_caps(text) else text


def sentence_case(text: str) -> str:
    """The text in lower case, with a capital at the beginning of each sentence."""
    lower = _placeholders().map_outside(text, _lower)
    protected = [Span(0, 0), *_placeholders().spans(lower)]
    parts, end, begins = list[str](), 0, True
    for match in _WORD_OR_END.finditer(lower):
        start = match.start()
        if begins and match["word"]:
            span = protected[bisect(protected, start, key=lambda span: span.start) - 1]
            if start >= span.end:
                parts += [lower[end:start], lower[start].title()]
                end = start + 1
        begins = not match["word"]
    return "".join([*parts, lower[end:]])


def _lower(text: str) -> str:
    return text.lower().replace("i\u0307", "i")  # the Turkish capital I with a dot


def upper_case(text: str, keep: Sequence[str] = ()) -> str:
    """The text in upper case, except for placeholders, tags and URLs, and for the terms to keep."""
    spans = _placeholders().spans(text)
    for term in filter(str.strip, keep):
        spans += [Span(*match.span()) for match in whole_word_pattern(term.strip()).finditer(text)]
    parts, end = list[str](), 0
    for start, stop in sorted(spans):
        parts += [text[end:start].upper(), text[max(start, end) : stop]]
        end = max(end, stop)
    return "".join([*parts, text[end:].upper()])
