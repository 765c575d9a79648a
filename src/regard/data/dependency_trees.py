"""Dependency trees: the words of a text hang on one another, and pieces of text belong to words.

Word 0 is the root of CoNLL-U, on which the head of the sentence hangs. EOS takes its place: it stands at depth 0, and
every word is as far from it as it is deep.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from regard.data.conllu import ParsedSentence
from regard.errors import RegardError

Short = npt.NDArray[np.int16]


class TokenTree(NamedTuple):
    """The tree of a text cut into pieces."""

    words: list[int]
    """the word, counted from 1, that each piece belongs to"""
    heads: list[int]
    """the word on which each word hangs; 0 is the root"""

    def cut(self, longest: int | None) -> TokenTree:
        """Of the first pieces only; the words stay, for they may be on the way between others."""
        return self._replace(words=self.words[:longest])


# ---------------------------------------------------------------------------------------------
# From a parse to the pieces


def check_parse(text: str, parsed: ParsedSentence, where: str) -> None:
    """That the words of a parse spell the text, white space aside, and that they make a tree."""
    words, letters = _letters("".join(form for form, _ in forms(parsed))), _letters(text)
    if words != letters:
        same = next(
            (n for n, (a, b) in enumerate(zip(words, letters, strict=False)) if a != b),
            min(len(words), len(letters)),
        )
        raise RegardError(
            f"{where}: the parse is of another text: it has {_excerpt(words, same)} where the text has "
            f"{_excerpt(letters, same)}"
        )
    count = len(parsed.heads)
    if wrong := [head for head in parsed.heads if head > count]:
        raise RegardError(f"{where}: a word hangs on word {wrong[0]}, but there are only {count}")
    if lost := sorted(set(range(1, count + 1)) - _from_the_root(parsed.heads)):
        raise RegardError(
            f"{where}: no tree: from word {lost[0]} ({parsed.words[lost[0] - 1]!r}) no way leads to the root"
        )


def forms(parsed: ParsedSentence) -> Iterator[tuple[str, int]]:
    """What is written, and the number of its (first) word."""
    number = 1
    while number <= len(parsed.words):
        if number in parsed.written:
            form, last = parsed.written[number]
            yield form, number
            number = max(last, number) + 1
        else:
            yield parsed.words[number - 1], number
            number += 1


class Cut(Protocol):
    """What is asked of a vocabulary; white space counts as no letter."""

    def starts(self, text: str) -> list[int]:
        """How many letters stand before each piece."""

    def letters(self, text: str) -> int:
        """How many there are in all."""


def token_tree(text: str, parsed: ParsedSentence | None, cut: Cut) -> TokenTree:
    """The tree of a text in pieces. A piece belongs to the word that its first letter is of."""
    starts = np.array(cut.starts(text), dtype=np.int64)
    if parsed is None:  # a blank line: white space that belongs to no word
        return TokenTree([0] * len(starts), [])
    written = list(forms(parsed))
    ends = np.cumsum([cut.letters(form) for form, _ in written])
    at = np.searchsorted(ends, starts, side="right")
    # White space at the end goes to the last word.
    words = [written[place][1] for place in np.minimum(at, len(written) - 1)]
    return TokenTree(words, parsed.heads)


def _letters(text: str) -> str:
    return "".join(unicodedata.normalize("NFC", text).split())


def _excerpt(letters: str, start: int) -> str:
    return repr(letters[start : start + 12]) if letters[start:] else "nothing more"


def _from_the_root(heads: Sequence[int]) -> set[int]:
    """The words from which the way up ends at the root."""
    found = {0}
    for word in range(1, len(heads) + 1):
        way: list[int] = []
        while word not in found and word not in way:
            way.append(word)
            word = heads[word - 1]
        if word in found:
            found.update(way)
    return found


# ---------------------------------------------------------------------------------------------
# Depth and distance, for all rows of a batch at once


def depth_and_distance(
    words: npt.NDArray[np.int64], heads: npt.NDArray[np.int64]
) -> tuple[Short, Short]:
    """Of pieces: depth [B, S] and distance [B, S, S], from the query in the row to the key in the column.

    words [B, S] tells the word of each piece. heads [B, N + 1] tells the head of each word, word 0 hanging on itself;
    rows with fewer words are filled up with 0.

    The size of a distance is the number of branches between the two words. Its sign follows Wang et al. (2019): where
    one word hangs below the other, below is positive and above is negative; else it is the order of the text.
    """
    above = _above(heads)
    depth = above.sum(-1).astype(np.int16) - np.int16(1)
    # All that stand above both of two words are the way from the root to where their ways part.
    shared = (above @ above.transpose(0, 2, 1)).astype(np.int16) - np.int16(1)
    query, key, order = depth[:, :, None], depth[:, None, :], np.arange(heads.shape[1])
    branches = query + key - 2 * shared
    later = np.where(order[:, None] < order, np.int16(1), np.int16(-1))
    one_above_the_other = shared == np.minimum(query, key)
    distance = np.where(one_above_the_other, key - query, later * branches)
    row = np.arange(len(words))[:, None]
    pairs = row[:, :, None], words[:, :, None], words[:, None, :]
    return depth[row, words], distance[pairs]


def _above(heads: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """[B, N + 1, N + 1]: 1 where the column is the word of the row, or stands above it in the tree."""
    batch, count = heads.shape
    # Floats, because NumPy multiplies no other numbers fast.
    above = np.zeros((batch, count, count), dtype=np.float32)
    row, word = np.arange(batch)[:, None], np.arange(count)
    reached = np.broadcast_to(word, heads.shape)
    above[row, word, reached] = 1
    while reached.any():
        reached = np.take_along_axis(heads, reached, axis=1)
        above[row, word, reached] = 1
    return above
