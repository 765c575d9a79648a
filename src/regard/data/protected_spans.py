"""Protected spans: parts of a text that a translation must copy unchanged, such as placeholders, tags and numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from regard.data.words import UNSPACED, Span, is_word_character
from regard.recipe.registry import Registry

_PLACEHOLDER = rf"""
    \{{\{{[^{{}}\n]+\}}\}}                                         # {{{{ name }}}}
  | [$%]?\{{[^{{}}\s][^{{}}\n]*\}} | \{{\}}                        # {{name}} {{0:.2f}} ${{name}} %{{name}} {{}}
  | %(?:\(\w+\)|\d+\$)?[-+\#0]*\d*(?:\.\d+)?l{{0,2}}[diouxXeEfgGcs@](?![^\W\d_{UNSPACED}])   # %s %(n)d %1$s %5.2f
  | </?[A-Za-z][\w.:-]*(?:\s+[\w.:-]+(?:=(?:"[^"]*"|'[^']*'|[^\s"'>]+))?)*\s*/?>   # <b> </b> <br/> <a href="…">
  | &(?:\w+|\#\d+);                                                # &nbsp; &#160;
  | \b(?:https?|ftp)://[^\s<>"']*[^\s<>"'.,;:!?)\]}}] | \bwww\.[^\s<>"']*[^\s<>"'.,;:!?)\]}}]
  | (?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+                       # e-mail addresses
"""
_NUMBER = r"(?<![\w.,])\d++(?:[.,:/]\d++)*+(?![^\W_])"

PROTECTED_SPANS: Registry[str] = Registry("decoding.protect")
PROTECTED_SPANS.register(
    "placeholders", summary="{name}, %s, tags such as <b>, entities, URLs, e-mail addresses"
)(_PLACEHOLDER)
PROTECTED_SPANS.register("numbers", summary="numbers, dates and times written in digits")(_NUMBER)


class Occurrence(NamedTuple):
    """How a protected span occurs in a text."""

    times: int
    touches_before: bool
    """somewhere a word character directly precedes it"""
    touches_after: bool
    """somewhere a word character directly follows it"""


class ProtectedSpans:
    """Finds the protected spans of some kinds (the names in ``PROTECTED_SPANS``) in texts."""

    def __init__(self, kinds: Sequence[str]) -> None:
        # In the order of the registry, placeholders first: a number inside a URL is part of the URL.
        patterns = [pattern for kind, pattern in PROTECTED_SPANS.items() if kind in kinds]
        alternatives = "|".join(f"(?:{pattern})" for pattern in patterns)
        self._pattern = re.compile(alternatives or r"(?!)", re.VERBOSE)

    def find(self, text: str) -> Counter[str]:
        """The protected spans and how often each occurs, in the order of the text."""
        return Counter(match[0] for match in self._pattern.finditer(text))

    def occurrences(self, text: str) -> dict[str, Occurrence]:
        """The protected spans, how often each occurs, and whether a word character touches it, as with tags."""
        occurrences: dict[str, Occurrence] = {}
        for match in self._pattern.finditer(text):
            times, touches_before, touches_after = occurrences.get(match[0], (0, False, False))
            touches_before |= is_word_character(text[match.start() - 1 : match.start()])
            touches_after |= is_word_character(text[match.end() : match.end() + 1])
            occurrences[match[0]] = Occurrence(times + 1, touches_before, touches_after)
        return occurrences

    def replace(self, text: str, substitutes: Mapping[str, str]) -> str:
        """The text with each protected span replaced by its substitute."""
        return self._pattern.sub(lambda match: substitutes[match[0]], text)

    def spans(self, text: str) -> list[Span]:
        """Where the protected spans are."""
        return [Span(*match.span()) for match in self._pattern.finditer(text)]

    def remove(self, text: str) -> str:
        """The text with a space in place of each protected span."""
        return self._pattern.sub(" ", text)

    def map_outside(self, text: str, change: Callable[[str], str]) -> str:
        """The text with every part that is not a protected span changed by a function."""
        parts, end = list[str](), 0
        for match in self._pattern.finditer(text):
            parts += [change(text[end : match.start()]), match[0]]
            end = match.end()
        return "".join([*parts, change(text[end:])])

    def mismatches(self, source: str, translation: str) -> list[str]:
        """One message for each protected span that the translation has more or fewer times than the source."""
        in_source, in_translation = self.find(source), self.find(translation)
        return [
            f"{span} occurs {in_source[span]} time(s) in the source, {in_translation[span]} in the translation"
            for span in {**in_source, **in_translation}
            if in_source[span] != in_translation[span]
        ]
