"""GPU kernels, written in Triton: LayerNorm, attention in packed rows, attention of a decoding step."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

# ---------------------------------------------------------------------------------------------
# The backward pass of LayerNorm.
#
# The gradients of gain and bias are sums over all tokens; the gradient of the input needs sums over the features of
# each token: sums along both axes of one matrix. Each program processes some of the tokens, writes the gradient of
# each, and accumulates its share of the gradients of gain and bias. The shares of all programs are added at the end.


PROGRAMS = 528
"""four for each multiprocessor of an H100 or H200"""
TOKENS = 4
"""tokens that a program processes at a time: one for each of its warps"""


@triton.jit
def backward_kernel(
    grad_output, inputs, means, scales, gain, grad_inputs, grad_sums, count,
    width: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    features = tl.arange(0, WIDTH)
    valid = features < width
    g = tl.load(gain + features, mask=valid, other=0.0).to(tl.float32)[None, :]
    grad_gain = tl.zeros([TOKENS, WIDTH], tl.float32)
    grad_bias = tl.zeros([TOKENS, WIDTH], tl.float32)
    for first in range(program * TOKENS, count, programs * TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        inside = tokens < count
        both = inside[:, None] & valid[None, :]
        indices = tokens[:, None] * width + features[None, :]
        grad_y = tl.load(grad_output + indices, mask=both, other=0.0).to(tl.float32)
        x = tl.load(inputs + indices, mask=both, other=0.0).to(tl.float32)
        mean = tl.load(means + tokens, mask=inside, other=0.0)[:, None]
        scale = tl.load(scales + tokens, mask=inside, other=0.0)[:, None]
        normed = tl.where(valid[None, :], (x - mean) * scale, 0.0)
        grad_normed = grad_y * g
        projection = tl.sum(grad_normed * normed, 1)[:, None] / width
        grad_mean = tl.sum(grad_normed, 1)[:, None] / width
        grad_x = (grad_normed - grad_mean - normed * projection) * scale
        tl.store(grad_inputs + indices, grad_x.to(grad_inputs.dtype.element_ty), mask=both)
        grad_gain += grad_y * normed
        grad_bias += grad_y
    own = grad_sums + program * width + features
    tl.store(own, tl.sum(grad_gain, 0), mask=valid)
    tl.store(own + programs * width, tl.sum(grad_bias, 0), mask=valid)


@torch.library.custom_op("regard::layer_norm_backward", mutates_args=())
def layer_norm_backward(
    grad_output: Tensor, inputs: Tensor, means: Tensor, scales: Tensor, gain: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of the inputs, and the share of each program in the gradients of gain and bias."""
    width = inputs.shape[-1]
    grad_output, inputs = grad_output.contiguous(), inputs.contiguous()
    grad_inputs = torch.empty_like(inputs)
    grad_sums = inputs.new_empty(2, PROGRAMS, width, dtype=torch.float32)
    backward_kernel[(PROGRAMS,)](
        grad_output, inputs, means, scales, gain, grad_inputs, grad_sums, inputs.numel() // width,
        width=width, WIDTH=triton.next_power_of_2(width), TOKENS=TOKENS,
    )  # fmt: skip
    return grad_inputs, grad_sums


@layer_norm_backward.register_fake
def _(grad_output, inputs, means, scales, gain):
    return (
        torch.empty_like(inputs, memory_format=torch.contiguous_format),
        inputs.new_empty(2, PROGRAMS, inputs.shape[-1], dtype=torch.float32),
    )


class CompiledLayerNorm(torch.autograd.Function):
    """LayerNorm for torch.compile: the forward pass is fused with its surroundings, the backward pass is the kernel."""

    @staticmethod
    def forward(ctx, x, gain, bias, epsilon):
        inputs = x.float()
        variance, mean = torch.var_mean(inputs, -1, keepdim=True, correction=0)
        scale = torch.rsqrt(variance + epsilon)
        ctx.save_for_backward(x, mean, scale, gain)
        return ((inputs - mean) * scale * gain + bias).to(torch.bfloat16)

    @staticmethod
    def backward(ctx, grad_output):
        grad_x, grad_sums = layer_norm_backward(grad_output, *ctx.saved_tensors)
        grad_gain, grad_bias = grad_sums.sum(1)
        return grad_x, grad_gain, grad_bias, None


def layer_norm(
    x: Float[Tensor, "B T d"], gain: Float[Tensor, " d"], bias: Float[Tensor, " d"], epsilon: float
) -> Float[Tensor, "B T d"]:
    """LayerNorm with output in bfloat16, the data type of the layers that follow."""
    normed: Tensor = CompiledLayerNorm.apply(x, gain, bias, epsilon)
    return normed


# ---------------------------------------------------------------------------------------------
# Attention in packed rows (variable-length, varlen attention): flash attention in which each query has a span of keys.
#
# A packed row holds many sentences end to end, so each query attends to one short span of keys. A tile of 64 queries
# needs only the one or two tiles of keys that its spans touch: the cost grows with the number of tokens, not with the
# length of the row. torch has no such kernel: FlexAttention has no dropout of the weights, and the kernel for ragged
# batches spends a whole tile on each sentence, however short.
#
# The weights are never stored. The dropout mask is a hash of the indices of query and key, so that the backward pass
# computes the same mask again.


TILE = 64
"""queries per tile, and keys per tile"""

# Scores are multiplied by log2(e) = 1.4427, so that exp2 can be used for exp.


@triton.jit
def tile_indices(count, TILE: tl.constexpr):
    """The row (one for each head of each batch row) and the indices of the tile that this program works on.

    The grid has one dimension: CUDA allows at most 65,535 programs in the second one.
    """
    tiles = tl.cdiv(count, TILE)
    program = tl.program_id(0)
    return (program // tiles).to(tl.int64), program % tiles * TILE + tl.arange(0, TILE)


@triton.jit
def keep_mask(seed, row, queries, keys, count, dropout):
    """The dropout mask: True where a hash of the indices (Wellons' lowbias32) is above a threshold.

    The same kind of hash as ``nn.dropout.mix_bits``, which a Triton kernel cannot call.
    """
    x = (row * count + queries).to(tl.uint32)[:, None] * 0x9E3779B1
    x ^= keys.to(tl.uint32)[None, :] * 0x85EBCA6B + seed.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x ^= x >> 16
    return (x >> 8).to(tl.float32) * (1.0 / 16777216.0) >= dropout


@triton.jit
def load_tile(base, stride, indices, count, width: tl.constexpr, WIDTH: tl.constexpr):
    """The vectors at these indices, with zeros beyond ``count`` and beyond ``width``."""
    features = tl.arange(0, WIDTH)
    inside = (indices < count)[:, None]
    if width < WIDTH:
        inside = inside & (features < width)[None, :]
    return tl.load(base + indices[:, None] * stride + features[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(base, stride, indices, count, x, width: tl.constexpr, WIDTH: tl.constexpr):
    """The inverse of ``load_tile``."""
    features = tl.arange(0, WIDTH)
    inside = (indices < count)[:, None]
    if width < WIDTH:
        inside = inside & (features < width)[None, :]
    tl.store(base + indices[:, None] * stride + features[None, :], x, mask=inside)


@triton.jit
def load_spans(starts, ends, indices, count):
    """The span of each index, and the smallest range that contains all of them."""
    inside = indices < count
    start = tl.load(starts + indices, mask=inside, other=0)
    end = tl.load(ends + indices, mask=inside, other=0)
    nonempty = end > start
    # If all spans are empty, first is far beyond last, but not so far that adding a tile overflows.
    first = tl.min(tl.where(nonempty, start, 1 << 30))
    return start, end, first, tl.max(tl.where(nonempty, end, 0))


@triton.jit
def forward_kernel(
    query, key, value, output, log_sums, key_starts, key_ends, seeds,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, ob, oh, ot,
    queries, keys, heads, d_k: tl.constexpr, d_v: tl.constexpr, scale, dropout,
    DROPOUT: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The output, and log2 of the sum of exp(score) of each query, for the backward pass."""
    row, q_index = tile_indices(queries, TILE)
    batch, head = row // heads, row % heads
    start, end, first, last = load_spans(
        key_starts + batch * queries, key_ends + batch * queries, q_index, queries
    )
    seed = tl.load(seeds)
    key += batch * kb + head * kh
    value += batch * vb + head * vh
    q = load_tile(query + batch * qb + head * qh, qt, q_index, queries, d_k, KEY)
    maximum = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    weighted = tl.zeros([TILE, VALUE], tl.float32)
    for tile in range(first, last, TILE):
        k_index = tile + tl.arange(0, TILE)
        k = load_tile(key, kt, k_index, keys, d_k, KEY)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        allowed = (k_index[None, :] >= start[:, None]) & (k_index[None, :] < end[:, None])
        scores = tl.where(allowed, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - finite[:, None])
        rescale = tl.exp2(maximum - finite)
        total = total * rescale + tl.sum(weights, 1)
        if DROPOUT:
            keep = keep_mask(seed, row, q_index, k_index, queries, dropout)
            weights = tl.where(keep, weights / (1 - dropout), 0.0)
        v = load_tile(value, vt, k_index, keys, d_v, VALUE)
        weighted = weighted * rescale[:, None]
        weighted += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        maximum = new_maximum
    total = tl.where(total == 0, 1.0, total)  # the output of a query with an empty span is 0
    weighted = weighted / total[:, None]
    output += batch * ob + head * oh
    store_tile(output, ot, q_index, queries, weighted.to(output.dtype.element_ty), d_v, VALUE)
    tl.store(log_sums + row * queries + q_index, maximum + tl.log2(total), mask=q_index < queries)


@triton.jit
def grad_query_kernel(
    query, key, value, output, grad_output, log_sums, deltas, grad_query, key_starts, key_ends, seeds,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, ob, oh, ot, gob, goh, got, gqb, gqh, gqt,
    queries, keys, heads, d_k: tl.constexpr, d_v: tl.constexpr, scale, dropout,
    DROPOUT: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries; and delta = grad_output . output of each query, which the keys need, too."""
    row, q_index = tile_indices(queries, TILE)
    batch, head = row // heads, row % heads
    start, end, first, last = load_spans(
        key_starts + batch * queries, key_ends + batch * queries, q_index, queries
    )
    seed = tl.load(seeds)
    key += batch * kb + head * kh
    value += batch * vb + head * vh
    q = load_tile(query + batch * qb + head * qh, qt, q_index, queries, d_k, KEY)
    o = load_tile(output + batch * ob + head * oh, ot, q_index, queries, d_v, VALUE)
    grad_o = load_tile(grad_output + batch * gob + head * goh, got, q_index, queries, d_v, VALUE)
    delta = tl.sum(o.to(tl.float32) * grad_o.to(tl.float32), 1)
    tl.store(deltas + row * queries + q_index, delta, mask=q_index < queries)
    log_sum = tl.load(log_sums + row * queries + q_index, mask=q_index < queries, other=0.0)
    grad_q = tl.zeros([TILE, KEY], tl.float32)
    for tile in range(first, last, TILE):
        k_index = tile + tl.arange(0, TILE)
        k = load_tile(key, kt, k_index, keys, d_k, KEY)
        v = load_tile(value, vt, k_index, keys, d_v, VALUE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        allowed = (k_index[None, :] >= start[:, None]) & (k_index[None, :] < end[:, None])
        weights = tl.where(allowed, tl.exp2(scores - log_sum[:, None]), 0.0)
        grad_weights = tl.dot(grad_o, tl.trans(v), input_precision="ieee")
        if DROPOUT:
            keep = keep_mask(seed, row, q_index, k_index, queries, dropout)
            grad_weights = tl.where(keep, grad_weights / (1 - dropout), 0.0)
        grad_scores = weights * (grad_weights - delta[:, None])
        grad_q += tl.dot(grad_scores.to(k.dtype), k, input_precision="ieee")
    grad_q = (grad_q * scale).to(grad_query.dtype.element_ty)
    store_tile(grad_query + batch * gqb + head * gqh, gqt, q_index, queries, grad_q, d_k, KEY)


@triton.jit
def grad_kv_kernel(
    query, key, value, grad_output, log_sums, deltas, grad_key, grad_value,
    key_starts, key_ends, query_starts, query_ends, seeds,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, gob, goh, got, gkb, gkh, gkt, gvb, gvh, gvt,
    queries, keys, heads, d_k: tl.constexpr, d_v: tl.constexpr, scale, dropout,
    DROPOUT: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradients of the keys and the values."""
    row, k_index = tile_indices(keys, TILE)
    batch, head = row // heads, row % heads
    _start, _end, first, last = load_spans(
        query_starts + batch * keys, query_ends + batch * keys, k_index, keys
    )
    seed = tl.load(seeds)
    key_starts += batch * queries
    key_ends += batch * queries
    query += batch * qb + head * qh
    grad_output += batch * gob + head * goh
    k = load_tile(key + batch * kb + head * kh, kt, k_index, keys, d_k, KEY)
    v = load_tile(value + batch * vb + head * vh, vt, k_index, keys, d_v, VALUE)
    grad_k = tl.zeros([TILE, KEY], tl.float32)
    grad_v = tl.zeros([TILE, VALUE], tl.float32)
    for tile in range(first, last, TILE):
        q_index = tile + tl.arange(0, TILE)
        start, end, _first, _last = load_spans(key_starts, key_ends, q_index, queries)
        q = load_tile(query, qt, q_index, queries, d_k, KEY)
        grad_o = load_tile(grad_output, got, q_index, queries, d_v, VALUE)
        log_sum = tl.load(log_sums + row * queries + q_index, mask=q_index < queries, other=0.0)
        delta = tl.load(deltas + row * queries + q_index, mask=q_index < queries, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        allowed = (k_index[None, :] >= start[:, None]) & (k_index[None, :] < end[:, None])
        weights = tl.where(allowed, tl.exp2(scores - log_sum[:, None]), 0.0)
        grad_weights = tl.dot(grad_o, tl.trans(v), input_precision="ieee")
        dropped = weights
        if DROPOUT:
            keep = keep_mask(seed, row, q_index, k_index, queries, dropout)
            dropped = tl.where(keep, weights / (1 - dropout), 0.0)
            grad_weights = tl.where(keep, grad_weights / (1 - dropout), 0.0)
        grad_v += tl.dot(tl.trans(dropped.to(grad_o.dtype)), grad_o, input_precision="ieee")
        grad_scores = weights * (grad_weights - delta[:, None])
        grad_k += tl.dot(tl.trans(grad_scores.to(q.dtype)), q, input_precision="ieee")
    grad_k = (grad_k * scale).to(grad_key.dtype.element_ty)
    store_tile(grad_key + batch * gkb + head * gkh, gkt, k_index, keys, grad_k, d_k, KEY)
    grad_v = grad_v.to(grad_value.dtype.element_ty)
    store_tile(grad_value + batch * gvb + head * gvh, gvt, k_index, keys, grad_v, d_v, VALUE)


# Kernel arguments


Vectors = Float[Tensor, "B h _ _"]


def empty_heads_last(x: Vectors) -> Vectors:
    """An empty tensor like x in which the heads of a token are side by side in memory, as linear layers need them."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def sizes(query: Vectors, key: Vectors, value: Vectors) -> tuple[int, ...]:
    return query.shape[2], key.shape[2], query.shape[1], query.shape[3], value.shape[3]


def tile_options(query: Vectors, value: Vectors) -> dict[str, int]:
    """Tile sizes: a power of two of features, at least 16."""
    # One pipeline stage: most tiles of queries need one or two tiles of keys, so there is nothing to prefetch, and the
    # shared memory saved lets more tiles run at a time.
    widths = (max(16, triton.next_power_of_2(x.shape[3])) for x in (query, value))
    return {**dict(zip(("KEY", "VALUE"), widths, strict=True)), "TILE": TILE, "num_stages": 1}


def strides(*tensors: Vectors) -> list[int]:
    assert all(x.stride(3) == 1 for x in tensors)
    assert all(x.shape[2] * x.stride(2) < 2**31 for x in tensors), "row too long for 32-bit offsets"
    return [step for x in tensors for step in x.stride()[:3]]


def grid(x: Vectors) -> tuple[int]:
    return (triton.cdiv(x.shape[2], TILE) * x.shape[0] * x.shape[1],)


# Operators for autograd and torch.compile


@torch.library.custom_op("regard::packed_attention_kernel", mutates_args=())
def packed_attention_kernel(
    query: Tensor, key: Tensor, value: Tensor,
    key_start: Tensor, key_end: Tensor, query_start: Tensor, query_end: Tensor,
    seed: Tensor, scale: float, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, and log2 of the sum of exp(score) of each query. For the spans, see ``nn/attention_mask.py``."""
    spans = key_start, key_end, query_start, query_end
    assert all(span.is_contiguous() for span in spans)
    output = empty_heads_last(query.new_empty(1).expand(*query.shape[:3], value.shape[3]))
    log_sums = query.new_empty(query.shape[:3], dtype=torch.float32)
    forward_kernel[grid(query)](
        query, key, value, output, log_sums, key_start, key_end, seed,
        *strides(query, key, value, output), *sizes(query, key, value), scale, dropout,
        DROPOUT=dropout > 0, **tile_options(query, value),
    )  # fmt: skip
    return output, log_sums


@packed_attention_kernel.register_fake
def _(query, key, value, key_start, key_end, query_start, query_end, seed, scale, dropout):
    output = empty_heads_last(query.new_empty(1).expand(*query.shape[:3], value.shape[3]))
    return output, query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op("regard::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sums: Tensor,
    key_start: Tensor, key_end: Tensor, query_start: Tensor, query_end: Tensor,
    seed: Tensor, scale: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value."""
    grad_output = grad_output if grad_output.stride(3) == 1 else grad_output.contiguous()
    grad_query, grad_key, grad_value = (empty_heads_last(x) for x in (query, key, value))
    deltas = torch.empty_like(log_sums)
    scalars = *sizes(query, key, value), scale, dropout
    options = {"DROPOUT": dropout > 0, **tile_options(query, value)}
    grad_query_kernel[grid(query)](
        query, key, value, output, grad_output, log_sums, deltas, grad_query,
        key_start, key_end, seed,
        *strides(query, key, value, output, grad_output, grad_query), *scalars, **options,
    )  # fmt: skip
    grad_kv_kernel[grid(key)](
        query, key, value, grad_output, log_sums, deltas, grad_key, grad_value,
        key_start, key_end, query_start, query_end, seed,
        *strides(query, key, value, grad_output, grad_key, grad_value), *scalars, **options,
    )  # fmt: skip
    return grad_query, grad_key, grad_value


@packed_attention_backward.register_fake
def _(grad_output, query, key, value, *rest):
    return tuple(empty_heads_last(x) for x in (query, key, value))


def _setup_context(ctx, inputs, output):
    query, key, value, *spans, seed, ctx.scale, ctx.dropout = inputs
    ctx.save_for_backward(query, key, value, *output, *spans, seed)


def _backward(ctx, grad_output, grad_log_sums):
    gradients = packed_attention_backward(grad_output, *ctx.saved_tensors, ctx.scale, ctx.dropout)
    return (*gradients, *[None] * 7)


packed_attention_kernel.register_autograd(_backward, setup_context=_setup_context)


# ---------------------------------------------------------------------------------------------
# Attention of a few queries to many keys: one step of beam search.
#
# The beams of a sentence are queries side by side that share its keys and values. One program per head of each sentence
# reads every key and value once. torch's kernels are made for many queries: 5 queries cost as much as 64.


DECODE_TILE = 32
"""keys per tile; the KV cache grows by multiples of this, or of half of it"""


@triton.jit
def decode_attention_kernel(
    query, key, value, bias, output,
    qs, qh, qt, ks, kh, kt, vs, vh, vt, bs, bq, os_, oh, ot,
    queries, keys, heads, d_k: tl.constexpr, d_v: tl.constexpr,
    BIAS: tl.constexpr, QUERIES: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    sentence, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    q_index = tl.arange(0, QUERIES)
    key += sentence * ks + head * kh
    value += sentence * vs + head * vh
    bias += sentence * bs
    q = load_tile(query + sentence * qs + head * qh, qt, q_index, queries, d_k, KEY)
    maximum = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    weighted = tl.zeros([QUERIES, VALUE], tl.float32)
    for tile in range(0, keys, TILE):
        k_index = tile + tl.arange(0, TILE)
        inside = k_index < keys
        k = load_tile(key, kt, k_index, keys, d_k, KEY)
        v = load_tile(value, vt, k_index, keys, d_v, VALUE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if BIAS:
            address = bias + q_index[:, None] * bq + k_index[None, :]
            valid = (q_index < queries)[:, None] & inside[None, :]
            scores += tl.load(address, mask=valid, other=0.0).to(tl.float32)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp(scores - new_maximum[:, None])
        rescale = tl.exp(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, 1)
        weighted = weighted * rescale[:, None]
        weighted += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        maximum = new_maximum
    weighted = (weighted / total[:, None]).to(output.dtype.element_ty)
    store_tile(output + sentence * os_ + head * oh, ot, q_index, queries, weighted, d_v, VALUE)


def decode_attention(
    query: Float[Tensor, "B h Q dk"],
    key: Float[Tensor, "B h K dk"],
    value: Float[Tensor, "B h K dv"],
    bias: Float[Tensor, "#B 1 #Q K"] | None,
) -> Float[Tensor, "B Q h*dv"]:
    """softmax(Q K^T + bias) V, with the heads of each query joined. Queries are already scaled.

    bias: 0 or minus infinity; each query must be able to attend to some key.
    """
    sentences, heads, queries, d_k = query.shape
    d_v = value.shape[3]
    output = value.new_empty(sentences, queries, heads, d_v)
    assert all(x.stride(3) == 1 for x in (query, key, value))
    bias_strides = (0, 0)
    if bias is not None:
        bias = bias.expand(sentences, 1, -1, -1)
        assert bias.stride(3) == 1
        bias_strides = bias.stride(0), bias.stride(2) if bias.shape[2] > 1 else 0
    decode_attention_kernel[(sentences * heads,)](
        query, key, value, query if bias is None else bias, output,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *bias_strides,
        output.stride(0), output.stride(2), output.stride(1),
        queries, key.shape[2], heads, d_k=d_k, d_v=d_v,
        BIAS=bias is not None, QUERIES=max(16, triton.next_power_of_2(queries)),
        KEY=max(16, triton.next_power_of_2(d_k)), VALUE=max(16, triton.next_power_of_2(d_v)),
        TILE=DECODE_TILE, num_warps=1, num_stages=2,
    )  # fmt: skip
    return output.view(sentences, queries, heads * d_v)


# ---------------------------------------------------------------------------------------------
# The residual connection and LayerNorm of a decoding step, in one pass, with output in bfloat16.


NORM_ROWS = 4
"""rows that a program normalizes: one for each of its warps"""


@triton.jit
def add_layer_norm_kernel(
    x, y, gain, bias, output, epsilon, rows,
    width: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    features = tl.arange(0, WIDTH)
    valid = features < width
    both = (row < rows)[:, None] & valid[None, :]
    indices = row[:, None] * width + features[None, :]
    total = tl.load(x + indices, mask=both, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(y + indices, mask=both, other=0.0).to(tl.float32)
    centred = tl.where(both, total - tl.sum(total, 1)[:, None] / width, 0.0)
    variance = tl.sum(centred * centred, 1)[:, None] / width
    g = tl.load(gain + features, mask=valid, other=0.0).to(tl.float32)[None, :]
    b = tl.load(bias + features, mask=valid, other=0.0).to(tl.float32)[None, :]
    normed = centred * (1.0 / tl.sqrt(variance + epsilon)) * g + b
    tl.store(output + indices, normed.to(output.dtype.element_ty), mask=both)


def add_layer_norm(
    x: Float[Tensor, "rows d"],
    y: Float[Tensor, "rows d"] | None,
    gain: Float[Tensor, " d"],
    bias: Float[Tensor, " d"],
    epsilon: float,
) -> Float[Tensor, "rows d"]:
    """LayerNorm of x + y, computed in float32, with output in bfloat16. y: None adds nothing."""
    rows, width = x.shape
    assert x.is_contiguous()
    assert y is None or y.is_contiguous()
    output = torch.empty_like(x, dtype=torch.bfloat16)
    add_layer_norm_kernel[(triton.cdiv(rows, NORM_ROWS),)](
        x, x if y is None else y, gain, bias, output, epsilon, rows,
        width=width, WIDTH=triton.next_power_of_2(width), ADD=y is not None, ROWS=NORM_ROWS,
        num_warps=NORM_ROWS,
    )  # fmt: skip
    return output
