"""The attention mask: which keys each query may attend to, for padding, causal attention and packed rows.

A mask is described by its parts; it becomes a matrix only when a kernel needs one.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class AttentionSpans:
    """A mask in which each query attends to one span of keys: packed sentences, or windows.

    Each end is one past the last index. Spans at padding do not matter: nothing attends to padding.
    """

    key_start: Int[Tensor, "B Q"]
    key_end: Int[Tensor, "B Q"]
    """the keys that each query attends to"""
    query_start: Int[Tensor, "B K"]
    query_end: Int[Tensor, "B K"]
    """the queries that attend to each key, for the backward pass"""

    def matrix(self) -> Bool[Tensor, "B 1 Q K"]:
        key = torch.arange(self.query_start.shape[1], device=self.query_start.device)
        return ((key >= self.key_start[:, :, None]) & (key < self.key_end[:, :, None]))[:, None]


@dataclass(frozen=True)
class AttentionMask:
    """The attention mask: which keys each query may attend to; the padding mask and the causal mask together.

    True means *may attend*, as in torch's scaled_dot_product_attention.
    """

    non_pad: Bool[Tensor, "B K"] | None = None
    """the padding mask: True at keys that are not padding; None: there is no padding"""
    causal: bool = False
    """position i attends to j <= i only; the queries are the last positions of the keys"""
    tree_distance: Int[Tensor, "B K K"] | None = None
    """distance in the dependency tree, for ``position: tree``"""
    spans: AttentionSpans | None = None
    """for packed rows: the whole mask, causality included"""

    def matrix(
        self, queries: int, keys: int, device: torch.device
    ) -> Bool[Tensor, "#B 1 #Q K"] | None:
        """The mask as a matrix; None if every query may attend to every key."""
        if self.spans is not None:
            return unmask_empty_rows(self.spans.matrix())
        allowed = None if self.non_pad is None else self.non_pad[:, None, None, :]
        if self.causal and queries > 1:
            causal = causal_mask(queries, keys, device)
            if allowed is None:
                return causal
            allowed = allowed & causal
        return None if allowed is None else unmask_empty_rows(allowed)

    def distance(self, queries: int, keys: int, device: torch.device) -> Int[Tensor, "#B Q K"]:
        """Position of each key minus position of each query: positive if the key comes later."""
        if self.tree_distance is not None:
            return self.tree_distance
        position = torch.arange(keys, device=device)
        return (position - position[keys - queries :, None])[None]


def causal_mask(queries: int, keys: int, device: torch.device) -> Bool[Tensor, "1 1 Q K"]:
    """True where the key is not later than the query; the queries are the last of the keys."""
    square = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return square.tril(keys - queries)[None, None]


def unmask_empty_rows(allowed: Bool[Tensor, "#B 1 #Q K"]) -> Bool[Tensor, "#B 1 #Q K"]:
    """Let a query that may attend to nothing attend to everything, so that softmax does not give NaN.

    Such a query is padding, or its whole text is. Nothing attends to it, so its output does not matter.
    """
    return allowed | ~allowed.any(-1, keepdim=True)
