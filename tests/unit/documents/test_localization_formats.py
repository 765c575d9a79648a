"""PO, XLIFF and TMX get the missing translations; JSON, YAML and properties keep everything but their values."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from regard.data.formats.base import ReadOptions
from regard.data.formats.localization import PO, TMX, XLIFF
from regard.documents import DocumentOptions
from regard.documents.base import xml_tokens
from tests.unit.documents import samples
from tests.unit.documents.translators import copy, parse, reverse, translate

RESOURCES = {
    "a.json": samples.JSON,
    "b.json": samples.CHROME,
    "a.yml": samples.YAML,
    "a.properties": samples.PROPERTIES,
}
UNNAMED = DocumentOptions()


@pytest.mark.parametrize("name", RESOURCES)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_resource_that_is_copied_is_equal_byte_for_byte(name: str, newline: str) -> None:
    content = RESOURCES[name].replace("\n", newline).encode()
    assert translate(name, content, copy, UNNAMED) == content


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.po", samples.PO),
        ("a.xlf", samples.XLIFF),
        ("b.xlf", samples.XLIFF2),
        ("a.tmx", samples.TMX),
    ],
)
def test_filling_in_again_changes_nothing(name: str, content: str) -> None:
    filled = translate(name, content, str.upper)
    assert filled != content.encode()
    assert translate(name, filled, str.lower) == filled
    kept = [line for line in content.split("\n") if "target" not in line and "msgstr" not in line]
    missing = [line for line in kept if line not in filled.decode()]
    assert [
        line
        for line in missing
        if "<file" not in line and "segment" not in line and "<seg/>" not in line
    ] == []


def test_po() -> None:
    filled = translate("a.po", samples.PO, str.upper).decode()
    assert 'msgid "Open the file %s?"\nmsgstr "OPEN THE FILE %S?"\n' in filled
    assert 'msgstr[0] "%D DOG"\nmsgstr[1] "%D DOGS"\n' in filled
    assert 'msgstr ""\n"TWO LINES.\\n"\n"THE \\"SECOND\\" ONE.\\n"\n' in filled
    assert 'msgstr "Fertig."' in filled
    assert '#~ msgid "Old"\n#~ msgstr ""\n' in filled
    assert translate("a.po", samples.PO.replace("\n", "\r\n"), str.upper) == (
        filled.replace("\n", "\r\n").encode()
    )


def test_filled_files_are_read_by_the_training_formats(tmp_path: Path) -> None:
    expected = {
        "a.po": (PO, ("%d dog", "%D DOG")),
        "a.xlf": (XLIFF, ("Press Start now.", "PRESS START NOW.")),
        "a.tmx": (TMX, ("A big cat.", "A BIG CAT.")),
    }
    contents = {"a.po": samples.PO, "a.xlf": samples.XLIFF, "a.tmx": samples.TMX}
    for name, (kind, pair) in expected.items():
        (tmp_path / name).write_bytes(translate(name, contents[name], str.upper))
        assert pair in list(kind(ReadOptions(languages=("en", "de"))).read(tmp_path / name))


def test_xliff() -> None:
    filled = reverse("a.xlf", samples.XLIFF).decode()
    assert 'source-language="en" datatype="plaintext" target-language="de">' in filled
    assert '<target>. cat &amp; <x id="2"/> dog <g id="1">big</g> The</target>' in filled
    assert (
        '<target state="needs-review-translation">. now <bpt id="1">&lt;b&gt;</bpt>Start<ept id="1">&lt;/b&gt;</ept> '
        "Press</target>"
    ) in filled
    assert "<source>ABC</source>\n      </trans-unit>" in filled
    assert (
        '<target><mrk mtype="seg" mid="1">. One</mrk> <mrk mtype="seg" mid="2">. Two</mrk></target>'
        in filled
    )
    assert '<segment state="translated">' in translate("b.xlf", samples.XLIFF2, copy).decode()


@pytest.mark.parametrize("kind", ['mtype="term"', 'id="m1" type="term"'])
def test_a_marked_term_does_not_split_a_sentence(kind: str) -> None:
    unit = f'<trans-unit id="t"><source>a <mrk {kind}>big</mrk> dog</source></trans-unit>'
    filled = reverse("a.xlf", samples.XLIFF.replace("</body>", f"{unit}</body>")).decode()
    assert f"<target>dog <mrk {kind}>big</mrk> a</target>" in filled
    unit = unit.replace("</mrk> dog", "<![CDATA[<b>x</b>]]></mrk> dog")
    source = samples.XLIFF.replace("</body>", f"{unit}</body>")
    filled = translate("a.xlf", source, str.upper).decode()
    assert f"<target>A <mrk {kind}>BIG<![CDATA[<b>X</b>]]></mrk> DOG</target>" in filled


def test_the_only_form_of_a_language_without_plurals_is_the_plural() -> None:
    forms = 'msgid ""\nmsgstr "Plural-Forms: nplurals={}; plural=0;\\n"\n\n'
    message = 'msgid "one dog"\nmsgid_plural "%d dogs"\nmsgstr[0] ""\n'
    for count, translated in ((1, "%D DOGS"), (2, "ONE DOG")):
        filled = translate("a.po", forms.format(count) + message, str.upper).decode()
        assert f'msgstr[0] "{translated}"' in filled


def test_empty_segments_of_an_xliff_target_are_filled() -> None:
    source = samples.XLIFF.replace("</trans-unit>", "", 0)
    unit = (
        '<trans-unit id="s"><source>One. Two.</source><seg-source><mrk mtype="seg" mid="1">One.</mrk> '
        '<mrk mtype="seg" mid="2">Two.</mrk></seg-source>'
    )
    empty = (
        '<target><mrk mtype="seg" mid="1"></mrk> <mrk mtype="seg" mid="2"/></target></trans-unit>'
    )
    source = source.replace("</body>", f"{unit}{empty}</body>")
    filled = translate("a.xlf", source, str.upper).decode()
    target = (
        '<target><mrk mtype="seg" mid="1">ONE.</mrk> <mrk mtype="seg" mid="2">TWO.</mrk></target>'
    )
    assert unit + target in filled


UNIT = '<trans-unit id="1"><source>{}</source></trans-unit>'


def xliff_unit(source: str) -> str:
    """An XLIFF file with one unit."""
    head, body = '<file source-language="en" target-language="de">', UNIT.format(source)
    return f'<xliff version="1.2">{head}<body>{body}</body></file></xliff>'


def target_of(filled: bytes) -> str:
    return filled.decode().partition("<target>")[2].partition("</target>")[0]


CDATA_HTML = (
    "<![CDATA[<h1 class='x'>The <b>big</b> dog</h1>\n"
    '<p>Tom &amp; Ann&nbsp;slept.<br/>It <code>a < b</code> was <a href="x?a=1&b=2">old</a>.</p>'
    "<script>if (a < b) {}</script>]]>"
)


def test_html_in_a_cdata_section_of_xliff_is_no_text() -> None:
    source = xliff_unit(CDATA_HTML)
    assert parse("a.xlf", source).sentences == [
        "The big dog",
        "Tom & Ann\xa0slept.",
        "It {1} was old.",
    ]
    assert target_of(translate("a.xlf", source, copy)) == CDATA_HTML
    reversed_ = target_of(reverse("a.xlf", source))
    assert reversed_ == (
        "<![CDATA[<h1 class='x'>dog <b>big</b> The</h1>\n"
        '<p>. slept Ann &amp; Tom<br/>. <a href="x?a=1&b=2">old</a> was <code>a < b</code> It</p>'
        "<script>if (a < b) {}</script>]]>"
    )
    ended = translate("a.xlf", source, lambda _: "]]> <x> & \x00").decode()
    assert ended.count("]]>") == 2
    assert "]]&gt; &lt;x&gt; &amp; " in ended
    xml_tokens(ended)  # is well-formed


def test_cdata_sections_with_and_without_html_beside_text() -> None:
    mixed = 'AT<![CDATA[&]]>T has <g id="1"><![CDATA[<i>big</i> dogs.]]></g> Yes.'
    source = xliff_unit(mixed)
    assert parse("a.xlf", source).sentences == ["AT&T has", "big dogs.", "Yes."]
    assert target_of(translate("a.xlf", source, copy)) == mixed
    assert target_of(translate("a.xlf", source, str.upper)) == (
        'AT&amp;T HAS <g id="1"><![CDATA[<i>BIG</i> DOGS.]]></g> YES.'
    )
    code = 'The <ph id="1"><![CDATA[<br>]]></ph> dog.'
    assert parse("a.xlf", xliff_unit(code)).sentences == ["The {1} dog."]
    empty = xliff_unit("<![CDATA[<b>A</b>]]>").replace(
        "</trans-unit>", "<target><![CDATA[]]></target></trans-unit>"
    )
    assert target_of(translate("a.xlf", empty, str.lower)) == "<![CDATA[<b>a</b>]]>"


def test_escaped_html_in_xliff_is_no_text() -> None:
    escaped = "The &lt;b&gt;big&lt;/b&gt; dog&lt;br /&gt;presses &lt;Enter&gt; if 1 &lt; 2."
    source = xliff_unit(escaped)
    assert parse("a.xlf", source).sentences == ["The big dog", "presses {1} if 1 < 2."]
    assert target_of(translate("a.xlf", source, copy)) == escaped
    assert target_of(reverse("a.xlf", source)) == (
        "dog &lt;b&gt;big&lt;/b&gt; The&lt;br /&gt;. 2 &lt; 1 if &lt;Enter&gt; presses"
    )


def test_html_in_a_message_is_no_text() -> None:
    """The tags of HTML and of components move with their words; other names in angle brackets are placeholders."""
    message = 'The <b>big</b> dog <a href=\\"x\\">slept</a>.<br>See <0>this</0> and <file>.'
    source = f'{{"a": "{message}"}}'
    assert parse("a.json", source).sentences == ["The big dog slept.", "See this and {1}."]
    assert translate("a.json", source, copy).decode() == source
    assert json.loads(reverse("a.json", source))["a"] == (
        '. <a href="x">slept</a> dog <b>big</b> The<br>. <file> and <0>this</0> See'
    )
    po = 'msgid "Click <strong>here</strong>"\nmsgstr ""\n'
    assert b'msgstr "CLICK <strong>HERE</strong>"' in translate("a.po", po, str.upper)


def test_tmx() -> None:
    filled = translate("a.tmx", samples.TMX, str.upper).decode()
    assert '\n      <tuv xml:lang="de"><seg>THE DOG.</seg></tuv>\n    </tu>' in filled
    assert '<tuv xml:lang="de"><seg>A <hi>BIG</hi> CAT.</seg></tuv>' in filled
    assert translate("a.tmx", samples.TMX, str.upper, UNNAMED).decode() == filled
    with pytest.raises(
        ValueError, match="languages en, en-GB: which are the source and the target"
    ):
        parse("a.tmx", samples.TMX.replace('xml:lang="de"', 'xml:lang="en"'), UNNAMED)


def test_json_values_are_translated_and_metadata_is_not() -> None:
    translated = translate("a.json", samples.JSON, str.upper).decode()
    data = json.loads(translated)
    assert data["nested"] == {"text": 'SAY "HI" TO {NAME}.', "list": ["ONE", 2, True]}
    assert data["@title"] == {"description": "Not translated"}
    assert data["url"] == "https://example.com/a"
    assert data["count"] == "{n, plural, one {# DOG} other {# DOGS}} HERE"
    assert json.loads(translate("b.json", samples.CHROME, str.upper)) == {
        "appName": {"message": "MY APP", "description": "The name"}
    }
    ascii_only = translate("a.json", '{"a": "caf\\u00e9"}', str.upper)
    assert ascii_only == b'{"a": "CAF\\u00c9"}'


JSON_VALUES = st.recursive(
    st.text() | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(max_examples=40)
@given(JSON_VALUES, st.booleans())
def test_any_json_and_yaml_that_is_copied_is_unchanged(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "ignore")
    assert translate("a.json", text, copy, UNNAMED) == text
    written = yaml.safe_dump(value, allow_unicode=not ascii_only)
    assert translate("a.yaml", written, copy, UNNAMED) == written.encode()


@settings(max_examples=20)
@given(st.dictionaries(st.text("abc"), st.text(st.characters(exclude_categories=["Cs", "Cc"]))))
def test_a_translated_yaml_file_has_the_translated_values(value: dict[str, str]) -> None:
    for style in (None, "'", '"', "|", ">"):
        written = yaml.safe_dump(value, allow_unicode=True, default_style=style)
        found = yaml.safe_load(translate("a.yaml", written, lambda text: f"- {text}: x", UNNAMED))
        texts = parse("a.yaml", written, UNNAMED).sentences
        assert list(found) == list(yaml.safe_load(written))
        joined = "\n".join(map(str, found.values()))
        assert all(f"- {text}: x" in joined for text in texts)


def test_yaml() -> None:
    translated = translate("a.yml", samples.YAML, str.upper).decode()
    assert translated.startswith("# A comment\nde:\n  title: THE DOG   # the title\n")
    assert yaml.safe_load(translated)["de"] == {
        "title": "THE DOG",
        "quoted": "IT'S HERE",
        "double": "LINE\nBREAK",
        "number": 5,
        "yes_word": True,
        "list": ["ONE DOG", "TWO: DOGS"],
        "block": "FIRST LINE.\nSECOND LINE.\n",
        "folded": "A LONG TEXT.",
        "anchor": "SAME",
        "alias": "SAME",
    }


def test_properties() -> None:
    translated = translate("a.properties", samples.PROPERTIES, str.upper).decode()
    assert translated == (
        "# comment\ntitle = THE DOG\nlong.text: ONE TWO.\nescaped=CAF\\u00C9 {0}\n! another\nempty=\n"
    )
    latin = "a=caf\xe9\n".encode("latin-1")
    assert translate("a.properties", latin, copy) == latin
    assert translate("a.properties", latin, lambda text: "日本 é") == b"a=\\u65E5\\u672C \\u00E9\n"
    assert translate("a.properties", "a=é", lambda text: "ü\\n") == "a=ü\\\\n".encode()


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.json", "{", "not JSON: Expecting property name"),
        ("a.yaml", "a: [", "not YAML: while parsing"),
        ("a.xlf", "<xliff><file>", "line 1: not well-formed XML: no element found"),
    ],
)
def test_a_damaged_file_is_refused(name: str, content: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse(name, content)
