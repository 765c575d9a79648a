"""Classification: one label for each text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from regard.data.batching import Batch, pad_sources, pad_targets, rows_of_rank
from regard.data.cleaning import EncodedPair, clean_and_encode
from regard.data.formats import abbreviate
from regard.data.pairs import Pair
from regard.data.special_tokens import EOS, PAD, SPECIAL_TOKENS
from regard.data.token_dataset import RowIndices, TokenDataset
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.inference.network_decoder import pad_rows, plan_rows
from regard.inference.precision import autocast
from regard.nn.encoder_heads import EncoderForSequenceClassification
from regard.nn.loss import LabelLoss
from regard.recipe import CleaningConfig, Recipe
from regard.tasks.base import (
    LABEL_DEFAULTS,
    LABEL_IGNORES,
    LABEL_SUPPORTS,
    TASKS,
    Model,
    PairEncoder,
    Task,
    decoding_keys,
    encoder_batch,
    label_ids,
    label_names,
)


class LabelEncoder(PairEncoder):
    """A text and its label."""

    def rows(
        self,
        pairs: Iterable[Pair],
        tokenizer: Tokenizer,
        clean: CleaningConfig | None,
        counts: Counter[str],
    ) -> Iterator[EncodedPair]:
        if clean is not None:  # a label is shorter than any text
            clean = clean.model_copy(update={"max_ratio": None})
        return clean_and_encode(pairs, tokenizer, clean, counts, self.encode, seen_pairs=self.seen)

    def encode(self, pairs: Sequence[Pair], tokenizer: Tokenizer) -> Iterator[EncodedPair]:
        for pair, ids in zip(pairs, super().encode(pairs, tokenizer), strict=True):
            if len(pair.target.split()) != 1:
                raise RegardError(
                    f"{pair.target!r} cannot be the label of {abbreviate(pair.source)}: "
                    "a label is one word without spaces"
                )
            labels = label_ids(pair.target.split(), tokenizer.target, pair.source)
            yield EncodedPair(ids.source, labels)

    def collate(
        self, dataset: TokenDataset, rows: RowIndices, rank: int = 0, ranks: int = 1
    ) -> Batch:
        mine, idle = rows_of_rank(rows, rank, ranks)
        return encoder_batch(
            pad_sources(dataset, mine), pad_targets(dataset, mine, end=PAD)[:, :-1], idle
        )

    def count_labels(self, dataset: TokenDataset, rows: RowIndices) -> int:
        return len(rows)


class Classification(NamedTuple):
    """The most probable label of one text."""

    label: str
    probability: float
    probabilities: dict[str, float]
    """of every label"""


class Classifier(Model):
    """Text in, a label out."""

    task = "classification"
    command = "classify"
    network: EncoderForSequenceClassification

    @staticmethod
    def build(recipe: Recipe, tokenizer: Tokenizer) -> EncoderForSequenceClassification:
        return EncoderForSequenceClassification(
            recipe.model, tokenizer.source.size, tokenizer.target.size
        )

    def predict(self, sources: Sequence[str], *, quick: bool = False) -> list[str]:
        return [result.label for result in self.classify(sources)]

    @torch.inference_mode()
    def classify(self, texts: Sequence[str]) -> list[Classification]:
        """The most probable label of each text."""
        if isinstance(texts, str):
            raise RegardError("classify takes a list of texts: classify([text])")
        rows = [[*ids, EOS] for ids in self.encode(texts)]
        names = label_names(self.tokenizer.target)
        results: dict[int, Classification] = {}
        for batch in plan_rows([len(row) for row in rows], self.device, len(names)):
            with autocast(self.precision, self.device):
                logits = self.network(pad_rows([rows[row] for row in batch], self.device))[:, 0]
            probabilities = logits[:, len(SPECIAL_TOKENS) :].float().softmax(-1).tolist()
            for row, values in zip(batch, probabilities, strict=True):
                best = max(range(len(values)), key=values.__getitem__)
                by_label = dict(zip(names, values, strict=True))
                results[row] = Classification(names[best], values[best], by_label)
        return [results[row] for row in range(len(texts))]


TASKS.register(
    "classification",
    summary="one label for each text",
    ignores=[*LABEL_IGNORES, *decoding_keys(), "data.clean.max_ratio"],
)(
    Task(
        Classifier,
        LabelEncoder,
        LabelLoss,
        own_metrics=("accuracy", "f1"),
        architectures=("transformer",),
        defaults=LABEL_DEFAULTS,
        has_labels=True,
        supports=("data.clean.truncate", *LABEL_SUPPORTS),
    )
)
