"""Writes docs/choices.md: the names that a recipe can select, from the registries.

    python docs/make_choices.py

Everything comes from the code: the keys and registries from ``regard.recipe.registry``, the description of a key from
the recipe schema, and the summary, options and supported features of a name from its registration. A test fails if the
page is not up to date.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from regard.data.formats import INPUT_FORMATS
from regard.data.formats.writers import OUTPUT_FORMATS
from regard.data.quality import QUALITY_RULES, threshold_names
from regard.recipe import PRESETS, Recipe
from regard.recipe.registry import LOCATIONS, allowed_names, find_registry
from regard.recipe.schema import Section

FILE = Path(__file__).parent / "choices.md"
HEAD = """# Choices

This page lists every name that a recipe can select. Write the name in a recipe, or set it on the command line:

    regard train multi30k --set model.position=rotary

This page is generated from the code by `python docs/make_choices.py`. [Components](parts.md) has formulas, shapes and
measurements. The columns:

- **reads**: recipe keys that have an effect only with this choice. Without it, they are refused.
- **packed training**: works with `training.batching: packed`. Without it, batches are padded.
- **packed inference**: works with packed weights, which int8 needs. Without it, the plain network is used.
- **export**: the export formats that can represent it.
"""


def document() -> str:
    """The whole page."""
    sections = [*(_section(keys) for keys in grouped_keys()), _presets()]
    sections += [_input_formats(), _output_formats(), _quality_rules()]
    return HEAD + "".join(f"\n{section}" for section in sections)


def grouped_keys() -> list[list[str]]:
    """The recipe keys; keys that share a registry are together."""
    groups: dict[str, list[str]] = {}
    for key, location in LOCATIONS.items():
        groups.setdefault(location, []).append(key)
    return list(groups.values())


def _section(keys: Sequence[str]) -> str:
    registry = find_registry(keys[0])
    choices = list(registry.choices.values())
    columns: dict[str, list[str]] = {"name": [f"`{one.name}`" for one in choices]}
    if len(keys) > 1:
        columns["keys"] = [_keys_of(one.name, keys) for one in choices]
    columns["what it is"] = [one.summary for one in choices]
    optional = {
        "reads": [_code(one.options) for one in choices],
        "packed training": [_yes(one.packed_batches) for one in choices],
        "packed inference": [_yes(one.fast_inference) for one in choices],
        "export": [", ".join(one.formats) for one in choices],
    }
    columns |= {heading: cells for heading, cells in optional.items() if any(cells)}
    lines = [f"## {', '.join(f'`{key}`' for key in keys)}", "", *map(describe, keys), ""]
    return "\n".join([*lines, *_table(columns)]) + "\n"


def describe(key: str) -> str:
    """A key with its description and default, from the schema."""
    section: Any = Recipe
    *outer, last = key.split(".")
    for name in outer:
        annotation = section.model_fields[name].annotation
        parts = (annotation, *get_args(annotation))
        section = next(
            part for part in parts if isinstance(part, type) and issubclass(part, Section)
        )
    field = section.model_fields[last]
    description = f": {' '.join(field.description.split())}" if field.description else ""
    default = field.default
    names = default if isinstance(default, tuple) else (default,)
    shown = ", ".join(f"`{name}`" for name in names) or "none"
    text = f"- `{last}`{description} (default: {shown})".replace("``", "`")
    return textwrap.fill(text, 120, subsequent_indent="  ", break_on_hyphens=False)


def _keys_of(name: str, keys: Sequence[str]) -> str:
    """The keys at which a name is allowed."""
    return ", ".join(key.rpartition(".")[2] for key in keys if name in allowed_names(key))


def _yes(value: bool) -> str:
    return "yes" if value else ""


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(columns: dict[str, list[str]]) -> Iterator[str]:
    """A Markdown table; columns by their headings."""
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for cells in zip(*columns.values(), strict=True):
        yield f"| {' | '.join(map(_escape, cells))} |"


def _escape(cell: str) -> str:
    """The cell without characters that have a meaning in a Markdown table."""
    return cell.replace("``", "`").replace("|", "&#124;").replace("<", "&lt;")


def _presets() -> str:
    keys = list(next(iter(PRESETS.values())))
    columns = {"name": [f"`{name}`" for name in PRESETS]}
    columns |= {f"`{key}`": [str(sizes[key]) for sizes in PRESETS.values()] for key in keys}
    lines = ["## `model.preset`", "", describe("model.preset"), "", *_table(columns)]
    return "\n".join(lines) + "\n"


def _input_formats() -> str:
    choices = INPUT_FORMATS.choices.values()
    columns = {
        "format": [f"`{one.name}`" for one in choices],
        "keys of `data.train`": [_code(one.value.keys) for one in choices],
        "file names end in": [_code(one.value.suffixes) for one in choices],
        "what it is": [one.summary for one in choices],
    }
    text = "Text files may be compressed: `.gz`, `.zst` or `.xz`. [Your data](your_data.md) has examples."
    return "\n".join(["## Input formats", "", text, "", *_table(columns)]) + "\n"


def _output_formats() -> str:
    choices = OUTPUT_FORMATS.choices.values()
    columns = {
        "format": [f"`{one.name}`" for one in choices],
        "file names end in": [_code(one.value.suffixes) for one in choices],
        "what it is": [one.summary for one in choices],
    }
    text = (
        "`regard data clean` and `regard data convert` write these formats. With two file names, they write two "
        "parallel text files."
    )
    return (
        "\n".join(["## Output formats", "", *textwrap.wrap(text, 120), "", *_table(columns)]) + "\n"
    )


def _quality_rules() -> str:
    choices = QUALITY_RULES.choices.values()
    columns = {
        "rule": [f"`{one.name}`" for one in choices],
        "what it finds": [one.summary for one in choices],
        "thresholds": [", ".join(_thresholds(one.name)) for one in choices],
        "dropped": [_yes(one.value.rejects) for one in choices],
    }
    text = (
        "What `regard data check` reports and, if *dropped*, `regard data clean` drops. `--set ratio.max_ratio=4` sets "
        "a threshold, `--skip ratio` turns a rule off."
    )
    lines = ["## Quality rules", "", *textwrap.wrap(text, 120), "", *_table(columns)]
    return "\n".join(lines) + "\n"


def _thresholds(rule: str) -> list[str]:
    kind = QUALITY_RULES[rule]
    defaults = kind()
    return [f"`{name}` {getattr(defaults, name)}" for name in threshold_names(kind)]


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
    print(FILE)
