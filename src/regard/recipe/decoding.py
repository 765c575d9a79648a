"""Decoding options: what they are called, their defaults and limits, and which decoding methods read them.

A decoding option is defined here and nowhere else: as a field of ``DecodingConfig``, and as a key of
``DecodingOptions``, which gives the Python API its types. The recipe's ``decoding`` section, ``--set`` on the command
line, ``model.translate(…)`` and the refusal of options without effect follow from these two lines. What an option does
is in ``decoding/``; most options turn on a logits processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self, TypedDict

from pydantic import Field, model_validator

from regard.recipe.validation import Section, registered

DecodingMethod = Literal["search", "sampling", "mask_predict"]
"""search: beam search and greedy search; mask_predict: the search of non-autoregressive models"""


@dataclass(frozen=True)
class ReadBy:
    """Marks the decoding methods that read an option. An option without a mark is read by search and sampling."""

    methods: tuple[DecodingMethod, ...]


SEARCH = ReadBy(("search",))
SAMPLING = ReadBy(("sampling",))
MASK_PREDICT = ReadBy(("mask_predict",))
ALL_METHODS = ReadBy(("search", "sampling", "mask_predict"))


@dataclass(frozen=True)
class EnablesProcessor:
    """Marks an option that turns on a logits processor when it differs from its default."""


LOGITS_PROCESSOR = EnablesProcessor()

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
    repetition_penalty: Annotated[float, Field(gt=0, le=10), LOGITS_PROCESSOR] = 1.0
    """factor on the log-probability of tokens that the translation already contains (Keskar et al. 2019): values above
    1 make repetitions less probable; 1 is off"""
    no_repeat_ngram: Annotated[int, Field(ge=0), LOGITS_PROCESSOR] = 0
    """no n-gram of this size occurs twice in a translation; 0 is off"""
    coverage_penalty: Annotated[float, Field(ge=0), SEARCH, LOGITS_PROCESSOR] = 0.0
    """weight of the coverage penalty (Wu et al. 2016) on source tokens that got little attention; 0 is off"""
    beam_groups: Annotated[int, Field(ge=1), SEARCH, LOGITS_PROCESSOR] = 1
    """diverse beam search: number of groups, with beam / beam_groups hypotheses each"""
    diversity_penalty: Annotated[float, Field(ge=0), SEARCH] = 0.5
    """beam_groups: penalty for a token that an earlier group selected in the same step"""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """sample from the model instead of searching: values below 1 sharpen the distribution, values above 1 flatten it;
    0 or null searches"""
    top_k: Annotated[int, Field(ge=0), SAMPLING] = 0
    """sampling: sample from the k most probable tokens; 0 means all"""
    top_p: Annotated[float, Field(gt=0, le=1), SAMPLING] = 1.0
    """nucleus sampling: sample from the most probable tokens that together have this probability"""
    seed: Annotated[int, Field(ge=0, lt=2**63), SAMPLING] = 1
    """sampling: random seed"""
    mbr: Annotated[int, Field(ge=0, le=10_000)] = 0
    """minimum Bayes risk decoding: number of samples, of which the one most similar to the others (by chrF) is
    returned; 0 is off"""
    protect: Annotated[tuple[Annotated[str, registered("decoding.protect")], ...], SEARCH] = ()
    """spans that are guaranteed to be copied unchanged: placeholders ({name}, %s, <b>, URLs), numbers"""
    constrained_beam: Annotated[int, Field(ge=1, le=1000), SEARCH] = 10
    """smallest beam for texts with protected spans, glossary terms or other constraints"""

    @property
    def logits_processors(self) -> list[str]:
        """The options that turn on logits processors (``decoding/logits_processors.py``)."""
        fields = type(self).model_fields.items()
        enabling = [
            (name, field.default) for name, field in fields if LOGITS_PROCESSOR in field.metadata
        ]
        return [name for name, default in enabling if getattr(self, name) != default]

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
    def _check(self) -> Self:
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
        beam_only = {
            "beam_groups": self.beam_groups > 1,
            "coverage_penalty": self.coverage_penalty > 0,
            "protect": bool(self.protect),
        }
        enabled = [name for name, is_on in beam_only.items() if is_on]
        if self.mbr and enabled:
            raise ValueError(
                f"mbr draws samples, so it cannot be combined with {' and '.join(enabled)}"
            )
        if self.temperature and enabled:
            raise ValueError(
                f"temperature turns on sampling, so it cannot be combined with {' and '.join(enabled)}"
            )
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
