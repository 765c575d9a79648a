"""Time planning: how many steps, validations and warmup steps of a training fit into the time.

``measure_steps`` times some steps of the actual training and undoes them. ``plan`` fits the recipe to the remaining
time. During training, ``keep_to_time`` changes the number of steps if the machine has become slower or faster.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.data.corpus import read_pairs
from regard.recipe import Recipe
from regard.tasks import Translator
from regard.training.evaluation import evenly_spaced, summary_seconds
from regard.training.optimizers import SCHEDULES

if TYPE_CHECKING:
    from regard.training.progress import ProgressReporter
    from regard.training.trainer import Meter, Trainer

SAFETY = 0.93
"""The share of the remaining time that is planned; the rest is a margin for a machine that becomes slower."""
VALIDATION_SHARE, MAX_VALIDATION_SHARE = 0.03, 0.08
"""One validation takes at most this share of the time left; the second, if it translates the fewest examples."""
MAX_VALIDATIONS = 20
MIN_EXAMPLES = 40
"""Fewest validation pairs to translate. If there is no time for them, the last checkpoint is selected."""
MEASURED_STEPS = 12
"""At most this many steps are timed, after the first ones, which are slower."""
TEST_SHARE = 0.15
"""Scoring the test data takes at most this share of the time; otherwise it is skipped."""
SUMMARY_SHARE = 0.1
"""At most this share of the time is reserved for the scores and examples that are printed at the end."""

# ---------------------------------------------------------------------------------------------
# The plan


@dataclass(frozen=True)
class Plan:
    """A recipe that ends in time, and the measurements it was computed from."""

    recipe: Recipe
    seconds_per_step: float
    tokens_per_second: float
    """target tokens"""
    seconds: float
    """expected duration of training and validation"""
    tokens_per_step: float
    shortened: bool
    """whether the recipe had more steps than there is time for"""
    requested_steps: int
    requested_seconds: float
    """the steps of the recipe, and the time they would take"""

    def describe(self, rows: int) -> str:
        """For example “12,400 pairs, 9,800 tokens/s: 2,300 steps of tiny in 18 min, ending at about 18:42”.

        rows: training pairs, counted twice with ``data.bidirectional``.
        """
        training, model = self.recipe.training, self.recipe.model
        end = datetime.now() + timedelta(seconds=self.seconds)
        steps = f"{training.steps:,} step{'s' * (training.steps != 1)}"
        pairs = f"{rows:,} pairs"
        if self.recipe.data.bidirectional:
            pairs += " (both directions)"
        return (
            f"{pairs}, {self.tokens_per_second:,.0f} tokens/s: {steps} of {model.preset} "
            f"in {duration(self.seconds)}, ending at about {end:%H:%M}"
        )


def duration(seconds: float) -> str:
    """For example “45 s”, “18 min” or “3 h 40 min”."""
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def plan(trainer: Trainer, deadline: float, step: StepTime, scoring: float = 0.0) -> Plan:
    """Time a validation, and fit the recipe to the time until the deadline.

    ``deadline`` is a time of ``time.monotonic()``, ``step`` the result of ``measure_steps``,
    ``scoring`` the seconds for scores after training, besides those of the test data.
    """
    left = deadline - time.monotonic()
    seconds_per_step, tokens_per_step = step
    limit_examples(trainer, VALIDATION_SHARE * left, MAX_VALIDATION_SHARE * left, MIN_EXAMPLES)
    left = deadline - time.monotonic()
    # The loss of the validation pairs takes about a third of training on them.
    speed = 3 * tokens_per_step / seconds_per_step
    validation = trainer.validation_seconds
    validation += limit_validation_pairs(trainer, VALIDATION_SHARE * left, speed)
    trainer.validation_seconds = validation
    reserve = (
        3 + 2.5 * validation + min(TEST_SHARE * left, seconds_to_score_test(trainer)) + scoring
    )
    reserve += min(SUMMARY_SHARE * left, summary_seconds(trainer))
    trainer.reserved_seconds, trainer.max_steps = reserve, trainer.training.steps
    before = validation if trainer.validates_start else 0.0
    available = max(0.0, SAFETY * left - reserve - before)
    recipe, shortened = fit_recipe(trainer.recipe, available, seconds_per_step, validation)
    training = recipe.training
    validations = training.steps // training.validate_every
    seconds = training.steps * seconds_per_step + validations * validation + before + reserve
    requested = trainer.training.steps
    return Plan(
        recipe,
        seconds_per_step,
        tokens_per_step / seconds_per_step,
        seconds,
        tokens_per_step,
        shortened,
        requested,
        requested * seconds_per_step,
    )


def fit_recipe(
    recipe: Recipe, available: float, seconds_per_step: float, validation: float
) -> tuple[Recipe, bool]:
    """The recipe with as many steps as fit into ``available`` seconds, and whether it was shortened.

    A shortened training has the same number of validations, or fewer if they would take too long. Its learning rate
    ends at zero, and its warmup is at most a tenth of the steps.
    """
    training = recipe.training
    count = max(1, training.steps // training.validate_every)
    # No validation takes longer than the training between two of them.
    longest = max(1, int(available / 2 / max(validation, 1e-9)))
    count = min(count, MAX_VALIDATIONS, longest) if validation else min(count, MAX_VALIDATIONS)
    if training.steps * seconds_per_step + count * validation <= available:
        every = max(training.validate_every, math.ceil(validation / seconds_per_step))
        if training.steps // every > count:  # these many would take too long
            every = math.ceil(training.steps / count)
        return _with_training(recipe, validate_every=min(every, training.steps)), False
    # At most a tenth of the time is for validations.
    count = max(1, min(count, int(0.1 * available / max(validation, 1e-9))))
    steps = max(1, int((available - count * validation) / seconds_per_step))
    every = max(1, steps // count)
    steps = max(every, steps // every * every)  # the last step is validated
    changes: dict[str, Any] = {
        "steps": steps,
        "validate_every": every,
        "checkpoint_every": every,
        "warmup": min(training.warmup, max(1, steps // 10)),
    }
    if training.schedule != "cosine":
        peak = SCHEDULES[training.schedule](max(1, training.warmup), training, recipe.model.d_model)
        changes |= {"schedule": "cosine", "learning_rate": peak}
    return _with_training(recipe, **changes), True


def _with_training(recipe: Recipe, **changes: Any) -> Recipe:
    training = recipe.training.model_copy(update=changes)
    return recipe.model_copy(update={"training": training})


# ---------------------------------------------------------------------------------------------
# During training


MEASURED_SHARE = 0.03
"""A plan is changed only after steps have been measured for this share of the time left."""
REVISION_SECONDS = 1.0
"""A plan is revised at most this often, except when a line is logged."""
TOLERANCE = 0.03
"""A plan that misses the deadline by less than this share of the time left is not changed, and it is not extended by
a smaller share of the steps."""


EXTEND_BELOW = 0.9
"""A plan that needs less than this share of the time left is extended."""


def adjust_steps(trainer: Trainer, deadline: float, seconds_per_step: float) -> Recipe | None:
    """The recipe with fewer or more steps if the machine has become slower or faster; None if the plan still fits.

    There are never more steps than the recipe had before it was planned.
    """
    training, done = trainer.training, trainer.state.step
    remaining = training.steps - done
    if remaining <= 0 or not seconds_per_step:
        return None
    validations = remaining // training.validate_every
    needed = remaining * seconds_per_step + validations * trainer.validation_seconds
    time_left = deadline - time.monotonic()
    left = max(0.0, time_left - trainer.time_to_finish())
    room = SAFETY * time_left - trainer.reserved_seconds
    steps = training.steps
    if needed > left * (1 + TOLERANCE):
        steps = done + max(1, int(remaining * left / needed))
    elif needed < EXTEND_BELOW * room:
        longer = min(trainer.max_steps, done + int(remaining * room / needed))
        # A few steps more are not worth another validation at their end.
        steps = longer if longer > (1 + TOLERANCE) * steps else steps
    if steps == training.steps:
        return None
    warmup = min(training.warmup, max(1, steps // 2))  # the learning rate must reach its peak
    return _with_training(trainer.recipe, steps=steps, warmup=warmup)


def is_too_slow(trainer: Trainer, deadline: float, meter: Meter) -> bool:
    """Whether to start again with another model, before the first checkpoint is written."""
    seconds, too_slow = deadline - time.monotonic() - trainer.reserved_seconds, False
    if (
        trainer.automatic is not None
        and trainer.state.step < trainer.training.checkpoint_every
        and meter.measured_seconds > MEASURED_SHARE * seconds
    ):
        tokens = trainer.state.tokens
        speed = tokens / trainer.state.step / meter.seconds_per_step
        too_slow = trainer.automatic.is_too_slow(speed, seconds, tokens)
    return bool(trainer.group.max(too_slow))


def revision_is_due(trainer: Trainer, deadline: float, meter: Meter) -> bool:
    """Whether to measure the speed now, and revise the plan: few steps may be slow, long before ``log_every`` of them.

    Measuring waits for the GPU, so it is not done after every step.
    """
    if not meter.logged and meter.steps < trainer.untimed_steps:
        return False
    now = time.monotonic()
    return now - meter.start >= max(REVISION_SECONDS, MEASURED_SHARE * (deadline - now))


def keep_to_time(
    trainer: Trainer, reporter: ProgressReporter, deadline: float, meter: Meter
) -> None:
    """Change the number of steps if the machine has become slower or faster than planned.

    A run that was started without a time limit has no plan, and keeps its steps.
    """
    recipe = None
    measured = meter.measured_seconds >= MEASURED_SHARE * (deadline - time.monotonic())
    if measured and trainer.run.plan_file.exists():
        recipe = adjust_steps(trainer, deadline, meter.seconds_per_step)
    recipe = trainer.group.broadcast(recipe)
    if recipe is None:
        return
    trainer.set_recipe(recipe)
    steps = trainer.training.steps
    reporter.log("plan", step=trainer.state.step, steps=steps)
    reporter.set_steps(steps)
    if not 0.7 * trainer.announced_steps <= steps <= 1.4 * trainer.announced_steps:
        change = (
            "slower than planned; reduced"
            if steps < trainer.announced_steps
            else "faster than planned; extended"
        )
        trainer.announced_steps = steps
        reporter.message(f"Training is {change} to {steps:,} steps to end on time")


# ---------------------------------------------------------------------------------------------
# Measurements


class StepTime(NamedTuple):
    """The measured duration of a training step, and its target tokens."""

    seconds: float
    tokens: float


def measure_steps(trainer: Trainer, left: float) -> StepTime:
    """The duration of a step, measured for a small part of the seconds left; the steps are undone afterwards.

    The first steps are not counted: they allocate memory, and on a GPU they compile and capture the step.
    """
    limit = trainer.group.broadcast(min(60.0, 0.04 * left))
    with trainer.trial_steps() as run_step:

        def timed(steps: int) -> tuple[float, int]:
            start = time.monotonic()
            tokens = sum(run_step() for _ in range(steps))
            trainer.synchronize()
            # The processes must agree on how many steps they measure.
            return trainer.group.max(int(1e6 * (time.monotonic() - start))) / 1e6, tokens

        seconds, tokens = timed(1)
        if seconds > limit and trainer.untimed_steps == 1:
            return StepTime(seconds, tokens)  # no time for more
        timed(trainer.untimed_steps - 1)
        seconds, tokens = timed(1)
        steps = 1 + max(0, min(MEASURED_STEPS, int(limit / max(seconds, 1e-6))))
        more_seconds, more_tokens = timed(steps - 1)
    return StepTime((seconds + more_seconds) / steps, (tokens + more_tokens) / steps)


def estimate_validation_time(
    trainer: Trainer, limit: float, measuring_seconds: float = 0.0
) -> None:
    """Set ``validation_seconds`` before the first validation, from the translation of some examples.

    ``limit`` is an upper bound of the estimate. Without examples, only the loss is computed, which takes no longer
    than training on the same data, and nothing is estimated.

    measuring_seconds: about how long the measurement may take. A GPU translates hundreds of sentences in hardly
    more time than a few, so that more examples give a better estimate.
    """
    if not trainer.examples:
        return
    with trainer.evaluation_mode():
        # Warm up, because the first use of a device is slow; on a slow device, one example has to do.
        count, seconds = 1, seconds_to_translate(trainer, 1)
        if seconds < 0.5 or trainer.group.device.type == "cuda":
            count, seconds = 16, seconds_to_translate(trainer, 16)
            while count < len(trainer.examples) and seconds < measuring_seconds / 8:
                count *= 4
                seconds = seconds_to_translate(trainer, count)
    each = seconds / min(count, len(trainer.examples))
    estimate = each * len(trainer.examples) / trainer.group.size
    if trainer.state.step == 0:
        estimate *= _trained_output_length(trainer)
    trainer.validation_seconds = min(limit, estimate)


def seconds_to_translate(trainer: Trainer, count: int) -> float:
    """The time to translate the first examples greedily."""
    start = time.monotonic()
    trainer.model.predict_pairs(trainer.examples[:count], quick=True)
    return time.monotonic() - start


def _trained_output_length(trainer: Trainer) -> float:
    """The length of a trained model's outputs relative to an untrained one's, which end at the length limit."""
    if not isinstance(trainer.model, Translator):
        return 1.0
    source = float(trainer.prepared.valid.source_lengths[:].mean())
    return min(1.0, 1.3 * source / (source + trainer.recipe.decoding.extra_length))


def limit_examples(trainer: Trainer, seconds: float, most_seconds: float, minimum: int) -> None:
    """Translate fewer validation pairs if they would take longer than ``seconds``.

    There are at least ``minimum``, unless these take longer than ``most_seconds``; then only the loss is validated,
    and the last checkpoint is selected, or the one with the lowest loss for early stopping and fine-tuning.
    """
    estimate_validation_time(trainer, limit=math.inf, measuring_seconds=seconds)
    if not trainer.examples or trainer.validation_seconds <= seconds:
        return
    each = trainer.validation_seconds / len(trainer.examples)
    count = max(int(seconds / each), min(minimum, len(trainer.examples)))
    values: dict[str, Any] = {"validate_sentences": count}
    if count * each > most_seconds:
        values = {"validate_sentences": 0}
        if trainer.training.best_checkpoint_metric == "score":
            # At the end of a schedule, the loss often rises while translations still improve.
            compared = trainer.training.patience is not None or trainer.validates_start
            values["best_checkpoint_metric"] = "loss" if compared else "last"
    training = trainer.training.model_copy(update=values)
    trainer.set_recipe(trainer.recipe.model_copy(update={"training": training}))
    trainer.examples = evenly_spaced(
        trainer.examples, len(trainer.examples), training.validate_sentences
    )
    trainer.validation_seconds = each * len(trainer.examples)


def limit_validation_pairs(trainer: Trainer, seconds: float, tokens_per_second: float) -> float:
    """Compute the validation loss on fewer pairs if it would take longer; returns the time it takes."""
    valid = trainer.prepared.valid
    each = trainer.count_labels(valid) / len(valid) / tokens_per_second
    count = max(2, int(seconds / each))
    trainer.state.max_validation_pairs = count if count < len(valid) else None
    return each * min(count, len(valid))


def decoding_seconds(trainer: Trainer, sentences: int) -> float:
    """How long the translation of this many sentences takes, at most.

    Beam search takes about beam times as long as greedy search. Where only the loss is validated, the same holds for
    the test.
    """
    relative = sentences / max(1, len(trainer.prepared.valid))
    if trainer.examples:
        relative = sentences * trainer.recipe.decoding.beam / len(trainer.examples)
    return relative * trainer.validation_seconds


def seconds_to_score_test(trainer: Trainer) -> float:
    """Estimated time to score the test data."""
    data = trainer.recipe.data
    if data.test is None:
        return 0.0
    return 10 + decoding_seconds(trainer, sum(1 for _ in read_pairs(data.test, data, "data.test")))
