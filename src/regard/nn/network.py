"""What learning, search and the page ask of a network, whatever it is made of."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard.data.special_tokens import BOS
from regard.nn.embeddings import Embedding
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.positions import PositionInfo


class Network(nn.Module, ABC):
    """Source ids in, memory; target ids and memory in, logits out: all at once to learn, word by word to search.

    Memory and state are the network's own business. A state has ``select(rows)``, which keeps these of its rows.
    """

    projection: Embedding
    """from states to logits"""

    @property
    @abstractmethod
    def longest(self) -> int | None:
        """The longest text it can read, marks counted; None: there is none."""

    def forward(
        self, source: Int[Tensor, "B S"], target: Int[Tensor, "B T"], places: PositionInfo = None
    ) -> Float[Tensor, "B T V"]:
        """Teacher forcing: the logits after each target word."""
        return self.project(self.decode(target, self.encode(source, places)))

    def project(self, states: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows V"]:
        return F.linear(states, self.projection.weight, self.projection.bias)

    @abstractmethod
    def encode(self, source: Int[Tensor, "B S"], places: PositionInfo = None) -> Any:
        """What is remembered of the source; EOS closes each row, padding follows."""

    @abstractmethod
    def decode(self, target: Int[Tensor, "B T"], memory: Any) -> Float[Tensor, "B T d"]:
        """The state after each target word; BOS opens each row."""

    @abstractmethod
    def start(self, memory: Any) -> Any:
        """The state before the first word."""

    @abstractmethod
    def step(self, tokens: Int[Tensor, "R"], state: Any) -> tuple[Float[Tensor, "R V"], Any]:
        """Read one more token in each row; the logits of the next."""

    def reading(self, said: Sequence[int]) -> list[int]:
        """What it reads, row by row, to say these tokens there: of a word after another, those before."""
        return [BOS, *said[:-1]]

    @abstractmethod
    def attentions(self) -> dict[str, list[MultiHeadAttention]]:
        """Every attention by its place, encoder, decoder and cross: what a trace watches, and what can be muted."""
