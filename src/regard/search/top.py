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
    if x.is_cuda or chunks <= 4 * count:
        return x.topk(min(count, x.shape[-1]))
    whole = x[..., : chunks * CHUNK].unflatten(-1, (chunks, CHUNK))  # type: ignore[no-untyped-call]
    best = whole.amax(-1).topk(count, sorted=False).indices
    some = whole.gather(-2, best.unsqueeze(-1).expand(*best.shape, CHUNK)).flatten(-2)
    places = (best.unsqueeze(-1) * CHUNK + torch.arange(CHUNK)).flatten(-2)
    rest = x[..., chunks * CHUNK :]
    if rest.shape[-1]:
        more = torch.arange(chunks * CHUNK, x.shape[-1]).expand(*rest.shape)
        some, places = torch.cat([some, rest], -1), torch.cat([places, more], -1)
    values, which = some.topk(count)
    return values, places.gather(-1, which)
