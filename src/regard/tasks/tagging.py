"""Tagging: one tag for each word, such as its part of speech."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from regard.data.batching import Batch, pad_sources, pad_targets, rows_of_rank
from regard.data.cleaning import EncodedPair
from regard.data.formats import abbreviate
from regard.data.pairs import Pair
from regard.data.special_tokens import EOS, PAD, SPECIAL_TOKENS
from regard.data.token_dataset import RowIndices, TokenDataset
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.inference.network_decoder import pad_rows, plan_rows
from regard.inference.precision import autocast
from regard.nn.encoder_heads import EncoderForTokenClassification
from regard.nn.loss import LabelLoss
from regard.recipe import Recipe
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


class TagEncoder(PairEncoder):
    """Words and as many tags: the tag is the label of a word's first token."""

    def encode(self, pairs: Sequence[Pair], tokenizer: Tokenizer) -> Iterator[EncodedPair]:
        for pair in pairs:
            words, tags = pair.source.split(), pair.target.split()
            if len(words) != len(tags):
                raise RegardError(
                    f"{len(words)} words but {len(tags)} tags: {abbreviate(pair.source)}, "
                    f"{abbreviate(pair.target)}; each word needs one tag"
                )
            tokens = tokenizer.source.encode(words)
            labels = label_ids(tags, tokenizer.target, pair.source)
            padded = [
                [label, *[PAD] * (len(word_tokens) - 1)]
                for label, word_tokens in zip(labels, tokens, strict=True)
            ]
            yield EncodedPair([*chain(*tokens)], [*chain(*padded)])

    def collate(
        self, dataset: TokenDataset, rows: RowIndices, rank: int = 0, ranks: int = 1
    ) -> Batch:
        mine, idle = rows_of_rank(rows, rank, ranks)
        return encoder_batch(pad_sources(dataset, mine), pad_targets(dataset, mine, end=PAD), idle)

    def count_labels(self, dataset: TokenDataset, rows: RowIndices) -> int:
        return int((pad_targets(dataset, rows, end=PAD) != PAD).sum())


class Tagged(NamedTuple):
    """The words of one text with their tags."""

    words: list[str]
    tags: list[str]
    probabilities: list[float]
    """of each tag"""


class Tagger(Model):
    """Assigns a tag to each word of a text. Words are separated by spaces."""

    task = "tagging"
    command = "tag"
    network: EncoderForTokenClassification

    @staticmethod
    def build(recipe: Recipe, tokenizer: Tokenizer) -> EncoderForTokenClassification:
        return EncoderForTokenClassification(
            recipe.model, tokenizer.source.size, tokenizer.target.size
        )

    def predict(self, sources: Sequence[str], *, quick: bool = False) -> list[str]:
        return [" ".join(tagged.tags) for tagged in self.tag(sources)]

    @torch.inference_mode()
    def tag(self, texts: Sequence[str]) -> list[Tagged]:
        """The words of each text with their tags."""
        if isinstance(texts, str):
            raise RegardError("tag takes a list of texts: tag([text])")
        words = [text.split() for text in texts]
        tokens = [self.tokenizer.source.encode(text_words) for text_words in words]
        rows = [[*chain(*text_tokens), EOS] for text_tokens in tokens]
        self.check_lengths(rows)
        names = label_names(self.tokenizer.target)
        results = [Tagged([], [], []) for _ in texts]
        for batch in plan_rows([len(row) for row in rows], self.device, len(names)):
            with autocast(self.precision, self.device):
                logits = self.network(pad_rows([rows[row] for row in batch], self.device))
            best = logits[..., len(SPECIAL_TOKENS) :].float().softmax(-1).max(-1)
            for row, values, labels in zip(
                batch, best.values.tolist(), best.indices.tolist(), strict=True
            ):
                # The tag of a word is that of its first token.
                firsts = [0, *accumulate(map(len, tokens[row]))][: len(words[row])]
                tags = [names[labels[first]] for first in firsts]
                results[row] = Tagged(words[row], tags, [values[first] for first in firsts])
        return results


TASKS.register(
    "tagging",
    summary="one tag for each word",
    # Every token has a label, so the length ratio is always 1.
    ignores=[*LABEL_IGNORES, *decoding_keys(), "data.clean.max_ratio"],
)(
    Task(
        Tagger,
        TagEncoder,
        LabelLoss,
        own_metrics=("accuracy", "f1"),
        architectures=("transformer",),
        defaults=LABEL_DEFAULTS,
        has_labels=True,
        supports=("data.conllu", *LABEL_SUPPORTS),
        reasons={"data.clean.truncate": "it would leave words without a tag"},
    )
)
