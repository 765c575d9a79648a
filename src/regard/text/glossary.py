"""A glossary: how terms are to be translated."""

from __future__ import annotations

import re
from pathlib import Path

from regard.errors import RegardError
from regard.text.lines import read_lines
from regard.text.words import as_words


class Glossary:
    """Source terms and what they are called in the target.

    A term is found where it stands as words. One in lower case is found in any case, another only as it is written.
    Where terms overlap the longer one counts.
    """

    def __init__(self, terms: dict[str, str]) -> None:
        if wrong := [term for term in terms if not term or term != term.strip()]:
            raise RegardError(f"{wrong[0]!r} is no term: it is empty, or has blanks around it")
        self.terms = terms
        longest_first = sorted(terms.items(), key=lambda pair: -len(pair[0]))
        self._patterns: list[tuple[re.Pattern[str], str]] = [
            (as_words(term, any_case=term == term.lower()), target)
            for term, target in longest_first
        ]

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
        for pattern, target in self._patterns:
            # What belongs to a longer term is blotted out.
            text, count = pattern.subn(lambda term: "\0" * len(term[0]), text)
            if count:
                found[target] = None
        return list(found)
