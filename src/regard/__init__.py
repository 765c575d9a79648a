"""Regard: the Transformer of "Attention Is All You Need". Pairs of text go in; a trained, scored model comes out.

    import regard

    model = regard.train("demo")                       # a recipe by name, a YAML file, or a Recipe
    model = regard.load("runs/demo")                   # a run folder
    model.translate(["The dog is tired."], beam=4)

The packages are listed in the order of the data flow; a package imports only from those above it.

    errors       RegardError, the exception for mistakes that users can fix
    recipe/      recipe schema, presets, registries of components, validation
    data/        read pairs, clean, tokenize, store token ids, form batches
    nn/          the networks: attention, positions, norms, layers, Transformer, loss
    decoding/    beam search, greedy search, sampling, mask-predict, constraints
    inference/   the engine, packed networks, quantization, KV cache, workers
    metrics/     BLEU, chrF, TER, ROUGE, error rates, accuracy, perplexity
    storage/     run folders, atomic files, resumable output, prefetching
    tasks/       translation, tagging, classification, masked and causal language models
    training/    prepare data, train, checkpoint, fine-tune, distill, autoconfig
    inspection/  hooks, traces, alignment, training history, the HTML page
    interop/     Hugging Face, CTranslate2, ONNX, torch, one HTML file, bundles
    server/      HTTP server: LibreTranslate's API, batching, streaming
    bench/       speed compared with other libraries
    demo/        the built-in corpus and the demo
    cli/         the commands
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

__version__ = "0.1.0"

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from regard.errors import RegardError as RegardError
    from regard.inspection.trace import Trace as Trace
    from regard.metrics import MetricResult as MetricResult
    from regard.recipe import (
        DecodingOptions as DecodingOptions,
        Device as Device,
        Precision as Precision,
        Recipe as Recipe,
    )
    from regard.tasks import (
        Classifier as Classifier,
        LanguageModel as LanguageModel,
        MaskedLM as MaskedLM,
        Model as Model,
        Tagger as Tagger,
        Translation as Translation,
        Translator as Translator,
    )

    M = TypeVar("M", bound=Model)

_MODULES = {
    "RegardError": "errors",
    **dict.fromkeys(("DecodingOptions", "Device", "Precision", "Recipe"), "recipe"),
    "MetricResult": "metrics",
    "Trace": "inspection.trace",
    **dict.fromkeys(("Classifier", "LanguageModel", "MaskedLM", "Model"), "tasks"),
    **dict.fromkeys(("Tagger", "Translation", "Translator"), "tasks"),
}


def __getattr__(name: str) -> Any:
    """Import names when they are first used, because importing torch takes seconds."""
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    return getattr(import_module(f"regard.{_MODULES[name]}"), name)


@overload
def load(
    run: str | PathLike[str],
    *,
    device: Device = ...,
    precision: Precision = ...,
    threads: int | None = ...,
) -> Translator: ...


@overload
def load(
    run: str | PathLike[str],
    kind: type[M],
    *,
    device: Device = ...,
    precision: Precision = ...,
    threads: int | None = ...,
) -> M: ...


def load(
    run: str | PathLike[str],
    kind: type[Any] | None = None,
    *,
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: int | None = None,
) -> Any:
    """Open a run folder.

    kind: the class of the model: ``regard.Translator`` (default), ``regard.Tagger``, ``regard.Classifier``,
    ``regard.MaskedLM`` or ``regard.LanguageModel``. ``regard.Model.load(run)`` opens a run of any task.
    precision: fp32, bf16, int8, or auto for the fastest that the machine supports.
    threads: number of batches to process at a time on a CPU; all cores by default.
    """
    from regard.errors import RegardError
    from regard.tasks import Model, Translator

    if kind is not None and not (isinstance(kind, type) and issubclass(kind, Model)):
        raise RegardError(
            f"load: {kind!r} is not a model class; options are given by name: device='cpu'"
        )
    return (kind or Translator).load(run, device, precision, threads)


@overload
def train(
    recipe: Recipe | str | PathLike[str],
    *,
    out: str | PathLike[str] | None = ...,
    changes: Sequence[str] = ...,
    minutes: float | None = ...,
) -> Translator: ...


@overload
def train(
    recipe: Recipe | str | PathLike[str],
    kind: type[M],
    *,
    out: str | PathLike[str] | None = ...,
    changes: Sequence[str] = ...,
    minutes: float | None = ...,
) -> M: ...


def train(
    recipe: Recipe | str | PathLike[str],
    kind: type[Any] | None = None,
    *,
    out: str | PathLike[str] | None = None,
    changes: Sequence[str] = (),
    minutes: float | None = None,
) -> Any:
    """Train a model, or resume an interrupted training.

    recipe: a ``Recipe``, a YAML file, or the name of a bundled recipe.
    kind: the class of the model, as in ``load``.
    out: the run folder, ``runs/<name of the recipe>`` by default.
    changes: ``"section.key=value"`` strings that override keys of a recipe file.
    minutes: stop training in time to finish within this many minutes.
    """
    from pathlib import Path

    from regard.errors import RegardError
    from regard.recipe import Recipe, load_recipe
    from regard.recipe.registry import find_registry
    from regard.tasks import Model, Translator
    from regard.training.run import train as train_run

    if kind is not None and not (isinstance(kind, type) and issubclass(kind, Model)):
        raise RegardError(
            f"train: {kind!r} is not a model class; options are given by name: out='runs/my'"
        )
    expected = kind or Translator
    if isinstance(recipe, Recipe):
        if out is None or changes:
            raise RegardError("train: a Recipe object needs out=…, and takes no changes")
        folder = Path(out)
    else:
        name = Path(recipe).name.split(".")[0]
        recipe, folder = load_recipe(Path(recipe), changes), Path(out or Path("runs") / name)
    model = find_registry("task")[recipe.task].model
    if not issubclass(model, expected):
        raise RegardError(
            f"train: the recipe is for task {recipe.task}; call "
            f"regard.train(recipe, regard.{model.__name__}) to get a {model.__name__}"
        )
    return train_run(recipe, folder, minutes)
