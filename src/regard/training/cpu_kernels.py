"""Native kernels for training on a CPU with packed rows: dropout, attention and cross-entropy.

Small models spend half of a step on a CPU outside of matrix products: random numbers for dropout, attention over
padding, several passes over the logits. These kernels (``inference/native/training.cpp``) do each in one pass. Dropout
masks are hashes of a seed, which the step's random state gives, so a resumed run gets the same ones. The matrix
products stay in torch, in float32 or bfloat16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.data.special_tokens import PAD
from regard.inference.native_library import native_library
from regard.nn.attention import Attention, repeat_kv
from regard.nn.attention_mask import AttentionSpans
from regard.nn.dropout import Dropout, thread_random
from regard.nn.loss import TrainingLoss, chunk_loss
from regard.nn.torch_internals import has_avx512_bf16, has_onednn_bf16

CPU_ROW_TOKENS = 4_096
"""The largest packed row; larger batches are several rows, whose gradients are summed."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def has_cpu_kernels() -> bool:
    """Whether this machine can train with the native kernels."""
    return native_library().functions is not None


def fastest_cpu_precision() -> Literal["bf16", "fp32"]:
    """The precision in which this CPU trains fastest: bf16 if it has instructions for it (AVX-512 BF16, AMX)."""
    return "bf16" if has_avx512_bf16() and has_onednn_bf16() else "fp32"


def fastest_batches(
    device: torch.device,
) -> tuple[Literal["padded", "packed"], Literal["auto", "fp32", "bf16"]]:
    """The values of ``training.batching`` and ``training.precision`` with which a Transformer trains fastest."""
    if device.type == "cuda":
        return "packed", "auto"
    return ("packed" if has_cpu_kernels() else "padded"), fastest_cpu_precision()


def attach_cpu_kernels(loss_fn: TrainingLoss) -> None:
    """Let a network, its loss and its teacher use the native kernels. The native library must be there."""
    networks: list[nn.Module] = [loss_fn.network, *loss_fn.teachers]
    for part in (part for network in networks for part in network.modules()):
        if isinstance(part, Dropout):
            part.kernel = dropout
        elif isinstance(part, Attention):
            part.packed_kernel = packed_attention
    loss_fn.chunk_loss = native_chunk_loss


def _functions() -> ctypes.CDLL:
    functions = native_library().functions
    assert functions is not None
    return functions


def _random_seed() -> int:
    """32 random bits from the generator of this thread, or torch's; both are seeded for each step."""
    return int(torch.randint(2**32, (), generator=thread_random.generator).item())


# ---------------------------------------------------------------------------------------------
# Dropout


def dropout(x: Float[Tensor, "*shape"], p: float) -> Float[Tensor, "*shape"]:
    """Zero each value with probability p, and divide the others by 1 - p."""
    y: Tensor = _Dropout.apply(x, p, _random_seed())  # type: ignore[no-untyped-call]
    return y


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, p: float, seed: int) -> Tensor:
        context.p, context.seed = p, seed
        return _drop(x, p, seed)

    @staticmethod
    def backward(context: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _drop(grad_outputs[0], context.p, context.seed), None, None


def _drop(x: Tensor, p: float, seed: int) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    threads = torch.get_num_threads()
    _functions().regard_dropout(
        x.data_ptr(), y.data_ptr(), x.numel(), DTYPES[x.dtype], seed, p, threads
    )
    return y


# ---------------------------------------------------------------------------------------------
# Attention


class AttentionSpec(ctypes.Structure):
    """The arguments of the attention kernels; ``training.cpp`` has the same structure."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value")),
        *((f"{name}_stride", c_int64) for name in ("query", "key", "value")),
        *((f"{name}_head", c_int64) for name in ("query", "key", "value")),
        *((name, c_void_p) for name in ("key_start", "key_end", "log_sums", "output")),
        *((name, c_void_p) for name in ("grad_output", "grad_query", "grad_key", "grad_value")),
        *((name, c_int32) for name in ("queries", "keys", "heads", "key_features")),
        *((name, c_int32) for name in ("value_features", "bfloat16")),
        *(("scale", c_float), ("dropout", c_float), ("seed", c_uint32)),
    )


def packed_attention(
    query: Float[Tensor, "B h Q dk"],
    key: Float[Tensor, "B g K dk"],
    value: Float[Tensor, "B g K dv"],
    spans: AttentionSpans,
    scale: float,
    dropout_p: float,
) -> Float[Tensor, "B h Q dv"]:
    """Attention in packed rows: each text attends to itself, or to the source text of its pair."""
    key, value = repeat_kv(query, key), repeat_kv(query, value)
    seed = _random_seed() if dropout_p else 0
    output: Tensor = _PackedAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, spans.key_start, spans.key_end, scale, dropout_p, seed
    )
    return output


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        query: Float[Tensor, "B h Q dk"],
        key: Float[Tensor, "B h K dk"],
        value: Float[Tensor, "B h K dv"],
        key_start: Int[Tensor, "B Q"],
        key_end: Int[Tensor, "B Q"],
        scale: float,
        dropout_p: float,
        seed: int,
    ) -> Float[Tensor, "B h Q dv"]:
        query, key, value = (_features_last(one) for one in (query, key, value))
        key_start, key_end = key_start.contiguous(), key_end.contiguous()
        rows, heads, queries, _ = query.shape
        log_sums = torch.empty(rows, heads, queries)
        output = query.new_zeros(rows, queries, heads, value.shape[3])  # zero at padding
        tensors = query, key, value, key_start, key_end, log_sums
        for row in range(rows):
            spec = _attention_spec(tensors, row, scale, dropout_p, seed)
            spec.output = output[row].data_ptr()
            _functions().regard_attention(ctypes.byref(spec), torch.get_num_threads())
        context.save_for_backward(*tensors)
        context.options = scale, dropout_p, seed
        return output.transpose(1, 2)

    @staticmethod
    def backward(context: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        tensors = context.saved_tensors
        grad_output = grad_outputs[0].transpose(1, 2).contiguous()
        # Zero at padding.
        grads = [torch.zeros(one.transpose(1, 2).shape, dtype=one.dtype) for one in tensors[:3]]
        for row in range(len(grad_output)):
            spec = _attention_spec(tensors, row, *context.options)
            spec.grad_output = grad_output[row].data_ptr()
            spec.grad_query, spec.grad_key, spec.grad_value = (one[row].data_ptr() for one in grads)
            _functions().regard_attention_backward(ctypes.byref(spec), torch.get_num_threads())
        return *(grad.transpose(1, 2) for grad in grads), *[None] * 5


def _features_last(x: Float[Tensor, "B h T d"]) -> Float[Tensor, "B h T d"]:
    """The same values, with the features of a head side by side in memory."""
    return x if x.stride(3) == 1 else x.contiguous()


def _attention_spec(
    tensors: Sequence[Tensor], row: int, scale: float, dropout_p: float, seed: int
) -> AttentionSpec:
    """The arguments for one packed row; the dropout masks of rows differ.

    tensors: query, key, value, key_start, key_end and log_sums, of all rows.
    """
    query, key, value, key_start, key_end, log_sums = (one[row] for one in tensors)
    spec = AttentionSpec()
    for name, one in (("query", query), ("key", key), ("value", value)):
        setattr(spec, name, one.data_ptr())
        setattr(spec, f"{name}_head", one.stride(0))
        setattr(spec, f"{name}_stride", one.stride(1))
    spec.key_start, spec.key_end = key_start.data_ptr(), key_end.data_ptr()
    spec.log_sums = log_sums.data_ptr()
    spec.heads, spec.queries, spec.key_features = query.shape
    spec.keys, spec.value_features = value.shape[1:]
    spec.bfloat16 = DTYPES[query.dtype]
    spec.scale, spec.dropout, spec.seed = scale, dropout_p, (seed + 0x85EBCA6B * row) % 2**32
    return spec


# ---------------------------------------------------------------------------------------------
# Cross-entropy


def native_chunk_loss(
    logits: Float[Tensor, "m V"],
    labels: Int[Tensor, n],
    epsilon: float,
    rdrop: float,
    simcut: float,
    with_gradient: bool,
    *soft: Any,
) -> tuple[Float[Tensor, ""], Float[Tensor, "m V"]]:
    """As ``nn.loss.chunk_loss``. The gradient overwrites the logits. SimCut and soft targets stay in torch."""
    if simcut or soft or logits.dtype not in DTYPES:
        return chunk_loss(logits, labels, epsilon, rdrop, simcut, with_gradient, *soft)
    assert logits.is_contiguous()
    assert labels.is_contiguous()
    losses = torch.empty(len(labels))
    _functions().regard_cross_entropy(
        *(logits.data_ptr(), DTYPES[logits.dtype], len(labels), logits.shape[1], labels.data_ptr()),
        *(PAD, epsilon, rdrop, len(logits) > len(labels), with_gradient),
        *(losses.data_ptr(), torch.get_num_threads()),
    )
    return losses.sum(), logits
