"""Attention patterns: which keys each query attends to. All but full attention are sparse attention, linear in T.

A pattern sits between a layer and ``Attention``. Its ``forward``, the fast path, cuts queries and keys into blocks and
calls the same attention on each, so every score, weighting and position works with every pattern. Its
``attention_with_weights`` computes full attention with a mask: quadratic, but it returns the weights. A test checks
that the two agree.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import cast, get_args

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from regard import recipe
from regard.errors import RegardError
from regard.nn.attention import Attention, AttentionIntermediates
from regard.nn.attention_mask import AttentionMask, AttentionSpans, unmask_empty_rows
from regard.nn.dropout import mix_bits
from regard.nn.kv_cache import KeyValue
from regard.recipe import FORMATS, Registry

PATTERNS: Registry[Callable[[recipe.ModelConfig, recipe.AttentionSite], "FullAttention"]] = (
    Registry("model.attention.encoder")
)


@PATTERNS.register(
    "full",
    sites=get_args(recipe.AttentionSite),
    packed_batches=True,
    fast_inference=True,
    formats=FORMATS,
)
class FullAttention(nn.Module):
    """Every query attends to every key."""

    keeps_tokens = True
    """whether each key still belongs to one token"""

    max_length: int | None = None
    """the longest sequence it supports; None if there is no limit"""

    def __init__(self, config: recipe.ModelConfig, site: recipe.AttentionSite) -> None:
        super().__init__()

    def project_kv(self, kv: KeyValue, non_pad: Bool[Tensor, "B K"] | None) -> KeyValue:
        """Applied once to keys and values, before any query attends to them."""
        return kv

    def allowed(
        self, mask: AttentionMask, queries: int, keys: int, device: torch.device
    ) -> Bool[Tensor, "#B 1 #Q K"] | None:
        """The mask and the pattern as one matrix; None if every query may attend to every key."""
        return mask.matrix(queries, keys, device)

    def forward(
        self,
        attention: Attention,
        query: Float[Tensor, "B h Q dk"],
        kv: KeyValue,
        mask: AttentionMask,
    ) -> Float[Tensor, "B h Q dv"]:
        """The fast path."""
        if mask.spans is not None and (query.is_cuda or attention.packed_kernel is not None):
            return attention.span_attention(query, *kv, mask.spans)
        sizes = query.shape[2], kv.key.shape[2]
        # For a causal square without padding, a flag lets the kernel skip everything above the diagonal.
        if attention.uses_sdpa and mask.causal and mask.non_pad is None and sizes[0] == sizes[1]:
            return cast(Tensor, attention(query, *kv, None, causal=True))
        allowed = mask.matrix(*sizes, query.device)
        return cast(Tensor, attention(query, *kv, allowed, distances(attention, query, kv, mask)))

    def attention_with_weights(
        self,
        attention: Attention,
        query: Float[Tensor, "B h Q dk"],
        kv: KeyValue,
        mask: AttentionMask,
    ) -> AttentionIntermediates:
        """The same attention with all intermediates, by a mask over all pairs of query and key."""
        allowed = self.allowed(mask, query.shape[2], kv.key.shape[2], query.device)
        distance = distances(attention, query, kv, mask)
        return attention.attention_with_weights(query, *kv, allowed, distance)


def distances(
    attention: Attention, query: Float[Tensor, "B h Q dk"], kv: KeyValue, mask: AttentionMask
) -> Int[Tensor, "#B Q K"] | None:
    """The distance from each query to each key, if the positional encoding needs it."""
    if not attention.position.in_scores:
        return None
    return mask.distance(query.shape[2], kv.key.shape[2], query.device)


# Sliding window


@PATTERNS.register("window", sites=("encoder", "decoder"), options=["model.attention.window_size"])
class SlidingWindow(FullAttention):
    """Sliding window attention (local attention): position i attends to i - window_size … i + window_size.

    These keys are a span, for which there is a kernel on a GPU. On a CPU, queries are cut into blocks, and each block
    attends to the keys around it.
    """

    edges: Int[Tensor, "2 4"]
    """offsets from a position to its ``AttentionSpans``; the second row is for causal attention"""

    def __init__(self, config: recipe.ModelConfig, site: recipe.AttentionSite) -> None:
        super().__init__(config, site)
        self.size = size = config.attention.window_size
        edges = [[-size, size + 1, -size, size + 1], [-size, 1, 0, size + 1]]
        self.register_buffer("edges", torch.tensor(edges, dtype=torch.int32), persistent=False)

    def allowed(
        self, mask: AttentionMask, queries: int, keys: int, device: torch.device
    ) -> Bool[Tensor, "#B 1 #Q K"] | None:
        in_window = (mask.distance(queries, keys, device).abs() <= self.size)[:, None]
        allowed = mask.matrix(queries, keys, device)
        return unmask_empty_rows(in_window if allowed is None else in_window & allowed)

    def forward(
        self,
        attention: Attention,
        query: Float[Tensor, "B h Q dk"],
        kv: KeyValue,
        mask: AttentionMask,
    ) -> Float[Tensor, "B h Q dv"]:
        if query.shape[2] == 1:  # a decoding step: the newest token needs only the last keys
            last_kv = KeyValue(*(tensor[:, :, -self.size - 1 :] for tensor in kv))
            non_pad = None if mask.non_pad is None else mask.non_pad[:, -self.size - 1 :]
            return super().forward(attention, query, last_kv, replace(mask, non_pad=non_pad))
        assert kv.key.shape[2] == query.shape[2], "window attention is self-attention"
        if query.is_cuda and attention.uses_sdpa:
            spans = self.spans(mask, len(query), query.shape[2], query.device)
            return attention.span_attention(query, *kv, spans)
        return self.blockwise_attention(attention, query, kv, mask)

    def blockwise_attention(
        self,
        attention: Attention,
        query: Float[Tensor, "B h T dk"],
        kv: KeyValue,
        mask: AttentionMask,
    ) -> Float[Tensor, "B h T dv"]:
        """Each block of queries attends to the keys around it."""
        length, size = query.shape[2], self.size
        ahead = 0 if mask.causal else size
        # At least 32 queries per block: very small blocks would be too many, since a GPU takes at most 65,535.
        blocks = Blocks(length, size=max(size, 32), before=size, after=ahead)
        queries, keys = blocks.positions(query.device)
        distance = keys[0] - queries[0, :, None]
        in_window = (distance >= -size) & (distance <= ahead)
        non_pad = non_pad_or_ones(mask, len(query), length, query.device)
        non_pad = blocks.keys(non_pad[:, None, :, None])[..., 0]
        allowed = unmask_empty_rows(in_window & non_pad[:, :, None])
        key_distances = None
        if attention.position.in_scores:
            key_distances = block_distances(len(query), queries[None], keys[None])
        kv_blocks = (blocks.keys(tensor) for tensor in kv)
        return blocks.merge(attention(blocks.queries(query), *kv_blocks, allowed, key_distances))

    def spans(
        self, mask: AttentionMask, batch: int, length: int, device: torch.device
    ) -> AttentionSpans:
        """The window of each position, cut to the tokens of its text."""
        position = torch.arange(length, dtype=torch.int32, device=device)
        edges = position + self.edges[int(mask.causal), :, None, None]
        if mask.non_pad is None:
            return AttentionSpans(*edges.clamp(0, length).expand(-1, batch, -1).contiguous())
        non_pad = mask.non_pad.int()
        start = non_pad.argmax(1, keepdim=True).int()  # padding is before the tokens, or after them
        end = start + non_pad.sum(1, keepdim=True, dtype=torch.int32)
        return AttentionSpans(*edges.clamp(start, end))


class Blocks:
    """A sequence cut into blocks of ``size`` queries, each with the keys from ``before`` it to ``after`` it.

    The blocks become rows of the batch, so attention treats them as separate sentences.
    """

    def __init__(self, length: int, size: int, before: int, after: int) -> None:
        self.length, self.size, self.before, self.after = length, size, before, after
        self.count = -(-length // size)
        self.padding = self.count * size - length

    def queries(self, x: Float[Tensor, "B h T dx"]) -> Float[Tensor, "Bn h size dx"]:
        padded = F.pad(x, (0, 0, 0, self.padding))
        blocks = padded.view(*x.shape[:2], self.count, self.size, x.shape[3])
        return blocks.transpose(1, 2).flatten(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        """[B, h, T, d] to [B n, h, before + size + after, d], with zeros beyond both ends."""
        padded = F.pad(x, (0, 0, self.before, self.padding + self.after))
        wide = self.before + self.size + self.after
        return padded.unfold(2, wide, self.size).permute(0, 2, 1, 4, 3).flatten(0, 1)

    def positions(
        self, device: torch.device
    ) -> tuple[Int[Tensor, "n size"], Int[Tensor, "n wide"]]:
        """The positions of the queries of each block, and of its keys."""
        start = torch.arange(0, self.count * self.size, self.size, device=device)[:, None]
        wide = torch.arange(-self.before, self.size + self.after, device=device)
        return start + torch.arange(self.size, device=device), start + wide

    def merge(self, x: Float[Tensor, "Bn h size dx"]) -> Float[Tensor, "B h T dx"]:
        """The inverse of ``queries``."""
        blocks = x.view(-1, self.count, *x.shape[1:])
        sequence = blocks.transpose(1, 2).flatten(2, 3)
        return sequence[:, :, : self.length]


def block_distances(
    batch: int, queries: Int[Tensor, "#B n Q"], keys: Int[Tensor, "#B n K"]
) -> Int[Tensor, "Bn Q K"]:
    """The distance from each query to each key of its block, given their positions."""
    distance = keys[:, :, None] - queries[..., None]
    return distance.expand(batch, -1, -1, -1).flatten(0, 1)


def non_pad_or_ones(
    mask: AttentionMask, batch: int, length: int, device: torch.device
) -> Bool[Tensor, "B T"]:
    """The padding mask; all True if there is no padding."""
    if mask.non_pad is not None:
        return mask.non_pad
    return torch.ones(batch, length, dtype=torch.bool, device=device)


# Linformer


@PATTERNS.register(
    "linformer",
    sites=("encoder", "cross_attention"),
    options=["model.attention.linformer_k", "model.max_length"],
)
class Linformer(FullAttention):
    """Keys and values of T tokens are projected to k rows: E K and F V with learned E and F (Wang et al. 2020).

    All heads of a layer share one E and one F. Padding does not enter the projection. Queries attend to rows, which no
    longer belong to single tokens.
    """

    keeps_tokens = False

    def __init__(self, config: recipe.ModelConfig, site: recipe.AttentionSite) -> None:
        super().__init__(config, site)
        self.max_length = config.max_length
        rows = config.attention.linformer_k
        self.keys = nn.Parameter(torch.empty(rows, config.max_length))
        self.values = nn.Parameter(torch.empty(rows, config.max_length))
        nn.init.normal_(self.keys, std=rows**-0.5)
        nn.init.normal_(self.values, std=rows**-0.5)

    def project_kv(self, kv: KeyValue, non_pad: Bool[Tensor, "B K"] | None) -> KeyValue:
        length = kv.key.shape[2]
        if length > self.keys.shape[1]:
            raise RegardError(
                f"a text of {length} tokens is longer than the {self.keys.shape[1]} positions of linformer "
                "(model.max_length); shorten it, or train with attention.encoder: window or bigbird"
            )
        if non_pad is not None:
            kv = KeyValue(*(tensor * non_pad[:, None, :, None] for tensor in kv))
        return KeyValue(self.keys[:, :length] @ kv.key, self.values[:, :length] @ kv.value)

    def allowed(
        self, mask: AttentionMask, queries: int, keys: int, device: torch.device
    ) -> Bool[Tensor, "#B 1 #Q K"] | None:
        return None

    def forward(
        self,
        attention: Attention,
        query: Float[Tensor, "B h Q dk"],
        kv: KeyValue,
        mask: AttentionMask,
    ) -> Float[Tensor, "B h Q dv"]:
        return super().forward(attention, query, kv, AttentionMask())


# BigBird


@PATTERNS.register(
    "bigbird",
    sites=("encoder",),
    options=[f"model.attention.{key}" for key in ("block_size", "global_blocks", "random_blocks")],
)
class BigBird(FullAttention):
    """Each block attends to itself, its neighbours, the first blocks and some random ones (Zaheer et al. 2020).

    The first, global blocks attend to everything. The random blocks are a fixed function of the index of a block and
    the number of blocks of its text, so padding does not change them.
    """

    def __init__(self, config: recipe.ModelConfig, site: recipe.AttentionSite) -> None:
        super().__init__(config, site)
        attention = config.attention
        self.size = attention.block_size
        self.global_blocks = attention.global_blocks
        self.random_blocks = attention.random_blocks

    def visible_blocks(self, non_pad: Bool[Tensor, "B T"]) -> Int[Tensor, "B n slots"]:
        """The indices of the blocks that each block attends to, without repeats; unused slots are -1."""
        device = non_pad.device
        count = -(-non_pad.shape[1] // self.size)
        text_blocks = -(-non_pad.sum(1) // self.size)  # blocks of each text, without its padding
        block = torch.arange(count, device=device)[:, None]
        global_blocks = torch.arange(self.global_blocks, device=device).expand(count, -1)
        neighbours = block + torch.arange(-1, 2, device=device)
        random = random_integers(block, torch.arange(self.random_blocks, device=device))
        fixed = torch.cat([global_blocks, neighbours], -1).expand(len(non_pad), -1, -1)
        visible = torch.cat([fixed, random % text_blocks[:, None, None]], -1)
        repeated = (visible[..., None] == visible[..., None, :]).tril(-1).any(-1)
        return visible.masked_fill(repeated | (visible < 0) | (visible >= count), -1)

    def allowed(
        self, mask: AttentionMask, queries: int, keys: int, device: torch.device
    ) -> Bool[Tensor, "#B 1 #Q K"] | None:
        non_pad = non_pad_or_ones(mask, 1, keys, device)
        visible = self.visible_blocks(non_pad)
        blocks = torch.arange(visible.shape[1], device=device)
        pairs = (visible[..., None] == blocks).any(-2) | (blocks < self.global_blocks)[:, None]
        pairs = pairs.repeat_interleave(self.size, 1).repeat_interleave(self.size, 2)
        return unmask_empty_rows((pairs[:, :queries, :keys] & non_pad[:, None])[:, None])

    def forward(
        self,
        attention: Attention,
        query: Float[Tensor, "B h Q dk"],
        kv: KeyValue,
        mask: AttentionMask,
    ) -> Float[Tensor, "B h Q dv"]:
        assert not mask.causal, "global blocks attend to later positions"
        length = query.shape[2]
        non_pad = non_pad_or_ones(mask, len(query), length, query.device)
        global_length = min(self.global_blocks * self.size, length)
        outputs = []
        if global_length > 0:
            outputs.append(
                self.global_attention(attention, query[:, :, :global_length], kv, non_pad)
            )
        if global_length < length:
            outputs.append(
                self.block_attention(attention, query[:, :, global_length:], kv, non_pad)
            )
        return torch.cat(outputs, dim=2)

    def global_attention(
        self,
        attention: Attention,
        query: Float[Tensor, "B h Q dk"],
        kv: KeyValue,
        non_pad: Bool[Tensor, "B T"],
    ) -> Float[Tensor, "B h Q dv"]:
        """The queries of the global blocks, the first of the text, attend to all keys."""
        key_distances = None
        if attention.position.in_scores:
            position = torch.arange(non_pad.shape[1], device=query.device)[None, None]
            key_distances = block_distances(len(query), position[:, :, : query.shape[2]], position)
        return cast(Tensor, attention(query, *kv, non_pad[:, None, None], key_distances))

    def block_attention(
        self,
        attention: Attention,
        query: Float[Tensor, "B h Q dk"],
        kv: KeyValue,
        non_pad: Bool[Tensor, "B T"],
    ) -> Float[Tensor, "B h Q dv"]:
        """The queries of all other blocks, the last of the text, attend to copies of their visible blocks."""
        blocks = Blocks(query.shape[2], self.size, 0, 0)
        visible = self.visible_blocks(non_pad)[:, -blocks.count :]
        is_visible = (visible >= 0).repeat_interleave(self.size, -1).flatten(0, 1)
        allowed = (
            self.gather_blocks(non_pad[:, None, :, None], visible)[..., 0] & is_visible[:, None]
        )
        key_distances = None
        if attention.position.in_scores:
            queries, _ = blocks.positions(query.device)
            offsets = torch.arange(self.size, device=query.device)
            positions = (visible[..., None] * self.size + offsets).flatten(2)
            start = non_pad.shape[1] - query.shape[2]
            key_distances = block_distances(len(query), queries[None] + start, positions)
        keys, values = (self.gather_blocks(tensor, visible) for tensor in kv)
        allowed = unmask_empty_rows(allowed[:, :, None])
        return blocks.merge(attention(blocks.queries(query), keys, values, allowed, key_distances))

    def gather_blocks(
        self, x: Shaped[Tensor, "B h T dx"], visible: Int[Tensor, "B n slots"]
    ) -> Shaped[Tensor, "Bn h wide dx"]:
        """The visible blocks of each query block, side by side; whole blocks are copied at once."""
        batch, heads, length, width = x.shape
        count = -(-length // self.size)
        blocks = F.pad(x, (0, 0, 0, count * self.size - length)).reshape(-1, self.size * width)
        # The rows of ``blocks`` are ordered by sentence, head, block; the output by sentence, query block, head, slot.
        head = torch.arange(batch * heads, device=x.device).view(batch, 1, heads, 1)
        rows = head * count + visible.clamp(min=0)[:, :, None]
        gathered = blocks.index_select(0, rows.flatten())
        return gathered.view(batch * visible.shape[1], heads, -1, width)


def random_integers(
    block: Int[Tensor, "n 1"], slot: Int[Tensor, " slots"]
) -> Int[Tensor, "n slots"]:
    """A pseudo-random integer below 2^32 for each pair, always the same."""
    x = (block * 0x9E3779B1 + slot * 0x85EBCA77 + 1) & 0xFFFFFFFF
    return mix_bits(x, ((16, 0x45D9F3B), (16, 0x45D9F3B)))
