"""Packages of other people, asked for only when a conversion needs them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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
from regard.storage.run_dir import PARTIAL


def need(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise RegardError(f"this needs {error.name}: pip install 'regard[exchange]'") from None


# ---------------------------------------------------------------------------------------------
# A folder is written whole or not at all.


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """A folder beside out to write into. It takes out's name at the end; on any error it is gone."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise RegardError(f"{out}: exists already; give --out another name, or remove it")
    partial = out.with_name(f".{out.name}{PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        if out.exists():
            out.rmdir()
        partial.replace(out)
    except OSError as error:
        raise RegardError(f"{out}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# ---------------------------------------------------------------------------------------------
# Our vocabularies as files that others can open.


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


# ---------------------------------------------------------------------------------------------
# Positions as other formats have them: what is added to the words, in a table.


POSITIONS = 1024
"""of such a table; sinusoids have no end with us"""


@torch.no_grad()
def table(stack: Encoder | Decoder) -> Float[Tensor, "T d"]:
    nothing = torch.zeros(1, stack.position.longest or POSITIONS, stack.embedding.weight.shape[1])
    added: Tensor = stack.position(nothing)
    return added[0]
