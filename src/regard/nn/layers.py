"""Encoder and decoder layers, and the residual connection around each of their parts (section 3.1)."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from regard import recipe
from regard.nn.attention import KeyValue, Mask
from regard.nn.dropout import Dropout
from regard.nn.feed_forward import ACTIVATIONS
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.norms import NORMS, Real
from regard.recipe import FORMATS, Registry

Sublayer = Callable[[Tensor], Tensor]


RESIDUALS: Registry[Callable[[recipe.Model], "PostNorm"]] = Registry("model.norm_order")


@RESIDUALS.register("post", packed=True, fused=True, formats=FORMATS)
class PostNorm(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))): the paper's, also called post-norm."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()
        self.norm = NORMS[section.norm](section.d_model)
        self.dropout = Dropout(section.dropout)

    def forward(
        self, x: Float[Tensor, "B T d"], sublayer: Sublayer, real: Real
    ) -> Float[Tensor, "B T d"]:
        added = self.dropout(sublayer(x))
        # A norm works in float32; what leaves it goes on in the number format of the sub-layers.
        y: Float[Tensor, "B T d"] = self.norm(x + added, real).to(added.dtype)
        return y


@RESIDUALS.register("pre", packed=True, fused=True, formats=("ctranslate2", "onnx", "torch"))
class PreNorm(PostNorm):
    """x + Dropout(Sublayer(LayerNorm(x))), also called pre-norm; easier to train when deep."""

    def forward(
        self, x: Float[Tensor, "B T d"], sublayer: Sublayer, real: Real
    ) -> Float[Tensor, "B T d"]:
        y: Float[Tensor, "B T d"] = x + self.dropout(sublayer(self.norm(x, real)))
        return y


@dataclass
class Cache:
    """Keys and values of the words a layer has already read; grows by one word a step."""

    seen: KeyValue | None = None

    @property
    def length(self) -> int:
        return 0 if self.seen is None else self.seen.key.shape[2]

    def append(self, new: KeyValue) -> KeyValue:
        self.seen = new if self.seen is None else self.seen.followed_by(new)
        return self.seen

    def select(self, rows: Tensor) -> "Cache":
        return Cache(None if self.seen is None else self.seen.select(rows))


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network."""

    def __init__(self, section: recipe.Model, place: recipe.AttentionSite = "encoder") -> None:
        super().__init__()
        residual = RESIDUALS[section.norm_order]
        self.attention = MultiHeadAttention(section, place)
        self.attention_residual = residual(section)
        self.feed_forward = ACTIVATIONS[section.activation](section)
        self.feed_forward_residual = residual(section)

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
        y: Float[Tensor, "B T d"] = self.feed_forward_residual(x, self.feed_forward, real)
        return y


class DecoderLayer(EncoderLayer):
    """Masked self-attention, encoder-decoder attention, then the feed-forward network."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__(section, "decoder")
        self.cross_attention = MultiHeadAttention(section, "cross_attention")
        self.cross_attention_residual = RESIDUALS[section.norm_order](section)

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "R T d"],
        mask: Mask,
        memory: KeyValue,
        memory_mask: Mask,
        real: Real = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "R T d"]:
        """All positions at once, or, with a cache, the newest position of each row."""

        x = self.look(x, mask, real, cache)
        x = self.cross_attention_residual(
            x, cross_attention_sublayer(memory, memory_mask, self.cross_attention), real
        )
        return self.think(x, real)


def cross_attention_sublayer(
    memory: KeyValue, mask: Mask, attention: MultiHeadAttention
) -> Sublayer:
    """Encoder-decoder attention as a sub-layer."""

    def attend(y: Tensor) -> Tensor:
        # In search several rows, the beams, share one sentence: they are queries side by side,
        # so that its keys and values are held and read once.
        # (A size of a graph to export is no int: no len().)
        queries = y.reshape(memory.key.shape[0], -1, y.shape[-1])
        attended: Tensor = attention(queries, memory, mask)
        return attended.reshape(y.shape)

    return attend


def final_norm(section: recipe.Model) -> nn.Module:
    """What closes a stack: one more norm, or nothing. Unless the recipe says otherwise pre-norm layers have one, since
    the sum that leaves the last of them has none; post-norm layers, each of which ends in a norm already, have not."""
    return NORMS[section.norm if section.final_norm else "none"](section.d_model)


def initialize(module: nn.Module) -> None:
    """Glorot's uniform weights and zero biases for every linear map below this module."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
