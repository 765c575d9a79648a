"""A recipe says everything that makes a model what it is: data, tokenizer, model, training, search, score.

Every default stands here and nowhere else; the names a choice may take stand in ``names``, what does not go together in
``refusals``, and how a recipe is read in ``reading``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator

from regard.recipe.names import (
    Activation,
    Architecture,
    Average,
    DecoderPattern,
    Device,
    EncoderPattern,
    Manner,
    Measure,
    MemoryPattern,
    Norm,
    Normalization,
    NormPlace,
    Optimizer,
    Position,
    Precision,
    Preset,
    Schedule,
    Score,
    Smoothing,
    Task,
    TokenizerKind,
    Weighting,
)
from regard.recipe.refusals import refused

Probability = Annotated[float, Field(ge=0, lt=1)]
Files = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    Field(min_length=1),
]
"""One file name or a list of them, read one after the other."""


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class Texts(Section):
    """Pairs of text: two line-parallel files, or one file of pairs."""

    source: Files | None = None
    """text file(s), one sentence a line; ``.gz`` and ``.zst`` are unpacked"""
    target: Files | None = None
    """as many files and lines as source"""
    pairs: Files | None = None
    """instead of the two: TSV (source, tab, target) or JSONL (keys source and target) file(s)"""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.source is None) != (self.target is None):
            raise ValueError("source and target go together")
        if (self.source is None) == (self.pairs is None):
            raise ValueError("give either source and target, or pairs")
        if self.source and self.target and len(self.source) != len(self.target):
            raise ValueError(
                f"source names {len(self.source)} file(s), target {len(self.target)}: they go in twos"
            )
        return self


class Clean(Section):
    """Which training pairs are left out; each reason is counted and reported."""

    max_tokens: Annotated[int, Field(ge=1)] = 256
    """pairs with a longer side are left out"""
    max_ratio: Annotated[float, Field(ge=1)] | None = 9.0
    """pairs with one side this many times longer than the other are left out; null keeps all"""
    keep_duplicates: bool = False
    """exact repeats of a pair are left out unless this is true"""


class Data(Section):
    root: str | None = None
    """folder the file names start from; else $REGARD_DATA, else the current folder"""
    train: Texts
    valid: Texts | None = None
    """pairs to choose the best checkpoint by; without it a share of train is held out"""
    test: Texts | None = None
    """pairs scored once, at the end"""
    hold_out: Annotated[float, Field(gt=0, le=0.5)] = 0.02
    """share of the distinct training sources held out when there is no valid"""
    languages: tuple[str, str] | None = None
    """codes of source and target, such as [en, de]; else read off names like train.en.gz"""
    clean: Clean = Clean()

    @property
    def language_pair(self) -> tuple[str, str]:
        """What the two sides are called, by a server for example."""
        if self.languages is not None:
            return self.languages
        source, target = self.train.source or (), self.train.target or ()
        codes = [_language(names[0]) if names else None for names in (source, target)]
        return codes[0] or "source", codes[1] or "target"

    def path(self, name: str) -> Path:
        return Path(self.root or os.environ.get("REGARD_DATA") or ".").expanduser() / name


def _language(name: str) -> str | None:
    """The code in a name such as train.en.gz or corpus.zh-CN."""
    ending = Path(name.removesuffix(".gz").removesuffix(".zst")).suffix.removeprefix(".")
    return ending if re.fullmatch(r"[a-z]{2,3}(-[A-Za-z]{2,4})?", ending) else None


class Tokenizer(Section):
    kind: TokenizerKind = "unigram"
    """unigram and bpe lose no text (unknown characters become bytes); characters; words; marian: of an import"""
    size: Annotated[int, Field(ge=8, le=1_000_000)] = 8000
    """entries of the vocabulary, at most; small data give fewer"""
    shared: StrictBool = True
    """one vocabulary for source and target"""
    normalize: Normalization = "nfc"
    """nfc keeps every letter as it looks; nfkc also folds ligatures, full width, superscripts"""


PRESETS: dict[Preset, dict[str, Any]] = {
    "tiny": {"encoder_layers": 4, "decoder_layers": 4, "width": 128, "feedforward": 256}
    | {"heads": 4, "dropout": 0.3},
    "small": {"encoder_layers": 6, "decoder_layers": 6, "width": 256, "feedforward": 1024}
    | {"heads": 4, "dropout": 0.3},
    "base": {"encoder_layers": 6, "decoder_layers": 6, "width": 512, "feedforward": 2048}
    | {"heads": 8, "dropout": 0.1},
    "big": {"encoder_layers": 6, "decoder_layers": 6, "width": 1024, "feedforward": 4096}
    | {"heads": 16, "dropout": 0.3},
}
"""base and big are the paper's (table 3); a preset only fills what the recipe leaves out."""


DERIVED = [
    *(("key_width",), ("value_width",), ("closing_norm",)),
    *(("attention_dropout",), ("feedforward_dropout",)),
]
"""Keys that follow from others unless they are given."""


class Attention(Section):
    score: Score = "scaled"
    """how a query is compared with a key; scaled is the paper's q.k / sqrt(d_k)"""
    weighting: Weighting = "softmax"
    """how scores become weights"""
    encoder: EncoderPattern = "full"
    """who is compared with whom in the encoder; window costs T times its reach, not T times T"""
    decoder: DecoderPattern = "full"
    """the same in the decoder's self-attention"""
    memory: MemoryPattern = "full"
    """the same in encoder-decoder attention"""
    reach: Annotated[int, Field(ge=1)] = 64
    """of window: how many positions it sees on each side"""
    key_value_heads: Annotated[int, Field(ge=1)] | None = None
    """fewer heads of keys and values than of queries, which then share them; null: as many"""
    bias: bool = False
    """biases in W^Q, W^K, W^V, W^O; the paper has none, torch and Marian do"""


class Model(Section):
    architecture: Architecture = "transformer"
    preset: Preset = "base"
    """the sizes to start from; any size given beside it wins"""
    width: Annotated[int, Field(ge=2)]
    """d_model"""
    heads: Annotated[int, Field(ge=1)]
    key_width: Annotated[int, Field(ge=1)]
    """d_k of each head; width / heads unless given"""
    value_width: Annotated[int, Field(ge=1)]
    """d_v of each head; width / heads unless given"""
    encoder_layers: Annotated[int, Field(ge=1)]
    decoder_layers: Annotated[int, Field(ge=1)]
    feedforward: Annotated[int, Field(ge=1)]
    """d_ff, the inner width of the feed-forward network"""
    activation: Activation = "relu"
    attention: Attention = Attention()
    dropout: Probability
    """on each sub-layer's output, and on embedding + position"""
    attention_dropout: Probability
    """on attention weights; as dropout unless given"""
    feedforward_dropout: Probability
    """inside the feed-forward network, after its activation; as dropout unless given"""
    norm: Norm = "layer"
    norm_place: NormPlace = "after"
    """after: LayerNorm(x + Sublayer(x)), the paper; before: x + Sublayer(LayerNorm(x))"""
    closing_norm: bool
    """one more norm after the last layer; with norm_place before, unless given (torch always has it)"""
    position: Position = "sinusoidal"
    max_length: Annotated[int, Field(ge=1)] = 1024
    """positions of ``position: learned``; the others have no end"""
    max_distance: Annotated[int, Field(ge=1)] = 16
    """of ``position: relative``: all words farther away are equally far"""
    tie_embeddings: bool
    """one embedding for source and target (needs a shared vocabulary)"""
    tie_output: bool = True
    """the projection before the softmax is the target embedding"""
    output_bias: bool = False
    """a bias in the projection before the softmax; the paper has none, Marian does"""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Fill in what follows from the preset and from the other values."""
        if not isinstance(given, Mapping):
            return given
        preset = given.get("preset", "base")
        known = isinstance(preset, str) and preset in PRESETS
        full = {**PRESETS[preset if known else "base"], **given}
        width, heads = full["width"], full["heads"]
        if isinstance(width, int) and isinstance(heads, int) and heads > 0:
            # A fraction, where one does not divide the other, is refused like any wrong value.
            full.setdefault("key_width", width / heads)
            full.setdefault("value_width", width / heads)
        full.setdefault("closing_norm", full.get("norm_place", "after") == "before")
        full.setdefault("attention_dropout", full["dropout"])
        full.setdefault("feedforward_dropout", full["dropout"])
        return full


class Training(Section):
    steps: Annotated[int, Field(ge=1)] = 100_000
    tokens_per_batch: Annotated[int, Field(ge=1)] = 25_000
    """source tokens and, counted apart, target tokens of one batch, padding included"""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """batches to a step"""
    optimizer: Optimizer = "adam"
    rate: Annotated[float, Field(gt=0)]
    """with schedule paper a factor on the paper's rate (1.0); else the highest learning rate"""
    betas: tuple[Probability, Probability] = (0.9, 0.98)
    """of adam and adamw"""
    epsilon: Annotated[float, Field(gt=0)] = 1e-9
    """of adam and adamw"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    schedule: Schedule = "paper"
    warmup: Annotated[int, Field(ge=0)] = 4000
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    """longest gradient allowed (its norm); null lets all pass, as in the paper"""
    label_smoothing: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    smoothing_over: Smoothing = "all"
    """epsilon is spread over all classes (torch), or over the others only (the study notes)"""
    validate_every: Annotated[int, Field(ge=1)] = 1000
    validate_sentences: Annotated[int, Field(ge=0)] = 500
    """valid pairs translated, greedily, for the validation score; 0 validates by loss alone"""
    choose_by: Literal["loss", "score"] = "score"
    """what the best checkpoint is best in; score is the first of score.measures"""
    patience: Annotated[int, Field(ge=1)] | None = None
    """validations without a new best before training stops; null never stops early"""
    checkpoint_every: Annotated[int, Field(ge=1)] = 1000
    keep: Annotated[int, Field(ge=1)] = 5
    """checkpoints kept, and averaged at the end"""
    average: Average = "best"
    """average the best, or the last, checkpoints kept (the paper: the last 5, big 20)"""
    ema: Probability = 0.0
    """decay of a moving average of the weights, used in place of the weights; 0 is off"""
    log_every: Annotated[int, Field(ge=1)] = 50
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    device: Device = "auto"
    precision: Precision = "auto"
    """auto is bf16 on a GPU that has it, else fp32"""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("rate") is None:
            return {**given, "rate": 1.0 if given.get("schedule", "paper") == "paper" else 1e-3}
        return given

    @model_validator(mode="after")
    def _choice_possible(self) -> Self:
        if self.choose_by == "score" and self.validate_sentences == 0:
            raise ValueError("choose_by: score needs validate_sentences above 0")
        return self


class Search(Section):
    beam: Annotated[int, Field(ge=1, le=1000)] = 5
    alpha: Annotated[float, Field(ge=0)] = 0.6
    """length penalty ((5 + length) / 6) ** alpha, as in the paper"""
    manner: Manner = "paper"
    """transformers, ctranslate2: with the penalty length ** alpha and the stop of those engines"""
    extra_length: Annotated[int, Field(ge=1)] = 50
    """a translation has at most source length + this many tokens"""
    max_length: Annotated[int, Field(ge=1)] | None = None
    """and at most this many, whatever its source; null sets no such limit"""


class Scoring(Section):
    measures: Annotated[tuple[Measure, ...], Field(min_length=1)] = ("bleu", "chrf", "ter")
    """the first one chooses checkpoints; bleu_lc minds no case; wer and per are for sounds"""
    tokenize: str = "13a"
    """sacreBLEU's tokenizer for BLEU; zh for Chinese, ja-mecab, char …"""


class Recipe(Section):
    task: Task = "translate"
    """what the model is to do"""
    data: Data
    tokenizer: Tokenizer = Tokenizer()
    model: Model
    training: Training
    search: Search = Search()
    score: Scoring = Scoring()

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """What one section needs to know of another."""
        if not isinstance(given, Mapping):
            return given
        empty: dict[str, Any] = {"tokenizer": {}, "model": {}, "training": {}}
        full = empty | {name: {} if section is None else section for name, section in given.items()}
        model, tokenizer = full["model"], full["tokenizer"]
        if isinstance(model, Mapping) and isinstance(tokenizer, Mapping):
            shared = tokenizer.get("shared", True)
            full["model"] = {"tie_embeddings": shared is True, **model}
        return full

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if problems := refused(self):
            raise ValueError("; ".join(problems))
        return self

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
