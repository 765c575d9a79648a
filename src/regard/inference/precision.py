"""Precision (fp32, bf16, int8) and mixed precision: what this machine supports, what to use, and what can be packed."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial

import torch

from regard import recipe
from regard.errors import RegardError
from regard.inference.packed_transformer import PackedTransformer, PackFormat
from regard.inference.quantization import (
    BF16Linear,
    FloatEmbedding,
    FP32Linear,
    Int8Embedding,
    Int8Linear,
    UnpackedLinear,
    calibrate_int8,
)
from regard.nn.torch_internals import has_avx512_bf16, has_onednn_bf16
from regard.nn.transformer import Transformer
from regard.recipe import Precision

BF16 = torch.bfloat16
UNPACKED: dict[Precision, PackFormat] = {
    "fp32": PackFormat(UnpackedLinear, FloatEmbedding),
    "bf16": PackFormat(
        partial(UnpackedLinear, dtype=BF16), partial(FloatEmbedding, dtype=BF16), BF16, BF16
    ),
}
"""on a GPU, or if torch was built without oneDNN"""
PACKED: dict[Precision, PackFormat] = {
    "fp32": PackFormat(FP32Linear, FloatEmbedding),
    "bf16": PackFormat(BF16Linear, partial(FloatEmbedding, dtype=BF16), BF16),
    "int8": PackFormat(Int8Linear, Int8Embedding, BF16, unbounded_linear=FP32Linear),
}
"""on a CPU"""


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Mixed precision: the context in which matrix products run in this precision.

    Weights and sums stay in float32.
    """
    if is_bf16(precision, device):
        # Threads that compute at the same time must not share the converted weights (``ThreadedTrainStep``).
        return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=device.type != "cpu")
    return nullcontext()


def is_bf16(precision: Precision, device: torch.device) -> bool:
    """Whether matrix products run in bfloat16."""
    return (default_precision(device) if precision == "auto" else precision) == "bf16"


def default_precision(device: torch.device) -> Precision:
    """What ``auto`` means for an unpacked network."""
    return "bf16" if _has_bf16_gpu(device) else "fp32"


def _has_bf16_gpu(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_bf16_supported()


def formats(device: torch.device) -> dict[Precision, PackFormat]:
    """The precisions that this machine supports, and how each packs weights."""
    if device.type != "cpu":
        return UNPACKED if _has_bf16_gpu(device) else {"fp32": UNPACKED["fp32"]}
    supported = dict(PACKED)
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        supported |= {"fp32": UNPACKED["fp32"], "bf16": UNPACKED["bf16"]}
        supported["int8"] = supported["int8"]._replace(unbounded_linear=UnpackedLinear)
    elif not has_onednn_bf16():
        del supported["bf16"]
    if not has_avx512_bf16():
        supported["int8"] = supported["int8"]._replace(kv_dtype=torch.float32)
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        del supported["int8"]
    return supported


def select_precision(precision: Precision, device: torch.device) -> Precision:
    """The requested precision, if this machine supports it; ``auto`` is the fastest one it supports."""
    supported = formats(device)
    if precision == "auto":
        fastest_first: tuple[Precision, ...] = ("int8", "bf16", "fp32")
        return next(candidate for candidate in fastest_first if candidate in supported)
    if precision not in supported:
        raise RegardError(
            f"precision {precision}: not supported by this machine's {device.type}; "
            f"use {', '.join(supported)} or auto"
        )
    return precision


@torch.no_grad()
def pack_network(network: Transformer, precision: Precision) -> PackedTransformer:
    """A packed copy of a network with its current weights. precision: a result of ``select_precision``."""
    packed = PackedTransformer(network, formats(network.projection.weight.device)[precision])
    calibrate_int8(packed, network)
    _release_memory()
    return packed


def _release_memory() -> None:
    """Return the memory that packing used to the system. glibc would keep it: more than int8 weights take."""
    with suppress(OSError, AttributeError, TypeError):  # other systems and C libraries
        ctypes.CDLL(None).malloc_trim(0)


def unsupported_reason(model: recipe.ModelConfig) -> str | None:
    """The first choice of a recipe that packed inference does not support; None if it supports all."""
    for key, choice in recipe.model_choices(model):
        if not choice.fast_inference:
            return f"{key}: {choice.name}"
    if model.attention.key_value_heads not in (None, model.heads):
        return "model.attention.key_value_heads"
    return "model.d_k differs from model.d_v" if model.d_k != model.d_v else None
