"""An LSTM encoder-decoder with cross-attention: the kind of network that the Transformer replaced.

    encoder layer:  x -> bidirectional LSTM
    decoder layer:  x -> LSTM -> cross-attention

Notable:
- Residual connections, norms, dropout, heads and tied weights are those of the Transformer, similar to RNMT+ (Chen et
  al. 2018). Only the way tokens interact is different, so a comparison measures just that.
- Cross-attention comes after the LSTM has read the whole target, so training needs one call of the fused LSTM per
  layer. Feeding attention back into the same LSTM (Bahdanau et al. 2015; Luong's input feeding) would need one call
  per token. Here attention enters the recurrence of the next layer.
- The decoder starts from zeros: all it knows about the source comes from cross-attention.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from regard import recipe
from regard.data.special_tokens import PAD
from regard.nn.attention_mask import AttentionMask
from regard.nn.kv_cache import KeyValue
from regard.nn.layers import NORM_ORDERS, cross_attention_sublayer
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.norms import NonPad
from regard.nn.positions import PositionInfo
from regard.nn.transformer import Decoder, Encoder, EncoderDecoder, EncoderOutput


class LSTMState(NamedTuple):
    """The hidden state and the cell state of an LSTM."""

    hidden: Float[Tensor, "1 R d"]
    cell: Float[Tensor, "1 R d"]


@dataclass
class LSTMCache:
    """The state of one layer's LSTM between decoding steps; None before the first token, which means zeros."""

    state: LSTMState | None = None

    def select(self, rows: Tensor) -> "LSTMCache":
        if self.state is None:
            return LSTMCache()
        return LSTMCache(LSTMState(*(tensor.index_select(1, rows) for tensor in self.state)))


def run_lstm(lstm: nn.LSTM, x: Tensor | PackedSequence, state: LSTMState | None = None) -> Any:
    """Run an LSTM in the data type of its weights.

    Autocast would use float16 for an LSTM, whatever its setting, and without loss scaling the gradients are too small
    for float16.
    """
    weight = cast(Tensor, lstm.weight_hh_l0)
    with torch.autocast(weight.device.type, enabled=False):
        return lstm(x.to(weight.dtype), state)


class BidirectionalLSTM(nn.Module):
    """An LSTM from left to right and one from right to left, each of half the width."""

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__()
        self.lstm = nn.LSTM(
            config.d_model, config.d_model // 2, batch_first=True, bidirectional=True
        )
        self.residual = NORM_ORDERS[config.norm_order](config)

    def forward(
        self, x: Float[Tensor, "B S d"], lengths: Int[Tensor, "B"], non_pad: NonPad
    ) -> Float[Tensor, "B S d"]:
        """lengths is on the CPU, as pack_padded_sequence requires."""

        def lstm(y: Tensor) -> Tensor:
            packed = pack_padded_sequence(y, lengths, batch_first=True, enforce_sorted=False)
            states, _ = run_lstm(self.lstm, packed)
            return pad_packed_sequence(states, batch_first=True, total_length=y.shape[1])[0]

        y: Float[Tensor, "B S d"] = self.residual(x, lstm, non_pad)
        return y


class LSTMDecoderLayer(nn.Module):
    """An LSTM from left to right, then cross-attention."""

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__()
        norm_order = NORM_ORDERS[config.norm_order]
        self.lstm = nn.LSTM(config.d_model, config.d_model, batch_first=True)
        self.residual = norm_order(config)
        self.cross_attention = MultiHeadAttention(config, "cross_attention")
        self.cross_attention_residual = norm_order(config)

    def forward(
        self,
        x: Float[Tensor, "R T d"],
        mask: AttentionMask,
        cross_kv: KeyValue,
        cross_mask: AttentionMask,
        non_pad: NonPad = None,
        cache: LSTMCache | None = None,
    ) -> Float[Tensor, "R T d"]:
        """All positions at once; with a cache, the newest position of each row."""
        assert mask.causal, "an LSTM decoder is causal"
        carried = LSTMCache() if cache is None else cache

        def lstm(y: Tensor) -> Tensor:
            states, state = run_lstm(self.lstm, y, carried.state)
            carried.state = LSTMState(*state)
            return cast(Tensor, states)

        x = self.residual(x, lstm, non_pad)
        y: Float[Tensor, "R T d"] = self.cross_attention_residual(
            x, cross_attention_sublayer(cross_kv, cross_mask, self.cross_attention), non_pad
        )
        return y


class LSTMEncoder(Encoder):
    """Embedding, then N bidirectional LSTM layers."""

    layer = BidirectionalLSTM

    def forward(
        self, source: Int[Tensor, "B S"], position_info: PositionInfo = None
    ) -> EncoderOutput:
        assert position_info is None
        non_pad = source != PAD
        lengths = non_pad.sum(1).cpu()  # once for all layers: a GPU must wait for it
        x = self.dropout(self.position(self.embedding(source)))
        for layer in self.layers:
            x = layer(x, lengths, non_pad)
        return EncoderOutput(self.norm(x, non_pad), non_pad)


class LSTMDecoder(Decoder):
    """Embedding, then N layers of an LSTM and cross-attention."""

    layer = LSTMDecoderLayer
    cache = LSTMCache


class LSTMEncoderDecoder(EncoderDecoder):
    """LSTM layers in encoder and decoder, with cross-attention."""

    encoder_class = LSTMEncoder
    decoder_class = LSTMDecoder
