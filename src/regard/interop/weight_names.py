"""Which weight of ours is which of theirs, and which of its axes are features of the model's width.

The axes matter where the other side has its features in another order. Marian lays the waves of the positions out as
sin … sin cos … cos, the paper and we as sin cos sin cos …. Positions are added to embeddings, so the order of the waves
is the order of the features, and a network is the same function if *every* weight that reads or writes features of
the width is reordered: embeddings, norms, the inputs of W^Q, W^K, W^V and W1, the outputs of W^O and W2, the
projection. Features inside a head, and inside the feed-forward network, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.errors import RegardError
from regard.recipe import Model


class Part(NamedTuple):
    """A linear map or a norm inside a layer."""

    ours: str
    theirs: str
    reads: bool
    """its inputs are features of the width"""
    writes: bool
    """its outputs are"""


class Weight(NamedTuple):
    ours: str
    theirs: str
    axes: tuple[int, ...]
    """those that are features of the width"""


def attention(ours: str, theirs: str) -> list[Part]:
    reading = [
        Part(f"{ours}.{name}", f"{theirs}.{name[0]}_proj", reads=True, writes=False)
        for name in ("query", "key", "value")
    ]
    return [*reading, Part(f"{ours}.output", f"{theirs}.out_proj", reads=False, writes=True)]


def norm(ours: str, theirs: str) -> Part:
    return Part(f"{ours}_residual.norm", theirs, reads=False, writes=True)


class Names(NamedTuple):
    """How another library calls the parts of a layer."""

    stem: str
    own: str
    own_norm: str
    memory: str
    memory_norm: str
    inner: str
    outer: str
    encoder_last: str
    decoder_last: str
    """the norm of the feed-forward network"""

    def parts(self, side: str) -> list[Part]:
        parts = [*attention("attention", self.own), norm("attention", self.own_norm)]
        if side == "decoder":
            parts += attention("cross_attention", self.memory)
            parts.append(norm("memory", self.memory_norm))
        last = self.encoder_last if side == "encoder" else self.decoder_last
        return [
            *parts,
            Part("feed_forward.inner", self.inner, reads=True, writes=False),
            Part("feed_forward.outer", self.outer, reads=False, writes=True),
            norm("d_ff", last),
        ]

    def weights(self, section: Model) -> Iterator[Weight]:
        """Every weight of every layer."""
        counts = {"encoder": section.encoder_layers, "decoder": section.decoder_layers}
        for side, count in counts.items():
            for layer in range(count):
                ours, theirs = f"{side}.layers.{layer}", f"{self.stem}{side}.layers.{layer}"
                for part in self.parts(side):
                    yield from _of(part, f"{ours}.{part.ours}", f"{theirs}.{part.theirs}")
            if section.final_norm:
                last = Part("norm", "norm", reads=False, writes=True)
                yield from _of(last, f"{side}.norm", f"{self.stem}{side}.norm")


def _of(part: Part, ours: str, theirs: str) -> Iterator[Weight]:
    is_norm = part.ours.endswith("norm")
    inputs = (1,) if part.reads and not is_norm else ()
    outputs = (0,) if part.writes else ()
    yield Weight(f"{ours}.weight", f"{theirs}.weight", (*outputs, *inputs))
    yield Weight(f"{ours}.bias", f"{theirs}.bias", outputs)


MARIAN = Names(
    stem="model.",
    own="self_attn",
    own_norm="self_attn_layer_norm",
    memory="encoder_attn",
    memory_norm="encoder_attn_layer_norm",
    inner="fc1",
    outer="fc2",
    encoder_last="final_layer_norm",
    decoder_last="final_layer_norm",
)
TORCH = Names(
    stem="transformer.",
    own="self_attn",
    own_norm="norm1",
    memory="multihead_attn",
    memory_norm="norm2",
    inner="linear1",
    outer="linear2",
    encoder_last="norm2",
    decoder_last="norm3",
)


def interleaved(width: int) -> Int[Tensor, " d"]:
    """Where each of our features stands among Marian's: sin_0 cos_0 sin_1 … in sin_0 sin_1 … cos_0 cos_1 …"""
    return torch.arange(width).view(2, width // 2).T.flatten()


def reordered(x: Tensor, axes: tuple[int, ...], order: Int[Tensor, " d"]) -> Tensor:
    for axis in axes:
        x = x.index_select(axis, order)
    return x


@torch.no_grad()
def fill(network: nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Copy weights into the network under any of their names; none may be missing or left over."""
    own = network.state_dict()
    for name, tensor in own.items():
        if name not in weights:
            raise RegardError(f"{where}: has no {name}")
        if tensor.shape != weights[name].shape:
            found, wanted = list(weights[name].shape), list(tensor.shape)
            raise RegardError(f"{where}: {name} is {found}, not {wanted}")
        tensor.copy_(weights[name])
    if extra := sorted(weights.keys() - own.keys()):
        raise RegardError(f"{where}: has {extra[0]}, for which this model has no place")
