"""Automatic configuration: a complete recipe from training data alone, with the reason for every choice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unicodedata import normalize

from regard.data.corpus import read_pairs
from regard.data.pairs import Pair
from regard.data.segmentation import count_ideographs, is_unspaced_script
from regard.errors import RegardError
from regard.recipe import (
    PRESETS,
    DataConfig,
    DataFiles,
    Preset,
    Recipe,
    TokenizerConfig,
    make_recipe,
)

MIN_PAIRS = 50
MAX_SYMBOLS = 200
"""Texts with more distinct words are not sequences of symbols such as phonemes."""
MAX_WORD_LENGTH, MAX_UNSPACED_WORD_LENGTH = 20, 6
"""Texts without spaces are words up to this mean length in characters; the second is for scripts without spaces."""
SYMBOL_DROPOUT = 0.1
"""Characters and symbols are so frequent that a higher dropout slows training down too much."""
IDEOGRAPHS_PER_TOKEN = 1.3
"""In Chinese and Japanese, where a token is one or two characters."""


@dataclass(frozen=True)
class SizeTier:
    """Settings that suit a corpus of up to ``max_pairs`` pairs."""

    max_pairs: float
    preset: Preset
    vocab_size: int
    characters_per_token: float
    """with this vocabulary size, spaces included"""
    dropout: float
    tokens_per_batch: int
    epochs: int
    peak_learning_rate: float

    @property
    def description(self) -> str:
        infinite = math.isinf(self.max_pairs)
        return "millions of pairs" if infinite else f"up to {self.max_pairs:,.0f} pairs"


SIZE_TIERS = (
    SizeTier(5_000, "tiny", 1_000, 2.8, 0.3, 1_024, 100, 0.002),
    SizeTier(50_000, "tiny", 4_000, 4.2, 0.3, 4_096, 60, 0.002),
    SizeTier(500_000, "small", 8_000, 4.7, 0.2, 8_192, 30, 0.002),
    SizeTier(5_000_000, "base", 16_000, 5.0, 0.1, 16_384, 15, 0.001),
    SizeTier(math.inf, "base", 32_000, 5.3, 0.1, 25_000, 8, 0.001),
)


def autoconfigure(
    files: DataFiles,
    root: str,
    overrides: Sequence[str] = (),
    languages: tuple[str, str] | None = None,
    pairs: Iterable[Pair] | None = None,
) -> tuple[Recipe, list[str]]:
    """A complete recipe for training files under ``root``, and the reasons, one line each.

    ``overrides`` are ``key=value`` settings of the user, ``languages`` the codes of source and target, if they are
    known, and ``pairs`` the pairs of the files, if the caller reads them.
    """
    data = DataConfig(root=root, train=files, languages=languages)
    corpus = collect_statistics(pairs or read_pairs(files, data, section=""))
    count = corpus.pairs
    if count < MIN_PAIRS:
        raise RegardError(
            f"too few pairs to train on: {count}; give at least {MIN_PAIRS}, preferably thousands"
        )
    for side, name in ((corpus.source, "sources"), (corpus.target, "targets")):
        if not side.texts:
            raise RegardError(f"nothing to train on: all {count:,} {name} are blank")
    tier = next(tier for tier in SIZE_TIERS if count <= tier.max_pairs)
    hold_out = min(0.05, max(1_000 / count, 0.001))
    values: dict[str, Any] = {
        "data": {"root": root, "train": files.model_dump(), "hold_out": round(hold_out, 4)},
        "tokenizer": {"kind": "unigram", "vocab_size": corpus.vocab_size(tier)},
        # Pre-norm is stable even in a short run with a high learning rate.
        "model": {"preset": tier.preset, "dropout": tier.dropout, "norm_order": "pre"},
    }
    if languages:
        values["data"]["languages"] = languages
    if corpus.tokenizer_kinds:
        values["tokenizer"] = _symbol_tokenizer(corpus, overrides)
        second = "per" if corpus.tokenizer_kinds[1] == "word" else "chrf"
        values["evaluation"] = {"metrics": ["wer", second]}
        values["model"]["dropout"] = SYMBOL_DROPOUT
    partial = make_recipe(values, "the automatic recipe", overrides)
    tokens = count * corpus.tokens_per_target(tier, partial.tokenizer)
    # If the user sets fewer steps, the warmup must not be longer.
    values["training"] = _training(tier, tokens, max_warmup=partial.training.steps)
    recipe = make_recipe(values, "the automatic recipe", overrides)
    return recipe, _reasons(recipe, tier, corpus)


def _symbol_tokenizer(corpus: CorpusStatistics, overrides: Sequence[str]) -> dict[str, Any]:
    """The tokenizer section for characters or a small set of symbols."""
    assert corpus.tokenizer_kinds is not None
    kind, target_kind = corpus.tokenizer_kinds
    config = {"kind": kind, "vocab_size": corpus.symbol_vocab_size, "shared": False}
    # If the user sets a kind or a shared vocabulary, it is for both sides.
    both_sides = ("tokenizer.kind=", "tokenizer.shared=")
    one_kind = any(override.startswith(both_sides) for override in overrides)
    return config if one_kind else {**config, "target_kind": target_kind}


def _training(tier: SizeTier, tokens: float, max_warmup: int) -> dict[str, Any]:
    """The training section for a corpus with this many target tokens."""
    steps = max(200, round(tier.epochs * tokens / tier.tokens_per_batch, -2))
    every = max(50, round(steps / 40, -1))
    warmup = int(min(4_000, max(100, steps // 10), max_warmup))
    d_model = PRESETS[tier.preset]["d_model"]
    return {
        "steps": int(steps),
        "tokens_per_batch": tier.tokens_per_batch,
        "warmup": warmup,
        # The factor with which the noam schedule peaks at the tier's learning rate.
        "learning_rate": round(tier.peak_learning_rate * math.sqrt(d_model * warmup), 3),
        "validate_every": int(every),
        "checkpoint_every": int(every),
        "patience": 10,
    }


def _reasons(recipe: Recipe, tier: SizeTier, corpus: CorpusStatistics) -> list[str]:
    """What was chosen, including the user's overrides, and why."""
    model, tokenizer, training = recipe.model, recipe.tokenizer, recipe.training
    kind = f"{tokenizer.kind}, at most {tokenizer.vocab_size:,} entries"
    if tokenizer.target_kind:
        kind = (
            f"{tokenizer.kind} for sources, {tokenizer.target_kind} for targets, "
            f"at most {tokenizer.vocab_size:,} entries each"
        )
    if corpus.tokenizer_kinds == (tokenizer.kind, tokenizer.of_target.kind):
        kind += f", because {corpus.tokenizer_reason}"
    elif (
        tokenizer.kind == "unigram"
        and tokenizer.vocab_size == corpus.vocab_size(tier) > tier.vocab_size
    ):
        kind += f", because there are {len(corpus.alphabet):,} different characters"
    tokens = corpus.tokens_per_target(tier, tokenizer)
    epochs = training.steps * recipe.batch_tokens / (corpus.pairs * tokens)
    early = (
        f"; stops early after {training.patience} validations without improvement"
        if training.patience
        else ""
    )
    return [
        f"{corpus.pairs:,} pairs, about {tokens:.0f} tokens each",
        f"model: {model.preset}, dropout {model.dropout} ({tier.preset} suits {tier.description})",
        f"tokenizer: {kind}",
        f"training: {training.steps:,} steps of {recipe.batch_tokens:,} tokens "
        f"(about {epochs:.0f} epochs){early}",
        f"validation: about {recipe.data.hold_out:.1%} of the pairs, held out",
    ]


# ---------------------------------------------------------------------------------------------
# Statistics of the training data


@dataclass
class SideStatistics:
    """Counts over the texts of one side of the pairs; blank texts are not counted."""

    texts: int = 0
    characters: int = 0
    """spaces included, ideographs not"""
    ideographs: int = 0
    """Chinese and Japanese characters"""
    unspaced: int = 0
    """texts that start in a script without spaces between words"""
    words: int = 0
    """separated by spaces"""
    single_words: int = 0
    """texts of one word"""
    alphabet: set[str] = field(default_factory=set)
    symbols: set[str] = field(default_factory=set)
    """the distinct words; incomplete if there are more than MAX_SYMBOLS"""

    def add(self, text: str) -> None:
        if not (words := text.split()):
            return
        ideographs = count_ideographs(text)
        self.texts += 1
        self.characters += len(text) - ideographs
        self.ideographs += ideographs
        self.unspaced += is_unspaced_script(words[0][0])
        self.words += len(words)
        self.single_words += len(words) == 1
        self.alphabet.update(text)
        if len(self.symbols) <= MAX_SYMBOLS:
            self.symbols.update(words)

    @property
    def tokenizer_kind(self) -> str | None:
        """``word`` for symbols, ``char`` for single words, None for sentences."""
        if is_symbol_set(self.symbols, self.texts):
            return "word"
        mostly_unspaced = self.unspaced > 0.5 * self.texts
        max_length = MAX_UNSPACED_WORD_LENGTH if mostly_unspaced else MAX_WORD_LENGTH
        short = self.characters + self.ideographs <= max_length * self.texts
        return "char" if self.single_words >= 0.95 * self.texts and short else None


def is_symbol_set(words: set[str], texts: int) -> bool:
    """Whether there are so few distinct words in this many texts that hardly any other word exists."""
    return len(words) <= MAX_SYMBOLS and texts > 10 * len(words)


def _describe_kind(kind: str, symbols: set[str]) -> str:
    count = f"{len(symbols)} symbols" if len(symbols) > 1 else "one symbol"
    return f"sequences of {count}" if kind == "word" else "single words"


class CorpusStatistics(NamedTuple):
    pairs: int
    source: SideStatistics
    target: SideStatistics

    @property
    def alphabet(self) -> set[str]:
        """The distinct characters of both sides."""
        return self.source.alphabet | self.target.alphabet

    @property
    def symbols(self) -> set[str]:
        """The distinct words of both sides."""
        return self.source.symbols | self.target.symbols

    @property
    def tokenizer_kinds(self) -> tuple[str, str] | None:
        """The tokenizer kinds of source and target; None, for subwords on both sides, if one side is sentences."""
        kind, target_kind = self.source.tokenizer_kind, self.target.tokenizer_kind
        if kind is None or target_kind is None:
            return None
        # Toy sentences also have few words on each side: both sides together must have few.
        if kind == target_kind == "word" and not is_symbol_set(self.symbols, self.pairs):
            return None
        return kind, target_kind

    @property
    def tokenizer_reason(self) -> str:
        """Why ``tokenizer_kinds`` were chosen."""
        assert self.tokenizer_kinds is not None
        kind, target_kind = self.tokenizer_kinds
        if kind == target_kind:
            return f"both sides are {_describe_kind(kind, self.symbols)}"
        source = _describe_kind(kind, self.source.symbols)
        target = _describe_kind(target_kind, self.target.symbols)
        return f"sources are {source} and targets are {target}"

    @property
    def symbol_vocab_size(self) -> int:
        """Enough for a small set of symbols, or for every character and the 256 bytes for unknown characters."""
        return 1_000 * math.ceil((len(self.alphabet) + 300) / 1_000)

    def vocab_size(self, tier: SizeTier) -> int:
        """A vocabulary size that leaves entries for subwords besides one for each character, also in Chinese."""
        alphabet = len(self.alphabet)
        if alphabet <= tier.vocab_size / 4:
            return tier.vocab_size
        return 1_000 * math.ceil((alphabet + tier.vocab_size) / 1_000)

    def tokens_per_target(self, tier: SizeTier, tokenizer: TokenizerConfig) -> float:
        """Estimated mean number of tokens of a target, EOS included."""
        target = self.target
        exact = {
            "word": target.words,
            "char": target.characters + target.ideographs + target.texts,
        }
        subwords = (
            target.characters / tier.characters_per_token + target.ideographs / IDEOGRAPHS_PER_TOKEN
        )
        return exact.get(tokenizer.of_target.kind, subwords) / max(1, self.pairs) + 1


def collect_statistics(pairs: Iterable[Pair]) -> CorpusStatistics:
    """Count the pairs and what their texts consist of."""
    count, source, target = 0, SideStatistics(), SideStatistics()
    for pair in pairs:
        count += 1
        source.add(normalize("NFC", pair.source))
        target.add(normalize("NFC", pair.target))
    return CorpusStatistics(count, source, target)
