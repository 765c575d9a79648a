"""A glossary: how terms are to be translated."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from regard.data.text_files import read_lines
from regard.data.words import as_words, caseless
from regard.errors import RegardError

BEGINNING = 8
"""signs by which terms are looked up"""


class Glossary:
    """Source terms and what they are called in the target.

    A term is found where it stands as words. One in lower case is found in any case, another only as it is written.
    Where terms overlap the longer one counts.
    """

    def __init__(self, terms: dict[str, str]) -> None:
        if wrong := [term for term in terms if not term or term != term.strip()]:
            raise RegardError(f"{wrong[0]!r} is no term: it is empty, or has blanks around it")
        self.terms = terms
        self._longest_first = sorted(terms, key=lambda term: -len(term))
        self._by_beginning: dict[str, list[int]] = {}
        """places of terms among the longest first"""
        for place, term in enumerate(self._longest_first):
            beginning = caseless(term.split()[0][:BEGINNING])
            self._by_beginning.setdefault(beginning, []).append(place)
        self._sizes = {len(beginning) for beginning in self._by_beginning}

    @classmethod
    def read(cls, path: Path) -> Glossary:
        """A file of lines: source term, tab, target term; blank lines are passed over."""
        terms: dict[str, str] = {}
        for number, line in enumerate(read_lines(path), 1):
            if not line.strip():
                continue
            source, _, target = (part.strip() for part in line.partition("\t"))
            if not source or not target or "\t" in target:
                raise RegardError(f"{path}:{number}: a line is source term, tab, target term")
            if terms.get(source, target) != target:
                raise RegardError(
                    f"{path}:{number}: {source!r} is {target!r} here and {terms[source]!r} before"
                )
            terms[source] = target
        return cls(terms)

    def asked_by(self, text: str) -> list[str]:
        """The target terms for the source terms of a text, each once."""
        found: dict[str, None] = {}
        for term in self._perhaps_in(text):
            # What belongs to a longer term is blotted out.
            pattern = as_words(term, any_case=term == term.lower())
            rest = pattern.sub(lambda term: "\0" * len(term[0]), text)
            if rest != text:
                found[self.terms[term]] = None
            text = rest
        return list(found)

    def _perhaps_in(self, text: str) -> list[str]:
        """The terms whose beginning is somewhere in a text, the longest first: to try all of many takes long."""
        plain = caseless(text)
        parts = {plain[at : at + size] for size in self._sizes for at in range(len(plain))}
        begun = (self._by_beginning[part] for part in parts & self._by_beginning.keys())
        return [self._longest_first[place] for place in sorted(chain.from_iterable(begun))]
