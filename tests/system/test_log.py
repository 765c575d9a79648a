"""What a run leaves behind says truly what happened."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.learn.checkpoint import checkpoint_files, load_checkpoint
from regard.learn.report import read_log
from system.commands import Done, regard

Train = Callable[..., Done]


@pytest.fixture
def train(workshop: Path, tmp_path: Path) -> Train:
    """Train with some changes to the recipe of the workshop, into tmp_path / run."""

    def start(*changes: str) -> Done:
        sets = [word for change in changes for word in ("--set", change)]
        return regard("train", "recipe.yaml", "--out", tmp_path / "run", *sets, cwd=workshop)

    return start


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_log(run / "log.jsonl") if event["event"] == kind]


def test_the_log_tells_start_steps_validations_and_why_it_stopped(workshop: Path) -> None:
    run = workshop / "run"
    (start,) = events(run, "start")
    assert (start["step"], start["steps"]) == (0, 300)
    steps = events(run, "step")
    assert [event["step"] for event in steps] == list(range(20, 301, 20))
    assert all(event["rate"] >= 0 and event["speed"] > 0 for event in steps)
    assert steps[0]["loss"] > 10 * steps[-1]["loss"] > 0
    valid = events(run, "valid")
    assert [event["step"] for event in valid] == [100, 200, 300]
    assert valid[0]["best"] is True
    assert {"loss", "perplexity", "bleu"} <= valid[0].keys()
    (stop,) = events(run, "stop")
    assert (stop["step"], stop["reason"]) == (300, "all 300 steps are done")
    times = [event["time"] for event in read_log(run / "log.jsonl")]
    assert times == sorted(times)


def test_tensorboard_can_draw_the_same(workshop: Path) -> None:
    (path,) = (workshop / "run" / "events").iterdir()
    written = path.read_bytes()
    for name in ("step/loss", "step/rate", "step/speed", "valid/loss", "valid/bleu"):
        assert name.encode() in written


def test_the_card_tells_all_it_takes_to_judge_and_to_repeat_the_run(workshop: Path) -> None:
    card = json.loads((workshop / "run" / "card.json").read_text())
    assert card["steps"] == 300
    assert card["reason_stopped"] == "all 300 steps are done"
    assert card["data"]["train"]["kept"] == 3000
    assert card["vocabulary"] == {"source": 12, "target": 12}
    assert [result["measure"] for result in card["test"]] == ["bleu", "chrf", "ter"]
    assert all(result["signature"] and result["low"] is not None for result in card["test"])
    assert card["valid"]["loss"] < 0.5
    assert "train" in card["command"]
    assert card["files"].keys() == {"recipe.yaml", "tokenizer.model", "model.safetensors"}
    for key in ("regard", "averaged_checkpoints", "epochs", "target_tokens", "seconds", "hardware"):
        assert card[key]
    for key in ("processes", "parameters", "search", "versions", "python"):
        assert card[key]


def test_a_loss_that_is_no_number_stops_with_advice(train: Train, tmp_path: Path) -> None:
    wild = "training.rate=1e30", "training.schedule=constant", "training.clip=null"
    done = train(*wild, "training.log_every=1", "training.checkpoint_every=1", "training.warmup=0")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    message = done.stderr.splitlines()[-1]
    assert message.startswith("regard: step 2: the loss is not a number any more")
    assert "smaller training.rate" in message
    (stop,) = events(tmp_path / "run", "stop")
    assert stop["reason"] == "the loss is not a number"
    (path,) = checkpoint_files(tmp_path / "run" / "checkpoints")
    _, groups = load_checkpoint(path)
    for weight in groups["model"].values():
        assert torch.isfinite(weight).all()


def test_patience_ends_the_training_early(train: Train, tmp_path: Path) -> None:
    still = "training.optimizer=sgd", "training.rate=1e-30", "training.validate_every=2"
    done = train(*still, "training.patience=2", "data.test=null")
    assert done.returncode == 0, done.stderr
    assert "Training stopped: no better validation in the last 2." in done.stderr
    (stop,) = events(tmp_path / "run", "stop")
    assert (stop["step"], stop["reason"]) == (6, "no better validation in the last 2")
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    assert (card["steps"], card["reason_stopped"]) == (6, stop["reason"])


def test_a_training_that_patience_ended_is_finished(train: Train, tmp_path: Path) -> None:
    still = "training.optimizer=sgd", "training.rate=1e-30", "training.validate_every=1"
    changes = *still, "training.patience=1", "data.test=null"
    assert train(*changes).returncode == 0
    card = (tmp_path / "run" / "card.json").read_bytes()
    assert train(*changes).returncode == 0
    assert (tmp_path / "run" / "card.json").read_bytes() == card
