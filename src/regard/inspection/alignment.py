"""Which word of a translation came from which word of its sentence, as the model's cross attention tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch

from regard.data.tokenizer import Vocabulary
from regard.data.words import Span, units, words
from regard.errors import RegardError
from regard.inference.engine import Request
from regard.inspection.hooks import Floats, observe
from regard.tasks import Translator

ROUNDS = 10
"""of balancing"""


@torch.inference_mode()
def align(
    model: Translator,
    sentence: str,
    translation: str,
    to: str | None = None,
    cut: Callable[[str], list[Span]] = units,
) -> Floats | None:
    """[unit of the translation, unit of the sentence]; None where the model's attention does not tell.

    cut says what the units of a text are; to is the language, of a model that knows several.
    """
    (source,) = model.encode([sentence], to)
    (target,) = model.tokenizer.target.encode([translation])
    read = model.network.reading(target)
    cross = observe(model, Request(source), read).weights["cross_attention"]
    if not cross.size or cross.shape[3] != len(source) + 1:
        return None
    tags = sum(i < model.tokenizer.source.marks for i in source[:1])  # the language asked for
    weights = cross.mean((0, 1))[: len(target), tags : len(source)]
    source = source[tags:]
    rows = _shares(cut(translation), _spans(model.tokenizer.target, target, translation))
    columns = _shares(_spans(model.tokenizer.source, source, sentence), cut(sentence))
    return balance(rows @ weights @ columns)


def pharaoh(model: Translator, sentence: str, translation: str) -> str:
    """The source word of each target word, as ``0-0 1-2``: source-target, words between blanks, counted from 0."""
    if not sentence.strip() or not translation.strip():
        return ""
    if model.needs_trees or (found := align(model, sentence, translation, cut=words)) is None:
        raise RegardError(
            "no alignment: this model's attention does not tell where words come from"
        )
    links = sorted((int(row.argmax()), place) for place, row in enumerate(found))
    return " ".join(f"{source}-{target}" for source, target in links)


def balance(weights: Floats) -> Floats:
    """Let words compete, so that in the end each has about one of the other side.

    An article looks at its noun to know its gender. Attention alone would say that both come from the noun; but
    the noun has a better match, and the source's article has no other (docs/decisions.md has the figures).
    """
    balanced = weights.astype(np.float64) + 1e-6
    for _ in range(ROUNDS):
        balanced /= balanced.sum(0, keepdims=True)
        balanced /= balanced.sum(1, keepdims=True)
    return balanced.astype(np.float32)


def _spans(vocabulary: Vocabulary, ids: Sequence[int], text: str) -> list[Span]:
    """Where each token stands in the text, measured by what the tokens before it spell."""
    lengths = [
        len(spelled) for spelled in vocabulary.decode([ids[:i] for i in range(len(ids) + 1)])
    ]
    # Where letters were normalised, their number may differ.
    scale = len(text) / max(1, lengths[-1])
    places = np.maximum.accumulate(np.array(lengths) * scale).round().astype(int).tolist()
    return list(map(Span._make, pairwise(places)))


def _shares(wholes: Sequence[Span], parts: Sequence[Span]) -> Floats:
    """[whole, part]: which share of each whole lies in each part."""
    a, b = (np.array(spans, dtype=np.float32).reshape(-1, 2) for spans in (wholes, parts))
    common = np.minimum(a[:, None, 1], b[None, :, 1]) - np.maximum(a[:, None, 0], b[None, :, 0])
    length = np.maximum(a[:, 1:] - a[:, :1], 1)
    return np.asarray(common.clip(0) / length, dtype=np.float32)
