"""A run folder holds everything about a model: what it is, where it came from, and how good it is.

    recipe.yaml         the complete recipe, with all defaults written out
    tokenizer*.model    one file, or one for each side; an imported tokenizer also has its pieces in JSON
    model.safetensors   the weights; the header has their checksum, their validation, and the hashes of the recipe and
                        the tokenizer they belong to
    card.json           scores, data, sizes, versions, times, and the hashes of all files above; written last
    test_outputs.jsonl  the outputs for the test data, one JSON string per line
    log.jsonl, events/  the training log, as JSON lines and for TensorBoard
    checkpoints/        to resume training from: a file each, or a folder to which several processes wrote
    data/               token ids, memory-mapped

The first four are a *bundle*: all that is needed to use the model. Nothing in a run folder is ever executed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.data.tokenizer import Tokenizer, load_tokenizer
from regard.errors import RegardError
from regard.storage.atomic_files import PARTIAL, NoChecksum, read_tensors, write_tensors, write_text

if TYPE_CHECKING:
    from torch import Tensor

    from regard.recipe import Recipe


def sha256(path: Path) -> str:
    """The hash of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


CHECKPOINT_STATE = "state.json"
"""The file of a checkpoint in parts that is written last; see ``training/sharded_checkpoint.py``."""
LOCK_ATTEMPTS = 3
LOCK_SECONDS = 0.05
"""how often a lock is tried, and how long to wait in between"""
SELECTION = "selection"
"""The key of a ``Selection`` in the header of the weights; all other keys are names of files."""


class Selection(NamedTuple):
    """Which weights model.safetensors has, and how they validated. It is in the header of that file."""

    averaged_checkpoints: int
    objective: float
    loss: float

    @property
    def sort_key(self) -> tuple[float, float]:
        """Orders selections, best first, like validations."""
        return self.objective, self.loss


def describe_fine_tuning(card: Mapping[str, Any]) -> list[str]:
    """The section ``fine_tuning`` of a card: one line per data set, with the scores before and after fine-tuning."""
    lines = []
    for name, scores in card["sets"].items():
        scores_before = {score["name"]: score["value"] for score in scores["before"]}
        texts = [
            f"{score['name']} {scores_before[score['name']]:.1f} before, {score['value']:.1f} after"
            if score["name"] in scores_before
            else f"{score['name']} {score['value']:.1f} after"
            for score in scores.get("after", ())
        ]
        if texts:
            heading = f"{name.capitalize()} data ({scores['set']}, {scores['pairs']:,} pairs)"
            lines.append(f"{heading}: {'; '.join(texts)}")
    return lines


def _describe_validation(recipe: Recipe, values: Mapping[str, float]) -> str:
    """The section ``valid`` of a card: the loss, and the score that selects checkpoints."""
    texts = {name: f"{name} {value:.3f}" for name, value in values.items()}
    scores = [texts.pop(name) for name in [*texts] if name in recipe.evaluation.metrics]
    how = "; greedy decoding, as during training: " if recipe.is_seq2seq else ", "
    return how.join(filter(None, (", ".join(texts.values()), ", ".join(scores))))


class RunDir:
    """The paths of a run folder, and the only code that reads and writes its files."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.recipe_file = self.folder / "recipe.yaml"
        self.weights_file = self.folder / "model.safetensors"
        self.card_file = self.folder / "card.json"
        self.log_file = self.folder / "log.jsonl"
        self.events = self.folder / "events"
        self.checkpoints = self.folder / "checkpoints"
        self.data = self.folder / "data"
        self.metadata_file = self.data / "metadata.json"
        """describes the prepared data; written last, so that if it exists, everything else does"""
        self.train_sources_file = self.data / "train_sources.npy"
        """hashes of the training sources, see ``training/train_test_overlap.py``"""
        self.test_outputs_file = self.folder / "test_outputs.jsonl"
        """the outputs that the test scores of the card were computed from, one JSON string per line"""
        self.plan_file = self.checkpoints / "plan.json"
        """the keys that a time limit has changed, as the recipe had them"""
        self.lock_file = self.checkpoints / ".lock"
        """locked while a process trains in the folder, and names this process; the first file of a run"""
        self.owner: str | None = None
        """the contents of the lock file while this object holds the lock"""

    def __str__(self) -> str:
        return str(self.folder)

    def temporary_files(self) -> list[Path]:
        """Files that a killed training may leave behind."""
        atomic_paths = (self.recipe_file, self.weights_file, self.card_file, self.test_outputs_file)
        patterns = [
            *(f".{path.name}{PARTIAL}" for path in atomic_paths),
            *(f".tokenizer*{PARTIAL}", f".log.jsonl{PARTIAL}", f"checkpoints/.*{PARTIAL}"),
            *(f"data/.*.json{PARTIAL}", f"data/.*.arrow{PARTIAL}"),
            "data/.*.arrow.*.unfinished",
            *("checkpoints/.seen-*", f"checkpoints/.*{PARTIAL}/*"),
        ]
        paths = [path for pattern in patterns for path in sorted(self.folder.glob(pattern))]
        return [path for path in paths if not path.is_dir()]

    def all_checkpoint_files(self) -> list[Path]:
        """The files of all checkpoints; first the file that makes a checkpoint in parts complete."""
        patterns = (f"step-*/{CHECKPOINT_STATE}", "step-*/*.safetensors", "step-*.safetensors")
        paths = [path for name in patterns for path in sorted(self.checkpoints.glob(name))]
        return [path for path in paths if not path.is_dir()]

    def delete_files(self, paths: Iterable[Path]) -> None:
        """Delete files, and the folders of checkpoints that are empty then."""
        for path in paths:
            path.unlink(missing_ok=True)
        for pattern in ("step-*", f".*{PARTIAL}"):
            for folder in self.checkpoints.glob(pattern):
                with suppress(OSError):  # a file, or not empty
                    folder.rmdir()

    @contextmanager
    def lock(self, seconds: float = 0.0) -> Iterator[bool]:
        """Try to lock the folder; yields whether it succeeded. The lock is released when the process ends in any way.

        It retries for at least ``seconds``, and a few times in any case, because ``is_locked`` also locks it briefly.
        """
        deadline = time.monotonic() + max(seconds, LOCK_ATTEMPTS * LOCK_SECONDS)
        with self.lock_file.open("a") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        yield False
                        return
                    time.sleep(LOCK_SECONDS)
            owner = f"process {os.getpid()} on {socket.gethostname()}, {secrets.token_hex(8)}\n"
            file.truncate(0)
            file.write(owner)
            file.flush()
            os.fsync(file.fileno())
            self.owner = owner
            try:
                yield True
            finally:
                self.owner = None

    def check_owner(self) -> None:
        """Raise if another process has locked the folder since this one did.

        This happens on network file systems that give the lock of an unreachable machine to another one, or that do not
        share locks at all. The machine that lost it must not write when it returns.
        """
        if self.owner is None:
            return
        owner = self.lock_file.read_text() if self.lock_file.is_file() else "nobody\n"
        if owner != self.owner:
            raise RegardError(
                f"{self}: {owner.partition(',')[0].strip()} is training here now; this process has lost the folder and "
                "stops writing"
            )

    def is_locked(self) -> bool:
        """Whether a process is training in the folder."""
        try:
            with self.lock_file.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no such file, or it cannot be read
            return False
        return False

    # Recipe, metadata, card and log

    def metadata(self) -> dict[str, Any]:
        """What describes the prepared data; empty if there is none, or it is damaged."""
        try:
            metadata = json.loads(self.metadata_file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return metadata if isinstance(metadata, dict) else {}

    def recipe(self) -> Recipe:
        if not self.recipe_file.is_file():
            problem = "a file, not a folder" if self.folder.exists() else "no such folder"
            problem = "not a run folder" if self.folder.is_dir() else problem
            raise RegardError(
                f"{self}: {problem} (a run folder contains recipe.yaml; regard train creates one, "
                "and regard runs lists your runs)"
            )
        from regard.recipe import load_recipe

        return load_recipe(self.recipe_file)

    def write_recipe(self, recipe: Recipe) -> None:
        self.check_owner()
        text = "# Complete: every default is written out.\n" + recipe.to_yaml()
        write_text(self.recipe_file, text)

    def card(self) -> dict[str, Any]:
        """The model card: the contents of card.json; empty if there is none yet."""
        if not self.card_file.is_file():
            return {}
        try:
            card = json.loads(self.card_file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            card = None
        if not isinstance(card, dict):
            raise RegardError(f"{self.card_file}: damaged, not a card in JSON")
        files = card.get("files", {})
        if not isinstance(files, dict) or not all(
            isinstance(digest, str) for digest in files.values()
        ):
            raise RegardError(f"{self.card_file}: damaged, its files are not names with hashes")
        return card

    def write_card(self, card: Mapping[str, Any]) -> None:
        """Write card.json, with the hashes of all files of the bundle added."""
        self.check_owner()
        files = [self.recipe_file, *self.tokenizer_files(), self.weights_file]
        card_with_hashes = {**card, "files": {path.name: sha256(path) for path in files}}
        text = json.dumps(card_with_hashes, indent=2, ensure_ascii=False) + "\n"
        write_text(self.card_file, text)

    def log(self) -> list[dict[str, Any]]:
        """The events of log.jsonl; a line truncated by a crash is skipped."""
        lines = self.log_file.read_text(encoding="utf-8") if self.log_file.is_file() else ""
        events = []
        for line in lines.split("\n"):
            with suppress(ValueError, RecursionError):
                if isinstance(event := json.loads(line), dict):
                    events.append(event)
        return events

    def describe(self, recipe: Recipe, card: Mapping[str, Any]) -> list[str]:
        """A readable summary of the run, for ``regard info``."""
        model, tokenizer = recipe.model, recipe.tokenizer
        target = f" (target: {tokenizer.target_kind})" if tokenizer.target_kind else ""
        lines = [
            f"run          {self}",
            f"model        from {model.preset}: {model.encoder_layers}+{model.decoder_layers} layers, "
            f"width {model.d_model}, {model.heads} heads, feed-forward {model.d_ff}",
            f"tokenizer    {tokenizer.kind}{target}",
            f"task         {recipe.task}",
        ]
        if "steps" not in card:
            origins = {"averaged from": "averaged_from", "imported from": "imported_from"}
            states = [f"{origin} {card[key]}" for origin, key in origins.items() if key in card]
            state = states[0] if states else "not finished; regard train resumes it"
            return [*lines, f"state        {state}"]
        try:
            return [*lines, *self._describe_training(recipe, card)]
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            detail = f": {error.args[0]} is missing" if isinstance(error, KeyError) else ""
            raise RegardError(f"{self.card_file}: incomplete card{detail}") from None

    def requested_training(self) -> dict[str, Any]:
        """The keys of the training section that a plan has changed, as they were before; empty without a plan."""
        try:
            requested = json.loads(self.plan_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return requested if isinstance(requested, dict) else {}

    def _describe_training(self, recipe: Recipe, card: Mapping[str, Any]) -> list[str]:
        from regard.metrics.base import MetricResult

        vocabulary, counts = card["vocabulary"], card["data"]["train"]
        return [
            f"parameters   {card['parameters']:,}",
            f"vocabulary   {vocabulary['source']:,} source, {vocabulary['target']:,} target",
            f"data         {counts['kept']:,} training pairs",
            f"training     {card['steps']:,} step{'s' * (card['steps'] != 1)}, "
            f"{card['epochs']} epoch{'s' * (card['epochs'] != 1)}, "
            f"{card['seconds'] / 60:.1f} minutes on {card['hardware']}; {card['reason_stopped']}",
            f"validation   {_describe_validation(recipe, card['valid'])}",
            *(
                f"validation   with the recipe's decoding options: {MetricResult(**result)}"
                for result in card.get("valid_scores", ())
                if not card["test"]
            ),
            *(f"test         {MetricResult(**result)}" for result in card["test"]),
            *self._describe_fine_tuning(card.get("fine_tuning")),
            f"command      {card['command']}",
        ]

    def _describe_fine_tuning(self, card: Mapping[str, Any] | None) -> list[str]:
        if card is None:
            return []
        mixed = f", {card['mix']:.0%} of the pairs from its training data" if card["mix"] else ""
        frozen = f", frozen: {', '.join(card['freeze'])}" if card["freeze"] else ""
        origin = f"fine-tuned   from {card['from']}{mixed}{frozen}"
        return [origin, *(f"             {line}" for line in describe_fine_tuning(card))]

    # Test outputs

    def write_test_outputs(self, outputs: Sequence[str], test: str) -> dict[str, str]:
        """Write the outputs for the test data, and return the section of the card that describes them.

        test: the fingerprint of the test data.
        """
        lines = [json.dumps(output, ensure_ascii=False) + "\n" for output in outputs]
        write_text(self.test_outputs_file, "".join(lines))
        return {"sha256": sha256(self.test_outputs_file), "test": test}

    def test_outputs(self, card: Mapping[str, Any], test: str) -> list[str] | None:
        """The outputs that belong to a card and to test data; None if there are none, or they have changed."""
        described = {"test": test}
        try:
            described["sha256"] = sha256(self.test_outputs_file)
            if card.get("test_outputs") != described:
                return None
            lines = self.test_outputs_file.read_text(encoding="utf-8").split("\n")[:-1]
            return [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return None

    # Tokenizer and weights

    def tokenizer_files(self) -> list[Path]:
        return sorted(self.folder.glob("tokenizer*"))

    def tokenizer(self, recipe: Recipe) -> Tokenizer:
        return load_tokenizer(self.folder, recipe.tokenizer, recipe.has_labels)

    def fingerprint(self) -> str:
        """A hash of everything that determines the model's output: recipe, tokenizer and weights."""
        files = [self.recipe_file, *self.tokenizer_files(), self.weights_file]
        hashes = "".join(sha256(path) for path in files)
        return hashlib.sha256(hashes.encode()).hexdigest()

    def _dependencies(self) -> dict[str, str]:
        """Hashes of what weights depend on: the recipe sections that define their shapes, and the tokenizer."""
        recipe = self.recipe()
        sections = recipe.model.identity + recipe.tokenizer.identity
        digest = hashlib.sha256(sections.encode()).hexdigest()
        return {self.recipe_file.name: digest} | {p.name: sha256(p) for p in self.tokenizer_files()}

    def write_weights(
        self, weights: Mapping[str, Tensor], selection: Selection | None = None
    ) -> None:
        """Write the weights; ``selection`` says how they validated, if they were validated."""
        self.check_owner()
        # The card describes the finished weights. It must never be next to other weights, not even after a crash.
        self.card_file.unlink(missing_ok=True)
        metadata: dict[str, Any] = dict(self._dependencies())
        if selection is not None:
            metadata[SELECTION] = selection
        write_tensors(self.weights_file, weights, metadata)

    def weights(self) -> dict[str, Tensor]:
        """The weights, after checking that all files of the run still belong together."""
        return self.read_weights()[0]

    def read_weights(self) -> tuple[dict[str, Tensor], Selection | None]:
        """The weights, checked as in ``weights``, and their selection; None if they were not selected in training."""
        from safetensors import SafetensorError

        if not self.weights_file.is_file():
            raise RegardError(
                f"{self}: no model yet (model.safetensors appears at the first validation)"
            )
        for name, digest in self.card().get("files", {}).items():
            path = self.folder / Path(name).name
            self._check_hash(name, sha256(path) if path.is_file() else None, digest, "card.json")
        try:
            weights, expected = read_tensors(self.weights_file)
            recorded = expected.pop(SELECTION, None)
            selection = None if recorded is None else Selection(*recorded)
        except NoChecksum as error:
            raise RegardError(f"{self.weights_file}: {error}") from None
        except (SafetensorError, ValueError, TypeError) as error:
            raise RegardError(f"{self.weights_file}: damaged: {error}") from None
        if self.recipe_file.name not in expected:
            raise RegardError(
                f"{self.weights_file}: does not name the recipe it belongs to, "
                "so it was not written by Regard"
            )
        actual = self._dependencies()
        for name in sorted(expected):
            self._check_hash(name, actual.get(name), expected[name], "model.safetensors")
        return weights, selection

    def _check_hash(self, name: str, actual: str | None, expected: str, named_by: str) -> None:
        path = self.folder / name
        if actual is None:
            raise RegardError(f"{path}: missing; {named_by} depends on it")
        if actual != expected:
            raise RegardError(
                f"{path}: not the file that {named_by} was written for (it was changed or replaced); "
                "restore the original"
            )
