"""Attention (section 3.2.1 of the paper): a weighted sum of the values, with weights from queries and keys.

    query, key -> score -> mask -> weighting -> weighted sum of the values

Notable:
- The recipe selects each step: the ``score``, the ``weighting``, and what positions add (``AttentionPosition``).
- There are two implementations of one formula. ``Attention.forward`` is the fast path: it calls torch's fused kernel
  if there is one, and never stores the weights. ``Attention.attention_with_weights`` is the formula written out, and
  returns every intermediate. A test checks that the two agree.
- ``AttentionMask`` (``attention_mask.py``) says which keys each query may attend to.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard import recipe
from regard.nn.attention_mask import AttentionSpans
from regard.nn.positions import AttentionPosition
from regard.recipe import FORMATS, Registry

# Inputs and intermediates


class AttentionIntermediates(NamedTuple):
    """Every intermediate of one attention, in the order of the formula. Rows are queries, columns are keys."""

    query: Float[Tensor, "B h Q dk"]
    key: Float[Tensor, "B h K dk"]
    value: Float[Tensor, "B h K dv"]
    products: Float[Tensor, "B h Q K"]
    """Q K^T, or what the recipe's score has in its place, with the scores of relative positions"""
    scores: Float[Tensor, "B h Q K"]
    """products times the scale: Q K^T / sqrt(d_k) in the paper"""
    masked: Float[Tensor, "B h Q K"]
    """scores, with minus infinity where the mask does not allow attention"""
    weights: Float[Tensor, "B h Q K"]
    """the attention weights; with softmax each row sums to 1"""
    output: Float[Tensor, "B h Q dv"]
    """weights V"""


# Scores: how a query is compared with a key


class AttentionScore(nn.Module):
    """Compares queries with keys: ``forward(query, key)`` gives a score for each pair."""

    scale: float
    """factor applied to the output of ``forward``"""


SCORES: Registry[Callable[[recipe.ModelConfig], AttentionScore]] = Registry("model.attention.score")


@SCORES.register("scaled_dot_product", packed_batches=True, fast_inference=True, formats=FORMATS)
class ScaledDotProduct(AttentionScore):
    """q.k / sqrt(d_k): the scale keeps the variance at 1 for any number of features."""

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__()
        self.scale: float = 1 / math.sqrt(config.d_k)

    def forward(
        self, query: Float[Tensor, "B h Q dk"], key: Float[Tensor, "B h K dk"]
    ) -> Float[Tensor, "B h Q K"]:
        """Q K^T, without the scale."""
        return query @ key.transpose(-2, -1)


@SCORES.register("dot_product", packed_batches=True, fast_inference=True, formats=("html",))
class UnscaledDotProduct(ScaledDotProduct):
    """q.k without the scale: softmax saturates and its gradient vanishes as d_k grows."""

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__(config)
        self.scale = 1.0


@SCORES.register("additive")
class Additive(AttentionScore):
    """v.tanh(q + k + b): a network with one hidden layer scores each pair (Bahdanau et al. 2015)."""

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__()
        self.scale = 1.0
        self.bias = nn.Parameter(torch.zeros(config.heads, 1, 1, config.d_k))
        self.weight = nn.Parameter(torch.empty(config.heads, config.d_k))
        nn.init.normal_(self.weight, std=config.d_k**-0.5)

    def forward(
        self, query: Float[Tensor, "B h Q dk"], key: Float[Tensor, "B h K dk"]
    ) -> Float[Tensor, "B h Q K"]:
        hidden = torch.tanh(query[:, :, :, None] + key[:, :, None] + self.bias)
        return torch.einsum("bhqkd,hd->bhqk", hidden, self.weight)


# Weightings: how scores become weights

WEIGHTINGS: Registry[Callable[[Tensor], Tensor]] = Registry("model.attention.weighting")


@WEIGHTINGS.register("softmax", packed_batches=True, fast_inference=True, formats=FORMATS)
def softmax(masked: Float[Tensor, "B h Q K"]) -> Float[Tensor, "B h Q K"]:
    """exp(score) divided by the sum over all keys: weights that sum to 1."""
    return masked.softmax(dim=-1)


@WEIGHTINGS.register("relu")
def relu(masked: Float[Tensor, "B h Q K"]) -> Float[Tensor, "B h Q K"]:
    """max(0, score) / n, where n is the number of keys the query attends to: weights need not sum to 1."""
    allowed_keys = (masked > -math.inf).sum(-1, keepdim=True)
    return masked.relu() / allowed_keys


# Attention


PackedKernel = Callable[[Tensor, Tensor, Tensor, AttentionSpans, float, float], Tensor]
"""query, key, value, spans, scale and dropout to output"""


class Attention(nn.Module):
    """Attention(Q, K, V) = weighting(score(Q, K)) V; the paper's is scaled dot-product attention with softmax."""

    def __init__(self, config: recipe.ModelConfig, position: AttentionPosition) -> None:
        super().__init__()
        self.score = SCORES[config.attention.score](config)
        self.weighting = WEIGHTINGS[config.attention.weighting]
        self.position = position
        self.dropout = config.attention_dropout
        fused = isinstance(self.score, ScaledDotProduct) and self.weighting is softmax
        self.uses_sdpa = fused and not position.in_scores
        """whether torch's fused kernel (SDPA) computes the whole formula"""
        self.packed_kernel: PackedKernel | None = None
        """on a CPU: attention in packed rows without a mask matrix; set for training"""

    def forward(
        self,
        query: Float[Tensor, "B h Q dk"],
        key: Float[Tensor, "B g K dk"],
        value: Float[Tensor, "B g K dv"],
        allowed: Bool[Tensor, "#B 1 #Q K"] | None,
        distance: Int[Tensor, "#B Q K"] | None = None,
        causal: bool = False,
    ) -> Float[Tensor, "B h Q dv"]:
        """The fast path: torch's fused kernel (flash attention) if there is one.

        With ``causal``, the mask is a square lower triangle and the kernel skips the rest.
        """
        if not self.uses_sdpa:
            assert not causal
            return self.attention_with_weights(query, key, value, allowed, distance).output
        key, value = repeat_kv(query, key), repeat_kv(query, value)
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(
            query, key, value, allowed, dropout_p=dropout, is_causal=causal, scale=self.score.scale
        )

    def attention_with_weights(
        self,
        query: Float[Tensor, "B h Q dk"],
        key: Float[Tensor, "B g K dk"],
        value: Float[Tensor, "B g K dv"],
        allowed: Bool[Tensor, "#B 1 #Q K"] | None,
        distance: Int[Tensor, "#B Q K"] | None = None,
    ) -> AttentionIntermediates:
        """The formula written out, with every intermediate."""
        key, value = repeat_kv(query, key), repeat_kv(query, value)
        products: Tensor = self.score(query, key)
        if self.position.in_scores:
            products = products + self.position.score(query, distance)
        scores = products * self.score.scale
        masked = scores if allowed is None else scores.masked_fill(~allowed, -math.inf)
        weights = self.weighting(masked)
        dropped = F.dropout(weights, self.dropout, self.training)
        output = dropped @ value
        if self.position.in_scores:
            output = output + self.position.value(dropped, distance)
        return AttentionIntermediates(query, key, value, products, scores, masked, weights, output)

    def span_attention(
        self,
        query: Float[Tensor, "B h Q dk"],
        key: Float[Tensor, "B g K dk"],
        value: Float[Tensor, "B g K dv"],
        spans: AttentionSpans,
    ) -> Float[Tensor, "B h Q dv"]:
        """The fast path where each query attends to one span of keys: on a GPU, or with ``packed_kernel``."""
        if self.packed_kernel is not None:
            dropout = self.dropout if self.training else 0.0
            return self.packed_kernel(query, key, value, spans, self.score.scale, dropout)
        # Imported here because Triton comes only with torch for CUDA.
        from regard.nn.triton_kernels import packed_attention_kernel

        key, value = repeat_kv(query, key), repeat_kv(query, value)
        seed = torch.randint(2**31 - 1, (1,), device=query.device, dtype=torch.int32)
        output: Tensor = packed_attention_kernel(
            *(query, key, value),
            *(spans.key_start, spans.key_end, spans.query_start, spans.query_end),
            *(seed, self.score.scale, self.dropout if self.training else 0.0),
        )[0]
        return output


def repeat_kv(
    query: Float[Tensor, "B h Q dk"], x: Float[Tensor, "B g K dx"]
) -> Float[Tensor, "B h K dx"]:
    """Grouped-query attention (GQA): keys or values of g heads, repeated for h query heads.

    h / g neighbouring query heads share one key-value head.
    """
    repeats = query.shape[1] // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)
