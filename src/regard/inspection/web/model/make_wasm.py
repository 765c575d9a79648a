"""Compile matmul.wat into matmul_wasm.js: python src/regard/inspection/web/model/make_wasm.py

Needs the package wasmtime, which make install installs. A test compares the file with a new build.
"""

from __future__ import annotations

import base64
from pathlib import Path

from wasmtime import wat2wasm

HERE = Path(__file__).parent


def module() -> str:
    """The JavaScript module with the compiled code."""
    code = base64.b64encode(wat2wasm((HERE / "matmul.wat").read_text(encoding="utf-8"))).decode()
    lines = [f'  "{code[start : start + 110]}",' for start in range(0, len(code), 110)]
    return "\n".join(
        [
            "/** The WebAssembly code of matmul.wat in base64, written by make_wasm.py. */",
            "export const MATMUL_WASM = [",
            *lines,
            '].join("");',
            "",
        ]
    )


if __name__ == "__main__":
    (HERE / "matmul_wasm.js").write_text(module(), encoding="utf-8")
