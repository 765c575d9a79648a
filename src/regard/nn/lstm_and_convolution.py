"""Encoder-decoders without self-attention: an LSTM and a convolutional network (ConvS2S), both with cross-attention."""

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from regard import recipe
from regard.data.special_tokens import PAD
from regard.nn.attention import AttentionMask, KeyValue
from regard.nn.layers import RESIDUALS, cross_attention_sublayer
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.norms import NonPad
from regard.nn.positions import PositionInfo
from regard.nn.transformer import Decoder, Encoder, EncoderDecoder, EncoderOutput

# ---------------------------------------------------------------------------------------------
# An LSTM encoder-decoder with cross-attention: the kind of network that the Transformer replaced.
#
#     encoder layer:  x -> bidirectional LSTM
#     decoder layer:  x -> LSTM -> cross-attention
#
# Notable:
# - Residual connections, norms, dropout, heads and tied weights are those of the Transformer, similar to RNMT+ (Chen et
#   al. 2018). Only the way tokens interact is different, so a comparison measures just that.
# - Cross-attention comes after the LSTM has read the whole target, so training needs one call of the fused LSTM per
#   layer. Feeding attention back into the same LSTM (Bahdanau et al. 2015; Luong's input feeding) would need one call
#   per token. Here attention enters the recurrence of the next layer.
# - The decoder starts from zeros: all it knows about the source comes from cross-attention.


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
        return LSTMCache(LSTMState(*(part.index_select(1, rows) for part in self.state)))


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
        self.residual = RESIDUALS[config.norm_order](config)

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
        residual = RESIDUALS[config.norm_order]
        self.lstm = nn.LSTM(config.d_model, config.d_model, batch_first=True)
        self.residual = residual(config)
        self.cross_attention = MultiHeadAttention(config, "cross_attention")
        self.cross_attention_residual = residual(config)

    def forward(
        self,
        x: Float[Tensor, "R T d"],
        mask: AttentionMask,
        memory: KeyValue,
        memory_mask: AttentionMask,
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
            x, cross_attention_sublayer(memory, memory_mask, self.cross_attention), non_pad
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


# ---------------------------------------------------------------------------------------------
# A convolutional encoder-decoder with gated linear units and cross-attention (ConvS2S, Gehring et al. 2017).
#
#     encoder layer:  x -> convolution around each token -> gated linear unit
#     decoder layer:  x -> convolution up to each token -> gated linear unit -> cross-attention
#
# Notable:
# - All positions are computed at once, but a layer connects only ``kernel_size`` neighbours: tokens at distance T
#   interact after about T / kernel_size layers, or in the decoder through cross-attention.
# - Residual connections, norms, dropout, heads, positions and tied weights are those of the Transformer, where Gehring
#   et al. scale sums by sqrt(1/2) and use weight normalization. Only the way tokens interact differs.
# - Sentences are padded with zeros. Decoding step by step keeps the last kernel_size - 1 inputs of each layer, zeros at
#   first, and so computes the same as training.


class GatedConvolution(nn.Module):
    """a * sigmoid(b), where a and b are convolutions of ``kernel_size`` neighbours."""

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__()
        self.kernel_size = config.kernel_size
        self.convolution = nn.Conv1d(config.d_model, 2 * config.d_model, config.kernel_size)
        # The gate halves its input: four times the variance keeps the output's variance (Gehring et al., appendix A).
        nn.init.normal_(
            self.convolution.weight, std=(4 / (config.kernel_size * config.d_model)) ** 0.5
        )
        nn.init.zeros_(cast(Tensor, self.convolution.bias))

    def forward(self, x: Float[Tensor, "B wide d"]) -> Float[Tensor, "B T d"]:
        """One output per complete window: kernel_size - 1 fewer than inputs."""
        outputs: Float[Tensor, "B 2d T"] = self.convolution(x.transpose(1, 2))
        return F.glu(outputs.transpose(1, 2), dim=-1)


@dataclass
class ConvolutionCache:
    """The last kernel_size - 1 inputs of one layer; None before the first token, which means zeros."""

    inputs: Float[Tensor, "R past d"] | None = None

    def select(self, rows: Tensor) -> "ConvolutionCache":
        return ConvolutionCache(None if self.inputs is None else self.inputs.index_select(0, rows))

    def append(self, new: Float[Tensor, "R T d"], size: int) -> Float[Tensor, "R wide d"]:
        """The cached inputs and the new ones; the last ``size`` of them stay in the cache."""
        before = (
            self.inputs if self.inputs is not None else new.new_zeros(len(new), size, new.shape[2])
        )
        joined = torch.cat([before, new], dim=1)
        self.inputs = joined[:, joined.shape[1] - size :]
        return joined


class ConvolutionEncoderLayer(nn.Module):
    """A convolution over the neighbours on both sides of each token."""

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__()
        self.convolution = GatedConvolution(config)
        self.residual = RESIDUALS[config.norm_order](config)

    def forward(
        self, x: Float[Tensor, "B T d"], mask: AttentionMask, non_pad: NonPad
    ) -> Float[Tensor, "B T d"]:
        before = self.convolution.kernel_size // 2
        after = self.convolution.kernel_size - 1 - before

        def convolution(y: Tensor) -> Tensor:
            tokens = y if non_pad is None else y.masked_fill(~non_pad[:, :, None], 0.0)
            return cast(Tensor, self.convolution(F.pad(tokens, (0, 0, before, after))))

        y: Float[Tensor, "B T d"] = self.residual(x, convolution, non_pad)
        return y


class ConvolutionDecoderLayer(nn.Module):
    """A convolution over each token and those before it, then cross-attention."""

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__()
        residual = RESIDUALS[config.norm_order]
        self.convolution = GatedConvolution(config)
        self.residual = residual(config)
        self.cross_attention = MultiHeadAttention(config, "cross_attention")
        self.cross_attention_residual = residual(config)

    def forward(
        self,
        x: Float[Tensor, "R T d"],
        mask: AttentionMask,
        memory: KeyValue,
        memory_mask: AttentionMask,
        non_pad: NonPad = None,
        cache: ConvolutionCache | None = None,
    ) -> Float[Tensor, "R T d"]:
        """All positions at once; with a cache, the newest position of each row."""
        assert mask.causal, "a convolutional decoder is causal"
        recent = ConvolutionCache() if cache is None else cache

        def convolution(y: Tensor) -> Tensor:
            inputs = recent.append(y, self.convolution.kernel_size - 1)
            return cast(Tensor, self.convolution(inputs))

        x = self.residual(x, convolution, non_pad)
        y: Float[Tensor, "R T d"] = self.cross_attention_residual(
            x, cross_attention_sublayer(memory, memory_mask, self.cross_attention), non_pad
        )
        return y


class ConvolutionEncoder(Encoder):
    """Embedding and position, then N convolutional layers."""

    layer = ConvolutionEncoderLayer


class ConvolutionDecoder(Decoder):
    """Embedding and position, then N layers of a convolution and cross-attention."""

    layer = ConvolutionDecoderLayer
    cache = ConvolutionCache


class ConvolutionEncoderDecoder(EncoderDecoder):
    """Gated convolutions in encoder and decoder, with cross-attention."""

    encoder_class = ConvolutionEncoder
    decoder_class = ConvolutionDecoder
