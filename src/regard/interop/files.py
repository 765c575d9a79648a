"""What several formats need: optional packages, the tokenizer as files for other libraries, and position tables."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.data.marian_vocabulary import MarianVocabulary
from regard.data.tokenizer import Tokenizer, Vocabulary
from regard.errors import RegardError
from regard.nn.transformer import Decoder, Encoder

MAX_POSITIONS = 1024
"""rows of an exported position table; our sinusoids have no limit"""

_ADD_DUMMY_PREFIX = b"\x1a\x02\x18\x01"
"""normalizer_spec { add_dummy_prefix: true } in the wire format of protocol buffers. Bytes appended to a message are
merged into it, so one field of a SentencePiece model can be changed without a library."""


def require_package(name: str) -> Any:
    """Import an optional package, or say how to install it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise RegardError(f"{error.name} is not installed: pip install 'regard[interop]'") from None


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------
# Tokenizers


def sentencepiece_model(vocabulary: Vocabulary) -> bytes:
    """A SentencePiece model that splits ordinary text into the same pieces as our tokenizer.

    Our tokenizer puts a space before each text; here SentencePiece does. Two things cannot be expressed: the recipe's
    Unicode normalization, and that U+2581, U+2585 and U+FDD0 in a text are escaped.
    """
    if isinstance(vocabulary, MarianVocabulary):
        return vocabulary.model
    return vocabulary.model + _ADD_DUMMY_PREFIX


def all_pieces(vocabulary: Vocabulary) -> list[str]:
    """Every piece of a vocabulary, in the order of the ids."""
    return vocabulary.pieces(range(vocabulary.size))


def piece_ids(vocabulary: Vocabulary) -> dict[str, int]:
    return {piece: i for i, piece in enumerate(all_pieces(vocabulary))}


def write_sentencepiece_models(folder: Path, tokenizer: Tokenizer) -> None:
    (folder / "source.spm").write_bytes(sentencepiece_model(tokenizer.source))
    (folder / "target.spm").write_bytes(sentencepiece_model(tokenizer.target))


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """The SentencePiece models, and the id of every piece as JSON."""
    write_sentencepiece_models(folder, tokenizer)
    write_json(folder / "vocab.source.json", piece_ids(tokenizer.source))
    write_json(folder / "vocab.target.json", piece_ids(tokenizer.target))


# ---------------------------------------------------------------------------------------------
# Positions


@torch.no_grad()
def position_table(stack: Encoder | Decoder) -> Float[Tensor, "T d"]:
    """What a stack adds to its embeddings, position by position."""
    length, d_model = stack.position.max_length or MAX_POSITIONS, stack.embedding.weight.shape[1]
    encoded: Tensor = stack.position(torch.zeros(1, length, d_model))
    return encoded[0]
