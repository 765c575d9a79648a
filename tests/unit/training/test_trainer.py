"""The scalars of a step, selected checkpoints, validation examples, and the time left."""

import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, strategies as st

from regard.data.pairs import Pair
from regard.errors import RegardError
from regard.recipe import load_recipe, make_recipe
from regard.storage.run_dir import RunDir
from regard.training.checkpoint import (
    TrainingState,
    checkpoint_files,
    checkpoint_name,
    checkpoint_step,
    load_checkpoint,
    save_checkpoint,
)
from regard.training.data_loader import DataCursor, TrainingBatch
from regard.training.evaluation import evenly_spaced
from regard.training.progress import ProgressReporter
from regard.training.run import Interrupted, train
from regard.training.stopping import StopReason
from regard.training.train_step import StepScalars
from regard.training.trainer import Trainer
from tests.cli.commands import write_recipe, write_task


def recipe_with(**training: Any) -> Any:
    return make_recipe({"data": {"train": {"pairs": "x.tsv"}}, "training": training}, "test")


@given(count=st.integers(1, 300), examples=st.integers(0, 300))
def test_examples_are_evenly_spaced_over_the_file(count: int, examples: int) -> None:
    pairs = [Pair(str(number), "") for number in range(count)]
    indices = [int(pair.source) for pair in evenly_spaced(pairs, count, examples)]
    assert len(indices) == min(count, examples)
    edges = [*indices, count] if indices else []
    gaps = [after - before for before, after in pairwise(edges)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert indices[:1] == [0][: len(indices)]


def test_the_time_left_is_at_most_the_time_to_the_deadline(tmp_path: Path) -> None:
    reporter = ProgressReporter(RunDir(tmp_path), enabled=False)
    reporter.start(0, 1000, time.monotonic() + 60)
    reporter.start_time -= 100  # ten steps took a hundred seconds
    assert reporter.time_left(10, 1000) <= timedelta(seconds=60)
    assert reporter.time_left(999, 1000) < timedelta(seconds=1)
    reporter.deadline = None
    assert reporter.time_left(10, 1000) >= timedelta(seconds=9900)


def scalars_of_step(step: int, tokens: list[int], processes: int = 1, **training: Any) -> Any:
    """The scalars that a trainer passes to its optimizer step, and the state after it."""
    recipe, received = recipe_with(**training), list[StepScalars]()

    def train_step(_: object, scalars: StepScalars) -> torch.Tensor:
        received.append(scalars)
        return torch.zeros(())

    trainer = SimpleNamespace(
        recipe=recipe,
        training=recipe.training,
        state=TrainingState(step=step - 1, tokens=1000),
        group=SimpleNamespace(rank=0, size=processes),
        cuda_graph_step=None,
        train_step=train_step,
    )
    batches = [TrainingBatch([], count, DataCursor(3, n)) for n, count in enumerate(tokens, 5)]
    Trainer.step(cast(Any, trainer), batches)
    return received[0], trainer.state


@pytest.mark.parametrize("processes", [1, 2])
def test_the_loss_is_a_mean_over_the_tokens_of_all_accumulated_batches(processes: int) -> None:
    scalars, state = scalars_of_step(1, [100, 300], processes, accumulate=2)
    assert scalars.grad_scale == processes / 400
    assert (state.step, state.tokens, state.epoch, state.batch) == (1, 1400, 3, 6)


@pytest.mark.parametrize(("step", "decay"), [(1, 2 / 11), (90, 0.91), (10**6, 0.999)])
def test_the_moving_average_has_a_warm_start(step: int, decay: float) -> None:
    scalars, _ = scalars_of_step(step, [100], ema=0.999)
    assert scalars.ema_rate == pytest.approx(1 - decay)


@pytest.mark.parametrize(
    ("average", "steps"), [("best", [40, 20]), ("last", [30, 40, 50]), ("none", [40])]
)
def test_the_checkpoints_to_keep_are_the_best_or_the_last(
    tmp_path: Path, average: str, steps: list[int]
) -> None:
    """Losses at steps 10, 20 …: the best is neither the first nor the last."""
    validations = [(10, 5.0, 5.0), (20, 3.0, 3.0), (30, 4.0, 4.0), (40, 2.0, 2.0), (50, 6.0, 6.0)]
    for step, *_ in validations:
        (tmp_path / checkpoint_name(step)).touch()
    keep = {} if average == "none" else {"keep_checkpoints": len(steps)}
    settings = {"validate_every": 10, "average": average, **keep}
    trainer = SimpleNamespace(
        training=recipe_with(**settings).training,
        run=SimpleNamespace(checkpoints=tmp_path),
        state=TrainingState(step=50, validations=validations),
    )
    selected = Trainer.selected_checkpoints(cast(Any, trainer))
    assert [checkpoint_step(path) for path in selected] == steps


# ---------------------------------------------------------------------------------------------
# Ways to train that must give the same weights


def train_run(folder: Path, out: str, *changes: str) -> dict[str, bytes]:
    """Train a small run; the contents of its checkpoints and of its model."""
    training = {"steps": 9, "validate_every": 2, "checkpoint_every": 3, "keep_checkpoints": 2}
    write_recipe(
        folder,
        model={"dropout": 0.1},
        training={**training, "tokens_per_batch": 64, "schedule": "noam", "warmup": 2, "ema": 0.5}
        | {"validate_sentences": 0, "best_checkpoint_metric": "loss", "device": "cpu"},
    )
    recipe = load_recipe(folder / "recipe.yaml", [f"data.root={folder}", *changes])
    train(recipe, folder / out)
    run = RunDir(folder / out)
    files = [*checkpoint_files(run.checkpoints), run.weights_file]
    return {file.name: file.read_bytes() for file in files}


def test_checkpoints_written_in_the_background_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingState, "seconds", property(lambda _: 0.0, lambda _, value: None))
    write_task(tmp_path, list, 100)
    at_once = train_run(tmp_path, "at-once")
    monkeypatch.setattr(Trainer, "saves_in_background", True)
    assert train_run(tmp_path, "background") == at_once


@pytest.mark.parametrize(("metric", "step"), [("loss", 2), ("last", 9)])
def test_the_last_checkpoint_is_kept_although_the_loss_rises(
    metric: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(tmp_path, list, 100)
    monkeypatch.setattr(Trainer, "_validation_loss", lambda trainer: float(trainer.state.step))
    train_run(
        tmp_path,
        "run",
        f"training.best_checkpoint_metric={metric}",
        *("training.keep_checkpoints=9", "training.checkpoint_every=1", "training.ema=0"),
    )
    path = tmp_path / "run" / "checkpoints" / checkpoint_name(step)
    _, tensors = load_checkpoint(path)
    weights, _ = RunDir(tmp_path / "run").read_weights()
    assert all(torch.equal(weights[name], one) for name, one in tensors["model"].items())


def test_a_checkpoint_that_cannot_be_written_in_the_background_ends_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, *_: object) -> None:
        raise RegardError(f"{path}: no space left on device")

    write_task(tmp_path, list, 100)
    monkeypatch.setattr(Trainer, "saves_in_background", True)
    monkeypatch.setattr("regard.training.checkpoint.save_checkpoint", fail)
    with pytest.raises(RegardError, match=r"step-000000002\.safetensors: no space left"):
        train_run(tmp_path, "full")


def test_a_validation_waits_for_the_first_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would otherwise save another one, which is wrong while the weights are gathered or averaged."""
    written = list[int]()

    def slow(path: Path, *arguments: Any) -> None:
        time.sleep(0.5)
        save_checkpoint(path, *arguments)
        written.append(checkpoint_step(path))

    write_task(tmp_path, list, 100)
    monkeypatch.setattr(Trainer, "saves_in_background", True)
    monkeypatch.setattr("regard.training.checkpoint.save_checkpoint", slow)
    changes = ("steps=4", "checkpoint_every=3", "validate_every=4")
    train_run(tmp_path, "run", *(f"training.{change}" for change in changes))
    assert written == [3, 4]


def test_a_resumed_run_at_its_last_step_waits_for_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, *_: object) -> None:
        raise RegardError(f"{path}: no space left on device")

    write_task(tmp_path, list, 100)
    # Ended by a signal at the last step, before it was validated.
    monkeypatch.setattr(Trainer, "_stop_reason", interrupted_at(4))
    with pytest.raises(Interrupted):
        train_run(tmp_path, "run", "training.steps=4", "training.validate_every=5")
    monkeypatch.setattr(Trainer, "saves_in_background", True)
    monkeypatch.setattr("regard.training.checkpoint.save_checkpoint", fail)
    with pytest.raises(RegardError, match="no space left"):
        train_run(tmp_path, "run", "training.steps=4", "training.validate_every=5")


def interrupted_at(last: int) -> Callable[..., StopReason]:
    def stop_reason(trainer: Trainer, *_: object) -> StopReason:
        return StopReason.INTERRUPTED if trainer.state.step == last else StopReason.NONE

    return stop_reason


def test_activation_checkpointing_gives_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingState, "seconds", property(lambda _: 0.0, lambda _, value: None))
    write_task(tmp_path, list, 100)
    stored = train_run(tmp_path, "stored")
    computed = train_run(tmp_path, "computed", "training.activation_checkpointing=true")
    assert computed == stored


@pytest.mark.parametrize(
    ("step", "reason"), [(3, StopReason.TIME_LIMIT), (4, StopReason.ALL_STEPS)]
)
def test_after_the_last_step_the_time_limit_is_not_the_reason(
    step: int, reason: StopReason
) -> None:
    """The message would tell to resume a training that is finished."""
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(step=step),
        training=SimpleNamespace(steps=4),
        time_to_finish=lambda: 1.0,
    )
    assert Trainer._stop_reason(trainer, time.monotonic(), interrupted=False) is reason
    assert (
        Trainer._stop_reason(trainer, time.monotonic(), interrupted=True) is StopReason.INTERRUPTED
    )
