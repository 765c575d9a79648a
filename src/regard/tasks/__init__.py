"""Tasks: what each task is, and the models that users work with."""

from regard.tasks.base import TASKS, Model, Task, build_network
from regard.tasks.classification import Classification, Classifier
from regard.tasks.language_model import LanguageModel
from regard.tasks.masked_lm import MaskedLM, MaskFilling
from regard.tasks.tagging import Tagged, Tagger
from regard.tasks.translation import Translation, Translator

__all__ = [
    "TASKS",
    "Classification",
    "Classifier",
    "LanguageModel",
    "MaskFilling",
    "MaskedLM",
    "Model",
    "Tagged",
    "Tagger",
    "Task",
    "Translation",
    "Translator",
    "build_network",
]
