"""What all decoding methods share: the step function, the rules for the next token, candidates, active hypotheses.

Shape letters: ``sentences`` are the sentences still being decoded, ``beams`` the active hypotheses of each of them,
``rows`` all of these hypotheses, those of one sentence next to each other, and ``V`` is the vocabulary size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decoding.hypothesis import NEG_INF, Hypothesis
from regard.decoding.length_penalty_and_stopping import LengthPenalty

ANY_TOKEN = -1
"""in a padded prefix: no token is forced at this position"""

# ---------------------------------------------------------------------------------------------
# The model, as decoding sees it


SelfT = TypeVar("SelfT")  # the shape checks of the tests do not support typing.Self


@runtime_checkable
class StepState(Protocol):
    """What the step function needs from earlier steps, such as cached keys and values.

    It has one row per sentence at first, and later one row per hypothesis, those of a sentence next to each other.
    """

    def select(self: SelfT, rows: Int[Tensor, "sentences beams"]) -> SelfT:
        """The state of the given rows, which are numbers of rows of the current state.

        Each line of ``rows`` has the hypotheses to continue for one sentence; all of them come from the same sentence.
        Sentences keep their order, but some may be missing. So whatever belongs to a sentence, such as the encoder
        output, can be stored once per sentence and shared by its beams.
        """
        ...


StateT = TypeVar("StateT", bound=StepState)

StepFunction = Callable[[Int[Tensor, "rows"], StateT], tuple[Float[Tensor, "rows V"], StateT]]
"""The last token of each row and the state, to the logits of the next token and the new state."""

LastAttention = Callable[[], Float[Tensor, "sentences beams S"]]
"""The cross-attention weights of each hypothesis in the last step; they sum to 1 over the source."""

# ---------------------------------------------------------------------------------------------
# Rules for the next token


@dataclass(frozen=True)
class SequenceRules:
    """Which tokens may come next in each sentence, whatever the decoding method."""

    bos: int
    """the first token that the decoder reads"""
    eos: int
    max_lengths: Int[Tensor, "sentences"]
    """largest number of tokens of each sentence, EOS not counted"""
    prefixes: Int[Tensor, "sentences longest"]
    """the tokens each sentence must begin with, padded with ``ANY_TOKEN``"""
    suppressed: Int[Tensor, "suppressed"]
    """tokens that are never generated, except as part of a prefix"""
    forces_eos: bool = False
    """at the maximum length EOS is the only possible token, and costs nothing"""

    @classmethod
    def create(
        cls,
        max_lengths: Sequence[int],
        bos: int,
        eos: int,
        prefixes: Sequence[Sequence[int]] | None,
        suppressed: Sequence[int],
        device: torch.device | str,
        forces_eos: bool = False,
    ) -> "SequenceRules":
        """The rules as tensors on ``device``. A prefix that is longer than the maximum length is not cut."""
        prefixes = prefixes if prefixes is not None else [()] * len(max_lengths)
        assert len(prefixes) == len(max_lengths), "give one prefix per sentence (it may be empty)"
        assert eos not in suppressed, "without EOS no sequence would end"
        assert all(eos not in prefix for prefix in prefixes), "a prefix cannot contain EOS"
        longest = max(map(len, prefixes), default=0)
        padded = [[*prefix, *[ANY_TOKEN] * (longest - len(prefix))] for prefix in prefixes]
        prefix_ids = torch.tensor(padded, dtype=torch.long, device=device)
        lengths = [max(n, len(prefix)) for n, prefix in zip(max_lengths, prefixes, strict=True)]
        return cls(
            bos=bos,
            eos=eos,
            max_lengths=torch.tensor(lengths, dtype=torch.long, device=device),
            prefixes=prefix_ids.view(len(lengths), longest),
            suppressed=torch.tensor(suppressed, dtype=torch.long, device=device),
            forces_eos=forces_eos,
        )

    def only_suppresses(self, position: int) -> bool:
        """Whether nothing but the suppressed tokens is forbidden at this position, in any sentence."""
        return position >= self.prefixes.shape[1] and not self.forces_eos

    def log_probabilities(
        self, logits: Float[Tensor, "rows V"], sentences: Int[Tensor, "rows"], position: int
    ) -> Float[Tensor, "rows V"]:
        """The model's log-probability of each allowed token at ``position``, ``NEG_INF`` for the others.

        The allowed tokens are not renormalized: a forced token costs what the model assigns to it.
        """
        log_probabilities = logits.log_softmax(-1, dtype=torch.float32)
        if self.forces_eos:
            only_eos = torch.full_like(log_probabilities, NEG_INF)
            only_eos[:, self.eos] = 0.0
            at_limit = (position >= self.max_lengths[sentences]).unsqueeze(1)
            log_probabilities = torch.where(at_limit, only_eos, log_probabilities)
        if position >= self.prefixes.shape[1]:
            return log_probabilities.index_fill_(1, self.suppressed, NEG_INF)
        # A forced token is read before the suppressed ones are removed, in place: a prefix may contain them.
        prefix = self.prefixes[sentences, position].unsqueeze(1)
        token = prefix.clamp(min=0)
        impossible = torch.full_like(log_probabilities, NEG_INF)
        forced = impossible.scatter(1, token, log_probabilities.gather(1, token))
        allowed = log_probabilities.index_fill_(1, self.suppressed, NEG_INF)
        return torch.where(prefix == ANY_TOKEN, allowed, forced)


# ---------------------------------------------------------------------------------------------
# Active hypotheses, and the candidates for their next token


@dataclass(frozen=True)
class BeamCandidates:
    """Active hypotheses of each sentence, each extended by one token."""

    beams: Int[Tensor, "sentences count"]
    """which hypothesis of the sentence is extended"""
    tokens: Int[Tensor, "sentences count"]
    log_probabilities: Float[Tensor, "sentences count"]
    """of the new tokens"""
    totals: Float[Tensor, "sentences count"]
    """log-probability of the extended hypothesis; ``NEG_INF`` if it is impossible"""

    def select(self, indices: Int[Tensor, "sentences fewer"]) -> "BeamCandidates":
        """These candidates of each sentence."""
        return self._map(lambda x: x.gather(1, indices))

    def first(self, count: int) -> "BeamCandidates":
        """The first candidates of each sentence."""
        return self._map(lambda x: x[:, :count])

    def select_sentences(self, sentences: Int[Tensor, "fewer"]) -> "BeamCandidates":
        """The candidates of these sentences."""
        return self._map(lambda x: x[sentences])

    @classmethod
    def concatenate(cls, groups: Sequence["BeamCandidates"]) -> "BeamCandidates":
        """The candidates of several groups of beams, next to each other."""
        return cls(
            torch.cat([group.beams for group in groups], dim=1),
            torch.cat([group.tokens for group in groups], dim=1),
            torch.cat([group.log_probabilities for group in groups], dim=1),
            torch.cat([group.totals for group in groups], dim=1),
        )

    def _map(self, function: Callable[[Tensor], Tensor]) -> "BeamCandidates":
        return BeamCandidates(
            function(self.beams),
            function(self.tokens),
            function(self.log_probabilities),
            function(self.totals),
        )


class BeamSelection(NamedTuple):
    """The outcome of one step of beam search."""

    candidates: BeamCandidates
    """the candidates that were considered, best first"""
    finished: Bool[Tensor, "sentences count"]
    """which candidates finish a hypothesis"""
    continued: BeamCandidates
    """the candidates that become the active hypotheses of the next step"""
    may_finish: bool = True
    """False: no candidate finishes a hypothesis. True: read ``finished``, which waits for the GPU."""

    @classmethod
    def from_candidates(cls, candidates: BeamCandidates, eos: int, beam: int) -> "BeamSelection":
        """EOS among the first ``beam`` finishes a hypothesis; the first ``beam`` that are not EOS are continued."""
        is_eos = candidates.tokens == eos
        if not is_eos.any():  # the most frequent case
            return cls(candidates, is_eos, candidates.first(beam), may_finish=False)
        rank = torch.arange(is_eos.shape[1], device=is_eos.device)
        finished = is_eos & (rank < beam) & (candidates.totals > NEG_INF)
        order = is_eos.int().argsort(dim=1, stable=True)[:, :beam]
        continued = candidates.select(order)
        # With a tiny vocabulary there may be too few other tokens: EOS fills the beam, as impossible hypotheses.
        totals = continued.totals.masked_fill(is_eos.gather(1, order), NEG_INF)
        return cls(candidates, finished, replace(continued, totals=totals))

    @classmethod
    def concatenate(cls, selections: Sequence["BeamSelection"]) -> "BeamSelection":
        """The selections of several groups of beams as one."""
        return cls(
            BeamCandidates.concatenate([selection.candidates for selection in selections]),
            torch.cat([selection.finished for selection in selections], dim=1),
            BeamCandidates.concatenate([selection.continued for selection in selections]),
        )


class BeamStep(NamedTuple):
    """One step of beam search, as passed to an observer."""

    length: int
    """tokens before this step"""
    candidates: BeamCandidates
    """the candidates that were considered, best first"""
    finished: Bool[Tensor, "sentences count"]
    """which candidates finish a hypothesis"""
    continued: BeamCandidates
    """the candidates that stay in the beam"""
    done: Bool[Tensor, "sentences"]
    """which sentences end with this step"""
    penalty: float
    """length penalty of a hypothesis of the new length"""
    groups: int = 1
    """groups of the beam; the candidates and the continued ones of each group are side by side"""


@dataclass(frozen=True)
class ActiveHypotheses(Generic[StateT]):
    """The unfinished hypotheses of all unfinished sentences. They have the same length."""

    state: StateT
    sentences: Int[Tensor, "sentences"]
    """row numbers of the sentences in the original batch"""
    log_probabilities: Float[Tensor, "sentences beams length"]
    """of each token"""
    tokens: Int[Tensor, "sentences beams length+1"]
    """BOS first"""
    totals: Float[Tensor, "sentences beams"]
    """Sums of the log-probabilities; ``NEG_INF`` where a sentence has fewer hypotheses than beams.

    In double precision, so that adding a large sum never makes two different tokens equal.
    """

    @classmethod
    def initial(cls, state: StateT, rules: SequenceRules) -> "ActiveHypotheses[StateT]":
        """One empty hypothesis per sentence."""
        count, device = len(rules.max_lengths), rules.max_lengths.device
        return cls(
            state=state,
            sentences=torch.arange(count, device=device),
            tokens=torch.full((count, 1, 1), rules.bos, device=device),
            log_probabilities=torch.zeros(count, 1, 0, device=device),
            totals=torch.zeros(count, 1, dtype=torch.float64, device=device),
        )

    @property
    def length(self) -> int:
        """Number of generated tokens."""
        return self.log_probabilities.shape[2]

    def step(
        self, step: StepFunction[StateT]
    ) -> tuple["ActiveHypotheses[StateT]", Float[Tensor, "sentences beams V"]]:
        """Run the model on the last tokens. Returns the new state and the logits of the next token."""
        logits, state = step(self.tokens[:, :, -1].flatten(), self.state)
        assert logits.device == self.tokens.device, (
            f"the logits are on {logits.device}, the search runs on {self.tokens.device}: "
            "pass the right device"
        )
        return replace(self, state=state), logits.view(*self.totals.shape, -1)

    def log_probabilities_of(
        self, logits: Float[Tensor, "sentences beams V"], rules: SequenceRules
    ) -> Float[Tensor, "sentences beams V"]:
        """The log-probability of each allowed token, ``NEG_INF`` for the others."""
        sentence_of_row = self.sentences.repeat_interleave(logits.shape[1])
        allowed = rules.log_probabilities(logits.flatten(0, 1), sentence_of_row, self.length)
        return allowed.view_as(logits)

    def advance(
        self, keep: Bool[Tensor, "sentences"] | None, continued: BeamCandidates
    ) -> "ActiveHypotheses[StateT]":
        """Extend the hypotheses by the selected candidates; drop the sentences that are not kept. None: keep all."""
        if keep is None:
            indices = torch.arange(len(self.sentences), device=self.sentences.device)
        else:
            indices = keep.nonzero().squeeze(1)
        if len(indices) < len(self.sentences):
            continued = continued.select_sentences(indices)
        sentence, beams = indices.unsqueeze(1), continued.beams
        rows = sentence * self.tokens.shape[1] + beams
        tokens = self.tokens[sentence, beams]
        log_probabilities = self.log_probabilities[sentence, beams]
        new_log_probabilities = continued.log_probabilities.unsqueeze(2)
        return ActiveHypotheses(
            state=self.state if self._is_unchanged(rows) else self.state.select(rows),
            sentences=self.sentences[indices],
            tokens=torch.cat([tokens, continued.tokens.unsqueeze(2)], dim=2),
            log_probabilities=torch.cat([log_probabilities, new_log_probabilities], dim=2),
            totals=continued.totals,
        )

    def _is_unchanged(self, rows: Int[Tensor, "sentences beams"]) -> bool:
        """Whether every row stays in place, so that keys and values need not be reordered. False: perhaps not."""
        if rows.shape != self.totals.shape:
            return False
        if rows.shape[1] == 1:
            return True
        if rows.is_cuda:  # comparing would wait for the GPU, and several beams rarely stay in place
            return False
        current_rows = torch.arange(self.totals.numel(), device=rows.device).view_as(self.totals)
        return torch.equal(rows, current_rows)

    def finish(
        self,
        finished: Bool[Tensor, "sentences count"],
        candidates: BeamCandidates,
        penalty: LengthPenalty,
        bonus: Float[Tensor, "sentences beams"] | None = None,
        by_eos: bool = True,
    ) -> list[tuple[int, Hypothesis]]:
        """The hypotheses that the marked candidates finish, each with the row number of its sentence.

        by_eos: the candidates are EOS; otherwise they are ordinary tokens at the maximum length.
        """
        sentences, columns = finished.nonzero(as_tuple=True)
        beams = candidates.beams[sentences, columns]
        last_log_probabilities = candidates.log_probabilities[sentences, columns].unsqueeze(1)
        log_probabilities = self.log_probabilities[sentences, beams]
        log_probabilities = torch.cat([log_probabilities, last_log_probabilities], dim=1)
        tokens = self.tokens[sentences, beams, 1:]
        if not by_eos:
            last_tokens = candidates.tokens[sentences, columns].unsqueeze(1)
            tokens = torch.cat([tokens, last_tokens], dim=1)
        totals = candidates.totals[sentences, columns]
        return self._hypotheses(sentences, beams, tokens, log_probabilities, totals, penalty, bonus)

    def truncate(
        self,
        truncated: Bool[Tensor, "sentences"],
        penalty: LengthPenalty,
        bonus: Float[Tensor, "sentences beams"] | None = None,
        complete: Bool[Tensor, "sentences beams"] | None = None,
    ) -> list[tuple[int, Hypothesis]]:
        """The hypotheses of the marked sentences as they are, without EOS.

        complete: which hypotheses satisfy all constraints. If a sentence has such hypotheses, only they are returned.
        """
        possible = truncated.unsqueeze(1) & self.totals.isfinite()
        if complete is not None:
            satisfied = possible & complete
            possible = torch.where(satisfied.any(1, keepdim=True), satisfied, possible)
        sentences, beams = possible.nonzero(as_tuple=True)
        tokens = self.tokens[sentences, beams, 1:]
        log_probabilities = self.log_probabilities[sentences, beams]
        totals = self.totals[sentences, beams]
        return self._hypotheses(sentences, beams, tokens, log_probabilities, totals, penalty, bonus)

    def _hypotheses(
        self,
        sentences: Int[Tensor, "count"],
        beams: Int[Tensor, "count"],
        tokens: Int[Tensor, "count words"],
        log_probabilities: Float[Tensor, "count length"],
        totals: Float[Tensor, "count"],
        penalty: LengthPenalty,
        bonus: Float[Tensor, "sentences beams"] | None,
    ) -> list[tuple[int, Hypothesis]]:
        length = log_probabilities.shape[1]
        scores = totals / penalty(max(1, length))
        scores = scores if bonus is None else scores + bonus[sentences, beams]
        rows: list[int] = self.sentences[sentences].tolist()
        columns = (tokens.tolist(), log_probabilities.tolist(), scores.tolist())
        finished = length > tokens.shape[1]
        return [
            (row, Hypothesis(ids, sum(values, 0.0), score, values, finished))
            for row, ids, values, score in zip(rows, *columns, strict=True)
        ]
