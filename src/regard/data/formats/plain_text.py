"""Plain text: two line-parallel files, one file without targets, one file with a pair per line, or CoNLL-U."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from itertools import zip_longest

from regard.data.dependency_trees import MultiwordToken, ParsedSentence, check_parse
from regard.data.formats.base import INPUT_FORMATS, InputFormat
from regard.data.pairs import Pair
from regard.data.text_files import BadLine, DataFile, decoded_lines, read_lines
from regard.errors import RegardError


@INPUT_FORMATS.register("parallel")
class ParallelText(InputFormat):
    """two line-parallel text files: line n of one translates line n of the other"""

    keys = ("source", "target")

    def read(self, *paths: DataFile) -> Iterator[Pair]:
        source_path, target_path = paths
        sources, targets = decoded_lines(source_path), decoded_lines(target_path)
        for number, (source, target) in enumerate(zip_longest(sources, targets)):
            if source is None or target is None:
                longer = number + 1 + sum(1 for _ in (targets if source is None else sources))
                counts = (number, longer) if source is None else (longer, number)
                lines = "line" if counts[0] == 1 else "lines"
                raise RegardError(
                    f"{source_path} has {counts[0]:,} {lines} but {target_path} has {counts[1]:,}: "
                    "each line must be the translation of the same line in the other file"
                )
            if isinstance(source, BadLine):
                self.bad(f"{source_path}:{number + 1}", source.problem)
            elif isinstance(target, BadLine):
                self.bad(f"{target_path}:{number + 1}", target.problem)
            else:
                yield Pair(source, target)


@INPUT_FORMATS.register("text")
class PlainText(InputFormat):
    """text without targets, for language modelling"""

    keys = ("text",)

    def read(self, *paths: DataFile) -> Iterator[Pair]:
        (path,) = paths
        return (Pair(line.strip(), "") for _, line in self.lines(path))


class LineFormat(InputFormat):
    """A format with one pair per line."""

    def read(self, *paths: DataFile) -> Iterator[Pair]:
        (path,) = paths
        for number, line in self.lines(path):
            try:
                pair = self.parse(line)
            except ValueError as error:
                self.bad(f"{path}:{number}", str(error))
            else:
                yield pair

    @abstractmethod
    def parse(self, line: str) -> Pair:
        """The pair of a line; raises ValueError."""


CONLLU_FIELDS = 10
MAX_DIGITS = 9
"""of the number of a word; Python refuses to read thousands of them"""


@INPUT_FORMATS.register("conllu")
class CoNLLU(InputFormat):
    """CoNLL-U: the words of each sentence as source, their universal part-of-speech tags as target"""

    keys = ("conllu",)
    suffixes = (".conllu",)

    def read(self, *paths: DataFile) -> Iterator[Pair]:
        (path,) = paths
        for sentence in read_conllu(path):
            # Some languages have words with a space in them; a source has one word between spaces.
            words = (word.replace(" ", "_") for word in sentence.words)
            yield Pair(" ".join(words), " ".join(sentence.tags))


def read_conllu(path: DataFile) -> Iterator[ParsedSentence]:
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
            if max(map(len, (first, last, fields[6]))) > MAX_DIGITS:
                raise RegardError(f"{path}:{number}: a number has more than {MAX_DIGITS} digits")
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


def _conllu_word(
    path: DataFile, number: int, fields: list[str], expected: int
) -> tuple[str, str, int]:
    """Form, universal part-of-speech tag, and head."""
    if int(fields[0]) != expected:
        raise RegardError(f"{path}:{number}: word {fields[0]} where word {expected} is expected")
    if not fields[6].isdecimal():
        raise RegardError(
            f"{path}:{number}: the head of a word must be a number, not {fields[6]!r}"
        )
    return fields[1], fields[3], int(fields[6])


def read_parses(lines: Iterable[str], path: DataFile, name: str) -> Iterator[ParsedSentence | None]:
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
        raise RegardError(
            f"{path}:{parse.line}: more trees than lines: {name} has only {number} lines"
        )
