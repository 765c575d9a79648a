"""ONNX: two graphs, the encoder and one step of the decoder. Batch size, beam size and lengths are dynamic.

    encoder.onnx   source [B, S] -> cross_keys, cross_values [layers, B, heads, S, d], source_mask [B, S]
    decoder.onnx   tokens [B, beams], keys, values [layers, B, beams, heads, T, d] of the tokens before, and the
                   encoder's outputs -> logits [B, beams, V], and keys and values with one token more

Begin with BOS as tokens and with keys and values of length T = 0. If beams are reordered, reorder keys and values too.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.data.special_tokens import BOS, EOS, PAD
from regard.interop.base import ONNX, position_table, require_package, write_json, write_tokenizer
from regard.interop.verification import SampleBatch, Verification, sample_batch, verify_by_outputs
from regard.nn.attention_mask import AttentionMask
from regard.nn.kv_cache import KeyValue, KVCache
from regard.nn.transformer import EncoderOutput, Transformer
from regard.storage.atomic_files import atomic_folder
from regard.tasks import Translator


@dataclass
class GraphCache(KVCache):
    """A KV cache with rows [B, beams]. It concatenates before it flattens: a graph cannot reshape an empty tensor."""

    past: tuple[Tensor, Tensor] | None = None

    def append(self, new: KeyValue) -> KeyValue:
        assert self.past is not None
        rows = self.past[0].shape[:2]
        key, value = (
            torch.cat([before, projected.view(*rows, *projected.shape[1:])], dim=3)
            for before, projected in zip(self.past, new, strict=True)
        )
        self.past = key, value
        return KeyValue(key.flatten(0, 1), value.flatten(0, 1))


class EncoderGraph(nn.Module):
    """The encoder, with the keys and values of the decoder's cross-attention."""

    def __init__(self, network: Transformer) -> None:
        super().__init__()
        self.network = network
        self.table = nn.Buffer(position_table(network.encoder))

    def forward(self, source: Int[Tensor, "B S"]) -> tuple[Tensor, Tensor, Bool[Tensor, "B S"]]:
        encoder, mask = self.network.encoder, source != PAD
        x = encoder.embedding(source) + self.table[: source.shape[1]]
        for layer in encoder.layers:
            x = layer(x, AttentionMask(mask), mask)
        cross = self.network.decoder.cross_attention_kv(EncoderOutput(encoder.norm(x, mask), mask))
        return (
            torch.stack([projected.key for projected in cross]),
            torch.stack([projected.value for projected in cross]),
            mask,
        )


class DecoderGraph(nn.Module):
    """One step of the decoder."""

    def __init__(self, network: Transformer) -> None:
        super().__init__()
        self.network = network
        self.table = nn.Buffer(position_table(network.decoder))

    def forward(
        self,
        tokens: Int[Tensor, "B n"],
        keys: Float[Tensor, "L B n h T dk"],
        values: Float[Tensor, "L B n h T dv"],
        cross_keys: Float[Tensor, "L B h S dk"],
        cross_values: Float[Tensor, "L B h S dv"],
        source_mask: Bool[Tensor, "B S"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        decoder, shape = self.network.decoder, tokens.shape
        position = torch.arange(1, device=tokens.device) + keys.shape[4]
        x = decoder.embedding(tokens.flatten()[:, None]) + self.table[position]
        caches = [GraphCache(past=(keys[i], values[i])) for i in range(len(decoder.layers))]
        for number, (layer, cache) in enumerate(zip(decoder.layers, caches, strict=True)):
            cross = KeyValue(cross_keys[number], cross_values[number])
            x = layer(x, AttentionMask(causal=True), cross, AttentionMask(source_mask), cache=cache)
        logits = self.network.project(decoder.norm(x)[:, 0]).view(*shape, -1)
        pasts = [cache.past for cache in caches if cache.past is not None]
        return (
            logits,
            torch.stack([past[0] for past in pasts]),
            torch.stack([past[1] for past in pasts]),
        )


def export_onnx(folder: Path, out: Path) -> list[str]:
    """Convert a run into a folder with two ONNX graphs and the tokenizer."""
    model = Translator.load(folder, "cpu")
    ONNX.check(model.recipe, str(folder))
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require_package(package)
    network = model.network
    assert isinstance(network, Transformer)
    batch = sample_batch(model.recipe, model.tokenizer)
    with atomic_folder(out) as partial:
        verification = _verify(str(folder), network, batch, partial)
        write_tokenizer(partial, model.tokenizer)
        write_json(partial / "config.json", _config(model))
    return [str(verification), f"{out}: encoder.onnx and decoder.onnx, for onnxruntime"]


def _config(model: Translator) -> dict[str, Any]:
    config = model.recipe.model
    return {
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "suppressed_token_ids": list(model.tokenizer.target.suppressed_tokens),
        "layers": config.decoder_layers,
        "heads": config.heads,
        "d_k": config.d_k,
        "d_v": config.d_v,
        "extra_length": model.recipe.decoding.extra_length,
    }


def write_graphs(folder: Path, network: Transformer) -> None:
    network = network.eval()
    source = torch.full((3, 5), EOS)
    encoded = EncoderGraph(network)(source)
    step = _decoder_inputs(torch.full((3, 2), BOS), length=4, encoded=encoded)
    batch, beams = torch.export.Dim("batch"), torch.export.Dim("beams")
    length, past = torch.export.Dim("length"), torch.export.Dim("past")
    _write(
        folder / "encoder.onnx",
        EncoderGraph(network),
        {"source": source},
        ["cross_keys", "cross_values", "source_mask"],
        {"source": {0: batch, 1: length}},
    )
    cached, cross = {1: batch, 2: beams, 4: past}, {1: batch, 3: length}
    _write(
        folder / "decoder.onnx",
        DecoderGraph(network),
        step,
        ["logits", "new_keys", "new_values"],
        {"tokens": {0: batch, 1: beams}, "keys": cached, "values": cached}
        | {"cross_keys": cross, "cross_values": cross}
        | {"source_mask": {0: batch, 1: length}},
    )


def _decoder_inputs(tokens: Tensor, length: int, encoded: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The inputs of a decoder step with an empty cache of this length."""
    keys, values, source_mask = encoded
    layers, batch, heads, _, d_k = keys.shape
    shape = layers, batch, tokens.shape[1], heads, length
    return {
        "tokens": tokens,
        "keys": torch.zeros(*shape, d_k),
        "values": torch.zeros(*shape, values.shape[-1]),
        "cross_keys": keys,
        "cross_values": values,
        "source_mask": source_mask,
    }


def _write(
    path: Path,
    module: nn.Module,
    inputs: dict[str, Tensor],
    outputs: list[str],
    dynamic: dict[str, Any],
) -> None:
    # The exporter is verbose, both in warnings and in its log.
    with warnings.catch_warnings(), torch.no_grad(), _silent("torch.onnx", "onnxscript", "onnx_ir"):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            kwargs=inputs,
            f=path,
            input_names=list(inputs),
            output_names=outputs,
            dynamic_shapes=dynamic,
            dynamo=True,
            external_data=False,
            verbose=False,
        )


@contextmanager
def _silent(*names: str) -> Iterator[None]:
    logs = [logging.getLogger(name) for name in names]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


# ---------------------------------------------------------------------------------------------
# Verification


def _verify(what: str, network: Transformer, batch: SampleBatch, folder: Path) -> Verification:
    """Write the graphs into the folder and compare their logits with the network's."""

    def ours(variant: Transformer) -> Float[Tensor, "n V"]:
        with torch.no_grad():
            logits: Tensor = variant.eval()(batch.source, batch.target)
            return logits[batch.target_mask]

    def theirs(variant: Transformer) -> Float[Tensor, "n V"]:
        if variant is network:
            write_graphs(folder, network)
            return graph_logits(folder, batch)
        with tempfile.TemporaryDirectory() as other:
            write_graphs(Path(other), variant)
            return graph_logits(Path(other), batch)

    return verify_by_outputs(what, network, batch, ours, theirs)


def session(path: Path) -> Any:
    """A graph, opened in onnxruntime on the CPU."""
    onnxruntime = require_package("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def graph_logits(folder: Path, batch: SampleBatch) -> Float[Tensor, "n V"]:
    """The logits after each target token, computed step by step with the two graphs."""
    encoded = session(folder / "encoder.onnx").run(None, {"source": batch.source.numpy()})
    decoder = session(folder / "decoder.onnx")
    first = _decoder_inputs(batch.target[:, :1], 0, tuple(map(torch.from_numpy, encoded)))
    feed = {name: tensor.numpy() for name, tensor in first.items()}
    steps = []
    for position in range(batch.target.shape[1]):
        feed["tokens"] = batch.target[:, position : position + 1].numpy()
        logits, feed["keys"], feed["values"] = decoder.run(None, feed)
        steps.append(torch.from_numpy(logits))
    return torch.cat(steps, dim=1)[batch.target_mask]
