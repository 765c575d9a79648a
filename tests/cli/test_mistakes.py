"""Ordinary mistakes: no file is lost, and each is reported in one line, before any work is done."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from regard.cli import main as cli
from regard.data.text_files import split_lines
from regard.errors import RegardError
from regard.recipe import DecodingConfig, override_decoding
from regard.storage.atomic_files import check_distinct_files, write_text
from regard.storage.resumable_output import ResumableOutput
from regard.storage.run_dir import RunDir
from regard.tasks import LanguageModel, Translator
from regard.training.distillation import distill
from regard.training.resume import locked
from tests.cli.commands import REGARD, Done, environment, inside, write

TEXTS = ["a dog", "ein Hund", ""]


def refused(message: str, *arguments: object, cwd: Path) -> None:
    """Check that a command is refused in one line, and that no file in the folder changes."""
    before = {path: path.read_bytes() for path in cwd.rglob("*") if path.is_file()}
    done = inside(*arguments, cwd=cwd)
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.returncode == 2
    assert {path: path.read_bytes() for path in cwd.rglob("*") if path.is_file()} == before


@pytest.fixture
def folder(finished_run: Path, tmp_path: Path) -> Path:
    """A folder with a run and a few files."""
    shutil.copytree(finished_run, tmp_path / "run")
    write(tmp_path / "in.txt", TEXTS)
    write(tmp_path / "in.tsv", TEXTS)
    (tmp_path / "link").symlink_to("in.txt")
    return tmp_path


# No file is both read and written


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("translate run --input in.txt --output in.txt", "--output in.txt: same file as --input"),
        ("translate run --input in.txt --output link", "--output link: same file as --input"),
        ("translate run --input in.txt --alignment run/../in.txt", "in.txt: same file as --input"),
        ("translate run --output x --alignment x a", "--alignment x: same file as --output"),
        ("translate run --output in.txt --glossary in.txt a", "in.txt: same file as --glossary"),
        ("translate run --output in.txt --parses in.txt a", "in.txt: same file as --parses"),
        ("distill run --input in.tsv --output in.tsv", "--output in.tsv: same file as --input"),
        ("tag run --input in.txt --output in.txt", "--output in.txt: same file as --input"),
        ("classify run --input in.txt --output in.txt", "--output in.txt: same file as --input"),
        ("train in.txt link", "target link: same file as source"),
    ],
)
def test_a_file_has_one_role(command: str, message: str, folder: Path) -> None:
    refused(message, *command.split(), cwd=folder)


def test_distinct_and_absent_files_are_accepted(tmp_path: Path) -> None:
    check_distinct_files({"a": tmp_path / "x", "b": None, "c": tmp_path / "y", "d": None})


def test_distill_does_not_overwrite_the_training_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGARD_DATA", str(folder))
    write(folder / "pairs.tsv", ["a dog\tein Hund"])  # the recipe's data.train
    for sources in (None, folder / "in.txt"):
        with pytest.raises(RegardError, match=r"pairs.tsv: same file as data.train.pairs"):
            distill(Translator.load(folder / "run", "cpu"), folder / "pairs.tsv", sources)


# Missing and empty files


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("translate absent-run --input absent.txt", "--input absent.txt: no such file"),
        ("translate absent-run --input run", "--input run: a folder, not a file"),
        ("train mine.yaml", "data.valid.pairs: no such file"),
        ("train in.txt absent.txt", "absent.txt: no such file"),
        (
            "serve absent-run --languages en",
            "--languages en: expected two codes separated by a comma, for example en,de",
        ),
    ],
)
def test_a_missing_file_is_reported_before_anything_is_opened_or_created(
    command: str, message: str, folder: Path
) -> None:
    write(folder / "mine.yaml", ["data: {train: {pairs: in.tsv}, valid: {pairs: absent.tsv}}"])
    refused(message, *command.split(), cwd=folder)
    assert not (folder / "runs").exists()


def test_the_translation_of_an_empty_file_is_empty(folder: Path) -> None:
    (folder / "empty.txt").touch()
    done = inside("translate", "run", "--input", "empty.txt", "--output", "out.txt", cwd=folder)
    assert (done.returncode, done.stdout) == (0, "")
    assert (folder / "out.txt").read_bytes() == b""


def test_invalid_unicode_is_refused_in_one_line(folder: Path) -> None:
    done = inside("translate", "run", "Hund \udcff " * 99, cwd=folder)
    assert done.returncode == 2
    assert "is an unpaired surrogate, not a character" in done.stderr


def test_look_refuses_a_blank_sentence(folder: Path) -> None:
    refused("nothing to show: TEXT is blank", "look", "run", " ", cwd=folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "nothing to show: TEXT or --heads is required"),
        ("a --pairs in.tsv", "has no effect without --heads"),
        ("--heads --lenses", "only --heads, --pairs and --to have an effect"),
        ("--heads", "use --pairs FILE to measure --heads on other data"),
    ],
)
def test_look_without_what_it_needs(options: str, message: str, folder: Path) -> None:
    refused(message, "look", "run", *options.split(), cwd=folder)


def test_there_is_one_warning_of_lines_longer_than_in_training(folder: Path) -> None:
    write(folder / "long.txt", ["ein Hund", " ".join(["Hund"] * 257), " ".join(["Hund"] * 300)])
    done = inside("translate", "run", "--input", "long.txt", "--beam", 1, cwd=folder)
    assert "line 2 has 257 tokens, but the model was trained on at most 256" in done.stderr
    assert "use --sentences to split it" in done.stderr
    assert done.stderr.count("the model was trained on at most") == 1
    done = inside("translate", "run", "--input", "long.txt", "--beam", 2, "--nbest", 2, cwd=folder)
    assert "line 2 has 257 tokens" in done.stderr
    assert "--sentences" not in done.stderr  # it cannot be combined with --nbest
    done = inside("translate", "run", "--input", "long.txt", "--beam", 1, "--sentences", cwd=folder)
    assert "the model was trained on at most" not in done.stderr


# Folders that are not runs


def test_a_recipe_written_by_the_user_is_not_replaced(tmp_path: Path) -> None:
    write(tmp_path / "recipe.yaml", ["# mine", "data: {train: {pairs: my.tsv}}"])
    write(tmp_path / "my.tsv", ["a\tb"])
    (tmp_path / ".notes.partial").touch()
    refused(
        ".: the folder contains other files", "train", "recipe.yaml", "--out", ".", cwd=tmp_path
    )


def test_only_files_of_a_killed_training_are_removed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.data.mkdir(parents=True)
    run.checkpoints.mkdir()
    left = [run.data / ".train.arrow.123.unfinished", run.data / ".metadata.json.partial"]
    left += [run.checkpoints / ".step-000000001.safetensors.partial"]
    with locked(run):
        left += [run.folder / f".{name}.partial" for name in ("recipe.yaml", "model.safetensors")]
    others = [run.folder / ".out.partial", run.folder / ".out.journal", run.data / ".my.partial"]
    for path in left + others:
        path.touch()
    with locked(run):
        assert not any(path.exists() for path in left)
        assert all(path.exists() for path in others)


def test_the_demo_refuses_a_folder_with_other_files(tmp_path: Path) -> None:
    write(tmp_path / "thesis.txt", ["years of work"])
    refused(".: the folder contains other files (thesis.txt)", "demo", "--out", ".", cwd=tmp_path)


# Output files that cannot be written


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (".", ".: a folder, not a file"),
        ("", ".: a folder, not a file"),
        ("in.txt/x", "in.txt/x: cannot be written: in.txt is not a folder"),
        ("absent/x", "absent/x: cannot be written: absent is not a folder"),
        ("pipe", "pipe: not a regular file"),
        ("x" * 250, "File name too long"),
    ],
)
def test_an_invalid_output_is_refused_before_the_work(
    output: str, message: str, folder: Path
) -> None:
    os.mkfifo(folder / "pipe")
    refused(
        message,
        "translate",
        "run",
        "--input",
        "in.txt",
        "--output",
        output,
        "--beam",
        1,
        cwd=folder,
    )
    assert (folder / "pipe").is_fifo()
    with pytest.raises(RegardError):
        write_text(folder / output, "x")


def test_an_error_of_the_final_rename_is_reported(tmp_path: Path) -> None:
    out = tmp_path / "out"
    journal = ResumableOutput([out], {"input": "x"})
    journal.add(1, ["line\n"])
    out.mkdir()  # by another process, meanwhile
    with pytest.raises(RegardError, match="out: cannot be written: Is a directory"):
        journal.finish()
    journal.close()
    out.rmdir()
    with ResumableOutput([out], {"input": "x"}) as journal:
        assert journal.done == 1
    assert out.read_text() == "line\n"


def test_a_failed_translation_leaves_no_files(folder: Path) -> None:
    (folder / "bytes").write_bytes(b"\xff")
    done = inside("translate", "run", "--input", "bytes", "--output", "o", cwd=folder)
    assert "regard: bytes:1: not UTF-8" in done.stderr
    assert not list(folder.glob(".*"))


# Interrupted distillation


@pytest.mark.parametrize("kill", [KeyboardInterrupt, SystemExit])
def test_distillation_is_resumed(
    kill: type[BaseException], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.training.distillation.CHUNK_SIZE", 2)
    teacher = Translator.load(folder / "run", "cpu")
    sources = write(folder / "sources", TEXTS * 2)
    distill(teacher, folder / "whole.tsv", sources, beam=1)
    translate, calls = teacher.translate, []

    def interrupted(texts: list[str], **options: Any) -> list[str]:
        calls.append(texts)
        if len(calls) == 3:
            raise kill
        return translate(texts, **options)

    monkeypatch.setattr(teacher, "translate", interrupted)
    output, messages = folder / "out.tsv", list[str]()
    with pytest.raises(kill):
        distill(teacher, output, sources, beam=1)
    assert not output.exists()
    with pytest.raises(RegardError, match=r"started with different options \(4 lines are done\)"):
        distill(teacher, output, sources, back_translation=True, beam=1)
    assert distill(teacher, output, sources, messages.append, beam=1) == 6
    assert len(calls) == 4, "it translated more than the missing sources"
    assert messages[1] == f"{output}: resuming after source 4"
    assert output.read_bytes() == (folder / "whole.tsv").read_bytes()
    assert not list(folder.glob(".*"))


def test_a_tab_is_reported_before_the_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = Translator.load(folder / "run", "cpu")
    monkeypatch.setattr(teacher, "translate", None)
    sources = write(folder / "sources", [*TEXTS, "a\tdog"])
    with pytest.raises(RegardError, match=r"sources:4: 'a\\tdog' contains a tab"):
        distill(teacher, folder / "out.tsv", sources)


# Errors of the operating system


def printing_to(stdout: int) -> Done:
    """Run a command with this standard output."""
    return subprocess.run(
        [*REGARD, "recipes"],
        env={**environment(), "PYTHONUNBUFFERED": ""},
        stderr=subprocess.PIPE,
        encoding="utf-8",
        check=False,
        stdout=stdout,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, of Linux")
def test_a_full_disk_at_standard_output_is_reported() -> None:
    with Path("/dev/full").open("w") as full:
        done = printing_to(full.fileno())
    assert done.stderr == "regard: cannot write to standard output: No space left on device\n"
    assert done.returncode == 2


def test_a_closed_pipe_at_standard_output_is_not_an_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = printing_to(writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file", "some.txt"), "some.txt: No such file"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    ],
)
def test_a_system_error_is_reported_in_one_line(
    error: OSError, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def app(**options: object) -> None:
        raise error

    monkeypatch.setattr(cli, "make_app", lambda command: app)
    done = inside(cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"regard: {message}\n")


def test_a_closed_standard_input_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    done = inside("translate", "run", cwd=folder)
    assert done.stderr.endswith("regard: standard input is closed; pass texts or --input\n")


# Other mistakes


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("average trained --out in.txt", "in.txt: Not a directory"),
        ("look run a --out .", ".: a folder, not a file"),
        ("look run a --out in.txt/x", "in.txt/x: cannot be written: in.txt is not a folder"),
        ("train many blank", "nothing to train on: all 60 targets are blank"),
        (f"train {'a' * 300}", "a: File name too long"),
        ("train run", "run: a run folder, not a recipe; to resume it: regard train run/recipe"),
        ("translate in.txt a", "in.txt: a file, not a folder"),
        (
            "translate run a --set beam",
            "--set beam: expected key=value with a key of the recipe's decoding section, for example beam=5",
        ),
        ("translate run a --set =3", "--set =3: expected key=value"),
        ("translate run a --set decoding.beam=3", "--set decoding.beam=3: expected key=value"),
        ("translate run a --to de", "language de: this model translates to one language only, so"),
        ("info carded", "carded/card.json: incomplete card: vocabulary is missing"),
        ("import theirs --from huggingface --out new", "theirs/config.json: encoder_layers, "),
    ],
)
def test_a_mistake_is_reported_in_one_line(
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
    assert list(split_lines(chunks, "x")) == lines + [rest] * bool(rest)


def test_a_long_line_takes_time_by_its_length() -> None:
    def seconds(count: int) -> float:
        start = time.process_time()
        lines = split_lines([b"a" * 4096] * count, "x", limit=count * 4096)
        assert [len(line) for line in lines] == [count * 4096]
        return time.process_time() - start

    assert seconds(8_000) < 0.5, "copied with each chunk it would be 130 GB"


LIMIT = "1,000,000 bytes, the limit for a line"


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("chunk", [999, 1_000_000, 3_000_000])
def test_a_line_that_is_too_long_is_refused_by_number(before: int, chunk: int) -> None:
    for after in (b"", b"\nmore\n"):
        text = b"short\n" * before + b"a" * 1_000_001 + after
        chunks = [text[at : at + chunk] for at in range(0, len(text), chunk)]
        with pytest.raises(RegardError, match=f"x:{before + 1}: longer than {LIMIT}"):
            list(split_lines(chunks, "x"))
    assert len(list(split_lines([b"a" * 1_000_000, b"\nb"], "x"))) == 2


def test_an_endless_line_is_refused_while_it_is_read(folder: Path) -> None:
    """The address space is limited, so that reading it all would end in a MemoryError, not in a dead machine."""
    limits = "import resource, runpy; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30)); "
    limited = [sys.executable, "-c", limits + "runpy.run_module('regard', run_name='__main__')"]
    for source in (["--input", "/dev/zero"], ["--input", "/dev/zero", "--output", "out.txt"], []):
        with Path("/dev/zero").open("rb") as zeros:
            done = subprocess.run(
                [*limited, "translate", "run", *source],
                cwd=folder,
                env=environment(),
                stdin=zeros,
                capture_output=True,
                encoding="utf-8",
                timeout=60,
                check=False,
            )
        name = "/dev/zero" if source else "standard input"
        assert done.returncode == 2
        assert done.stderr.splitlines()[1:] == [f"regard: {name}:1: longer than {LIMIT}"]
    assert not (folder / "out.txt").exists()


def test_a_line_that_takes_too_long_to_translate_is_refused_by_number(folder: Path) -> None:
    write(folder / "long.txt", ["ein Hund", " ".join(["ein Hund"] * 50_000)])
    start = time.monotonic()
    message = "line 2 has 100,000 tokens, but at most 4,096 can be translated as one text; "
    for options, advice in {
        (): "use --sentences to split it",
        ("--nbest", 2): "shorten it",
    }.items():
        done = inside("translate", "run", "--input", "long.txt", *options, cwd=folder)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == f"regard: {message}{advice}"
    assert time.monotonic() - start < 30
    model = Translator.load(folder / "run", "cpu")
    with pytest.raises(RegardError, match="text 2 has 4,097 tokens; the limit is 4,096"):
        model.translate(["ein", " ".join(["ein"] * 4097)])


def test_data_without_an_end_are_refused(folder: Path) -> None:
    done = inside("train", "/dev/zero", "/dev/zero", "--out", "new", cwd=folder)
    assert done.returncode == 2
    assert "/dev/zero" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_an_error_about_an_option_names_the_option(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(text: str, tokens: int, **sampling: float) -> None:
        override_decoding(DecodingConfig(), sampling)

    model = SimpleNamespace(generate=generate)
    monkeypatch.setattr(LanguageModel, "load", lambda run: model)
    refused("--top-k: -1 must be greater", "generate", "run", "--top-k", -1, cwd=folder)
