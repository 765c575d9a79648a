"""The names of our weights in other libraries, and which of their axes are features of the residual stream (d_model).

The axes matter if the other library orders features differently. Marian's sinusoidal positions are sin … sin cos … cos;
ours are sin cos sin cos …, as in the paper. Positions are added to embeddings, so this order is the order of the
features. The network stays the same function if *every* weight that reads or writes d_model features is permuted:
embeddings, norms, the inputs of W^Q, W^K, W^V and W1, the outputs of W^O and W2, and the output projection. Features
inside a head and inside the feed-forward network keep their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.errors import RegardError
from regard.recipe import ModelConfig


class WeightName(NamedTuple):
    """One weight under both names."""

    ours: str
    theirs: str
    axes: tuple[int, ...]
    """the axes that are d_model features"""


class ModuleName(NamedTuple):
    """A linear map or a norm of a layer under both names."""

    ours: str
    theirs: str
    reads: bool
    """its inputs are d_model features"""
    writes: bool
    """its outputs are d_model features"""

    def weights(self, our_prefix: str = "", their_prefix: str = "") -> Iterator[WeightName]:
        inputs = (1,) if self.reads else ()
        outputs = (0,) if self.writes else ()
        ours, theirs = f"{our_prefix}{self.ours}", f"{their_prefix}{self.theirs}"
        yield WeightName(f"{ours}.weight", f"{theirs}.weight", (*outputs, *inputs))
        yield WeightName(f"{ours}.bias", f"{theirs}.bias", outputs)


def _attention(ours: str, theirs: str) -> list[ModuleName]:
    projections = [
        ModuleName(f"{ours}.{name}", f"{theirs}.{name[0]}_proj", reads=True, writes=False)
        for name in ("query", "key", "value")
    ]
    output = ModuleName(f"{ours}.output", f"{theirs}.out_proj", reads=False, writes=True)
    return [*projections, output]


def _norm(ours: str, theirs: str) -> ModuleName:
    return ModuleName(ours, theirs, reads=False, writes=True)


class LayerNames(NamedTuple):
    """The names of another library for the modules of a layer."""

    prefix: str
    """before the names of the stacks, encoder and decoder"""
    self_attention: str
    self_attention_norm: str
    cross_attention: str
    cross_attention_norm: str
    inner: str
    outer: str
    encoder_feed_forward_norm: str
    decoder_feed_forward_norm: str

    def modules(self, stack: str) -> list[ModuleName]:
        """The modules of a layer of the encoder or the decoder."""
        modules = _attention("attention", self.self_attention)
        modules.append(_norm("attention_residual.norm", self.self_attention_norm))
        feed_forward_norm = self.encoder_feed_forward_norm
        if stack == "decoder":
            modules += _attention("cross_attention", self.cross_attention)
            modules.append(_norm("cross_attention_residual.norm", self.cross_attention_norm))
            feed_forward_norm = self.decoder_feed_forward_norm
        return [
            *modules,
            ModuleName("feed_forward.inner", self.inner, reads=True, writes=False),
            ModuleName("feed_forward.outer", self.outer, reads=False, writes=True),
            _norm("feed_forward_residual.norm", feed_forward_norm),
        ]

    def weights(self, config: ModelConfig) -> Iterator[WeightName]:
        """Every weight of every layer, and of the final norms."""
        counts = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
        for stack, count in counts.items():
            for layer in range(count):
                ours = f"{stack}.layers.{layer}."
                for module in self.modules(stack):
                    yield from module.weights(ours, f"{self.prefix}{ours}")
            if config.final_norm:
                yield from _norm(f"{stack}.norm", f"{self.prefix}{stack}.norm").weights()


MARIAN = LayerNames(
    prefix="model.",
    self_attention="self_attn",
    self_attention_norm="self_attn_layer_norm",
    cross_attention="encoder_attn",
    cross_attention_norm="encoder_attn_layer_norm",
    inner="fc1",
    outer="fc2",
    encoder_feed_forward_norm="final_layer_norm",
    decoder_feed_forward_norm="final_layer_norm",
)
TORCH = LayerNames(
    prefix="transformer.",
    self_attention="self_attn",
    self_attention_norm="norm1",
    cross_attention="multihead_attn",
    cross_attention_norm="norm2",
    inner="linear1",
    outer="linear2",
    encoder_feed_forward_norm="norm2",
    decoder_feed_forward_norm="norm3",
)


def interleaved(d_model: int) -> Int[Tensor, " d"]:
    """The index of each of our features among Marian's: of sin_0 cos_0 sin_1 … in sin_0 sin_1 … cos_0 cos_1 …"""
    return torch.arange(d_model).view(2, d_model // 2).T.flatten()


def permute_features(x: Tensor, axes: tuple[int, ...], order: Int[Tensor, " d"]) -> Tensor:
    for axis in axes:
        x = x.index_select(axis, order)
    return x


@torch.no_grad()
def copy_state(network: nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Copy weights into a network. None may be missing or left over. where: the origin of the weights in errors."""
    state = network.state_dict()
    for name, tensor in state.items():
        if name not in weights:
            raise RegardError(f"{where}: the weight {name} is missing")
        if tensor.shape != weights[name].shape:
            found, expected = list(weights[name].shape), list(tensor.shape)
            raise RegardError(f"{where}: {name} has shape {found}, but the model needs {expected}")
        tensor.copy_(weights[name])
    if extra := sorted(weights.keys() - state.keys()):
        raise RegardError(f"{where}: the model has no weight {extra[0]}")
