"""A beam search as a tree: every continuation that was looked at, and what became of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.decoding.hypotheses import BeamCandidates, Hypothesis

State = Literal["kept", "pruned", "finished"]


class BeamStep(NamedTuple):
    """One step of a beam search, as it shows itself to a watcher."""

    length: int
    """tokens before this step"""
    best: BeamCandidates
    """the continuations looked at, best first"""
    ended: Bool[Tensor, "sentences count"]
    """which of them finish a hypothesis"""
    going: BeamCandidates
    """those that go on"""
    done: Bool[Tensor, "sentences"]
    """which sentences end here"""
    penalty: float
    """what a hypothesis of the new length is divided by"""


@dataclass(frozen=True)
class Node:
    """A hypothesis at one moment: its last token, and the way to it through the parents."""

    id: int
    parent: int | None
    token: int
    log_probability: float
    """of the token"""
    total: float
    """of the whole way"""
    score: float
    """total over the length penalty"""
    state: State


@dataclass
class BeamTree:
    """Watches the search of a single sentence."""

    start: int
    nodes: list[Node] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    """the node at which each live hypothesis stands"""

    def __post_init__(self) -> None:
        self.nodes.append(Node(0, None, self.start, 0.0, 0.0, 0.0, "kept"))
        self.live.append(0)

    def __call__(self, looked: BeamStep) -> None:
        assert len(looked.done) == 1, "a tree is of one sentence"
        places = _places(looked.going)
        going = set() if bool(looked.done[0]) else set(places)
        parts, totals = looked.best.log_probabilities[0].tolist(), looked.best.totals[0].tolist()
        ended = looked.ended[0].tolist()
        ids: dict[Place, int] = {}
        for place, part, total, end in zip(_places(looked.best), parts, totals, ended, strict=True):
            if total == -torch.inf:
                continue
            state: State = "finished" if end else "kept" if place in going else "pruned"
            beam, token = place
            ids[place] = len(self.nodes)
            self.nodes.append(
                Node(ids[place], self.live[beam], token, part, total, total / looked.penalty, state)
            )
        # A place without a hypothesis keeps the root: nothing real will ever stand there.
        self.live = [ids.get(place, 0) for place in places]

    def add_path(self, hypothesis: Hypothesis, end: int, penalty: Callable[[int], float]) -> None:
        """Add one hypothesis as a single branch: a sampled one has no beam."""
        tokens = [*hypothesis.tokens, end] if hypothesis.finished else hypothesis.tokens
        total = 0.0
        for step, part in enumerate(hypothesis.token_log_probabilities, 1):
            total += part
            state: State = "finished" if tokens[step - 1] == end else "kept"
            self.nodes.append(
                Node(step, step - 1, tokens[step - 1], part, total, total / penalty(step), state)
            )


Place = tuple[int, int]
"""A beam and the token it goes on with: each continuation of a step has its own."""


def _places(some: BeamCandidates) -> list[Place]:
    return list(zip(some.beams[0].tolist(), some.tokens[0].tolist(), strict=True))
