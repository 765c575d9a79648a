"""The best few of many, without sorting the many."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decoding.beam_tree import BeamStep
from regard.decoding.hypotheses import (
    NEG_INF,
    ActiveHypotheses,
    BeamCandidates,
    Hypothesis,
    Penalty,
    S,
    SequenceRules,
    Step,
)
from regard.decoding.length_penalty import GNMT, BeamState
from regard.decoding.logits_processors import BeamSelection, LogitsProcessor, LogitsProcessorList
from regard.errors import RegardError

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


# ---------------------------------------------------------------------------------------------
# Beam search: of each sentence the best few hypotheses go on together.
#
# At each step the ``2 * beam`` best continuations of a sentence are looked at. EOS among the first
# ``beam`` of them finishes a hypothesis; the first ``beam`` that are not EOS go on (each hypothesis
# has one EOS, so there are that many). A sentence is done
#
# - when its length_normalization says so: in the paper's, when it has ``beam`` finished hypotheses and no live one is ahead of the
#   ``nbest``, or no live one can come to a better score than the ``nbest`` it has; or
# - at its limit: after ``limit`` tokens EOS may still come, by the same rule, but nothing else (or, if its length_normalization cuts
#   there, nothing at all).
#
# Its finished hypotheses are the result. Only where there is none are the live ones given, cut off.


@torch.no_grad()
def beam_search(
    step: Step[S],
    state: S,
    *,
    limits: Sequence[int],
    start: int,
    end: int,
    beam: int,
    length_penalty: float,
    length_normalization: type[GNMT] = GNMT,
    nbest: int = 1,
    prefixes: Sequence[Sequence[int]] | None = None,
    banned: Sequence[int] = (),
    device: torch.device | str = "cpu",
    observer: Callable[[BeamStep], None] | None = None,
    processors: Sequence[LogitsProcessor] = (),
) -> list[list[Hypothesis]]:
    """The ``nbest`` best hypotheses of each sentence by score, best first; fewer if so few are.

    ``observer`` is shown every step: what was looked at, and what became of it. With ``processors`` that make the beam of
    several groups, each group finishes for itself, and the best of each come before the second best.
    """
    assert beam >= 1
    assert length_penalty >= 0
    if not 1 <= nbest <= beam:
        raise RegardError(f"nbest {nbest}: must be from 1 to the beam, {beam}")
    rules = SequenceRules.of(
        limits, start, end, prefixes, banned, device, length_normalization.forces_end
    )
    # The score still to be had is greatest for the longest sequence, EOS counted.
    longest = [
        length_normalization.penalty(limit + 1, length_penalty) for limit in rules.limits.tolist()
    ]
    penalties = torch.tensor(longest, dtype=torch.float64, device=device)
    guide = LogitsProcessorList(processors)
    groups = guide.groups
    wanted = -(-nbest // groups)
    shape = (len(limits), groups, beam // groups)
    found = Found(shape, nbest, length_penalty, length_normalization.penalty, device)
    cuts = (
        length_normalization.cuts_at_limit and not processors
    )  # a guide may still want what is not said yet

    live = ActiveHypotheses.begin(state, rules)
    while len(live.sentences):
        live, log_probabilities = live.look_ahead(step, rules)
        log_probabilities = guide.allow(live, log_probabilities)
        choice = guide.choose(live, log_probabilities, beam, end)
        if choice is None:
            choice = BeamSelection.of(_best(live, log_probabilities, 2 * beam), end, beam)
        best, ended, going = choice
        bonus = guide.bonus(live)
        if ended.any():
            found.finished(live, ended, best, bonus)

        # A sentence with nothing to go on with is done too: NEG_INF is no better than NEG_INF.
        ahead = going.totals.view(-1, groups, going.tokens.shape[1] // groups).amax(2).flatten()
        scores = found.scores[live.sentences]
        longest_of = penalties[live.sentences].repeat_interleave(groups)
        now = BeamState(ahead, scores.flatten(0, 1), live.length + 1, longest_of)
        left = rules.limits[live.sentences] - live.length
        done = (left <= 0) | length_normalization.done(now, length_penalty, wanted).view(
            -1, groups
        ).all(1)
        nothing = done & (scores[:, :, 0] == NEG_INF).all(1)
        if cuts and (left == 1).any():
            full = (left == 1).unsqueeze(1) & (going.totals > NEG_INF)
            done, nothing = done | full.any(1), nothing & ~full.any(1)
            found.closed(live, full, going)
        if nothing.any():
            found.cut(live, nothing, bonus, guide.complete(live))

        if observer is not None:
            penalty = length_normalization.penalty(live.length + 1, length_penalty)
            observer(BeamStep(live.length, best, ended, going, done, penalty))
        live = live.go_on(~done, going)
        if processors:
            guide.go_on((~done).nonzero().squeeze(1), going)
    return found.ranked()


def _best(
    live: ActiveHypotheses[S], log_probabilities: Float[Tensor, "sentences beams V"], count: int
) -> BeamCandidates:
    """The best continuations of each sentence, best first."""
    V = log_probabilities.shape[2]
    if log_probabilities.shape[1] > 1 and in_chunks(log_probabilities, count):
        totals, places = top_sums(log_probabilities, live.totals, count)
        added = log_probabilities.flatten(1).gather(1, places)
        return BeamCandidates(places // V, places % V, added, totals)
    # The best of a sentence are among the best of its hypotheses: few are left to add and sort.
    added, tokens = top(log_probabilities, count)
    added = added.masked_fill(added.isnan(), NEG_INF)  # the model says nothing: no way leads on
    each = added.shape[2]
    totals = (live.totals.unsqueeze(2) + added).flatten(1)
    # Stable: of equal continuations the one that stood first stays first.
    totals, order = totals.sort(dim=1, descending=True, stable=True)
    totals, order = totals[:, :count], order[:, :count]
    return BeamCandidates(
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
        length_penalty: float,
        penalty: Penalty,
        device: torch.device | str,
    ) -> None:
        """shape: sentences, groups, beams of a group."""
        sentences, self.groups, _ = shape
        self.nbest, self.length_penalty, self.penalty = nbest, length_penalty, penalty
        self.of: list[list[tuple[int, Hypothesis]]] = [[] for _ in range(sentences)]
        self.scores = torch.full(shape, NEG_INF, dtype=torch.float64, device=device)
        """the best of those with EOS, best first"""

    def finished(
        self,
        live: ActiveHypotheses[S],
        which: Bool[Tensor, "sentences count"],
        best: BeamCandidates,
        bonus: Float[Tensor, "sentences beams"] | None,
    ) -> None:
        """By EOS."""
        ends = best.totals / self.penalty(live.length + 1, self.length_penalty)
        ends = ends if bonus is None else ends + bonus.gather(1, best.beams)
        each = which.shape[1] // self.groups
        new = ends.masked_fill(~which, NEG_INF).view(-1, self.groups, each)
        both = torch.cat([self.scores[live.sentences], new], dim=2)
        scores = self.scores[live.sentences] = both.topk(self.scores.shape[2]).values
        if self.groups == 1:  # to write down what is beaten already takes longer than to find it
            which = which & (new >= scores[:, :, self.nbest - 1].unsqueeze(2)).flatten(1)
        groups = which.nonzero()[:, 1] // each
        some = live.finish(which, best, self.length_penalty, self.penalty, bonus)
        self._add(some, groups.tolist())

    def closed(
        self,
        live: ActiveHypotheses[S],
        which: Bool[Tensor, "sentences beams"],
        going: BeamCandidates,
    ) -> None:
        """By the last word that there is room for; the best stand first."""
        first = torch.arange(which.shape[1], device=which.device) < self.nbest
        self._add(live.finish(which & first, going, self.length_penalty, self.penalty, ends=False))

    def cut(
        self,
        live: ActiveHypotheses[S],
        which: Bool[Tensor, "sentences"],
        bonus: Float[Tensor, "sentences beams"] | None,
        complete: Bool[Tensor, "sentences beams"] | None,
    ) -> None:
        """As they stand, where none is finished."""
        self._add(live.cut(which, self.length_penalty, self.penalty, bonus, complete))

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
