"""The step a search is made of, and which tokens may come next: the same in every search."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NEG_INF = -torch.inf
"""the log-probability of what may not or cannot come"""
FREE = -1
"""in a prefix's place: any token may come here"""


Same = TypeVar("Same")


@runtime_checkable
class State(Protocol):
    """All a step tokens_needed to know of the past: keys and values already computed, for example.

    At first it has one row a sentence, later one row a hypothesis, a sentence's rows side by side.
    """

    def select(self: Same, rows: Int[Tensor, "sentences beams"]) -> Same:
        """The state of the rows to keep, numbered as they stand in the present state.

        Line i holds the rows that go on for one sentence; they all come from one and the same
        sentence, and sentences stay in order (some may be gone). So what belongs to a sentence,
        such as the encoder's output, can be kept once for each and shared among its beams.
        """
        ...


S = TypeVar("S", bound=State)

Step = Callable[[Int[Tensor, "rows"], S], tuple[Float[Tensor, "rows V"], S]]
"""The last token of each row, and the state, to the logits of the next token and the new state."""


@dataclass(frozen=True)
class SequenceRules:
    """What holds for every sequence of the batch, whatever the search."""

    start: int
    end: int
    limits: Int[Tensor, "sentences"]
    """most tokens of each sentence, EOS not counted"""
    prefixes: Int[Tensor, "sentences longest"]
    """the tokens each sentence must begin with, ``FREE`` after them"""
    banned: Int[Tensor, "banned"]
    """tokens that never come, unless a prefix says so"""
    forces_end: bool = False
    """at the limit EOS comes, at no cost, and nothing else"""

    @classmethod
    def of(
        cls,
        limits: Sequence[int],
        start: int,
        end: int,
        prefixes: Sequence[Sequence[int]] | None,
        banned: Sequence[int],
        device: torch.device | str,
        forces_end: bool = False,
    ) -> "SequenceRules":
        prefixes = prefixes if prefixes is not None else [()] * len(limits)
        assert len(prefixes) == len(limits), "one prefix a sentence (it may be empty)"
        assert end not in banned, "without EOS no sequence would finish"
        assert all(end not in prefix for prefix in prefixes), "EOS cannot stand inside a sequence"
        longest = max(map(len, prefixes), default=0)
        padded = [[*prefix, *[FREE] * (longest - len(prefix))] for prefix in prefixes]
        # A prefix longer than the limit still comes whole.
        reached = [max(limit, len(prefix)) for limit, prefix in zip(limits, prefixes, strict=True)]
        return cls(
            start=start,
            end=end,
            limits=torch.tensor(reached, dtype=torch.long, device=device),
            prefixes=torch.tensor(padded, dtype=torch.long, device=device).view(
                len(limits), longest
            ),
            banned=torch.tensor(banned, dtype=torch.long, device=device),
            forces_end=forces_end,
        )

    def log_probabilities(
        self,
        logits: Float[Tensor, "rows V"],
        sentences: Int[Tensor, "rows"],
        position: int,
    ) -> Float[Tensor, "rows V"]:
        """The model's log-probability of each token that may come next, ``NEG_INF`` for the others.

        What is left is not normalised again: a forced token costs what the model says it costs.
        """
        everything = logits.log_softmax(-1, dtype=torch.float32)
        if self.forces_end:
            closing = torch.full_like(everything, NEG_INF)
            closing[:, self.end] = 0.0
            at_limit = (position >= self.limits[sentences]).unsqueeze(1)
            everything = torch.where(at_limit, closing, everything)
        if position >= self.prefixes.shape[1]:
            return everything.index_fill_(1, self.banned, NEG_INF)
        prefix = self.prefixes[sentences, position].unsqueeze(1)
        token = prefix.clamp(min=0)
        forced = torch.full_like(everything, NEG_INF).scatter(1, token, everything.gather(1, token))
        allowed = everything.index_fill_(1, self.banned, NEG_INF)
        return torch.where(prefix == FREE, allowed, forced)


# ---------------------------------------------------------------------------------------------
# What a search gives back.


Penalty = Callable[[int, float], float]
"""length, EOS counted, and length_penalty to what a log-probability is divided by"""


def gnmt_length_penalty(length: int, length_penalty: float) -> float:
    """((5 + length) / 6) ** length_penalty, length counting EOS: the paper's, from Wu et al. (2016)."""
    return float(((5 + length) / 6) ** length_penalty)


@dataclass(frozen=True)
class Hypothesis:
    """One output sequence and how probable the model finds it."""

    tokens: list[int]
    """without BOS and EOS"""
    log_probability: float
    """of the whole: the sum of ``token_log_probabilities``"""
    score: float
    """``log_probability`` over the length penalty, and a guide's bonus; or their mean: what the search is best in"""
    token_log_probabilities: list[float]
    """of each token, then EOS's if it was said"""
    finished: bool
    """EOS was said, or the length was known; False where the sequence was cut off at its greatest length"""

    @classmethod
    def of(
        cls,
        tokens: list[int],
        log_probabilities: list[float],
        ranked_by: float,
        length_penalty: float,
        penalty: Penalty = gnmt_length_penalty,
        bonus: float = 0.0,
    ) -> "Hypothesis":
        """ranked_by is the total that the search ranks by: the sum, unless a guide lets it off some of it."""
        return cls(
            tokens=tokens,
            log_probability=sum(log_probabilities, 0.0),
            score=ranked_by / penalty(max(1, len(log_probabilities)), length_penalty) + bonus,
            token_log_probabilities=log_probabilities,
            finished=len(log_probabilities) > len(tokens),
        )


# ---------------------------------------------------------------------------------------------
# The hypotheses that still grow, and how they grow by one token.


@dataclass(frozen=True)
class BeamCandidates:
    """One more token for hypotheses of each sentence."""

    beams: Int[Tensor, "sentences count"]
    """which of the sentence's hypotheses goes on"""
    tokens: Int[Tensor, "sentences count"]
    log_probabilities: Float[Tensor, "sentences count"]
    totals: Float[Tensor, "sentences count"]
    """log-probability of the hypothesis with the new token; ``NEG_INF`` if it may not come"""

    def select(self, which: Int[Tensor, "sentences fewer"]) -> "BeamCandidates":
        return self._each(lambda x: x.gather(1, which))

    def first(self, count: int) -> "BeamCandidates":
        return self._each(lambda x: x[:, :count])

    def of(self, sentences: Int[Tensor, "fewer"]) -> "BeamCandidates":
        return self._each(lambda x: x[sentences])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "BeamCandidates":
        return BeamCandidates(
            change(self.beams),
            change(self.tokens),
            change(self.log_probabilities),
            change(self.totals),
        )


@dataclass(frozen=True)
class ActiveHypotheses(Generic[S]):
    """The unfinished hypotheses of the unfinished sentences, all of one length."""

    state: S
    sentences: Int[Tensor, "sentences"]
    """their numbers in the batch as it was given"""
    log_probabilities: Float[Tensor, "sentences beams length"]
    tokens: Int[Tensor, "sentences beams length+1"]
    """BOS first"""
    totals: Float[Tensor, "sentences beams"]
    """sums of the log-probabilities; ``NEG_INF`` where a sentence has fewer hypotheses than beams.

    In double precision, so that adding a long past never makes two different tokens equal.
    """

    @classmethod
    def begin(cls, state: S, rules: SequenceRules) -> "ActiveHypotheses[S]":
        count, device = len(rules.limits), rules.limits.device
        return cls(
            state=state,
            sentences=torch.arange(count, device=device),
            tokens=torch.full((count, 1, 1), rules.start, device=device),
            log_probabilities=torch.zeros(count, 1, 0, device=device),
            totals=torch.zeros(count, 1, dtype=torch.float64, device=device),
        )

    @property
    def length(self) -> int:
        return self.log_probabilities.shape[2]

    def look_ahead(
        self, step: Step[S], rules: SequenceRules
    ) -> tuple["ActiveHypotheses[S]", Float[Tensor, "sentences beams V"]]:
        """Take one step: the log-probabilities of the next token."""
        beams = self.tokens.shape[1]
        logits, state = step(self.tokens[:, :, -1].flatten(), self.state)
        assert logits.device == self.tokens.device, (
            f"logits on {logits.device}, search on {self.tokens.device}: give the search its device"
        )
        owners = self.sentences.repeat_interleave(beams)
        allowed = rules.log_probabilities(logits, owners, self.length)
        return replace(self, state=state), allowed.view(-1, beams, allowed.shape[1])

    def go_on(
        self, keep: Bool[Tensor, "sentences"], chosen: BeamCandidates
    ) -> "ActiveHypotheses[S]":
        """The sentences to keep, each with its chosen continuations; the others leave the batch."""
        kept = keep.nonzero().squeeze(1)
        if len(kept) < len(keep):
            chosen = chosen.of(kept)
        owner, beams = kept.unsqueeze(1), chosen.beams
        rows = owner * self.tokens.shape[1] + beams
        present = torch.arange(self.totals.numel(), device=rows.device).view_as(self.totals)
        past, words = self.log_probabilities[owner, beams], self.tokens[owner, beams]
        return ActiveHypotheses(
            # Moving keys and values about is dear: not when every row stays where it is.
            state=self.state if torch.equal(rows, present) else self.state.select(rows),
            sentences=self.sentences[kept],
            tokens=torch.cat([words, chosen.tokens.unsqueeze(2)], dim=2),
            log_probabilities=torch.cat([past, chosen.log_probabilities.unsqueeze(2)], dim=2),
            totals=chosen.totals,
        )

    def finish(
        self,
        which: Bool[Tensor, "sentences count"],
        chosen: BeamCandidates,
        length_penalty: float = 0.0,
        penalty: Penalty = gnmt_length_penalty,
        bonus: Float[Tensor, "sentences beams"] | None = None,
        ends: bool = True,
    ) -> list[tuple[int, Hypothesis]]:
        """The hypotheses these continuations finish; each with its sentence's number.

        They are EOS; without ``ends`` they are the last word that there is room for.
        """
        sentences, places = which.nonzero(as_tuple=True)
        beams = chosen.beams[sentences, places]
        last = chosen.log_probabilities[sentences, places].unsqueeze(1)
        whole = torch.cat([self.log_probabilities[sentences, beams], last], dim=1)
        tokens = self.tokens[sentences, beams, 1:]
        if not ends:
            tokens = torch.cat([tokens, chosen.tokens[sentences, places].unsqueeze(1)], dim=1)
        totals = chosen.totals[sentences, places]
        return self._written(
            sentences, beams, tokens, whole, totals, length_penalty, penalty, bonus
        )

    def cut(
        self,
        which: Bool[Tensor, "sentences"],
        length_penalty: float = 0.0,
        penalty: Penalty = gnmt_length_penalty,
        bonus: Float[Tensor, "sentences beams"] | None = None,
        complete: Bool[Tensor, "sentences beams"] | None = None,
    ) -> list[tuple[int, Hypothesis]]:
        """The hypotheses of these sentences as they stand, without EOS; the complete ones, if any is."""
        real = which.unsqueeze(1) & self.totals.isfinite()
        if complete is not None:
            whole = real & complete
            real = torch.where(whole.any(1, keepdim=True), whole, real)
        sentences, beams = real.nonzero(as_tuple=True)
        tokens = self.tokens[sentences, beams, 1:]
        past = self.log_probabilities[sentences, beams]
        totals = self.totals[sentences, beams]
        return self._written(sentences, beams, tokens, past, totals, length_penalty, penalty, bonus)

    def _written(
        self,
        sentences: Int[Tensor, "count"],
        beams: Int[Tensor, "count"],
        tokens: Int[Tensor, "count words"],
        log_probabilities: Float[Tensor, "count length"],
        totals: Float[Tensor, "count"],
        length_penalty: float,
        penalty: Penalty,
        bonus: Float[Tensor, "sentences beams"] | None,
    ) -> list[tuple[int, Hypothesis]]:
        numbers: list[int] = self.sentences[sentences].tolist()
        words: list[list[int]] = tokens.tolist()
        each: list[list[float]] = log_probabilities.tolist()
        more = [0.0] * len(numbers) if bonus is None else bonus[sentences, beams].tolist()
        ranked: list[float] = totals.tolist()
        return [
            (number, Hypothesis.of(sequence, parts, total, length_penalty, penalty, extra))
            for number, sequence, parts, total, extra in zip(
                numbers, words, each, ranked, more, strict=True
            )
        ]
