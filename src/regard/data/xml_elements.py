"""Reads large XML files element by element, in constant memory, and safely.

This uses expat from the standard library, not translate-toolkit or lxml: those keep the tree of the whole document in
memory, and the accelerated parser of ``xml.etree`` does not say when a document declares entities. A document may have
a DOCTYPE, as TMX files do, but must not declare entities. Nothing outside the file is ever read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from regard.data.text_files import DataFile, read_chunks
from regard.errors import RegardError

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
            yield from reader.found
            reader.found.clear()
        if empty:
            raise RegardError(f"{path}: the file is empty")
        reader.parser.Parse(b"", True)
    except expat.ExpatError as error:
        problem = expat.errors.messages.get(error.code, "error")
        raise RegardError(f"{path}:{error.lineno}: not well-formed XML: {problem}") from None
    except (LookupError, ValueError) as error:  # of an encoding that is declared but not known
        raise RegardError(f"{path}: cannot be decoded: {error}") from None
    yield from reader.found


class _ElementReader:
    """The handlers of a parser."""

    def __init__(
        self, path: DataFile, root: str, units: Collection[str], containers: Collection[str]
    ) -> None:
        self.path, self.root, self.units, self.containers = path, root, units, containers
        self.found: list[XmlElement] = []
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
            self.found.append(XmlElement(self.parser.CurrentLineNumber, element, False))

    def end(self, name: str) -> None:
        if self.builder is not None:
            self.builder.end(name.rpartition(":")[2])
            if self.depth == self.unit_depth:
                self.found.append(XmlElement(self.unit_line, self.builder.close(), True))
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

    def entity(self, name: str, *more: object) -> None:
        raise self.refuse(
            f"declares the entity {name[:40]!r}; XML with entity declarations is refused"
        )

    def skipped_entity(self, name: str, is_parameter: bool) -> None:
        if not is_parameter:
            raise self.refuse(f"the entity &{name[:40]}; is not defined")
