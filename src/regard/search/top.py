"""The best few of many, without sorting the many."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK = 64
"""tokens of which only the best is looked at first"""


def top(
    x: Float[Tensor, "*rows V"], count: int
) -> tuple[Float[Tensor, "*rows k"], Int[Tensor, "*rows k"]]:
    """The largest, largest first, and where they stand: ``topk``, sooner where there are many on a CPU.

    The largest ``count`` numbers stand in the ``count`` chunks with the largest maxima.
    """
    chunks = x.shape[-1] // CHUNK
    if not in_chunks(x, count):
        return x.topk(min(count, x.shape[-1]))
    whole = x[..., : chunks * CHUNK].view(*x.shape[:-1], chunks, CHUNK)
    best = whole.amax(-1).topk(count, sorted=False).indices
    some = whole.gather(-2, best.unsqueeze(-1).expand(*best.shape, CHUNK)).flatten(-2)
    places = (best.unsqueeze(-1) * CHUNK + torch.arange(CHUNK)).flatten(-2)
    rest = x[..., chunks * CHUNK :]
    if rest.shape[-1]:
        more = torch.arange(chunks * CHUNK, x.shape[-1]).expand(*rest.shape)
        some, places = torch.cat([some, rest], -1), torch.cat([places, more], -1)
    values, which = some.topk(count)
    return values, places.gather(-1, which)


def in_chunks(x: Float[Tensor, "*rows V"], count: int) -> bool:
    """Whether to look at the best of each chunk first saves time."""
    return not x.is_cuda and x.shape[-1] // CHUNK > 4 * count


def top_sums(
    x: Float[Tensor, "sentences beams V"], totals: Float[Tensor, "sentences beams"], count: int
) -> tuple[Float[Tensor, "sentences k"], Int[Tensor, "sentences k"]]:
    """The largest of each sentence in ``x`` with its total added, and where they stand, counted through beams and V.

    No number counts as minus infinity; of equal ones that are taken the first comes first. For where chunks save time.
    """
    V = x.shape[2]
    chunks = V // CHUNK
    end = chunks * CHUNK
    maxima = _sums(totals, x[..., :end].view(*x.shape[:2], chunks, CHUNK).amax(-1))
    chunk = maxima.flatten(1).topk(count, sorted=False).indices
    beams = chunk // chunks
    first = chunk * CHUNK + beams * (V - end)
    places = (first.unsqueeze(2) + torch.arange(CHUNK)).flatten(1)
    some = x.flatten(1).gather(1, places).view(-1, count, CHUNK)
    sums = _sums(totals.gather(1, beams), some).flatten(1)
    if end < V:
        rest = torch.arange(x.shape[1]).unsqueeze(1) * V + torch.arange(end, V)
        places = torch.cat([places, rest.flatten().expand(len(x), -1)], dim=1)
        sums = torch.cat([sums, _sums(totals, x[..., end:]).flatten(1)], dim=1)
    values, which = sums.topk(count, sorted=False)
    places, order = places.gather(1, which).sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, places.gather(1, order)


def _sums(
    totals: Float[Tensor, "sentences some"], x: Float[Tensor, "sentences some more"]
) -> Float[Tensor, "sentences some more"]:
    sums = totals.unsqueeze(2) + x
    return sums.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
