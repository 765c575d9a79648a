"""Top-k over a large vocabulary on a CPU. On a GPU, ``fused_top_k`` computes it together with log-softmax.

The k largest values are in the k chunks with the largest maxima, so only these chunks need to be sorted.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK = 64
"""values per chunk"""


def chunks_are_faster(x: Float[Tensor, "*rows V"], count: int) -> bool:
    """Whether selecting chunks first is faster than ``topk`` over all values."""
    return not x.is_cuda and x.shape[-1] // CHUNK > 4 * count


def top_k(
    x: Float[Tensor, "*rows V"], count: int
) -> tuple[Float[Tensor, "*rows k"], Int[Tensor, "*rows k"]]:
    """The largest values, largest first, and their indices: ``torch.topk``, but faster for large V on a CPU."""
    chunks = x.shape[-1] // CHUNK
    if not chunks_are_faster(x, count):
        return x.topk(min(count, x.shape[-1]))
    chunked = x[..., : chunks * CHUNK].view(*x.shape[:-1], chunks, CHUNK)
    best_chunks = chunked.amax(-1).topk(count, sorted=False).indices.unsqueeze(-1)
    values = chunked.gather(-2, best_chunks.expand(*best_chunks.shape[:-1], CHUNK)).flatten(-2)
    indices = (best_chunks * CHUNK + torch.arange(CHUNK)).flatten(-2)
    remainder = x[..., chunks * CHUNK :]
    if remainder.shape[-1]:
        remainder_indices = torch.arange(chunks * CHUNK, x.shape[-1]).expand(*remainder.shape)
        values = torch.cat([values, remainder], -1)
        indices = torch.cat([indices, remainder_indices], -1)
    values, order = values.topk(count)
    return values, indices.gather(-1, order)


def top_k_sums(
    x: Float[Tensor, "sentences beams V"], totals: Float[Tensor, "sentences beams"], count: int
) -> tuple[Float[Tensor, "sentences k"], Int[Tensor, "sentences k"]]:
    """The largest values of ``totals[..., None] + x`` of each sentence, and their indices into (beams, V) flattened.

    NaN counts as minus infinity. Of equal values the one with the smaller index comes first. Only for inputs for which
    ``chunks_are_faster``.
    """
    V = x.shape[2]
    chunks = V // CHUNK
    end = chunks * CHUNK
    maxima = _sums(totals, x[..., :end].view(*x.shape[:2], chunks, CHUNK).amax(-1))
    best_chunks = maxima.flatten(1).topk(count, sorted=False).indices
    beams = best_chunks // chunks
    first_indices = best_chunks * CHUNK + beams * (V - end)
    indices = (first_indices.unsqueeze(2) + torch.arange(CHUNK)).flatten(1)
    values = x.flatten(1).gather(1, indices).view(-1, count, CHUNK)
    sums = _sums(totals.gather(1, beams), values).flatten(1)
    if end < V:
        remainder = torch.arange(x.shape[1]).unsqueeze(1) * V + torch.arange(end, V)
        indices = torch.cat([indices, remainder.flatten().expand(len(x), -1)], dim=1)
        sums = torch.cat([sums, _sums(totals, x[..., end:]).flatten(1)], dim=1)
    values, order = sums.topk(count, sorted=False)
    # Sort by index, then stably by value.
    indices, order = indices.gather(1, order).sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, indices.gather(1, order)


def _sums(
    totals: Float[Tensor, "sentences n"], x: Float[Tensor, "sentences n m"]
) -> Float[Tensor, "sentences n m"]:
    sums = totals.unsqueeze(2) + x
    return sums.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
