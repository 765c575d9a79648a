"""Ensemble: several networks with one vocabulary decode together; the next token has the mean of their probabilities.

    p(y | x) = 1/n sum_i p_i(y | x)

The members may differ in architecture and size, but not in their vocabularies.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard import recipe
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.network import Network
from regard.nn.positions import PositionInfo


class MemberState(Protocol):
    """The decoder state of one network."""

    def select(self, rows: Tensor, /) -> Any: ...


class EnsembleState(NamedTuple):
    """The decoder state of each member."""

    states: Sequence[MemberState]

    def select(self, rows: Int[Tensor, "sentences beams"]) -> "EnsembleState":
        """Keep these rows, in this order."""
        return EnsembleState([state.select(rows) for state in self.states])


def mean_log_probabilities(logits: Sequence[Float[Tensor, "*rows V"]]) -> Float[Tensor, "*rows V"]:
    """The logarithm of the mean of the probabilities, from the logits of each member."""
    log_probs = torch.stack([member.float().log_softmax(-1) for member in logits])
    return log_probs.logsumexp(0) - math.log(len(logits))


class Ensemble(Network):
    """Networks that decode together. Their logits are the log-probabilities of the ensemble."""

    def __init__(self, members: Sequence[Network], configs: Sequence[recipe.ModelConfig]) -> None:
        super().__init__()
        assert len(members) == len(configs)
        self.configs = configs
        """the model section of each member's recipe"""
        self.networks = nn.ModuleList(members)

    @property
    def members(self) -> list[Network]:
        return [cast(Network, network) for network in self.networks]

    @property
    def max_length(self) -> int | None:
        limits = [member.max_length for member in self.members]
        return min((limit for limit in limits if limit is not None), default=None)

    def encode(self, source: Int[Tensor, "B S"], position_info: PositionInfo = None) -> list[Any]:
        """The encoder output of each member."""
        return [member.encode(source, position_info) for member in self.members]

    def decode(
        self, target: Int[Tensor, "B T"], encoder_outputs: list[Any]
    ) -> Float[Tensor, "B T d"]:
        """The states of all members, side by side: d is the sum of their widths."""
        pairs = zip(self.members, encoder_outputs, strict=True)
        return torch.cat([member.decode(target, encoded) for member, encoded in pairs], dim=-1)

    def project(self, states: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows V"]:
        splits = torch.split_with_sizes(
            states, [member.projection.weight.shape[1] for member in self.members], -1
        )
        pairs = zip(self.members, splits, strict=True)
        return mean_log_probabilities([member.project(split) for member, split in pairs])

    def start(self, encoder_outputs: list[Any]) -> EnsembleState:
        pairs = zip(self.members, encoder_outputs, strict=True)
        return EnsembleState([member.start(encoded) for member, encoded in pairs])

    def step(
        self, tokens: Int[Tensor, "R"], state: EnsembleState
    ) -> tuple[Float[Tensor, "R V"], EnsembleState]:
        pairs = zip(self.members, state.states, strict=True)
        steps = [member.step(tokens, member_state) for member, member_state in pairs]
        logits = mean_log_probabilities([member_logits for member_logits, _ in steps])
        return logits, EnsembleState([new_state for _, new_state in steps])

    def attentions(self) -> dict[str, list[MultiHeadAttention]]:
        """Empty: each member has attention of its own."""
        return {}
