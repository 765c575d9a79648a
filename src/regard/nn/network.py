"""The interface of sequence-to-sequence networks, which training, decoding and inspection use."""

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
    """Source ids are encoded to a memory; target ids and the memory are decoded to logits.

    Training decodes all positions at once, with teacher forcing. Search decodes token by token with ``start`` and
    ``step``. Memory and decoder state are opaque to callers, except that a state has ``select(rows)``, which keeps the
    given rows.
    """

    projection: Embedding
    """the output projection, from states to logits"""

    @property
    @abstractmethod
    def max_length(self) -> int | None:
        """The longest sequence it supports, special tokens included; None if there is no limit."""

    def forward(
        self,
        source: Int[Tensor, "B S"],
        target: Int[Tensor, "B T"],
        position_info: PositionInfo = None,
    ) -> Float[Tensor, "B T V"]:
        """Teacher forcing: the logits of the next token after each target token."""
        return self.project(self.decode(target, self.encode(source, position_info)))

    def project(self, states: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows V"]:
        """The logits of decoder states."""
        return F.linear(states, self.projection.weight, self.projection.bias)

    @abstractmethod
    def encode(self, source: Int[Tensor, "B S"], position_info: PositionInfo = None) -> Any:
        """The memory of the source. Each row ends with EOS and is padded."""

    @abstractmethod
    def decode(self, target: Int[Tensor, "B T"], memory: Any) -> Float[Tensor, "B T d"]:
        """The decoder state after each target token. Each row begins with BOS."""

    @abstractmethod
    def start(self, memory: Any) -> Any:
        """The decoder state before the first token."""

    @abstractmethod
    def step(self, tokens: Int[Tensor, "R"], state: Any) -> tuple[Float[Tensor, "R V"], Any]:
        """Feed one more token of each row; returns the logits of the next token, and the new state."""

    def decoder_input(self, output: Sequence[int]) -> list[int]:
        """The tokens the decoder reads when it generates these tokens: BOS and all but the last of them."""
        return [BOS, *output[:-1]]

    @abstractmethod
    def attentions(self) -> dict[str, list[MultiHeadAttention]]:
        """The attention modules of all layers, by site: encoder, decoder, cross_attention."""
