"""What does not go together in a recipe, each with what would work. All of them are told at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.recipe.sections import Model, Recipe


def refused(recipe: Recipe) -> list[str]:
    return [
        *_embeddings(recipe),
        *_positions(recipe),
        *_attention(recipe.model),
        *_norms(recipe),
        *_parallel(recipe),
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


def _parallel(recipe: Recipe) -> Iterator[str]:
    model = recipe.model
    places = recipe.data.clean.max_tokens + model.parallel.spare
    cuts = model.architecture == "parallel" and model.parallel.length == "cut"
    if cuts and model.position == "learned" and model.max_length < places:
        yield (
            f"model.max_length {model.max_length} is shorter than the places of length: cut: {places} "
            "(data.clean.max_tokens and model.parallel.spare)"
        )
