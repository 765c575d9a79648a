import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, strategies as st

from regard.data.corpus import Pair, fingerprint, held_out, read_lines, read_pairs
from regard.errors import RegardError
from regard.recipe import Data, DataFiles


def packed(path: Path, content: bytes) -> Path:
    """Write the content the way the file's ending says."""
    packers = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
    path.write_bytes(packers.get(path.suffix, bytes)(content))
    return path


def parallel(folder: Path, source: str, target: str) -> Data:
    (folder / "s").write_text(source, encoding="utf-8", newline="")
    (folder / "t").write_text(target, encoding="utf-8", newline="")
    return Data(root=str(folder), train=DataFiles(source=("s",), target=("t",)))


def paired(folder: Path, name: str, content: str) -> Data:
    packed(folder / name, content.encode())
    return Data(root=str(folder), train=DataFiles(pairs=(name,)))


def pairs_of(data: Data) -> list[Pair]:
    return list(read_pairs(data.train, data))


@pytest.mark.parametrize("name", ["text", "text.gz", "text.zst"])
def test_a_line_ends_at_a_line_feed_only(tmp_path: Path, name: str) -> None:
    lines = ["a\u2028b", "c\u0085d", "e\fg\vh", "i\rj", "", " k ", "last"]
    path = packed(tmp_path / name, b"\xef\xbb\xbf" + "\n".join(lines).encode())
    assert list(read_lines(path)) == lines


def test_line_ends_of_windows_and_the_last_line_feed(tmp_path: Path) -> None:
    path = packed(tmp_path / "text", b"one\r\ntwo\r\n\r\n")
    assert list(read_lines(path)) == ["one", "two", ""]


def test_lines_longer_than_a_chunk_stay_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.data.text_files.CHUNK", 3)
    for name in ("text", "text.gz", "text.zst"):
        path = packed(tmp_path / name, "äöüß\n\n日本語\n".encode())
        assert list(read_lines(path)) == ["äöüß", "", "日本語"]


def test_zst_of_several_frames(tmp_path: Path) -> None:
    pack = zstandard.ZstdCompressor().compress
    (tmp_path / "x.zst").write_bytes(pack(b"a\nb") + pack(b"c\n"))
    assert list(read_lines(tmp_path / "x.zst")) == ["a", "bc"]


def test_bad_utf8_is_named_by_file_line_and_byte(tmp_path: Path) -> None:
    path = packed(tmp_path / "text", b"good\nna\xefve\n")
    with pytest.raises(RegardError, match=r"text:2: not UTF-8: byte 0xEF after 2 good bytes"):
        list(read_lines(path))


@pytest.mark.parametrize("name", ["x.gz", "x.zst"])
def test_damaged_files(tmp_path: Path, name: str) -> None:
    whole = packed(tmp_path / name, os.urandom(5000) + b"\n").read_bytes()
    for damaged in (whole[:-100], b"plain text", whole[:2000] + b"\0" * 10 + whole[2010:]):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(RegardError, match=r"damaged|not UTF-8"):
            list(read_lines(tmp_path / name))
    (tmp_path / name).write_bytes(packed(tmp_path / name, b"line\n" * 1000).read_bytes()[:-3])
    with pytest.raises(RegardError, match="damaged, cannot be unpacked"):
        list(read_lines(tmp_path / name))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="nowhere: no such file"):
        list(read_lines(tmp_path / "nowhere"))
    with pytest.raises(RegardError, match="a folder, not a file"):
        list(read_lines(tmp_path))
    for name in ("empty", "empty.gz", "empty.zst"):
        with pytest.raises(RegardError, match="the file is empty"):
            list(read_lines(packed(tmp_path / name, b"")))


def test_several_files_one_after_another(tmp_path: Path) -> None:
    for name, text in {"s1": "a\n", "s2.gz": "b\n", "t1.zst": "A", "t2": "B"}.items():
        packed(tmp_path / name, text.encode())
    texts = DataFiles(source=("s1", "s2.gz"), target=("t1.zst", "t2"))
    pairs = read_pairs(texts, Data(root=str(tmp_path), train=texts))
    assert list(pairs) == [Pair("a", "A"), Pair("b", "B")]


@pytest.mark.parametrize(("source", "target"), [("1\n2\n3\n4\n", "1\n2\n"), ("1\n", "1\n2\n3")])
def test_unequal_line_counts(tmp_path: Path, source: str, target: str) -> None:
    counts = [len(text.split()) for text in (source, target)]
    with pytest.raises(RegardError, match=rf"s has {counts[0]} lines but .*t has {counts[1]}:"):
        pairs_of(parallel(tmp_path, source, target))


@pytest.mark.parametrize("name", ["p.tsv", "p.txt", "p.tab.gz", "p"])
def test_tsv_uses_the_first_two_fields(tmp_path: Path, name: str) -> None:
    data = paired(tmp_path, name, "a b\tc\r\nd\te\tCC-BY 2.0\t7\n\t\n")
    assert pairs_of(data) == [Pair("a b", "c"), Pair("d", "e"), Pair("", "")]


def test_tsv_without_a_tab(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"p\.tsv:2: no tab in 'only one'; a line is source, tab"):
        pairs_of(paired(tmp_path, "p.tsv", "a\tb\nonly one\n"))


@given(pairs=st.lists(st.tuples(st.text(), st.text()), min_size=1))
def test_jsonl_gives_back_any_text(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]
) -> None:
    lines = [json.dumps({"source": s, "target": t, "more": 1}) for s, t in pairs]
    data = paired(tmp_path_factory.mktemp("jsonl"), "p.jsonl.zst", "\n".join(lines))
    assert pairs_of(data) == pairs


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON: '{'; a line is"),
        ("", "not JSON: ''"),
        ('["a", "b"]', "not a JSON object"),
        ('{"source": "a"}', '"target" must be a string, found nothing'),
        ('{"source": 7, "target": "b"}', '"source" must be a string, found 7'),
        ('{"source": "\\ud800", "target": "b"}', '"source" holds half of a surrogate pair'),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_bad_jsonl_is_named_by_file_and_line(tmp_path: Path, line: str, complaint: str) -> None:
    data = paired(tmp_path, "p.jsonl", '{"source": "a", "target": "b"}\n' + line + "\n")
    with pytest.raises(RegardError, match=r"p\.jsonl:2: ") as error:
        pairs_of(data)
    assert complaint in str(error.value)
    assert len(str(error.value).removeprefix(str(tmp_path))) < 200


def test_a_missing_file_is_named_at_once_with_its_key_and_the_remedy(tmp_path: Path) -> None:
    texts = DataFiles(source=("s",), target=("gone",))
    packed(tmp_path / "s", b"a\n")
    with pytest.raises(RegardError) as error:
        read_pairs(texts, Data(root=str(tmp_path), train=texts), "data.valid")
    assert str(error.value) == (
        f"data.valid.target: no such file: {tmp_path / 'gone'} "
        "(the folder is set by --set data.root=DIR or $REGARD_DATA)"
    )


def test_the_held_out_share_is_stable_and_about_right() -> None:
    held = [held_out(f"sentence {n}", 0.02) for n in range(20_000)]
    assert 300 < sum(held) < 500
    # These never change: a run that goes on must hold out the same sources.
    assert [n for n in range(100) if held_out(f"sentence {n}", 0.02)] == [67, 84, 96]
    assert not any(held_out(str(n), 0.0) for n in range(100))


@pytest.mark.parametrize("like", ["{} äpfel essen", "{} A\u0308pfel essen", " {} Äpfel Essen "])
def test_how_a_source_is_written_does_not_decide(like: str) -> None:
    for number in range(50):
        assert held_out(like.format(number), 0.3) == held_out(f"{number} Äpfel essen", 0.3)


@given(source=st.text(), smaller=st.floats(0, 0.5), larger=st.floats(0, 0.5))
def test_a_larger_share_holds_out_a_superset(source: str, smaller: float, larger: float) -> None:
    smaller, larger = sorted((smaller, larger))
    assert held_out(source, larger) or not held_out(source, smaller)


def test_the_fingerprint_follows_content_and_role_not_names(tmp_path: Path) -> None:
    for name, text in {"a": "1\n", "b": "2\n", "c": "1\n"}.items():
        packed(tmp_path / name, text.encode())

    def of(source: str, target: str) -> str:
        texts = DataFiles(source=(source,), target=(target,))
        return fingerprint(texts, Data(root=str(tmp_path), train=texts))

    assert of("a", "b") == of("c", "b")
    assert of("a", "b") != of("b", "a")
    assert len(of("a", "b")) == 64
    with pytest.raises(RegardError, match="no such file"):
        of("a", "gone")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RegardError, match="a folder, not a file"):
        of("a", "folder")


def test_reading_text_needs_none_of_the_heavy_libraries() -> None:
    code = (
        "import sys, regard.data.corpus; "
        "print([m for m in ('torch', 'sentencepiece', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
