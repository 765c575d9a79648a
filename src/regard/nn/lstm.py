"""The network the Transformer replaced: LSTMs that read word after word, with attention between the two stacks.

    encoder layer:  x -> LSTM, one half of it from left to right, the other from right to left
    decoder layer:  x -> LSTM, from left to right -> encoder-decoder attention

What is notable:
- Residual connections, norms, dropout, heads and ties are the Transformer's, much as in RNMT+ (Chen et al. 2018): only
  the way in which words meet differs, and a comparison compares just that.
- A decoder layer's attention comes after its LSTM has read the whole target, so learning needs one call of the fused
  LSTM for each layer. Feeding attention back into the same LSTM (Bahdanau et al. 2015; Luong's input feeding) would
  need a call for each word. What was looked at still enters a recurrence: that of the layer above.
- The decoder starts from zeros: the first attention tells it all there is to know of the source.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from regard import recipe
from regard.data.special_tokens import PAD
from regard.nn.attention import KeyValue, Mask
from regard.nn.layers import RESIDUALS, cross_attention_sublayer
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.norms import Real
from regard.nn.positions import PositionInfo
from regard.nn.transformer import Decoder, Encoder, EncoderDecoder, Memory


class Cell(NamedTuple):
    """What an LSTM carries from word to word."""

    hidden: Float[Tensor, "1 R d"]
    cell: Float[Tensor, "1 R d"]


@dataclass
class LSTMCache:
    """What the LSTM of one layer carries; nothing before the first word, which stands for zeros."""

    state: Cell | None = None

    def select(self, rows: Tensor) -> "LSTMCache":
        if self.state is None:
            return LSTMCache()
        return LSTMCache(Cell(*(part.index_select(1, rows) for part in self.state)))


def run(lstm: nn.LSTM, x: Tensor | PackedSequence, state: Cell | None = None) -> Any:
    """In the number format of the weights. Autocast would take float16 for an LSTM, whatever it is told, and the
    gradients of a loss that is not scaled are too small for float16."""
    weight = cast(Tensor, lstm.weight_hh_l0)
    with torch.autocast(weight.device.type, enabled=False):
        return lstm(x.to(weight.dtype), state)


class BidirectionalLSTM(nn.Module):
    """An LSTM from left to right beside one from right to left, each half as wide."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()
        self.lstm = nn.LSTM(
            section.d_model, section.d_model // 2, batch_first=True, bidirectional=True
        )
        self.residual = RESIDUALS[section.norm_order](section)

    def forward(
        self, x: Float[Tensor, "B S d"], lengths: Int[Tensor, "B"], real: Real
    ) -> Float[Tensor, "B S d"]:
        """lengths is on the CPU, where packing wants it. A packed row ends where its words do, both ways."""

        def read(y: Tensor) -> Tensor:
            packed = pack_padded_sequence(y, lengths, batch_first=True, enforce_sorted=False)
            states, _ = run(self.lstm, packed)
            return pad_packed_sequence(states, batch_first=True, total_length=y.shape[1])[0]

        y: Float[Tensor, "B S d"] = self.residual(x, read, real)
        return y


class LSTMDecoderLayer(nn.Module):
    """An LSTM over the words before, then encoder-decoder attention."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()
        residual = RESIDUALS[section.norm_order]
        self.lstm = nn.LSTM(section.d_model, section.d_model, batch_first=True)
        self.residual = residual(section)
        self.cross_attention = MultiHeadAttention(section, "cross_attention")
        self.cross_attention_residual = residual(section)

    def forward(
        self,
        x: Float[Tensor, "R T d"],
        mask: Mask,
        memory: KeyValue,
        memory_mask: Mask,
        real: Real = None,
        cache: LSTMCache | None = None,
    ) -> Float[Tensor, "R T d"]:
        """All positions at once, or, with a cache, the newest position of each row."""
        assert mask.causal, "an LSTM from left to right sees no later word"
        carried = LSTMCache() if cache is None else cache

        def read(y: Tensor) -> Tensor:
            states, state = run(self.lstm, y, carried.state)
            carried.state = Cell(*state)
            return cast(Tensor, states)

        x = self.residual(x, read, real)
        y: Float[Tensor, "R T d"] = self.cross_attention_residual(
            x, cross_attention_sublayer(memory, memory_mask, self.cross_attention), real
        )
        return y


class LSTMEncoder(Encoder):
    """Embedding, then N layers of LSTMs in both directions."""

    layer = BidirectionalLSTM

    def forward(self, source: Int[Tensor, "B S"], places: PositionInfo = None) -> Memory:
        real = source != PAD
        lengths = real.sum(1).cpu()  # once for all layers: a GPU has to wait for it
        assert places is None
        x = self.dropout(self.position(self.embedding(source)))
        for layer in self.layers:
            x = layer(x, lengths, real)
        return Memory(self.norm(x, real), real)


class LSTMDecoder(Decoder):
    """Embedding, then N layers of an LSTM and encoder-decoder attention."""

    layer = LSTMDecoderLayer
    cache = LSTMCache


class LSTMEncoderDecoder(EncoderDecoder):
    """An LSTM in both stacks."""

    encoder_stack = LSTMEncoder
    decoder_stack = LSTMDecoder
