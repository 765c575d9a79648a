"""Attention of a few queries to many keys, as one kernel for a GPU, written in Triton: a step of search.

The beams of a sentence are queries side by side that share its keys and values. There is one program for each head of
each sentence; it reads every key and value once. torch's kernels are made for many queries, and spend on five of them
what they would on 64.
"""

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from regard.nn.kernels.packed_attention import put, tile_of

TILE = 32
"""keys that are looked at together; slots come in such numbers or halves of them"""


@triton.jit
def few_kernel(
    query, key, value, bias, output,
    qs, qh, qt, ks, kh, kt, vs, vh, vt, bs, bq, os_, oh, ot,
    queries, keys, heads, d_k: tl.constexpr, d_v: tl.constexpr,
    HIDES: tl.constexpr, QUERIES: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    sentence, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    asks = tl.arange(0, QUERIES)
    key += sentence * ks + head * kh
    value += sentence * vs + head * vh
    bias += sentence * bs
    q = tile_of(query + sentence * qs + head * qh, qt, asks, queries, d_k, KEY)
    best = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    found = tl.zeros([QUERIES, VALUE], tl.float32)
    for start in range(0, keys, TILE):
        at = start + tl.arange(0, TILE)
        there = at < keys
        k = tile_of(key, kt, at, keys, d_k, KEY)
        v = tile_of(value, vt, at, keys, d_v, VALUE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HIDES:
            hidden = bias + asks[:, None] * bq + at[None, :]
            some = (asks < queries)[:, None] & there[None, :]
            scores += tl.load(hidden, mask=some, other=0.0).to(tl.float32)
        scores = tl.where(there[None, :], scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - better[:, None])
        shrink = tl.exp(best - better)
        total = total * shrink + tl.sum(weights, 1)
        found = found * shrink[:, None]
        found += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = better
    found = (found / total[:, None]).to(output.dtype.element_ty)
    put(output + sentence * os_ + head * oh, ot, asks, queries, found, d_v, VALUE)


def decode_attention(
    query: Float[Tensor, "S h Q dk"],
    key: Float[Tensor, "S h K dk"],
    value: Float[Tensor, "S h K dv"],
    bias: Float[Tensor, "#S 1 #Q K"] | None,
) -> Float[Tensor, "S Q h*dv"]:
    """Softmax of query . key + bias, times value; each query sees some key. The heads of a query stand side by side."""
    sentences, heads, queries, width = query.shape
    out = value.shape[3]
    output = value.new_empty(sentences, queries, heads, out)
    assert all(x.stride(3) == 1 for x in (query, key, value))
    hides = (0, 0)
    if bias is not None:
        bias = bias.expand(sentences, 1, -1, -1)
        assert bias.stride(3) == 1
        hides = bias.stride(0), bias.stride(2) if bias.shape[2] > 1 else 0
    few_kernel[(sentences * heads,)](
        query, key, value, query if bias is None else bias, output,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *hides,
        output.stride(0), output.stride(2), output.stride(1),
        queries, key.shape[2], heads, d_k=width, d_v=out,
        HIDES=bias is not None, QUERIES=max(16, triton.next_power_of_2(queries)),
        KEY=max(16, triton.next_power_of_2(width)), VALUE=max(16, triton.next_power_of_2(out)),
        TILE=TILE, num_warps=1, num_stages=2,
    )  # fmt: skip
    return output.view(sentences, queries, heads * out)
