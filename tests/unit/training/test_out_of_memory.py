"""Out of memory in training: one line, everything saved, and an exact resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

from regard.errors import RegardError
from regard.recipe import load_recipe
from regard.storage.run_dir import RunDir
from regard.training.checkpoint import checkpoint_files, checkpoint_step
from regard.training.run import train
from regard.training.train_step import TrainStep
from regard.training.trainer import Trainer, is_out_of_memory
from tests.cli.commands import write_recipe, write_task

STEPS = 9


def allocate_too_much() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def exhaust_python() -> None:
    raise MemoryError


def exhaust_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


FAILURES = [allocate_too_much, exhaust_python, exhaust_gpu]


def train_run(folder: Path, out: str) -> None:
    training = {"validate_every": 3, "keep_checkpoints": 2, "schedule": "noam", "warmup": 2}
    write_recipe(
        folder,
        model={"dropout": 0.1},
        training={**training, "steps": STEPS, "tokens_per_batch": 64, "accumulate": 2}
        | {"validate_sentences": 0, "best_checkpoint_metric": "loss"},
    )
    train(load_recipe(folder / "recipe.yaml", [f"data.root={folder}"]), folder / out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, and a run of it that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("memory")
    write_task(folder, list, 100)
    train_run(folder, "whole")
    return folder


def fail_once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, failure: Callable[[], None]
) -> None:
    """Let a method fail at one of its calls, counted from 1."""
    usual, calls = getattr(owner, name), iter(range(1, 10_000))

    def method(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            failure()
        return usual(*arguments, **options)

    monkeypatch.setattr(owner, name, method)


def newest(run: Path) -> int:
    return max(map(checkpoint_step, checkpoint_files(run / "checkpoints")), default=0)


def assert_fails_and_resumes(folder: Path, out: str, done: int, saved: int) -> None:
    with pytest.raises(RegardError) as caught:
        train_run(folder, out)
    message = str(caught.value)
    assert message.startswith(f"out of memory after step {done} on ")
    assert "\n" not in message
    for words in ("training.tokens_per_batch (now 64)", "training.accumulate (now 2)"):
        assert words in message
    assert f"Everything up to step {saved} is saved" in message or not saved
    assert newest(folder / out) == saved
    assert RunDir(folder / out).log()[-1]["reason"] == "out of memory"
    train_run(folder, out)
    whole, resumed = RunDir(folder / "whole"), RunDir(folder / out)
    assert resumed.weights_file.read_bytes() == whole.weights_file.read_bytes()
    assert resumed.card()["valid"] == whole.card()["valid"]


@pytest.mark.parametrize("failure", FAILURES)
def test_in_a_step_the_steps_before_it_are_saved(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failure: Callable[[], None]
) -> None:
    fail_once(
        monkeypatch, torch.autograd, "backward", 10, failure
    )  # accumulate: the second of step 5
    assert_fails_and_resumes(folder, failure.__name__, done=4, saved=4)


def test_in_the_first_step_nothing_is_saved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_once(monkeypatch, TrainStep, "compute_loss", 1, allocate_too_much)
    assert_fails_and_resumes(folder, "first", done=0, saved=0)


def test_in_an_update_the_last_checkpoint_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, optim.Adam, "step", 5, allocate_too_much)
    assert_fails_and_resumes(folder, "update", done=4, saved=3)


def test_in_a_validation_the_step_is_saved_and_validated_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, Trainer, "validate", 2, allocate_too_much)
    assert_fails_and_resumes(folder, "validation", done=6, saved=6)


def test_after_training_the_model_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_once(monkeypatch, Trainer, "validate", STEPS // 3 + 1, allocate_too_much)
    with pytest.raises(RegardError, match=r"out of memory\. What was trained is saved"):
        train_run(folder, "end")
    train_run(folder, "end")
    weights = [RunDir(folder / out).weights_file.read_bytes() for out in ("end", "whole")]
    assert weights[0] == weights[1]


def test_other_errors_are_not_taken_for_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    fail_once(monkeypatch, TrainStep, "compute_loss", 3, fail)
    with pytest.raises(RuntimeError, match="mat1"):
        train_run(folder, "other")
    assert not is_out_of_memory(ValueError("out of memory"))
