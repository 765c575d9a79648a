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
    best = chunked.amax(-1).topk(count, sorted=False).indices
    values = chunked.gather(-2, best.unsqueeze(-1).expand(*best.shape, CHUNK)).flatten(-2)
    indices = (best.unsqueeze(-1) * CHUNK + torch.arange(CHUNK)).flatten(-2)
    rest = x[..., chunks * CHUNK :]
    if rest.shape[-1]:
        rest_indices = torch.arange(chunks * CHUNK, x.shape[-1]).expand(*rest.shape)
        values, indices = torch.cat([values, rest], -1), torch.cat([indices, rest_indices], -1)
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
    best = maxima.flatten(1).topk(count, sorted=False).indices
    beams = best // chunks
    first = best * CHUNK + beams * (V - end)
    indices = (first.unsqueeze(2) + torch.arange(CHUNK)).flatten(1)
    values = x.flatten(1).gather(1, indices).view(-1, count, CHUNK)
    sums = _sums(totals.gather(1, beams), values).flatten(1)
    if end < V:
        rest = torch.arange(x.shape[1]).unsqueeze(1) * V + torch.arange(end, V)
        indices = torch.cat([indices, rest.flatten().expand(len(x), -1)], dim=1)
        sums = torch.cat([sums, _sums(totals, x[..., end:]).flatten(1)], dim=1)
    values, order = sums.topk(count, sorted=False)
    # Sort by index, then stably by value.
    indices, order = indices.gather(1, order).sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, indices.gather(1, order)


def _sums(
    totals: Float[Tensor, "sentences some"], x: Float[Tensor, "sentences some more"]
) -> Float[Tensor, "sentences some more"]:
    sums = totals.unsqueeze(2) + x
    return sums.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
