"""The interface of sequence-to-sequence networks, which training, decoding and inspection use; its weights by name."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from regard.data.special_tokens import BOS
from regard.errors import RegardError
from regard.nn.layers import Embedding
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.positions import PositionInfo
from regard.nn.torch_internals import persistent_buffers


class Network(nn.Module, ABC):
    """Source ids are encoded; target ids and the encoder output are decoded to logits.

    Training decodes all positions at once, with teacher forcing. Search decodes token by token with ``start`` and
    ``step``. Encoder output and decoder state are opaque to callers, except that a state has ``select(rows)``, which
    keeps the given rows.
    """

    projection: Embedding
    """the output projection, from states to logits"""

    @property
    @abstractmethod
    def max_length(self) -> int | None:
        """The longest sequence it supports, special tokens included; None if there is no limit."""

    def forward(
        self,
        source: Int[Tensor, "B S"],
        target: Int[Tensor, "B T"],
        position_info: PositionInfo = None,
    ) -> Float[Tensor, "B T V"]:
        """Teacher forcing: the logits of the next token after each target token."""
        return self.project(self.decode(target, self.encode(source, position_info)))

    def project(self, states: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows V"]:
        """The logits of decoder states."""
        return F.linear(states, self.projection.weight, self.projection.bias)

    @abstractmethod
    def encode(self, source: Int[Tensor, "B S"], position_info: PositionInfo = None) -> Any:
        """The encoder output. Each row ends with EOS and is padded."""

    @abstractmethod
    def decode(self, target: Int[Tensor, "B T"], encoder_output: Any) -> Float[Tensor, "B T d"]:
        """The decoder state after each target token. Each row begins with BOS."""

    @abstractmethod
    def start(self, encoder_output: Any) -> Any:
        """The decoder state before the first token."""

    @abstractmethod
    def step(self, tokens: Int[Tensor, "R"], state: Any) -> tuple[Float[Tensor, "R V"], Any]:
        """Feed one more token of each row; returns the logits of the next token, and the new state."""

    def decoder_input(self, output: Sequence[int]) -> list[int]:
        """The tokens the decoder reads when it generates these tokens: BOS and all but the last of them."""
        return [BOS, *output[:-1]]

    @abstractmethod
    def attentions(self) -> dict[str, list[MultiHeadAttention]]:
        """The attention modules of all layers, by site: encoder, decoder, cross_attention."""


def checkpoint_activations(network: nn.Module) -> None:
    """Activation checkpointing (gradient checkpointing, Chen et al. 2016): store only the input of each layer.

    All other activations are recomputed in the backward pass.
    """
    for name, layers in network.named_modules():
        if name.endswith("layers") and isinstance(layers, nn.ModuleList):
            for layer in layers:
                # The random state is restored, so that dropout draws the same masks again.
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


# ---------------------------------------------------------------------------------------------
# Weights by name: read them from a network, or load them into it (state dict)


def named_weights(network: torch.nn.Module) -> dict[str, Tensor]:
    """Every parameter and saved buffer by name. Tied weights appear once, under the first of their names."""
    return {name: tensor.detach() for name, tensor in _named_tensors(network).items()}


@torch.no_grad()
def copy_weights(network: torch.nn.Module, weights: Mapping[str, Tensor], origin: str) -> None:
    """Copy weights into a network. All names and shapes must match. origin: where they are from, for error messages."""
    for name, tensor in _matching(network, weights, origin).items():
        tensor.copy_(weights[name])


@torch.no_grad()
def assign_weights(network: torch.nn.Module, weights: Mapping[str, Tensor], origin: str) -> None:
    """Let a network use these tensors without copying them.

    A tensor of a memory-mapped file is then loaded only when it is first read, and the system can release it again.
    Once a network is packed for inference, its own weights are rarely read.
    """
    for name, tensor in _matching(network, weights, origin).items():
        tensor.data = weights[name].to(tensor.dtype)


def _named_tensors(network: torch.nn.Module) -> dict[str, Tensor]:
    return {**dict(network.named_parameters()), **persistent_buffers(network)}


def _matching(
    network: torch.nn.Module, weights: Mapping[str, Tensor], origin: str
) -> dict[str, Tensor]:
    """The tensors of the network, after checking that the weights have the same names and shapes."""
    tensors = _named_tensors(network)
    missing = sorted(tensors.keys() - weights.keys())
    unknown = sorted(weights.keys() - tensors.keys())
    shapes = [
        f"{name} has shape {list(weights[name].shape)}, expected {list(tensors[name].shape)}"
        for name in tensors.keys() & weights.keys()
        if weights[name].shape != tensors[name].shape
    ]
    if missing or unknown or shapes:
        problems = [f"{name} is missing" for name in missing]
        problems += [f"{name} is unknown" for name in unknown] + shapes
        raise RegardError(
            f"{origin}: the weights do not match the recipe: {'; '.join(problems[:4])}"
        )
    return tensors
