"""Weights by name: read them from a network, or load them into it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from regard.errors import RegardError


def named_weights(network: torch.nn.Module) -> dict[str, Tensor]:
    """Every parameter and saved buffer by name. Tied weights appear once, under the first of their names."""
    return {name: tensor.detach() for name, tensor in _named_tensors(network).items()}


@torch.no_grad()
def copy_weights(network: torch.nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Copy weights into a network. All names and shapes must match. where: their origin, for error messages."""
    for name, tensor in _matching(network, weights, where).items():
        tensor.copy_(weights[name])


@torch.no_grad()
def assign_weights(network: torch.nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Let a network use these tensors without copying them.

    A tensor of a memory-mapped file is then loaded only when it is first read, and the system can release it again.
    Once a network is packed for inference, its own weights are rarely read.
    """
    for name, tensor in _matching(network, weights, where).items():
        tensor.data = weights[name].to(tensor.dtype)


def _named_tensors(network: torch.nn.Module) -> dict[str, Tensor]:
    named = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    saved = network.state_dict().keys()  # without buffers that are not persistent
    return {name: tensor for name, tensor in named.items() if name in saved}


def _matching(
    network: torch.nn.Module, weights: Mapping[str, Tensor], where: str
) -> dict[str, Tensor]:
    """The tensors of the network, after checking that the weights have the same names and shapes."""
    own = _named_tensors(network)
    missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [
        f"{name} has shape {list(weights[name].shape)}, expected {list(own[name].shape)}"
        for name in own.keys() & weights.keys()
        if weights[name].shape != own[name].shape
    ]
    if missing or unknown or shapes:
        problems = [f"{name} is missing" for name in missing]
        problems += [f"{name} is unknown" for name in unknown] + shapes
        raise RegardError(
            f"{where}: the weights do not match the recipe: {'; '.join(problems[:4])}"
        )
    return own
