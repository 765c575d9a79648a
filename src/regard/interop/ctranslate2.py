"""CTranslate2, the fastest engine on a CPU that people use. Its model is built here from its own specification."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.data.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from regard.interop.files import entries, need, table, whole, write_json, write_models
from regard.interop.supported import CTRANSLATE2, decoding_note
from regard.interop.verification import Inputs, Verification, inputs, verify_by_outputs
from regard.nn.feed_forward import Gated
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.transformer import Decoder, Encoder, Transformer
from regard.recipe import Model
from regard.tasks import Translator

Quantization = Literal["fp32", "int8"]

ACTIVATIONS: dict[str, str] = {
    "relu": "RELU",
    "gelu": "GELU",
    "swish": "SWISH",
    "swiglu": "SWISH",
}
EPSILONS: dict[str, float] = {"layer": 1e-5, "rms": 1e-6}


def export_ctranslate2(folder: Path, out: Path, quantization: Quantization = "fp32") -> list[str]:
    model = Translator.load(folder, "cpu")
    CTRANSLATE2.check(model.recipe, str(folder))
    need("ctranslate2")
    given = inputs(model.recipe, model.tokenizer)
    assert isinstance(model.network, Transformer)
    proof = _prove(str(folder), model, model.network, given)
    with whole(out) as partial:
        _write(partial, model, model.network, quantization)
        write_models(partial, model.tokenizer)
        write_json(partial / "translate.json", _options(model))
        lines = [str(proof)]
        if quantization == "int8":
            lines.append(_cost(partial, model, given))
    lines += decoding_note(model.recipe, "ctranslate2")
    return [*lines, f"{out}: opens in ctranslate2.Translator"]


def _options(model: Translator) -> dict[str, Any]:
    """What translate_batch must be told to search as we do, apart from the form of the length penalty."""
    target = model.tokenizer.target
    never = [i for i in target.suppressed_tokens if i != UNK]
    return {
        "beam_size": model.recipe.decoding.beam,
        "length_penalty": model.recipe.decoding.length_penalty,
        "min_decoding_length": 0,
        "disable_unk": UNK in target.suppressed_tokens,
        "suppress_sequences": [[piece] for piece in target.pieces(never)],
    }


# The specification


def _write(folder: Path, model: Translator, network: Transformer, quantization: str) -> None:
    spec = _spec(network, model.recipe.model)
    spec.register_source_vocabulary(entries(model.tokenizer.source))
    spec.register_target_vocabulary(entries(model.tokenizer.target))
    spec.config.bos_token = spec.config.decoder_start_token = SPECIAL_TOKENS[BOS]
    spec.config.eos_token, spec.config.unk_token = SPECIAL_TOKENS[EOS], SPECIAL_TOKENS[UNK]
    spec.config.add_source_bos, spec.config.add_source_eos = False, True
    spec.config.layer_norm_epsilon = EPSILONS[model.recipe.model.norm]
    spec.validate()
    spec.optimize(quantization=None if quantization == "fp32" else quantization)
    spec.save(str(folder))


def _spec(network: Transformer, section: Model) -> Any:
    specs = need("ctranslate2.specs")
    shape = {
        "pre_norm": section.norm_order == "before",
        "no_final_norm": not section.final_norm,
        "activation": getattr(specs.Activation, ACTIVATIONS[section.activation]),
        "ffn_glu": section.activation == "swiglu",
        "rms_norm": section.norm == "rms",
    }
    kinds = need("ctranslate2.specs.transformer_spec")
    encoder = kinds.TransformerEncoderSpec(len(network.encoder.layers), section.heads, **shape)
    decoder = kinds.TransformerDecoderSpec(len(network.decoder.layers), section.heads, **shape)
    _stack(encoder, network.encoder)
    _stack(decoder, network.decoder)
    encoder.embeddings[0].weight = _array(network.encoder.embedding.weight)
    decoder.embeddings.weight = _array(network.decoder.embedding.weight)
    decoder.projection.weight = _array(network.projection.weight)
    if network.projection.bias is not None:
        decoder.projection.bias = _array(network.projection.bias)
    return specs.TransformerSpec(encoder, decoder)


@torch.no_grad()
def _stack(spec: Any, stack: Encoder | Decoder) -> None:
    spec.position_encodings.encodings = _array(table(stack))
    if hasattr(spec, "layer_norm"):
        _norm(spec.layer_norm, stack.norm)
    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
        _layer(layer_spec, layer)


def _layer(spec: Any, layer: Any) -> None:
    attention: MultiHeadAttention = layer.attention
    own = spec.self_attention
    _linear(own.linear[0], attention.query, attention.key, attention.value)
    _linear(own.linear[1], attention.output)
    _norm(own.layer_norm, layer.attention_residual.norm)
    if hasattr(spec, "attention"):
        memory: MultiHeadAttention = layer.cross_attention
        _linear(spec.attention.linear[0], memory.query)
        _linear(spec.attention.linear[1], memory.key, memory.value)
        _linear(spec.attention.linear[2], memory.output)
        _norm(spec.attention.layer_norm, layer.cross_attention_residual.norm)
    gated = isinstance(layer.feed_forward, Gated)
    _linear(spec.ffn.linear_0, layer.feed_forward.gate if gated else layer.feed_forward.inner)
    if gated:
        _linear(spec.ffn.linear_0_noact, layer.feed_forward.inner)
    _linear(spec.ffn.linear_1, layer.feed_forward.outer)
    _norm(spec.ffn.layer_norm, layer.feed_forward_residual.norm)


def _linear(spec: Any, *maps: nn.Linear) -> None:
    """One map, or several of the same input side by side."""
    spec.weight = _array(torch.cat([one.weight for one in maps]))
    if maps[0].bias is not None:
        spec.bias = _array(torch.cat([one.bias for one in maps]))


def _norm(spec: Any, norm: Any) -> None:
    spec.gamma = _array(norm.weight)
    if getattr(norm, "bias", None) is not None:
        spec.beta = _array(norm.bias)


def _array(x: Tensor) -> Any:
    # A copy: quantization works in place, and would reach through into the network.
    return x.detach().float().numpy().copy()


# Verification


def _prove(what: str, model: Translator, network: Transformer, given: Inputs) -> Verification:
    def ours(smaller: Transformer) -> Float[Tensor, " n"]:
        return our_log_probabilities(smaller, given)

    def theirs(smaller: Transformer) -> Float[Tensor, " n"]:
        with tempfile.TemporaryDirectory() as folder:
            _write(Path(folder), model, smaller, "fp32")
            return _log_probabilities(Path(folder), model, given)

    return verify_by_outputs(what, network, given, ours, theirs)


@torch.no_grad()
def our_log_probabilities(network: Transformer, given: Inputs) -> Float[Tensor, " n"]:
    """Of every target token, and of EOS after the last."""
    said = torch.cat([given.target[:, 1:], torch.full_like(given.target[:, :1], PAD)], dim=1)
    said[range(len(said)), given.target_real.sum(1) - 1] = EOS
    every: Tensor = network.eval()(given.source, given.target).log_softmax(-1)
    return every.gather(-1, said[..., None])[..., 0][given.target_real]


def _log_probabilities(folder: Path, model: Translator, given: Inputs) -> Float[Tensor, " n"]:
    translator = need("ctranslate2").Translator(
        str(folder), device="cpu", compute_type="default", intra_threads=torch.get_num_threads()
    )
    source, target = model.tokenizer.source, model.tokenizer.target
    sources = [_pieces(source, row)[:-1] for row in given.source]
    targets = [_pieces(target, row)[1:] for row in given.target]
    scored = translator.score_batch(sources, targets)
    return torch.tensor([value for one in scored for value in one.log_probs])


def _pieces(vocabulary: Any, row: Tensor) -> list[str]:
    pieces: list[str] = vocabulary.pieces([i for i in row.tolist() if i != PAD])
    return pieces


def _cost(folder: Path, model: Translator, given: Inputs) -> str:
    """What int8 changes, in figures: it is not the same function, and cannot be."""
    assert isinstance(model.network, Transformer)
    apart = our_log_probabilities(model.network, given) - _log_probabilities(folder, model, given)
    return (
        "int8 itself changes the log-probability of a token by "
        f"{apart.abs().mean():.2g} in the mean, {apart.abs().max():.2g} at most"
    )
