"""Fitting a training to the time there is."""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from regard.nn.network import named_weights
from regard.recipe import Recipe, make_recipe
from regard.storage.run_dir import RunDir
from regard.training import planner
from regard.training.checkpoint import TrainingState
from regard.training.data_loader import TrainingBatch
from regard.training.distributed import ProcessGroup
from regard.training.planner import (
    StepTime,
    adjust_steps,
    duration,
    estimate_validation_time,
    fit_recipe,
    is_too_slow,
    keep_to_time,
    limit_examples,
    limit_validation_pairs,
    measure_steps,
    plan,
    revision_is_due,
    seconds_to_translate,
)
from regard.training.prepare_data import open_prepared, prepare
from regard.training.progress import ProgressReporter
from regard.training.stopping import StopReason
from regard.training.trainer import Meter, Trainer


def recipe_with(**training: object) -> Recipe:
    values = {"steps": 1_000, "validate_every": 100, "schedule": "cosine", "warmup": 200}
    return make_recipe(
        {
            "data": {"train": {"pairs": "x.tsv"}},
            "model": {"preset": "tiny", "d_model": 16, "heads": 2, "d_ff": 16},
            "training": values | training,
        },
        "test",
    )


def test_a_recipe_that_fits_is_not_changed() -> None:
    recipe = recipe_with()
    fitted, shortened = fit_recipe(recipe, available=120, seconds_per_step=0.1, validation=1.0)
    assert (fitted, shortened) == (recipe, False)


def test_a_long_recipe_is_shortened_with_its_schedule() -> None:
    fitted, shortened = fit_recipe(
        recipe_with(), available=50, seconds_per_step=0.1, validation=0.5
    )
    training = fitted.training
    assert shortened
    assert 400 <= training.steps <= 450
    assert training.warmup == training.steps // 10
    assert training.steps % training.validate_every == 0
    count = training.steps // training.validate_every
    assert training.steps * 0.1 + count * 0.5 <= 50
    assert count * 0.5 <= 0.1 * 50


def test_a_schedule_without_an_end_gets_one_with_the_same_peak() -> None:
    recipe = recipe_with(schedule="noam", learning_rate=2.0, warmup=400)
    fitted, _ = fit_recipe(recipe, available=50, seconds_per_step=0.1, validation=0.5)
    assert fitted.training.schedule == "cosine"
    assert fitted.training.learning_rate == pytest.approx(2.0 * 16**-0.5 * 400**-0.5)


@pytest.mark.parametrize("available", [0.0, 0.01, 0.3, 7.0])
def test_even_without_time_there_is_one_step_and_one_validation(available: float) -> None:
    fitted, shortened = fit_recipe(recipe_with(), available, seconds_per_step=10.0, validation=5.0)
    assert shortened
    assert fitted.training.steps == fitted.training.validate_every == 1


def test_a_validation_never_takes_longer_than_the_training_between_two() -> None:
    recipe = recipe_with(validate_every=10)
    fitted, shortened = fit_recipe(recipe, available=1_000, seconds_per_step=0.1, validation=4.0)
    assert not shortened
    assert fitted.training.validate_every * 0.1 >= 4.0
    few_steps = recipe_with(validate_every=10, steps=400)
    fitted, _ = fit_recipe(few_steps, available=1_000, seconds_per_step=0.1, validation=4.0)
    assert fitted.training.validate_every == 40


def test_a_recipe_with_too_many_validations_gets_fewer_of_them() -> None:
    recipe = recipe_with(validate_every=10)
    fitted, shortened = fit_recipe(recipe, available=115, seconds_per_step=0.1, validation=0.5)
    training = fitted.training
    assert (shortened, training.steps) == (False, 1_000)
    assert training.steps * 0.1 + training.steps // training.validate_every * 0.5 <= 115


def test_durations_are_readable() -> None:
    assert [duration(seconds) for seconds in (44.2, 1_080, 13_200)] == [
        "45 s",
        "18 min",
        "3 h 40 min",
    ]


WORDS = ["a", "b", "c", "d", "e", "f", "g", "h"]
LINES = [" ".join([*WORDS[i % 7 : i % 7 + 1 + i % 3], WORDS[i % 5]]) for i in range(200)]


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    """A small training that has not begun."""
    (tmp_path / "x.tsv").write_text("".join(f"{line}\t{line}\n" for line in LINES))
    yield from new_trainer(tmp_path, "translation", {"pairs": "x.tsv"})


def new_trainer(tmp_path: Path, task: str, files: dict[str, str]) -> Iterator[Trainer]:
    recipe = make_recipe(
        {
            "task": task,
            "data": {"root": str(tmp_path), "train": files, "hold_out": 0.2},
            "tokenizer": {"kind": "word"},
            "model": {"preset": "tiny", "d_model": 16, "heads": 2, "d_ff": 16},
            "training": {"steps": 100_000, "warmup": 100, "tokens_per_batch": 60, "device": "cpu"}
            | {"ema": 0.9, "validate_every": 1_000},
        },
        "test",
    )
    run = RunDir(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    run.write_recipe(recipe)
    reporter = ProgressReporter(run, enabled=False)
    prepare(run, recipe, reporter)
    yield Trainer(run, recipe, open_prepared(run, recipe), ProcessGroup(0, 1, torch.device("cpu")))
    reporter.close()


def snapshot(trainer: Trainer) -> dict[str, torch.Tensor]:
    weights = {name: weight.clone() for name, weight in named_weights(trainer.network).items()}
    assert trainer.ema is not None
    return weights | {f"ema.{name}": mean.clone() for name, mean in trainer.ema.items()}


def test_measured_steps_leave_no_trace(trainer: Trainer) -> None:
    before = snapshot(trainer)
    first = trainer.step([next(trainer.batches())])
    after_one_step = snapshot(trainer)
    with pytest.raises(AssertionError), trainer.trial_steps():
        pass  # training has begun
    fresh = Trainer(trainer.run, trainer.recipe, trainer.prepared, trainer.group)
    seconds, tokens = measure_steps(fresh, left=5.0)
    assert seconds > 0
    assert 1 <= tokens <= 60
    assert fresh.state.step == fresh.state.tokens == 0
    assert all(torch.equal(before[name], value) for name, value in snapshot(fresh).items())
    assert torch.equal(fresh.step([next(fresh.batches())]), first)
    assert all(torch.equal(after_one_step[name], value) for name, value in snapshot(fresh).items())


def test_a_plan_ends_before_the_deadline(trainer: Trainer) -> None:
    fitted = plan(trainer, time.monotonic() + 20, measure_steps(trainer, left=20.0))
    assert fitted.shortened
    assert fitted.seconds <= 20
    training = fitted.recipe.training
    assert 1 <= training.steps < 100_000
    assert training.steps * fitted.seconds_per_step <= 20
    assert fitted.requested_steps == 100_000
    assert "pairs" in fitted.describe(160)


def test_the_time_of_a_validation_is_not_proportional_to_its_examples_on_a_gpu(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "examples", trainer.examples * 10)
    count = len(trainer.examples)
    assert count > 300
    measured: list[int] = []

    def translate(_: Trainer, first: int) -> float:
        measured.append(first)
        return 0.4 + 0.001 * min(first, count)

    monkeypatch.setattr(planner, "seconds_to_translate", translate)
    trainer.state.step = 1  # a trained model ends its outputs
    limit_examples(trainer, 10.0, 20.0, minimum=40)
    assert measured == [1, 16, 64, 256, 1_024]
    assert trainer.validation_seconds == pytest.approx(0.4 + 0.001 * count)
    assert len(trainer.examples) == count
    # An untrained one goes on to the limit of 50 tokens more than the source.
    trainer.state.step = 0
    estimate_validation_time(trainer, limit=100.0, measuring_seconds=10.0)
    assert trainer.validation_seconds < 0.2 * (0.4 + 0.001 * count)


def test_a_validation_gets_three_percent_of_the_time(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And up to eight, if there would be too few examples otherwise."""
    limits = list[float]()

    def limit_examples(_: Trainer, seconds: float, at_most: float, minimum: int) -> None:
        limits.extend((seconds, at_most))

    def limit_validation_pairs(_: Trainer, seconds: float, speed: float) -> float:
        limits.extend((seconds, speed))
        return 0.0

    monkeypatch.setattr(planner, "limit_examples", limit_examples)
    monkeypatch.setattr(planner, "limit_validation_pairs", limit_validation_pairs)
    plan(trainer, time.monotonic() + 1_000, StepTime(0.1, 50.0))
    assert limits == pytest.approx([30, 80, 30, 1_500], rel=0.01)


def test_few_examples_are_better_than_none(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "seconds_to_translate", lambda _, count: float(count))
    trainer.state.step = 1
    assert len(trainer.examples) > 20
    limit_examples(trainer, 5.0, 20.0, minimum=10)
    assert (len(trainer.examples), trainer.validation_seconds) == (10, 10.0)
    metrics = [trainer.training.best_checkpoint_metric]
    limit_examples(trainer, 5.0, 9.0, minimum=10)
    assert (len(trainer.examples), trainer.validation_seconds) == (0, 0.0)
    assert [*metrics, trainer.training.best_checkpoint_metric] == ["score", "last"]


@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({}, "last"),
        ({"patience": 3}, "loss"),
        ({"init_from": "a/run"}, "loss"),
        ({"best_checkpoint_metric": "loss"}, "loss"),
    ],
)
def test_without_time_to_translate_the_last_checkpoint_is_kept_unless_it_is_compared(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], metric: str
) -> None:
    monkeypatch.setattr(planner, "seconds_to_translate", lambda _, count: float(count))
    trainer.state.step = 1
    training = trainer.training.model_copy(update=changes)
    trainer.set_recipe(trainer.recipe.model_copy(update={"training": training}))
    limit_examples(trainer, 5.0, 9.0, minimum=10)
    assert trainer.training.best_checkpoint_metric == metric


def test_a_plan_is_shortened_when_the_machine_is_slower(trainer: Trainer) -> None:
    trainer.set_recipe(
        trainer.recipe.model_copy(
            update={"training": trainer.training.model_copy(update={"steps": 1_000})}
        )
    )
    trainer.state.step, trainer.validation_seconds = 200, 0.0
    deadline = time.monotonic() + 102
    assert adjust_steps(trainer, deadline, seconds_per_step=0.12) is None
    shorter = adjust_steps(trainer, deadline, seconds_per_step=0.25)
    assert shorter is not None
    assert 590 <= shorter.training.steps <= 600


def test_a_plan_is_extended_when_the_machine_is_faster(trainer: Trainer) -> None:
    fitted = plan(trainer, time.monotonic() + 20, StepTime(seconds=0.05, tokens=50))
    trainer.set_recipe(fitted.recipe)
    trainer.state.step, trainer.validation_seconds = 10, 0.0
    steps, deadline = fitted.recipe.training.steps, time.monotonic() + 20
    exact = (0.93 * 20 - trainer.reserved_seconds) / (steps - 10)
    assert adjust_steps(trainer, deadline, seconds_per_step=0.95 * exact) is None
    longer = adjust_steps(trainer, deadline, seconds_per_step=exact / 4)
    assert longer is not None
    assert longer.training.steps == pytest.approx(10 + 4 * (steps - 10), rel=0.05)
    longest = adjust_steps(trainer, deadline, seconds_per_step=1e-6)
    assert longest is not None
    assert longest.training.steps == 100_000
    trainer.state.step = steps - 1  # two steps more are not worth another validation
    assert (
        adjust_steps(trainer, deadline, seconds_per_step=(deadline - time.monotonic()) / 4) is None
    )


def test_a_plan_of_few_slow_steps_is_revised(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if there are fewer than ``log_every``. The learning rate still ends at zero."""
    monkeypatch.setattr(planner, "REVISION_SECONDS", 0.1)
    few = {"steps": 5, "validate_every": 5, "warmup": 1, "schedule": "cosine"}
    training = trainer.training.model_copy(update=few)
    trainer.set_recipe(trainer.recipe.model_copy(update={"training": training}))
    trainer.run.plan_file.write_text("{}")
    trainer.examples, trainer.validation_seconds = [], 0.01
    step = trainer.step

    def slow_step(batches: list[TrainingBatch]) -> torch.Tensor:
        time.sleep(0.05)
        return step(batches)

    monkeypatch.setattr(trainer, "step", slow_step)
    reporter = ProgressReporter(trainer.run, enabled=False)
    assert trainer.fit(reporter, time.monotonic() + 4) is StopReason.ALL_STEPS
    assert 10 <= trainer.state.step == trainer.training.steps < training.log_every
    assert trainer.optimizer.param_groups[0]["lr"] == 0


@pytest.mark.parametrize(
    ("left", "since", "steps", "logged", "due"),
    [
        (100.0, 3.1, 5, True, True),
        (100.0, 2.9, 5, True, False),
        (10.0, 1.1, 5, True, True),
        (10.0, 0.9, 5, True, False),  # each time, the GPU is waited for
        (100.0, 9.0, 3, False, False),  # the first steps are slower
        (100.0, 9.0, 4, False, True),
    ],
)
def test_a_plan_is_revised_every_three_percent_of_the_time(
    left: float, since: float, steps: int, logged: bool, due: bool
) -> None:
    now = time.monotonic()
    trainer = cast(Any, SimpleNamespace(untimed_steps=4))
    meter = cast(Any, SimpleNamespace(start=now - since, steps=steps, logged=logged))
    assert revision_is_due(trainer, now + left, meter) is due


@pytest.mark.parametrize("planned", [False, True])
def test_only_a_run_with_a_plan_is_shortened(trainer: Trainer, planned: bool) -> None:
    """A run that was started without a time limit keeps its steps when it is resumed with one."""
    if planned:
        trainer.run.plan_file.write_text("{}")
    trainer.state.step = 10
    meter = cast(Any, SimpleNamespace(measured_seconds=10.0, seconds_per_step=1.0))
    reporter = ProgressReporter(trainer.run, enabled=False)
    keep_to_time(trainer, reporter, time.monotonic() + 100, meter)
    assert (trainer.training.steps < 200) is planned


@pytest.mark.parametrize("task", ["masked_lm", "language_model"])
def test_tasks_without_targets_are_planned(tmp_path: Path, task: str) -> None:
    (tmp_path / "x.txt").write_text("".join(f"{line} {n}\n" for n, line in enumerate(LINES)))
    for trainer in new_trainer(tmp_path, task, {"text": "x.txt"}):
        assert trainer.count_labels(trainer.prepared.train) > 100
        assert plan(trainer, time.monotonic() + 20, measure_steps(trainer, 20.0)).shortened


def test_a_plan_that_is_shortened_during_warmup_gives_a_valid_recipe(trainer: Trainer) -> None:
    trainer.state.step = 10
    shorter = adjust_steps(trainer, time.monotonic() + 10, seconds_per_step=0.5)
    assert shorter is not None
    assert shorter.training.steps < 100
    assert make_recipe(shorter.model_dump(), "the shorter recipe") == shorter


def test_the_loss_is_computed_on_the_same_validation_pairs_after_resuming(trainer: Trainer) -> None:
    limit_validation_pairs(trainer, seconds=1.0, tokens_per_second=20.0)
    trainer.step([next(trainer.batches())])
    trainer.save()
    loss = trainer.validate().loss
    resumed = Trainer(trainer.run, trainer.recipe, trainer.prepared, trainer.group)
    assert resumed.validate().loss != loss
    resumed.load()
    assert resumed.validate().loss == loss


class OtherProcess(ProcessGroup):
    """One of several processes; the main one has no time to measure more than one step."""

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return 0.0


def test_all_processes_measure_as_many_steps_as_the_main_one(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.group = OtherProcess(0, 1, torch.device("cpu"))
    batch = next(trainer.batches())
    monkeypatch.setattr(trainer, "batches", lambda: iter([batch]))  # enough for one step
    _, tokens = measure_steps(trainer, left=6_000.0)
    assert tokens == batch.tokens


def test_the_first_steps_and_a_short_delay_do_not_shorten_a_plan(trainer: Trainer) -> None:
    trainer.state.step = 1
    meter = Meter(trainer, ProgressReporter(trainer.run, enabled=False))
    for seconds in (100.0, *[1.0] * 20, 3.0):
        for _ in range(10):
            meter.update(torch.ones(()))
        meter.start -= seconds
        meter.log()
    assert meter.seconds_per_step == pytest.approx(23 / 210, rel=0.1)


def test_examples_are_cleaned_as_the_pairs_of_the_loss(tmp_path: Path) -> None:
    equal = [f"{line} {n}\t{line} {n}" for n, line in enumerate(LINES)]
    unequal = [f"{n}\t{' '.join(WORDS * 2)} {n}" for n in range(100)]  # data.clean.max_ratio
    blank = [f"{line}\t " for line in LINES]
    (tmp_path / "x.tsv").write_text("\n".join([*unequal, *blank, *equal, ""]))
    for trainer in new_trainer(tmp_path, "translation", {"pairs": "x.tsv"}):
        assert len(trainer.validation_pairs(1_000)) == len(trainer.prepared.valid) > 20
        assert trainer.examples == trainer.validation_pairs(trainer.training.validate_sentences)


def test_the_speed_that_is_too_slow_is_in_tokens_per_second() -> None:
    """Five steps of 200 tokens, half a second each, are 400 tokens per second."""
    asked = list[tuple[float, int]]()

    def judge(tokens_per_second: float, seconds: float, done: int) -> bool:
        asked.append((tokens_per_second, done))
        return True

    trainer = SimpleNamespace(
        training=recipe_with(checkpoint_every=10).training,
        state=TrainingState(step=5, tokens=1000),
        automatic=SimpleNamespace(is_too_slow=judge),
        group=SimpleNamespace(max=float),
        reserved_seconds=0.0,
    )
    meter = SimpleNamespace(measured_seconds=90.0, seconds_per_step=0.5)
    for step, slow in ((5, True), (10, False)):  # a checkpoint is kept
        trainer.state.step = step
        deadline = time.monotonic() + 100
        assert is_too_slow(cast(Any, trainer), deadline, cast(Any, meter)) is slow
    assert asked == [(400.0, 1000)]


def test_the_time_of_translations_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, translated = [1000.0], list[int]()
    monkeypatch.setattr("regard.training.planner.time.monotonic", lambda: clock[0])

    def predict_pairs(pairs: list[int], quick: bool) -> None:
        clock[0] += 2.5
        translated.extend(pairs)

    model = SimpleNamespace(predict_pairs=predict_pairs)
    trainer = cast(Any, SimpleNamespace(model=model, examples=[1, 2, 3, 4]))
    assert seconds_to_translate(trainer, 3) == 2.5
    assert translated == [1, 2, 3]


@pytest.mark.parametrize(("left", "measured"), [(250.0, 5), (10_000.0, 12), (1.0, 0)])
def test_as_many_steps_are_measured_as_fit_into_four_percent_of_the_time(
    monkeypatch: pytest.MonkeyPatch, left: float, measured: int
) -> None:
    """Steps of two seconds; three come first, which are not counted, and one that is."""
    clock, steps = [0.0], list[int]()
    monkeypatch.setattr("regard.training.planner.time.monotonic", lambda: clock[0])

    def run_step() -> int:
        clock[0] += 2.0
        steps.append(100)
        return 100

    trainer = SimpleNamespace(
        group=SimpleNamespace(broadcast=lambda value: value, max=lambda value: value),
        trial_steps=lambda: nullcontext(run_step),
        synchronize=lambda: None,
        untimed_steps=3,
    )
    assert measure_steps(cast(Trainer, trainer), left) == (2.0, 100)
    assert len(steps) == 3 + 1 + measured
