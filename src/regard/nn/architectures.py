"""The architectures that a recipe can select, ``model.architecture``.

Each is built from the model section of a recipe and the sizes of the source and target vocabularies.
"""

from collections.abc import Callable

from regard import recipe
from regard.nn.convolution import ConvolutionEncoderDecoder
from regard.nn.language_model import DecoderOnlyTransformer
from regard.nn.lstm import LSTMEncoderDecoder
from regard.nn.network import Network
from regard.nn.non_autoregressive import NonAutoregressiveTransformer
from regard.nn.transformer import Transformer
from regard.recipe import FORMATS, Registry

ARCHITECTURES: Registry[Callable[[recipe.ModelConfig, int, int], Network]] = Registry(
    "model.architecture"
)

_SELF_ATTENTION = ("model.attention.encoder", "model.attention.decoder")
_FEED_FORWARD = ("model.d_ff", "model.activation", "model.activation_dropout")
_AUTOREGRESSIVE = recipe.DecodingConfig.options_read_by("search", "sampling")
_MASK_PREDICT = recipe.DecodingConfig.options_read_by("mask_predict")

ARCHITECTURES.register(
    "transformer", packed_batches=True, sharding=True, fast_inference=True, formats=FORMATS
)(Transformer)
ARCHITECTURES.register(
    "decoder_only",
    sharding=True,
    ignores=[
        *("model.encoder_layers", "model.attention.encoder", "model.attention.cross_attention"),
        *("model.output_bias", "model.tie_embeddings", "decoding.coverage_penalty"),
    ],
)(DecoderOnlyTransformer)
ARCHITECTURES.register("lstm", ignores=[*_SELF_ATTENTION, *_FEED_FORWARD, "model.position"])(
    LSTMEncoderDecoder
)
ARCHITECTURES.register(
    "convolution", options=["model.kernel_size"], ignores=[*_SELF_ATTENTION, *_FEED_FORWARD]
)(ConvolutionEncoderDecoder)
ARCHITECTURES.register(
    "non_autoregressive",
    options=[
        "model.non_autoregressive.length",
        *(f"decoding.{key}" for key in sorted(_MASK_PREDICT - _AUTOREGRESSIVE)),
    ],
    ignores=[f"decoding.{key}" for key in sorted(_AUTOREGRESSIVE - _MASK_PREDICT)],
)(NonAutoregressiveTransformer)
