"""Small files as other programs write them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping

MARKDOWN = """---
title: My page
tags: [a, b]
---
# The `big` dog {#dog}

The *dog* didn't cross the **wide
street** because it was [too `tired`](http://x.y/z "A title").
See <https://example.com> or https://example.com/a_b. Math $x^2$ and costs of $5 and $6.

> A quote that
> runs on. And *more*
> text.

- [x] Done item
- Second item with `code`
  continued here.

| Name | What it *is* |
|------|:-----:|
| Dog  | An animal \\| pet |
| `x`  | A [link](a.md) |

```python
print("Hello world")
```

    indented code

![The logo](logo.png)

A [ref link][r] and [shortcut] and a footnote[^1]. Line one\\
line two

[^1]: The note.
[r]: http://ref
[shortcut]: http://s

<div align="center"><h1>Title here</h1></div>

::: warning
Be careful here.
:::

Setext heading
==============

Hello {{ name }}, use snake_case and 2 * 3. <!-- note --> Bye<br>now.
"""

SRT = """1
00:00:01,000 --> 00:00:02,500
<i>The dog was too tired
to cross the street.</i>

2
00:00:03,000 --> 00:00:04,000 X1:10 X2:20
- Where is it?
- It is {\\an8}here.

3
00:00:05,000 --> 00:00:06,000
♪ ♪
"""

VTT = """WEBVTT - A film

STYLE
::cue { color: white }

NOTE A remark that is
not translated.

intro
00:01.000 --> 00:04.000 align:start position:0%
<v Roger>Never drink <b>liquid</b> &amp; cold
nitrogen.

00:05.000 --> 00:09.000
It will <00:06.000>perforate your stomach.
"""

PO = r"""# A comment
msgid ""
msgstr ""
"Language: de\n"
"Content-Type: text/plain; charset=UTF-8\n"

#: main.c:12
#, c-format
msgctxt "menu"
msgid "Open the file %s?"
msgstr ""

msgid "Done."
msgstr "Fertig."

msgid "%d dog"
msgid_plural "%d dogs"
msgstr[0] ""
msgstr[1] ""

msgid ""
"Two lines.\n"
"The \"second\" one.\n"
msgstr ""

#~ msgid "Old"
#~ msgstr ""
"""

XLIFF = """<?xml version="1.0" encoding="UTF-8"?>
<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2">
  <file original="a.txt" source-language="en" datatype="plaintext">
    <body>
      <trans-unit id="1">
        <source>The <g id="1">big</g> dog<x id="2"/> &amp; cat.</source>
      </trans-unit>
      <trans-unit id="2">
        <source>Done.</source>
        <target>Fertig.</target>
      </trans-unit>
      <trans-unit id="3">
        <source>Press <bpt id="1">&lt;b&gt;</bpt>Start<ept id="1">&lt;/b&gt;</ept> now.</source>
        <target state="new"/>
      </trans-unit>
      <trans-unit id="4" translate="no">
        <source>ABC</source>
      </trans-unit>
      <trans-unit id="5">
        <source>One. Two.</source>
        <seg-source><mrk mtype="seg" mid="1">One.</mrk> <mrk mtype="seg" mid="2">Two.</mrk></seg-source>
      </trans-unit>
    </body>
  </file>
</xliff>
"""

XLIFF2 = """<xliff xmlns="urn:oasis:names:tc:xliff:document:2.0" version="2.0" srcLang="en" trgLang="de">
 <file id="f1">
  <unit id="1">
   <segment state="initial">
    <source>Hello <pc id="1">big</pc> world</source>
   </segment>
  </unit>
 </file>
</xliff>
"""

TMX = """<?xml version="1.0"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4">
  <header srclang="en" adminlang="en" creationtool="x" segtype="sentence" datatype="xml"/>
  <body>
    <tu>
      <tuv xml:lang="en"><seg>The dog.</seg></tuv>
    </tu>
    <tu>
      <tuv xml:lang="en-GB"><seg>A <hi>big</hi> cat.</seg></tuv>
      <tuv xml:lang="de"><seg/></tuv>
    </tu>
    <tu>
      <tuv xml:lang="en"><seg>Yes.</seg></tuv>
      <tuv xml:lang="de"><seg>Ja.</seg></tuv>
    </tu>
  </body>
</tmx>
"""

JSON = """{
  "title": "The dog",
  "nested": {"text": "Say \\"hi\\" to {name}.", "list": ["One", 2, true]},
  "@title": {"description": "Not translated"},
  "url": "https://example.com/a",
  "count": "{n, plural, one {# dog} other {# dogs}} here"
}
"""

CHROME = '{"appName": {"message": "My app", "description": "The name"}}'

YAML = """# A comment
en:
  title: The dog   # the title
  quoted: 'It''s here'
  double: "Line\\nbreak"
  number: 5
  yes_word: yes
  list: [One dog, "Two: dogs"]
  block: |
    First line.
    Second line.
  folded: >-
    A long
    text.
  anchor: &a Same
  alias: *a
"""

PROPERTIES = """# comment
title = The dog
long.text: One \\
    two.
escaped=caf\\u00e9 {0}
! another
empty=
"""

CSV = 'id,text,note\n1,The dog,"a, b"\n2,"A ""big"" cat, here",x\n3,,y\n'

TEXT = """The dog didn't cross the street because it was too tired, and nobody
was surprised. It slept. A short line ends
a paragraph that was broken at a fixed width, as editors often do it.

  * An item
  * Another item

Last paragraph
"""

_WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
DOCX_BODY = f"""<?xml version="1.0" encoding="UTF-8" standalone="yes"?>
<w:document {_WORD} xmlns:r="http://schemas.openxmlformats.org/officeDocument/2006/relationships"><w:body>\
<w:p><w:pPr><w:pStyle w:val="Heading1"/></w:pPr><w:bookmarkStart w:id="0" w:name="_Top"/>\
<w:r w:rsidR="00A1"><w:t>The big</w:t></w:r><w:r w:rsidR="00A2"><w:t xml:space="preserve"> dog</w:t></w:r>\
<w:bookmarkEnd w:id="0"/></w:p>\
<w:p><w:r><w:t xml:space="preserve">The </w:t></w:r><w:r><w:rPr><w:b/></w:rPr><w:t>dog</w:t></w:r>\
<w:proofErr w:type="spellStart"/><w:r><w:t xml:space="preserve"> &amp; cat</w:t></w:r>\
<w:r><w:rPr><w:vertAlign w:val="superscript"/></w:rPr><w:footnoteReference w:id="2"/></w:r>\
<w:r><w:t xml:space="preserve"> slept. </w:t></w:r>\
<w:hyperlink r:id="rId5"><w:r><w:rPr><w:u w:val="single"/></w:rPr><w:t>See here</w:t></w:r></w:hyperlink>\
<w:r><w:t>.</w:t></w:r></w:p>\
<w:p><w:r><w:t>Name</w:t><w:tab/><w:t>Value</w:t></w:r></w:p>\
<w:p><w:r><w:fldChar w:fldCharType="begin"/></w:r><w:r><w:instrText> PAGE </w:instrText></w:r>\
<w:r><w:fldChar w:fldCharType="separate"/></w:r><w:r><w:t>3</w:t></w:r>\
<w:r><w:fldChar w:fldCharType="end"/></w:r></w:p>\
<w:p><w:r><w:t>Before</w:t><w:drawing><wps:txbx xmlns:wps="urn:wps"><w:txbxContent>\
<w:p><w:r><w:t>In the box</w:t></w:r></w:p>\
</w:txbxContent></wps:txbx></w:drawing></w:r></w:p>\
<w:p><w:r><w:t>H</w:t></w:r><w:r><w:rPr><w:vertAlign w:val="subscript"/></w:rPr><w:t>2</w:t></w:r>\
<w:r><w:t>O is water</w:t></w:r></w:p>\
<w:tbl><w:tr><w:tc><w:p><w:del w:id="1"><w:r><w:delText>gone</w:delText></w:r></w:del>\
<w:ins w:id="2"><w:r><w:t>A cell</w:t></w:r></w:ins></w:p></w:tc></w:tr></w:tbl>\
<w:sectPr/></w:body></w:document>"""

PPTX_SLIDE = """<?xml version="1.0" encoding="UTF-8" standalone="yes"?>
<p:sld xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main" \
xmlns:p="http://schemas.openxmlformats.org/presentationml/2006/main"><p:cSld><p:spTree><p:sp><p:txBody><a:bodyPr/>\
<a:p><a:pPr lvl="0"/><a:r><a:rPr lang="en-US" dirty="0"/><a:t>The </a:t></a:r>\
<a:r><a:rPr lang="en-US" b="1"/><a:t>big</a:t></a:r><a:r><a:rPr lang="en-GB"/><a:t> dog</a:t></a:r>\
<a:br/><a:r><a:rPr lang="en-US"/><a:t>A new line</a:t></a:r><a:endParaRPr lang="en-US"/></a:p>\
<a:p><a:fld id="{1}" type="slidenum"><a:rPr lang="en-US"/><a:t>3</a:t></a:fld></a:p>\
</p:txBody></p:sp></p:spTree></p:cSld></p:sld>"""

ODT_CONTENT = """<?xml version="1.0" encoding="UTF-8"?>
<office:document-content xmlns:office="urn:oasis:names:tc:opendocument:xmlns:office:1.0" \
xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0" xmlns:xlink="http://www.w3.org/1999/xlink" \
xmlns:draw="urn:oasis:names:tc:opendocument:xmlns:drawing:1.0" office:version="1.3"><office:body><office:text>\
<text:tracked-changes><text:changed-region text:id="c1"><text:deletion><text:p>Deleted text</text:p></text:deletion>\
</text:changed-region></text:tracked-changes>\
<text:h text:style-name="H1" text:outline-level="1">The big dog</text:h>\
<text:p text:style-name="P1">The <text:span text:style-name="T1">dog</text:span> &amp;<text:s text:c="2"/>cat\
<text:note text:id="n1" text:note-class="footnote"><text:note-citation>1</text:note-citation>\
<text:note-body><text:p>A note.</text:p>\
</text:note-body></text:note> slept. On page <text:page-number>3</text:page-number> is \
<text:a xlink:href="http://x">more</text:a>.</text:p>\
<text:p>Name<text:tab/>Value</text:p><text:p/>\
<text:p><draw:frame><draw:text-box><text:p>In the box</text:p></draw:text-box></draw:frame>After it</text:p>\
</office:text></office:body></office:document-content>"""


def archive(parts: Mapping[str, str | bytes], stored: tuple[str, ...] = ()) -> bytes:
    """A zip archive. stored: parts that are not compressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in parts.items():
            kind = zipfile.ZIP_STORED if name in stored else zipfile.ZIP_DEFLATED
            info = zipfile.ZipInfo(name, (2024, 1, 2, 3, 4, 6))
            file.writestr(info, content, kind)
    return buffer.getvalue()


_TYPES = "http://schemas.openxmlformats.org/package/2006/content-types"
_RELATIONS = "http://schemas.openxmlformats.org/package/2006/relationships"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"


def docx(body: str = DOCX_BODY, others: Mapping[str, str | bytes] | None = None) -> bytes:
    kind = "application/vnd.openxmlformats-officedocument.wordprocessingml"
    main = f'<Relationship Id="rId1" Type="{_OFFICE}/officeDocument" Target="word/document.xml"/>'
    relations = f'<Relationships xmlns="{_RELATIONS}">{main}</Relationships>'
    link = f'<Relationship Id="rId5" Type="{_OFFICE}/hyperlink" Target="http://x.y" TargetMode="External"/>'
    links = f'<Relationships xmlns="{_RELATIONS}">{link}</Relationships>'
    rels = "application/vnd.openxmlformats-package.relationships+xml"
    types = (
        f'<Types xmlns="{_TYPES}"><Default Extension="rels" ContentType="{rels}"/>'
        f'<Default Extension="xml" ContentType="application/xml"/>'
        f'<Override PartName="/word/document.xml" ContentType="{kind}.document.main+xml"/></Types>'
    )
    header = f"<w:hdr {_WORD}><w:p><w:r><w:t>A header</w:t></w:r></w:p></w:hdr>"
    parts: dict[str, str | bytes] = {
        "[Content_Types].xml": types,
        "_rels/.rels": relations,
        "word/document.xml": body,
        "word/_rels/document.xml.rels": links,
        "word/header1.xml": header,
        "word/media/image1.png": bytes(range(256)) * 4,
        **(others or {}),
    }
    return archive(parts, stored=("word/media/image1.png",))


def pptx() -> bytes:
    return archive({"ppt/presentation.xml": "<p/>", "ppt/slides/slide1.xml": PPTX_SLIDE})


def odt(content: str = ODT_CONTENT) -> bytes:
    kind = "application/vnd.oasis.opendocument.text"
    manifest = (
        '<manifest:manifest xmlns:manifest="urn:oasis:names:tc:opendocument:xmlns:manifest:1.0" manifest:version="1.3">'
        f'<manifest:file-entry manifest:full-path="/" manifest:media-type="{kind}"/>'
        '<manifest:file-entry manifest:full-path="content.xml" manifest:media-type="text/xml"/></manifest:manifest>'
    )
    parts = {"mimetype": kind, "content.xml": content, "META-INF/manifest.xml": manifest}
    return archive(parts, stored=("mimetype",))


# ---------------------------------------------------------------------------------------------
# Sources from which LibreOffice makes documents of all kinds

_NAMESPACES = "\n".join(
    f'xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{uri or name}:1.0"'
    for name, uri in {
        "office": "", "text": "", "table": "", "style": "", "presentation": "", "fo": "xsl-fo-compatible",
        "draw": "drawing", "svg": "svg-compatible",
    }.items()
)  # fmt: skip


def _flat(kind: str, content: str) -> str:
    return f"""<?xml version="1.0" encoding="UTF-8"?>
<office:document {_NAMESPACES} xmlns:dc="http://purl.org/dc/elements/1.1/" xmlns:xlink="http://www.w3.org/1999/xlink"
 office:version="1.3" office:mimetype="application/vnd.oasis.opendocument.{kind}">
<office:automatic-styles>
<style:style style:name="bold" style:family="text"><style:text-properties fo:font-weight="bold"/></style:style>
<style:style style:name="sub" style:family="text"><style:text-properties style:text-position="sub 58%"/></style:style>
<style:style style:name="rtl" style:family="paragraph"><style:paragraph-properties style:writing-mode="rl-tb"/>
</style:style><style:style style:name="ruby" style:family="ruby"/>
</office:automatic-styles>
<office:master-styles><style:master-page style:name="master"/></office:master-styles>
<office:body><office:{kind}>{content}</office:{kind}></office:body></office:document>
"""


_CHANGE = "<office:change-info><dc:creator>A</dc:creator><dc:date>2024-01-02T03:04:05</dc:date></office:change-info>"

FLAT_TEXT = _flat(
    "text",
    f"""<text:tracked-changes>
<text:changed-region text:id="c1"><text:insertion>{_CHANGE}</text:insertion></text:changed-region>
<text:changed-region text:id="c2"><text:deletion>{_CHANGE}<text:p>very </text:p></text:deletion></text:changed-region>
</text:tracked-changes>
<text:h text:outline-level="1">The big dog</text:h>
<text:p>The <text:span text:style-name="bold">big</text:span> dog<text:note text:id="n" text:note-class="footnote"
><text:note-citation>1</text:note-citation><text:note-body><text:p>A note about the dog.</text:p></text:note-body
></text:note> slept. See <text:a xlink:type="simple" xlink:href="http://x.y/">this page</text:a>.</text:p>
<text:p>It was <text:change text:change-id="c2"/><text:change-start text:change-id="c1"/>too <text:change-end
 text:change-id="c1"/>tired<office:annotation office:name="c"><dc:creator>B</dc:creator><text:p>A comment here.</text:p
></office:annotation> today<office:annotation-end office:name="c"/>. H<text:span text:style-name="sub">2</text:span>O
is water. Page <text:page-number>1</text:page-number>.</text:p>
<text:list><text:list-item><text:p>First item</text:p>
<text:list><text:list-item><text:p>Nested item</text:p>
<text:list><text:list-item><text:p>Deep item</text:p></text:list-item></text:list></text:list-item></text:list>
</text:list-item></text:list>
<table:table table:name="t"><table:table-column table:number-columns-repeated="2"/>
<table:table-row><table:table-cell table:number-columns-spanned="2"><text:p>Merged cell</text:p></table:table-cell>
<table:covered-table-cell/></table:table-row>
<table:table-row><table:table-cell table:number-rows-spanned="2"><text:p>Left cell</text:p></table:table-cell>
<table:table-cell><text:p>Right cell</text:p></table:table-cell></table:table-row>
<table:table-row><table:covered-table-cell/><table:table-cell><text:p>Last</text:p></table:table-cell></table:table-row>
</table:table>
<text:p text:style-name="rtl">שלום עולם and more words</text:p>
<text:p>The word <text:ruby text:style-name="ruby"><text:ruby-base>漢字</text:ruby-base
><text:ruby-text>kanji</text:ruby-text></text:ruby> is here.</text:p>
<text:p><draw:frame draw:name="f" text:anchor-type="as-char" svg:width="5cm" svg:height="2cm"><draw:text-box>
<text:p>Inside the box</text:p></draw:text-box></draw:frame></text:p>
<text:p>Name<text:tab/>Value<text:line-break/>New line<text:s text:c="3"/>spaced</text:p>""",
)

FLAT_PRESENTATION = _flat(
    "presentation",
    """<draw:page draw:name="p" draw:master-page-name="master">
<draw:frame svg:width="20cm" svg:height="3cm" svg:x="1cm" svg:y="1cm"><draw:text-box>
<text:p>The <text:span text:style-name="bold">big</text:span> dog</text:p></draw:text-box></draw:frame>
<draw:frame svg:width="20cm" svg:height="8cm" svg:x="1cm" svg:y="5cm"><draw:text-box>
<text:list><text:list-item><text:p>First item</text:p>
<text:list><text:list-item><text:p>Nested item</text:p></text:list-item></text:list></text:list-item></text:list>
</draw:text-box></draw:frame>
<draw:frame svg:width="20cm" svg:height="4cm" svg:x="1cm" svg:y="14cm"><table:table>
<table:table-column/><table:table-column/><table:table-row>
<table:table-cell><text:p>Left cell</text:p></table:table-cell>
<table:table-cell><text:p>Right cell</text:p></table:table-cell></table:table-row></table:table></draw:frame>
<presentation:notes><draw:frame presentation:class="notes" svg:width="15cm" svg:height="10cm" svg:x="1cm" svg:y="14cm">
<draw:text-box><text:p>A speaker note.</text:p></draw:text-box></draw:frame></presentation:notes></draw:page>""",
)
