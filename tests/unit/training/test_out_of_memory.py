"""Out of memory in training: batches are split, training continues, and the log and the card say so."""

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
from regard.training import out_of_memory
from regard.training.checkpoint import checkpoint_files, checkpoint_step, load_checkpoint
from regard.training.out_of_memory import available_memory, is_out_of_memory
from regard.training.run import train
from regard.training.train_step import TrainStep
from regard.training.trainer import Trainer
from tests.cli.commands import write_recipe, write_task

STEPS = 9


def allocate_too_much() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def exhaust_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


FAILURES = [allocate_too_much, exhaust_gpu]


def train_run(folder: Path, out: str, *changes: str) -> None:
    training = {"validate_every": 3, "keep_checkpoints": 2, "schedule": "noam", "warmup": 2}
    write_recipe(
        folder,
        model={"dropout": 0.0},
        training={**training, "steps": STEPS, "tokens_per_batch": 64, "accumulate": 2}
        | {"validate_sentences": 0, "best_checkpoint_metric": "loss"},
    )
    recipe = load_recipe(folder / "recipe.yaml", [f"data.root={folder}", *changes])
    train(recipe, folder / out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, and a run of it that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("memory")
    write_task(folder, list, 100)
    train_run(folder, "whole")
    return folder


def fail_at(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    failing: Callable[[int], bool],
    failure: Callable[[], None] = allocate_too_much,
) -> None:
    """Let a method fail at some of its calls, counted from 1."""
    usual, calls = getattr(owner, name), iter(range(1, 10_000))

    def method(*arguments: Any, **options: Any) -> Any:
        if failing(next(calls)):
            failure()
        return usual(*arguments, **options)

    monkeypatch.setattr(owner, name, method)


def newest(run: Path) -> int:
    return max(map(checkpoint_step, checkpoint_files(run / "checkpoints")), default=0)


def same_weights(folder: Path, one: str, other: str) -> bool:
    weights = [RunDir(folder / out).weights_file.read_bytes() for out in (one, other)]
    return weights[0] == weights[1]


def assert_recovers(folder: Path, out: str, failed: int, resumed_from: int) -> None:
    """The run ends, says what happened, and its weights are those of the whole batches but for rounding."""
    train_run(folder, out)
    run, whole = RunDir(folder / out), RunDir(folder / "whole")
    card = run.card()
    assert (card["micro_batches"], card["out_of_memory"], card["steps"]) == (2, [failed], STEPS)
    assert card["target_tokens"] == whole.card()["target_tokens"]
    (event,) = [event for event in run.log() if event["event"] == "out_of_memory"]
    assert (event["step"], event["resumed_from"], event["micro_batches"]) == (
        failed,
        resumed_from,
        2,
    )
    expected = whole.weights()
    for name, weight in run.weights().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-4)


# Recovery


@pytest.mark.parametrize("failure", FAILURES)
def test_in_a_step_it_is_repeated_with_smaller_micro_batches(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failure: Callable[[], None]
) -> None:
    # accumulate: the second batch of step 5
    fail_at(monkeypatch, torch.autograd, "backward", lambda call: call == 10, failure)
    assert_recovers(folder, failure.__name__, failed=4, resumed_from=4)


def test_in_the_first_step_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, TrainStep, "compute_loss", lambda call: call == 1)
    assert_recovers(folder, "first", failed=0, resumed_from=0)


def test_in_an_update_training_continues_from_the_last_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, optim.Adam, "step", lambda call: call == 5)
    assert_recovers(folder, "update", failed=4, resumed_from=3)


def test_in_a_validation_it_is_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, Trainer, "validate", lambda call: call == 2)
    assert_recovers(folder, "validation", failed=6, resumed_from=6)


def test_a_resumed_run_keeps_its_micro_batches(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, TrainStep, "compute_loss", lambda call: call == 3)  # step 2
    train_run(folder, "split")
    with monkeypatch.context() as patch:
        fail_at(patch, TrainStep, "compute_loss", lambda call: call == 3)
        train_run(folder, "halves", "training.steps=3")
    assert load_checkpoint(checkpoint_files(folder / "halves/checkpoints")[-1])[0].out_of_memory
    train_run(folder, "halves")
    assert same_weights(folder, "halves", "split")
    assert RunDir(folder / "halves").card()["out_of_memory"] == [1]


# Where nothing is left to split


def test_what_cannot_be_split_is_refused_in_one_line_and_resumes_exactly(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_at(patch, torch.autograd, "backward", lambda call: call >= 10)
        with pytest.raises(RegardError) as caught:
            train_run(folder, "exhausted")
    message = str(caught.value)
    assert message.startswith("out of memory after step 4 on ")
    assert "Everything up to step 4 is saved" in message
    assert "\n" not in message
    assert "training.accumulate (now 2)" in message
    assert "training.tokens_per_batch (now 64 in " in message
    assert newest(folder / "exhausted") == 4
    assert RunDir(folder / "exhausted").log()[-1]["reason"] == "out of memory"
    train_run(folder, "exhausted")
    splits = RunDir(folder / "exhausted").card()["out_of_memory"]
    assert splits == [4] * len(splits)
    assert 2 <= len(splits) <= 6


def test_the_first_update_has_no_checkpoint_to_return_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_at(patch, optim.Adam, "step", lambda call: call == 1)
        with pytest.raises(
            RegardError, match=r"^out of memory after step 0 on .* No step was saved"
        ):
            train_run(folder, "first-update")
    assert newest(folder / "first-update") == 0
    train_run(folder, "first-update")
    assert same_weights(folder, "first-update", "whole")


def test_statistics_of_a_batch_are_not_split(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, TrainStep, "compute_loss", lambda call: call == 3)
    changes = ("model.norm=batch", "training.tokens_per_batch=400")
    with pytest.raises(RegardError, match="out of memory after step 1"):
        train_run(folder, "batch-norm", *changes, "data.clean.max_tokens=100")
    with pytest.raises(RegardError, match=r"tokens_per_batch: auto may split a batch"):
        train_run(folder, "auto-norm", "model.norm=batch", "training.tokens_per_batch=auto")


def test_after_training_the_model_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, Trainer, "validate", lambda call: call == STEPS // 3 + 1)
    with pytest.raises(RegardError, match=r"out of memory\. Training progress is saved"):
        train_run(folder, "end")
    train_run(folder, "end")
    assert same_weights(folder, "end", "whole")


def test_other_errors_are_not_taken_for_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    fail_at(monkeypatch, TrainStep, "compute_loss", lambda call: call == 3, fail)
    with pytest.raises(RuntimeError, match="mat1"):
        train_run(folder, "other")
    assert not is_out_of_memory(ValueError("out of memory"))
    assert is_out_of_memory(MemoryError())


# tokens_per_batch: auto


def auto_run(folder: Path, out: str) -> tuple[int, RunDir]:
    """Train with tokens_per_batch: auto; returns the number of micro-batches, and the run."""
    changes = ("model.preset=tiny", "training.tokens_per_batch=auto", "training.steps=3")
    train_run(folder, out, *changes, "training.warmup=1")
    run = RunDir(folder / out)
    (event,) = [event for event in run.log() if event["event"] == "micro_batches"]
    assert event["micro_batches"] == run.card()["micro_batches"]
    return event["micro_batches"], run


def test_auto_is_the_batch_of_the_preset_in_one_part_where_it_fits(folder: Path) -> None:
    parts, run = auto_run(folder, "auto")
    assert parts == 1
    train_run(
        folder,
        "fixed",
        *("model.preset=tiny", "training.tokens_per_batch=4096", "training.steps=3"),
        "training.warmup=1",
    )
    assert run.recipe().training.tokens_per_batch == "auto"
    assert {n: w.tolist() for n, w in run.weights().items()} == {
        n: w.tolist() for n, w in RunDir(folder / "fixed").weights().items()
    }


def test_auto_splits_a_batch_that_is_larger_than_the_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out_of_memory, "available_memory", lambda: 10 << 20)
    parts, run = auto_run(folder, "auto-small")
    assert parts in (2, 4, 8)
    assert run.card()["target_tokens"] == RunDir(folder / "auto").card()["target_tokens"]


def test_auto_tries_the_largest_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls 1: the estimate on a CPU. Calls 2 and 3: trials with one and two micro-batches."""
    fail_at(monkeypatch, TrainStep, "compute_loss", lambda call: call in (2, 3), exhaust_gpu)
    parts, run = auto_run(folder, "tried")
    assert parts == 4
    assert run.card()["out_of_memory"] == []


def test_the_memory_of_the_machine_and_of_the_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert available_memory(meminfo, tmp_path) is None
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:   50 kB\n")
    assert available_memory(meminfo, tmp_path) == 50 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("10240\n")
    assert available_memory(meminfo, tmp_path) == 50 * 1024
    (tmp_path / "memory.max").write_text("20480\n")
    assert available_memory(meminfo, tmp_path) == 10240
