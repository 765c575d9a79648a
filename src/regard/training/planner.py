"""Time planning: how fast a device trains, and how many steps, validations and warmup steps fit into the time.

``measure_device`` estimates the speed of a device, so that a model can be chosen. ``measure_steps`` times some steps of
the actual training and undoes them. ``plan`` fits the recipe to the remaining time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from regard.data.batching import Batch, pack_equal
from regard.inference.worker_pool import on_one_core
from regard.nn.architectures import ARCHITECTURES
from regard.nn.loss import Seq2SeqLoss
from regard.recipe import Recipe, make_recipe
from regard.training.cpu_kernels import (
    attach_cpu_kernels,
    fastest_cpu_precision,
    has_cpu_kernels,
)
from regard.training.evaluation import summary_seconds
from regard.training.optimizers_and_schedules import OPTIMIZERS, SCHEDULES
from regard.training.train_step import StepScalars, TrainStep

if TYPE_CHECKING:
    from regard.training.trainer import Trainer

SAFETY = 0.93
"""The share of the remaining time that is planned; the rest is a margin for a machine that becomes slower."""
VALIDATION_SHARE, MAX_VALIDATION_SHARE = 0.03, 0.08
"""One validation takes at most this share of the time left; the second, if it translates the fewest examples."""
MAX_VALIDATIONS = 20
MIN_EXAMPLES = 40
"""Fewest validation pairs to translate. If there is no time for them, checkpoints are selected by the loss."""
MEASURED_STEPS = 12
"""At most this many steps are timed, after the first ones, which are slower."""
TEST_SHARE = 0.15
"""Scoring the test data takes at most this share of the time; otherwise it is skipped."""
SUMMARY_SHARE = 0.1
"""At most this share of the time is reserved for the scores and examples that are printed at the end."""

# ---------------------------------------------------------------------------------------------
# The speed of a device


@dataclass(frozen=True)
class DeviceSpeed:
    """How fast a device trains, estimated in about a second."""

    device: str
    """cpu or cuda"""
    reference: float
    """target tokens per second with the model of cost 1, ``REFERENCE_MODELS``"""
    name: str = ""
    """for example “2 CPU cores” or “NVIDIA H200”"""
    batching: Literal["padded", "packed"] = "padded"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """how it trains fastest"""

    def tokens_per_second(self, cost: float) -> float:
        """Target tokens per second for a model of this cost relative to the reference model."""
        return self.reference / cost

    def describe(self) -> str:
        model = REFERENCE_MODELS[self.device]
        return f"{self.name}: about {self.reference:,.0f} tokens/s with {model}"


REFERENCE_MODELS = {"cpu": "the preset tiny", "cuda": "3+3 layers of width 512"}
"""The models that costs are relative to."""
H200_MATMUL, H200_REFERENCE = 7.0e14, 1.08e6
"""Operations per second of a large bf16 product, and tokens per second of the reference model in batches of 4,096
tokens (``python benchmarks/autoconfig_experiments.py --speeds``). Another GPU is estimated from its own product."""


def measure_device(device: torch.device) -> DeviceSpeed:
    """The speed of a device: on a CPU from a few steps of ``tiny``, on a GPU from a large matrix product."""
    if device.type == "cuda":
        speed = H200_REFERENCE * matmul_speed(device) / H200_MATMUL
        return DeviceSpeed("cuda", speed, torch.cuda.get_device_name(device), "packed")
    tokens, seconds = 1_000, math.inf
    batching: Literal["padded", "packed"] = "packed" if has_cpu_kernels() else "padded"
    precision = fastest_cpu_precision()
    values: dict[str, Any] = {"data": {"train": {"pairs": "x"}}, "model": {"preset": "tiny"}}
    values["training"] = {"precision": precision, "batching": batching}
    step = _random_step(make_recipe(values, "speed"), tokens, vocab_size=6_000)
    for _ in range(4):
        start = time.perf_counter()
        step()
        seconds = min(seconds, time.perf_counter() - start)
    cores = torch.get_num_threads()
    name = f"{cores} CPU core{'s' * (cores > 1)}"
    return DeviceSpeed("cpu", tokens / seconds, name, batching, precision)


SENTENCE_TOKENS = 25
"""of the random sentences that a speed is measured with"""


def _random_step(recipe: Recipe, tokens: int, vocab_size: int) -> Callable[[], object]:
    """A training step on a CPU with this many random source tokens and as many target tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ARCHITECTURES["transformer"](recipe.model, vocab_size, vocab_size)
        ids = torch.randint(10, vocab_size, (tokens // SENTENCE_TOKENS, SENTENCE_TOKENS))
    loss_fn = Seq2SeqLoss(network, recipe.training)
    batch = Batch(ids, ids, ids)
    if recipe.training.batching == "packed" and has_cpu_kernels():
        attach_cpu_kernels(loss_fn)
        batch = pack_equal(ids)
    optimizer = OPTIMIZERS["adam"](network.parameters(), recipe.training)
    train_step = TrainStep(loss_fn, optimizer, recipe.training, torch.device("cpu"))

    def step() -> None:
        with torch.random.fork_rng(devices=[]):
            train_step([batch], StepScalars(1 / ids.numel(), 1e-4))

    return step


class CoreSpeed(NamedTuple):
    """How long one core takes for a training step of a recipe."""

    seconds_per_token: float
    """for a source token and a target token"""
    seconds_per_step: float
    """whatever the number of tokens: the update of the weights, and the calls of the layers"""


def measure_core(recipe: Recipe) -> CoreSpeed:
    """Time two steps of different size on one core, in CPU seconds: as long as on an idle machine."""
    seconds = []
    with on_one_core():
        for tokens in CORE_TOKENS:
            step = _random_step(recipe, tokens, recipe.tokenizer.vocab_size)
            taken = []
            for _ in range(4):
                start = time.process_time()
                step()
                taken.append(time.process_time() - start)
            seconds.append(min(taken[1:]))
    per_token = (seconds[1] - seconds[0]) / (CORE_TOKENS[1] - CORE_TOKENS[0])
    return CoreSpeed(per_token, max(0.0, seconds[0] - per_token * CORE_TOKENS[0]))


CORE_TOKENS = (500, 2_000)
"""target tokens of the two steps"""


def matmul_speed(device: torch.device) -> float:
    """Operations per second of one large matrix product, as the device's peak speed."""
    gpu = device.type == "cuda"
    size = 8192 if gpu else 1024
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16 if gpu else torch.float32)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(10):
            torch.mm(x, x)
        if gpu:
            torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - start) / 10)
    return 2 * size**3 / min(seconds[1:])


# ---------------------------------------------------------------------------------------------
# The plan of a training


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

    def describe(self, pairs: int) -> str:
        """For example “12,400 pairs, 9,800 tokens/s: 2,300 steps of tiny in 18 min, ending at about 18:42”."""
        training, model = self.recipe.training, self.recipe.model
        end = datetime.now() + timedelta(seconds=self.seconds)
        return (
            f"{pairs:,} pairs, {self.tokens_per_second:,.0f} tokens/s: {training.steps:,} steps of {model.preset} "
            f"in {duration(self.seconds)}, ending at about {end:%H:%M}"
        )


def duration(seconds: float) -> str:
    """For example “45 s”, “18 min” or “3 h 40 min”."""
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


class StepTime(NamedTuple):
    """The measured duration of a training step, and its target tokens."""

    seconds: float
    tokens: float


def plan(trainer: Trainer, deadline: float, step: StepTime, scoring: float = 0.0) -> Plan:
    """Time a validation, and fit the recipe to the time until the deadline.

    ``deadline`` is a time of ``time.monotonic()``, ``step`` the result of ``measure_steps``,
    ``scoring`` the seconds for scores after training, besides those of the test data.
    """
    left = deadline - time.monotonic()
    seconds_per_step, tokens_per_step = step
    trainer.limit_examples(VALIDATION_SHARE * left, MAX_VALIDATION_SHARE * left, MIN_EXAMPLES)
    left = deadline - time.monotonic()
    # The loss of the validation pairs takes about a third of training on them.
    speed = 3 * tokens_per_step / seconds_per_step
    validation = trainer.validation_seconds + trainer.limit_validation_pairs(
        VALIDATION_SHARE * left, speed
    )
    trainer.validation_seconds = validation
    reserve = 3 + 2.5 * validation + min(TEST_SHARE * left, trainer.test_seconds()) + scoring
    reserve += min(SUMMARY_SHARE * left, summary_seconds(trainer))
    trainer.reserved_seconds, trainer.max_steps = reserve, trainer.training.steps
    available = max(0.0, SAFETY * left - reserve)
    recipe, shortened = fit_recipe(trainer.recipe, available, seconds_per_step, validation)
    training = recipe.training
    validations = training.steps // training.validate_every
    seconds = training.steps * seconds_per_step + validations * validation + reserve
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


TOLERANCE = 0.03
"""A plan that misses the deadline by less than this share of the time left is not changed."""


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
        steps = min(trainer.max_steps, done + int(remaining * room / needed))
    if steps == training.steps:
        return None
    warmup = min(training.warmup, max(1, steps // 2))  # the learning rate must reach its peak
    return _with_training(trainer.recipe, steps=steps, warmup=warmup)


def _with_training(recipe: Recipe, **changes: Any) -> Recipe:
    training = recipe.training.model_copy(update=changes)
    return recipe.model_copy(update={"training": training})


def measure_steps(trainer: Trainer, left: float) -> StepTime:
    """The duration of a step, measured for a small part of the seconds left; the steps are undone afterwards.

    The first steps are not counted: they allocate memory, and on a GPU they compile and capture the step.
    """
    limit = trainer.group.broadcast(min(60.0, 0.04 * left))
    with trainer.rehearsal() as run_step:

        def timed(steps: int) -> tuple[float, int]:
            start = time.monotonic()
            tokens = sum(run_step() for _ in range(steps))
            trainer.synchronize()
            # The processes must agree on how many steps they measure.
            return trainer.group.max(int(1e6 * (time.monotonic() - start))) / 1e6, tokens

        seconds, tokens = timed(1)
        if seconds > limit and trainer.warmup_steps == 1:
            return StepTime(seconds, tokens)  # no time for more
        timed(trainer.warmup_steps - 1)
        seconds, tokens = timed(1)
        steps = 1 + max(0, min(MEASURED_STEPS, int(limit / max(seconds, 1e-6))))
        more_seconds, more_tokens = timed(steps - 1)
    return StepTime((seconds + more_seconds) / steps, (tokens + more_tokens) / steps)
