"""The help of every command is complete, options are refused in one line, and the command line starts without torch."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from regard.cli import main as cli
from tests.cli.commands import PYTHON, SOURCES, environment, inside

COMMANDS = {
    "plan",
    *("demo", "train", "recipes", "distill", "average"),
    *("data check", "data clean", "data convert", "data score", "data prepare"),
    *("translate", "tag", "classify", "fill", "generate"),
    *("evaluate", "look", "info", "bench translate", "bench train", "selftest"),
    *("runs list", "runs compare", "runs prune"),
    *("experiment run", "experiment show", "lab list", "lab run"),
    *("serve", "import", "export"),
}
DECODING = {
    *("--beam", "--length-penalty", "--length-normalization", "--no-repeat-ngram", "--protect"),
    *("--mbr", "--temperature", "--top-k", "--top-p", "--seed", "--iterations", "--length-beam"),
    "--set",
}


def _commands(group: Any, *names: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, *names, name)
        else:
            yield " ".join([*names, name]), command


ALL: dict[str, Any] = dict(_commands(get_command(cli.app)))


def options(command: str) -> set[str]:
    return {name for parameter in ALL[command].params for name in parameter.opts}


def test_the_commands_are_known() -> None:
    assert {*ALL} == COMMANDS


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_describes_every_option_in_a_sentence(name: str, tmp_path: Path) -> None:
    done = inside(*name.split(), "-h", cwd=tmp_path)
    assert done.returncode == 0
    assert f"Usage: regard {name} [OPTIONS]" in done.stdout
    assert ALL[name].help.strip().endswith(".")
    for parameter in ALL[name].params:
        label = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar
        assert label in done.stdout, label
        assert re.match(r"[A-Z`'\"]|huggingface", parameter.help or ""), (label, parameter.help)
        assert parameter.help.endswith((".", ").")), (label, parameter.help)
        assert parameter.help.count("(") == parameter.help.count(")")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_states_the_default_of_every_option(name: str) -> None:
    """Typer adds a default that is not None or empty; a flag is off by default."""
    for one in ALL[name].params:
        if one.param_type_name == "option" and not (one.is_flag or one.required or one.default):
            shown_by_typer = one.default is not None and one.default != ""
            assert shown_by_typer or "default: " in one.help, (one.opts[0], one.help)


@pytest.mark.parametrize("name", ["", "data", "runs", "lab", "train", "translate", "serve", "fill"])
def test_the_help_shows_no_python_types(name: str, tmp_path: Path) -> None:
    text = inside(*name.split(), "--help", cwd=tmp_path).stdout
    assert not re.search(r"<(bool|str|path|list)\b", text)


def test_no_line_of_the_source_is_long() -> None:
    for path in (SOURCES / "regard" / "cli").glob("*.py"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert len(line) <= 120, f"{path.name}:{number}"


@pytest.mark.parametrize("command", ["translate", "evaluate", "look", "distill"])
def test_decoding_options_are_shared(command: str) -> None:
    assert options(command) >= DECODING


def test_help_needs_no_torch() -> None:
    done = subprocess.run(
        [*PYTHON, "-X", "importtime", "-m", "regard", "--help"],
        env=environment(),
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in modules
    assert not modules & {"torch", "numpy", "pydantic", "pyarrow", "sentencepiece"}


# Options and commands of earlier versions

RENAMED = [
    (f"{command} run a {old} 1", f"{old} was renamed to {new}")
    for command, renamed in cli.RENAMED_OPTIONS.items()
    for old, new in renamed.items()
]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        *RENAMED,
        ("translate run --alpha=0.6 a", "--alpha was renamed to --length-penalty"),
        ("continue run a", "the command continue was renamed to generate"),
    ],
)
def test_an_old_name_is_answered_with_the_new_one(
    command: str, message: str, tmp_path: Path
) -> None:
    done = inside(*command.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"regard: {message}\n")


def test_new_names_exist_and_old_ones_do_not() -> None:
    assert {*cli.RENAMED_COMMANDS.values()} <= COMMANDS
    assert not {*cli.RENAMED_COMMANDS} & COMMANDS
    for command, renamed in cli.RENAMED_OPTIONS.items():
        assert {*renamed.values()} <= options(command)
        assert not {*renamed} & options(command)


def test_an_old_name_may_be_a_text(tmp_path: Path) -> None:
    done = inside("translate", "absent", "--", "--alpha", cwd=tmp_path)
    assert done.stderr == (
        "regard: absent: no such folder (a run folder contains recipe.yaml; regard train creates one, "
        "and regard runs lists your runs)\n"
    )


# Wrong options and arguments


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("tranlsate run a", "no such command tranlsate; did you mean translate?"),
        ("translate run a --baem 3", "no such option: --baem; did you mean --beam?"),
        ("runs list --sort x", "no such option: --sort (see regard runs list --help)"),
        ("translate", "missing argument RUN (see regard translate --help)"),
        ("translate run a --beam", "option --beam requires an argument"),
        ("translate run a --beam five", "--beam five: must be an integer (see"),
        ("translate run a --nbest 0", "--nbest 0: must be greater than or equal to 1 (see"),
        ("translate run a --nbest=x", "--nbest x: must be an integer (see"),
        ("info run other", "got unexpected extra argument(s) (other)"),
        ("translate run a --precision int4", "--precision int4: unknown name; did you mean int8?"),
        ("bench translate --device gpu", "--device gpu: unknown name; did you mean cpu?"),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line(
    command: str, message: str, tmp_path: Path
) -> None:
    done = inside(*command.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"regard: {message}"), done.stderr
    assert done.stderr.count("\n") == 1


def test_a_wrong_argument_is_answered_with_a_hint(tmp_path: Path) -> None:
    done = inside("bench", "train", "--repeats", "x", cwd=tmp_path)
    assert done.stderr.endswith("(see regard bench train --help)\n")


@pytest.mark.parametrize("command", ["", "bench"])
def test_without_arguments_the_help_is_printed(command: str, tmp_path: Path) -> None:
    done = inside(*command.split(), cwd=tmp_path)
    assert "Usage: regard" in done.stdout
    assert done.stderr == ""
