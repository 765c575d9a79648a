"""A translator in one HTML file: the model runs in the browser, without a network or a server.

The file holds the page of ``regard serve`` with all its views, the model's weights and tokenizer, and the code that
runs them: ``inspection/web/model``. This module writes the data that this code reads: the model as JSON, and the
weights as bytes. ``weights.js`` describes the bytes.

Weights are stored as integers, with as many bits as fit into a file of ``MAX_BYTES``, between ``MIN_BITS`` and
``MAX_BITS`` on average. ``weight_rounding.py`` decides which matrix gets how many. The browser computes in float32, so
rounding the weights is the only loss; the export measures it.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.data.tokenizer import Tokenizer, Vocabulary
from regard.errors import RegardError
from regard.inspection.head_ablation import HeadTable
from regard.inspection.html_page import deflate, model_page
from regard.inspection.page_data import model_info
from regard.inspection.training_history import training_history
from regard.interop.base import HTML
from regard.interop.ctranslate2 import our_log_probabilities
from regard.interop.verification import SampleBatch, sample_batch
from regard.interop.weight_rounding import (
    Floats,
    Integers,
    RoundingCalibration,
    calibrate_rounding,
    limit_step,
)
from regard.nn.multi_head_attention import record_attention
from regard.nn.network import copy_weights, named_weights
from regard.nn.transformer import Transformer
from regard.recipe import Recipe
from regard.storage.atomic_files import check_writable, write_bytes
from regard.tasks import Translator

MAX_BYTES = 20_000_000
"""The largest file, if it can have ``MIN_BITS``; a larger model has a larger file."""
MIN_BITS, MAX_BITS = 8.0, 15.0
"""bits of a weight, on average"""
CALIBRATION_TEXTS = 512
TEXT_SIZE = 1.032
"""bytes of the text for each byte of data, if the data are random"""
LAYOUT_BYTES = 40
"""what the JSON about one matrix or vector takes, at most, when it is compressed"""
SEARCH_STEPS, MARGIN_BITS = 4, 0.02
"""how the step is found for which the weights fill the file, and how much is left empty"""


def export_html(
    folder: Path, out: Path, measure_heads: Callable[[Translator], HeadTable] | None = None
) -> list[str]:
    """Write a run as one HTML file that translates what is typed.

    measure_heads: measures what each attention head contributes, which the file then shows.
    """
    if out.suffix.lower() not in (".html", ".htm"):
        raise RegardError(f"--out {out}: the HTML export is one file; its name must end in .html")
    check_writable(out)
    model = Translator.load(folder, "cpu")
    HTML.check(model.recipe, str(folder))
    head_table = measure_heads and measure_heads(model)
    html, packed = build_page(model, str(folder), head_table)
    write_bytes(out, html)
    return [
        f"weights stored with {packed.bits:.1f} bits on average: {_rounding_error(packed, model)}",
        f"{out}: {len(html) / 1e6:.1f} MB, open it in a browser",
    ]


def build_page(
    model: Translator, name: str, head_table: HeadTable | None = None
) -> tuple[bytes, PackedWeights]:
    """The file, and the weights that are in it."""
    description = {**describe(model, name), "head_table": head_table and head_table.to_json()}
    packed = pack_model(model, len(model_page(description, b"")))
    return model_page({**description, "weights": packed.layout()}, packed.data), packed


# ---------------------------------------------------------------------------------------------
# The model as JSON


def describe(model: Translator, name: str) -> dict[str, Any]:
    """Everything about a model except its weights. ``TranslatorJson`` of translator.js and main.js read it."""
    recipe, tokenizer = model.recipe, model.tokenizer
    return {
        **model_info(model, Path(name).resolve().name),
        "network": _network(model),
        "decoding": recipe.decoding.model_dump(include=set(HTML.decoding or ())),
        "truncate": recipe.data.clean.max_tokens if recipe.data.clean.truncate else None,
        "recases": model.recases,
        "source": vocabulary_json(tokenizer.source, recipe.tokenizer.kind),
        "target": _target(tokenizer, recipe),
        "history": training_history(model),
    }


def _network(model: Translator) -> dict[str, Any]:
    config = model.recipe.model
    first = model.network.attentions()["encoder"][0]
    keys = ("d_model", "heads", "d_k", "d_v", "encoder_layers", "decoder_layers", "norm")
    more = ("final_norm", "activation", "position", "max_distance")
    return {
        **{key: getattr(config, key) for key in (*keys, *more)},
        "key_value_heads": config.attention.key_value_heads or config.heads,
        "pre_norm": config.norm_order == "pre",
        "max_length": model.network.max_length,
        "scale": first.attention.score.scale,
    }


def vocabulary_json(vocabulary: Vocabulary, kind: str) -> dict[str, Any]:
    """``VocabularyJson`` of tokenizer.js."""
    scores = [0.0] * vocabulary.size
    for i, score in vocabulary.piece_scores().values():
        scores[i] = score
    first, *others = vocabulary.byte_ids
    has_bytes = others == list(range(first + 1, first + 256))
    assert has_bytes or kind == "word", "the ids of bytes are consecutive"
    return {
        "kind": kind,
        "normalization": vocabulary.normalization,
        "pieces": vocabulary.pieces(range(vocabulary.size)),
        "scores": scores,
        "special_tokens": vocabulary.num_special_tokens,
        "first_byte": first if has_bytes else None,
        "suppressed": list(vocabulary.suppressed_tokens),
    }


def _target(tokenizer: Tokenizer, recipe: Recipe) -> dict[str, Any] | None:
    if tokenizer.shared:
        return None
    return vocabulary_json(tokenizer.target, recipe.tokenizer.of_target.kind)


# ---------------------------------------------------------------------------------------------
# The weights as bytes


class RoundedMatrix(NamedTuple):
    """A matrix is its integers times its step."""

    integers: Integers
    step: float

    @property
    def low_bits(self) -> int:
        """The bits of an integer that are stored as they are. The 8 bits above them are compressed."""
        return max(0, int(np.abs(self.integers).max()).bit_length() + 1 - 8)


class PackedWeights(NamedTuple):
    """Rounded weights and their bytes."""

    matrices: dict[str, RoundedMatrix]
    vectors: dict[str, Floats]
    aliases: dict[str, str]
    """the other names of tied weights"""
    data: bytes
    """what ``readWeights`` of weights.js reads"""

    @property
    def bits(self) -> float:
        """Bits of a weight of a matrix, on average."""
        vectors = 4 * sum(map(np.size, self.vectors.values()))
        count = sum(matrix.integers.size for matrix in self.matrices.values())
        return 8 * (len(self.data) - vectors) / count

    def layout(self) -> dict[str, Any]:
        """What the bytes hold, in their order: ``WeightsJson`` of weights.js."""
        return {
            "matrices": [
                [name, *matrix.integers.shape, matrix.step, matrix.low_bits]
                for name, matrix in self.matrices.items()
            ],
            "vectors": [[name, len(vector)] for name, vector in self.vectors.items()],
            "aliases": self.aliases,
        }

    def restored(self) -> dict[str, Tensor]:
        """The weights that the browser computes with."""
        matrices = {
            name: torch.from_numpy(integers.astype(np.float32) * np.float32(step))
            for name, (integers, step) in self.matrices.items()
        }
        return {
            **matrices,
            **{name: torch.from_numpy(vector) for name, vector in self.vectors.items()},
        }


def pack_model(model: Translator, other_bytes: int) -> PackedWeights:
    """The weights of a model, in the space that is left beside the other bytes of the file."""
    network = model.network
    assert isinstance(network, Transformer)
    texts = sample_batch(model.recipe, model.tokenizer, CALIBRATION_TEXTS)
    arrays = {name: tensor.float().numpy() for name, tensor in named_weights(network).items()}
    vectors = {name: array for name, array in arrays.items() if array.ndim == 1}
    matrices = {name: array for name, array in arrays.items() if array.ndim == 2}
    assert len(vectors) + len(matrices) == len(arrays)
    floats = 4 * sum(map(np.size, vectors.values()))
    space = (MAX_BYTES - other_bytes) / TEXT_SIZE - floats - LAYOUT_BYTES * len(arrays)
    bits = min(max(8 * space / sum(map(np.size, matrices.values())), MIN_BITS), MAX_BITS)
    rounded = round_matrices(matrices, calibrate_rounding(network, texts), bits)
    data = weight_bytes([*vectors.values()], [*rounded.values()])
    return PackedWeights(rounded, vectors, dict(_aliases(network)), data)


def round_matrices(
    matrices: Mapping[str, Floats], calibration: RoundingCalibration, bits: float
) -> dict[str, RoundedMatrix]:
    """Integers that take ``bits`` bits on average after compression, or slightly fewer."""
    relative = calibration.relative_steps()
    count = sum(map(np.size, matrices.values()))

    def steps(scale: float) -> dict[str, float]:
        return {
            name: limit_step(matrix, relative[name] * 2.0**scale)
            for name, matrix in matrices.items()
        }

    scale = 0.0
    for _ in range(SEARCH_STEPS):
        rounded = [
            RoundedMatrix(np.rint(matrices[name] / step).astype(np.int32), step)
            for name, step in steps(scale).items()
        ]
        scale += 8 * len(weight_bytes([], rounded)) / count - bits  # twice the step, one bit less
    final_steps = steps(scale + MARGIN_BITS)
    return {
        name: RoundedMatrix(calibration.round(name, matrices[name], step), step)
        for name, step in final_steps.items()
    }


def weight_bytes(vectors: Sequence[Floats], matrices: Sequence[RoundedMatrix]) -> bytes:
    """Vectors as floats; the low bits of all integers; the upper 8 bits of all integers, compressed."""
    upper = [(matrix.integers >> matrix.low_bits).astype(np.int8) for matrix in matrices]
    return b"".join(
        [
            *(vector.astype("<f4").tobytes() for vector in vectors),
            *(_low_bits(matrix.integers, matrix.low_bits) for matrix in matrices),
            # The values are independent of each other, so there is nothing to gain from repetitions.
            deflate(b"".join(high_bits.tobytes() for high_bits in upper), zlib.Z_HUFFMAN_ONLY),
        ]
    )


def _low_bits(values: Integers, width: int) -> bytes:
    """The lowest bits of each value, one after another, from the lowest bit of the first byte."""
    bits = values.ravel()[:, None] >> np.arange(width) & 1
    return np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()


def _aliases(network: Transformer) -> Iterator[tuple[str, str]]:
    first: dict[int, str] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        first_name = first.setdefault(id(tensor), name)
        if first_name != name:
            yield name, first_name


# ---------------------------------------------------------------------------------------------
# The loss by rounding


def _rounding_error(packed: PackedWeights, model: Translator) -> str:
    """How much rounding the weights changes the model, on sample texts."""
    network = model.network
    assert isinstance(network, Transformer)
    rounded = copy.deepcopy(network)
    copy_weights(rounded, packed.restored(), "rounded weights")
    batch = sample_batch(model.recipe, model.tokenizer)
    outputs = [our_log_probabilities(variant, batch) for variant in (network, rounded)]
    attention = [_attention(variant, batch) for variant in (network, rounded)]
    changes = [(exact - rounded_values).abs() for exact, rounded_values in (outputs, attention)]
    return (
        f"log-probabilities of tokens change by {changes[0].mean():.1g} on average, "
        f"attention weights by {changes[1].mean():.1g} on average and {changes[1].max():.1g} at most"
    )


@torch.no_grad()
def _attention(network: Transformer, batch: SampleBatch) -> Tensor:
    """All attention weights that are not padding, one after the other."""
    modules = network.attentions()
    with record_attention(layer for layers in modules.values() for layer in layers) as recorded:
        network.eval()(batch.source, batch.target)
    masks = {"encoder": batch.source_mask, "decoder": batch.target_mask}
    weights = [
        recorded[module].weights.transpose(1, 2)[masks.get(site, batch.target_mask)].flatten()
        for site, layers in modules.items()
        for module in layers
    ]
    return torch.cat(weights)
