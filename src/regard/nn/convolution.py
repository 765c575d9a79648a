"""Windows of words: 1-D convolutions with gated linear units (Gehring et al. 2017).

    encoder layer:  x -> window around each word -> gated linear unit
    decoder layer:  x -> window that ends at each word -> gated linear unit -> encoder-decoder attention

What is notable:
- All positions are computed at once, but one layer joins only ``kernel`` neighbours: words T apart meet after about
  T / kernel layers, or in the decoder by way of attention.
- Residual connections, norms, dropout, heads, positions and ties are the Transformer's, where Gehring et al. scale the
  sums by sqrt(1/2) and normalise the weights: only the way in which words meet differs.
- Beyond the ends of a sentence, and at padding, stand zeros. So a search that keeps the last kernel - 1 inputs of each
  layer, zeros at first, computes what learning computes.
"""

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from regard import recipe
from regard.nn.attention import KeyValue, Mask
from regard.nn.layers import RESIDUALS, cross_attention_sublayer
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.norms import Real
from regard.nn.transformer import Decoder, Encoder, EncoderDecoder


class GatedConvolution(nn.Module):
    """a * sigmoid(b), where a and b are each a linear map of ``kernel`` neighbours side by side."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()
        self.kernel = section.kernel_size
        self.convolution = nn.Conv1d(section.d_model, 2 * section.d_model, section.kernel_size)
        # The gate halves what passes: four times the variance lets it leave as it came (Gehring et al., appendix A).
        nn.init.normal_(
            self.convolution.weight, std=(4 / (section.kernel_size * section.d_model)) ** 0.5
        )
        nn.init.zeros_(cast(Tensor, self.convolution.bias))

    def forward(self, x: Float[Tensor, "B wide d"]) -> Float[Tensor, "B T d"]:
        """One output for each whole window: kernel - 1 fewer than inputs."""
        windows: Float[Tensor, "B 2d T"] = self.convolution(x.transpose(1, 2))
        return F.glu(windows.transpose(1, 2), dim=-1)


@dataclass
class ConvolutionCache:
    """The last kernel - 1 inputs of one layer's windows; None before the first word, which stands for zeros."""

    inputs: Float[Tensor, "R past d"] | None = None

    def select(self, rows: Tensor) -> "ConvolutionCache":
        return ConvolutionCache(None if self.inputs is None else self.inputs.index_select(0, rows))

    def append(self, new: Float[Tensor, "R T d"], keep: int) -> Float[Tensor, "R wide d"]:
        """The inputs kept and the new ones; the last of them are kept for the next time."""
        before = (
            self.inputs if self.inputs is not None else new.new_zeros(len(new), keep, new.shape[2])
        )
        joined = torch.cat([before, new], dim=1)
        self.inputs = joined[:, joined.shape[1] - keep :]
        return joined


class ConvolutionEncoderLayer(nn.Module):
    """Each word with its neighbours on both sides."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()
        self.window = GatedConvolution(section)
        self.residual = RESIDUALS[section.norm_order](section)

    def forward(self, x: Float[Tensor, "B T d"], mask: Mask, real: Real) -> Float[Tensor, "B T d"]:
        before = self.window.kernel // 2
        after = self.window.kernel - 1 - before

        def look(y: Tensor) -> Tensor:
            words = y if real is None else y.masked_fill(~real[:, :, None], 0.0)
            return cast(Tensor, self.window(F.pad(words, (0, 0, before, after))))

        y: Float[Tensor, "B T d"] = self.residual(x, look, real)
        return y


class ConvolutionDecoderLayer(nn.Module):
    """Each word with those just before it, then encoder-decoder attention."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()
        residual = RESIDUALS[section.norm_order]
        self.window = GatedConvolution(section)
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
        cache: ConvolutionCache | None = None,
    ) -> Float[Tensor, "R T d"]:
        """All positions at once, or, with a cache, the newest position of each row."""
        assert mask.causal, "a window before a word holds no later one"
        recent = ConvolutionCache() if cache is None else cache

        def look(y: Tensor) -> Tensor:
            return cast(Tensor, self.window(recent.append(y, self.window.kernel - 1)))

        x = self.residual(x, look, real)
        y: Float[Tensor, "R T d"] = self.cross_attention_residual(
            x, cross_attention_sublayer(memory, memory_mask, self.cross_attention), real
        )
        return y


class ConvolutionEncoder(Encoder):
    """Embedding and position, then N layers of windows."""

    layer = ConvolutionEncoderLayer


class ConvolutionDecoder(Decoder):
    """Embedding and position, then N layers of windows and encoder-decoder attention."""

    layer = ConvolutionDecoderLayer
    cache = ConvolutionCache


class Convolution(EncoderDecoder):
    """Windows in both stacks."""

    encoder_stack = ConvolutionEncoder
    decoder_stack = ConvolutionDecoder
