"""Mask-predict: all words at once, then the least sure ones again, round by round (Ghazvininejad et al. 2019).

In the first round every place is hidden. In round r of R, T (R - r + 1) / R of the T words, rounded down, are hidden
again: those the model was least sure of when it said them. It guesses them from the others. One round is plain
non-autoregressive translation. Several lengths of one sentence go side by side, and the translation with the highest
mean log-probability is the best.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decoding.hypotheses import NEG_INF, Hypothesis

Predict = Callable[
    [Int[Tensor, "rows T"], Bool[Tensor, "rows T"]],
    Float[Tensor, "places V"],
]
"""What stands in each row, and which places are hidden, to the logits at those places, row after row.

The logits are given away: they are written over.
"""


class Iteration(NamedTuple):
    """One round as it can be watched. Rows are sentences times candidates, those of one sentence side by side."""

    read: Int[Tensor, "rows T"]
    said: Int[Tensor, "rows T"]
    log_probabilities: Float[Tensor, "rows T"]


@torch.no_grad()
def mask_predict(
    predict: Predict,
    lengths: Int[Tensor, "sentences candidates"],
    *,
    iterations: int,
    mask: int,
    pad: int,
    end: int,
    nbest: int = 1,
    banned: Sequence[int] = (),
    observer: Callable[[Iteration], None] | None = None,
) -> list[list[Hypothesis]]:
    """The nbest candidates of each sentence, best first. A length of 0 is no candidate.

    Each candidate is cut at the first EOS; ban EOS where the length is the whole truth.
    """
    assert iterations >= 1
    T = lengths.flatten()
    real = torch.arange(max(1, int(T.max())), device=T.device) < T[:, None]
    never = torch.tensor(banned, dtype=torch.long, device=T.device)
    said = torch.where(real, mask, pad)
    sureness = torch.zeros(real.shape, device=T.device)
    for left in range(iterations, 0, -1):
        hidden = _least_sure(sureness, real, T * left // iterations)
        if not hidden.any():  # in a short text the last iterations have nothing to hide
            break
        read = said.masked_fill(hidden, mask)
        words, values = _most_probable(predict(read, hidden), never)
        said = read.masked_scatter(hidden, words)
        sureness = sureness.masked_scatter(hidden, values)
        if observer is not None:
            observer(Iteration(read, said, sureness))
    found = _read(said, sureness, lengths, end, always_ends=end in banned)
    return [sorted(some, key=lambda one: one.score, reverse=True)[:nbest] for some in found]


def _least_sure(
    sureness: Float[Tensor, "rows T"], real: Bool[Tensor, "rows T"], count: Int[Tensor, "rows"]
) -> Bool[Tensor, "rows T"]:
    """The count places of each row with the lowest log-probability; of equal ones the first."""
    order = sureness.masked_fill(~real, torch.inf).argsort(dim=1, stable=True)
    rank = order.argsort(dim=1)
    return rank < count[:, None]


def _most_probable(
    logits: Float[Tensor, "places V"], never: Int[Tensor, "banned"]
) -> tuple[Int[Tensor, "places"], Float[Tensor, "places"]]:
    """The best word of each place that may come, and its log-probability as the model has it."""
    logits = logits.float()
    logits -= logits.amax(-1, keepdim=True)  # now the sum is no large number, and nothing is lost
    total = logits.logsumexp(-1)
    best = logits.index_fill_(1, never, NEG_INF).max(-1)
    return best.indices, best.values - total


def _read(
    said: Int[Tensor, "rows T"],
    log_probabilities: Float[Tensor, "rows T"],
    lengths: Int[Tensor, "sentences candidates"],
    end: int,
    always_ends: bool,
) -> list[list[Hypothesis]]:
    """All candidates of each sentence."""
    shape = (*lengths.shape, said.shape[1])
    tokens: list[list[list[int]]] = said.view(shape).tolist()
    values: list[list[list[float]]] = log_probabilities.view(shape).tolist()
    return [
        [
            _cut(words[:length], each[:length], end, always_ends)
            for words, each, length in zip(*candidates, strict=True)
            if length
        ]
        for candidates in zip(tokens, values, lengths.tolist(), strict=True)
    ]


def _cut(
    words: list[int], log_probabilities: list[float], end: int, always_ends: bool
) -> Hypothesis:
    """One candidate up to its first EOS; its score is the mean, EOS counted."""
    length = words.index(end) if end in words else len(words)
    kept = log_probabilities[: length + 1]
    return Hypothesis(
        tokens=words[:length],
        log_probability=sum(kept),
        score=sum(kept) / len(kept),
        token_log_probabilities=kept,
        finished=always_ends or length < len(words),
    )
