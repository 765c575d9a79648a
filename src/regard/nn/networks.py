"""The networks a recipe can name as its architecture."""

from collections.abc import Callable

from regard import recipe
from regard.nn.convolution import Convolution
from regard.nn.decoder_only import DecoderOnly
from regard.nn.network import Network
from regard.nn.parallel import Parallel
from regard.nn.recurrent import Recurrent
from regard.nn.transformer import Transformer

NETWORKS: dict[recipe.Architecture, Callable[[recipe.Model, int, int], Network]] = {
    "transformer": Transformer,
    "decoder": DecoderOnly,
    "recurrent": Recurrent,
    "convolution": Convolution,
    "parallel": Parallel,
}
"""each is made from its section and the sizes of the source and the target vocabulary"""
