"""Model: a run folder opened for use. Text enters and leaves here; everything below speaks ids."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.fast import cores
from regard.marks import PAD
from regard.model.weights import lay_weights
from regard.recipe import Device, Precision, Recipe, Task, change_search
from regard.run import Run
from regard.score import NOT_OF_TEXT, Comparison, Result, compare, score
from regard.text.batches import plan_in_order
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
    if (chosen(device) if precision == "auto" else precision) == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def chosen(device: torch.device) -> Precision:
    """What auto means in the ordinary way."""
    half = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return "bf16" if half else "fp32"


TOKENS_AT_ONCE = 4_096
"""source tokens, padding included, times beam: what is worked on in one batch on a CPU"""
TOKENS_A_GIGABYTE = 8_192
"""the same on a GPU, for each gigabyte it has: the more at once, the less it waits for Python"""


def tokens_at_once(device: torch.device) -> int:
    if device.type != "cuda":
        return TOKENS_AT_ONCE
    return TOKENS_A_GIGABYTE * (torch.cuda.get_device_properties(device).total_memory >> 30)


def rows_at_once(device: torch.device, entries: int) -> int:
    """So many that what is computed over the vocabulary, 16 bytes for each entry, takes a quarter of a GPU."""
    if device.type != "cuda":
        return TOKENS_AT_ONCE
    return torch.cuda.get_device_properties(device).total_memory // 4 // (16 * entries)


MODELS: dict[Task, type[Model]] = {}
"""the kind of model for each task; a kind enters itself"""


class Model(ABC):
    """What every kind of model can do. Each kind adds the method that is its task."""

    task: ClassVar[Task]
    command: ClassVar[str]
    """of the command line, to use it"""

    def __init_subclass__(cls) -> None:
        if "task" in vars(cls):  # else it is what several kinds have in common
            MODELS[cls.task] = cls

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Tokenizer,
        network: nn.Module,
        device: torch.device,
        precision: Precision = "fp32",
        run: Run | None = None,
        threads: int | None = None,
    ) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.network = network
        self.device = device
        self.precision = precision
        self.run = run
        """the folder it was opened from, if it was"""
        self.threads = min(threads or cores(), os.cpu_count() or 1)
        """batches worked on at a time, on a CPU"""

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        device: Device = "auto",
        precision: Precision = "fp32",
        threads: int | None = None,
    ) -> Self:
        """Open a run. ``Model.load`` takes a run of any task and gives the kind of model it is."""
        run = Run(Path(folder))
        recipe = run.recipe()
        kind = MODELS[recipe.task]
        if not issubclass(kind, cls):
            raise RegardError(
                f"{run}: a model to {recipe.task}, not to {cls.task}; use it by  regard {kind.command}"
            )
        weights = run.weights()
        tokenizer = run.tokenizer(recipe)
        network = kind.build(recipe, tokenizer)
        lay_weights(network, weights, str(run.weights_file))
        place = choose_device(device)
        network = network.to(place).eval()
        model = kind(recipe, tokenizer, network, place, precision, run, threads)
        model.freeze()
        return model

    @staticmethod
    @abstractmethod
    def build(recipe: Recipe, tokenizer: Tokenizer) -> nn.Module:
        """The network of a recipe, its weights still random."""

    def freeze(self) -> None:
        """The weights are what they will be: whatever can be made ready for use is."""
        if self.precision == "int8":
            raise RegardError(
                f"precision int8: not for models to {self.task}; take fp32, bf16 or auto"
            )

    def work_in_processes(self) -> None:  # noqa: B027 (most have nothing to share out)
        """From now on batches are worked on in processes, if that is sooner; for a program that has no threads."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Source ids of texts, cut where those of the training were."""
        clean = self.recipe.data.clean
        longest = clean.max_tokens if clean.cut else None
        return [ids[:longest] for ids in self.tokenizer.source.encode(texts)]

    def padded(self, rows: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, rows))
        ids = [[*row, *[PAD] * (longest - len(row))] for row in rows]
        # By way of numpy, which reads lists three times as fast as torch.
        return torch.from_numpy(np.array(ids, dtype=np.int64)).to(self.device)

    def in_batches(
        self, lengths: Sequence[int], beam: int = 1, workers: int = 1
    ) -> Iterator[list[int]]:
        """The numbers of rows that go through the network together: such of like length."""
        sizes = np.array(lengths, dtype=np.int64)
        room = tokens_at_once(self.device) // beam
        most = max(1, rows_at_once(self.device, self.tokenizer.target.size) // beam)
        for part in plan_in_order(sizes, sizes, room, workers):
            for first in range(0, len(part), most):
                yield part[first : first + most].tolist()

    @abstractmethod
    def answer(self, sources: Sequence[str], *, quick: bool = False) -> list[str]:
        """What the model makes of each source, to be held against its target; quick is for validation."""

    def answer_to(self, pairs: Sequence[Pair], *, quick: bool = False) -> list[str]:
        """The same for the sources of pairs, with whatever else comes with them."""
        return self.answer([pair.source for pair in pairs], quick=quick)

    def evaluate(self, pairs: Sequence[Pair], *, quick: bool = False) -> list[Result]:
        """Answer the sources and score the answers against the targets, as the recipe says.

        quick is for validation: the first measure alone, and no interval.
        """
        sources, references = [pair.source for pair in pairs], [pair.target for pair in pairs]
        return self._score(self.answer_to(pairs, quick=quick), references, sources, quick)

    def compare(self, other: Self, pairs: Sequence[Pair]) -> tuple[list[Result], list[Comparison]]:
        """The scores, and for each whether it is better than the other model's by more than chance."""
        scoring = self.recipe.score
        if unfit := NOT_OF_TEXT & {*scoring.measures}:
            raise RegardError(
                f"{', '.join(unfit)} of two models cannot be compared by a paired test"
            )
        sources, references = [pair.source for pair in pairs], [pair.target for pair in pairs]
        ours, theirs = self.answer_to(pairs), other.answer_to(pairs)
        both = ours, theirs, references, sources
        found = compare(scoring.measures, *both, tokenize=scoring.tokenize)
        return self._score(ours, references, sources), found

    def _score(
        self, answers: list[str], references: list[str], sources: list[str], quick: bool = False
    ) -> list[Result]:
        scoring = self.recipe.score
        measures = scoring.measures[:1] if quick else scoring.measures
        both = answers, references, sources
        return score(measures, *both, tokenize=scoring.tokenize, intervals=not quick)

    def search_by(self, **options: Any) -> None:
        """Search in another way than the recipe says."""
        search = change_search(self.recipe.search, options)
        self.recipe = self.recipe.model_copy(update={"search": search})


def build(recipe: Recipe, tokenizer: Tokenizer) -> nn.Module:
    return MODELS[recipe.task].build(recipe, tokenizer)
