"""Vocabularies of imported Marian (OPUS-MT) models.

A Marian model has two SentencePiece models, one for each side, and its own list of pieces, ``vocab.json``, in another
order. The rows of the weights follow that list, with our special tokens put first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from regard import recipe
from regard.data.special_tokens import BOS, MASK, PAD, SPACE_SYMBOL, SPECIAL_TOKENS, UNK
from regard.data.tokenizer import (
    SKIPPED_TOKENS,
    UNK_SYMBOL,
    Tokenizer,
    Vocabulary,
    encode_utf8,
    file_stems,
    read_model,
)
from regard.errors import RegardError

_LANGUAGE = re.compile(r">>.*?<<", re.DOTALL)
"""as in ``>>fra<< How are you?``: the target language of a multilingual model"""


class MarianVocabulary(Vocabulary):
    """The pieces of one side of a Marian model."""

    def __init__(self, model: bytes, entries: Sequence[str], banned: Sequence[int] = ()) -> None:
        """``entries``: every piece, by id. ``banned``: ids that the model's settings forbid in a translation."""
        super().__init__(model, "none")
        self.tags = {}  # Marian's tags are part of the text
        assert list(entries[: len(SPECIAL_TOKENS)]) == list(SPECIAL_TOKENS.values()), (
            "the special tokens come first"
        )
        self.entries = list(entries)
        self.banned = tuple(banned)
        self._ids = {piece: i for i, piece in enumerate(entries) if i not in SPECIAL_TOKENS}

    @property
    def size(self) -> int:
        return len(self.entries)

    @property
    def line_break_ids(self) -> list[int]:
        return []  # Marian's normalizer turns line breaks into spaces

    @property
    def suppressed_tokens(self) -> tuple[int, ...]:
        return (PAD, BOS, MASK, *self.banned)

    def normalize(self, text: str) -> str:
        """Apply the normalization rules of the SentencePiece model."""
        return str(self._processor.normalize(text))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        assert not isinstance(texts, str), "a list of texts"
        return [[self._ids.get(piece, UNK) for piece in self._segment(text)] for text in texts]

    def encode_continuation(self, text: str) -> list[int]:
        first_piece, *following = self._segment(text) or [""]
        pieces = filter(None, [first_piece.removeprefix(SPACE_SYMBOL), *following])
        return [self._ids.get(piece, UNK) for piece in pieces]

    def _segment(self, text: str) -> list[str]:
        language = _LANGUAGE.match(text)
        code = [] if language is None else [language[0]]
        untagged = encode_utf8(text[len("".join(code)) :])
        pieces: list[str] = self._processor.encode(untagged, out_type=str)
        return code + pieces

    def decode(self, ids: Iterable[Sequence[int]]) -> list[str]:
        return [
            self._join([self.entries[i] for i in row if i not in SKIPPED_TOKENS]) for row in ids
        ]

    def _join(self, pieces: list[str]) -> str:
        printable = [
            f"{SPACE_SYMBOL}{UNK_SYMBOL}" if piece == SPECIAL_TOKENS[UNK] else piece
            for piece in pieces
        ]
        return str(self._processor.decode_pieces(printable)).replace(SPACE_SYMBOL, " ").strip()

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self.entries[i] for i in ids]

    def files(self, stem: str) -> dict[str, bytes]:
        content = {"pieces": self.entries, "banned": list(self.banned)}
        text = json.dumps(content, ensure_ascii=False, indent=0)
        return {**super().files(stem), f"{stem}.pieces.json": text.encode("utf-8")}


def load_marian(folder: Path, config: recipe.TokenizerConfig, labels: bool = False) -> Tokenizer:
    """Load the tokenizer of an imported Marian model from a run folder."""
    assert not labels, "only translation models are imported"
    source, target = (_load(folder, stem) for stem in file_stems(shared=False))
    return Tokenizer(source, target)


def _load(folder: Path, stem: str) -> MarianVocabulary:
    path = folder / f"{stem}.pieces.json"
    model = read_model(folder / f"{stem}.model")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return MarianVocabulary(model, content["pieces"], content["banned"])
    except FileNotFoundError:
        raise RegardError(f"{path}: no such file; the tokenizer is missing") from None
    except RuntimeError:
        raise RegardError(f"{folder / stem}.model: damaged, or not a SentencePiece model") from None
    except (ValueError, KeyError, TypeError, AssertionError):
        raise RegardError(f"{path}: damaged: not a JSON list of pieces") from None
