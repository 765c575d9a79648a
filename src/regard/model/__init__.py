"""Models opened for use, one kind for each task."""

from regard.model.base import MODELS, Model, arithmetic, build, choose_device
from regard.model.classifier import Classification, Classifier
from regard.model.continuer import Continuer
from regard.model.filler import Filler, Filling
from regard.model.tagger import Tagged, Tagger
from regard.model.translator import Translation, Translator
from regard.model.weights import put_weights, weights_of

__all__ = [
    "MODELS",
    "Classification",
    "Classifier",
    "Continuer",
    "Filler",
    "Filling",
    "Model",
    "Tagged",
    "Tagger",
    "Translation",
    "Translator",
    "arithmetic",
    "build",
    "choose_device",
    "put_weights",
    "weights_of",
]
