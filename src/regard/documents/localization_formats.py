"""Translating files of translation tools and resources of programs: PO, XLIFF, TMX, JSON, YAML, Java properties.

``data/formats/localization.py`` reads training pairs from PO, XLIFF and TMX.

In PO, XLIFF and TMX, missing translations are filled in and the others are kept. In resources, values are replaced and
keys are kept. All of them are read with the position of each text: libraries that parse and write a file again change
its quotes, line breaks and order.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import yaml

from regard.data.language_identification import is_language
from regard.data.protected_spans import ProtectedSpans
from regard.documents.base import (
    DOCUMENT_FORMATS,
    Slot,
    Template,
    TextFormat,
    XmlFormat,
    XmlToken,
    end_of_element,
    escape_xml,
    without_control_characters,
    xml_attribute,
    xml_tokens,
)
from regard.documents.markup import (
    VOID_ELEMENTS,
    Document,
    Encode,
    Inline,
    InlineKind,
    add_run,
    escape_html,
    split_html,
    text_token,
    unescaped_tokens,
)

# ---------------------------------------------------------------------------------------------
# Messages of programs

_VARIANTS = re.compile(r"\{\s*[\w.]+\s*,\s*(?:plural|select|selectordinal)\s*,")
"""where an ICU message with several variants begins: {count, plural, one {# dog} other {# dogs}}"""
_BRACE = re.compile("[{}]")
_PLACEHOLDERS = ProtectedSpans(("placeholders",))


MAX_MESSAGE_DEPTH = 16
"""of variants inside variants; deeper ones are text"""


def message_tokens(message: str, in_plural: bool = False, depth: int = 0) -> Iterator[Inline]:
    """The tokens of a message; the variants of an ICU message are separate texts."""
    done = 0
    while depth < MAX_MESSAGE_DEPTH and (match := _VARIANTS.search(message, done)):
        yield from _text_tokens(message[done : match.start()], in_plural)
        start = match.start()
        at = match.end()
        while (brace := _BRACE.search(message, at)) and brace[0] == "{":
            end = _closing_brace(message, brace.end())
            yield Inline(message[start : brace.end()], InlineKind.TEXT, "\n")
            yield from message_tokens(message[brace.end() : end], "plural" in match[0], depth + 1)
            start, at = end, end + 1
        done = brace.end() if brace else len(message)
        yield Inline(message[start:done], InlineKind.TEXT, "\n")
    yield from _text_tokens(message[done:], in_plural)


_TAG = re.compile(r"<(?P<slash>/?)(?P<name>[a-zA-Z][\w.:-]*|\d+)(?:\s[^<>]*)?/?>")
"""HTML inside a message, or a numbered tag of react-i18next: <0>Log in</0>"""


def _text_tokens(text: str, in_plural: bool) -> Iterator[Inline]:
    done = 0
    last = {tag["name"].lower(): tag.start() for tag in _TAG.finditer(text) if tag["slash"]}
    for match in _TAG.finditer(text):
        yield from _number_tokens(text[done : match.start()], in_plural)
        yield _tag_token(match, match.start() < last.get(match["name"].lower(), 0))
        done = match.end()
    yield from _number_tokens(text[done:], in_plural)


def _tag_token(match: re.Match[str], is_closed: bool) -> Inline:
    """A tag of HTML or of a component. Others, such as <file>, stand for a text that the program inserts.

    is_closed: whether a closing tag of this name follows.
    """
    raw, name = match[0], match["name"].lower()
    if raw.endswith("/>") or name in VOID_ELEMENTS:
        return Inline(raw, InlineKind.TEXT, "\n") if name == "br" else Inline(raw, InlineKind.ATOM)
    if name in BLOCK_ELEMENTS:
        return Inline(raw, InlineKind.TEXT, "\n")
    if match["slash"]:
        return Inline(raw, InlineKind.CLOSE, name)
    return Inline(raw, InlineKind.OPEN if is_closed else InlineKind.ATOM, name if is_closed else "")


BLOCK_ELEMENTS = {
    "p", "div", "ul", "ol", "li", "dl", "dt", "dd", "table", "tr", "td", "th", "blockquote", "pre",
    "h1", "h2", "h3", "h4", "h5", "h6",
}  # fmt: skip
"""elements whose tags end a sentence"""


def _number_tokens(text: str, in_plural: bool) -> Iterator[Inline]:
    for part in re.split("(#)", text) if in_plural else [text]:
        if part:
            is_number = in_plural and part == "#"
            yield Inline(part, InlineKind.ATOM) if is_number else text_token(part)


def _closing_brace(text: str, start: int) -> int:
    """The position where the brace that was opened before ``start`` is closed; the end of the text if it is not."""
    depth = 1
    for match in _BRACE.finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    return len(text)


def message_slot(message: str, language: str, raw: str | None, encode: Encode) -> Slot:
    """A slot for a message. A message that is only a placeholder or an address is not translated."""
    document = Document()
    if _PLACEHOLDERS.replace(message, dict.fromkeys(_PLACEHOLDERS.find(message), "")).strip():
        add_run(document, list(message_tokens(message)), language)
    else:
        document.add_markup(message)
    return Slot(document, raw, encode)


# ---------------------------------------------------------------------------------------------
# PO


class PoField(NamedTuple):
    """A keyword such as msgid, its value, and the span of its quoted strings in the file."""

    keyword: str
    value: str
    start: int
    end: int


_PO_FIELD = re.compile(
    r"""^[ \t]*(?P<keyword>msgctxt|msgid_plural|msgid|msgstr(?:\[\d+\])?)[ \t]*
    (?P<strings>"(?:\\.|[^"\\\r\n])*"(?:[ \t]*\r?\n[ \t]*"(?:\\.|[^"\\\r\n])*")*)""",
    re.MULTILINE | re.VERBOSE,
)
_PO_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\"}


@DOCUMENT_FORMATS.register("po")
class PoDocument(TextFormat):
    """gettext messages (PO): empty msgstr are filled in; the only form of a language without plurals is the plural"""

    suffixes = (".po", ".pot")
    is_connected = False
    why_not_lines = "its keywords would be translated"

    @classmethod
    def recognizes(cls, beginning: str) -> bool:
        comments, strings = r"(?:[ \t]*(?:#.*)?\r?\n)*", r'".*\n(?:".*\n)*'
        message = rf"{comments}(?:msgctxt {strings})?msgid {strings}(?:msgid_plural|msgstr)"
        return re.match(message, beginning) is not None

    def split(self, text: str) -> Template:
        template = Template()
        newline = "\r\n" if "\r\n" in text else "\n"
        done = 0
        messages: list[str] = []
        one_form = re.search(r"Plural-Forms:[^\n]*\bnplurals\s*=\s*1\b", text) is not None
        for field in _po_fields(text):
            if field.keyword == "msgid":
                messages = [field.value]
            elif field.keyword == "msgid_plural":
                messages.append(field.value)
            elif field.keyword.startswith("msgstr") and not field.value and any(messages):
                singular = field.keyword == "msgstr" or (
                    field.keyword == "msgstr[0]" and not one_form
                )
                message = messages[0] if singular else messages[-1]
                slot = message_slot(message, self.options.source, None, partial(_quote_po, newline))
                template.add(text[done : field.start], slot)
                done = field.end
        template.add(text[done:])
        return template


def _po_fields(text: str) -> Iterator[PoField]:
    for match in _PO_FIELD.finditer(text):
        strings = re.findall(r'"((?:\\.|[^"\\\r\n])*)"', match["strings"])
        value = re.sub(
            r"\\(.)", lambda match: _PO_ESCAPES.get(match[1], match[0]), "".join(strings)
        )
        yield PoField(match["keyword"], value, *match.span("strings"))


def _quote_po(newline: str, text: str) -> str:
    """A value in quotes; one with several lines has one line each, as gettext writes it."""
    for character, escape in {"\\": "\\\\", '"': '\\"', "\t": "\\t", "\r": "\\r"}.items():
        text = text.replace(character, escape)
    lines = [f'"{line}"' for line in text.replace("\n", "\\n\n").split("\n") if line]
    return lines[0] if len(lines) == 1 else newline.join(['""', *lines])


# ---------------------------------------------------------------------------------------------
# XLIFF and TMX

PAIRED_TAGS = {"g", "mrk", "pc", "hi"}
OPENING_CODES = {"bpt": "i", "bx": "id", "sc": "id"}
"""elements that stand for an opening tag, and the attribute that names it"""
CLOSING_CODES = {"ept": "i", "ex": "id", "ec": "startRef"}


def inline_xml(tokens: Sequence[XmlToken], soft_breaks: bool) -> list[Inline]:
    """The content of a segment as inline tokens."""
    inlines: list[Inline] = []
    open_marks: list[bool] = []  # whether each enclosing mrk is a segment
    at = 0
    while at < len(tokens):
        token = tokens[at]
        tag = token.name.rpartition(":")[2]
        end = at + 1
        if token.raw.startswith(CDATA):
            inlines.append(Inline(token.raw, InlineKind.TEXT, cdata_content(token)))
        elif token.is_text:
            inlines += _escaped_html(token.raw, soft_breaks)
        elif tag in PAIRED_TAGS and not (token.opens and token.closes):
            if tag == "mrk" and token.opens:
                open_marks.append(xml_attribute(token.attributes, "mtype") == "seg")
            is_segment = tag == "mrk" and (
                open_marks[-1] if token.opens else not open_marks or open_marks.pop()
            )
            if is_segment:
                inlines.append(Inline(token.raw, InlineKind.TEXT, "\n"))
            else:
                kind = InlineKind.OPEN if token.opens else InlineKind.CLOSE
                inlines.append(Inline(token.raw, kind, tag))
        elif token.name:
            end = end_of_element(tokens, at)
            inlines.append(_code(token, tag, "".join(part.raw for part in tokens[at:end])))
        else:
            inlines.append(Inline(token.raw, InlineKind.ANCHOR))
        at = end
    return inlines


CDATA, CDATA_END = "<![CDATA[", "]]>"
_HTML = re.compile(r"</?[a-zA-Z][^<>]*>|&(?:#\d+|#[xX][0-9a-fA-F]+|[a-zA-Z]\w*);")
"""a tag or an entity"""
_ESCAPED_TAG = re.compile(r"&lt;/?[a-zA-Z](?:[^&<>]|&(?!lt;|gt;))*&gt;")


def cdata_content(token: XmlToken) -> str:
    return token.raw[len(CDATA) : -len(CDATA_END)]


def _escaped_html(raw: str, soft_breaks: bool) -> Iterator[Inline]:
    """Text of a segment; tags of HTML in it, which are escaped in XML, are no text."""
    done = 0
    escaped_tags = [
        (match, tag)
        for match in _ESCAPED_TAG.finditer(raw)
        if (tag := _TAG.fullmatch(html.unescape(match[0])))
    ]
    last = {tag["name"].lower(): match.start() for match, tag in escaped_tags if tag["slash"]}
    for match, tag in escaped_tags:
        yield from unescaped_tokens(raw[done : match.start()], soft_breaks)
        is_closed = match.start() < last.get(tag["name"].lower(), 0)
        yield _tag_token(tag, is_closed)._replace(raw=match[0])
        done = match.end()
    yield from unescaped_tokens(raw[done:], soft_breaks)


def escape_html_in_cdata(text: str) -> str:
    """Text of HTML in a CDATA section. It cannot end the section, because ``>`` is escaped."""
    return escape_html(without_control_characters(text))


def _code(token: XmlToken, tag: str, raw: str) -> Inline:
    """An element that stands for a formatting code."""
    for codes, kind in ((OPENING_CODES, InlineKind.OPEN), (CLOSING_CODES, InlineKind.CLOSE)):
        if tag in codes:
            names = ("rid", codes[tag], "id")
            values = [value for name in names if (value := xml_attribute(token.attributes, name))]
            return Inline(raw, kind, f"code {values[0] if values else ''}")
    if xml_attribute(token.attributes, "ctype") in ("lb", "x-lb"):
        return Inline(raw, InlineKind.TEXT, "\n")
    return Inline(raw, InlineKind.ATOM)


class XmlNode(NamedTuple):
    """An element: its first token, and the indices of the first and the last token."""

    token: XmlToken
    first: int
    last: int


class BilingualXml(XmlFormat):
    """XML with source and target segments."""

    is_connected = False
    why_not_lines = "its tags would be translated"

    def split(self, text: str) -> Template:
        self.tokens = xml_tokens(text)
        self.template = Template()
        self.done = 0
        self.fill()
        self.add_until(len(self.tokens))
        return self.template

    def fill(self) -> None:
        """Add the slots of all units."""
        raise NotImplementedError

    def add_until(self, end: int) -> None:
        """Copy the tokens up to an index."""
        self.template.add("".join(token.raw for token in self.tokens[self.done : end]))
        self.done = max(self.done, end)

    def children(self, node: XmlNode) -> Iterator[tuple[str, XmlNode]]:
        """The elements directly inside an element, with their names."""
        at = node.first + 1
        while at < node.last:
            token, end = self.tokens[at], at + 1
            if token.opens:
                end = end_of_element(self.tokens, at)
                yield token.name.rpartition(":")[2], XmlNode(token, at, end - 1)
            at = end

    def nodes(self, *names: str) -> Iterator[XmlNode]:
        for at, token in enumerate(self.tokens):
            if token.opens and token.name.rpartition(":")[2] in names:
                yield XmlNode(token, at, end_of_element(self.tokens, at) - 1)

    def content(self, node: XmlNode) -> Sequence[XmlToken]:
        return self.tokens[node.first + 1 : node.last] if node.last > node.first else []

    def is_blank(self, node: XmlNode) -> bool:
        """Whether an element has no content; segments (mrk) without a text do not count as content."""
        parts = [token for token in self.content(node) if token.name.rpartition(":")[2] != "mrk"]
        return not any(
            cdata_content(token).strip() if token.raw.startswith(CDATA) else token.raw.strip()
            for token in parts
        )

    def slots(self, source: XmlNode, soft_breaks: bool) -> list[str | Slot]:
        """The content of a segment; HTML in a CDATA section is a document of its own."""
        parts: list[str | Slot] = []
        tokens, start = self.content(source), 0
        for at in [*_html_sections(tokens), len(tokens)]:
            if start < at:
                document = Document(escape=escape_xml)
                add_run(document, inline_xml(tokens[start:at], soft_breaks), self.options.source)
                parts.append(Slot(document))
            if at < len(tokens):
                section = split_html(cdata_content(tokens[at]), self.options.source, atoms=True)
                section.escape = escape_html_in_cdata
                parts += [CDATA, Slot(section), CDATA_END]
            start = at + 1
        return parts

    def space_before(self, node: XmlNode) -> str:
        """The line break and indentation before an element."""
        before = self.tokens[node.first - 1]
        return before.raw if before.is_text and before.raw.isspace() else ""

    def add_element(self, opening: str, content: Sequence[str | Slot], name: str) -> None:
        self.template.add(opening, *content, f"</{name}>")


def _html_sections(tokens: Sequence[XmlToken]) -> Iterator[int]:
    """Where the CDATA sections with HTML are; those in an element that stands for a code belong to the code."""
    at = 0
    while at < len(tokens):
        token = tokens[at]
        if token.raw.startswith(CDATA) and _HTML.search(cdata_content(token)):
            yield at
        is_code = token.opens and token.name.rpartition(":")[2] not in PAIRED_TAGS
        at = end_of_element(tokens, at) if is_code else at + 1


def with_attribute(tag: str, name: str, value: str) -> str:
    """An opening tag with an attribute set; an empty element becomes an opening tag."""
    tag = re.sub(r"\s*/>$", ">", tag)
    if xml_attribute(tag, name) is None:
        return f'{tag[:-1]} {name}="{value}">'
    return re.sub(rf"""((?<![\w:.-]){name}\s*=\s*)("[^"]*"|'[^']*')""", rf'\1"{value}"', tag)


@DOCUMENT_FORMATS.register("xliff")
class XliffDocument(BilingualXml):
    """XLIFF 1.2 and 2: missing targets are filled in"""

    suffixes = (".xlf", ".xliff", ".sdlxliff", ".mqxliff", ".mxliff")
    root = "xliff"
    untranslated = ("new", "needs-translation", "initial")

    def fill(self) -> None:
        preserve = 'xml:space="preserve"'
        everywhere = any(preserve in node.token.attributes for node in self.nodes("xliff", "file"))
        language = {"file": "target-language", "xliff": "trgLang"}
        for node in self.nodes("xliff", "file", "trans-unit", "unit"):
            tag = node.token.name.rpartition(":")[2]
            if tag in language:
                self._name_language(node, language[tag])
            elif xml_attribute(node.token.attributes, "translate") != "no":
                keep_space = everywhere or preserve in node.token.attributes
                units = [node]
                if tag == "unit":
                    units = [child for name, child in self.children(node) if name == "segment"]
                for unit in units:
                    self._fill_unit(unit, keep_space)

    def _name_language(self, node: XmlNode, attribute: str) -> None:
        """State the target language if the file does not."""
        source = {"target-language": "source-language", "trgLang": "srcLang"}[attribute]
        languages = [xml_attribute(node.token.attributes, name) for name in (source, attribute)]
        if languages[0] and not languages[1] and self.options.target:
            self.add_until(node.first)
            self.template.add(with_attribute(node.token.raw, attribute, self.options.target))
            self.done += 1

    def _fill_unit(self, unit: XmlNode, preserve: bool) -> None:
        parts = dict(reversed(list(self.children(unit))))  # the first of each name
        source, target = parts.get("source"), parts.get("target")
        if source is None:
            return
        states = [unit.token.attributes, target.token.attributes if target else ""]
        state = next((value for text in states if (value := xml_attribute(text, "state"))), None)
        if target and not self.is_blank(target) and state not in self.untranslated:
            return
        segmented = parts.get("seg-source", source)
        preserve = preserve or 'xml:space="preserve"' in source.token.attributes
        content = self.slots(segmented, soft_breaks=not preserve)
        prefix = source.token.name.removesuffix("source")
        if unit.token.name.endswith("segment") and state:
            self.add_until(unit.first)
            self.template.add(with_attribute(unit.token.raw, "state", "translated"))
            self.done += 1
        if target is None:
            last = max(source.last, segmented.last)
            self.add_until(last + 1)
            self.template.add(self.space_before(source))
            self.add_element(f"<{prefix}target>", content, f"{prefix}target")
            return
        self.add_until(target.first)
        opening = re.sub(r"\s*/>$", ">", target.token.raw)
        if xml_attribute(opening, "state"):
            opening = with_attribute(opening, "state", "needs-review-translation")
        self.add_element(opening, content, f"{prefix}target")
        self.done = target.last + 1


@DOCUMENT_FORMATS.register("tmx")
class TmxDocument(BilingualXml):
    """translation memory (TMX): units without the target language get it"""

    suffixes = (".tmx",)
    root = "tmx"

    def fill(self) -> None:
        units = [
            (unit, [child for name, child in self.children(unit) if name == "tuv"])
            for unit in self.nodes("tu")
        ]
        source, target = self._languages([variant for _, variants in units for variant in variants])
        for unit, variants in units:
            texts: dict[str, tuple[XmlNode, XmlNode]] = {}
            for variant in variants:
                segment = next(
                    (child for name, child in self.children(variant) if name == "seg"), None
                )
                for language in (source, target):
                    if segment and is_language(_language(variant), language):
                        texts.setdefault(language, (variant, segment))
            if source in texts:
                self._fill_variant(unit, texts[source], texts.get(target), target)

    def _languages(self, variants: Sequence[XmlNode]) -> tuple[str, str]:
        languages = list(dict.fromkeys(map(_language, variants)))
        headers = [xml_attribute(node.token.attributes, "srclang") for node in self.nodes("header")]
        source_language = next((code for code in headers if code and code != "*all*"), "")
        source = self.options.source or source_language
        others = [code for code in languages if source and not is_language(code, source)]
        target = self.options.target or (others[0] if len(others) == 1 else "")
        if not source or not target:
            raise ValueError(
                f"languages {', '.join(languages)}: which are the source and the target? The model does not name "
                "its languages (in its recipe: data.languages)"
            )
        return source, target

    def _fill_variant(
        self,
        unit: XmlNode,
        source: tuple[XmlNode, XmlNode],
        existing: tuple[XmlNode, XmlNode] | None,
        target: str,
    ) -> None:
        """Add a variant, or fill an empty one. source, existing: a variant and its segment."""
        variant, segment = source
        content = self.slots(segment, soft_breaks=True)
        if existing is None:
            space = self.space_before(variant)
            last = max(node.last for name, node in self.children(unit) if name == "tuv")
            self.add_until(last + 1)
            self.template.add(f'{space}<tuv xml:lang="{target}"><seg>', *content, "</seg></tuv>")
        elif self.is_blank(existing[1]):
            self.add_until(existing[1].first)
            self.add_element(re.sub(r"\s*/>$", ">", existing[1].token.raw), content, "seg")
            self.done = existing[1].last + 1


def _language(variant: XmlNode) -> str:
    attributes = variant.token.attributes
    return xml_attribute(attributes, "xml:lang") or xml_attribute(attributes, "lang") or ""


# ---------------------------------------------------------------------------------------------
# JSON

_JSON = re.compile(r'(?P<string>"(?:[^"\\]|\\.)*")|[\[\]{},:]')


@DOCUMENT_FORMATS.register("json")
class JsonDocument(TextFormat):
    """JSON resources, also ARB and Chrome's messages.json: values are translated, keys are kept"""

    suffixes = (".json", ".arb")
    is_connected = False
    why_not_lines = "its keys would be translated"

    def split(self, text: str) -> Template:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from None
        chrome = isinstance(data, dict) and all(
            isinstance(value, dict) and "message" in value for value in data.values()
        )
        encode = partial(json.dumps, ensure_ascii="\\u" in text and text.isascii())
        template = Template()
        done = 0
        for path, start, end in _json_values(text):
            metadata = any(key.startswith("@") for key in path)
            if metadata or (chrome and path[1:] != ("message",)):
                continue
            raw = text[start:end]
            slot = message_slot(json.loads(raw), self.options.source, raw, encode)
            template.add(text[done:start], slot)
            done = end
        template.add(text[done:])
        return template


def _json_values(text: str) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """The keys to each string that is a value, and its span."""
    path: list[str] = []  # the current key of each open object or list
    pending: re.Match[str] | None = None
    for match in _JSON.finditer(text):
        token = match[0]
        if pending is not None and token != ":":
            yield tuple(path), *pending.span()
        if token == ":":
            assert pending is not None
            path[-1] = json.loads(pending[0])
        pending = match if match["string"] else None
        if token in "{[":
            path.append("")
        elif token in "}]":
            path.pop()
    if pending is not None:
        yield tuple(path), *pending.span()


# ---------------------------------------------------------------------------------------------
# YAML


_YAML_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)+")
"""an anchor or a tag before a value"""


@DOCUMENT_FORMATS.register("yaml")
class YamlDocument(TextFormat):
    """YAML resources, also of Rails: strings are translated, keys, anchors and comments are kept"""

    suffixes = (".yaml", ".yml")
    is_connected = False
    why_not_lines = "its keys would be translated"

    def split(self, text: str) -> Template:
        try:
            roots = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(f"not YAML: {' '.join(str(error).split())[:200]}") from None
        template = Template()
        done = 0
        if (key := self._root_key(roots)) is not None:
            template.add(text[: key.start_mark.index], self.options.target)
            done = key.end_mark.index
        scalars = {id(node): (node, flow) for root in roots for node, flow in _scalars(root, False)}
        for node, flow in sorted(scalars.values(), key=lambda scalar: scalar[0].start_mark.index):
            start, end = node.start_mark.index, node.end_mark.index
            if properties := _YAML_PROPERTIES.match(text, start, end):
                start = properties.end()
            raw = text[start:end]
            encode = partial(_yaml_scalar, raw, node.style, flow)
            slot = message_slot(node.value, self.options.source, raw, encode)
            template.add(text[done:start], slot)
            done = end
        template.add(text[done:])
        return template

    def _root_key(self, roots: Sequence[Any]) -> Any | None:
        """The key that names the source language, if it contains everything, as in Rails."""
        if len(roots) != 1 or not isinstance(roots[0], yaml.MappingNode):
            return None
        keys = [key for key, _ in roots[0].value]
        is_source = len(keys) == 1 and keys[0].value == self.options.source
        return keys[0] if is_source and self.options.source and self.options.target else None


def _scalars(node: Any, flow: bool) -> Iterator[tuple[Any, bool]]:
    """The strings that are values, and whether each is inside brackets."""
    if isinstance(node, yaml.ScalarNode):
        if node.tag == "tag:yaml.org,2002:str":
            yield node, flow
    elif isinstance(node, yaml.MappingNode | yaml.SequenceNode):
        in_brackets = flow or bool(node.flow_style)
        for child in node.value:
            yield from _scalars(child[1] if isinstance(child, tuple) else child, in_brackets)


def _yaml_scalar(raw: str, style: str | None, flow: bool, value: str) -> str:
    """A value in the style of the scalar that it replaces, or in double quotes if that is not possible."""
    written = json.dumps(value, ensure_ascii=False)
    if style == "'":
        written = "'" + value.replace("'", "''") + "'"
    elif style in ("|", ">"):
        return _yaml_block(raw, style, value)
    elif style is None:
        written = value
    probe = f"[{written}]" if flow else f"- {written}\n"
    try:
        same = "\n" not in written and yaml.safe_load(probe) == [value]
    except yaml.YAMLError:
        same = False
    return written if same else json.dumps(value, ensure_ascii=False)


def _yaml_block(raw: str, style: str, value: str) -> str:
    """A block scalar with the header, the indentation and the end of another one."""
    header, _, body = raw.partition("\n")
    first = next((line for line in body.split("\n") if line.strip()), "")
    indent = "".join(takewhile(str.isspace, first))
    end = raw[len(raw.rstrip()) :]
    lines = value.rstrip("\n").split("\n")
    separator = "\n" if style == "|" else "\n\n"
    return f"{header}\n" + separator.join(indent + line if line else "" for line in lines) + end


# ---------------------------------------------------------------------------------------------
# Java properties

_PROPERTY = re.compile(
    r"""^[ \t\f]*+(?![#!\r\n])(?P<key>(?:\\.|[^\\=:\s])*+)(?:[ \t\f]*+[=:])?+[ \t\f]*+
    (?P<value>(?:\\\r?\n|\\.|[^\\\r\n])*+)""",
    re.MULTILINE | re.VERBOSE,
)
_PROPERTY_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}


@DOCUMENT_FORMATS.register("properties")
class Properties(TextFormat):
    """Java properties: values are translated, keys and comments are kept"""

    suffixes = (".properties",)
    is_connected = False
    why_not_lines = "its keys would be translated"
    fallback_encoding = "latin-1"

    def decode(self, content: bytes) -> tuple[str, str, bytes]:
        text, encoding, mark = super().decode(content)
        self.ascii = text.isascii() or encoding == self.fallback_encoding
        return text, encoding, mark

    def split(self, text: str) -> Template:
        template = Template()
        done = 0
        encode = partial(_escape_property, self.ascii)
        for match in _PROPERTY.finditer(text):
            if match["value"].strip():
                start, end = match.span("value")
                value = _unescape_property(match["value"])
                slot = message_slot(value, self.options.source, match["value"], encode)
                template.add(text[done:start], slot)
                done = end
        template.add(text[done:])
        return template


def _unescape_property(raw: str) -> str:
    def unescape(match: re.Match[str]) -> str:
        escaped = match[1]
        if len(escaped) == 5 and escaped[0] == "u":
            return chr(int(escaped[1:], 16))
        return "" if escaped[0] in "\r\n" else _PROPERTY_ESCAPES.get(escaped, escaped)

    value = re.sub(r"\\(\r?\n[ \t\f]*|u[0-9a-fA-F]{4}|.)", unescape, raw)
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # joins surrogates


def _escape_property(ascii_only: bool, text: str) -> str:
    text = text.replace("\\", "\\\\")
    for letter, character in _PROPERTY_ESCAPES.items():
        text = text.replace(character, f"\\{letter}")
    if text.startswith(" "):
        text = f"\\{text}"
    if not ascii_only:
        return text
    units = text.encode("utf-16-be")
    codes = (int.from_bytes(units[at : at + 2]) for at in range(0, len(units), 2))
    return "".join(chr(code) if code < 128 else f"\\u{code:04X}" for code in codes)
