"""Weights by name, out of a network and into it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from regard.errors import RegardError


def named_weights(network: torch.nn.Module) -> dict[str, Tensor]:
    """Every weight and statistic once, by name: tied ones under the first of their names."""
    return {name: tensor.detach() for name, tensor in _named(network).items()}


@torch.no_grad()
def copy_weights(network: torch.nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Copy weights into the network; each name and shape must fit."""
    for name, tensor in _fitting(network, weights, where).items():
        tensor.copy_(weights[name])


@torch.no_grad()
def assign_weights(network: torch.nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """The same without a copy: what stands in a file stays there until it is looked at, and memory can let go of it.

    A network that was prepared for search is hardly looked at itself.
    """
    for name, tensor in _fitting(network, weights, where).items():
        tensor.data = weights[name].to(tensor.dtype)


def _named(network: torch.nn.Module) -> dict[str, Tensor]:
    named = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    kept = network.state_dict().keys()  # leaves out what can be computed, such as sinusoids
    return {name: tensor for name, tensor in named.items() if name in kept}


def _fitting(
    network: torch.nn.Module, weights: Mapping[str, Tensor], where: str
) -> dict[str, Tensor]:
    """The network's own, after checking that the weights are of the same names and shapes."""
    own = _named(network)
    missing, extra = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [
        f"{name} is {list(weights[name].shape)}, not {list(own[name].shape)}"
        for name in own.keys() & weights.keys()
        if weights[name].shape != own[name].shape
    ]
    if missing or extra or shapes:
        problems = (
            [f"no {name}" for name in missing] + [f"unknown {name}" for name in extra] + shapes
        )
        raise RegardError(f"{where}: not the weights of this recipe: {'; '.join(problems[:4])}")
    return own
