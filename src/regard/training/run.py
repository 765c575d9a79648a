"""Train a run: open or resume the folder, prepare the data, train, average checkpoints, score, write the card."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from regard import __version__
from regard.data.corpus import data_paths, example_sources, fingerprint, read_pairs
from regard.errors import RegardError
from regard.inference.confidence import MAX_SENTENCES
from regard.inference.hallucinations import OutputStatistics
from regard.inference.native_library import native_library
from regard.metrics import MetricResult
from regard.nn.network import copy_weights
from regard.recipe import DataConfig, DataFiles, Recipe, make_recipe
from regard.storage.atomic_files import write_text
from regard.storage.resumable_output import WHOLE, Shard
from regard.storage.run_dir import RunDir, Selection
from regard.tasks import Model, Translator
from regard.training.autoconfig import AutomaticRecipe, describe_model
from regard.training.checkpoint import average_checkpoints, checkpoint_files, checkpoint_step
from regard.training.data_loader import unpackable_choices
from regard.training.distributed import (
    ProcessGroup,
    first_sentence,
    is_connection_lost,
    process_group,
)
from regard.training.evaluation import (
    perplexity,
    summarize,
    summary_seconds,
    tune_length_penalty,
)
from regard.training.fine_tuning import check_initial_run, recipe_differences
from regard.training.forgetting import score_after, score_before, scoring_seconds
from regard.training.planner import duration, measure_steps, plan
from regard.training.prepare_data import check_files, open_prepared, prepare
from regard.training.progress import ProgressReporter
from regard.training.run_mirror import RunMirror
from regard.training.stopping import NonFiniteError, StopReason, finished
from regard.training.train_step import is_out_of_memory
from regard.training.train_test_overlap import OverlapScores
from regard.training.trainer import Trainer, describe_environment

CHANGEABLE_KEYS = (
    *("training.steps", "training.patience", "training.device", "training.log_every"),
    *("training.sharding", "training.activation_checkpointing"),
    *("data.root", "data.test", "decoding.", "evaluation."),
)
"""Keys and sections that may change when a run is resumed; any other change would give another model."""

ANNOUNCED_SECONDS = 5.0
"""the final scoring is announced if it takes longer than this"""
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
    with process_group(recipe.training.device) as group:
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
        with ExitStack() as stack:
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


def _check_recipe(run: RunDir, recipe: Recipe) -> Recipe:
    """Check files and folders before anything is written; returns the recipe with the plan of a run to resume."""
    check_files(recipe)
    recipe = keep_plan(run, recipe)
    check_initial_run(run, recipe)
    return recipe


class TrainOptions(NamedTuple):
    """The deadline of a training, how to keep it, and what is done at the end."""

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
        score_before(run, recipe, reporter, deadline)

    group.on_main(prepare_run)
    if mirror is not None:
        mirror.update()
    group.check_shared_file(run.metadata_file)
    trainer = Trainer(run, recipe, open_prepared(run, recipe), group, mirror)
    trainer.load()
    stop = StopReason(group.max(finished(trainer.state, recipe.training)))
    if stop is not StopReason.NONE and run.card():
        reporter.message(f"{run} is already trained: {stop.describe(recipe.training)}")
        return
    _report_start(trainer, reporter)
    if recipe.training.tokens_per_batch == "auto" and trainer.state.step == 0:
        trainer.choose_micro_batches(reporter)
    if deadline is not None and trainer.state.step == 0:
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
        finish(trainer, reporter, reason, options)
        trainer.evaluation.dismiss()
    else:
        trainer.evaluation.assist()
    if mirror is not None:
        mirror.update()


def _make_plan(
    trainer: Trainer,
    reporter: ProgressReporter,
    deadline: float,
    automatic: AutomaticRecipe | None,
) -> Trainer:
    """Fit the training to the time limit, and print the plan; returns a new trainer if the model was chosen again."""
    if trainer.group.is_main:
        write_text(trainer.run.plan_file, json.dumps(_planned_values(trainer.recipe)))
    step = measure_steps(trainer, deadline - time.monotonic())
    if automatic is not None:
        speed = step.tokens / step.seconds
        automatic = automatic.refit(speed, deadline - time.monotonic())
        automatic = trainer.group.broadcast(automatic)
        before, after = trainer.recipe, automatic.recipe
        if (before.model, before.batch_tokens) == (after.model, after.batch_tokens):
            trainer.apply(after)
        else:
            trainer = _replace_trainer(trainer, after, reporter, speed)
            step = measure_steps(trainer, deadline - time.monotonic())
        trainer.automatic = automatic
    scoring = scoring_seconds(trainer.run, trainer.recipe)
    fitted = trainer.group.broadcast(plan(trainer, deadline, step, scoring))
    trainer.apply(fitted.recipe)
    trainer.announced_steps = fitted.recipe.training.steps
    pairs, training = len(trainer.prepared.train), fitted.recipe.training
    reporter.message(f"Plan: {fitted.describe(pairs)}")
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
    """A plan for another model, because training is too slow for the chosen one."""
    automatic, state = trainer.automatic, trainer.state
    assert automatic is not None
    speed = state.tokens / max(1e-9, state.seconds)
    automatic = automatic.refit(speed, deadline - time.monotonic())
    automatic = trainer.group.broadcast(automatic)
    trainer = _replace_trainer(trainer, automatic.recipe, reporter, speed)
    trainer = _make_plan(trainer, reporter, deadline, automatic)
    trainer.automatic = None  # once is enough
    return trainer


def _replace_trainer(
    trainer: Trainer, recipe: Recipe, reporter: ProgressReporter, tokens_per_second: float
) -> Trainer:
    """A trainer for another model or batch size on the same prepared data."""
    changed = f"batches of {recipe.batch_tokens:,} tokens"
    if recipe.model != trainer.recipe.model:
        changed = f"{describe_model(recipe)}, {changed}"
    reporter.message(
        f"Measured {tokens_per_second:,.0f} tokens/s; chosen for this speed: {changed}"
    )
    if trainer.group.is_main:
        trainer.run.write_recipe(recipe)
    return Trainer(trainer.run, recipe, trainer.prepared, trainer.group, trainer.mirror)


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


# ---------------------------------------------------------------------------------------------
# The run folder


RESTART_SECONDS = 60.0
"""If torchrun restarts processes: how long to wait for the lock of one that has not ended yet."""


def restart_seconds() -> float:
    """How long to wait for the lock of a run: with ``torchrun --max-restarts``, an earlier process may still have it.

    It may be on a machine that the others no longer reach. It notices this after ``SILENT_PEER_SECONDS``.
    """
    return RESTART_SECONDS if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) else 0.0


@contextmanager
def locked(run: RunDir, seconds: float = 0.0) -> Iterator[None]:
    """Allow one process at a time to train in a folder; the lock is released when the process ends, however it ends.

    seconds: how long to wait for the lock.
    """
    check_run_folder(run)
    try:
        run.checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RegardError(f"{run}: cannot create the folder: {error.strerror}") from None
    with run.lock(seconds) as free:
        if not free:
            raise RegardError(
                f"{run}: another process is training here; wait for it, or choose another --out"
            )
        for path in run.temporary_files():
            path.unlink()
        yield


def check_run_folder(run: RunDir) -> None:
    """Raise if the folder contains files but no run; a recipe alone may be one that the user wrote."""
    started = (run.lock_file, run.metadata_file, run.weights_file)
    if not run.folder.exists() or any(path.exists() for path in started):
        return
    if not run.folder.is_dir():
        raise RegardError(f"{run}: a file, not a folder; choose another --out")
    own = (run.checkpoints, run.data)
    others = sorted(path.name for path in run.folder.iterdir() if path not in own)
    if others:
        raise RegardError(
            f"{run}: the folder contains other files ({', '.join(others[:3])}) and is not a run folder; "
            "choose another --out"
        )


def open_run(run: RunDir, recipe: Recipe) -> None:
    """Write the recipe of a new run; for a run with checkpoints, check that it can be resumed with this recipe."""
    if not checkpoint_files(run.checkpoints):
        if run.weights_file.exists():
            raise RegardError(
                f"{run}: contains a model but no checkpoints, so it cannot be resumed; "
                "choose another --out"
            )
        run.write_recipe(recipe)
        return
    previous = run.recipe()
    differences = list(recipe_differences(previous.model_dump(), recipe.model_dump()))
    fixed = tuple(_fixed_keys(previous, recipe))
    forbidden = [
        text
        for key, text in differences
        if not key.startswith(CHANGEABLE_KEYS) or key.startswith(fixed)
    ]
    if forbidden:
        raise RegardError(
            f"{run}: contains a run with a different recipe; choose another --out. Differences: "
            + "; ".join(forbidden[:5])
        )
    done = checkpoint_step(checkpoint_files(run.checkpoints)[-1])
    if recipe.training.steps < done:
        raise RegardError(
            f"{run}: already trained for {done:,} steps, more than training.steps: {recipe.training.steps:,}; "
            "increase training.steps, or choose another --out"
        )
    if differences:
        run.card_file.unlink(missing_ok=True)  # it belongs to the old recipe
        run.write_recipe(recipe)


PLANNED_KEYS = (
    *("steps", "warmup", "schedule", "learning_rate"),
    *("validate_every", "validate_sentences", "best_checkpoint_metric", "checkpoint_every"),
)
"""The keys of the training section that a plan sets."""


def resumable_recipe(
    out: Path,
    files: DataFiles,
    root: str,
    changes: Sequence[str],
    languages: tuple[str, str] | None = None,
) -> Recipe | None:
    """The recipe of a run that was started with an automatic recipe for the same files; None if there is none.

    ``changes`` are settings of the user, which must agree with it, and so must ``languages``, if they are given. The
    recipe is not chosen again, because the choice depends on the current speed of the machine.
    """
    run = RunDir(out)
    if not checkpoint_files(run.checkpoints):
        return None
    recipe = run.recipe()
    if (
        recipe.data.train != files
        or Path(recipe.data.root or ".").resolve() != Path(root).resolve()
    ):
        data_paths(files, DataConfig(root=root, train=files), "")  # a missing file is named first
        raise RegardError(f"{run}: contains a run with different data; choose another --out")
    if languages is not None and languages != recipe.data.languages:
        raise RegardError(
            f"{run}: contains a run with languages other than {','.join(languages)}; choose another --out"
        )
    if not any(change.startswith("training.steps=") for change in changes):
        # The run has a plan, which may have changed what the user has set.
        planned = tuple(f"training.{key}=" for key in PLANNED_KEYS)
        changes = [change for change in changes if not change.startswith(planned)]
    return make_recipe(recipe.model_dump(), str(run.recipe_file), changes)


def keep_plan(run: RunDir, recipe: Recipe) -> Recipe:
    """The recipe with the plan of a run that is resumed, unless the user asks for something else now."""
    if not checkpoint_files(run.checkpoints) or not run.plan_file.exists():
        return recipe
    try:
        requested = json.loads(run.plan_file.read_text(encoding="utf-8"))
    except ValueError:
        raise RegardError(
            f"{run.plan_file}: not JSON; delete it to resume without a plan"
        ) from None
    if requested != _planned_values(recipe):
        return recipe
    training = recipe.training.model_copy(update=_planned_values(run.recipe()))
    return recipe.model_copy(update={"training": training})


def _planned_values(recipe: Recipe) -> dict[str, Any]:
    return {key: getattr(recipe.training, key) for key in PLANNED_KEYS}


def _fixed_keys(previous: Recipe, recipe: Recipe) -> Iterator[str]:
    """Keys that may change in other runs, but not in this one."""
    if recipe.training.schedule == "cosine":
        yield "training.steps"  # every learning rate depends on it
    if recipe.training.best_checkpoint_metric == "score":
        yield "evaluation.tokenize"  # the scores of checkpoints would not be comparable
        if previous.evaluation.metrics[0] != recipe.evaluation.metrics[0]:
            yield "evaluation.metrics"


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
    if state.step:
        reporter.message(f"Resuming from step {state.step:,} of {recipe.training.steps:,}")
        here = describe_environment(trainer)
        if state.environment != here:
            reporter.message(
                f"Trained so far with {state.environment}, now with {here}: the weights may differ in "
                "rounding from those of an uninterrupted run"
            )
    reporter.log(
        "start",
        step=state.step,
        steps=recipe.training.steps,
        parameters=parameters,
        processes=trainer.group.size,
        host=socket.gethostname(),
    )


# ---------------------------------------------------------------------------------------------
# After training


def finish(
    trainer: Trainer, reporter: ProgressReporter, reason: str, options: TrainOptions
) -> None:
    """Average checkpoints if that is better, score the result, write the card."""
    start, deadline = time.monotonic(), options.deadline
    trainer.model.set_precision("fp32")  # as when the model is loaded
    if deadline is not None and not trainer.validation_seconds:
        trainer.estimate_validation_time(limit=math.inf)  # nothing was validated in this session
    selection = _select_weights(trainer, reporter, deadline)
    trainer.network.eval()
    seconds = summary_seconds(trainer)
    if seconds > ANNOUNCED_SECONDS and (deadline is None or time.monotonic() + seconds < deadline):
        reporter.message("Translating validation pairs to score the model")
    if options.tune_decoding:
        tune_length_penalty(trainer, reporter, deadline)
    state, prepared = trainer.state, trainer.prepared
    summary = summarize(trainer, deadline)
    card = {
        "regard": __version__,
        "reason_stopped": reason,
        "averaged_checkpoints": selection.averaged_checkpoints,
        "steps": state.step,
        "epochs": state.epoch,
        "target_tokens": state.tokens,
        "seconds": round(state.seconds, 1),
        "preparing_seconds": prepared.metadata.get("seconds"),
        "processes": trainer.group.size,
        "micro_batches": state.micro_batches,
        "out_of_memory": state.out_of_memory,
        "hardware": hardware(trainer.group.device),
        "parameters": sum(p.numel() for p in trainer.network.parameters()),
        "layers": count_layers(trainer.network),
        "d_model": trainer.recipe.model.d_model,
        "vocabulary": {
            "source": prepared.tokenizer.source.size,
            "target": prepared.tokenizer.target.size,
        },
        "data": {
            key: prepared.metadata[key]
            for key in ("identity", "train", "valid", "old")
            if key in prepared.metadata
        },
        "examples": example_sources(trainer.recipe)
        if isinstance(trainer.model, Translator)
        else [],
        "valid": _validation_values(trainer, selection),
        "valid_scores": [result.to_json() for result in summary.results],
        **_score_test(trainer, reporter, deadline),
        **_calibrate(trainer, reporter, deadline),
        "decoding": trainer.recipe.decoding.model_dump(),
        "versions": {name: version(name) for name in ("torch", "sentencepiece", "sacrebleu")},
        "python": platform.python_version(),
        "command": shlex.join(["regard", *sys.argv[1:]]),
    }
    fine_tuning = score_after(trainer.run, trainer.recipe, trainer.model, reporter, deadline)
    card |= {"fine_tuning": fine_tuning} if fine_tuning else {}
    card["scoring_seconds"] = round(time.monotonic() - start, 1)
    trainer.run.write_card(card)
    for line in summary.lines():
        reporter.message(line)
    if isinstance(trainer.model, Translator) and not summary.examples:
        reporter.message("No validation pairs were translated")
    language = trainer.recipe.data.targets[:1]
    words = [trainer.model.command, str(trainer.run), *(f"--to {one}" for one in language)]
    reporter.message(f'The run is in {trainer.run}; try  regard {" ".join(words)} "…"')
    if isinstance(trainer.model, Translator) and trainer.recipe.data.test is None:
        evaluate = f"regard evaluate {trainer.run} --source FILE --reference FILE"
        reporter.message(f"To score it on test data:  {evaluate}")


def _select_weights(
    trainer: Trainer, reporter: ProgressReporter, deadline: float | None
) -> Selection:
    """Make the average of the checkpoints the run's model, unless the weights in the file validate better.

    The network then has the weights of the file.
    """
    checkpoints = trainer.selected_checkpoints()
    count = len(checkpoints)
    averaging = trainer.training.average != "none" and count > 1
    current = _validate_selection(trainer, deadline, validations=1 + averaging)
    if not averaging:
        return current
    if _too_late(deadline, trainer.validation_seconds):
        reporter.message("No time left to average the checkpoints")
        return current
    mean = average_checkpoints(checkpoints)
    copy_weights(trainer.network, mean, "the average")
    validation = trainer.validate()
    # The average of the last checkpoints is used as it is, as in the paper; that of the best must beat the best.
    used = trainer.training.average == "last" or validation.sort_key < current.sort_key
    steps = [checkpoint_step(path) for path in checkpoints]
    reporter.log("average", checkpoints=steps, objective=validation.objective, used=used)
    if not used:
        kept = "the earlier average" if current.averaged_checkpoints > 1 else "the best checkpoint"
        reporter.message(
            f"The average of {count} checkpoints is no better than {kept}, which is kept"
        )
        copy_weights(trainer.network, trainer.run.weights(), str(trainer.run))
        return current
    reporter.message(f"Using the average of {count} checkpoints")
    trainer.select(mean, Selection(count, *validation.sort_key))
    return Selection(count, *validation.sort_key)


def _validate_selection(trainer: Trainer, deadline: float | None, validations: int) -> Selection:
    """Validate the weights in the run's file; as they validated when they were written if time is short.

    ``validations``: the number of validations for which there must be time.
    """
    weights, recorded = trainer.run.read_weights()
    copy_weights(trainer.network, weights, str(trainer.run))
    if recorded is None:
        raise RegardError(f"{trainer.run.weights_file}: not written by this training; remove it")
    if _too_late(deadline, validations * trainer.validation_seconds):
        return recorded
    return Selection(recorded.averaged_checkpoints, *trainer.validate().sort_key)


def _too_late(deadline: float | None, seconds: float) -> bool:
    return deadline is not None and time.monotonic() + seconds > deadline


def _validation_values(trainer: Trainer, selection: Selection) -> dict[str, float]:
    """Loss and score of the selected weights: those with the best objective, not always with the lowest loss."""
    values = {"loss": selection.loss, "perplexity": perplexity(selection.loss)}
    if trainer.training.best_checkpoint_metric == "score":
        values[trainer.recipe.evaluation.metrics[0]] = abs(selection.objective)
    return values


def _score_test(
    trainer: Trainer, reporter: ProgressReporter, deadline: float | None
) -> dict[str, Any]:
    """Sections of the card: the test scores, the overlap with the training data, where the outputs are."""
    model, run, data = trainer.model, trainer.run, trainer.recipe.data
    if data.test is None:
        return {"test": []}
    pairs = list(read_pairs(data.test, data, "data.test"))
    if deadline is not None and _too_late(deadline, trainer.test_seconds()):
        reporter.message("No time left to score the test data; run  regard evaluate")
        return {"test": []}
    if trainer.recipe.text_only:
        results = model.evaluate(pairs)
        _report_scores(results, reporter)
        return {"test": [result.to_json() for result in results]}
    outputs = trainer.evaluation.outputs(pairs)
    results = model.score_outputs(outputs, pairs)
    _report_scores(results, reporter)
    overlap = OverlapScores.of(model, run, outputs, pairs)
    for line in overlap.messages() if overlap else ():
        reporter.message(line)
    return {
        "test": [result.to_json() for result in results],
        "test_overlap": overlap.to_json() if overlap else None,
        "test_outputs": run.write_test_outputs(outputs, fingerprint(data.test, data)),
    }


def _report_scores(results: Sequence[MetricResult], reporter: ProgressReporter) -> None:
    for result in results:
        reporter.message(f"Test {result}")


def _calibrate(
    trainer: Trainer, reporter: ProgressReporter, deadline: float | None
) -> dict[str, Any]:
    """Sections of the card of a translation model: its confidence, and what its references look like."""
    if not isinstance(trainer.model, Translator):
        return {}
    valid = trainer.prepared.valid
    pairs = trainer.validation_pairs(MAX_SENTENCES)
    lengths = zip(valid.source_lengths[:].tolist(), valid.target_lengths[:].tolist(), strict=True)
    card: dict[str, Any] = {"references": asdict(OutputStatistics.of(pairs, lengths))}
    if not trainer.examples:  # training.validate_sentences: 0: nothing is translated in validation
        return card
    if _too_late(deadline, _decoding_seconds(trainer, len(pairs))):
        reporter.message("No time left to calibrate the confidence of translations")
        return card
    try:
        calibration = trainer.model.calibrate(pairs)
    except RegardError as error:  # a text that is too long for the model
        reporter.message(f"The confidence of translations is not calibrated: {error}")
        return card
    if calibration is not None:
        reporter.message(f"Confidence: {calibration.summary}")
        card["confidence"] = calibration.to_json()
    return card


def _decoding_seconds(trainer: Trainer, sentences: int) -> float:
    """How long the translation of this many sentences takes, at most.

    Beam search takes about beam times as long as greedy search. Where only the loss is validated, the same holds for
    the test.
    """
    relative = sentences / max(1, len(trainer.prepared.valid))
    if trainer.examples:
        relative = sentences * trainer.recipe.decoding.beam / len(trainer.examples)
    return relative * trainer.validation_seconds


def count_layers(network: nn.Module) -> dict[str, int]:
    """The number of layers of each stack of a network; an unnamed stack is the decoder."""
    stacks = {name: part for name, part in network.named_modules() if name.endswith("layers")}
    return {
        name.removesuffix("layers").removesuffix(".") or "decoder": len(part)
        for name, part in stacks.items()
        if isinstance(part, nn.ModuleList)
    }


def hardware(device: torch.device) -> str:
    """The name of the GPU, or the CPU and the number of threads used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if line.startswith("model name")
    ]
    threads = torch.get_num_threads()
    return f"{names[0] if names else platform.machine()}, {threads} core{'s' * (threads > 1)}"
