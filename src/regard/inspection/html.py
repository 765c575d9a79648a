"""A trace as one HTML file to send around: it opens from a folder and loads nothing.

A browser loads no ES modules from ``file://``, so the page's modules go into one script: each becomes a function
called once, in the order of its imports. They stay as they are but for their import and export lines, which are
held to the two plain forms below; any other is an error, not a guess.
"""

from __future__ import annotations

import base64
import hashlib
import json
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from regard.inspection.trace import Trace

WEB = Path(__file__).parent / "web"

_IMPORT = re.compile(r'^import \{([^{}]*)\} from "(\.{1,2}/[^"]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_OTHER = re.compile(r"^\s*(?:import|export)\b.*$", re.MULTILINE)
_ENDING = re.compile(r"</(?:script|style)|<!--", re.IGNORECASE)
_UNSAFE = re.compile("[<>&\u2028\u2029]")

_STYLE = '<link rel="stylesheet" href="style.css">'
_SCRIPT = '<script type="module" src="main.js"></script>'
_CHARSET = '<meta charset="utf-8">'


def page(trace: Trace) -> str:
    """The page of a trace, whole: its style, its script and the trace itself inside."""
    style = (WEB / "style.css").read_text(encoding="utf-8")
    script = bundle("main.js", lambda name: (WEB / name).read_text(encoding="utf-8"))
    assert not _ENDING.search(style + script), "would end its own element"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    html = (WEB / "index.html").read_text(encoding="utf-8")
    data = embed(trace.to_json("file"))
    for old, new in {
        _CHARSET: f'{_CHARSET}\n    <meta http-equiv="content-security-policy" content="{policy}">',
        _STYLE: f"<style>{style}</style>",
        _SCRIPT: f'<script type="application/json" id="trace">{data}</script>\n'
        f"    <script>{script}</script>",
    }.items():
        before, found, after = html.partition(old)
        assert found, f"index.html has no {old}"
        html = before + new + after
    return html


def embed(value: object) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element, or begin a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate is no character, and cannot be written as UTF-8.
    text = re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)
    return _UNSAFE.sub(lambda sign: f"\\u{ord(sign[0]):04x}", text)


def bundle(entry: str, read: Callable[[str], str]) -> str:
    """One script that does what the module ``entry`` does, with all that it imports."""
    done: dict[str, str] = {}

    def add(name: str, asking: tuple[str, ...]) -> None:
        if name in asking:
            raise ValueError(
                f"{' → '.join([*asking, name])}: modules import each other in a circle"
            )
        if name in done:
            return
        code = read(name)

        def take(line: re.Match[str]) -> str:
            other = posixpath.normpath(posixpath.join(posixpath.dirname(name), line[2]))
            add(other, (*asking, name))
            parts = filter(None, map(str.strip, line[1].split(",")))
            names = ", ".join(part.replace(" as ", ": ") for part in parts)
            return f'const {{ {names} }} = modules["{other}"];'

        exports = [export[1] for export in _EXPORT.finditer(code)]
        code = _EXPORT.sub("", _IMPORT.sub(take, code))
        if other := _OTHER.search(code):
            raise ValueError(f"{name}: not a form that can be bundled: {other[0].strip()}")
        done[name] = (
            f'modules["{name}"] = (() => {{\n{code}\nreturn {{ {", ".join(exports)} }};\n}})();\n'
        )

    add(entry, ())
    return '"use strict";\n(() => {\nconst modules = {};\n' + "".join(done.values()) + "})();\n"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
