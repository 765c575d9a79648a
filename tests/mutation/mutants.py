"""Mutants: changes of the source code that a test should notice.

``named.yaml`` has mistakes written by hand. ``sampling.py`` draws others at random.
"""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    """relative to the root of the repository"""
    name: str
    """the operator and how many times it applies before, or the name of a mistake"""
    line: int
    """the first line that changes, counted from 1"""
    code: str
    """the whole file, changed"""

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.file}\0{self.code}".encode()).hexdigest()[:16]

    @property
    def diff(self) -> list[str]:
        """The lines that change."""
        before = (ROOT / self.file).read_text(encoding="utf-8").splitlines()
        lines = difflib.unified_diff(before, self.code.splitlines(), n=0, lineterm="")
        return [line for line in lines if line[:3] not in ("---", "+++", "@@ ")]


def named_mutants() -> list[Mutant]:
    """The mistakes in named.yaml."""
    mutants = []
    for entry in yaml.safe_load(Path(__file__).with_name("named.yaml").read_text("utf-8")):
        source = read_source(entry["file"])
        old, new = (entry[key].rstrip("\n") for key in ("old", "new"))
        assert source.count(old) == 1, f"{entry['name']}: {entry['file']} has changed"
        line = source[: source.index(old)].count("\n") + 1
        code = source.replace(old, new)
        mutants.append(Mutant(entry["file"], entry["name"], line, code))
    return mutants


@cache
def read_source(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")
