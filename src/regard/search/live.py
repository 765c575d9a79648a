"""The hypotheses that still grow, and how they grow by one token."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.search.hypothesis import Hypothesis, Penalty, length_penalty
from regard.search.rules import Rules, S, Step


@dataclass(frozen=True)
class Continuations:
    """One more token for hypotheses of each sentence."""

    beams: Int[Tensor, "sentences count"]
    """which of the sentence's hypotheses goes on"""
    tokens: Int[Tensor, "sentences count"]
    log_probabilities: Float[Tensor, "sentences count"]
    totals: Float[Tensor, "sentences count"]
    """log-probability of the hypothesis with the new token; ``NEVER`` if it may not come"""

    def select(self, which: Int[Tensor, "sentences fewer"]) -> "Continuations":
        return self._each(lambda x: x.gather(1, which))

    def first(self, count: int) -> "Continuations":
        return self._each(lambda x: x[:, :count])

    def of(self, sentences: Int[Tensor, "fewer"]) -> "Continuations":
        return self._each(lambda x: x[sentences])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Continuations":
        return Continuations(
            change(self.beams),
            change(self.tokens),
            change(self.log_probabilities),
            change(self.totals),
        )


@dataclass(frozen=True)
class Live(Generic[S]):
    """The unfinished hypotheses of the unfinished sentences, all of one length."""

    state: S
    sentences: Int[Tensor, "sentences"]
    """their numbers in the batch as it was given"""
    log_probabilities: Float[Tensor, "sentences beams length"]
    tokens: Int[Tensor, "sentences beams length+1"]
    """START first"""
    totals: Float[Tensor, "sentences beams"]
    """sums of the log-probabilities; ``NEVER`` where a sentence has fewer hypotheses than beams.

    In double precision, so that adding a long past never makes two different tokens equal.
    """

    @classmethod
    def begin(cls, state: S, rules: Rules) -> "Live[S]":
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
        self, step: Step[S], rules: Rules
    ) -> tuple["Live[S]", Float[Tensor, "sentences beams V"]]:
        """Take one step: the log-probabilities of the next token."""
        beams = self.tokens.shape[1]
        logits, state = step(self.tokens[:, :, -1].flatten(), self.state)
        assert logits.device == self.tokens.device, (
            f"logits on {logits.device}, search on {self.tokens.device}: give the search its device"
        )
        owners = self.sentences.repeat_interleave(beams)
        allowed = rules.log_probabilities(logits, owners, self.length)
        return replace(self, state=state), allowed.view(-1, beams, allowed.shape[1])

    def go_on(self, keep: Bool[Tensor, "sentences"], chosen: Continuations) -> "Live[S]":
        """The sentences to keep, each with its chosen continuations; the others leave the batch."""
        kept = keep.nonzero().squeeze(1)
        if len(kept) < len(keep):
            chosen = chosen.of(kept)
        owner, beams = kept.unsqueeze(1), chosen.beams
        rows = owner * self.tokens.shape[1] + beams
        present = torch.arange(self.totals.numel(), device=rows.device).view_as(self.totals)
        past, words = self.log_probabilities[owner, beams], self.tokens[owner, beams]
        return Live(
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
        chosen: Continuations,
        alpha: float = 0.0,
        penalty: Penalty = length_penalty,
        bonus: Float[Tensor, "sentences beams"] | None = None,
        ends: bool = True,
    ) -> list[tuple[int, Hypothesis]]:
        """The hypotheses these continuations finish; each with its sentence's number.

        They are END; without ``ends`` they are the last word that there is room for.
        """
        sentences, places = which.nonzero(as_tuple=True)
        beams = chosen.beams[sentences, places]
        last = chosen.log_probabilities[sentences, places].unsqueeze(1)
        whole = torch.cat([self.log_probabilities[sentences, beams], last], dim=1)
        tokens = self.tokens[sentences, beams, 1:]
        if not ends:
            tokens = torch.cat([tokens, chosen.tokens[sentences, places].unsqueeze(1)], dim=1)
        totals = chosen.totals[sentences, places]
        return self._written(sentences, beams, tokens, whole, totals, alpha, penalty, bonus)

    def cut(
        self,
        which: Bool[Tensor, "sentences"],
        alpha: float = 0.0,
        penalty: Penalty = length_penalty,
        bonus: Float[Tensor, "sentences beams"] | None = None,
        complete: Bool[Tensor, "sentences beams"] | None = None,
    ) -> list[tuple[int, Hypothesis]]:
        """The hypotheses of these sentences as they stand, without END; the complete ones, if any is."""
        real = which.unsqueeze(1) & self.totals.isfinite()
        if complete is not None:
            whole = real & complete
            real = torch.where(whole.any(1, keepdim=True), whole, real)
        sentences, beams = real.nonzero(as_tuple=True)
        tokens = self.tokens[sentences, beams, 1:]
        past = self.log_probabilities[sentences, beams]
        totals = self.totals[sentences, beams]
        return self._written(sentences, beams, tokens, past, totals, alpha, penalty, bonus)

    def _written(
        self,
        sentences: Int[Tensor, "count"],
        beams: Int[Tensor, "count"],
        tokens: Int[Tensor, "count words"],
        log_probabilities: Float[Tensor, "count length"],
        totals: Float[Tensor, "count"],
        alpha: float,
        penalty: Penalty,
        bonus: Float[Tensor, "sentences beams"] | None,
    ) -> list[tuple[int, Hypothesis]]:
        numbers: list[int] = self.sentences[sentences].tolist()
        words: list[list[int]] = tokens.tolist()
        each: list[list[float]] = log_probabilities.tolist()
        more = [0.0] * len(numbers) if bonus is None else bonus[sentences, beams].tolist()
        ranked: list[float] = totals.tolist()
        return [
            (number, Hypothesis.of(sequence, parts, total, alpha, penalty, extra))
            for number, sequence, parts, total, extra in zip(
                numbers, words, each, ranked, more, strict=True
            )
        ]
