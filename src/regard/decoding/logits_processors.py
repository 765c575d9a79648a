"""Logits processors: optional changes to decoding, one class each, that can be combined.

Besides the model and the ``SequenceRules``, a processor may

- forbid tokens (``process_logits``),
- select which candidates finish a hypothesis and which are continued (``select``; one processor at most),
- add to the score of a finished hypothesis (``score_bonus``), and
- state which hypotheses may be returned if they have to be truncated (``is_complete``).

A processor is made for one batch. If it stores data about each hypothesis, it updates the data in ``advance``. A
processor that a decoding option turns on is registered under the name of the option (``enabled_by``). The lexical
constraints, also a processor, are in ``constraints.py``. Temperature, top-k and top-p are in
``greedy_and_sampling.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decoding.search_state import NEG_INF, ActiveHypotheses, BeamCandidates, S
from regard.errors import RegardError
from regard.recipe import DecodingConfig


class BeamSelection(NamedTuple):
    """The outcome of one step of beam search."""

    candidates: BeamCandidates
    """the candidates that were considered, best first"""
    finished: Bool[Tensor, "sentences count"]
    """which candidates finish a hypothesis"""
    continued: BeamCandidates
    """the candidates that become the active hypotheses of the next step"""
    none_finished: bool = False
    """No candidate finishes a hypothesis. If False, read ``finished``, which waits for the GPU."""

    @classmethod
    def from_candidates(cls, candidates: BeamCandidates, eos: int, beam: int) -> "BeamSelection":
        """EOS among the first ``beam`` finishes a hypothesis; the first ``beam`` that are not EOS are continued."""
        is_eos = candidates.tokens == eos
        if not is_eos.any():  # the most frequent case
            return cls(candidates, is_eos, candidates.first(beam), none_finished=True)
        rank = torch.arange(is_eos.shape[1], device=is_eos.device)
        finished = is_eos & (rank < beam) & (candidates.totals > NEG_INF)
        order = is_eos.int().argsort(dim=1, stable=True)[:, :beam]
        continued = candidates.select(order)
        # With a tiny vocabulary there may be too few other tokens: EOS fills the beam, as impossible hypotheses.
        totals = continued.totals.masked_fill(is_eos.gather(1, order), NEG_INF)
        return cls(candidates, finished, replace(continued, totals=totals))


class LogitsProcessor:
    """Base class; changes nothing."""

    groups: int = 1
    """number of groups that the beam is divided into"""

    def process_logits(
        self, active: ActiveHypotheses[S], log_probabilities: Float[Tensor, "sentences beams V"]
    ) -> Float[Tensor, "sentences beams V"]:
        """The log-probabilities, with ``NEG_INF`` for forbidden tokens. Called once per step, before the others."""
        return log_probabilities

    def select(
        self,
        active: ActiveHypotheses[S],
        log_probabilities: Float[Tensor, "sentences beams V"],
        beam: int,
        eos: int,
    ) -> BeamSelection | None:
        """The candidates to finish and to continue; None: as plain beam search selects them."""
        return None

    def score_bonus(self, active: ActiveHypotheses[S]) -> Float[Tensor, "sentences beams"] | None:
        """Added to the score of a hypothesis that finishes in this step; at most 0. None: nothing."""
        return None

    def is_complete(self, active: ActiveHypotheses[S]) -> Bool[Tensor, "sentences beams"] | None:
        """Which hypotheses satisfy every requirement and lack only EOS; None: all."""
        return None

    def advance(self, kept: Int[Tensor, "kept"], continued: BeamCandidates) -> None:
        """Follow the beam: only the sentences ``kept`` remain, with the candidates that are continued.

        ``kept`` are indices into the present sentences; ``continued`` has the candidates of all present sentences.
        """


# Processors by decoding option

LastAttention = Callable[[], Float[Tensor, "sentences beams S"]]
"""The cross-attention weights of each hypothesis in the last step; they sum to 1 over the source."""


@dataclass(frozen=True)
class DecodingContext:
    """What a processor may use besides the decoding options."""

    source_mask: Bool[Tensor, "sentences S"]
    """False at padding and EOS"""
    record_cross_attention: Callable[[], LastAttention]
    """starts the recording of cross-attention; for processors with ``needs_attention``"""
    eos: int


class OptionalProcessor(LogitsProcessor):
    """A processor that a decoding option turns on."""

    needs_attention: ClassVar[bool] = False
    """whether it reads the model's attention, which only the plain network can record"""

    @classmethod
    def from_options(
        cls, decoding: DecodingConfig, context: DecodingContext
    ) -> "OptionalProcessor":
        raise NotImplementedError


P = TypeVar("P", bound=type[OptionalProcessor])
OPTIONAL_PROCESSORS: dict[str, type[OptionalProcessor]] = {}
"""processors by the decoding option that turns them on"""


def enabled_by(option: str) -> Callable[[P], P]:
    """A decorator: the processor is used if this decoding option differs from its default."""

    def register(processor: P) -> P:
        OPTIONAL_PROCESSORS[option] = processor
        return processor

    return register


def enabled_processors(decoding: DecodingConfig) -> list[type[OptionalProcessor]]:
    """The processors that the decoding options turn on."""
    enabled = decoding.logits_processors
    return [processor for option, processor in OPTIONAL_PROCESSORS.items() if option in enabled]


class LogitsProcessorList(LogitsProcessor):
    """Several processors, applied in order. At most one of them may implement ``select``."""

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        selecting = [
            type(processor).__name__
            for processor in processors
            if type(processor).select is not LogitsProcessor.select
        ]
        assert len(selecting) <= 1, f"{' and '.join(selecting)} cannot be combined: each selects"
        self.processors = processors
        self.groups = max((processor.groups for processor in processors), default=1)

    def process_logits(
        self, active: ActiveHypotheses[S], log_probabilities: Float[Tensor, "sentences beams V"]
    ) -> Float[Tensor, "sentences beams V"]:
        for processor in self.processors:
            log_probabilities = processor.process_logits(active, log_probabilities)
        return log_probabilities

    def select(
        self,
        active: ActiveHypotheses[S],
        log_probabilities: Float[Tensor, "sentences beams V"],
        beam: int,
        eos: int,
    ) -> BeamSelection | None:
        selections = (
            processor.select(active, log_probabilities, beam, eos) for processor in self.processors
        )
        return next((selection for selection in selections if selection is not None), None)

    def score_bonus(self, active: ActiveHypotheses[S]) -> Float[Tensor, "sentences beams"] | None:
        results = [processor.score_bonus(active) for processor in self.processors]
        bonuses = [bonus for bonus in results if bonus is not None]
        return sum(bonuses[1:], bonuses[0]) if bonuses else None

    def is_complete(self, active: ActiveHypotheses[S]) -> Bool[Tensor, "sentences beams"] | None:
        results = [processor.is_complete(active) for processor in self.processors]
        complete = [flags for flags in results if flags is not None]
        return torch.stack(complete).all(0) if complete else None

    def advance(self, kept: Int[Tensor, "kept"], continued: BeamCandidates) -> None:
        for processor in self.processors:
            processor.advance(kept, continued)


@enabled_by("no_repeat_ngram")
class NoRepeatNgram(OptionalProcessor):
    """N-gram blocking: no n-gram of tokens occurs twice in a hypothesis (Paulus et al. 2017).

    Hugging Face calls the option ``no_repeat_ngram_size``. If it would forbid every allowed token, it has no effect in
    that step: a forced prefix or a required phrase may repeat an n-gram.
    """

    def __init__(self, n: int) -> None:
        assert n >= 1
        self.n = n

    @classmethod
    def from_options(cls, decoding: DecodingConfig, context: DecodingContext) -> "NoRepeatNgram":
        return cls(decoding.no_repeat_ngram)

    def process_logits(
        self, active: ActiveHypotheses[S], log_probabilities: Float[Tensor, "sentences beams V"]
    ) -> Float[Tensor, "sentences beams V"]:
        tokens = active.tokens[:, :, 1:]  # BOS is not part of any n-gram
        if tokens.shape[2] < self.n:
            return log_probabilities
        ngrams = tokens.unfold(2, self.n, 1)  # [sentences, beams, positions, n]
        suffix = tokens[:, :, tokens.shape[2] - self.n + 1 :].unsqueeze(2)
        repeats = (ngrams[..., :-1] == suffix).all(-1)
        # One extra column collects the tokens that are not forbidden.
        V = log_probabilities.shape[2]
        forbidden = ngrams[..., -1].masked_fill(~repeats, V)
        flags = log_probabilities.new_zeros(*repeats.shape[:2], V + 1).scatter(2, forbidden, 1.0)
        allowed = log_probabilities.masked_fill(flags[..., :V].bool(), NEG_INF)
        none_allowed = (allowed == NEG_INF).all(2, keepdim=True)
        return torch.where(none_allowed, log_probabilities, allowed)


@enabled_by("repetition_penalty")
class RepetitionPenalty(OptionalProcessor):
    """Repetition penalty: makes tokens that a hypothesis already contains less probable (Keskar et al. 2019).

    Their log-probabilities are multiplied by ``penalty``, however often they occurred. As in the beam search of Hugging
    Face, the result is not normalized again, so scores contain the penalty.
    """

    def __init__(self, penalty: float) -> None:
        assert penalty > 0
        self.penalty = penalty

    @classmethod
    def from_options(
        cls, decoding: DecodingConfig, context: DecodingContext
    ) -> "RepetitionPenalty":
        return cls(decoding.repetition_penalty)

    def process_logits(
        self, active: ActiveHypotheses[S], log_probabilities: Float[Tensor, "sentences beams V"]
    ) -> Float[Tensor, "sentences beams V"]:
        tokens = active.tokens[:, :, 1:]  # without BOS
        penalized = self.penalty * log_probabilities.gather(2, tokens)
        return log_probabilities.scatter(2, tokens, penalized)


@enabled_by("coverage_penalty")
class CoveragePenalty(OptionalProcessor):
    """Coverage penalty: ranks hypotheses that attended to every source token higher (Wu et al. 2016, equation 14).

    Adds beta * sum over the source tokens of log(min(1, total attention that the token received)) to the score of a
    finished hypothesis. It does not change which hypotheses are continued, as in the paper.

    source_mask: False at padding and EOS.
    """

    needs_attention = True

    @classmethod
    def from_options(cls, decoding: DecodingConfig, context: DecodingContext) -> "CoveragePenalty":
        attention = context.record_cross_attention()
        return cls(decoding.coverage_penalty, context.source_mask, attention)

    def __init__(
        self, beta: float, source_mask: Bool[Tensor, "sentences S"], attention: LastAttention
    ) -> None:
        assert beta >= 0
        self.beta = beta
        self.source_mask = source_mask
        self.attention = attention
        self.coverage = torch.zeros(*source_mask.shape, device=source_mask.device)[:, None]
        """[sentences, beams, S]: total attention that each source token has received"""

    def process_logits(
        self, active: ActiveHypotheses[S], log_probabilities: Float[Tensor, "sentences beams V"]
    ) -> Float[Tensor, "sentences beams V"]:
        self.coverage = self.coverage + self.attention()
        return log_probabilities

    def score_bonus(self, active: ActiveHypotheses[S]) -> Float[Tensor, "sentences beams"]:
        covered = self.coverage.clamp(1e-9, 1).log().masked_fill(~self.source_mask[:, None], 0.0)
        return self.beta * covered.sum(2).double()

    def advance(self, kept: Int[Tensor, "kept"], continued: BeamCandidates) -> None:
        self.coverage = self.coverage[kept.unsqueeze(1), continued.beams[kept]]
        self.source_mask = self.source_mask[kept]


@enabled_by("beam_groups")
class DiverseBeamGroups(OptionalProcessor):
    """Diverse beam search: groups of beams that avoid each other's tokens (Vijayakumar et al. 2016).

    Each group is a small beam search. The groups select one after the other. A token costs a group ``penalty`` for each
    hypothesis of an earlier group that is continued with the same token in the same step. The cost affects the
    selection only: scores are the model's.
    """

    def __init__(self, groups: int, penalty: float) -> None:
        assert groups >= 1
        assert penalty >= 0
        self.groups = groups
        self.penalty = penalty

    @classmethod
    def from_options(
        cls, decoding: DecodingConfig, context: DecodingContext
    ) -> "DiverseBeamGroups":
        return cls(decoding.beam_groups, decoding.diversity_penalty)

    def select(
        self,
        active: ActiveHypotheses[S],
        log_probabilities: Float[Tensor, "sentences beams V"],
        beam: int,
        eos: int,
    ) -> BeamSelection:
        assert beam % self.groups == 0
        per_group = beam // self.groups
        sentences, beams, V = log_probabilities.shape
        if per_group >= V:
            raise RegardError(
                f"beam {beam}, beam_groups {self.groups}: {per_group} hypotheses per group need "
                f"more than the {V} tokens of the vocabulary"
            )
        cost = torch.zeros(sentences, 1, V, dtype=torch.float64, device=log_probabilities.device)
        selections = []
        for group in range(self.groups):
            # The first step has one hypothesis, which every group extends.
            first_beam = group * per_group if beams > 1 else 0
            group_beams = slice(first_beam, first_beam + per_group if beams > 1 else 1)
            selection = _select_in_group(
                active.totals[:, group_beams],
                log_probabilities[:, group_beams],
                cost,
                first_beam,
                per_group,
                eos,
            )
            selections.append(selection)
            tokens = selection.continued.tokens.unsqueeze(1)
            possible = (selection.continued.totals > NEG_INF).unsqueeze(1)
            cost = cost.scatter_add(2, tokens, self.penalty * possible.double())
        return BeamSelection(
            _concatenate([selection.candidates for selection in selections]),
            torch.cat([selection.finished for selection in selections], dim=1),
            _concatenate([selection.continued for selection in selections]),
        )


def _select_in_group(
    totals: Float[Tensor, "sentences beams"],
    log_probabilities: Float[Tensor, "sentences beams V"],
    cost: Float[Tensor, "sentences 1 V"],
    first_beam: int,
    beam: int,
    eos: int,
) -> BeamSelection:
    """Select as beam search does, by the totals less the cost. ``first``: number of the group's first beam."""
    V = log_probabilities.shape[2]
    log_probabilities = log_probabilities.masked_fill(log_probabilities.isnan(), NEG_INF)
    ranking = (totals.unsqueeze(2) + log_probabilities - cost).flatten(1)
    order = ranking.topk(min(2 * beam, ranking.shape[1])).indices
    beams, tokens = order // V, order % V
    added = log_probabilities.flatten(1).gather(1, order)
    candidates = BeamCandidates(beams + first_beam, tokens, added, totals.gather(1, beams) + added)
    return BeamSelection.from_candidates(candidates, eos, beam)


def _concatenate(groups: list[BeamCandidates]) -> BeamCandidates:
    return BeamCandidates(
        torch.cat([group.beams for group in groups], dim=1),
        torch.cat([group.tokens for group in groups], dim=1),
        torch.cat([group.log_probabilities for group in groups], dim=1),
        torch.cat([group.totals for group in groups], dim=1),
    )
