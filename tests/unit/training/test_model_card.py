"""Which weights a run has in the end, and that its card describes these and no others."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from regard.data.pairs import Pair
from regard.nn.network import named_weights
from regard.recipe import load_recipe
from regard.storage.run_dir import RunDir
from regard.training import model_card
from regard.training.evaluation import Validation
from regard.training.run import train
from regard.training.trainer import Trainer
from tests.cli.commands import write_recipe, write_task


def digest(weights: Mapping[str, Tensor]) -> str:
    content = b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
    return hashlib.sha256(content).hexdigest()


class ScriptedLosses:
    """Gives every new set of weights the next loss, and the same weights the same loss again."""

    def __init__(self, losses: Iterator[float]) -> None:
        self.losses = losses
        self.known: dict[str, float] = {}

    def validate(self, trainer: Trainer) -> Validation:
        with trainer.evaluation_mode():
            key = digest(named_weights(trainer.network))
        if key not in self.known:
            self.known[key] = next(self.losses)
        return Validation(self.known[key], None, self.known[key])


def run_with(
    folder: Path, steps: int, average: str = "best", minutes: float | None = None
) -> RunDir:
    training = {"validate_every": 2, "keep_checkpoints": 2, "schedule": "noam", "warmup": 2}
    write_recipe(
        folder,
        training={**training, "steps": steps, "average": average, "tokens_per_batch": 64}
        | {"validate_sentences": 0, "best_checkpoint_metric": "loss"},
    )
    train(load_recipe(folder / "recipe.yaml", [f"data.root={folder}"]), folder / "run", minutes)
    return RunDir(folder / "run")


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedLosses:
    write_task(tmp_path, list, 40)
    script = ScriptedLosses(iter([5.0, 4.9, 4.0]))  # steps 2 and 4, and their average
    monkeypatch.setattr(Trainer, "validate", lambda trainer: script.validate(trainer))
    run = run_with(tmp_path, 4)
    assert described(run, script) == (2, 4.0)
    return script


def described(run: RunDir, script: ScriptedLosses) -> tuple[int, float]:
    """What the card says, after checking that it says it of the weights in the file."""
    card = run.card()
    assert card["valid"]["loss"] == script.known[digest(run.weights())]
    return card["averaged_checkpoints"], card["valid"]["loss"]


@pytest.mark.parametrize(
    ("single", "average"),
    [(5.5, 6.0), (4.5, 4.2), (4.5, 4.0), (4.0, 4.1)],
    ids=["worse", "best single, worse than the average", "equal average", "equal single"],
)
def test_a_continued_run_keeps_a_better_average_and_its_card(
    tmp_path: Path, scripted: ScriptedLosses, single: float, average: float
) -> None:
    before = (tmp_path / "run/model.safetensors").read_bytes()
    scripted.losses = iter([single, average])
    run = run_with(tmp_path, 6)
    assert described(run, scripted) == (2, 4.0)
    assert run.weights_file.read_bytes() == before


@pytest.mark.parametrize(
    ("single", "average", "chosen"), [(3.9, 4.2, (1, 3.9)), (4.5, 3.0, (2, 3.0))]
)
def test_a_continued_run_takes_better_weights(
    tmp_path: Path,
    scripted: ScriptedLosses,
    single: float,
    average: float,
    chosen: tuple[int, float],
) -> None:
    scripted.losses = iter([single, average])
    assert described(run_with(tmp_path, 6), scripted) == chosen


def test_a_card_that_was_lost_is_written_again_for_the_same_weights(
    tmp_path: Path, scripted: ScriptedLosses
) -> None:
    (tmp_path / "run/card.json").unlink()
    assert described(run_with(tmp_path, 4), scripted) == (2, 4.0)


def test_without_time_to_validate_the_card_has_the_values_of_the_file(
    tmp_path: Path, scripted: ScriptedLosses, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.losses = iter([5.5])
    monkeypatch.setattr("regard.training.model_card._too_late", lambda *_: True)
    run = run_with(tmp_path, 6, minutes=5)
    assert described(run, scripted) == (2, 4.0)


@pytest.mark.parametrize(
    ("left", "expected"), [(None, 1000), (1_000.0, 1000), (100.0, 500), (41.0, 200), (39.0, 0)]
)
def test_the_confidence_is_calibrated_on_as_many_pairs_as_there_is_time_for(
    monkeypatch: pytest.MonkeyPatch, left: float | None, expected: int
) -> None:
    trainer: Any = None  # the time of a translation does not depend on it here
    monkeypatch.setattr(model_card, "decoding_seconds", lambda _, sentences: 0.2 * sentences)
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    pairs = [Pair(str(number), "") for number in range(1000)]
    deadline = None if left is None else 7.0 + left
    assert len(model_card._pairs_in_time(trainer, pairs, deadline)) == expected
    few = model_card._pairs_in_time(trainer, pairs[:50], deadline)
    assert few == pairs[:50]
