"""A run folder is the unit of everything: what a model is, where it came from, how good it is.

    recipe.yaml         complete, all defaults written out
    tokenizer*.model    one file, or one for each side; an imported one has its pieces beside it, in JSON
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
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.data.tokenizer import Tokenizer, load_tokenizer
from regard.errors import RegardError
from regard.metrics.base import Result
from regard.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from torch import Tensor


PARTIAL = ".partial"
"""How the name of a file that is still being written ends."""


def check_distinct_files(files: Mapping[str, Path | None]) -> None:
    """Refuse a file that is given twice, by role: written over what is read, or given by mistake."""
    roles: dict[Path, str] = {}
    for role, path in files.items():
        if path and (other := roles.setdefault(path.resolve(), role)) != role:
            raise RegardError(f"{role} {path}: that is the {other}; give each a file of its own")


def check_writable(path: Path) -> None:
    """Refuse, before any work is done for it, a file that cannot be written."""
    if path.is_dir():
        raise RegardError(f"{path}: a folder, not a file")
    if path.exists() and not path.is_file():
        raise RegardError(f"{path}: not an ordinary file, so it cannot be replaced")
    if not path.parent.is_dir():
        raise RegardError(f"{path}: cannot be written: {path.parent} is no folder")


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file whole or not at all: to a temporary name, to the disk, then renamed in one move."""
    check_writable(path)
    temporary = path.with_name(f".{path.name}{PARTIAL}")
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise RegardError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        with suppress(OSError):
            temporary.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_text(path: Path, text: str) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomic(path, write)


FACTS = "regard"
"""where a file of tensors says more. One entry: safetensors writes several in any order, and what is equal should be
equal byte for byte."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    def write(temporary: Path) -> None:
        try:
            temporary.touch()  # with the user's permissions; safetensors would give its own
            mode = temporary.stat().st_mode
            save_file(dict(tensors), temporary, {FACTS: json.dumps(facts, sort_keys=True)})
            temporary.chmod(mode)
        except SafetensorError as error:  # which is how a full disk is told
            raise OSError(errno.EIO, str(error)) from None

    write_atomic(path, write)


def facts_of(file: Any) -> dict[str, Any]:
    """What was written beside the tensors of an open file; nothing if not by us."""
    facts: dict[str, Any] = json.loads((file.metadata() or {}).get(FACTS, "{}"))
    return facts


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class RunDir:
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
            what = "a file, not a folder" if self.folder.exists() else "no such folder"
            what = "not a run folder" if self.folder.is_dir() else what
            raise RegardError(
                f"{self}: {what} (a run folder has a recipe.yaml; regard train makes one)"
            )
        return load_recipe(self.recipe_file)

    def write_recipe(self, recipe: Recipe) -> None:
        text = "# Complete: every default is written out.\n" + recipe.to_yaml()
        write_text(self.recipe_file, text)

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

    def log(self) -> list[dict[str, Any]]:
        """The events of log.jsonl; a line cut short by a crash is left out."""
        lines = self.log_file.read_text(encoding="utf-8") if self.log_file.is_file() else ""
        events = []
        for line in lines.split("\n"):
            with suppress(ValueError):
                events.append(json.loads(line))
        return events

    def write_card(self, card: Mapping[str, Any]) -> None:
        files = [self.recipe_file, *self.tokenizer_files(), self.weights_file]
        full = {**card, "files": {path.name: sha256(path) for path in files}}
        text = json.dumps(full, indent=2, ensure_ascii=False) + "\n"
        write_text(self.card_file, text)

    def describe(self, recipe: Recipe, card: Mapping[str, Any]) -> list[str]:
        """A few lines for a person."""
        model, tokenizer = recipe.model, recipe.tokenizer
        other = f" and, of the target, {tokenizer.target_kind}" if tokenizer.target_kind else ""
        lines = [
            f"run          {self}",
            f"model        from {model.preset}: {model.encoder_layers}+{model.decoder_layers} layers, "
            f"width {model.d_model}, {model.heads} heads, feed-forward {model.d_ff}",
            f"tokenizer    {tokenizer.kind}{other}",
            f"task         {recipe.task}",
        ]
        if "steps" not in card:
            made = {"averaged from": "averaged_from", "imported from": "imported_from"}
            states = [f"{words} {card[key]}" for words, key in made.items() if key in card]
            state = states[0] if states else "not finished; train goes on with it"
            return [*lines, f"state        {state}"]
        try:
            return [*lines, *self._trained(card)]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RegardError(f"{self.card_file}: not a whole card: {error!r}") from None

    def _trained(self, card: Mapping[str, Any]) -> list[str]:
        vocabulary, counts = card["vocabulary"], card["data"]["train"]
        return [
            f"parameters   {card['parameters']:,}",
            f"vocabulary   {vocabulary['source']:,} source, {vocabulary['target']:,} target",
            f"data         {counts['kept']:,} training pairs",
            f"training     {card['steps']:,} steps, {card['epochs']} times through the data, "
            f"{card['seconds'] / 60:.1f} minutes on {card['hardware']}; {card['reason_stopped']}",
            "validation   " + ", ".join(f"{k} {v:.3f}" for k, v in card["valid"].items()),
            *(f"test         {Result(**result)}" for result in card["test"]),
            f"command      {card['command']}",
        ]

    # Weights, which name what they belong to

    def tokenizer_files(self) -> list[Path]:
        return sorted(self.folder.glob("tokenizer*"))

    def _belongings(self) -> dict[str, str]:
        """What weights fit: the sections of the recipe that shape them, and the tokenizer."""
        recipe = self.recipe()
        shape = recipe.model.model_dump_json() + recipe.tokenizer.identity
        digest = hashlib.sha256(shape.encode()).hexdigest()
        return {self.recipe_file.name: digest} | {p.name: sha256(p) for p in self.tokenizer_files()}

    def fingerprint(self) -> str:
        """Of all that makes the model what it is."""
        files = [self.recipe_file, *self.tokenizer_files(), self.weights_file]
        whole = "".join(sha256(path) for path in files)
        return hashlib.sha256(whole.encode()).hexdigest()

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
            path = self.folder / Path(name).name
            self._compare(name, sha256(path) if path.is_file() else None, digest, "card.json")
        try:
            with safe_open(self.weights_file, "pt") as file:
                named = facts_of(file)
                if self.recipe_file.name not in named:
                    raise RegardError(
                        f"{self.weights_file}: does not say to which recipe it belongs, "
                        "so it was not written by regard"
                    )
                found = self._belongings()
                for name in sorted(named):
                    self._compare(name, found.get(name), named[name], "model.safetensors")
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise RegardError(f"{self.weights_file}: damaged: {error}") from None

    def _compare(self, name: str, found: str | None, wanted: str, by: str) -> None:
        path = self.folder / name
        if found is None:
            raise RegardError(f"{path}: missing; {by} belongs to it")
        if found != wanted:
            raise RegardError(
                f"{path}: not the file that {by} was written for (it was changed or exchanged); "
                "put the original back"
            )

    def tokenizer(self, recipe: Recipe) -> Tokenizer:
        return load_tokenizer(self.folder, recipe.tokenizer, recipe.has_labels)
