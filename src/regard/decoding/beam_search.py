"""Beam search: the best few hypotheses of each sentence are extended together, one token per step.

Each step considers the ``2 * beam`` best candidates of a sentence, where a candidate is an active hypothesis with one
more token. EOS among the first ``beam`` candidates finishes a hypothesis. The first ``beam`` candidates that are not
EOS become the active hypotheses of the next step; as each hypothesis has one EOS, there are enough of them.

A sentence is done when its length normalization says so (see ``length_penalty_and_stopping.py``), or at its maximum
length. At the maximum length EOS may still follow, under the same rule, but no other token; if the length
normalization cuts at the limit, nothing follows. The result is the finished hypotheses. If there are none, the active
ones are returned, truncated."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decoding.hypothesis import NEG_INF, Hypothesis
from regard.decoding.length_penalty_and_stopping import (
    GNMT,
    BeamState,
    LengthNormalization,
    LengthPenalty,
)
from regard.decoding.options_and_logits_processors import LogitsProcessor, LogitsProcessorList
from regard.decoding.search_state import (
    ActiveHypotheses,
    BeamCandidates,
    BeamSelection,
    BeamStep,
    SequenceRules,
    StateT,
    StepFunction,
)
from regard.decoding.top_k import chunks_are_faster, top_k, top_k_sums
from regard.errors import RegardError


@torch.no_grad()
def beam_search(
    step: StepFunction[StateT],
    state: StateT,
    *,
    max_lengths: Sequence[int],
    bos: int,
    eos: int,
    beam: int,
    length_penalty: float,
    length_normalization: type[LengthNormalization] = GNMT,
    nbest: int = 1,
    prefixes: Sequence[Sequence[int]] | None = None,
    suppressed: Sequence[int] = (),
    device: torch.device | str = "cpu",
    observer: Callable[[BeamStep], None] | None = None,
    processors: Sequence[LogitsProcessor] = (),
) -> list[list[Hypothesis]]:
    """The ``nbest`` best hypotheses of each sentence, best first, or fewer if fewer were found.

    step, state: the model and its initial state, with one row per sentence. max_lengths: of each sentence, EOS not
    counted. prefixes: the tokens each sentence must begin with. suppressed: tokens that are never generated. observer:
    called after each step. processors: optional changes. If they divide the beam into groups, each group finishes on
    its own, and the best hypothesis of every group comes before the second best of any.
    """
    assert beam >= 1
    assert length_penalty >= 0
    if not 1 <= nbest <= beam:
        raise RegardError(f"nbest {nbest}: must be between 1 and beam, {beam}")
    penalty = length_normalization.penalty_with(length_penalty)
    rules = SequenceRules.create(
        max_lengths, bos, eos, prefixes, suppressed, device, length_normalization.forces_eos
    )
    # The best score that is still possible is that of the longest sequence, EOS counted.
    max_penalties = torch.tensor(
        [penalty(length + 1) for length in rules.max_lengths.tolist()],
        dtype=torch.float64,
        device=device,
    )
    processor = LogitsProcessorList(processors)
    groups = processor.groups
    nbest_per_group = -(-nbest // groups)
    shape = (len(max_lengths), groups, beam // groups)
    finished = FinishedHypotheses(shape, nbest, penalty, device)
    # A logits processor may require tokens that are still missing at the limit.
    cuts_at_limit = length_normalization.cuts_at_limit and not processors
    shortest_limit = min(max_lengths, default=0)

    active = ActiveHypotheses.initial(state, rules)
    while len(active.sentences):
        # 1. Run the model, and select which candidates finish a hypothesis and which are continued.
        active, logits = active.step(step)
        selection = _select(active, logits, rules, processor, beam)
        candidates, continued = selection.candidates, selection.continued
        bonus = processor.score_bonus(active)
        if selection.may_finish and selection.finished.any():
            finished.add_ended(active, selection.finished, candidates, bonus)

        # 2. Find the sentences that are done. One without candidates is done, too: NEG_INF is not above NEG_INF.
        per_group = continued.tokens.shape[1] // groups
        scores = finished.scores[active.sentences]
        beam_state = BeamState(
            best_active=continued.totals.view(-1, groups, per_group).amax(2).flatten(),
            finished_scores=scores.flatten(0, 1),
            length=active.length + 1,
            max_penalty=max_penalties[active.sentences].repeat_interleave(groups),
        )
        group_done = length_normalization.is_done(beam_state, length_penalty, nbest_per_group)
        remaining = rules.max_lengths[active.sentences] - active.length
        done = (remaining <= 0) | group_done.view(-1, groups).all(1)

        # 3. Collect what has no EOS: hypotheses that reach the maximum length and need none there, and the active ones
        # of sentences that are done without a finished hypothesis.
        without_result = done & (scores[:, :, 0] == NEG_INF).all(1)
        if cuts_at_limit and active.length + 1 >= shortest_limit and (remaining == 1).any():
            at_limit = (remaining == 1).unsqueeze(1) & (continued.totals > NEG_INF)
            reached = at_limit.any(1)
            done, without_result = done | reached, without_result & ~reached
            finished.add_at_limit(active, at_limit, continued)
        any_done = bool(done.any())
        if any_done and without_result.any():
            finished.add_truncated(active, without_result, bonus, processor.is_complete(active))

        # 4. Extend the hypotheses of the sentences that are not done.
        if observer is not None:
            observer(
                BeamStep(
                    length=active.length,
                    candidates=candidates,
                    finished=selection.finished,
                    continued=continued,
                    done=done,
                    penalty=penalty(active.length + 1),
                    groups=groups,
                )
            )
        active = active.advance(~done if any_done else None, continued)
        if processors:
            processor.advance((~done).nonzero().squeeze(1), continued)
    return finished.ranked()


FUSED_COUNT = 32
"""Candidates per hypothesis up to which the GPU kernel ``top_tokens`` is used: it takes a maximum for each of them.

With 10, it takes a third of the time of log-softmax and top-k."""


def _select(
    active: ActiveHypotheses[StateT],
    logits: Float[Tensor, "sentences beams V"],
    rules: SequenceRules,
    processor: LogitsProcessorList,
    beam: int,
) -> BeamSelection:
    """The candidates of each sentence, those that finish a hypothesis, and those that are continued."""
    count = 2 * beam
    fused = logits.is_cuda and count <= FUSED_COUNT and rules.only_suppresses(active.length)
    if fused and not processor.processors:
        from regard.decoding.fused_top_k import top_tokens

        shape = (*logits.shape[:2], min(count, logits.shape[2]))
        added, tokens = top_tokens(logits.flatten(0, 1), shape[2], rules.suppressed)
        candidates = _rank_candidates(active, added.view(shape), tokens.view(shape), count)
        return BeamSelection.from_candidates(candidates, rules.eos, beam)
    log_probabilities = active.log_probabilities_of(logits, rules)
    log_probabilities = processor.process_log_probabilities(active, log_probabilities)
    selection = processor.select(active, log_probabilities, beam, rules.eos)
    if selection is not None:
        return selection
    candidates = _best_candidates(active, log_probabilities, count)
    return BeamSelection.from_candidates(candidates, rules.eos, beam)


def _best_candidates(
    active: ActiveHypotheses[StateT],
    log_probabilities: Float[Tensor, "sentences beams V"],
    count: int,
) -> BeamCandidates:
    """The best candidates of each sentence, best first."""
    V = log_probabilities.shape[2]
    if log_probabilities.shape[1] > 1 and chunks_are_faster(log_probabilities, count):
        totals, indices = top_k_sums(log_probabilities, active.totals, count)
        added = log_probabilities.flatten(1).gather(1, indices)
        return BeamCandidates(indices // V, indices % V, added, totals)
    # The best of a sentence are among the best of its hypotheses, so few remain to be added and sorted.
    return _rank_candidates(active, *top_k(log_probabilities, count), count)


def _rank_candidates(
    active: ActiveHypotheses[StateT],
    added: Float[Tensor, "sentences beams k"],
    tokens: Int[Tensor, "sentences beams k"],
    count: int,
) -> BeamCandidates:
    """The best candidates of each sentence, best first, from the best tokens of each hypothesis."""
    added = added.masked_fill(added.isnan(), NEG_INF)  # NaN: the model allows no token
    per_beam = added.shape[2]
    totals = (active.totals.unsqueeze(2) + added).flatten(1)
    # A stable sort: of equal candidates the first stays first.
    totals, order = totals.sort(dim=1, descending=True, stable=True)
    totals, order = totals[:, :count], order[:, :count]
    return BeamCandidates(
        beams=order // per_beam,
        tokens=tokens.flatten(1).gather(1, order),
        log_probabilities=added.flatten(1).gather(1, order),
        totals=totals,
    )


class FinishedHypotheses:
    """The finished hypotheses of each sentence, each with the number of its group."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        nbest: int,
        penalty: LengthPenalty,
        device: torch.device | str,
    ) -> None:
        """shape: sentences, groups, beams per group."""
        sentences, self.groups, _ = shape
        self.nbest, self.penalty = nbest, penalty
        self.hypotheses: list[list[tuple[int, Hypothesis]]] = [[] for _ in range(sentences)]
        """group and hypothesis, for each sentence"""
        self.scores = torch.full(shape, NEG_INF, dtype=torch.float64, device=device)
        """scores of the best hypotheses that ended with EOS, best first"""

    def add_ended(
        self,
        active: ActiveHypotheses[StateT],
        ended: Bool[Tensor, "sentences count"],
        candidates: BeamCandidates,
        bonus: Float[Tensor, "sentences beams"] | None,
    ) -> None:
        """Add the hypotheses that end with EOS."""
        scores = candidates.totals / self.penalty(active.length + 1)
        scores = scores if bonus is None else scores + bonus.gather(1, candidates.beams)
        per_group = ended.shape[1] // self.groups
        new_scores = scores.masked_fill(~ended, NEG_INF).view(-1, self.groups, per_group)
        all_scores = torch.cat([self.scores[active.sentences], new_scores], dim=2)
        best = self.scores[active.sentences] = all_scores.topk(self.scores.shape[2]).values
        if self.groups == 1:  # converting a hypothesis that cannot win takes longer than this test
            ended = ended & (new_scores >= best[:, :, self.nbest - 1].unsqueeze(2)).flatten(1)
        groups = ended.nonzero()[:, 1] // per_group
        finished = active.finish(ended, candidates, self.penalty, bonus)
        self._add(finished, groups.tolist())

    def add_at_limit(
        self,
        active: ActiveHypotheses[StateT],
        at_limit: Bool[Tensor, "sentences beams"],
        continued: BeamCandidates,
    ) -> None:
        """Add the best hypotheses that reach the maximum length with this token."""
        within_nbest = torch.arange(at_limit.shape[1], device=at_limit.device) < self.nbest
        finished = active.finish(at_limit & within_nbest, continued, self.penalty, by_eos=False)
        self._add(finished)

    def add_truncated(
        self,
        active: ActiveHypotheses[StateT],
        truncated: Bool[Tensor, "sentences"],
        bonus: Float[Tensor, "sentences beams"] | None,
        complete: Bool[Tensor, "sentences beams"] | None,
    ) -> None:
        """Add the active hypotheses of these sentences without EOS."""
        self._add(active.truncate(truncated, self.penalty, bonus, complete))

    def _add(self, finished: list[tuple[int, Hypothesis]], groups: list[int] | None = None) -> None:
        for (row, hypothesis), group in zip(finished, groups or [0] * len(finished), strict=True):
            self.hypotheses[row].append((group, hypothesis))

    def ranked(self) -> list[list[Hypothesis]]:
        """The ``nbest`` hypotheses of each sentence, best first."""
        return [self._nbest_of(finished) for finished in self.hypotheses]

    def _nbest_of(self, finished: list[tuple[int, Hypothesis]]) -> list[Hypothesis]:
        """Take the best of each group before the second best of any, then sort by score."""
        if len(finished) == 1:
            return [finished[0][1]]
        rank_in_group: Counter[int] = Counter()
        ranked_tokens: set[tuple[int, ...]] = set()
        ranked = []
        for group, hypothesis in sorted(finished, key=lambda entry: entry[1].score, reverse=True):
            if tuple(hypothesis.tokens) in ranked_tokens:  # another group found it
                continue
            ranked_tokens.add(tuple(hypothesis.tokens))
            ranked.append((rank_in_group[group], hypothesis))
            rank_in_group[group] += 1
        nbest = sorted(ranked, key=lambda entry: entry[0])[: self.nbest]
        return sorted(
            (hypothesis for _, hypothesis in nbest),
            key=lambda hypothesis: hypothesis.score,
            reverse=True,
        )
