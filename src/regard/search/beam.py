"""Beam search: of each sentence the best few hypotheses go on together.

At each step the ``2 * beam`` best continuations of a sentence are looked at. END among the first
``beam`` of them finishes a hypothesis; the first ``beam`` that are not END go on (each hypothesis
has one END, so there are that many). A sentence is done

- when its manner says so: in the paper's, when it has ``beam`` finished hypotheses and no live one is ahead of the
  ``nbest``, or no live one can come to a better score than the ``nbest`` it has; or
- at its limit: after ``limit`` tokens END may still come, by the same rule, but nothing else (or, if its manner cuts
  there, nothing at all).

Its finished hypotheses are the result. Only where there is none are the live ones given, cut off.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.errors import RegardError
from regard.search.guides import Choice, Guide, Guides
from regard.search.hypothesis import Hypothesis, Penalty
from regard.search.live import Continuations, Live
from regard.search.manners import Paper, Standing
from regard.search.rules import NEVER, Rules, S, Step
from regard.search.top import in_chunks, top, top_sums
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
    guides: Sequence[Guide] = (),
) -> list[list[Hypothesis]]:
    """The ``nbest`` best hypotheses of each sentence by score, best first; fewer if so few are.

    ``watch`` is shown every step: what was looked at, and what became of it. With ``guides`` that make the beam of
    several groups, each group finishes for itself, and the best of each come before the second best.
    """
    assert beam >= 1
    assert alpha >= 0
    if not 1 <= nbest <= beam:
        raise RegardError(f"nbest {nbest}: must be from 1 to the beam, {beam}")
    rules = Rules.of(limits, start, end, prefixes, banned, device, manner.forces_end)
    # The score still to be had is greatest for the longest sequence, END counted.
    longest = [manner.penalty(limit + 1, alpha) for limit in rules.limits.tolist()]
    penalties = torch.tensor(longest, dtype=torch.float64, device=device)
    guide = Guides(guides)
    groups = guide.groups
    wanted = -(-nbest // groups)
    shape = (len(limits), groups, beam // groups)
    found = Found(shape, nbest, alpha, manner.penalty, device)
    cuts = manner.cuts_at_limit and not guides  # a guide may still want what is not said yet

    live = Live.begin(state, rules)
    while len(live.sentences):
        live, log_probabilities = live.look_ahead(step, rules)
        log_probabilities = guide.allow(live, log_probabilities)
        choice = guide.choose(live, log_probabilities, beam, end)
        if choice is None:
            choice = Choice.of(_best(live, log_probabilities, 2 * beam), end, beam)
        best, ended, going = choice
        bonus = guide.bonus(live)
        if ended.any():
            found.finished(live, ended, best, bonus)

        # A sentence with nothing to go on with is done too: NEVER is no better than NEVER.
        ahead = going.totals.view(-1, groups, going.tokens.shape[1] // groups).amax(2).flatten()
        scores = found.scores[live.sentences]
        longest_of = penalties[live.sentences].repeat_interleave(groups)
        now = Standing(ahead, scores.flatten(0, 1), live.length + 1, longest_of)
        left = rules.limits[live.sentences] - live.length
        done = (left <= 0) | manner.done(now, alpha, wanted).view(-1, groups).all(1)
        nothing = done & (scores[:, :, 0] == NEVER).all(1)
        if cuts and (left == 1).any():
            full = (left == 1).unsqueeze(1) & (going.totals > NEVER)
            done, nothing = done | full.any(1), nothing & ~full.any(1)
            found.closed(live, full, going)
        if nothing.any():
            found.cut(live, nothing, bonus, guide.complete(live))

        if watch is not None:
            penalty = manner.penalty(live.length + 1, alpha)
            watch(Looked(live.length, best, ended, going, done, penalty))
        live = live.go_on(~done, going)
        if guides:
            guide.go_on((~done).nonzero().squeeze(1), going)
    return found.ranked()


def _best(
    live: Live[S], log_probabilities: Float[Tensor, "sentences beams V"], count: int
) -> Continuations:
    """The best continuations of each sentence, best first."""
    V = log_probabilities.shape[2]
    if log_probabilities.shape[1] > 1 and in_chunks(log_probabilities, count):
        totals, places = top_sums(log_probabilities, live.totals, count)
        added = log_probabilities.flatten(1).gather(1, places)
        return Continuations(places // V, places % V, added, totals)
    # The best of a sentence are among the best of its hypotheses: few are left to add and sort.
    added, tokens = top(log_probabilities, count)
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


class Found:
    """The hypotheses of each sentence that are done, each with the number of its group."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        nbest: int,
        alpha: float,
        penalty: Penalty,
        device: torch.device | str,
    ) -> None:
        """shape: sentences, groups, beams of a group."""
        sentences, self.groups, _ = shape
        self.nbest, self.alpha, self.penalty = nbest, alpha, penalty
        self.of: list[list[tuple[int, Hypothesis]]] = [[] for _ in range(sentences)]
        self.scores = torch.full(shape, NEVER, dtype=torch.float64, device=device)
        """the best of those with END, best first"""

    def finished(
        self,
        live: Live[S],
        which: Bool[Tensor, "sentences count"],
        best: Continuations,
        bonus: Float[Tensor, "sentences beams"] | None,
    ) -> None:
        """By END."""
        ends = best.totals / self.penalty(live.length + 1, self.alpha)
        ends = ends if bonus is None else ends + bonus.gather(1, best.beams)
        each = which.shape[1] // self.groups
        new = ends.masked_fill(~which, NEVER).view(-1, self.groups, each)
        both = torch.cat([self.scores[live.sentences], new], dim=2)
        scores = self.scores[live.sentences] = both.topk(self.scores.shape[2]).values
        if self.groups == 1:  # to write down what is beaten already takes longer than to find it
            which = which & (new >= scores[:, :, self.nbest - 1].unsqueeze(2)).flatten(1)
        groups = which.nonzero()[:, 1] // each
        some = live.finish(which, best, self.alpha, self.penalty, bonus)
        self._add(some, groups.tolist())

    def closed(
        self, live: Live[S], which: Bool[Tensor, "sentences beams"], going: Continuations
    ) -> None:
        """By the last word that there is room for; the best stand first."""
        first = torch.arange(which.shape[1], device=which.device) < self.nbest
        self._add(live.finish(which & first, going, self.alpha, self.penalty, ends=False))

    def cut(
        self,
        live: Live[S],
        which: Bool[Tensor, "sentences"],
        bonus: Float[Tensor, "sentences beams"] | None,
        complete: Bool[Tensor, "sentences beams"] | None,
    ) -> None:
        """As they stand, where none is finished."""
        self._add(live.cut(which, self.alpha, self.penalty, bonus, complete))

    def _add(self, some: list[tuple[int, Hypothesis]], groups: list[int] | None = None) -> None:
        for (number, hypothesis), group in zip(some, groups or [0] * len(some), strict=True):
            self.of[number].append((group, hypothesis))

    def ranked(self) -> list[list[Hypothesis]]:
        return [self._ranked(some) for some in self.of]

    def _ranked(self, found: list[tuple[int, Hypothesis]]) -> list[Hypothesis]:
        """The best of each group before the second best of any; of those that stay, the best first."""
        order = sorted(found, key=lambda one: one[1].score, reverse=True)
        seen: Counter[int] = Counter()
        said: set[tuple[int, ...]] = set()
        ranks = []
        for group, hypothesis in order:
            if tuple(hypothesis.tokens) in said:  # by another group
                continue
            said.add(tuple(hypothesis.tokens))
            ranks.append((seen[group], hypothesis))
            seen[group] += 1
        best = sorted(ranks, key=lambda one: one[0])[: self.nbest]
        return sorted((one for _, one in best), key=lambda one: one.score, reverse=True)
