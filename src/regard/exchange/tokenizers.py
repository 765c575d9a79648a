"""Our vocabularies as files that others can open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regard.text.foreign import MarianVocabulary
from regard.text.tokenizer import Tokenizer, Vocabulary

_WITH_DUMMY_PREFIX = b"\x1a\x02\x18\x01"
"""normalizer_spec { add_dummy_prefix: true } in the wire format of protocol buffers: what follows a message is merged
into it, so no library is needed to change one field of a SentencePiece model"""


def sentencepiece_model(vocabulary: Vocabulary) -> bytes:
    """A SentencePiece model that cuts ordinary text into the same pieces by itself.

    We put one space before a text (see text/tokenizer); here SentencePiece is told to. What it cannot be told: text
    not in the recipe's Unicode form, and U+2581, U+2585 and U+FDD0, which we spell out, it takes as they come.
    """
    if isinstance(vocabulary, MarianVocabulary):
        return vocabulary.model
    return vocabulary.model + _WITH_DUMMY_PREFIX


def entries(vocabulary: Vocabulary) -> list[str]:
    """Every piece, by id."""
    return vocabulary.pieces(range(vocabulary.size))


def write_models(folder: Path, tokenizer: Tokenizer) -> None:
    (folder / "source.spm").write_bytes(sentencepiece_model(tokenizer.source))
    (folder / "target.spm").write_bytes(sentencepiece_model(tokenizer.target))


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def ids_by_piece(vocabulary: Vocabulary) -> dict[str, int]:
    return {piece: i for i, piece in enumerate(entries(vocabulary))}
