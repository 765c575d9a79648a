import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, strategies as st

from regard.data.corpus import read_pairs
from regard.data.formats import INPUT_FORMATS, InputFormat, pair_format, pair_suffixes, read_conllu
from regard.data.pairs import Pair
from regard.data.text_files import read_lines
from regard.errors import RegardError
from regard.recipe import DataConfig, DataFiles


def compressed(path: Path, content: bytes) -> Path:
    """Write a file, compressed as its suffix says."""
    compress = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
    path.write_bytes(compress.get(path.suffix, bytes)(content))
    return path


def parallel_data(folder: Path, source: str, target: str) -> DataConfig:
    (folder / "s").write_text(source, encoding="utf-8", newline="")
    (folder / "t").write_text(target, encoding="utf-8", newline="")
    return DataConfig(root=str(folder), train=DataFiles(source=("s",), target=("t",)))


def pair_data(folder: Path, name: str, content: str) -> DataConfig:
    compressed(folder / name, content.encode())
    return DataConfig(root=str(folder), train=DataFiles(pairs=(name,)))


def pairs_of(data: DataConfig) -> list[Pair]:
    return list(read_pairs(data.train, data))


def test_adding_a_format_takes_one_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(INPUT_FORMATS, "choices", dict(INPUT_FORMATS.choices))

    @INPUT_FORMATS.register("semicolons")
    class Semicolons(InputFormat):
        """source; target"""

        suffixes = (".ssv",)

        def read(self, *paths: Path) -> Iterator[Pair]:
            (path,) = paths
            for line in read_lines(path):
                source, _, target = line.partition(";")
                yield Pair(source, target)

    assert pair_suffixes() == (".tsv", ".jsonl", ".ssv")
    assert isinstance(pair_format(Path("x.ssv.zst")), Semicolons)
    assert pairs_of(pair_data(tmp_path, "p.ssv.gz", "a;b\nc;d\n")) == [
        Pair("a", "b"),
        Pair("c", "d"),
    ]


def test_several_files_are_read_one_after_another(tmp_path: Path) -> None:
    for name, text in {"s1": "a\n", "s2.gz": "b\n", "t1.zst": "A", "t2": "B"}.items():
        compressed(tmp_path / name, text.encode())
    files = DataFiles(source=("s1", "s2.gz"), target=("t1.zst", "t2"))
    pairs = read_pairs(files, DataConfig(root=str(tmp_path), train=files))
    assert list(pairs) == [Pair("a", "A"), Pair("b", "B")]


@pytest.mark.parametrize(("source", "target"), [("1\n2\n3\n4\n", "1\n2\n"), ("1\n", "1\n2\n3")])
def test_unequal_line_counts_are_refused(tmp_path: Path, source: str, target: str) -> None:
    counts = [len(text.split()) for text in (source, target)]
    with pytest.raises(RegardError, match=rf"s has {counts[0]} lines but .*t has {counts[1]}:"):
        pairs_of(parallel_data(tmp_path, source, target))


@pytest.mark.parametrize("name", ["p.tsv", "p.txt", "p.tab.gz", "p"])
def test_tsv_uses_the_first_two_fields(tmp_path: Path, name: str) -> None:
    data = pair_data(tmp_path, name, "a b\tc\r\nd\te\tCC-BY 2.0\t7\n\t\n")
    assert pairs_of(data) == [Pair("a b", "c"), Pair("d", "e"), Pair("", "")]


def test_tsv_without_a_tab_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"p\.tsv:2: no tab in 'only one'; a line is source, tab"):
        pairs_of(pair_data(tmp_path, "p.tsv", "a\tb\nonly one\n"))


@given(pairs=st.lists(st.tuples(st.text(), st.text()), min_size=1))
def test_jsonl_round_trips_any_text(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]
) -> None:
    lines = [json.dumps({"source": s, "target": t, "more": 1}) for s, t in pairs]
    data = pair_data(tmp_path_factory.mktemp("jsonl"), "p.jsonl.zst", "\n".join(lines))
    assert pairs_of(data) == pairs


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: '{'; a line is"),
        ("", "not JSON: ''"),
        ('["a", "b"]', "not a JSON object"),
        ('{"source": "a"}', '"target" must be a string, found nothing'),
        ('{"source": 7, "target": "b"}', '"source" must be a string, found 7'),
        ('{"source": "\\ud800", "target": "b"}', '"source" has half of a surrogate pair'),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_bad_jsonl_is_reported_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    data = pair_data(tmp_path, "p.jsonl", '{"source": "a", "target": "b"}\n' + line + "\n")
    with pytest.raises(RegardError, match=r"p\.jsonl:2: ") as error:
        pairs_of(data)
    assert message in str(error.value)
    assert len(str(error.value).removeprefix(str(tmp_path))) < 200


def test_plain_text_has_empty_targets(tmp_path: Path) -> None:
    compressed(tmp_path / "a.txt.gz", b" one \n\ntwo\n")
    data = DataConfig(root=str(tmp_path), train=DataFiles(text=("a.txt.gz",)))
    assert pairs_of(data) == [Pair("one", ""), Pair("", ""), Pair("two", "")]


def test_conllu_with_the_wrong_number_of_fields_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\tx\n")
    with pytest.raises(RegardError, match="a:1: 2 fields, CoNLL-U has 10"):
        list(read_conllu(tmp_path / "a"))
