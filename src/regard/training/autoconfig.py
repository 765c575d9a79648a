"""Automatic configuration: a complete recipe for the training data, the device and the time, with reasons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from regard.data.corpus import read_pairs
from regard.data.language_identification import primary_subtag
from regard.data.pairs import Pair
from regard.errors import RegardError
from regard.inference.device import choose_device
from regard.recipe import PRESETS, DataConfig, DataFiles, Recipe, TokenizerConfig, make_recipe
from regard.recipe.validation import selected_choices
from regard.training.corpus_statistics import CorpusStatistics, collect_statistics
from regard.training.cost_model import DeviceSpeed, measure_device
from regard.training.planner import duration

MIN_PAIRS = 50
MANY_COPIES = 0.9
"""share of the targets that equal their sources, from which on one of the files is probably the wrong one"""
MIN_STEPS = 6_000
"""Batches are made smaller to reach this many steps: on a CPU, many small steps learn more than few large ones."""
MIN_TOKENS_PER_BATCH = {"cpu": 1_024, "cuda": 4_096}
"""On a GPU, smaller batches take as long. With several CPU cores, which share a batch, it is twice as much."""
MUON_TOKENS_PER_BATCH, MIN_MUON_STEPS = 4_096, 1_200
"""With Muon, batches have at least so many tokens if there is time for so many steps."""
KEY_VALUE_HEADS = "model.attention.key_value_heads"
VALIDATIONS = 20
USEFUL_TOKENS = 2_000_000
"""With fewer target tokens, a model learns little from real text: BLEU 0 to 5 in the experiments."""
SAMPLED_PAIRS, MIN_COPIES, MAX_COPIES = 80_000, 4, 16
"""With subword sampling, fewer copies of the pairs are prepared if they would have more pairs than this in all: a core
samples about 4,000 texts per second, and both texts of a pair are sampled in both directions."""
DEFAULT_MINUTES = {"cpu": 60.0, "cuda": 20.0}
"""The longest time that is chosen if the user sets none."""


# ---------------------------------------------------------------------------------------------
# The rules


class VocabularyRule(NamedTuple):
    """The vocabulary for a corpus of up to ``max_pairs`` pairs, and the largest batch."""

    max_pairs: float
    vocab_size: int
    characters_per_token: float
    """with this vocabulary size, spaces included"""
    tokens_per_batch: int


VOCABULARY_RULES = (
    VocabularyRule(2_000, 4_000, 3.95, 4_096),  # whose texts have fewer subwords than that
    VocabularyRule(20_000, 4_000, 4.2, 4_096),
    VocabularyRule(50_000, 6_000, 4.5, 8_192),
    VocabularyRule(500_000, 8_000, 4.7, 16_384),
    VocabularyRule(5_000_000, 16_000, 5.0, 16_384),
    VocabularyRule(math.inf, 32_000, 5.3, 25_000),
)
"""Igbo, 7,000 pairs, chrF after 6,000 steps: 2,000 entries 32.9, 4,000 entries 35.7, 8,000 entries 36.1.
multi30k, 5,000 pairs: 2,000 entries 49.6, 4,000 entries 52.8, 8,000 entries 53.0."""


class Cost(NamedTuple):
    """The time of a training step, R-Drop included, relative to the model of cost 1 (``REFERENCE_MODELS``)."""

    cpu: float
    cuda: float = math.inf
    """not measured if the rule is only for a CPU"""

    def on(self, device: str) -> float:
        return self.cuda if device == "cuda" else self.cpu


class Rates(NamedTuple):
    """The learning rates of Adam and of Muon; 0: Muon is not used unless the user chooses it."""

    adam: float
    muon: float = 0.0


@dataclass(frozen=True)
class ModelRule:
    """A model and its regularization, and when they are used: if the time allows this many epochs and tokens."""

    name: str
    model: dict[str, Any]
    dropout: float
    rdrop: float
    rates: Rates
    cost: Cost
    device: Literal["any", "cpu", "cuda"] = "any"
    min_epochs: float = 0
    max_epochs: float = 250
    """more epochs do not help"""
    min_tokens: float = 0
    """target tokens that must be affordable"""
    min_pairs: float = 0
    max_pairs: float = math.inf
    bidirectional: bool = False
    """every pair is used in both directions; an epoch is still one pass over the pairs in one direction"""
    subword_sampling: float = 0.0

    def applies(self, tokens: float, epoch_tokens: float) -> bool:
        """Whether the model is worth training on this many target tokens."""
        return tokens >= max(self.min_tokens, self.min_epochs * epoch_tokens)

    def has_same_training(self, other: ModelRule) -> bool:
        """Whether the rules differ only in when they are used."""
        mine = self.dropout, self.rates, self.methods
        return mine == (other.dropout, other.rates, other.methods)

    @property
    def methods(self) -> tuple[Any, ...]:
        """The model and what is used besides dropout, as users are told."""
        return self.model, self.rdrop, self.bidirectional, self.subword_sampling


_BASE, _SMALL, _TINY = ({"preset": name} for name in ("base", "small", "tiny"))
_DEEP = {"preset": "base", "d_ff": 1024}
_WIDE = {"preset": "base", "encoder_layers": 3, "decoder_layers": 3}
_MEDIUM = {"preset": "tiny", "d_model": 192, "heads": 6, "d_ff": 768}
_MUON = Rates(0.003, 0.01)

# The models, and how they are trained: name, model, dropout, R-Drop, learning rates, costs on CPU and GPU.
_deep = partial(ModelRule, "deep", _DEEP, 0.3, 5, Rates(0.001), Cost(20, 2.2))
_wide = partial(ModelRule, "wide", _WIDE, 0.3, 2, Rates(0.001), Cost(14, 1.6))
_base = partial(ModelRule, "base", _BASE, 0.1, 0, Rates(0.0007), Cost(15, 1.8))
_wide_both = partial(_wide, bidirectional=True)
_wide_sampled = partial(
    ModelRule, "wide, sampled", _WIDE, 0.3, 5, Rates(0.001), Cost(14, 1.6),
    bidirectional=True, subword_sampling=0.3,
)  # fmt: skip
_medium = partial(ModelRule, "medium", _MEDIUM, 0.2, 2, _MUON, Cost(4.0))
_wide_dropout = partial(ModelRule, "wide, dropout", _WIDE, 0.3, 0, Rates(0.001), Cost(7.5, 1))
_wide_short = partial(ModelRule, "wide, short", _WIDE, 0.1, 0, Rates(0.001), Cost(7.5, 1))
_medium_both = partial(_medium, bidirectional=True)
_medium_short = partial(ModelRule, "medium, short", _MEDIUM, 0.1, 0, _MUON, Cost(2.1))
_tiny_long = partial(ModelRule, "tiny, many epochs", _TINY, 0.2, 0, _MUON, Cost(1))
_tiny_both = partial(_tiny_long, bidirectional=True)
_tiny_muon = partial(ModelRule, "tiny", _TINY, 0.1, 0, _MUON, Cost(1))
_tiny = partial(ModelRule, "tiny", _TINY, 0.1, 0, Rates(0.003), Cost(1, 0.8))
_symbols = partial(ModelRule, "symbols", _SMALL, 0.2, 2, Rates(0.0012), Cost(8.5, 1.4))
_tiny_symbols = partial(ModelRule, "tiny symbols", _TINY, 0.1, 0, Rates(0.003), Cost(1, 0.8))

# When they are used: the first rule that applies.
MODEL_RULES = (
    _deep(min_epochs=100, min_pairs=2e4, max_pairs=5e5),
    _wide_sampled(min_epochs=200, max_epochs=500, max_pairs=2e4),
    _wide_both(device="cpu", min_epochs=100, min_tokens=1e7, max_pairs=2e4),
    _wide_both(device="cuda", min_epochs=60, max_pairs=2e4),
    _wide(device="cpu", min_epochs=100, min_tokens=1e7, max_pairs=5e5),
    _wide(device="cuda", min_epochs=45, max_pairs=2e4),
    _wide(device="cuda", min_epochs=60, min_pairs=2e4, max_pairs=5e5),
    _base(min_epochs=1, max_epochs=50, min_tokens=5e7, min_pairs=5e5),
    _medium_both(device="cpu", min_epochs=80, min_tokens=4e6, max_pairs=2e4),
    _medium(device="cpu", min_epochs=40, min_tokens=4e6, max_pairs=1e5),
    _tiny_both(device="cpu", min_epochs=80, max_epochs=300, max_pairs=2e4),
    _wide_dropout(min_epochs=35, max_epochs=100, min_tokens=1.5e7),
    _wide_short(min_epochs=8, max_epochs=40, min_tokens=2.5e7),
    _wide_short(device="cuda", min_epochs=2, max_epochs=40, min_tokens=3e6),
    _medium_short(device="cpu", min_epochs=2, max_epochs=40, min_tokens=1.4e7, min_pairs=2e4),
    _tiny_long(device="cpu", min_epochs=60, max_epochs=150, max_pairs=2e4),
    _tiny_muon(device="cpu", max_epochs=60),
    _tiny(device="cuda", max_epochs=60),
)
"""Measured on corpora of 3,000 to 165,000 pairs with ``benchmarks/autoconfig_experiments.py``, see
docs/autoconfig.md."""
SYMBOL_RULES = (
    _symbols(min_epochs=40, max_epochs=150, min_pairs=5e3),
    _tiny_symbols(max_epochs=60),
)
"""for sequences of characters or symbols, instead of sentences"""


class AllowedMethods(NamedTuple):
    """Whether the corpus and the settings of the user allow methods that some rules use."""

    bidirectional: bool
    subword_sampling: bool

    def include(self, rule: ModelRule) -> bool:
        """Whether all methods of the rule are allowed."""
        allows_direction = self.bidirectional or not rule.bidirectional
        return allows_direction and (self.subword_sampling or not rule.subword_sampling)


@dataclass(frozen=True)
class ChosenModel:
    """The result of the rules for a corpus, a device and a time limit."""

    rule: ModelRule
    vocabulary: VocabularyRule
    minutes: float
    tokens_per_second: float
    """of the chosen model, estimated"""
    epoch_tokens: float
    """target tokens of one epoch, estimated"""
    device: str
    next_rule: ModelRule | None
    """the next better rule, for which the time is too short"""
    speed: DeviceSpeed
    allowed: AllowedMethods
    source_ratio: float = 1.0
    """source tokens for each target token, see ``CorpusStatistics.source_ratio``"""

    @property
    def tokens(self) -> float:
        """Target tokens to train on: as many as the time allows, up to ``max_epochs``."""
        affordable = training_seconds(self.minutes, self.device) * self.tokens_per_second
        return min(affordable, self.rule.max_epochs * self.epoch_tokens)

    @property
    def epochs(self) -> float:
        return self.tokens / self.epoch_tokens

    def minutes_for(self, rule: ModelRule) -> float:
        """The time that a rule needs for its minimum number of epochs and tokens."""
        tokens = max(rule.min_tokens, rule.min_epochs * self.epoch_tokens)
        return total_minutes(
            tokens / self.speed.tokens_per_second(rule.cost.on(self.device)), self.device
        )


TRAINING_SHARE = 0.9
"""The share of the time that is spent in training steps; the rest is for validating and scoring."""
START_SECONDS = {"cpu": 15.0, "cuda": 45.0}
"""The time before the first step: reading, preparing and, on a GPU, compiling."""


def training_seconds(minutes: float, device: str) -> float:
    """The time for training steps if the whole run takes this many minutes."""
    return max(1.0, TRAINING_SHARE * 60 * minutes - START_SECONDS[device])


def total_minutes(seconds: float, device: str) -> float:
    """The time for the whole run if training steps take this many seconds."""
    return (seconds + START_SECONDS[device]) / TRAINING_SHARE / 60


def choose(
    corpus: CorpusStatistics,
    epoch_tokens: float,
    vocabulary: VocabularyRule,
    speed: DeviceSpeed,
    minutes: float | None,
    allowed: AllowedMethods,
    source_ratio: float = 1.0,
) -> ChosenModel:
    """Apply the rules: the first model for which the time is long enough.

    epoch_tokens: target tokens of an epoch in one direction.
    speed: in target tokens per second, for pairs with this ratio of source tokens to target tokens.
    """
    rules = [
        rule
        for rule in (SYMBOL_RULES if corpus.tokenizer_kinds else MODEL_RULES)
        if rule.device in ("any", speed.device)
        and rule.min_pairs <= corpus.pairs < rule.max_pairs
        and allowed.include(rule)
    ]
    if minutes is None:
        minutes = _default_minutes(rules, epoch_tokens, speed)
    too_slow: list[ModelRule] = []
    for rule in rules:
        choice = ChosenModel(
            rule,
            vocabulary,
            minutes,
            speed.tokens_per_second(rule.cost.on(speed.device)),
            epoch_tokens,
            speed.device,
            None,
            speed,
            allowed,
            source_ratio,
        )
        affordable = training_seconds(minutes, speed.device) * choice.tokens_per_second
        if rule.applies(affordable, epoch_tokens):
            better = [one for one in too_slow if one.methods != rule.methods]
            return replace(choice, next_rule=min(better, key=choice.minutes_for, default=None))
        too_slow.append(rule)
    raise AssertionError("the last rule has no conditions")


def _default_minutes(rules: Sequence[ModelRule], epoch_tokens: float, speed: DeviceSpeed) -> float:
    """The default time limit: what the first affordable rule needs for a full training, rounded up.

    A rule is affordable if its least number of epochs and tokens fits into the longest default.
    """
    longest = DEFAULT_MINUTES[speed.device]
    for rule in rules:
        rate = speed.tokens_per_second(rule.cost.on(speed.device))
        least, usual = (
            total_minutes(max(rule.min_tokens, epochs * epoch_tokens) / rate, speed.device)
            for epochs in (rule.min_epochs, min(rule.max_epochs, max(10.0, 2 * rule.min_epochs)))
        )
        if least <= longest:
            minutes = min(longest, usual)
            steps = (1, 2, 3, 5, 10, 15, 20, 30, 45, 60)
            return float(next(step for step in steps if step >= minutes))
    return longest


# ---------------------------------------------------------------------------------------------
# The recipe


def autoconfigure(
    files: DataFiles,
    root: str,
    overrides: Sequence[str] = (),
    languages: tuple[str, str] | None = None,
    pairs: Iterable[Pair] | None = None,
    minutes: float | None = None,
    speed: DeviceSpeed | None = None,
) -> AutomaticRecipe:
    """A complete recipe for training files under ``root`` that suits the data, the device and the time.

    overrides: ``key=value`` settings of the user.
    languages: the codes of source and target, if they are known.
    pairs: the pairs of the files, if the caller reads them.
    minutes: time limit for the whole run; a default for the device if None.
    speed: the speed of the device, measured if None.
    """
    if (task := _setting(overrides, "task")) not in (None, "translation"):
        raise RegardError(
            f"task: {task} needs a recipe; without one, only models for task: translation are trained"
        )
    data = DataConfig(root=root, train=files, languages=languages)
    corpus = collect_statistics(pairs or read_pairs(files, data, section=""))
    _check_size(corpus)
    count = corpus.pairs
    vocabulary = next(rule for rule in VOCABULARY_RULES if count <= rule.max_pairs)
    hold_out = min(0.05, max(1_000 / count, 0.001))
    values: dict[str, Any] = {
        "data": {"root": root, "train": files.model_dump()},
        "tokenizer": {"kind": "unigram", "vocab_size": corpus.vocab_size(vocabulary.vocab_size)},
        "model": {"preset": "tiny"},
    }
    if not any(override.strip().startswith("data.valid") for override in overrides):
        values["data"]["hold_out"] = round(hold_out, 4)
    if languages:
        values["data"]["languages"] = languages
    if corpus.summary_ratio:
        values["data"]["clean"] = {"max_ratio": None, "truncate": True}
    if corpus.tokenizer_kinds:
        values["tokenizer"] = _symbol_tokenizer(corpus, overrides)
    partial = _without_shape(values, overrides)
    speed = speed or measure_device(choose_device(partial.training.device))
    epoch_tokens = count * corpus.tokens_per_target(
        vocabulary.characters_per_token, partial.tokenizer
    )
    source_ratio = corpus.source_ratio(vocabulary.characters_per_token, partial)
    # The encoder takes about half of the time.
    speed = replace(speed, reference=speed.reference * 2 / (1 + source_ratio))
    allowed = _allowed_methods(corpus, partial, overrides)
    choice = choose(corpus, epoch_tokens, vocabulary, speed, minutes, allowed, source_ratio)
    recipe = _complete(values, choice, corpus, overrides)
    fixed_steps = minutes is None and _number_setting(overrides, "training.steps") is not None
    planned = None if fixed_steps else choice.minutes
    reasons = _reasons(recipe, choice, corpus, planned)
    return AutomaticRecipe(recipe, reasons, planned, values, choice, corpus, overrides)


def _complete(
    values: dict[str, Any],
    choice: ChosenModel,
    corpus: CorpusStatistics,
    overrides: Sequence[str],
    batch: int | None = None,
    *,
    longest: bool = False,
) -> Recipe:
    """The recipe with the sections that depend on the chosen model.

    batch: tokens per batch; chosen from the number of tokens if None.
    longest: as many steps as help, even if the time is too short.
    """
    rule = choice.rule
    given = _without_shape(values, overrides)
    training = _training(choice, overrides, batch, longest)
    # What the user has chosen may not support what is chosen here.
    if given.training.activation_checkpointing:
        training["batching"] = "padded"
    if given.model.architecture == "non_autoregressive" or given.training.simcut:
        training["rdrop"] = 0
    if rule.subword_sampling:
        copies = min(MAX_COPIES, max(MIN_COPIES, SAMPLED_PAIRS // corpus.pairs))
        training |= {"subword_sampling": rule.subword_sampling, "subword_copies": copies}
    sections = {
        # Pre-norm is stable even in a short run with a high learning rate.
        "model": {**_shape(rule.model, overrides), "dropout": rule.dropout, "norm_order": "pre"},
        "training": training,
        "evaluation": _evaluation(corpus),
        "decoding": {} if given.decoding.is_sampling else {"beam": 5, "length_penalty": 1.0},
    }
    ignored = {option for _, selected in selected_choices(given) for option in selected.ignores}
    complete = {
        section: {key: value for key, value in keys.items() if f"{section}.{key}" not in ignored}
        for section, keys in sections.items()
    }
    if rule.bidirectional:
        complete["data"] = {**values["data"], "bidirectional": True}
    return make_recipe({**values, **complete}, "the automatic recipe", overrides)


def _allowed_methods(
    corpus: CorpusStatistics, given: Recipe, overrides: Sequence[str]
) -> AllowedMethods:
    """Whether pairs may be swapped, and subwords sampled.

    given: the recipe without the model.
    """
    if _number_setting(overrides, "training.steps"):  # these may be too few
        return AllowedMethods(bidirectional=False, subword_sampling=False)
    data, (source, target) = given.data, given.data.language_pair
    is_translation = not (corpus.is_one_language or corpus.summary_ratio or corpus.tokenizer_kinds)
    if data.named:
        is_translation &= primary_subtag(source) != primary_subtag(target)
    tagged = data.train.to or data.train.tag or data.context or given.model.position == "tree"
    own = _setting(overrides, "data.bidirectional") is not None
    taught = given.training.teacher is not None  # by a model that may know one direction
    swaps = is_translation and given.tokenizer.shared and not (tagged or own or taught)
    samples = given.tokenizer.kind == "unigram" and not given.tokenizer.target_kind
    samples &= _setting(overrides, "training.subword_sampling") is None
    return AllowedMethods(swaps, samples)


def _without_shape(values: dict[str, Any], overrides: Sequence[str]) -> Recipe:
    """The recipe before a model is chosen, without settings that may not fit before the rest is chosen."""
    later = KEY_VALUE_HEADS, "training.subword_copies"
    others = [one for one in overrides if one.partition("=")[0].strip() not in later]
    return make_recipe(values, "the automatic recipe", others)


def _shape(shape: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The preset and sizes of a rule, without those that do not fit what the user sets."""
    if _setting(overrides, "model.preset") is not None:
        return {}
    if _setting(overrides, "model.d_model") is not None:
        # The rule's number of heads may not divide the user's width.
        shape = {key: value for key, value in shape.items() if key != "heads"}
    key_value_heads = _number_setting(overrides, KEY_VALUE_HEADS)
    heads = (PRESETS[shape["preset"]] | shape)["heads"]
    if key_value_heads and heads % key_value_heads:
        return {**shape, "heads": key_value_heads}
    return shape


REFIT_RATIO = 1.3
"""A better model is chosen if the measured speed exceeds the estimate by more than this factor."""
TOO_SLOW = 0.75
"""Another model is chosen if only this share of what the model needs can be reached."""
REBUILD_SECONDS, REBUILD_SHARE = {"cpu": 3.0, "cuda": 25.0}, 0.5
"""How long it takes to build another model, and on a GPU to compile it; not more than this share of the time left."""


@dataclass(frozen=True)
class AutomaticRecipe:
    """A recipe, why it was chosen, and what is needed to choose again when the real speed is known."""

    recipe: Recipe
    reasons: list[str]
    """what was chosen and why, one line each"""
    minutes: float | None
    """the time limit that the recipe was chosen for; None if the user sets the number of steps, but no time"""
    values: dict[str, Any]
    """the sections that do not depend on the speed"""
    choice: ChosenModel
    corpus: CorpusStatistics
    overrides: Sequence[str]

    @property
    def own_steps(self) -> bool:
        """Whether the user has set the number of steps."""
        return _number_setting(self.overrides, "training.steps") is not None

    def can_change(self, seconds: float) -> bool:
        """Whether there is time for another model, and the user has not set a part of it."""
        parts = ("model.", "training.rdrop=", "training.simcut=")
        own_model = any(one.strip().startswith(parts) for one in self.overrides)
        return not own_model and REBUILD_SECONDS[self.choice.device] <= REBUILD_SHARE * seconds

    def is_too_slow(self, tokens_per_second: float, seconds: float, done: int = 0) -> bool:
        """Whether another model would be better at this speed in the seconds that are left.

        done: target tokens that the model was trained on before.
        """
        choice = self.choice
        tokens = done + TRAINING_SHARE * seconds * tokens_per_second
        if choice.rule.applies(tokens / TOO_SLOW, choice.epoch_tokens):
            return False
        other = self._choice_for(tokens_per_second, seconds)
        return self.can_change(seconds) and not other.rule.has_same_training(choice.rule)

    def refit(self, tokens_per_second: float, seconds: float) -> AutomaticRecipe:
        """The choice for the measured speed of the chosen model and the seconds that are left.

        The model is changed if the device is too slow for it, or much faster than estimated. The number of steps is
        the largest that helps; the plan reduces it to what the time allows. The tokenizer does not change.
        """
        choice = self.choice
        speed = self._speed_for(tokens_per_second)
        minutes = total_minutes(TRAINING_SHARE * seconds, choice.device)
        fitted = replace(choice, minutes=minutes, tokens_per_second=tokens_per_second, speed=speed)
        batch: int | None = self.recipe.batch_tokens
        faster = tokens_per_second > REFIT_RATIO * choice.tokens_per_second
        if (faster and self.can_change(seconds)) or self.is_too_slow(tokens_per_second, seconds):
            other = self._choice_for(tokens_per_second, seconds)
            if not other.rule.has_same_training(choice.rule):
                fitted, batch = other, None
        recipe = _complete(self.values, fitted, self.corpus, self.overrides, batch, longest=True)
        return replace(self, recipe=recipe, choice=fitted)

    def _speed_for(self, tokens_per_second: float) -> DeviceSpeed:
        """The speed of the device if the chosen model trains on this many tokens per second."""
        ratio = tokens_per_second / self.choice.tokens_per_second
        return replace(self.choice.speed, reference=self.choice.speed.reference * ratio)

    def _choice_for(self, tokens_per_second: float, seconds: float) -> ChosenModel:
        """What the rules choose at this speed if training starts again with these seconds left."""
        choice = self.choice
        left = TRAINING_SHARE * (seconds - REBUILD_SECONDS[choice.device])
        return choose(
            self.corpus,
            choice.epoch_tokens,
            choice.vocabulary,
            self._speed_for(tokens_per_second),
            total_minutes(left, choice.device),
            choice.allowed,
            choice.source_ratio,
        )


def _check_size(corpus: CorpusStatistics) -> None:
    if corpus.pairs < MIN_PAIRS:
        raise RegardError(
            f"too few pairs to train on: {corpus.pairs}; at least {MIN_PAIRS} are needed, preferably thousands"
        )
    for side, name in ((corpus.source, "sources"), (corpus.target, "targets")):
        if not side.texts:
            raise RegardError(f"nothing to train on: all {corpus.pairs:,} {name} are blank")


def _symbol_tokenizer(corpus: CorpusStatistics, overrides: Sequence[str]) -> dict[str, Any]:
    """The tokenizer section for characters or a small set of symbols."""
    assert corpus.tokenizer_kinds is not None
    kind, target_kind = corpus.tokenizer_kinds
    config = {"kind": kind, "vocab_size": corpus.symbol_vocab_size, "shared": False}
    # If the user sets a kind or a shared vocabulary, it is for both sides.
    both_sides = ("tokenizer.kind=", "tokenizer.shared=")
    one_kind = any(override.startswith(both_sides) for override in overrides)
    return config if one_kind else {**config, "target_kind": target_kind}


def _training(
    choice: ChosenModel, overrides: Sequence[str], batch: int | None, longest: bool
) -> dict[str, Any]:
    """The training section: as many steps as the time allows, in batches that leave time for ``MIN_STEPS``."""
    rule = choice.rule
    # Batches are limited by the longer side.
    tokens = choice.source_ratio * choice.tokens
    most = choice.source_ratio * rule.max_epochs * choice.epoch_tokens if longest else tokens
    largest = choice.vocabulary.tokens_per_batch
    shards = _setting(overrides, "training.sharding") == "full_shard"  # which Muon does not support
    optimizer = {"optimizer": "muon"} if rule.rates.muon and not shards else {}
    muon = bool(optimizer) and _setting(overrides, "training.optimizer") in (None, "muon")
    if batch is None:
        batch = 2 ** math.floor(math.log2(max(1.0, tokens / MIN_STEPS)))
        smallest = MIN_TOKENS_PER_BATCH[choice.device] * (2 if choice.speed.spare_cores else 1)
        if muon and tokens >= MIN_MUON_STEPS * MUON_TOKENS_PER_BATCH:
            smallest = MUON_TOKENS_PER_BATCH
        batch = min(largest, max(smallest, batch))
    steps = int(max(200, round(most / batch, -2)))
    if given := _number_setting(overrides, "training.steps"):
        steps = given
    every = max(1, steps // VALIDATIONS)
    rate = {"learning_rate": rule.rates.muon if muon else rule.rates.adam}
    return {
        "steps": steps,
        "tokens_per_batch": batch,
        "batching": choice.speed.batching,
        "precision": choice.speed.precision,
        **optimizer,
        "schedule": "cosine",
        # The factor of the schedule noam is not a learning rate.
        **({} if _setting(overrides, "training.schedule") == "noam" else rate),
        "warmup": min(1_000, steps // 10) or 1,
        "rdrop": rule.rdrop,
        "validate_every": every,
        "checkpoint_every": every,
    }


def _setting(overrides: Sequence[str], key: str) -> str | None:
    """The value that the user sets a key to."""
    parts = (one.partition("=") for one in overrides)
    values = [text.strip() for name, _, text in parts if name.strip() == key]
    return values[-1] if values else None


def _number_setting(overrides: Sequence[str], key: str) -> int | None:
    """The positive number that the user sets a key to, such as 100 or 1e2; None if it is not a number."""
    try:
        number = float(_setting(overrides, key) or "")
    except ValueError:
        return None
    return int(number) if 1 <= number < math.inf else None


def tunes_decoding(overrides: Sequence[str]) -> bool:
    """Whether the length penalty is tuned after training with an automatic recipe: unless the user sets it."""
    return _setting(overrides, "decoding.length_penalty") is None


def _evaluation(corpus: CorpusStatistics) -> dict[str, Any]:
    """The metrics, of which the first selects checkpoints; chrF, because BLEU varies on a few hundred sentences."""
    if corpus.tokenizer_kinds:
        second = "per" if corpus.tokenizer_kinds[1] == "word" else "chrf"
        return {"metrics": ["wer", second]}
    if corpus.target.unspaced > 0.5 * corpus.target.texts:
        return {"metrics": ["chrf", "bleu"], "tokenize": corpus.target.bleu_tokenizer}
    if corpus.summary_ratio:
        return {"metrics": ["rouge1", "rouge2", "rougeL"]}
    return {"metrics": ["chrf", "bleu"]}


def _reasons(
    recipe: Recipe, choice: ChosenModel, corpus: CorpusStatistics, minutes: float | None
) -> list[str]:
    """What was chosen, including the user's overrides, and why."""
    training = recipe.training
    tokens = corpus.tokens_per_target(choice.vocabulary.characters_per_token, recipe.tokenizer)
    epochs = training.steps * recipe.batch_tokens / (choice.source_ratio * corpus.pairs * tokens)
    if recipe.data.bidirectional:
        epochs /= 2  # of twice the pairs
    held_out = f"about {100 * recipe.data.hold_out:.2g}% of the pairs, held out"
    warnings = _warnings(choice, corpus) if minutes else []
    return [
        f"{corpus.pairs:,} pairs, about {tokens:.0f} tokens per target; {choice.speed.describe()}",
        f"model: {describe_model(recipe)}, for about {epochs:.0f} epochs"
        + (f" in {duration(60 * minutes)}" if minutes else ""),
        *(_alternatives(choice) if minutes else ()),
        f"tokenizer: {_describe_tokenizer(recipe.tokenizer, choice, corpus)}",
        f"training: about {training.steps:,} steps of {recipe.batch_tokens:,} tokens"
        + (", optimizer Muon" if training.optimizer == "muon" else ""),
        *_directions(recipe),
        *_cleaning(recipe, corpus),
        f"validation: {held_out if recipe.data.valid is None else 'data.valid'}",
        *warnings,
        *_copy_warning(corpus),
    ]


def _directions(recipe: Recipe) -> list[str]:
    """Why pairs are used in both directions."""
    if not recipe.data.bidirectional:
        return []
    return [
        "pairs: each is used in both directions, which makes models of small corpora better (data.bidirectional); "
        "validation is from source to target"
    ]


def _cleaning(recipe: Recipe, corpus: CorpusStatistics) -> list[str]:
    """How pairs of long sources and short targets are used."""
    clean, ratio = recipe.data.clean, corpus.summary_ratio
    if not ratio or clean.max_ratio is not None or not clean.truncate:
        return []
    return [
        f"lengths: sources are about {ratio:.0f} times as long as targets, as for summaries; no pair is dropped for "
        f"that, and sources are cut to {clean.max_tokens} tokens"
    ]


def describe_model(recipe: Recipe) -> str:
    """For example “small, 6+6 layers of width 256, dropout 0.3, R-Drop 5, both directions”."""
    model, training = recipe.model, recipe.training
    shape = f"{model.encoder_layers}+{model.decoder_layers} layers of width {model.d_model}"
    methods = _describe_methods(
        training.rdrop, training.subword_sampling, recipe.data.bidirectional
    )
    return f"{model.preset}, {shape}, dropout {model.dropout}{methods}"


def _describe_methods(rdrop: float, subword_sampling: float, bidirectional: bool) -> str:
    """What is used besides dropout, for example “, R-Drop 5, both directions”."""
    return (
        (f", R-Drop {rdrop:g}" if rdrop else "")
        + (f", subword sampling {subword_sampling:g}" if subword_sampling else "")
        + (", both directions" if bidirectional else "")
    )


def _alternatives(choice: ChosenModel) -> list[str]:
    """The better model that more time would allow, if there is one."""
    rule = choice.next_rule
    if rule is None:
        return []
    minutes = choice.minutes_for(rule)
    shape = PRESETS[rule.model["preset"]] | rule.model
    layers, width = shape["encoder_layers"], shape["d_model"]
    methods = _describe_methods(rule.rdrop, rule.subword_sampling, rule.bidirectional)
    return [
        f"a better model ({layers}+{layers} layers of width {width}{methods}) needs about {duration(60 * minutes)}: "
        f"--minutes {math.ceil(minutes)}"
    ]


def _warnings(choice: ChosenModel, corpus: CorpusStatistics) -> list[str]:
    """A warning if the time is too short for a useful model, with the time that would be long enough."""
    if choice.tokens >= min(USEFUL_TOKENS, choice.rule.max_epochs * choice.epoch_tokens):
        return []
    if corpus.tokenizer_kinds or choice.epochs > 40:
        return []
    enough = total_minutes(USEFUL_TOKENS / choice.tokens_per_second, choice.device)
    enough = max(math.ceil(enough), math.floor(choice.minutes) + 1)
    return [
        f"warning: {duration(60 * choice.minutes)} is too short to train a useful model on real text; "
        f"allow at least --minutes {enough}"
    ]


def _copy_warning(corpus: CorpusStatistics) -> list[str]:
    share = corpus.copies / max(1, corpus.pairs)
    if share < MANY_COPIES:
        return []
    return [
        f"warning: {math.floor(100 * share)}% of the targets equal their sources; is one of the files the wrong one?"
    ]


def _describe_tokenizer(
    tokenizer: TokenizerConfig, choice: ChosenModel, corpus: CorpusStatistics
) -> str:
    kind = f"{tokenizer.kind}, at most {tokenizer.vocab_size:,} entries"
    if tokenizer.target_kind:
        kind = (
            f"{tokenizer.kind} for sources, {tokenizer.target_kind} for targets, "
            f"at most {tokenizer.vocab_size:,} entries each"
        )
    vocabulary = choice.vocabulary
    if corpus.tokenizer_kinds == (tokenizer.kind, tokenizer.of_target.kind):
        return f"{kind}, because {corpus.tokenizer_reason}"
    large = corpus.vocab_size(vocabulary.vocab_size) > vocabulary.vocab_size
    if (
        tokenizer.kind == "unigram"
        and tokenizer.vocab_size == corpus.vocab_size(vocabulary.vocab_size)
        and large
    ):
        return f"{kind}, because there are {len(corpus.alphabet):,} distinct characters"
    return kind
