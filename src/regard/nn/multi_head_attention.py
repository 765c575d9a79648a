"""Multi-head attention (section 3.2.2 of the paper): several heads attend in parallel, each with its own projections.

One class serves all three uses. A layer calls ``keys_values(x)`` on what is attended to and passes the result to
``forward``: in self-attention x is the layer's own input, with a KV cache only its newest positions, and in
cross-attention x is the encoder output, projected once per source sentence.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from regard import recipe
from regard.nn.attention import Attention, AttentionIntermediates
from regard.nn.attention_mask import AttentionMask
from regard.nn.attention_patterns import PATTERNS
from regard.nn.kv_cache import KeyValue
from regard.nn.positions import POSITIONS, AttentionPosition


class MultiHeadAttention(nn.Module):
    """Concat(head_1 … head_h) W^O, with head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    The W_i of all heads are side by side in one matrix. d_k and d_v are free and may differ. The site is where a module
    is used: ``encoder`` or ``decoder`` for self-attention, or ``cross_attention``.
    """

    def __init__(self, config: recipe.ModelConfig, site: recipe.AttentionSite) -> None:
        super().__init__()
        d_model, heads, attention = config.d_model, config.heads, config.attention
        kv_heads = attention.key_value_heads or heads
        self.heads, self.kv_heads = heads, kv_heads
        self.query = nn.Linear(d_model, heads * config.d_k, attention.bias)
        self.key = nn.Linear(d_model, kv_heads * config.d_k, attention.bias)
        self.value = nn.Linear(d_model, kv_heads * config.d_v, attention.bias)
        self.output = nn.Linear(heads * config.d_v, d_model, attention.bias)
        position = (
            AttentionPosition  # no positional term: two texts have no common order
            if site == "cross_attention"
            else POSITIONS[config.position].for_site(site).attention
        )
        self.position = position(config)
        self.attention = Attention(config, self.position)
        self.pattern = PATTERNS[getattr(attention, site)](config, site)
        self.observer: Callable[[AttentionIntermediates], None] | None = None
        """if set, attention runs with all intermediates, and they are passed to this function"""
        self.gate: Float[Tensor, " h"] | None = None
        """if set, the output of each head is multiplied by its value: 0 removes a head"""

    def keys_values(
        self, x: Float[Tensor, "B K d"], non_pad: Bool[Tensor, "B K"] | None = None, start: int = 0
    ) -> KeyValue:
        """The keys and values of x. start: the position of its first token."""
        key = self.position.rotate(split_heads(self.key(x), self.kv_heads), start)
        value = split_heads(self.value(x), self.kv_heads)
        return self.pattern.project_kv(KeyValue(key, value), non_pad)

    def forward(
        self, x: Float[Tensor, "B Q d"], kv: KeyValue, mask: AttentionMask
    ) -> Float[Tensor, "B Q d"]:
        """Attend from x to kv. In self-attention the queries are the last positions of the keys."""
        query = split_heads(self.query(x), self.heads)
        query = self.position.rotate(query, kv.key.shape[2] - query.shape[2])
        return self.attend(query, kv, mask)

    def packed_attention(
        self, x: Float[Tensor, "B T d"], mask: AttentionMask
    ) -> Float[Tensor, "B T d"]:
        """Self-attention in packed rows, with one matrix product for queries, keys and values."""
        query, key, value = fused_linear([self.query, self.key, self.value], x)
        # Positions in the row will do: only the distance between two tokens matters here.
        queries, keys = (
            self.position.rotate(split_heads(projected, heads), 0)
            for projected, heads in ((query, self.heads), (key, self.kv_heads))
        )
        return self.attend(queries, KeyValue(keys, split_heads(value, self.kv_heads)), mask)

    def attend(
        self, query: Float[Tensor, "B h Q dk"], kv: KeyValue, mask: AttentionMask
    ) -> Float[Tensor, "B Q d"]:
        """Attention of all heads, and the output projection."""
        if self.observer is not None:
            intermediates = self.pattern.attention_with_weights(self.attention, query, kv, mask)
            self.observer(intermediates)
            heads = intermediates.output
        else:
            heads = self.pattern(self.attention, query, kv, mask)
        if self.gate is not None:
            heads = heads * self.gate[:, None, None]
        output: Float[Tensor, "B Q d"] = self.output(join_heads(heads))
        return output


@contextmanager
def record_attention(
    modules: Iterable[MultiHeadAttention],
) -> Iterator[dict[nn.Module, AttentionIntermediates]]:
    """Record attention for the duration of the with-block: the latest intermediates of each module, by module."""
    modules = list(modules)
    recorded: dict[nn.Module, AttentionIntermediates] = {}
    try:
        for module in modules:
            module.observer = lambda latest, module=module: recorded.__setitem__(module, latest)
        yield recorded
    finally:
        for module in modules:
            module.observer = None


def fused_linear(layers: Sequence[nn.Linear], x: Float[Tensor, "B T d"]) -> Sequence[Tensor]:
    """The output of each linear layer for x, computed as one matrix product: faster on a GPU, which reads x once."""
    weight = torch.cat([layer.weight for layer in layers])
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    outputs = F.linear(x, weight, torch.cat(biases) if biases else None)
    return torch.split_with_sizes(outputs, [layer.out_features for layer in layers], dim=-1)


def split_heads(x: Float[Tensor, "B T hd"], heads: int) -> Float[Tensor, "B h T dh"]:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def join_heads(x: Float[Tensor, "B h T dh"]) -> Float[Tensor, "B T hd"]:
    return x.transpose(1, 2).flatten(2)
