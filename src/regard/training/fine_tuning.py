"""Where a training begins: at random, or with the tokenizer and the weights of another run (fine-tuning)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from regard.data.corpus import Pair
from regard.data.tokenizer import Tokenizer, learn_labels
from regard.errors import RegardError
from regard.nn.state_dict import named_weights
from regard.recipe import Recipe
from regard.storage.run_dir import RunDir

FREE = {"preset", "dropout", "attention_dropout", "activation_dropout"}
"""keys of the model section that may differ: they shape no weight"""
FREE_WITH_A_NEW_HEAD = {"decoder_layers", "tie_embeddings", "tie_output"}
"""further ones, where the encoder alone is taken"""
OF_TARGET = {"shared", "target_kind"}
"""keys of the tokenizer section that say nothing of the source"""


def initial_tokenizer(recipe: Recipe, pairs: Callable[[], Iterable[Pair]]) -> Tokenizer:
    """That of the run to start from, or a new one; labels are always new."""
    if recipe.training.init_from is None:
        return Tokenizer.train(recipe.tokenizer, pairs, recipe.has_labels, recipe.data.tags)
    run = RunDir(recipe.training.init_from)
    before = run.recipe()
    _agree(run, before, recipe)
    tokenizer = run.tokenizer(before)
    if recipe.has_labels:
        return Tokenizer(tokenizer.source, learn_labels(pairs))
    return tokenizer


def load_initial_weights(network: nn.Module, recipe: Recipe, tokenizer: Tokenizer) -> str:
    """Put the weights of the run to start from into the network; what was taken, in words.

    A network with labels takes the encoder, its head stays random; any other takes everything.
    """
    assert recipe.training.init_from is not None
    run = RunDir(recipe.training.init_from)
    if run.tokenizer(run.recipe()).source.model != tokenizer.source.model:
        raise RegardError(
            f"training.init_from: {run} has another tokenizer than when the text was prepared; "
            "choose another --out"
        )
    weights, own = run.weights(), named_weights(network)
    taken = [name for name in own if not recipe.has_labels or name.startswith("encoder.")]
    for name in taken:
        if name not in weights:
            raise RegardError(f"training.init_from: {run} has no weight {name}")
        if weights[name].shape != own[name].shape:
            raise RegardError(
                f"training.init_from: {name} of {run} is {list(weights[name].shape)}, "
                f"here it is {list(own[name].shape)}"
            )
    with torch.no_grad():
        for name in taken:
            own[name].copy_(weights[name])
    new = [name for name in own if name not in taken]
    rest = f"; new: {', '.join(new)}" if new else ""
    part = "of the encoder " if recipe.has_labels else ""
    return f"Start: tokenizer and {len(taken)} weights {part}taken from {run}{rest}"


def _agree(run: RunDir, before: Recipe, now: Recipe) -> None:
    """The tokenizer and whatever shapes a weight must be the same."""
    free = FREE | (FREE_WITH_A_NEW_HEAD if now.has_labels else set())
    theirs, ours = (
        {
            "model": recipe.model.model_dump(exclude=free),
            "tokenizer": recipe.tokenizer.model_dump(
                exclude=OF_TARGET if now.has_labels else set()
            ),
        }
        for recipe in (before, now)
    )
    if told := [difference for _, difference in differences(theirs, ours)]:
        raise RegardError(f"training.init_from: {run} is of another shape: {'; '.join(told)}")


def differences(
    before: dict[str, Any], now: dict[str, Any], at: str = ""
) -> Iterator[tuple[str, str]]:
    """What two recipes, or parts of them, differ in: each key, and what it is there and here."""
    for key in now:
        if isinstance(before[key], dict) and isinstance(now[key], dict):
            yield from differences(before[key], now[key], f"{at}{key}.")
        elif before[key] != now[key]:
            yield f"{at}{key}", f"{at}{key} is {before[key]} there, {now[key]} here"
