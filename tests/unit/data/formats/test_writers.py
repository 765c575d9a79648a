"""Every output format can be read again."""

from pathlib import Path

import pytest

from regard.data.formats import INPUT_FORMATS, ReadOptions, pair_format
from regard.data.formats.writers import OUTPUT_FORMATS, ParallelWriter, output_format
from regard.data.pairs import Pair
from regard.errors import RegardError

PAIRS = [
    Pair("The dog <b>sleeps</b> & eats.", "Der „Hund“ schläft; er frisst, 'so'."),
    Pair('=1+1 "quoted"', "汉字 😀"),
    Pair("  spaces kept?", "ja"),
]


def round_trip(path: Path, pairs: list[Pair]) -> list[Pair]:
    with output_format(path)(path, path.name, ("en", "de")) as writer:
        for pair in pairs:
            writer.write(pair)
    options = ReadOptions(languages=("en", "de"))
    return list(pair_format(path, options).read(path))


@pytest.mark.parametrize("name", [*OUTPUT_FORMATS, "tsv.gz", "jsonl.zst", "tmx.xz"])
def test_what_is_written_can_be_read(name: str, tmp_path: Path) -> None:
    kind, _, compression = name.partition(".")
    path = tmp_path / f"p{OUTPUT_FORMATS[kind].suffixes[0]}{'.' * bool(compression)}{compression}"
    expected = PAIRS
    if kind in ("csv", "tmx", "xliff", "xlsx"):  # their readers strip texts
        expected = [Pair(*(text.strip() for text in pair)) for pair in PAIRS]
    assert round_trip(path, PAIRS) == expected


def test_two_text_files(tmp_path: Path) -> None:
    paths = [tmp_path / "a.en.gz", tmp_path / "a.de"]
    with ParallelWriter(paths, [path.name for path in paths]) as writer:
        for pair in PAIRS:
            writer.write(pair)
        with pytest.raises(RegardError, match="line break"):
            writer.write(Pair("a\nb", "c"))
    assert list(INPUT_FORMATS["parallel"]().read(*paths)) == PAIRS


def test_equal_pairs_give_equal_files(tmp_path: Path) -> None:
    for name in ("a.tsv.gz", "b.tsv.gz"):
        round_trip(tmp_path / name, PAIRS)
    assert (tmp_path / "a.tsv.gz").read_bytes() == (tmp_path / "b.tsv.gz").read_bytes()


@pytest.mark.parametrize(
    ("name", "pair", "message"),
    [
        ("p.tsv", Pair("a\tb", "c"), "p.tsv: 'a\\tb' contains a tab or a line break"),
        ("p.tmx", Pair("a\x07", "c"), "p.tmx: XML cannot represent a character in 'a\\x07'"),
        ("p.xlsx", Pair("a\x07", "c"), "p.xlsx: a spreadsheet cannot contain"),
    ],
)
def test_what_a_format_cannot_contain_is_refused(
    name: str, pair: Pair, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    with pytest.raises(RegardError) as error, output_format(path)(path, name, ("en", "de")) as out:
        out.write(pair)
    assert message in str(error.value)


def test_unknown_names_are_refused() -> None:
    for name in ("p.doc", "p.parquet.gz"):
        with pytest.raises(RegardError, match=r"unknown format; the name must end in one of \.tsv"):
            output_format(Path(name))
    with pytest.raises(RegardError, match="TMX needs language codes"):
        output_format(Path("p.tmx"))(Path("p.tmx"), "p.tmx")
