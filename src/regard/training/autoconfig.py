"""Sizes from the data, for a person who has pairs and no recipe. Every choice comes with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unicodedata import normalize

from regard.data.corpus import Pair, read_pairs
from regard.data.words import count_ideographs, unspaced
from regard.errors import RegardError
from regard.recipe import (
    PRESETS,
    Data,
    DataFiles,
    Preset,
    Recipe,
    Tokenizer,
    make_recipe,
)

FEWEST_PAIRS = 50
FEW_SYMBOLS = 200
LONGEST_WORD, LONGEST_UNSPACED = 20, 6
"""letters, in the mean, of texts without blanks that are words; the second where a script sets no blanks anyway"""
DROPOUT_OF_SYMBOLS = 0.1
"""letters and symbols come so often that more keeps a model from learning them in the time people have"""
SIGNS_PER_TOKEN = 1.3
"""in Chinese and Japanese, where a token is a sign or two"""


@dataclass(frozen=True)
class Size:
    """What suits a corpus of up to so many pairs."""

    pairs: float
    preset: Preset
    vocabulary: int
    letters_per_token: float
    """with such a vocabulary, blanks counted"""
    dropout: float
    tokens_per_batch: int
    epochs: int
    highest_rate: float

    @property
    def suits(self) -> str:
        return "millions of pairs" if math.isinf(self.pairs) else f"up to {self.pairs:,.0f} pairs"


SIZES = (
    Size(5_000, "tiny", 1_000, 2.8, 0.3, 1_024, 100, 0.002),
    Size(50_000, "tiny", 4_000, 4.2, 0.3, 4_096, 60, 0.002),
    Size(500_000, "small", 8_000, 4.7, 0.2, 8_192, 30, 0.002),
    Size(5_000_000, "base", 16_000, 5.0, 0.1, 16_384, 15, 0.001),
    Size(math.inf, "base", 32_000, 5.3, 0.1, 25_000, 8, 0.001),
)


def choose(texts: DataFiles, root: str, changes: Sequence[str] = ()) -> tuple[Recipe, list[str]]:
    """A complete recipe for these pairs, and why."""
    measured = _measure(read_pairs(texts, Data(root=root, train=texts), section=""))
    count = measured.pairs
    if count < FEWEST_PAIRS:
        raise RegardError(
            f"too few pairs to learn from: {count}; give {FEWEST_PAIRS} or more, best thousands"
        )
    for side, name in ((measured.source, "sources"), (measured.target, "targets")):
        if not side.texts:
            raise RegardError(f"nothing to learn: all {count:,} {name} are blank")
    size = next(size for size in SIZES if count <= size.pairs)
    hold_out = min(0.05, max(1_000 / count, 0.001))
    values: dict[str, Any] = {
        "data": {"root": root, "train": texts.model_dump(), "hold_out": round(hold_out, 4)},
        "tokenizer": {"kind": "unigram", "vocab_size": measured.vocabulary(size)},
        # With the norm before each sub-layer even short trainings at a high rate are stable.
        "model": {"preset": size.preset, "dropout": size.dropout, "norm_order": "pre"},
    }
    if measured.kinds:
        values["tokenizer"] = _of_symbols(measured, changes)
        unit = "per" if measured.kinds[1] == "word" else "chrf"
        values["score"] = {"metrics": ["wer", unit]}
        values["model"]["dropout"] = DROPOUT_OF_SYMBOLS
    tokenizer = make_recipe(values, "the chosen recipe", changes).tokenizer
    values["training"] = _training(size, count * measured.tokens(size, tokenizer))
    recipe = make_recipe(values, "the chosen recipe", changes)
    return recipe, _reasons(recipe, size, measured)


def _of_symbols(measured: Measured, changes: Sequence[str]) -> dict[str, Any]:
    """A tokenizer for letters or a few symbols."""
    assert measured.kinds is not None
    kind, target_kind = measured.kinds
    chosen = {"kind": kind, "vocab_size": measured.entries, "shared": False}
    # Who wishes for a kind, or for one vocabulary, has no use for two kinds.
    own = ("tokenizer.kind=", "tokenizer.shared=")
    one = any(change.startswith(own) for change in changes)
    return chosen if one else {**chosen, "target_kind": target_kind}


def _training(size: Size, tokens: float) -> dict[str, Any]:
    steps = max(200, round(size.epochs * tokens / size.tokens_per_batch, -2))
    every = max(50, round(steps / 40, -1))
    warmup = int(min(4_000, max(100, steps // 10)))
    width = PRESETS[size.preset]["d_model"]
    return {
        "steps": int(steps),
        "tokens_per_batch": size.tokens_per_batch,
        "warmup": warmup,
        "learning_rate": round(size.highest_rate * math.sqrt(width * warmup), 3),
        "validate_every": int(every),
        "checkpoint_every": int(every),
        "patience": 10,
    }


def _reasons(recipe: Recipe, size: Size, measured: Measured) -> list[str]:
    """What was chosen, after the changes the user asked for, and why."""
    model, tokenizer, training = recipe.model, recipe.tokenizer, recipe.training
    suits = f" ({size.preset} suits {size.suits})"
    kind = f"{tokenizer.kind}, at most {tokenizer.vocab_size:,} entries"
    if tokenizer.target_kind:
        kind = (
            f"{tokenizer.kind} for sources, {tokenizer.target_kind} for targets, "
            f"at most {tokenizer.vocab_size:,} entries each"
        )
    if measured.kinds == (tokenizer.kind, tokenizer.of_target.kind):
        kind += f", since {measured.why}"
    elif (
        tokenizer.kind == "unigram"
        and tokenizer.vocab_size == measured.vocabulary(size) > size.vocabulary
    ):
        kind += f", since there are {len(measured.alphabet):,} different letters and signs"
    tokens = measured.tokens(size, tokenizer)
    passes = training.steps * training.tokens_per_batch / (measured.pairs * tokens)
    early = f", fewer if {training.patience} validations bring nothing" if training.patience else ""
    return [
        f"{measured.pairs:,} pairs, about {tokens:.0f} tokens each",
        f"model: {model.preset}, dropout {model.dropout}{suits}",
        f"tokenizer: {kind}",
        f"training: {training.steps:,} steps of {training.tokens_per_batch:,} tokens "
        f"({passes:.0f} times through the data){early}",
        f"validation: about {recipe.data.hold_out:.1%} of the pairs, held out",
    ]


@dataclass
class Side:
    """What one side of the pairs is made of, counted text by text; blank ones do not count."""

    texts: int = 0
    letters: int = 0
    """blanks counted, Chinese and Japanese signs not"""
    signs: int = 0
    """Chinese and Japanese ones"""
    unspaced: int = 0
    """texts that begin in a script which sets no blanks"""
    words: int = 0
    """with blanks between them"""
    single: int = 0
    """texts of one word"""
    alphabet: set[str] = field(default_factory=set)
    symbols: set[str] = field(default_factory=set)
    """all different words; where there are many, not all"""

    def read(self, text: str) -> None:
        if not (words := text.split()):
            return
        signs = count_ideographs(text)
        self.texts += 1
        self.letters += len(text) - signs
        self.signs += signs
        self.unspaced += unspaced(words[0][0])
        self.words += len(words)
        self.single += len(words) == 1
        self.alphabet.update(text)
        if len(self.symbols) <= FEW_SYMBOLS:
            self.symbols.update(words)

    @property
    def kind(self) -> str | None:
        """What it is to be cut into; None: it is sentences."""
        if few(self.symbols, self.texts):
            return "word"
        longest = LONGEST_UNSPACED if self.unspaced > 0.5 * self.texts else LONGEST_WORD
        short = self.letters + self.signs <= longest * self.texts
        return "char" if self.single >= 0.95 * self.texts and short else None


def few(symbols: set[str], texts: int) -> bool:
    """Whether each of them comes so often that there are hardly any others."""
    return len(symbols) <= FEW_SYMBOLS and texts > 10 * len(symbols)


def _made_of(kind: str, symbols: set[str]) -> str:
    several = f"{len(symbols)} symbols" if len(symbols) > 1 else "one symbol"
    return f"made of {several}, blanks between them" if kind == "word" else "single words"


class Measured(NamedTuple):
    pairs: int
    source: Side
    target: Side

    @property
    def alphabet(self) -> set[str]:
        """The different letters and signs of both sides."""
        return self.source.alphabet | self.target.alphabet

    @property
    def kinds(self) -> tuple[str, str] | None:
        """What each side is to be cut into; None where one is sentences: then both into pieces."""
        kind, target_kind = self.source.kind, self.target.kind
        if kind is None or target_kind is None:
            return None
        # Toy sentences have few words on each side, too: both sides together must have few.
        if kind == target_kind == "word" and not few(self.symbols, self.pairs):
            return None
        return kind, target_kind

    @property
    def symbols(self) -> set[str]:
        return self.source.symbols | self.target.symbols

    @property
    def entries(self) -> int:
        """Enough for a few symbols, or for every letter beside the bytes of those never seen."""
        return 1_000 * math.ceil((len(self.alphabet) + 300) / 1_000)

    @property
    def why(self) -> str:
        """Of the kinds."""
        assert self.kinds is not None
        kind, target_kind = self.kinds
        if kind == target_kind:
            return f"both sides are {_made_of(kind, self.symbols)}"
        source = _made_of(kind, self.source.symbols)
        return f"sources are {source}, targets {_made_of(target_kind, self.target.symbols)}"

    def tokens(self, size: Size, tokenizer: Tokenizer) -> float:
        """Of a target, about, EOS counted."""
        target = self.target
        said = {
            "word": target.words,
            "char": target.letters + target.signs + target.texts,
        }
        pieces = target.letters / size.letters_per_token + target.signs / SIGNS_PER_TOKEN
        return said.get(tokenizer.of_target.kind, pieces) / max(1, self.pairs) + 1

    def vocabulary(self, size: Size) -> int:
        """Each letter is an entry, and pieces of several are to have room beside them, in Chinese too."""
        alphabet = len(self.alphabet)
        if alphabet <= size.vocabulary / 4:
            return size.vocabulary
        return 1_000 * math.ceil((alphabet + size.vocabulary) / 1_000)


def _measure(pairs: Iterable[Pair]) -> Measured:
    count, source, target = 0, Side(), Side()
    for pair in pairs:
        count += 1
        source.read(normalize("NFC", pair.source))
        target.read(normalize("NFC", pair.target))
    return Measured(count, source, target)
