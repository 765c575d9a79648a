"""Encoder and decoder layers, and the residual connection around each of their parts (section 3.1)."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from regard import recipe
from regard.nn.attention import KeysValues, Mask
from regard.nn.dropout import Dropout
from regard.nn.feedforward import ACTIVATIONS
from regard.nn.heads import MultiHeadAttention
from regard.nn.norms import NORMS, Real

Sublayer = Callable[[Tensor], Tensor]


class NormAfter(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))): the paper's, also called post-norm."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()
        self.norm = NORMS[section.norm](section.width)
        self.dropout = Dropout(section.dropout)

    def forward(
        self, x: Float[Tensor, "B T d"], sublayer: Sublayer, real: Real
    ) -> Float[Tensor, "B T d"]:
        added = self.dropout(sublayer(x))
        # A norm works in float32; what leaves it goes on in the number format of the sub-layers.
        y: Float[Tensor, "B T d"] = self.norm(x + added, real).to(added.dtype)
        return y


class NormBefore(NormAfter):
    """x + Dropout(Sublayer(LayerNorm(x))), also called pre-norm; easier to train when deep."""

    def forward(
        self, x: Float[Tensor, "B T d"], sublayer: Sublayer, real: Real
    ) -> Float[Tensor, "B T d"]:
        y: Float[Tensor, "B T d"] = x + self.dropout(sublayer(self.norm(x, real)))
        return y


RESIDUALS: dict[recipe.NormPlace, type[NormAfter]] = {"after": NormAfter, "before": NormBefore}


@dataclass
class Cache:
    """Keys and values of the words a layer has already read; grows by one word a step."""

    seen: KeysValues | None = None

    @property
    def length(self) -> int:
        return 0 if self.seen is None else self.seen.key.shape[2]

    def append(self, new: KeysValues) -> KeysValues:
        self.seen = new if self.seen is None else self.seen.followed_by(new)
        return self.seen

    def select(self, rows: Tensor) -> "Cache":
        return Cache(None if self.seen is None else self.seen.select(rows))


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network."""

    def __init__(self, section: recipe.Model, place: recipe.Place = "encoder") -> None:
        super().__init__()
        residual = RESIDUALS[section.norm_place]
        self.attention = MultiHeadAttention(section, place)
        self.attention_residual = residual(section)
        self.feedforward = ACTIVATIONS[section.activation](section)
        self.feedforward_residual = residual(section)

    def forward(
        self, x: Float[Tensor, "B T d"], mask: Mask, real: Real = None, cache: Cache | None = None
    ) -> Float[Tensor, "B T d"]:
        return self.think(self.look(x, mask, real, cache), real)

    def look(
        self, x: Float[Tensor, "B T d"], mask: Mask, real: Real, cache: Cache | None
    ) -> Float[Tensor, "B T d"]:
        """All positions look at one another; with a cache, the newest ones look at those before too."""

        def attend(y: Tensor) -> Tensor:
            if mask.spans is not None:
                return self.attention.among(y, mask)
            new = self.attention.keys_values(y, real, 0 if cache is None else cache.length)
            attended: Tensor = self.attention(y, new if cache is None else cache.append(new), mask)
            return attended

        y: Float[Tensor, "B T d"] = self.attention_residual(x, attend, real)
        return y

    def think(self, x: Float[Tensor, "B T d"], real: Real) -> Float[Tensor, "B T d"]:
        """Each position by itself."""
        y: Float[Tensor, "B T d"] = self.feedforward_residual(x, self.feedforward, real)
        return y


class DecoderLayer(EncoderLayer):
    """Masked self-attention, encoder-decoder attention, then the feed-forward network."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__(section, "decoder")
        self.memory_attention = MultiHeadAttention(section, "memory")
        self.memory_residual = RESIDUALS[section.norm_place](section)

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "R T d"],
        mask: Mask,
        memory: KeysValues,
        memory_mask: Mask,
        real: Real = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "R T d"]:
        """All positions at once, or, with a cache, the newest position of each row."""

        x = self.look(x, mask, real, cache)
        x = self.memory_residual(x, looking_at(memory, memory_mask, self.memory_attention), real)
        return self.think(x, real)


def looking_at(memory: KeysValues, mask: Mask, attention: MultiHeadAttention) -> Sublayer:
    """Encoder-decoder attention as a sub-layer."""

    def attend(y: Tensor) -> Tensor:
        # In search several rows, the beams, share one sentence: they are queries side by side,
        # so that its keys and values are held and read once.
        # (A size of a graph to export is no int: no len().)
        queries = y.reshape(memory.key.shape[0], -1, y.shape[-1])
        attended: Tensor = attention(queries, memory, mask)
        return attended.reshape(y.shape)

    return attend


def closing_norm(section: recipe.Model) -> nn.Module:
    """What closes a stack: one more norm, or nothing. Unless the recipe says otherwise pre-norm layers have one, since
    the sum that leaves the last of them has none; post-norm layers, each of which ends in a norm already, have not."""
    return NORMS[section.norm if section.closing_norm else "none"](section.width)


def initialize(module: nn.Module) -> None:
    """Glorot's uniform weights and zero biases for every linear map below this module."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
