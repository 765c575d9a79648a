"""What models that generate sequences have in common: a network and the engine that decodes with it."""

from __future__ import annotations

from typing import Any

from regard.data.tokenizer import Tokenizer
from regard.inference.engine import Engine
from regard.nn.architectures import ARCHITECTURES
from regard.nn.network import Network
from regard.recipe import Recipe
from regard.tasks.base import Model


class SequenceGenerator(Model):
    """A model whose network generates tokens."""

    network: Network

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.engine = Engine(
            self.recipe.model,
            self.network,
            self.tokenizer.target,
            self.device,
            self.precision,
            self.threads,
        )

    @staticmethod
    def build(recipe: Recipe, tokenizer: Tokenizer) -> Network:
        section = recipe.model
        build = ARCHITECTURES[section.architecture]
        return build(section, tokenizer.source.size, tokenizer.target.size)

    def freeze(self) -> None:
        self.engine.freeze()
        self.precision = self.engine.precision

    def start_workers(self) -> None:
        self.engine.start_workers()
