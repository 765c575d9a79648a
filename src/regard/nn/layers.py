"""Layers: embeddings, feed-forward network, encoder and decoder layers with residual connections (section 3)."""

import math
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard import recipe
from regard.data.special_tokens import SPECIAL_TOKENS
from regard.nn.attention_mask import AttentionMask
from regard.nn.dropout import Dropout, kept_tokens
from regard.nn.kv_cache import KeyValue, KVCache
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.norms import NORMS, NonPad
from regard.recipe import FORMATS, Registry

# ---------------------------------------------------------------------------------------------
# Token embeddings, which are also the output projection when the two are tied (section 3.4 of the paper)


class Embedding(nn.Module):
    """Token ids to vectors, times sqrt(d_model): without the factor, positions would dominate the embeddings."""

    cutoff = 0.0
    """SimCut: the probability that a token of the second half of the rows becomes a zero vector, in training"""
    special_tokens = len(SPECIAL_TOKENS)
    """ids below this number are never cut"""

    def __init__(self, vocab_size: int, d_model: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        nn.init.normal_(self.weight, std=d_model**-0.5)
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None
        """bias of the logits, if the weight is also the output projection"""

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T d"]:
        vectors = F.embedding(ids, self.weight) * math.sqrt(self.weight.shape[1])
        if not self.training or not self.cutoff:
            return vectors
        return vectors * kept_tokens(ids, self.cutoff, self.special_tokens)[..., None]


# ---------------------------------------------------------------------------------------------
# The position-wise feed-forward network (section 3.3 of the paper)


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2 at every position, or with another activation than ReLU."""

    def __init__(self, config: recipe.ModelConfig, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_ff)
        self.outer = nn.Linear(config.d_ff, config.d_model)
        self.activation = activation
        self.dropout = Dropout(config.activation_dropout)

    def forward(self, x: Float[Tensor, "B T d"]) -> Float[Tensor, "B T d"]:
        y: Float[Tensor, "B T d"] = self.outer(self.dropout(self.activation(self.inner(x))))
        return y


class SwiGLU(nn.Module):
    """(swish(x W1) * x V) W2 (Shazeer 2020), with 2/3 of d_ff so that the number of weights stays the same."""

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__()
        d_inner = max(1, round(config.d_ff * 2 / 3))
        self.gate = nn.Linear(config.d_model, d_inner, bias=False)
        self.inner = nn.Linear(config.d_model, d_inner, bias=False)
        self.outer = nn.Linear(d_inner, config.d_model, bias=False)
        self.dropout = Dropout(config.activation_dropout)

    def forward(self, x: Float[Tensor, "B T d"]) -> Float[Tensor, "B T d"]:
        y: Float[Tensor, "B T d"] = self.outer(self.dropout(F.silu(self.gate(x)) * self.inner(x)))
        return y


FEED_FORWARDS: Registry[Callable[[recipe.ModelConfig], nn.Module]] = Registry("model.activation")
"""the feed-forward network, by the name of its activation function"""

FEED_FORWARDS.register(
    "relu",
    summary="max(0, x), as in the paper",
    packed_batches=True,
    fast_inference=True,
    formats=FORMATS,
)(partial(FeedForward, activation=F.relu))
FEED_FORWARDS.register(
    "gelu",
    summary="x Phi(x) (Hendrycks and Gimpel 2016)",
    packed_batches=True,
    fast_inference=True,
    formats=FORMATS,
)(partial(FeedForward, activation=F.gelu))
FEED_FORWARDS.register(
    "swish",
    summary="x sigmoid(x), also called SiLU",
    packed_batches=True,
    fast_inference=True,
    formats=("huggingface", "ctranslate2", "onnx", "html"),
)(partial(FeedForward, activation=F.silu))
FEED_FORWARDS.register(
    "swiglu", packed_batches=True, fast_inference=True, formats=("ctranslate2", "onnx", "html")
)(SwiGLU)


# ---------------------------------------------------------------------------------------------
# Residual connections and norms around a sub-layer

Sublayer = Callable[[Tensor], Tensor]


RESIDUALS: Registry[Callable[[Tensor, Tensor], Tensor]] = Registry("model.residual")


@RESIDUALS.register("add", packed_batches=True, fast_inference=True, formats=FORMATS)
def add_residual(x: Float[Tensor, "B T d"], y: Float[Tensor, "B T d"]) -> Float[Tensor, "B T d"]:
    """x + Sublayer(x): the input of a sub-layer is added to its output, as in the paper (He et al. 2016)."""
    return x + y


@RESIDUALS.register("none")
def no_residual(x: Float[Tensor, "B T d"], y: Float[Tensor, "B T d"]) -> Float[Tensor, "B T d"]:
    """Sublayer(x): without residual connections, for ablation experiments."""
    return y


class SublayerConnection(nn.Module):
    """Norm, dropout and residual connection around a sub-layer; named as in The Annotated Transformer (Rush 2018).

    The ``forward(x, sublayer, non_pad)`` of a subclass says where the norm stands.
    """

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__()
        self.norm = NORMS[config.norm](config.d_model)
        self.dropout = Dropout(config.dropout)
        self.add = RESIDUALS[config.residual]


NORM_ORDERS: Registry[Callable[[recipe.ModelConfig], SublayerConnection]] = Registry(
    "model.norm_order"
)


@NORM_ORDERS.register("post", packed_batches=True, fast_inference=True, formats=FORMATS)
class PostNorm(SublayerConnection):
    """Post-norm: LayerNorm(x + Dropout(Sublayer(x))), as in the paper."""

    def forward(
        self, x: Float[Tensor, "B T d"], sublayer: Sublayer, non_pad: NonPad
    ) -> Float[Tensor, "B T d"]:
        output = self.dropout(sublayer(x))
        # Under autocast, norms compute in float32; go back to the data type of the sub-layers.
        y: Float[Tensor, "B T d"] = self.norm(self.add(x, output), non_pad).to(output.dtype)
        return y


@NORM_ORDERS.register(
    "pre",
    packed_batches=True,
    fast_inference=True,
    formats=("ctranslate2", "onnx", "torch", "html"),
)
class PreNorm(SublayerConnection):
    """Pre-norm: x + Dropout(Sublayer(LayerNorm(x))); deep networks train more easily (Xiong et al. 2020)."""

    def forward(
        self, x: Float[Tensor, "B T d"], sublayer: Sublayer, non_pad: NonPad
    ) -> Float[Tensor, "B T d"]:
        return self.add(x, self.dropout(sublayer(self.norm(x, non_pad))))


def final_norm(config: recipe.ModelConfig) -> nn.Module:
    """The norm after the last layer, or none.

    By default pre-norm stacks have one, because the output of their last layer is not normalized; post-norm stacks,
    whose every layer ends in a norm, have none.
    """
    return NORMS[config.norm if config.final_norm else "none"](config.d_model)


# ---------------------------------------------------------------------------------------------
# Encoder and decoder layers (section 3.1 of the paper)


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network."""

    def __init__(self, config: recipe.ModelConfig, site: recipe.AttentionSite = "encoder") -> None:
        super().__init__()
        norm_order = NORM_ORDERS[config.norm_order]
        self.attention = MultiHeadAttention(config, site)
        self.attention_residual = norm_order(config)
        self.feed_forward = FEED_FORWARDS[config.activation](config)
        self.feed_forward_residual = norm_order(config)

    def forward(
        self,
        x: Float[Tensor, "B T d"],
        mask: AttentionMask,
        non_pad: NonPad = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "B T d"]:
        """With a cache, x holds only the newest positions, which also attend to the cached ones."""
        x = self.self_attention_sublayer(x, mask, non_pad, cache)
        return self.feed_forward_sublayer(x, non_pad)

    def self_attention_sublayer(
        self, x: Float[Tensor, "B T d"], mask: AttentionMask, non_pad: NonPad, cache: KVCache | None
    ) -> Float[Tensor, "B T d"]:
        """Self-attention with its residual connection."""

        def self_attention(y: Tensor) -> Tensor:
            if mask.spans is not None:
                return self.attention.packed_attention(y, mask)
            kv = self.attention.keys_values(y, non_pad, 0 if cache is None else cache.length)
            output: Tensor = self.attention(y, kv if cache is None else cache.append(kv), mask)
            return output

        y: Float[Tensor, "B T d"] = self.attention_residual(x, self_attention, non_pad)
        return y

    def feed_forward_sublayer(
        self, x: Float[Tensor, "B T d"], non_pad: NonPad
    ) -> Float[Tensor, "B T d"]:
        """The feed-forward network with its residual connection."""
        y: Float[Tensor, "B T d"] = self.feed_forward_residual(x, self.feed_forward, non_pad)
        return y


class DecoderLayer(EncoderLayer):
    """Masked self-attention, cross-attention to the encoder output, then the feed-forward network."""

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__(config, "decoder")
        self.cross_attention = MultiHeadAttention(config, "cross_attention")
        self.cross_attention_residual = NORM_ORDERS[config.norm_order](config)

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "R T d"],
        mask: AttentionMask,
        cross_kv: KeyValue,
        cross_mask: AttentionMask,
        non_pad: NonPad = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "R T d"]:
        """All positions at once; with a cache, the newest position of each row.

        cross_kv: the keys and values of the encoder output, of which ``cross_mask`` masks the padding.
        """
        x = self.self_attention_sublayer(x, mask, non_pad, cache)
        x = self.cross_attention_residual(
            x, cross_attention_sublayer(cross_kv, cross_mask, self.cross_attention), non_pad
        )
        return self.feed_forward_sublayer(x, non_pad)


def cross_attention_sublayer(
    kv: KeyValue, mask: AttentionMask, attention: MultiHeadAttention
) -> Sublayer:
    """Cross-attention to these keys and values, as a sub-layer."""

    def cross_attention(y: Tensor) -> Tensor:
        # In beam search, several rows belong to one sentence. They become queries side by side, so that its keys
        # and values are stored and read once. No len() here: sizes are symbolic during ONNX export.
        queries = y.reshape(kv.key.shape[0], -1, y.shape[-1])
        output: Tensor = attention(queries, kv, mask)
        return output.reshape(y.shape)

    return cross_attention


def initialize(module: nn.Module) -> None:
    """Xavier (Glorot) uniform weights and zero biases for every linear layer of this module."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
