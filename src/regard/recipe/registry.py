"""Registries: the named choices of a recipe, each registered where it is defined.

    NORMS: Registry[Callable[[int], nn.Module]] = Registry("model.norm")

    @NORMS.register("layer", packed_batches=True, fast_inference=True, formats=FORMATS)
    class LayerNorm(nn.LayerNorm): ...

A registration also states what the choice supports. Everything is off unless stated, so a new choice works in the
plain code path at once, and in the optimized ones once somebody has checked it there. The recipe schema looks up names
here, and ``recipe/validation.py`` refuses options that no selected choice reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar

T = TypeVar("T")
V = TypeVar("V")

FORMATS = ("huggingface", "ctranslate2", "onnx", "torch", "html")
"""The formats that a model can be exported to, by the names of ``interop/base.py``."""

LOCATIONS = {
    "task": "regard.tasks:TASKS",
    "tokenizer.kind": "regard.data.tokenizer:TOKENIZERS",
    "tokenizer.normalize": "regard.data.tokenizer:NORMALIZATIONS",
    "model.architecture": "regard.nn.architectures:ARCHITECTURES",
    "model.norm": "regard.nn.norms:NORMS",
    "model.norm_order": "regard.nn.layers:NORM_ORDERS",
    "model.residual": "regard.nn.layers:RESIDUALS",
    "model.position": "regard.nn.positions:POSITIONS",
    "model.activation": "regard.nn.layers:FEED_FORWARDS",
    "model.attention.score": "regard.nn.attention:SCORES",
    "model.attention.weighting": "regard.nn.attention:WEIGHTINGS",
    "model.attention.encoder": "regard.nn.attention_patterns:PATTERNS",
    "model.attention.decoder": "regard.nn.attention_patterns:PATTERNS",
    "model.attention.cross_attention": "regard.nn.attention_patterns:PATTERNS",
    "model.non_autoregressive.length": "regard.nn.non_autoregressive:LENGTHS",
    "training.optimizer": "regard.training.optimizers:OPTIMIZERS",
    "training.schedule": "regard.training.optimizers:SCHEDULES",
    "training.label_smoothing_over": "regard.nn.loss:LABEL_SMOOTHINGS",
    "decoding.length_normalization": "regard.decoding.length_penalty_and_stopping:LENGTH_NORMALIZATIONS",
    "decoding.protect": "regard.data.protected_spans:PROTECTED_SPANS",
    "evaluation.metrics": "regard.metrics.base:METRICS",
}
"""The registry of each recipe key, imported when the key is first looked up: most of them import torch."""


@dataclass(frozen=True)
class Choice(Generic[T]):
    """One named choice and what it supports."""

    name: str
    value: T
    summary: str
    """one line of documentation"""
    options: tuple[str, ...] = ()
    """recipe keys that have an effect only if a choice that reads them is selected"""
    ignores: tuple[str, ...] = ()
    """recipe keys that have no effect with this choice"""
    sites: tuple[str, ...] = ()
    """attention patterns only: encoder, decoder, cross_attention"""
    packed_batches: bool = False
    """works with ``training.batching: packed``"""
    sharding: bool = False
    """architectures and optimizers only: works with ``training.sharding: full_shard``"""
    fast_inference: bool = False
    """works with the packed weights of the inference engine (fp32, bf16 and int8)"""
    formats: tuple[str, ...] = ()
    """formats of ``FORMATS`` that can represent it"""


class Registry(Mapping[str, T]):
    """The choices of one recipe key by name."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.choices: dict[str, Choice[T]] = {}

    def register(
        self,
        name: str,
        *,
        summary: str = "",
        options: Collection[str] = (),
        ignores: Collection[str] = (),
        sites: Collection[str] = (),
        packed_batches: bool = False,
        sharding: bool = False,
        fast_inference: bool = False,
        formats: Collection[str] = (),
    ) -> Callable[[V], V]:
        """A decorator that registers a class, function or object.

        The summary defaults to the first line of its docstring.
        """
        assert name not in self.choices, f"{self.key}: {name} is registered twice"

        def add(value: V) -> V:
            line = summary or (getattr(value, "__doc__", None) or "").strip().split("\n")[0]
            choice: Choice[Any] = Choice(
                *(name, value, line, tuple(options), tuple(ignores)),
                *(tuple(sites), packed_batches, sharding, fast_inference, tuple(formats)),
            )
            self.choices[name] = choice
            return value

        return add

    def __getitem__(self, name: str) -> T:
        return self.choices[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self.choices)

    def __len__(self) -> int:
        return len(self.choices)


def find_registry(key: str) -> Registry[Any]:
    """The registry of a recipe key such as ``model.norm``."""
    module, name = LOCATIONS[key].split(":")
    registry: Registry[Any] = getattr(import_module(module), name)
    return registry


CHECKED_NAMES: set[tuple[str, str]] = set()
"""keys and names that an earlier process has looked up, see ``tasks/native_model_cache.py``"""


def allowed_names(key: str) -> list[str]:
    """The names that a recipe key may have."""
    choices = find_registry(key).choices.values()
    site = key.rpartition(".")[2]
    return [choice.name for choice in choices if not choice.sites or site in choice.sites]
