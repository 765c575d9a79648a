"""Lexically constrained decoding: the output is guaranteed to contain given phrases (lexical constraints).

Beam search with banks (Post and Vilar 2018, vectorized as in Hu et al. 2019). The *bank* of a hypothesis is its
progress: the number of phrase tokens it has generated. The beam is divided among the banks, so that a hypothesis that
has generated improbable phrases does not compete with those that have not generated theirs yet. EOS is allowed once no
phrase is missing. Glossary terms and protected spans are such phrases.

Why it is guaranteed: each step adds, for every hypothesis, the tokens that continue a missing phrase as candidates,
however improbable they are. The next token of the phrase with the most matched tokens increases the progress by at
least 1, because completed phrases stay completed, and of the partly matched ones only the longest match counts. The
best candidate of the highest bank is always continued. So the largest progress grows with every step, and after
``tokens_needed`` steps there is a hypothesis with nothing missing, which stays so. Only such hypotheses are finished,
or returned if they are truncated at the maximum length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decoding.hypothesis import NEG_INF, Phrase, Tokenization
from regard.decoding.options_and_logits_processors import LogitsProcessor
from regard.decoding.search_state import ActiveHypotheses, BeamCandidates, BeamSelection, StateT

NO_TOKEN = -1
"""padding in tensors of tokens"""

# ---------------------------------------------------------------------------------------------
# Word boundaries


class WordBoundaries(NamedTuple):
    """Which tokens of the vocabulary begin a word (so the previous word has ended), and which end one."""

    begins_word: Bool[Tensor, "V"]
    ends_word: Bool[Tensor, "V"]


# ---------------------------------------------------------------------------------------------
# Tokenizations as tensors. P: tokenizations of a sentence, C: its phrases (constraints), L: tokens of a tokenization.


@dataclass(frozen=True)
class TokenizationTable:
    """All tokenizations of each sentence, padded with empty ones that never match."""

    tokens: Int[Tensor, "sentences P L"]
    """padded with ``NO_TOKEN``"""
    fallback: Int[Tensor, "sentences P L"]
    """The failure function of Knuth, Morris and Pratt (1977): after this many matched tokens and a mismatch, how many
    of the last tokens still match the beginning."""
    length: Int[Tensor, "sentences P"]
    boundary_before: Bool[Tensor, "sentences P"]
    boundary_after: Bool[Tensor, "sentences P"]
    free: Bool[Tensor, "sentences P"]
    membership: Float[Tensor, "sentences P C"]
    """1 where the tokenization belongs to the phrase"""
    times: Int[Tensor, "sentences C"]
    steps: Int[Tensor, "sentences C"]

    @classmethod
    def from_phrases(
        cls, batch: Sequence[Sequence[Phrase]], boundaries: WordBoundaries
    ) -> "TokenizationTable":
        """The table of the phrases of each sentence."""
        device = boundaries.begins_word.device
        P = max(sum(len(phrase.tokenizations) for phrase in phrases) for phrases in batch)
        C = max(len(phrases) for phrases in batch)
        tokenizations = [
            tokenization
            for phrases in batch
            for phrase in phrases
            for tokenization in phrase.tokenizations
        ]
        L = max((len(tokenization.tokens) for tokenization in tokenizations), default=0)
        size = len(batch), P
        tokens = torch.full((*size, L + 1), NO_TOKEN)
        fallback = torch.zeros(*size, L + 1, dtype=torch.long)
        length = torch.zeros(size, dtype=torch.long)
        before, after, free = torch.zeros(3, *size, dtype=torch.bool)
        membership = torch.zeros(*size, C)
        times, steps = torch.zeros(2, len(batch), C, dtype=torch.long)
        ends_word = boundaries.ends_word.tolist() if tokenizations else []
        for row, phrases in enumerate(batch):
            column = 0
            for number, phrase in enumerate(phrases):
                assert not all(
                    tokenization.boundary_before for tokenization in phrase.tokenizations
                ), "one tokenization must need no boundary before it"
                times[row, number], steps[row, number] = phrase.times, phrase.steps
                for tokenization in phrase.tokenizations:
                    n = len(tokenization.tokens)
                    assert n > 0, "a phrase has at least one token"
                    tokens[row, column, :n] = torch.tensor(tokenization.tokens)
                    fallback[row, column, : n + 1] = torch.tensor(
                        _fallback(tokenization, ends_word)
                    )
                    length[row, column] = n
                    before[row, column] = tokenization.boundary_before
                    after[row, column] = tokenization.boundary_after
                    free[row, column] = phrase.free
                    membership[row, column, number] = 1.0
                    column += 1
        tensors = tokens, fallback, length, before, after, free, membership, times, steps
        return cls(*(tensor.to(device) for tensor in tensors))

    def select(self, sentences: Int[Tensor, "fewer"]) -> "TokenizationTable":
        """The table of these sentences."""
        return TokenizationTable(*(tensor[sentences] for tensor in vars(self).values()))


def _fallback(tokenization: Tokenization, ends_word: Sequence[bool]) -> list[int]:
    """For each number of matched tokens, how many remain matched after a mismatch."""
    tokens = tokenization.tokens

    def may_begin(start: int, end: int) -> bool:
        """Whether the tokenization may have begun at ``start``, given its tokens up to ``end``."""
        boundary = not tokenization.boundary_before or ends_word[tokens[start - 1]]
        return boundary and tokens[start:end] == tokens[: end - start]

    return [
        next((end - start for start in range(1, end) if may_begin(start, end)), 0)
        for end in range(len(tokens) + 1)
    ]


@dataclass(frozen=True)
class ConstraintProgress:
    """The progress of n hypotheses (or candidates) of each sentence."""

    matched: Int[Tensor, "sentences n P"]
    """Tokens of each tokenization that the last tokens match. If all of them match, only the word boundary after it is
    missing."""
    completed: Int[Tensor, "sentences n C"]
    """how many times each phrase has been generated"""

    @property
    def longest(self) -> Int[Tensor, "sentences n"]:
        """Tokens of the longest match."""
        return torch.nn.functional.pad(self.matched, (0, 1)).amax(2)

    def select(
        self, rows: Int[Tensor, "sentences 1"], columns: Int[Tensor, "sentences n"]
    ) -> "ConstraintProgress":
        return ConstraintProgress(self.matched[rows, columns], self.completed[rows, columns])


# ---------------------------------------------------------------------------------------------
# The logits processor


class Constraints(LogitsProcessor):
    """Guarantees the phrases of each sentence of the batch.

    It must come before other processors, because it records the tokens that continue a phrase before others forbid
    them.
    """

    def __init__(
        self, phrases: Sequence[Sequence[Phrase]], boundaries: WordBoundaries, eos: int
    ) -> None:
        self.boundaries = boundaries
        self.eos = eos
        self.table = TokenizationTable.from_phrases(phrases, boundaries)
        sentences, P = self.table.length.shape
        device = boundaries.begins_word.device
        C = self.table.times.shape[1]
        self.progress = ConstraintProgress(
            torch.zeros(sentences, 1, P, dtype=torch.long, device=device),
            torch.zeros(sentences, 1, C, dtype=torch.long, device=device),
        )
        L = self.table.tokens.shape[2] - 1
        self.differences = torch.zeros(sentences, 1, L, dtype=torch.float64, device=device)
        """[sentences, beams, L]: for the last L tokens of each hypothesis, the difference to the most probable token"""
        self.waived = torch.zeros(sentences, 1, dtype=torch.float64, device=device)
        """the cost that each hypothesis was spared for the free phrase it is generating"""
        self.phrase_tokens: tuple[Tensor, Tensor]
        """the tokens that continue a missing phrase of each hypothesis, and their log-probabilities"""

    # The interface of a logits processor

    def process_log_probabilities(
        self,
        active: ActiveHypotheses[StateT],
        log_probabilities: Float[Tensor, "sentences beams V"],
    ) -> Float[Tensor, "sentences beams V"]:
        """Record the tokens that continue a phrase, and forbid EOS while a phrase is missing."""
        tokens = self._next_phrase_tokens(active.tokens[:, :, -1], log_probabilities)
        values = log_probabilities.gather(2, tokens.clamp(min=0))
        self.phrase_tokens = tokens, values.masked_fill(tokens == NO_TOKEN, NEG_INF)
        incomplete = ~self.is_complete(active)
        allowed = log_probabilities.clone()
        allowed[:, :, self.eos].masked_fill_(incomplete, NEG_INF)
        return allowed

    def is_complete(self, active: ActiveHypotheses[StateT]) -> Bool[Tensor, "sentences beams"]:
        """Whether no phrase would be missing if the hypothesis ended here. The end is a word boundary."""
        waiting = self._awaits_boundary(self.progress.matched)
        completed = self.progress.completed + self._to_phrases(waiting).long()
        return (completed >= self.table.times[:, None]).all(2)

    def advance(self, kept: Int[Tensor, "kept"], continued: BeamCandidates) -> None:
        rows, beams = kept.unsqueeze(1), continued.beams[kept]
        progress = self.progress.select(rows, beams)
        last_tokens = self.last_tokens[rows, beams]
        best_log_probabilities = self.best_log_probabilities[rows, beams]
        differences = self.differences[rows, beams]
        self.table = self.table.select(kept)
        self.progress = self._after(progress, last_tokens, continued.tokens[kept])
        difference = _difference(best_log_probabilities, continued.log_probabilities[kept])
        _, self.waived, self.differences = self._free_costs(
            progress, self.progress, continued.tokens[kept], differences, difference
        )

    def select(
        self,
        active: ActiveHypotheses[StateT],
        log_probabilities: Float[Tensor, "sentences beams V"],
        beam: int,
        eos: int,
    ) -> BeamSelection:
        candidates, bank = self._candidates(active, log_probabilities, beam)
        possible = candidates.totals > NEG_INF
        is_eos = candidates.tokens == eos
        # Among the candidates of complete hypotheses, EOS is selected as in plain beam search.
        complete = self.is_complete(active).gather(1, candidates.beams)
        finished = possible & is_eos & complete & (complete.cumsum(1) <= beam)

        order = _allocate(bank, possible & ~is_eos)[:, :beam]
        continued = candidates.select(order)
        can_continue = (possible & ~is_eos).gather(1, order)
        totals = continued.totals.masked_fill(~can_continue, NEG_INF)
        continued = BeamCandidates(
            continued.beams, continued.tokens, continued.log_probabilities, totals
        )
        return BeamSelection(candidates, finished, continued)

    # Candidates

    def _next_phrase_tokens(
        self, last_tokens: Int[Tensor, "sentences beams"], log_probabilities: Float[Tensor, "s b V"]
    ) -> Int[Tensor, "sentences beams Q"]:
        """The distinct tokens that continue a missing phrase of each hypothesis, padded with ``NO_TOKEN``."""
        self.last_tokens = last_tokens
        table, matched = self.table, self.progress.matched
        missing = self.progress.completed < table.times[:, None]
        needed = (missing.float() @ table.membership.transpose(1, 2)) > 0
        ended_word = self._ends_word(last_tokens).unsqueeze(2)
        may_begin = (matched > 0) | ~table.boundary_before[:, None] | ended_word
        following = self._next_token(matched).masked_fill(~needed | ~may_begin, NO_TOKEN)
        # For a tokenization that awaits a word boundary: the most probable token, other than EOS, that begins a word.
        boundaries = self.boundaries.begins_word.clone()
        boundaries[self.eos] = False
        word_start = log_probabilities.masked_fill(~boundaries, NEG_INF).argmax(2, keepdim=True)
        waiting = (self._awaits_boundary(matched) & needed).any(2, keepdim=True)
        tokens = torch.cat([following, word_start.masked_fill(~waiting, NO_TOKEN)], dim=2)
        duplicate = (tokens.unsqueeze(3) == tokens.unsqueeze(2)).tril(-1).any(3)
        return tokens.masked_fill(duplicate, NO_TOKEN)

    def _candidates(
        self,
        active: ActiveHypotheses[StateT],
        log_probabilities: Float[Tensor, "sentences beams V"],
        beam: int,
    ) -> tuple[BeamCandidates, Int[Tensor, "sentences count"]]:
        """The best candidates of each hypothesis and those that continue a phrase, best first, with their banks."""
        count = min(2 * beam, log_probabilities.shape[2])
        added, tokens = log_probabilities.topk(count)
        phrase_tokens, values = self.phrase_tokens
        is_phrase_token = (tokens.unsqueeze(3) == phrase_tokens.unsqueeze(2)).any(3)
        added = torch.cat([added.masked_fill(is_phrase_token, NEG_INF), values], dim=2)
        added = added.masked_fill(added.isnan(), NEG_INF)
        tokens = torch.cat([tokens, phrase_tokens.clamp(min=0)], dim=2).flatten(1)
        beams = torch.arange(added.shape[1], device=added.device).repeat_interleave(added.shape[2])
        beams = beams.expand(len(added), -1)
        rows = torch.arange(len(added), device=added.device).unsqueeze(1)
        before = self.progress.select(rows, beams)
        after = self._after(before, self.last_tokens[rows, beams], tokens)
        # A token of a free phrase costs what the most probable token costs. If the phrase is broken off, the
        # hypothesis pays the waived cost after all.
        self.best_log_probabilities = log_probabilities.amax(2)
        difference = _difference(self.best_log_probabilities[rows, beams], added.flatten(1))
        saved, waived, _ = self._free_costs(
            before, after, tokens, self.differences[rows, beams], difference
        )
        discount = saved + waived - self.waived[rows, beams]
        totals = (active.totals.unsqueeze(2) + added).flatten(1) + discount
        totals, order = totals.sort(dim=1, descending=True, stable=True)
        candidates = BeamCandidates(
            beams=beams.gather(1, order),
            tokens=tokens.gather(1, order),
            log_probabilities=added.flatten(1).gather(1, order),
            totals=totals,
        )
        return candidates, self._banks(after).gather(1, order)

    def _free_costs(
        self,
        before: ConstraintProgress,
        after: ConstraintProgress,
        tokens: Int[Tensor, "sentences n"],
        differences: Float[Tensor, "sentences n L"],
        difference: Float[Tensor, "sentences n"],
    ) -> tuple[
        Float[Tensor, "sentences n"], Float[Tensor, "sentences n"], Float[Tensor, "sentences n L"]
    ]:
        """What the free phrases save after one more token.

        Returns the cost saved for good by phrases that the token completes, the cost waived for the phrase that is
        being generated, and the differences of the last tokens that no completed phrase contains.
        """
        table, token = self.table, tokens.unsqueeze(2)
        missing = self._to_tokenizations(before.completed < table.times[:, None])
        missing = missing & table.free[:, None]
        last_token = (before.matched + 1 == table.length[:, None]) & ~table.boundary_after[:, None]
        completes = missing & last_token & (self._next_token(before.matched) == token)
        completes = completes & self._to_tokenizations(after.completed > before.completed)
        begins_word = self.boundaries.begins_word[tokens].unsqueeze(2)
        confirmed = missing & self._awaits_boundary(before.matched) & begins_word
        recent = torch.cat([differences, difference.unsqueeze(2)], dim=2)
        completed, bounded = self._longest(completes), self._longest(confirmed)
        saved = _sum_of_last(recent, completed) + _sum_of_last(differences, bounded)
        # No token is free twice: the tokens of a completed phrase no longer count.
        recent = recent[:, :, 1:].masked_fill((completed > 0).unsqueeze(2), 0.0)
        recent[:, :, :-1].masked_fill_((bounded > 0).unsqueeze(2), 0.0)
        missing = self._to_tokenizations(after.completed < table.times[:, None])
        matched = after.matched * (missing & table.free[:, None])
        longest = torch.nn.functional.pad(matched, (0, 1)).amax(2)
        return saved, _sum_of_last(recent, longest), recent

    def _longest(self, tokenizations: Bool[Tensor, "sentences n P"]) -> Int[Tensor, "sentences n"]:
        """The length of the longest of these tokenizations; 0 if there are none."""
        return torch.nn.functional.pad(self.table.length[:, None] * tokenizations, (0, 1)).amax(2)

    # Progress

    def _after(
        self,
        before: ConstraintProgress,
        last_tokens: Int[Tensor, "sentences n"],
        tokens: Int[Tensor, "sentences n"],
    ) -> ConstraintProgress:
        """The progress after one more token. ``last`` is the token before it."""
        table, token = self.table, tokens.unsqueeze(2)
        # A word boundary confirms the tokenizations that await one; without it they fall back.
        waiting = self._awaits_boundary(before.matched)
        begins_word = self.boundaries.begins_word[tokens].unsqueeze(2)
        confirmed = self._to_phrases(waiting & begins_word)
        matched = torch.where(waiting, self._at(table.fallback, before.matched), before.matched)
        matched = matched.masked_fill(self._to_tokenizations(confirmed), 0)
        # Fall back until the next token of each tokenization is this one, or nothing is matched.
        for _ in range(table.tokens.shape[2] - 1):
            mismatch = (matched > 0) & (self._next_token(matched) != token)
            matched = torch.where(mismatch, self._at(table.fallback, matched), matched)
        may_begin = ~table.boundary_before[:, None] | self._ends_word(last_tokens).unsqueeze(2)
        matches = (self._next_token(matched) == token) & ((matched > 0) | may_begin)
        matched = matched + matches.long()
        # A tokenization that needs no boundary after it is complete with its last token.
        is_complete = (matched == table.length[:, None]) & ~table.boundary_after[:, None]
        finished = self._to_phrases(is_complete & matches)
        matched = matched.masked_fill(self._to_tokenizations(finished), 0)
        completed = before.completed + confirmed.long() + finished.long()
        return ConstraintProgress(matched, completed)

    def _banks(self, progress: ConstraintProgress) -> Int[Tensor, "sentences n"]:
        """Tokens of the completed phrases and of the longest match of a missing one."""
        table = self.table
        completed = progress.completed.minimum(table.times[:, None])
        completed_tokens = (completed * table.steps[:, None]).sum(2)
        missing = self._to_tokenizations(completed < table.times[:, None])
        steps = (table.membership @ table.steps.unsqueeze(2).float()).long().transpose(1, 2)
        remaining = table.length[:, None] + table.boundary_after[:, None].long() - progress.matched
        partial = (steps - remaining).masked_fill(~missing | (progress.matched == 0), 0)
        return completed_tokens + partial.amax(2) if partial.shape[2] else completed_tokens

    def _awaits_boundary(
        self, matched: Int[Tensor, "sentences n P"]
    ) -> Bool[Tensor, "sentences n P"]:
        """Which tokenizations match in full and lack only the word boundary after them."""
        return (matched == self.table.length[:, None]) & (matched > 0)

    def _to_phrases(
        self, tokenizations: Bool[Tensor, "sentences n P"]
    ) -> Bool[Tensor, "sentences n C"]:
        """Which phrases have one of these tokenizations."""
        return (tokenizations.float() @ self.table.membership) > 0

    def _to_tokenizations(
        self, phrases: Bool[Tensor, "sentences n C"]
    ) -> Bool[Tensor, "sentences n P"]:
        """The tokenizations of these phrases."""
        return (phrases.float() @ self.table.membership.transpose(1, 2)) > 0

    def _next_token(self, matched: Int[Tensor, "sentences n P"]) -> Int[Tensor, "sentences n P"]:
        """The token that continues each tokenization."""
        return self._at(self.table.tokens, matched)

    def _at(
        self, table: Int[Tensor, "sentences P L"], matched: Int[Tensor, "sentences n P"]
    ) -> Int[Tensor, "sentences n P"]:
        return table.gather(2, matched.transpose(1, 2)).transpose(1, 2)

    def _ends_word(self, last_tokens: Int[Tensor, "sentences n"]) -> Bool[Tensor, "sentences n"]:
        return self.boundaries.ends_word[last_tokens]


def _difference(
    best_log_probabilities: Float[Tensor, "sentences n"],
    log_probabilities: Float[Tensor, "sentences n"],
) -> Float[Tensor, "sentences n"]:
    """How much less probable tokens are than the most probable one; 0 for impossible tokens."""
    difference = (best_log_probabilities - log_probabilities).clamp(min=0).double()
    return difference.masked_fill(log_probabilities == NEG_INF, 0.0)


def _sum_of_last(
    values: Float[Tensor, "sentences n L"], count: Int[Tensor, "sentences n"]
) -> Float[Tensor, "sentences n"]:
    """The sum of the last ``count`` values of each row."""
    sums = torch.nn.functional.pad(values.flip(2).cumsum(2), (1, 0))
    return sums.gather(2, count.unsqueeze(2)).squeeze(2)


def _allocate(
    bank: Int[Tensor, "sentences count"], possible: Bool[Tensor, "sentences count"]
) -> Int[Tensor, "sentences count"]:
    """The order in which candidates, given best first, enter the beam.

    First the best candidate of each bank, from the highest bank down, then the second best of each, and so on.
    """
    banks = int(bank.amax()) + 1
    one_hot = torch.nn.functional.one_hot(bank, banks) * possible.unsqueeze(2)
    rank = one_hot.cumsum(1).gather(2, bank.unsqueeze(2)).squeeze(2)
    last_rank = torch.iinfo(rank.dtype).max
    return (rank * banks - bank).masked_fill(~possible, last_rank).argsort(dim=1, stable=True)
