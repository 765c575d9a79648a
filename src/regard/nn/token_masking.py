"""Words hidden to be guessed from the others: BERT's masked words (Devlin et al. 2019), and word dropout."""

import torch
from jaxtyping import Int
from torch import Tensor

from regard.data.special_tokens import MASK, PAD, SPECIAL_TOKENS

HIDDEN, EXCHANGED = 0.8, 0.1
"""of those: how many show MASK, and how many another word; the rest stay as they are"""


def hide(
    source: Int[Tensor, "B S"],
    words: Int[Tensor, "B S"],
    size: int,
    generator: torch.Generator | None = None,
) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B S"]]:
    """What the encoder is shown in place of the source, and what is wanted: the hidden words, PAD elsewhere.

    words is PAD where there is nothing to guess. Of n words 0.15 n are chosen, rounded, but one at least; of these 80
    in 100 show MASK, 10 another entry of the ``size`` in the vocabulary, and 10 stay, so that the encoder must know
    every word it sees.
    """
    place = torch.device("cpu") if generator is not None else source.device
    order, fate = torch.rand(2, *source.shape, generator=generator, device=place).to(source.device)
    other = torch.randint(
        len(SPECIAL_TOKENS), size, source.shape, generator=generator, device=place
    )
    real = words != PAD
    count = real.sum(1, keepdim=True)
    wanted = ((3 * count + 10) // 20).clamp(min=1).minimum(count)
    # The words with the smallest numbers are chosen: as many as are wanted of each text.
    rank = order.masked_fill(~real, 2.0).argsort(1).argsort(1)
    chosen = rank < wanted
    hidden = chosen & (fate < HIDDEN)
    exchanged = chosen & (fate >= HIDDEN) & (fate < HIDDEN + EXCHANGED)
    shown = source.masked_fill(hidden, MASK).where(~exchanged, other.to(source.device))
    return shown, words.masked_fill(~chosen, PAD)


def drop_words(
    source: Int[Tensor, "B S"], share: float, marks: int = len(SPECIAL_TOKENS)
) -> Int[Tensor, "B S"]:
    """Each word shows MASK with this probability; ids below ``marks`` stay."""
    dropped = (torch.rand(source.shape, device=source.device) < share) & (source >= marks)
    return source.masked_fill(dropped, MASK)
