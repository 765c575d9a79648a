"""A recipe says everything that makes a model what it is: data, tokenizer, model, training, search, score.

Every default stands here and nowhere else. A recipe is YAML in which one writes only what differs; the run
folder keeps it complete. Unknown keys and bad values are all reported at once, each with its line and what is
allowed.

The names a choice may take (``Norm``, ``Position`` …) are written here as ``Literal`` types; the class behind
each name stands in the dictionary of its module in ``nn/`` or ``learn/``, and a test holds the two lists equal.
"""

from __future__ import annotations

import copy
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from regard.errors import RegardError

TokenizerKind = Literal["unigram", "bpe", "characters", "words"]
Normalization = Literal["nfc", "nfkc", "none"]
Preset = Literal["tiny", "small", "base", "big"]
Score = Literal["scaled", "unscaled"]
Position = Literal["sinusoidal", "learned"]
Norm = Literal["layer"]
NormPlace = Literal["after", "before"]
Activation = Literal["relu", "gelu", "swish"]
Optimizer = Literal["adam", "adamw", "sgd", "momentum", "adagrad", "rmsprop"]
Schedule = Literal["paper", "constant", "cosine"]
Smoothing = Literal["all", "others"]
Average = Literal["best", "last", "none"]
Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "fp32", "bf16"]
Measure = Literal["bleu", "bleu_lc", "chrf", "ter", "wer", "per"]

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
    """unigram and bpe lose no text (unknown characters become bytes); characters; words"""
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


DERIVED = [("key_width",), ("value_width",), ("attention_dropout",), ("feedforward_dropout",)]
"""Keys that follow from others unless they are given."""


class Attention(Section):
    score: Score = "scaled"
    """how a query is compared with a key; scaled is the paper's q.k / sqrt(d_k)"""
    bias: bool = False
    """biases in W^Q, W^K, W^V, W^O; the paper has none, torch and Marian do"""


class Model(Section):
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
    position: Position = "sinusoidal"
    max_length: Annotated[int, Field(ge=1)] = 1024
    """positions of ``position: learned``; sinusoidal has no end"""
    tie_embeddings: bool
    """one embedding for source and target (needs a shared vocabulary)"""
    tie_output: bool = True
    """the projection before the softmax is the target embedding"""

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
            given_widths = {"key_width", "value_width"} <= full.keys()
            if width % heads and not given_widths and known:
                raise ValueError(
                    f"width {width} is not divisible by {heads} heads; change one of them, "
                    "or give key_width and value_width"
                )
            full.setdefault("key_width", width // heads)
            full.setdefault("value_width", width // heads)
        full.setdefault("attention_dropout", full["dropout"])
        full.setdefault("feedforward_dropout", full["dropout"])
        return full

    @model_validator(mode="after")
    def _even(self) -> Self:
        if self.position == "sinusoidal" and self.width % 2:
            raise ValueError(f"sinusoidal positions come in twos: width {self.width} must be even")
        return self


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
    extra_length: Annotated[int, Field(ge=1)] = 50
    """a translation has at most source length + this many tokens"""


class Scoring(Section):
    measures: Annotated[tuple[Measure, ...], Field(min_length=1)] = ("bleu", "chrf", "ter")
    """the first one chooses checkpoints; bleu_lc minds no case; wer and per are for sounds"""
    tokenize: str = "13a"
    """sacreBLEU's tokenizer for BLEU; zh for Chinese, ja-mecab, char …"""


class Recipe(Section):
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
        problems = []
        if self.model.tie_embeddings and not self.tokenizer.shared:
            problems.append("model.tie_embeddings: true needs tokenizer.shared: true")
        longest = self.data.clean.max_tokens + 1  # the text and its END or START
        if self.model.position == "learned" and self.model.max_length < longest:
            problems.append(
                f"model.max_length {self.model.max_length} is shorter than the data may be: "
                f"{longest} (data.clean.max_tokens and one mark)"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


# ---------------------------------------------------------------------------------------------
# Reading


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with Regard, by name: inside an installed package, or in the repository."""
    here = Path(__file__).parent
    folder = here / "recipes" if (here / "recipes").is_dir() else here.parents[1] / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(name: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a YAML file, or a shipped recipe by name, with ``a.b=c`` changes on top."""
    path = Path(name)
    if not path.is_file():
        shipped = shipped_recipes()
        if str(name) not in shipped:
            raise RegardError(
                f"{name}: no such file, and no recipe of that name{nearest(str(name), shipped)}"
            )
        path = shipped[str(name)]
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RegardError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise RegardError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_recipe(text, str(path), changes)


def parse_recipe(text: str, where: str, changes: Sequence[str] = ()) -> Recipe:
    try:
        lines = _lines(yaml.compose(text, Loader=yaml.SafeLoader))
        values = yaml.safe_load(text)
    except _RepeatedError as error:
        raise RegardError(f"{where}: {error}") from None
    except RecursionError:
        raise RegardError(f"{where}: not a recipe: an alias in it contains itself") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        raise RegardError(f"{where}:{line} not YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(values, dict):
        raise RegardError(
            f"{where}: a recipe has sections (data, tokenizer, model, …), this file has none"
        )
    return make_recipe(values, where, changes, lines)


def make_recipe(
    values: dict[str, Any],
    where: str,
    changes: Sequence[str] = (),
    lines: Mapping[tuple[str, ...], int] = MappingProxyType({}),
) -> Recipe:
    """Check plain values; lines tells on which line of the file each key stands."""
    values = copy.deepcopy(values)
    for change in changes:
        location = _apply(values, change)
        lines = {at: line for at, line in lines.items() if at[: len(location)] != location}
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        found = error.errors()
        # What follows from another value is wrong only because that one is.
        causes = [details for details in found if details["loc"][-1:] not in DERIVED]
        problems = [_explain(details, lines) for details in causes or found]
        if len(problems) == 1:
            raise RegardError(f"{where}: {problems[0]}") from None
        listing = "".join(f"\n  {problem}" for problem in problems)
        raise RegardError(f"{where}: {len(problems)} problems:{listing}") from None


def _apply(values: dict[str, Any], change: str) -> tuple[str, ...]:
    """Put one ``a.b=c`` into the values; c is read as YAML. Returns where it went."""
    key, equals, text = change.partition("=")
    location = tuple(key.strip().split("."))
    if not equals or not all(location):
        raise RegardError(
            f"--set {change}: write it as section.key=value, for example training.steps=500"
        )
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise RegardError(f"--set {change}: the value is not YAML") from None
    section = values
    for name in location[:-1]:
        inner = section.get(name)
        section[name] = inner = dict(inner) if isinstance(inner, dict) else {}
        section = inner
    section[location[-1]] = value
    return location


class _RepeatedError(Exception):
    """A key that stands twice; YAML would take the last one without a word."""


def _lines(node: yaml.Node | None, at: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    """The line on which each key stands."""
    found: dict[tuple[str, ...], int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place, line = (*at, str(key.value)), key.start_mark.line + 1
            if place in found:
                raise _RepeatedError(
                    f"{'.'.join(place)} stands on line {found[place]} and again on {line}"
                )
            found[place] = line
            found |= _lines(value, place)
    return found


def _explain(details: ErrorDetails, lines: Mapping[tuple[str, ...], int]) -> str:
    """One problem in words: line, key, what is wrong, what is allowed."""
    location = tuple(str(part) for part in details["loc"])
    # An element of a list stands on the line of its list.
    named = tuple(str(part) for part in details["loc"] if isinstance(part, str))
    line = lines.get(named)
    start = f"line {line}: " if line else ""
    key = ".".join(location)
    if details["type"] == "extra_forbidden":
        return f"{start}unknown key {key}{nearest(location[-1], _keys(location[:-1]))}"
    if details["type"] == "missing":
        return f"{start}{key} is missing"
    message = details["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if details["type"] == "value_error":
        return f"{start}{key}: {message}" if key else f"{start}{message}"
    return f"{start}{key}: {details['input']!r} {message}"


def _keys(location: tuple[str, ...]) -> Sequence[str]:
    """The keys allowed in the section at this place."""
    section: Any = Recipe
    for name in location:
        annotation = section.model_fields[name].annotation
        section = next(
            part
            for part in (annotation, *get_args(annotation))
            if isinstance(part, type) and issubclass(part, Section)
        )
    return list(section.model_fields)


def nearest(word: str, allowed: Mapping[str, Any] | Sequence[str]) -> str:
    """“; did you mean X?”, or the whole list when nothing is near."""
    close = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f"; allowed: {', '.join(allowed)}"
