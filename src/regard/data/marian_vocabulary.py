"""Vocabularies of models made elsewhere: their own SentencePiece, their own pieces, our marks in front.

Marian's (OPUS-MT) has two SentencePiece models, one for each side, and a list of pieces of its own, ``vocab.json``,
which is not in SentencePiece's order. The rows of the weights follow that list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from regard import recipe
from regard.data.special_tokens import BOS, MASK, PAD, SPACE_SYMBOL, SPECIAL_TOKENS, UNK
from regard.data.tokenizer import (
    SILENT,
    UNK_SYMBOL,
    Tokenizer,
    Vocabulary,
    read_model,
    side_names,
    utf8,
)
from regard.errors import RegardError

_LANGUAGE = re.compile(r">>.*?<<", re.DOTALL)
"""as in ``>>fra<< How are you?``: which language a model of many is to speak"""


class MarianVocabulary(Vocabulary):
    """The pieces of one side of a Marian model."""

    def __init__(self, model: bytes, entries: Sequence[str], banned: Sequence[int] = ()) -> None:
        super().__init__(model, "none")
        self.tags = {}  # theirs stand in the text
        assert list(entries[: len(SPECIAL_TOKENS)]) == list(SPECIAL_TOKENS.values()), (
            "our marks come first"
        )
        self.entries = list(entries)
        """every piece, by id"""
        self.banned = tuple(banned)
        """what their settings forbid a translation to contain"""
        self._ids = {piece: i for i, piece in enumerate(entries) if i not in SPECIAL_TOKENS}

    @property
    def size(self) -> int:
        return len(self.entries)

    @property
    def line_breaks(self) -> list[int]:
        return []  # their normaliser makes every line break a space

    @property
    def suppressed_tokens(self) -> tuple[int, ...]:
        return (PAD, BOS, MASK, *self.banned)

    def normalize(self, text: str) -> str:
        """As SentencePiece's own rules, which stand in its file, would have it."""
        return str(self._processor.normalize(text))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        assert not isinstance(texts, str), "a list of texts"
        return [[self._ids.get(piece, UNK) for piece in self._cut(text)] for text in texts]

    def inside(self, text: str) -> list[int]:
        first, *rest = self._cut(text) or [""]
        pieces = filter(None, [first.removeprefix(SPACE_SYMBOL), *rest])
        return [self._ids.get(piece, UNK) for piece in pieces]

    def _cut(self, text: str) -> list[str]:
        language = _LANGUAGE.match(text)
        code = [] if language is None else [language[0]]
        rest = utf8(text[len("".join(code)) :])
        pieces: list[str] = self._processor.encode(rest, out_type=str)
        return code + pieces

    def decode(self, ids: Iterable[Sequence[int]]) -> list[str]:
        return [self._join([self.entries[i] for i in row if i not in SILENT]) for row in ids]

    def _join(self, pieces: list[str]) -> str:
        known = [
            f"{SPACE_SYMBOL}{UNK_SYMBOL}" if piece == SPECIAL_TOKENS[UNK] else piece
            for piece in pieces
        ]
        return str(self._processor.decode_pieces(known)).replace(SPACE_SYMBOL, " ").strip()

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self.entries[i] for i in ids]

    def files(self, stem: str) -> dict[str, bytes]:
        plain = {"pieces": self.entries, "banned": list(self.banned)}
        text = json.dumps(plain, ensure_ascii=False, indent=0)
        return {**super().files(stem), f"{stem}.pieces.json": text.encode("utf-8")}


def load_marian(folder: Path, section: recipe.Tokenizer, labels: bool = False) -> Tokenizer:
    assert not labels, "only translators are imported"
    source, target = (_load(folder, stem) for stem in side_names(shared=False))
    return Tokenizer(source, target)


def _load(folder: Path, stem: str) -> MarianVocabulary:
    path = folder / f"{stem}.pieces.json"
    model = read_model(folder / f"{stem}.model")
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        return MarianVocabulary(model, plain["pieces"], plain["banned"])
    except FileNotFoundError:
        raise RegardError(f"{path}: no such file; the tokenizer is missing") from None
    except RuntimeError:
        raise RegardError(f"{folder / stem}.model: damaged, or not a SentencePiece model") from None
    except (ValueError, KeyError, TypeError, AssertionError):
        raise RegardError(f"{path}: damaged, not a list of pieces in JSON") from None
