"""CTranslate2, a fast inference engine for CPUs and GPUs. The model is built with its own specification classes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.data.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from regard.interop.base import (
    CTRANSLATE2,
    all_pieces,
    decoding_note,
    position_table,
    require_package,
    write_json,
    write_sentencepiece_models,
)
from regard.interop.verification import SampleBatch, Verification, sample_batch, verify_by_outputs
from regard.nn.layers import SwiGLU
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.transformer import Decoder, Encoder, Transformer
from regard.recipe import ModelConfig
from regard.storage.atomic_files import atomic_folder
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
    """Convert a run into a folder that ``ctranslate2.Translator`` opens."""
    model = Translator.load(folder, "cpu")
    CTRANSLATE2.check(model.recipe, str(folder))
    require_package("ctranslate2")
    batch = sample_batch(model.recipe, model.tokenizer)
    assert isinstance(model.network, Transformer)
    verification = _verify(str(folder), model, model.network, batch)
    with atomic_folder(out) as partial:
        _write(partial, model, model.network, quantization)
        write_sentencepiece_models(partial, model.tokenizer)
        write_json(partial / "translate.json", _options(model))
        lines = [str(verification)]
        if quantization == "int8":
            lines.append(_int8_error(partial, model, batch))
    lines += decoding_note(model.recipe, "ctranslate2")
    return [*lines, f"{out}: open it with ctranslate2.Translator"]


def _options(model: Translator) -> dict[str, Any]:
    """The arguments of translate_batch that give our decoding, apart from the form of the length penalty."""
    target = model.tokenizer.target
    suppressed = [i for i in target.suppressed_tokens if i != UNK]
    return {
        "beam_size": model.recipe.decoding.beam,
        "length_penalty": model.recipe.decoding.length_penalty,
        "min_decoding_length": 0,
        "disable_unk": UNK in target.suppressed_tokens,
        "suppress_sequences": [[piece] for piece in target.pieces(suppressed)],
    }


# ---------------------------------------------------------------------------------------------
# The specification


def _write(folder: Path, model: Translator, network: Transformer, quantization: str) -> None:
    spec = _spec(network, model.recipe.model)
    spec.register_source_vocabulary(all_pieces(model.tokenizer.source))
    spec.register_target_vocabulary(all_pieces(model.tokenizer.target))
    spec.config.bos_token = spec.config.decoder_start_token = SPECIAL_TOKENS[BOS]
    spec.config.eos_token, spec.config.unk_token = SPECIAL_TOKENS[EOS], SPECIAL_TOKENS[UNK]
    spec.config.add_source_bos, spec.config.add_source_eos = False, True
    spec.config.layer_norm_epsilon = EPSILONS[model.recipe.model.norm]
    spec.validate()
    spec.optimize(quantization=None if quantization == "fp32" else quantization)
    spec.save(str(folder))


def _spec(network: Transformer, config: ModelConfig) -> Any:
    specs = require_package("ctranslate2.specs")
    options = {
        "pre_norm": config.norm_order == "pre",
        "no_final_norm": not config.final_norm,
        "activation": getattr(specs.Activation, ACTIVATIONS[config.activation]),
        "ffn_glu": config.activation == "swiglu",
        "rms_norm": config.norm == "rms",
    }
    classes = require_package("ctranslate2.specs.transformer_spec")
    encoder = classes.TransformerEncoderSpec(len(network.encoder.layers), config.heads, **options)
    decoder = classes.TransformerDecoderSpec(len(network.decoder.layers), config.heads, **options)
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
    spec.position_encodings.encodings = _array(position_table(stack))
    if hasattr(spec, "layer_norm"):
        _norm(spec.layer_norm, stack.norm)
    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
        _layer(layer_spec, layer)


def _layer(spec: Any, layer: Any) -> None:
    attention: MultiHeadAttention = layer.attention
    self_attention = spec.self_attention
    _linear(self_attention.linear[0], attention.query, attention.key, attention.value)
    _linear(self_attention.linear[1], attention.output)
    _norm(self_attention.layer_norm, layer.attention_residual.norm)
    if hasattr(spec, "attention"):
        cross: MultiHeadAttention = layer.cross_attention
        _linear(spec.attention.linear[0], cross.query)
        _linear(spec.attention.linear[1], cross.key, cross.value)
        _linear(spec.attention.linear[2], cross.output)
        _norm(spec.attention.layer_norm, layer.cross_attention_residual.norm)
    gated = isinstance(layer.feed_forward, SwiGLU)
    _linear(spec.ffn.linear_0, layer.feed_forward.gate if gated else layer.feed_forward.inner)
    if gated:
        _linear(spec.ffn.linear_0_noact, layer.feed_forward.inner)
    _linear(spec.ffn.linear_1, layer.feed_forward.outer)
    _norm(spec.ffn.layer_norm, layer.feed_forward_residual.norm)


def _linear(spec: Any, *maps: nn.Linear) -> None:
    """One linear map, or several of the same input, concatenated."""
    spec.weight = _array(torch.cat([linear.weight for linear in maps]))
    if maps[0].bias is not None:
        spec.bias = _array(torch.cat([linear.bias for linear in maps]))


def _norm(spec: Any, norm: Any) -> None:
    spec.gamma = _array(norm.weight)
    if getattr(norm, "bias", None) is not None:
        spec.beta = _array(norm.bias)


def _array(x: Tensor) -> Any:
    # A copy, because quantization works in place and would change the network.
    return x.detach().float().numpy().copy()


# ---------------------------------------------------------------------------------------------
# Verification


def _verify(what: str, model: Translator, network: Transformer, batch: SampleBatch) -> Verification:
    def ours(variant: Transformer) -> Float[Tensor, " n"]:
        return our_log_probabilities(variant, batch)

    def theirs(variant: Transformer) -> Float[Tensor, " n"]:
        with tempfile.TemporaryDirectory() as folder:
            _write(Path(folder), model, variant, "fp32")
            return _log_probabilities(Path(folder), model, batch)

    return verify_by_outputs(what, network, batch, ours, theirs)


@torch.no_grad()
def our_log_probabilities(network: Transformer, batch: SampleBatch) -> Float[Tensor, " n"]:
    """The log-probability of every target token, and of EOS after the last."""
    labels = torch.cat([batch.target[:, 1:], torch.full_like(batch.target[:, :1], PAD)], dim=1)
    labels[range(len(labels)), batch.target_mask.sum(1) - 1] = EOS
    log_probabilities: Tensor = network.eval()(batch.source, batch.target).log_softmax(-1)
    return log_probabilities.gather(-1, labels[..., None])[..., 0][batch.target_mask]


def _log_probabilities(folder: Path, model: Translator, batch: SampleBatch) -> Float[Tensor, " n"]:
    translator = require_package("ctranslate2").Translator(
        str(folder), device="cpu", compute_type="default", intra_threads=torch.get_num_threads()
    )
    source, target = model.tokenizer.source, model.tokenizer.target
    sources = [_pieces(source, row)[:-1] for row in batch.source]
    targets = [_pieces(target, row)[1:] for row in batch.target]
    scored = translator.score_batch(sources, targets)
    return torch.tensor([value for result in scored for value in result.log_probs])


def _pieces(vocabulary: Any, row: Tensor) -> list[str]:
    pieces: list[str] = vocabulary.pieces([i for i in row.tolist() if i != PAD])
    return pieces


def _int8_error(folder: Path, model: Translator, batch: SampleBatch) -> str:
    """How much int8 quantization changes the outputs."""
    assert isinstance(model.network, Transformer)
    expected = our_log_probabilities(model.network, batch)
    error = (expected - _log_probabilities(folder, model, batch)).abs()
    return (
        "int8 changes the log-probability of a token by "
        f"{error.mean():.2g} on average, {error.max():.2g} at most"
    )
