"""When training stops, and why: all steps, early stopping, a time limit, a signal, a loss that is not finite."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from regard.recipe import TrainingConfig
from regard.training.checkpoint import TrainingState


class NonFiniteError(Exception):
    """A weight or the loss is infinite or not a number."""


class StopReason(IntEnum):
    """Why training stops. If processes disagree, the highest value counts."""

    NONE = 0
    ALL_STEPS = 1
    PATIENCE = 2
    TIME_LIMIT = 3
    TOO_SLOW = 4
    """for the chosen model: training is started again with another one"""
    INTERRUPTED = 5

    def describe(self, training: TrainingConfig) -> str:
        many = training.patience != 1
        return {
            StopReason.ALL_STEPS: f"all {training.steps:,} steps are done"
            if training.steps != 1
            else "the only step is done",
            StopReason.PATIENCE: f"no improvement in the last {training.patience} validations"
            if many
            else "no improvement in the last validation",
            StopReason.TIME_LIMIT: "the time limit was reached",
            StopReason.INTERRUPTED: "interrupted",
        }[self]


def finished(state: TrainingState, training: TrainingConfig) -> StopReason:
    """Why there is nothing left to train, if so."""
    return max(all_steps_done(state, training), early_stop(state, training))


def all_steps_done(state: TrainingState, training: TrainingConfig) -> StopReason:
    return StopReason.ALL_STEPS if state.step >= training.steps else StopReason.NONE


def early_stop(state: TrainingState, training: TrainingConfig) -> StopReason:
    """Whether patience is exhausted. Only the main process has the validations; the others follow it."""
    # Fine-tuning often makes a model worse at first, so its start does not count.
    validations = [validation for validation in state.validations if validation[0] > 0]
    if training.patience is None or not validations:
        return StopReason.NONE
    # A later checkpoint is always better if the last one is kept, so the loss decides.
    first = 2 if training.best_checkpoint_metric == "last" else 1
    best_step, *_ = min(validations, key=lambda validation: validation[first:])
    # A validation at a time limit does not count: training in several sessions must not stop a run sooner.
    since = [
        step for step, *_ in validations if step > best_step and step % training.validate_every == 0
    ]
    return StopReason.PATIENCE if len(since) >= training.patience else StopReason.NONE


@contextmanager
def catch_signals() -> Iterator[threading.Event]:
    """An event that SIGINT (Ctrl-C) or SIGTERM sets; a second signal raises KeyboardInterrupt."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def handle(number: int, frame: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    signals = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, handle) for number in signals]
    try:
        yield event
    finally:
        for number, handler in zip(signals, previous, strict=True):
            signal.signal(number, handler)
