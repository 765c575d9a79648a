"""Classifier: one label for each text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from regard.errors import RegardError
from regard.marks import END, MARKS
from regard.model.base import Model, arithmetic
from regard.nn import encoder_only
from regard.recipe import Recipe
from regard.text.forms import label_names
from regard.text.tokenizer import Tokenizer


class Classification(NamedTuple):
    label: str
    probability: float
    probabilities: dict[str, float]
    """of every label"""


class Classifier(Model):
    """Text in, a label out."""

    task = "classify"
    command = "classify"
    network: encoder_only.Classifier

    @staticmethod
    def build(recipe: Recipe, tokenizer: Tokenizer) -> encoder_only.Classifier:
        return encoder_only.Classifier(recipe.model, tokenizer.source.size, tokenizer.target.size)

    def answer(self, sources: Sequence[str], *, quick: bool = False) -> list[str]:
        return [found.label for found in self.classify(sources)]

    @torch.inference_mode()
    def classify(self, texts: Sequence[str]) -> list[Classification]:
        if isinstance(texts, str):
            raise RegardError("classify takes a list of texts: classify([text])")
        rows = [[*ids, END] for ids in self.encode(texts)]
        names = label_names(self.tokenizer.target)
        found: dict[int, Classification] = {}
        for part in self.in_batches([len(row) for row in rows]):
            with arithmetic(self.precision, self.device):
                logits = self.network(self.padded([rows[row] for row in part]))[:, 0]
            probabilities = logits[:, len(MARKS) :].float().softmax(-1).tolist()
            for row, values in zip(part, probabilities, strict=True):
                best = max(range(len(values)), key=values.__getitem__)
                each = dict(zip(names, values, strict=True))
                found[row] = Classification(names[best], values[best], each)
        return [found[row] for row in range(len(texts))]
