"""Patterns: who is compared with whom. Full attention compares all with all; the others cost only T times a constant.

A pattern stands between a sub-layer and ``Attention``. Its fast way, ``forward``, cuts queries and keys into parts and
calls the same attention on each, so every score, weighting and position works with every pattern. Its shown way,
``show``, compares all with all and masks what the pattern leaves out: quadratic, but it can be looked at, and a test
holds the two equal.
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
from regard.nn.attention import Attention, AttentionIntermediates, KeyValue, Mask, Spans
from regard.recipe import FORMATS, Registry

PATTERNS: Registry[Callable[[recipe.Model, recipe.AttentionSite], "Full"]] = Registry(
    "model.attention.encoder"
)


@PATTERNS.register(
    "full", sites=get_args(recipe.AttentionSite), packed=True, fused=True, formats=FORMATS
)
class Full(nn.Module):
    """All with all."""

    keeps_tokens = True
    """whether each key is still that of one word"""

    longest: int | None = None
    """the longest text it can read, if there is one"""

    def __init__(self, section: recipe.Model, place: recipe.AttentionSite) -> None:
        super().__init__()

    def condense(self, seen: KeyValue, real: Bool[Tensor, "B K"] | None) -> KeyValue:
        """What is kept of keys and values, once for all queries."""
        return seen

    def allowed(
        self, mask: Mask, queries: int, keys: int, device: torch.device
    ) -> Bool[Tensor, "#B 1 #Q K"] | None:
        """The whole pattern as a matrix, to be looked at."""
        return mask.matrix(queries, keys, device)

    def forward(
        self, attend: Attention, query: Float[Tensor, "B h Q dk"], seen: KeyValue, mask: Mask
    ) -> Float[Tensor, "B h Q dv"]:
        if mask.spans is not None and query.is_cuda:
            return attend.within(query, *seen, mask.spans)
        sizes = query.shape[2], seen.key.shape[2]
        # A purely causal square goes by flag: the kernel then skips what lies above the diagonal.
        if attend.fused and mask.causal and mask.real is None and sizes[0] == sizes[1]:
            return cast(Tensor, attend(query, *seen, None, causal=True))
        allowed = mask.matrix(*sizes, query.device)
        return cast(Tensor, attend(query, *seen, allowed, distances(attend, query, seen, mask)))

    def show(
        self, attend: Attention, query: Float[Tensor, "B h Q dk"], seen: KeyValue, mask: Mask
    ) -> AttentionIntermediates:
        sizes = query.shape[2], seen.key.shape[2]
        allowed = self.allowed(mask, *sizes, query.device)
        return attend.show(query, *seen, allowed, distances(attend, query, seen, mask))


def distances(
    attend: Attention, query: Float[Tensor, "B h Q dk"], seen: KeyValue, mask: Mask
) -> Int[Tensor, "#B Q K"] | None:
    """Only where a position asks for them: between two texts there are none."""
    if not attend.relation.in_scores:
        return None
    return mask.distance(query.shape[2], seen.key.shape[2], query.device)


@PATTERNS.register("window", sites=("encoder", "decoder"), options=["model.attention.window_size"])
class Window(Full):
    """Position i sees i - reach … i + reach.

    That is a span of keys, for which there is a kernel on a GPU. Elsewhere queries go in blocks, each with the keys
    around it.
    """

    edges: Int[Tensor, "2 4"]
    """of the spans of a place, what it sees and what sees it, and once more where nobody sees ahead"""

    def __init__(self, section: recipe.Model, place: recipe.AttentionSite) -> None:
        super().__init__(section, place)
        self.reach = reach = section.attention.window_size
        edges = [[-reach, reach + 1, -reach, reach + 1], [-reach, 1, 0, reach + 1]]
        self.register_buffer("edges", torch.tensor(edges, dtype=torch.int32), persistent=False)

    def allowed(
        self, mask: Mask, queries: int, keys: int, device: torch.device
    ) -> Bool[Tensor, "#B 1 #Q K"] | None:
        near = (mask.distance(queries, keys, device).abs() <= self.reach)[:, None]
        inside = mask.matrix(queries, keys, device)
        return unmask_empty_rows(near if inside is None else near & inside)

    def forward(
        self, attend: Attention, query: Float[Tensor, "B h Q dk"], seen: KeyValue, mask: Mask
    ) -> Float[Tensor, "B h Q dv"]:
        if query.shape[2] == 1:  # the newest word, in search: it needs the last few keys only
            last = KeyValue(*(part[:, :, -self.reach - 1 :] for part in seen))
            real = None if mask.real is None else mask.real[:, -self.reach - 1 :]
            return super().forward(attend, query, last, replace(mask, real=real))
        assert seen.key.shape[2] == query.shape[2], "a window is for self-attention"
        if query.is_cuda and attend.fused:
            spans = self.spans(mask, len(query), query.shape[2], query.device)
            return attend.within(query, *seen, spans)
        return self.in_blocks(attend, query, seen, mask)

    def in_blocks(
        self, attend: Attention, query: Float[Tensor, "B h T dk"], seen: KeyValue, mask: Mask
    ) -> Float[Tensor, "B h T dv"]:
        """Queries in blocks, each with the keys around it."""
        length, reach = query.shape[2], self.reach
        ahead = 0 if mask.causal else reach
        # Very small blocks would be many: a GPU takes 65,535 at once.
        cut = Blocks(length, size=max(reach, 32), before=reach, after=ahead)
        at, around = cut.places(query.device)
        distance = around[0] - at[0, :, None]
        near = (distance >= -reach) & (distance <= ahead)
        real = cut.keys(words(mask, len(query), length, query.device)[:, None, :, None])[..., 0]
        allowed = unmask_empty_rows(near & real[:, :, None])
        far = apart(len(query), at[None], around[None]) if attend.relation.in_scores else None
        heads = attend(cut.queries(query), *(cut.keys(part) for part in seen), allowed, far)
        return cut.together(heads)

    def spans(self, mask: Mask, batch: int, length: int, device: torch.device) -> Spans:
        """What each place sees, and by what it is seen: the words of its row that are near."""
        place = torch.arange(length, dtype=torch.int32, device=device)
        near = place + self.edges[int(mask.causal), :, None, None]
        if mask.real is None:
            return Spans(*near.clamp(0, length).expand(-1, batch, -1).contiguous())
        real = mask.real.int()
        start = real.argmax(1, keepdim=True).int()  # padding stands before the words, or after
        end = start + real.sum(1, keepdim=True, dtype=torch.int32)
        return Spans(*near.clamp(start, end))


class Blocks:
    """A sequence cut into blocks of queries, each with the keys from ``before`` it to ``after`` it.

    The blocks stand side by side in the batch: to attention they are sentences of their own.
    """

    def __init__(self, length: int, size: int, before: int, after: int) -> None:
        self.length, self.size, self.before, self.after = length, size, before, after
        self.count = -(-length // size)
        self.missing = self.count * size - length

    def queries(self, x: Float[Tensor, "B h T dx"]) -> Float[Tensor, "Bn h size dx"]:
        padded = F.pad(x, (0, 0, 0, self.missing))
        blocks = padded.view(*x.shape[:2], self.count, self.size, x.shape[3])
        return blocks.transpose(1, 2).flatten(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        """[B, h, T, d] to [B n, h, before + size + after, d]; beyond the ends stand zeros."""
        padded = F.pad(x, (0, 0, self.before, self.missing + self.after))
        wide = self.before + self.size + self.after
        return padded.unfold(2, wide, self.size).permute(0, 2, 1, 4, 3).flatten(0, 1)

    def places(self, device: torch.device) -> tuple[Int[Tensor, "n size"], Int[Tensor, "n wide"]]:
        """The positions of the queries of each block, and those of its keys."""
        start = torch.arange(0, self.count * self.size, self.size, device=device)[:, None]
        wide = torch.arange(-self.before, self.size + self.after, device=device)
        return start + torch.arange(self.size, device=device), start + wide

    def together(self, x: Float[Tensor, "Bn h size dx"]) -> Float[Tensor, "B h T dx"]:
        blocks = x.view(-1, self.count, *x.shape[1:])
        whole = blocks.transpose(1, 2).flatten(2, 3)
        return whole[:, :, : self.length]


@PATTERNS.register(
    "linformer",
    sites=("encoder", "cross_attention"),
    options=["model.attention.linformer_k", "model.max_length"],
)
class Linformer(Full):
    """Keys and values of T words become those of k rows: E K and F V, E and F learned (Wang et al. 2020).

    Row i of E says how much of each position goes into row i; one E and one F serve all heads of a layer. Padding goes
    into none. What is looked at are rows, no longer words.
    """

    keeps_tokens = False

    def __init__(self, section: recipe.Model, place: recipe.AttentionSite) -> None:
        super().__init__(section, place)
        self.longest = section.max_length
        rows = section.attention.linformer_k
        self.keys = nn.Parameter(torch.empty(rows, section.max_length))
        self.values = nn.Parameter(torch.empty(rows, section.max_length))
        nn.init.normal_(self.keys, std=rows**-0.5)
        nn.init.normal_(self.values, std=rows**-0.5)

    def condense(self, seen: KeyValue, real: Bool[Tensor, "B K"] | None) -> KeyValue:
        length = seen.key.shape[2]
        if length > self.keys.shape[1]:
            raise RegardError(
                f"a text of {length} tokens is longer than the {self.keys.shape[1]} linformer can read "
                "(model.max_length); cut it, or train with attention.encoder: window or bigbird"
            )
        if real is not None:
            seen = KeyValue(*(part * real[:, None, :, None] for part in seen))
        return KeyValue(self.keys[:, :length] @ seen.key, self.values[:, :length] @ seen.value)

    def allowed(
        self, mask: Mask, queries: int, keys: int, device: torch.device
    ) -> Bool[Tensor, "#B 1 #Q K"] | None:
        return None

    def forward(
        self, attend: Attention, query: Float[Tensor, "B h Q dk"], seen: KeyValue, mask: Mask
    ) -> Float[Tensor, "B h Q dv"]:
        return super().forward(attend, query, seen, Mask())


@PATTERNS.register(
    "bigbird",
    sites=("encoder",),
    options=[f"model.attention.{key}" for key in ("block_size", "global_blocks", "random_blocks")],
)
class BigBird(Full):
    """Blocks see themselves, the two beside them, the first ones and some random ones (Zaheer et al. 2020).

    The first, global, blocks see all. Which blocks are random is a fixed function of the number of a block and how many
    blocks its text has, so that a text sees the same alone and padded.
    """

    def __init__(self, section: recipe.Model, place: recipe.AttentionSite) -> None:
        super().__init__(section, place)
        attention = section.attention
        self.size = attention.block_size
        self.globals, self.randoms = attention.global_blocks, attention.random_blocks

    def chosen(self, real: Bool[Tensor, "B T"]) -> Int[Tensor, "B n slots"]:
        """The numbers of the blocks each block sees, each once; -1 fills up."""
        count = -(-real.shape[1] // self.size)
        own = -(-real.sum(1) // self.size)  # blocks of each text, without its padding
        block = torch.arange(count, device=real.device)[:, None]
        first = torch.arange(self.globals, device=real.device).expand(count, -1)
        beside = block + torch.arange(-1, 2, device=real.device)
        anywhere = mixed(block, torch.arange(self.randoms, device=real.device))
        fixed = torch.cat([first, beside], -1).expand(len(real), -1, -1)
        found = torch.cat([fixed, anywhere % own[:, None, None]], -1)
        again = (found[..., None] == found[..., None, :]).tril(-1).any(-1)
        return found.masked_fill(again | (found < 0) | (found >= count), -1)

    def allowed(
        self, mask: Mask, queries: int, keys: int, device: torch.device
    ) -> Bool[Tensor, "#B 1 #Q K"] | None:
        real = words(mask, 1, keys, device)
        chosen = self.chosen(real)
        blocks = torch.arange(chosen.shape[1], device=device)
        seen = (chosen[..., None] == blocks).any(-2) | (blocks < self.globals)[:, None]
        pairs = seen.repeat_interleave(self.size, 1).repeat_interleave(self.size, 2)
        return unmask_empty_rows((pairs[:, :queries, :keys] & real[:, None])[:, None])

    def forward(
        self, attend: Attention, query: Float[Tensor, "B h Q dk"], seen: KeyValue, mask: Mask
    ) -> Float[Tensor, "B h Q dv"]:
        assert not mask.causal, "a global block sees what comes after it"
        length = query.shape[2]
        real = words(mask, len(query), length, query.device)
        first = min(self.globals * self.size, length)
        parts = []
        if first > 0:
            parts.append(self.see_all(attend, query[:, :, :first], seen, real))
        if first < length:
            parts.append(self.see_some(attend, query[:, :, first:], seen, real))
        return torch.cat(parts, dim=2)

    def see_all(
        self,
        attend: Attention,
        query: Float[Tensor, "B h Q dk"],
        seen: KeyValue,
        real: Bool[Tensor, "B T"],
    ) -> Float[Tensor, "B h Q dv"]:
        """The global blocks, the first of the text."""
        far = None
        if attend.relation.in_scores:
            place = torch.arange(real.shape[1], device=query.device)[None, None]
            far = apart(len(query), place[:, :, : query.shape[2]], place)
        return cast(Tensor, attend(query, *seen, real[:, None, None], far))

    def see_some(
        self,
        attend: Attention,
        query: Float[Tensor, "B h Q dk"],
        seen: KeyValue,
        real: Bool[Tensor, "B T"],
    ) -> Float[Tensor, "B h Q dv"]:
        """All other blocks, the last of the text, each with copies of the blocks it sees."""
        cut = Blocks(query.shape[2], self.size, 0, 0)
        chosen = self.chosen(real)[:, -cut.count :]
        there = (chosen >= 0).repeat_interleave(self.size, -1).flatten(0, 1)
        allowed = self.pick(real[:, None, :, None], chosen)[..., 0] & there[:, None]
        far = None
        if attend.relation.in_scores:
            at, _ = cut.places(query.device)
            inside = torch.arange(self.size, device=query.device)
            around = (chosen[..., None] * self.size + inside).flatten(2)
            far = apart(len(query), at[None] + real.shape[1] - query.shape[2], around)
        keys, values = (self.pick(part, chosen) for part in seen)
        heads = attend(
            cut.queries(query), keys, values, unmask_empty_rows(allowed[:, :, None]), far
        )
        return cut.together(heads)

    def pick(
        self, x: Shaped[Tensor, "B h T dx"], chosen: Int[Tensor, "B n slots"]
    ) -> Shaped[Tensor, "Bn h wide dx"]:
        """The chosen blocks side by side, for each block of queries; whole blocks are copied at once."""
        batch, heads, length, width = x.shape
        count = -(-length // self.size)
        blocks = F.pad(x, (0, 0, 0, count * self.size - length)).reshape(-1, self.size * width)
        # Line (row, head, block) of blocks; what comes out is ordered by row, query block, head, slot.
        head = torch.arange(batch * heads, device=x.device).view(batch, 1, heads, 1)
        lines = head * count + chosen.clamp(min=0)[:, :, None]
        summary = blocks.index_select(0, lines.flatten())
        return summary.view(batch * chosen.shape[1], heads, -1, width)


def mixed(block: Int[Tensor, "n 1"], slot: Int[Tensor, " slots"]) -> Int[Tensor, "n slots"]:
    """A number below 2^32 for each pair that looks random and is always the same."""
    number = block * 0x9E3779B1 + slot * 0x85EBCA77 + 1
    for _ in range(2):
        number = number & 0xFFFFFFFF
        number = (number ^ (number >> 16)) * 0x45D9F3B
    number = number & 0xFFFFFFFF
    return number ^ (number >> 16)


def apart(
    batch: int, query: Int[Tensor, "#B n Q"], key: Int[Tensor, "#B n K"]
) -> Int[Tensor, "Bn Q K"]:
    """How far keys at these places lie from queries at those, block by block."""
    distance = key[:, :, None] - query[..., None]
    return distance.expand(batch, -1, -1, -1).flatten(0, 1)


def words(mask: Mask, batch: int, length: int, device: torch.device) -> Bool[Tensor, "B T"]:
    """Which positions are words; without padding all are."""
    if mask.real is not None:
        return mask.real
    return torch.ones(batch, length, dtype=torch.bool, device=device)


def unmask_empty_rows(allowed: Bool[Tensor, "B 1 Q K"]) -> Bool[Tensor, "B 1 Q K"]:
    """A query that sees nothing, being padding itself, sees all: nobody looks at it, but it must stay a number."""
    return allowed | ~allowed.any(-1, keepdim=True)
