"""The generated page of choices is the one the code would write now, and every part has its place in the book."""

import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import load_script

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return load_script("docs/make_choices.py")


def test_the_page_of_choices_is_up_to_date(maker: ModuleType) -> None:
    written = (DOCS / "choices.md").read_text(encoding="utf-8")
    assert written == maker.document(), "run  python docs/make_choices.py"


def test_no_choice_goes_without_its_formula(maker: ModuleType) -> None:
    assert not re.findall(r".*–.*", maker.document())


def test_every_choice_has_its_paragraph(maker: ModuleType) -> None:
    """With a recipe line to try it, or the line that says it is the default."""
    book = (DOCS / "parts.md").read_text(encoding="utf-8")
    parts = [choice for choice in maker.CHOICES if choice.facts and choice.names is not None]
    missing = [
        f"{key}={name}"
        for choice in parts
        for key in choice.keys
        for name in maker.names_of(choice, key)
        if f"`{key}={name}`" not in book
    ]
    assert not missing
