import gzip
import os
from pathlib import Path

import pytest
import zstandard

from regard.data.text_files import find_encoding, read_chunks, read_lines
from regard.errors import RegardError


def compressed(path: Path, content: bytes) -> Path:
    """Write a file, compressed as its suffix says."""
    compress = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
    path.write_bytes(compress.get(path.suffix, bytes)(content))
    return path


@pytest.mark.parametrize("name", ["text", "text.gz", "text.zst"])
def test_only_a_line_feed_ends_a_line(tmp_path: Path, name: str) -> None:
    lines = ["a\u2028b", "c\u0085d", "e\fg\vh", "i\rj", "", " k ", "last"]
    path = compressed(tmp_path / name, b"\xef\xbb\xbf" + "\n".join(lines).encode())
    assert list(read_lines(path)) == lines


def test_windows_line_ends_and_the_last_line_feed(tmp_path: Path) -> None:
    path = compressed(tmp_path / "text", b"one\r\ntwo\r\n\r\n")
    assert list(read_lines(path)) == ["one", "two", ""]


def test_lines_longer_than_a_chunk_are_not_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.data.text_files.CHUNK", 3)
    for name in ("text", "text.gz", "text.zst"):
        path = compressed(tmp_path / name, "äöüß\n\n日本語\n".encode())
        assert list(read_lines(path)) == ["äöüß", "", "日本語"]


def test_a_zst_bomb_is_decompressed_a_little_at_a_time(tmp_path: Path) -> None:
    """30 kB for 1 GB: the whole file would be decompressed at once."""
    size = 1 << 20
    compressor = zstandard.ZstdCompressor(level=19).compressobj()
    with (tmp_path / "bomb.zst").open("wb") as file:
        for _ in range(1000):
            file.write(compressor.compress(b"\n" * size))
        file.write(compressor.flush())
    assert (tmp_path / "bomb.zst").stat().st_size < 100_000
    pieces = [len(piece) for piece in read_chunks(tmp_path / "bomb.zst")]
    assert sum(pieces) == 1000 * size
    assert max(pieces) <= 16 * size


def test_zst_of_several_frames(tmp_path: Path) -> None:
    compress = zstandard.ZstdCompressor().compress
    (tmp_path / "x.zst").write_bytes(compress(b"a\nb") + compress(b"c\n"))
    assert list(read_lines(tmp_path / "x.zst")) == ["a", "bc"]


def test_invalid_utf8_is_reported_with_file_line_and_byte(tmp_path: Path) -> None:
    path = compressed(tmp_path / "text", b"good\nna\xefve\n")
    with pytest.raises(RegardError, match=r"text:2: not UTF-8: byte 0xEF after 2 valid bytes"):
        list(read_lines(path))


@pytest.mark.parametrize("name", ["x.gz", "x.zst"])
def test_damaged_compressed_files(tmp_path: Path, name: str) -> None:
    whole = compressed(tmp_path / name, os.urandom(5000) + b"\n").read_bytes()
    for damaged in (whole[:-100], b"plain text", whole[:2000] + b"\0" * 10 + whole[2010:]):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(RegardError, match=r"damaged|not UTF-8"):
            list(read_lines(tmp_path / name))
    (tmp_path / name).write_bytes(compressed(tmp_path / name, b"line\n" * 1000).read_bytes()[:-3])
    with pytest.raises(RegardError, match="damaged, cannot be decompressed"):
        list(read_lines(tmp_path / name))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="nowhere: no such file"):
        list(read_lines(tmp_path / "nowhere"))
    with pytest.raises(RegardError, match="a folder, not a file"):
        list(read_lines(tmp_path))
    for name in ("empty", "empty.gz", "empty.zst"):
        with pytest.raises(RegardError, match="the file is empty"):
            list(read_lines(compressed(tmp_path / name, b"")))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-16", "utf-32"])
def test_the_encoding_is_found_without_a_mark(encoding: str) -> None:
    text = "Der Hund schläft unter dem Tisch, und die Katze sieht ihm zu."
    assert find_encoding(text.encode(encoding)) == encoding
    # In UTF-16, \u0101 is two bytes of 1, one on each side.
    mixed = f"{text}\u0101".encode(encoding)
    assert mixed.decode(find_encoding(mixed)) == f"{text}\u0101"


def test_binary_data_are_not_utf_16() -> None:
    assert find_encoding(bytes([0, 0, 1, 2]) * 20) == "utf-8"
