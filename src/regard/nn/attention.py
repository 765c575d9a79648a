"""Attention: which positions look at which, and what they take from there (section 3.2 of the paper).

What is notable:
- Two ways to the same output. The *fast* way, ``forward``, goes through torch's fused kernels and never keeps the
  weights. The *shown* way, ``show``, is the formula written out and returns every intermediate. A test holds the two
  equal.
- One form serves all three uses. A sub-layer asks ``keys_values(x)`` of whatever is looked at and hands the result
  to ``forward``: for self-attention x is the layer's own input, for the decoder's earlier words it is a cache, for
  encoder-decoder attention it is computed once for each source sentence.
- ``Mask`` says who may look at whom without building a matrix until a kernel wants one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from regard import recipe


@dataclass(frozen=True)
class Mask:
    """Who may look at whom. True means *may look*, as in torch's attention and unlike torch's Transformer."""

    real: Bool[Tensor, "B K"] | None = None
    """keys that are words, not padding; None: all are"""
    causal: bool = False
    """position i sees j <= i only; queries and keys begin at the same position"""

    def matrix(
        self, queries: int, keys: int, device: torch.device
    ) -> Bool[Tensor, "#B 1 #Q K"] | None:
        """The mask as the kernels want it; None when everybody sees everything."""
        allowed = None if self.real is None else self.real[:, None, None, :]
        if not self.causal:
            return allowed
        earlier = torch.ones(queries, keys, dtype=torch.bool, device=device).tril()[None, None]
        return earlier if allowed is None else allowed & earlier


class Shown(NamedTuple):
    """Every intermediate of one attention, in the order of the formula. Rows are queries, columns are keys."""

    query: Float[Tensor, "B h Q dk"]
    key: Float[Tensor, "B h K dk"]
    value: Float[Tensor, "B h K dv"]
    products: Float[Tensor, "B h Q K"]
    """Q K^T"""
    scores: Float[Tensor, "B h Q K"]
    """Q K^T / sqrt(d_k)"""
    masked: Float[Tensor, "B h Q K"]
    """minus infinity where the query may not look"""
    weights: Float[Tensor, "B h Q K"]
    """softmax of each row: sums to 1"""
    output: Float[Tensor, "B h Q dv"]
    """weights V"""


class ScaledDotProduct(nn.Module):
    """softmax(Q K^T / sqrt(d_k)) V."""

    def __init__(self, key_width: int) -> None:
        super().__init__()
        self.scale = 1 / math.sqrt(key_width)

    def forward(
        self,
        query: Float[Tensor, "B h Q dk"],
        key: Float[Tensor, "B h K dk"],
        value: Float[Tensor, "B h K dv"],
        mask: Mask,
        dropout: float = 0.0,
    ) -> Float[Tensor, "B h Q dv"]:
        # A purely causal mask goes by flag: the kernel then skips what lies above the diagonal.
        by_flag = mask.causal and mask.real is None
        matrix = None if by_flag else mask.matrix(query.shape[2], key.shape[2], query.device)
        return F.scaled_dot_product_attention(
            query, key, value, matrix, dropout_p=dropout, is_causal=by_flag, scale=self.scale
        )

    def show(
        self,
        query: Float[Tensor, "B h Q dk"],
        key: Float[Tensor, "B h K dk"],
        value: Float[Tensor, "B h K dv"],
        mask: Mask,
    ) -> Shown:
        products = query @ key.transpose(-2, -1)
        scores = products * self.scale
        allowed = mask.matrix(query.shape[2], key.shape[2], query.device)
        masked = scores if allowed is None else scores.masked_fill(~allowed, -math.inf)
        weights = masked.softmax(dim=-1)
        return Shown(query, key, value, products, scores, masked, weights, weights @ value)


class UnscaledDotProduct(ScaledDotProduct):
    """softmax(Q K^T) V: what the scale is there to mend."""

    def __init__(self, key_width: int) -> None:
        super().__init__(key_width)
        self.scale = 1.0


SCORES: dict[recipe.Score, type[ScaledDotProduct]] = {
    "scaled": ScaledDotProduct,
    "unscaled": UnscaledDotProduct,
}


class KeysValues(NamedTuple):
    """What can be looked at, already projected and split into heads."""

    key: Float[Tensor, "B h K dk"]
    value: Float[Tensor, "B h K dv"]

    def select(self, rows: Tensor) -> "KeysValues":
        return KeysValues(self.key.index_select(0, rows), self.value.index_select(0, rows))

    def followed_by(self, later: "KeysValues") -> "KeysValues":
        return KeysValues(
            torch.cat([self.key, later.key], dim=2), torch.cat([self.value, later.value], dim=2)
        )


class MultiHeadAttention(nn.Module):
    """Concat(head_1 … head_h) W^O, with head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    The W_i of all heads stand side by side in one matrix. d_k and d_v are free and may differ.
    """

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()
        width, heads, attention = section.width, section.heads, section.attention
        self.heads = heads
        self.query = nn.Linear(width, heads * section.key_width, attention.bias)
        self.key = nn.Linear(width, heads * section.key_width, attention.bias)
        self.value = nn.Linear(width, heads * section.value_width, attention.bias)
        self.output = nn.Linear(heads * section.value_width, width, attention.bias)
        self.score = SCORES[attention.score](section.key_width)
        self.dropout = section.attention_dropout
        self.watch: Callable[[Shown], None] | None = None
        """when set, attention goes the shown way and each result is handed to this function"""
        self.gate: Float[Tensor, " h"] | None = None
        """when set, each head's output is multiplied by its number: 0 mutes a head"""

    def keys_values(self, x: Float[Tensor, "B K d"]) -> KeysValues:
        return KeysValues(self.split(self.key(x)), self.split(self.value(x)))

    def forward(
        self, x: Float[Tensor, "B Q d"], seen: KeysValues, mask: Mask
    ) -> Float[Tensor, "B Q d"]:
        query = self.split(self.query(x))
        if self.watch is not None:
            shown = self.score.show(query, *seen, mask)
            self.watch(shown)
            heads = shown.output
        else:
            heads = self.score(query, *seen, mask, self.dropout if self.training else 0.0)
        if self.gate is not None:
            heads = heads * self.gate[:, None, None]
        joined: Float[Tensor, "B Q d"] = self.output(self.join(heads))
        return joined

    def split(self, x: Float[Tensor, "B T hd"]) -> Float[Tensor, "B h T dh"]:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def join(self, x: Float[Tensor, "B h T dh"]) -> Float[Tensor, "B T hd"]:
        return x.transpose(1, 2).flatten(2)
