"""Encoder-only networks with a head: masked language model, token classification, sequence classification.

source ids -> encoder -> states -> projection -> logits of each token               (masked_lm, tagging)
source ids -> encoder -> states -> pooling -> projection -> logits of the text      (classification)
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard import recipe
from regard.nn.dropout import Dropout
from regard.nn.layers import Embedding, initialize
from regard.nn.transformer import Encoder, EncoderOutput


class EncoderForMaskedLM(nn.Module):
    """The encoder and a projection to its own vocabulary, tied to the embedding by default."""

    def __init__(self, config: recipe.ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.encoder = Encoder(config, Embedding(vocab_size, config.d_model))
        tied = config.tie_output
        self.projection = self.encoder.embedding if tied else Embedding(vocab_size, config.d_model)
        initialize(self)

    def states(self, source: Int[Tensor, "B S"]) -> Float[Tensor, "B S d"]:
        encoder_output: EncoderOutput = self.encoder(source)
        return encoder_output.states

    def forward(self, source: Int[Tensor, "B S"]) -> Float[Tensor, "B S V"]:
        return F.linear(self.states(source), self.projection.weight)


class EncoderForTokenClassification(nn.Module):
    """The encoder and a projection to labels, for each token."""

    def __init__(self, config: recipe.ModelConfig, vocab_size: int, labels: int) -> None:
        super().__init__()
        self.encoder = Encoder(config, Embedding(vocab_size, config.d_model))
        self.dropout = Dropout(config.dropout)
        self.projection = Embedding(labels, config.d_model)
        initialize(self)

    def states(self, source: Int[Tensor, "B S"]) -> Float[Tensor, "B P d"]:
        """One state for each position that gets a label."""
        encoder_output: EncoderOutput = self.encoder(source)
        states: Float[Tensor, "B P d"] = self.dropout(self.label_states(encoder_output))
        return states

    def label_states(self, encoder_output: EncoderOutput) -> Float[Tensor, "B P d"]:
        return encoder_output.states

    def forward(self, source: Int[Tensor, "B S"]) -> Float[Tensor, "B P V"]:
        return F.linear(self.states(source), self.projection.weight)


class AttentionPooling(nn.Module):
    """One vector for a whole text: attention with a learned query over its states.

    The query is initialized to zero, where all weights are equal and the result is the mean.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(d_model))

    def forward(
        self, states: Float[Tensor, "B S d"], non_pad: Bool[Tensor, "B S"]
    ) -> Float[Tensor, "B d"]:
        scores = states @ self.query.to(states.dtype) / math.sqrt(states.shape[-1])
        weights = scores.masked_fill(~non_pad, -math.inf).softmax(-1)
        return (weights[:, None] @ states)[:, 0]


class EncoderForSequenceClassification(EncoderForTokenClassification):
    """The encoder, attention pooling, and a projection to labels, for the whole text."""

    def __init__(self, config: recipe.ModelConfig, vocab_size: int, labels: int) -> None:
        super().__init__(config, vocab_size, labels)
        self.pool = AttentionPooling(config.d_model)

    def label_states(self, encoder_output: EncoderOutput) -> Float[Tensor, "B 1 d"]:
        pooled: Float[Tensor, "B d"] = self.pool(encoder_output.states, encoder_output.non_pad)
        return pooled[:, None]
