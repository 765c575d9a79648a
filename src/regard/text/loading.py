"""Tokenizers by kind: those learned here, and those that came with a model from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from regard import recipe
from regard.text.foreign import load_marian
from regard.text.tokenizer import MODEL_TYPES, Tokenizer

TOKENIZERS: dict[recipe.TokenizerKind, Callable[[Path, recipe.Tokenizer, bool], Tokenizer]] = {
    **dict.fromkeys(MODEL_TYPES, Tokenizer.load),
    "marian": load_marian,
}


def load_tokenizer(folder: Path, section: recipe.Tokenizer, labels: bool = False) -> Tokenizer:
    """labels: the targets are labels, each an entry as it stands."""
    return TOKENIZERS[section.kind](folder, section, labels)
