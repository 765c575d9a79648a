"""End to end, from text files to translations: the model learns copying, reversing and sorting."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.commands import Done, in_workers, inside, write_task

Task = Callable[[list[str]], Iterable[str]]

CASES: dict[str, tuple[Task, list[str]]] = {
    "copy": (list, []),
    "reverse": (reversed, []),
    "sort": (sorted, []),
    "bpe, not shared": (
        list,
        ["tokenizer.kind=bpe", "tokenizer.vocab_size=300", "tokenizer.shared=false"],
    ),
}
"""name: the task to learn, and the changes to the recipe"""


BEAMS = {"reverse": [2, 5]}


class Learned(NamedTuple):
    training: Done
    translating: dict[int, Done]
    """by beam"""
    expected: list[str]


def learn(folder: Path, name: str, task: Task, changes: list[str]) -> Learned:
    recipe = write_task(folder, task, count=4000)
    sets = [word for change in changes for word in ("--set", change)]
    training = inside("train", recipe, *sets, "--out", "run", cwd=folder)
    translating = {
        beam: inside("translate", "run", "--input", "test.src", "--beam", beam, cwd=folder)
        for beam in BEAMS.get(name, [5])
    }
    return Learned(training, translating, (folder / "test.tgt").read_text().splitlines())


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Learned]:
    return in_workers(
        {
            name: partial(learn, tmp_path_factory.mktemp("learn"), name, *case)
            for name, case in CASES.items()
        }
    )


def count_correct(learned: Learned, beam: int) -> int:
    """How many of the unseen sequences are translated correctly."""
    assert learned.training.returncode == 0, learned.training.stderr
    assert learned.translating[beam].returncode == 0, learned.translating[beam].stderr
    found = learned.translating[beam].stdout.splitlines()
    return sum(one == other for one, other in zip(found, learned.expected, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_unseen_sequences_are_translated_correctly(name: str, learned: dict[str, Learned]) -> None:
    assert count_correct(learned[name], 5) >= 0.95 * 150, learned[name].training.stderr


def test_a_small_beam_works_as_well(learned: dict[str, Learned]) -> None:
    assert count_correct(learned["reverse"], 2) >= 0.95 * 150
