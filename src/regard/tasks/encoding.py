"""How the pairs of a task become token ids on disk and tensors in a batch.

    task            pair              source        target      labels
    translation     source, target    text EOS      BOS text    text EOS
    tagging         words, tags       tokens EOS    -           a tag at the first token of each word, else PAD
    classification  text, label       text EOS      -           the label
    masked_lm       text              text EOS      -           the text; the loss masks tokens of it in each step
    language_model  line              -             a block     the block, shifted by one

``PairEncoder`` is the encoder of translation and the base class of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from regard.data.batching import Batch, as_tensors, collate
from regard.data.cleaning import AugmentFunction, EncodedPair, clean_and_encode, encode_pairs
from regard.data.dataset import RowIndices, TokenDataset
from regard.data.dependency_trees import TokenTree, token_tree
from regard.data.formats import abbreviate
from regard.data.pairs import Pair, parse_of
from regard.data.special_tokens import PAD, SPECIAL_TOKENS, UNK
from regard.data.tokenizer import Tokenizer, Vocabulary
from regard.errors import RegardError
from regard.recipe import CleaningConfig, Recipe


class PairEncoder:
    """Encodes pairs of source and target text."""

    def __init__(self, recipe: Recipe, augment: AugmentFunction | None = None) -> None:
        """``augment``: changes the text of each pair, for task translation."""
        clean = recipe.data.clean
        self.max_tokens = clean.max_tokens
        self.truncate = clean.max_tokens if clean.truncate else None
        """where sources are truncated"""
        self.trees = recipe.model.position == "tree"
        self.augment = augment

    def rows(
        self,
        pairs: Iterable[Pair],
        tokenizer: Tokenizer,
        clean: CleaningConfig | None,
        counts: Counter[str],
    ) -> Iterator[EncodedPair]:
        """The encoded pairs that pass the cleaning rules; ``counts`` counts what happens to each pair."""
        return clean_and_encode(pairs, tokenizer, clean, counts, self.encode, self.augment)

    def encode(self, pairs: Sequence[Pair], tokenizer: Tokenizer) -> Iterator[EncodedPair]:
        for pair, ids in zip(pairs, encode_pairs(pairs, tokenizer), strict=True):
            source = ids.source[: self.truncate]
            yield EncodedPair(source, ids.target, self._tree(pair, tokenizer))

    def _tree(self, pair: Pair, tokenizer: Tokenizer) -> TokenTree | None:
        if not self.trees:
            return None
        return token_tree(pair.source, parse_of(pair), tokenizer.source).truncate(self.truncate)

    def collate(
        self, dataset: TokenDataset, rows: RowIndices, rank: int = 0, ranks: int = 1
    ) -> Batch:
        """The tensors of a batch, or the share of one of several processes."""
        return collate(dataset, rows, rank, ranks)

    def count_labels(self, dataset: TokenDataset, rows: RowIndices) -> int:
        """The number of labels in these rows, which the loss is averaged over."""
        return int(dataset.target_lengths[rows].sum()) + len(rows)


def encoder_batch(source: RowIndices, labels: RowIndices, idle: bool) -> Batch:
    """A batch without decoder input; an idle process has no labels."""
    labels = np.full_like(labels, PAD) if idle else labels
    return Batch(*as_tensors(source, labels[:, :0], labels))


def label_ids(labels: list[str], vocabulary: Vocabulary, where: str) -> list[int]:
    """The ids of labels; an unknown label is an error."""
    ids = [i for (i,) in vocabulary.encode(labels)]
    if UNK in ids:
        known = ", ".join(label_names(vocabulary)[:20])
        raise RegardError(
            f"label {labels[ids.index(UNK)]!r} of {abbreviate(where)} does not occur in "
            f"data.train; known labels: {known}"
        )
    return ids


def label_names(vocabulary: Vocabulary) -> list[str]:
    """The labels, in the order of their ids, without the special tokens."""
    return vocabulary.decode([[i] for i in range(len(SPECIAL_TOKENS), vocabulary.size)])


def encode_texts(
    pairs: Iterable[Pair], vocabulary: Vocabulary, counts: Counter[str]
) -> Iterator[tuple[Pair, list[int]]]:
    """Each pair with the ids of its source."""
    for pair in pairs:
        counts["read"] += 1
        (ids,) = vocabulary.encode([pair.source])
        yield pair, ids
