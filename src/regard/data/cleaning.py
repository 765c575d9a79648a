"""Cleaning: which training pairs are dropped, why, and the token ids of the others.

Training applies four of the rules of ``quality.py``: empty sides, exact duplicates, length and length ratio. Lengths
are in tokens. ``regard data clean`` applies all rules, before training.

Duplicates of a large corpus are found on disk (deduplication, ``find_duplicates``): hashes are distributed over files,
the hash buckets, and each bucket is sorted on its own. Memory is that of one bucket, whatever the number of hashes.
Equal hashes are in the same bucket, so duplicates are found bucket by bucket; buckets are ranges of hash values, so
sorted buckets one after the other are sorted as a whole.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from regard.data.dependency_trees import TokenTree
from regard.data.pairs import Pair, context_of, tags_of
from regard.data.quality import exceeds_length, exceeds_ratio, is_empty
from regard.data.special_tokens import EOS
from regard.data.tokenizer import Tokenizer, Vocabulary
from regard.recipe import CleaningConfig

PAIRS_PER_CHUNK = 8_192
"""pairs that are tokenized at a time"""


@dataclass(frozen=True)
class CleaningCounts:
    """The number of pairs read, kept, and dropped, each dropped pair under the first reason that applies."""

    read: int = 0
    kept: int = 0
    empty: int = 0
    """one side is blank"""
    duplicates: int = 0
    """both sides occurred before"""
    too_long: int = 0
    """one side has more tokens than ``clean.max_tokens``"""
    ratio: int = 0
    """one side has more than ``clean.max_ratio`` times the tokens of the other"""

    @property
    def summary(self) -> str:
        """For example “28,990 of 29,000 pairs kept (4 empty, 6 too long)”."""
        if self.kept == self.read:
            return f"all {self.read:,} pairs kept"
        dropped = {
            "empty": self.empty,
            "duplicate": self.duplicates,
            "too long": self.too_long,
            "of unequal length": self.ratio,
        }
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items() if count)
        return f"{self.kept:,} of {self.read:,} pairs kept ({reasons})"


class EncodedPair(NamedTuple):
    """The token ids of a pair, without BOS and EOS."""

    source: list[int]
    target: list[int]
    tree: TokenTree | None = None
    """the dependency tree of the source, if the model uses it"""


EncodeFunction = Callable[[Sequence[Pair], Tokenizer], Iterable[EncodedPair]]
"""Encodes some pairs, each as one row of the dataset."""
AugmentFunction = Callable[[Pair], Pair]
"""Changes the text of a pair, see ``augmentation.py``."""


def encode_pairs(pairs: Sequence[Pair], tokenizer: Tokenizer) -> Iterator[EncodedPair]:
    """The token ids of pairs, with the tags of each pair prepended to its source."""
    texts = [pair.source for pair in pairs]
    if {*map(type, pairs)} <= {Pair}:  # no tags and no context
        sources = tokenizer.source.encode(texts)
    else:
        encoded = encode_with_context(tokenizer.source, texts, list(map(context_of, pairs)))
        sources = list(map(tokenizer.source.prepend_tags, encoded, map(tags_of, pairs)))
    targets = tokenizer.target.encode([pair.target for pair in pairs])
    return map(EncodedPair, sources, targets)


def encode_with_context(
    vocabulary: Vocabulary, texts: Sequence[str], contexts: Sequence[Sequence[str]]
) -> list[list[int]]:
    """The token ids of each text, preceded by those of the sentences before it; EOS separates them."""
    encoded = vocabulary.encode(texts)
    if not any(contexts):
        return encoded
    context_ids = iter(
        vocabulary.encode([sentence for context in contexts for sentence in context])
    )
    return [
        [token for _ in context for token in (*next(context_ids), EOS)] + ids
        for context, ids in zip(contexts, encoded, strict=True)
    ]


class SeenPairs:
    """Recognizes pairs that occurred before; in memory, so for corpora of a limited size."""

    def __init__(self) -> None:
        self.keys = set[int]()

    def is_duplicate(self, pair: Pair, tokenizer: Tokenizer) -> bool:
        """Whether a pair occurred before. Called for each pair that is not blank, in order."""
        key = pair_key(pair, tokenizer)
        if key in self.keys:
            return True
        self.keys.add(key)
        return False

    def add_outcomes(self, outcomes: Sequence[CleaningOutcome]) -> None:
        """Called with the outcome of each pair that is neither blank nor a duplicate, in order."""


class RecordedPairs(SeenPairs):
    """Finds no duplicates, but records what is needed to find them later, when all parts of a corpus are known."""

    def __init__(self) -> None:
        self.hashes = array("Q")
        """the key of each pair that is not blank"""
        self.outcomes = bytearray()
        """the outcome of each of these pairs"""

    def is_duplicate(self, pair: Pair, tokenizer: Tokenizer) -> bool:
        self.hashes.append(pair_key(pair, tokenizer))
        return False

    def add_outcomes(self, outcomes: Sequence[CleaningOutcome]) -> None:
        self.outcomes += bytes(outcomes)


class KnownDuplicates(SeenPairs):
    """Duplicates that were found before, see ``find_duplicates``: one flag for each pair that is not blank."""

    def __init__(self, flags: Iterable[bool]) -> None:
        self.flags = iter(flags)

    def is_duplicate(self, pair: Pair, tokenizer: Tokenizer) -> bool:
        return bool(next(self.flags))


def pair_key(pair: Pair, tokenizer: Tokenizer) -> int:
    """An 8-byte hash of a pair: among a million pairs, two have the same hash once in 10^7 corpora."""
    text = f"{tokenizer.source.normalize(pair.source)}\n{tokenizer.target.normalize(pair.target)}"
    if type(pair) is not Pair:
        text = "\n".join((text, *tags_of(pair), *context_of(pair)))
    return int.from_bytes(blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")


class CleaningOutcome(IntEnum):
    """What becomes of a pair after tokenization; the names are those of ``CleaningCounts``."""

    kept = 0
    too_long = 1
    ratio = 2


def clean_and_encode(
    pairs: Iterable[Pair],
    tokenizer: Tokenizer,
    clean: CleaningConfig | None,
    counts: Counter[str],
    encode: EncodeFunction = encode_pairs,
    augment: AugmentFunction | None = None,
    seen_pairs: SeenPairs | None = None,
) -> Iterator[EncodedPair]:
    """The token ids of the pairs that pass the cleaning rules; all pairs if ``clean`` is None.

    ``counts`` is updated with the fields of ``CleaningCounts`` while the pairs are read. ``seen_pairs``
    recognizes duplicates; by default it is empty at first.

    With subword sampling or ``augment``, the deterministic segmentation of the original pair decides which pairs are
    kept, so that all copies of the corpus have the same pairs. It also replaces a row that is too long.
    """
    seen_pairs = seen_pairs or SeenPairs()
    pairs = iter(pairs)
    while chunk := list(islice(pairs, PAIRS_PER_CHUNK)):
        counts["read"] += len(chunk)
        if clean is not None:
            chunk = [
                p for p in chunk if _passes_text_rules(p, tokenizer, clean, seen_pairs, counts)
            ]
        encoded = list(encode(chunk, tokenizer.deterministic))
        sampled = encoded
        if augment is not None or tokenizer.deterministic is not tokenizer:
            changed = chunk if augment is None else list(map(augment, chunk))
            sampled = list(encode(changed, tokenizer))
        if clean is None:
            outcomes = [CleaningOutcome.kept] * len(encoded)
        else:
            outcomes = [_length_outcome(ids, clean) for ids in encoded]
        seen_pairs.add_outcomes(outcomes)
        for outcome, count in Counter(outcomes).items():
            counts[outcome.name] += count
        for ids, sampled_ids, outcome in zip(encoded, sampled, outcomes, strict=True):
            if outcome is CleaningOutcome.kept:
                yield sampled_ids if sampled_ids is ids or _is_short(sampled_ids, clean) else ids


def _is_short(ids: EncodedPair, clean: CleaningConfig | None) -> bool:
    """Whether no side has more tokens than ``clean.max_tokens``."""
    if clean is None:
        return True
    return not exceeds_length(len(ids.source), len(ids.target), clean.max_tokens)


def _passes_text_rules(
    pair: Pair,
    tokenizer: Tokenizer,
    clean: CleaningConfig,
    seen_pairs: SeenPairs,
    counts: Counter[str],
) -> bool:
    """The rules that need only the text and are checked before tokenizing: no blank side, no duplicates."""
    if is_empty(pair):
        counts["empty"] += 1
        return False
    if clean.keep_duplicates or not seen_pairs.is_duplicate(pair, tokenizer):
        return True
    counts["duplicates"] += 1
    return False


def _length_outcome(ids: EncodedPair, clean: CleaningConfig) -> CleaningOutcome:
    """The rules that need the number of tokens: maximum length and length ratio."""
    source, target = len(ids.source), len(ids.target)
    if exceeds_length(source, target, clean.max_tokens):
        return CleaningOutcome.too_long
    if clean.max_ratio is not None:
        if EOS in ids.source:  # after the context
            source = ids.source[::-1].index(EOS)
        if exceeds_ratio(source, target, clean.max_ratio):
            return CleaningOutcome.ratio
    return CleaningOutcome.kept


Hashes = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

HASHES_PER_BUCKET = 2**20
"""about how many hashes a bucket has: 16 MB with their positions"""
MAX_BUCKET_BITS = 7
"""At most 128 files are open at a time: some systems allow a process 256. Buckets of a larger corpus are larger."""


def find_duplicates(hashes: Iterable[Hashes], count: int, output: Path) -> None:
    """Write a file with one byte for each hash: 1 if the same hash occurred before it, else 0.

    hashes: in several arrays, ``count`` in all. The order of the hashes decides which one is the first.
    """
    output.write_bytes(b"")
    if not count:
        return
    with output.open("r+b") as file:
        file.truncate(count)
    mask = np.memmap(output, np.uint8, "r+", shape=(count,))
    for bucket, positions in _buckets(hashes, count, output.parent, with_positions=True):
        order = np.argsort(bucket, kind="stable")  # equal hashes stay in order
        repeated = order[1:][bucket[order[1:]] == bucket[order[:-1]]]
        mask[positions[repeated]] = 1
    mask.flush()


def read_duplicates(path: Path, start: int, count: int) -> Mask:
    """A part of what ``find_duplicates`` wrote."""
    with path.open("rb") as file:
        file.seek(start)
        return np.frombuffer(file.read(count), np.bool_)


def write_distinct(hashes: Iterable[Hashes], count: int, output: Path) -> None:
    """Write the distinct hashes in ascending order as an ``.npy`` file; ``count`` is their number with duplicates."""
    with TemporaryDirectory(dir=output.parent, prefix=".distinct-") as folder:
        values = Path(folder) / "values"
        total = 0
        with values.open("wb") as file:
            for bucket, _ in _buckets(hashes, count, output.parent, with_positions=False):
                distinct = np.unique(bucket)
                distinct.tofile(file)
                total += len(distinct)
        shape = (total,)
        stored = np.lib.format.open_memmap(values.with_suffix(".npy"), "w+", np.uint64, shape)
        with values.open("rb") as file:
            for start in range(0, total, HASHES_PER_BUCKET):
                chunk = np.fromfile(file, np.uint64, HASHES_PER_BUCKET)
                stored[start : start + len(chunk)] = chunk
        del stored
        values.with_suffix(".npy").replace(output)


def _buckets(
    hashes: Iterable[Hashes], count: int, parent: Path, with_positions: bool
) -> Iterator[tuple[Hashes, npt.NDArray[np.int64]]]:
    """The hashes of each bucket in their order, with their positions among all hashes if requested."""
    bits = min(MAX_BUCKET_BITS, (count // HASHES_PER_BUCKET).bit_length())
    with TemporaryDirectory(dir=parent, prefix=".buckets-") as folder:
        paths = [Path(folder) / str(number) for number in range(1 << bits)]
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("wb")) for path in paths]
            next_position = 0
            for chunk in hashes:
                positions = np.arange(next_position, next_position + len(chunk))
                next_position += len(chunk)
                number = chunk >> np.uint64(64 - bits) if bits else np.zeros(len(chunk), np.uint64)
                order = np.argsort(number, kind="stable")
                ends = np.searchsorted(number[order], np.arange(1 << bits), side="right")
                for file, chosen in zip(files, np.split(order, ends[:-1]), strict=True):
                    records = chunk[chosen]
                    if with_positions:
                        records = np.stack([records, positions[chosen].astype(np.uint64)], 1)
                    records.tofile(file)
        for path in paths:
            records = np.fromfile(path, np.uint64)
            path.unlink()
            if with_positions:
                records = records.reshape(-1, 2)
                yield records[:, 0].copy(), records[:, 1].astype(np.int64)
            else:
                yield records, np.empty(0, np.int64)
