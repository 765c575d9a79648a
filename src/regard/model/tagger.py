"""Tagger: one label for each word."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from regard.errors import RegardError
from regard.marks import END, MARKS
from regard.model.base import Model, arithmetic
from regard.nn.encoder_only import Labeller
from regard.recipe import Recipe
from regard.text.forms import label_names
from regard.text.tokenizer import Tokenizer


class Tagged(NamedTuple):
    """The words of one text with their tags."""

    words: list[str]
    tags: list[str]
    probabilities: list[float]
    """of each tag"""


class Tagger(Model):
    """Words in, a tag for each out. Words stand between blanks."""

    task = "tag"
    command = "tag"
    network: Labeller

    @staticmethod
    def build(recipe: Recipe, tokenizer: Tokenizer) -> Labeller:
        return Labeller(recipe.model, tokenizer.source.size, tokenizer.target.size)

    def answer(self, sources: Sequence[str], *, quick: bool = False) -> list[str]:
        return [" ".join(tagged.tags) for tagged in self.tag(sources)]

    @torch.inference_mode()
    def tag(self, texts: Sequence[str]) -> list[Tagged]:
        if isinstance(texts, str):
            raise RegardError("tag takes a list of texts: tag([text])")
        words = [text.split() for text in texts]
        pieces = [self.tokenizer.source.encode(some) for some in words]
        rows = [[*chain(*some), END] for some in pieces]
        names = label_names(self.tokenizer.target)
        found = [Tagged([], [], []) for _ in texts]
        for part in self.in_batches([len(row) for row in rows]):
            with arithmetic(self.precision, self.device):
                logits = self.network(self.padded([rows[row] for row in part]))
            best = logits[..., len(MARKS) :].float().softmax(-1).max(-1)
            for row, values, labels in zip(
                part, best.values.tolist(), best.indices.tolist(), strict=True
            ):
                # The tag of a word stands where its first piece does.
                firsts = [0, *accumulate(map(len, pieces[row]))][: len(words[row])]
                tags = [names[labels[place]] for place in firsts]
                found[row] = Tagged(words[row], tags, [values[place] for place in firsts])
        return found
