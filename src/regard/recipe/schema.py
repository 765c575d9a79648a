"""The recipe schema: everything that determines a model, with every default.

The sections are ``data``, ``tokenizer``, ``model``, ``training``, ``decoding`` (in ``decoding.py``) and ``evaluation``.
Names of components (norms, positions, optimizers, tasks …) are looked up in the registries, ``registry.py``, and model
sizes in ``presets.py``. ``validation.py`` checks how the sections fit together, and ``parsing.py`` reads recipes from
YAML.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, model_validator
from pydantic_core import PydanticCustomError

from regard.decoding.options_and_logits_processors import DecodingConfig
from regard.recipe.presets import BATCH_TOKENS, PRESETS, Preset
from regard.recipe.registry import find_registry
from regard.recipe.validation import Section, find_problems, registered

Device = Literal["auto", "cpu", "cuda"]
TrainingPrecision = Literal["auto", "fp32", "bf16"]
Precision = Literal[TrainingPrecision, "int8"]
AttentionSite = Literal["encoder", "decoder", "cross_attention"]
"""where attention is used: self-attention of either stack, or cross-attention"""

Probability = Annotated[float, Field(ge=0, lt=1)]
_ONE_OR_MORE = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
Files = Annotated[tuple[str, ...], _ONE_OR_MORE, Field(min_length=1)]
"""One file name or a list of them, read one after the other."""
Tag = Annotated[str, Field(pattern="^[A-Za-z][A-Za-z0-9_-]*$")]


FREEZE_GROUPS = (
    *("encoder", "decoder", "embeddings"),
    *("self_attention", "cross_attention", "feed_forward", "norms"),
)
"""groups of weights that ``training.freeze`` can name"""
ALL_BUT = "all-but-"


def _check_group(name: str) -> str:
    """Accept the name of a group of weights, with or without ``all-but-``."""
    if name.removeprefix(ALL_BUT) not in FREEZE_GROUPS:
        *most, last = FREEZE_GROUPS
        expected = f"{', '.join(most)} or {last}, or one of these after {ALL_BUT}"
        raise PydanticCustomError("choice", "Input should be {expected}", {"expected": expected})
    return name


FrozenGroup = Annotated[str, AfterValidator(_check_group)]


# ---------------------------------------------------------------------------------------------
# Data


class DataFiles(Section):
    """The files of one split: two line-parallel files, files of pairs, CoNLL-U files, or plain text."""

    source: Files | None = None
    """text file(s), one sentence per line; ``.gz``, ``.zst`` and ``.xz`` files are decompressed"""
    target: Files | None = None
    """the translations: as many files and lines as ``source``"""
    pairs: Files | None = None
    """instead of source and target, file(s) with both sides: TSV, CSV, XLSX, JSONL, Parquet, TMX, XLIFF, PO, zip
    archives; or a folder or a pattern such as ``memories/*.tmx``"""
    conllu: Files | None = None
    """CoNLL-U file(s) for task tagging: the words of each sentence and their universal part-of-speech tags"""
    text: Files | None = None
    """text file(s) without targets, for the tasks masked_lm and language_model"""
    parses: Files | None = None
    """CoNLL-U file(s) with the dependency tree of each source line, for ``model.position: tree``"""
    to: Annotated[tuple[Tag, ...], _ONE_OR_MORE, Field(min_length=1)] | None = None
    """target language of all files, or of each: with ``de``, the token <2de> is prepended to every source"""
    tag: Annotated[tuple[Tag | None, ...], _ONE_OR_MORE, Field(min_length=1)] | None = None
    """another token to prepend to every source, for all files or for each: <bt> for ``bt``, none for null"""

    weights: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=2)] | None = None
    """train: relative weight of each file in sampling, for example [3, 1]; an epoch has as many pairs as all files
    together"""
    temperature: Annotated[float, Field(ge=1)] | None = None
    """train: sample from each file in proportion to its number of pairs to the power of 1/temperature, so that small
    files are seen more often; 5 is usual for many languages, 1 samples in proportion to size"""

    columns: tuple[str, str] | None = None
    """pairs: names or numbers (from 1) of the columns of source and target, or their keys or languages, such as
    [en, de]; found from headers, keys and language codes by default"""
    on_bad_line: Literal["error", "skip"] = "error"
    """what to do with a line that cannot be read: error stops; skip skips it and reports the count"""

    @property
    def tags(self) -> list[tuple[str, ...]]:
        """The tags prepended to the sources of each file."""
        count = len(self.source or self.pairs or self.conllu or self.text or ())
        languages = [language_tag(code) for code in self.to or ()]
        tag_lists = [_for_each(languages, count), _for_each(self.tag or (), count)]
        return [tuple(tag for tag in tags if tag) for tags in zip(*tag_lists, strict=True)]

    @property
    def mixed(self) -> bool:
        """Whether the files are mixed by weights or a temperature."""
        return self.weights is not None or self.temperature is not None

    @property
    def single_files(self) -> list[Self]:
        """The same files, each as a split of its own."""
        keys = ("source", "target", "pairs", "parses", "to", "tag")
        fields = {key: getattr(self, key) for key in keys if getattr(self, key)}
        unmixed = {"weights": None, "temperature": None}
        return [
            self.model_copy(
                update={key: (values[number % len(values)],) for key, values in fields.items()}
                | unmixed
            )
            for number in range(len(self.source or self.pairs or ()))
        ]

    def sampling_shares(self, pairs: Sequence[int]) -> list[float]:
        """The share of each file in an epoch, given their numbers of pairs."""
        powers = [count ** (1 / (self.temperature or 1)) for count in pairs]
        weights = [
            weight * (count > 0)
            for weight, count in zip(self.weights or powers, pairs, strict=True)
        ]
        return [weight / sum(weights) for weight in weights]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.source is None) != (self.target is None):
            raise ValueError("source and target must be given together")
        file_lists = [self.source, self.pairs, self.conllu, self.text]
        if sum(files is not None for files in file_lists) != 1:
            raise ValueError("expected one of: source and target, pairs, conllu, text")
        if self.source and self.target and len(self.source) != len(self.target):
            raise ValueError(
                f"source has {len(self.source)} file(s) and target has {len(self.target)}: "
                "expected one target file per source file"
            )
        if self.columns and not self.pairs:
            raise ValueError("columns needs pairs: other files have no columns")
        if self.on_bad_line == "skip" and (self.conllu or self.parses):
            raise ValueError("on_bad_line: skip is not supported for CoNLL-U files")
        sources = self.source or self.pairs or ()
        if self.parses and len(self.parses) != len(sources):
            raise ValueError(
                f"parses has {len(self.parses)} file(s) for {len(sources)} source file(s): expected one per source file"
            )
        if self.weights and self.temperature:
            raise ValueError("weights and temperature cannot be combined")
        if self.weights and len(self.weights) != len(sources):
            raise ValueError(
                f"weights has {len(self.weights)} values for {len(sources)} file(s): expected one per file"
            )
        if self.temperature and len(sources) < 2:
            raise ValueError("temperature needs several files of source and target, or of pairs")
        for name, values in (("to", self.to), ("tag", self.tag)):
            if values and not sources:
                raise ValueError(f"{name} needs source and target, or pairs")
            if values and len(values) not in (1, len(sources)):
                raise ValueError(
                    f"{name} has {len(values)} values for {len(sources)} file(s): expected one, or one per file"
                )
        return self


def _for_each(values: Sequence[str | None], count: int) -> list[str | None]:
    """One value for each of ``count`` files: none, one for all, or one for each."""
    return list(values) if len(values) == count else [*values, None][:1] * count


class CleaningConfig(Section):
    """Which training pairs are dropped. The number of pairs dropped for each reason is reported."""

    max_tokens: Annotated[int, Field(ge=1)] = 256
    """drop pairs in which one side has more tokens than this"""
    max_ratio: Annotated[float, Field(ge=1)] | None = 9.0
    """drop pairs in which one side is more than this many times as long as the other; null keeps all"""
    keep_duplicates: bool = False
    """keep exact duplicates of a pair; by default they are dropped"""
    truncate: bool = False
    """truncate sources longer than max_tokens, in training and at inference, instead of dropping them"""


UNNAMED_LANGUAGES = ("source", "target")
"""The language codes of a model whose languages are not known."""


class DataConfig(Section):
    root: str | None = None
    """folder, or its URL, that file names are relative to; by default $REGARD_DATA, or the current folder if that is
    not set"""
    train: DataFiles
    valid: DataFiles | None = None
    """validation pairs; without them, a fraction of train is held out"""
    test: DataFiles | None = None
    """test pairs, scored once at the end of training"""
    hold_out: Annotated[float, Field(gt=0, le=0.5)] = 0.02
    """fraction of the distinct training sources to hold out for validation when valid is not given"""
    languages: tuple[str, str] | None = None
    """language codes of source and target, such as [en, de], which also select the languages of a TMX or XLIFF file and
    the columns of a table; read from file names like train.en.gz by default"""
    other_targets: tuple[Tag, ...] = ()
    """fine-tuning: target languages that the model keeps from the run it started from, besides those of train.to"""
    clean: CleaningConfig = CleaningConfig()
    bidirectional: bool = False
    """train on every pair in both directions, without a language tag, as a first stage: fine-tuning the run for one
    direction (training.init_from) is the second"""
    context: Annotated[int, Field(ge=0, le=10)] = 0
    """number of previous source sentences that the model also reads; the lines of a file must be in the order of their
    documents, with a blank line between documents"""

    @property
    def splits(self) -> dict[str, DataFiles]:
        """The splits among train, valid and test that the recipe has."""
        splits = {"train": self.train, "valid": self.valid, "test": self.test}
        return {name: files for name, files in splits.items() if files is not None}

    @property
    def tags(self) -> list[str]:
        """All tags that are prepended to training sources."""
        other_tags = map(language_tag, self.other_targets)
        return sorted({tag for tags in self.train.tags for tag in tags} | {*other_tags})

    @property
    def targets(self) -> list[str]:
        """The target languages of a multilingual model; empty if there is only one language pair."""
        return list(dict.fromkeys((*(self.train.to or ()), *self.other_targets)))

    @property
    def language_pair(self) -> tuple[str, str]:
        """The language codes of source and target."""
        if self.languages is not None:
            return self.languages
        source, target = self.train.source or (), self.train.target or ()
        codes = [_language(names[0]) if names else None for names in (source, target)]
        return codes[0] or UNNAMED_LANGUAGES[0], codes[1] or UNNAMED_LANGUAGES[1]

    @property
    def named(self) -> bool:
        """Whether the codes of all languages are known."""
        return not {code for pair in self.language_pairs for code in pair} & {*UNNAMED_LANGUAGES}

    @property
    def language_pairs(self) -> list[tuple[str, str]]:
        """All supported pairs of source and target language."""
        source, target = self.language_pair
        if not self.train.to:
            return [(source, target)]
        names = self.train.source or self.train.pairs or ()
        # The suffix of a file of pairs is its format, not a language.
        codes = [(self.train.source and _language(name)) or source for name in names]
        languages = (
            self.train.to if len(self.train.to) == len(names) else self.train.to * len(names)
        )
        other_pairs = [(source, code) for code in self.other_targets]
        return list(dict.fromkeys([*zip(codes, languages, strict=True), *other_pairs]))

    def location(self, name: str) -> str:
        """The path or the URL of a file; a name is relative to ``root``, unless it is absolute or a URL."""
        root = self.root or os.environ.get("REGARD_DATA") or "."
        if is_url(name) or Path(name).is_absolute():
            return name
        return f"{root.rstrip('/')}/{name}" if is_url(root) else str(Path(root).expanduser() / name)


def is_url(name: str) -> bool:
    """Whether a name is a URL such as s3://bucket/file, and not a path."""
    return "://" in name


def language_tag(code: str) -> str:
    """The tag that selects a target language: ``2de`` for ``de``."""
    return f"2{code}"


def _language(name: str) -> str | None:
    """The language code in a file name such as train.en.gz or corpus.zh-CN."""
    suffix = Path(
        name.removesuffix(".gz").removesuffix(".zst").removesuffix(".xz")
    ).suffix.removeprefix(".")
    match = re.fullmatch(r"(?!txt|tok|raw)[a-z]{2,3}(-[A-Za-z]{2,4})?", suffix)
    return suffix if match else None


# ---------------------------------------------------------------------------------------------
# Tokenizer


class TokenizerConfig(Section):
    kind: Annotated[str, registered("tokenizer.kind")] = "unigram"
    """unigram, bpe, char or word, trained by SentencePiece; marian comes with an imported model"""
    target_kind: Annotated[str, registered("tokenizer.kind")] | None = None
    """kind of the target tokenizer if it is different, such as word for phonemes; needs shared: false"""
    vocab_size: Annotated[int, Field(ge=8, le=1_000_000)] = 8000
    """maximum vocabulary size; small corpora get fewer entries"""
    shared: StrictBool = True
    """use one vocabulary for source and target"""
    normalize: Annotated[str, registered("tokenizer.normalize")] = "nfc"
    """Unicode normalization: nfc, nfkc (also folds ligatures, full-width forms and superscripts), lower (nfc and
    lower-cased) or none"""

    @property
    def identity(self) -> str:
        """What token ids depend on, as JSON."""
        return self.model_dump_json(exclude_none=True)

    @property
    def of_target(self) -> TokenizerConfig:
        """The settings of the target tokenizer."""
        return self.model_copy(update={"kind": self.target_kind or self.kind})

    @model_validator(mode="before")
    @classmethod
    def _drop_equal_target_kind(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        if values.get("target_kind") == values.get("kind", "unigram"):
            return {**values, "target_kind": None}
        return values


# ---------------------------------------------------------------------------------------------
# Model


class AttentionConfig(Section):
    score: Annotated[str, registered("model.attention.score")] = "scaled_dot_product"
    """how a query is compared with a key; the paper's is q.k / sqrt(d_k)"""
    weighting: Annotated[str, registered("model.attention.weighting")] = "softmax"
    """how scores become attention weights"""
    encoder: Annotated[str, registered("model.attention.encoder")] = "full"
    """attention pattern of encoder self-attention; the cost of all patterns but full is linear in the length"""
    decoder: Annotated[str, registered("model.attention.decoder")] = "full"
    """attention pattern of decoder self-attention"""
    cross_attention: Annotated[str, registered("model.attention.cross_attention")] = "full"
    """attention pattern of cross-attention"""
    window_size: Annotated[int, Field(ge=1)] = 64
    """window: number of positions seen on each side (sliding-window attention)"""
    linformer_k: Annotated[int, Field(ge=1)] = 256
    """linformer: number of rows that keys and values are projected to"""
    block_size: Annotated[int, Field(ge=1)] = 64
    """bigbird: positions per block; each block sees itself and its two neighbours"""
    global_blocks: Annotated[int, Field(ge=0)] = 2
    """bigbird: number of blocks at the beginning that see all blocks and are seen by all"""
    random_blocks: Annotated[int, Field(ge=0)] = 3
    """bigbird: number of random blocks that each block sees"""
    key_value_heads: Annotated[int, Field(ge=1)] | None = None
    """number of key and value heads (grouped-query attention; 1 is multi-query attention); null: as many as heads"""
    bias: bool = False
    """add biases to W^Q, W^K, W^V and W^O; the paper has none, torch and Marian have them"""


class NonAutoregressiveConfig(Section):
    """How ``architecture: non_autoregressive`` determines the length of a translation."""

    length: Annotated[str, registered("model.non_autoregressive.length")] = "predicted"
    """predicted: from the encoder output; eos: all positions after the first EOS are dropped"""
    max_length_difference: Annotated[int, Field(ge=1)] = 64
    """predicted: maximum difference between target and source length, in tokens"""
    length_loss_weight: Annotated[float, Field(ge=0)] = 0.1
    """predicted: weight of the length loss, a mean over sentences, relative to the token loss"""
    extra_positions: Annotated[int, Field(ge=1)] = 10
    """eos: number of positions beyond the source length; longer translations do not fit"""


DERIVED_KEYS = [
    *(("d_k",), ("d_v",), ("final_norm",)),
    *(("attention_dropout",), ("activation_dropout",)),
]
"""Keys whose defaults follow from other keys."""


MAX_D_MODEL = 1_000_000


class ModelConfig(Section):
    architecture: Annotated[str, registered("model.architecture")] = "transformer"
    """transformer, decoder_only, non_autoregressive, or one of the baselines lstm and convolution"""
    preset: Preset = "base"
    """named set of model sizes; sizes given in the recipe override it"""
    d_model: Annotated[int, Field(ge=2, le=MAX_D_MODEL)]
    """width of embeddings and layers"""
    heads: Annotated[int, Field(ge=1)]
    """number of attention heads"""
    d_k: Annotated[int, Field(ge=1)]
    """width of the queries and keys of a head; d_model / heads by default"""
    d_v: Annotated[int, Field(ge=1)]
    """width of the values of a head; d_model / heads by default"""
    encoder_layers: Annotated[int, Field(ge=1)]
    decoder_layers: Annotated[int, Field(ge=1)]
    d_ff: Annotated[int, Field(ge=1)]
    """inner width of the feed-forward network"""
    activation: Annotated[str, registered("model.activation")] = "relu"
    """activation of the feed-forward network"""
    attention: AttentionConfig = AttentionConfig()
    non_autoregressive: NonAutoregressiveConfig = NonAutoregressiveConfig()
    dropout: Probability
    """dropout on the output of each sub-layer and on the sum of embedding and position"""
    attention_dropout: Probability
    """dropout on attention weights; equal to dropout by default"""
    activation_dropout: Probability
    """dropout after the activation of the feed-forward network; equal to dropout by default"""
    norm: Annotated[str, registered("model.norm")] = "layer"
    """normalization of each sub-layer: layer, rms, batch or none"""
    norm_order: Annotated[str, registered("model.norm_order")] = "post"
    """post: LayerNorm(x + Sublayer(x)), as in the paper; pre: x + Sublayer(LayerNorm(x))"""
    residual: Annotated[str, registered("model.residual")] = "add"
    """residual connection around each sub-layer: add, as in the paper, or none"""
    final_norm: bool
    """one more norm after the last layer; true for pre-norm and false for post-norm by default"""
    position: Annotated[str, registered("model.position")] = "sinusoidal"
    """positional encoding; tree needs ``data.train.parses``"""
    max_length: Annotated[int, Field(ge=1)] = 1024
    """maximum sequence length, special tokens included, of ``position: learned`` and of linformer"""
    max_distance: Annotated[int, Field(ge=1)] = 16
    """relative and tree positions: larger distances are clipped to this one"""
    kernel_size: Annotated[int, Field(ge=1)] = 3
    """convolution: width of the convolution"""
    tie_embeddings: bool
    """embedding tying: share one embedding matrix between source and target; needs a shared vocabulary"""
    tie_output: bool = True
    """weight tying: use the target embedding as the output projection"""
    output_bias: bool = False
    """add a bias to the output projection; the paper has none, Marian has one"""

    @property
    def identity(self) -> str:
        """The section as JSON, for hashes. A key that earlier versions do not have counts only if it is set."""
        return self.model_dump_json(exclude={"residual"} if self.residual == "add" else None)

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        """Fill in what follows from the preset and from other keys."""
        if not isinstance(values, Mapping):
            return values
        preset = values.get("preset", "base")
        is_known = isinstance(preset, str) and preset in PRESETS
        full = {**PRESETS[preset if is_known else "base"], **values}
        if full.get("architecture") == "lstm":
            full.setdefault("position", "none")  # a recurrent network needs no positions
        d_model, heads = full["d_model"], full["heads"]
        if isinstance(d_model, int) and isinstance(heads, int) and heads > 0:
            d_model = min(d_model, MAX_D_MODEL)
            # If heads does not divide d_model, the fraction is rejected like any other wrong value.
            full.setdefault("d_k", d_model / heads)
            full.setdefault("d_v", d_model / heads)
        full.setdefault("final_norm", full.get("norm_order", "post") == "pre")
        full.setdefault("attention_dropout", full["dropout"])
        full.setdefault("activation_dropout", full["dropout"])
        return full


# ---------------------------------------------------------------------------------------------
# Training


class AugmentConfig(Section):
    """Fractions of the training pairs that are changed in each epoch, so that models handle such text."""

    upper: Probability = 0.0
    """read the source as if it were in capitals; the run then recases all-caps texts and upper-cases their translations
    """
    title: Probability = 0.0
    """capitalize every word of source and target"""
    typos: Probability = 0.0
    """misspell about a tenth of the words of the source, at least one; the target stays as it is"""
    no_final_punctuation: Probability = 0.0
    """drop the punctuation at the end of the source; the target keeps its own"""

    @property
    def enabled(self) -> bool:
        return any((self.upper, self.title, self.typos, self.no_final_punctuation))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.upper + self.title > 1:
            raise ValueError(
                f"upper {self.upper:g} and title {self.title:g} are fractions of the same pairs: "
                "their sum must be at most 1"
            )
        return self


class TrainingConfig(Section):
    init_from: str | None = None
    """run folder to initialize tokenizer and weights from (fine-tuning); tagging and classification use its encoder;
    keys of the sections tokenizer and model that the recipe omits are taken from that run"""
    mix: Probability = 0.0
    """fine-tuning: share of the training pairs that is taken from the training data of that run"""
    freeze: Annotated[tuple[FrozenGroup, ...], _ONE_OR_MORE] = ()
    """fine-tuning: groups of weights that are not trained: encoder, decoder, embeddings, self_attention,
    cross_attention, feed_forward or norms; or all but one of them, such as all-but-decoder"""
    extend_vocab: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """fine-tuning: maximum number of entries, learned from the new data, that are added to each vocabulary"""
    steps: Annotated[int, Field(ge=1)] = 100_000
    """number of optimizer steps"""
    tokens_per_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = 25_000
    """maximum number of source tokens, and of target tokens, in a batch, padding included; auto: the usual number for
    the preset, in as many micro-batches as the memory of the device needs"""
    batching: Literal["padded", "packed"] = "padded"
    """padded: sentences of similar length in each batch; packed: sentences of all lengths end to end, which a GPU
    processes without padding, compiled and as one CUDA graph, and a CPU with native kernels"""
    sharding: Literal["auto", "full_shard", "no_shard"] = "auto"
    """several processes: full_shard gives each a part of the weights, gradients and optimizer state (FSDP); no_shard
    gives each all of them, which is faster; auto shards if they take more than half of the memory"""
    activation_checkpointing: bool = False
    """compute the activations of each layer again in the backward pass instead of storing them (gradient
    checkpointing): the same weights in less memory, about a third slower"""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """number of batches per optimizer step (gradient accumulation)"""
    optimizer: Annotated[str, registered("training.optimizer")] = "adam"
    learning_rate: Annotated[float, Field(gt=0)]
    """peak learning rate; with schedule noam, a factor on the paper's schedule (default 1.0)"""
    betas: tuple[Probability, Probability] = (0.9, 0.98)
    """adam and adamw: decay rates of the moment estimates"""
    epsilon: Annotated[float, Field(gt=0)] = 1e-9
    """adam and adamw: added to the denominator"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    schedule: Annotated[str, registered("training.schedule")] = "noam"
    """learning-rate schedule: noam (the paper's), constant or cosine"""
    warmup: Annotated[int, Field(ge=0)] = 4000
    """number of steps over which the learning rate rises linearly"""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """maximum gradient norm; null turns clipping off, as in the paper"""
    subword_sampling: Probability = 0.0
    """random subword segmentation: for bpe the dropout probability of a merge (BPE-dropout), for unigram the smoothing
    parameter alpha, where smaller values sample more diverse segmentations; 0 is off"""
    subword_copies: Annotated[int, Field(ge=1, le=999)] = 16
    """subword_sampling and augment: number of different copies of the training data; epoch n uses copy n modulo this
    number"""
    augment: AugmentConfig = AugmentConfig()
    rdrop: Annotated[float, Field(ge=0)] = 0.0
    """weight of R-Drop: each batch passes through the network twice with different dropout, and a loss term penalizes
    the difference between the two outputs"""
    teacher: Files | None = None
    """token-level distillation: run folder of a teacher, or several as an ensemble, whose probabilities of every token
    are learned in addition to the labels; its tokenizer is used"""
    teacher_weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """teacher: weight of its probabilities; the labels have the remaining weight"""
    simcut: Annotated[float, Field(ge=0)] = 0.0
    """weight of SimCut: each batch passes through the network twice, the second time with 5% of the token embeddings
    set to zero, and a loss term penalizes the difference between the two outputs; not together with rdrop"""
    word_dropout: Probability = 0.0
    """fraction of source tokens replaced by MASK in each step"""
    target_word_dropout: Probability = 0.0
    """fraction of decoder input tokens replaced by MASK in each step"""
    label_smoothing: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    label_smoothing_over: Annotated[str, registered("training.label_smoothing_over")] = "all"
    """spread the smoothing mass over all classes (as torch does) or over the others, without the correct one"""
    validate_every: Annotated[int, Field(ge=1)] = 1000
    """steps between two validations"""
    validate_sentences: Annotated[int, Field(ge=0)] = 500
    """validation pairs to translate greedily for the validation score; 0 validates by loss alone"""
    best_checkpoint_metric: Literal["loss", "score", "last"] = "score"
    """how the best checkpoint is chosen: by loss, by score, the first of evaluation.metrics, or always the last one"""
    patience: Annotated[int, Field(ge=1)] | None = None
    """stop after this many validations without improvement, of the loss if best_checkpoint_metric is last; null never
    stops early"""
    checkpoint_every: Annotated[int, Field(ge=1)] = 1000
    """steps between two checkpoints"""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 5
    """number of checkpoints to keep, and to average at the end"""
    average: Literal["best", "last", "none"] = "best"
    """average the best or the last kept checkpoints (the paper: the last 5, or 20 for big), or none"""
    ema: Probability = 0.0
    """decay of an exponential moving average of the weights, which replaces the weights; 0 is off"""
    log_every: Annotated[int, Field(ge=1)] = 50
    """steps between two log lines"""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    device: Device = "auto"
    precision: TrainingPrecision = "auto"
    """mixed precision: auto is bf16 on a GPU that supports it, else fp32; bf16 is also faster on a CPU with AVX-512
    BF16 or AMX"""

    @property
    def copies(self) -> int:
        """The number of different copies of the training data; 0: every epoch uses the same data."""
        return self.subword_copies if self.subword_sampling or self.augment.enabled else 0

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("learning_rate") is None:
            rate = 1.0 if values.get("schedule", "noam") == "noam" else 1e-3
            return {**values, "learning_rate": rate}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.best_checkpoint_metric == "score" and self.validate_sentences == 0:
            raise ValueError("best_checkpoint_metric: score needs validate_sentences above 0")
        return self


# ---------------------------------------------------------------------------------------------
# Evaluation


class EvaluationConfig(Section):
    metrics: Annotated[
        tuple[Annotated[str, registered("evaluation.metrics")], ...], Field(min_length=1)
    ] = ("bleu", "chrf", "ter")
    """the first one selects checkpoints; bleu_lc is lower-cased BLEU; wer and per are for phonemes, rouge1, rouge2 and
    rougeL for summaries"""
    tokenize: str = "13a"
    """sacreBLEU's tokenizer for BLEU and TER: 13a, zh, ja-mecab, char …"""


# ---------------------------------------------------------------------------------------------
# The recipe


class RecipeLoader(yaml.SafeLoader):
    """Reads YAML 1.2 floats: 1e3 is a number, with or without a decimal point."""


class RecipeDumper(yaml.SafeDumper):
    """Writes texts that ``RecipeLoader`` would read as numbers, such as a file named 1e3, in quotes."""


for _class in (RecipeLoader, RecipeDumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+\Z"),
        list("-+0123456789"),
    )


class Recipe(Section):
    task: Annotated[str, registered("task")] = "translation"
    data: DataConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: ModelConfig
    training: TrainingConfig
    decoding: DecodingConfig = DecodingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        """Fill in the defaults of the task, and values that one section needs from another."""
        if not isinstance(values, Mapping):
            return values
        empty_sections: dict[str, Any] = {"tokenizer": {}, "model": {}, "training": {}}
        full = empty_sections | {
            name: {} if section is None else section for name, section in values.items()
        }
        tasks, task = find_registry("task"), values.get("task", "translation")
        is_known = isinstance(task, str) and task in tasks
        for name, defaults in tasks[task].defaults.items() if is_known else ():
            section = full.get(name, {})
            if isinstance(section, Mapping):
                full[name] = {**defaults, **section}
        model, tokenizer = full["model"], full["tokenizer"]
        if isinstance(model, Mapping) and isinstance(tokenizer, Mapping):
            shared = tokenizer.get("shared", True)
            full["model"] = {"tie_embeddings": shared is True, **model}
        return full

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := find_problems(self):
            raise ValueError("; ".join(problems))
        return self

    @property
    def has_labels(self) -> bool:
        """Whether the targets are labels, not text."""
        return bool(find_registry("task")[self.task].has_labels)

    @property
    def text_only(self) -> bool:
        """Whether the data are text without targets."""
        return bool(find_registry("task")[self.task].text_only)

    @property
    def is_seq2seq(self) -> bool:
        """Whether sources and targets are texts (sequence to sequence)."""
        return not (self.has_labels or self.text_only)

    @property
    def batch_tokens(self) -> int:
        """``training.tokens_per_batch`` as a number; auto is the usual one for the preset."""
        tokens = self.training.tokens_per_batch
        return BATCH_TOKENS[self.model.preset] if tokens == "auto" else tokens

    def to_yaml(self) -> str:
        values = self.model_dump(mode="json")
        return yaml.dump(values, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True)
