"""Optimizers, Muon among them, and learning rate schedules with warmup (section 5.3 of the Transformer paper).

Both are chosen by name in the recipe: ``training.optimizer`` and ``training.schedule``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn, optim

from regard import recipe
from regard.inference.precision import is_bf16
from regard.nn.torch_internals import foreach_lerp_
from regard.recipe import Registry

OptimizerBuilder = Callable[[nn.Module, recipe.TrainingConfig], optim.Optimizer]
"""An optimizer for all weights of a network that are not frozen."""
OPTIMIZERS: Registry[OptimizerBuilder] = Registry("training.optimizer")


def trained_parameters(network: nn.Module) -> list[nn.Parameter]:
    """The weights that are not frozen."""
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def _adam(
    kind: type[optim.Adam], network: nn.Module, training: recipe.TrainingConfig
) -> optim.Optimizer:
    parameters = trained_parameters(network)
    return _adam_for(kind, parameters, training, parameters[0].device)


def _adam_for(
    kind: type[optim.Adam],
    parameters: list[nn.Parameter],
    training: recipe.TrainingConfig,
    device: torch.device,
) -> optim.Optimizer:
    """Adam for parameters on this device; there may be none, if Muon has all weights that are not frozen."""
    gpu = device.type == "cuda"
    # fused: one kernel for all weights, with the same results. On a GPU the learning rate is a tensor on the device,
    # so that a CUDA graph reads its current value.
    return kind(
        [{"params": parameters}],
        lr=torch.tensor(training.learning_rate, device=device) if gpu else training.learning_rate,
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
    device = parameters[0].device
    return Muon(
        matrices,
        _adam_for(optim.AdamW, others, training, device),
        training.weight_decay,
        torch.bfloat16 if is_bf16(training.precision, device) else torch.float32,
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


# ---------------------------------------------------------------------------------------------
# Muon: the momentum of every weight matrix is orthogonalized before it is added (Jordan et al. 2024)
#
# A few directions dominate the gradient of a weight matrix. Muon makes all directions of an update equally large: it
# replaces the momentum U S Vᵀ (its singular value decomposition) by U Vᵀ, which a Newton-Schulz iteration approximates
# with matrix products.

MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Each iteration applies a s + b s³ + c s⁵ to the singular values s (Jordan et al. 2024)."""
UPDATE_RMS = 0.2
"""The root mean square of an update is the learning rate times this, about as with Adam, so that both optimizers use
similar learning rates (Liu et al. 2025, arXiv 2502.16982)."""


class Muon(optim.Optimizer):
    """Muon for weight matrices, and another optimizer for embeddings, norms and biases.

    matrices: the weights that are updated by Muon; those of the same shape are processed together.
    others: the optimizer of all other weights. Both have the same learning rate.
    weight_decay: decoupled, as in AdamW.
    dtype: the format of the matrix products that orthogonalize the updates.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: optim.Optimizer,
        weight_decay: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__([{"params": matrices}], {"lr": others.param_groups[0]["lr"]})
        self.others, self.weight_decay, self.dtype = others, weight_decay, dtype
        # One list of parameter groups and one state: for learning rates and checkpoints this is one optimizer.
        self.param_groups += others.param_groups
        others.state = self.state
        self.by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            self.by_shape[matrix.shape].append(matrix)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have gradients."""
        self.others.step()
        rate = self.param_groups[0]["lr"]
        for shape, matrices in self.by_shape.items():
            trained = [matrix for matrix in matrices if matrix.grad is not None]
            if trained:
                scale = UPDATE_RMS * math.sqrt(max(shape))
                for matrix, update in zip(trained, self._updates(trained).unbind(), strict=True):
                    if self.weight_decay:
                        matrix.mul_(1 - rate * self.weight_decay)
                    matrix.sub_(update * (rate * scale))

    def _updates(self, matrices: Sequence[nn.Parameter]) -> Float[Tensor, "N rows columns"]:
        """The orthogonalized updates of matrices of the same shape, with Nesterov momentum."""
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        momenta = [self._momentum(matrix) for matrix in matrices]
        foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        nesterov = torch.lerp(torch.stack(gradients), torch.stack(momenta), MOMENTUM)
        return orthogonalize(nesterov, self.dtype)

    def _momentum(self, matrix: nn.Parameter) -> Tensor:
        state = self.state[matrix]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(matrix)
        momentum: Tensor = state["momentum"]
        return momentum


def orthogonalize(
    matrices: Float[Tensor, "N rows columns"], dtype: torch.dtype
) -> Float[Tensor, "N rows columns"]:
    """Each matrix U S Vᵀ becomes U S' Vᵀ, whose singular values S' are between about 0.7 and 1.2.

    dtype: the format to compute in.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).to(dtype)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


# ---------------------------------------------------------------------------------------------
# Learning rate schedules

SCHEDULES: Registry[Callable[[int, recipe.TrainingConfig, int], float]] = Registry(
    "training.schedule"
)


def learning_rate(step: int, training: recipe.TrainingConfig, d_model: int) -> float:
    """The learning rate of a step; steps are numbered from 1."""
    return SCHEDULES[training.schedule](step, training, d_model)


def warmup_factor(step: int, warmup: int) -> float:
    """Learning rate warmup: the share of the peak, which rises linearly to 1."""
    return min(1.0, step / warmup) if warmup else 1.0


@SCHEDULES.register("noam", options=["training.warmup"])
def noam(step: int, training: recipe.TrainingConfig, d_model: int) -> float:
    """d_model^-0.5 min(step^-0.5, step warmup^-1.5): linear warmup, then decay with the inverse square root.

    ``inverse_sqrt`` of fairseq is the same curve; there the learning rate is that of its peak.
    """
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
