"""What must pass through a translation untouched: placeholders, tags, addresses, numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from regard.data.words import joins
from regard.recipe import Registry

_PLACEHOLDER = r"""
    \{\{[^{}\n]+\}\} | \$?\{[^{}\s][^{}\n]*\} | \{\}              # {{ name }} {name} {0:.2f} ${name} {}
  | %(?:\(\w+\)|\d+\$)?[-+\#0]*\d*(?:\.\d+)?l{0,2}[diouxXeEfgGcs@](?![^\W\d_])   # %s %(n)d %1$s %5.2f
  | </?[A-Za-z][\w.:-]*(?:\s+[\w.:-]+(?:=(?:"[^"]*"|'[^']*'|[^\s"'>]+))?)*\s*/?>   # <b> </b> <br/> <a href="…">
  | &(?:\w+|\#\d+);                                                # &nbsp; &#160;
  | \b(?:https?|ftp)://[^\s<>"']*[^\s<>"'.,;:!?)\]}] | \bwww\.[^\s<>"']*[^\s<>"'.,;:!?)\]}]
  | (?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+                       # mail addresses
"""
_NUMBER = r"(?<![\w.,])\d++(?:[.,:/]\d++)*+(?![^\W_])"

PROTECTED_SPANS: Registry[str] = Registry("decoding.protect")
PROTECTED_SPANS.register(
    "placeholders", summary="{name}, %s, tags such as <b>, entities, URLs, e-mail addresses"
)(_PLACEHOLDER)
PROTECTED_SPANS.register("numbers", summary="numbers, dates and times written in digits")(_NUMBER)


class Occurrence(NamedTuple):
    """How something stands in a text."""

    times: int
    touches_before: bool
    """somewhere a letter stands right before it"""
    touches_after: bool


class ProtectedSpans:
    """Finds what is to be kept, and what was not."""

    def __init__(self, kinds: Sequence[str]) -> None:
        # Placeholders first: a number inside an address is part of it.
        chosen = [pattern for kind, pattern in PROTECTED_SPANS.items() if kind in kinds]
        self._pattern = re.compile("|".join(f"(?:{one})" for one in chosen) or r"(?!)", re.VERBOSE)

    def find(self, text: str) -> Counter[str]:
        """Each with how often it occurs, in the order in which they come."""
        return Counter(found[0] for found in self._pattern.finditer(text))

    def occurrences(self, text: str) -> dict[str, Occurrence]:
        """The same, and whether it stands by itself or beside a word, as a tag does."""
        found: dict[str, Occurrence] = {}
        for one in self._pattern.finditer(text):
            times, before, after = found.get(one[0], (0, False, False))
            before |= joins(text[one.start() - 1 : one.start()])
            after |= joins(text[one.end() : one.end() + 1])
            found[one[0]] = Occurrence(times + 1, before, after)
        return found

    def replaced(self, text: str, names: Mapping[str, str]) -> str:
        """The text with each of these replaced by its name."""
        return self._pattern.sub(lambda found: names[found[0]], text)

    def lost(self, source: str, translation: str) -> list[str]:
        """What a translation has fewer times, or more times, than its source, each with the counts."""
        before, after = self.find(source), self.find(translation)
        return [
            f"{one} occurs {before[one]} time(s), in the translation {after[one]}"
            for one in {**before, **after}
            if before[one] != after[one]
        ]
