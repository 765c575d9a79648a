"""A translator in one HTML file: the model runs in the browser, without a network or a server.

The file holds the page of ``regard serve`` with all its views, the model's weights and tokenizer, and the code that
runs them: ``inspection/web/model``. This module writes the two data elements that code reads: the model as JSON, and
the weights as text. ``weights.js`` describes the text.

Weights are stored with 16 bits if the file then has at most ``MAX_BYTES``, else with fewer, down to 8. Each row of a
matrix has its own scale. The browser computes in float32, so rounding the weights is the only loss; the export measures
it.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from regard.data.tokenizer import Tokenizer, Vocabulary
from regard.errors import RegardError
from regard.inspection.history import training_history
from regard.inspection.html_page import embed, model_page
from regard.inspection.page_data import model_info
from regard.interop.base import HTML
from regard.interop.ctranslate2 import our_log_probabilities
from regard.interop.verification import SampleBatch, sample_batch
from regard.nn.multi_head_attention import record_attention
from regard.nn.network import copy_weights, named_weights
from regard.nn.transformer import Transformer
from regard.recipe import Recipe
from regard.storage.atomic_files import check_writable, write_text
from regard.tasks import Translator

MAX_BYTES = 20_000_000
"""The largest file if 8 bits are enough for it; a larger model has a larger file."""
BITS: tuple[int, ...] = (16, 12, 10, 9, 8)

Integers = npt.NDArray[np.int32]


def export_html(folder: Path, out: Path) -> list[str]:
    """Write a run as one HTML file that translates what is typed."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise RegardError(f"--out {out}: the HTML export is one file; its name must end in .html")
    check_writable(out)
    model = Translator.load(folder, "cpu")
    HTML.check(model.recipe, str(folder))
    assert isinstance(model.network, Transformer)
    description = describe(model, str(folder))
    packed = pack_within(named_weights(model.network), len(embed(description)))
    html = model_page({**description, "weights": packed.layout(model.network)}, packed.text)
    write_text(out, html)
    return [
        f"weights stored with {packed.bits} bits: {_rounding_error(model.network, packed, model)}",
        f"{out}: {len(html.encode('utf-8')) / 1e6:.1f} MB, open it in a browser",
    ]


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
# The weights as text


class PackedWeights(NamedTuple):
    """Quantized weights."""

    bits: int
    matrices: dict[str, tuple[Integers, npt.NDArray[np.float32]]]
    """integers [row, column], and the scale of each row"""
    vectors: dict[str, npt.NDArray[np.float32]]
    text: str
    """the streams of weights.js"""

    def layout(self, network: Transformer) -> dict[str, Any]:
        """What the text holds, in its order: ``WeightsJson`` of weights.js."""
        return {
            "bits": self.bits,
            "matrices": [[name, *integers.shape] for name, (integers, _) in self.matrices.items()],
            "vectors": [[name, len(vector)] for name, vector in self.vectors.items()],
            "aliases": dict(_aliases(network)),
        }

    def restored(self) -> dict[str, Tensor]:
        """The weights that the browser computes with."""
        matrices = {
            name: torch.from_numpy(integers.astype(np.float32) * scales[:, None])
            for name, (integers, scales) in self.matrices.items()
        }
        return {**matrices, **{name: torch.from_numpy(one) for name, one in self.vectors.items()}}


def pack_within(weights: Mapping[str, Tensor], other_bytes: int) -> PackedWeights:
    """Weights with as many bits as fit into ``MAX_BYTES`` with the other bytes of the file, or with the fewest."""
    count = sum(weight.numel() for weight in weights.values() if weight.ndim == 2)
    floats = sum(4 * (len(one) if one.ndim == 2 else one.numel()) for one in weights.values())
    others = other_bytes + len(model_page({}, ""))
    fitting = (bits for bits in BITS if (count * bits / 8 + floats) * 5 / 4 + others < MAX_BYTES)
    return pack_weights(weights, next(fitting, BITS[-1]))


def pack_weights(weights: Mapping[str, Tensor], bits: int) -> PackedWeights:
    """Quantize each row of the matrices to integers of so many bits. Vectors stay as they are."""
    arrays = {name: tensor.float().numpy() for name, tensor in weights.items()}
    vectors = {name: array for name, array in arrays.items() if array.ndim == 1}
    matrices = {name: quantize(array, bits) for name, array in arrays.items() if array.ndim == 2}
    assert len(vectors) + len(matrices) == len(arrays)
    floats = [*vectors.values(), *(scales for _, scales in matrices.values())]
    values = np.concatenate([integers.ravel() for integers, _ in matrices.values()])
    streams = [
        b"".join(one.astype("<f4").tobytes() for one in floats),
        (values >> (bits - 8)).astype(np.int8).tobytes(),
        _low_bits(values, bits - 8),
    ]
    return PackedWeights(bits, matrices, vectors, " ".join(map(_encode, streams)))


def quantize(
    matrix: npt.NDArray[np.float32], bits: int
) -> tuple[Integers, npt.NDArray[np.float32]]:
    """The integers nearest to each row divided by its scale, and the scales."""
    largest = np.abs(matrix).max(axis=1)
    scales = np.where(largest > 0, largest / (2 ** (bits - 1) - 1), 1).astype(np.float32)
    return np.round(matrix / scales[:, None]).astype(np.int32), scales


def _low_bits(values: Integers, width: int) -> bytes:
    """The lowest bits of each value; several values in a byte, the first in its lowest bits."""
    if not width:
        return b""
    per_byte = 8 // width
    low = (values & ((1 << width) - 1)).astype(np.uint8)
    low = np.pad(low, (0, -len(low) % per_byte)).reshape(-1, per_byte)
    shifted = low << (np.arange(per_byte, dtype=np.uint8) * width)
    joined: npt.NDArray[np.uint8] = np.bitwise_or.reduce(shifted, axis=1)
    return joined.tobytes()


def _encode(stream: bytes) -> str:
    # "<" could begin a tag or a comment.
    return base64.b85encode(stream).decode("ascii").replace("<", ",")


def _aliases(network: Transformer) -> Iterator[tuple[str, str]]:
    """The other names of tied weights."""
    first: dict[int, str] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        known = first.setdefault(id(tensor), name)
        if known != name:
            yield name, known


# ---------------------------------------------------------------------------------------------
# The loss by rounding


def _rounding_error(network: Transformer, packed: PackedWeights, model: Translator) -> str:
    """How much rounding the weights changes the model, on sample texts."""
    rounded = copy.deepcopy(network)
    copy_weights(rounded, packed.restored(), "rounded weights")
    batch = sample_batch(model.recipe, model.tokenizer)
    outputs = [our_log_probabilities(one, batch) for one in (network, rounded)]
    attention = [_attention(one, batch) for one in (network, rounded)]
    changes = [(one - other).abs() for one, other in (outputs, attention)]
    return (
        f"log-probabilities of tokens change by {changes[0].mean():.1g} on average, "
        f"attention weights by {changes[1].mean():.1g} on average and {changes[1].max():.1g} at most"
    )


@torch.no_grad()
def _attention(network: Transformer, batch: SampleBatch) -> Tensor:
    """All attention weights that are not padding, one after the other."""
    modules = network.attentions()
    with record_attention(one for layers in modules.values() for one in layers) as recorded:
        network.eval()(batch.source, batch.target)
    masks = {"encoder": batch.source_mask, "decoder": batch.target_mask}
    weights = [
        recorded[module].weights.transpose(1, 2)[masks.get(site, batch.target_mask)].flatten()
        for site, layers in modules.items()
        for module in layers
    ]
    return torch.cat(weights)
