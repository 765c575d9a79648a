"""Mask-predict: predict all tokens at once, then mask and predict the least confident ones again.

Ghazvininejad et al. 2019, "Mask-Predict: Parallel Decoding of Conditional Masked Language Models".

In the first iteration every position is masked. In iteration t of N, floor(T (N - t + 1) / N) of the T tokens are
masked again: those with the lowest log-probability when they were predicted. They are predicted from the others. One
iteration is plain non-autoregressive translation. Several candidate lengths of a sentence are decoded in parallel, and
the candidate with the highest mean log-probability is the best.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decoding.hypothesis import NEG_INF, Hypothesis

PredictFunction = Callable[
    [Int[Tensor, "rows T"], Bool[Tensor, "rows T"]], Float[Tensor, "masked V"]
]
"""The decoder inputs, and which positions are masked, to the logits at the masked positions, row by row.

The logits are overwritten by the caller.
"""


class Iteration(NamedTuple):
    """One iteration, as passed to an observer. Rows are sentences times candidate lengths, in this order."""

    inputs: Int[Tensor, "rows T"]
    """decoder inputs, with mask tokens"""
    tokens: Int[Tensor, "rows T"]
    """the tokens after the iteration"""
    log_probabilities: Float[Tensor, "rows T"]
    """of each token when it was predicted"""


@torch.no_grad()
def mask_predict(
    predict: PredictFunction,
    lengths: Int[Tensor, "sentences candidates"],
    *,
    iterations: int,
    mask: int,
    pad: int,
    eos: int,
    nbest: int = 1,
    suppressed: Sequence[int] = (),
    observer: Callable[[Iteration], None] | None = None,
) -> list[list[Hypothesis]]:
    """The ``nbest`` candidates of each sentence, best first.

    lengths: the candidate lengths; 0 means no candidate. Candidates are cut at the first EOS; suppress EOS if the
    length alone decides where a sentence ends.
    """
    assert iterations >= 1
    T = lengths.flatten()
    non_pad = torch.arange(max(1, int(T.max())), device=T.device) < T[:, None]
    forbidden = torch.tensor(suppressed, dtype=torch.long, device=T.device)
    tokens = torch.where(non_pad, mask, pad)
    confidences = torch.zeros(non_pad.shape, device=T.device)
    for remaining in range(iterations, 0, -1):
        # Mask the tokens with the lowest log-probabilities.
        masked = _least_confident(confidences, non_pad, T * remaining // iterations)
        if not masked.any():  # short sequences have nothing left to mask in the last iterations
            break
        inputs = tokens.masked_fill(masked, mask)
        # Predict them from the others.
        predicted, values = _most_probable(predict(inputs, masked), forbidden)
        tokens = inputs.masked_scatter(masked, predicted)
        confidences = confidences.masked_scatter(masked, values)
        if observer is not None:
            observer(Iteration(inputs, tokens, confidences))
    hypotheses = _hypotheses(tokens, confidences, lengths, eos, always_ends=eos in suppressed)
    return [
        sorted(candidates, key=lambda candidate: candidate.score, reverse=True)[:nbest]
        for candidates in hypotheses
    ]


def _least_confident(
    confidences: Float[Tensor, "rows T"],
    non_pad: Bool[Tensor, "rows T"],
    count: Int[Tensor, "rows"],
) -> Bool[Tensor, "rows T"]:
    """The ``count`` positions of each row with the lowest log-probability; of equal ones the first."""
    order = confidences.masked_fill(~non_pad, torch.inf).argsort(dim=1, stable=True)
    rank = order.argsort(dim=1)
    return rank < count[:, None]


def _most_probable(
    logits: Float[Tensor, "masked V"], forbidden: Int[Tensor, "forbidden"]
) -> tuple[Int[Tensor, "masked"], Float[Tensor, "masked"]]:
    """The most probable allowed token at each position, and its log-probability under the model."""
    logits = logits.float()
    logits -= logits.amax(-1, keepdim=True)  # keeps the sum of exponentials small, for precision
    total = logits.logsumexp(-1)
    best = logits.index_fill_(1, forbidden, NEG_INF).max(-1)
    return best.indices, best.values - total


def _hypotheses(
    tokens: Int[Tensor, "rows T"],
    log_probabilities: Float[Tensor, "rows T"],
    lengths: Int[Tensor, "sentences candidates"],
    eos: int,
    always_ends: bool,
) -> list[list[Hypothesis]]:
    """All candidates of each sentence."""
    shape = (*lengths.shape, tokens.shape[1])
    ids: list[list[list[int]]] = tokens.view(shape).tolist()
    values: list[list[list[float]]] = log_probabilities.view(shape).tolist()
    return [
        [
            _hypothesis(row[:length], confidences[:length], eos, always_ends)
            for row, confidences, length in zip(*candidates, strict=True)
            if length
        ]
        for candidates in zip(ids, values, lengths.tolist(), strict=True)
    ]


def _hypothesis(
    tokens: list[int], log_probabilities: list[float], eos: int, always_ends: bool
) -> Hypothesis:
    """One candidate, cut at its first EOS. The score is the mean log-probability, EOS included."""
    length = tokens.index(eos) if eos in tokens else len(tokens)
    token_log_probabilities = log_probabilities[: length + 1]
    return Hypothesis(
        tokens=tokens[:length],
        log_probability=sum(token_log_probabilities),
        score=sum(token_log_probabilities) / len(token_log_probabilities),
        token_log_probabilities=token_log_probabilities,
        finished=always_ends or length < len(tokens),
    )
