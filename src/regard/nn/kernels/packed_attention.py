"""Attention among many texts in one row, as one kernel for a GPU, written in Triton.

In a packed row texts stand end to end, so each query sees the keys of one short span. A tile of 64 queries meets only
the one or two tiles of keys that its spans touch: the cost grows with the tokens, whatever the length of the row. torch
has no such kernel: FlexAttention has no dropout of the weights, and the kernel for ragged batches spends a whole tile
on each text, however short.

The weights are never in memory. Which of them dropout takes follows from a hash of their place, so that the way back
finds the same ones.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

TILE = 64
"""queries, and keys, to a tile; in the kernels exp2 stands for exp, so scores are taken times log2(e), 1.4427"""


@triton.jit
def place_of(count, TILE: tl.constexpr):
    """The row, one for each head of each text, and the tile of it that this program works on.

    They are counted through in one number: CUDA takes at most 65,535 of a second one.
    """
    tiles = tl.cdiv(count, TILE)
    number = tl.program_id(0)
    return (number // tiles).to(tl.int64), number % tiles * TILE + tl.arange(0, TILE)


@triton.jit
def kept(seed, row, queries, keys, count, dropout):
    """Which weights dropout leaves: a hash of their places (Wellons' lowbias32) above a threshold."""
    x = (row * count + queries).to(tl.uint32)[:, None] * 0x9E3779B1
    x ^= keys.to(tl.uint32)[None, :] * 0x85EBCA6B + seed.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x ^= x >> 16
    return (x >> 8).to(tl.float32) * (1.0 / 16777216.0) >= dropout


@triton.jit
def tile_of(base, stride, places, count, width: tl.constexpr, WIDTH: tl.constexpr):
    """Vectors of some places, zeros beyond the last."""
    features = tl.arange(0, WIDTH)
    inside = (places < count)[:, None]
    if width < WIDTH:
        inside = inside & (features < width)[None, :]
    return tl.load(base + places[:, None] * stride + features[None, :], mask=inside, other=0.0)


@triton.jit
def put(base, stride, places, count, x, width: tl.constexpr, WIDTH: tl.constexpr):
    features = tl.arange(0, WIDTH)
    inside = (places < count)[:, None]
    if width < WIDTH:
        inside = inside & (features < width)[None, :]
    tl.store(base + places[:, None] * stride + features[None, :], x, mask=inside)


@triton.jit
def span_of(low, high, places, count):
    """First and end of what each place sees, and of what all of them together see."""
    inside = places < count
    first = tl.load(low + places, mask=inside, other=0)
    end = tl.load(high + places, mask=inside, other=0)
    some = end > first
    # Where nobody sees anything, begin lies far behind stop, yet not so far that a step beyond it would overflow.
    begin = tl.min(tl.where(some, first, 1 << 30))
    return first, end, begin, tl.max(tl.where(some, end, 0))


@triton.jit
def forward_kernel(
    query, key, value, output, summed, low, high, seeds,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, ob, oh, ot,
    queries, keys, heads, d_k: tl.constexpr, d_v: tl.constexpr, scale, dropout,
    DROPS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, at = place_of(queries, TILE)
    batch, head = row // heads, row % heads
    first, end, begin, stop = span_of(low + batch * queries, high + batch * queries, at, queries)
    seed = tl.load(seeds)
    key += batch * kb + head * kh
    value += batch * vb + head * vh
    q = tile_of(query + batch * qb + head * qh, qt, at, queries, d_k, KEY)
    top = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, VALUE], tl.float32)
    for start in range(begin, stop, TILE):
        there = start + tl.arange(0, TILE)
        k = tile_of(key, kt, there, keys, d_k, KEY)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        seen = (there[None, :] >= first[:, None]) & (there[None, :] < end[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        if DROPS:
            stays = kept(seed, row, at, there, queries, dropout)
            weights = tl.where(stays, weights / (1 - dropout), 0.0)
        v = tile_of(value, vt, there, keys, d_v, VALUE)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    total = tl.where(total == 0, 1.0, total)  # who sees nothing gets nothing
    mixed = mixed / total[:, None]
    output += batch * ob + head * oh
    put(output, ot, at, queries, mixed.to(output.dtype.element_ty), d_v, VALUE)
    tl.store(summed + row * queries + at, top + tl.log2(total), mask=at < queries)


@triton.jit
def query_kernel(
    query, key, value, output, above, summed, products, of_query, low, high, seeds,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, ob, oh, ot, ab, ah, at_, gb, gh, gt,
    queries, keys, heads, d_k: tl.constexpr, d_v: tl.constexpr, scale, dropout,
    DROPS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries; and above . output for each of them, which the keys need too."""
    row, at = place_of(queries, TILE)
    batch, head = row // heads, row % heads
    first, end, begin, stop = span_of(low + batch * queries, high + batch * queries, at, queries)
    seed = tl.load(seeds)
    key += batch * kb + head * kh
    value += batch * vb + head * vh
    q = tile_of(query + batch * qb + head * qh, qt, at, queries, d_k, KEY)
    o = tile_of(output + batch * ob + head * oh, ot, at, queries, d_v, VALUE)
    a = tile_of(above + batch * ab + head * ah, at_, at, queries, d_v, VALUE)
    product = tl.sum(o.to(tl.float32) * a.to(tl.float32), 1)
    tl.store(products + row * queries + at, product, mask=at < queries)
    log_sum = tl.load(summed + row * queries + at, mask=at < queries, other=0.0)
    gradient = tl.zeros([TILE, KEY], tl.float32)
    for start in range(begin, stop, TILE):
        there = start + tl.arange(0, TILE)
        k = tile_of(key, kt, there, keys, d_k, KEY)
        v = tile_of(value, vt, there, keys, d_v, VALUE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        seen = (there[None, :] >= first[:, None]) & (there[None, :] < end[:, None])
        weights = tl.where(seen, tl.exp2(scores - log_sum[:, None]), 0.0)
        of_weights = tl.dot(a, tl.trans(v), input_precision="ieee")
        if DROPS:
            stays = kept(seed, row, at, there, queries, dropout)
            of_weights = tl.where(stays, of_weights / (1 - dropout), 0.0)
        of_scores = weights * (of_weights - product[:, None])
        gradient += tl.dot(of_scores.to(k.dtype), k, input_precision="ieee")
    gradient = (gradient * scale).to(of_query.dtype.element_ty)
    put(of_query + batch * gb + head * gh, gt, at, queries, gradient, d_k, KEY)


@triton.jit
def key_kernel(
    query, key, value, above, summed, products, of_key, of_value, low, high, first_, last_, seeds,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, ab, ah, at_, gb, gh, gt, ub, uh, ut,
    queries, keys, heads, d_k: tl.constexpr, d_v: tl.constexpr, scale, dropout,
    DROPS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradients of the keys and of the values."""
    row, there = place_of(keys, TILE)
    batch, head = row // heads, row % heads
    _first, _end, begin, stop = span_of(first_ + batch * keys, last_ + batch * keys, there, keys)
    seed = tl.load(seeds)
    low += batch * queries
    high += batch * queries
    query += batch * qb + head * qh
    above += batch * ab + head * ah
    k = tile_of(key + batch * kb + head * kh, kt, there, keys, d_k, KEY)
    v = tile_of(value + batch * vb + head * vh, vt, there, keys, d_v, VALUE)
    of_k = tl.zeros([TILE, KEY], tl.float32)
    of_v = tl.zeros([TILE, VALUE], tl.float32)
    for start in range(begin, stop, TILE):
        at = start + tl.arange(0, TILE)
        first, end, _low, _high = span_of(low, high, at, queries)
        q = tile_of(query, qt, at, queries, d_k, KEY)
        a = tile_of(above, at_, at, queries, d_v, VALUE)
        log_sum = tl.load(summed + row * queries + at, mask=at < queries, other=0.0)
        product = tl.load(products + row * queries + at, mask=at < queries, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        seen = (there[None, :] >= first[:, None]) & (there[None, :] < end[:, None])
        weights = tl.where(seen, tl.exp2(scores - log_sum[:, None]), 0.0)
        of_weights = tl.dot(a, tl.trans(v), input_precision="ieee")
        left = weights
        if DROPS:
            stays = kept(seed, row, at, there, queries, dropout)
            left = tl.where(stays, weights / (1 - dropout), 0.0)
            of_weights = tl.where(stays, of_weights / (1 - dropout), 0.0)
        of_v += tl.dot(tl.trans(left.to(a.dtype)), a, input_precision="ieee")
        of_scores = weights * (of_weights - product[:, None])
        of_k += tl.dot(tl.trans(of_scores.to(q.dtype)), q, input_precision="ieee")
    of_k = (of_k * scale).to(of_key.dtype.element_ty)
    put(of_key + batch * gb + head * gh, gt, there, keys, of_k, d_k, KEY)
    of_v = of_v.to(of_value.dtype.element_ty)
    put(of_value + batch * ub + head * uh, ut, there, keys, of_v, d_v, VALUE)


Vectors = Float[Tensor, "B h _ _"]


def side_by_side(x: Vectors) -> Vectors:
    """Room for x in which the heads of a word stand side by side, as the linear maps want them."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def sizes(query: Vectors, key: Vectors, value: Vectors) -> tuple[int, ...]:
    return query.shape[2], key.shape[2], query.shape[1], query.shape[3], value.shape[3]


def padded(query: Vectors, value: Vectors) -> dict[str, int]:
    """Tiles have powers of two of features, 16 at least."""
    # One stage: most tiles of queries meet one or two tiles of keys, so there is nothing to fetch ahead, and the room
    # it would take lets more tiles run at once.
    widths = (max(16, triton.next_power_of_2(x.shape[3])) for x in (query, value))
    return {**dict(zip(("KEY", "VALUE"), widths, strict=True)), "TILE": TILE, "num_stages": 1}


def strides(*tensors: Vectors) -> list[int]:
    assert all(x.stride(3) == 1 for x in tensors)
    assert all(x.shape[2] * x.stride(2) < 2**31 for x in tensors), (
        "a row too long for its addresses"
    )
    return [step for x in tensors for step in x.stride()[:3]]


def tiles(x: Vectors) -> tuple[int]:
    return (triton.cdiv(x.shape[2], TILE) * x.shape[0] * x.shape[1],)


@torch.library.custom_op("regard::packed_attention_kernel", mutates_args=())
def packed_attention_kernel(
    query: Tensor, key: Tensor, value: Tensor, low: Tensor, high: Tensor, first: Tensor, last: Tensor,
    seed: Tensor, scale: float, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert all(spans.is_contiguous() for spans in (low, high, first, last))
    output = side_by_side(query.new_empty(1).expand(*query.shape[:3], value.shape[3]))
    summed = query.new_empty(query.shape[:3], dtype=torch.float32)
    forward_kernel[tiles(query)](
        query, key, value, output, summed, low, high, seed,
        *strides(query, key, value, output), *sizes(query, key, value), scale, dropout,
        DROPS=dropout > 0, **padded(query, value),
    )  # fmt: skip
    return output, summed


@packed_attention_kernel.register_fake
def _(query, key, value, low, high, first, last, seed, scale, dropout):
    output = side_by_side(query.new_empty(1).expand(*query.shape[:3], value.shape[3]))
    return output, query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op("regard::attend_in_texts_backward", mutates_args=())
def attend_in_texts_backward(
    above: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, summed: Tensor,
    low: Tensor, high: Tensor, first: Tensor, last: Tensor, seed: Tensor, scale: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    above = above if above.stride(3) == 1 else above.contiguous()
    of_query, of_key, of_value = (side_by_side(x) for x in (query, key, value))
    products = torch.empty_like(summed)
    numbers = *sizes(query, key, value), scale, dropout
    shape = {"DROPS": dropout > 0, **padded(query, value)}
    query_kernel[tiles(query)](
        query, key, value, output, above, summed, products, of_query, low, high, seed,
        *strides(query, key, value, output, above, of_query), *numbers, **shape,
    )  # fmt: skip
    key_kernel[tiles(key)](
        query, key, value, above, summed, products, of_key, of_value, low, high, first, last, seed,
        *strides(query, key, value, above, of_key, of_value), *numbers, **shape,
    )  # fmt: skip
    return of_query, of_key, of_value


@attend_in_texts_backward.register_fake
def _(above, query, key, value, *rest):
    return tuple(side_by_side(x) for x in (query, key, value))


def _setup(ctx, inputs, output):
    query, key, value, low, high, first, last, seed, ctx.scale, ctx.dropout = inputs
    ctx.save_for_backward(query, key, value, *output, low, high, first, last, seed)


def _backward(ctx, above, of_summed):
    of = attend_in_texts_backward(above, *ctx.saved_tensors, ctx.scale, ctx.dropout)
    return (*of, *[None] * 7)


packed_attention_kernel.register_autograd(_backward, setup_context=_setup)
