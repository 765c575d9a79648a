"""Log-softmax and top-k in one GPU kernel, written in Triton: the most probable tokens of each hypothesis.

A program keeps a part of a row in registers, adds up its exponentials, and takes its maximum ``COUNT`` times. torch
writes the log-probabilities of the whole vocabulary, and its top-k kernel reads them several times.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

VOCABULARY_PART = 8192
"""logits that a program keeps in registers"""


@triton.jit
def top_tokens_kernel(
    logits, suppressed, values, tokens, log_sums, row_stride, suppressed_count, V,
    COUNT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * row_stride + token, mask=token < V, other=float("-inf"))
    x = x.to(tl.float32)
    maximum = tl.max(x, 0)
    finite = tl.where(maximum == float("-inf"), 0.0, maximum)
    # NaN in any logit, or a row without a possible token, makes this NaN or minus infinity.
    log_sum = finite + tl.log(tl.sum(tl.exp(x - finite), 0))
    tl.store(log_sums + row * parts + part, log_sum)
    for number in range(suppressed_count):
        x = tl.where(token == tl.load(suppressed + number), float("-inf"), x)
    first = (row * parts + part) * COUNT
    for rank in range(COUNT):
        best = tl.max(x, 0)
        index = tl.min(tl.where(x == best, token, V - 1), 0)  # if best is NaN: any token
        tl.store(values + first + rank, best)
        tl.store(tokens + first + rank, index.to(tl.int64))
        x = tl.where(token == index, float("-inf"), x)


def top_tokens(
    logits: Float[Tensor, "rows V"], count: int, suppressed: Int[Tensor, " suppressed"]
) -> tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]]:
    """The log-probabilities of the ``count`` most probable tokens of each row, largest first, and these tokens.

    Suppressed tokens have probability 0, but count in the softmax. Of equal tokens the smaller one comes first. If a
    logit is NaN, all log-probabilities of its row are NaN.
    """
    rows, V = logits.shape
    assert logits.stride(1) == 1
    parts = triton.cdiv(V, VOCABULARY_PART)
    values = logits.new_empty(rows, parts * count, dtype=torch.float32)
    tokens = logits.new_empty(rows, parts * count, dtype=torch.long)
    log_sums = logits.new_empty(rows, parts, dtype=torch.float32)
    top_tokens_kernel[(rows, parts)](
        logits, suppressed, values, tokens, log_sums, logits.stride(0), len(suppressed), V,
        COUNT=count, PART=min(VOCABULARY_PART, triton.next_power_of_2(V)), num_warps=8,
    )  # fmt: skip
    if parts > 1:
        values, order = values.sort(dim=1, descending=True, stable=True)
        values, tokens = values[:, :count], tokens.gather(1, order[:, :count])
        log_sums = log_sums.logsumexp(1, keepdim=True)
    return values - log_sums, tokens
