"""What does not go together in a recipe, each with what would work. All of them are told at once."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from regard.recipe.names import Architecture, Position

if TYPE_CHECKING:
    from regard.recipe.sections import Model, Recipe

_ON_EMBEDDINGS: tuple[Position, ...] = ("none", "index", "sinusoidal", "learned")
_SELF_ATTENTION = ("attention.encoder", "attention.decoder")
_FEEDFORWARD = ("feedforward", "activation", "feedforward_dropout")
UNUSED: dict[Architecture, tuple[str, ...]] = {
    "recurrent": (*_SELF_ATTENTION, *_FEEDFORWARD, "kernel"),
    "convolution": (*_SELF_ATTENTION, *_FEEDFORWARD),
}
"""what an architecture has no use for, the others for kernel alone; whoever sets it expects what will not happen"""


def refused(recipe: Recipe) -> list[str]:
    return [
        *_embeddings(recipe),
        *_positions(recipe),
        *_attention(recipe.model),
        *_norms(recipe),
        *_architecture(recipe.model),
    ]


def _embeddings(recipe: Recipe) -> Iterator[str]:
    if recipe.model.tie_embeddings and not recipe.tokenizer.shared:
        yield "model.tie_embeddings: true needs tokenizer.shared: true"


def _positions(recipe: Recipe) -> Iterator[str]:
    model, longest = recipe.model, recipe.data.clean.max_tokens + 1  # the text and its END or START
    if model.position == "sinusoidal" and model.width % 2:
        yield f"model.position: sinusoidal waves come in twos: model.width {model.width} must be even"
    if model.position == "rotary" and model.key_width % 2:
        yield f"model.position: rotary turns features in twos: model.key_width {model.key_width} must be even"
    if model.position == "learned" and model.max_length < longest:
        yield (
            f"model.max_length {model.max_length} is shorter than the data may be: "
            f"{longest} (data.clean.max_tokens and one mark)"
        )


def _attention(model: Model) -> Iterator[str]:
    attention = model.attention
    if attention.key_value_heads and model.heads % attention.key_value_heads:
        allowed = [str(n) for n in range(1, model.heads + 1) if model.heads % n == 0]
        yield (
            f"model.attention.key_value_heads {attention.key_value_heads} does not divide "
            f"{model.heads} heads; allowed: {', '.join(allowed)}"
        )


def _norms(recipe: Recipe) -> Iterator[str]:
    room, text = recipe.training.tokens_per_batch, recipe.data.clean.max_tokens + 1
    if recipe.model.norm == "batch" and room < 2 * text:
        yield (
            f"model.norm: batch needs batches of several texts: training.tokens_per_batch {room} must be at "
            f"least {2 * text}, twice the longest text; or take norm: layer"
        )


def _architecture(model: Model) -> Iterator[str]:
    kind = model.architecture
    follow_from = model.model_dump(include={"preset", "dropout", "tie_embeddings"})
    plain = type(model).model_validate(follow_from)
    for key in UNUSED.get(kind, ("kernel",)):
        given, usual = attrgetter(key)(model), attrgetter(key)(plain)
        if given != usual:
            yield f"model.{key}: {given} is of no use to architecture: {kind}; leave it out"
    if kind == "recurrent" and model.position != "none":
        yield (
            f"model.position: {model.position} is of no use to architecture: recurrent, which reads the "
            "words in their order; leave it out"
        )
    if kind == "recurrent" and model.width % 2:
        yield (
            "model.architecture: recurrent reads in two directions, each with half the features: "
            f"model.width {model.width} must be even"
        )
    if kind == "convolution" and model.position not in _ON_EMBEDDINGS:
        yield (
            f"model.position: {model.position} acts inside self-attention, which architecture: convolution "
            f"has not; allowed: {', '.join(_ON_EMBEDDINGS)}"
        )
