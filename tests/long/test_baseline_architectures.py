"""The baselines, LSTM and convolution, through the same commands: train, translate, inspect."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.cli.commands import Done, in_workers, inside, write_task

ARCHITECTURES = ["lstm", "convolution"]


class Learned(NamedTuple):
    folder: Path
    training: Done
    translating: Done


def learn(folder: Path, architecture: str) -> Learned:
    path = write_task(folder, list, count=3000)
    recipe = yaml.safe_load(path.read_text())
    del recipe["model"]["d_ff"]
    recipe["model"]["architecture"] = architecture
    recipe["training"] |= {"steps": 300, "validate_every": 300}
    path.write_text(yaml.safe_dump(recipe))
    training = inside("train", path, "--out", "run", cwd=folder)
    translating = inside("translate", "run", "--input", "test.src", "--beam", 5, cwd=folder)
    return Learned(folder, training, translating)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Learned]:
    return in_workers(
        {name: partial(learn, tmp_path_factory.mktemp(name), name) for name in ARCHITECTURES}
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_learns_to_copy_unseen_sequences(architecture: str, learned: dict[str, Learned]) -> None:
    one = learned[architecture]
    assert one.training.returncode == 0, one.training.stderr
    assert one.translating.returncode == 0, one.translating.stderr
    expected = (one.folder / "test.tgt").read_text().splitlines()
    found = one.translating.stdout.splitlines()
    correct = sum(a == b for a, b in zip(found, expected, strict=True))
    assert correct >= 0.95 * len(expected), one.training.stderr


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_sentence_can_be_inspected(architecture: str, learned: dict[str, Learned]) -> None:
    done = inside("look", "run", "a b c", cwd=learned[architecture].folder)
    assert done.returncode == 0, done.stderr
    assert "<html" in (learned[architecture].folder / "look.html").read_text()
