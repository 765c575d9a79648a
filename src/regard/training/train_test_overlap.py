"""Overlap: validation and test sources that also occur in the training data, and the scores without them.

A source is represented by a 64-bit hash of its normalized text. The hashes of all training sources are stored with the
prepared data: 8 bytes for each distinct source.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from regard.data.cleaning import Hashes
from regard.data.corpus import fingerprint, read_pairs, train_pairs
from regard.data.pairs import Pair
from regard.data.tokenizer import nfc
from regard.errors import RegardError
from regard.metrics import MetricResult
from regard.recipe import Recipe
from regard.storage.run_dir import RunDir
from regard.tasks import Model


def source_hash(source: str) -> int:
    """The hash of a source, whatever its Unicode form and the spaces around it."""
    text = nfc(source).strip()
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


BLANK = source_hash("")

# ---------------------------------------------------------------------------------------------
# While the data are prepared


class SourceOverlap:
    """Finds sources of the validation and test data that also occur in the training data."""

    def __init__(self, recipe: Recipe) -> None:
        # Held-out pairs cannot overlap, and lines of plain text repeat anyway.
        splits = {} if recipe.text_only else recipe.data.splits
        self.sources = {
            name: {
                source_hash(pair.source) for pair in read_pairs(texts, recipe.data, f"data.{name}")
            }
            - {BLANK}
            for name, texts in splits.items()
            if name != "train"
        }
        self.all_sources = np.array(sorted(set().union(*self.sources.values())), np.uint64)
        self.common: set[int] = set()

    def add(self, sources: Hashes) -> None:
        """Compare the hashes of some training sources."""
        self.common.update(np.intersect1d(sources, self.all_sources).tolist())

    def messages(self) -> Iterator[str]:
        """What to report once all training pairs have passed."""
        for name, sources in self.sources.items():
            if common := len(sources & self.common):
                yield (
                    f"{common:,} of {len(sources):,} sources of data.{name} also occur in the training data, "
                    "so the model may reproduce their targets from memory"
                )


def record_sources(pairs: Iterable[Pair], hashes: array[int]) -> Iterator[Pair]:
    """Pass training pairs through and append the hashes of their sources."""
    for pair in pairs:
        hashes.append(source_hash(pair.source))
        yield pair


# ---------------------------------------------------------------------------------------------
# When a model is scored


def in_training_data(run: RunDir, recipe: Recipe, sources: Sequence[str]) -> list[bool] | None:
    """Whether each source occurs in the training data of a run.

    None if that is not known: the prepared data were deleted, and the training files are missing or have changed.
    """
    hashes = np.array([source_hash(source) for source in sources], np.uint64)
    blank = hashes == np.uint64(BLANK)
    if run.train_sources_file.is_file():
        try:
            stored = np.load(run.train_sources_file, mmap_mode="r")
            found: list[bool] = (_isin_sorted(hashes, stored) & ~blank).tolist()
            return found
        except (OSError, ValueError):
            pass  # damaged: read the training data again
    known = _reread(run, recipe, {*hashes.tolist()} - {BLANK})
    return None if known is None else [one in known for one in hashes.tolist()]


def _isin_sorted(values: Any, ordered: Any) -> Any:
    """Whether each value is in an ordered array, which stays on disk."""
    places = np.minimum(np.searchsorted(ordered, values), max(0, len(ordered) - 1))
    return ordered[places] == values if len(ordered) else np.zeros(len(values), bool)


def _reread(run: RunDir, recipe: Recipe, wanted: set[int]) -> set[int] | None:
    """Those of some hashes that are of a training source; the training files are read again."""
    data = run.card().get("data")
    identity = data.get("identity") if isinstance(data, dict) else None
    if not isinstance(identity, dict) or recipe.text_only:
        return None
    try:
        if fingerprint(recipe.data.train, recipe.data) != identity.get("train"):
            return None
        return wanted & {source_hash(pair.source) for pair in train_pairs(recipe.data)}
    except RegardError:
        return None


@dataclass(frozen=True)
class OverlapScores:
    """How many test sources are in the training data, and the scores without them."""

    sources: int
    total: int
    scores_without: list[MetricResult]
    """empty if no sources are left"""

    @classmethod
    def of(
        cls, model: Model, run: RunDir, outputs: Sequence[str], pairs: Sequence[Pair]
    ) -> OverlapScores | None:
        """The overlap of test pairs; outputs: of the model for their sources. None if it is not known."""
        known = in_training_data(run, model.recipe, [pair.source for pair in pairs])
        if known is None:
            return None
        rest = [number for number, found in enumerate(known) if not found]
        scores = []
        if 0 < len(rest) < len(pairs):
            scores = model.score_outputs(
                [outputs[number] for number in rest], [pairs[number] for number in rest]
            )
        return cls(sum(known), len(pairs), scores)

    def messages(self) -> Iterator[str]:
        """What to report; nothing if there is no overlap."""
        if not self.sources:
            return
        share = f"{self.sources:,} of {self.total:,} test sources ({self.sources / self.total:.1%})"
        if not self.scores_without:
            yield f"{share} are in the training data"
            return
        rest = self.total - self.sources
        yield f"{share} are in the training data; scores of the other {rest:,}:"
        yield from map(str, self.scores_without)

    def to_json(self) -> dict[str, Any]:
        return {
            "sources": self.sources,
            "total": self.total,
            "percent": round(100 * self.sources / self.total, 2),
            "scores_without": [result.to_json() for result in self.scores_without],
        }
