"""Models opened for use, one kind for each task."""

from regard.model.base import MODELS, Model, arithmetic, build, choose_device
from regard.model.translator import Translation, Translator
from regard.model.weights import put_weights, weights_of

__all__ = [
    "MODELS",
    "Model",
    "Translation",
    "Translator",
    "arithmetic",
    "build",
    "choose_device",
    "put_weights",
    "weights_of",
]
