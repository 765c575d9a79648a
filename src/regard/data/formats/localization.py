"""Localization files (TMX, XLIFF and PO): the readers of their training pairs.

``documents/localization_formats.py`` translates such files.

All of them stream: TMX and XLIFF element by element (``read_elements``), PO files a few messages at a time, which
translate-toolkit parses.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Generator, Iterator
from contextlib import closing
from itertools import islice, product
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from regard.data.formats.base import (
    INPUT_FORMATS,
    InputFormat,
    Layout,
    NamePair,
    ReadOptions,
    abbreviate,
    how_to_choose_languages,
    language_names,
    one_line,
)
from regard.data.language_identification import is_language, normalized_code
from regard.data.pairs import Pair
from regard.data.text_files import DataFile, read_chunks, split_lines
from regard.errors import RegardError

# ---------------------------------------------------------------------------------------------
# XML elements: large files are read element by element, in constant memory, and safely.
#
# This uses expat from the standard library, not translate-toolkit or lxml: those keep the tree of the whole document in
# memory, and the accelerated parser of ``xml.etree`` does not say when a document declares entities. A document may
# have a DOCTYPE, as TMX files do, but must not declare entities. Nothing outside the file is ever read.


MAX_DEPTH = 100
"""of nested elements"""
MAX_SIZE = 1 << 24
"""characters of one unit"""
ELEMENT_SIZE = 100
"""what an element counts as, in characters"""


class XmlElement(NamedTuple):
    """An element of a document. Tags are without the prefix of a namespace, attributes as written: ``xml:lang``."""

    line: int
    element: Element
    is_unit: bool
    """whether it is complete; otherwise there are only its attributes"""


def read_elements(
    path: DataFile, root: str, units: Collection[str], containers: Collection[str]
) -> Iterator[XmlElement]:
    """The units of a document, complete, and the elements that contain or precede them, without content.

    ``root`` is the name that the outermost element must have.
    """
    reader = _ElementReader(path, root, units, containers)
    empty = True
    try:
        for chunk in read_chunks(path):
            empty = empty and not chunk
            reader.parser.Parse(chunk, False)
            yield from reader.elements
            reader.elements.clear()
        if empty:
            raise RegardError(f"{path}: the file is empty")
        reader.parser.Parse(b"", True)
    except expat.ExpatError as error:
        problem = expat.errors.messages.get(error.code, "error")
        raise RegardError(f"{path}:{error.lineno}: not well-formed XML: {problem}") from None
    except (LookupError, ValueError) as error:  # of an encoding that is declared but not known
        raise RegardError(f"{path}: cannot be decoded: {error}") from None
    yield from reader.elements


class _ElementReader:
    """The handlers of a parser."""

    def __init__(
        self, path: DataFile, root: str, units: Collection[str], containers: Collection[str]
    ) -> None:
        self.path, self.root, self.units, self.containers = path, root, units, containers
        self.elements: list[XmlElement] = []
        self.builder: TreeBuilder | None = None
        self.depth = self.unit_depth = self.unit_line = self.size = 0
        self.parser = parser = expat.ParserCreate()  # without namespaces
        parser.buffer_text = True
        parser.StartElementHandler = self.start
        parser.EndElementHandler = self.end
        parser.CharacterDataHandler = self.text
        parser.EntityDeclHandler = self.entity
        parser.SkippedEntityHandler = self.skipped_entity

    def refuse(self, problem: str) -> RegardError:
        return RegardError(f"{self.path}:{self.parser.CurrentLineNumber}: {problem}")

    def start(self, name: str, attributes: dict[str, str]) -> None:
        tag = name.rpartition(":")[2]
        self.depth += 1
        if self.depth == 1 and tag != self.root:
            raise self.refuse(f"<{tag[:40]}> is the outermost element; expected <{self.root}>")
        if self.depth > MAX_DEPTH:
            raise self.refuse(f"more than {MAX_DEPTH} nested elements")
        if self.builder is None and tag in self.units:
            self.builder, self.unit_depth, self.size = TreeBuilder(), self.depth, 0
            self.unit_line = self.parser.CurrentLineNumber
        if self.builder is not None:
            self.builder.start(tag, attributes)
            self.grow(ELEMENT_SIZE)
        elif tag in self.containers:
            element = Element(tag, attributes)
            self.elements.append(XmlElement(self.parser.CurrentLineNumber, element, False))

    def end(self, name: str) -> None:
        if self.builder is not None:
            self.builder.end(name.rpartition(":")[2])
            if self.depth == self.unit_depth:
                self.elements.append(XmlElement(self.unit_line, self.builder.close(), True))
                self.builder = None
        self.depth -= 1

    def text(self, data: str) -> None:
        if self.builder is not None:
            self.builder.data(data)
            self.grow(len(data))

    def grow(self, size: int) -> None:
        self.size += size
        if self.size > MAX_SIZE:
            raise self.refuse(f"a unit with more than {MAX_SIZE:,} characters")

    def entity(self, name: str, *details: object) -> None:
        raise self.refuse(
            f"declares the entity {name[:40]!r}; XML with entity declarations is refused"
        )

    def skipped_entity(self, name: str, is_parameter: bool) -> None:
        if not is_parameter:
            raise self.refuse(f"the entity &{name[:40]}; is not defined")


# ---------------------------------------------------------------------------------------------
# Text and languages of XML elements


CODE_ELEMENTS = frozenset(
    ("bpt", "ept", "it", "ph", "ut", "sub", "x", "bx", "ex", "sc", "ec", "sm", "em", "cp")
)
"""inline elements that stand for formatting codes of the original document; others contain text"""


def inline_text(element: Element) -> str:
    """The text of a segment, without the formatting codes in it."""
    return one_line("".join(_text_parts(element)) if len(element) else element.text or "")


def _text_parts(element: Element) -> Iterator[str]:
    yield element.text or ""
    for child in element:
        if child.tag not in CODE_ELEMENTS:
            yield from _text_parts(child)
        elif _is_line_break(child):
            yield "\n"
        yield child.tail or ""


def _is_line_break(code: Element) -> bool:
    ctype = code.get("ctype") or code.get("subType") or code.get("type") or ""
    return ctype in ("lb", "x-lb", "xlf:lb") or (code.text or "").strip().lower().startswith("<br")


# ---------------------------------------------------------------------------------------------
# TMX


class TranslationUnit(NamedTuple):
    """The texts of a unit in each language, in order."""

    line: int
    texts: list[tuple[str, str]]
    """language and text"""
    source: str | None
    """the source language, if the unit or the header names one"""


@INPUT_FORMATS.register("tmx")
class TMX(InputFormat):
    """translation memory (TMX): the languages are named by xml:lang, the source by srclang"""

    suffixes = (".tmx",)
    sample = 1000
    """units from which the languages are recognised"""

    def read(self, *paths: DataFile) -> Iterator[Pair]:
        (path,) = paths
        has_pairs = False
        chosen = self.options.requested_languages is not None
        languages = self.languages(path)
        source, target = languages
        for unit in self.units(path):
            sources, targets = (
                [text for code, text in unit.texts if is_language(code, language)]
                for language in languages
            )
            other_count = len(unit.texts) - len(sources) - len(targets)
            if other_count and not chosen:
                raise RegardError(
                    f"{path}:{unit.line}: language {_other(unit, languages)} besides {source} and {target}; "
                    + how_to_choose_languages(source, target)
                )
            pairs = [Pair(*texts) for texts in product(sources, targets) if all(texts)]
            if not pairs:
                reason = f"translation units without both {source} and {target}"
                self.options.skipped.add(reason, f"{path}:{unit.line}")
            has_pairs = has_pairs or bool(pairs)
            yield from pairs
        if not has_pairs:
            raise RegardError(f"{path}: no pairs of {source} and {target}")

    def layout(self, *paths: DataFile) -> Layout:
        languages = self.languages(paths[0])
        return Layout((), languages, language_names(languages))

    def languages(self, path: DataFile) -> NamePair:
        """The languages of source and target: those that the user requests, or the only two."""
        quiet = type(self)(ReadOptions(on_bad_line=self.options.on_bad_line))
        with closing(quiet.units(path)) as units:
            sample = list(islice(units, self.sample))
        codes: dict[str, str] = {}
        for unit in sample:
            for code, _ in unit.texts:
                codes.setdefault(normalized_code(code), code)
        if not codes:
            raise RegardError(f"{path}: no translation units")
        found_codes = list(codes.values())
        if requested := self.options.requested_languages:
            for language in requested:
                # One that occurs later is found when the file is read.
                if len(sample) < self.sample and not any(
                    is_language(c, language) for c in found_codes
                ):
                    raise RegardError(
                        f"{path}: no language {language}; found: {', '.join(found_codes)}"
                    )
            if normalized_code(requested[0]) == normalized_code(requested[1]):
                raise RegardError(f"{path}: source and target are both {requested[0]}")
            return requested
        sources = {normalized_code(unit.source) for unit in sample if unit.source}
        if len(found_codes) == 2 and len(sources) == 1:
            (source,) = sources
            matching = [code for code in found_codes if is_language(code, source)] or [
                code for code in found_codes if is_language(source, code)
            ]
            if len(matching) == 1:
                (target_code,) = (code for code in found_codes if code not in matching)
                return matching[0], target_code
        names = ", ".join(found_codes[:12]) + ", …" * (len(found_codes) > 12)
        bases = list(dict.fromkeys(re.split("[-_]", code)[0].lower() for code in found_codes))
        if len(found_codes) > len(bases) == 2:  # --languages en,de also reads en-US and en-GB
            found_codes = bases
        second_code = found_codes[1] if len(found_codes) > 1 else "de"
        question = (
            "which is the source?"
            if len(found_codes) == 2
            else "which are the source and the target?"
        )
        raise RegardError(
            f"{path}: languages {names}: {question} {how_to_choose_languages(found_codes[0], second_code)}"
        )

    def units(self, path: DataFile) -> Generator[TranslationUnit, None, None]:
        """The translation units of a file."""
        header: str | None = None
        for line, element, is_unit in read_elements(path, "tmx", ("tu",), ("header",)):
            if not is_unit:
                header = element.get("srclang")
                continue
            texts = []
            for variant in element.iterfind("tuv"):
                language = variant.get("xml:lang") or variant.get("lang")
                segment = variant.find("seg")
                if not language:
                    self.bad(f"{path}:{line}", "a translation unit has a text without xml:lang")
                    break
                texts.append((language, "" if segment is None else inline_text(segment)))
            else:
                source = element.get("srclang") or header
                yield TranslationUnit(line, texts, None if source == "*all*" else source)


def _other(unit: TranslationUnit, languages: NamePair) -> str:
    """The first language of a unit that is none of these."""
    codes = (code for code, _ in unit.texts)
    return next(
        code for code in codes if not any(is_language(code, language) for language in languages)
    )


# ---------------------------------------------------------------------------------------------
# XLIFF


class XliffSegment(NamedTuple):
    """A source and its translation, with what the file says about their languages."""

    line: int
    pair: Pair
    languages: tuple[str | None, str | None]
    is_translated: bool


@INPUT_FORMATS.register("xliff")
class XLIFF(InputFormat):
    """XLIFF 1.2 and 2, also of SDL, memoQ and Phrase; segments without a translation are left out"""

    suffixes = (".xlf", ".xliff", ".sdlxliff", ".mqxliff", ".mxliff")
    untranslated = ("new", "needs-translation", "initial")
    """states of targets that are no translations yet"""

    def read(self, *paths: DataFile) -> Iterator[Pair]:
        (path,) = paths
        requested, has_segments = self.options.requested_languages, False
        stated: tuple[str | None, str | None] | None = None
        for line, pair, languages, is_translated in self.segments(path):
            if not is_translated or not all(pair):
                reason = "segments without a translation"
                self.options.skipped.add(reason, f"{path}:{line}")
                continue
            if requested is None:
                stated = stated or languages
                if stated != languages:
                    raise RegardError(
                        f"{path}:{line}: {_stated(languages)} after {_stated(stated)}; "
                        + how_to_choose_languages(languages[0] or "en", languages[1] or "de")
                    )
            elif not _matches(languages, requested):
                if not _matches(languages[::-1], requested):
                    reason = f"segments not {language_names(requested)}"
                    self.options.skipped.add(reason, f"{path}:{line}: {_stated(languages)}")
                    continue
                pair = Pair(pair.target, pair.source)
            has_segments = True
            yield pair
        if not has_segments:
            direction = f" {language_names(requested)}" if requested else ""
            raise RegardError(f"{path}: no translated segments{direction}")

    def layout(self, *paths: DataFile) -> Layout:
        (path,) = paths
        requested = self.options.requested_languages
        if requested is None:
            with closing(self.segments(path)) as segments:
                first = next((segment for segment in segments if segment.is_translated), None)
            source, target = first.languages if first else (None, None)
            return Layout((), (source, target) if source and target else None)
        return Layout((), requested, language_names(requested))

    def segments(self, path: DataFile) -> Generator[XliffSegment, None, None]:
        """All segments of a file, in both versions of the format."""
        languages: tuple[str | None, str | None] = (None, None)
        containers = ("xliff", "file")
        for line, element, is_unit in read_elements(
            path, "xliff", ("trans-unit", "unit"), containers
        ):
            if element.tag == "file" and element.get("source-language"):
                languages = element.get("source-language"), element.get("target-language")
            elif element.tag == "xliff" and element.get("srcLang"):
                languages = element.get("srcLang"), element.get("trgLang")
            elif is_unit:
                read_unit = self._unit12 if element.tag == "trans-unit" else self._unit2
                for source, target, is_translated in read_unit(element):
                    pair = Pair(inline_text(source), inline_text(target))
                    codes = source.get("xml:lang"), target.get("xml:lang")
                    stated = (codes[0] or languages[0], codes[1] or languages[1])
                    yield XliffSegment(line, pair, stated, is_translated)

    def _unit12(self, unit: Element) -> Iterator[tuple[Element, Element, bool]]:
        """The segments of a unit of XLIFF 1.2, or the whole unit if it is not segmented."""
        source, target = unit.find("source"), unit.find("target")
        if source is None:
            return
        empty_target = Element("target")
        if target is None:
            yield source, empty_target, False
            return
        is_translated = target.get("state") not in self.untranslated
        segmented = unit.find("seg-source")
        sources = _marked(segmented) if segmented is not None else {}
        targets = _marked(target)
        if not sources or not targets:
            yield source, target, is_translated
            return
        for number, segment in sources.items():
            yield segment, targets.get(number, empty_target), is_translated and number in targets

    def _unit2(self, unit: Element) -> Iterator[tuple[Element, Element, bool]]:
        """The segments of a unit of XLIFF 2."""
        for segment in unit.iterfind("segment"):
            source, target = segment.find("source"), segment.find("target")
            if source is None:
                continue
            is_translated = target is not None and segment.get("state") not in self.untranslated
            yield source, Element("target") if target is None else target, is_translated


def _marked(element: Element) -> dict[str, Element]:
    """The segments of a source or target by their numbers."""
    marks = (mark for mark in element.iter("mrk") if mark.get("mtype") == "seg")
    return {mark.get("mid", ""): mark for mark in marks}


def _matches(stated: tuple[str | None, ...], requested: NamePair) -> bool:
    """Whether languages are the requested ones, as far as they are stated."""
    return all(
        code is None or is_language(code, language)
        for code, language in zip(stated, requested, strict=True)
    )


def _stated(languages: tuple[str | None, str | None]) -> str:
    return f"{languages[0] or 'unknown'} to {languages[1] or 'unknown'}"


# ---------------------------------------------------------------------------------------------
# PO


@INPUT_FORMATS.register("po")
class PO(InputFormat):
    """gettext messages (PO): msgid is the source, msgstr the target; fuzzy and obsolete messages are left out"""

    suffixes = (".po",)

    def read(self, *paths: DataFile) -> Iterator[Pair]:
        (path,) = paths
        swap, has_messages = False, False
        for number, store in enumerate(self._stores(path)):
            swap = swap or (number == 0 and self._is_swapped(path, store))
            for unit in store.units:
                if unit.isheader():
                    continue
                if unit.isobsolete() or unit.isfuzzy() or not unit.istranslated():
                    reason = "messages untranslated, fuzzy or obsolete"
                    self.options.skipped.add(reason, f"{path}: {str(unit.source)[:40]!r}")
                    continue
                for source, target in _messages(unit):
                    if source and target:
                        has_messages = True
                        yield Pair(target, source) if swap else Pair(source, target)
        if not has_messages:
            raise RegardError(f"{path}: no translated messages")

    def layout(self, *paths: DataFile) -> Layout:
        (path,) = paths
        with closing(self._stores(path)) as stores:
            first_store = next(stores)
        swap = self._is_swapped(path, first_store)
        if requested := self.options.requested_languages:
            return Layout((), requested, "swapped" if swap else "")
        header = first_store.parseheader()
        source, target = header.get("X-Source-Language"), header.get("Language")
        return Layout((), (source, target) if source and target else None)

    def _is_swapped(self, path: DataFile, first_store: Any) -> bool:
        """Whether the user wants to translate from the language of msgstr; raises if it is another one."""
        requested, language = (
            self.options.requested_languages,
            first_store.parseheader().get("Language"),
        )
        if not requested or not language or is_language(language, requested[1]):
            return False
        if is_language(language, requested[0]):
            return True
        raise RegardError(f"{path}: the language is {language}, not {requested[1]}")

    def _stores(self, path: DataFile) -> Generator[Any, None, None]:
        """The messages of a file, a few at a time. The first store begins with the header."""
        charset = ""
        for line, chunk in _po_chunks(path):
            if line == 1:
                charset = _po_charset(path, chunk)
            try:
                text = chunk.decode(charset)
            except UnicodeDecodeError as error:
                location = f"{path}:{line + chunk[: error.start].count(NEWLINE)}"
                problem = f"not {charset}: byte 0x{chunk[error.start]:02X}"
                raise RegardError(f"{location}: {problem}") from None
            except (LookupError, UnicodeError):  # a codec that is not for texts, such as hex
                raise RegardError(f"{path}: the charset {charset!r} is not known") from None
            # In UTF-8, because translate-toolkit decodes other encodings wrongly.
            if line == 1 and re.search(r'^\ufeff?msgid\s*""\s*msgstr', text, re.MULTILINE):
                text = PO_CHARSET.sub(r"\1UTF-8", text.removeprefix("\ufeff"))
                store = self._parse(path, text, line)
            else:
                text = PO_HEADER + text.removeprefix("\ufeff")
                store = self._parse(path, text, line - PO_HEADER.count("\n"))
            yield store
            store.units.clear()  # they refer to the store, which would be freed later

    def _parse(self, path: DataFile, text: str, first_line: int) -> Any:
        try:
            from translate.storage.pypo import pofile
        except ImportError:
            raise RegardError(
                f"{path}: PO files need translate-toolkit: pip install 'regard[formats]'"
            ) from None
        try:
            store: Any = pofile.parsestring(text.encode())  # type: ignore[no-untyped-call,unused-ignore]
            store.parseheader()
        except Exception as error:  # what it raises for a damaged file is not documented
            problem = str(error).split("\n")[0] or type(error).__name__
            location = str(path)
            if match := re.fullmatch(r"(.*) on line (\d+)(: .*)?", problem):
                location = f"{path}:{first_line + int(match[2]) - 1}"
                problem = f"{match[1]}{match[3] or ''}"
            raise RegardError(f"{location}: not a PO file: {problem[:200]}") from None
        return store


PO_CHUNK = 1 << 20
"""bytes of messages that are parsed at a time"""
PO_CHARSET = re.compile(r'("Content-Type:[^"]*charset= *)([^\s\\"]+)', re.IGNORECASE)
PO_HEADER = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\n'
NEWLINE = b"\n"


def _po_charset(path: DataFile, header: bytes) -> str:
    """The encoding that the header of a PO file names; UTF-8 if it names none."""
    match = PO_CHARSET.search(header.decode("latin-1"))
    if match is None or match[2] == "CHARSET":  # as in templates
        return "utf-8"
    try:
        return codecs.lookup(match[2]).name
    except (LookupError, ValueError):  # ValueError: a null character
        raise RegardError(f"{path}: the charset {abbreviate(match[2])} is not known") from None


def _po_chunks(path: DataFile) -> Iterator[tuple[int, bytes]]:
    """The first message of a PO file, then the others, about ``PO_CHUNK`` bytes at a time, with their first lines.

    A message ends with its msgstr: the next comment, msgctxt or msgid begins another one.
    """
    lines: list[bytes] = []
    first_line, size, ends = 1, 0, False
    limit = 0  # the first message is a chunk of its own
    number = 0
    for number, line in enumerate(split_lines(read_chunks(path), str(path)), start=1):
        word = line.lstrip().removeprefix(b"#~").lstrip()  # of an obsolete message, too
        if ends and word.startswith((b"#", b"|", b"msgctxt", b"msgid")):
            ends = False
            if size > limit:
                yield first_line, NEWLINE.join([*lines, b""])
                lines, first_line, size, limit = [], number, 0, PO_CHUNK
        ends = ends or word.startswith(b"msgstr")
        lines.append(line.removesuffix(b"\r"))
        size += len(line) + 1
        if size > MAX_SIZE:
            raise RegardError(f"{path}:{number}: a message with more than {MAX_SIZE:,} bytes")
    if number == 0:
        raise RegardError(f"{path}: the file is empty")
    yield first_line, NEWLINE.join([*lines, b""])


def _messages(unit: Any) -> list[tuple[str, str]]:
    """The message of a unit; of a plural, the singular and each form of the plural."""
    if not unit.hasplural():
        return [(one_line(str(unit.source)), one_line(str(unit.target)))]
    singular, plural = (one_line(str(text)) for text in unit.source.strings[:2])
    forms = [one_line(str(text)) for text in unit.target.strings]
    if len(forms) == 1:  # languages without a plural
        return [(plural, forms[0])]
    return [(singular, forms[0]), *((plural, form) for form in forms[1:])]
