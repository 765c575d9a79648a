"""How the weights follow the gradient, and how fast (section 5.3 of the paper)."""

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn, optim

from regard import recipe
from regard.recipe import Registry

Build = Callable[[Iterable[nn.Parameter], recipe.Training], optim.Optimizer]


def _adam(
    kind: type[optim.Adam], parameters: Iterable[nn.Parameter], training: recipe.Training
) -> optim.Optimizer:
    parameters = list(parameters)
    gpu = parameters[0].is_cuda
    # fused: one kernel for all weights, the same autocast. On a GPU the rate lies there too, for a recorded update.
    return kind(
        parameters,
        lr=torch.tensor(training.learning_rate, device=parameters[0].device)
        if gpu
        else training.learning_rate,
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


OPTIMIZERS: Registry[Build] = Registry("training.optimizer")
_ADAM = ("training.betas", "training.epsilon")

OPTIMIZERS.register("adam", summary="Adam with bias correction", options=_ADAM, packed=True)(
    partial(_adam, optim.Adam)
)
OPTIMIZERS.register(
    "adamw", summary="Adam with decoupled weight decay", options=_ADAM, packed=True
)(partial(_adam, optim.AdamW))
OPTIMIZERS.register("sgd", summary="stochastic gradient descent")(partial(_sgd, 0.0))
OPTIMIZERS.register("momentum", summary="SGD with momentum 0.9")(partial(_sgd, 0.9))
OPTIMIZERS.register("adagrad", summary="AdaGrad")(_adagrad)
OPTIMIZERS.register("rmsprop", summary="RMSProp")(_rmsprop)


def set_rate(optimizer: optim.Optimizer, rate: float | Tensor) -> None:
    for settings in optimizer.param_groups:
        if isinstance(settings["lr"], Tensor):
            settings["lr"].copy_(rate) if isinstance(rate, Tensor) else settings["lr"].fill_(rate)
        else:
            settings["lr"] = rate


SCHEDULES: Registry[Callable[[int, recipe.Training, int], float]] = Registry("training.schedule")


def warming(step: int, warmup: int) -> float:
    return min(1.0, step / warmup) if warmup else 1.0


@SCHEDULES.register("noam", options=["training.warmup"])
def noam(step: int, training: recipe.Training, width: int) -> float:
    """d^-0.5 min(step^-0.5, step warmup^-1.5): a straight rise, then a fall with the root of the step."""
    rise = step / training.warmup**1.5 if training.warmup else math.inf
    return training.learning_rate / math.sqrt(width) * min(1 / math.sqrt(step), rise)


@SCHEDULES.register("constant", options=["training.warmup"])
def constant(step: int, training: recipe.Training, width: int) -> float:
    return training.learning_rate * warming(step, training.warmup)


@SCHEDULES.register("cosine", options=["training.warmup"])
def cosine(step: int, training: recipe.Training, width: int) -> float:
    """BF16Linear a cosine wave from the top down to nothing at the last step."""
    done = max(0, step - training.warmup) / max(1, training.steps - training.warmup)
    fall = (1 + math.cos(math.pi * min(1.0, done))) / 2
    return training.learning_rate * warming(step, training.warmup) * fall


def learning_rate(step: int, training: recipe.Training, width: int) -> float:
    """The rate of a step; steps count from 1."""
    return SCHEDULES[training.schedule](step, training, width)
