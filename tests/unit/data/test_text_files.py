"""Lines of text files, compressed or not, here or elsewhere."""

import gzip
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import zstandard

from regard.data.corpus import data_paths, fingerprint, train_pairs
from regard.data.text_files import RemoteFile, find_encoding, read_chunks, read_lines
from regard.errors import RegardError
from regard.recipe import Recipe, make_recipe
from regard.training import prepare_data_shards
from regard.training.run import prepare_data


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
    with pytest.raises(RegardError, match=r"text:2: not UTF-8: byte 0xEF at position 3"):
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


# ---------------------------------------------------------------------------------------------
# Files by URL, through fsspec


LINES = [f"source {n}\ttarget {n % 40}\n" for n in range(90)]
SHARDS = {
    "part-1.tsv.gz": gzip.compress("".join(LINES[:40]).encode()),
    "part-2.tsv.zst": zstandard.compress("".join(LINES[40:70]).encode()),
    "part-3.tsv": "".join(LINES[70:]).encode(),
}


@pytest.fixture(params=["memory", "file"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a folder with the shards of a corpus."""
    folder = "memory://corpus" if request.param == "memory" else f"file://{tmp_path}/corpus"
    system, path = fsspec.core.url_to_fs(folder)
    system.makedirs(f"{path}/valid")
    for name, content in SHARDS.items():
        system.pipe(f"{path}/{name}", content)
    system.pipe(f"{path}/valid/v.tsv", b"a b\tb a\n")
    yield folder
    system.rm(path, recursive=True)


def recipe_for(root: str, *names: str) -> Recipe:
    files = {"train": {"pairs": list(names)}, "valid": {"pairs": "valid/v.tsv"}}
    return make_recipe({"data": {"root": root, **files}, "tokenizer": {"kind": "char"}}, "test")


@pytest.mark.parametrize(
    "names",
    [[*SHARDS], ["part-*"], [f"{name[:6]}*" for name in SHARDS]],
)
@pytest.mark.parametrize("chain", ["", "simplecache::"])
def test_shards_are_streamed_in_order(root: str, names: list[str], chain: str) -> None:
    data = recipe_for(chain + root, *names).data
    assert [f"{source}\t{target}\n" for source, target in train_pairs(data)] == LINES
    # A URL is used as it is, whatever the root.
    urls = recipe_for("/elsewhere", *(f"{root}/{name}" for name in SHARDS)).data
    assert list(train_pairs(urls)) == list(train_pairs(data))


def test_prepared_data_are_those_of_local_files(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_data_shards, "PART_PAIRS", 16)
    local = tmp_path / "local"
    local.mkdir()
    for name, content in SHARDS.items():
        (local / name).write_bytes(content)
    (local / "valid").mkdir()
    (local / "valid" / "v.tsv").write_text("a b\tb a\n")
    runs = []
    for number, place in enumerate((root, str(local))):
        recipe = recipe_for(place, *SHARDS)
        # The files in the memory of this process are not those of another one.
        workers = 1 if place.startswith("memory") else 2
        runs.append(prepare_data(recipe, tmp_path / f"run{number}", workers=workers))
    there, here = (recipe_for(place, *SHARDS).data for place in (root, str(local)))
    assert fingerprint(there.train, there) == fingerprint(here.train, here)
    for file in ("data/train.arrow", "data/valid.arrow", "tokenizer.model"):
        one, other = (run.folder / file for run in runs)
        assert one.read_bytes() == other.read_bytes()


def test_a_folder_is_read_file_by_file(root: str) -> None:
    files = RemoteFile(root).files()
    assert [file.name for file in files] == [*SHARDS, "v.tsv"]
    assert RemoteFile(root).is_dir()
    assert not RemoteFile(root).is_file()
    assert files[2].size() == len(SHARDS["part-3.tsv"])
    with files[2].open("rb") as file:
        assert file.read() == SHARDS["part-3.tsv"]
    data = recipe_for(root, "").data
    assert len(list(train_pairs(data))) == len(LINES) + 1


def test_what_cannot_be_read_is_named(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = recipe_for(root, "part-9.tsv.gz").data
    with pytest.raises(RegardError, match=f"data.train.pairs: no such file: {root}/part-9.tsv.gz$"):
        data_paths(data.train, data, "data.train")
    damaged = recipe_for(root, "part-1.tsv.gz").data
    system, path = fsspec.core.url_to_fs(f"{root}/part-1.tsv.gz")
    system.pipe(path, SHARDS["part-1.tsv.gz"][:-20])
    with pytest.raises(RegardError, match=f"{root}/part-1.tsv.gz: damaged"):
        list(train_pairs(damaged))
    with pytest.raises(RegardError, match=r"^no://y: cannot be read: Protocol not known: no$"):
        RemoteFile("no://y").exists()
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(
        RegardError, match=r"^s3://b/x: needs fsspec: pip install 'regard\[remote\]'$"
    ):
        RemoteFile("s3://b/x").open("rb")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://bucket/a/b.tsv.gz", "b.tsv.gz"),
        ("s3://bucket/a/", "a"),
        ("https://host/x.tsv.zst?download=true", "x.tsv.zst"),
    ],
)
def test_the_name_is_the_last_part(url: str, name: str) -> None:
    assert RemoteFile(url).name == name
