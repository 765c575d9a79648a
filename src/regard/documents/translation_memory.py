"""Translation memory: earlier translations, looked up by exact and fuzzy matches of the source.

``data/formats/localization.py`` reads TMX files.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from regard.data.formats import pair_format
from regard.data.formats.base import NamePair, ReadOptions
from regard.data.pairs import Pair
from regard.data.words import word_and_symbol_spans
from regard.errors import RegardError

CANDIDATES = 20
"""number of entries, those with the most words in common, whose scores are computed"""
MAX_CANDIDATES = 1000
"""number of entries with a rare word in common whose common words are counted"""


class Match(NamedTuple):
    """An entry of the memory and how similar its source is to a text."""

    score: float
    """1 for the same text; otherwise 1 - edit distance in words / length of the longer text, always below 1"""
    source: str
    target: str


class TranslationMemory:
    """Pairs of texts, by source. Of several translations of a source, the most frequent one is taken."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        targets: dict[str, Counter[str]] = defaultdict(Counter)
        for pair in pairs:
            if pair.source.strip() and pair.target.strip():
                targets[_normalized(pair.source)][_normalized(pair.target)] += 1
        self._entries = {source: counts.most_common(1)[0][0] for source, counts in targets.items()}
        self._sources = list(self._entries)
        self._words = [_words(source) for source in self._sources]
        self._rows: dict[str, list[int]] = defaultdict(list)
        """the entries that contain each word"""
        for row, words in enumerate(self._words):
            for word in set(words):
                self._rows[word].append(row)

    @classmethod
    def read(cls, path: Path, languages: NamePair | None) -> TranslationMemory:
        """Read a TMX file, or pairs in another format. languages: of source and target, if they are known."""
        if not path.is_file():
            raise RegardError(f"--memory {path}: no such file")
        return cls(pair_format(path, ReadOptions(languages=languages)).read(path))

    def fingerprint(self) -> str:
        """Identifies the entries."""
        digest = hashlib.sha256()
        for source, target in self._entries.items():
            digest.update(f"{source}\t{target}\n".encode(errors="replace"))
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._entries)

    def exact(self, text: str) -> Match | None:
        """The entry with this text, apart from whitespace."""
        source = _normalized(text)
        target = self._entries.get(source)
        return None if target is None else Match(1.0, source, target)

    def best(self, text: str, threshold: float) -> Match | None:
        """The most similar entry, if its score is at least ``threshold``."""
        if match := self.exact(text):
            return match
        words = _words(text)
        # An entry above the threshold shares most words with the text, so it has one of the rarest of them.
        rarest = sorted(set(words), key=lambda word: len(self._rows.get(word, ())))
        found_rows: Counter[int] = Counter()
        for word in rarest[: len(rarest) - int(threshold * len(rarest)) + 1]:
            found_rows.update(self._rows.get(word, ()))
        candidate_rows = [row for row, _ in found_rows.most_common(MAX_CANDIDATES)]
        candidate_rows.sort(key=lambda row: -len(set(words) & set(self._words[row])))
        scored = ((similarity(words, self._words[row]), row) for row in candidate_rows[:CANDIDATES])
        score, row = max(scored, default=(0.0, -1))
        if row < 0 or score < threshold:
            return None
        source = self._sources[row]
        # The same words with other spaces or case are no exact match.
        return Match(min(score, 0.99), source, self._entries[source])


def similarity(words: list[str], others: list[str]) -> float:
    """1 - edit distance / length of the longer one."""
    if not words or not others:
        return 0.0
    previous = list(range(len(others) + 1))
    for i, word in enumerate(words, 1):
        current = [i]
        for j, other in enumerate(others, 1):
            change = previous[j - 1] + (word != other)
            current.append(min(change, previous[j] + 1, current[-1] + 1))
        previous = current
    return 1 - previous[-1] / max(len(words), len(others))


def _words(text: str) -> list[str]:
    return [text[start:end].casefold() for start, end in word_and_symbol_spans(text)]


def _normalized(text: str) -> str:
    return " ".join(text.split())
