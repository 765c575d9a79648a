"""Multi-head attention (section 3.2.2 of the paper): several heads look at once, each in its own way.

One form serves all three uses. A sub-layer asks ``keys_values(x)`` of whatever is looked at and hands the result to
``forward``: for self-attention x is the layer's own input, for the decoder's earlier words it is a cache, for
encoder-decoder attention it is computed once for each source sentence.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from regard import recipe
from regard.nn.attention import Attention, AttentionIntermediates, KeyValue, Mask
from regard.nn.positions import POSITIONS, AttentionPosition
from regard.nn.sparse_attention import PATTERNS


class MultiHeadAttention(nn.Module):
    """Concat(head_1 … head_h) W^O, with head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    The W_i of all heads stand side by side in one matrix. d_k and d_v are free and may differ.
    """

    def __init__(self, section: recipe.Model, place: recipe.AttentionSite) -> None:
        super().__init__()
        width, heads, attention = section.d_model, section.heads, section.attention
        groups = attention.key_value_heads or heads
        self.heads, self.groups = heads, groups
        self.query = nn.Linear(width, heads * section.d_k, attention.bias)
        self.key = nn.Linear(width, groups * section.d_k, attention.bias)
        self.value = nn.Linear(width, groups * section.d_v, attention.bias)
        self.output = nn.Linear(heads * section.d_v, width, attention.bias)
        relation = (
            AttentionPosition
            if place == "cross_attention"
            else POSITIONS[section.position].on(place).attention
        )
        self.relation = relation(section)
        self.attention = Attention(section, self.relation)
        self.pattern = PATTERNS[getattr(attention, place)](section, place)
        self.watch: Callable[[AttentionIntermediates], None] | None = None
        """when set, attention goes the shown way and each result is handed to this function"""
        self.gate: Float[Tensor, " h"] | None = None
        """when set, each head's output is multiplied by its number: 0 mutes a head"""

    def keys_values(
        self, x: Float[Tensor, "B K d"], real: Bool[Tensor, "B K"] | None = None, start: int = 0
    ) -> KeyValue:
        """What x has to offer; start is the position of its first word."""
        key = self.relation.turn(split(self.key(x), self.groups), start)
        return self.pattern.condense(KeyValue(key, split(self.value(x), self.groups)), real)

    def forward(
        self, x: Float[Tensor, "B Q d"], seen: KeyValue, mask: Mask
    ) -> Float[Tensor, "B Q d"]:
        """In self-attention the queries are the last positions of the keys."""
        query = split(self.query(x), self.heads)
        query = self.relation.turn(query, seen.key.shape[2] - query.shape[2])
        return self.look(query, seen, mask)

    def among(self, x: Float[Tensor, "B T d"], mask: Mask) -> Float[Tensor, "B T d"]:
        """Self-attention in packed rows: one product for queries, keys and values."""
        query, key, value = at_once([self.query, self.key, self.value], x)
        # A relation minds the distance of two words alone, so their places in the row will do.
        queries, keys = (
            self.relation.turn(split(made, heads), 0)
            for made, heads in ((query, self.heads), (key, self.groups))
        )
        return self.look(queries, KeyValue(keys, split(value, self.groups)), mask)

    def look(
        self, query: Float[Tensor, "B h Q dk"], seen: KeyValue, mask: Mask
    ) -> Float[Tensor, "B Q d"]:
        if self.watch is not None:
            shown = self.pattern.show(self.attention, query, seen, mask)
            self.watch(shown)
            heads = shown.output
        else:
            heads = self.pattern(self.attention, query, seen, mask)
        if self.gate is not None:
            heads = heads * self.gate[:, None, None]
        joined: Float[Tensor, "B Q d"] = self.output(join(heads))
        return joined


@contextmanager
def record_attention(
    parts: Iterable[MultiHeadAttention],
) -> Iterator[dict[nn.Module, AttentionIntermediates]]:
    """Attention goes the shown way for the time of the with-block; what each part showed last, by part."""
    parts = list(parts)
    shown: dict[nn.Module, AttentionIntermediates] = {}
    try:
        for part in parts:
            part.watch = lambda seen, part=part: shown.__setitem__(part, seen)
        yield shown
    finally:
        for part in parts:
            part.watch = None


def at_once(maps: Sequence[nn.Linear], x: Float[Tensor, "B T d"]) -> Sequence[Tensor]:
    """The same as each linear map of x, in one product: a GPU fills up better, and reads x once."""
    weight = torch.cat([one.weight for one in maps])
    biases: list[Tensor] = [one.bias for one in maps if one.bias is not None]
    together = F.linear(x, weight, torch.cat(biases) if biases else None)
    return torch.split_with_sizes(together, [one.out_features for one in maps], dim=-1)


def split(x: Float[Tensor, "B T hd"], heads: int) -> Float[Tensor, "B h T dh"]:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def join(x: Float[Tensor, "B h T dh"]) -> Float[Tensor, "B T hd"]:
    return x.transpose(1, 2).flatten(2)
