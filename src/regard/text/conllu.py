"""CoNLL-U: sentences whose words carry a tag and hang on one another as a tree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from regard.errors import RegardError
from regard.text.lines import read_lines

FIELDS = 10


class Parsed(NamedTuple):
    words: list[str]
    tags: list[str]
    """the universal part of speech of each word"""
    heads: list[int]
    """the number of the word each word hangs on, counted from 1; 0 for the root"""


def read_conllu(path: Path) -> Iterator[Parsed]:
    """The sentences of a file, unpacked if its name ends in ``.gz`` or ``.zst``.

    Only syntactic words count: ranges such as 1-2 and empty words such as 1.1 are passed over.
    """
    words: list[tuple[str, str, int]] = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            if words:
                yield _parsed(words)
            words = []
        elif not line.startswith("#"):
            fields = line.split("\t")
            if len(fields) != FIELDS:
                raise RegardError(f"{path}:{number}: {len(fields)} fields, CoNLL-U has {FIELDS}")
            if fields[0].isdigit():
                words.append(_word(path, number, fields, len(words) + 1))
    if words:
        yield _parsed(words)


def _word(path: Path, number: int, fields: list[str], expected: int) -> tuple[str, str, int]:
    if int(fields[0]) != expected:
        raise RegardError(f"{path}:{number}: word {fields[0]} where word {expected} is expected")
    if not fields[6].isdigit():
        raise RegardError(f"{path}:{number}: the head of a word is a number, not {fields[6]!r}")
    return fields[1], fields[3], int(fields[6])


def _parsed(words: list[tuple[str, str, int]]) -> Parsed:
    return Parsed(*(list(column) for column in zip(*words, strict=True)))
