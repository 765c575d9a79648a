"""HTML: a trace, or a model, as one self-contained file.

Browsers do not load ES modules from ``file://``, so the page's modules are bundled into one script: each becomes a
function that is called once, in the order of the imports. Only import and export lines are rewritten, and only the two
forms below are supported; any other form is an error.

A model is stored as text in UTF-16, which has one character for almost every pair of bytes, so that 16 bits of data
take 16.5 bits of the file. Base64 takes 21.3, and no encoding in UTF-8 takes less than 17.9. The file begins with a
byte order mark, which decides its encoding even if a server declares another one. ``web/packed_text.js`` reads it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import posixpath
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from regard.inspection.trace import Trace

# ---------------------------------------------------------------------------------------------
# The page


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
    packed = {id: deflate(text.encode("utf-8")) for id, text in texts.items()}
    data = [
        _data("text/plain", id, pack(content))
        for id, content in (packed | {"weights": weights}).items()
    ]
    # The first script runs that of the page (strict-dynamic). The model runs in a worker whose code comes from the
    # file, with products in WebAssembly.
    html = _document(
        data, "packed_script.js", " 'strict-dynamic' 'wasm-unsafe-eval'", "worker-src blob:; "
    )
    # The byte order mark declares the encoding. A meta element cannot declare UTF-16.
    return html.replace(f"{_CHARSET}\n", "", 1).encode(ENCODING)


def _data(media_type: str, id: str, text: str) -> str:
    """A script element that holds data."""
    assert not _ELEMENT_END.search(text), "the text would end its own element"
    return f'<script type="{media_type}" id="{id}">{text}</script>'


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
            names = ", ".join(specifier.replace(" as ", ": ") for specifier in imported)
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


# ---------------------------------------------------------------------------------------------
# Packed text: bytes as text in an HTML file with the encoding UTF-16


ENCODING = "utf-16"
"""of the whole file"""
_SURROGATES = 0xD800
_RESERVED = (0x0000, 0x000D, 0x003C)
"""characters that an HTML parser replaces or interprets: NUL, carriage return, ``<``"""
_FIRST_RESERVED = 0x800
_FIRST_BYTE = _FIRST_RESERVED + len(_RESERVED)
"""numbers of escaped characters: surrogates come first, then reserved characters, then bytes"""


def pack(data: bytes) -> str:
    """One character for each pair of bytes, and one for an odd last byte."""
    odd = len(data) % 2
    pairs = np.frombuffer(data, dtype="<u2", count=len(data) // 2).astype(np.int32)
    # Surrogates, reserved characters and an odd last byte are numbered, and written as characters above U+FFFF. Those
    # take two units.
    numbers = np.where(pairs >> 11 == _SURROGATES >> 11, pairs - _SURROGATES, -1)
    for number, reserved in enumerate(_RESERVED, _FIRST_RESERVED):
        numbers[pairs == reserved] = number
    if odd:
        pairs, numbers = np.append(pairs, 0), np.append(numbers, _FIRST_BYTE + data[-1])
    escaped = numbers >= 0
    first = np.where(escaped, 0xD800 + (numbers >> 10), pairs)
    second = 0xDC00 + (numbers & 0x3FF)
    used_units = np.stack([np.ones_like(escaped), escaped], axis=1)
    units = np.stack([first, second], axis=1)[used_units].astype("<u2")
    return units.tobytes().decode("utf-16-le")


def deflate(data: bytes, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> bytes:
    """Compress; the result has no header, as ``DecompressionStream("deflate-raw")`` reads it."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, strategy)
    return compressor.compress(data) + compressor.flush()
