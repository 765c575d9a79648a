"""Names in the source: a class name means one thing, and no module has a name that says nothing."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "regard"


def test_no_class_name_is_used_twice() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path.relative_to(SOURCE).as_posix())
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_there_are_no_modules_beside_the_packages() -> None:
    assert sorted(path.name for path in SOURCE.glob("*.py")) == [
        "__init__.py",
        "__main__.py",
        "errors.py",
    ]
