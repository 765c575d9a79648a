"""Lines in, in portions, and lines out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

import typer

from regard.errors import RegardError

Item = TypeVar("Item")

LINES_AT_ONCE = 1024


def one_way_in(texts: list[str] | None, input: Path | None) -> None:
    """Either texts or a file, and that is there: said before a model is opened."""
    if texts and input:
        raise RegardError("give either texts or --input, not both")
    if input and not input.exists():
        raise RegardError(f"--input {input}: no such file")
    if input and input.is_dir():
        raise RegardError(f"--input {input}: a folder, not a file")


def tell(lines: Iterator[str], output: Path | None) -> None:
    """To standard output as they come, or to a file that is there whole or not at all."""
    if output is None:
        for line in lines:
            print(line, flush=True)
        return
    from regard.storage.run_dir import write_atomic

    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)

    write_atomic(output, write)


def given_lines(texts: list[str] | None, input: Path | None) -> Iterator[str]:
    """What to work on: the texts of the command line, a file, or standard input."""
    from regard.data.corpus import read_lines

    if texts:
        return iter(texts)
    return read_lines(input, may_be_empty=True) if input else _standard_input()


def portions_of(items: Iterable[Item], streamed: bool) -> Iterator[list[Item]]:
    """In portions of one size; streamed: as much as is there, so that a person at a terminal never waits."""
    from regard.storage.prefetch import portions

    if streamed:
        return portions(items, LINES_AT_ONCE)
    rest = iter(items)
    return iter(lambda: list(islice(rest, LINES_AT_ONCE)), [])


def _standard_input() -> Iterator[str]:
    if sys.stdin is None:
        raise RegardError("standard input is closed; give texts or --input")
    if sys.stdin.isatty():
        typer.echo("Type a line and Enter; Ctrl-D ends.", err=True)
    for number, line in enumerate(_raw_lines(), 1):
        try:
            yield line.decode("utf-8").rstrip("\r")
        except UnicodeDecodeError:
            raise RegardError(f"standard input, line {number}: not UTF-8 text") from None


def _raw_lines() -> Iterator[bytes]:
    """Read from the descriptor: a thread that waits inside sys.stdin cannot be ended cleanly."""
    from regard.data.text_files import split

    return split(iter(lambda: os.read(0, 65536), b""))
