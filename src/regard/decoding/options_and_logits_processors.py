"""Decoding options, and the logits processors behind them.

A decoding option is defined in this file and nowhere else: as a field of ``DecodingConfig``, and as a key of
``DecodingOptions``, which gives the Python API its types. The recipe's ``decoding`` section, ``--set`` on the command
line, ``model.translate(…)`` and the refusal of options without effect follow from these two lines. Most options turn on
a logits processor, an optional change to decoding. Its class is written above the options that use it. The lexical
constraints, also a processor, are in ``constraints.py``.

Help pages and recipes do not wait for torch. Therefore this file uses methods of tensors instead of functions of torch,
and imports ``Tensor`` only for type checkers, and if torch is loaded already: the tests check shapes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypedDict

from pydantic import Field, model_validator

from regard.decoding.hypothesis import NEG_INF
from regard.errors import RegardError
from regard.recipe.validation import Section, registered

if TYPE_CHECKING or "torch" in sys.modules:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from regard.decoding.search_state import (
        ActiveHypotheses,
        BeamCandidates,
        BeamSelection,
        LastAttention,
        StateT,
    )

# ---------------------------------------------------------------------------------------------
# Logits processors


class LogitsProcessor:
    """An optional change to decoding; this base class changes nothing.

    As in the beam search of Hugging Face, the logits are normalized first: a processor reads and returns
    log-probabilities. It is made for one batch. If it stores data about each hypothesis, it updates them in
    ``advance``.
    """

    groups: int = 1
    """number of groups that the beam is divided into"""

    def process_log_probabilities(
        self,
        active: ActiveHypotheses[StateT],
        log_probabilities: Float[Tensor, "sentences beams V"],
    ) -> Float[Tensor, "sentences beams V"]:
        """The log-probabilities, with ``NEG_INF`` for forbidden tokens. Called once per step, before the others."""
        return log_probabilities

    def truncate_distribution(
        self, log_probabilities: Float[Tensor, "sentences V"]
    ) -> Float[Tensor, "sentences V"]:
        """Sampling: the log-probabilities to sample from, ``NEG_INF`` for excluded tokens; they need not sum to 1.

        This changes which token is drawn, not its log-probability in the result.
        """
        return log_probabilities

    def select(
        self,
        active: ActiveHypotheses[StateT],
        log_probabilities: Float[Tensor, "sentences beams V"],
        beam: int,
        eos: int,
    ) -> BeamSelection | None:
        """The candidates to finish and to continue; None: as plain beam search selects them.

        At most one processor of a list may implement it.
        """
        return None

    def score_bonus(
        self, active: ActiveHypotheses[StateT]
    ) -> Float[Tensor, "sentences beams"] | None:
        """Added to the score of a hypothesis that finishes in this step; at most 0. None: nothing."""
        return None

    def is_complete(
        self, active: ActiveHypotheses[StateT]
    ) -> Bool[Tensor, "sentences beams"] | None:
        """Which hypotheses satisfy every requirement and lack only EOS; None: all."""
        return None

    def advance(self, kept: Int[Tensor, " kept"], continued: BeamCandidates) -> None:
        """Follow the beam: only the sentences ``kept`` remain, with the candidates that are continued.

        ``kept`` are indices into the present sentences; ``continued`` has the candidates of all present sentences.
        """


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

    def process_log_probabilities(
        self,
        active: ActiveHypotheses[StateT],
        log_probabilities: Float[Tensor, "sentences beams V"],
    ) -> Float[Tensor, "sentences beams V"]:
        for processor in self.processors:
            log_probabilities = processor.process_log_probabilities(active, log_probabilities)
        return log_probabilities

    def truncate_distribution(
        self, log_probabilities: Float[Tensor, "sentences V"]
    ) -> Float[Tensor, "sentences V"]:
        for processor in self.processors:
            log_probabilities = processor.truncate_distribution(log_probabilities)
        return log_probabilities

    def select(
        self,
        active: ActiveHypotheses[StateT],
        log_probabilities: Float[Tensor, "sentences beams V"],
        beam: int,
        eos: int,
    ) -> BeamSelection | None:
        selections = (
            processor.select(active, log_probabilities, beam, eos) for processor in self.processors
        )
        return next((selection for selection in selections if selection is not None), None)

    def score_bonus(
        self, active: ActiveHypotheses[StateT]
    ) -> Float[Tensor, "sentences beams"] | None:
        results = [processor.score_bonus(active) for processor in self.processors]
        bonuses = [bonus for bonus in results if bonus is not None]
        return sum(bonuses[1:], bonuses[0]) if bonuses else None

    def is_complete(
        self, active: ActiveHypotheses[StateT]
    ) -> Bool[Tensor, "sentences beams"] | None:
        results = [processor.is_complete(active) for processor in self.processors]
        complete = [flags for flags in results if flags is not None]
        return reduce(and_, complete) if complete else None

    def advance(self, kept: Int[Tensor, " kept"], continued: BeamCandidates) -> None:
        for processor in self.processors:
            processor.advance(kept, continued)


@dataclass(frozen=True)
class DecodingContext:
    """What a processor may use besides the decoding options."""

    source_mask: Bool[Tensor, "sentences S"]
    """False at padding and EOS"""
    record_cross_attention: Callable[[], LastAttention]
    """starts the recording of cross-attention; for processors with ``needs_attention``"""
    eos: int


class ConfiguredProcessor(LogitsProcessor):
    """A processor that a decoding option turns on, and that is made from the decoding options."""

    needs_attention: ClassVar[bool] = False
    """whether it reads the model's attention, which only the plain network can record"""

    @classmethod
    def from_options(
        cls, decoding: DecodingConfig, context: DecodingContext
    ) -> ConfiguredProcessor:
        raise NotImplementedError


class NoRepeatNgram(ConfiguredProcessor):
    """N-gram blocking: no n-gram of tokens occurs twice in a hypothesis (Paulus et al. 2017).

    Hugging Face calls the option ``no_repeat_ngram_size``. If it would forbid every allowed token, it has no effect in
    that step: a forced prefix or a required phrase may repeat an n-gram.
    """

    def __init__(self, n: int) -> None:
        assert n >= 1
        self.n = n

    @classmethod
    def from_options(cls, decoding: DecodingConfig, context: DecodingContext) -> NoRepeatNgram:
        return cls(decoding.no_repeat_ngram)

    def process_log_probabilities(
        self,
        active: ActiveHypotheses[StateT],
        log_probabilities: Float[Tensor, "sentences beams V"],
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
        return log_probabilities.where(none_allowed, allowed)


class RepetitionPenalty(ConfiguredProcessor):
    """Repetition penalty: makes tokens that a hypothesis already contains less probable (Keskar et al. 2019).

    Their log-probabilities are multiplied by ``penalty``, however often they occurred. As in the beam search of Hugging
    Face, the result is not normalized again, so scores contain the penalty.
    """

    def __init__(self, penalty: float) -> None:
        assert penalty > 0
        self.penalty = penalty

    @classmethod
    def from_options(cls, decoding: DecodingConfig, context: DecodingContext) -> RepetitionPenalty:
        return cls(decoding.repetition_penalty)

    def process_log_probabilities(
        self,
        active: ActiveHypotheses[StateT],
        log_probabilities: Float[Tensor, "sentences beams V"],
    ) -> Float[Tensor, "sentences beams V"]:
        tokens = active.tokens[:, :, 1:]  # without BOS
        penalized = self.penalty * log_probabilities.gather(2, tokens)
        return log_probabilities.scatter(2, tokens, penalized)


class CoveragePenalty(ConfiguredProcessor):
    """Coverage penalty: ranks hypotheses that attended to every source token higher (Wu et al. 2016, equation 14).

    Adds beta * sum over the source tokens of log(min(1, total attention that the token received)) to the score of a
    finished hypothesis. It does not change which hypotheses are continued, as in the paper.

    source_mask: False at padding and EOS.
    """

    needs_attention = True

    @classmethod
    def from_options(cls, decoding: DecodingConfig, context: DecodingContext) -> CoveragePenalty:
        attention = context.record_cross_attention()
        return cls(decoding.coverage_penalty, context.source_mask, attention)

    def __init__(
        self, beta: float, source_mask: Bool[Tensor, "sentences S"], attention: LastAttention
    ) -> None:
        assert beta >= 0
        self.beta = beta
        self.source_mask = source_mask
        self.attention = attention
        self.coverage = source_mask.mul(0.0)[:, None]
        """[sentences, beams, S]: total attention that each source token has received"""

    def process_log_probabilities(
        self,
        active: ActiveHypotheses[StateT],
        log_probabilities: Float[Tensor, "sentences beams V"],
    ) -> Float[Tensor, "sentences beams V"]:
        self.coverage = self.coverage + self.attention()
        return log_probabilities

    def score_bonus(self, active: ActiveHypotheses[StateT]) -> Float[Tensor, "sentences beams"]:
        covered = self.coverage.clamp(1e-9, 1).log().masked_fill(~self.source_mask[:, None], 0.0)
        return self.beta * covered.sum(2).double()

    def advance(self, kept: Int[Tensor, " kept"], continued: BeamCandidates) -> None:
        self.coverage = self.coverage[kept.unsqueeze(1), continued.beams[kept]]
        self.source_mask = self.source_mask[kept]


class DiverseBeamGroups(ConfiguredProcessor):
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
    def from_options(cls, decoding: DecodingConfig, context: DecodingContext) -> DiverseBeamGroups:
        return cls(decoding.beam_groups, decoding.diversity_penalty)

    def select(
        self,
        active: ActiveHypotheses[StateT],
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
        cost = active.totals.new_zeros(sentences, 1, V)
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
        return type(selections[0]).concatenate(selections)


def _select_in_group(
    totals: Float[Tensor, "sentences beams"],
    log_probabilities: Float[Tensor, "sentences beams V"],
    cost: Float[Tensor, "sentences 1 V"],
    first_beam: int,
    beam: int,
    eos: int,
) -> BeamSelection:
    """Select as beam search does, by the totals less the cost. first_beam: number of the group's first beam."""
    from regard.decoding.search_state import BeamCandidates, BeamSelection

    V = log_probabilities.shape[2]
    log_probabilities = log_probabilities.masked_fill(log_probabilities.isnan(), NEG_INF)
    ranking = (totals.unsqueeze(2) + log_probabilities - cost).flatten(1)
    order = ranking.topk(min(2 * beam, ranking.shape[1])).indices
    beams, tokens = order // V, order % V
    added = log_probabilities.flatten(1).gather(1, order)
    candidates = BeamCandidates(beams + first_beam, tokens, added, totals.gather(1, beams) + added)
    return BeamSelection.from_candidates(candidates, eos, beam)


class TopK(ConfiguredProcessor):
    """Top-k sampling: only the ``k`` most probable tokens can be drawn (Fan et al. 2018)."""

    def __init__(self, k: int) -> None:
        assert k >= 1
        self.k = k

    @classmethod
    def from_options(cls, decoding: DecodingConfig, context: DecodingContext) -> TopK:
        return cls(decoding.top_k)

    def truncate_distribution(
        self, log_probabilities: Float[Tensor, "sentences V"]
    ) -> Float[Tensor, "sentences V"]:
        ordered, tokens = log_probabilities.sort(descending=True, stable=True)
        ordered[:, self.k :] = NEG_INF
        return log_probabilities.scatter(1, tokens, ordered)


class TopP(ConfiguredProcessor):
    """Top-p (nucleus) sampling: only the fewest tokens that together have probability ``p`` can be drawn.

    Holtzman et al. 2020. With top-k, the probabilities are those among the k tokens.
    """

    def __init__(self, p: float) -> None:
        assert 0 < p <= 1
        self.p = p

    @classmethod
    def from_options(cls, decoding: DecodingConfig, context: DecodingContext) -> TopP:
        return cls(decoding.top_p)

    def truncate_distribution(
        self, log_probabilities: Float[Tensor, "sentences V"]
    ) -> Float[Tensor, "sentences V"]:
        ordered, tokens = log_probabilities.sort(descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        cumulative_before = probabilities.cumsum(-1) - probabilities
        ordered = ordered.masked_fill(cumulative_before >= self.p, NEG_INF)
        return log_probabilities.scatter(1, tokens, ordered)


# ---------------------------------------------------------------------------------------------
# The options


DecodingMethod = Literal["search", "sampling", "mask_predict"]
"""search: beam search and greedy search; mask_predict: the search of non-autoregressive models"""


@dataclass(frozen=True)
class ReadBy:
    """Marks the decoding methods that read an option. An option without a mark is read by search and sampling."""

    methods: tuple[DecodingMethod, ...]
    excludes_others: bool = False
    """Another method cannot be used while the option differs from its default; otherwise it ignores the option."""


SEARCH = ReadBy(("search",))
SEARCH_ONLY = ReadBy(("search",), excludes_others=True)
SAMPLING = ReadBy(("sampling",))
MASK_PREDICT = ReadBy(("mask_predict",))
ALL_METHODS = ReadBy(("search", "sampling", "mask_predict"))


@dataclass(frozen=True)
class Enables:
    """Marks an option that turns on a logits processor when it is read and differs from its default."""

    processor: type[ConfiguredProcessor]


MIN_TEMPERATURE = 0.01
"""Lower temperatures are practically greedy search, and they overflow."""
MBR_TEMPERATURE = 0.7
"""The temperature of minimum Bayes risk samples if none is given."""


class DecodingConfig(Section):
    """How translations are generated. Every key can be overridden for one call, see ``DecodingOptions``."""

    beam: Annotated[int, Field(ge=1, le=1000), SEARCH] = 5
    """beam size (beam width); 1 is greedy search"""
    length_penalty: Annotated[float, Field(ge=0, le=10), SEARCH] = 0.6
    """exponent alpha of the length penalty, by default ((5 + length) / 6) ** alpha as in the paper"""
    length_normalization: Annotated[str, registered("decoding.length_normalization"), SEARCH] = (
        "gnmt"
    )
    """length penalty and stopping rule: gnmt (the paper's), or those of transformers or ctranslate2"""
    extra_length: Annotated[int, Field(ge=1), ALL_METHODS] = 50
    """a translation has at most source length + this many tokens"""
    max_length: Annotated[Annotated[int, Field(ge=1)] | None, ALL_METHODS] = None
    """maximum number of tokens in a translation, regardless of its source; null sets no such limit"""
    iterations: Annotated[int, Field(ge=1, le=1000), MASK_PREDICT] = 10
    """non_autoregressive: mask-predict iterations; 1 predicts all tokens once"""
    length_beam: Annotated[int, Field(ge=1, le=1000), MASK_PREDICT] = 5
    """non_autoregressive: number of candidate lengths decoded in parallel"""
    repetition_penalty: Annotated[float, Field(gt=0, le=10), Enables(RepetitionPenalty)] = 1.0
    """factor on the log-probability of tokens that the translation already contains (Keskar et al. 2019): values above
    1 make repetitions less probable; 1 is off"""
    no_repeat_ngram: Annotated[int, Field(ge=0), Enables(NoRepeatNgram)] = 0
    """no n-gram of this size occurs twice in a translation; 0 is off"""
    coverage_penalty: Annotated[float, Field(ge=0), SEARCH_ONLY, Enables(CoveragePenalty)] = 0.0
    """weight of the coverage penalty (Wu et al. 2016) on source tokens that got little attention; 0 is off"""
    beam_groups: Annotated[int, Field(ge=1), SEARCH_ONLY, Enables(DiverseBeamGroups)] = 1
    """diverse beam search: number of groups, with beam / beam_groups hypotheses each"""
    diversity_penalty: Annotated[float, Field(ge=0), SEARCH] = 0.5
    """beam_groups: penalty for a token that an earlier group selected in the same step"""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """sample from the model instead of searching: values below 1 sharpen the distribution, values above 1 flatten it;
    0 or null searches"""
    top_k: Annotated[int, Field(ge=0), SAMPLING, Enables(TopK)] = 0
    """sampling: sample from the k most probable tokens; 0 means all"""
    top_p: Annotated[float, Field(gt=0, le=1), SAMPLING, Enables(TopP)] = 1.0
    """nucleus sampling: sample from the most probable tokens that together have this probability"""
    seed: Annotated[int, Field(ge=0, lt=2**63), SAMPLING] = 1
    """sampling: random seed"""
    mbr: Annotated[int, Field(ge=0, le=10_000)] = 0
    """minimum Bayes risk decoding: number of samples, of which the one most similar to the others (by chrF) is
    returned; 0 is off"""
    protect: Annotated[tuple[Annotated[str, registered("decoding.protect")], ...], SEARCH_ONLY] = ()
    """spans that are guaranteed to be copied unchanged: placeholders ({name}, %s, <b>, URLs), numbers"""
    constrained_beam: Annotated[int, Field(ge=1, le=1000), SEARCH] = 10
    """smallest beam for texts with protected spans, glossary terms or other constraints"""

    @property
    def logits_processors(self) -> list[type[ConfiguredProcessor]]:
        """The logits processors that the options turn on; an option that is not read turns on none."""
        read = self.options_read_by("sampling" if self.is_sampling else "search")
        return [
            mark.processor
            for name, field in type(self).model_fields.items()
            for mark in field.metadata
            if isinstance(mark, Enables) and name in read and getattr(self, name) != field.default
        ]

    @property
    def is_sampling(self) -> bool:
        """Whether hypotheses are sampled: with a temperature, or for minimum Bayes risk decoding."""
        return bool(self.temperature) or self.mbr > 0

    @property
    def unused_options(self) -> dict[str, str]:
        """The options that an autoregressive model does not read because of other options, and what each needs."""
        searching, sampling = self.options_read_by("search"), self.options_read_by("sampling")
        if self.is_sampling:
            requirement = "search, not to sampling (decoding.temperature, decoding.mbr)"
            unused = dict.fromkeys(sorted(searching - sampling), requirement)
        else:
            requirement = "decoding.temperature or decoding.mbr"
            unused = dict.fromkeys(sorted(sampling - searching), requirement)
        if self.beam_groups == 1:
            unused.setdefault("diversity_penalty", "decoding.beam_groups above 1")
        else:
            unused.setdefault("constrained_beam", "decoding.beam_groups: 1")
        return unused

    @classmethod
    def options_read_by(cls, *methods: DecodingMethod) -> set[str]:
        """The options that at least one of these methods reads."""
        options = set()
        for name, field in cls.model_fields.items():
            marks = [mark for mark in field.metadata if isinstance(mark, ReadBy)]
            read_by = marks[0].methods if marks else ("search", "sampling")
            if not {*read_by}.isdisjoint(methods):
                options.add(name)
        return options

    @model_validator(mode="after")
    def _check(self) -> DecodingConfig:
        if self.temperature and self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature {self.temperature:g} must be 0 (search instead of sampling) or at least "
                f"{MIN_TEMPERATURE}"
            )
        if self.temperature == 0 and self.mbr:
            raise ValueError(
                f"mbr {self.mbr} draws samples, but temperature 0 turns sampling off; set only one of the two"
            )
        if self.beam % self.beam_groups:
            raise ValueError(f"beam_groups {self.beam_groups} must divide beam {self.beam}")
        search_only = [
            name
            for name, field in type(self).model_fields.items()
            if SEARCH_ONLY in field.metadata and getattr(self, name) != field.default
        ]
        if self.is_sampling and search_only:
            cause = "mbr draws samples" if self.mbr else "temperature turns on sampling"
            raise ValueError(f"{cause}, so it cannot be combined with {' and '.join(search_only)}")
        if self.protect and self.beam_groups > 1:
            raise ValueError("protect cannot be combined with beam_groups")
        return self


class DecodingOptions(TypedDict, total=False):
    """Options that override the recipe's ``decoding`` section for one call; ``DecodingConfig`` explains them.

    A missing option, or None, keeps the recipe's value.
    """

    beam: int | None
    length_penalty: float | None
    length_normalization: str | None
    extra_length: int | None
    max_length: int | None
    iterations: int | None
    length_beam: int | None
    repetition_penalty: float | None
    no_repeat_ngram: int | None
    coverage_penalty: float | None
    beam_groups: int | None
    diversity_penalty: float | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    mbr: int | None
    protect: Sequence[str] | None
    constrained_beam: int | None
