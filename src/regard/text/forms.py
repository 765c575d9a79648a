"""What each task makes of a pair: ids at rest, tensors in a batch, and how many tokens count in the loss.

    task       pair                      source      target                  wanted
    translate  source, target            text END    START text              text END
    tag        words, tags               pieces END  a tag at the first piece of each word, else PAD
    classify   text, label               text END    the label
    mask       text, nothing             text END    the text itself: what is wanted of it is drawn each step
    continue   line, nothing             nothing     a block of the stream   the block, one further

A stream is all lines with END after each; a block begins wherever the one before it ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from regard import recipe as recipes
from regard.errors import RegardError
from regard.marks import END, MARKS, PAD, UNKNOWN
from regard.recipe import Clean, Recipe
from regard.text.batches import Batch, collate, of_numpy, share, sources, targets
from regard.text.corpus import Pair, parse_of, shortened
from regard.text.store import Ids, Places, Store, cleaned, encode_pairs
from regard.text.tokenizer import Tokenizer, Vocabulary
from regard.text.trees import TokenTree, token_tree


class Translated:
    """translate: two texts."""

    def __init__(self, recipe: Recipe) -> None:
        clean = recipe.data.clean
        self.longest = clean.max_tokens
        self.cut = clean.max_tokens if clean.cut else None
        """where sources are cut"""
        self.trees = recipe.model.position == "tree"

    def rows(
        self, pairs: Iterable[Pair], tokenizer: Tokenizer, clean: Clean | None, tally: Counter[str]
    ) -> Iterator[Ids]:
        return cleaned(pairs, tokenizer, clean, tally, self.encode)

    def encode(self, pairs: Sequence[Pair], tokenizer: Tokenizer) -> Iterator[Ids]:
        for pair, ids in zip(pairs, encode_pairs(pairs, tokenizer), strict=True):
            yield Ids(ids.source[: self.cut], ids.target, self.tree(pair, tokenizer))

    def tree(self, pair: Pair, tokenizer: Tokenizer) -> TokenTree | None:
        if not self.trees:
            return None
        return token_tree(pair.source, parse_of(pair), tokenizer.source).cut(self.cut)

    def collate(self, store: Store, rows: Places, part: int = 0, parts: int = 1) -> Batch:
        return collate(store, rows, part, parts)

    def tokens(self, store: Store, rows: Places) -> int:
        """How many tokens are wanted of these rows."""
        return int(store.target_lengths[rows].sum()) + len(rows)


class Classified(Translated):
    """classify: a text and its label."""

    def rows(
        self, pairs: Iterable[Pair], tokenizer: Tokenizer, clean: Clean | None, tally: Counter[str]
    ) -> Iterator[Ids]:
        if clean is not None:  # a label is shorter than any text
            clean = clean.model_copy(update={"max_ratio": None})
        return cleaned(pairs, tokenizer, clean, tally, self.encode)

    def encode(self, pairs: Sequence[Pair], tokenizer: Tokenizer) -> Iterator[Ids]:
        for pair, ids in zip(pairs, super().encode(pairs, tokenizer), strict=True):
            if len(pair.target.split()) != 1:
                raise RegardError(
                    f"{pair.target!r} is no label of {shortened(pair.source)}: "
                    "a label is one word without blanks"
                )
            yield Ids(ids.source, label_ids(pair.target.split(), tokenizer.target, pair.source))

    def collate(self, store: Store, rows: Places, part: int = 0, parts: int = 1) -> Batch:
        mine, idle = share(rows, part, parts)
        return labelled(sources(store, mine), targets(store, mine, end=PAD)[:, :-1], idle)

    def tokens(self, store: Store, rows: Places) -> int:
        return len(rows)


class Tagged(Translated):
    """tag: words, and as many tags."""

    def encode(self, pairs: Sequence[Pair], tokenizer: Tokenizer) -> Iterator[Ids]:
        for pair in pairs:
            words, tags = pair.source.split(), pair.target.split()
            if len(words) != len(tags):
                raise RegardError(
                    f"{len(words)} words but {len(tags)} tags: {shortened(pair.source)}, "
                    f"{shortened(pair.target)}; each word has one tag"
                )
            pieces = tokenizer.source.encode(words)
            labels = label_ids(tags, tokenizer.target, pair.source)
            marked = [
                [label, *[PAD] * (len(some) - 1)]
                for label, some in zip(labels, pieces, strict=True)
            ]
            yield Ids([*chain(*pieces)], [*chain(*marked)])

    def collate(self, store: Store, rows: Places, part: int = 0, parts: int = 1) -> Batch:
        mine, idle = share(rows, part, parts)
        return labelled(sources(store, mine), targets(store, mine, end=PAD), idle)

    def tokens(self, store: Store, rows: Places) -> int:
        return int((targets(store, rows, end=PAD) != PAD).sum())


class Masked(Translated):
    """mask: text alone; what is too long is cut into pieces, and nothing of it is lost."""

    def rows(
        self, pairs: Iterable[Pair], tokenizer: Tokenizer, clean: Clean | None, tally: Counter[str]
    ) -> Iterator[Ids]:
        for pair, ids in encoded(pairs, tokenizer.source, tally):
            if not pair.source.strip():
                tally["empty"] += 1
                continue
            tally["kept"] += 1
            for start in range(0, len(ids), self.longest):
                yield Ids(ids[start : start + self.longest], [])

    def collate(self, store: Store, rows: Places, part: int = 0, parts: int = 1) -> Batch:
        mine, idle = share(rows, part, parts)
        source = sources(store, mine)
        return labelled(source, np.where(source == END, PAD, source), idle)

    def tokens(self, store: Store, rows: Places) -> int:
        """As many as ``nn.masking`` hides: 0.15 of each row, rounded, but one at least."""
        return int(np.maximum(1, (3 * store.source_lengths[rows] + 10) // 20).sum())


class Stream(Translated):
    """continue: text alone, as one stream; a block has one token more than is read of it."""

    def rows(
        self, pairs: Iterable[Pair], tokenizer: Tokenizer, clean: Clean | None, tally: Counter[str]
    ) -> Iterator[Ids]:
        rest = [END]
        for _, ids in encoded(pairs, tokenizer.source, tally):
            tally["kept"] += 1
            rest += [*ids, END]
            start = 0
            while len(rest) - start > self.longest:
                yield Ids([], rest[start : start + self.longest + 1])
                start += self.longest
            rest = rest[start:]
        if len(rest) > 1:
            yield Ids([], rest)

    def collate(self, store: Store, rows: Places, part: int = 0, parts: int = 1) -> Batch:
        mine, idle = share(rows, part, parts)
        blocks = targets(store, mine, end=PAD)[:, :-1]
        wanted = blocks[:, 1:].copy()
        read = np.where(wanted == PAD, PAD, blocks[:, :-1])
        if idle:
            wanted[:] = PAD
        return Batch(*of_numpy(read[:, :0], read, wanted))

    def tokens(self, store: Store, rows: Places) -> int:
        return int(store.target_lengths[rows].sum()) - len(rows)


FORMS: dict[recipes.Task, type[Translated]] = {
    "translate": Translated,
    "tag": Tagged,
    "classify": Classified,
    "mask": Masked,
    "continue": Stream,
}


def labelled(source: Places, wanted: Places, idle: bool) -> Batch:
    """A batch without a decoder: nothing but the source is read."""
    wanted = np.full_like(wanted, PAD) if idle else wanted
    return Batch(*of_numpy(source, wanted[:, :0], wanted))


def label_ids(labels: list[str], vocabulary: Vocabulary, where: str) -> list[int]:
    ids = [i for (i,) in vocabulary.encode(labels)]
    if UNKNOWN in ids:
        known = ", ".join(label_names(vocabulary)[:20])
        raise RegardError(
            f"label {labels[ids.index(UNKNOWN)]!r} of {shortened(where)} never occurs in "
            f"data.train; known: {known}"
        )
    return ids


def label_names(vocabulary: Vocabulary) -> list[str]:
    """The labels, by their id less the number of marks."""
    return vocabulary.decode([[i] for i in range(len(MARKS), vocabulary.size)])


def encoded(
    pairs: Iterable[Pair], vocabulary: Vocabulary, tally: Counter[str]
) -> Iterator[tuple[Pair, list[int]]]:
    for pair in pairs:
        tally["read"] += 1
        (ids,) = vocabulary.encode([pair.source])
        yield pair, ids
