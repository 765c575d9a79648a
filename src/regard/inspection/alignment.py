"""Word alignment: which source word each word of a translation comes from, according to cross-attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch

from regard.data.tokenizer import Vocabulary
from regard.data.words import Span, word_and_symbol_spans, word_spans
from regard.errors import RegardError
from regard.inference.engine import Request
from regard.inspection.hooks import Floats, observe
from regard.tasks import Translator

BALANCE_ITERATIONS = 10


@torch.inference_mode()
def align(
    model: Translator,
    sentence: str,
    translation: str,
    to: str | None = None,
    split: Callable[[str], list[Span]] = word_and_symbol_spans,
) -> Floats | None:
    """[target unit, source unit] weights; None if the model has no cross-attention to source tokens.

    split: returns the spans of the units of a text. to: the target language of a multilingual model.
    """
    (source,) = model.encode([sentence], to)
    target = model.encode_translation(translation, sentence)
    observed = observe(model, Request(source), model.network.decoder_input(target))
    cross = observed.weights["cross_attention"]
    if not cross.size or cross.shape[3] != len(source) + 1:
        return None
    # The target language tag, if there is one.
    tags = sum(i < model.tokenizer.source.num_special_tokens for i in source[:1])
    weights = cross.mean((0, 1))[: len(target), tags : len(source)]
    source = source[tags:]
    target_spans = _token_spans(model.tokenizer.target, target, translation)
    source_spans = _token_spans(model.tokenizer.source, source, sentence)
    rows = _overlap(split(translation), target_spans)
    columns = _overlap(source_spans, split(sentence))
    return balance(rows @ weights @ columns)


def word_links(
    model: Translator, sentence: str, translation: str, to: str | None = None
) -> list[tuple[int, int]]:
    """The source word of each target word, as numbers: (source, target), whitespace-separated words."""
    if not sentence.strip() or not translation.strip():
        return []
    if (
        model.needs_trees
        or (weights := align(model, sentence, translation, to, split=word_spans)) is None
    ):
        raise RegardError("alignment: this model has no cross-attention to source tokens")
    return sorted((int(row.argmax()), target) for target, row in enumerate(weights))


def pharaoh(model: Translator, sentence: str, translation: str) -> str:
    """The source word of each target word in Pharaoh format, ``0-0 1-2``: source-target."""
    links = word_links(model, sentence, translation)
    return " ".join(f"{source}-{target}" for source, target in links)


def balance(weights: Floats) -> Floats:
    """Normalise columns and rows in turn (Sinkhorn), so that each word aligns with about one word of the other side.

    An article attends to its noun to get the gender, so attention alone would align both with the noun. But the noun
    has a better match, and the source's article has no other (docs/decisions.md has measurements).
    """
    balanced = weights.astype(np.float64) + 1e-6
    for _ in range(BALANCE_ITERATIONS):
        balanced /= balanced.sum(0, keepdims=True)
        balanced /= balanced.sum(1, keepdims=True)
    return balanced.astype(np.float32)


def _token_spans(vocabulary: Vocabulary, ids: Sequence[int], text: str) -> list[Span]:
    """The span of each token in the text, from the lengths of the decoded prefixes."""
    lengths = [len(prefix) for prefix in vocabulary.decode([ids[:i] for i in range(len(ids) + 1)])]
    # Normalisation may have changed the number of characters.
    scale = len(text) / max(1, lengths[-1])
    ends = np.maximum.accumulate(np.array(lengths) * scale).round().astype(int).tolist()
    return list(map(Span._make, pairwise(ends)))


def _overlap(spans: Sequence[Span], others: Sequence[Span]) -> Floats:
    """[span, other]: the fraction of each span that lies in each of the others."""
    a, b = (np.array(side, dtype=np.float32).reshape(-1, 2) for side in (spans, others))
    common = np.minimum(a[:, None, 1], b[None, :, 1]) - np.maximum(a[:, None, 0], b[None, :, 0])
    length = np.maximum(a[:, 1:] - a[:, :1], 1)
    return np.asarray(common.clip(0) / length, dtype=np.float32)
