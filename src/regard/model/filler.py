"""Filler: what words were hidden, guessed from the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from regard.errors import RegardError
from regard.marks import BLANK, END, MARKS, MASK, PAD
from regard.model.base import Model, arithmetic
from regard.nn.encoder_only import Guesser
from regard.nn.masking import hide
from regard.recipe import Recipe
from regard.score import Result
from regard.score.labels import ACCURACY
from regard.score.likelihood import TOKENS
from regard.text.corpus import Pair
from regard.text.tokenizer import Tokenizer

GAP = "[MASK]"


class Filling(NamedTuple):
    """A guess for one gap."""

    text: str
    """a whole word, or after … the rest of one"""
    probability: float


class Filler(Model):
    """Text with gaps in, the most probable fillings out."""

    task = "mask"
    command = "fill"
    network: Guesser

    @staticmethod
    def build(recipe: Recipe, tokenizer: Tokenizer) -> Guesser:
        return Guesser(recipe.model, tokenizer.source.size)

    def answer(self, sources: Sequence[str], *, quick: bool = False) -> list[str]:
        """Each text with its gaps filled."""
        answers = []
        for source in sources:
            parts = source.split(GAP)
            fillings = [best.text for best, *_ in self.fill(source, 1)] if len(parts) > 1 else []
            answers.append(
                parts[0] + "".join(a + b for a, b in zip(fillings, parts[1:], strict=True))
            )
        return answers

    @torch.inference_mode()
    def fill(self, text: str, count: int = 5) -> list[list[Filling]]:
        """For each [MASK] of the text the most probable fillings, best first."""
        parts = [part.strip() for part in text.split(GAP)]
        if len(parts) == 1:
            raise RegardError(f"no {GAP} in {text!r}: write it where a word is to be guessed")
        first, *rest = self.tokenizer.source.encode(parts)
        row = [*first, *(i for ids in rest for i in (MASK, *ids)), END]
        gaps = [place for place, i in enumerate(row) if i == MASK]
        with arithmetic(self.precision, self.device):
            logits = self.network(self.padded([row]))[0, gaps, len(MARKS) :]
        best = logits.float().softmax(-1).topk(min(count, logits.shape[-1]))
        return [
            [Filling(*one) for one in zip(self._names(ids), values, strict=True)]
            for ids, values in zip(
                (best.indices + len(MARKS)).tolist(), best.values.tolist(), strict=True
            )
        ]

    def _names(self, ids: Sequence[int]) -> list[str]:
        pieces = self.tokenizer.source.pieces(ids)
        return [p.removeprefix(BLANK) or BLANK if p.startswith(BLANK) else f"…{p}" for p in pieces]

    @torch.inference_mode()
    def evaluate(self, pairs: Sequence[Pair], *, quick: bool = False) -> list[Result]:
        """Hide words of each text, always the same ones, and see how well they are guessed."""
        longest = self.recipe.data.clean.max_tokens
        texts = self.tokenizer.source.encode([pair.source for pair in pairs if pair.source.strip()])
        rows = [ids[at : at + longest] for ids in texts for at in range(0, len(ids), longest)]
        if not rows:
            raise RegardError("there is nothing to score: no text")
        counts = np.zeros((len(rows), 3))  # right, negative log-probability, hidden words
        tried = [self._hiding(ids, number) for number, ids in enumerate(rows)]
        for part in self.in_batches([len(row) for row in rows]):
            shown, hidden = (
                self.padded(side) for side in zip(*(tried[row] for row in part), strict=True)
            )
            with arithmetic(self.precision, self.device):
                counts[part] = _count(self.network, shown, hidden).cpu().numpy()
        kinds = {
            "accuracy": ACCURACY.of_counts(counts[:, [0, 2]], not quick, more="words:15%"),
            "perplexity": TOKENS.of_counts(counts[:, [1, 2]], not quick, more="words:15%"),
        }
        return [kinds[measure] for measure in self.recipe.score.measures]

    def _hiding(self, ids: Sequence[int], number: int) -> tuple[list[int], list[int]]:
        """What is shown of a text, and what is hidden; its number alone decides, not the texts beside it."""
        source = torch.tensor([[*ids, END]])
        words = source.masked_fill(source == END, PAD)
        chance = torch.Generator().manual_seed(number)
        shown, hidden = hide(source, words, self.tokenizer.source.size, chance)
        return shown[0].tolist(), hidden[0].tolist()


def _count(
    network: Guesser, shown: Int[Tensor, "B S"], hidden: Int[Tensor, "B S"]
) -> Float[Tensor, "B 3"]:
    """For each row: how many are guessed right, the negative log-probability of all, how many there are."""
    row, place = (hidden != PAD).nonzero(as_tuple=True)
    wanted = hidden[row, place]
    logits = F.linear(network.states(shown)[row, place], network.projection.weight).float()
    each = -logits.log_softmax(-1).gather(-1, wanted[:, None])[:, 0]
    counts = torch.stack([logits.argmax(-1) == wanted, each, torch.ones_like(each)], dim=1)
    return counts.new_zeros(len(hidden), 3).index_add(0, row, counts).double()
