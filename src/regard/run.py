"""A run folder is the unit of everything: what a model is, where it came from, how good it is.

    recipe.yaml         complete, all defaults written out
    tokenizer*.model    one file, or one for each side
    model.safetensors   the weights; its header names the recipe and the tokenizer by hash
    card.json           scores, data, sizes, versions, times, and every file above by hash; written last
    log.jsonl, events/  what happened while it learned
    checkpoints/        to go on from
    data/               ids, memory-mapped

The first four are a *bundle*: all that is needed to use the model. Nothing in a run folder is ever executed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import RegardError
from regard.recipe import Recipe, load_recipe
from regard.score.result import Result
from regard.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor


PARTIAL = ".partial"
"""How the name of a file that is still being written ends."""


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file whole or not at all: to a temporary name, to the disk, then renamed in one move."""
    temporary = path.with_name(f".{path.name}{PARTIAL}")
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise RegardError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    def write(temporary: Path) -> None:
        try:
            save_file(dict(tensors), temporary, {"format": "pt", **header})
        except SafetensorError as error:  # which is how a full disk is told
            raise OSError(errno.EIO, str(error)) from None

    write_whole(path, write)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Run:
    """The paths of a run folder, and the only place that reads and writes its files."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.recipe_file = self.folder / "recipe.yaml"
        self.weights_file = self.folder / "model.safetensors"
        self.card_file = self.folder / "card.json"
        self.log_file = self.folder / "log.jsonl"
        self.events = self.folder / "events"
        self.checkpoints = self.folder / "checkpoints"
        self.data = self.folder / "data"

    def __str__(self) -> str:
        return str(self.folder)

    # Recipe and card

    def recipe(self) -> Recipe:
        if not self.recipe_file.is_file():
            what = "not a run folder" if self.folder.is_dir() else "no such folder"
            raise RegardError(
                f"{self}: {what} (a run folder has a recipe.yaml; regard train makes one)"
            )
        return load_recipe(self.recipe_file)

    def write_recipe(self, recipe: Recipe) -> None:
        text = "# Complete: every default is written out.\n" + recipe.to_yaml()
        write_whole(self.recipe_file, lambda path: void(path.write_text(text, encoding="utf-8")))

    def card(self) -> dict[str, Any]:
        if not self.card_file.is_file():
            return {}
        try:
            card = json.loads(self.card_file.read_text(encoding="utf-8"))
        except ValueError:
            card = None
        if not isinstance(card, dict):
            raise RegardError(f"{self.card_file}: damaged, not a card in JSON")
        return card

    def write_card(self, card: Mapping[str, Any]) -> None:
        files = [self.recipe_file, *self.tokenizer_files(), self.weights_file]
        full = {**card, "files": {path.name: sha256(path) for path in files}}
        text = json.dumps(full, indent=2, ensure_ascii=False) + "\n"
        write_whole(self.card_file, lambda path: void(path.write_text(text, encoding="utf-8")))

    def describe(self, recipe: Recipe, card: Mapping[str, Any]) -> list[str]:
        """A few lines for a person."""
        model = recipe.model
        lines = [
            f"run          {self}",
            f"model        {model.preset}: {model.encoder_layers}+{model.decoder_layers} layers, "
            f"width {model.width}, {model.heads} heads, feed-forward {model.feedforward}",
            f"tokenizer    {recipe.tokenizer.kind}",
        ]
        if "steps" not in card:
            return [*lines, "state        not finished" if not card else "state        averaged"]
        vocabulary, counts = card["vocabulary"], card["data"]["train"]
        lines += [
            f"parameters   {card['parameters']:,}",
            f"vocabulary   {vocabulary['source']:,} source, {vocabulary['target']:,} target",
            f"data         {counts['kept']:,} training pairs",
            f"training     {card['steps']:,} steps, {card['epochs']} epochs, "
            f"{card['seconds'] / 60:.1f} minutes on {card['hardware']}; {card['reason_stopped']}",
            f"validation   loss {card['valid']['loss']:.3f}",
        ]
        lines += [f"test         {Result(**result)}" for result in card["test"]]
        return [*lines, f"command      {card['command']}"]

    # Weights, which name what they belong to

    def tokenizer_files(self) -> list[Path]:
        return sorted(self.folder.glob("tokenizer*.model"))

    def _belongings(self) -> dict[str, str]:
        return {path.name: sha256(path) for path in [self.recipe_file, *self.tokenizer_files()]}

    def write_weights(self, weights: Mapping[str, Tensor]) -> None:
        # A card belongs to finished weights; it must never stand beside others, not even after a crash.
        self.card_file.unlink(missing_ok=True)
        write_tensors(self.weights_file, weights, self._belongings())

    def weights(self) -> dict[str, Tensor]:
        """The weights, after checking that all files of the run still belong together."""
        from safetensors import SafetensorError, safe_open

        if not self.weights_file.is_file():
            raise RegardError(
                f"{self}: no model yet (model.safetensors appears at the first validation)"
            )
        for name, digest in self.card().get("files", {}).items():
            self._check(name, digest, "card.json")
        try:
            with safe_open(self.weights_file, "pt") as file:
                named = file.metadata() or {}
                if self.recipe_file.name not in named:
                    raise RegardError(
                        f"{self.weights_file}: does not say to which recipe it belongs, "
                        "so it was not written by regard"
                    )
                for name in named.keys() - {"format"}:
                    self._check(name, named[name], "model.safetensors")
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise RegardError(f"{self.weights_file}: damaged: {error}") from None

    def _check(self, name: str, digest: str, by: str) -> None:
        path = self.folder / Path(name).name
        if not path.is_file():
            raise RegardError(f"{path}: missing; {by} belongs to it")
        if sha256(path) != digest:
            raise RegardError(
                f"{path}: not the file that {by} was written for (it was changed or exchanged); "
                "put the original back"
            )

    def tokenizer(self, recipe: Recipe) -> Tokenizer:
        return Tokenizer.load(self.folder, recipe.tokenizer)


def void(_: object) -> None:
    """Turn a function's result into none, where a callback must not return one."""
