"""Regard: the Transformer of "Attention Is All You Need", whole. Pairs of text in; a trained, scored model out.

    import regard
    model = regard.train("my-recipe.yaml")          # or regard.load("runs/demo")
    model.translate(["The dog is tired."])

The package reads from top to bottom; a module imports only from those above it. Two imports go down, made when they
are asked for: a model that traces itself (course), and a trace that shows itself (look).

    version     the version
    errors      RegardError, the one exception that speaks to a person
    background  items made in another thread while the ones before are in use
    marks       PAD, BOS, EOS, UNK, MASK: the ids that stand for no text
    recipe/     everything that makes a model what it is, typed, with every default
    text/       read pairs, tokenize, store ids, make batches; where sentences end; the built-in grammar
    nn/         the mathematics: attention, positions, norms, feed-forward, layers, transformer, recurrent, convolution
    search/     greedy, beam, sampling: ids and a step function, no model
    fast/       a trained network made ready for search: packed weights, fp32, bf16 or int8
    score/      BLEU, chrF, TER through sacreBLEU; error rates, ROUGE, accuracy and F1, perplexity
    run         the run folder: files that name each other by hash
    journal     files that grow a portion at a time and lose nothing when their writer is killed
    model/      Model: a run folder opened for use, one kind for each task; text enters and leaves here
    probe       to look into a network while a text passes, and to interfere: watch, mute, leave out a word
    trace       everything seen while one sentence passed: attention, candidates, the beam as a tree
    tracing     how a trace is made: a sentence is translated while it is watched, and read again
    align       which word of a translation came from which word of its sentence, as attention tells
    learn/      loss, optimizers, checkpoints, several processes, the loop
    course      what a model is built on and how it learned, for the page
    distill     a teacher's translations, for a student to learn from
    look        a trace as one HTML file to send around; the page itself is in web/
    exchange/   models come and go: Hugging Face, CTranslate2, ONNX, torch, bundles; each proves itself
    serve/      a model behind HTTP: LibreTranslate's API, batches, limits
    bench/      how fast it is, beside others, in one run
    demo        the main job in three minutes, with nothing to download
    commands/   the commands by kind, thin
    cli         which commands there are
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from regard.errors import RegardError as RegardError
    from regard.recipe import Device, Precision, Recipe as Recipe
    from regard.tasks import Model as Model

_HOMES = {"RegardError": "errors", "Recipe": "recipe", "Model": "tasks"}


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used: torch takes seconds to import."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    return getattr(import_module(f"regard.{_HOMES[name]}"), name)


def load(
    run: str | Path,
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: int | None = None,
) -> Any:
    """Open a run folder: a Translator, a Tagger …, whatever its task is.

    precision: the numbers to compute in, fp32, bf16, int8, or auto, the fastest the machine has.
    threads: batches worked on at a time, on a CPU (all available_cores, unless given).
    """
    from regard.tasks import Model

    return Model.load(run, device, precision, threads)


def train(
    recipe: Recipe | str | Path,
    out: str | Path | None = None,
    changes: Sequence[str] = (),
    minutes: float | None = None,
) -> Any:
    """Train by a recipe: a ``Recipe``, a YAML file, or the name of a shipped one.

    out is the run folder (``runs/<name of the recipe>`` unless given); a run found there goes on.
    changes are ``"section.key=value"`` on top of a file; minutes ends the training in time.
    """
    from pathlib import Path

    from regard.errors import RegardError
    from regard.recipe import Recipe, load_recipe
    from regard.training.run import train as train_in

    if isinstance(recipe, Recipe):
        if out is None or changes:
            raise RegardError("a Recipe object needs out, and takes no changes")
        return train_in(recipe, out, minutes)
    name = Path(recipe).name.split(".")[0]
    return train_in(load_recipe(recipe, changes), out or Path("runs") / name, minutes)
