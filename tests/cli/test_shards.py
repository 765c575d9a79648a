"""Shards of a file are translated by several processes; their outputs in order are that of one process."""

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from regard.cli import text_io, translate
from regard.storage.resumable_output import Shard
from regard.training import distillation, pair_scoring
from tests.cli.commands import inside, sequences, succeeds_inside, write

LINES = [" ".join(words) for words in sequences(300, "abcdefgh", range(2, 7), seed=3)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (text_io, translate):
        monkeypatch.setattr(module, "CHUNK_LINES", 64)
    monkeypatch.setattr(distillation, "CHUNK_SIZE", 64)


def joined(folder: Path, name: str, shards: int) -> str:
    first = Path(name)
    names = [Shard(number, shards).path(first).name for number in range(1, shards + 1)]
    assert names[1] == f"{first.stem}-00002-of-{shards:05d}{first.suffix}"
    return "".join((folder / name).read_text() for name in names)


def test_shards_of_a_text_file(workshop: Path, tmp_path: Path) -> None:
    run, command = workshop / "run", ("--input", "in.txt", "--output", "out.txt")
    write(tmp_path / "in.txt", LINES)
    succeeds_inside("translate", run, *command, cwd=tmp_path)
    for number in (2, 1, 3):
        succeeds_inside("translate", run, *command, "--shard", f"{number}/3", cwd=tmp_path)
    assert joined(tmp_path, "out.txt", 3) == (tmp_path / "out.txt").read_text()
    succeeds_inside("translate", run, *command, "--shard", "9/9", cwd=tmp_path)  # 5 chunks
    assert len((tmp_path / "out-00009-of-00009.txt").read_text().splitlines()) == 44


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_shards_have_all_lines_of_any_text_file(
    workshop: Path, tmp_path: Path, encoding: str
) -> None:
    """The last line may lack its line feed, and a byte of UTF-16 may look like one."""
    lines = [*LINES[:65], f"{LINES[65]} \u0a0a", LINES[66]]
    (tmp_path / "in.txt").write_bytes("\n".join(lines).encode(encoding))
    command = ("translate", workshop / "run", "--input", "in.txt", "--output", "out.txt")
    succeeds_inside(*command, cwd=tmp_path)
    for number in (1, 2):
        succeeds_inside(*command, "--shard", f"{number}/2", cwd=tmp_path)
    whole = (tmp_path / "out.txt").read_text()
    assert len(whole.splitlines()) == len(lines)
    assert joined(tmp_path, "out.txt", 2) == whole


def test_parquet_in_and_out(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translate, "ROW_GROUP", 100)
    run = workshop / "run"
    table = pa.table({"id": range(300), "text": LINES, "note": ["x"] * 300})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=70)
    command = ("translate", run, "--input", "in.parquet", "--output", "out.parquet")
    succeeds_inside(*command, cwd=tmp_path)
    whole = parquet.read_table(tmp_path / "out.parquet")
    assert whole.column_names == ["source", "translation", "confidence"]
    assert whole.column("source").to_pylist() == LINES
    # Written in groups of rows, so that memory does not grow with their number.
    assert parquet.read_metadata(tmp_path / "out.parquet").num_row_groups == 3
    for number in (1, 2):
        succeeds_inside(*command, "--shard", f"{number}/2", cwd=tmp_path)
    shards = [parquet.read_table(tmp_path / f"out-0000{n}-of-00002.parquet") for n in (1, 2)]
    assert pa.concat_tables(shards).to_pylist() == whole.to_pylist()
    none = inside(*command, "--columns", "title", cwd=tmp_path)
    assert "--columns title: no such column of texts in in.parquet" in none.stderr
    assert "columns of texts: text, note" in none.stderr


def test_shards_of_distilled_pairs(workshop: Path, tmp_path: Path) -> None:
    write(tmp_path / "in.txt", LINES)
    command = ("distill", workshop / "run", "--input", "in.txt", "--output", "out.tsv")
    succeeds_inside(*command, cwd=tmp_path)
    for number in (1, 2):
        succeeds_inside(*command, "--shard", f"{number}/2", cwd=tmp_path)
    assert joined(tmp_path, "out.tsv", 2) == (tmp_path / "out.tsv").read_text()


def test_shards_of_scored_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_scoring, "CHUNK_PAIRS", 64)
    monkeypatch.setattr(pair_scoring, "MIN_STEPS", 2)
    write(tmp_path / "in.tsv", [f"{line}\t{line[::-1]}" for line in LINES])
    command = ("data", "score", "in.tsv", "--output", "out.tsv", "--epochs", 0.1, "--device", "cpu")
    succeeds_inside(*command, "--order", "input", cwd=tmp_path)
    assert not (tmp_path / "out.models").exists()
    for number in (2, 1, 3):
        shard = ("--order", "input", "--shard", f"{number}/3")
        done = succeeds_inside(*command, *shard, cwd=tmp_path)
        assert f"out-0000{number}-of-00003.tsv: " in done.stdout
    whole = (tmp_path / "out.tsv").read_text()
    assert joined(tmp_path, "out.tsv", 3) == whole
    header, *lines = whole.splitlines()
    assert header == "score\tsource\ttarget"
    assert [line.split("\t")[1] for line in lines] == LINES
    # The models are used again; they and the order of the pairs are those of the other files.
    done = succeeds_inside(*command, "--models", "out.models", cwd=tmp_path)
    assert done.stderr.count("is already trained") == 2
    ranked = (tmp_path / "out.tsv").read_text().splitlines()
    assert {*ranked} == {header, *lines}
    assert ranked[1:] == sorted(ranked[1:], key=lambda line: -float(line.split("\t")[0]))
    assert (tmp_path / "out.models").exists()
    refused = inside(*command, "--shard", "1/2", cwd=tmp_path)
    assert "--shard 1/2: needs --order input" in refused.stderr
    unknown = inside(*command, "--order", "best", cwd=tmp_path)
    assert "--order best: expected score or input" in unknown.stderr
    others = inside(*command, "--epochs", 0.2, "--models", "out.models", cwd=tmp_path)
    assert "out.models: the models in it were trained on other pairs or with" in others.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("a b",), "--shard 1/2: needs --input with a regular file, and --output"),
        (("--input", "in.txt"), "--shard 1/2: needs --input with a regular file, and --output"),
    ],
)
def test_a_shard_needs_files(
    workshop: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    write(tmp_path / "in.txt", LINES[:3])
    done = inside("translate", workshop / "run", *options, "--shard", "1/2", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def test_shards_of_prepared_data(workshop: Path, tmp_path: Path) -> None:
    recipe = workshop / "recipe.yaml"
    prepare = ("data", "prepare", recipe, "--set", f"data.root={workshop}", "--out")
    succeeds_inside(*prepare, "whole", cwd=tmp_path)
    for number in (1, 2):
        succeeds_inside(*prepare, "run", "--shard", f"{number}/2", cwd=tmp_path)
    done = succeeds_inside(*prepare, "run", cwd=tmp_path)
    assert "run: data prepared" in done.stdout
    one, other = (tmp_path / name / "data" / "train.arrow" for name in ("whole", "run"))
    assert one.read_bytes() == other.read_bytes()
    original = workshop / "run" / "data" / "train.arrow"
    assert one.read_bytes() == original.read_bytes()
