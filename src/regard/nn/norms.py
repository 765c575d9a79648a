"""Normalisation of the features."""

from torch import nn

from regard import recipe

NORMS: dict[recipe.Norm, type[nn.LayerNorm]] = {
    # Over the features of one position: (x - mean) / sqrt(biased variance + eps) * gain + bias.
    "layer": nn.LayerNorm,
}
