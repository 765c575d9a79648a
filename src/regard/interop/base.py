"""What all formats of other libraries need: what each can represent, optional packages, tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
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
from regard.recipe import DecodingConfig, ModelConfig, Recipe, model_choices
from regard.recipe.registry import allowed_names, find_registry


@dataclass(frozen=True)
class ModelFormat:
    """An export format. Which components it supports is stated where they are registered."""

    name: str
    title: str
    """in messages"""
    equal_heads: bool = True
    """whether d_k and d_v must be d_model / heads"""
    final_norm: bool | None = None
    """whether it always has a final norm (True), never has one (False), or allows both (None)"""
    grouped_queries: bool = False
    """whether key_value_heads may differ from heads"""
    tokenizers: tuple[str, ...] | None = None
    """the kinds of tokenizer it supports; None: all"""
    decoding: tuple[str, ...] | None = None
    """the keys of the decoding section it reads; None: the other library has its own options"""

    def check(self, recipe: Recipe, what: str) -> None:
        """Raise an error if the format cannot represent a recipe's model. what: the model's name in the error."""
        if problems := list(self._problems(recipe)):
            raise RegardError(f"{what}: {self.title} does not support {'; '.join(problems)}")

    def _problems(self, recipe: Recipe) -> Iterator[str]:
        model = recipe.model
        if recipe.task != "translation":
            yield f"task: {recipe.task} (only translation)"
        if recipe.data.targets:
            yield f"data.train.to: {', '.join(recipe.data.targets)} (only one target language, without to)"
        for key, choice in model_choices(model):
            if self.name not in choice.formats:
                yield f"{key}: {choice.name} (only {' or '.join(self._supported(key))})"
        if self.final_norm not in (None, model.final_norm):
            yield f"model.final_norm: {str(model.final_norm).lower()} (only {str(self.final_norm).lower()})"
        if not self.grouped_queries and model.attention.key_value_heads not in (None, model.heads):
            yield f"model.attention.key_value_heads: {model.attention.key_value_heads} (only heads, {model.heads})"
        if self.equal_heads:
            yield from _unequal_heads(model)
        for kind in dict.fromkeys([recipe.tokenizer.kind, recipe.tokenizer.of_target.kind]):
            if self.tokenizers is not None and kind not in self.tokenizers:
                yield f"tokenizer.kind: {kind} (only {' or '.join(self.tokenizers)})"
        if self.decoding is not None:
            yield from _unread_options(recipe.decoding, self.decoding)

    def _supported(self, key: str) -> list[str]:
        """The choices of a recipe key that the format can represent."""
        choices = find_registry(key).choices
        return [name for name in allowed_names(key) if self.name in choices[name].formats]


def _unequal_heads(model: ModelConfig) -> Iterator[str]:
    for key in ("d_k", "d_v"):
        width = getattr(model, key)
        if width * model.heads != model.d_model:
            yield f"model.{key}: {width} (only d_model / heads, {model.d_model / model.heads:g})"


def _unread_options(decoding: DecodingConfig, read: Collection[str]) -> Iterator[str]:
    """The keys of the decoding section that differ from their default although the format does not read them."""
    for key, default in DecodingConfig().model_dump().items():
        if key not in read and (value := getattr(decoding, key)) != default:
            yield f"decoding.{key}: {value} (only {default})"


def decoding_note(recipe: Recipe, rule: str) -> list[str]:
    """A note for users if the other library normalizes scores by length in another way than the recipe."""
    decoding = recipe.decoding
    if decoding.length_normalization == rule or decoding.beam == 1 or decoding.length_penalty == 0:
        return []
    return [
        "its beam search divides scores by length ** length_penalty; "
        f"regard translate --length-normalization {rule} does the same"
    ]


HUGGINGFACE = ModelFormat("huggingface", "MarianMTModel", final_norm=False)
CTRANSLATE2 = ModelFormat("ctranslate2", "CTranslate2")
ONNX = ModelFormat("onnx", "the ONNX export", equal_heads=False)
TORCH = ModelFormat("torch", "torch.nn.Transformer", final_norm=True)
HTML = ModelFormat(
    "html",
    "the HTML export",
    equal_heads=False,
    grouped_queries=True,
    tokenizers=("unigram", "bpe", "char", "word"),
    decoding=(
        *("beam", "length_penalty", "length_normalization", "extra_length", "max_length"),
        *("temperature", "seed"),
        *("iterations", "length_beam", "diversity_penalty", "constrained_beam"),  # of other methods
    ),
)


# ---------------------------------------------------------------------------------------------
# Optional packages, and files


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
