"""A translation read again by its model (teacher forcing), and hooks on what happens inside: the tools of all lenses.

The residual stream of a stack of N layers has N + 1 depths: depth 0 is the embedding with its position, depth k the
output of layer k. ``residual_streams`` records all of them, and ``edit_stream`` changes one while the network runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.data.special_tokens import EOS
from regard.errors import RegardError
from regard.inference.engine import Request
from regard.inference.network_decoder import pad_rows
from regard.inspection.trace import Token, group_words, to_tokens
from regard.nn.transformer import Decoder, Encoder, Transformer
from regard.recipe import abbreviate
from regard.tasks import Translator

Stack = Literal["encoder", "decoder"]
STACKS: tuple[Stack, ...] = ("encoder", "decoder")


@dataclass(frozen=True)
class ForcedTranslation:
    """A source and a translation of it, as ids and as tokens."""

    request: Request
    source: list[Token]
    """what the encoder reads; EOS last"""
    inputs: list[Token]
    """what the decoder reads: BOS and the tokens before"""
    outputs: list[Token]
    """what it predicts there; EOS last"""

    @property
    def source_words(self) -> list[list[int]]:
        """The positions of the tokens of each source word, without EOS."""
        return group_words(self.source)

    @property
    def input_words(self) -> list[list[int]]:
        """The positions of the tokens of each word that the decoder reads, without BOS."""
        return group_words(self.inputs)

    def tokens(self, stack: Stack) -> list[Token]:
        return self.source if stack == "encoder" else self.inputs

    def batch(
        self, model: Translator, rows: int = 1
    ) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B T"]]:
        """Source and decoder input, repeated in ``rows`` rows."""
        ids = [[token.id for token in side] for side in (self.source, self.inputs)]
        source, inputs = (torch.tensor([side], device=model.device) for side in ids)
        return source.expand(rows, -1), inputs.expand(rows, -1)


def check_supported(model: Translator) -> Transformer:
    """The network, if it is one that lenses can read: an autoregressive encoder-decoder Transformer."""
    network = model.network
    if not isinstance(network, Transformer) or model.non_autoregressive:
        raise RegardError(
            f"model.architecture {model.recipe.model.architecture}: lenses need an autoregressive encoder-decoder "
            "Transformer (architecture transformer)"
        )
    if model.needs_trees:
        raise RegardError("model.position tree: lenses do not support dependency trees")
    return network


def check_text(text: str) -> None:
    if not text.strip():
        raise RegardError("the text is blank: there is nothing to inspect")


def force(model: Translator, text: str, translation: str | None = None) -> ForcedTranslation:
    """A text with a translation of it; without one, the model's own."""
    check_supported(model)
    check_text(text)
    if translation is None:
        ((generated, *_),) = model.generate([text])
        return force_ids(model, generated.request, generated.hypothesis.tokens)
    return force_ids(model, model.request(text), model.encode_translation(translation, text))


def force_ids(model: Translator, request: Request, target: Sequence[int]) -> ForcedTranslation:
    """A request with the ids of its translation, without or with EOS."""
    outputs = [*target[:-1], EOS] if target and target[-1] == EOS else [*target, EOS]
    return ForcedTranslation(
        request,
        to_tokens(model.tokenizer.source, [*request.source, EOS]),
        to_tokens(model.tokenizer.target, model.network.decoder_input(outputs)),
        to_tokens(model.tokenizer.target, outputs),
    )


def token_log_probabilities(
    model: Translator, forced: Sequence[ForcedTranslation], batch_size: int = 32
) -> list[Float[Tensor, " T"]]:
    """The log-probability of each output token of each translation."""
    results: list[Tensor] = []
    for start in range(0, len(forced), batch_size):
        batch = forced[start : start + batch_size]
        source, inputs, outputs = (
            pad_rows([[token.id for token in row] for row in rows], model.device)
            for rows in zip(
                *(
                    (translation.source, translation.inputs, translation.outputs)
                    for translation in batch
                ),
                strict=True,
            )
        )
        log_probabilities = model.network(source, inputs).log_softmax(-1)
        token_values = log_probabilities.gather(2, outputs[:, :, None]).squeeze(2)
        results += [
            row[: len(translation.outputs)]
            for row, translation in zip(token_values, batch, strict=True)
        ]
    return results


# ---------------------------------------------------------------------------------------------
# Hooks

Edit = Callable[[Tensor], Tensor]


@contextmanager
def replace_output(module: nn.Module, value: Tensor) -> Iterator[None]:
    """Inside the with-block, the module returns this value."""
    handle = module.register_forward_hook(lambda *_: value)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def edit_stream(stack: Encoder | Decoder, depth: int, edit: Edit) -> Iterator[None]:
    """Inside the with-block, the residual stream at this depth is replaced by ``edit(stream)``."""
    handle = _hook_stream(stack, depth, edit)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def residual_streams(stack: Encoder | Decoder) -> Iterator[dict[int, Float[Tensor, "B T d"]]]:
    """The latest residual stream at each depth, by depth."""
    streams: dict[int, Tensor] = {}

    def record(depth: int) -> Edit:
        def keep(stream: Tensor) -> Tensor:
            streams[depth] = stream
            return stream

        return keep

    handles = [_hook_stream(stack, depth, record(depth)) for depth in range(len(stack.layers) + 1)]
    try:
        yield streams
    finally:
        for handle in handles:
            handle.remove()


def _hook_stream(stack: Encoder | Decoder, depth: int, edit: Edit) -> Any:
    """The input of layer ``depth``, counted from 0, is the stream at that depth; the last one is an output."""
    if depth < len(stack.layers):
        return stack.layers[depth].register_forward_pre_hook(
            lambda _, inputs: (edit(inputs[0]), *inputs[1:])
        )
    return stack.layers[-1].register_forward_hook(lambda _, __, output: edit(output))


def depth_names(layers: int) -> list[str]:
    return ["embedding", *(f"layer {number}" for number in range(1, layers + 1))]


def find_word(forced: ForcedTranslation, word: str | int) -> int:
    """The position of the first output token of a word of the translation; a number is the position itself."""
    if isinstance(word, int):
        if not 0 <= word < len(forced.outputs):
            raise RegardError(
                f"position {word}: the translation has {len(forced.outputs)} tokens, counted from 0"
            )
        return word
    words = [
        (positions[0], "".join(forced.outputs[position].text for position in positions).lstrip("▁"))
        for positions in group_words(forced.outputs)
    ]
    for position, text in words:
        if text == word:
            return position
    raise RegardError(
        f"word {abbreviate(word)}: not in the translation, which has "
        f"{', '.join(text for _, text in words)}"
    )
