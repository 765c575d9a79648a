"""Attention of a few queries to many keys as a GPU kernel, written in Triton: one step of beam search.

The beams of a sentence are queries side by side that share its keys and values. One program per head of each sentence
reads every key and value once. torch's kernels are made for many queries: 5 queries cost as much as 64.
"""

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from regard.nn.kernels.packed_attention import load_tile, store_tile

TILE = 32
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
        TILE=TILE, num_warps=1, num_stages=2,
    )  # fmt: skip
    return output.view(sentences, queries, heads * d_v)
