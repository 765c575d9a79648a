"""constraints.txt pins everything that CI installs, and names no machine."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"([a-z0-9-]+)==([0-9][\w.]*)")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [PIN.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(found), "constraints.txt: a line is not NAME==VERSION"
    return {match[1]: match[2] for match in found if match}


def required() -> set[str]:
    """The packages of ``pip install -e '.[dev]'``, as far as they are installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    names = [*project["dependencies"]]
    own = next(Requirement(one) for one in extras["dev"] if one.startswith("regard["))
    for extra in ("dev", *own.extras):
        names += [one for one in extras[extra] if not one.startswith("regard[")]
    found: dict[tuple[str, frozenset[str]], None] = {}
    waiting = [Requirement(name) for name in names]
    while waiting:
        requirement = waiting.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in found:
            continue
        found[key] = None
        try:
            needed = metadata.requires(key[0]) or []
        except metadata.PackageNotFoundError:
            continue
        for one in map(Requirement, needed):
            marker = one.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in ("", *key[1])):
                waiting.append(one)
    return {name for name, _ in found}


def test_every_package_that_ci_installs_is_pinned() -> None:
    missing = sorted(required() - {*pins()})
    assert not missing, f"constraints.txt does not pin {', '.join(missing)}; run  make lock"


def test_every_pin_is_allowed_by_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(one for extra in extras for one in extra)]
    pinned = pins()
    for one in map(Requirement, wanted):
        name = canonicalize_name(one.name)
        if name in pinned:
            assert one.specifier.contains(pinned[name]), f"{one} does not allow {pinned[name]}"
