"""Hugging Face's MarianMTModel, which holds OPUS-MT: more than a thousand pairs of languages."""

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
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.interop.files import POSITIONS, ids_by_piece, need, whole, write_json, write_models
from regard.interop.supported import HUGGINGFACE, decoding_note
from regard.interop.verification import Inputs, compare, inputs, our_side, stages, watched
from regard.interop.weight_names import MARIAN, fill, interleaved, reordered
from regard.nn.state_dict import named_weights
from regard.nn.transformer import Transformer
from regard.recipe import Model, Recipe, make_recipe
from regard.storage.run_dir import RunDir
from regard.tasks import Translator

ACTIVATIONS: dict[str, str] = {
    "swish": "swish",
    "silu": "swish",
    "relu": "relu",
    "gelu": "gelu",
}
"""their name to ours"""
NEG_INF = -1e4
"""the logit of a mark they do not have: the probability of such a mark is 0, and a mean over logits stays a number"""
LONGEST = 510
"""tokens of a translation, where the recipe sets no limit of its own: theirs cannot depend on the source"""
LANGUAGES = ("source", "target")
NEEDED = (
    *("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"),
    *("encoder_ffn_dim", "decoder_ffn_dim", "d_model", "vocab_size"),
    *("pad_token_id", "eos_token_id", "decoder_start_token_id"),
)
"""what their settings must say"""


# Import


@dataclass(frozen=True)
class Side:
    """One side of their vocabulary."""

    rows: list[int | None]
    """for each of our ids the row it has with them; None: they have no such row"""
    pieces: list[str]
    """by our id"""

    @classmethod
    def of(cls, vocab: Mapping[str, int], settings: Mapping[str, Any]) -> Side:
        pad, start = settings["pad_token_id"], settings["decoder_start_token_id"]
        marks: list[int | None] = [None] * len(SPECIAL_TOKENS)
        # Marian's decoder begins by reading PAD, so what is PAD there is BOS here.
        marks[PAD] = None if pad == start else pad
        marks[BOS], marks[EOS] = start, settings["eos_token_id"]
        marks[UNK], marks[MASK] = vocab["<unk>"], vocab.get(SPECIAL_TOKENS[MASK])
        texts = {row: piece for piece, row in vocab.items()}
        others = [row for row in sorted(texts) if row not in marks]
        return cls([*marks, *others], [*SPECIAL_TOKENS.values(), *(texts[row] for row in others)])

    def take(self, x: Tensor, missing: float = 0.0) -> Tensor:
        """Their rows in our order."""
        rows = [
            torch.full_like(x[0], missing) if row is None else x[row]
            for row in self.rows[: len(SPECIAL_TOKENS)]
        ]
        return torch.cat([torch.stack(rows), x[self.rows[len(SPECIAL_TOKENS) :]]])

    def id(self, row: int) -> int:
        return self.rows.index(row)


def import_huggingface(folder: Path, out: Path, like: Path | None = None) -> list[str]:
    """A MarianMT folder to a run folder."""
    if like is not None:
        raise RegardError("--like is for --from torch: a MarianMT folder knows its own shape")
    settings = _settings(folder)
    vocabs = _vocabs(folder, settings)
    sides = [Side.of(vocab, settings) for vocab in vocabs]
    recipe = _recipe(folder, settings)
    tokenizer = _tokenizer(folder, sides, settings)
    network = Translator.build(recipe, tokenizer)
    assert isinstance(network, Transformer)
    fill(network, _our_weights(_their_weights(folder), sides, recipe), str(folder))
    given = inputs(recipe, tokenizer)
    proof = compare(str(folder), our_side(network, given), _their_side(folder, given, sides), given)
    texts = _same_pieces(str(folder), folder, tokenizer, given, sides)
    with whole(out) as partial:
        run = RunDir(partial)
        run.write_recipe(recipe)
        tokenizer.save(partial)
        run.write_weights(named_weights(network))
        run.write_card({"imported_from": f"{folder.resolve()} (huggingface)", "proof": str(proof)})
    notes = []
    if settings.get("early_stopping"):
        notes.append(
            "its generate stops early (early_stopping); here it looks on, and may find better"
        )
    done = f"{out}: a model as if it were trained here; {texts} texts give the same pieces"
    return [str(proof), *notes, done]


def _settings(folder: Path) -> dict[str, Any]:
    """config.json, and on top of it what generation_config.json says."""
    config = _json(folder / "config.json")
    generation = folder / "generation_config.json"
    said = _json(generation) if generation.is_file() else {}
    settings = {**config, **{key: value for key, value in said.items() if value is not None}}
    if config.get("model_type") != "marian":
        raise RegardError(
            f"{folder}: model_type {config.get('model_type')!r}; only marian (OPUS-MT) can be imported"
        )
    if lacking := [key for key in NEEDED if not isinstance(settings.get(key), int)]:
        raise RegardError(f"{folder / 'config.json'}: no whole number for {', '.join(lacking)}")
    twos = [("encoder_attention_heads", "decoder_attention_heads")]
    twos.append(("encoder_ffn_dim", "decoder_ffn_dim"))
    for one, other in twos:
        if config[one] != config[other]:
            raise RegardError(
                f"{folder}: {one} {config[one]} and {other} {config[other]}: they must be equal here"
            )
    if config.get("activation_function") not in ACTIVATIONS:
        raise RegardError(
            f"{folder}: activation_function {config.get('activation_function')!r}; "
            f"possible are {', '.join(ACTIVATIONS)}"
        )
    if not config.get("scale_embedding", False):
        raise RegardError(f"{folder}: scale_embedding false; embeddings are always scaled here")
    return settings


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RegardError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise RegardError(f"{path}: not JSON") from None
    if not isinstance(found, dict):
        raise RegardError(f"{path}: not a JSON object")
    return found


def _shares(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("share_encoder_decoder_embeddings", True))


def _vocabs(folder: Path, settings: Mapping[str, Any]) -> list[dict[str, int]]:
    names = ["vocab.json"] if _shares(settings) else ["vocab.json", "target_vocab.json"]
    if not _shares(settings) and not (folder / names[1]).is_file():
        names[1] = names[0]  # two embeddings of one vocabulary
    sizes = [settings["vocab_size"], settings.get("decoder_vocab_size") or settings["vocab_size"]]
    found = []
    for name, size in zip(names, sizes, strict=False):
        vocab = _json(folder / name)
        if sorted(vocab.values()) != list(range(size)) or "<unk>" not in vocab:
            raise RegardError(f"{folder / name}: not <unk> and {size - 1} other pieces, one a row")
        found.append(vocab)
    return [found[0], found[-1]]


def _recipe(folder: Path, settings: Mapping[str, Any]) -> Recipe:
    tokenizer_config = folder / "tokenizer_config.json"
    known = _json(tokenizer_config) if tokenizer_config.is_file() else {}
    languages = [known.get(f"{side}_lang") or side for side in LANGUAGES]
    longest = int(settings.get("max_length") or 512)
    dropout = settings.get("dropout", 0.1)
    values = {
        "data": {"train": {"pairs": "not known, the model was imported"}, "languages": languages}
        | {"clean": {"max_tokens": longest}},
        "tokenizer": {"kind": "marian", "vocab_size": settings["vocab_size"] + len(SPECIAL_TOKENS)}
        | {"shared": _shares(settings), "normalize": "none"},
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
            "tie_embeddings": _shares(settings),
            "tie_output": settings.get("tie_word_embeddings", True),
            "output_bias": True,
        },
        "decoding": {
            "beam": settings.get("num_beams", 1),
            "length_penalty": settings.get("length_penalty", 1.0),
            "length_normalization": "transformers",
            "extra_length": longest,
            # Theirs counts what the decoder begins with, and EOS.
            "max_length": max(1, longest - 2),
        },
    }
    return make_recipe(values, str(folder))


def _tokenizer(folder: Path, sides: Sequence[Side], settings: Mapping[str, Any]) -> Tokenizer:
    words = settings.get("bad_words_ids") or []
    if any(len(word) != 1 for word in words):
        raise RegardError(f"{folder}: bad_words_ids of several tokens are not possible here")
    banned = sorted({sides[1].id(row) for (row,) in words} - {PAD, BOS, MASK, EOS})
    models = [_bytes(folder / f"{side}.spm") for side in LANGUAGES]
    try:
        source, target = (
            MarianVocabulary(model, side.pieces, not_said)
            for model, side, not_said in zip(models, sides, ((), banned), strict=True)
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
    """By name; nothing in the file is executed."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    try:
        if safe.is_file():
            found = load_file(safe)
        elif pickled.is_file():
            found = torch.load(pickled, map_location="cpu", weights_only=True)
        else:
            raise RegardError(f"{folder}: neither model.safetensors nor pytorch_model.bin is there")
    except (SafetensorError, RuntimeError, EOFError) as error:
        raise RegardError(f"{folder}: the weights are damaged: {error}") from None
    except Exception as error:  # pickle.UnpicklingError: more than tensors is in the file
        if isinstance(error, RegardError):
            raise
        raise RegardError(f"{pickled}: holds more than weights, so it is not read") from None
    return {name: tensor.float() for name, tensor in found.items()}


def _our_weights(
    theirs: Mapping[str, Tensor], sides: Sequence[Side], recipe: Recipe
) -> dict[str, Tensor]:
    """Their weights under our names, features and rows in our order."""
    order = interleaved(recipe.model.d_model)
    source, target = sides
    encoder, decoder = (
        _first(theirs, f"model.{side}.embed_tokens.weight", "model.shared.weight")
        for side in ("encoder", "decoder")
    )
    projection = decoder
    if not recipe.model.tie_output:
        projection = _first(theirs, "lm_head.weight")
    bias = theirs.get("final_logits_bias", torch.zeros(1, len(decoder)))[0]
    found = {
        "encoder.embedding.weight": reordered(source.take(encoder), (1,), order),
        "decoder.embedding.weight": reordered(target.take(decoder), (1,), order),
        "projection.weight": reordered(target.take(projection), (1,), order),
        "projection.bias": target.take(bias, NEG_INF),
    }
    if recipe.model.tie_output:
        found["decoder.embedding.bias"] = found["projection.bias"]
        if recipe.model.tie_embeddings:
            found["encoder.embedding.bias"] = found["projection.bias"]
    for weight in MARIAN.weights(recipe.model):
        found[weight.ours] = reordered(_first(theirs, weight.theirs), weight.axes, order)
    return found


def _first(theirs: Mapping[str, Tensor], *names: str) -> Tensor:
    for name in names:
        if name in theirs:
            return theirs[name]
    raise RegardError(f"the weights have no {names[-1]}")


# Both sides, stage by stage


@torch.no_grad()
def _their_side(folder: Path, given: Inputs, sides: Sequence[Side]) -> dict[str, Tensor]:
    """What transformers makes of the folder and of the same texts; features and rows in our order."""
    transformers = need("transformers")
    with quiet(transformers):
        model = transformers.MarianMTModel.from_pretrained(folder, local_files_only=True)
    model = model.double().eval()
    source, target = sides
    pad = model.config.pad_token_id
    places = stages("encoder", model.model.encoder.layers)
    places += stages("decoder", model.model.decoder.layers)
    with watched(places) as seen:
        logits = model(
            input_ids=_theirs(given.source, source, pad),
            attention_mask=given.source_real.long(),
            decoder_input_ids=_theirs(given.target, target, pad),
            use_cache=False,
        ).logits
    order = interleaved(model.config.d_model)
    reordered_stages = {name: value[..., order] for name, value in seen.items()}
    ours = target.take(logits.permute(2, 0, 1), NEG_INF).permute(1, 2, 0)
    return {**reordered_stages, "logits": ours}


def _theirs(ids: Tensor, side: Side, pad: int) -> Tensor:
    rows = torch.tensor([pad if row is None else row for row in side.rows])
    return torch.where(ids == PAD, pad, rows[ids])


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Its advice and its progress bars are not for our users."""
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()


# Export


def export_huggingface(folder: Path, out: Path) -> list[str]:
    """A run folder to one that ``MarianMTModel.from_pretrained`` opens."""
    model = Translator.load(folder, "cpu")
    HUGGINGFACE.check(model.recipe, str(folder))
    transformers = need("transformers")
    network, tokenizer = model.network, model.tokenizer
    assert isinstance(network, Transformer)
    given = inputs(model.recipe, tokenizer)
    same = [
        Side(list(range(side.size)), side.pieces(range(side.size)))
        for side in (tokenizer.source, tokenizer.target)
    ]
    with whole(out) as partial, quiet(transformers):
        config = transformers.MarianConfig(**_config(model.recipe, tokenizer))
        marian = transformers.MarianMTModel(config)
        fill(marian, _marian_weights(network, model.recipe.model, marian), str(folder))
        marian.generation_config = transformers.GenerationConfig(**_generation(model))
        marian.save_pretrained(partial)
        _write_tokenizer(partial, model)
        theirs = _their_side(partial, given, same)
        proof = compare(str(folder), our_side(network, given), theirs, given)
        texts = _same_pieces(str(folder), partial, tokenizer, given, same)
    done = f"{out}: opens in transformers; {texts} texts give the same pieces there"
    return [str(proof), *decoding_note(model.recipe, "transformers"), done]


def _config(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    section = recipe.model
    theirs = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    return {
        "vocab_size": tokenizer.source.size,
        "decoder_vocab_size": tokenizer.target.size,
        "max_position_embeddings": POSITIONS,
        "d_model": section.d_model,
        "encoder_layers": section.encoder_layers,
        "decoder_layers": section.decoder_layers,
        "encoder_attention_heads": section.heads,
        "decoder_attention_heads": section.heads,
        "encoder_ffn_dim": section.d_ff,
        "decoder_ffn_dim": section.d_ff,
        "activation_function": theirs[section.activation],
        "dropout": section.dropout,
        "attention_dropout": section.attention_dropout,
        "activation_dropout": section.activation_dropout,
        "scale_embedding": True,
        "pad_token_id": PAD,
        "decoder_start_token_id": BOS,
        "eos_token_id": EOS,
        "forced_eos_token_id": None,
        "share_encoder_decoder_embeddings": section.tie_embeddings,
        "tie_word_embeddings": section.tie_output,
    }


def _generation(model: Translator) -> dict[str, Any]:
    search = model.recipe.decoding
    forced = {"forced_eos_token_id": EOS} if search.length_normalization == "transformers" else {}
    return {
        "num_beams": search.beam,
        "length_penalty": search.length_penalty,
        "max_length": min(POSITIONS, (search.max_length or LONGEST) + 2),
        "early_stopping": False,
        "bad_words_ids": [[i] for i in model.tokenizer.target.suppressed_tokens],
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "decoder_start_token_id": BOS,
        **forced,
    }


@torch.no_grad()
def _marian_weights(network: Transformer, section: Model, marian: Any) -> dict[str, Tensor]:
    """Our weights under their names, features in their order; a bias we do not have is zero."""
    order = interleaved(section.d_model).argsort()
    ours, theirs = network.state_dict(), marian.state_dict()
    found = {name: tensor for name, tensor in theirs.items() if "embed_positions" in name}
    embeddings = {
        "model.shared.weight": ours["decoder.embedding.weight"],
        "model.encoder.embed_tokens.weight": ours["encoder.embedding.weight"],
        "model.decoder.embed_tokens.weight": ours["decoder.embedding.weight"],
        "lm_head.weight": ours["projection.weight"],
    }
    for name, tensor in embeddings.items():
        if name in theirs:
            found[name] = reordered(tensor, (1,), order)
    bias = ours.get("projection.bias")
    found["final_logits_bias"] = torch.zeros(len(network.projection.weight))[None]
    if bias is not None:
        found["final_logits_bias"] = bias[None]
    for weight in MARIAN.weights(section):
        if weight.ours in ours:
            found[weight.theirs] = reordered(ours[weight.ours], weight.axes, order)
        else:
            found[weight.theirs] = torch.zeros_like(theirs[weight.theirs])
    return found


def _write_tokenizer(folder: Path, model: Translator) -> None:
    tokenizer, (source, target) = model.tokenizer, model.recipe.data.language_pair
    separate = not model.recipe.tokenizer.shared
    write_models(folder, tokenizer)
    write_json(folder / "vocab.json", ids_by_piece(tokenizer.source))
    if separate:
        write_json(folder / "target_vocab.json", ids_by_piece(tokenizer.target))
    marks = {
        "unk_token": SPECIAL_TOKENS[UNK],
        "eos_token": SPECIAL_TOKENS[EOS],
        "pad_token": SPECIAL_TOKENS[PAD],
    }
    settings = {"tokenizer_class": "MarianTokenizer", "source_lang": source, "target_lang": target}
    more = {"model_max_length": POSITIONS, "separate_vocabs": separate}
    write_json(folder / "tokenizer_config.json", {**settings, **marks, **more})


def _same_pieces(
    what: str, folder: Path, tokenizer: Tokenizer, given: Inputs, sides: Sequence[Side]
) -> int:
    """Both tokenizers cut the real texts into the same pieces, and put them together again."""
    transformers = need("transformers")
    with quiet(transformers):
        theirs = transformers.MarianTokenizer.from_pretrained(folder, local_files_only=True)
    sources, targets = (list(side) for side in zip(*given.pairs, strict=True))
    checks = [
        (sources, tokenizer.source, sides[0], theirs(sources).input_ids),
        (targets, tokenizer.target, sides[1], theirs(text_target=targets).input_ids),
    ]
    for texts, vocabulary, side, found in checks:
        for text, ours, others in zip(texts, vocabulary.encode(texts), found, strict=True):
            if [*ours, EOS] != [side.id(row) for row in others]:
                raise RegardError(f"{what}: MarianTokenizer cuts {text!r} into other pieces")
    said = [[i for i in row if i != UNK] for row in tokenizer.target.encode(targets)]
    for text, row in zip(tokenizer.target.decode(said), said, strict=True):
        if theirs.decode([sides[1].rows[i] for i in row], skip_special_tokens=True) != text.strip():
            raise RegardError(f"{what}: MarianTokenizer does not give back {text!r}")
    return 2 * len(sources)
