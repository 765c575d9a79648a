"""Reading a recipe: YAML in, a checked ``Recipe`` or every problem at once out.

Unknown keys and bad values are reported with their line and what is allowed.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from regard.errors import RegardError
from regard.recipe.sections import DERIVED, Recipe, Search, Section

Name = TypeVar("Name", bound=str)


class _Loader(yaml.SafeLoader):
    """As YAML 1.2 has it: 1e3 is a number, point or no point."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+\Z"), list("-+0123456789")
)


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with Regard, by name: inside an installed package, or in the repository."""
    package = Path(__file__).parents[1]
    inside, beside = package / "recipes", package.parents[1] / "recipes"
    folder = inside if inside.is_dir() else beside
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(name: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a YAML file, or a shipped recipe by name, with ``a.b=c`` changes on top."""
    path = Path(name)
    if not path.is_file():
        shipped = shipped_recipes()
        if str(name) not in shipped:
            if (path / "recipe.yaml").is_file():
                raise RegardError(
                    f"{path}: a run folder, not a recipe; to go on with it: "
                    f"regard train {path / 'recipe.yaml'} --out {path}"
                )
            raise RegardError(
                f"{name}: no such file, and no recipe of that name{nearest(str(name), shipped)}"
            )
        path = shipped[str(name)]
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RegardError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise RegardError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_recipe(text, str(path), changes)


def parse_recipe(text: str, where: str, changes: Sequence[str] = ()) -> Recipe:
    try:
        lines = _lines(yaml.compose(text, Loader=_Loader))
        values = yaml.load(text, Loader=_Loader)
    except _RepeatedError as error:
        raise RegardError(f"{where}: {error}") from None
    except RecursionError:
        raise RegardError(f"{where}: not a recipe: an alias in it contains itself") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        raise RegardError(f"{where}:{line} not YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(values, dict):
        raise RegardError(
            f"{where}: a recipe has sections (data, tokenizer, model, …), this file has none"
        )
    return make_recipe(values, where, changes, lines)


def make_recipe(
    values: dict[str, Any],
    where: str,
    changes: Sequence[str] = (),
    lines: Mapping[tuple[str, ...], int] = MappingProxyType({}),
) -> Recipe:
    """Check plain values; lines tells on which line of the file each key stands."""
    values = copy.deepcopy(values)
    for change in changes:
        location = _apply(values, change)
        lines = {at: line for at, line in lines.items() if at[: len(location)] != location}
    problems: list[str] = []
    while True:
        try:
            recipe = Recipe.model_validate(values)
            break
        except ValidationError as error:
            found = _causes(error.errors())
            problems += [_explain(details, lines) for details in found]
            # What is wrong is left out, so that what else is wrong comes to light at once.
            left_out = [_leave_out(values, details) for details in found]
            if not all(left_out):
                break
    if not problems:
        return recipe
    if len(problems) == 1:
        raise RegardError(f"{where}: {problems[0]}")
    listing = "".join(f"\n  {problem}" for problem in problems)
    raise RegardError(f"{where}: {len(problems)} problems:{listing}")


def change_search(search: Search, changes: Mapping[str, Any]) -> Search:
    """The section with some values changed, checked as a recipe's."""
    try:
        return Search.model_validate({**search.model_dump(), **changes})
    except ValidationError as error:
        problems = [_explain({**one, "loc": ("search", *one["loc"])}, {}) for one in error.errors()]
        raise RegardError("; ".join(problems)) from None


def search_changes(changes: Sequence[str]) -> dict[str, Any]:
    """``key=value`` of the section search, as they are given to a command."""
    values: dict[str, Any] = {}
    for change in changes:
        key, equals, _ = change.partition("=")
        if not equals or not key.strip() or "." in key:
            raise RegardError(
                f"--set {change}: write it as key=value, for example beam=5; "
                "the keys are those of the recipe's section search"
            )
        _apply(values, change)
    return values


def _causes(found: list[ErrorDetails]) -> list[ErrorDetails]:
    """What follows from another value is wrong only because that one is."""
    causes = [details for details in found if details["loc"][-1:] not in DERIVED]
    fractions = [details for details in found if _is_fraction(details)]
    return causes + fractions[:1] or found


def _is_fraction(details: ErrorDetails) -> bool:
    """Whether it is width / heads, where the one does not divide the other."""
    return details["type"] == "int_from_float" and details["loc"][-1:] in DERIVED


def _leave_out(values: dict[str, Any], details: ErrorDetails) -> bool:
    """Take a wrong value out of the values; False if there is none to take."""
    *sections, key = map(str, details["loc"] or [""])
    for name in sections:
        if not isinstance(values.get(name), dict):
            return False
        values = values[name]
    if _is_fraction(details):
        values |= {"key_width": 1, "value_width": 1}
        return True
    return values.pop(key, values) is not values


def _apply(values: dict[str, Any], change: str) -> tuple[str, ...]:
    """Put one ``a.b=c`` into the values; c is read as YAML. Returns where it went."""
    key, equals, text = change.partition("=")
    location = tuple(key.strip().split("."))
    if not equals or not all(location):
        raise RegardError(
            f"--set {change}: write it as section.key=value, for example training.steps=500"
        )
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise RegardError(f"--set {change}: the value is not YAML") from None
    section = values
    for name in location[:-1]:
        inner = section.get(name)
        section[name] = inner = dict(inner) if isinstance(inner, dict) else {}
        section = inner
    section[location[-1]] = value
    return location


class _RepeatedError(Exception):
    """A key that stands twice; YAML would take the last one without a word."""


def _lines(node: yaml.Node | None, at: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    """The line on which each key stands."""
    found: dict[tuple[str, ...], int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place, line = (*at, str(key.value)), key.start_mark.line + 1
            if place in found:
                raise _RepeatedError(
                    f"{'.'.join(place)} stands on line {found[place]} and again on {line}"
                )
            found[place] = line
            found |= _lines(value, place)
    return found


def _explain(details: ErrorDetails, lines: Mapping[tuple[str, ...], int]) -> str:
    """One problem in words: line, key, what is wrong, what is allowed."""
    location = tuple(str(part) for part in details["loc"])
    # An element of a list stands on the line of its list.
    named = tuple(str(part) for part in details["loc"] if isinstance(part, str))
    line = lines.get(named[:-1] if _is_fraction(details) else named)
    start = f"line {line}: " if line else ""
    key = ".".join(location)
    if details["type"] == "extra_forbidden":
        return f"{start}unknown key {key}{nearest(location[-1], _keys(location[:-1]))}"
    if details["type"] == "missing":
        return f"{start}{key} is missing"
    if _is_fraction(details):
        return (
            f"{start}model.width is not divisible by model.heads: {details['input']:.2f} features a "
            "head; change one of them, or give key_width and value_width"
        )
    message = details["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if details["type"] == "value_error":
        return f"{start}{key}: {message}" if key else f"{start}{message}"
    return f"{start}{key}: {details['input']!r} {message}"


def _keys(location: tuple[str, ...]) -> Sequence[str]:
    """The keys allowed in the section at this place."""
    section: Any = Recipe
    for name in location:
        annotation = section.model_fields[name].annotation
        section = next(
            part
            for part in (annotation, *get_args(annotation))
            if isinstance(part, type) and issubclass(part, Section)
        )
    return list(section.model_fields)


def one_of(names: Iterable[Name], value: str, option: str) -> Name:
    """The name that was given, if it is one of these."""
    known = {str(name): name for name in names}
    if value not in known:
        raise RegardError(f"{option} {value}: no such name{nearest(value, known)}")
    return known[value]


def nearest(word: str, allowed: Mapping[str, Any] | Sequence[str]) -> str:
    """“; did you mean X?”, or the whole list when nothing is near."""
    close = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f"; allowed: {', '.join(allowed)}"
