"""How the weights follow the gradient, and how fast (section 5.3 of the paper)."""

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn, optim

from regard import recipe

Build = Callable[[Iterable[nn.Parameter], recipe.Training], optim.Optimizer]


def _adam(
    kind: type[optim.Adam], parameters: Iterable[nn.Parameter], training: recipe.Training
) -> optim.Optimizer:
    parameters = list(parameters)
    gpu = parameters[0].is_cuda
    # fused: one kernel for all weights, the same arithmetic. On a GPU the rate lies there too, for a recorded update.
    return kind(
        parameters,
        lr=torch.tensor(training.rate, device=parameters[0].device) if gpu else training.rate,
        capturable=gpu,
        betas=training.betas,
        eps=training.epsilon,
        weight_decay=training.weight_decay,
        fused=True,
    )


def _sgd(
    momentum: float, parameters: Iterable[nn.Parameter], training: recipe.Training
) -> optim.Optimizer:
    return optim.SGD(parameters, momentum=momentum, weight_decay=training.weight_decay)


def _adagrad(parameters: Iterable[nn.Parameter], training: recipe.Training) -> optim.Optimizer:
    return optim.Adagrad(parameters, weight_decay=training.weight_decay)


def _rmsprop(parameters: Iterable[nn.Parameter], training: recipe.Training) -> optim.Optimizer:
    return optim.RMSprop(parameters, weight_decay=training.weight_decay)


OPTIMIZERS: dict[recipe.Optimizer, Build] = {
    "adam": partial(_adam, optim.Adam),
    "adamw": partial(_adam, optim.AdamW),
    "sgd": partial(_sgd, 0.0),
    "momentum": partial(_sgd, 0.9),
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
}


def set_rate(optimizer: optim.Optimizer, rate: float | Tensor) -> None:
    for settings in optimizer.param_groups:
        if isinstance(settings["lr"], Tensor):
            settings["lr"].copy_(rate) if isinstance(rate, Tensor) else settings["lr"].fill_(rate)
        else:
            settings["lr"] = rate


def warming(step: int, warmup: int) -> float:
    return min(1.0, step / warmup) if warmup else 1.0


def paper(step: int, training: recipe.Training, width: int) -> float:
    """d^-0.5 min(step^-0.5, step warmup^-1.5): a straight rise, then a fall with the root of the step."""
    rise = step / training.warmup**1.5 if training.warmup else math.inf
    return training.rate / math.sqrt(width) * min(1 / math.sqrt(step), rise)


def constant(step: int, training: recipe.Training, width: int) -> float:
    return training.rate * warming(step, training.warmup)


def cosine(step: int, training: recipe.Training, width: int) -> float:
    """Half a cosine wave from the top down to nothing at the last step."""
    done = max(0, step - training.warmup) / max(1, training.steps - training.warmup)
    fall = (1 + math.cos(math.pi * min(1.0, done))) / 2
    return training.rate * warming(step, training.warmup) * fall


SCHEDULES: dict[recipe.Schedule, Callable[[int, recipe.Training, int], float]] = {
    "paper": paper,
    "constant": constant,
    "cosine": cosine,
}


def learning_rate(step: int, training: recipe.Training, width: int) -> float:
    """The rate of a step; steps count from 1."""
    return SCHEDULES[training.schedule](step, training, width)
