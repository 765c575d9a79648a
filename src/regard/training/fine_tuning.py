"""Initial tokenizer and weights: new ones, or those of another run (fine-tuning, ``training.init_from``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from regard.data.pairs import Pair
from regard.data.tokenizer import Tokenizer, train_labels
from regard.errors import RegardError
from regard.nn.network import named_weights
from regard.recipe import Recipe
from regard.storage.run_dir import RunDir

MAY_DIFFER = {"preset", "dropout", "attention_dropout", "activation_dropout"}
"""Keys of the model section that no weight depends on."""
MAY_DIFFER_FOR_ENCODER = {"decoder_layers", "tie_embeddings", "tie_output"}
"""Further keys that may differ if only the encoder is initialized."""
TARGET_TOKENIZER_KEYS = {"shared", "target_kind"}
"""Keys of the tokenizer section that the source tokenizer does not depend on."""


def initial_tokenizer(recipe: Recipe, pairs: Callable[[], Iterable[Pair]]) -> Tokenizer:
    """The tokenizer of the run to initialize from, or one trained on ``pairs``; labels are always new."""
    if recipe.training.init_from is None:
        return Tokenizer.train(recipe.tokenizer, pairs, recipe.has_labels, recipe.data.tags)
    run = RunDir(recipe.training.init_from)
    run_recipe = run.recipe()
    _check_compatible(run, run_recipe, recipe)
    tokenizer = run.tokenizer(run_recipe)
    if recipe.has_labels:
        return Tokenizer(tokenizer.source, train_labels(pairs))
    return tokenizer


def load_initial_weights(network: nn.Module, recipe: Recipe, tokenizer: Tokenizer) -> str:
    """Copy the weights of ``training.init_from`` into a network; returns a message that says which ones.

    A network with labels gets the encoder, and its head stays random; any other network gets all weights.
    """
    assert recipe.training.init_from is not None
    run = RunDir(recipe.training.init_from)
    if run.tokenizer(run.recipe()).source.model != tokenizer.source.model:
        raise RegardError(
            f"training.init_from: the tokenizer of {run} has changed since the data were prepared; "
            "choose another --out"
        )
    theirs, own = run.weights(), named_weights(network)
    copied = [name for name in own if not recipe.has_labels or name.startswith("encoder.")]
    for name in copied:
        if name not in theirs:
            raise RegardError(f"training.init_from: {run} has no weight {name}")
        if theirs[name].shape != own[name].shape:
            raise RegardError(
                f"training.init_from: {name} of {run} has shape {list(theirs[name].shape)}, "
                f"but this recipe needs {list(own[name].shape)}"
            )
    with torch.no_grad():
        for name in copied:
            own[name].copy_(theirs[name])
    new = [name for name in own if name not in copied]
    randomly = f"; randomly initialized: {', '.join(new)}" if new else ""
    part = "encoder " if recipe.has_labels else ""
    return f"Initialized the tokenizer and {len(copied)} {part}weights from {run}{randomly}"


def _check_compatible(run: RunDir, run_recipe: Recipe, recipe: Recipe) -> None:
    """Raise if the tokenizer, or a key that weights depend on, differs."""
    exclude = MAY_DIFFER | (MAY_DIFFER_FOR_ENCODER if recipe.has_labels else set())
    theirs, ours = (
        {
            "model": one.model.model_dump(exclude=exclude),
            "tokenizer": one.tokenizer.model_dump(
                exclude=TARGET_TOKENIZER_KEYS if recipe.has_labels else set()
            ),
        }
        for one in (run_recipe, recipe)
    )
    if different := [text for _, text in recipe_differences(theirs, ours)]:
        raise RegardError(
            f"training.init_from: {run} does not match this recipe: {'; '.join(different)}"
        )


def recipe_differences(
    theirs: dict[str, Any], ours: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """The keys in which two recipes, or parts of them, differ, each with a text that gives both values."""
    for key in ours:
        if isinstance(theirs[key], dict) and isinstance(ours[key], dict):
            yield from recipe_differences(theirs[key], ours[key], f"{prefix}{key}.")
        elif theirs[key] != ours[key]:
            yield f"{prefix}{key}", f"{prefix}{key} is {theirs[key]} there, {ours[key]} here"
