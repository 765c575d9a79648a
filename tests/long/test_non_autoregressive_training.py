"""Non-autoregressive models through the command line."""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest

from tests.cli.commands import in_workers, inside, succeeds_inside, write_task

Task = Callable[[list[str]], Iterable[str]]

CASES: dict[str, tuple[Task, list[str]]] = {
    "copy": (list, ["training.steps=250", "training.validate_every=250"]),
    # The length is certain here: more candidates could only win by accident.
    "reverse": (reversed, ["decoding.length_beam=1"]),
    "reverse, eos": (
        reversed,
        ["model.non_autoregressive.length=eos", "model.non_autoregressive.extra_positions=2"],
    ),
}


def learn(folder: Path, task: Task, changes: list[str]) -> Path:
    recipe = write_task(folder, task, count=4000)
    # The default beam: any other would be refused, because it has no effect.
    every = ["model.architecture=non_autoregressive", "decoding.beam=5", *changes]
    sets = [word for change in every for word in ("--set", change)]
    succeeds_inside("train", recipe, *sets, "--out", "run", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with a run for each case. To be read only."""
    return in_workers(
        {
            name: partial(learn, tmp_path_factory.mktemp("non_autoregressive"), *case)
            for name, case in CASES.items()
        }
    )


@pytest.mark.parametrize(
    ("name", "iterations"), [("copy", 10), ("reverse", 1), ("reverse", 10), ("reverse, eos", 4)]
)
def test_unseen_sequences_are_translated_correctly(
    name: str, iterations: int, learned: dict[str, Path]
) -> None:
    folder = learned[name]
    done = succeeds_inside(
        "translate", "run", "--input", "test.src", "--iterations", iterations, cwd=folder
    )
    expected = (folder / "test.tgt").read_text().splitlines()
    found = done.stdout.splitlines()
    assert sum(one == other for one, other in zip(found, expected, strict=True)) >= 0.9 * 150


def test_evaluate_uses_the_given_number_of_iterations(learned: dict[str, Path]) -> None:
    files = ("--source", "test.src", "--reference", "test.tgt")
    done = succeeds_inside(
        "evaluate", "run", *files, "--iterations", 2, "--json", cwd=learned["copy"]
    )
    assert json.loads(done.stdout)["scores"][0]["value"] > 90


def test_a_beam_is_refused_in_one_line(learned: dict[str, Path]) -> None:
    done = inside("translate", "run", "a b", "--beam", 3, cwd=learned["copy"])
    assert done.returncode == 2
    assert done.stderr.startswith("regard: beam 3: no effect on a non-autoregressive model")
    assert done.stderr.count("\n") == 1
