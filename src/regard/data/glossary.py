"""A glossary: how certain terms must be translated.

``tasks/translation_requests.py`` makes the terms of a text phrases of its request; ``decoding/constraints.py``
guarantees that the translation contains them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from regard.data.formats.base import abbreviate
from regard.data.recasing import is_all_caps
from regard.data.text_files import read_lines
from regard.data.words import fold_case, whole_word_pattern, word_and_symbol_spans
from regard.errors import RegardError


class TermTrie:
    """Terms as sequences of words and symbols: finds those that may occur in a text, at once.

    Trying every term of a large glossary is slow.
    """

    def __init__(self) -> None:
        self._children: dict[str, TermTrie] = {}
        self._terms: list[int] = []

    def add(self, term: str, index: int) -> None:
        node = self
        for unit in _units(term):
            node = node._children.setdefault(unit, TermTrie())
        node._terms.append(index)

    def find(self, text: str) -> set[int]:
        """The terms whose words and symbols follow each other in a text, whatever is between them, in any case."""
        units = [*_units(text), ""]  # no term contains the empty unit
        terms: set[int] = set()
        for start in range(len(units)):
            node, position = self._children.get(units[start]), start
            while node is not None:
                if node._terms:
                    terms.update(node._terms)
                position += 1
                node = node._children.get(units[position])
        return terms


def _units(text: str) -> list[str]:
    return [fold_case(text[start:end]) for start, end in word_and_symbol_spans(text)]


class Glossary:
    """Source terms and their translations.

    A term matches whole words. A lower-case term matches in any case, another one only as it is written. Where terms
    overlap, the longer one wins.
    """

    def __init__(self, terms: dict[str, str]) -> None:
        for term in chain.from_iterable(terms.items()):
            if not term or term != term.strip():
                raise RegardError(
                    f"glossary term {abbreviate(term)}: must not be empty or begin or end with a space"
                )
        self.terms = terms
        self._longest_first = sorted(terms, key=lambda term: -len(term))
        self._trie = TermTrie()
        for index, term in enumerate(self._longest_first):
            self._trie.add(term, index)

    @classmethod
    def read(cls, path: Path) -> Glossary:
        """Read a file with lines of source term, tab, target term."""
        return cls.parse(read_lines(path), str(path))

    @classmethod
    def parse(cls, lines: Iterable[str], name: str) -> Glossary:
        """A glossary from lines of source term, tab, target term; blank lines are skipped. name: for error messages."""
        terms: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            source, _, target = (field.strip() for field in line.partition("\t"))
            if not source or not target or "\t" in target:
                raise RegardError(f"{name}:{number}: a line must be source term, tab, target term")
            if terms.get(source, target) != target:
                raise RegardError(
                    f"{name}:{number}: {abbreviate(source)} is translated as {abbreviate(target)} "
                    f"here and as {abbreviate(terms[source])} before"
                )
            terms[source] = target
        return cls(terms)

    def target_terms(self, text: str) -> list[str]:
        """The translations of the source terms in a text, each once."""
        translations: dict[str, None] = {}
        any_case = is_all_caps(text)  # then capitals do not distinguish words
        for term in (self._longest_first[index] for index in sorted(self._trie.find(text))):
            # Matches are blanked out, so that shorter terms inside them do not match.
            pattern = whole_word_pattern(term, ignore_case=any_case or term == term.lower())
            remaining = pattern.sub(lambda match: "\0" * len(match[0]), text)
            if remaining != text:
                translations[self.terms[term]] = None
            text = remaining
        return list(translations)
