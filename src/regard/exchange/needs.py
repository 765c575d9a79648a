"""Packages of other people, asked for only when a conversion needs them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from regard.errors import RegardError


def need(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise RegardError(f"this needs {error.name}: pip install 'regard[exchange]'") from None
