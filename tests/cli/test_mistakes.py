"""Ordinary mistakes: no file of the user's is lost by them, and each is told in one line, before any work is done."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from regard import cli
from regard.data.text_files import split
from regard.errors import RegardError
from regard.storage.resumable_output import ResumableOutput
from regard.storage.run_dir import RunDir, check_distinct_files, write_text
from regard.tasks import Translator
from regard.training.distillation import distill
from regard.training.run import locked
from tests.cli.commands import REGARD, Done, environment, inside, write

TEXTS = ["a dog", "ein Hund", ""]


def refused(message: str, *arguments: object, cwd: Path) -> None:
    """In one line, and the folder is as it was."""
    before = {path: path.read_bytes() for path in cwd.rglob("*") if path.is_file()}
    done = inside(*arguments, cwd=cwd)
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.returncode == 2
    assert {path: path.read_bytes() for path in cwd.rglob("*") if path.is_file()} == before


@pytest.fixture
def folder(finished_run: Path, tmp_path: Path) -> Path:
    """With a run in it, and a few files."""
    shutil.copytree(finished_run, tmp_path / "run")
    write(tmp_path / "in.txt", TEXTS)
    write(tmp_path / "in.tsv", TEXTS)
    (tmp_path / "link").symlink_to("in.txt")
    return tmp_path


# What is read is never written


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("translate run --input in.txt --output in.txt", "--output in.txt: that is the --input"),
        ("translate run --input in.txt --output link", "--output link: that is the --input"),
        ("translate run --input in.txt --alignment run/../in.txt", "in.txt: that is the --input"),
        ("translate run --output x --alignment x a", "--alignment x: that is the --output"),
        ("translate run --output in.txt --glossary in.txt a", "in.txt: that is the --glossary"),
        ("translate run --output in.txt --parses in.txt a", "in.txt: that is the --parses"),
        ("distill run --input in.tsv --output in.tsv", "--output in.tsv: that is the --input"),
        ("tag run --input in.txt --output in.txt", "--output in.txt: that is the --input"),
        ("classify run --input in.txt --output in.txt", "--output in.txt: that is the --input"),
        ("train in.txt link", "target link: that is the source"),
    ],
)
def test_a_file_has_one_role(command: str, message: str, folder: Path) -> None:
    refused(message, *command.split(), cwd=folder)


def test_files_of_their_own_and_files_not_given_are_let_pass(tmp_path: Path) -> None:
    check_distinct_files({"a": tmp_path / "x", "b": None, "c": tmp_path / "y", "d": None})


def test_a_teacher_does_not_write_over_what_it_learned_from(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGARD_DATA", str(folder))
    write(folder / "pairs.tsv", ["a dog\tein Hund"])  # the recipe's data.train
    for sources in (None, folder / "in.txt"):
        with pytest.raises(RegardError, match=r"pairs.tsv: that is the data.train.pairs"):
            distill(Translator.load(folder / "run", "cpu"), folder / "pairs.tsv", sources)


# What is not there, or empty


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("translate absent-run --input absent.txt", "--input absent.txt: no such file"),
        ("translate absent-run --input run", "--input run: a folder, not a file"),
        ("train mine.yaml", "data.valid.pairs: no such file"),
        ("train in.txt absent.txt", "absent.txt: no such file"),
        (
            "serve absent-run --languages en",
            "--languages en: two codes with a comma, such as en,de",
        ),
    ],
)
def test_a_missing_file_is_told_before_anything_is_opened_or_made(
    command: str, message: str, folder: Path
) -> None:
    write(folder / "mine.yaml", ["data: {train: {pairs: in.tsv}, valid: {pairs: absent.tsv}}"])
    refused(message, *command.split(), cwd=folder)
    assert not (folder / "runs").exists()


def test_of_an_empty_file_nothing_is_made(folder: Path) -> None:
    (folder / "empty.txt").touch()
    done = inside("translate", "run", "--input", "empty.txt", "--output", "out.txt", cwd=folder)
    assert (done.returncode, done.stdout) == (0, "")
    assert (folder / "out.txt").read_bytes() == b""


def test_a_text_that_is_no_text_is_refused_in_one_line(folder: Path) -> None:
    done = inside("translate", "run", "Hund \udcff " * 99, cwd=folder)
    assert done.returncode == 2
    assert "is half of a surrogate pair, no character" in done.stderr


def test_a_blank_sentence_is_not_looked_at(folder: Path) -> None:
    refused("the text is blank", "look", "run", " ", cwd=folder)


def test_a_line_longer_than_any_that_was_learned_from_is_told_once(folder: Path) -> None:
    write(folder / "long.txt", ["ein Hund", " ".join(["Hund"] * 257), " ".join(["Hund"] * 300)])
    done = inside("translate", "run", "--input", "long.txt", "--beam", 1, cwd=folder)
    assert "line 2 has 257 tokens, and the model learned from 256 at most" in done.stderr
    assert "--sentences cuts it" in done.stderr
    assert done.stderr.count("tokens") == 1
    done = inside("translate", "run", "--input", "long.txt", "--beam", 2, "--nbest", 2, cwd=folder)
    assert "line 2 has 257 tokens" in done.stderr
    assert "--sentences" not in done.stderr  # which does not go with --nbest
    done = inside("translate", "run", "--input", "long.txt", "--beam", 1, "--sentences", cwd=folder)
    assert "tokens" not in done.stderr


# A folder that is no run's


def test_a_recipe_that_a_person_wrote_is_not_replaced(tmp_path: Path) -> None:
    write(tmp_path / "recipe.yaml", ["# mine", "data: {train: {pairs: my.tsv}}"])
    write(tmp_path / "my.tsv", ["a\tb"])
    (tmp_path / ".notes.partial").touch()
    refused(".: the folder holds other files", "train", "recipe.yaml", "--out", ".", cwd=tmp_path)


def test_only_what_a_killed_training_left_is_removed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.data.mkdir(parents=True)
    run.checkpoints.mkdir()
    left = [run.data / ".train.arrow.123.unfinished", run.data / ".facts.json.partial"]
    left += [run.checkpoints / ".step-000000001.safetensors.partial"]
    with locked(run):
        left += [run.folder / f".{name}.partial" for name in ("recipe.yaml", "model.safetensors")]
    others = [run.folder / ".out.partial", run.folder / ".out.journal", run.data / ".my.partial"]
    for path in left + others:
        path.touch()
    with locked(run):
        assert not any(path.exists() for path in left)
        assert all(path.exists() for path in others)


def test_the_demo_writes_nothing_among_other_files(tmp_path: Path) -> None:
    write(tmp_path / "thesis.txt", ["years of work"])
    refused(".: the folder holds other files (thesis.txt)", "demo", "--out", ".", cwd=tmp_path)


# A place where no file can be


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (".", ".: a folder, not a file"),
        ("", ".: a folder, not a file"),
        ("in.txt/x", "in.txt/x: cannot be written: in.txt is no folder"),
        ("absent/x", "absent/x: cannot be written: absent is no folder"),
        ("pipe", "pipe: not an ordinary file"),
        ("x" * 250, "File name too long"),
    ],
)
def test_a_bad_output_is_refused_before_the_work(place: str, message: str, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    refused(
        message, "translate", "run", "--input", "in.txt", "--output", place, "--beam", 1, cwd=folder
    )
    assert (folder / "pipe").is_fifo()
    with pytest.raises(RegardError):
        write_text(folder / place, "x")


def test_what_the_last_move_cannot_do_is_told(tmp_path: Path) -> None:
    out = tmp_path / "out"
    journal = ResumableOutput([out], {"input": "x"})
    journal.add(1, ["line\n"])
    out.mkdir()  # by somebody else, meanwhile
    with pytest.raises(RegardError, match="out: cannot be written: Is a directory"):
        journal.finish()
    journal.close()
    out.rmdir()
    with ResumableOutput([out], {"input": "x"}) as journal:
        assert journal.done == 1
    assert out.read_text() == "line\n"


def test_nothing_done_leaves_nothing_behind(folder: Path) -> None:
    (folder / "bytes").write_bytes(b"\xff")
    done = inside("translate", "run", "--input", "bytes", "--output", "o", cwd=folder)
    assert "regard: bytes:1: not UTF-8" in done.stderr
    assert not list(folder.glob(".*"))


# A teacher that is killed


@pytest.mark.parametrize("kill", [KeyboardInterrupt, SystemExit])
def test_distilling_goes_on_where_it_was(
    kill: type[BaseException], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.training.distillation.PAIRS_AT_ONCE", 2)
    teacher = Translator.load(folder / "run", "cpu")
    sources = write(folder / "sources", TEXTS * 2)
    distill(teacher, folder / "whole.tsv", sources, beam=1)
    known, asked = teacher.translate, []

    def translate(texts: list[str], **options: Any) -> list[str]:
        asked.append(texts)
        if len(asked) == 3:
            raise kill
        return known(texts, **options)

    monkeypatch.setattr(teacher, "translate", translate)
    output, told = folder / "out.tsv", list[str]()
    with pytest.raises(kill):
        distill(teacher, output, sources, beam=1)
    assert not output.exists()
    with pytest.raises(RegardError, match=r"begun with other options \(4 lines are done\)"):
        distill(teacher, output, sources, turned=True, beam=1)
    assert distill(teacher, output, sources, told.append, beam=1) == 6
    assert len(asked) == 4, "only what was missing"
    assert told[1] == f"{output}: goes on after source 4"
    assert output.read_bytes() == (folder / "whole.tsv").read_bytes()
    assert not list(folder.glob(".*"))


def test_a_tab_is_found_before_the_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = Translator.load(folder / "run", "cpu")
    monkeypatch.setattr(teacher, "translate", None)
    sources = write(folder / "sources", [*TEXTS, "a\tdog"])
    with pytest.raises(RegardError, match="sources:4: a tab in the text"):
        distill(teacher, folder / "out.tsv", sources)


# What the system refuses


def printing_to(stdout: int) -> Done:
    """A command whose standard output is full, or read by nobody."""
    return subprocess.run(
        [*REGARD, "recipes"],
        env={**environment(), "PYTHONUNBUFFERED": ""},
        stderr=subprocess.PIPE,
        encoding="utf-8",
        check=False,
        stdout=stdout,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_full_disk_behind_standard_output_is_told() -> None:
    with Path("/dev/full").open("w") as full:
        done = printing_to(full.fileno())
    assert done.stderr == "regard: standard output: cannot be written: No space left on device\n"
    assert done.returncode == 2


def test_a_reader_who_is_gone_is_left_in_peace() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = printing_to(writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file", "some.txt"), "some.txt: No such file"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    ],
)
def test_an_error_of_the_system_is_one_line(
    error: OSError, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def app() -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)
    done = inside(cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"regard: {said}\n")


def test_a_closed_standard_input_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    done = inside("translate", "run", cwd=folder)
    assert done.stderr.endswith("regard: standard input is closed; give texts or --input\n")


# What a person may take for right


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("average trained --out in.txt", "in.txt: Not a directory"),
        ("look run a --out .", ".: a folder, not a file"),
        ("look run a --out in.txt/x", "in.txt/x: cannot be written: in.txt is no folder"),
        ("train many blank", "nothing to learn: all 60 targets are blank"),
        (f"train {'a' * 300}", "a: File name too long"),
        ("train run", "run: a run folder, not a recipe; to go on with it: regard train run/recipe"),
        ("translate in.txt a", "in.txt: a file, not a folder"),
        ("translate run a --set beam", "--set beam: write it as key=value, for example beam=5"),
        ("translate run a --set =3", "--set =3: write it as key=value"),
        ("translate run a --set decoding.beam=3", "--set decoding.beam=3: write it as key=value"),
        ("translate run a --to de", "language de: this model translates to one language only, so"),
        ("info carded", "carded/card.json: not a whole card: KeyError('vocabulary')"),
        ("import theirs --from huggingface --out new", "theirs/config.json: no whole number for "),
    ],
)
def test_a_mistake_is_told_in_one_line(
    command: str, message: str, folder: Path, trained_run: Path
) -> None:
    (folder / "trained").symlink_to(trained_run)
    write(folder / "many", ["a dog"] * 60)
    write(folder / "blank", [""] * 60)
    (folder / "carded").mkdir()
    shutil.copy(folder / "run" / "recipe.yaml", folder / "carded")
    write(folder / "carded" / "card.json", [json.dumps({"steps": 3})])
    (folder / "theirs").mkdir()
    write(folder / "theirs" / "config.json", [json.dumps({"model_type": "marian"})])
    refused(message, *command.split(), cwd=folder)


# Long lines


@given(st.binary(max_size=30).map(lambda text: text.replace(b"a", b"\n")), st.integers(1, 5))
def test_chunks_of_any_size_give_the_same_lines(text: bytes, size: int) -> None:
    chunks = [text[at : at + size] for at in range(0, len(text), size)]
    *lines, rest = text.split(b"\n")
    assert list(split(chunks)) == lines + [rest] * bool(rest)


def test_a_long_line_takes_time_by_its_length() -> None:
    def seconds(count: int) -> float:
        start = time.process_time()
        assert [len(line) for line in split([b"a" * 4096] * count)] == [count * 4096]
        return time.process_time() - start

    assert seconds(8_000) < 0.5, "copied with each chunk it would be 130 GB"
