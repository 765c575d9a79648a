"""What all document formats have in common: the registry, slots for translations, archives, and safe XML.

A format splits a file into slots, each with a text to translate, and the skeleton between them, which never changes.
The skeleton is preserved byte for byte, and so is a slot whose sentences do not change.
"""

from __future__ import annotations

import codecs
import html
import io
import re
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol
from xml.parsers import expat

from regard.data.pairs import previous_sentences
from regard.data.text_files import find_encoding, read_error
from regard.documents.markup import Document, Element, Encode, Floats, split_plain
from regard.errors import RegardError
from regard.recipe import Registry

MAX_FILE_SIZE = 1 << 28
"""bytes of a file, and of the parts of an archive together when they are decompressed"""
MAX_PARTS = 10_000
"""files in an archive"""
MAX_XML_DEPTH = 500
"""of nested elements"""
SNIFFED = 1 << 14
"""bytes from which a format is recognised"""


# ---------------------------------------------------------------------------------------------
# Slots


class SplitText(Protocol):
    """The sentences of a text, and how their translations are joined."""

    sentences: list[str]
    elements: dict[int, list[Element]]
    """the inline elements of a sentence, which need its alignment"""

    def join(
        self, translations: Sequence[str], alignments: Sequence[Floats | None] | None = None
    ) -> str: ...


@dataclass
class Slot:
    """A span of a file that is replaced by a translation."""

    text: SplitText
    raw: str | None = None
    """the original content, which is kept if no sentence changes; None if the slot is empty"""
    encode: Encode = str
    """writes the joined translation in the format of the file"""

    def write(self, translations: Sequence[str], alignments: Sequence[Floats | None]) -> str:
        if self.raw is not None and list(translations) == self.text.sentences:
            return self.raw
        return self.encode(self.text.join(translations, alignments))


@dataclass
class Template:
    """A text split into slots and the skeleton between them, in order."""

    parts: list[str | Slot] = field(default_factory=list)
    nested: list[Template] = field(default_factory=list)
    """texts inside a sentence, such as notes; the other parts have their reference instead"""

    def add(self, *parts: str | Slot) -> None:
        self.parts += parts

    def nest(self, template: Template) -> str:
        """Add a nested template; returns its reference, which no XML document can contain."""
        self.nested.append(template)
        return f"\0{len(self.nested) - 1}\0"

    def slots(self) -> Iterator[Slot]:
        yield from (part for part in self.parts if isinstance(part, Slot))
        for template in self.nested:
            yield from template.slots()

    def write(self, written: Iterator[str]) -> str:
        """The text with the given content of each slot."""
        text = "".join(part if isinstance(part, str) else next(written) for part in self.parts)
        if not self.nested:
            return text
        texts = [template.write(written) for template in self.nested]
        return re.sub("\0(\\d+)\0", lambda match: texts[int(match[1])], text)


class SentenceTranslation(NamedTuple):
    """The translation of a sentence, and its alignment if the sentence has inline elements."""

    text: str
    alignment: Floats | None = None


@dataclass
class ParsedDocument:
    """A file split into slots."""

    templates: dict[str, Template]
    """by the name of the part in an archive; other files have a single one, with an empty name"""
    rebuild: Callable[[dict[str, str]], bytes]
    """builds the file from the text of each part"""
    is_connected: bool = True
    """whether the slots are one text, so that a sentence can refer to the slots before"""

    @property
    def slots(self) -> list[Slot]:
        return [slot for template in self.templates.values() for slot in template.slots()]

    @property
    def sentences(self) -> list[str]:
        return [sentence for slot in self.slots for sentence in slot.text.sentences]

    @property
    def has_elements(self) -> list[bool]:
        """Whether each sentence has inline elements."""
        return [
            index in slot.text.elements
            for slot in self.slots
            for index in range(len(slot.text.sentences))
        ]

    def contexts(self, count: int) -> list[tuple[str, ...]]:
        """Up to ``count`` sentences before each sentence."""
        if self.is_connected:
            return previous_sentences(self.sentences, count)
        return [
            sentence
            for slot in self.slots
            for sentence in previous_sentences(slot.text.sentences, count)
        ]

    def write(self, translations: Sequence[SentenceTranslation]) -> bytes:
        """The file with the translations of all its sentences."""
        remaining = iter(translations)

        def write_slots() -> Iterator[str]:
            for slot in self.slots:
                sentences = [next(remaining) for _ in slot.text.sentences]
                yield slot.write(
                    [sentence.text for sentence in sentences],
                    [sentence.alignment for sentence in sentences],
                )

        slot_texts = write_slots()
        texts = {name: template.write(slot_texts) for name, template in self.templates.items()}
        return self.rebuild(texts)


# ---------------------------------------------------------------------------------------------
# Formats


@dataclass(frozen=True)
class DocumentOptions:
    """The languages of the model and the options of the user for a document."""

    source: str = ""
    """language code of the source; empty if it is not known"""
    target: str = ""
    columns: tuple[str, ...] = ()
    """columns of a table, by name or number (from 1)"""
    max_bytes: int | None = None
    """of the parts of an archive together when they are decompressed; the default is ``MAX_FILE_SIZE``"""


class DocumentFormat(ABC):
    """A format of documents."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    """how the names of its files end"""
    is_text: ClassVar[bool] = True
    """whether it can be printed"""
    is_connected: ClassVar[bool] = True
    """whether its slots are one text, and not separate messages"""
    why_not_lines: ClassVar[str] = ""
    """what would happen to a file that is translated line by line; empty if that is fine"""

    def __init__(self, options: DocumentOptions | None = None) -> None:
        self.options = options or DocumentOptions()

    @classmethod
    def recognizes(cls, beginning: str) -> bool:
        """Whether a file that begins with this text has this format, regardless of its name."""
        return False

    @abstractmethod
    def parse(self, content: bytes) -> ParsedDocument:
        """Split a file into slots. Raises ValueError if it is damaged."""

    def split_plain(self, text: str) -> Document:
        return split_plain(text, self.options.source)


DOCUMENT_FORMATS: Registry[type[DocumentFormat]] = Registry("documents")


def format_of_name(name: str | Path) -> type[DocumentFormat] | None:
    """The format of a file by its suffix."""
    lower = Path(name).name.lower()
    return next(
        (
            document_format
            for document_format in DOCUMENT_FORMATS.values()
            if lower.endswith(document_format.suffixes)
        ),
        None,
    )


def format_of_content(path: Path) -> type[DocumentFormat] | None:
    """The format of a file by its first bytes; None if they are lines of text, or cannot be read again."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            sample = file.read(SNIFFED)
    except OSError as error:
        raise read_error(path, error) from None
    return recognize(sample)


def recognize(sample: bytes) -> type[DocumentFormat] | None:
    """The format of a file that begins with these bytes; None if they are lines of text."""
    if sample.startswith(b"PK\x03\x04"):
        beginning = sample.decode("latin-1")
    else:
        beginning = sample.decode(find_encoding(sample), errors="ignore").removeprefix("\ufeff")
    return next(
        (
            document_format
            for document_format in DOCUMENT_FORMATS.values()
            if document_format.recognizes(beginning)
        ),
        None,
    )


def read_document(path: Path, options: DocumentOptions) -> ParsedDocument:
    """Read a document; its format is recognised by its suffix."""
    document_format = format_of_name(path)
    assert document_format is not None, path
    try:
        if path.stat().st_size > MAX_FILE_SIZE:
            raise RegardError(f"{path}: larger than {MAX_FILE_SIZE >> 20} MiB")
        content = path.read_bytes()
    except OSError as error:
        raise read_error(path, error) from None
    try:
        return document_format(options).parse(content)
    except ValueError as error:
        raise RegardError(f"{path}: {error}") from None


class TextFormat(DocumentFormat):
    """A format of text files."""

    fallback_encoding: ClassVar[str | None] = None
    """encoding of files that are not Unicode"""

    @abstractmethod
    def split(self, text: str) -> Template:
        """Split a text into slots."""

    def parse(self, content: bytes) -> ParsedDocument:
        text, encoding, mark = self.decode(content)

        def rebuild(texts: dict[str, str]) -> bytes:
            try:
                return mark + texts[""].encode(encoding)
            except UnicodeEncodeError as error:
                character = texts[""][error.start]
                raise RegardError(f"{encoding} cannot encode {character!r}") from None

        return ParsedDocument({"": self.split(text)}, rebuild, self.is_connected)

    def decode(self, content: bytes) -> tuple[str, str, bytes]:
        """The text, its encoding and its byte order mark."""
        mark = next((mark for mark in _MARKS if content.startswith(mark)), b"")
        encoding = _MARKS[mark] if mark else find_encoding(content[:SNIFFED])
        try:
            return content[len(mark) :].decode(encoding), encoding, mark
        except UnicodeDecodeError as error:
            if self.fallback_encoding and not mark:
                return content.decode(self.fallback_encoding), self.fallback_encoding, mark
            raise ValueError(
                f"not {encoding.upper()} text (byte {error.start:,}); convert it with iconv first"
            ) from None


_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",  # before UTF-16: the marks begin alike
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


class XmlFormat(TextFormat):
    """A format of XML files."""

    root: ClassVar[str]
    """the name of the outermost element"""

    @classmethod
    def recognizes(cls, beginning: str) -> bool:
        first = re.search(r"<([A-Za-z][\w:.-]*)", re.sub(r"(?s)<!--.*?-->", "", beginning))
        return (
            beginning.lstrip().startswith("<")
            and first is not None
            and first[1].rpartition(":")[2] == cls.root
        )

    def decode(self, content: bytes) -> tuple[str, str, bytes]:
        declared = re.match(rb"""<\?xml[^>]*?encoding\s*=\s*["']([\w.-]+)""", content)
        if declared:
            try:
                encoding = declared[1].decode("ascii")
                return content.decode(encoding), encoding, b""
            except (LookupError, UnicodeDecodeError):
                raise ValueError(f"is not in its declared encoding, {encoding[:40]}") from None
        return super().decode(content)


# ---------------------------------------------------------------------------------------------
# XML


class XmlToken(NamedTuple):
    """A piece of an XML document: a tag, text, or other markup."""

    raw: str
    name: str = ""
    """of a tag, with its prefix"""
    attributes: str = ""
    opens: bool = False
    closes: bool = False
    """an empty element opens and closes"""
    is_text: bool = False


_XML = re.compile(
    r"""
    <!--.*?--> | <\?.*?\?> | <!DOCTYPE[^>\[]*(?:\[.*?\]\s*)?> | (?P<cdata><!\[CDATA\[.*?\]\]>)
    | <(?P<close>/)?(?P<name>[^\s/>]+)(?P<attributes>(?:[^>"'/]|"[^"]*"|'[^']*'|/(?!>))*)(?P<empty>/)?>
    """,
    re.VERBOSE | re.DOTALL,
)


def xml_tokens(text: str) -> list[XmlToken]:
    """The tokens of a well-formed XML document; concatenated, they are the document. Raises ValueError.

    Nothing outside the document is read, and one that declares entities is refused: they can expand without limit.
    """
    _check_xml(text)
    tokens: list[XmlToken] = []
    done = 0
    for match in _XML.finditer(text):
        if match.start() > done:
            tokens.append(XmlToken(text[done : match.start()], is_text=True))
        name = match["name"]
        if name:
            tokens.append(
                XmlToken(
                    *(match[0], name, match["attributes"]),
                    opens=not match["close"],
                    closes=bool(match["close"] or match["empty"]),
                )
            )
        else:
            tokens.append(XmlToken(match[0], is_text=bool(match["cdata"])))
        done = match.end()
    if done < len(text):
        tokens.append(XmlToken(text[done:], is_text=True))
    return tokens


def _check_xml(text: str) -> None:
    depth = 0
    parser = expat.ParserCreate("utf-8")

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > MAX_XML_DEPTH:
            raise ValueError(f"more than {MAX_XML_DEPTH} nested elements")

    def end(name: str) -> None:
        nonlocal depth
        depth -= 1

    def entity(name: str, *details: object) -> None:
        raise ValueError(
            f"declares the entity {name[:40]!r}; XML with entity declarations is refused"
        )

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.EntityDeclHandler = entity
    try:
        parser.Parse(text.encode("utf-8", "surrogatepass"), True)
    except expat.ExpatError as error:
        problem = expat.errors.messages.get(error.code, "error")
        raise ValueError(f"line {error.lineno}: not well-formed XML: {problem}") from None


def end_of_element(tokens: Sequence[XmlToken], at: int) -> int:
    """The index after the element that begins at a token."""
    depth = 0
    while True:
        depth += tokens[at].opens - tokens[at].closes
        at += 1
        if depth == 0:
            return at


def xml_attribute(attributes: str, name: str) -> str | None:
    """The value of an attribute, as it is written."""
    match = re.search(rf"""(?<![\w:.-]){re.escape(name)}\s*=\s*("[^"]*"|'[^']*')""", attributes)
    return match[1][1:-1] if match else None


_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


def without_control_characters(text: str) -> str:
    """Text without the characters that XML does not allow."""
    return _NOT_XML.sub("", text)


def escape_xml(text: str) -> str:
    """Text in an XML document."""
    return html.escape(without_control_characters(text), quote=False)


# ---------------------------------------------------------------------------------------------
# Archives


class ArchiveFormat(DocumentFormat):
    """A zip archive with XML files, as office programs write it."""

    is_text = False
    why_not_lines = "it is an archive, not text"
    translated: ClassVar[re.Pattern[str]]
    """names of the parts that are translated"""
    required: ClassVar[str]
    """the part that every such archive has"""

    @abstractmethod
    def split(self, text: str) -> Template:
        """Split an XML part into slots."""

    def parse(self, content: bytes) -> ParsedDocument:
        parts = read_archive(content, self.options.max_bytes)
        if self.required not in {info.filename for info, _ in parts}:
            raise ValueError(f"contains no {self.required}, so it is not a {self.suffixes[0]} file")
        templates = {}
        for info, data in parts:
            if self.translated.fullmatch(info.filename):
                try:
                    text = data.decode("utf-8-sig")
                    templates[info.filename] = self.split(text)
                except ValueError as error:
                    raise ValueError(f"{info.filename}: {error}") from None

        def rebuild(texts: dict[str, str]) -> bytes:
            return write_archive(
                [
                    (info, texts[info.filename].encode() if info.filename in texts else data)
                    for info, data in parts
                ]
            )

        return ParsedDocument(templates, rebuild)


Part = tuple[zipfile.ZipInfo, bytes]
"""a file of an archive: its header and its content"""


def read_archive(content: bytes, max_bytes: int | None = None) -> list[Part]:
    """The files of an archive in order; their actual total size is limited, regardless of their headers."""
    parts: list[Part] = []
    left = max_bytes = max_bytes or MAX_FILE_SIZE
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            infos = archive.infolist()
            if len(infos) > MAX_PARTS:
                raise ValueError(f"{len(infos):,} files in the archive; at most {MAX_PARTS:,}")
            for info in infos:
                if info.flag_bits & 1:
                    raise ValueError("encrypted; remove its password first")
                with archive.open(info) as file:
                    data = file.read(left + 1)
                left -= len(data)
                if left < 0:
                    raise ValueError(f"larger than {max_bytes >> 20} MiB when decompressed")
                parts.append((info, data))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError) as error:
        raise ValueError(f"a damaged archive: {error}") from None
    return parts


def write_archive(parts: Sequence[Part]) -> bytes:
    """Write an archive with the same order, compression and dates as the original."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for info, data in parts:
            header = zipfile.ZipInfo(info.filename, info.date_time)
            header.compress_type, header.external_attr = info.compress_type, info.external_attr
            header.create_system = info.create_system
            archive.writestr(header, data)
    return buffer.getvalue()
