"""The training loop: step, tell, validate, save, until there is a reason to stop."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from enum import IntEnum

import torch

from regard.background import ahead
from regard.learn.learner import Learner, NotANumberError, Validation
from regard.learn.optimizers import learning_rate
from regard.learn.report import Report
from regard.model import weights_of
from regard.recipe import Training

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


def learn(learner: Learner, report: Report, deadline: float | None) -> Stop:
    """Train until the steps are done, patience or time is over, or a signal comes."""
    training, progress, group = learner.training, learner.progress, learner.group
    meter = Meter(learner, report)
    if deadline is not None:
        learner.rehearse(most=0.1 * (deadline - time.monotonic()))
    report.begin(progress.step, training.steps, deadline)
    with interrupts() as interrupted, closing(ahead(learner.batches(), BATCHES_AHEAD)) as stream:
        while True:
            meter.add(learner.step([next(stream) for _ in range(training.accumulate)]))
            step = progress.step
            report.advance(step)
            stop = Stop(group.max(_stop(learner, deadline, interrupted.is_set())))
            ending = stop is not Stop.NOT_YET
            validating = step % training.validate_every == 0 or (
                ending and stop is not Stop.INTERRUPTED
            )
            saving = validating or ending or step % training.checkpoint_every == 0
            if saving or step % training.log_every == 0:
                meter.tell()
            if validating:
                check(learner, report)
                stop = Stop(max(stop, group.max(_patience(learner))))
            if saving:
                meter.skip()  # a run that goes on from here knows what its validation took
                save(learner)
                meter.skip()
            if stop is not Stop.NOT_YET:
                return stop


def _stop(learner: Learner, deadline: float | None, interrupted: bool) -> Stop:
    if interrupted:
        return Stop.INTERRUPTED
    if deadline is not None and time.monotonic() > deadline - learner.time_to_finish():
        return Stop.TIME
    return _done(learner)


def _done(learner: Learner) -> Stop:
    return Stop.DONE if learner.progress.step >= learner.training.steps else Stop.NOT_YET


def finished(learner: Learner) -> Stop:
    """Why there is nothing left to learn, if so."""
    return max(_done(learner), _patience(learner))


def _patience(learner: Learner) -> Stop:
    """Whether the best validation lies too far back. Only the first process knows; the others follow."""
    validations, training = learner.progress.validations, learner.training
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

    def __init__(self, learner: Learner, report: Report) -> None:
        self.learner, self.report = learner, report
        self.total, self.steps = torch.zeros((), device=learner.group.device), 0
        self.tokens, self.since = learner.progress.tokens, time.monotonic()

    def add(self, loss: torch.Tensor) -> None:
        self.total += loss
        self.steps += 1

    def tell(self) -> None:
        """Write the line, after seeing that the loss is still a number."""
        progress, training = self.learner.progress, self.learner.training
        loss = self.learner.group.mean(self.total) / self.steps
        seconds = time.monotonic() - self.since
        progress.seconds += seconds
        if not math.isfinite(loss):
            raise NotANumberError
        rate = learning_rate(progress.step, training, self.learner.recipe.model.width)
        facts = {"loss": loss, "rate": rate, "speed": (progress.tokens - self.tokens) / seconds}
        self.report.step(progress.step, training.steps, **facts)
        self.report.log("step", step=progress.step, epoch=progress.epoch, **facts)
        self.total.zero_()
        self.steps, self.tokens, self.since = 0, progress.tokens, time.monotonic()

    def skip(self) -> None:
        """Time that just went by in validation and saving is no part of the speed of learning."""
        self.learner.progress.seconds += time.monotonic() - self.since
        self.since = time.monotonic()


def check(learner: Learner, report: Report) -> None:
    """Validate, and make the model the run's if it is the best so far."""
    progress = learner.progress
    if not learner.group.first:
        return
    validation = learner.validate()
    if not math.isfinite(validation.loss):
        raise NotANumberError
    best = validation.rank < progress.best
    progress.validations.append((progress.step, *validation.rank))
    tell_validation(report, progress.step, validation, best)
    if best:
        with learner.resting():
            learner.run.write_weights(weights_of(learner.network))


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # beyond, a float has no room


def save(learner: Learner) -> None:
    if learner.group.first:
        learner.save()
    learner.group.wait()


def tell_validation(report: Report, step: int, validation: Validation, best: bool) -> None:
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
