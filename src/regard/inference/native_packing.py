"""The weights of a packed int8 network for the native decoder: in memory, or as tensors to store in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from ctypes import Structure
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.inference.native_decoder import (
    EmbeddingSpec,
    LinearSpec,
    NativeWeights,
    NormSpec,
    PositionTable,
)
from regard.inference.native_library import native_library
from regard.inference.packed_transformer import (
    Packed,
    PackedDecoderLayer,
    PackedEncoderLayer,
    PackedFeedForward,
    PackedGatedFeedForward,
    PackedTransformer,
    PackFormat,
    Sublayer,
)
from regard.inference.quantization import Int8Embedding, Int8Linear, NativeInt8, quantize_rows
from regard.nn.layers import DecoderLayer, EncoderLayer, FeedForward, PreNorm, SwiGLU
from regard.nn.norms import LayerNorm, NoNorm, RMSNorm
from regard.nn.transformer import Decoder, Encoder, Transformer

ACTIVATIONS: dict[Callable[[Tensor], Tensor], int] = {F.relu: 1, F.gelu: 2, F.silu: 3}
KNOWN_ATTRIBUTES = {"norm", "pre_norm", "heads", "rotary", "activation"} | {
    *("qkv", "query", "key_value", "output"),
    *("inner", "gate_inner", "outer"),
}
"""the attributes of packed sub-layers that the native code reads, or that the checks below exclude"""
LANES = 16
"""features of a head must be a multiple of this"""
STORED_POSITIONS = 512
"""positions in a file, if the network has as many"""

# ---------------------------------------------------------------------------------------------
# What is supported


def unsupported_network(network: Transformer, packed: PackedTransformer) -> str | None:
    """Why a network has no native decoder; None: it has one."""
    if (library := native_library()).functions is None:
        return library.reason
    layers = [*_layers(network.encoder), *_layers(network.decoder)]
    norms = {type(layer.attention_residual.norm) for layer in layers}
    if not norms <= {LayerNorm, RMSNorm}:
        return "its norm is neither layer nor rms"
    stacks: list[PackedEncoderLayer] = [*packed.encoder, *packed.decoder]
    if any(layer.self_attention.rotary is not None for layer in stacks):
        return "its position is rotary"
    if unknown := sorted(set().union(*map(_attributes, stacks)) - KNOWN_ATTRIBUTES):
        return f"native code does not support {', '.join(unknown)}"
    maps = [linear for linear in packed.weights if not isinstance(linear, Int8Embedding)]
    if not all(isinstance(linear, Int8Linear) and linear.is_frozen for linear in maps):
        return "some of its linear maps are not calibrated"
    features, width = _features(layers[0]), network.encoder.embedding.weight.shape[1]
    if features % LANES or width % LANES:
        return f"d_model {width} or d_k {features} is not a multiple of {LANES}"
    return None


def _attributes(layer: PackedEncoderLayer) -> set[str]:
    """The attributes of the sub-layers of a layer, and its activation if it is unknown."""
    sublayers: list[Sublayer] = [layer.self_attention, layer.feed_forward]
    if isinstance(layer, PackedDecoderLayer):
        sublayers.append(layer.cross_attention)
    attributes = {name for sublayer in sublayers for name in vars(sublayer)}
    activation = getattr(layer.feed_forward, "activation", None)
    if activation is not None and activation not in ACTIVATIONS:
        attributes.add("this activation")
    return attributes


def _layers(stack: Encoder | Decoder) -> list[EncoderLayer]:
    return list(cast(Iterable[EncoderLayer], stack.layers))


def _features(layer: EncoderLayer) -> int:
    """The features of a head."""
    return layer.attention.query.out_features // layer.attention.heads


# ---------------------------------------------------------------------------------------------
# Names of the parts


def _linears(packed: PackedTransformer) -> Iterator[tuple[str, Packed]]:
    """The linear maps of a packed network by name."""
    stacks: dict[str, list[PackedEncoderLayer]] = {
        "encoder": packed.encoder,
        "decoder": list(packed.decoder),
    }
    for stack, layers in stacks.items():
        for number, layer in enumerate(layers):
            name = f"{stack}.{number}"
            yield f"{name}.qkv", layer.self_attention.qkv
            yield f"{name}.self_output", layer.self_attention.output
            if isinstance(layer, PackedDecoderLayer):
                yield f"{name}.cross_query", layer.cross_attention.query
                yield f"{name}.cross_key_value", layer.cross_attention.key_value
                yield f"{name}.cross_output", layer.cross_attention.output
            feed_forward = layer.feed_forward
            assert isinstance(feed_forward, PackedFeedForward | PackedGatedFeedForward)
            if isinstance(feed_forward, PackedGatedFeedForward):
                yield f"{name}.inner", feed_forward.gate_inner
            else:
                yield f"{name}.inner", feed_forward.inner
            yield f"{name}.outer", feed_forward.outer
    yield "projection", packed.projection


def _norms(network: Transformer) -> Iterator[tuple[str, nn.Module]]:
    """The norms of a network by name."""
    stacks: dict[str, Encoder | Decoder] = {"encoder": network.encoder, "decoder": network.decoder}
    for stack, layers in stacks.items():
        for number, layer in enumerate(_layers(layers)):
            name = f"{stack}.{number}"
            yield f"{name}.self_norm", layer.attention_residual.norm
            if isinstance(layer, DecoderLayer):
                yield f"{name}.cross_norm", layer.cross_attention_residual.norm
            yield f"{name}.feed_forward_norm", layer.feed_forward_residual.norm
        yield f"{stack}_norm", layers.norm


class _Norm(NamedTuple):
    """The kind of a norm by the number of native code, its epsilon and its weights."""

    kind: int
    epsilon: float
    weights: dict[str, Tensor]


def _norm(norm: nn.Module) -> _Norm:
    if isinstance(norm, LayerNorm):
        return _Norm(1, norm.eps, {"weight": norm.weight, "bias": norm.bias})
    if isinstance(norm, RMSNorm):
        assert norm.weight is not None
        assert norm.eps is not None
        return _Norm(2, norm.eps, {"weight": norm.weight})
    assert isinstance(norm, NoNorm)
    return _Norm(0, 0.0, {})


def _sizes(network: Transformer, packed: PackedTransformer) -> dict[str, int]:
    """The numbers of ``ModelSpec``, and the size of the source vocabulary."""
    layers = _layers(network.encoder)
    feed_forward = packed.encoder[0].feed_forward
    activation = 0
    if isinstance(feed_forward, PackedFeedForward):
        activation = ACTIVATIONS[feed_forward.activation or F.relu]
    return {
        "width": network.encoder.embedding.weight.shape[1],
        "heads": layers[0].attention.heads,
        "features": _features(layers[0]),
        "hidden": cast(FeedForward | SwiGLU, layers[0].feed_forward).outer.in_features,
        "pre_norm": int(isinstance(layers[0].attention_residual, PreNorm)),
        "activation": activation,
        "gated": int(isinstance(feed_forward, PackedGatedFeedForward)),
        "encoder_layers": len(packed.encoder),
        "decoder_layers": len(packed.decoder),
        "vocabulary": len(network.projection.weight),
        "source_vocabulary": len(network.encoder.embedding.weight),
    }


# ---------------------------------------------------------------------------------------------
# Weights


def native_weights(network: Transformer, packed: PackedTransformer) -> NativeWeights:
    """The weights of a network that is supported, see ``unsupported_network``. They are shared with ``packed``."""
    tensors: list[Tensor] = []

    def address(tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensors.append(tensor.detach().contiguous())
        return tensors[-1].data_ptr()

    parts: dict[str, Structure] = {}
    for name, linear in _linears(packed):
        assert isinstance(linear, Int8Linear)
        assert isinstance(linear.kernels, NativeInt8)
        parts[name] = LinearSpec(linear.kernels.handle, linear.scale, linear.zero_point)
    for name, module in _norms(network):
        norm_type, epsilon, weights = _norm(module)
        parts[name] = NormSpec(
            norm_type, epsilon, address(weights.get("weight")), address(weights.get("bias"))
        )
    for name, packed_embedding in (("source", packed.source), ("target", packed.target)):
        embedding = packed_embedding.embedding
        assert isinstance(embedding, Int8Embedding)
        parts[name] = EmbeddingSpec(address(embedding.weight), address(embedding.scale))
    return NativeWeights(
        _sizes(network, packed),
        parts,
        packed.bytes,
        packed.max_length,
        position_tables(packed),
        (packed, tensors),
    )


def position_tables(packed: PackedTransformer) -> Callable[[str, int], PositionTable]:
    """``NativeWeights.positions`` of a packed network."""

    def positions(side: str, end: int) -> PositionTable:
        with torch.inference_mode():
            table = (packed.source if side == "source" else packed.target).positions(end)
        return PositionTable(table.data_ptr(), table)

    return positions


class QuantizedLinear:
    """The int8 weight, scales and bias of a linear map, to be stored; it cannot be applied."""

    def __init__(self, weight: Tensor, bias: Tensor | None, relu: bool = False) -> None:
        self.weight, scale = quantize_rows(weight)
        self.tensors = {"weight": self.weight, "scale": scale.float()}
        if bias is not None:
            self.tensors["bias"] = bias.detach().float()
        self.bytes = self.weight.nbytes + scale.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def quantized_weights(
    network: Transformer, packed: PackedTransformer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights of ``native_weights`` as tensors, and the description that ``stored_weights`` needs.

    The scales and zero points of inputs are those of ``packed``, which are calibrated for the kernels in use.
    """
    quantized = PackedTransformer(network, PackFormat(QuantizedLinear, Int8Embedding))
    tensors: dict[str, Tensor] = {}
    linears, norms, embeddings = {}, {}, {}
    for (name, linear), (_, calibrated) in zip(_linears(quantized), _linears(packed), strict=True):
        assert isinstance(linear, QuantizedLinear)
        assert isinstance(calibrated, Int8Linear)
        tensors |= {f"{name}.{part}": tensor for part, tensor in linear.tensors.items()}
        linears[name] = calibrated.scale, calibrated.zero_point
    for name, module in _norms(network):
        norm_type, epsilon, weights = _norm(module)
        tensors |= {f"{name}.{part}": tensor.detach().float() for part, tensor in weights.items()}
        norms[name] = norm_type, epsilon
    shared = quantized.source.embedding is quantized.target.embedding
    for name, packed_embedding in (("source", quantized.source), ("target", quantized.target)):
        embedding = packed_embedding.embedding
        assert isinstance(embedding, Int8Embedding)
        embeddings[name] = "source" if shared else name
        tensors[f"{embeddings[name]}.weight"] = embedding.weight
        tensors[f"{embeddings[name]}.scale"] = embedding.scale.float()
        count = min(STORED_POSITIONS, packed.max_length or STORED_POSITIONS)
        tensors[f"{name}.positions"] = packed_embedding.positions(count)[:count].float()
    description = {
        "sizes": _sizes(network, packed),
        "linears": linears,
        "norms": norms,
        "embeddings": embeddings,
        "bytes": packed.bytes,
        "max_length": packed.max_length,
    }
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, description
