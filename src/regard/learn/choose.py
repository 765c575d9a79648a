"""Sizes from the data, for a person who has pairs and no recipe. Every choice comes with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unicodedata import normalize

from regard.errors import RegardError
from regard.recipe import (
    PRESETS,
    Data,
    Preset,
    Recipe,
    Texts,
    Tokenizer,
    TokenizerKind,
    make_recipe,
)
from regard.text.corpus import Pair, read_pairs
from regard.text.words import count_ideographs

FEWEST_PAIRS = 50
FEW_SYMBOLS = 200
LONGEST_WORD = 20
"""letters: where single texts are longer in the mean they are sentences of a script without blanks, such as Thai"""
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


def choose(texts: Texts, root: str, changes: Sequence[str] = ()) -> tuple[Recipe, list[str]]:
    """A complete recipe for these pairs, and why."""
    measured = _measure(read_pairs(texts, Data(root=root, train=texts), section=""))
    count = measured.pairs
    if count < FEWEST_PAIRS:
        raise RegardError(
            f"{count} pairs are too few to learn from: give {FEWEST_PAIRS} or more, best thousands"
        )
    if not measured.target.letters + measured.target.signs:
        raise RegardError(f"nothing to learn: all {count:,} targets are blank")
    size = next(size for size in SIZES if count <= size.pairs)
    tokens = count * measured.tokens(size)
    steps = max(200, round(size.epochs * tokens / size.tokens_per_batch, -2))
    every = max(50, round(steps / 40, -1))
    warmup = int(min(4_000, max(100, steps // 10)))
    width = PRESETS[size.preset]["width"]
    hold_out = min(0.05, max(1_000 / count, 0.001))
    values: dict[str, Any] = {
        "data": {"root": root, "train": texts.model_dump(), "hold_out": round(hold_out, 4)},
        "tokenizer": {"kind": "unigram", "size": measured.vocabulary(size)},
        # With the norm before each sub-layer even short trainings at a high rate are stable.
        "model": {"preset": size.preset, "dropout": size.dropout, "norm_place": "before"},
        "training": {
            "steps": int(steps),
            "tokens_per_batch": size.tokens_per_batch,
            "warmup": warmup,
            "rate": round(size.highest_rate * math.sqrt(width * warmup), 3),
            "validate_every": int(every),
            "checkpoint_every": int(every),
            "patience": 10,
        },
    }
    if kinds := measured.kinds:
        kind, target_kind = kinds
        values["tokenizer"] = {"kind": kind, "size": measured.entries, "shared": False}
        values["tokenizer"]["target_kind"] = target_kind if target_kind != kind else None
        values["score"] = {"measures": ["wer", "per" if target_kind == "words" else "chrf"]}
    recipe = make_recipe(values, "the chosen recipe", changes)
    return recipe, _reasons(recipe, size, measured)


def _reasons(recipe: Recipe, size: Size, measured: Measured) -> list[str]:
    """What was chosen, after the changes the user asked for, and why."""
    model, tokenizer, training = recipe.model, recipe.tokenizer, recipe.training
    suits = f" ({size.preset} suits {size.suits})"
    kind = f"{tokenizer.kind}, at most {tokenizer.size:,} entries"
    if measured.kinds == (tokenizer.kind, tokenizer.of_target.kind):
        kind = measured.why(tokenizer)
    elif (
        tokenizer.kind == "unigram"
        and tokenizer.size == measured.vocabulary(size) > size.vocabulary
    ):
        kind += f", since there are {len(measured.alphabet):,} different letters and signs"
    tokens = measured.tokens(size)
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
    """What one side of the pairs is made of, counted text by text."""

    texts: int = 0
    letters: int = 0
    """blanks counted, Chinese and Japanese signs not"""
    signs: int = 0
    """Chinese and Japanese ones"""
    words: int = 0
    """with blanks between them"""
    single: int = 0
    """texts of one word"""
    alphabet: set[str] = field(default_factory=set)
    symbols: set[str] = field(default_factory=set)
    """all different words; where there are many, not all"""

    def read(self, text: str) -> None:
        words, signs = text.split(), count_ideographs(text)
        self.texts += 1
        self.letters += len(text) - signs
        self.signs += signs
        self.words += len(words)
        self.single += len(words) == 1
        self.alphabet.update(text)
        if len(self.symbols) <= FEW_SYMBOLS:
            self.symbols.update(words)

    @property
    def kind(self) -> TokenizerKind | None:
        """What it is to be cut into; None: it is sentences."""
        if len(self.symbols) <= FEW_SYMBOLS and self.texts > 10 * FEW_SYMBOLS:
            return "words"
        short = self.letters <= LONGEST_WORD * self.texts
        return (
            "characters" if self.single >= 0.95 * self.texts and short and not self.signs else None
        )


def _made_of(kind: TokenizerKind, symbols: set[str]) -> str:
    several = f"made of {len(symbols)} symbols with blanks between them"
    return several if kind == "words" else "single words"


class Measured(NamedTuple):
    source: Side
    target: Side

    @property
    def pairs(self) -> int:
        return self.target.texts

    @property
    def alphabet(self) -> set[str]:
        """The different letters and signs of both sides."""
        return self.source.alphabet | self.target.alphabet

    @property
    def kinds(self) -> tuple[TokenizerKind, TokenizerKind] | None:
        """What each side is to be cut into; None where one is sentences: then both into pieces."""
        kind, target_kind = self.source.kind, self.target.kind
        return (kind, target_kind) if kind and target_kind else None

    @property
    def entries(self) -> int:
        """Enough for a few symbols, or for every letter beside the bytes of those never seen."""
        return 1_000 * math.ceil((len(self.alphabet) + 300) / 1_000)

    def why(self, tokenizer: Tokenizer) -> str:
        """Of the kinds."""
        most = f"at most {tokenizer.size:,} entries"
        if not tokenizer.target_kind:
            both = _made_of(tokenizer.kind, self.source.symbols | self.target.symbols)
            return f"{tokenizer.kind}, {most}, since both sides are {both}"
        source = _made_of(tokenizer.kind, self.source.symbols)
        target = _made_of(tokenizer.target_kind, self.target.symbols)
        return (
            f"{tokenizer.kind} for sources, which are {source}, and {tokenizer.target_kind} for "
            f"targets, which are {target}; {most} each"
        )

    def tokens(self, size: Size) -> float:
        """Of a target, about, END counted."""
        target = self.target
        said = target.letters / size.letters_per_token + target.signs / SIGNS_PER_TOKEN
        if self.kinds:
            said = target.words if target.kind == "words" else target.letters + target.texts
        return said / max(1, target.texts) + 1

    def vocabulary(self, size: Size) -> int:
        """Each letter is an entry, and pieces of several are to have room beside them, in Chinese too."""
        alphabet = len(self.alphabet)
        if alphabet <= size.vocabulary / 4:
            return size.vocabulary
        return 1_000 * math.ceil((alphabet + size.vocabulary) / 1_000)


def _measure(pairs: Iterable[Pair]) -> Measured:
    measured = Measured(Side(), Side())
    for pair in pairs:
        for side, text in zip(measured, pair[:2], strict=True):
            side.read(normalize("NFC", text))
    return measured
