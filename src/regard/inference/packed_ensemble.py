"""PackedEnsemble: several packed networks that decode together, see ``nn/ensemble.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from jaxtyping import Float, Int
from torch import Tensor

from regard.inference.packed_transformer import Memory, PackedDecoderState, PackedTransformer
from regard.nn.ensemble import EnsembleState, mean_log_probabilities
from regard.nn.positions import Tree


class PackedEnsemble:
    """The same function as ``nn.ensemble.Ensemble``, with the interface of ``PackedTransformer``."""

    def __init__(self, members: Sequence[PackedTransformer]) -> None:
        self.members = members

    def for_sentences(self, sentences: int) -> PackedEnsemble:
        """The ensemble with the cache data type that is fastest for this many sentences."""
        return PackedEnsemble([member.for_sentences(sentences) for member in self.members])

    @property
    def bytes(self) -> int:
        """Size of the packed weights."""
        return sum(member.bytes for member in self.members)

    def encode(self, source: Int[Tensor, "S K"], tree: Tree | None = None) -> list[Memory]:
        """The memory of each member."""
        return [member.encode(source, tree) for member in self.members]

    def start(self, memory: list[Memory]) -> EnsembleState:
        """The state before the first token."""
        each = zip(self.members, memory, strict=True)
        return EnsembleState([member.start(one) for member, one in each])

    def step(
        self, tokens: Int[Tensor, " R"], state: EnsembleState
    ) -> tuple[Float[Tensor, "R V"], EnsembleState]:
        """Read one token in each row. Returns the log-probabilities of the next token and the new state."""
        states = cast(Sequence[PackedDecoderState], state.states)
        each = zip(self.members, states, strict=True)
        steps: list[tuple[Tensor, Any]] = [member.step(tokens, one) for member, one in each]
        logits = mean_log_probabilities([one for one, _ in steps])
        return logits, EnsembleState([new for _, new in steps])
