"""A convolutional encoder-decoder with gated linear units and cross-attention (ConvS2S, Gehring et al. 2017).

    encoder layer:  x -> convolution around each token -> gated linear unit
    decoder layer:  x -> convolution up to each token -> gated linear unit -> cross-attention

Notable:
- All positions are computed at once, but a layer connects only ``kernel_size`` neighbours: tokens at distance T
  interact after about T / kernel_size layers, or in the decoder through cross-attention.
- Residual connections, norms, dropout, heads, positions and tied weights are those of the Transformer, where Gehring
  et al. scale sums by sqrt(1/2) and use weight normalization. Only the way tokens interact differs.
- Sentences are padded with zeros. Decoding step by step keeps the last kernel_size - 1 inputs of each layer, zeros at
  first, and so computes the same as training.
"""

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from regard import recipe
from regard.nn.attention_mask import AttentionMask
from regard.nn.kv_cache import KeyValue
from regard.nn.layers import NORM_ORDERS, cross_attention_sublayer
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.norms import NonPad
from regard.nn.transformer import Decoder, Encoder, EncoderDecoder


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

    def append(self, inputs: Float[Tensor, "R T d"], size: int) -> Float[Tensor, "R wide d"]:
        """The cached inputs and the new ones; the last ``size`` of them stay in the cache."""
        past_inputs = (
            self.inputs
            if self.inputs is not None
            else inputs.new_zeros(len(inputs), size, inputs.shape[2])
        )
        joined = torch.cat([past_inputs, inputs], dim=1)
        self.inputs = joined[:, joined.shape[1] - size :]
        return joined


class ConvolutionEncoderLayer(nn.Module):
    """A convolution over the neighbours on both sides of each token."""

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__()
        self.convolution = GatedConvolution(config)
        self.residual = NORM_ORDERS[config.norm_order](config)

    def forward(
        self, x: Float[Tensor, "B T d"], mask: AttentionMask, non_pad: NonPad
    ) -> Float[Tensor, "B T d"]:
        left_padding = self.convolution.kernel_size // 2
        right_padding = self.convolution.kernel_size - 1 - left_padding

        def convolution(y: Tensor) -> Tensor:
            tokens = y if non_pad is None else y.masked_fill(~non_pad[:, :, None], 0.0)
            return cast(
                Tensor, self.convolution(F.pad(tokens, (0, 0, left_padding, right_padding)))
            )

        y: Float[Tensor, "B T d"] = self.residual(x, convolution, non_pad)
        return y


class ConvolutionDecoderLayer(nn.Module):
    """A convolution over each token and those before it, then cross-attention."""

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__()
        norm_order = NORM_ORDERS[config.norm_order]
        self.convolution = GatedConvolution(config)
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
            x, cross_attention_sublayer(cross_kv, cross_mask, self.cross_attention), non_pad
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
