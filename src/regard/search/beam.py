"""Beam search: of each sentence the best few hypotheses go on together.

At each step the ``2 * beam`` best continuations of a sentence are looked at. END among the first
``beam`` of them finishes a hypothesis; the first ``beam`` that are not END go on (each hypothesis
has one END, so there are that many). A sentence is done

- when its manner says so: in the paper's, when it has ``beam`` finished hypotheses and no live one is ahead of the
  ``nbest``, or no live one can come to a better score than the ``nbest`` it has; or
- at its limit: after ``limit`` tokens END may still come, by the same rule, but nothing else.

Its finished hypotheses are the result. Only where there is none are the live ones given, cut off.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.errors import RegardError
from regard.search.hypothesis import Hypothesis
from regard.search.live import Continuations, Live
from regard.search.manners import Paper, Standing
from regard.search.rules import NEVER, Rules, S, Step
from regard.search.tree import Looked


@torch.no_grad()
def beam_search(
    step: Step[S],
    state: S,
    *,
    limits: Sequence[int],
    start: int,
    end: int,
    beam: int,
    alpha: float,
    manner: type[Paper] = Paper,
    nbest: int = 1,
    prefixes: Sequence[Sequence[int]] | None = None,
    banned: Sequence[int] = (),
    device: torch.device | str = "cpu",
    watch: Callable[[Looked], None] | None = None,
) -> list[list[Hypothesis]]:
    """The ``nbest`` best hypotheses of each sentence by score, best first; fewer if so few are.

    ``watch`` is shown every step: what was looked at, and what became of it.
    """
    assert beam >= 1
    assert alpha >= 0
    if not 1 <= nbest <= beam:
        raise RegardError(f"nbest {nbest}: must be from 1 to the beam, {beam}")
    rules = Rules.of(limits, start, end, prefixes, banned, device, manner.forces_end)
    # The score still to be had is greatest for the longest sequence, END counted.
    longest = [manner.penalty(limit + 1, alpha) for limit in rules.limits.tolist()]
    penalties = torch.tensor(longest, dtype=torch.float64, device=device)
    scores = torch.full((len(limits), beam), NEVER, dtype=torch.float64, device=device)
    found: list[list[Hypothesis]] = [[] for _ in limits]

    live = Live.begin(state, rules)
    while len(live.sentences):
        live, log_probabilities = live.look_ahead(step, rules)
        best = _best(live, log_probabilities, 2 * beam)
        ended = _ended(best, rules.end, beam)
        going = _not_ended(best, rules.end, beam)

        penalty = manner.penalty(live.length + 1, alpha)
        added = (best.totals / penalty).masked_fill(~ended, NEVER)
        own = torch.cat([scores[live.sentences], added], dim=1).topk(beam).values
        scores[live.sentences] = own
        # A sentence with nothing to go on with is done too: NEVER is no better than NEVER.
        now = Standing(going.totals[:, 0], own, live.length + 1, penalties[live.sentences])
        at_limit = live.length >= rules.limits[live.sentences]
        done = at_limit | manner.done(now, alpha, nbest)

        if watch is not None:
            watch(Looked(live.length, best, ended, going, done, penalty))
        if ended.any():
            _add(found, live.finish(ended, best, alpha, manner.penalty))
        if done.any():
            _add(found, live.cut(done & (own[:, 0] == NEVER), alpha, manner.penalty))
        live = live.go_on(~done, going)
    return [sorted(some, key=lambda one: one.score, reverse=True)[:nbest] for some in found]


def _best(
    live: Live[S], log_probabilities: Float[Tensor, "sentences beams V"], count: int
) -> Continuations:
    """The best continuations of each sentence, best first."""
    # The best of a sentence are among the best of its hypotheses: few are left to add and sort.
    added, tokens = log_probabilities.topk(min(count, log_probabilities.shape[2]))
    added = added.masked_fill(added.isnan(), NEVER)  # the model says nothing: no way leads on
    each = added.shape[2]
    totals = (live.totals.unsqueeze(2) + added).flatten(1)
    # Stable: of equal continuations the one that stood first stays first.
    totals, order = totals.sort(dim=1, descending=True, stable=True)
    totals, order = totals[:, :count], order[:, :count]
    return Continuations(
        beams=order // each,
        tokens=tokens.flatten(1).gather(1, order),
        log_probabilities=added.flatten(1).gather(1, order),
        totals=totals,
    )


def _ended(best: Continuations, end: int, beam: int) -> Bool[Tensor, "sentences count"]:
    """Which continuations finish a hypothesis."""
    rank = torch.arange(best.tokens.shape[1], device=best.tokens.device)
    return (best.tokens == end) & (rank < beam) & (best.totals > NEVER)


def _not_ended(best: Continuations, end: int, beam: int) -> Continuations:
    """The first ``beam`` continuations that are not END."""
    is_end = best.tokens == end
    order = is_end.int().argsort(dim=1, stable=True)[:, :beam]
    going = best.select(order)
    # In a tiny vocabulary there may be fewer: END fills the places, and no hypothesis stands there.
    totals = going.totals.masked_fill(is_end.gather(1, order), NEVER)
    return Continuations(going.beams, going.tokens, going.log_probabilities, totals)


def _add(found: list[list[Hypothesis]], some: list[tuple[int, Hypothesis]]) -> None:
    for number, hypothesis in some:
        found[number].append(hypothesis)
