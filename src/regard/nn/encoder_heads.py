"""The encoder by itself: states to tags, to one label, or to the words that were hidden.

source ids -> encoder -> states -> projection -> logits of each position          (tag, mask)
source ids -> encoder -> states -> pool -> projection -> logits of the text       (classify)
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard import recipe
from regard.nn.dropout import Dropout
from regard.nn.embeddings import Embedding
from regard.nn.layers import initialize
from regard.nn.transformer import Encoder, Memory


class EncoderForMaskedLM(nn.Module):
    """The encoder and, tied to its embedding, a projection to its own words."""

    def __init__(self, section: recipe.Model, size: int) -> None:
        super().__init__()
        self.encoder = Encoder(section, Embedding(size, section.d_model))
        tied = section.tie_output
        self.projection = self.encoder.embedding if tied else Embedding(size, section.d_model)
        initialize(self)

    def states(self, source: Int[Tensor, "B S"]) -> Float[Tensor, "B S d"]:
        memory: Memory = self.encoder(source)
        return memory.states

    def forward(self, source: Int[Tensor, "B S"]) -> Float[Tensor, "B S V"]:
        return F.linear(self.states(source), self.projection.weight)


class EncoderForTokenClassification(nn.Module):
    """The encoder and a projection to labels, for each position."""

    def __init__(self, section: recipe.Model, size: int, labels: int) -> None:
        super().__init__()
        self.encoder = Encoder(section, Embedding(size, section.d_model))
        self.dropout = Dropout(section.dropout)
        self.projection = Embedding(labels, section.d_model)
        initialize(self)

    def states(self, source: Int[Tensor, "B S"]) -> Float[Tensor, "B P d"]:
        """One for each position that gets a label."""
        memory: Memory = self.encoder(source)
        states: Float[Tensor, "B P d"] = self.dropout(self.gather(memory))
        return states

    def gather(self, memory: Memory) -> Float[Tensor, "B P d"]:
        return memory.states

    def forward(self, source: Int[Tensor, "B S"]) -> Float[Tensor, "B P V"]:
        return F.linear(self.states(source), self.projection.weight)


class Pool(nn.Module):
    """One vector of a whole text: its states summed, weighted by how well they answer a learned query.

    The query begins at zero, where all words weigh the same and the sum is the mean.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(width))

    def forward(
        self, states: Float[Tensor, "B S d"], real: Bool[Tensor, "B S"]
    ) -> Float[Tensor, "B d"]:
        scores = states @ self.query.to(states.dtype) / math.sqrt(states.shape[-1])
        weights = scores.masked_fill(~real, -math.inf).softmax(-1)
        return (weights[:, None] @ states)[:, 0]


class EncoderForSequenceClassification(EncoderForTokenClassification):
    """The encoder, a pool, and a projection to labels, for the whole text."""

    def __init__(self, section: recipe.Model, size: int, labels: int) -> None:
        super().__init__(section, size, labels)
        self.pool = Pool(section.d_model)

    def gather(self, memory: Memory) -> Float[Tensor, "B 1 d"]:
        pooled: Float[Tensor, "B d"] = self.pool(memory.states, memory.real)
        return pooled[:, None]
