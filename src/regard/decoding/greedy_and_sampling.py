"""Greedy search and sampling: one hypothesis per sentence, extended by its most probable or a sampled token.

The temperature divides the logits here. Top-k and top-p (nucleus) sampling are logits processors, see
``options_and_logits_processors.py``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decoding.hypothesis import NEG_INF, Hypothesis
from regard.decoding.length_penalty_and_stopping import GNMT, LengthNormalization
from regard.decoding.options_and_logits_processors import (
    MIN_TEMPERATURE,
    LogitsProcessor,
    LogitsProcessorList,
)
from regard.decoding.search_state import (
    ActiveHypotheses,
    BeamCandidates,
    SequenceRules,
    StateT,
    StepFunction,
)
from regard.decoding.top_k import top_k
from regard.errors import RegardError

TokenSelector = Callable[
    [Float[Tensor, "sentences V"], ActiveHypotheses[Any]], Int[Tensor, "sentences"]
]
"""Log-probabilities of the next token, and the hypotheses so far, to the token to take."""


@torch.no_grad()
def greedy(
    step: StepFunction[StateT],
    state: StateT,
    *,
    max_lengths: Sequence[int],
    bos: int,
    eos: int,
    length_penalty: float = 0.0,
    length_normalization: type[LengthNormalization] = GNMT,
    prefixes: Sequence[Sequence[int]] | None = None,
    suppressed: Sequence[int] = (),
    device: torch.device | str = "cpu",
    processors: Sequence[LogitsProcessor] = (),
) -> list[Hypothesis]:
    """Greedy decoding: take the most probable token in each step, until EOS or the maximum length.

    The arguments are those of ``beam_search``. ``length_penalty`` and ``length_normalization`` change no token, only
    the score, which is that of a beam of size 1.
    """
    rules = SequenceRules.create(
        max_lengths, bos, eos, prefixes, suppressed, device, length_normalization.forces_eos
    )
    return _decode(
        step, state, rules, _most_probable, length_penalty, length_normalization, processors
    )


@torch.no_grad()
def sample(
    step: StepFunction[StateT],
    state: StateT,
    *,
    max_lengths: Sequence[int],
    bos: int,
    eos: int,
    temperature: float = 1.0,
    seeds: Sequence[int],
    prefixes: Sequence[Sequence[int]] | None = None,
    suppressed: Sequence[int] = (),
    device: torch.device | str = "cpu",
    processors: Sequence[LogitsProcessor] = (),
) -> list[Hypothesis]:
    """Sample each token from the model's distribution, until EOS or the maximum length.

    temperature: below 1 sharpens the distribution, above 1 flattens it. seeds: one per sentence, so that a sample does
    not depend on the other sentences of the batch. processors: may truncate the distribution (top-k, top-p).

    The log-probabilities of the result are the model's, not those of the truncated distribution.
    """
    if not temperature >= MIN_TEMPERATURE:
        raise RegardError(
            f"temperature {temperature}: must be at least {MIN_TEMPERATURE}; "
            "for temperature 0, use greedy search"
        )
    rules = SequenceRules.create(max_lengths, bos, eos, prefixes, suppressed, device)
    assert len(seeds) == len(max_lengths)
    if not max_lengths:
        return []
    longest = 1 + int(rules.max_lengths.max())
    truncate = LogitsProcessorList(processors).truncate_distribution
    uniform = torch.stack([_uniform(seed, longest) for seed in seeds]).to(device)

    def draw(
        log_probabilities: Float[Tensor, "sentences V"], active: ActiveHypotheses[StateT]
    ) -> Int[Tensor, "sentences"]:
        # A row in which every token is forbidden has NaN; the token drawn there is not used.
        probabilities = truncate(log_probabilities / temperature).softmax(-1).nan_to_num(nan=1.0)
        # Like torch.multinomial, but much faster: one random number per row instead of one per token.
        cumulative = probabilities.double().cumsum(-1)
        threshold = uniform[active.sentences, active.length].unsqueeze(1) * cumulative[:, -1:]
        return torch.searchsorted(cumulative, threshold, right=True).squeeze(1)

    return _decode(step, state, rules, draw, processors=processors)


def _decode(
    step: StepFunction[StateT],
    state: StateT,
    rules: SequenceRules,
    select_token: TokenSelector,
    length_penalty: float = 0.0,
    length_normalization: type[LengthNormalization] = GNMT,
    processors: Sequence[LogitsProcessor] = (),
) -> list[Hypothesis]:
    """Extend one hypothesis per sentence token by token."""
    processor = LogitsProcessorList(processors)
    penalty = length_normalization.penalty_with(length_penalty)
    cuts_at_limit = length_normalization.cuts_at_limit and not processors
    active = ActiveHypotheses.initial(state, rules)
    results: dict[int, Hypothesis] = {}
    while len(active.sentences):
        # 1. Run the model, and select the next token of each sentence.
        active, logits = active.step(step)
        log_probabilities = active.log_probabilities_of(logits, rules)
        log_probabilities = processor.process_log_probabilities(active, log_probabilities)
        candidates = _extend(active, log_probabilities, select_token)

        # 2. Find the sentences that are done: by EOS, at the maximum length, or because no token is allowed.
        possible = candidates.totals > NEG_INF
        ended = possible & (candidates.tokens == rules.eos)
        remaining = (rules.max_lengths[active.sentences] - active.length).unsqueeze(1)
        truncated = ~ended & ((remaining <= 0) | ~possible)
        at_limit = possible & ~ended & (remaining == 1) & cuts_at_limit
        done = (ended | truncated | at_limit).squeeze(1)
        if any_done := bool(done.any()):
            results.update(active.finish(ended, candidates, penalty))
            results.update(active.finish(at_limit, candidates, penalty, by_eos=False))
            results.update(active.truncate(truncated.squeeze(1), penalty))

        # 3. Extend the others.
        active = active.advance(~done if any_done else None, candidates)
        if processors:
            processor.advance((~done).nonzero().squeeze(1), candidates)
    return [results[row] for row in range(len(rules.max_lengths))]


def _extend(
    active: ActiveHypotheses[StateT],
    log_probabilities: Float[Tensor, "sentences 1 V"],
    select_token: TokenSelector,
) -> BeamCandidates:
    """One candidate per sentence."""
    tokens = select_token(log_probabilities.squeeze(1), active).unsqueeze(1)
    added = log_probabilities.squeeze(1).gather(1, tokens)
    return BeamCandidates(torch.zeros_like(tokens), tokens, added, active.totals + added)


def _most_probable(
    log_probabilities: Float[Tensor, "sentences V"], active: ActiveHypotheses[Any]
) -> Int[Tensor, "sentences"]:
    # As in a beam of size 1, so that both take the same one of equal tokens: the smaller one on a GPU, see
    # ``fused_top_k.py``, else the first of the best two.
    if log_probabilities.is_cuda:
        return log_probabilities.argmax(-1)
    return top_k(log_probabilities, 2)[1][:, 0]


def _uniform(seed: int, count: int) -> Float[Tensor, " count"]:
    """Random numbers from 0 to 1. They are the same on every device; the first n do not depend on the count."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
