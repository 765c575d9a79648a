"""A recipe says everything that makes a model what it is: data, tokenizer, model, training, search, score.

Every default stands here and nowhere else; the names a choice may take stand in ``names``, what does not go together in
``refusals``, and how a recipe is read in ``reading``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator

from regard.marks import MARKS
from regard.recipe.names import (
    Activation,
    Architecture,
    Average,
    Batches,
    DecoderPattern,
    Device,
    EncoderPattern,
    Keep,
    LearningPrecision,
    Length,
    Manner,
    Measure,
    MemoryPattern,
    Norm,
    Normalization,
    NormPlace,
    Optimizer,
    Position,
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
_ONE_OR_MORE = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
Files = Annotated[tuple[str, ...], _ONE_OR_MORE, Field(min_length=1)]
"""One file name or a list of them, read one after the other."""
Tag = Annotated[str, Field(pattern="^[A-Za-z][A-Za-z0-9_-]*$")]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class Texts(Section):
    """Pairs of text: two line-parallel files, one file of pairs, tagged sentences; or text alone."""

    source: Files | None = None
    """text file(s), one sentence a line; ``.gz`` and ``.zst`` are unpacked"""
    target: Files | None = None
    """as many files and lines as source"""
    pairs: Files | None = None
    """instead of the two: TSV (source, tab, target) or JSONL (keys source and target) file(s)"""
    conllu: Files | None = None
    """CoNLL-U file(s): the source is the words of a sentence, the target their universal tags"""
    text: Files | None = None
    """text file(s) without a target, for the tasks mask and continue"""
    parses: Files | None = None
    """CoNLL-U file(s), a tree for each source line, for ``model.position: tree``"""
    to: Annotated[tuple[Tag, ...], _ONE_OR_MORE, Field(min_length=1)] | None = None
    """the language wanted, for all files or for each of them: the entry <2de> before a source asks for de"""
    tag: Annotated[tuple[Tag | None, ...], _ONE_OR_MORE, Field(min_length=1)] | None = None
    """one more entry before each source, for all files or for each: <bt> where it is bt, none where it is null"""

    @property
    def tags(self) -> list[tuple[str, ...]]:
        """What stands before the sources of each file."""
        count = len(self.source or self.pairs or self.conllu or self.text or ())
        languages = [language_tag(code) for code in self.to or ()]
        each = [_for_each(languages, count), _for_each(self.tag or (), count)]
        return [tuple(tag for tag in some if tag) for some in zip(*each, strict=True)]

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.source is None) != (self.target is None):
            raise ValueError("source and target go together")
        forms = [self.source, self.pairs, self.conllu, self.text]
        if sum(form is not None for form in forms) != 1:
            raise ValueError("give either source and target, or pairs, or conllu, or text")
        if self.source and self.target and len(self.source) != len(self.target):
            raise ValueError(
                f"source names {len(self.source)} file(s), target {len(self.target)}: they go in twos"
            )
        sources = self.source or self.pairs or ()
        if self.parses and len(self.parses) != len(sources):
            raise ValueError(
                f"parses names {len(self.parses)} file(s), the texts {len(sources)}: one for each"
            )
        if taken := {f"<{tag}>" for tag in self.tag or ()} & {*MARKS.values()}:
            raise ValueError(f"tag: the vocabulary has its own {min(taken)}; take another name")
        for name, given in (("to", self.to), ("tag", self.tag)):
            if given and not sources:
                raise ValueError(f"{name} goes with source and target, or pairs")
            if given and len(given) not in (1, len(sources)):
                raise ValueError(
                    f"{name} has {len(given)} entries for {len(sources)} file(s): give one, or one for each"
                )
        return self


def _for_each(given: Sequence[str | None], count: int) -> list[str | None]:
    """One entry for each of so many files: none, the same for all, or as they stand."""
    return list(given) if len(given) == count else [*given, None][:1] * count


class Clean(Section):
    """Which training pairs are left out; each reason is counted and reported."""

    max_tokens: Annotated[int, Field(ge=1)] = 256
    """pairs with a longer side are left out"""
    max_ratio: Annotated[float, Field(ge=1)] | None = 9.0
    """pairs with one side this many times longer than the other are left out; null keeps all"""
    keep_duplicates: bool = False
    """exact repeats of a pair are left out unless this is true"""
    cut: bool = False
    """a source longer than max_tokens is cut there, in use as in training, and not left out"""


UNNAMED = ("source", "target")
"""what two languages are called that have no names"""


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
    def texts(self) -> dict[str, Texts]:
        """Those of train, valid and test that are given."""
        every = {"train": self.train, "valid": self.valid, "test": self.test}
        return {name: texts for name, texts in every.items() if texts is not None}

    @property
    def tags(self) -> list[str]:
        """Everything that stands before a source of the training."""
        return sorted({tag for tags in self.train.tags for tag in tags})

    @property
    def targets(self) -> list[str]:
        """The languages that can be asked for, if there is a choice."""
        return list(dict.fromkeys(self.train.to or ()))

    @property
    def language_pair(self) -> tuple[str, str]:
        """What the two sides are called, by a server for example."""
        if self.languages is not None:
            return self.languages
        source, target = self.train.source or (), self.train.target or ()
        codes = [_language(names[0]) if names else None for names in (source, target)]
        return codes[0] or UNNAMED[0], codes[1] or UNNAMED[1]

    @property
    def named(self) -> bool:
        """Whether all languages have names."""
        return not {code for pair in self.language_pairs for code in pair} & {*UNNAMED}

    @property
    def language_pairs(self) -> list[tuple[str, str]]:
        """Every pair of languages that can be translated, the first ones first."""
        source, target = self.language_pair
        if not self.train.to:
            return [(source, target)]
        names = self.train.source or self.train.pairs or ()
        # A file of pairs is named after its form, not after a language.
        codes = [(self.train.source and _language(name)) or source for name in names]
        languages = (
            self.train.to if len(self.train.to) == len(names) else self.train.to * len(names)
        )
        return list(dict.fromkeys(zip(codes, languages, strict=True)))

    def path(self, name: str) -> Path:
        return Path(self.root or os.environ.get("REGARD_DATA") or ".").expanduser() / name


def language_tag(code: str) -> str:
    """What stands before a source to ask for this language."""
    return f"2{code}"


def _language(name: str) -> str | None:
    """The code in a name such as train.en.gz or corpus.zh-CN."""
    ending = Path(name.removesuffix(".gz").removesuffix(".zst")).suffix.removeprefix(".")
    known = re.fullmatch(r"(?!txt|tok|raw)[a-z]{2,3}(-[A-Za-z]{2,4})?", ending)
    return ending if known else None


class Tokenizer(Section):
    kind: TokenizerKind = "unigram"
    """unigram and bpe lose no text (unknown characters become bytes); characters; words; marian: of an import"""
    target_kind: TokenizerKind | None = None
    """of the target, where it is another: characters in, words (such as sounds) out; needs shared: false"""
    size: Annotated[int, Field(ge=8, le=1_000_000)] = 8000
    """entries of the vocabulary, at most; small data give fewer"""
    shared: StrictBool = True
    """one vocabulary for source and target"""
    normalize: Normalization = "nfc"
    """nfc keeps every letter as it looks; nfkc also folds ligatures, full width, superscripts; lower is nfc
    in lower case"""

    @property
    def identity(self) -> str:
        """What ids and weights depend on; target_kind, which older runs do not know, counts where it is given."""
        return self.model_dump_json(exclude_none=True)

    @property
    def of_target(self) -> Tokenizer:
        """What its target is cut by."""
        return self.model_copy(update={"kind": self.target_kind or self.kind})

    @model_validator(mode="before")
    @classmethod
    def _of_one_kind(cls, given: Any) -> Any:
        """Twice the same kind is one."""
        if isinstance(given, Mapping) and given.get("target_kind") == given.get("kind", "unigram"):
            return {**given, "target_kind": None}
        return given


PRESETS: dict[Preset, dict[str, Any]] = {
    "tiny": {"encoder_layers": 4, "decoder_layers": 4, "width": 128, "feedforward": 256}
    | {"heads": 4, "dropout": 0.3},
    "small": {"encoder_layers": 6, "decoder_layers": 6, "width": 256, "feedforward": 1024}
    | {"heads": 4, "dropout": 0.3},
    "fast": {"encoder_layers": 8, "decoder_layers": 1, "width": 256, "feedforward": 1024}
    | {"heads": 4, "dropout": 0.3},
    "base": {"encoder_layers": 6, "decoder_layers": 6, "width": 512, "feedforward": 2048}
    | {"heads": 8, "dropout": 0.1},
    "big": {"encoder_layers": 6, "decoder_layers": 6, "width": 1024, "feedforward": 4096}
    | {"heads": 16, "dropout": 0.3},
}
"""base and big are the paper's (table 3); fast reads deep and says quickly: the encoder works once for a sentence, the
decoder once for each word and hypothesis (Kasai et al. 2021). A preset only fills what the recipe leaves out."""


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
    """who is compared with whom in the encoder; all but full cost T times a constant, not T times T"""
    decoder: DecoderPattern = "full"
    """the same in the decoder's self-attention"""
    memory: MemoryPattern = "full"
    """the same in encoder-decoder attention"""
    reach: Annotated[int, Field(ge=1)] = 64
    """of window: how many positions it sees on each side"""
    rows: Annotated[int, Field(ge=1)] = 256
    """of linformer: what is left of the keys and values of a text, however long it is"""
    block: Annotated[int, Field(ge=1)] = 64
    """of bigbird: positions to a block; each block sees itself and the blocks beside it"""
    global_blocks: Annotated[int, Field(ge=0)] = 2
    """of bigbird: the first so many blocks see all and are seen by all"""
    random_blocks: Annotated[int, Field(ge=0)] = 3
    """of bigbird: how many blocks anywhere in the text each block sees besides"""
    key_value_heads: Annotated[int, Field(ge=1)] | None = None
    """fewer heads of keys and values than of queries, which then share them; null: as many"""
    bias: bool = False
    """biases in W^Q, W^K, W^V, W^O; the paper has none, torch and Marian do"""


class Parallel(Section):
    """Of architecture parallel: how long a translation is."""

    length: Length = "predicted"
    """predicted from the source; or cut: there are more places than words, and END fills the rest"""
    difference: Annotated[int, Field(ge=1)] = 64
    """of predicted: a translation has at most so many tokens more, or fewer, than the source"""
    length_weight: Annotated[float, Field(ge=0)] = 0.1
    """of predicted: what its loss, a mean over sentences, counts beside that of the words"""
    spare: Annotated[int, Field(ge=1)] = 10
    """of cut: places beyond the length of the source; a longer translation has no room"""


class Model(Section):
    architecture: Architecture = "transformer"
    """what the layers are made of; parallel is a transformer that says all words at once"""
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
    """what stands between the two matrices of the feed-forward network"""
    attention: Attention = Attention()
    parallel: Parallel = Parallel()
    dropout: Probability
    """on each sub-layer's output, and on embedding + position"""
    attention_dropout: Probability
    """on attention weights; as dropout unless given"""
    feedforward_dropout: Probability
    """inside the feed-forward network, after its activation; as dropout unless given"""
    norm: Norm = "layer"
    """what keeps the features of the words at one size"""
    norm_place: NormPlace = "after"
    """after: LayerNorm(x + Sublayer(x)), the paper; before: x + Sublayer(LayerNorm(x))"""
    closing_norm: bool
    """one more norm after the last layer; with norm_place before, unless given (torch always has it)"""
    position: Position = "sinusoidal"
    """how the model knows the order of the words; tree needs ``data.train.parses``"""
    max_length: Annotated[int, Field(ge=1)] = 1024
    """the longest text, marks counted, of ``position: learned`` and of linformer; the others have no end"""
    max_distance: Annotated[int, Field(ge=1)] = 16
    """of ``position: relative`` and ``tree``: all words farther away are equally far"""
    kernel: Annotated[int, Field(ge=1)] = 3
    """of ``architecture: convolution``: how many neighbouring words one window holds"""
    tie_embeddings: bool
    """one embedding for source and target (needs a shared vocabulary)"""
    tie_output: bool = True
    """the projection before the softmax is the target embedding"""
    output_bias: bool = False
    """a bias in the projection before the softmax; the paper has none, Marian does"""

    @property
    def longest(self) -> int | None:
        """The longest text it can read, marks counted; None: there is none."""
        linformer = "linformer" in (self.attention.encoder, self.attention.memory)
        return self.max_length if self.position == "learned" or linformer else None

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Fill in what follows from the preset and from the other values."""
        if not isinstance(given, Mapping):
            return given
        preset = given.get("preset", "base")
        known = isinstance(preset, str) and preset in PRESETS
        full = {**PRESETS[preset if known else "base"], **given}
        if full.get("architecture") == "recurrent":
            full.setdefault("position", "none")  # it reads the words in their order
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
    start_from: str | None = None
    """a run folder to take tokenizer and weights from: fine-tuning; tag and classify take its encoder"""
    steps: Annotated[int, Field(ge=1)] = 100_000
    tokens_per_batch: Annotated[int, Field(ge=1)] = 25_000
    """source tokens and, counted apart, target tokens of one batch, padding included"""
    batches: Batches = "padded"
    """padded: texts of like length side by side; packed: texts of all lengths end to end, which a GPU works on without
    padding, compiled and as one recorded graph"""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """batches to a step"""
    optimizer: Optimizer = "adam"
    """how the weights follow the gradient"""
    rate: Annotated[float, Field(gt=0)]
    """with schedule paper a factor on the paper's rate (1.0); else the highest learning rate"""
    betas: tuple[Probability, Probability] = (0.9, 0.98)
    """of adam and adamw"""
    epsilon: Annotated[float, Field(gt=0)] = 1e-9
    """of adam and adamw"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    schedule: Schedule = "paper"
    """how the learning rate goes with the steps"""
    warmup: Annotated[int, Field(ge=0)] = 4000
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    """longest gradient allowed (its norm); null lets all pass, as in the paper"""
    sampling: Probability = 0.0
    """texts are cut into pieces at random while it learns: of bpe the share of joins left out, of unigram the
    sharpness alpha, where less is wilder; 0 always cuts the same way"""
    copies: Annotated[int, Field(ge=1, le=999)] = 16
    """of sampling: how often the training text is cut, beforehand; epoch n learns from copy n modulo this"""
    rdrop: Annotated[float, Field(ge=0)] = 0.0
    """weight of R-Drop: every batch passes twice, each time with other dropout, and the two answers shall agree"""
    word_dropout: Probability = 0.0
    """share of source tokens hidden behind MASK while it learns, each step others"""
    target_word_dropout: Probability = 0.0
    """the same of the target words that the decoder reads; for translate"""
    label_smoothing: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    smoothing_over: Smoothing = "all"
    """epsilon is spread over all classes (torch), or over the others only (some textbooks)"""
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
    precision: LearningPrecision = "auto"
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


COLDEST = 0.01
"""a lower temperature would only ever draw the most probable, or numbers that are none"""


class Search(Section):
    beam: Annotated[int, Field(ge=1, le=1000)] = 5
    alpha: Annotated[float, Field(ge=0, le=10)] = 0.6
    """length penalty ((5 + length) / 6) ** alpha, as in the paper"""
    manner: Manner = "paper"
    """transformers, ctranslate2: with the penalty length ** alpha and the stop of those engines"""
    extra_length: Annotated[int, Field(ge=1)] = 50
    """a translation has at most source length + this many tokens"""
    max_length: Annotated[int, Field(ge=1)] | None = None
    """and at most this many, whatever its source; null sets no such limit"""
    rounds: Annotated[int, Field(ge=1, le=1000)] = 10
    """of architecture parallel: 1 says all words once, more say the least sure ones again"""
    candidates: Annotated[int, Field(ge=1, le=1000)] = 5
    """of architecture parallel: lengths tried side by side"""
    no_repeat: Annotated[int, Field(ge=0)] = 0
    """no so many tokens in a row come twice in one translation; 0 lets them"""
    coverage: Annotated[float, Field(ge=0)] = 0.0
    """weight of the coverage penalty (Wu et al. 2016): what was not looked at was not translated; 0 is off"""
    groups: Annotated[int, Field(ge=1)] = 1
    """diverse beam search: so many groups, of beam / groups hypotheses each, that avoid each other's words"""
    diversity: Annotated[float, Field(ge=0)] = 0.5
    """of groups: what a token costs if a group before says it in the same step"""
    mbr: Annotated[int, Field(ge=0, le=10_000)] = 0
    """minimum Bayes risk: of so many samples the one most like the others, by chrF; 0 is beam search"""
    temperature: Annotated[float, Field(ge=COLDEST)] = 0.7
    """of mbr: how its samples are drawn; 1 as the model thinks, below 1 safer"""
    keep: tuple[Keep, ...] = ()
    """what is guaranteed to pass untouched, placeholders ({name}, %s, <b>, addresses), numbers"""
    constrained_beam: Annotated[int, Field(ge=1, le=1000)] = 10
    """at least so wide is the beam for a text with something to keep, or to say"""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.beam % self.groups:
            raise ValueError(f"groups {self.groups} must divide beam {self.beam}")
        guided = {"groups": self.groups > 1, "coverage": self.coverage > 0, "keep": bool(self.keep)}
        if self.mbr and (unfit := [name for name, on in guided.items() if on]):
            raise ValueError(f"mbr draws samples; it does not go with {' and '.join(unfit)}")
        if self.keep and self.groups > 1:
            raise ValueError("keep does not go with groups: both say which hypotheses go on")
        return self


class Scoring(Section):
    measures: Annotated[tuple[Measure, ...], Field(min_length=1)] = ("bleu", "chrf", "ter")
    """the first one chooses checkpoints; bleu_lc minds no case; wer and per are for sounds, rouge for summaries"""
    tokenize: str = "13a"
    """sacreBLEU's tokenizer for BLEU; zh for Chinese, ja-mecab, char …"""


TASKS: dict[Task, dict[str, dict[str, Any]]] = {
    "translate": {},
    "tag": {"tokenizer": {"shared": False}, "score": {"measures": ("accuracy", "f1")}},
    "classify": {"tokenizer": {"shared": False}, "score": {"measures": ("accuracy", "f1")}},
    "mask": {"training": {"choose_by": "loss", "validate_sentences": 0, "label_smoothing": 0.0}}
    | {"score": {"measures": ("accuracy", "perplexity")}},
    "continue": {"training": {"choose_by": "loss", "validate_sentences": 0, "label_smoothing": 0.0}}
    | {"score": {"measures": ("perplexity", "word_perplexity")}}
    | {"model": {"architecture": "decoder"}},
}
"""what suits each task where the recipe says nothing"""


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
        task = given.get("task", "translate")
        for name, suits in TASKS[task].items() if task in get_args(Task) else ():
            section = full.get(name, {})
            if isinstance(section, Mapping):
                full[name] = {**suits, **section}
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

    @property
    def labelled(self) -> bool:
        """Whether the targets are labels, not text."""
        return self.task in ("tag", "classify")

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
