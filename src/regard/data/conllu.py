"""CoNLL-U: sentences whose words carry a tag and hang on one another as a tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from regard.data.text_files import read_lines
from regard.errors import RegardError

FIELDS = 10


class MultiwordToken(NamedTuple):
    """Several words written as one, as German writes zu dem: zum."""

    form: str
    last: int
    """the number of the last of its words"""


class ParsedSentence(NamedTuple):
    words: list[str]
    tags: list[str]
    """the universal part of speech of each word"""
    heads: list[int]
    """the number of the word each word hangs on, counted from 1; 0 for the root"""
    written: Mapping[int, MultiwordToken] = MappingProxyType({})
    """words written as one, by the number of the first"""
    line: int = 0
    """of the file, where the sentence begins"""


def read_conllu(path: Path) -> Iterator[ParsedSentence]:
    """The sentences of a file, unpacked if its name ends in ``.gz`` or ``.zst``.

    Only syntactic words count: ranges such as 1-2 say how they are written, empty words such as 1.1 are passed over.
    """
    found = _Sentence()
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            if found.words:
                yield found.parsed()
            found = _Sentence()
        elif not line.startswith("#"):
            fields = line.split("\t")
            if len(fields) != FIELDS:
                raise RegardError(f"{path}:{number}: {len(fields)} fields, CoNLL-U has {FIELDS}")
            found.line = found.line or number
            first, _, last = fields[0].partition("-")
            if last.isdecimal() and first.isdecimal():
                found.written[int(first)] = MultiwordToken(fields[1], int(last))
            elif fields[0].isdecimal():
                found.words.append(_word(path, number, fields, len(found.words) + 1))
    if found.words:
        yield found.parsed()


class _Sentence:
    """A sentence while its lines go by."""

    def __init__(self) -> None:
        self.words: list[tuple[str, str, int]] = []
        self.written: dict[int, MultiwordToken] = {}
        self.line = 0

    def parsed(self) -> ParsedSentence:
        words, tags, heads = (list(column) for column in zip(*self.words, strict=True))
        return ParsedSentence(words, tags, heads, self.written, self.line)


def _word(path: Path, number: int, fields: list[str], expected: int) -> tuple[str, str, int]:
    if int(fields[0]) != expected:
        raise RegardError(f"{path}:{number}: word {fields[0]} where word {expected} is expected")
    if not fields[6].isdecimal():
        raise RegardError(f"{path}:{number}: the head of a word is a number, not {fields[6]!r}")
    return fields[1], fields[3], int(fields[6])
