"""Lexical constraints: phrases that the output is guaranteed to contain.

Beam search with banks (Post and Vilar 2018; in tensors as in Hu et al. 2019). A hypothesis is in the bank of its
*progress*: how many tokens of the phrases it has said. The beam is shared out among the banks, so one that has yet to
say its phrases need not fight those that cost nothing yet. EOS comes when nothing is missing.

Why it is guaranteed. Each step offers every hypothesis the tokens that lead on in what it lacks, however improbable.
Of the phrase that is furthest on, the next token makes the progress greater by 1 at least: what is said whole stays
said, and of what is begun only the furthest counts. The best of the highest bank always goes on. So the greatest
progress grows with every step, and after ``tokens_needed`` steps there is a hypothesis that lacks nothing; nor can it come to
lack anything later. Only such ones finish, or are given back where the limit cuts them off.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decoding.hypotheses import NEG_INF, ActiveHypotheses, BeamCandidates, S
from regard.decoding.logits_processors import BeamSelection, LogitsProcessor

NOTHING = -1
"""in a token's place: there is none"""


class Spelling(NamedTuple):
    """One way to say a phrase: these tokens, one after the other."""

    tokens: tuple[int, ...]
    after_border: bool = False
    """it may follow only on the start, or on a token that closes a word"""
    before_border: bool = False
    """only EOS, or a token that opens a word, may follow it"""

    @property
    def steps(self) -> int:
        """at most, until it counts as said"""
        return len(self.tokens) + self.before_border


class Phrase(NamedTuple):
    """What must be said, in one spelling or another, so many times. One spelling at least may come anywhere."""

    spellings: tuple[Spelling, ...]
    times: int = 1
    free: bool = False
    """Its tokens count as probable as the likeliest: for what no model can find probable, a placeholder. Scores show
    it, log-probabilities stay the model's."""

    @property
    def steps(self) -> int:
        return max(spelling.steps for spelling in self.spellings)


class WordBoundaries(NamedTuple):
    """Which tokens open a word (so the one before has ended), and which close one, of the whole vocabulary."""

    opens: Bool[Tensor, "V"]
    closes: Bool[Tensor, "V"]


def tokens_needed(phrases: Sequence[Phrase]) -> int:
    """How many tokens suffice to say all of them."""
    return sum(phrase.steps * phrase.times for phrase in phrases)


@dataclass(frozen=True)
class Patterns:
    """All spellings of each sentence, as tensors; where a sentence has fewer, empty ones that are never said."""

    tokens: Int[Tensor, "sentences P L"]
    """``NOTHING`` after the last"""
    fallback: Int[Tensor, "sentences P L"]
    """of so many tokens that were right, how many may still be, as the beginning of another try (Knuth et al. 1977)"""
    length: Int[Tensor, "sentences P"]
    after_border: Bool[Tensor, "sentences P"]
    before_border: Bool[Tensor, "sentences P"]
    free: Bool[Tensor, "sentences P"]
    member: Float[Tensor, "sentences P C"]
    """1 where the spelling is of the phrase"""
    times: Int[Tensor, "sentences C"]
    steps: Int[Tensor, "sentences C"]

    @classmethod
    def of(cls, batch: Sequence[Sequence[Phrase]], borders: WordBoundaries) -> "Patterns":
        device = borders.opens.device
        P = max(sum(len(phrase.spellings) for phrase in phrases) for phrases in batch)
        C = max(len(phrases) for phrases in batch)
        every = [one for phrases in batch for phrase in phrases for one in phrase.spellings]
        L = max((len(one.tokens) for one in every), default=0)
        size = len(batch), P
        tokens = torch.full((*size, L + 1), NOTHING)
        fallback = torch.zeros(*size, L + 1, dtype=torch.long)
        length = torch.zeros(size, dtype=torch.long)
        after, before, free = torch.zeros(3, *size, dtype=torch.bool)
        member = torch.zeros(*size, C)
        times, steps = torch.zeros(2, len(batch), C, dtype=torch.long)
        closes = borders.closes.tolist() if every else []
        for row, phrases in enumerate(batch):
            place = 0
            for number, phrase in enumerate(phrases):
                assert not all(one.after_border for one in phrase.spellings), "one is free to come"
                times[row, number], steps[row, number] = phrase.times, phrase.steps
                for one in phrase.spellings:
                    n = len(one.tokens)
                    assert n > 0, "a phrase has tokens"
                    tokens[row, place, :n] = torch.tensor(one.tokens)
                    fallback[row, place, : n + 1] = torch.tensor(_fallback(one, closes))
                    length[row, place] = n
                    after[row, place], before[row, place] = one.after_border, one.before_border
                    free[row, place] = phrase.free
                    member[row, place, number] = 1.0
                    place += 1
        parts = tokens, fallback, length, after, before, free, member, times, steps
        return cls(*(part.to(device) for part in parts))

    def of_rows(self, kept: Int[Tensor, "kept"]) -> "Patterns":
        return Patterns(*(part[kept] for part in vars(self).values()))


def _fallback(one: Spelling, closes: Sequence[bool]) -> list[int]:
    tokens = one.tokens

    def begins(start: int, end: int) -> bool:
        """Whether the spelling may have begun at start, if the tokens up to end were said."""
        border = not one.after_border or closes[tokens[start - 1]]
        return border and tokens[start:end] == tokens[: end - start]

    return [
        next((end - start for start in range(1, end) if begins(start, end)), 0)
        for end in range(len(tokens) + 1)
    ]


@dataclass(frozen=True)
class Progress:
    """How far hypotheses have come: n of each sentence."""

    matched: Int[Tensor, "sentences n P"]
    """tokens of each spelling just said; all of them: only the border is missing"""
    said: Int[Tensor, "sentences n C"]
    """how many times each phrase was said"""

    @property
    def longest(self) -> Int[Tensor, "sentences n"]:
        """Tokens of the spelling that is furthest on."""
        return torch.nn.functional.pad(self.matched, (0, 1)).amax(2)

    def select(self, rows: Int[Tensor, "some 1"], which: Int[Tensor, "some n"]) -> "Progress":
        return Progress(self.matched[rows, which], self.said[rows, which])


class Constraints(LogitsProcessor):
    """The phrases of each sentence of the batch."""

    def __init__(
        self, phrases: Sequence[Sequence[Phrase]], borders: WordBoundaries, end: int
    ) -> None:
        self.borders = borders
        self.end = end
        self.patterns = Patterns.of(phrases, borders)
        sentences, P = self.patterns.length.shape
        device = borders.opens.device
        C = self.patterns.times.shape[1]
        self.progress = Progress(
            torch.zeros(sentences, 1, P, dtype=torch.long, device=device),
            torch.zeros(sentences, 1, C, dtype=torch.long, device=device),
        )
        self.deferred_cost = torch.zeros(sentences, 1, dtype=torch.float64, device=device)
        """what each hypothesis was let off for the phrase it is saying"""
        self.leading: tuple[Tensor, Tensor]

    def allow(
        self, live: ActiveHypotheses[S], log_probabilities: Float[Tensor, "sentences beams V"]
    ) -> Float[Tensor, "sentences beams V"]:
        """What leads on is noted before any other guide can forbid it."""
        tokens = self._lead_on(live.tokens[:, :, -1], log_probabilities)
        values = log_probabilities.gather(2, tokens.clamp(min=0))
        self.leading = tokens, values.masked_fill(tokens == NOTHING, NEG_INF)
        unfinished = ~self.complete(live)
        allowed = log_probabilities.clone()
        allowed[:, :, self.end].masked_fill_(unfinished, NEG_INF)
        return allowed

    def complete(self, live: ActiveHypotheses[S]) -> Bool[Tensor, "sentences beams"]:
        """EOS, or being cut off, is a border."""
        waiting = self._waiting(self.progress.matched)
        said = self.progress.said + self._by_phrase(waiting).long()
        return (said >= self.patterns.times[:, None]).all(2)

    def go_on(self, kept: Int[Tensor, "kept"], chosen: BeamCandidates) -> None:
        own, beams = kept.unsqueeze(1), chosen.beams[kept]
        before = self.progress.select(own, beams)
        last, totals, deferred_cost = (
            self.last[own, beams],
            self.totals[own, beams],
            self.deferred_cost[own, beams],
        )
        self.patterns = self.patterns.of_rows(kept)
        self.progress = self._after(before, last, chosen.tokens[kept])
        new = (chosen.totals - chosen.log_probabilities)[kept] - totals
        settled = self._whole(before, self.progress) | ~self._begun(self.progress)
        self.deferred_cost = torch.where(settled | new.isnan(), 0.0, deferred_cost + new)

    def choose(
        self,
        live: ActiveHypotheses[S],
        log_probabilities: Float[Tensor, "sentences beams V"],
        beam: int,
        end: int,
    ) -> BeamSelection:
        best, bank = self._candidates(live, log_probabilities, beam)
        real = best.totals > NEG_INF
        is_end = best.tokens == end
        # Among those that lack nothing the choice is that of any beam search.
        whole = self.complete(live).gather(1, best.beams)
        ended = real & is_end & whole & (whole.cumsum(1) <= beam)

        order = _shared_out(bank, real & ~is_end)[:, :beam]
        going = best.select(order)
        possible = (real & ~is_end).gather(1, order)
        totals = going.totals.masked_fill(~possible, NEG_INF)
        going = BeamCandidates(going.beams, going.tokens, going.log_probabilities, totals)
        return BeamSelection(best, ended, going)

    # Candidates

    def _lead_on(
        self, last: Int[Tensor, "sentences beams"], log_probabilities: Float[Tensor, "s b V"]
    ) -> Int[Tensor, "sentences beams Q"]:
        """Of each hypothesis the tokens that bring it on, each once, ``NOTHING`` where there are fewer."""
        self.last = last
        patterns, matched = self.patterns, self.progress.matched
        lacking = self.progress.said < patterns.times[:, None]
        wanted = (lacking.float() @ patterns.member.transpose(1, 2)) > 0
        closed = self._closes(last).unsqueeze(2)
        may_begin = (matched > 0) | ~patterns.after_border[:, None] | closed
        following = self._token(matched).masked_fill(~wanted | ~may_begin, NOTHING)
        # A border, for what waits for one: the most probable that is not EOS.
        borders = self.borders.opens.clone()
        borders[self.end] = False
        opening = log_probabilities.masked_fill(~borders, NEG_INF).argmax(2, keepdim=True)
        waiting = (self._waiting(matched) & wanted).any(2, keepdim=True)
        tokens = torch.cat([following, opening.masked_fill(~waiting, NOTHING)], dim=2)
        twice = (tokens.unsqueeze(3) == tokens.unsqueeze(2)).tril(-1).any(3)
        return tokens.masked_fill(twice, NOTHING)

    def _candidates(
        self,
        live: ActiveHypotheses[S],
        log_probabilities: Float[Tensor, "sentences beams V"],
        beam: int,
    ) -> tuple[BeamCandidates, Int[Tensor, "sentences count"]]:
        """The best continuations of each hypothesis, and those that bring it on; best first, with their banks."""
        count = min(2 * beam, log_probabilities.shape[2])
        added, tokens = log_probabilities.topk(count)
        leading, values = self.leading
        known = (tokens.unsqueeze(3) == leading.unsqueeze(2)).any(3)
        added = torch.cat([added.masked_fill(known, NEG_INF), values], dim=2)
        added = added.masked_fill(added.isnan(), NEG_INF)
        tokens = torch.cat([tokens, leading.clamp(min=0)], dim=2).flatten(1)
        beams = torch.arange(added.shape[1], device=added.device).repeat_interleave(added.shape[2])
        beams = beams.expand(len(added), -1)
        rows = torch.arange(len(added), device=added.device).unsqueeze(1)
        before = self.progress.select(rows, beams)
        after = self._after(before, self.last[rows, beams], tokens)
        # What is free costs what the likeliest token costs; a phrase that is broken off pays for it after all.
        loan = torch.zeros_like(added, dtype=torch.float64)
        phrase = slice(count, added.shape[2] - 1)
        let_off = log_probabilities.amax(2, keepdim=True) - added[:, :, phrase]
        loan[:, :, phrase] = let_off.clamp(min=0) * self.patterns.free[:, None]
        loan = loan.masked_fill(added == NEG_INF, 0.0).flatten(1)
        whole, begun = self._whole(before, after), self._begun(after)
        longer = after.longest > before.longest
        loan = loan.masked_fill(~whole & ~begun, 0.0)
        loan = loan - self.deferred_cost[rows, beams].masked_fill(whole | longer, 0.0)
        self.totals = live.totals
        totals = (live.totals.unsqueeze(2) + added).flatten(1) + loan
        totals, order = totals.sort(dim=1, descending=True, stable=True)
        best = BeamCandidates(
            beams=beams.gather(1, order),
            tokens=tokens.gather(1, order),
            log_probabilities=added.flatten(1).gather(1, order),
            totals=totals,
        )
        return best, self._banks(after).gather(1, order)

    def _whole(self, before: Progress, after: Progress) -> Bool[Tensor, "sentences n"]:
        """Whether the last token made a phrase whole."""
        return (after.said > before.said).any(2)

    def _begun(self, progress: Progress) -> Bool[Tensor, "sentences n"]:
        return (progress.matched > 0).any(2)

    # Progress

    def _after(
        self,
        before: Progress,
        last: Int[Tensor, "sentences n"],
        tokens: Int[Tensor, "sentences n"],
    ) -> Progress:
        """The progress when each hypothesis has said one more token."""
        patterns, said = self.patterns, tokens.unsqueeze(2)
        waiting = self._waiting(before.matched)
        opens = self.borders.opens[tokens].unsqueeze(2)
        confirmed = self._by_phrase(waiting & opens)
        matched = torch.where(waiting, self._at(patterns.fallback, before.matched), before.matched)
        matched = matched.masked_fill(self._of_phrases(confirmed), 0)
        for _ in range(patterns.tokens.shape[2] - 1):
            wrong = (matched > 0) & (self._token(matched) != said)
            matched = torch.where(wrong, self._at(patterns.fallback, matched), matched)
        free = ~patterns.after_border[:, None] | self._closes(last).unsqueeze(2)
        right = (self._token(matched) == said) & ((matched > 0) | free)
        matched = matched + right.long()
        whole = (matched == patterns.length[:, None]) & ~patterns.before_border[:, None]
        finished = self._by_phrase(whole & right)
        matched = matched.masked_fill(self._of_phrases(finished), 0)
        return Progress(matched, before.said + confirmed.long() + finished.long())

    def _banks(self, progress: Progress) -> Int[Tensor, "sentences n"]:
        """Tokens of phrases said whole, and of the furthest that is begun."""
        patterns = self.patterns
        said = progress.said.minimum(patterns.times[:, None])
        whole = (said * patterns.steps[:, None]).sum(2)
        lacking = self._of_phrases(said < patterns.times[:, None])
        most = (patterns.member @ patterns.steps.unsqueeze(2).float()).long().transpose(1, 2)
        left = patterns.length[:, None] + patterns.before_border[:, None].long() - progress.matched
        begun = (most - left).masked_fill(~lacking | (progress.matched == 0), 0)
        return whole + begun.amax(2) if begun.shape[2] else whole

    def _waiting(self, matched: Int[Tensor, "sentences n P"]) -> Bool[Tensor, "sentences n P"]:
        """Said but for the border."""
        return (matched == self.patterns.length[:, None]) & (matched > 0)

    def _by_phrase(self, spellings: Bool[Tensor, "sentences n P"]) -> Bool[Tensor, "sentences n C"]:
        return (spellings.float() @ self.patterns.member) > 0

    def _of_phrases(self, phrases: Bool[Tensor, "sentences n C"]) -> Bool[Tensor, "sentences n P"]:
        return (phrases.float() @ self.patterns.member.transpose(1, 2)) > 0

    def _token(self, matched: Int[Tensor, "sentences n P"]) -> Int[Tensor, "sentences n P"]:
        """The token each spelling goes on with."""
        return self._at(self.patterns.tokens, matched)

    def _at(
        self, table: Int[Tensor, "sentences P L"], matched: Int[Tensor, "sentences n P"]
    ) -> Int[Tensor, "sentences n P"]:
        return table.gather(2, matched.transpose(1, 2)).transpose(1, 2)

    def _closes(self, last: Int[Tensor, "sentences n"]) -> Bool[Tensor, "sentences n"]:
        return self.borders.closes[last]


def _shared_out(
    bank: Int[Tensor, "sentences count"], possible: Bool[Tensor, "sentences count"]
) -> Int[Tensor, "sentences count"]:
    """The order in which continuations, which come best first, get a place in the beam.

    First the best of each bank, from the highest bank down, then the second best of each, and so on.
    """
    banks = int(bank.amax()) + 1
    inside = torch.nn.functional.one_hot(bank, banks) * possible.unsqueeze(2)
    rank = inside.cumsum(1).gather(2, bank.unsqueeze(2)).squeeze(2)
    last = torch.iinfo(rank.dtype).max
    return (rank * banks - bank).masked_fill(~possible, last).argsort(dim=1, stable=True)
