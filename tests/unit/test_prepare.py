"""What is said while texts are made ready to learn from."""

from pathlib import Path
from typing import Any

import pytest

from regard.learn.prepare import prepare
from regard.learn.report import Report
from regard.recipe import make_recipe
from regard.run import Run


def said_of(folder: Path, capsys: pytest.CaptureFixture[str], **data: Any) -> str:
    given = {"root": str(folder), "train": {"pairs": "train.tsv"}, **data}
    recipe = make_recipe({"data": given, "tokenizer": {"kind": "words", "size": 50}}, "test")
    run = Run(folder / "run")
    run.folder.mkdir()
    report = Report(run)
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
