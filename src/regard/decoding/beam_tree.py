"""The beam tree: every candidate of every step of beam search, and whether it was kept, pruned or finished."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from regard.decoding.hypothesis import Hypothesis
from regard.decoding.length_penalty_and_stopping import LengthPenalty
from regard.decoding.search_state import BeamCandidates, BeamStep

NodeState = Literal["kept", "pruned", "finished"]


@dataclass(frozen=True)
class Node:
    """A hypothesis after one step: its last token, and the node of the hypothesis before it."""

    id: int
    parent: int | None
    token: int
    log_probability: float
    """of the token"""
    total: float
    """log-probability of the whole hypothesis"""
    score: float
    """total divided by the length penalty"""
    state: NodeState


@dataclass
class BeamTree:
    """An observer that records the search for one sentence. The root, node 0, is the first token."""

    start: int
    """the first token that the decoder reads"""
    nodes: list[Node] = field(default_factory=list)
    active_nodes: list[int] = field(default_factory=list)
    """the node of each active hypothesis"""

    def __post_init__(self) -> None:
        self.nodes.append(Node(0, None, self.start, 0.0, 0.0, 0.0, "kept"))
        self.active_nodes.append(0)

    def __call__(self, step: BeamStep) -> None:
        assert len(step.done) == 1, "a beam tree records one sentence"
        extensions = _extensions(step.continued, step.groups)
        kept = set() if bool(step.done[0]) else set(extensions)
        log_probabilities = step.candidates.log_probabilities[0].tolist()
        totals = step.candidates.totals[0].tolist()
        finished = step.finished[0].tolist()
        candidates = zip(
            _extensions(step.candidates, step.groups),
            log_probabilities,
            totals,
            finished,
            strict=True,
        )
        ids: dict[Extension, int] = {}
        for extension, log_probability, total, ends in candidates:
            if total == -torch.inf:
                continue
            state: NodeState = "finished" if ends else "kept" if extension in kept else "pruned"
            _, beam, token = extension
            ids[extension] = number = len(self.nodes)
            parent, score = self.active_nodes[beam], total / step.penalty
            self.nodes.append(Node(number, parent, token, log_probability, total, score, state))
        # An empty slot of the beam points to the root; it never has a possible candidate.
        self.active_nodes = [ids.get(extension, 0) for extension in extensions]

    def add_path(self, hypothesis: Hypothesis, end: int, penalty: LengthPenalty) -> None:
        """Add a sampled hypothesis, which has no beam, as a single branch. ``end`` is the EOS token."""
        tokens = [*hypothesis.tokens, end] if hypothesis.finished else hypothesis.tokens
        total = 0.0
        for step, log_probability in enumerate(hypothesis.token_log_probabilities, 1):
            total += log_probability
            token, score = tokens[step - 1], total / penalty(step)
            state: NodeState = "finished" if token == end else "kept"
            self.nodes.append(Node(step, step - 1, token, log_probability, total, score, state))


Extension = tuple[int, int, int]
"""A group, a beam and the token it is extended by: unique among the candidates of a step."""


def _extensions(candidates: BeamCandidates, groups: int) -> list[Extension]:
    beams, tokens = candidates.beams[0].tolist(), candidates.tokens[0].tolist()
    per_group = len(beams) // groups
    return [
        (column // per_group, beam, token)
        for column, (beam, token) in enumerate(zip(beams, tokens, strict=True))
    ]
