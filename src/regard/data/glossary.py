"""A glossary: how certain terms must be translated."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from regard.data.text_files import read_lines
from regard.data.words import fold_case, whole_word_pattern
from regard.errors import RegardError

PREFIX_LENGTH = 8
"""characters by which terms are indexed"""


class Glossary:
    """Source terms and their translations.

    A term matches whole words. A lower-case term matches in any case, another one only as it is written. Where terms
    overlap, the longer one wins.
    """

    def __init__(self, terms: dict[str, str]) -> None:
        if invalid := [term for term in terms if not term or term != term.strip()]:
            raise RegardError(
                f"glossary term {invalid[0]!r}: must not be empty or begin or end with a space"
            )
        self.terms = terms
        self._longest_first = sorted(terms, key=lambda term: -len(term))
        self._by_prefix: dict[str, list[int]] = {}
        """indices into the terms, longest first"""
        for index, term in enumerate(self._longest_first):
            prefix = fold_case(term.split()[0][:PREFIX_LENGTH])
            self._by_prefix.setdefault(prefix, []).append(index)
        self._prefix_lengths = {len(prefix) for prefix in self._by_prefix}

    @classmethod
    def read(cls, path: Path) -> Glossary:
        """Read a file with lines of source term, tab, target term; blank lines are skipped."""
        terms: dict[str, str] = {}
        for number, line in enumerate(read_lines(path), 1):
            if not line.strip():
                continue
            source, _, target = (part.strip() for part in line.partition("\t"))
            if not source or not target or "\t" in target:
                raise RegardError(f"{path}:{number}: a line must be source term, tab, target term")
            if terms.get(source, target) != target:
                raise RegardError(
                    f"{path}:{number}: {source!r} is translated as {target!r} here "
                    f"and as {terms[source]!r} before"
                )
            terms[source] = target
        return cls(terms)

    def target_terms(self, text: str) -> list[str]:
        """The translations of the source terms in a text, each once."""
        found: dict[str, None] = {}
        for term in self._candidates(text):
            # Matches are blanked out, so that shorter terms inside them do not match.
            pattern = whole_word_pattern(term, ignore_case=term == term.lower())
            rest = pattern.sub(lambda match: "\0" * len(match[0]), text)
            if rest != text:
                found[self.terms[term]] = None
            text = rest
        return list(found)

    def _candidates(self, text: str) -> list[str]:
        """The terms whose prefix occurs in a text, longest first. Trying every term of a large glossary is slow."""
        folded = fold_case(text)
        substrings = {
            folded[start : start + length]
            for length in self._prefix_lengths
            for start in range(len(folded))
        }
        indices = (self._by_prefix[prefix] for prefix in substrings & self._by_prefix.keys())
        return [self._longest_first[index] for index in sorted(chain.from_iterable(indices))]
