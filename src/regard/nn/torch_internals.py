"""Private torch functions, each behind a documented function with a public fallback.

No other file of the package uses private torch API. The private functions are faster; the fallbacks give the same
results up to rounding, and are used when a torch version lacks the private ones. The functions here return bound
kernels, so that calling them in an inner loop adds nothing.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.nn import functional as F

Weight = Float[Tensor, "m n"]
Bias = Float[Tensor, " m"] | None


def _find(path: str) -> Any:
    """The object at this path inside torch, such as ``_C.DisableTorchFunctionSubclass``; None if it is missing."""
    try:
        return operator.attrgetter(path)(torch)
    except (AttributeError, RuntimeError):
        return None


def _without_python(packet: Any) -> Callable[..., Tensor]:
    """The C++ function of an operator. Calling it through torch's Python layer takes as long as a small product."""
    function: Callable[..., Tensor] = getattr(packet.default, "_op", packet.default)
    return function


# ---------------------------------------------------------------------------------------------
# What the CPU supports


def has_vnni() -> bool:
    """Whether the CPU adds products of 8-bit integers in 32 bits. Without it they are added in 16 bits."""
    return _probe("cpu._is_vnni_supported")


def has_avx512_bf16() -> bool:
    """Whether the CPU has vector instructions for bfloat16."""
    return _probe("cpu._is_avx512_bf16_supported")


def has_onednn_bf16() -> bool:
    """Whether oneDNN has bfloat16 kernels for this CPU."""
    return _probe("ops.mkldnn._is_mkldnn_bf16_supported")


def _probe(path: str) -> bool:
    function = _find(path)
    return False if function is None else bool(function())


# ---------------------------------------------------------------------------------------------
# Calling torch


def without_torch_function() -> AbstractContextManager[None]:
    """A context in which torch does not check whether arguments override its functions.

    A packed int8 weight answers this check with an exception, thrown and caught inside torch. That takes 8
    microseconds, longer than many matrix products. Fallback: the check stays.
    """
    disable = _find("_C.DisableTorchFunctionSubclass")
    context: AbstractContextManager[None] = nullcontext() if disable is None else disable()
    return context


def foreach_lerp_(
    tensors: Sequence[Tensor], targets: Sequence[Tensor], weight: float | Tensor
) -> None:
    """tensors += (targets - tensors) * weight, in place, in a few kernels for all tensors. Fallback: one by one."""
    names = ("_foreach_sub", "_foreach_mul_", "_foreach_add_")
    subtract, multiply_, add_ = (_find(name) for name in names)
    if subtract and multiply_ and add_:
        differences = subtract(targets, tensors)
        multiply_(differences, weight)
        add_(tensors, differences)
        return
    for tensor, target in zip(tensors, targets, strict=True):
        tensor.add_((target - tensor).mul_(weight))


# ---------------------------------------------------------------------------------------------
# Linear maps in float32 and bfloat16


LinearKernel = Callable[[Tensor, Tensor, Tensor | None, str, list[Any], str], Tensor]
"""Input, packed weight, bias, activation ("none" or "relu"), and two arguments of other activations: [] and ""."""


def pack_linear(weight: Weight) -> tuple[LinearKernel, Tensor]:
    """oneDNN's kernel for a linear map, and the weight in the layout that the kernel reads fastest.

    Fallback: ``torch.nn.functional.linear`` with the plain weight.
    """
    kernel = _find("ops.mkldnn._linear_pointwise")
    reorder = _find("ops.mkldnn._reorder_linear_weight")
    if kernel is None or reorder is None:
        return _plain_linear, weight
    packed: Tensor = reorder(weight)
    return _without_python(kernel), packed


def _plain_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, _: list[Any], __: str
) -> Tensor:
    y = F.linear(x, weight, bias)
    return y.relu_() if activation == "relu" else y


# ---------------------------------------------------------------------------------------------
# Linear maps in int8


@runtime_checkable
class Int8Kernels(Protocol):
    """A linear map with an int8 weight. Inputs are quantized to 8 bits (unsigned), products are summed in int32."""

    levels: int
    """the largest quantized input: 255, or 127 where sums of products of 8 bits would overflow"""

    def dynamic(self, x: Tensor) -> Tensor:
        """The output for x, quantized by its own range."""
        ...

    def static(self, scale: float, zero_point: int) -> Callable[[Tensor], Tensor]:
        """The map for inputs quantized as round(x / scale) + zero_point, clipped to the 8-bit range."""
        ...


def pack_int8_linear(
    weight: Int8[Tensor, "m n"], scale: Float[Tensor, " m"], bias: Bias, relu: bool
) -> Int8Kernels:
    """FBGEMM's kernels for a weight of int8 with one scale per output. Fallback: ``PlainInt8``."""
    kernels = [f"ops.quantized.{name}" for name in ("linear_prepack", *FBGEMM.names(relu))]
    kernel_class = PlainInt8 if any(_find(name) is None for name in kernels) else FBGEMM
    return kernel_class(weight, scale, bias, relu)


class FBGEMM:
    """torch's quantized kernels."""

    @staticmethod
    def names(relu: bool) -> tuple[str, str]:
        """The kernels with dynamic and with static input range."""
        if relu:
            return "linear_relu_dynamic", "linear_with_input_q_dq_qweight_dq_relu_output_fp32"
        return "linear_dynamic", "linear_with_input_q_dq_qweight_dq_output_fp32"

    def __init__(
        self, weight: Int8[Tensor, "m n"], scale: Float[Tensor, " m"], bias: Bias, relu: bool
    ) -> None:
        self.reduce_range = not has_vnni()
        self.levels = 127 if self.reduce_range else 255
        dynamic, static = self.names(relu)
        self._dynamic = getattr(torch.ops.quantized, dynamic)
        self._static = _without_python(getattr(torch.ops.quantized, static))
        zeros = torch.zeros(len(scale), dtype=torch.long)
        with warnings.catch_warnings():  # torch announces that quantized tensors will be removed
            warnings.simplefilter("ignore", UserWarning)
            values = weight.float() * scale[:, None]
            quantized = torch.quantize_per_channel(values, scale.double(), zeros, 0, torch.qint8)
        engine, torch.backends.quantized.engine = torch.backends.quantized.engine, "fbgemm"
        try:
            self.packed = torch.ops.quantized.linear_prepack(quantized, bias)
        finally:
            torch.backends.quantized.engine = engine

    def dynamic(self, x: Tensor) -> Tensor:
        y: Tensor = self._dynamic(x, self.packed, self.reduce_range)
        return y

    def static(self, scale: float, zero_point: int) -> Callable[[Tensor], Tensor]:
        kernel, packed = self._static, self.packed
        return lambda x: kernel(x, scale, zero_point, packed)


class PlainInt8:
    """The same arithmetic in public operations: quantize the input, multiply, and scale back. Slow."""

    levels = 255

    def __init__(
        self, weight: Int8[Tensor, "m n"], scale: Float[Tensor, " m"], bias: Bias, relu: bool
    ) -> None:
        self.weight, self.scale, self.bias, self.relu = weight.float(), scale, bias, relu

    def dynamic(self, x: Tensor) -> Tensor:
        low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
        scale = max((high - low) / self.levels, torch.finfo(torch.float32).tiny)
        return self._multiply(x, scale, round(-low / scale))

    def static(self, scale: float, zero_point: int) -> Callable[[Tensor], Tensor]:
        return lambda x: self._multiply(x, scale, zero_point)

    def _multiply(self, x: Tensor, scale: float, zero_point: int) -> Tensor:
        quantized = (x / scale).round().clamp(-zero_point, self.levels - zero_point)
        y = F.linear(quantized, self.weight) * (self.scale * scale)
        y = y if self.bias is None else y + self.bias
        return y.relu_() if self.relu else y


# ---------------------------------------------------------------------------------------------
# Modules


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a module and its submodules that its state dict contains, by name.

    ``state_dict`` itself would shard the weights again that FSDP has gathered.
    """
    buffers = dict(module.named_buffers())
    modules = dict(module.named_modules())
    excluded = {
        name: getattr(submodule, "_non_persistent_buffers_set", None)
        for name, submodule in modules.items()
    }
    if None in excluded.values():
        saved = module.state_dict().keys()
        return {name: buffer for name, buffer in buffers.items() if name in saved}
    return {
        name: buffer
        for name, buffer in buffers.items()
        if name.rpartition(".")[2] not in (excluded[name.rpartition(".")[0]] or ())
    }
