"""Masking of input tokens: BERT's masked language model (Devlin et al. 2019), mask-predict, and word dropout."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.data.special_tokens import MASK, PAD, SPECIAL_TOKENS

MASKED, REPLACED = 0.8, 0.1
"""fractions of the selected tokens that become MASK and a random token; the rest stay unchanged"""


def mask_tokens(
    source: Int[Tensor, "B S"],
    tokens: Int[Tensor, "B S"],
    vocab_size: int,
    generator: torch.Generator | None = None,
) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B S"]]:
    """The input and the labels of masked language modelling. The labels are PAD where nothing is predicted.

    tokens: the source, with PAD where no token may be selected. Of n tokens 15% are selected, rounded, but at least
    one. Of these, 80% become MASK, 10% a random entry of the vocabulary, and 10% stay unchanged, so that the encoder
    must represent every token it reads.
    """
    device = torch.device("cpu") if generator is not None else source.device
    order, fate = torch.rand(2, *source.shape, generator=generator, device=device).to(source.device)
    random = torch.randint(
        len(SPECIAL_TOKENS), vocab_size, source.shape, generator=generator, device=device
    )
    selectable = tokens != PAD
    total = selectable.sum(1, keepdim=True)
    count = ((3 * total + 10) // 20).clamp(min=1).minimum(total)
    selected = rank_within(order, selectable) < count
    masked = selected & (fate < MASKED)
    replaced = selected & (fate >= MASKED) & (fate < MASKED + REPLACED)
    inputs = source.masked_fill(masked, MASK).where(~replaced, random.to(source.device))
    return inputs, tokens.masked_fill(~selected, PAD)


def random_token_mask(
    non_pad: Bool[Tensor, "B T"], generator: torch.Generator | None = None
) -> Bool[Tensor, "B T"]:
    """Which tokens to mask for mask-predict: between 1 and all tokens of each row, every number equally likely."""
    fraction = torch.rand(len(non_pad), device=non_pad.device, generator=generator)
    count = 1 + (fraction * non_pad.sum(1)).long()
    order = torch.rand(non_pad.shape, device=non_pad.device, generator=generator)
    return (rank_within(order, non_pad) < count[:, None]) & non_pad


def rank_within(order: Tensor, selectable: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """The rank of each value of its row, among values in [0, 1); positions that are not selectable come last."""
    return order.masked_fill(~selectable, 2.0).argsort(1).argsort(1)


def drop_tokens(
    ids: Int[Tensor, "B S"], probability: float, special_tokens: int = len(SPECIAL_TOKENS)
) -> Int[Tensor, "B S"]:
    """Word dropout: each token becomes MASK with this probability. Ids below ``special_tokens`` stay."""
    dropped = (torch.rand(ids.shape, device=ids.device) < probability) & (ids >= special_tokens)
    return ids.masked_fill(dropped, MASK)
