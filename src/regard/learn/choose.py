"""Sizes from the data, for a person who has pairs and no recipe. Every choice comes with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unicodedata import normalize

from regard.errors import RegardError
from regard.recipe import PRESETS, Data, Preset, Recipe, Texts, make_recipe
from regard.text.corpus import Pair, read_pairs
from regard.text.words import count_ideographs

FEWEST_PAIRS = 50
FEW_SYMBOLS = 200
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
    if not measured.letters + measured.signs:
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
    if measured.symbols:
        values["tokenizer"] = {"kind": "words", "size": 1_000, "shared": False}
        values["score"] = {"measures": ["wer", "per"]}
    recipe = make_recipe(values, "the chosen recipe", changes)
    return recipe, _reasons(recipe, size, measured)


def _reasons(recipe: Recipe, size: Size, measured: Measured) -> list[str]:
    """What was chosen, after the changes the user asked for, and why."""
    model, tokenizer, training = recipe.model, recipe.tokenizer, recipe.training
    suits = f" ({size.preset} suits {size.suits})"
    kind = f"{tokenizer.kind}, at most {tokenizer.size:,} entries"
    if measured.symbols:
        kind += (
            f", since both sides are made of {measured.symbols} symbols with blanks between them"
        )
    elif (
        tokenizer.kind == "unigram"
        and tokenizer.size == measured.vocabulary(size) > size.vocabulary
    ):
        kind += f", since there are {measured.alphabet:,} different letters and signs"
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


class Measured(NamedTuple):
    pairs: int
    letters: float
    """of a target, blanks counted, Chinese and Japanese signs not"""
    signs: float
    """of a target, Chinese and Japanese ones"""
    words: float
    """of a target, with blanks between them"""
    alphabet: int
    """how many different letters and signs both sides have"""
    symbols: int
    """how many there are, if both sides are nothing but a few symbols with blanks between them"""

    def tokens(self, size: Size) -> float:
        """Of a target, about, END counted."""
        if self.symbols:
            return self.words + 1
        return self.letters / size.letters_per_token + self.signs / SIGNS_PER_TOKEN + 1

    def vocabulary(self, size: Size) -> int:
        """Each letter is an entry, and pieces of several are to have room beside them, in Chinese too."""
        if self.alphabet <= size.vocabulary / 4:
            return size.vocabulary
        return 1_000 * math.ceil((self.alphabet + size.vocabulary) / 1_000)


def _measure(pairs: Iterable[Pair]) -> Measured:
    count = 0
    letters = signs = words = 0.0
    alphabet: set[str] = set()
    symbols: set[str] = set()
    for pair in pairs:
        count += 1
        source, target = normalize("NFC", pair.source), normalize("NFC", pair.target)
        ideographs = count_ideographs(target)
        signs += ideographs
        letters += len(target) - ideographs
        words += len(target.split())
        alphabet.update(source, target)
        if len(symbols) <= FEW_SYMBOLS:
            symbols.update(source.split(), target.split())
    few = len(symbols) <= FEW_SYMBOLS and count > 10 * FEW_SYMBOLS
    letters, signs, words = (some / max(1, count) for some in (letters, signs, words))
    return Measured(count, letters, signs, words, len(alphabet), len(symbols) if few else 0)
