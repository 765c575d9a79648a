"""Continuer: what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from regard.errors import RegardError
from regard.marks import END, UNKNOWN
from regard.model.base import arithmetic
from regard.model.writer import Writer
from regard.score import Result
from regard.score.likelihood import TOKENS, WORDS
from regard.search import greedy, sample
from regard.text.corpus import Pair

ANSWER_TOKENS = 20


class Continuer(Writer):
    """The beginning of a line in, the rest of it out."""

    task = "continue"
    command = "continue"

    def answer(self, sources: Sequence[str], *, quick: bool = False) -> list[str]:
        return [self.go_on(source, ANSWER_TOKENS, temperature=0) for source in sources]

    @torch.inference_mode()
    def go_on(
        self,
        text: str,
        tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 1,
    ) -> str:
        """The text and at most so many tokens more, to the end of the line; temperature 0 draws nothing by chance."""
        longest = self.recipe.data.clean.max_tokens
        if not 1 <= tokens < longest:
            raise RegardError(
                f"{tokens} tokens asked for: it has learned from blocks of {longest}, "
                f"so 1 to {longest - 1} can be had"
            )
        (said,) = self.tokenizer.source.encode([text.rstrip()])
        *before, last = [END, *said][tokens - longest :]
        way = partial(sample, temperature=temperature, top_k=top_k, top_p=top_p, seeds=[seed])
        prompt = torch.tensor([before], dtype=torch.long, device=self.device)
        with arithmetic(self.precision, self.device):
            (found,) = (greedy if temperature == 0 else way)(
                self.network.step,
                self.network.start(self.network.encode(prompt)),
                limits=[tokens],
                start=last,
                end=END,
                banned=self.tokenizer.source.never_said,
                device=self.device,
            )
        (whole,) = self.tokenizer.source.decode([[*said, *found.tokens]])
        return whole

    @torch.inference_mode()
    def evaluate(self, pairs: Sequence[Pair], *, quick: bool = False) -> list[Result]:
        """How well it foretells the lines, as one stream: each token sees at least half a block before it.

        A word is what stands between blanks, and the end of each line is one more.
        """
        lines = self.tokenizer.source.encode([pair.source for pair in pairs])
        if not lines:
            raise RegardError("there is nothing to score: no lines")
        stream = torch.tensor([END, *(i for ids in lines for i in (*ids, END))])
        losses = self._losses(stream)
        ends = np.cumsum([len(ids) + 1 for ids in lines])
        totals = np.add.reduceat(losses, [0, *ends[:-1]])
        tokens = np.diff(ends, prepend=0)
        words = np.array([len(pair.source.split()) + 1 for pair in pairs])
        unknown = int((stream == UNKNOWN).sum())
        more = f"context:{self.recipe.data.clean.max_tokens // 2}+|unknown:{unknown}"
        kinds = {
            "perplexity": TOKENS.of_counts(np.stack([totals, tokens], 1), not quick, more),
            "word_perplexity": WORDS.of_counts(np.stack([totals, words], 1), not quick, more),
        }
        return [kinds[measure] for measure in self.recipe.score.measures]

    def _losses(self, stream: torch.Tensor) -> npt.NDArray[np.float64]:
        """The negative log-probability of each token but the first."""
        longest = self.recipe.data.clean.max_tokens
        stride = max(1, longest // 2)
        count = len(stream) - 1
        losses = np.zeros(count)
        starts = range(0, max(1, count - longest + stride), stride)
        blocks = [(at, min(at + longest, count)) for at in starts]
        for part in self.in_batches([end - at for at, end in blocks]):
            read = self.padded([stream[slice(*blocks[i])].tolist() for i in part])
            said = self.padded([stream[blocks[i][0] + 1 : blocks[i][1] + 1].tolist() for i in part])
            with arithmetic(self.precision, self.device):
                states = self.network.decode(read, self.network.encode(read[:, :0]))
                for row, i in enumerate(part):  # one by one: logits are large
                    at, end = blocks[i]
                    new = at if at == 0 else at + longest - stride
                    logits = self.network.project(states[row, new - at : end - at]).float()
                    wanted = said[row, new - at : end - at, None]
                    each = -logits.log_softmax(-1).gather(-1, wanted)[:, 0]
                    losses[new:end] = each.double().cpu().numpy()
        return losses
