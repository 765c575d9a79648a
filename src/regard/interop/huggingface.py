"""Hugging Face's MarianMTModel: import (for example OPUS-MT, with over a thousand language pairs) and export."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.data.marian_vocabulary import MarianVocabulary
from regard.data.special_tokens import BOS, EOS, MASK, PAD, SPECIAL_TOKENS, UNK
from regard.data.tokenizer import Tokenizer, Vocabulary
from regard.errors import RegardError
from regard.interop.base import (
    HUGGINGFACE,
    MARIAN_NAMES,
    MAX_POSITIONS,
    all_pieces,
    copy_state,
    decoding_note,
    interleaved,
    permute_features,
    piece_ids,
    require_package,
    write_json,
    write_sentencepiece_models,
)
from regard.interop.verification import (
    SampleBatch,
    compare,
    our_activations,
    record_stages,
    sample_batch,
    stages,
)
from regard.nn.network import named_weights
from regard.nn.transformer import Transformer
from regard.recipe import ModelConfig, Recipe, make_recipe
from regard.storage.atomic_files import atomic_folder
from regard.storage.run_dir import RunDir
from regard.tasks import Translator

ACTIVATIONS: dict[str, str] = {
    "swish": "swish",
    "silu": "swish",
    "relu": "relu",
    "gelu": "gelu",
}
"""our name of each of their activation functions"""
NEG_INF = -1e4
"""the logit of a special token that they do not have: its probability is 0, and a mean over logits stays finite"""
MAX_LENGTH = 510
"""tokens of a translation if the recipe has no ``max_length``: their limit cannot depend on the source"""
SIDES = ("source", "target")
REQUIRED_SETTINGS = (
    *("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"),
    *("encoder_ffn_dim", "decoder_ffn_dim", "d_model", "vocab_size"),
    *("pad_token_id", "eos_token_id", "decoder_start_token_id"),
)
"""integers that config.json must have"""


# ---------------------------------------------------------------------------------------------
# Import


@dataclass(frozen=True)
class VocabularyMap:
    """How the rows of a Marian vocabulary correspond to our ids."""

    rows: list[int | None]
    """their row of each of our ids; None if they have no such token"""
    pieces: list[str]
    """by our id"""

    @classmethod
    def from_marian(cls, vocab: Mapping[str, int], settings: Mapping[str, Any]) -> VocabularyMap:
        pad, start = settings["pad_token_id"], settings["decoder_start_token_id"]
        special: list[int | None] = [None] * len(SPECIAL_TOKENS)
        # Marian's decoder starts with PAD, so their PAD is our BOS.
        special[PAD] = None if pad == start else pad
        special[BOS], special[EOS] = start, settings["eos_token_id"]
        special[UNK], special[MASK] = vocab["<unk>"], vocab.get(SPECIAL_TOKENS[MASK])
        pieces = {row: piece for piece, row in vocab.items()}
        others = [row for row in sorted(pieces) if row not in special]
        return cls(
            [*special, *others], [*SPECIAL_TOKENS.values(), *(pieces[row] for row in others)]
        )

    @classmethod
    def identity(cls, vocabulary: Vocabulary) -> VocabularyMap:
        return cls(list(range(vocabulary.size)), all_pieces(vocabulary))

    def reorder(self, x: Tensor, missing: float = 0.0) -> Tensor:
        """Their rows in our order; ``missing`` is the value of rows that they do not have."""
        rows = [
            torch.full_like(x[0], missing) if row is None else x[row]
            for row in self.rows[: len(SPECIAL_TOKENS)]
        ]
        return torch.cat([torch.stack(rows), x[self.rows[len(SPECIAL_TOKENS) :]]])

    def our_id(self, row: int) -> int:
        return self.rows.index(row)


def import_huggingface(folder: Path, out: Path, like: Path | None = None) -> list[str]:
    """Convert a MarianMT folder into a run folder."""
    if like is not None:
        raise RegardError("--like is only for --from torch: a MarianMT folder has its own config")
    settings = _settings(folder)
    maps = [VocabularyMap.from_marian(vocab, settings) for vocab in _vocabs(folder, settings)]
    recipe = _recipe(folder, settings)
    tokenizer = _tokenizer(folder, maps, settings)
    network = Translator.build(recipe, tokenizer)
    assert isinstance(network, Transformer)
    copy_state(network, _our_weights(_their_weights(folder), maps, recipe), str(folder))
    batch = sample_batch(recipe, tokenizer)
    activations = our_activations(network, batch), _their_activations(folder, batch, maps)
    verification = compare(str(folder), *activations, batch)
    texts = _compare_tokenizers(str(folder), folder, tokenizer, batch, maps)
    with atomic_folder(out) as partial:
        run = RunDir(partial)
        run.write_recipe(recipe)
        tokenizer.save(partial)
        run.write_weights(named_weights(network))
        origin = f"{folder.resolve()} (huggingface)"
        run.write_card({"imported_from": origin, "verification": str(verification)})
    notes = []
    if settings.get("early_stopping"):
        notes.append(
            "its generate() uses early_stopping; Regard continues the search and may find better hypotheses"
        )
    done = f"{out}: imported; {texts} texts are tokenized in the same way"
    return [str(verification), *notes, done]


def _settings(folder: Path) -> dict[str, Any]:
    """The settings of config.json, overridden by those of generation_config.json."""
    config = _json(folder / "config.json")
    generation = folder / "generation_config.json"
    overrides = _json(generation) if generation.is_file() else {}
    settings = {**config, **{key: value for key, value in overrides.items() if value is not None}}
    if config.get("model_type") != "marian":
        raise RegardError(
            f"{folder}: model_type {config.get('model_type')!r} is not supported; only marian (OPUS-MT) is"
        )
    missing = [key for key in REQUIRED_SETTINGS if not isinstance(settings.get(key), int)]
    if missing:
        raise RegardError(f"{folder / 'config.json'}: {', '.join(missing)} must be integers")
    for name in ("attention_heads", "ffn_dim"):
        encoder, decoder = config[f"encoder_{name}"], config[f"decoder_{name}"]
        if encoder != decoder:
            raise RegardError(
                f"{folder}: encoder_{name} {encoder} and decoder_{name} {decoder} must be equal"
            )
    if config.get("activation_function") not in ACTIVATIONS:
        raise RegardError(
            f"{folder}: activation_function {config.get('activation_function')!r} is not supported; "
            f"allowed: {', '.join(ACTIVATIONS)}"
        )
    if not config.get("scale_embedding", False):
        raise RegardError(
            f"{folder}: scale_embedding must be true: Regard always scales embeddings"
        )
    return settings


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RegardError(
            f"{path}: no such file; expected the folder of a Hugging Face model"
        ) from None
    except OSError as error:
        raise RegardError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise RegardError(f"{path}: not JSON") from None
    if not isinstance(value, dict):
        raise RegardError(f"{path}: not a JSON object")
    return value


def _shared(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("share_encoder_decoder_embeddings", True))


def _vocabs(folder: Path, settings: Mapping[str, Any]) -> list[dict[str, int]]:
    names = ["vocab.json"] if _shared(settings) else ["vocab.json", "target_vocab.json"]
    if not _shared(settings) and not (folder / names[1]).is_file():
        names[1] = names[0]  # two embeddings of one vocabulary
    sizes = [settings["vocab_size"], settings.get("decoder_vocab_size") or settings["vocab_size"]]
    vocabs = []
    for name, size in zip(names, sizes, strict=False):
        vocab = _json(folder / name)
        if sorted(vocab.values()) != list(range(size)) or "<unk>" not in vocab:
            raise RegardError(
                f"{folder / name}: must have {size} pieces, including <unk>, with the ids 0 to {size - 1}"
            )
        vocabs.append(vocab)
    return [vocabs[0], vocabs[-1]]


def _recipe(folder: Path, settings: Mapping[str, Any]) -> Recipe:
    tokenizer_config = folder / "tokenizer_config.json"
    config = _json(tokenizer_config) if tokenizer_config.is_file() else {}
    languages = [config.get(f"{side}_lang") or side for side in SIDES]
    max_length = int(settings.get("max_length") or 512)
    dropout = settings.get("dropout", 0.1)
    values = {
        "data": {"train": {"pairs": "unknown: the model was imported"}, "languages": languages}
        | {"clean": {"max_tokens": max_length}},
        "tokenizer": {"kind": "marian", "vocab_size": settings["vocab_size"] + len(SPECIAL_TOKENS)}
        | {"shared": _shared(settings), "normalize": "none"},
        "model": {
            "encoder_layers": settings["encoder_layers"],
            "decoder_layers": settings["decoder_layers"],
            "d_model": settings["d_model"],
            "heads": settings["encoder_attention_heads"],
            "d_ff": settings["encoder_ffn_dim"],
            "activation": ACTIVATIONS[settings["activation_function"]],
            "attention": {"bias": True},
            "dropout": dropout,
            "attention_dropout": settings.get("attention_dropout", 0.0),
            "activation_dropout": settings.get("activation_dropout", 0.0),
            "tie_embeddings": _shared(settings),
            "tie_output": settings.get("tie_word_embeddings", True),
            "output_bias": True,
        },
        "decoding": {
            "beam": settings.get("num_beams", 1),
            "length_penalty": settings.get("length_penalty", 1.0),
            "length_normalization": "transformers",
            "extra_length": max_length,
            # Their limit includes the start token and EOS.
            "max_length": max(1, max_length - 2),
        },
    }
    return make_recipe(values, str(folder))


def _tokenizer(
    folder: Path, maps: Sequence[VocabularyMap], settings: Mapping[str, Any]
) -> Tokenizer:
    words = settings.get("bad_words_ids") or []
    if any(len(word) != 1 for word in words):
        raise RegardError(f"{folder}: bad_words_ids with more than one token are not supported")
    suppressed = sorted({maps[1].our_id(row) for (row,) in words} - {PAD, BOS, MASK, EOS})
    models = [_bytes(folder / f"{side}.spm") for side in SIDES]
    try:
        source, target = (
            MarianVocabulary(model, vocabulary_map.pieces, ids)
            for model, vocabulary_map, ids in zip(models, maps, ((), suppressed), strict=True)
        )
    except RuntimeError:
        raise RegardError(f"{folder}: source.spm or target.spm is damaged") from None
    return Tokenizer(source, target)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RegardError(f"{path}: cannot be read: {error.strerror}") from None


def _their_weights(folder: Path) -> dict[str, Tensor]:
    """Their weights by name. Pickle files are loaded with ``weights_only``, so nothing in them is executed."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    try:
        if safe.is_file():
            weights = load_file(safe)
        elif pickled.is_file():
            weights = torch.load(pickled, map_location="cpu", weights_only=True)
        else:
            raise RegardError(f"{folder}: contains neither model.safetensors nor pytorch_model.bin")
    except (SafetensorError, RuntimeError, EOFError) as error:
        raise RegardError(f"{folder}: the weights are damaged: {error}") from None
    except Exception as error:  # pickle.UnpicklingError: the file holds more than tensors
        if isinstance(error, RegardError):
            raise
        raise RegardError(
            f"{pickled}: contains more than weights, so it is not loaded; save the weights as model.safetensors"
        ) from None
    return {name: tensor.float() for name, tensor in weights.items()}


def _our_weights(
    theirs: Mapping[str, Tensor], maps: Sequence[VocabularyMap], recipe: Recipe
) -> dict[str, Tensor]:
    """Their weights under our names, with features and rows in our order."""
    order = interleaved(recipe.model.d_model)
    source, target = maps
    encoder, decoder = (
        _first(theirs, f"model.{side}.embed_tokens.weight", "model.shared.weight")
        for side in ("encoder", "decoder")
    )
    projection = decoder
    if not recipe.model.tie_output:
        projection = _first(theirs, "lm_head.weight")
    bias = theirs.get("final_logits_bias", torch.zeros(1, len(decoder)))[0]
    weights = {
        "encoder.embedding.weight": permute_features(source.reorder(encoder), (1,), order),
        "decoder.embedding.weight": permute_features(target.reorder(decoder), (1,), order),
        "projection.weight": permute_features(target.reorder(projection), (1,), order),
        "projection.bias": target.reorder(bias, NEG_INF),
    }
    if recipe.model.tie_output:
        weights["decoder.embedding.bias"] = weights["projection.bias"]
        if recipe.model.tie_embeddings:
            weights["encoder.embedding.bias"] = weights["projection.bias"]
    for weight in MARIAN_NAMES.weights(recipe.model):
        weights[weight.ours] = permute_features(_first(theirs, weight.theirs), weight.axes, order)
    return weights


def _first(theirs: Mapping[str, Tensor], *names: str) -> Tensor:
    for name in names:
        if name in theirs:
            return theirs[name]
    raise RegardError(f"the weight {names[-1]} is missing")


# ---------------------------------------------------------------------------------------------
# Verification


@torch.no_grad()
def _their_activations(
    folder: Path, batch: SampleBatch, maps: Sequence[VocabularyMap]
) -> dict[str, Tensor]:
    """The activations of the model in ``transformers``, with features and rows in our order."""
    transformers = require_package("transformers")
    with quiet(transformers):
        model = transformers.MarianMTModel.from_pretrained(folder, local_files_only=True)
    model = model.double().eval()
    source, target = maps
    pad = model.config.pad_token_id
    points = stages("encoder", model.model.encoder.layers)
    points += stages("decoder", model.model.decoder.layers)
    with record_stages(points) as recorded:
        logits = model(
            input_ids=_their_ids(batch.source, source, pad),
            attention_mask=batch.source_mask.long(),
            decoder_input_ids=_their_ids(batch.target, target, pad),
            use_cache=False,
        ).logits
    order = interleaved(model.config.d_model)
    ordered = {name: value[..., order] for name, value in recorded.items()}
    our_logits = target.reorder(logits.permute(2, 0, 1), NEG_INF).permute(1, 2, 0)
    return {**ordered, "logits": our_logits}


def _their_ids(ids: Tensor, vocabulary: VocabularyMap, pad: int) -> Tensor:
    rows = torch.tensor([pad if row is None else row for row in vocabulary.rows])
    return torch.where(ids == PAD, pad, rows[ids])


def _compare_tokenizers(
    what: str,
    folder: Path,
    tokenizer: Tokenizer,
    batch: SampleBatch,
    maps: Sequence[VocabularyMap],
) -> int:
    """Check that both tokenizers encode and decode the real texts in the same way. Returns the number of texts."""
    transformers = require_package("transformers")
    with quiet(transformers):
        theirs = transformers.MarianTokenizer.from_pretrained(folder, local_files_only=True)
    sources, targets = (list(texts) for texts in zip(*batch.pairs, strict=True))
    checks = [
        (sources, tokenizer.source, maps[0], theirs(sources).input_ids),
        (targets, tokenizer.target, maps[1], theirs(text_target=targets).input_ids),
    ]
    for texts, vocabulary, vocabulary_map, their_rows in checks:
        for text, ours, rows in zip(texts, vocabulary.encode(texts), their_rows, strict=True):
            if [*ours, EOS] != [vocabulary_map.our_id(row) for row in rows]:
                raise RegardError(f"{what}: MarianTokenizer encodes {text!r} differently")
    encoded = [[i for i in row if i != UNK] for row in tokenizer.target.encode(targets)]
    for text, row in zip(tokenizer.target.decode(encoded), encoded, strict=True):
        if theirs.decode([maps[1].rows[i] for i in row], skip_special_tokens=True) != text.strip():
            raise RegardError(f"{what}: MarianTokenizer decodes {text!r} differently")
    return 2 * len(sources)


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Suppress warnings and progress bars of ``transformers``."""
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()


# ---------------------------------------------------------------------------------------------
# Export


def export_huggingface(folder: Path, out: Path) -> list[str]:
    """Convert a run into a folder that ``MarianMTModel.from_pretrained`` opens."""
    model = Translator.load(folder, "cpu")
    HUGGINGFACE.check(model.recipe, str(folder))
    transformers = require_package("transformers")
    network, tokenizer = model.network, model.tokenizer
    assert isinstance(network, Transformer)
    batch = sample_batch(model.recipe, tokenizer)
    maps = [
        VocabularyMap.identity(vocabulary) for vocabulary in (tokenizer.source, tokenizer.target)
    ]
    with atomic_folder(out) as partial, quiet(transformers):
        config = transformers.MarianConfig(**_config(model.recipe, tokenizer))
        marian = transformers.MarianMTModel(config)
        copy_state(marian, _marian_weights(network, model.recipe.model, marian), str(folder))
        marian.generation_config = transformers.GenerationConfig(**_generation(model))
        marian.save_pretrained(partial)
        _write_tokenizer(partial, model)
        activations = our_activations(network, batch), _their_activations(partial, batch, maps)
        verification = compare(str(folder), *activations, batch)
        texts = _compare_tokenizers(str(folder), partial, tokenizer, batch, maps)
    done = f"{out}: open it with transformers; {texts} texts are tokenized in the same way there"
    return [str(verification), *decoding_note(model.recipe, "transformers"), done]


def _config(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    config = recipe.model
    theirs = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    return {
        "vocab_size": tokenizer.source.size,
        "decoder_vocab_size": tokenizer.target.size,
        "max_position_embeddings": MAX_POSITIONS,
        "d_model": config.d_model,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "encoder_attention_heads": config.heads,
        "decoder_attention_heads": config.heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff,
        "activation_function": theirs[config.activation],
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "scale_embedding": True,
        "pad_token_id": PAD,
        "decoder_start_token_id": BOS,
        "eos_token_id": EOS,
        "forced_eos_token_id": None,
        "share_encoder_decoder_embeddings": config.tie_embeddings,
        "tie_word_embeddings": config.tie_output,
    }


def _generation(model: Translator) -> dict[str, Any]:
    decoding = model.recipe.decoding
    forced_eos = (
        {"forced_eos_token_id": EOS} if decoding.length_normalization == "transformers" else {}
    )
    return {
        "num_beams": decoding.beam,
        "length_penalty": decoding.length_penalty,
        "max_length": min(MAX_POSITIONS, (decoding.max_length or MAX_LENGTH) + 2),
        "early_stopping": False,
        "bad_words_ids": [[i] for i in model.tokenizer.target.suppressed_tokens],
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "decoder_start_token_id": BOS,
        **forced_eos,
    }


@torch.no_grad()
def _marian_weights(network: Transformer, config: ModelConfig, marian: Any) -> dict[str, Tensor]:
    """Our weights under their names, with features in their order; a bias we do not have is zero."""
    order = interleaved(config.d_model).argsort()
    ours, theirs = network.state_dict(), marian.state_dict()
    weights = {name: tensor for name, tensor in theirs.items() if "embed_positions" in name}
    embeddings = {
        "model.shared.weight": ours["decoder.embedding.weight"],
        "model.encoder.embed_tokens.weight": ours["encoder.embedding.weight"],
        "model.decoder.embed_tokens.weight": ours["decoder.embedding.weight"],
        "lm_head.weight": ours["projection.weight"],
    }
    for name, tensor in embeddings.items():
        if name in theirs:
            weights[name] = permute_features(tensor, (1,), order)
    bias = ours.get("projection.bias")
    weights["final_logits_bias"] = torch.zeros(len(network.projection.weight))[None]
    if bias is not None:
        weights["final_logits_bias"] = bias[None]
    for weight in MARIAN_NAMES.weights(config):
        if weight.ours in ours:
            weights[weight.theirs] = permute_features(ours[weight.ours], weight.axes, order)
        else:
            weights[weight.theirs] = torch.zeros_like(theirs[weight.theirs])
    return weights


def _write_tokenizer(folder: Path, model: Translator) -> None:
    tokenizer, (source, target) = model.tokenizer, model.recipe.data.language_pair
    separate = not model.recipe.tokenizer.shared
    write_sentencepiece_models(folder, tokenizer)
    write_json(folder / "vocab.json", piece_ids(tokenizer.source))
    if separate:
        write_json(folder / "target_vocab.json", piece_ids(tokenizer.target))
    special_tokens = {
        "unk_token": SPECIAL_TOKENS[UNK],
        "eos_token": SPECIAL_TOKENS[EOS],
        "pad_token": SPECIAL_TOKENS[PAD],
    }
    config: dict[str, Any] = {"tokenizer_class": "MarianTokenizer"}
    config |= {"source_lang": source, "target_lang": target}
    config |= special_tokens
    config |= {"model_max_length": MAX_POSITIONS, "separate_vocabs": separate}
    write_json(folder / "tokenizer_config.json", config)
