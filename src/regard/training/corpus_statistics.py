"""Statistics of the training pairs that the automatic configuration needs: sizes, lengths, scripts, similarity."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from unicodedata import normalize

from regard.data.pairs import Pair
from regard.data.words import count_ideographs, is_unspaced_script
from regard.recipe import Recipe, TokenizerConfig

MAX_SYMBOLS = 200
"""Texts with more distinct words are not sequences of symbols such as phonemes."""
MAX_WORD_LENGTH, MAX_UNSPACED_WORD_LENGTH = 20, 6
"""Texts without spaces are words up to this mean length in characters; the second is for scripts without spaces."""
SUMMARY_RATIO = 5
"""Targets are summaries if the sources are this many times as long, in characters."""
IDEOGRAPHS_PER_TOKEN = 1.3
"""In Chinese and Japanese, where a token is one or two characters."""
COMPARED_PAIRS = 2_000
"""The first pairs, whose sides are compared."""
SAME_LANGUAGE = 0.5
"""Both sides are one language if their trigrams are so similar. With 14 corpora: 0.04 to 0.31 between two languages,
from 0.80 in text repair, and 1.00 between the sentences of a text and those that follow them."""


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

    def tokens(self, characters_per_token: float, kind: str) -> float:
        """Estimated number of tokens of all texts, EOS excluded, with a tokenizer of this kind."""
        if kind in ("word", "char"):
            return self.words if kind == "word" else self.characters + self.ideographs + self.texts
        return self.characters / characters_per_token + self.ideographs / IDEOGRAPHS_PER_TOKEN

    @property
    def width(self) -> float:
        """The mean length of a text in characters; ideographs count as three, as in ``regard data check``."""
        return (self.characters + 3 * self.ideographs) / max(1, self.texts)

    @property
    def bleu_tokenizer(self) -> str:
        """sacreBLEU's tokenizer for texts without spaces between words."""
        kana = any("\u3040" <= letter <= "\u30ff" for letter in self.alphabet)
        chinese = not kana and self.ideographs > self.characters / 2
        return "zh" if chinese else "char"

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
    count = f"{len(symbols)} different symbols" if len(symbols) > 1 else "one symbol"
    return f"sequences of {count}" if kind == "word" else "single words"


class CorpusStatistics(NamedTuple):
    pairs: int
    source: SideStatistics
    target: SideStatistics
    copies: int = 0
    """pairs whose target equals the source"""
    similarity: float = 0.0
    """how similar the character trigrams of both sides are, from 0 to 1"""

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
    def summary_ratio(self) -> float:
        """How many times as long as the targets the sources are, if these are summaries; otherwise 0."""
        ratio = self.source.width / max(1, self.target.width)
        return ratio if ratio >= SUMMARY_RATIO and self.tokenizer_kinds is None else 0.0

    @property
    def is_one_language(self) -> bool:
        """Whether sources and targets are the same language, as for text repair and dialogue."""
        return self.similarity >= SAME_LANGUAGE

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

    def vocab_size(self, usual: int) -> int:
        """A vocabulary size that leaves entries for subwords besides one for each character, also in Chinese."""
        alphabet = len(self.alphabet)
        if alphabet <= usual / 4:
            return usual
        return 1_000 * math.ceil((alphabet + usual) / 1_000)

    def tokens_per_target(self, characters_per_token: float, tokenizer: TokenizerConfig) -> float:
        """Estimated mean number of tokens of a target, EOS included."""
        return (
            self.target.tokens(characters_per_token, tokenizer.of_target.kind) / max(1, self.pairs)
            + 1
        )

    def source_ratio(self, characters_per_token: float, recipe: Recipe) -> float:
        """Estimated source tokens for each target token; 1 unless the targets are summaries."""
        if not self.summary_ratio:
            return 1.0
        kind, target_kind = recipe.tokenizer.kind, recipe.tokenizer.of_target.kind
        source = self.source.tokens(characters_per_token, kind) / max(1, self.source.texts) + 1
        target = (
            self.target.tokens(characters_per_token, target_kind) / max(1, self.target.texts) + 1
        )
        return max(1.0, min(source, recipe.data.clean.max_tokens) / target)


def collect_statistics(pairs: Iterable[Pair]) -> CorpusStatistics:
    """Count the pairs and what their texts consist of."""
    count, copies, source, target = 0, 0, SideStatistics(), SideStatistics()
    trigrams = Counter[str](), Counter[str]()
    for pair in pairs:
        count += 1
        copies += pair.source == pair.target
        source.add(normalize("NFC", pair.source))
        target.add(normalize("NFC", pair.target))
        if count <= COMPARED_PAIRS:
            for counts, text in zip(trigrams, pair, strict=False):
                counts.update(_trigrams(text))
    return CorpusStatistics(count, source, target, copies, _cosine(*trigrams))


def _trigrams(text: str) -> Iterator[str]:
    """The sequences of three characters of a text, without spaces and case."""
    letters = "".join(normalize("NFC", text).casefold().split())
    return (letters[start : start + 3] for start in range(len(letters) - 2))


def _cosine(ours: Counter[str], theirs: Counter[str]) -> float:
    """The cosine of the angle between two vectors of counts."""
    product = sum(count * theirs[key] for key, count in ours.items())
    return product / max(1.0, math.sqrt(_square(ours) * _square(theirs)))


def _square(counts: Counter[str]) -> int:
    return sum(count * count for count in counts.values())
