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

import torch
from torch import nn

from regard import __version__
from regard.data.corpus import read_pairs
from regard.errors import RegardError
from regard.metrics import Result
from regard.nn.state_dict import copy_weights
from regard.recipe import Recipe
from regard.storage.run_dir import PARTIAL, RunDir
from regard.tasks import Model
from regard.training.checkpoint import average, checkpoint_files, step_of
from regard.training.distributed import Group, join
from regard.training.fine_tuning import differences
from regard.training.prepare import FACTS, check_files, open_prepared, prepare
from regard.training.progress import ProgressReporter
from regard.training.trainer import (
    NonFiniteError,
    Stop,
    Trainer,
    check,
    finished,
    learn,
    perplexity,
    save,
    unpackable,
)

MAY_CHANGE = (
    *("training.steps", "training.patience", "training.device", "training.log_every"),
    *("data.root", "data.test", "search.", "score."),
)
"""What a run that goes on may have otherwise than when it began; all else would make it another model."""

GO_ON = "To go on, give the same command again."
LOCK = ".lock"
"""of the folder of checkpoints; it is the first file of a run"""
LEFTOVERS = (
    *(f".{name}{PARTIAL}" for name in ("recipe.yaml", "model.safetensors", "card.json")),
    *(f"checkpoints/.step-*{PARTIAL}", f"data/.{FACTS}{PARTIAL}", "data/.*.arrow.*.unfinished"),
)
"""what a training that was killed can leave; whatever else lies there is another's"""


class Interrupted(Exception):  # noqa: N818
    """Training was interrupted; everything is saved."""


def train(recipe: Recipe, out: str | Path, minutes: float | None = None) -> Model:
    """Train a model, or go on with one, in the run folder ``out``."""
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    check_files(recipe)  # before there is a folder for what cannot be
    run = RunDir(out)
    with join(recipe.training.device) as group:
        report = ProgressReporter(run, speaks=group.first)
        try:
            if group.first:
                with locked(run):
                    _train(run, recipe, group, report, deadline)
            else:
                _train(run, recipe, group, report, deadline)
        finally:
            report.end()
    return Model.load(out, recipe.training.device)


def _train(
    run: RunDir, recipe: Recipe, group: Group, report: ProgressReporter, deadline: float | None
) -> None:
    if group.first:
        open_run(run, recipe)
        prepare(run, recipe, report)
    group.wait()
    trainer = Trainer(run, recipe, open_prepared(run, recipe), group)
    trainer.load()
    stop = Stop(group.max(finished(trainer)))
    if stop is not Stop.NOT_YET and run.card():
        report.say(f"{run} was trained before: {stop.reason(recipe.training)}")
        return
    tell_start(trainer, report)
    try:
        if stop is Stop.NOT_YET:
            stop = learn(trainer, report, deadline)
        elif trainer.progress.step not in {step for step, *_ in trainer.progress.validations}:
            check(trainer, report)  # it was interrupted at its very last step
            save(trainer)
    except NonFiniteError:
        report.log("stop", step=trainer.progress.step, reason="the loss is not a number")
        raise RegardError(
            f"step {trainer.progress.step}: the loss is not a number any more. The checkpoints kept "
            "are sound. Try a smaller training.learning_rate, a longer training.warmup, training.clip_norm: 1.0, "
            "or precision fp32"
        ) from None
    reason = stop.reason(recipe.training)
    report.end()
    report.log("stop", step=trainer.progress.step, reason=reason, resumable=True)
    if stop is Stop.INTERRUPTED:
        report.say(f"Stopped at step {trainer.progress.step:,}; everything is saved.")
        report.say(GO_ON)
        raise Interrupted
    report.say(f"Training stopped: {reason}.")
    if stop is Stop.TIME:
        report.say(GO_ON)
    if group.first:
        finish(trainer, report, reason, deadline)
    group.wait()


# The run folder


@contextmanager
def locked(run: RunDir) -> Iterator[None]:
    """Only one training at a time in a folder; the lock ends with the process, however it ends."""
    refuse_strangers(run)
    try:
        run.checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RegardError(f"{run}: cannot be made: {error.strerror}") from None
    with (run.checkpoints / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RegardError(f"{run}: another process is training here") from None
        for name in LEFTOVERS:
            for left in run.folder.glob(name):
                left.unlink()
        yield


def refuse_strangers(run: RunDir) -> None:
    """A folder with files that are no run's is not ours to write to; a recipe alone may be one that a person wrote."""
    begun = (run.checkpoints / LOCK, run.data / FACTS, run.weights_file)
    if not run.folder.exists() or any(path.exists() for path in begun):
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


def open_run(run: RunDir, recipe: Recipe) -> None:
    """Begin a run, or make sure that the one found is of the same recipe; never overwrite another."""
    if not checkpoint_files(run.checkpoints):
        if run.weights_file.exists():
            raise RegardError(
                f"{run}: a model without checkpoints, so there is nothing to go on from; "
                "choose another --out"
            )
        run.write_recipe(recipe)
        return
    before = run.recipe()
    found = list(differences(before.model_dump(), recipe.model_dump()))
    fixed = tuple(_fixed(before, recipe))
    foreign = [
        text for key, text in found if not key.startswith(MAY_CHANGE) or key.startswith(fixed)
    ]
    if foreign:
        raise RegardError(
            f"{run}: holds a run of another recipe; choose another --out. Different: "
            + "; ".join(foreign[:5])
        )
    done = step_of(checkpoint_files(run.checkpoints)[-1])
    if recipe.training.steps < done:
        raise RegardError(
            f"{run}: has learned for {done:,} steps; training.steps {recipe.training.steps:,} is fewer"
        )
    if found:
        run.card_file.unlink(missing_ok=True)  # it names the old recipe
        run.write_recipe(recipe)


def _fixed(before: Recipe, now: Recipe) -> Iterator[str]:
    """What could change in other runs, but not in this one."""
    if now.training.schedule == "cosine":
        yield "training.steps"  # the rate falls to its end at the last step: every other would be another
    if now.training.best_checkpoint_metric == "score":
        yield "score.tokenize"  # scores of checkpoints would not be comparable
        if before.evaluation.metrics[0] != now.evaluation.metrics[0]:
            yield "evaluation.metrics"


def tell_start(trainer: Trainer, report: ProgressReporter) -> None:
    recipe, progress = trainer.recipe, trainer.progress
    parameters = sum(parameter.numel() for parameter in trainer.network.parameters())
    report.say(
        f"Model: {recipe.model.preset}, {parameters:,} parameters, on {hardware(trainer.group.device)}"
    )
    if trainer.taken:
        report.say(trainer.taken)
    unfit = unpackable(recipe) if recipe.training.batching == "packed" else []
    if recipe.training.batching == "packed" and trainer.group.size > 1:
        unfit.append(f"{trainer.group.size} processes")
    if unfit and trainer.group.device.type == "cuda":
        report.say(f"Batches are padded, and so slower, because of {', '.join(unfit)}")
    if progress.step:
        report.say(f"Going on from step {progress.step:,} of {recipe.training.steps:,}")
    report.log("start", step=progress.step, steps=recipe.training.steps, parameters=parameters)


# The end


def finish(trainer: Trainer, report: ProgressReporter, reason: str, deadline: float | None) -> None:
    """Average checkpoints if that is better, score the result, write the card."""
    start = time.monotonic()
    trainer.moving = None  # from here on the network holds the very weights to be judged
    trainer.model.precision = "fp32"  # and the scores are those anybody gets
    if deadline is not None and not trainer.validation_seconds:
        trainer.rehearse(most=math.inf)  # all was learned before, and nothing validated since
    averaged, valid = _choose_weights(trainer, report, deadline)
    trainer.network.eval()
    progress, prepared = trainer.progress, trainer.prepared
    card = {
        "regard": __version__,
        "reason_stopped": reason,
        "averaged_checkpoints": averaged,
        "steps": progress.step,
        "epochs": progress.epoch,
        "target_tokens": progress.tokens,
        "seconds": round(progress.seconds, 1),
        "preparing_seconds": prepared.facts.get("seconds"),
        "processes": trainer.group.size,
        "hardware": hardware(trainer.group.device),
        "parameters": sum(p.numel() for p in trainer.network.parameters()),
        "layers": layers(trainer.network),
        "d_model": trainer.recipe.model.d_model,
        "vocabulary": {
            "source": prepared.tokenizer.source.size,
            "target": prepared.tokenizer.target.size,
        },
        "data": {key: prepared.facts[key] for key in ("identity", "train", "valid")},
        "valid": valid,
        "test": [result.to_json() for result in _score_test(trainer, report, deadline)],
        "search": trainer.recipe.decoding.model_dump(),
        "versions": {name: version(name) for name in ("torch", "sentencepiece", "sacrebleu")},
        "python": platform.python_version(),
        "command": shlex.join(["regard", *sys.argv[1:]]),
    }
    card["scoring_seconds"] = round(time.monotonic() - start, 1)
    trainer.run.write_card(card)
    language = trainer.recipe.data.targets[:1]
    words = [trainer.model.command, str(trainer.run), *(f"--to {one}" for one in language)]
    report.say(f'The run is in {trainer.run}; try  regard {" ".join(words)} "…"')


def _choose_weights(
    trainer: Trainer, report: ProgressReporter, deadline: float | None
) -> tuple[int, dict[str, float]]:
    """Average the checkpoints, or take the best single one where that validates better; how many, and how good."""
    chosen = trainer.chosen()
    copy_weights(trainer.network, trainer.run.weights(), str(trainer.run))
    single = 1, _valid(trainer, *trainer.progress.best)
    if trainer.training.average == "none" or len(chosen) < 2:
        return single
    if _too_late(deadline, trainer.validation_seconds):
        report.say("No time is left to try the average of the checkpoints")
        return single
    mean = average(chosen)
    copy_weights(trainer.network, mean, "the average")
    rank = trainer.validate().rank
    # The paper takes the average of the last as it is; that of the best must be better than the best.
    used = trainer.training.average == "last" or rank < trainer.progress.best
    report.log("average", checkpoints=[step_of(p) for p in chosen], badness=rank[0], used=used)
    if not used:
        report.say(f"The average of {len(chosen)} checkpoints is no better than the best of them")
        copy_weights(trainer.network, trainer.run.weights(), str(trainer.run))
        return single
    report.say(f"The average of {len(chosen)} checkpoints is taken")
    trainer.run.write_weights(mean)
    return len(chosen), _valid(trainer, *rank)


def _too_late(deadline: float | None, seconds: float) -> bool:
    return deadline is not None and time.monotonic() + seconds > deadline


def _valid(trainer: Trainer, badness: float, loss: float) -> dict[str, float]:
    """What the weights came to in validation; they are those with the least badness, not always the least loss."""
    found = {"loss": loss, "perplexity": perplexity(loss)}
    if trainer.training.best_checkpoint_metric == "score":
        found[trainer.recipe.evaluation.metrics[0]] = abs(badness)
    return found


def _score_test(trainer: Trainer, report: ProgressReporter, deadline: float | None) -> list[Result]:
    data = trainer.recipe.data
    if data.test is None:
        return []
    pairs = list(read_pairs(data.test, data, "data.test"))
    # A beam costs about its width; the bootstrap a few seconds more. Where only the loss is validated, so is the test.
    share = len(pairs) / max(1, len(trainer.prepared.valid))
    if trainer.examples:
        share = len(pairs) * trainer.recipe.decoding.beam / len(trainer.examples)
    if _too_late(deadline, 10 + share * trainer.validation_seconds):
        report.say("No time is left to score the test pairs; regard evaluate does it")
        return []
    results = trainer.model.evaluate(pairs)
    for result in results:
        report.say(f"Test {result}")
    return results


def layers(network: nn.Module) -> dict[str, int]:
    """How many layers each stack of the network has; a stack without a name of its own is a decoder's."""
    stacks = {name: part for name, part in network.named_modules() if name.endswith("layers")}
    return {
        name.removesuffix("layers").removesuffix(".") or "decoder": len(part)
        for name, part in stacks.items()
        if isinstance(part, nn.ModuleList)
    }


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = [
        line.partition(":")[2].strip()
        for line in _lines(Path("/proc/cpuinfo"))
        if line.startswith("model name")
    ]
    threads = torch.get_num_threads()
    return f"{names[0] if names else platform.machine()}, {threads} core{'s' * (threads > 1)}"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
