"""Searches along a single hypothesis: take the most probable token, or draw one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decoding.beam_search import top
from regard.decoding.hypotheses import (
    NEG_INF,
    ActiveHypotheses,
    BeamCandidates,
    Hypothesis,
    S,
    SequenceRules,
    Step,
)
from regard.decoding.length_penalty import GNMT
from regard.decoding.logits_processors import LogitsProcessor, LogitsProcessorList
from regard.errors import RegardError
from regard.recipe import MIN_TEMPERATURE

Choose = Callable[[Float[Tensor, "sentences V"], ActiveHypotheses[Any]], Int[Tensor, "sentences"]]
"""Log-probabilities of the next token, and where the search stands, to the token taken."""


@torch.no_grad()
def greedy(
    step: Step[S],
    state: S,
    *,
    limits: Sequence[int],
    start: int,
    end: int,
    length_penalty: float = 0.0,
    length_normalization: type[GNMT] = GNMT,
    prefixes: Sequence[Sequence[int]] | None = None,
    banned: Sequence[int] = (),
    device: torch.device | str = "cpu",
    processors: Sequence[LogitsProcessor] = (),
) -> list[Hypothesis]:
    """Take the most probable token, again and again, until EOS or the sentence's limit.

    ``length_penalty`` and ``length_normalization`` change no token, only the score: as a beam of one would tell it.
    """
    rules = SequenceRules.of(
        limits, start, end, prefixes, banned, device, length_normalization.forces_end
    )
    return _one_by_one(
        step, state, rules, _most_probable, length_penalty, length_normalization, processors
    )


@torch.no_grad()
def sample(
    step: Step[S],
    state: S,
    *,
    limits: Sequence[int],
    start: int,
    end: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seeds: Sequence[int],
    prefixes: Sequence[Sequence[int]] | None = None,
    banned: Sequence[int] = (),
    device: torch.device | str = "cpu",
    processors: Sequence[LogitsProcessor] = (),
) -> list[Hypothesis]:
    """Draw each token by its probability, until EOS or the sentence's limit.

    ``temperature`` below 1 sharpens the distribution, above 1 flattens it; then only the ``top_k``
    most probable tokens stay (0: all), and of them the fewest that together have ``top_p`` of the
    probability. The log-probabilities told are the model's own, not those of the drawing. Each
    sentence has its seed: what is drawn for it does not depend on those beside it.
    """
    if not temperature >= MIN_TEMPERATURE:
        raise RegardError(
            f"temperature {temperature}: must be at least {MIN_TEMPERATURE} (greedy search is its limit)"
        )
    if not 0 < top_p <= 1:
        raise RegardError(f"top_p {top_p}: must be above 0 and at most 1")
    if top_k < 0:
        raise RegardError(f"top_k {top_k}: must be 0 (all tokens) or more")
    rules = SequenceRules.of(limits, start, end, prefixes, banned, device)
    assert len(seeds) == len(limits)
    if not limits:
        return []
    longest = 1 + int(rules.limits.max())
    chances = torch.stack([_chances(seed, longest) for seed in seeds]).to(device)

    def draw(
        log_probabilities: Float[Tensor, "sentences V"], live: ActiveHypotheses[S]
    ) -> Int[Tensor, "sentences"]:
        drawn_from = _truncated(log_probabilities / temperature, top_k, top_p)
        # As torch.multinomial, in a fraction of the time: one random number a row, not one a token.
        until = drawn_from.double().cumsum(-1)
        chance = chances[live.sentences, live.length].unsqueeze(1)
        return torch.searchsorted(until, chance * until[:, -1:], right=True).squeeze(1)

    return _one_by_one(step, state, rules, draw, processors=processors)


def _chances(seed: int, count: int) -> Float[Tensor, " count"]:
    """Numbers between 0 and 1, the same on every device and however many are asked for."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _one_by_one(
    step: Step[S],
    state: S,
    rules: SequenceRules,
    choose: Choose,
    length_penalty: float = 0.0,
    length_normalization: type[GNMT] = GNMT,
    processors: Sequence[LogitsProcessor] = (),
) -> list[Hypothesis]:
    guide = LogitsProcessorList(processors)
    cuts = length_normalization.cuts_at_limit and not processors
    live = ActiveHypotheses.begin(state, rules)
    written: dict[int, Hypothesis] = {}
    while len(live.sentences):
        live, log_probabilities = live.look_ahead(step, rules)
        log_probabilities = guide.allow(live, log_probabilities)
        chosen = _continue(live, log_probabilities, choose)
        possible = chosen.totals > NEG_INF
        ended = possible & (chosen.tokens == rules.end)
        left = (rules.limits[live.sentences] - live.length).unsqueeze(1)
        stuck = ~ended & ((left <= 0) | ~possible)
        full = possible & ~ended & (left == 1) & cuts
        done = (ended | stuck | full).squeeze(1)
        if done.any():
            written.update(live.finish(ended, chosen, length_penalty, length_normalization.penalty))
            written.update(
                live.finish(full, chosen, length_penalty, length_normalization.penalty, ends=False)
            )
            written.update(live.cut(stuck.squeeze(1), length_penalty, length_normalization.penalty))
        live = live.go_on(~done, chosen)
        guide.go_on((~done).nonzero().squeeze(1), chosen)
    return [written[number] for number in range(len(rules.limits))]


def _continue(
    live: ActiveHypotheses[S], log_probabilities: Float[Tensor, "sentences 1 V"], choose: Choose
) -> BeamCandidates:
    tokens = choose(log_probabilities.squeeze(1), live).unsqueeze(1)
    added = log_probabilities.squeeze(1).gather(1, tokens)
    return BeamCandidates(torch.zeros_like(tokens), tokens, added, live.totals + added)


def _most_probable(
    log_probabilities: Float[Tensor, "sentences V"], live: ActiveHypotheses[Any]
) -> Int[Tensor, "sentences"]:
    # The first of the best two, as a beam of one takes it: of equal tokens both then take the same.
    return top(log_probabilities, 2)[1][:, 0]


def _truncated(
    log_probabilities: Float[Tensor, "sentences V"], top_k: int, top_p: float
) -> Float[Tensor, "sentences V"]:
    """The probabilities to draw by: the most probable tokens only."""
    if top_k == 0 and top_p == 1:  # all of them: nothing to sort
        return log_probabilities.softmax(-1).nan_to_num(nan=1.0)
    V = log_probabilities.shape[1]
    best, tokens = log_probabilities.sort(descending=True, stable=True)
    best[:, top_k or V :] = NEG_INF
    probabilities = best.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # A row where nothing may come has no probabilities (NaN): whatever is drawn there is not used.
    probabilities = probabilities.masked_fill(before >= top_p, 0.0).nan_to_num(nan=1.0)
    return torch.zeros_like(probabilities).scatter(1, tokens, probabilities)
