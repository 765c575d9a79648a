"""Input formats: each class reads pairs of text out of files of one format.

To add a format, write a class here and register it:

    @INPUT_FORMATS.register("csv")
    class CSV(InputFormat):
        '''comma-separated values: source, target'''
        suffixes = (".csv",)

        def read(self, *paths: Path) -> Iterator[Pair]: ...

Files of ``data.train.pairs`` with that suffix, compressed or not, are then read by it, and ``regard train`` accepts
them on the command line. Readers stream: a corpus is never in memory as a whole. A reader whose files name languages
yields ``TaggedPair``. A line that cannot be read raises an error with its file and number; nothing is repaired or
skipped.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import ClassVar

from regard.data.dependency_trees import MultiwordToken, ParsedSentence, check_parse
from regard.data.pairs import Pair
from regard.data.text_files import read_lines, uncompressed_name
from regard.errors import RegardError
from regard.recipe import Registry


class InputFormat(ABC):
    """A format of input files."""

    keys: ClassVar[tuple[str, ...]] = ("pairs",)
    """the recipe keys under ``data.train`` that name its files; ``read`` gets one path for each"""
    suffixes: ClassVar[tuple[str, ...]] = ()
    """how the names of its files end, before ``.gz`` or ``.zst``"""

    @abstractmethod
    def read(self, *paths: Path) -> Iterator[Pair]:
        """The pairs of one file, or of the files that belong together."""


INPUT_FORMATS: Registry[type[InputFormat]] = Registry("data.train")


def pair_suffixes() -> tuple[str, ...]:
    """The suffixes of files with both sides of a pair, which ``data.train.pairs`` can name."""
    formats = (kind for kind in INPUT_FORMATS.values() if kind.keys == ("pairs",))
    return tuple(suffix for kind in formats for suffix in kind.suffixes)


def pair_format(path: Path) -> InputFormat:
    """The format of a file of ``data.train.pairs``, by its suffix; TSV if the suffix is not known."""
    name = uncompressed_name(path)
    for kind in INPUT_FORMATS.values():
        if kind.keys == ("pairs",) and name.endswith(kind.suffixes):
            return kind()
    return TSV()


# ---------------------------------------------------------------------------------------------
# Files of one side each


@INPUT_FORMATS.register("parallel")
class ParallelText(InputFormat):
    """two line-parallel text files: line n of one translates line n of the other"""

    keys = ("source", "target")

    def read(self, *paths: Path) -> Iterator[Pair]:
        source_path, target_path = paths
        sources, targets = read_lines(source_path), read_lines(target_path)
        for number, (source, target) in enumerate(zip_longest(sources, targets)):
            if source is None or target is None:
                longer = number + 1 + sum(1 for _ in (targets if source is None else sources))
                counts = (number, longer) if source is None else (longer, number)
                raise RegardError(
                    f"{source_path} has {counts[0]:,} lines but {target_path} has {counts[1]:,}: "
                    "line n of one must translate line n of the other"
                )
            yield Pair(source, target)


@INPUT_FORMATS.register("text")
class PlainText(InputFormat):
    """text without targets, for language modelling"""

    keys = ("text",)

    def read(self, *paths: Path) -> Iterator[Pair]:
        (path,) = paths
        return (Pair(line.strip(), "") for line in read_lines(path))


# ---------------------------------------------------------------------------------------------
# Files of pairs, one pair per line


class LineFormat(InputFormat):
    """A format with one pair per line."""

    def read(self, *paths: Path) -> Iterator[Pair]:
        (path,) = paths
        for number, line in enumerate(read_lines(path), start=1):
            try:
                yield self.parse(line)
            except ValueError as error:
                raise RegardError(f"{path}:{number}: {error}") from None

    @abstractmethod
    def parse(self, line: str) -> Pair:
        """The pair of a line; raises ValueError."""


@INPUT_FORMATS.register("tsv")
class TSV(LineFormat):
    """tab-separated values: source, tab, target; further fields are ignored (Tatoeba puts the licence there)"""

    suffixes = (".tsv",)

    def parse(self, line: str) -> Pair:
        fields = line.split("\t", maxsplit=2)
        if len(fields) < 2:
            raise ValueError(f"no tab in {abbreviate(line)}; a line is source, tab, target")
        return Pair(fields[0], fields[1])


@INPUT_FORMATS.register("jsonl")
class JSONL(LineFormat):
    """JSON lines: objects with the keys source and target"""

    suffixes = (".jsonl",)
    expected = 'a line is {"source": "…", "target": "…"}'

    def parse(self, line: str) -> Pair:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(f"not JSON: {abbreviate(line)}; {self.expected}") from None
        if not isinstance(record, dict):
            raise ValueError(f"not a JSON object: {abbreviate(line)}; {self.expected}")
        for key in ("source", "target"):
            if not isinstance(record.get(key), str):
                value = abbreviate(record[key]) if key in record else "nothing"
                raise ValueError(f'"{key}" must be a string, found {value}; {self.expected}')
            if any("\ud800" <= character <= "\udfff" for character in record[key]):
                # JSON can escape half of a surrogate pair, which is not text and has no UTF-8 form.
                raise ValueError(f'"{key}" has half of a surrogate pair: {abbreviate(record[key])}')
        return Pair(record["source"], record["target"])


def abbreviate(value: object) -> str:
    """A value as it is shown in an error message, at most 60 characters long."""
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


# ---------------------------------------------------------------------------------------------
# CoNLL-U: sentences of words with part-of-speech tags and dependency trees

CONLLU_FIELDS = 10


@INPUT_FORMATS.register("conllu")
class CoNLLU(InputFormat):
    """CoNLL-U: the words of each sentence as source, their universal part-of-speech tags as target"""

    keys = ("conllu",)
    suffixes = (".conllu",)

    def read(self, *paths: Path) -> Iterator[Pair]:
        (path,) = paths
        for sentence in read_conllu(path):
            # Some languages have words with a space in them; a source has one word between spaces.
            words = (word.replace(" ", "_") for word in sentence.words)
            yield Pair(" ".join(words), " ".join(sentence.tags))


def read_conllu(path: Path) -> Iterator[ParsedSentence]:
    """The sentences of a CoNLL-U file.

    Only syntactic words count: ranges such as 1-2 say how several words are written as one, and empty words such as 1.1
    are skipped.
    """
    sentence = _SentenceBuilder()
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            if sentence.words:
                yield sentence.build()
            sentence = _SentenceBuilder()
        elif not line.startswith("#"):
            fields = line.split("\t")
            if len(fields) != CONLLU_FIELDS:
                raise RegardError(
                    f"{path}:{number}: {len(fields)} fields, CoNLL-U has {CONLLU_FIELDS}"
                )
            sentence.line = sentence.line or number
            first, _, last = fields[0].partition("-")
            if last.isdecimal() and first.isdecimal():
                sentence.multiword_tokens[int(first)] = MultiwordToken(fields[1], int(last))
            elif fields[0].isdecimal():
                word = _conllu_word(path, number, fields, len(sentence.words) + 1)
                sentence.words.append(word)
    if sentence.words:
        yield sentence.build()


class _SentenceBuilder:
    """A sentence while its lines are being read."""

    def __init__(self) -> None:
        self.words: list[tuple[str, str, int]] = []
        self.multiword_tokens: dict[int, MultiwordToken] = {}
        self.line = 0

    def build(self) -> ParsedSentence:
        words, tags, heads = (list(column) for column in zip(*self.words, strict=True))
        return ParsedSentence(words, tags, heads, self.multiword_tokens, self.line)


def _conllu_word(path: Path, number: int, fields: list[str], expected: int) -> tuple[str, str, int]:
    """Form, universal part-of-speech tag, and head."""
    if int(fields[0]) != expected:
        raise RegardError(f"{path}:{number}: word {fields[0]} where word {expected} is expected")
    if not fields[6].isdecimal():
        raise RegardError(
            f"{path}:{number}: the head of a word must be a number, not {fields[6]!r}"
        )
    return fields[1], fields[3], int(fields[6])


def read_parses(lines: Iterable[str], path: Path, name: str) -> Iterator[ParsedSentence | None]:
    """The parse of each line out of a CoNLL-U file, checked against the line; None for a blank line.

    ``name``: what to call the lines in error messages, usually their file.
    """
    parses = read_conllu(path)
    number = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            yield None
            continue
        parse = next(parses, None)
        if parse is None:
            raise RegardError(f"{path}: there is no tree for line {number} of {name}")
        check_parse(line, parse, f"{path}:{parse.line}, line {number} of {name}")
        yield parse
    if parse := next(parses, None):
        raise RegardError(f"{path}:{parse.line}: one tree too many: {name} has only {number} lines")
