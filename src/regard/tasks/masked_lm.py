"""Masked language modelling (BERT): predict masked tokens from the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from regard.data.batching import Batch, pad_sources, rows_of_rank
from regard.data.cleaning import EncodedPair
from regard.data.pairs import Pair
from regard.data.special_tokens import EOS, MASK, PAD, SPACE_SYMBOL, SPECIAL_TOKENS
from regard.data.token_dataset import RowIndices, TokenDataset
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.inference.network_decoder import pad_rows, plan_rows
from regard.inference.precision import autocast
from regard.metrics import MetricResult
from regard.metrics.accuracy_and_perplexity import ACCURACY, TOKEN_PERPLEXITY
from regard.nn.dropout import mask_tokens
from regard.nn.encoder_heads import EncoderForMaskedLM
from regard.nn.loss import MaskedLMLoss
from regard.recipe import CleaningConfig, Recipe
from regard.tasks.base import (
    DECODER_KEYS,
    TASKS,
    TEXT_DEFAULTS,
    TEXT_IGNORES,
    Model,
    PairEncoder,
    Task,
    decoding_keys,
    encode_texts,
    encoder_batch,
)

GAP = "[MASK]"


class TextEncoder(PairEncoder):
    """Text without targets; a text that is too long is split, so that nothing is lost."""

    def rows(
        self,
        pairs: Iterable[Pair],
        tokenizer: Tokenizer,
        clean: CleaningConfig | None,
        counts: Counter[str],
    ) -> Iterator[EncodedPair]:
        for pair, ids in encode_texts(pairs, tokenizer.source, counts):
            if not pair.source.strip():
                counts["empty"] += 1
                continue
            counts["kept"] += 1
            for start in range(0, len(ids), self.max_tokens):
                yield EncodedPair(ids[start : start + self.max_tokens], [])

    def collate(
        self, dataset: TokenDataset, rows: RowIndices, rank: int = 0, ranks: int = 1
    ) -> Batch:
        mine, idle = rows_of_rank(rows, rank, ranks)
        source = pad_sources(dataset, mine)
        return encoder_batch(source, np.where(source == EOS, PAD, source), idle)

    def count_labels(self, dataset: TokenDataset, rows: RowIndices) -> int:
        """As many as ``nn/dropout.py`` masks: 15% of each row, rounded, but at least one."""
        return int(np.maximum(1, (3 * dataset.source_lengths[rows] + 10) // 20).sum())


class MaskFilling(NamedTuple):
    """A prediction for one masked token."""

    text: str
    """a whole word, or after … the rest of one"""
    probability: float


class MaskedLM(Model):
    """Text with [MASK] tokens in, the most probable tokens out."""

    task = "masked_lm"
    command = "fill"
    network: EncoderForMaskedLM

    @staticmethod
    def build(recipe: Recipe, tokenizer: Tokenizer) -> EncoderForMaskedLM:
        return EncoderForMaskedLM(recipe.model, tokenizer.source.size)

    def predict(self, sources: Sequence[str], *, quick: bool = False) -> list[str]:
        """Each text with its [MASK] tokens replaced by the most probable tokens."""
        answers = []
        for source in sources:
            parts = source.split(GAP)
            fillings = [best.text for best, *_ in self.fill(source, 1)] if len(parts) > 1 else []
            answers.append(
                parts[0] + "".join(a + b for a, b in zip(fillings, parts[1:], strict=True))
            )
        return answers

    @torch.inference_mode()
    def fill(self, text: str, count: int = 5) -> list[list[MaskFilling]]:
        """For each [MASK] of the text the most probable fillings, best first."""
        parts = [part.strip() for part in text.split(GAP)]
        if len(parts) == 1:
            raise RegardError(f"no {GAP} in {text!r}: write it in place of each missing token")
        first, *rest = self.tokenizer.source.encode(parts)
        row = [*first, *(i for ids in rest for i in (MASK, *ids)), EOS]
        masked = [position for position, i in enumerate(row) if i == MASK]
        with autocast(self.precision, self.device):
            logits = self.network(pad_rows([row], self.device))[0, masked, len(SPECIAL_TOKENS) :]
        best = logits.float().softmax(-1).topk(min(count, logits.shape[-1]))
        return [
            [MaskFilling(*filling) for filling in zip(self._names(ids), values, strict=True)]
            for ids, values in zip(
                (best.indices + len(SPECIAL_TOKENS)).tolist(), best.values.tolist(), strict=True
            )
        ]

    def _names(self, ids: Sequence[int]) -> list[str]:
        pieces = self.tokenizer.source.pieces(ids)
        return [
            p.removeprefix(SPACE_SYMBOL) or SPACE_SYMBOL if p.startswith(SPACE_SYMBOL) else f"…{p}"
            for p in pieces
        ]

    @torch.inference_mode()
    def evaluate(self, pairs: Sequence[Pair], *, quick: bool = False) -> list[MetricResult]:
        """Mask tokens of each text, always the same ones, and score their predictions."""
        max_tokens = self.recipe.data.clean.max_tokens
        texts = self.tokenizer.source.encode([pair.source for pair in pairs if pair.source.strip()])
        rows = [ids[at : at + max_tokens] for ids in texts for at in range(0, len(ids), max_tokens)]
        if not rows:
            raise RegardError("nothing to score: there are no texts")
        counts = np.zeros((len(rows), 3))  # correct, negative log-probability, masked tokens
        masked = [self._mask(ids, number) for number, ids in enumerate(rows)]
        for part in plan_rows([len(row) for row in rows], self.device, self.tokenizer.source.size):
            inputs, labels = (
                pad_rows(side, self.device)
                for side in zip(*(masked[row] for row in part), strict=True)
            )
            with autocast(self.precision, self.device):
                counts[part] = _count(self.network, inputs, labels).cpu().numpy()
        results = {
            "accuracy": ACCURACY.score_counts(counts[:, [0, 2]], not quick, details="words:15%"),
            "perplexity": TOKEN_PERPLEXITY.score_counts(
                counts[:, [1, 2]], not quick, details="words:15%"
            ),
        }
        return [results[metric] for metric in self.recipe.evaluation.metrics]

    def _mask(self, ids: Sequence[int], number: int) -> tuple[list[int], list[int]]:
        """The input ids and labels of a text. What is masked depends on its number, not on the other texts."""
        source = torch.tensor([[*ids, EOS]])
        maskable = source.masked_fill(source == EOS, PAD)
        generator = torch.Generator().manual_seed(number)
        inputs, labels = mask_tokens(source, maskable, self.tokenizer.source.size, generator)
        return inputs[0].tolist(), labels[0].tolist()


def _count(
    network: EncoderForMaskedLM, inputs: Int[Tensor, "B S"], labels: Int[Tensor, "B S"]
) -> Float[Tensor, "B 3"]:
    """For each row: the number of correct predictions, the summed negative log-probability, the number of labels."""
    row, position = (labels != PAD).nonzero(as_tuple=True)
    expected = labels[row, position]
    logits = F.linear(network.states(inputs)[row, position], network.projection.weight).float()
    each = -logits.log_softmax(-1).gather(-1, expected[:, None])[:, 0]
    counts = torch.stack([logits.argmax(-1) == expected, each, torch.ones_like(each)], dim=1)
    return counts.new_zeros(len(labels), 3).index_add(0, row, counts).double()


TASKS.register(
    "masked_lm",
    summary="predict masked tokens (BERT)",
    ignores=[*DECODER_KEYS, *decoding_keys(), *TEXT_IGNORES],
)(
    Task(
        MaskedLM,
        TextEncoder,
        MaskedLMLoss,
        own_metrics=("accuracy", "perplexity"),
        architectures=("transformer",),
        defaults={"training": TEXT_DEFAULTS, "evaluation": {"metrics": ("accuracy", "perplexity")}},
        text_only=True,
        reasons=dict.fromkeys(
            ("training.rdrop", "training.simcut"),
            "it compares two passes over the same input, but this task masks different tokens in each",
        ),
    )
)
