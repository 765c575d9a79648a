"""The Markdown files: short lines, no private references; every link, file, command, option and recipe key exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from regard.cli.main import app
from regard.recipe import Recipe
from regard.recipe.validation import Section

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "lab").glob("*.md")),
]
SOURCES = [
    *(
        path
        for path in sorted((ROOT / "src").rglob("*"))
        if path.suffix in {".py", ".js", ".css", ".html"}
    ),
    *(page for page in PAGES if page.name != "CHANGELOG.md"),
]
LONGEST_LINE = 120
PRIVATE = re.compile(r"\bthe notes\b|\bthe mission\b|\bworked example", re.IGNORECASE)
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
NOT_PROSE = ("|", "<", "![", "$$", "#")
"""what lines of tables, HTML, images, formulas and headings begin with"""
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
SOURCE_FILE = re.compile(
    r"`((?:recipe|data|nn|decoding|inference|tasks|metrics|training|inspection|interop|server|storage|documents|demo|experiments|bench|cli)"
    r"/[\w/]+\.(?:py|js))`"
)
ROOT_FILE = re.compile(
    r"`?\b((?:src/regard|tests|benchmarks|docs|recipes)/[\w/.-]+\.(?:py|js|md|yaml|json))\b"
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """The lines of prose, with their numbers."""
    text = page.read_text(encoding="utf-8")
    text = FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(text.split("\n"), start=1):
        # A long word, such as a link or a command, cannot be broken.
        code, text = line.startswith("    "), line.strip()
        if not code and not text.startswith(NOT_PROSE) and " " in text.strip("-*( "):
            yield number, line


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_page_has_a_line_that_is_still_to_be_written(page: Path) -> None:
    """A word such as SOME_FIGURES alone on a line stands for a text that was never written."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    assert not re.findall(r"^(?:[A-Z]+(?:_[A-Z]+)+|TODO\b.*|TBD)$", text, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_line_of_prose_is_long(page: Path) -> None:
    long = [
        f"{name(page)}:{number}: {len(line)}"
        for number, line in prose(page)
        if len(line) > LONGEST_LINE
    ]
    assert not long


def test_there_are_no_private_references() -> None:
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1)
        if PRIVATE.search(line)
    ]
    assert not found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_resolves(page: Path) -> None:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    targets = [link or image for link, image in LINK.findall(text)]
    assert not [target for target in targets if not resolves(page, target)]


def resolves(page: Path, target: str) -> bool:
    file, _, anchor = target.partition("#")
    path = page.parent / file if file else page
    return path.exists() and (not anchor or anchor in anchors(path))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_file_that_is_named_exists(page: Path) -> None:
    """Except in the changelog, whose older entries name files of their time, and in examples."""
    if page.name == "CHANGELOG.md":
        pytest.skip("entries are of their time")
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    named = [
        *(f"src/regard/{file}" for file in SOURCE_FILE.findall(text)),
        *ROOT_FILE.findall(text),
    ]
    assert not [file for file in named if not (ROOT / file).exists()]


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert not [page for page in pages if f"]({page})" not in index]


CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]
COMMAND = re.compile(
    r"(?:^|[ `(])(?:-m )?regard ([a-z]+(?: translate| train| check| clean| score| convert)?)((?: [^`\n#|]*)?)",
    re.MULTILINE,
)
KEY = re.compile(
    r"(?<![\w./])((?:data|tokenizer|model|training|decoding|evaluation)(?:\.[a-z_]+)+)(?![\w(/*.]*[(/*\w])"
)
NOT_KEYS = {
    "model.safetensors",
    "model.trace",
    "model.translate",
    "training.warmpu",
    "decoding.min_length",
}
"""files and methods; the typo of README's example; the option that docs/architecture.md adds"""
COMMANDS: Any = typer.main.get_command(app)


def parameters(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts} | {"--help"}


@pytest.mark.parametrize("page", CURRENT, ids=name)
def test_every_command_and_option_exists(page: Path) -> None:
    wrong = []
    for words, arguments in COMMAND.findall(page.read_text(encoding="utf-8").replace("\\\n", " ")):
        command: Any = COMMANDS
        for word in [*words.split(), *arguments.split()[:1]]:
            command = getattr(command, "commands", {}).get(word, command)
        default = getattr(command, "default_command", None)
        command = command.commands[default] if default else command
        if command is COMMANDS:
            continue  # prose: "the command regard has …"
        options = re.findall(r"(?<![\w-])--[a-z][a-z-]+", arguments)
        wrong += [f"regard {words} {one}" for one in options if one not in parameters(command)]
    assert not wrong


@pytest.mark.parametrize("page", CURRENT, ids=name)
def test_every_recipe_key_exists(page: Path) -> None:
    keys = set(KEY.findall(page.read_text(encoding="utf-8"))) - NOT_KEYS
    assert not sorted(key for key in keys if not key.endswith(".md") and not is_key(key))


def is_key(key: str) -> bool:
    section: Any = Recipe
    for part in key.split("."):
        if section is None or part not in section.model_fields:
            return False
        annotation = section.model_fields[part].annotation
        kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
        section = next((kind for kind in kinds if issubclass(kind, Section)), None)
    return True
