"""Learning-rate schedules: the learning rate as a function of the step (section 5.3 of the paper)."""

import math
from collections.abc import Callable

from regard import recipe
from regard.recipe import Registry

SCHEDULES: Registry[Callable[[int, recipe.TrainingConfig, int], float]] = Registry(
    "training.schedule"
)


def learning_rate(step: int, training: recipe.TrainingConfig, d_model: int) -> float:
    """The learning rate of a step; steps are numbered from 1."""
    return SCHEDULES[training.schedule](step, training, d_model)


def warmup_factor(step: int, warmup: int) -> float:
    """Rises linearly to 1 during warmup."""
    return min(1.0, step / warmup) if warmup else 1.0


@SCHEDULES.register("noam", options=["training.warmup"])
def noam(step: int, training: recipe.TrainingConfig, d_model: int) -> float:
    """d_model^-0.5 min(step^-0.5, step warmup^-1.5): linear warmup, then decay with the inverse square root."""
    rise = step / training.warmup**1.5 if training.warmup else math.inf
    return training.learning_rate / math.sqrt(d_model) * min(1 / math.sqrt(step), rise)


@SCHEDULES.register("constant", options=["training.warmup"])
def constant(step: int, training: recipe.TrainingConfig, d_model: int) -> float:
    """Constant after a linear warmup."""
    return training.learning_rate * warmup_factor(step, training.warmup)


@SCHEDULES.register("cosine", options=["training.warmup"])
def cosine(step: int, training: recipe.TrainingConfig, d_model: int) -> float:
    """Cosine schedule: linear warmup, then half a cosine down to zero at the last step."""
    done = max(0, step - training.warmup) / max(1, training.steps - training.warmup)
    decay = (1 + math.cos(math.pi * min(1.0, done))) / 2
    return training.learning_rate * warmup_factor(step, training.warmup) * decay
