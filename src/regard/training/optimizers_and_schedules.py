"""Optimizers, and the learning rate schedule with its warmup (section 5.3 of the paper)."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn, optim

from regard import recipe
from regard.inference.precision import is_bf16
from regard.recipe import Registry
from regard.training.muon import Muon

OptimizerBuilder = Callable[[nn.Module, recipe.TrainingConfig], optim.Optimizer]
"""An optimizer for all weights of a network that are not frozen."""
OPTIMIZERS: Registry[OptimizerBuilder] = Registry("training.optimizer")


def trained_parameters(network: nn.Module) -> list[nn.Parameter]:
    """The weights that are not frozen."""
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def _adam(
    kind: type[optim.Adam], network: nn.Module, training: recipe.TrainingConfig
) -> optim.Optimizer:
    return _adam_for(kind, trained_parameters(network), training)


def _adam_for(
    kind: type[optim.Adam], parameters: list[nn.Parameter], training: recipe.TrainingConfig
) -> optim.Optimizer:
    gpu = any(parameter.is_cuda for parameter in parameters)
    # fused: one kernel for all weights, with the same results. On a GPU the learning rate is a tensor on the device,
    # so that a CUDA graph reads its current value.
    return kind(
        [{"params": parameters}],
        lr=torch.tensor(training.learning_rate, device=parameters[0].device)
        if gpu
        else training.learning_rate,
        capturable=gpu,
        betas=training.betas,
        eps=training.epsilon,
        weight_decay=training.weight_decay,
        fused=True,
    )


def _muon(network: nn.Module, training: recipe.TrainingConfig) -> optim.Optimizer:
    parameters = trained_parameters(network)
    in_layers = set(layer_matrices(network))
    matrices = [parameter for parameter in parameters if parameter in in_layers]
    others = [parameter for parameter in parameters if parameter not in in_layers]
    bf16 = is_bf16(training.precision, parameters[0].device)
    return Muon(
        matrices,
        _adam_for(optim.AdamW, others, training),
        training.weight_decay,
        torch.bfloat16 if bf16 else torch.float32,
    )


def layer_matrices(network: nn.Module) -> list[Tensor]:
    """The weight matrices of the encoder and decoder layers; not the embeddings and the output projection."""
    return [
        linear.weight
        for stack in network.modules()
        if isinstance(stack, nn.ModuleList)
        for linear in stack.modules()
        if isinstance(linear, nn.Linear)
    ]


def _sgd(momentum: float, network: nn.Module, training: recipe.TrainingConfig) -> optim.Optimizer:
    parameters = trained_parameters(network)
    return optim.SGD(parameters, momentum=momentum, weight_decay=training.weight_decay)


def _adagrad(network: nn.Module, training: recipe.TrainingConfig) -> optim.Optimizer:
    return optim.Adagrad(trained_parameters(network), weight_decay=training.weight_decay)


def _rmsprop(network: nn.Module, training: recipe.TrainingConfig) -> optim.Optimizer:
    return optim.RMSprop(trained_parameters(network), weight_decay=training.weight_decay)


_ADAM_OPTIONS = ("training.betas", "training.epsilon")

OPTIMIZERS.register(
    "adam",
    summary="Adam with bias correction",
    options=_ADAM_OPTIONS,
    packed_batches=True,
    sharding=True,
)(partial(_adam, optim.Adam))
OPTIMIZERS.register(
    "adamw",
    summary="Adam with decoupled weight decay",
    options=_ADAM_OPTIONS,
    packed_batches=True,
    sharding=True,
)(partial(_adam, optim.AdamW))
OPTIMIZERS.register(
    "muon",
    summary="Muon for the weight matrices of the layers, AdamW for all other weights",
    options=_ADAM_OPTIONS,
    packed_batches=True,
)(_muon)
OPTIMIZERS.register("sgd", summary="stochastic gradient descent", sharding=True)(partial(_sgd, 0.0))
OPTIMIZERS.register("momentum", summary="SGD with momentum 0.9", sharding=True)(partial(_sgd, 0.9))
OPTIMIZERS.register("adagrad", summary="AdaGrad", sharding=True)(_adagrad)
OPTIMIZERS.register("rmsprop", summary="RMSProp", sharding=True)(_rmsprop)


def set_learning_rate(optimizer: optim.Optimizer, rate: float | Tensor) -> None:
    """Set the learning rate of all parameters; in place where it is a tensor, which a CUDA graph may read."""
    for settings in optimizer.param_groups:
        if isinstance(settings["lr"], Tensor):
            settings["lr"].copy_(rate) if isinstance(rate, Tensor) else settings["lr"].fill_(rate)
        else:
            settings["lr"] = rate


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
