"""Attention: the values summed, weighted by how well their keys answer the query (section 3.2.1 of the paper).

    query, key -> score -> mask -> weighting -> weighted sum of the values

What is notable:
- Each step has a name in the recipe: the ``score``, the ``weighting``, and what ``positions`` have to say.
- Two ways to the same output. The *fast* way, ``forward``, goes through torch's fused kernel where there is one and
  never keeps the weights. The *shown* way, ``show``, is the formula written out and returns every intermediate. A test
  holds the two equal.
- ``Mask`` says who may look at whom without building a matrix until a kernel wants one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard import recipe
from regard.nn.positions import AttentionPosition
from regard.recipe import FORMATS, Registry


@dataclass(frozen=True)
class Spans:
    """A query sees the keys of one span, a key is seen by one span of queries: texts that stand end to end in one row,
    or windows.

    Each end is one past the last. What a place sees that is no word does not matter: nobody looks at it.
    """

    low: Int[Tensor, "B Q"]
    high: Int[Tensor, "B Q"]
    """first and end of the keys that each query sees"""
    first: Int[Tensor, "B K"]
    last: Int[Tensor, "B K"]
    """first and end of the queries that see each key"""

    def matrix(self) -> Bool[Tensor, "B 1 Q K"]:
        key = torch.arange(self.first.shape[1], device=self.first.device)
        return ((key >= self.low[:, :, None]) & (key < self.high[:, :, None]))[:, None]


@dataclass(frozen=True)
class Mask:
    """Who may look at whom. True means *may look*, as in torch's attention and unlike torch's Transformer."""

    real: Bool[Tensor, "B K"] | None = None
    """keys that are words, not padding; None: all are"""
    causal: bool = False
    """position i sees j <= i only; the queries are the last positions of the keys"""
    tree: Int[Tensor, "B K K"] | None = None
    """distance along the dependency tree, where positions are those of a tree"""
    spans: Spans | None = None
    """in a packed row: all there is to say, causality included"""

    def matrix(
        self, queries: int, keys: int, device: torch.device
    ) -> Bool[Tensor, "#B 1 #Q K"] | None:
        """The mask as the kernels want it; None when everybody sees everything."""
        if self.spans is not None:
            inside = self.spans.matrix()
            return inside | ~inside.any(-1, keepdim=True)  # as below: nobody looks at padding
        allowed = None if self.real is None else self.real[:, None, None, :]
        if self.causal and queries > 1:
            square = torch.ones(queries, keys, dtype=torch.bool, device=device)
            earlier = square.tril(keys - queries)[None, None]
            if allowed is None:
                return earlier
            allowed = allowed & earlier
        if allowed is None:
            return None
        # Padding in front of a text, and a text that is all padding, see nothing: they may see all, since nobody
        # looks at them, and stay numbers.
        return allowed | ~allowed.any(-1, keepdim=True)

    def distance(self, queries: int, keys: int, device: torch.device) -> Int[Tensor, "#B Q K"]:
        """How far each key lies from each query: ahead is positive, behind is negative."""
        if self.tree is not None:
            return self.tree
        place = torch.arange(keys, device=device)
        return (place - place[keys - queries :, None])[None]


class KeyValue(NamedTuple):
    """What can be looked at, already projected and split into heads."""

    key: Float[Tensor, "B g K dk"]
    value: Float[Tensor, "B g K dv"]

    def select(self, rows: Tensor) -> "KeyValue":
        return KeyValue(self.key.index_select(0, rows), self.value.index_select(0, rows))

    def followed_by(self, later: "KeyValue") -> "KeyValue":
        return KeyValue(
            torch.cat([self.key, later.key], dim=2), torch.cat([self.value, later.value], dim=2)
        )


class AttentionIntermediates(NamedTuple):
    """Every intermediate of one attention, in the order of the formula. Rows are queries, columns are keys."""

    query: Float[Tensor, "B h Q dk"]
    key: Float[Tensor, "B h K dk"]
    value: Float[Tensor, "B h K dv"]
    products: Float[Tensor, "B h Q K"]
    """Q K^T, or what the recipe has in its place"""
    scores: Float[Tensor, "B h Q K"]
    """products times the scale: Q K^T / sqrt(d_k) in the paper"""
    masked: Float[Tensor, "B h Q K"]
    """minus infinity where the query may not look"""
    weights: Float[Tensor, "B h Q K"]
    """what the weighting makes of each row; of softmax it sums to 1"""
    output: Float[Tensor, "B h Q dv"]
    """weights V"""


# Scores: how a query is compared with a key


class AttentionScore(nn.Module):
    """Compares queries with keys."""

    scale: float
    """the factor applied to its output"""


SCORES: Registry[Callable[[recipe.Model], AttentionScore]] = Registry("model.attention.score")


@SCORES.register("scaled_dot_product", packed=True, fused=True, formats=FORMATS)
class ScaledDotProduct(AttentionScore):
    """q.k / sqrt(d_k): the scale keeps the variance at 1, however many features are summed."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()
        self.scale: float = 1 / math.sqrt(section.d_k)

    def forward(
        self, query: Float[Tensor, "B h Q dk"], key: Float[Tensor, "B h K dk"]
    ) -> Float[Tensor, "B h Q K"]:
        """Before the scale."""
        return query @ key.transpose(-2, -1)


@SCORES.register("dot_product", packed=True, fused=True)
class UnscaledDotProduct(ScaledDotProduct):
    """q.k: what the scale is there to mend."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__(section)
        self.scale = 1.0


@SCORES.register("additive")
class Additive(AttentionScore):
    """v.tanh(q + k + b): one hidden layer scores each pair, its first matrices being W^Q and W^K."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()
        self.scale = 1.0
        self.bias = nn.Parameter(torch.zeros(section.heads, 1, 1, section.d_k))
        self.weight = nn.Parameter(torch.empty(section.heads, section.d_k))
        nn.init.normal_(self.weight, std=section.d_k**-0.5)

    def forward(
        self, query: Float[Tensor, "B h Q dk"], key: Float[Tensor, "B h K dk"]
    ) -> Float[Tensor, "B h Q K"]:
        hidden = torch.tanh(query[:, :, :, None] + key[:, :, None] + self.bias)
        return torch.einsum("bhqkd,hd->bhqk", hidden, self.weight)


# Weightings: how scores become weights

WEIGHTINGS: Registry[Callable[[Tensor], Tensor]] = Registry("model.attention.weighting")


@WEIGHTINGS.register("softmax", packed=True, fused=True, formats=FORMATS)
def softmax(masked: Float[Tensor, "B h Q K"]) -> Float[Tensor, "B h Q K"]:
    """exp(score), over the sum of all that the query sees: weights that sum to 1."""
    return masked.softmax(dim=-1)


@WEIGHTINGS.register("relu")
def relu(masked: Float[Tensor, "B h Q K"]) -> Float[Tensor, "B h Q K"]:
    """max(0, score) / n, n being how many keys the query sees: weights that need not sum to 1."""
    seen = (masked > -math.inf).sum(-1, keepdim=True)
    return masked.relu() / seen


class Attention(nn.Module):
    """Attention(Q, K, V): the values summed, weighted by how well their keys answer the query."""

    def __init__(self, section: recipe.Model, relation: AttentionPosition) -> None:
        super().__init__()
        self.score = SCORES[section.attention.score](section)
        self.weighting = WEIGHTINGS[section.attention.weighting]
        self.relation = relation
        self.dropout = section.attention_dropout
        fused = isinstance(self.score, ScaledDotProduct) and self.weighting is softmax
        self.fused = fused and not relation.in_scores
        """whether torch has one kernel for all of it"""

    def forward(
        self,
        query: Float[Tensor, "B h Q dk"],
        key: Float[Tensor, "B g K dk"],
        value: Float[Tensor, "B g K dv"],
        allowed: Bool[Tensor, "#B 1 #Q K"] | None,
        distance: Int[Tensor, "#B Q K"] | None = None,
        causal: bool = False,
    ) -> Float[Tensor, "B h Q dv"]:
        """The fast way. causal stands for the mask of a square: the kernel skips what is above the diagonal."""
        if not self.fused:
            assert not causal
            return self.show(query, key, value, allowed, distance).output
        key, value = for_each(query, key), for_each(query, value)
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(
            query, key, value, allowed, dropout_p=dropout, is_causal=causal, scale=self.score.scale
        )

    def within(
        self,
        query: Float[Tensor, "B h Q dk"],
        key: Float[Tensor, "B g K dk"],
        value: Float[Tensor, "B g K dv"],
        spans: Spans,
    ) -> Float[Tensor, "B h Q dv"]:
        """The fast way where each query sees one span of keys, on a GPU."""
        # Not above: Triton comes with torch for CUDA only.
        from regard.nn.kernels.packed_attention import packed_attention_kernel

        key, value = for_each(query, key), for_each(query, value)
        seed = torch.randint(2**31 - 1, (1,), device=query.device, dtype=torch.int32)
        output: Tensor = packed_attention_kernel(
            *(query, key, value, spans.low, spans.high, spans.first, spans.last, seed),
            *(self.score.scale, self.dropout if self.training else 0.0),
        )[0]
        return output

    def show(
        self,
        query: Float[Tensor, "B h Q dk"],
        key: Float[Tensor, "B g K dk"],
        value: Float[Tensor, "B g K dv"],
        allowed: Bool[Tensor, "#B 1 #Q K"] | None,
        distance: Int[Tensor, "#B Q K"] | None = None,
    ) -> AttentionIntermediates:
        """The formula written out."""
        key, value = for_each(query, key), for_each(query, value)
        products: Tensor = self.score(query, key)
        if self.relation.in_scores:
            products = products + self.relation.score(query, distance)
        scores = products * self.score.scale
        masked = scores if allowed is None else scores.masked_fill(~allowed, -math.inf)
        weights = self.weighting(masked)
        kept = F.dropout(weights, self.dropout, self.training)
        output = kept @ value
        if self.relation.in_scores:
            output = output + self.relation.value(kept, distance)
        return AttentionIntermediates(query, key, value, products, scores, masked, weights, output)


def for_each(
    query: Float[Tensor, "B h Q dk"], x: Float[Tensor, "B g K dx"]
) -> Float[Tensor, "B h K dx"]:
    """Keys or values of g heads for h query heads: h / g neighbours share one."""
    shared_by = query.shape[1] // x.shape[1]
    return x if shared_by == 1 else x.repeat_interleave(shared_by, dim=1)
