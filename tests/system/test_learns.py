"""The whole road, from text files to translations, leads to a model that has understood its task."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from system.commands import Done, regard, together, write_task

Task = Callable[[list[str]], Iterable[str]]

CASES: dict[str, tuple[Task, list[str]]] = {
    "copy": (list, []),
    "reverse": (reversed, []),
    "sort": (sorted, []),
    "norms after": (reversed, ["model.norm_place=after", "training.rate=0.003"]),
    "learned positions": (reversed, ["model.position=learned"]),
    "bpe, not shared": (list, ["tokenizer.kind=bpe", "tokenizer.shared=false"]),
}
"""name: what to learn, and the changes to the recipe"""


class Learned(NamedTuple):
    training: Done
    translating: Done
    wanted: list[str]


def learn(folder: Path, task: Task, changes: list[str]) -> Learned:
    recipe = write_task(folder, task, count=4000)
    sets = [word for change in changes for word in ("--set", change)]
    training = regard("train", recipe, *sets, "--out", "run", cwd=folder)
    translating = regard("translate", "run", "--input", "test.src", cwd=folder)
    return Learned(training, translating, (folder / "test.tgt").read_text().splitlines())


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Learned]:
    return together(
        {
            name: partial(learn, tmp_path_factory.mktemp("learn"), *case)
            for name, case in CASES.items()
        }
    )


@pytest.mark.parametrize("name", CASES)
def test_unseen_sequences_are_translated_right(name: str, learned: dict[str, Learned]) -> None:
    training, translating, wanted = learned[name]
    assert training.returncode == 0, training.stderr
    assert translating.returncode == 0, translating.stderr
    found = translating.stdout.splitlines()
    assert len(found) == len(wanted) == 150
    right = sum(one == other for one, other in zip(found, wanted, strict=True))
    assert right >= 0.95 * len(wanted), f"{right} of {len(wanted)}\n{training.stderr}"
