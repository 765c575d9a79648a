"""Muon: the momentum of every weight matrix is orthogonalized before it is added (Jordan et al. 2024).

A few directions dominate the gradient of a weight matrix. Muon makes all directions of an update equally large: it
replaces the momentum U S Vᵀ (its singular value decomposition) by U Vᵀ, which a Newton-Schulz iteration approximates
with matrix products.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn, optim

from regard.nn.torch_internals import foreach_lerp_

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
