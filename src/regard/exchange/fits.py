"""What another format can hold. A choice it has no place for is refused by name, all of them at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from regard.errors import RegardError
from regard.recipe import Manner, Model, Position, Recipe

ANY_LINEAR: Mapping[str, Collection[Any]] = {
    "architecture": ("transformer",),
    "attention.score": ("scaled",),
    "attention.weighting": ("softmax",),
    "attention.encoder": ("full",),
    "attention.decoder": ("full",),
    "attention.memory": ("full",),
    "attention.key_value_heads": (None,),
}
"""what all the other formats want of a model"""
ADDED: tuple[Position, ...] = ("sinusoidal", "learned", "index", "none")
"""positions that are added to the words, so that a table can hold them"""


@dataclass(frozen=True)
class Format:
    """Another format, and the choices it has a place for."""

    name: str
    holds: Mapping[str, Collection[Any]]
    """by the key of a choice in ``model``; what is not named here is free"""
    equal_heads: bool = True
    """whether key_width and value_width must be width / heads"""

    def check(self, recipe: Recipe, what: str) -> None:
        problems = list(self._problems(recipe))
        if problems:
            raise RegardError(f"{what}: {self.name} cannot hold {'; '.join(problems)}")

    def _problems(self, recipe: Recipe) -> Iterator[str]:
        if recipe.task != "translate":
            yield f"task: {recipe.task} (only translate)"
        if recipe.data.targets:
            yield f"data.train.to: {', '.join(recipe.data.targets)} (only one language, without to)"
        for key, held in {**ANY_LINEAR, **self.holds}.items():
            value = attrgetter(key)(recipe.model)
            if value not in held:
                yield f"model.{key}: {_word(value)} (only {' or '.join(map(_word, held))})"
        if self.equal_heads:
            yield from _unequal(recipe.model)


def other_search(recipe: Recipe, manner: Manner) -> list[str]:
    """What to tell where the other side's beam search scores length in another way than the recipe's."""
    search = recipe.search
    if search.manner == manner or search.beam == 1 or search.alpha == 0:
        return []
    return [
        f"its beam search divides by length ** alpha: regard translate --manner {manner} searches so too"
    ]


def _unequal(model: Model) -> Iterator[str]:
    for key in ("key_width", "value_width"):
        width = getattr(model, key)
        if width * model.heads != model.width:
            yield f"model.{key}: {width} (only width / heads, {model.width / model.heads:g})"


def _word(value: object) -> str:
    return "null" if value is None else str(value).lower()


HUGGINGFACE = Format(
    "MarianMTModel",
    {
        "norm": ("layer",),
        "norm_place": ("after",),
        "closing_norm": (False,),
        "position": ("sinusoidal",),
        "activation": ("relu", "gelu", "swish"),
    },
)
CTRANSLATE2 = Format(
    "CTranslate2",
    {
        "norm": ("layer", "rms"),
        "position": ADDED,
        "activation": ("relu", "gelu", "swish", "swiglu"),
    },
)
ONNX = Format("the ONNX export", {"position": ADDED}, False)
TORCH = Format(
    "torch.nn.Transformer",
    {
        "norm": ("layer",),
        "closing_norm": (True,),
        "activation": ("relu", "gelu"),
        "position": ("sinusoidal",),
    },
)
