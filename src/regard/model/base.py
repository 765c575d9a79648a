"""Model: a run folder opened for use. Text enters and leaves here; everything below speaks ids."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import nn

from regard.errors import RegardError
from regard.model.weights import put_weights
from regard.recipe import Device, Precision, Recipe, Task
from regard.run import Run
from regard.score import Result, score
from regard.text.corpus import Pair
from regard.text.tokenizer import Tokenizer


def choose_device(device: Device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise RegardError("device cuda: torch sees no GPU here; use device cpu or auto")
    return torch.device(device)


def arithmetic(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The number format matrix products run in; weights and sums stay in float32."""
    if precision == "auto":
        gpu = device.type == "cuda" and torch.cuda.is_bf16_supported()
        precision = "bf16" if gpu else "fp32"
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


MODELS: dict[Task, type[Model]] = {}
"""the kind of model for each task; a kind enters itself"""


class Model(ABC):
    """What every kind of model can do. Each kind adds the method that is its task."""

    task: ClassVar[Task]

    def __init_subclass__(cls) -> None:
        MODELS[cls.task] = cls

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Tokenizer,
        network: nn.Module,
        device: torch.device,
        precision: Precision = "fp32",
    ) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.network = network
        self.device = device
        self.precision = precision

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], device: Device = "auto", precision: Precision = "fp32"
    ) -> Self:
        """Open a run. ``Model.load`` takes a run of any task and gives the kind of model it is."""
        run = Run(Path(folder))
        recipe = run.recipe()
        kind = MODELS[recipe.task]
        if not issubclass(kind, cls):
            raise RegardError(f"{run}: a model to {recipe.task}, not to {cls.task}")
        weights = run.weights()
        tokenizer = run.tokenizer(recipe)
        network = kind.build(recipe, tokenizer)
        put_weights(network, weights, str(run.weights_file))
        place = choose_device(device)
        return kind(recipe, tokenizer, network.to(place).eval(), place, precision)

    @staticmethod
    @abstractmethod
    def build(recipe: Recipe, tokenizer: Tokenizer) -> nn.Module:
        """The network of a recipe, its weights still random."""

    @abstractmethod
    def answer(self, sources: Sequence[str], *, quick: bool = False) -> list[str]:
        """What the model makes of each source, to be held against its target; quick is for validation."""

    def answer_to(self, pairs: Sequence[Pair], *, quick: bool = False) -> list[str]:
        """The same for the sources of pairs, with whatever else comes with them."""
        return self.answer([pair.source for pair in pairs], quick=quick)

    def evaluate(self, pairs: Sequence[Pair]) -> list[Result]:
        """Answer the sources and score the answers against the targets, as the recipe says."""
        sources = [pair.source for pair in pairs]
        return score(
            self.recipe.score.measures,
            self.answer_to(pairs),
            [pair.target for pair in pairs],
            sources,
            tokenize=self.recipe.score.tokenize,
        )


def build(recipe: Recipe, tokenizer: Tokenizer) -> nn.Module:
    return MODELS[recipe.task].build(recipe, tokenizer)
