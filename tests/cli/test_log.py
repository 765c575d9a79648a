"""Log, TensorBoard events and card of a run record what happened."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.storage.run_dir import RunDir
from regard.training.checkpoint import checkpoint_files, load_checkpoint
from tests.cli.commands import Done, inside, write, write_recipe, write_task

Train = Callable[..., Done]


@pytest.fixture
def train(workshop: Path, tmp_path: Path) -> Train:
    """Trains the workshop's recipe with some changes, into tmp_path / run."""

    def start(*changes: str) -> Done:
        sets = [word for change in changes for word in ("--set", change)]
        return inside("train", "recipe.yaml", "--out", tmp_path / "run", *sets, cwd=workshop)

    return start


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in RunDir(run).log() if event["event"] == kind]


def test_the_log_has_start_steps_validations_and_stop_reason(workshop: Path) -> None:
    run = workshop / "run"
    (start,) = events(run, "start")
    assert (start["step"], start["steps"]) == (0, 300)
    steps = events(run, "step")
    assert [event["step"] for event in steps] == list(range(20, 301, 20))
    assert all(event["learning_rate"] >= 0 and event["speed"] > 0 for event in steps)
    assert steps[0]["loss"] > 10 * steps[-1]["loss"] > 0
    valid = events(run, "valid")
    assert [event["step"] for event in valid] == [100, 200, 300]
    assert valid[0]["best"] is True
    assert {"loss", "perplexity", "bleu"} <= valid[0].keys()
    (stop,) = events(run, "stop")
    assert (stop["step"], stop["reason"]) == (300, "all 300 steps are done")
    times = [event["time"] for event in RunDir(run).log()]
    assert times == sorted(times)


def test_tensorboard_gets_the_same_values(workshop: Path) -> None:
    (path,) = (workshop / "run" / "events").iterdir()
    written = path.read_bytes()
    for name in ("step/loss", "step/learning_rate", "step/speed", "valid/loss", "valid/bleu"):
        assert name.encode() in written


def test_the_card_has_everything_to_judge_and_repeat_the_run(workshop: Path) -> None:
    card = json.loads((workshop / "run" / "card.json").read_text())
    assert card["steps"] == 300
    assert card["reason_stopped"] == "all 300 steps are done"
    assert card["data"]["train"]["kept"] == 3000
    assert card["vocabulary"] == {"source": 13, "target": 13}
    assert [result["metric"] for result in card["test"]] == ["bleu", "chrf", "ter"]
    assert all(result["signature"] and result["low"] is not None for result in card["test"])
    assert card["valid"]["loss"] < 0.5
    assert "train" in card["command"]
    assert card["files"].keys() == {"recipe.yaml", "tokenizer.model", "model.safetensors"}
    for key in ("regard", "averaged_checkpoints", "epochs", "target_tokens", "seconds", "hardware"):
        assert card[key]
    for key in ("processes", "parameters", "decoding", "versions", "python"):
        assert card[key]


def test_a_loss_that_is_not_finite_stops_training_with_advice(train: Train, tmp_path: Path) -> None:
    diverging = (
        "training.learning_rate=1e30",
        "training.schedule=constant",
        "training.clip_norm=null",
    )
    done = train(
        *diverging, "training.log_every=1", "training.checkpoint_every=1", "training.warmup=0"
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    message = done.stderr.splitlines()[-1]
    assert message.startswith("regard: step 2: the loss is not finite")
    assert "smaller training.learning_rate" in message
    (stop,) = events(tmp_path / "run", "stop")
    assert stop["reason"] == "the loss is not finite"
    (path,) = checkpoint_files(tmp_path / "run" / "checkpoints")
    _, groups = load_checkpoint(path)
    for weight in groups["model"].values():
        assert torch.isfinite(weight).all()


def test_patience_stops_training_early(train: Train, tmp_path: Path) -> None:
    frozen = "training.optimizer=sgd", "training.learning_rate=1e-30", "training.validate_every=2"
    done = train(*frozen, "training.patience=2", "data.test=null")
    assert done.returncode == 0, done.stderr
    assert "Training stopped: no improvement in the last 2 validations." in done.stderr
    (stop,) = events(tmp_path / "run", "stop")
    assert (stop["step"], stop["reason"]) == (6, "no improvement in the last 2 validations")
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    assert (card["steps"], card["reason_stopped"]) == (6, stop["reason"])


def test_a_run_that_stopped_early_is_finished(train: Train, tmp_path: Path) -> None:
    frozen = "training.optimizer=sgd", "training.learning_rate=1e-30", "training.validate_every=1"
    changes = *frozen, "training.patience=1", "data.test=null"
    assert train(*changes).returncode == 0
    card = (tmp_path / "run" / "card.json").read_bytes()
    assert train(*changes).returncode == 0
    assert (tmp_path / "run" / "card.json").read_bytes() == card


def refused(folder: Path, *sets: str) -> str:
    """Train with these changes, which must fail, and return the error output."""
    changes = [word for change in sets for word in ("--set", change)]
    done = inside("train", "recipe.yaml", "--out", "refused", *changes, cwd=folder)
    assert done.returncode == 2, done.stderr
    return done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_task(tmp_path, list, count=300)
    training = {"steps": 4, "warmup": 1, "validate_every": 2, "checkpoint_every": 2}
    write_recipe(tmp_path, training=training)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.test={pairs: absent.tsv}", "data.test.pairs: no such file"),
        ("evaluation.tokenize=13b", "no tokenizer 13b; did you mean 13a"),
    ],
)
def test_evaluation_settings_are_checked_before_the_first_step(
    folder: Path, change: str, message: str
) -> None:
    assert message in refused(folder, change)
    assert not list((folder / "refused" / "checkpoints").glob("step-*"))


def test_a_test_source_that_is_too_long_is_found_before_the_first_step(folder: Path) -> None:
    write(folder / "long.src", ["a b", " ".join("a" * 12)])
    write(folder / "long.tgt", ["a b", "a"])
    test = "data.test={source: long.src, target: long.tgt}"
    short = "model.position=learned", "model.max_length=9", "data.clean.max_tokens=8"
    stderr = refused(folder, test, *short)
    assert (
        "data.test: source 2 has 13 tokens, EOS included, but the model can read only 9" in stderr
    )
    assert not list((folder / "refused" / "checkpoints").glob("step-*"))


def test_non_finite_weights_are_never_saved(folder: Path) -> None:
    sets = [
        "optimizer=sgd",
        "schedule=constant",
        "warmup=0",
        "learning_rate=1e30",
        "clip_norm=null",
    ]
    stderr = refused(
        folder, *(f"training.{change}" for change in sets), "training.validate_every=1"
    )
    assert "the loss is not finite" in stderr
    assert not (folder / "refused" / "model.safetensors").exists()
    assert not list((folder / "refused" / "checkpoints").glob("step-*"))


def test_a_model_without_checkpoints_is_not_overwritten(folder: Path) -> None:
    assert inside("train", "recipe.yaml", "--out", "run", cwd=folder).returncode == 0
    shutil.rmtree(folder / "run" / "checkpoints")
    before = (folder / "run" / "model.safetensors").read_bytes()
    done = inside("train", "recipe.yaml", "--out", "run", cwd=folder)
    assert done.returncode == 2
    assert "contains a model but no checkpoints, so it cannot be resumed" in done.stderr
    assert (folder / "run" / "model.safetensors").read_bytes() == before


def test_more_steps_with_a_cosine_schedule_are_refused(folder: Path) -> None:
    command = ["train", "recipe.yaml", "--out", "run", "--set", "training.schedule=cosine"]
    assert inside(*command, cwd=folder).returncode == 0
    done = inside(*command, "--set", "training.steps=8", cwd=folder)
    assert done.returncode == 2
    assert "training.steps is 4 there, 8 here" in done.stderr


def test_changes_that_contradict_the_run_are_refused(folder: Path) -> None:
    command = ["train", "recipe.yaml", "--out", "run", "--set", "training.schedule=constant"]
    assert inside(*command, cwd=folder).returncode == 0
    for change, message in (
        ("evaluation.metrics=[ter]", "evaluation.metrics"),  # checkpoints were selected by BLEU
        ("training.steps=3", "already trained for 4 steps, more than training.steps: 3"),
    ):
        done = inside(*command, "--set", "training.steps=6", "--set", change, cwd=folder)
        assert done.returncode == 2
        assert message in done.stderr
    also = ["--set", "training.steps=6", "--set", "evaluation.metrics=[bleu, ter]"]
    assert inside(*command, *also, cwd=folder).returncode == 0
