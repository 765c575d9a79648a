"""Data preparation: messages, and what is reused."""

from pathlib import Path
from typing import Any

import pytest

from regard.errors import RegardError
from regard.recipe import make_recipe
from regard.storage.run_dir import RunDir
from regard.training.prepare import open_prepared, prepare
from regard.training.progress import ProgressReporter


def messages_of(folder: Path, capsys: pytest.CaptureFixture[str], **data: Any) -> str:
    given = {"root": str(folder), "train": {"pairs": "train.tsv"}, **data}
    recipe = make_recipe({"data": given, "tokenizer": {"kind": "word", "vocab_size": 50}}, "test")
    run = RunDir(folder / "run")
    run.folder.mkdir()
    reporter = ProgressReporter(run)
    prepare(run, recipe, reporter)
    reporter.close()
    captured = capsys.readouterr()
    return captured.out + captured.err


def write(path: Path, *pairs: str) -> None:
    path.write_text("".join(f"{pair}\n" for pair in pairs))


def test_an_overlap_with_the_training_data_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "train.tsv", "a\tx", "b\ty", "b\tz", "c\tx")
    write(tmp_path / "valid.tsv", " b\tx", "b\ty", "d\ty", " \ty")
    write(tmp_path / "test.tsv", "e\tx", "f\ty")
    both = {"valid": {"pairs": "valid.tsv"}, "test": {"pairs": "test.tsv"}}
    messages = messages_of(tmp_path, capsys, **both)
    assert "1 of 2 sources of data.valid also occur in the training data" in messages
    assert "data.test" not in messages


def test_held_out_pairs_are_not_checked_for_overlap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "train.tsv", *(f"w{number}\tx" for number in range(60)))
    messages = messages_of(tmp_path, capsys, hold_out=0.3)
    assert "Validation pairs" in messages
    assert "also occur" not in messages


def test_data_are_prepared_again_after_a_failed_preparation(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", "a b c\tx", "a\ty", "b\tz")
    write(tmp_path / "valid.tsv", "a b c\tx")
    data = {"root": str(tmp_path), "train": {"pairs": "train.tsv"}, "valid": {"pairs": "valid.tsv"}}
    sections = {"data": data, "tokenizer": {"kind": "word", "vocab_size": 50}}
    short = {**sections, "data": {**data, "clean": {"max_tokens": 2}}}
    short |= {"model": {"position": "learned", "max_length": 3}}
    run = RunDir(tmp_path / "run")
    run.folder.mkdir()
    full, reporter = make_recipe(sections, "test"), ProgressReporter(run, enabled=False)
    prepare(run, full, reporter)
    with pytest.raises(RegardError, match=r"data\.valid has a text of 4 tokens"):
        prepare(run, make_recipe(short, "test"), reporter)
    prepare(run, full, reporter)
    reporter.close()
    assert len(open_prepared(run, full).train) == 3


@pytest.mark.parametrize(
    ("valid", "message"),
    [
        ({"pairs": "empty.tsv"}, r"empty\.tsv: the file is empty"),
        ({"pairs": "torn.tsv"}, r"torn\.tsv:2: no tab"),
        (None, "no pair was held out for validation"),
    ],
)
def test_missing_validation_data_are_found_before_the_tokenizer_is_trained(
    tmp_path: Path,
    valid: dict[str, str] | None,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train_tokenizer(*_: Any) -> None:
        raise AssertionError("the tokenizer is trained")

    monkeypatch.setattr("regard.training.prepare.initial_tokenizer", train_tokenizer)
    write(tmp_path / "train.tsv", "a\tx", "b\ty")
    write(tmp_path / "empty.tsv")
    write(tmp_path / "torn.tsv", "a\tx", "b")
    with pytest.raises(RegardError, match=message):
        messages_of(tmp_path, capsys, **({"valid": valid} if valid else {"hold_out": 1e-9}))


def test_metadata_that_are_damaged_are_prepared_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "train.tsv", "a\tx", "b\ty")
    write(tmp_path / "valid.tsv", "a\tx")
    messages_of(tmp_path, capsys, valid={"pairs": "valid.tsv"})
    for content in ("", "{", "[" * 100_000, "[1]"):
        (tmp_path / "run/data/metadata.json").write_text(content)
        given = {"root": str(tmp_path), "train": {"pairs": "train.tsv"}}
        sections = {"data": {**given, "valid": {"pairs": "valid.tsv"}}}
        recipe = make_recipe({**sections, "tokenizer": {"kind": "word", "vocab_size": 50}}, "test")
        run = RunDir(tmp_path / "run")
        prepare(run, recipe, ProgressReporter(run, enabled=False))
        assert open_prepared(run, recipe).metadata["train"]["kept"] == 2
