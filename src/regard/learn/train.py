"""From a recipe to a finished run folder: open or resume, prepare, learn, average, score, write the card."""

from __future__ import annotations

import fcntl
import math
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from regard.errors import RegardError
from regard.learn.checkpoint import average, checkpoint_files, step_of
from regard.learn.distributed import Group, join
from regard.learn.learner import Learner
from regard.learn.loop import Stop, finished, learn
from regard.learn.prepare import open_prepared, prepare
from regard.learn.report import Report
from regard.model import Model, put_weights
from regard.recipe import Recipe
from regard.run import PARTIAL, Run
from regard.score import Result
from regard.text.corpus import read_pairs
from regard.version import __version__

MAY_CHANGE = ("training.steps", "training.device", "data.root", "search.", "training.log_every")
"""What a run that goes on may have otherwise than when it began; all else would make it another model."""


class Interrupted(Exception):  # noqa: N818
    """Training was interrupted; everything is saved."""


def train(recipe: Recipe, out: str | Path, minutes: float | None = None) -> Model:
    """Train a model, or go on with one, in the run folder ``out``."""
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    run = Run(out)
    with join(recipe.training.device) as group:
        report = Report(run, speaks=group.first)
        try:
            if group.first:
                with locked(run):
                    _train(run, recipe, group, report, deadline)
            else:
                _train(run, recipe, group, report, deadline)
        finally:
            report.end()
    return Model.load(out, recipe.training.device)


def _train(run: Run, recipe: Recipe, group: Group, report: Report, deadline: float | None) -> None:
    if group.first:
        open_run(run, recipe)
        prepare(run, recipe, report)
    group.wait()
    learner = Learner(run, recipe, open_prepared(run, recipe), group)
    learner.load()
    stop = Stop(group.max(finished(learner)))
    if stop is not Stop.NOT_YET and run.card():
        report.say(f"{run} was trained before: {stop.reason(recipe.training)}")
        return
    tell_start(learner, report)
    if stop is Stop.NOT_YET:
        stop = learn(learner, report, deadline)
    reason = stop.reason(recipe.training)
    report.end()
    report.log("stop", step=learner.progress.step, reason=reason, resumable=True)
    if stop is Stop.INTERRUPTED:
        report.say(f"Stopped at step {learner.progress.step:,}; everything is saved.")
        report.say("To go on, give the same command again.")
        raise Interrupted
    report.say(f"Training stopped: {reason}.")
    if group.first:
        finish(learner, report, reason)
    group.wait()


# The run folder


@contextmanager
def locked(run: Run) -> Iterator[None]:
    """Only one training at a time in a folder; the lock ends with the process, however it ends."""
    refuse_strangers(run)
    try:
        run.checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RegardError(f"{run}: cannot be made: {error.strerror}") from None
    with (run.checkpoints / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RegardError(f"{run}: another process is training here") from None
        for left in run.folder.rglob(f".*{PARTIAL}"):  # by a process that was killed
            left.unlink()
        yield


def refuse_strangers(run: Run) -> None:
    """A folder with files that are no run's is not ours to write to."""
    if run.recipe_file.exists() or not run.folder.exists():
        return
    if not run.folder.is_dir():
        raise RegardError(f"{run}: a file, not a folder; choose another --out")
    own = (run.checkpoints, run.data)
    strangers = sorted(path.name for path in run.folder.iterdir() if path not in own)
    if strangers:
        raise RegardError(
            f"{run}: the folder holds other files ({', '.join(strangers[:3])}) and is no run; "
            "choose another --out"
        )


def open_run(run: Run, recipe: Recipe) -> None:
    """Begin a run, or make sure that the one found is of the same recipe; never overwrite another."""
    begun = run.weights_file.exists() or checkpoint_files(run.checkpoints)
    if not begun or not run.recipe_file.exists():
        run.write_recipe(recipe)
        return
    before = run.recipe()
    differences = list(_differences(before.model_dump(), recipe.model_dump()))
    foreign = [text for key, text in differences if not key.startswith(MAY_CHANGE)]
    if foreign:
        raise RegardError(
            f"{run}: holds a run of another recipe; choose another --out. Different: "
            + "; ".join(foreign[:5])
        )
    if differences:
        _exchange_recipe(run, recipe)


def _exchange_recipe(run: Run, recipe: Recipe) -> None:
    """The weights name their recipe by hash: take them out, exchange the recipe, put them back."""
    weights = run.weights() if run.weights_file.exists() else None
    run.card_file.unlink(missing_ok=True)
    run.weights_file.unlink(missing_ok=True)
    run.write_recipe(recipe)
    if weights is not None:
        run.write_weights(weights)


def _differences(
    before: dict[str, Any], now: dict[str, Any], at: str = ""
) -> Iterator[tuple[str, str]]:
    for key in now:
        if isinstance(before[key], dict) and isinstance(now[key], dict):
            yield from _differences(before[key], now[key], f"{at}{key}.")
        elif before[key] != now[key]:
            yield f"{at}{key}", f"{at}{key} is {before[key]} there, {now[key]} here"


def tell_start(learner: Learner, report: Report) -> None:
    recipe, progress = learner.recipe, learner.progress
    parameters = sum(parameter.numel() for parameter in learner.network.parameters())
    report.say(
        f"Model: {recipe.model.preset}, {parameters:,} parameters, on {hardware(learner.group.device)}"
    )
    if progress.step:
        report.say(f"Going on from step {progress.step:,} of {recipe.training.steps:,}")
    report.log("start", step=progress.step, steps=recipe.training.steps, parameters=parameters)


# The end


def finish(learner: Learner, report: Report, reason: str) -> None:
    """Average checkpoints if that is better, score the result, write the card."""
    learner.moving = None  # from here on the network holds the very weights to be judged
    weights, averaged = _best_weights(learner, report)
    put_weights(learner.network, weights, str(learner.run))
    validation = learner.validate()
    learner.network.eval()
    learner.model.precision = "fp32"  # the scores on the card are those anybody gets
    valid: dict[str, Any] = {"loss": validation.loss, "perplexity": math.exp(validation.loss)}
    if validation.result is not None:
        valid["greedy"] = validation.result.to_json()
    card = {
        "regard": __version__,
        "reason_stopped": reason,
        "averaged_checkpoints": averaged,
        "steps": learner.progress.step,
        "epochs": learner.progress.epoch,
        "target_tokens": learner.progress.tokens,
        "seconds": round(learner.progress.seconds, 1),
        "processes": learner.group.size,
        "hardware": hardware(learner.group.device),
        "parameters": sum(p.numel() for p in learner.network.parameters()),
        "vocabulary": {
            "source": learner.prepared.tokenizer.source.size,
            "target": learner.prepared.tokenizer.target.size,
        },
        "data": {key: learner.prepared.facts[key] for key in ("identity", "train", "valid")},
        "valid": valid,
        "test": [result.to_json() for result in _score_test(learner, report)],
        "search": learner.recipe.search.model_dump(),
        "versions": {name: version(name) for name in ("torch", "sentencepiece", "sacrebleu")},
        "python": platform.python_version(),
        "command": shlex.join(["regard", *sys.argv[1:]]),
    }
    learner.run.write_card(card)
    report.say(f"The run is in {learner.run}")


def _best_weights(learner: Learner, report: Report) -> tuple[dict[str, torch.Tensor], int]:
    """The averaged checkpoints, or the best single one where that validates better."""
    chosen = learner.chosen()
    best = learner.run.weights()
    if learner.training.average == "none" or len(chosen) < 2:
        return best, 1
    mean = average(chosen)
    put_weights(learner.network, mean, "the average")
    badness = learner.validate().badness
    single = min(badness for _, badness in learner.progress.validations)
    better = badness < single
    report.log("average", checkpoints=[step_of(p) for p in chosen], badness=badness, used=better)
    if not better:
        return best, 1
    report.say(f"The average of {len(chosen)} checkpoints validates best")
    learner.run.write_weights(mean)
    return mean, len(chosen)


def _score_test(learner: Learner, report: Report) -> list[Result]:
    data = learner.recipe.data
    if data.test is None:
        return []
    results = learner.model.evaluate(list(read_pairs(data.test, data, "data.test")))
    for result in results:
        report.say(f"Test {result}")
    return results


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = [
        line.partition(":")[2].strip()
        for line in _lines(Path("/proc/cpuinfo"))
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} cores"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
