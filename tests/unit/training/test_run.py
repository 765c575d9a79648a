"""A whole training."""

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from regard.recipe import DataFiles, make_recipe
from regard.storage.run_dir import RunDir
from regard.training import out_of_memory
from regard.training.autoconfig import AutomaticRecipe, autoconfigure
from regard.training.checkpoint import checkpoint_name
from regard.training.cost_model import DeviceSpeed
from regard.training.optimizers import Muon
from regard.training.prepare_data import data_identity
from regard.training.progress import ProgressReporter
from regard.training.run import (
    RESUME_HINT,
    Interrupted,
    prepare_data,
    report_interrupt,
    train,
)
from regard.training.stopping import StopReason
from regard.training.trainer import Trainer

FILES = DataFiles(pairs=("x.tsv",))


@pytest.mark.parametrize("other", [True, False])
def test_a_training_that_is_too_slow_for_its_model_starts_again_with_another(
    other: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training goes on if there is no other model for the time left."""
    lines = [f"{a} {b} {c}" for a in "abcdefg" for b in "hijklmn" for c in "opqrs"]
    (tmp_path / "x.tsv").write_text("".join(f"{line}\t{line}\n" for line in lines))
    overrides = ["training.device=cpu", "training.log_every=1"]
    speed = DeviceSpeed("cpu", 1e6)
    chosen = autoconfigure(FILES, str(tmp_path), overrides, minutes=1, speed=speed)
    tiny = {"preset": "tiny", "d_model": 16, "heads": 2, "d_ff": 16}

    def refit(automatic: AutomaticRecipe, _: float, seconds: float) -> AutomaticRecipe:
        layers = 1 if called and other else 2
        values = automatic.values | {
            "model": tiny | {"encoder_layers": layers, "decoder_layers": layers},
            "training": {"steps": 40, "warmup": 4, "tokens_per_batch": 500},
        }
        assert 0 < seconds < 60
        return replace(automatic, recipe=make_recipe(values, "test", overrides))

    called: list[int] = []

    def is_too_slow(_: AutomaticRecipe, speed: float, seconds: float, done: int = 0) -> bool:
        assert speed > 0
        assert seconds < 60
        called.append(done)
        return True

    monkeypatch.setattr(AutomaticRecipe, "refit", refit)
    monkeypatch.setattr(AutomaticRecipe, "is_too_slow", is_too_slow)
    monkeypatch.setattr("regard.training.planner.MEASURED_SHARE", 0.0)
    model = train(chosen.recipe, tmp_path / "again", minutes=1, automatic=chosen)
    assert len(called) == 1
    assert called[0] > 0
    assert (model.recipe.model.encoder_layers, model.recipe.model.d_model) == (2 - other, 16)
    assert RunDir(tmp_path / "again").recipe().model == model.recipe.model
    assert capsys.readouterr().err.count("chosen for this speed") == 1 + other
    log = (tmp_path / "again" / "log.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in log if "step" in json.loads(line)]
    assert (steps == sorted(steps)) is not other  # otherwise it starts at step 0 again


def choose_again(
    folder: Path,
    patch: pytest.MonkeyPatch,
    overrides: list[str],
    section: str,
    target: Callable[[str], str] = str,
    **changes: object,
) -> Trainer:
    """Start a training whose recipe is chosen again with these changes; returns the trainer that would train.

    target: the target of a source.
    """
    lines = [f"{a} {b} {c}" for a in "abcdefg" for b in "hijklmn" for c in "opqrs"]
    (folder / "x.tsv").write_text("".join(f"{line}\t{target(line)}\n" for line in lines))
    small = ["training.device=cpu", "model.d_ff=16", "model.d_model=16", "model.heads=2"]
    speed = DeviceSpeed("cpu", 1e6)
    chosen = autoconfigure(FILES, str(folder), small + overrides, minutes=1, speed=speed)

    def refit(automatic: AutomaticRecipe, speed: float, seconds: float) -> AutomaticRecipe:
        changed = getattr(chosen.recipe, section).model_copy(update=changes)
        return replace(automatic, recipe=chosen.recipe.model_copy(update={section: changed}))

    def fit(trainer: Trainer, reporter: ProgressReporter, deadline: float | None) -> StopReason:
        trainers.append(trainer)
        return StopReason.INTERRUPTED

    trainers: list[Trainer] = []
    patch.setattr(AutomaticRecipe, "refit", refit)
    patch.setattr(Trainer, "fit", fit)
    with pytest.raises(Interrupted):
        train(chosen.recipe, folder / "again", minutes=1, automatic=chosen)
    (trainer,) = trainers
    return trainer


@pytest.mark.parametrize("changes", [{"rdrop": 2.0}, {"optimizer": "muon"}, {"steps": 30}])
def test_a_new_choice_trains_as_its_recipe_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
) -> None:
    """Also if network and batches are the same. If only the plan changes, the trainer need not be replaced."""
    trainer = choose_again(tmp_path, monkeypatch, [], "training", **changes)
    training = RunDir(tmp_path / "again").recipe().training
    assert {name: getattr(training, name) for name in changes} == changes
    assert trainer.loss_fn.settings.rdrop == training.rdrop
    assert isinstance(trainer.optimizer, Muon) == (training.optimizer == "muon")
    assert ("chosen for this speed" in capsys.readouterr().err) == ("steps" not in changes)


def test_data_are_prepared_again_if_a_new_choice_uses_them_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources and targets differ only in case, so that they are not swapped at first."""
    trainer = choose_again(tmp_path, monkeypatch, [], "data", str.upper, bidirectional=True)
    pairs = (tmp_path / "x.tsv").read_text().count("\n")
    assert len(trainer.prepared.train) == 2 * (pairs - len(trainer.prepared.valid))
    assert RunDir(tmp_path / "again").recipe().data.bidirectional


def test_copies_are_written_again_if_a_new_choice_samples_other_subwords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With augmentation, there are copies in any case."""
    copies = ["training.subword_copies=2", "training.augment.typos=0.5"]
    trainer = choose_again(
        tmp_path, monkeypatch, copies, "training", str.upper, subword_sampling=0.3
    )
    assert trainer.prepared.metadata["identity"] == data_identity(trainer.recipe)


def test_a_new_choice_fits_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "available_memory", lambda: 1 << 20)
    automatic = ["training.tokens_per_batch=auto"]
    trainer = choose_again(tmp_path, monkeypatch, automatic, "model", decoder_layers=2)
    assert trainer.recipe.model.decoder_layers == 2
    assert trainer.state.micro_batches > 1


def test_micro_batches_are_chosen_when_the_memory_of_the_old_model_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    networks = list[weakref.ref[nn.Module]]()
    in_memory = list[int]()

    def choose_micro_batches(trainer: Trainer, reporter: ProgressReporter) -> None:
        networks.append(weakref.ref(trainer.network))
        in_memory.append(sum(network() is not None for network in networks))

    monkeypatch.setattr(Trainer, "choose_micro_batches", choose_micro_batches)
    automatic = ["training.tokens_per_batch=auto"]
    choose_again(tmp_path, monkeypatch, automatic, "model", decoder_layers=2)
    assert in_memory == [1, 1]


def test_after_an_interrupt_the_user_knows_what_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "run")

    def interrupt() -> str:
        with pytest.raises(KeyboardInterrupt), report_interrupt(run):
            raise KeyboardInterrupt
        return capsys.readouterr().err.removesuffix(f". {RESUME_HINT}\n")

    assert interrupt() == (
        "Interrupted: the data are not prepared yet; the parts that are finished are kept"
    )
    run.data.mkdir(parents=True)
    run.metadata_file.touch()
    assert interrupt() == "Interrupted: the prepared data are kept; no training step is saved"
    run.checkpoints.mkdir()
    (run.checkpoints / checkpoint_name(1200)).touch()
    assert interrupt() == "Interrupted: everything up to step 1,200 is saved"


@pytest.mark.parametrize("call", [train, prepare_data])
def test_an_interrupt_while_preparing_is_reported(
    call: Callable[..., object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def prepare(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.training.run.prepare", prepare)
    (tmp_path / "x.tsv").write_text("a\tb\n")
    data = {"root": str(tmp_path), "train": {"pairs": "x.tsv"}}
    with pytest.raises(KeyboardInterrupt):
        call(make_recipe({"data": data}, "test"), tmp_path / "run")
    assert capsys.readouterr().err.startswith("Interrupted: the data are not prepared yet")


def test_a_resumed_run_says_what_the_time_limit_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{a} {b} {c}" for a in "abcdefg" for b in "hijklmn" for c in "opqrs"]
    (tmp_path / "x.tsv").write_text("".join(f"{line}\t{line}\n" for line in lines))
    run = RunDir(tmp_path / "run")

    def messages(steps: int, minutes: float | None) -> str:
        training = {"steps": steps, "warmup": 1, "device": "cpu", "validate_sentences": 0}
        values = {
            "data": {"root": str(tmp_path), "train": {"pairs": "x.tsv"}, "hold_out": 0.2},
            "tokenizer": {"kind": "word"},
            "model": {"preset": "tiny", "d_model": 16, "heads": 2, "d_ff": 16},
            "training": {"best_checkpoint_metric": "loss", **training},
        }
        train(make_recipe(values, "test"), run.folder, minutes)
        return capsys.readouterr().err

    assert "--minutes" not in messages(1, None)
    assert "without --minutes and keeps its 2 steps: if the time is too short" in messages(2, 1.0)
    run.plan_file.write_text("{}")
    assert "keeps its plan of 3 steps: --minutes can make it shorter, but" in messages(3, 1.0)
    assert "--minutes" not in messages(4, None)
