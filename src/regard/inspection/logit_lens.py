"""What a model would predict at each depth: the logit lens and the DecoderLens.

The **logit lens** (nostalgebraist 2020) applies the final norm and the output projection to the decoder's residual
stream at every depth. The **DecoderLens** (Langedijk et al. 2023) lets the whole decoder read the encoder's stream at
every depth; depth by depth it also translates the sentence anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.inspection.display_tables import Cell, heat_table, text_table
from regard.inspection.hooks import Floats
from regard.inspection.teacher_forcing import (
    ForcedTranslation,
    check_supported,
    check_text,
    depth_names,
    force,
    residual_streams,
)
from regard.inspection.trace import Candidate, Token, pack, to_tokens
from regard.nn.transformer import Encoder
from regard.tasks import Translator

CANDIDATES = 3
"""the most probable tokens recorded at each depth and position"""


@dataclass(frozen=True)
class DepthLens:
    """The most probable tokens at each depth and position."""

    name: str
    outputs: list[Token]
    """the translation; EOS last"""
    depths: list[str]
    """embedding, layer 1, …"""
    candidates: list[list[list[Candidate]]]
    """[depth][position]: the most probable tokens, best first"""
    probabilities: Floats
    """[depth, position] of the token that was generated"""
    translations: list[str]
    """DecoderLens: the greedy translation at each depth; empty for the logit lens"""

    @property
    def settled(self) -> list[int]:
        """For each position, the depth from which on the generated token is the most probable one."""
        best = [
            [row[0].token.id == token.id for row, token in zip(rows, self.outputs, strict=True)]
            for rows in self.candidates
        ]
        return [
            next(
                (
                    depth
                    for depth in range(len(best))
                    if all(later[position] for later in best[depth:])
                ),
                len(best),
            )
            for position in range(len(self.outputs))
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values, as the page reads them."""
        return {
            "outputs": [token._asdict() for token in self.outputs],
            "depths": self.depths,
            "candidates": [
                [
                    [
                        {**candidate.token._asdict(), "probability": candidate.probability}
                        for candidate in row
                    ]
                    for row in rows
                ]
                for rows in self.candidates
            ],
            "probabilities": pack(self.probabilities),
            "translations": self.translations,
        }

    def __str__(self) -> str:
        """A table for terminals: the most probable token at each position (rows) and depth (columns)."""
        rows = [
            [token.text, *(rows[position][0].token.text for rows in self.candidates)]
            for position, token in enumerate(self.outputs)
        ]
        return text_table([["output", *self.depths], *rows])

    def _repr_html_(self) -> str:
        """A table for notebooks: depths in rows, positions in columns; colour is the output's probability."""
        cells = [
            [
                Cell(row[0].token.text, float(self.probabilities[depth, position]))
                for position, row in enumerate(rows)
            ]
            for depth, rows in enumerate(self.candidates)
        ]
        columns = [token.text for token in self.outputs]
        return heat_table(self.name, self.depths[::-1], columns, cells[::-1])


@torch.inference_mode()
def logit_lens(model: Translator, text: str, translation: str | None = None) -> DepthLens:
    """What the decoder would say after each of its layers, while it generates a translation (its own by default)."""
    return logit_lens_of(model, force(model, text, translation))


@torch.inference_mode()
def logit_lens_of(model: Translator, forced: ForcedTranslation) -> DepthLens:
    network = check_supported(model)
    with residual_streams(network.decoder) as streams:
        network(*forced.batch(model))
    norm, depths = network.decoder.norm, range(len(network.decoder.layers) + 1)
    logits = [network.project(norm(streams[depth]))[0] for depth in depths]
    return _lens("logit lens", model, forced, logits, [])


@torch.inference_mode()
def decoder_lens(model: Translator, text: str, translation: str | None = None) -> DepthLens:
    """What the decoder says if it reads the encoder's stream at each depth instead of the encoder's output."""
    return decoder_lens_of(model, text, force(model, text, translation))


@torch.inference_mode()
def decoder_lens_of(model: Translator, text: str, forced: ForcedTranslation) -> DepthLens:
    network = check_supported(model)
    check_text(text)
    logits, translations = [], []
    for depth in range(len(network.encoder.layers) + 1):
        with encoder_depth(network.encoder, depth):
            logits.append(network(*forced.batch(model))[0])
            ((generated, *_),) = model.generate([text], plain=True, beam=1)
            translations.append(generated.translation.text)
    return _lens("DecoderLens", model, forced, logits, translations)


@contextmanager
def encoder_depth(encoder: Encoder, depth: int) -> Iterator[None]:
    """Inside the with-block, the encoder has only its first ``depth`` layers, then its final norm."""
    layers = encoder.layers
    encoder.layers = nn.ModuleList(list(layers)[:depth])
    try:
        yield
    finally:
        encoder.layers = layers


def _lens(
    name: str,
    model: Translator,
    forced: ForcedTranslation,
    logits: Sequence[Float[Tensor, "T V"]],
    translations: list[str],
) -> DepthLens:
    probabilities = torch.stack(list(logits)).softmax(-1)
    best = probabilities.topk(min(CANDIDATES, probabilities.shape[2]))
    target = model.tokenizer.target
    outputs = torch.tensor([token.id for token in forced.outputs], device=probabilities.device)
    output_probabilities = probabilities.gather(
        2, outputs[None, :, None].expand(len(logits), -1, 1)
    )
    return DepthLens(
        name=name,
        outputs=forced.outputs,
        depths=depth_names(len(logits) - 1),
        candidates=[
            [
                [
                    Candidate(*candidate)
                    for candidate in zip(to_tokens(target, ids), values, strict=True)
                ]
                for ids, values in zip(*rows, strict=True)
            ]
            for rows in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ],
        probabilities=np.asarray(output_probabilities.squeeze(2).cpu().numpy(), dtype=np.float32),
        translations=translations,
    )
