"""Train a run: open or resume the folder, prepare the data, train, average checkpoints, score, write the card."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from regard.errors import RegardError
from regard.inference.native_library import native_library
from regard.recipe import Recipe
from regard.storage.atomic_files import write_text
from regard.storage.resumable_output import WHOLE, Shard
from regard.storage.run_dir import RunDir
from regard.tasks import Model
from regard.training.autoconfig import AutomaticRecipe, describe_model
from regard.training.checkpoint import checkpoint_files, checkpoint_step
from regard.training.data_loader import unpackable_choices
from regard.training.distributed import (
    ProcessGroup,
    first_sentence,
    is_connection_lost,
    process_group,
)
from regard.training.evaluation import forgetting_seconds, score_before_fine_tuning
from regard.training.fine_tuning import check_initial_run
from regard.training.model_card import finish, hardware
from regard.training.out_of_memory import is_out_of_memory
from regard.training.planner import duration, measure_steps, plan
from regard.training.prepare_data import check_files, open_prepared, prepare
from regard.training.progress import ProgressReporter
from regard.training.resume import (
    check_run_folder,
    inexact_resume_warning,
    keep_plan,
    locked,
    open_run,
    planned_values,
    restart_seconds,
    with_plan,
)
from regard.training.run_mirror import RunMirror
from regard.training.stopping import NonFiniteError, StopReason, finished
from regard.training.trainer import Trainer

RESUME_HINT = "To resume, run the same command again."


class Interrupted(Exception):  # noqa: N818
    """Training was interrupted by a signal; everything is saved."""


def train(
    recipe: Recipe,
    out: str | Path,
    minutes: float | None = None,
    *,
    automatic: AutomaticRecipe | None = None,
    tune_decoding: bool = False,
) -> Model:
    """Train a model in the run folder ``out``, or resume if the folder has checkpoints.

    minutes: time limit for the whole run. Steps, warmup and validations are fitted to it, so that the schedule ends
    in time; a resumed run keeps its plan.
    automatic: how the recipe was chosen, so that it can be chosen again when the speed is known.
    tune_decoding: choose the length penalty on the validation pairs after training.
    """
    start = time.monotonic()
    run = RunDir(out)
    with report_interrupt(run), process_group(recipe.training.device) as group:
        # Each process has chosen an automatic recipe for the speed that it measured.
        recipe = group.in_each(lambda: _check_recipe(run, recipe))
        recipe, minutes = group.broadcast((recipe, minutes))
        deadline = None if minutes is None else start + 60 * minutes
        options = TrainOptions(deadline, automatic, tune_decoding)
        reporter = ProgressReporter(run, enabled=group.is_main)
        try:
            with ExitStack() as stack:

                def lock() -> None:
                    stack.enter_context(locked(run, restart_seconds()))

                group.on_main(lock)
                mirror = RunMirror.find(run, group, lock)
                _train(run, recipe, group, reporter, options, mirror)
        except (MemoryError, RuntimeError) as error:  # before the first step, or after the last
            if group.size > 1 and is_connection_lost(error):
                raise RegardError(
                    f"{run}: process {group.rank} has lost the connection to another process "
                    f"({first_sentence(error)}), whose own message says why. {RESUME_HINT}"
                ) from None
            if not is_out_of_memory(error):
                raise
            raise RegardError(
                f"{run}: out of memory. Training progress is saved. Use a smaller model, or a smaller "
                "training.tokens_per_batch and a larger training.accumulate"
            ) from None
        finally:
            reporter.close()
    return Model.load(out, recipe.training.device)


def prepare_data(
    recipe: Recipe, out: str | Path, shard: Shard = WHOLE, workers: int | None = None
) -> RunDir:
    """Prepare the data of a run without training, all of it or one shard; ``train`` then uses what is there."""
    run = RunDir(out)
    recipe = _check_recipe(run, recipe)
    reporter = ProgressReporter(run)
    try:
        with report_interrupt(run), ExitStack() as stack:
            if shard == WHOLE:
                stack.enter_context(locked(run))
            else:
                check_run_folder(run)  # shards work at the same time
                run.checkpoints.mkdir(parents=True, exist_ok=True)
                run.lock_file.touch()
            open_run(run, recipe)
            prepare(run, recipe, reporter, shard, workers)
    finally:
        reporter.close()
    return run


@contextmanager
def report_interrupt(run: RunDir) -> Iterator[None]:
    """Say what is kept after Ctrl-C, before the first step and after the last; the training loop handles it itself."""
    try:
        yield
    except KeyboardInterrupt:
        saved = max(map(checkpoint_step, checkpoint_files(run.checkpoints)), default=0)
        if saved:
            kept = f"everything up to step {saved:,} is saved"
        elif run.metadata_file.exists():
            kept = "the prepared data are kept; no training step is saved"
        else:
            kept = "the data are not prepared yet; the parts that are finished are kept"
        is_main = os.environ.get("RANK", "0") == "0"
        ProgressReporter(run, enabled=is_main).message(f"Interrupted: {kept}. {RESUME_HINT}")
        raise


def _check_recipe(run: RunDir, recipe: Recipe) -> Recipe:
    """Check files and folders before anything is written; returns the recipe with the plan of a run to resume."""
    check_files(recipe)
    recipe = keep_plan(run, recipe)
    check_initial_run(run, recipe)
    return recipe


class TrainOptions(NamedTuple):
    """The deadline of a training run, how to keep it, and what is done at the end."""

    deadline: float | None
    """a time of ``time.monotonic()``"""
    automatic: AutomaticRecipe | None
    tune_decoding: bool


def _train(
    run: RunDir,
    recipe: Recipe,
    group: ProcessGroup,
    reporter: ProgressReporter,
    options: TrainOptions,
    mirror: RunMirror | None,
) -> None:
    deadline = options.deadline
    if mirror is not None:
        reporter.message(
            f"The machines do not share {run}: each of the {mirror.machines} keeps a copy of the run"
        )

    def prepare_run() -> None:
        open_run(run, recipe)
        prepare(run, recipe, reporter)
        score_before_fine_tuning(run, recipe, reporter, deadline)

    _on_main(prepare_run, run, group, mirror)
    trainer = Trainer(run, recipe, open_prepared(run, recipe), group, mirror)
    trainer.load()
    stop = StopReason(group.max(finished(trainer.state, recipe.training)))
    if stop is not StopReason.NONE and run.card():
        reporter.message(
            f"{run} is already trained: {stop.describe(recipe.training)}; to train longer, choose another --out, "
            f"and add --from {run} to start from this model"
        )
        return
    _report_start(trainer, reporter)
    resumed = trainer.state.step > 0 or bool(trainer.state.validations)
    if deadline is not None and resumed:
        reporter.message(_time_limit_of_resumed_run(run, trainer.training.steps))
    if recipe.training.tokens_per_batch == "auto" and not resumed:
        trainer.choose_micro_batches(reporter)
    if deadline is not None and not resumed:
        trainer = _make_plan(trainer, reporter, deadline, options.automatic)
    stop = _fit(trainer, reporter, stop, deadline)
    if stop is StopReason.TOO_SLOW:
        assert deadline is not None
        trainer = _start_again(trainer, reporter, deadline)
        stop = _fit(trainer, reporter, StopReason.NONE, deadline)
    reason = stop.describe(trainer.training)
    reporter.close()
    reporter.log("stop", step=trainer.state.step, reason=reason, resumable=True)
    if stop is StopReason.INTERRUPTED:
        reporter.message(f"Stopped at step {trainer.state.step:,}; everything is saved.")
        reporter.message(RESUME_HINT)
        raise Interrupted
    reporter.message(f"Training stopped: {reason}.")
    if stop is StopReason.TIME_LIMIT:
        reporter.message(RESUME_HINT)
    trainer.gather_weights()  # from here on the network itself holds the weights to score
    if group.is_main:
        finish(trainer, reporter, reason, deadline, options.tune_decoding)
        trainer.evaluation.dismiss()
    else:
        trainer.evaluation.assist()
    if mirror is not None:
        mirror.update()


def _on_main(
    write: Callable[[], None], run: RunDir, group: ProcessGroup, mirror: RunMirror | None
) -> None:
    """Let the main process write the prepared data, which the others then read."""
    group.on_main(write)
    if mirror is not None:
        mirror.update()
    group.check_shared_file(run.metadata_file)


def _time_limit_of_resumed_run(run: RunDir, steps: int) -> str:
    """What ``--minutes`` does when a run is resumed: the steps are not planned again."""
    if run.plan_file.exists():
        return (
            f"A resumed run keeps its plan of {steps:,} steps: --minutes can make it shorter, but not longer; to train "
            f"longer, choose another --out, and add --from {run} to start from this model"
        )
    return (
        f"The run was started without --minutes and keeps its {steps:,} steps: if the time is too short for them, it "
        "stops, and the same command resumes it"
    )


def _make_plan(
    trainer: Trainer, reporter: ProgressReporter, deadline: float, automatic: AutomaticRecipe | None
) -> Trainer:
    """Fit the training to the time limit, and print the plan; returns a new trainer if the model was chosen again."""
    if trainer.group.is_main:
        write_text(trainer.run.plan_file, json.dumps(planned_values(trainer.recipe)))
    step = measure_steps(trainer, deadline - time.monotonic())
    if automatic is not None:
        speed = step.tokens / step.seconds
        automatic = automatic.refit(speed, deadline - time.monotonic())
        automatic = trainer.group.broadcast(automatic)
        after = automatic.recipe
        if with_plan(trainer.recipe, after) == after:
            trainer.set_recipe(after)
        else:
            trainer = _replace_trainer(trainer, after, reporter, speed)
            step = measure_steps(trainer, deadline - time.monotonic())
        trainer.automatic = automatic
    scoring, had_examples = forgetting_seconds(trainer.run, trainer.recipe), bool(trainer.examples)
    fitted = trainer.group.broadcast(plan(trainer, deadline, step, scoring))
    trainer.set_recipe(fitted.recipe)
    trainer.announced_steps = fitted.recipe.training.steps
    pairs, training = len(trainer.prepared.train), fitted.recipe.training
    reporter.message(f"Plan: {fitted.describe(pairs)}")
    if had_examples and not trainer.examples:
        last = trainer.training.best_checkpoint_metric == "last"
        kept = "the last checkpoint is kept" if last else "the validation loss selects checkpoints"
        reporter.message(
            f"      There is not enough time to translate validation pairs during training: {kept}"
        )
    epochs = training.steps * fitted.tokens_per_step / trainer.count_labels(trainer.prepared.train)
    if automatic is not None and not automatic.own_steps:
        reporter.message(f"      {epochs:.1f} epochs")
    elif fitted.shortened:
        reporter.message(
            f"      {epochs:.1f} epochs; the recipe's {fitted.requested_steps:,} steps would take "
            f"{duration(fitted.requested_seconds)}"
        )
    reporter.log(
        "plan",
        step=0,
        steps=training.steps,
        seconds_per_step=fitted.seconds_per_step,
        speed=fitted.tokens_per_second,
    )
    return trainer


def _start_again(trainer: Trainer, reporter: ProgressReporter, deadline: float) -> Trainer:
    """A plan for another model, because training is too slow for the chosen one.

    Training goes on if the rules choose the same model for the exact time left.
    """
    automatic, state = trainer.automatic, trainer.state
    assert automatic is not None
    speed = state.tokens / max(1e-9, state.seconds)
    automatic = trainer.group.broadcast(automatic.refit(speed, deadline - time.monotonic()))
    after = automatic.recipe
    if with_plan(trainer.recipe, after) != after:
        trainer = _replace_trainer(trainer, after, reporter, speed)
        trainer = _make_plan(trainer, reporter, deadline, automatic)
    trainer.automatic = None  # once is enough
    return trainer


def _replace_trainer(
    trainer: Trainer, recipe: Recipe, reporter: ProgressReporter, tokens_per_second: float
) -> Trainer:
    """A trainer for another model, loss or batch size. The old one is released.

    The data are prepared again if the new recipe uses the pairs in another way.
    """
    changed = f"batches of {recipe.batch_tokens:,} tokens"
    if describe_model(recipe) != describe_model(trainer.recipe):
        changed = f"{describe_model(recipe)}, {changed}"
    reporter.message(
        f"Measured {tokens_per_second:,.0f} tokens/s; chosen for this speed: {changed}"
    )
    if trainer.group.is_main:
        trainer.run.write_recipe(recipe)
    run, prepared, group, mirror = trainer.run, trainer.prepared, trainer.group, trainer.mirror
    before = trainer.recipe
    trainer.release()  # its memory is not to be counted
    if _data_keys(recipe) != _data_keys(before):
        _on_main(lambda: prepare(run, recipe, reporter), run, group, mirror)
        prepared = open_prepared(run, recipe)
    trainer = Trainer(run, recipe, prepared, group, mirror)
    if recipe.training.tokens_per_batch == "auto":
        trainer.choose_micro_batches(reporter)
    return trainer


def _data_keys(recipe: Recipe) -> tuple[object, ...]:
    """What the prepared data depend on, among the keys that an automatic recipe chooses."""
    training = recipe.training
    return recipe.data, training.subword_sampling, training.copies


def _fit(
    trainer: Trainer, reporter: ProgressReporter, stop: StopReason, deadline: float | None
) -> StopReason:
    """Train, unless there is a reason to stop already."""
    state = trainer.state
    try:
        if stop is StopReason.NONE:
            return trainer.fit(reporter, deadline)
        if state.step not in {step for step, *_ in state.validations}:
            trainer.validate_and_save_best(reporter)  # it was interrupted at the last step
            trainer.save()
            trainer.finish_saving()
        return stop
    except NonFiniteError:
        reporter.log("stop", step=state.step, reason="the loss is not finite")
        raise RegardError(
            f"step {state.step}: the loss is not finite (infinity or NaN). The saved checkpoints are not affected. "
            "Try a smaller training.learning_rate, a longer training.warmup, training.clip_norm: 1.0, "
            "or training.precision: fp32"
        ) from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    # Here, and not above: the error holds the tensors of the step that failed.
    raise _out_of_memory(trainer, reporter)


def _out_of_memory(trainer: Trainer, reporter: ProgressReporter) -> RegardError:
    """Save what can be saved, and say how to need less memory."""
    step, training, parts = trainer.state.step, trainer.training, trainer.state.micro_batches
    saved = trainer.rescue()
    reporter.log("stop", step=step, reason="out of memory", resumable=saved > 0)
    kept = f"Everything up to step {saved:,} is saved" if saved else "No step was saved"
    return RegardError(
        f"out of memory after step {step:,} on {hardware(trainer.group.device)}. {kept}. Use a smaller "
        f"training.tokens_per_batch (now {trainer.recipe.batch_tokens:,}"
        f"{f' in {parts} micro-batches' if parts > 1 else ''}) and a larger training.accumulate (now "
        f"{training.accumulate}) in a new --out, or resume this run where more memory is free"
    )


def _report_start(trainer: Trainer, reporter: ProgressReporter) -> None:
    recipe, state = trainer.recipe, trainer.state
    parameters = sum(parameter.numel() for parameter in trainer.network.parameters())
    reporter.message(
        f"Model: {recipe.model.preset}, {parameters:,} parameters, on {hardware(trainer.group.device)}"
    )
    if trainer.sharded:
        reporter.message(
            f"Weights, gradients and optimizer state are sharded over {trainer.group.size} processes (FSDP)"
        )
    if trainer.init_message:
        reporter.message(trainer.init_message)
    reasons = unpackable_choices(recipe) + ["sharded weights"] * trainer.sharded
    packed, on_cpu = recipe.training.batching == "packed", trainer.group.device.type == "cpu"
    if packed and (reasons or (on_cpu and not trainer.data_loader.packs_on_cpu)):
        no_library = f"there is no native library ({native_library().reason})"
        cause = f"packing does not support {', '.join(reasons)}" if reasons else no_library
        reporter.message(f"Batches are padded, which is slower: {cause}")
    steps, warmup = recipe.training.steps, recipe.training.warmup
    if warmup > steps:  # the default; the recipe's own value is checked when it is read
        reporter.message(
            f"training.warmup is {warmup:,} by default, longer than the {steps:,} steps: the learning rate rises "
            "until the end and never reaches its peak. Set training.warmup and training.learning_rate for short runs."
        )
    if recipe.training.sharding == "full_shard" and trainer.group.size == 1:
        reporter.message("training.sharding: full_shard has no effect with one process")
    if state.step:
        reporter.message(f"Resuming from step {state.step:,} of {recipe.training.steps:,}")
        if warning := inexact_resume_warning(trainer):
            reporter.message(warning)
    reporter.log(
        "start",
        step=state.step,
        steps=recipe.training.steps,
        parameters=parameters,
        processes=trainer.group.size,
        host=socket.gethostname(),
    )
