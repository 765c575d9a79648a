"""ONNX: two graphs, one that reads the source and one that says the next word. Batch, beams and lengths are free.

    encoder.onnx   source [B, S] -> memory_keys, memory_values [layers, B, heads, S, d], real [B, S]
    decoder.onnx   tokens [B, beams], keys, values [layers, B, beams, heads, T, d] of the words before, and the memory
                   -> logits [B, beams, V], and keys and values with one word more

Begin with tokens BOS and keys and values of length T = 0. When beams change places, keys and values go with them.
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
from regard.interop.files import ids_by_piece, need, table, whole, write_json, write_models
from regard.interop.supported import ONNX
from regard.interop.verification import Inputs, Verification, inputs, verify_by_outputs
from regard.nn.attention import KeyValue, Mask
from regard.nn.layers import Cache
from regard.nn.transformer import Memory, Transformer
from regard.tasks import Translator


@dataclass
class Growing(Cache):
    """A cache whose rows are [B, beams]. It is joined before it is flattened: a graph cannot reshape what is empty."""

    past: tuple[Tensor, Tensor] | None = None

    def append(self, new: KeyValue) -> KeyValue:
        assert self.past is not None
        rows = self.past[0].shape[:2]
        key, value = (
            torch.cat([before, one.view(*rows, *one.shape[1:])], dim=3)
            for before, one in zip(self.past, new, strict=True)
        )
        self.past = key, value
        return KeyValue(key.flatten(0, 1), value.flatten(0, 1))


class Reads(nn.Module):
    """The encoder, and the keys and values the decoder will look at."""

    def __init__(self, network: Transformer) -> None:
        super().__init__()
        self.network = network
        self.table = nn.Buffer(table(network.encoder))

    def forward(self, source: Int[Tensor, "B S"]) -> tuple[Tensor, Tensor, Bool[Tensor, "B S"]]:
        encoder, real = self.network.encoder, source != PAD
        x = encoder.embedding(source) + self.table[: source.shape[1]]
        for layer in encoder.layers:
            x = layer(x, Mask(real), real)
        seen = self.network.decoder.look_up(Memory(encoder.norm(x, real), real))
        return (
            torch.stack([one.key for one in seen]),
            torch.stack([one.value for one in seen]),
            real,
        )


class Says(nn.Module):
    """One step of the decoder."""

    def __init__(self, network: Transformer) -> None:
        super().__init__()
        self.network = network
        self.table = nn.Buffer(table(network.decoder))

    def forward(
        self,
        tokens: Int[Tensor, "B n"],
        keys: Float[Tensor, "L B n h T dk"],
        values: Float[Tensor, "L B n h T dv"],
        memory_keys: Float[Tensor, "L B h S dk"],
        memory_values: Float[Tensor, "L B h S dv"],
        real: Bool[Tensor, "B S"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        decoder, shape = self.network.decoder, tokens.shape
        place = torch.arange(1, device=tokens.device) + keys.shape[4]
        x = decoder.embedding(tokens.flatten()[:, None]) + self.table[place]
        caches = [Growing(past=(keys[i], values[i])) for i in range(len(decoder.layers))]
        for number, (layer, cache) in enumerate(zip(decoder.layers, caches, strict=True)):
            memory = KeyValue(memory_keys[number], memory_values[number])
            x = layer(x, Mask(causal=True), memory, Mask(real), cache=cache)
        logits = self.network.project(decoder.norm(x)[:, 0]).view(*shape, -1)
        pasts = [cache.past for cache in caches if cache.past is not None]
        return (
            logits,
            torch.stack([past[0] for past in pasts]),
            torch.stack([past[1] for past in pasts]),
        )


def export_onnx(folder: Path, out: Path) -> list[str]:
    model = Translator.load(folder, "cpu")
    ONNX.check(model.recipe, str(folder))
    for package in ("onnx", "onnxscript", "onnxruntime"):
        need(package)
    network = model.network
    assert isinstance(network, Transformer)
    given = inputs(model.recipe, model.tokenizer)
    with whole(out) as partial:
        proof = _prove(str(folder), network, given, partial)
        write_models(partial, model.tokenizer)
        write_json(partial / "vocab.source.json", ids_by_piece(model.tokenizer.source))
        write_json(partial / "vocab.target.json", ids_by_piece(model.tokenizer.target))
        write_json(partial / "config.json", _config(model))
    return [str(proof), f"{out}: encoder.onnx and decoder.onnx, for onnxruntime"]


def _config(model: Translator) -> dict[str, Any]:
    section = model.recipe.model
    return {
        "pad": PAD,
        "start": BOS,
        "end": EOS,
        "never": list(model.tokenizer.target.suppressed_tokens),
        "layers": section.decoder_layers,
        "heads": section.heads,
        "d_k": section.d_k,
        "d_v": section.d_v,
        "extra_length": model.recipe.decoding.extra_length,
    }


def write_graphs(folder: Path, network: Transformer) -> None:
    network = network.eval()
    source = torch.full((3, 5), EOS)
    memory = Reads(network)(source)
    step = _step(torch.full((3, 2), BOS), length=4, memory=memory)
    batch, beams = torch.export.Dim("batch"), torch.export.Dim("beams")
    length, past = torch.export.Dim("length"), torch.export.Dim("past")
    _write(
        folder / "encoder.onnx",
        Reads(network),
        {"source": source},
        ["memory_keys", "memory_values", "real"],
        {"source": {0: batch, 1: length}},
    )
    before, memory_free = {1: batch, 2: beams, 4: past}, {1: batch, 3: length}
    _write(
        folder / "decoder.onnx",
        Says(network),
        step,
        ["logits", "new_keys", "new_values"],
        {"tokens": {0: batch, 1: beams}, "keys": before, "values": before}
        | {"memory_keys": memory_free, "memory_values": memory_free}
        | {"real": {0: batch, 1: length}},
    )


def _step(tokens: Tensor, length: int, memory: tuple[Tensor, ...]) -> dict[str, Tensor]:
    keys, values, real = memory
    layers, batch, heads, _, d_k = keys.shape
    shape = layers, batch, tokens.shape[1], heads, length
    return {
        "tokens": tokens,
        "keys": torch.zeros(*shape, d_k),
        "values": torch.zeros(*shape, values.shape[-1]),
        "memory_keys": keys,
        "memory_values": values,
        "real": real,
    }


def _write(
    path: Path,
    module: nn.Module,
    given: dict[str, Tensor],
    outputs: list[str],
    free: dict[str, Any],
) -> None:
    # The exporter has much to say about itself, in warnings and in its log.
    with warnings.catch_warnings(), torch.no_grad(), _silent("torch.onnx", "onnxscript", "onnx_ir"):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            kwargs=given,
            f=path,
            input_names=list(given),
            output_names=outputs,
            dynamic_shapes=free,
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


# Verification


def _prove(what: str, network: Transformer, given: Inputs, folder: Path) -> Verification:
    def ours(smaller: Transformer) -> Float[Tensor, "n V"]:
        with torch.no_grad():
            logits: Tensor = smaller.eval()(given.source, given.target)
            return logits[given.target_real]

    def theirs(smaller: Transformer) -> Float[Tensor, "n V"]:
        if smaller is network:
            write_graphs(folder, network)
            return read_along(folder, given)
        with tempfile.TemporaryDirectory() as other:
            write_graphs(Path(other), smaller)
            return read_along(Path(other), given)

    return verify_by_outputs(what, network, given, ours, theirs)


def session(path: Path) -> Any:
    onnxruntime = need("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def read_along(folder: Path, given: Inputs) -> Float[Tensor, "n V"]:
    """The logits after each target word, step by step through the two graphs."""
    memory = session(folder / "encoder.onnx").run(None, {"source": given.source.numpy()})
    decoder = session(folder / "decoder.onnx")
    tokens = given.target[:, :1]
    state = _step(tokens, 0, tuple(map(torch.from_numpy, memory)))
    feed = {name: tensor.numpy() for name, tensor in state.items()}
    every = []
    for place in range(given.target.shape[1]):
        feed["tokens"] = given.target[:, place : place + 1].numpy()
        logits, feed["keys"], feed["values"] = decoder.run(None, feed)
        every.append(torch.from_numpy(logits))
    return torch.cat(every, dim=1)[given.target_real]
