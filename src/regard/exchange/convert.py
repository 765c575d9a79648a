"""The formats by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from regard.errors import RegardError
from regard.exchange.bundle import export_bundle
from regard.exchange.ctranslate2 import export_ctranslate2
from regard.exchange.huggingface import export_huggingface, import_huggingface
from regard.exchange.onnx import export_onnx
from regard.exchange.pytorch import export_torch, import_torch
from regard.recipe import nearest

IMPORTS: dict[str, Callable[[Path, Path, Path | None], list[str]]] = {
    "huggingface": import_huggingface,
    "torch": import_torch,
}
EXPORTS: dict[str, Callable[[Path, Path], list[str]]] = {
    "huggingface": export_huggingface,
    "ctranslate2": export_ctranslate2,
    "ctranslate2-int8": partial(export_ctranslate2, quantization="int8"),
    "onnx": export_onnx,
    "torch": export_torch,
    "bundle": export_bundle,
}


def import_model(what: Path, kind: str, out: Path, like: Path | None = None) -> list[str]:
    """Make a run folder of a model from elsewhere; lines that say what was proved."""
    if kind not in IMPORTS:
        raise RegardError(f"--from {kind}: no such format{nearest(kind, IMPORTS)}")
    return IMPORTS[kind](what, out, like)


def export_model(run: Path, kind: str, out: Path) -> list[str]:
    """Write a run for others to open; lines that say what was proved."""
    if kind not in EXPORTS:
        raise RegardError(f"--to {kind}: no such format{nearest(kind, EXPORTS)}")
    return EXPORTS[kind](run, out)
