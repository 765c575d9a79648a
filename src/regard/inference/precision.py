"""Which number format, and what can be prepared at all."""

from __future__ import annotations

import ctypes
import os
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial

import torch

from regard import recipe
from regard.errors import RegardError
from regard.inference.packed_transformer import Format, PackedTransformer
from regard.inference.quantization import (
    BF16Linear,
    FP32Linear,
    Int8Embedding,
    Int8Linear,
    Rows,
    UnpackedLinear,
    settle,
)
from regard.nn.transformer import Transformer
from regard.recipe import Device, Precision

# oneDNN makes a kernel for each shape, and a thousand of them are kept, twice: 0.8 GB, however small the model.
# Sentences that end one by one bring new shapes at every step; those that come again do so soon. It is read when the
# first is made.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")

HALF = torch.bfloat16
UNPACKED: dict[Precision, Format] = {
    "fp32": Format(UnpackedLinear, Rows),
    "bf16": Format(partial(UnpackedLinear, dtype=HALF), partial(Rows, dtype=HALF), HALF, HALF),
}
"""on a GPU, or where torch was built without oneDNN"""
PACKED: dict[Precision, Format] = {
    "fp32": Format(FP32Linear, Rows),
    "bf16": Format(BF16Linear, partial(Rows, dtype=HALF), HALF),
    "int8": Format(Int8Linear, Int8Embedding, HALF),
}
"""on a CPU"""


def choose_device(device: Device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise RegardError("device cuda: torch sees no GPU here; use device cpu or auto")
    return torch.device(device)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The number format matrix products run in; weights and sums stay in float32."""
    if (default_precision(device) if precision == "auto" else precision) == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def default_precision(device: torch.device) -> Precision:
    """What auto means in the ordinary way."""
    half = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return "bf16" if half else "fp32"


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


def select_precision(precision: Precision, device: torch.device) -> Precision:
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
def pack_network(network: Transformer, precision: Precision) -> PackedTransformer:
    """The network as it is now, ready for search. ``precision`` is one that ``select_precision`` gave."""
    fast = PackedTransformer(network, formats(network.projection.weight.device)[precision])
    settle(fast, network)
    _let_go()
    return fast


def _let_go() -> None:
    """What packing needed goes back to the system; glibc would keep it, more than the weights of int8 take."""
    with suppress(OSError, AttributeError, TypeError):  # another system, another library
        ctypes.CDLL(None).malloc_trim(0)


def unsupported_reason(model: recipe.Model) -> str | None:
    """The choice of a recipe that packed inference does not support; None if there is none."""
    for key, choice in recipe.model_choices(model):
        if not choice.fused:
            return f"{key}: {choice.name}"
    if model.attention.key_value_heads not in (None, model.heads):
        return "model.attention.key_value_heads"
    return "model.d_k differs from model.d_v" if model.d_k != model.d_v else None
