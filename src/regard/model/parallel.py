"""How a translator uses a network that says all words at once: a search with rounds in place of beams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from regard.errors import RegardError
from regard.marks import END, MASK, PAD
from regard.nn.parallel import Parallel, ParallelState
from regard.recipe import Search
from regard.search import Hypothesis, Round, mask_predict

WIDTH = 8
"""so many beams are as dear as one candidate: the logits of all its words exist at once"""


class History(NamedTuple):
    """How a text was translated by a model that says all words at once."""

    hypothesis: Hypothesis
    read: list[list[int]]
    """in each round what stood at each place before it: words, or MASK"""
    said: list[list[int]]
    """and after it"""


@dataclass(frozen=True)
class Rounds:
    """A way to search."""

    network: Parallel
    rounds: int
    candidates: int
    length: int | None
    nbest: int
    watch: Callable[[Round], None] | None = None

    def __call__(
        self,
        step: object,
        state: ParallelState,
        *,
        limits: Sequence[int],
        banned: Sequence[int],
        **others: Any,
    ) -> list[list[Hypothesis]]:
        """Called like any search; it takes no step, so START and prefixes are nothing to it."""
        network, device = self.network, state.memory.states.device
        if self.length is None:
            most = torch.tensor(limits, device=device)
            lengths = network.length.choose(state.memory, most, self.candidates)
        else:
            lengths = torch.full((len(limits), 1), self.length, device=device)
        return mask_predict(
            partial(network.fill, state=state),
            lengths,
            rounds=self.rounds,
            mask=MASK,
            pad=PAD,
            end=END,
            nbest=self.nbest,
            banned=[*banned, *([] if network.length.says_end else [END])],
            watch=self.watch,
        )


def in_rounds(
    network: Parallel,
    options: Search,
    rounds: int | None,
    candidates: int | None,
    length: int | None,
    nbest: int = 1,
) -> Rounds:
    """The way that was asked for, or else the recipe's; refused if there is no such way."""
    rounds = options.rounds if rounds is None else rounds
    if length is not None:
        _check_length(network, length, candidates)
        candidates = 1
    elif candidates is None:
        candidates = max(options.candidates, nbest)
    if rounds < 1 or candidates < 1 or not 1 <= nbest <= candidates:
        raise RegardError(
            f"rounds {rounds}, candidates {candidates}, nbest {nbest}: rounds and candidates must "
            "be at least 1, nbest between 1 and candidates"
        )
    return Rounds(network, rounds, candidates, length, nbest)


def _check_length(network: Parallel, length: int, candidates: int | None) -> None:
    if network.length.says_end:
        raise RegardError(
            f"length {length}: this model ends where it says END (model.parallel.length: cut); "
            "its length cannot be set"
        )
    if candidates not in (None, 1) or length < 1:
        raise RegardError(
            f"length {length}, candidates {candidates or 1}: a length must be at least 1, "
            "and with a length given there is one candidate"
        )


def told(best: Hypothesis, seen: Sequence[Round]) -> History:
    """What became of the best candidate in each round."""
    row = _row_of(best, seen[-1])
    places = int((seen[-1].said[row] != PAD).sum())
    return History(
        best,
        [one.read[row, :places].tolist() for one in seen],
        [one.said[row, :places].tolist() for one in seen],
    )


def _row_of(best: Hypothesis, last: Round) -> int:
    """The candidate that became the hypothesis: others are longer or shorter."""
    words = best.tokens
    after = slice(len(words), len(words) + 1)
    rows: list[list[int]] = last.said.tolist()
    return next(
        number
        for number, row in enumerate(rows)
        if row[: len(words)] == words and row[after] in ([], [PAD], [END])
    )
