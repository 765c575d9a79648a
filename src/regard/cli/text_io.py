"""Reading and writing lines of text: input from arguments, a file or standard input, in chunks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from regard.errors import RegardError

if TYPE_CHECKING:
    import pyarrow as pa

Item = TypeVar("Item")

MAX_COUNTED_BYTES = 10**9

CHUNK_LINES = 1024
"""lines that are read before they are processed together"""


def check_input(texts: list[str] | None, input: Path | None) -> None:
    """Check the input before the model is loaded: texts or an existing file, not both."""
    if texts and input:
        raise RegardError("texts and --input cannot be combined")
    if input and not input.exists():
        raise RegardError(f"--input {input}: no such file")
    if input and input.is_dir():
        raise RegardError(f"--input {input}: a folder, not a file")


def input_lines(
    texts: list[str] | None, input: Path | None, column: str | None = None
) -> Iterator[str]:
    """The lines to process: the texts of the command line, or those of a file or of standard input.

    column: the column of a Parquet file.
    """
    if texts:
        return iter(texts)
    if input and is_parquet(input):
        return _parquet_texts(input, column)
    from regard.data.text_files import read_lines

    return read_lines(input, may_be_empty=True) if input else _standard_input()


def is_parquet(path: Path | None) -> bool:
    return path is not None and path.suffix == ".parquet"


def _parquet_texts(path: Path, column: str | None) -> Iterator[str]:
    """The texts of a column of a Parquet file; line breaks become spaces, and missing texts are empty."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as table:
            name = _text_column(path, table.schema_arrow, column)
            for batch in table.iter_batches(CHUNK_LINES, columns=[name]):
                for text in batch.column(0).to_pylist():
                    yield " ".join((text or "").splitlines())
    except (pa.ArrowException, OSError) as error:
        reason = str(error).split("\n")[0]
        raise RegardError(f"{path}: damaged, or not Parquet: {reason}") from None


def _text_column(path: Path, schema: pa.Schema, column: str | None) -> str:
    """The column with the texts: the given one, or ``source`` or ``text``, or the only column of strings."""
    import pyarrow as pa

    is_text = (pa.types.is_string, pa.types.is_large_string)
    names = [field.name for field in schema if any(test(field.type) for test in is_text)]
    preferred = [name for name in ("source", "text") if name in names]
    chosen = column or (preferred[0] if preferred else names[0] if len(names) == 1 else None)
    if chosen in names:
        return str(chosen)
    available = ", ".join(names) or "none"
    problem = f"--columns {column}: no such column of texts in" if column else "--input"
    raise RegardError(f"{problem} {path}; choose one with --columns; columns of texts: {available}")


def total_lines(input: Path, column: str | None = None) -> int:
    """The number of lines of a file as ``input_lines`` returns them: the last one may lack its line feed."""
    if is_parquet(input):
        from pyarrow.parquet import read_metadata

        next(_parquet_texts(input, column), None)  # raises if it cannot be read
        return int(read_metadata(input).num_rows)
    return sum(1 for _ in input_lines(None, input))


def count_lines(input: Path | None) -> int | None:
    """About the number of lines of a text file, to report progress: it counts line feeds.

    None if the file cannot be read twice, is compressed or very large.
    """
    if input is None:
        return None
    from regard.data.text_files import uncompressed_name

    if not input.is_file() or uncompressed_name(input.name) != input.name:
        return None
    if is_parquet(input):
        return None
    if input.stat().st_size > MAX_COUNTED_BYTES:
        return None
    with input.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 16), b""))


def chunks(items: Iterable[Item], streamed: bool) -> Iterator[list[Item]]:
    """Split items into chunks of equal size.

    streamed: a chunk has the items that are available, at least one, so that a line typed at a terminal is answered
    at once.
    """
    if streamed:
        from regard.data.prefetch import available_items

        return available_items(items, CHUNK_LINES)
    iterator = iter(items)
    return iter(lambda: list(islice(iterator, CHUNK_LINES)), [])


def write_lines(lines: Iterator[str], output: Path | None) -> None:
    """Print lines as they come, or write them to a file, which is replaced only when all are written."""
    if output is None:
        for line in lines:
            print(line, flush=True)
        return
    from regard.storage.atomic_files import write_atomic

    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)

    write_atomic(output, write)


def _standard_input() -> Iterator[str]:
    if sys.stdin is None:
        raise RegardError("standard input is closed; pass texts or --input")
    if sys.stdin.isatty():
        typer.echo("Type a line and press Enter; press Ctrl-D to finish.", err=True)
    from regard.data.text_files import bad_byte

    for number, line in enumerate(_raw_lines(), 1):
        try:
            yield line.decode("utf-8").rstrip("\r")
        except UnicodeDecodeError as error:
            raise RegardError(
                f"standard input, line {number}: {bad_byte(line, error)}; convert it to UTF-8, "
                "if it is Latin-1 with  iconv -f latin1 -t utf-8"
            ) from None


def _raw_lines() -> Iterator[bytes]:
    """Read from the file descriptor: a thread blocked in sys.stdin cannot be stopped cleanly."""
    from regard.data.text_files import split_lines

    return split_lines(iter(lambda: os.read(0, 65536), b""), "standard input")
