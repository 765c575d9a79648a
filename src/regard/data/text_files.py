"""Bytes and lines of text files, decompressed and decoded if necessary.

A file that is named by a URL is read through fsspec: s3://bucket/part-*.tsv.gz, hf://datasets/owner/name/train.tsv. It
is streamed: nothing is stored on disk. Some file systems need a package of their own, which fsspec names.
"""

from __future__ import annotations

import codecs
import gzip
import lzma
import shlex
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import zstandard

from regard.errors import RegardError

# ---------------------------------------------------------------------------------------------
# Files that are named by a URL


Result = TypeVar("Result")


@dataclass(frozen=True, order=True)
class RemoteFile:
    """A file, a folder or a pattern elsewhere, with the methods of a path that readers use."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        url = self.url.partition("?")[0] if self.url.startswith("http") else self.url
        return url.rstrip("/").rpartition("/")[2]

    def exists(self) -> bool:
        return self._info() is not None

    def is_file(self) -> bool:
        return self._type() == "file"

    def is_dir(self) -> bool:
        return self._type() == "directory"

    def size(self) -> int:
        """The number of bytes; 0 if it is not known."""
        return int((self._info() or {}).get("size") or 0)

    def open(self, mode: str) -> BufferedReader:
        """The file, to be read as bytes."""
        return self._call(lambda system, path: system.open(path, mode))

    def files(self) -> list[RemoteFile]:
        """The files of a folder and its subfolders, or those that match a pattern, in order of their names."""
        is_dir = self.is_dir()

        def find(system: Any, path: str) -> list[str]:
            names = system.find(path) if is_dir else system.glob(path)
            return [system.unstrip_protocol(name) for name in names if system.isfile(name)]

        chain = self.url.rpartition("::")[0]
        urls = self._call(find)
        return sorted(RemoteFile(f"{chain}::{url}" if chain else url) for url in urls)

    def _info(self) -> dict[str, Any] | None:
        """What the file system knows of the file; None if it does not exist."""
        try:
            info: dict[str, Any] = self._call(lambda system, path: system.info(path))
        except FileNotFoundError:
            return None
        return info

    def _type(self) -> str | None:
        return (self._info() or {}).get("type")

    def _call(self, method: Callable[[Any, str], Result]) -> Result:
        """Call a method of the file system, with the path of the file in it."""
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise RegardError(f"{self.url}: needs fsspec: pip install 'regard[remote]'") from None
        try:
            return method(*url_to_fs(self.url))
        except FileNotFoundError:
            raise
        except Exception as error:  # each file system has its own
            reason = str(error).split("\n")[0] or type(error).__name__
            raise RegardError(f"{self.url}: cannot be read: {reason}") from None


# ---------------------------------------------------------------------------------------------
# Bytes and lines


DataFile: TypeAlias = Path | zipfile.Path | RemoteFile
"""a file, a file in a zip archive, or a file elsewhere"""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CHUNK = 1 << 20
"""bytes read at a time"""
COMPRESSED = (".gz", ".zst", ".xz")
"""suffixes of compressed files"""
SAMPLE = 1 << 10
"""bytes from which an encoding is recognised"""
DAMAGED = (gzip.BadGzipFile, zlib.error, lzma.LZMAError, zstandard.ZstdError, zipfile.BadZipFile)
"""what decompression raises, besides EOFError"""
ZST_PART = 1 << 9
"""Compressed bytes that are decompressed at a time: 4 of them can stand for 128 kB, so this is 16 MB at most."""
MAX_LINE_BYTES = 1_000_000
"""A longer line is refused as soon as this much of it is read: it is not text, or it lacks its line feeds."""


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be decoded."""

    problem: str


def read_lines(path: DataFile, may_be_empty: bool = False) -> Iterator[str]:
    """The lines of a UTF-8 or UTF-16 file, decompressed if its name ends in ``.gz``, ``.zst`` or ``.xz``.

    Only a line feed ends a line. ``str.splitlines`` also splits at U+2028, U+0085, form feed …, which would put
    line-parallel files out of step.
    """
    for number, line in enumerate(decoded_lines(path, may_be_empty), start=1):
        if isinstance(line, BadLine):
            raise RegardError(f"{path}:{number}: {line.problem}")
        yield line


def decoded_lines(path: DataFile, may_be_empty: bool = False) -> Iterator[str | BadLine]:
    """The same, but lines that cannot be decoded are returned as such."""
    number = 0
    for number, line in enumerate(split_lines(_as_utf8(path), str(path)), start=1):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        try:
            yield line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            yield BadLine(f"{bad_byte(line, error)}; {_how_to_convert(path)}")
    if number == 0 and not may_be_empty:
        raise RegardError(f"{path}: the file is empty")


def bad_byte(line: bytes, error: UnicodeDecodeError) -> str:
    """Where a line is not UTF-8."""
    return f"not UTF-8: byte 0x{line[error.start]:02X} at position {error.start + 1} of the line"


def _how_to_convert(path: DataFile) -> str:
    if not isinstance(path, Path) or path.suffix in COMPRESSED:
        return "save the file as UTF-8"
    converted = path.with_name(f"{path.stem}.utf8{path.suffix}")
    command = f"iconv -f latin1 -t utf-8 {shlex.quote(str(path))} > {shlex.quote(str(converted))}"
    return f"convert the file to UTF-8, if it is Latin-1 with  {command}"


def uncompressed_name(path: str | DataFile) -> str:
    """The name of a file without ``.gz``, ``.zst`` or ``.xz``."""
    name = Path(path).name if isinstance(path, str) else path.name
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name


def split_lines(
    chunks: Iterable[bytes], where: str, limit: int = MAX_LINE_BYTES
) -> Iterator[bytes]:
    """Lines that end in a line feed; anything after the last line feed is a line, too.

    A line of more than ``limit`` bytes is refused; ``where`` names the file in the error message.
    """
    number = 1
    # Joined once; otherwise a line of many chunks would be copied with each.
    pending: list[bytes] = []
    size = 0
    for chunk in chunks:
        head, *following = chunk.split(b"\n")
        pending.append(head)
        size += len(head)
        if following:
            _check_line(size, where, number, limit)
            yield b"".join(pending)
            *complete, tail = following
            # Long lines are rare, so lines are not checked one by one.
            if max(map(len, complete), default=0) > limit:
                for line in complete:
                    number += 1
                    _check_line(len(line), where, number, limit)
                    yield line
            yield from complete
            number += len(following)
            pending, size = [tail], len(tail)
        _check_line(size, where, number, limit)
    if remainder := b"".join(pending):
        yield remainder


def _check_line(size: int, where: str, number: int, limit: int) -> None:
    if size > limit:
        raise RegardError(f"{where}:{number}: longer than {limit:,} bytes, the limit for a line")


def read_error(path: DataFile, error: OSError) -> RegardError:
    """The error to raise for a file that cannot be read."""
    match error:
        case FileNotFoundError():
            return RegardError(f"{path}: no such file")
        case IsADirectoryError():
            return RegardError(f"{path}: a folder, not a file")
    return RegardError(f"{path}: cannot be read: {error.strerror or error}")


def read_chunks(path: DataFile) -> Iterator[bytes]:
    """The decompressed bytes of a file."""
    try:
        with path.open("rb") as file:
            suffix = Path(path.name).suffix
            if suffix == ".zst":
                yield from _decompress_zst(iter(lambda: file.read(CHUNK), b""))
            elif suffix == ".gz":
                with gzip.GzipFile(fileobj=file) as compressed:
                    yield from iter(lambda: compressed.read(CHUNK), b"")
            elif suffix == ".xz":
                with lzma.LZMAFile(file) as compressed_xz:
                    yield from iter(lambda: compressed_xz.read(CHUNK), b"")
            else:
                yield from iter(lambda: file.read(CHUNK), b"")
    except (*DAMAGED, EOFError) as error:
        raise RegardError(f"{path}: damaged, cannot be decompressed: {error}") from None
    except OSError as error:
        raise read_error(path, error) from None


def _decompress_zst(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Frame by frame, because zstandard's own readers do not notice that a file is truncated."""
    frame = None
    for chunk in chunks:
        start = 0
        while start < len(chunk):
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            compressed = chunk[start : start + ZST_PART]
            yield frame.decompress(compressed)
            start += len(compressed)
            if frame.eof:  # the unused bytes belong to the next frame
                start -= len(frame.unused_data)
                frame = None
    if frame is not None:
        raise EOFError("the file ends in the middle of a frame")


def find_encoding(sample: bytes) -> str:
    """The Unicode encoding of a text that begins with these bytes."""
    marks = {
        codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16: the marks begin alike
        codecs.BOM_UTF32_BE: "utf-32",
        codecs.BOM_UTF16_LE: "utf-16",
        codecs.BOM_UTF16_BE: "utf-16",
    }
    for mark, encoding in marks.items():
        if sample.startswith(mark):
            return encoding
    # Without a mark: in UTF-16, letters and spaces of most languages have a zero byte on the same side.
    if len(sample) >= 32 and sample.count(0) > len(sample) / 5:
        if 0 not in sample[0::2]:
            return "utf-16-le"
        if 0 not in sample[1::2]:
            return "utf-16-be"
    return "utf-8"


def _as_utf8(path: DataFile) -> Iterator[bytes]:
    """The bytes of a file in UTF-8; those of a UTF-8 file are unchanged, whether valid or not."""
    chunks = read_chunks(path)
    sample = b""
    for chunk in chunks:
        sample += chunk
        if len(sample) >= SAMPLE:
            break
    encoding = find_encoding(sample[:SAMPLE])
    if encoding == "utf-8":
        yield sample
        yield from chunks
        return
    # Half of a surrogate pair is passed on, so that the line with it can be named.
    decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
    try:
        yield decoder.decode(sample).encode("utf-8", "surrogatepass")
        for chunk in chunks:
            yield decoder.decode(chunk).encode("utf-8", "surrogatepass")
        decoder.decode(b"", final=True)
    except UnicodeError as error:
        raise RegardError(f"{path}: damaged {encoding.upper()}: {error.args[-1]}") from None
