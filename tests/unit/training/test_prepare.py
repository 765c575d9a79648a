"""What is said while texts are made ready to learn from."""

from pathlib import Path
from typing import Any

import pytest

from regard.errors import RegardError
from regard.recipe import make_recipe
from regard.storage.run_dir import RunDir
from regard.training.prepare import open_prepared, prepare
from regard.training.progress import ProgressReporter


def said_of(folder: Path, capsys: pytest.CaptureFixture[str], **data: Any) -> str:
    given = {"root": str(folder), "train": {"pairs": "train.tsv"}, **data}
    recipe = make_recipe({"data": given, "tokenizer": {"kind": "word", "vocab_size": 50}}, "test")
    run = RunDir(folder / "run")
    run.folder.mkdir()
    report = ProgressReporter(run)
    prepare(run, recipe, report)
    report.end()
    captured = capsys.readouterr()
    return captured.out + captured.err


def write(path: Path, *pairs: str) -> None:
    path.write_text("".join(f"{pair}\n" for pair in pairs))


def test_sources_that_are_learned_from_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "train.tsv", "a\tx", "b\ty", "b\tz", "c\tx")
    write(tmp_path / "valid.tsv", " b\tx", "b\ty", "d\ty", " \ty")
    write(tmp_path / "test.tsv", "e\tx", "f\ty")
    both = {"valid": {"pairs": "valid.tsv"}, "test": {"pairs": "test.tsv"}}
    said = said_of(tmp_path, capsys, **both)
    assert "Sources of data.valid that are in the training text, too: 1 of 2;" in said
    assert "data.test" not in said


def test_what_is_held_out_is_not_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "train.tsv", *(f"w{number}\tx" for number in range(60)))
    said = said_of(tmp_path, capsys, hold_out=0.3)
    assert "Validation pairs" in said
    assert "training text" not in said


def test_text_whose_preparation_failed_is_not_taken_for_that_of_before(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", "a b c\tx", "a\ty", "b\tz")
    write(tmp_path / "valid.tsv", "a b c\tx")
    data = {"root": str(tmp_path), "train": {"pairs": "train.tsv"}, "valid": {"pairs": "valid.tsv"}}
    sections = {"data": data, "tokenizer": {"kind": "word", "vocab_size": 50}}
    short = {**sections, "data": {**data, "clean": {"max_tokens": 2}}}
    short |= {"model": {"position": "learned", "max_length": 3}}
    run = RunDir(tmp_path / "run")
    run.folder.mkdir()
    whole, report = make_recipe(sections, "test"), ProgressReporter(run, speaks=False)
    prepare(run, whole, report)
    with pytest.raises(RegardError, match=r"data\.valid has a text of 4 tokens"):
        prepare(run, make_recipe(short, "test"), report)
    prepare(run, whole, report)
    report.end()
    assert len(open_prepared(run, whole).train) == 3
