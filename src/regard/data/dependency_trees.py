"""Dependency trees of sentences, and their depths and distances between subword tokens.

Words are numbered from 1. Word 0 is the root of CoNLL-U, which the head of the sentence depends on. The EOS token
stands for the root: its depth is 0, and its distance to every word is that word's depth.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from regard.errors import RegardError

Int16Array = npt.NDArray[np.int16]


class MultiwordToken(NamedTuple):
    """Several words written as one, such as German *zum* for *zu dem*."""

    form: str
    last: int
    """the number of its last word"""


class ParsedSentence(NamedTuple):
    """A sentence with its part-of-speech tags and dependency tree."""

    words: list[str]
    tags: list[str]
    """the universal part-of-speech tag of each word"""
    heads: list[int]
    """the head of each word, numbered from 1; 0 for the root"""
    multiword_tokens: Mapping[int, MultiwordToken] = MappingProxyType({})
    """words that are written as one, by the number of the first word"""
    line: int = 0
    """the line of the file where the sentence begins"""


class TokenTree(NamedTuple):
    """The dependency tree of a text that is split into subword tokens."""

    words: list[int]
    """the word that each token belongs to, numbered from 1"""
    heads: list[int]
    """the head of each word; 0 is the root"""

    def truncate(self, max_tokens: int | None) -> TokenTree:
        """The tree of the first tokens. All words stay, because paths between other words may lead through them."""
        return self._replace(words=self.words[:max_tokens])


# ---------------------------------------------------------------------------------------------
# From a parse to tokens


def check_parse(text: str, parsed: ParsedSentence, where: str) -> None:
    """Check that the words of a parse spell the text, except for whitespace, and that they form a tree.

    ``where`` locates the parse in error messages.
    """
    parse_text = _without_whitespace("".join(form for form, _ in surface_forms(parsed)))
    text = _without_whitespace(text)
    if parse_text != text:
        differing = next(
            (n for n, (a, b) in enumerate(zip(parse_text, text, strict=False)) if a != b),
            min(len(parse_text), len(text)),
        )
        raise RegardError(
            f"{where}: the parse does not match the text: it has {_excerpt(parse_text, differing)} where the text has "
            f"{_excerpt(text, differing)}"
        )
    count = len(parsed.heads)
    if invalid := [head for head in parsed.heads if head > count]:
        raise RegardError(
            f"{where}: a word has head {invalid[0]}, but there are only {count} words"
        )
    if unreached := sorted(set(range(1, count + 1)) - _connected_to_root(parsed.heads)):
        word = unreached[0]
        raise RegardError(
            f"{where}: not a tree: word {word} ({parsed.words[word - 1]!r}) is not connected to the root"
        )


def surface_forms(parsed: ParsedSentence) -> Iterator[tuple[str, int]]:
    """What is written in the text, with the number of its (first) word."""
    number = 1
    while number <= len(parsed.words):
        if number in parsed.multiword_tokens:
            form, last = parsed.multiword_tokens[number]
            yield form, number
            number = max(last, number) + 1
        else:
            yield parsed.words[number - 1], number
            number += 1


class CharacterOffsets(Protocol):
    """The methods of a vocabulary that ``token_tree`` needs. Whitespace is not counted."""

    def token_starts(self, text: str) -> list[int]:
        """The number of characters before each token of a text."""

    def count_characters(self, text: str) -> int:
        """The number of characters of a text, counted in the same way."""


def token_tree(text: str, parsed: ParsedSentence | None, vocabulary: CharacterOffsets) -> TokenTree:
    """The tree of a tokenized text. A token belongs to the word that its first character is part of."""
    starts = np.array(vocabulary.token_starts(text), dtype=np.int64)
    if parsed is None:  # a blank line: whitespace that belongs to no word
        return TokenTree([0] * len(starts), [])
    forms = list(surface_forms(parsed))
    ends = np.cumsum([vocabulary.count_characters(form) for form, _ in forms])
    indices = np.searchsorted(ends, starts, side="right")
    # Whitespace at the end belongs to the last word.
    words = [forms[index][1] for index in np.minimum(indices, len(forms) - 1)]
    return TokenTree(words, parsed.heads)


def _without_whitespace(text: str) -> str:
    return "".join(unicodedata.normalize("NFC", text).split())


def _excerpt(text: str, start: int) -> str:
    return repr(text[start : start + 12]) if text[start:] else "nothing more"


def _connected_to_root(heads: Sequence[int]) -> set[int]:
    """The words from which the chain of heads ends at the root."""
    connected = {0}
    for word in range(1, len(heads) + 1):
        path: list[int] = []
        while word not in connected and word not in path:
            path.append(word)
            word = heads[word - 1]
        if word in connected:
            connected.update(path)
    return connected


# ---------------------------------------------------------------------------------------------
# Depth and distance, for all rows of a batch at once


def depth_and_distance(
    words: npt.NDArray[np.int64], heads: npt.NDArray[np.int64]
) -> tuple[Int16Array, Int16Array]:
    """Tree depth [B, S] of each token, and tree distance [B, S, S] from the query (row) to the key (column).

    words [B, S]: the word of each token. heads [B, N + 1]: the head of each word; word 0 is its own head, and rows with
    fewer words are padded with 0.

    The absolute distance is the number of edges between the two words. Its sign follows Wang et al. (2019): if one word
    is an ancestor of the other, it is positive towards the descendant and negative towards the ancestor; otherwise it
    follows the order of the text.
    """
    ancestors = _ancestor_matrix(heads)
    depth = ancestors.sum(-1).astype(np.int16) - np.int16(1)
    # The common ancestors of two words are the path from the root to their lowest common ancestor.
    shared = (ancestors @ ancestors.transpose(0, 2, 1)).astype(np.int16) - np.int16(1)
    query, key, order = depth[:, :, None], depth[:, None, :], np.arange(heads.shape[1])
    edges = query + key - 2 * shared
    text_order = np.where(order[:, None] < order, np.int16(1), np.int16(-1))
    one_is_ancestor = shared == np.minimum(query, key)
    distance = np.where(one_is_ancestor, key - query, text_order * edges)
    row = np.arange(len(words))[:, None]
    pairs = row[:, :, None], words[:, :, None], words[:, None, :]
    return depth[row, words], distance[pairs]


def _ancestor_matrix(heads: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """[B, N + 1, N + 1]: 1 where the column's word is the row's word or one of its ancestors."""
    batch, count = heads.shape
    # Floats, because NumPy has no fast matrix product for integers.
    ancestors = np.zeros((batch, count, count), dtype=np.float32)
    row, word = np.arange(batch)[:, None], np.arange(count)
    reached = np.broadcast_to(word, heads.shape)
    ancestors[row, word, reached] = 1
    while reached.any():
        reached = np.take_along_axis(heads, reached, axis=1)
        ancestors[row, word, reached] = 1
    return ancestors
