"""Lines of text files, decompressed if necessary."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import zstandard

from regard.errors import RegardError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CHUNK = 1 << 20
"""bytes read at a time"""
MAX_LINE_BYTES = 1_000_000
"""A longer line is refused as soon as this much of it is read: it is not text, or it lacks its line feeds."""


def read_lines(path: Path, may_be_empty: bool = False) -> Iterator[str]:
    """The lines of a UTF-8 file, decompressed if its name ends in ``.gz`` or ``.zst``.

    Only a line feed ends a line. ``str.splitlines`` also splits at U+2028, U+0085, form feed …, which would put
    line-parallel files out of step.
    """
    number = 0
    for number, line in enumerate(split_lines(_chunks(path), str(path)), start=1):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        try:
            yield line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise RegardError(
                f"{path}:{number}: not UTF-8: byte 0x{line[error.start]:02X} "
                f"after {error.start} valid bytes of the line"
            ) from None
    if number == 0 and not may_be_empty:
        raise RegardError(f"{path}: the file is empty")


def uncompressed_name(path: str | Path) -> str:
    """The name of a file without ``.gz`` or ``.zst``."""
    return Path(path).name.removesuffix(".gz").removesuffix(".zst")


def split_lines(
    chunks: Iterable[bytes], where: str, limit: int = MAX_LINE_BYTES
) -> Iterator[bytes]:
    """Lines that end in a line feed; anything after the last line feed is a line, too.

    A line of more than ``limit`` bytes is refused; ``where`` names the file in the error message.
    """
    number = 1
    begun: list[
        bytes
    ] = []  # joined once; otherwise a line of many chunks would be copied with each
    size = 0
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        begun.append(first)
        size += len(first)
        if others:
            _check_line(size, where, number, limit)
            yield b"".join(begun)
            for line in others[:-1]:
                number += 1
                _check_line(len(line), where, number, limit)
                yield line
            number += 1
            begun, size = others[-1:], len(others[-1])
        _check_line(size, where, number, limit)
    if rest := b"".join(begun):
        yield rest


def _check_line(size: int, where: str, number: int, limit: int) -> None:
    if size > limit:
        raise RegardError(f"{where}:{number}: longer than {limit:,} bytes, the limit for a line")


def read_error(path: Path, error: OSError) -> RegardError:
    """The error to raise for a file that cannot be read."""
    match error:
        case FileNotFoundError():
            return RegardError(f"{path}: no such file")
        case IsADirectoryError():
            return RegardError(f"{path}: a folder, not a file")
    return RegardError(f"{path}: cannot be read: {error.strerror or error}")


def _chunks(path: Path) -> Iterator[bytes]:
    """The decompressed bytes of a file."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as compressed:
                yield from iter(lambda: compressed.read(CHUNK), b"")
        elif path.suffix == ".zst":
            yield from _decompress_zst(path)
        else:
            with path.open("rb") as file:
                yield from iter(lambda: file.read(CHUNK), b"")
    except (gzip.BadGzipFile, zlib.error, EOFError, zstandard.ZstdError) as error:
        raise RegardError(f"{path}: damaged, cannot be decompressed: {error}") from None
    except OSError as error:
        raise read_error(path, error) from None


def _decompress_zst(path: Path) -> Iterator[bytes]:
    """Frame by frame, because zstandard's own readers do not notice that a file is truncated."""
    frame = None
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            while chunk:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(chunk)
                chunk = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the file ends before its last frame does")
