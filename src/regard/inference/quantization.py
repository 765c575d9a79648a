"""Quantization: linear maps and embeddings with packed weights, one class per number format; calibration of int8.

- On a CPU all of them read and return float32. On a GPU they return what they compute in, so that the next one reads it
  without conversion. Sums and norms are computed in float32 everywhere.
- The kernels are torch's own: oneDNN for float32 and bfloat16, FBGEMM for int8. docs/decisions.md has the times of each
  at the sizes of translation.
- int8 quantization has one scale per output of a map and one scale for its inputs. The input scale is calibrated once
  (static, not dynamic quantization), so the output of a row does not depend on the other rows of the batch.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from regard.data.special_tokens import BOS, EOS, SPECIAL_TOKENS
from regard.errors import RegardError
from regard.inference.native_library import native_library
from regard.inference.packed_transformer import PackedTransformer, has_bounded_inputs
from regard.nn.norms import BatchNorm, NoNorm
from regard.nn.torch_internals import Int8Kernels, pack_int8_linear, pack_linear
from regard.nn.transformer import Decoder, Encoder, Transformer

Weight = Float[Tensor, "m n"]
Bias = Float[Tensor, " m"] | None

# ---------------------------------------------------------------------------------------------
# Linear maps


class FP32Linear:
    """A linear map in float32, on a CPU."""

    dtype = torch.float32

    def __init__(self, weight: Weight, bias: Bias, relu: bool = False) -> None:
        self.bias = None if bias is None else bias.to(self.dtype)
        self.activation = "relu" if relu else "none"
        weight = weight.to(self.dtype).contiguous()
        self.multiply, self.packed = pack_linear(weight)
        self.bytes = weight.nbytes

    def __call__(self, x: Float[Tensor, "rows n"]) -> Float[Tensor, "rows m"]:
        y = self.multiply(x.to(self.dtype), self.packed, self.bias, self.activation, [], "")
        return y.float()


class BF16Linear(FP32Linear):
    """A linear map in bfloat16, summed in float32, on a CPU."""

    dtype = torch.bfloat16


class UnpackedLinear:
    """A linear map in float32 or bfloat16 with torch's kernel for the device: for GPUs."""

    def __init__(
        self, weight: Weight, bias: Bias, relu: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        self.weight = weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        self.relu = relu
        self.bytes = self.weight.nbytes

    def __call__(self, x: Float[Tensor, "rows n"]) -> Float[Tensor, "rows m"]:
        y = F.linear(x.to(self.weight.dtype), self.weight, self.bias)
        return y.relu_() if self.relu else y


class NativeInt8:
    """The kernels of a linear map with an int8 weight in native code: ``Int8Kernels`` of ``nn/torch_internals.py``."""

    def __init__(self, weight: Tensor, scale: Float[Tensor, " m"], bias: Bias, relu: bool) -> None:
        """weight: int8. The native library must be there."""
        library = native_library().functions
        assert library is not None
        self.apply = library.regard_linear_apply
        self.outputs, inputs = weight.shape
        self.relu = relu
        self.levels: int = library.regard_levels()
        weight, scale = weight.contiguous(), scale.float().contiguous()
        bias = None if bias is None else bias.detach().float().contiguous()
        self.handle: int = library.regard_linear_pack(
            weight.data_ptr(),
            scale.data_ptr(),
            None if bias is None else bias.data_ptr(),
            self.outputs,
            inputs,
        )
        if not self.handle:
            raise MemoryError("the weights of the native decoder")
        weakref.finalize(self, library.regard_linear_free, self.handle).atexit = False

    def dynamic(self, x: Float[Tensor, "rows n"]) -> Float[Tensor, "rows m"]:
        """The output for x, quantized by its own range."""
        return self.static(*input_range(float(x.min()), float(x.max()), self.levels))(x)

    def static(self, scale: float, zero_point: int) -> Callable[[Tensor], Tensor]:
        """The map for inputs quantized as round(x / scale) + zero_point, clipped to the 8-bit range."""
        apply, handle, outputs, relu = self.apply, self.handle, self.outputs, int(self.relu)

        def multiply(x: Float[Tensor, "rows n"]) -> Float[Tensor, "rows m"]:
            x = x.contiguous()
            rows = x.shape[0]
            y = x.new_empty(rows, outputs)
            if apply(handle, x.data_ptr(), rows, scale, zero_point, relu, y.data_ptr()):
                raise MemoryError("a product of the native decoder")
            return y

        return multiply


def input_range(low: float, high: float, levels: int) -> tuple[float, int]:
    """The scale and zero point of inputs from ``low`` to ``high``, and 0."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = max((high - low) / levels, torch.finfo(torch.float32).tiny)
    return scale, round(-low / scale)


class Int8Linear:
    """A linear map in int8, summed in int32, on a CPU.

    At first the range of the inputs is computed anew in each call, and recorded. ``freeze`` fixes the range to what was
    recorded; later inputs outside of it are clipped.
    """

    def __init__(self, weight: Weight, bias: Bias, relu: bool = False) -> None:
        int8_weight, scale = quantize_rows(weight)
        pack = pack_int8_linear if native_library().functions is None else NativeInt8
        self.kernels: Int8Kernels = pack(int8_weight, scale, bias, relu)
        self.scale, self.zero_point = 0.0, 0
        """of the inputs, once the map is frozen"""
        self.min = self.max = 0.0
        """the range of the inputs so far"""
        self.multiply: Callable[[Tensor], Tensor] = self._multiply_and_observe
        self.bytes = int8_weight.nbytes + scale.nbytes

    def __call__(self, x: Float[Tensor, "rows n"]) -> Float[Tensor, "rows m"]:
        return self.multiply(x)

    def _multiply_and_observe(self, x: Float[Tensor, "rows n"]) -> Tensor:
        self.observe(float(x.min()), float(x.max()))
        return self.kernels.dynamic(x)

    def observe(self, low: float, high: float) -> None:
        """Extend the recorded range of the inputs."""
        if not math.isfinite(low + high):
            raise RegardError(
                "precision int8: an activation of this model is infinite or NaN; use fp32"
            )
        self.min, self.max = min(self.min, low), max(self.max, high)

    def freeze(self, margin: float) -> None:
        """Fix the range of the inputs to the recorded one, times ``margin``."""
        low, high = margin * self.min, margin * self.max
        self.scale, self.zero_point = input_range(low, high, self.kernels.levels)
        self.multiply = self.kernels.static(self.scale, self.zero_point)

    @property
    def is_frozen(self) -> bool:
        return self.scale > 0


# ---------------------------------------------------------------------------------------------
# Embeddings


class FloatEmbedding:
    """An embedding table in float32 or bfloat16."""

    def __init__(
        self, weight: Float[Tensor, "V d"], scale: float, dtype: torch.dtype = torch.float32
    ) -> None:
        self.weight = (weight * scale).to(dtype)
        self.bytes = self.weight.nbytes

    def __call__(self, ids: Int[Tensor, " rows"]) -> Float[Tensor, "rows d"]:
        return self.weight.index_select(0, ids).float()


class Int8Embedding:
    """An embedding table in int8, with one scale per token."""

    def __init__(self, weight: Float[Tensor, "V d"], scale: float) -> None:
        self.weight, self.scale = quantize_rows(weight * scale)
        self.bytes = self.weight.nbytes + self.scale.nbytes

    def __call__(self, ids: Int[Tensor, " rows"]) -> Float[Tensor, "rows d"]:
        return self.weight.index_select(0, ids) * self.scale.index_select(0, ids)[:, None]


def quantize_rows(weight: Weight) -> tuple[Tensor, Float[Tensor, " m"]]:
    """Per-channel quantization: the nearest integers from -127 to 127, and the scale of each row (output feature).

    The weight is about integers * scale.
    """
    scale = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight / scale[:, None]).round().to(torch.int8), scale


# ---------------------------------------------------------------------------------------------
# Calibration: find the input ranges of the int8 maps, once, on random tokens


CALIBRATION_SENTENCES, CALIBRATION_TOKENS = 16, 20
CALIBRATION_SEED = 1
MARGIN = 1.25
"""how far beyond the observed range an input may be before it is clipped"""
TABLE_POSITIONS = 512
"""positions to search for the largest value of a positional encoding that has no maximum length"""


@torch.inference_mode()
def calibrate_int8(packed: PackedTransformer, network: Transformer) -> None:
    """Calibration of int8: run the network on random tokens to find the input ranges of its maps, then freeze them.

    Norms make the inputs of most maps similar whatever the tokens are, so random tokens suffice. On Multi30k, one in
    ten thousand inputs is outside the observed range without a margin. Where no norm precedes the first layer, its
    range is extended to the largest possible input, see ``largest_input``. Without norms the inputs have no fixed
    range, so the maps are not frozen.
    """
    maps = [weight for weight in packed.weights if isinstance(weight, Int8Linear)]
    if not maps or not _normalizes(network):
        return
    draw = torch.Generator().manual_seed(CALIBRATION_SEED)
    longest = network.max_length
    length = CALIBRATION_TOKENS if longest is None else min(CALIBRATION_TOKENS, longest)
    source = _random_tokens(network.encoder, length, draw)
    target = _random_tokens(network.decoder, length, draw)
    source[:, -1], target[:, 0] = EOS, BOS
    state = packed.start(packed.encode(source))
    for tokens in target.unbind(1):
        _, state = packed.step(tokens, state)
    stacks: tuple[Encoder | Decoder, ...] = network.encoder, network.decoder
    for stack, layer in zip(stacks, (packed.encoder[0], packed.decoder[0]), strict=True):
        if not layer.self_attention.pre_norm and has_bounded_inputs(stack):
            bound = largest_input(stack)
            cast(Int8Linear, layer.self_attention.qkv).observe(-bound, bound)
    for linear in maps:
        linear.freeze(MARGIN)


def _normalizes(network: Transformer) -> bool:
    """Whether the norms of a network bound the inputs of its maps.

    Batch norm scales by statistics of the training data, so with unbounded positions its outputs are unbounded, too.
    """
    norm = network.encoder.layers[0].attention_residual.norm
    if isinstance(norm, BatchNorm):
        return network.encoder.position.bounded and network.decoder.position.bounded
    return not isinstance(norm, NoNorm)


def _random_tokens(stack: Encoder | Decoder, length: int, draw: torch.Generator) -> Tensor:
    """Sentences of random tokens; every fourth token is one of those with the largest embeddings."""
    weight = stack.embedding.weight
    size = len(weight)
    first_id = min(len(SPECIAL_TOKENS), size - 1)
    tokens = torch.randint(first_id, size, (CALIBRATION_SENTENCES, length), generator=draw)
    fourth = tokens[:, 1::4]
    largest = weight.abs().amax(1).argsort(descending=True)
    fourth.copy_(largest[torch.arange(fourth.numel()) % size].view_as(fourth))
    return tokens


def largest_input(stack: Encoder | Decoder) -> float:
    """An upper bound of the absolute input values of the first layer, for bounded positions."""
    weight, position = stack.embedding.weight, stack.position
    length = position.max_length or TABLE_POSITIONS
    positions = position(weight.new_zeros(1, length, weight.shape[1]))
    return float(weight.abs().max() * math.sqrt(weight.shape[1]) + positions.abs().max())
