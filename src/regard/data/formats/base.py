"""What all input formats have in common: the registry, the base class, the options of reading, and error reports."""

from __future__ import annotations

import re
import zipfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from regard.data.pairs import Pair
from regard.data.text_files import BadLine, DataFile, RemoteFile, decoded_lines, uncompressed_name
from regard.errors import RegardError, shorten
from regard.recipe import Registry

OnBadLine = Literal["error", "skip"]
NamePair = tuple[str, str]
"""the names of the source and target columns, or the codes of the source and target languages"""


BAD_LINES = "bad lines skipped"
MANY_BAD_LINES = 0.1
"""a larger share of bad lines gives a warning: the format or the encoding is probably wrong"""


class Skipped:
    """Counts what was left out, by reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        """the first example of each reason"""
        self.read = 0
        """the pairs that were read, if they are counted"""

    def add(self, reason: str, example: str) -> None:
        self.counts[reason] += 1
        self.examples.setdefault(reason, example)

    def clear(self) -> None:
        """Start over, before the same files are read again."""
        self.counts.clear()
        self.read = 0

    def messages(self) -> list[str]:
        """One line for each reason, and a warning if there are many bad lines."""
        bad = self.counts[BAD_LINES]
        total = self.read + bad
        lines = [
            f"{reason}: {count:,}{f' of {total:,}' * (reason == BAD_LINES and self.read > 0)} "
            f"(the first: {self.examples[reason]})"
            for reason, count in self.counts.items()
        ]
        if self.read and bad > MANY_BAD_LINES * total:
            lines.append(
                f"warning: {bad / total:.0%} of the lines are bad; do the files have another format or encoding?"
            )
        return lines


HOW_TO_SKIP = "or skip single lines with --on-bad-line skip; in a recipe: on_bad_line"


@dataclass(frozen=True)
class ReadOptions:
    """What the user said about files of pairs."""

    columns: NamePair | None = None
    """names or numbers (from 1) of the columns of source and target, or their keys or languages"""
    languages: NamePair | None = None
    on_bad_line: OnBadLine = "error"
    skipped: Skipped = field(default_factory=Skipped)

    @property
    def requested_languages(self) -> NamePair | None:
        """The languages to read from a file that has languages instead of columns."""
        return self.columns or self.languages


class Layout(NamedTuple):
    """How a file is read: what was found in it, or what the user said."""

    details: tuple[str, ...] = ()
    """what to tell the user, one line each"""
    languages: NamePair | None = None
    key: str = ""
    """identifies a layout that is not the default of the format"""


class InputFormat(ABC):
    """A format of input files."""

    keys: ClassVar[tuple[str, ...]] = ("pairs",)
    """the recipe keys under ``data.train`` that name its files; ``read`` gets one path for each"""
    suffixes: ClassVar[tuple[str, ...]] = ()
    """how the names of its files end, before ``.gz``, ``.zst`` or ``.xz``"""

    def __init__(self, options: ReadOptions | None = None) -> None:
        self.options = options or ReadOptions()

    @abstractmethod
    def read(self, *paths: DataFile) -> Iterator[Pair]:
        """The pairs of one file, or of the files that belong together."""

    def layout(self, *paths: DataFile) -> Layout:
        """How the file is read; looks only at its beginning."""
        return Layout()

    def bad(self, location: str, problem: str) -> None:
        """Raise an error for a line that cannot be read, or count it if such lines are to be skipped."""
        if self.options.on_bad_line == "error":
            raise RegardError(f"{location}: {problem} ({HOW_TO_SKIP})")
        self.options.skipped.add(BAD_LINES, f"{location}: {problem}")

    def lines(self, path: DataFile) -> Generator[tuple[int, str], None, None]:
        """The lines of a text file with their numbers, without bad ones."""
        for number, line in enumerate(decoded_lines(path), start=1):
            if isinstance(line, BadLine):
                self.bad(f"{path}:{number}", line.problem)
            else:
                yield number, line


INPUT_FORMATS: Registry[type[InputFormat]] = Registry("data.train")


def pair_suffixes() -> tuple[str, ...]:
    """The suffixes of files with both sides of a pair, which ``data.train.pairs`` can name."""
    formats = (
        format_class for format_class in INPUT_FORMATS.values() if format_class.keys == ("pairs",)
    )
    return tuple(suffix for format_class in formats for suffix in format_class.suffixes)


def pair_format(path: DataFile, options: ReadOptions | None = None) -> InputFormat:
    """The format of a file of ``data.train.pairs``, by its suffix; TSV if the suffix is not known.

    A folder or a pattern such as ``*.tmx`` stands for the files in it.
    """
    if not isinstance(path, zipfile.Path) and (path.is_dir() or is_pattern(path)):
        return INPUT_FORMATS["folder"](options)
    return (suffix_format(path) or INPUT_FORMATS["tsv"])(options)


def suffix_format(path: DataFile) -> type[InputFormat] | None:
    """The format of a file of pairs by its suffix, if it is known."""
    name = uncompressed_name(path).lower()
    for format_class in INPUT_FORMATS.values():
        if format_class.keys == ("pairs",) and name.endswith(format_class.suffixes):
            return format_class
    return None


def is_pattern(path: Path | RemoteFile) -> bool:
    """Whether a name is a pattern such as ``*.tmx``, and not the name of a file."""
    return any(character in str(path) for character in "*?[") and not path.exists()


def format_name(input_format: InputFormat) -> str:
    """The name under which a format is registered."""
    return next(name for name, value in INPUT_FORMATS.items() if value is type(input_format))


def abbreviate(value: object) -> str:
    """A value as it is shown in an error message, at most 60 characters long."""
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return shorten(text, 60)


def one_line(text: str) -> str:
    """A text with its line breaks, and the indentation after them, replaced by spaces."""
    text = text.strip(" \t\r\n")
    if "\n" not in text and "\r" not in text:
        return text
    return re.sub(r"[ \t]*[\r\n]+[ \t\r\n]*", " ", text)


def language_names(languages: NamePair) -> str:
    return f"{languages[0]} to {languages[1]}"


def how_to_choose_languages(source: str, target: str) -> str:
    """How to name the languages, in a command or in a recipe."""
    return f"name them with --languages, for example --languages {source},{target} (in a recipe: data.languages)"
