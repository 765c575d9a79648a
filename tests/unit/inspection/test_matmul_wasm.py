"""The WebAssembly code of the page is what its source compiles to."""

import runpy
from pathlib import Path

import pytest

from regard.inspection.html_page import WEB


def test_the_code_is_a_build_of_the_source() -> None:
    pytest.importorskip("wasmtime", reason="wasmtime is not installed")
    module = runpy.run_path(str(Path(WEB, "model", "make_wasm.py")))["module"]
    checked_in = (WEB / "model" / "matmul_wasm.js").read_text(encoding="utf-8")
    assert module() == checked_in, "run python src/regard/inspection/web/model/make_wasm.py"
