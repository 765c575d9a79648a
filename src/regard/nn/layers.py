"""Encoder and decoder layers, and the residual connection around each of their parts (section 3.1)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard import recipe
from regard.nn.attention import KeysValues, Mask, MultiHeadAttention
from regard.nn.feedforward import FeedForward
from regard.nn.norms import NORMS

Sublayer = Callable[[Tensor], Tensor]


class NormAfter(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))): the paper's, also called post-norm."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()
        self.norm = NORMS[section.norm](section.width)
        self.dropout = nn.Dropout(section.dropout)

    def forward(self, x: Float[Tensor, "B T d"], sublayer: Sublayer) -> Float[Tensor, "B T d"]:
        y: Float[Tensor, "B T d"] = self.norm(x + self.dropout(sublayer(x)))
        return y

    @staticmethod
    def last(section: recipe.Model) -> nn.Module:
        """What closes a stack: nothing, each layer ends in a norm already."""
        return nn.Identity()


class NormBefore(NormAfter):
    """x + Dropout(Sublayer(LayerNorm(x))), also called pre-norm; easier to train when deep."""

    def forward(self, x: Float[Tensor, "B T d"], sublayer: Sublayer) -> Float[Tensor, "B T d"]:
        y: Float[Tensor, "B T d"] = x + self.dropout(sublayer(self.norm(x)))
        return y

    @staticmethod
    def last(section: recipe.Model) -> nn.Module:
        """What closes a stack: one norm, since the sum that leaves the last layer has none."""
        return NORMS[section.norm](section.width)


RESIDUALS: dict[recipe.NormPlace, type[NormAfter]] = {"after": NormAfter, "before": NormBefore}


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()
        residual = RESIDUALS[section.norm_place]
        self.attention = MultiHeadAttention(section)
        self.attention_residual = residual(section)
        self.feedforward = FeedForward(section)
        self.feedforward_residual = residual(section)

    def forward(self, x: Float[Tensor, "B S d"], mask: Mask) -> Float[Tensor, "B S d"]:
        def attend(y: Tensor) -> Tensor:
            attended: Tensor = self.attention(y, self.attention.keys_values(y), mask)
            return attended

        x = self.attention_residual(x, attend)
        y: Float[Tensor, "B S d"] = self.feedforward_residual(x, self.feedforward)
        return y


@dataclass
class Cache:
    """Keys and values of the words a decoder layer has already said; grows by one word a step."""

    seen: KeysValues | None = None

    def append(self, new: KeysValues) -> KeysValues:
        self.seen = new if self.seen is None else self.seen.followed_by(new)
        return self.seen

    def select(self, rows: Tensor) -> "Cache":
        return Cache(None if self.seen is None else self.seen.select(rows))


class DecoderLayer(nn.Module):
    """Masked self-attention, encoder-decoder attention, then the feed-forward network."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()
        residual = RESIDUALS[section.norm_place]
        self.attention = MultiHeadAttention(section)
        self.attention_residual = residual(section)
        self.memory_attention = MultiHeadAttention(section)
        self.memory_residual = residual(section)
        self.feedforward = FeedForward(section)
        self.feedforward_residual = residual(section)

    def forward(
        self,
        x: Float[Tensor, "R T d"],
        memory: KeysValues,
        memory_mask: Mask,
        cache: Cache | None = None,
    ) -> Float[Tensor, "R T d"]:
        """All positions at once under the causal mask, or, with a cache, the newest position of each row."""

        def attend(y: Tensor) -> Tensor:
            new = self.attention.keys_values(y)
            seen, mask = (new, Mask(causal=True)) if cache is None else (cache.append(new), Mask())
            attended: Tensor = self.attention(y, seen, mask)
            return attended

        def attend_to_memory(y: Tensor) -> Tensor:
            # In search several rows, the beams, share one sentence: they are queries side by side,
            # so that its keys and values are held and read once.
            queries = y.reshape(len(memory.key), -1, y.shape[-1])
            attended: Tensor = self.memory_attention(queries, memory, memory_mask)
            return attended.reshape(y.shape)

        x = self.attention_residual(x, attend)
        x = self.memory_residual(x, attend_to_memory)
        y: Float[Tensor, "R T d"] = self.feedforward_residual(x, self.feedforward)
        return y


def initialize(module: nn.Module) -> None:
    """Glorot's uniform weights and zero biases for every linear map below this module."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            if part.bias is not None:
                torch.nn.init.zeros_(part.bias)
