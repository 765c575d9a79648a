"""Regard: the Transformer of "Attention Is All You Need". Pairs of text go in; a trained, scored model comes out.

    import regard

    model = regard.train("demo")                       # a recipe by name, a YAML file, or a Recipe
    model = regard.load("runs/demo")                   # a run folder
    model.translate(["The dog is tired."], beam=4)

The packages are listed in the order of the data flow; a package imports only from those above it. interop, ray and
server do not import each other. The few exceptions are in ``ignore_imports`` in ``pyproject.toml``, with their reasons.

    errors       RegardError, the exception for mistakes that users can fix
    recipe/      recipe schema, presets, registries of components, validation
    data/        read pairs, clean, tokenize, store token ids, form batches
    nn/          the networks: attention, positions, norms, layers, Transformer, loss
    decoding/    beam search, greedy search, sampling, mask-predict, constraints
    inference/   the engine, packed networks, quantization, KV cache, workers, confidence
    metrics/     BLEU, chrF, TER, ROUGE, error rates, accuracy, perplexity
    storage/     run folders, atomic files, resumable output
    tasks/       translation, tagging, classification, masked and causal language models
    training/    prepare data, train, checkpoint, fine-tune, distill, autoconfig
    inspection/  hooks, traces, lenses, alignment, training history, the HTML page
    documents/   office files, Markdown, subtitles, resources; translation memory
    demo/        the built-in corpus and the demo
    interop/     Hugging Face, CTranslate2, ONNX, torch, one HTML file, bundles
    ray/         translation with Ray Data, on many machines
    server/      HTTP server: LibreTranslate's API, batching, streaming, metrics
    bench/       speed compared with other libraries, self-test
    experiments/ variants of a recipe with several seeds, claims about the Transformer
    cli/         the commands
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

__version__ = "0.1.0"

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike
    from pathlib import Path

    from regard.errors import RegardError as RegardError
    from regard.inspection.trace import Trace as Trace
    from regard.metrics import MetricResult as MetricResult
    from regard.recipe import (
        DataFiles as DataFiles,
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
    from regard.training.autoconfig import AutomaticRecipe

    M = TypeVar("M", bound=Model)

_MODULES = {
    "RegardError": "errors",
    **dict.fromkeys(("DataFiles", "DecodingOptions", "Device", "Precision", "Recipe"), "recipe"),
    "MetricResult": "metrics",
    "Trace": "inspection.trace",
    **dict.fromkeys(("Classifier", "LanguageModel", "MaskedLM", "Model"), "tasks"),
    **dict.fromkeys(("Tagger", "Translation", "Translator"), "tasks"),
}


if not TYPE_CHECKING:  # so that a type checker reports an unknown name

    def __getattr__(name: str) -> Any:
        """Import names when they are first used, because importing torch takes seconds."""
        from importlib import import_module

        if name not in _MODULES:
            raise AttributeError(f"module 'regard' has no attribute {name!r}")
        return getattr(import_module(f"regard.{_MODULES[name]}"), name)


@overload
def load(
    run: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    device: Device = ...,
    precision: Precision = ...,
    threads: int | None = ...,
) -> Translator: ...


@overload
def load(
    run: str | PathLike[str] | Sequence[str | PathLike[str]],
    kind: type[M],
    *,
    device: Device = ...,
    precision: Precision = ...,
    threads: int | None = ...,
) -> M: ...


def load(
    run: str | PathLike[str] | Sequence[str | PathLike[str]],
    kind: type[Any] | None = None,
    *,
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: int | None = None,
) -> Any:
    """Open a run folder, or a list of them as an ensemble: translation models with the same tokenizer.

    kind: the class of the model: ``regard.Translator`` (default), ``regard.Tagger``, ``regard.Classifier``,
    ``regard.MaskedLM`` or ``regard.LanguageModel``. ``regard.Model.load(run)`` opens a run of any task.
    precision: fp32, bf16, int8, or auto for the fastest that the machine supports.
    threads: number of batches to process at a time on a CPU; all cores by default.
    """
    from regard.errors import RegardError
    from regard.tasks import Model, Translator

    if kind is not None and not (isinstance(kind, type) and issubclass(kind, Model)):
        raise RegardError(
            f"load: {kind!r} is not a model class; pass options by keyword: device='cpu'"
        )
    return (kind or Translator).load(run, device, precision, threads)


@overload
def train(
    recipe: Recipe | DataFiles | str | PathLike[str],
    *,
    out: str | PathLike[str] | None = ...,
    changes: Sequence[str] = ...,
    minutes: float | None = ...,
    init_from: str | PathLike[str] | None = ...,
    mix: float | None = ...,
    freeze: Sequence[str] | None = ...,
    extend_vocab: int | None = ...,
) -> Translator: ...


@overload
def train(
    recipe: Recipe | DataFiles | str | PathLike[str],
    kind: type[M],
    *,
    out: str | PathLike[str] | None = ...,
    changes: Sequence[str] = ...,
    minutes: float | None = ...,
    init_from: str | PathLike[str] | None = ...,
    mix: float | None = ...,
    freeze: Sequence[str] | None = ...,
    extend_vocab: int | None = ...,
) -> M: ...


def train(
    recipe: Recipe | DataFiles | str | PathLike[str],
    kind: type[Any] | None = None,
    *,
    out: str | PathLike[str] | None = None,
    changes: Sequence[str] = (),
    minutes: float | None = None,
    init_from: str | PathLike[str] | None = None,
    mix: float | None = None,
    freeze: Sequence[str] | None = None,
    extend_vocab: int | None = None,
) -> Any:
    """Train a model, resume an interrupted training, or fine-tune a finished run (``init_from``).

    recipe: a ``Recipe``, a YAML file, or the name of a bundled recipe. Without a recipe: a file of pairs, or
    ``regard.DataFiles(source=("my.en",), target=("my.de",))``.
    kind: the class of the model, as in ``load``.
    out: the run folder, ``runs/<name of the recipe>`` by default.
    changes: ``"section.key=value"`` strings that override keys of a recipe file.
    minutes: time limit for the whole run; steps, schedule and validations are fitted to it.
    init_from: run folder to fine-tune; sizes and tokenizer are taken from it, and a low learning rate is chosen.
    mix: fine-tuning: share of the training pairs that is taken from the training data of that run.
    freeze: fine-tuning: groups of weights that are not trained, such as ``["encoder"]`` or ``["all-but-decoder"]``.
    extend_vocab: fine-tuning: maximum number of entries to add to each vocabulary.
    """
    import time
    from pathlib import Path

    from regard.errors import RegardError
    from regard.recipe import DataFiles, Recipe
    from regard.recipe.registry import find_registry
    from regard.tasks import Model, Translator
    from regard.training.run import train as train_run

    if kind is not None and not (isinstance(kind, type) and issubclass(kind, Model)):
        raise RegardError(
            f"train: {kind!r} is not a model class; pass options by keyword: out='runs/my'"
        )
    expected, tune = kind or Translator, False
    automatic: AutomaticRecipe | None = None
    fine_tuning = {"mix": mix, "freeze": freeze, "extend_vocab": extend_vocab}
    if init_from is None and any(value is not None for value in fine_tuning.values()):
        raise RegardError(
            f"train: {', '.join(fine_tuning)} have an effect only in fine-tuning; pass init_from=…"
        )
    if isinstance(recipe, Recipe):
        if out is None or changes or init_from is not None:
            raise RegardError(
                "train: a Recipe object needs out=…; put changes and init_from in the recipe, not in the call"
            )
        folder = Path(out)
    else:
        named = (
            (recipe.pairs or recipe.source or ("data",))[0]
            if isinstance(recipe, DataFiles)
            else recipe
        )
        folder = Path(out or Path("runs") / Path(named).name.split(".")[0])
        groups = None if freeze is None else tuple(freeze)
        start = time.monotonic()
        recipe, minutes, tune, automatic = _find_recipe(
            recipe, folder, changes, minutes, init_from, mix, groups, extend_vocab
        )
        if minutes is not None:
            minutes = max(0.1, minutes - (time.monotonic() - start) / 60)
    model = find_registry("task")[recipe.task].model
    if not issubclass(model, expected):
        raise RegardError(
            f"train: the recipe is for task {recipe.task}; call "
            f"regard.train(recipe, regard.{model.__name__}) to get a {model.__name__}"
        )
    return train_run(recipe, folder, minutes, automatic=automatic, tune_decoding=tune)


def _find_recipe(
    recipe: DataFiles | str | PathLike[str],
    out: Path,
    changes: Sequence[str],
    minutes: float | None,
    init_from: str | PathLike[str] | None,
    mix: float | None,
    freeze: tuple[str, ...] | None,
    extend_vocab: int | None,
) -> tuple[Recipe, float | None, bool, AutomaticRecipe | None]:
    """For the arguments of ``train``: the recipe, the time, whether to tune decoding, and how it was chosen."""
    from pathlib import Path

    from regard.data.corpus import CorpusPreview
    from regard.data.formats.base import suffix_format
    from regard.recipe import DataConfig, DataFiles, load_recipe
    from regard.training.autoconfig import autoconfigure, tunes_decoding
    from regard.training.fine_tuning import (
        FineTuning,
        fine_tuning_from_recipe,
        fine_tuning_recipe,
    )
    from regard.training.resume import resumable_recipe

    options = None
    if init_from is not None:
        options = FineTuning(Path(init_from), mix, freeze, extend_vocab)
    if not isinstance(recipe, DataFiles) and suffix_format(Path(recipe)) is None:
        if options is None:
            return load_recipe(Path(recipe), changes), minutes, False, None
        return fine_tuning_from_recipe(options, Path(recipe), changes)[0], minutes, False, None
    files = recipe if isinstance(recipe, DataFiles) else DataFiles(pairs=(str(recipe),))
    root = str(Path.cwd())
    preview = CorpusPreview(files, DataConfig(root=root, train=files))
    if options is None:
        if (begun := resumable_recipe(out, files, root, changes)) is not None:
            return begun, minutes, tunes_decoding(changes), None
        languages = None if files.source else preview.languages
        chosen = autoconfigure(files, root, changes, languages, preview.pairs(), minutes)
        return chosen.recipe, chosen.minutes, tunes_decoding(changes), chosen
    languages = preview.languages
    found = fine_tuning_recipe(options, files, root, changes, languages, preview.pairs())
    return found[0], minutes, False, None
