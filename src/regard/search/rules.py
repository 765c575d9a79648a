"""The step a search is made of, and which tokens may come next: the same in every search."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

NEVER = -torch.inf
"""the log-probability of what may not or cannot come"""
FREE = -1
"""in a prefix's place: any token may come here"""


Same = TypeVar("Same")


@runtime_checkable
class State(Protocol):
    """All a step needs to know of the past: keys and values already computed, for example.

    At first it has one row a sentence, later one row a hypothesis, a sentence's rows side by side.
    """

    def select(self: Same, rows: Int[Tensor, "sentences beams"]) -> Same:
        """The state of the rows to keep, numbered as they stand in the present state.

        Line i holds the rows that go on for one sentence; they all come from one and the same
        sentence, and sentences stay in order (some may be gone). So what belongs to a sentence,
        such as the encoder's output, can be kept once for each and shared among its beams.
        """
        ...


S = TypeVar("S", bound=State)

Step = Callable[[Int[Tensor, "rows"], S], tuple[Float[Tensor, "rows V"], S]]
"""The last token of each row, and the state, to the logits of the next token and the new state."""


@dataclass(frozen=True)
class Rules:
    """What holds for every sequence of the batch, whatever the search."""

    start: int
    end: int
    limits: Int[Tensor, "sentences"]
    """most tokens of each sentence, END not counted"""
    prefixes: Int[Tensor, "sentences longest"]
    """the tokens each sentence must begin with, ``FREE`` after them"""
    banned: Int[Tensor, "banned"]
    """tokens that never come, unless a prefix says so"""
    forces_end: bool = False
    """at the limit END comes, at no cost, and nothing else"""

    @classmethod
    def of(
        cls,
        limits: Sequence[int],
        start: int,
        end: int,
        prefixes: Sequence[Sequence[int]] | None,
        banned: Sequence[int],
        device: torch.device | str,
        forces_end: bool = False,
    ) -> "Rules":
        prefixes = prefixes if prefixes is not None else [()] * len(limits)
        assert len(prefixes) == len(limits), "one prefix a sentence (it may be empty)"
        assert end not in banned, "without END no sequence would finish"
        assert all(end not in prefix for prefix in prefixes), "END cannot stand inside a sequence"
        longest = max(map(len, prefixes), default=0)
        padded = [[*prefix, *[FREE] * (longest - len(prefix))] for prefix in prefixes]
        # A prefix longer than the limit still comes whole.
        reached = [max(limit, len(prefix)) for limit, prefix in zip(limits, prefixes, strict=True)]
        return cls(
            start=start,
            end=end,
            limits=torch.tensor(reached, dtype=torch.long, device=device),
            prefixes=torch.tensor(padded, dtype=torch.long, device=device).view(
                len(limits), longest
            ),
            banned=torch.tensor(banned, dtype=torch.long, device=device),
            forces_end=forces_end,
        )

    def log_probabilities(
        self,
        logits: Float[Tensor, "rows V"],
        sentences: Int[Tensor, "rows"],
        position: int,
    ) -> Float[Tensor, "rows V"]:
        """The model's log-probability of each token that may come next, ``NEVER`` for the others.

        What is left is not normalised again: a forced token costs what the model says it costs.
        """
        everything = logits.log_softmax(-1, dtype=torch.float32)
        if self.forces_end:
            closing = torch.full_like(everything, NEVER)
            closing[:, self.end] = 0.0
            at_limit = (position >= self.limits[sentences]).unsqueeze(1)
            everything = torch.where(at_limit, closing, everything)
        if position >= self.prefixes.shape[1]:
            return everything.index_fill_(1, self.banned, NEVER)
        prefix = self.prefixes[sentences, position].unsqueeze(1)
        token = prefix.clamp(min=0)
        forced = torch.full_like(everything, NEVER).scatter(1, token, everything.gather(1, token))
        allowed = everything.index_fill_(1, self.banned, NEVER)
        return torch.where(prefix == FREE, allowed, forced)
