"""Which number format, and what can be prepared at all."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import torch

from regard.errors import RegardError
from regard.fast.layers import Format
from regard.fast.linear import Eight, EightRows, Half, Rows, Single, Unpacked
from regard.fast.network import Fast
from regard.fast.ranges import settle
from regard.nn.heads import MultiHeadAttention
from regard.nn.network import Network
from regard.nn.patterns import Full
from regard.nn.positions import Relation, Rotary
from regard.nn.transformer import Transformer
from regard.recipe import Precision

# oneDNN makes a kernel for each shape, and a thousand of them are kept, twice: 0.8 GB, however small the model.
# Sentences that end one by one bring new shapes at every step; those that come again do so soon. It is read when the
# first is made.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")

HALF = torch.bfloat16
UNPACKED: dict[Precision, Format] = {
    "fp32": Format(Unpacked, Rows),
    "bf16": Format(partial(Unpacked, dtype=HALF), partial(Rows, dtype=HALF), HALF, HALF),
}
"""on a GPU, or where torch was built without oneDNN"""
PACKED: dict[Precision, Format] = {
    "fp32": Format(Single, Rows),
    "bf16": Format(Half, partial(Rows, dtype=HALF), HALF),
    "int8": Format(Eight, EightRows, HALF),
}
"""on a CPU"""


def formats(device: torch.device) -> dict[Precision, Format]:
    """What this machine can work in."""
    if device.type != "cpu":
        half = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return UNPACKED if half else {"fp32": UNPACKED["fp32"]}
    found = dict(PACKED)
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        found |= {"fp32": UNPACKED["fp32"], "bf16": UNPACKED["bf16"]}
    elif not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        del found["bf16"]
    if not torch.cpu._is_avx512_bf16_supported():
        found["int8"] = found["int8"]._replace(keys=torch.float32)
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        del found["int8"]
    return found


def pick(precision: Precision, device: torch.device) -> Precision:
    """The number format asked for, if this machine has it; auto is the fastest it has."""
    there = formats(device)
    if precision == "auto":
        order: tuple[Precision, ...] = ("int8", "bf16", "fp32")
        return next(one for one in order if one in there)
    if precision not in there:
        raise RegardError(
            f"precision {precision}: not on this machine's {device.type}; it has {', '.join(there)}"
        )
    return precision


@torch.no_grad()
def prepare(network: Transformer, precision: Precision) -> Fast:
    """The network as it is now, ready for search. ``precision`` is one that ``pick`` gave."""
    fast = Fast(network, formats(network.projection.weight.device)[precision])
    settle(fast, network)
    _let_go()
    return fast


def _let_go() -> None:
    """What packing needed goes back to the system; glibc would keep it, more than the weights of int8 take."""
    with suppress(OSError, AttributeError, TypeError):  # another system, another library
        ctypes.CDLL(None).malloc_trim(0)


def unfit(network: Network) -> str | None:
    """What keeps a network from being prepared; None: nothing."""
    if type(network) is not Transformer:
        return f"architecture {type(network).__name__.lower()}"
    parts = [part for some in network.attentions().values() for part in some]
    return next((why for part in parts for why in _unfit(part)), None)


def _unfit(part: MultiHeadAttention) -> Iterator[str]:
    if type(part.pattern) is not Full:
        yield f"attention pattern {type(part.pattern).__name__.lower()}"
    if type(part.relation) not in (Relation, Rotary):
        yield f"{type(part.relation).__name__.lower()} positions"
    if not part.attention.fused:
        yield "its way to score or weight"
    if part.groups != part.heads:
        yield "key_value_heads"
    if part.key.out_features != part.value.out_features:
        yield "key_width that is not value_width"
