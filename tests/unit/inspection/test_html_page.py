"""The page in one file holds the trace, and loads or runs nothing else; packed text; tables for notebooks."""

import base64
import hashlib
import json
import re
import zlib

import numpy as np
import pytest
from hypothesis import given, strategies as st

from regard.decoding.beam_tree import Node
from regard.inspection import html_page
from regard.inspection.html_page import (
    WEB,
    bundle,
    deflate,
    embed,
    pack,
    page,
)
from regard.inspection.trace import Candidate, Token, Trace

HOSTILE = "</script><!--<script>alert(1)</script>\u2028\u2029&amp;\"'<img src=x onerror=alert(1)>"


def _trace(text: str) -> Trace:
    token, end = Token(9, text, False), Token(2, "</s>", True)
    one = np.full((1, 1, 2, 2), 0.5, dtype=np.float32)
    return Trace(
        text=text,
        translation=text,
        source=[token, end],
        inputs=[Token(1, "<s>", True), token],
        outputs=[token, end],
        encoder=one,
        decoder=one,
        cross_attention=one,
        probabilities=[0.5, 0.5],
        candidates=[[Candidate(token, 0.5)], [Candidate(end, 0.5)]],
        beam=[Node(0, None, 1, 0.0, 0.0, 0.0, "kept"), Node(1, 0, 9, -0.7, -0.7, -0.7, "kept")],
        tokens={1: Token(1, "<s>", True), 9: token},
        options={"beam": 1, "length_penalty": 0.6},
    )


@given(st.text() | st.sampled_from([HOSTILE, "\ud800"]))
def test_embedded_json_is_inert_and_round_trips(text: str) -> None:
    embedded = embed({"text": text, text: [1.5, None]})
    assert not re.search("[<>&\u2028\u2029]", embedded)
    assert json.loads(embedded.encode("utf-8")) == {"text": text, text: [1.5, None]}


def test_values_that_json_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        embed(float("nan"))


def test_the_page_holds_the_trace_and_loads_nothing() -> None:
    html = page(_trace(HOSTILE))
    (data,) = re.findall(r'<script type="application/json" id="trace">(.*?)</script>', html)
    assert json.loads(data) == json.loads(json.dumps(_trace(HOSTILE).to_json()))
    assert html.count("</script>") == 2
    assert "alert(1)<" not in html
    rest = html.replace(data, "")
    assert not re.search(r'<link rel="stylesheet"|<script[^>]* src=|@import|url\(', rest)
    assert re.findall(r"https?://[\w./]+", rest) == ["http://www.w3.org/2000/svg"]


def test_the_policy_allows_only_the_script_and_style_of_the_page() -> None:
    html = page(_trace("a"))
    for kind in ("script", "style"):
        (code,) = re.findall(rf"<{kind}>(.*?)</{kind}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in html


def test_every_module_of_the_page_is_in_the_bundle() -> None:
    # A file with a model has the worker and the page's script compressed, and a script that starts them.
    entries = ("model/worker.js", "packed_script.js")
    html = page(_trace("a")) + "".join(map(html_page._bundled, entries))
    names = {path.relative_to(WEB).as_posix() for path in WEB.rglob("*.js")}
    assert set(re.findall(r'^modules\["(.*?)"\] = ', html, re.MULTILINE)) == names


def test_modules_come_after_their_imports() -> None:
    files = {
        "main.js": 'import { one, two as zwei } from "./views/a.js";\none(zwei);',
        "views/a.js": 'import {\n  three,\n} from "../b.js";\n'
        "export function one() {}\nexport const two = three;",
        "b.js": "export class three {}",
    }
    code = bundle("main.js", files.__getitem__)
    order = re.findall(r'^modules\["(.*?)"\] = ', code, re.MULTILINE)
    assert order == ["b.js", "views/a.js", "main.js"]
    assert 'const { one, two: zwei } = modules["views/a.js"];' in code
    assert 'const { three } = modules["b.js"];' in code
    assert "return { one, two };" in code
    assert "export" not in code


@pytest.mark.parametrize(
    "line",
    [
        "export default 1;",
        'import * as a from "./a.js";',
        'import "./a.js";',
        "export { a };",
        'import { a } from "d3";',
    ],
)
def test_other_import_forms_are_refused(line: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"main.js: this form cannot be bundled: {line}")
    ):
        bundle("main.js", {"main.js": line}.__getitem__)


def test_circular_imports_are_refused() -> None:
    files = {"a.js": 'import { b } from "./b.js";', "b.js": 'import { a } from "./a.js";'}
    with pytest.raises(ValueError, match=r"a\.js → b\.js → a\.js"):
        bundle("a.js", files.__getitem__)


# ---------------------------------------------------------------------------------------------
# Bytes as text in a UTF-16 file


EVERY_PAIR = np.arange(65536, dtype="<u2").tobytes()


def unpack(text: str) -> bytes:
    """The reverse, character by character, written from the description."""
    data = b""
    for character in map(ord, text):
        number = character - 0x10000
        if number < 0:
            data += character.to_bytes(2, "little")
        elif number < 0x800:
            data += (0xD800 + number).to_bytes(2, "little")
        elif number < 0x803:
            data += (0, 13, 60)[number - 0x800].to_bytes(2, "little")
        else:
            data += bytes([number - 0x803])
    return data


@given(st.binary() | st.just(EVERY_PAIR) | st.just(EVERY_PAIR + b"\xff"))
def test_bytes_survive(data: bytes) -> None:
    assert unpack(pack(data)) == data


def test_an_html_parser_changes_no_character() -> None:
    text = pack(EVERY_PAIR)
    assert not {"\0", "\r", "<"} & set(text)
    text.encode("utf-16")  # no lone surrogate


def test_random_bytes_take_little_more_space() -> None:
    data = np.random.default_rng(1).bytes(1_000_000)
    assert len(pack(data).encode("utf-16-le")) / len(data) < 1.032


def test_compressed_bytes_have_no_header() -> None:
    data = b"The dog sleeps. " * 100
    assert zlib.decompress(deflate(data), -zlib.MAX_WBITS) == data
    assert len(deflate(data)) < len(deflate(data, zlib.Z_HUFFMAN_ONLY)) < len(data)
