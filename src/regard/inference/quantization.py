"""Linear maps and embeddings with their weights packed once, for the kernel that uses them.

What is notable:
- One class for each number format. On a CPU all take and give float32; on a GPU they give what they compute in, so that
  what one gives another takes as it is. Sums and norms are in float32 everywhere.
- The kernels are torch's own: oneDNN for float32 and bfloat16, FBGEMM for int8. docs/decisions.md has what each
  takes at the sizes of translation.
- int8 has one scale for each output of a map, and one for its inputs, found once: what a row gives does not depend on
  the rows beside it.
"""

from __future__ import annotations

import math
import warnings
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from regard.data.special_tokens import BOS, EOS, SPECIAL_TOKENS
from regard.errors import RegardError
from regard.inference.packed_transformer import PackedTransformer
from regard.nn.norms import NoNorm
from regard.nn.transformer import Decoder, Encoder, Transformer

Weight = Float[Tensor, "m n"]
Bias = Float[Tensor, " m"] | None


class FP32Linear:
    """In float32."""

    dtype = torch.float32

    def __init__(self, weight: Weight, bias: Bias, relu: bool = False) -> None:
        self.bias = None if bias is None else bias.to(self.dtype)
        self.after = "relu" if relu else "none"
        # Without torch's own Python around it, which takes as long as a small product.
        self.multiply = torch.ops.mkldnn._linear_pointwise.default._op
        weight = weight.to(self.dtype).contiguous()
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.bytes = weight.nbytes

    def __call__(self, x: Float[Tensor, "rows n"]) -> Float[Tensor, "rows m"]:
        x = x.to(self.dtype)
        y: Tensor = self.multiply(x, self.packed, self.bias, self.after, [], "")
        return y.float()


class BF16Linear(FP32Linear):
    """In bfloat16, summed in float32."""

    dtype = torch.bfloat16


class Int8Linear:
    """In int8, summed in int32.

    At first it finds the range of its inputs anew at each call, and remembers it. Once ``settle`` was called the range
    is what was seen until then; what lies outside counts as its border.
    """

    def __init__(self, weight: Weight, bias: Bias, relu: bool = False) -> None:
        eight, scale = quantized(weight)
        none = torch.zeros(len(scale), dtype=torch.long)
        with warnings.catch_warnings():  # of a form that torch will give up some day
            warnings.simplefilter("ignore", UserWarning)
            whole = torch._make_per_channel_quantized_tensor(eight, scale.double(), none, 0)
        before, torch.backends.quantized.engine = torch.backends.quantized.engine, "fbgemm"
        try:
            self.packed = torch.ops.quantized.linear_prepack(whole, bias)
        finally:
            torch.backends.quantized.engine = before
        # Without VNNI two products of 8 bits are added in 16, where they may not fit; of 7 they do.
        self.seven = not torch.cpu._is_vnni_supported()
        self.least = self.most = 0.0
        self.relu, self.multiply = relu, self._seeing
        self.bytes = eight.nbytes + scale.nbytes

    def __call__(self, x: Float[Tensor, "rows n"]) -> Float[Tensor, "rows m"]:
        y: Tensor = self.multiply(x)
        return y

    def _seeing(self, x: Float[Tensor, "rows n"]) -> Tensor:
        self.see(float(x.min()), float(x.max()))
        kernels = torch.ops.quantized
        kernel = kernels.linear_relu_dynamic if self.relu else kernels.linear_dynamic
        y: Tensor = kernel(x, self.packed, self.seven)
        return y

    def see(self, least: float, most: float) -> None:
        """Inputs may be as small and as large as this."""
        if not math.isfinite(least + most):
            raise RegardError(
                "precision int8: the numbers of this model grow beyond all bounds; take fp32"
            )
        self.least, self.most = min(self.least, least), max(self.most, most)

    def settle(self, margin: float) -> None:
        """From now on inputs are between the least and the most that was seen, times margin."""
        steps = 127 if self.seven else 255
        tiny = torch.finfo(torch.float32).tiny
        scale = max(margin * (self.most - self.least) / steps, tiny)
        zero = round(-margin * self.least / scale)
        kernels = torch.ops.quantized
        kernel = kernels.linear_with_input_q_dq_qweight_dq_output_fp32
        if self.relu:
            kernel = kernels.linear_with_input_q_dq_qweight_dq_relu_output_fp32
        # Without torch's own Python around it, as dear as a small product.
        multiply, packed = kernel.default._op, self.packed
        self.multiply = lambda x: multiply(x, scale, zero, packed)


class UnpackedLinear:
    """In float32 or bfloat16, by whatever product torch has for the device: on a GPU."""

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


class Rows:
    """Embeddings, in float32 or bfloat16."""

    def __init__(
        self, weight: Float[Tensor, "V d"], scale: float, dtype: torch.dtype = torch.float32
    ) -> None:
        self.weight = (weight * scale).to(dtype)
        self.bytes = self.weight.nbytes

    def __call__(self, ids: Int[Tensor, " rows"]) -> Float[Tensor, "rows d"]:
        return self.weight.index_select(0, ids).float()


class Int8Embedding:
    """Embeddings in int8, each with its own scale."""

    def __init__(self, weight: Float[Tensor, "V d"], scale: float) -> None:
        self.weight, self.scale = quantized(weight * scale)
        self.bytes = self.weight.nbytes + self.scale.nbytes

    def __call__(self, ids: Int[Tensor, " rows"]) -> Float[Tensor, "rows d"]:
        return self.weight.index_select(0, ids) * self.scale.index_select(0, ids)[:, None]


def quantized(weight: Weight) -> tuple[Tensor, Float[Tensor, " m"]]:
    """The suggest whole numbers from -127 to 127, and what they are to be multiplied by, for each row."""
    scale = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight / scale[:, None]).round().to(torch.int8), scale


# ---------------------------------------------------------------------------------------------
# How large the inputs of the maps of int8 become: tried once, on words drawn at random.


SENTENCES, WORDS = 16, 20
SEED = 1
FAR = 512
"""words: by then positions without end have been as large as they become"""
MARGIN = 1.25
"""how much larger than any that was seen an input may be before it is cut off"""


@torch.inference_mode()
def settle(fast: PackedTransformer, network: Transformer) -> None:
    """Let all maps of int8 see what comes their way, then keep to it.

    Norms make the inputs of most maps alike whatever the words say, so any words serve. On multi30k a ten-thousandth
    of the inputs lie outside the ranges found without a margin. Where no norm stands before the first layer, it is
    shown how large any word can be; a network without norms goes on finding its ranges anew.
    """
    maps = [weight for weight in fast.weights if isinstance(weight, Int8Linear)]
    stacks: tuple[Encoder | Decoder, ...] = network.encoder, network.decoder
    if not maps or isinstance(network.encoder.layers[0].attention_residual.norm, NoNorm):
        return
    draw = torch.Generator().manual_seed(SEED)
    words = WORDS if network.longest is None else min(WORDS, network.longest)

    def drawn(stack: Encoder | Decoder) -> torch.Tensor:
        """Words at random, every fourth one of those with the largest embeddings."""
        weight = stack.embedding.weight
        size = len(weight)
        rows = torch.randint(
            min(len(SPECIAL_TOKENS), size - 1), size, (SENTENCES, words), generator=draw
        )
        some = rows[:, 1::4]
        order = weight.abs().amax(1).argsort(descending=True)
        some.copy_(order[torch.arange(some.numel()) % size].view_as(some))
        return rows

    source, target = map(drawn, stacks)
    source[:, -1], target[:, 0] = EOS, BOS
    state = fast.start(fast.encode(source))
    for tokens in target.unbind(1):
        _, state = fast.step(tokens, state)
    for stack, first in zip(stacks, (fast.encoder[0], fast.decoder[0]), strict=True):
        if not first.attention.before:
            most = largest(stack)
            cast(Int8Linear, first.attention.joined).see(-most, most)
    for one in maps:
        one.settle(MARGIN)


def largest(stack: Encoder | Decoder) -> float:
    """No number of any word at any place is larger."""
    weight, position = stack.embedding.weight, stack.position
    places = position(weight.new_zeros(1, position.longest or FAR, weight.shape[1]))
    return float(weight.abs().max() * math.sqrt(weight.shape[1]) + places.abs().max())
