"""A trace, or a model, as one self-contained HTML file.

Browsers do not load ES modules from ``file://``, so the page's modules are bundled into one script: each becomes a
function that is called once, in the order of the imports. Only import and export lines are rewritten, and only the two
forms below are supported; any other form is an error.
"""

from __future__ import annotations

import base64
import hashlib
import json
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.inspection import packed_text
from regard.inspection.trace import Trace

WEB = Path(__file__).parent / "web"

_IMPORT = re.compile(r'^import \{([^{}]*)\} from "(\.{1,2}/[^"]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_UNSUPPORTED = re.compile(r"^\s*(?:import|export)\b.*$", re.MULTILINE)
_ELEMENT_END = re.compile(r"</(?:script|style)|<!--", re.IGNORECASE)
_UNSAFE = re.compile("[<>&\u2028\u2029]")

_STYLE = '<link rel="stylesheet" href="style.css">'
_SCRIPT = '<script type="module" src="main.js"></script>'
_CHARSET = '<meta charset="utf-8">'


def page(trace: Trace) -> str:
    """The page of a trace as HTML, with style, script and trace inside."""
    return _document([_data("application/json", "trace", embed(trace.to_json("file")))])


def model_page(model: Mapping[str, Any], weights: bytes) -> bytes:
    """The page with a model inside, which translates what is typed; arguments: ``interop/html_export.py``."""
    texts = {
        "model": json.dumps(model, allow_nan=False),
        "worker": _bundled("model/worker.js"),
        "script": _bundled("main.js"),
    }
    packed = {id: packed_text.deflate(text.encode("utf-8")) for id, text in texts.items()}
    data = [
        _data("text/plain", id, packed_text.pack(each))
        for id, each in (packed | {"weights": weights}).items()
    ]
    # The first script runs that of the page (strict-dynamic). The model runs in a worker whose code comes from the
    # file, with products in WebAssembly.
    html = _document(
        data, "packed_script.js", " 'strict-dynamic' 'wasm-unsafe-eval'", "worker-src blob:; "
    )
    # The byte order mark declares the encoding. A meta element cannot declare UTF-16.
    return html.replace(f"{_CHARSET}\n", "", 1).encode(packed_text.ENCODING)


def _data(kind: str, id: str, text: str) -> str:
    """A script element that holds data."""
    assert not _ELEMENT_END.search(text), "the text would end its own element"
    return f'<script type="{kind}" id="{id}">{text}</script>'


def _bundled(entry: str) -> str:
    return bundle(entry, lambda name: (WEB / name).read_text(encoding="utf-8"))


def _document(
    data: Sequence[str], entry: str = "main.js", scripts: str = "", others: str = ""
) -> str:
    """The page as one file. scripts, others: what its content security policy allows besides its own script."""
    style, script = (WEB / "style.css").read_text(encoding="utf-8"), _bundled(entry)
    assert not _ELEMENT_END.search(style + script), "the text would end its own element"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'{scripts}; style-src '{_hash(style)}'; "
        f"{others}img-src data:; base-uri 'none'; form-action 'none'"
    )
    html = (WEB / "index.html").read_text(encoding="utf-8")
    for old, new in {
        _CHARSET: f'{_CHARSET}\n    <meta http-equiv="content-security-policy" content="{policy}">',
        _STYLE: f"<style>{style}</style>",
        _SCRIPT: "\n    ".join([*data, f"<script>{script}</script>"]),
    }.items():
        before, separator, after = html.partition(old)
        assert separator, f"index.html does not contain {old}"
        html = before + new + after
    return html


def embed(value: object) -> str:
    """JSON for a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate is not a character and cannot be encoded in UTF-8.
    text = re.sub("[\ud800-\udfff]", lambda surrogate: f"\\u{ord(surrogate[0]):04x}", text)
    return _UNSAFE.sub(lambda character: f"\\u{ord(character[0]):04x}", text)


def bundle(entry: str, read: Callable[[str], str]) -> str:
    """One script with the module ``entry`` and everything it imports; ``read`` returns the code of a module."""
    bundled: dict[str, str] = {}

    def add(name: str, importers: tuple[str, ...]) -> None:
        if name in importers:
            raise ValueError(f"{' → '.join([*importers, name])}: circular import")
        if name in bundled:
            return
        code = read(name)

        def import_module(line: re.Match[str]) -> str:
            other = posixpath.normpath(posixpath.join(posixpath.dirname(name), line[2]))
            add(other, (*importers, name))
            imported = filter(None, map(str.strip, line[1].split(",")))
            names = ", ".join(one.replace(" as ", ": ") for one in imported)
            return f'const {{ {names} }} = modules["{other}"];'

        exports = [export[1] for export in _EXPORT.finditer(code)]
        code = _EXPORT.sub("", _IMPORT.sub(import_module, code))
        if line := _UNSUPPORTED.search(code):
            raise ValueError(f"{name}: this form cannot be bundled: {line[0].strip()}")
        bundled[name] = (
            f'modules["{name}"] = (() => {{\n{code}\nreturn {{ {", ".join(exports)} }};\n}})();\n'
        )

    add(entry, ())
    return '"use strict";\n(() => {\nconst modules = {};\n' + "".join(bundled.values()) + "})();\n"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
