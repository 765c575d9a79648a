"""Tasks: what each task is, and the models that users work with."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.tasks.base import (
        TASKS as TASKS,
        Model as Model,
        Task as Task,
        build_network as build_network,
    )
    from regard.tasks.classification import (
        Classification as Classification,
        Classifier as Classifier,
    )
    from regard.tasks.language_model import LanguageModel as LanguageModel
    from regard.tasks.masked_lm import MaskedLM as MaskedLM, MaskFilling as MaskFilling
    from regard.tasks.tagging import Tagged as Tagged, Tagger as Tagger
    from regard.tasks.translation import Translation as Translation, Translator as Translator

MODULES = ("translation", "tagging", "classification", "masked_lm", "language_model")
"""Each registers its task in ``TASKS``. The first one may be imported alone."""


def __getattr__(name: str) -> Any:
    """Import names when they are first used. A task is imported without the others; ``TASKS`` has all of them."""
    from importlib import import_module

    modules = MODULES[:1] if name in ("Translation", "Translator") else (*MODULES, "base")
    for loaded in (import_module(f"regard.tasks.{module}") for module in modules):
        if hasattr(loaded, name):
            globals()[name] = getattr(loaded, name)
    if name not in globals():
        raise AttributeError(f"module 'regard.tasks' has no attribute {name!r}")
    return globals()[name]
