"""Reading recipes from YAML. Every problem is reported at once, with its line and what is allowed."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from regard.decoding.options_and_logits_processors import DecodingConfig
from regard.errors import RegardError, shorten
from regard.recipe.registry import find_registry
from regard.recipe.schema import (
    DERIVED_KEYS,
    ModelConfig,
    Recipe,
    RecipeLoader,
    TokenizerConfig,
)
from regard.recipe.validation import Section, as_written

Name = TypeVar("Name", bound=str)

RENAMED_KEYS = {
    "search": "decoding",
    "search.alpha": "decoding.length_penalty",
    "search.candidates": "decoding.length_beam",
    "search.coverage": "decoding.coverage_penalty",
    "search.diversity": "decoding.diversity_penalty",
    "search.groups": "decoding.beam_groups",
    "search.keep": "decoding.protect",
    "search.manner": "decoding.length_normalization",
    "search.no_repeat": "decoding.no_repeat_ngram",
    "search.rounds": "decoding.iterations",
    "score": "evaluation",
    "score.measures": "evaluation.metrics",
    "evaluation.measures": "evaluation.metrics",
    "data.clean.cut": "data.clean.truncate",
    "tokenizer.size": "tokenizer.vocab_size",
    "model.attention.block": "model.attention.block_size",
    "model.attention.memory": "model.attention.cross_attention",
    "model.attention.reach": "model.attention.window_size",
    "model.attention.rows": "model.attention.linformer_k",
    "model.closing_norm": "model.final_norm",
    "model.feedforward": "model.d_ff",
    "model.feedforward_dropout": "model.activation_dropout",
    "model.kernel": "model.kernel_size",
    "model.key_width": "model.d_k",
    "model.norm_place": "model.norm_order",
    "model.parallel": "model.non_autoregressive",
    "model.parallel.difference": "model.non_autoregressive.max_length_difference",
    "model.parallel.length_weight": "model.non_autoregressive.length_loss_weight",
    "model.parallel.spare": "model.non_autoregressive.extra_positions",
    "model.value_width": "model.d_v",
    "model.width": "model.d_model",
    "training.batches": "training.batching",
    "training.choose_by": "training.best_checkpoint_metric",
    "training.clip": "training.clip_norm",
    "training.copies": "training.subword_copies",
    "training.keep": "training.keep_checkpoints",
    "training.rate": "training.learning_rate",
    "training.sampling": "training.subword_sampling",
    "training.smoothing_over": "training.label_smoothing_over",
    "training.start_from": "training.init_from",
}
RENAMED_KEYS |= {
    old.replace("search.", "decoding."): new
    for old, new in RENAMED_KEYS.items()
    if old.startswith("search.")
}
"""Keys of earlier versions and their current names."""
RENAMED_VALUES: dict[str, dict[str, str]] = {
    "task": {
        "translate": "translation",
        "tag": "tagging",
        "classify": "classification",
        "mask": "masked_lm",
        "continue": "language_model",
    },
    "model.architecture": {
        "parallel": "non_autoregressive",
        "recurrent": "lstm",
        "decoder": "decoder_only",
    },
    "model.attention.score": {"scaled": "scaled_dot_product", "unscaled": "dot_product"},
    "model.norm_order": {"after": "post", "before": "pre", "no_residual": "model.residual: none"},
    "model.non_autoregressive.length": {"cut": "eos"},
    "tokenizer.kind": {"characters": "char", "words": "word"},
    "tokenizer.target_kind": {"characters": "char", "words": "word"},
    "training.schedule": {"paper": "noam"},
    "decoding.length_normalization": {"paper": "gnmt"},
}
"""Values of earlier versions and their current names."""


RECIPE_SUFFIXES = (".yaml", ".yml")
MAX_CHARACTERS = 200_000
MAX_DEPTH = 32
MAX_NODES = 20_000
"""Bounds of a YAML document: its size, its nesting, and its keys and values with every alias written out. An alias that
contains aliases multiplies: a few lines can stand for billions of values."""
SHOWN_PROBLEMS = 20


class _LimitError(Exception):
    """A document that is too large, too deeply nested, or has an alias that contains itself."""


def load_yaml(text: str) -> Any:
    """The value of a YAML document, after its limits have been checked."""
    _check_limits(text)
    return yaml.load(text, Loader=RecipeLoader)


def _check_limits(text: str) -> None:
    """Count what a document would contain, from its stream of events; nothing is built."""
    if len(text) > MAX_CHARACTERS:
        raise _LimitError(f"too large: more than {MAX_CHARACTERS:,} characters")
    sizes: dict[str, int] = {}  # of each anchor that is complete
    open_anchors: list[str | None] = []
    counts = [0]  # of each open collection, within that of the document
    for event in yaml.parse(text, Loader=RecipeLoader):
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            if anchor in open_anchors:
                raise _LimitError("an alias in it contains itself")
            counts[-1] += sizes.get(anchor or "", 1)
        elif isinstance(event, yaml.ScalarEvent):
            counts[-1] += 1
            sizes |= {anchor: 1} if anchor else {}
        elif isinstance(event, yaml.CollectionStartEvent):
            open_anchors.append(anchor)
            counts.append(1)
        elif isinstance(event, yaml.CollectionEndEvent):
            size, name = counts.pop(), open_anchors.pop()
            sizes |= {name: size} if name else {}
            counts[-1] += size
        if len(counts) > MAX_DEPTH:
            raise _LimitError(f"nested more than {MAX_DEPTH} levels deep")
        if counts[-1] > MAX_NODES:
            raise _LimitError(
                f"more than {MAX_NODES:,} keys and values with its aliases written out, too large"
            )


def bundled_recipes() -> dict[str, Path]:
    """The recipes that come with Regard by name, from the installed package or from the repository."""
    package = Path(__file__).parents[1]
    installed, in_repository = package / "recipes", package.parents[1] / "recipes"
    folder = installed if installed.is_dir() else in_repository
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(name: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a YAML file, or a bundled recipe by name, and apply changes of the form ``a.b=c``."""
    path = Path(name)
    if not path.is_file():
        bundled = bundled_recipes()
        if str(name) not in bundled:
            if (path / "recipe.yaml").is_file():
                raise RegardError(
                    f"{path}: a run folder, not a recipe; to resume it: "
                    f"regard train {path / 'recipe.yaml'} --out {path}"
                )
            if path.suffix in RECIPE_SUFFIXES:
                raise RegardError(f"{name}: no such file")
            near = _nearest(str(name), bundled)
            hint = f"did you mean {near}?" if near else "regard recipes lists the bundled recipes"
            raise RegardError(f"{name}: no bundled recipe and no file of that name; {hint}")
        path = bundled[str(name)]
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)  # more is refused by its parser
    except UnicodeDecodeError as error:
        raise RegardError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise RegardError(f"{path}: cannot be read: {error.strerror}") from None
    if path.suffix not in ("", *RECIPE_SUFFIXES):
        raise RegardError(
            f"{path}: not a recipe; the name of a recipe ends in {' or '.join(RECIPE_SUFFIXES)}"
        )
    return parse_recipe(text, str(path), changes)


def parse_recipe(text: str, where: str, changes: Sequence[str] = ()) -> Recipe:
    """Parse the YAML text of a recipe. ``where`` names it in error messages."""
    try:
        values = load_yaml(text)
        lines = _lines(yaml.compose(text, Loader=RecipeLoader))
    except _DuplicateKeyError as error:
        raise RegardError(f"{where}: {error}") from None
    except _LimitError as error:
        raise RegardError(f"{where}: not a recipe: {error}") from None
    except ValueError as error:  # a date with 13 months, a number of 5,000 digits
        raise RegardError(f"{where}: not a recipe: {abbreviate(error)}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        raise RegardError(f"{where}:{line} not YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(values, dict):
        raise RegardError(
            f"{where}: a recipe has sections (data, tokenizer, model, …), but this file has none"
        )
    return make_recipe(values, where, changes, lines)


def make_recipe(
    values: dict[str, Any],
    where: str,
    changes: Sequence[str] = (),
    lines: Mapping[tuple[str, ...], int] = MappingProxyType({}),
) -> Recipe:
    """Validate plain values. ``lines`` has the line number of each key in the file."""
    values = copy.deepcopy(values)
    changed: list[tuple[str, ...]] = []
    for change in changes:
        location = _apply(values, change)
        changed.append(location)
        lines = {key: line for key, line in lines.items() if key[: len(location)] != location}
    _inherit(values)
    problems: list[tuple[bool, str]] = []
    reported: set[tuple[str | int, ...]] = set()
    while True:
        try:
            recipe = Recipe.model_validate(values)
            break
        except ValidationError as error:
            # A key is not missing if it was removed because of a problem that is already reported.
            errors = [
                details for details in _causes(error.errors()) if details["loc"] not in reported
            ]
            problems += [
                (_is_changed(details, changed), _explain(details, lines)) for details in errors
            ]
            reported |= {details["loc"] for details in errors}
            # Remove the wrong values and validate again, to find the remaining problems.
            removed = [_remove(values, details) for details in errors]
            if not errors or not all(removed):
                break
    if not problems:
        return recipe
    if all(is_changed for is_changed, _ in problems):
        where = "--set"
    if len(problems) == 1:
        raise RegardError(f"{where}: {problems[0][1]}")
    messages = [text for _, text in problems[:SHOWN_PROBLEMS]]
    if len(problems) > len(messages):
        messages.append(f"and {len(problems) - len(messages):,} more")
    listing = "".join(f"\n  {problem}" for problem in messages)
    raise RegardError(f"{where}: {len(problems)} problems:{listing}")


# ---------------------------------------------------------------------------------------------
# Fine-tuning: keys that are taken from another run

NOT_FOR_LABELS = {
    "tokenizer": {"shared", "target_kind"},
    "model": {"decoder_layers", "tie_embeddings", "tie_output", "output_bias"},
}
"""Keys that a task with labels does not take from another run, of which it uses the encoder only."""


def _inherit(values: dict[str, Any]) -> None:
    """Take the keys of tokenizer and model that are left out from the run ``training.init_from``.

    If the run does not exist, nothing is taken: a run that is resumed has a complete recipe and does not need it.
    """
    training = values.get("training")
    run = training.get("init_from") if isinstance(training, Mapping) else None
    path = Path(run) / "recipe.yaml" if isinstance(run, str) else None
    sections: dict[str, type[Section]] = {"tokenizer": TokenizerConfig, "model": ModelConfig}
    if path is None or not path.is_file():
        return
    if all(_is_complete(values.get(name), section) for name, section in sections.items()):
        return
    base_recipe = load_recipe(path)
    task = values.get("task", "translation")
    choice = find_registry("task").choices.get(task) if isinstance(task, str) else None
    for name in sections:
        section_values = {} if values.get(name) is None else values[name]
        if choice is None or not isinstance(section_values, Mapping):
            return  # validation reports it
        ignored = {key.partition(".")[2] for key in choice.ignores if key.startswith(f"{name}.")}
        if choice.value.has_labels:
            ignored |= NOT_FOR_LABELS[name]
        values[name] = _merged(getattr(base_recipe, name).model_dump(), section_values, ignored)


def _is_complete(values: Any, section: type[Section]) -> bool:
    """Whether a section has all keys, as in the recipe of a run."""
    return isinstance(values, Mapping) and values.keys() >= section.model_fields.keys()


def _merged(base: dict[str, Any], changes: Mapping[str, Any], ignored: set[str]) -> dict[str, Any]:
    """The section of another run, with the changes of the recipe.

    Ignored keys are left out, and so are keys whose defaults depend on a changed key.
    """
    if changes.get("preset", base.get("preset")) != base.get("preset"):
        return dict(changes)  # another model; it is compared with the run later
    if "dropout" in changes:
        ignored = ignored | {"attention_dropout", "activation_dropout"}
    merged = dict(changes)
    for key, base_value in base.items():
        if key not in changes and key not in ignored:
            merged[key] = base_value
        if isinstance(base_value, dict) and isinstance(merged.get(key), Mapping):
            hidden = {name.removeprefix(f"{key}.") for name in ignored}
            inherited = {name: value for name, value in base_value.items() if name not in hidden}
            merged[key] = {**inherited, **changes.get(key, {})}
    return merged


def override_decoding(decoding: DecodingConfig, changes: Mapping[str, Any]) -> DecodingConfig:
    """The decoding section with some values changed, validated like a recipe's."""
    try:
        return DecodingConfig.model_validate({**decoding.model_dump(), **changes})
    except ValidationError as error:
        errors = [{**details, "loc": ("decoding", *details["loc"])} for details in error.errors()]
        raise RegardError("; ".join(_explain(details, {}) for details in errors)) from None  # type: ignore[arg-type]


def decoding_overrides(changes: Sequence[str]) -> dict[str, Any]:
    """Parse the ``key=value`` options of a command into values of the section ``decoding``."""
    values: dict[str, Any] = {}
    for change in changes:
        key, equals, _ = change.partition("=")
        if not equals or not key.strip() or "." in key:
            raise RegardError(
                f"--set {change}: expected key=value with a key of the recipe's decoding section, for example beam=5"
            )
        _apply(values, change)
    return values


def _causes(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """The errors without those that are caused by another error."""
    causes = [details for details in errors if details["loc"][-1:] not in DERIVED_KEYS]
    fractions = [details for details in errors if _is_fraction(details)]
    return causes + fractions[:1] or errors


def _is_fraction(details: ErrorDetails) -> bool:
    """Whether the error is that heads does not divide d_model."""
    return details["type"] == "int_from_float" and details["loc"][-1:] in DERIVED_KEYS


def _remove(values: dict[str, Any], details: ErrorDetails) -> bool:
    """Remove a wrong value; False if there is none to remove."""
    *sections, key = map(str, details["loc"] or [""])
    for name in sections:
        if not isinstance(values.get(name), dict):
            return False
        values = values[name]
    if _is_fraction(details):
        values |= {"d_k": 1, "d_v": 1}
        return True
    return values.pop(key, values) is not values


def _apply(values: dict[str, Any], change: str) -> tuple[str, ...]:
    """Apply a change ``a.b=c``, where c is YAML, and return the changed location."""
    key, equals, text = change.partition("=")
    location = tuple(key.strip().split("."))
    if not equals or not all(location):
        raise RegardError(
            f"--set {change}: expected section.key=value, for example training.steps=500"
        )
    try:
        value = load_yaml(text)
    except (yaml.YAMLError, ValueError):
        raise RegardError(f"--set {_shorten(change)}: the value is not YAML") from None
    except _LimitError as error:
        raise RegardError(f"--set {_shorten(change)}: {error}") from None
    section = values
    for name in location[:-1]:
        subsection = section.get(name)
        section[name] = subsection = dict(subsection) if isinstance(subsection, dict) else {}
        section = subsection
    section[location[-1]] = value
    return location


def _is_changed(details: ErrorDetails, changed: Sequence[tuple[str, ...]]) -> bool:
    """Whether the wrong value comes from ``--set``."""
    location = tuple(str(name) for name in details["loc"])
    return any(location[: len(prefix)] == prefix for prefix in changed)


class _DuplicateKeyError(Exception):
    """A key that occurs twice. YAML would silently use the last one."""


def _lines(node: yaml.Node | None, parent: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    """The line number of each key."""
    lines: dict[tuple[str, ...], int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            location, line = (*parent, str(key.value)), key.start_mark.line + 1
            if location in lines:
                raise _DuplicateKeyError(
                    f"{'.'.join(location)} is on line {lines[location]} and again on line {line}"
                )
            lines[location] = line
            lines |= _lines(value, location)
    return lines


def _explain(details: ErrorDetails, lines: Mapping[tuple[str, ...], int]) -> str:
    """One problem as a line of text: line number, key, what is wrong, what is allowed."""
    location = tuple(str(name) for name in details["loc"])
    # An element of a list is on the line of its list.
    named = tuple(str(name) for name in details["loc"] if isinstance(name, str))
    line = lines.get(named[:-1] if _is_fraction(details) else named)
    start = f"line {line}: " if line else ""
    key = _shorten(".".join(location))
    if details["type"] == "extra_forbidden":
        if key in RENAMED_KEYS:
            return start + _renamed(key, details["input"])
        return f"{start}unknown key {key}{suggest(_shorten(location[-1]), _keys(location[:-1]))}"
    if details["type"] == "missing":
        if isinstance(number := details["loc"][-1], int):
            return f"{start}{_shorten('.'.join(location[:-1]))}: value {number + 1} is missing"
        return f"{start}{key} is missing"
    if _is_fraction(details):
        return (
            f"{start}model.heads does not divide model.d_model: {details['input']:.2f} features per "
            "head; change one of them, or set d_k and d_v"
        )
    renamed = RENAMED_VALUES.get(".".join(named), {})
    if details["type"] == "choice" and str(details["input"]) in renamed:
        return f"{start}{key}: {details['input']} was renamed to {renamed[str(details['input'])]}"
    message = details["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    message = shorten(PLAIN_MESSAGES.get(details["type"], message), 1000)
    if details["type"] == "too_short":
        message = f"must have at least {details['ctx']['min_length']} value(s)"
    if details["type"] == "value_error":
        return f"{start}{key}: {message}" if key else f"{start}{message}"
    return f"{start}{key}: {abbreviate(details['input'])} {message}"


PLAIN_MESSAGES = {
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type"), "must be a section of keys"
    ),
    **dict.fromkeys(("tuple_type", "list_type"), "must be a list"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
}
"""Messages by pydantic's error type. They replace messages that name a Python type or pydantic's parser."""
SHOWN_CHARACTERS = 80


def abbreviate(value: object) -> str:
    """A value as it is shown in an error message: one line, not longer than ``SHOWN_CHARACTERS``."""
    if isinstance(value, str):
        value = _shorten(value)
    elif isinstance(value, Mapping | Sequence) and len(value) > SHOWN_CHARACTERS:
        return f"{len(value):,} values"
    try:
        text = repr(value) if isinstance(value, str) else as_written(value)
    except ValueError:  # an integer with thousands of digits
        return "a number that is too long"
    return _shorten(" ".join(text.split()))


def _shorten(text: str) -> str:
    return shorten(text, SHOWN_CHARACTERS)


def _renamed(key: str, value: object) -> str:
    """The new name of a key and, for a section, of the keys in it."""
    old_keys = [f"{key}.{name}" for name in value] if isinstance(value, Mapping) else []
    renamed = {old: RENAMED_KEYS[old] for old in old_keys if old in RENAMED_KEYS}
    names = [f"{key} was renamed to {RENAMED_KEYS[key]}"]
    return ", ".join([*names, *(f"{old} to {new}" for old, new in renamed.items())])


def _keys(location: tuple[str, ...]) -> Sequence[str]:
    """The keys of the section at a location."""
    section: Any = Recipe
    for name in location:
        annotation = section.model_fields[name].annotation
        section = next(
            candidate
            for candidate in (annotation, *get_args(annotation))
            if isinstance(candidate, type) and issubclass(candidate, Section)
        )
    return list(section.model_fields)


def parse_choice(names: Iterable[Name], value: str, option: str) -> Name:
    """The given name, if it is one of the allowed names of a command-line option."""
    names_by_text = {str(name): name for name in names}
    if value not in names_by_text:
        raise RegardError(f"{option} {value}: unknown name{suggest(value, names_by_text)}")
    return names_by_text[value]


def suggest(word: str, allowed: Mapping[str, Any] | Sequence[str]) -> str:
    """“; did you mean X?”, or the list of allowed names if none is close."""
    near = _nearest(word, allowed)
    return f"; did you mean {near}?" if near else f"; allowed: {', '.join(allowed)}"


def _nearest(word: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that is most similar, if one is close."""
    return next(iter(difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)), None)
