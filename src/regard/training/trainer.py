"""A network that learns: one step, one validation, one save. When to do which is the loop's business."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regard import recipe as recipes
from regard.data.batching import (
    Batch,
    Room,
    pack,
    plan_batches,
    plan_packed,
    plan_sorted,
    room,
)
from regard.data.corpus import Pair, valid_pairs
from regard.data.dataset import RowIndices, TokenDataset
from regard.metrics import Result
from regard.nn.state_dict import copy_weights, named_weights
from regard.recipe import Training
from regard.storage.prefetch import ahead
from regard.storage.run_dir import RunDir
from regard.tasks import TASKS, build_network
from regard.training.checkpoint import (
    Progress,
    checkpoint_files,
    checkpoint_name,
    discard,
    load_checkpoint,
    moments_of,
    put_moments,
    save_checkpoint,
    step_of,
)
from regard.training.distributed import Group
from regard.training.fine_tuning import load_initial_weights
from regard.training.optimizers import OPTIMIZERS, learning_rate
from regard.training.prepare import PreparedData
from regard.training.progress import ProgressReporter
from regard.training.train_step import CUDAGraphStep, Numbers, TrainStep


class Place(NamedTuple):
    """A place in the data: this many batches of this epoch are behind us."""

    epoch: int
    batch: int


class TrainingBatch(NamedTuple):
    """One batch as it comes from the data."""

    parts: list[Batch]
    """worked on one after the other"""
    tokens: int
    """target tokens of the whole batch, over all processes"""
    after: Place


class NonFiniteError(Exception):
    """The weights or the loss are infinite or not a number."""


class Validation(NamedTuple):
    loss: float
    """mean negative log-probability of a target token, without smoothing"""
    result: Result | None
    """the score of the examples"""
    badness: float
    """what checkpoints are chosen by; smaller is better"""

    @property
    def rank(self) -> tuple[float, float]:
        """Of equal badness the smaller loss is the better."""
        return self.badness, self.loss


class Trainer:
    """A network that learns: weights, optimizer, progress, and the run folder they are saved in."""

    def __init__(
        self, run: RunDir, recipe: recipes.Recipe, prepared: PreparedData, group: Group
    ) -> None:
        self.run, self.recipe, self.prepared, self.group = run, recipe, prepared, group
        self.training = recipe.training
        torch.manual_seed(self.training.seed)
        self.network = build_network(recipe, prepared.tokenizer).to(group.device)
        self.encoder = TASKS[recipe.task].encoder(recipe)
        self.taken: str | None = None
        """what a new training began with, in words; None: with random weights"""
        if self.training.init_from and not checkpoint_files(run.checkpoints):
            self.taken = load_initial_weights(self.network, recipe, prepared.tokenizer)
        self.names: dict[Tensor, str] = {
            parameter: name for name, parameter in self.network.named_parameters()
        }
        self.optimizer = OPTIMIZERS[self.training.optimizer](
            self.network.parameters(), self.training
        )
        self.progress = Progress()
        self.validation_seconds = 0.0
        """what the last one took, or a guess before the first"""
        marks = prepared.tokenizer.source.marks
        self.objective = TASKS[recipe.task].loss(self.network, self.training, marks)
        self.shared: nn.Module = self.objective
        if group.size > 1:
            ids = [group.device.index] if group.device.type == "cuda" else None
            self.shared = DistributedDataParallel(self.objective, ids)
        self.update = TrainStep(self.shared, self.optimizer, self.training, group.device)
        self.recorded = CUDAGraphStep(self.update, self.network) if records(recipe, group) else None
        self.moving: dict[str, Tensor] | None = None
        if self.training.ema:
            self.follow({name: w.clone() for name, w in named_weights(self.network).items()})
        self.model = TASKS[recipe.task].model(
            recipe, prepared.tokenizer, self.network, group.device, self.training.precision
        )
        self.examples = _spread(valid_pairs(recipe.data), len(prepared.valid), self.training)

    # One step

    def step(self, drawn: list[TrainingBatch]) -> Tensor:
        """Learn from some batches at once; the mean loss of this process's tokens."""
        self.progress.step += 1
        step, training = self.progress.step, self.training
        _seed(training.seed, step, self.group)
        tokens = sum(one.tokens for one in drawn)
        # In the first steps the average follows closely, so that it forgets the random start.
        drift = 1 - min(training.ema, (1 + step) / (10 + step))
        # Other processes add their share: DistributedDataParallel takes the mean.
        share = self.group.size / tokens
        rate = learning_rate(step, training, self.recipe.model.d_model)
        parts = [part for one in drawn for part in one.parts]
        loss = (self.recorded or self.update)(parts, Numbers(share, rate, drift))
        self.progress.tokens += tokens
        self.progress.epoch, self.progress.batch = drawn[-1].after
        return loss

    def follow(self, means: dict[str, Tensor]) -> None:
        """Let these be the moving average of the weights."""
        self.moving, weights = means, named_weights(self.network)
        self.update.moving = list(means.values()), [weights[name] for name in means]

    # The data

    def batches(self) -> Iterator[TrainingBatch]:
        """Batches without end, from where the progress stands."""
        epoch, batch = self.progress.epoch, self.progress.batch
        while True:
            store = self.prepared.of_epoch(epoch)
            plan = self.planned(store, epoch)
            for number in range(batch, len(plan)):
                rows = plan[number]
                tokens = self.encoder.count_labels(store, rows)
                yield TrainingBatch(self.tensors(store, rows), tokens, Place(epoch, number + 1))
            epoch, batch = epoch + 1, 0

    def planned(self, store: TokenDataset, epoch: int) -> list[RowIndices]:
        """The rows of each batch of an epoch."""
        training = self.training
        lengths = store.source_lengths, store.target_lengths
        if training.batching == "packed":
            return plan_packed(*lengths, self.room, training.seed, epoch)
        return plan_batches(*lengths, training.tokens_per_batch, training.seed, epoch)

    @cached_property
    def room(self) -> Room:
        """Of every packed batch, whichever copy of the text it comes from."""
        stores = self.prepared.copies or [self.prepared.train]
        source = np.concatenate([store.source_lengths for store in stores])
        target = np.concatenate([store.target_lengths for store in stores])
        return room(source, target, self.training.tokens_per_batch)

    def tensors(self, store: TokenDataset, rows: RowIndices) -> list[Batch]:
        """A batch as it is worked on: packed into one row, in a few parts of like length, or whole."""
        group = self.group
        if self.recorded is not None:
            return [pack(store, rows, self.room).map(torch.Tensor.pin_memory)]
        parts = [rows]
        if self.training.batching == "packed":
            lengths = store.source_lengths[rows], store.target_lengths[rows]
            most = -(-self.training.tokens_per_batch // recipes.PACKED_CHUNKS)
            parts = [rows[part] for part in plan_sorted(*lengths, most)]
        return [self.encoder.collate(store, part, group.rank, group.size) for part in parts]

    # Validation

    @contextmanager
    def resting(self) -> Iterator[None]:
        """No dropout, and the moving average in place of the weights, for the time of the with-block."""
        own = None
        if self.moving is not None:
            own = {name: tensor.clone() for name, tensor in named_weights(self.network).items()}
            copy_weights(self.network, self.moving, "the moving average")
        self.shared.eval()
        try:
            yield
        finally:
            self.shared.train()
            if own is not None:
                copy_weights(self.network, own, "the weights")

    def validate(self) -> Validation:
        """Loss on all validation pairs; scores on some of them, translated greedily."""
        start = time.monotonic()
        with self.resting():
            loss = self._valid_loss()
            result = self._valid_score()
        self.validation_seconds = time.monotonic() - start
        if self.training.best_checkpoint_metric == "loss" or result is None:
            return Validation(loss, result, loss)
        return Validation(loss, result, -result.value if result.higher_is_better else result.value)

    def rehearse(self, most: float) -> None:
        """Guess how long a validation takes before there was one: from a few examples, and a high guess."""
        few = self.examples[:16]
        if not few:  # it validates by loss alone, which takes no longer than learning from as much
            return
        with self.resting():
            self.model.answer_to(few[:1], quick=True)  # the first use of a device takes long
            start = time.monotonic()
            self.model.answer_to(few, quick=True)
        each = (time.monotonic() - start) / len(few)
        self.validation_seconds = min(most, each * len(self.examples))

    def time_to_finish(self) -> float:
        """Seconds for the last validation; the average and the test are scored only if time is left."""
        return 2 + 1.5 * self.validation_seconds

    @torch.inference_mode()
    def _valid_loss(self) -> float:
        store = self.prepared.valid
        lengths = store.source_lengths, store.target_lengths
        total, tokens = 0.0, 0
        for rows in plan_sorted(*lengths, self.training.tokens_per_batch):
            batch = self.encoder.collate(store, rows).to(self.group.device)
            total += float(self.update.loss(self.objective, batch))
            tokens += self.encoder.count_labels(store, rows)
        return total / tokens

    def _valid_score(self) -> Result | None:
        if not self.examples:
            return None
        return self.model.evaluate(self.examples, quick=True)[0]

    # Saving and going on

    def save(self) -> None:
        if not all(
            bool(weight.isfinite().all()) for weight in named_weights(self.network).values()
        ):
            raise NonFiniteError
        path = self.run.checkpoints / checkpoint_name(self.progress.step)
        moments = moments_of(self.optimizer, self.names)
        save_checkpoint(path, self.progress, named_weights(self.network), self.moving, moments)
        files = checkpoint_files(self.run.checkpoints)
        discard(files, [*self.chosen(), files[-1]])

    def is_regular(self, step: int) -> bool:
        """Not the place of an interruption: that must not change what a run becomes."""
        training = self.training
        due = step % training.checkpoint_every == 0 or step % training.validate_every == 0
        return due or step == training.steps

    def load(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        files = checkpoint_files(self.run.checkpoints)
        if not files:
            return
        self.progress, groups = load_checkpoint(files[-1])
        copy_weights(self.network, groups["model"], str(files[-1]))
        if self.moving is not None:
            self.follow({n: t.to(self.group.device) for n, t in groups["average"].items()})
        put_moments(self.optimizer, self.names, groups["optimizer"])

    def chosen(self) -> list[Path]:
        """The checkpoints to keep and, at the end, to average."""
        files = {step_of(path): path for path in checkpoint_files(self.run.checkpoints)}
        if self.training.average == "last":
            regular = [step for step in sorted(files) if self.is_regular(step)]
            return [files[step] for step in regular[-self.training.keep_checkpoints :]]
        ranked = sorted(self.progress.validations, key=lambda validation: validation[1:])
        best = [files[step] for step, *_ in ranked if step in files]
        return best[: self.training.keep_checkpoints if self.training.average == "best" else 1]


def unpackable(recipe: recipes.Recipe) -> list[str]:
    """The choices of a recipe that do not support packed rows."""
    optimizer = OPTIMIZERS.choices[recipe.training.optimizer]
    choices = [("training.optimizer", optimizer), *recipes.model_choices(recipe.model)]
    return [f"{key}: {choice.name}" for key, choice in choices if not choice.packed]


def records(recipe: recipes.Recipe, group: Group) -> bool:
    """Whether every update is the same work on one GPU."""
    alone = group.size == 1 and group.device.type == "cuda"
    return alone and recipe.training.batching == "packed" and not unpackable(recipe)


def _seed(seed: int, step: int, group: Group) -> None:
    """Dropout of this step in this process depends on nothing that came before."""
    (state,) = np.random.SeedSequence([seed, step, group.rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(state >> 1))


def _spread(pairs: Iterable[Pair], count: int, training: recipes.Training) -> list[Pair]:
    """Some pairs at equal distances: files are often sorted, so the first ones would not do."""
    if training.validate_sentences == 0:
        return []  # nothing need be read
    wanted = min(count, training.validate_sentences)
    places = {number * count // wanted for number in range(wanted)}
    return [pair for place, pair in enumerate(pairs) if place in places]


# ---------------------------------------------------------------------------------------------
# The training loop: step, tell, validate, save, until there is a reason to stop.


BATCHES_AHEAD = 8


class Stop(IntEnum):
    """Why training stops; numbers, so that several processes can agree on the gravest."""

    NOT_YET = 0
    DONE = 1
    PATIENCE = 2
    TIME = 3
    INTERRUPTED = 4

    def reason(self, training: Training) -> str:
        return {
            Stop.DONE: f"all {training.steps:,} steps are done",
            Stop.PATIENCE: f"the last {training.patience} validations were no better",
            Stop.TIME: "the minutes given are over",
            Stop.INTERRUPTED: "interrupted",
        }[self]


def learn(trainer: Trainer, report: ProgressReporter, deadline: float | None) -> Stop:
    """Train until the steps are done, patience or time is over, or a signal comes."""
    training, progress, group = trainer.training, trainer.progress, trainer.group
    meter = Meter(trainer, report)
    if deadline is not None:
        trainer.rehearse(most=0.1 * (deadline - time.monotonic()))
    report.begin(progress.step, training.steps, deadline)
    with interrupts() as interrupted, closing(ahead(trainer.batches(), BATCHES_AHEAD)) as stream:
        while True:
            meter.add(trainer.step([next(stream) for _ in range(training.accumulate)]))
            step = progress.step
            report.advance(step)
            stop = Stop(group.max(_stop(trainer, deadline, interrupted.is_set())))
            ending = stop is not Stop.NOT_YET
            validating = step % training.validate_every == 0 or (
                ending and stop is not Stop.INTERRUPTED
            )
            saving = validating or ending or step % training.checkpoint_every == 0
            if saving or step % training.log_every == 0:
                meter.tell()
            if validating:
                check(trainer, report)
                stop = Stop(max(stop, group.max(_patience(trainer))))
            if saving:
                meter.skip()  # a run that goes on from here knows what its validation took
                save(trainer)
                meter.skip()
            if stop is not Stop.NOT_YET:
                return stop


def _stop(trainer: Trainer, deadline: float | None, interrupted: bool) -> Stop:
    if interrupted:
        return Stop.INTERRUPTED
    if deadline is not None and time.monotonic() > deadline - trainer.time_to_finish():
        return Stop.TIME
    return _done(trainer)


def _done(trainer: Trainer) -> Stop:
    return Stop.DONE if trainer.progress.step >= trainer.training.steps else Stop.NOT_YET


def finished(trainer: Trainer) -> Stop:
    """Why there is nothing left to learn, if so."""
    return max(_done(trainer), _patience(trainer))


def _patience(trainer: Trainer) -> Stop:
    """Whether the best validation lies too far back. Only the first process knows; the others follow."""
    validations, training = trainer.progress.validations, trainer.training
    if training.patience is None or not validations:
        return Stop.NOT_YET
    best, *_ = min(validations, key=lambda validation: validation[1:])
    # One that came because time was over does not count: to learn in portions must not end a run sooner.
    since = [
        step for step, *_ in validations if step > best and step % training.validate_every == 0
    ]
    return Stop.PATIENCE if len(since) >= training.patience else Stop.NOT_YET


class Meter:
    """Measures between two lines of the log: mean loss and tokens a second of learning."""

    def __init__(self, trainer: Trainer, report: ProgressReporter) -> None:
        self.trainer, self.report = trainer, report
        self.total, self.steps = torch.zeros((), device=trainer.group.device), 0
        self.tokens, self.since = trainer.progress.tokens, time.monotonic()

    def add(self, loss: torch.Tensor) -> None:
        self.total += loss
        self.steps += 1

    def tell(self) -> None:
        """Write the line, after seeing that the loss is still a number."""
        progress, training = self.trainer.progress, self.trainer.training
        loss = self.trainer.group.mean(self.total) / self.steps
        seconds = time.monotonic() - self.since
        progress.seconds += seconds
        if not math.isfinite(loss):
            raise NonFiniteError
        rate = learning_rate(progress.step, training, self.trainer.recipe.model.d_model)
        facts = {
            "loss": loss,
            "learning_rate": rate,
            "speed": (progress.tokens - self.tokens) / seconds,
        }
        self.report.step(progress.step, training.steps, **facts)
        self.report.log("step", step=progress.step, epoch=progress.epoch, **facts)
        self.total.zero_()
        self.steps, self.tokens, self.since = 0, progress.tokens, time.monotonic()

    def skip(self) -> None:
        """Time that just went by in validation and saving is no part of the speed of learning."""
        self.trainer.progress.seconds += time.monotonic() - self.since
        self.since = time.monotonic()


def check(trainer: Trainer, report: ProgressReporter) -> None:
    """Validate, and make the model the run's if it is the best so far."""
    progress = trainer.progress
    if not trainer.group.first:
        return
    validation = trainer.validate()
    if not math.isfinite(validation.loss):
        raise NonFiniteError
    best = validation.rank < progress.best
    progress.validations.append((progress.step, *validation.rank))
    tell_validation(report, progress.step, validation, best)
    if best:
        with trainer.resting():
            trainer.run.write_weights(named_weights(trainer.network))


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # beyond, a float has no room


def save(trainer: Trainer) -> None:
    if trainer.group.first:
        trainer.save()
    trainer.group.wait()


def tell_validation(
    report: ProgressReporter, step: int, validation: Validation, best: bool
) -> None:
    facts = {"loss": validation.loss, "perplexity": perplexity(validation.loss)}
    text = f"step {step:,}: validation loss {validation.loss:.3f}"
    if validation.result is not None:
        facts[validation.result.measure] = validation.result.value
        text += f", {validation.result.name} {validation.result.value:.2f}"
    report.log("valid", step=step, best=best, **facts)
    report.say(text + (", the best so far" if best else ""))


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Ctrl-C or a request to end sets the event; a second one ends at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def note(number: int, frame: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, note) for number in signals]
    try:
        yield event
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
