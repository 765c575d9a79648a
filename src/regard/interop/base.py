"""What all formats of other libraries need: what each can represent, weight names, optional packages, tokenizer files.

``LayerNames`` has the names of our weights in another library, and which of their axes are features of the residual
stream (d_model). The axes matter if the other library orders features differently. Marian's sinusoidal positions are
sin … sin cos … cos; ours are sin cos sin cos …, as in the paper. Positions are added to embeddings, so this order is
the order of the features. The network stays the same function if *every* weight that reads or writes d_model features
is permuted: embeddings, norms, the inputs of W^Q, W^K, W^V and W1, the outputs of W^O and W2, and the output
projection. Features inside a head and inside the feed-forward network keep their order.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

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
        if self.name not in find_registry("task").choices[recipe.task].formats:
            yield f"task: {recipe.task} (only {' or '.join(self._supported('task'))})"
        if recipe.data.targets:
            yield f"data.train.to: {', '.join(recipe.data.targets)} (only one target language, without to)"
        for key, choice in model_choices(model):
            if self.name not in choice.formats:
                yield f"{key}: {choice.name} (only {' or '.join(self._supported(key))})"
        if self.final_norm not in (None, model.final_norm):
            yield f"model.final_norm: {str(model.final_norm).lower()} (only {str(self.final_norm).lower()})"
        if not self.grouped_queries and model.attention.key_value_heads not in (None, model.heads):
            yield (
                f"model.attention.key_value_heads: {model.attention.key_value_heads} "
                f"(must equal model.heads, {model.heads})"
            )
        if self.equal_heads:
            yield from _unequal_heads(model)
        for tokenizer_kind in dict.fromkeys(
            [recipe.tokenizer.kind, recipe.tokenizer.of_target.kind]
        ):
            if self.tokenizers is not None and tokenizer_kind not in self.tokenizers:
                yield f"tokenizer.kind: {tokenizer_kind} (only {' or '.join(self.tokenizers)})"
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
            yield f"model.{key}: {width} (must be d_model / heads, {model.d_model / model.heads:g})"


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


class WeightName(NamedTuple):
    """One weight under both names."""

    ours: str
    theirs: str
    axes: tuple[int, ...]
    """the axes that are d_model features"""


class ModuleName(NamedTuple):
    """A linear map or a norm of a layer under both names."""

    ours: str
    theirs: str
    reads: bool
    """its inputs are d_model features"""
    writes: bool
    """its outputs are d_model features"""

    def weights(self, our_prefix: str = "", their_prefix: str = "") -> Iterator[WeightName]:
        inputs = (1,) if self.reads else ()
        outputs = (0,) if self.writes else ()
        ours, theirs = f"{our_prefix}{self.ours}", f"{their_prefix}{self.theirs}"
        yield WeightName(f"{ours}.weight", f"{theirs}.weight", (*outputs, *inputs))
        yield WeightName(f"{ours}.bias", f"{theirs}.bias", outputs)


def _attention(ours: str, theirs: str) -> list[ModuleName]:
    projections = [
        ModuleName(f"{ours}.{name}", f"{theirs}.{name[0]}_proj", reads=True, writes=False)
        for name in ("query", "key", "value")
    ]
    output = ModuleName(f"{ours}.output", f"{theirs}.out_proj", reads=False, writes=True)
    return [*projections, output]


def _norm(ours: str, theirs: str) -> ModuleName:
    return ModuleName(ours, theirs, reads=False, writes=True)


class LayerNames(NamedTuple):
    """The names of another library for the modules of a layer."""

    prefix: str
    """before the names of the stacks, encoder and decoder"""
    self_attention: str
    self_attention_norm: str
    cross_attention: str
    cross_attention_norm: str
    inner: str
    outer: str
    encoder_feed_forward_norm: str
    decoder_feed_forward_norm: str

    def modules(self, stack: str) -> list[ModuleName]:
        """The modules of a layer of the encoder or the decoder."""
        modules = _attention("attention", self.self_attention)
        modules.append(_norm("attention_residual.norm", self.self_attention_norm))
        feed_forward_norm = self.encoder_feed_forward_norm
        if stack == "decoder":
            modules += _attention("cross_attention", self.cross_attention)
            modules.append(_norm("cross_attention_residual.norm", self.cross_attention_norm))
            feed_forward_norm = self.decoder_feed_forward_norm
        return [
            *modules,
            ModuleName("feed_forward.inner", self.inner, reads=True, writes=False),
            ModuleName("feed_forward.outer", self.outer, reads=False, writes=True),
            _norm("feed_forward_residual.norm", feed_forward_norm),
        ]

    def weights(self, config: ModelConfig) -> Iterator[WeightName]:
        """Every weight of every layer, and of the final norms."""
        counts = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
        for stack, count in counts.items():
            for layer in range(count):
                ours = f"{stack}.layers.{layer}."
                for module in self.modules(stack):
                    yield from module.weights(ours, f"{self.prefix}{ours}")
            if config.final_norm:
                yield from _norm(f"{stack}.norm", f"{self.prefix}{stack}.norm").weights()


MARIAN_NAMES = LayerNames(
    prefix="model.",
    self_attention="self_attn",
    self_attention_norm="self_attn_layer_norm",
    cross_attention="encoder_attn",
    cross_attention_norm="encoder_attn_layer_norm",
    inner="fc1",
    outer="fc2",
    encoder_feed_forward_norm="final_layer_norm",
    decoder_feed_forward_norm="final_layer_norm",
)
TORCH_NAMES = LayerNames(
    prefix="transformer.",
    self_attention="self_attn",
    self_attention_norm="norm1",
    cross_attention="multihead_attn",
    cross_attention_norm="norm2",
    inner="linear1",
    outer="linear2",
    encoder_feed_forward_norm="norm2",
    decoder_feed_forward_norm="norm3",
)


def interleaved(d_model: int) -> Int[Tensor, " d"]:
    """The index of each of our features among Marian's: of sin_0 cos_0 sin_1 … in sin_0 sin_1 … cos_0 cos_1 …"""
    return torch.arange(d_model).view(2, d_model // 2).T.flatten()


def permute_features(x: Tensor, axes: tuple[int, ...], order: Int[Tensor, " d"]) -> Tensor:
    for axis in axes:
        x = x.index_select(axis, order)
    return x


@torch.no_grad()
def copy_state(network: nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Copy weights into a network. None may be missing or left over. where: the origin of the weights in errors."""
    state = network.state_dict()
    for name, tensor in state.items():
        if name not in weights:
            raise RegardError(f"{where}: the weight {name} is missing")
        if tensor.shape != weights[name].shape:
            shape, expected_shape = list(weights[name].shape), list(tensor.shape)
            raise RegardError(
                f"{where}: {name} has shape {shape}, but the model needs {expected_shape}"
            )
        tensor.copy_(weights[name])
    if extra := sorted(weights.keys() - state.keys()):
        raise RegardError(f"{where}: the model has no weight {extra[0]}")
