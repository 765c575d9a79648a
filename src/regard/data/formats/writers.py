"""Output formats: each class writes pairs of text to a file of one format, pair by pair.

    @OUTPUT_FORMATS.register("bitext")
    class Bitext(LineWriter):
        '''source ||| target'''
        suffixes = (".bitext",)

        def line(self, pair: Pair) -> str: ...

The name of the file chooses the format. The formats that ``regard data convert`` writes can also be read
(the other modules of this package).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TextIO
from xml.sax.saxutils import escape, quoteattr

import zstandard

from regard.data.formats.base import NamePair, abbreviate
from regard.data.pairs import Pair
from regard.data.text_files import uncompressed_name
from regard.errors import RegardError
from regard.recipe import Registry

ROWS = 10_000
"""pairs that are written to a Parquet file at a time"""


class PairWriter(ABC):
    """Writes pairs to a file; a context manager."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    """how the names of its files end"""
    is_text: ClassVar[bool] = True
    """whether its files may be compressed (.gz, .zst, .xz)"""

    def __init__(self, path: Path, name: str, languages: NamePair | None = None) -> None:
        """``path`` is the file to write, ``name`` the one that it will have."""
        self.path, self.name, self.languages = path, name, languages
        self.columns = languages or ("source", "target")

    @abstractmethod
    def write(self, pair: Pair) -> None:
        """Write one pair."""

    @abstractmethod
    def close(self) -> None:
        """Finish the file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


OUTPUT_FORMATS: Registry[type[PairWriter]] = Registry("--output")


class TextWriter(PairWriter):
    """Writes a text file, compressed if its name says so."""

    def __init__(self, path: Path, name: str, languages: NamePair | None = None) -> None:
        super().__init__(path, name, languages)
        self.file = open_text(path, name)

    def close(self) -> None:
        self.file.close()


def open_text(path: Path, name: str) -> TextIO:
    """A text file to write; ``name`` says whether it is compressed."""
    suffix = Path(name).suffix
    if suffix == ".gz":
        return io.TextIOWrapper(ReproducibleGzip(path), encoding="utf-8", newline="")
    if suffix == ".xz":
        return lzma.open(path, "wt", encoding="utf-8", newline="")
    if suffix == ".zst":
        compressed: TextIO = zstandard.open(path, "wt", encoding="utf-8", newline="")
        return compressed
    return path.open("w", encoding="utf-8", newline="")


class ReproducibleGzip(gzip.GzipFile):
    """A gzip file without a time and a name in it: equal contents are equal files."""

    def __init__(self, path: Path) -> None:
        self.compressed = path.open("wb")
        super().__init__("", "wb", 6, self.compressed, mtime=0)

    def close(self) -> None:
        super().close()
        self.compressed.close()


def one_field(text: str) -> str:
    """A text as a field of a TSV file: tabs and line breaks become spaces."""
    return text.replace("\t", " ").replace("\n", " ").replace("\r", " ")


def tsv_line(pair: Pair, where: str) -> str:
    """A pair as a line of a TSV file, without its end; ``where`` is for the error if the pair cannot be one."""
    for text in pair[:2]:
        if any(character in text for character in "\t\n\r"):
            raise RegardError(
                f"{where}: {abbreviate(text)} contains a tab or a line break, which separate fields; "
                "choose an --output name that ends in .jsonl"
            )
    return f"{pair.source}\t{pair.target}"


def json_line(pair: Pair) -> str:
    """A pair as a JSON object in one line, without its end."""
    return json.dumps({"source": pair.source, "target": pair.target}, ensure_ascii=False)


class LineWriter(TextWriter):
    """Writes one line for each pair."""

    def write(self, pair: Pair) -> None:
        self.file.write(self.line(pair) + "\n")

    @abstractmethod
    def line(self, pair: Pair) -> str:
        """A pair as a line."""


@OUTPUT_FORMATS.register("tsv")
class TSVWriter(LineWriter):
    """source, tab, target, without a header"""

    suffixes = (".tsv", ".txt")

    def line(self, pair: Pair) -> str:
        return tsv_line(pair, self.name)


@OUTPUT_FORMATS.register("csv")
class CSVWriter(TextWriter):
    """comma-separated values with a header: the languages, or source and target"""

    suffixes = (".csv",)

    def __init__(self, path: Path, name: str, languages: NamePair | None = None) -> None:
        super().__init__(path, name, languages)
        self.writer = csv.writer(self.file, lineterminator="\n")
        self.writer.writerow(self.columns)

    def write(self, pair: Pair) -> None:
        self.writer.writerow(pair[:2])


@OUTPUT_FORMATS.register("jsonl")
class JSONLWriter(LineWriter):
    """JSON lines with the keys source and target"""

    suffixes = (".jsonl", ".ndjson")

    def line(self, pair: Pair) -> str:
        return json_line(pair)


@OUTPUT_FORMATS.register("json")
class JSONWriter(TextWriter):
    """a JSON array of objects with the keys source and target"""

    suffixes = (".json",)

    def __init__(self, path: Path, name: str, languages: NamePair | None = None) -> None:
        super().__init__(path, name, languages)
        self.separator = "[\n"

    def write(self, pair: Pair) -> None:
        self.file.write(self.separator + json_line(pair))
        self.separator = ",\n"

    def close(self) -> None:
        self.file.write("[]\n" if self.separator == "[\n" else "\n]\n")
        super().close()


@OUTPUT_FORMATS.register("parquet")
class ParquetWriter(PairWriter):
    """Parquet with two columns of strings: the languages, or source and target"""

    suffixes = (".parquet",)
    is_text = False

    def __init__(self, path: Path, name: str, languages: NamePair | None = None) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        super().__init__(path, name, languages)
        self.schema = pa.schema([(column, pa.string()) for column in self.columns])
        self.writer = parquet.ParquetWriter(path, self.schema)
        self.rows: list[Pair] = []

    def write(self, pair: Pair) -> None:
        self.rows.append(pair)
        if len(self.rows) == ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self.writer.close()

    def _flush(self) -> None:
        import pyarrow as pa

        sides = [[pair.source for pair in self.rows], [pair.target for pair in self.rows]]
        self.writer.write_table(pa.table(sides, schema=self.schema))
        self.rows.clear()


@OUTPUT_FORMATS.register("tmx")
class TMXWriter(TextWriter):
    """translation memory (TMX 1.4)"""

    suffixes = (".tmx",)

    def __init__(self, path: Path, name: str, languages: NamePair | None = None) -> None:
        if languages is None:
            raise RegardError(
                f"{name}: TMX needs language codes; pass --languages, for example en,de"
            )
        super().__init__(path, name, languages)
        self.file.write(
            '<?xml version="1.0" encoding="UTF-8"?>\n<tmx version="1.4">\n'
            '  <header creationtool="regard" creationtoolversion="1" segtype="sentence" o-tmf="regard"'
            f' adminlang="en" srclang={quoteattr(languages[0])} datatype="plaintext"/>\n  <body>\n'
        )

    def write(self, pair: Pair) -> None:
        variants = "".join(
            f"<tuv xml:lang={quoteattr(language)}><seg>{_xml_text(text, self.name)}</seg></tuv>"
            for language, text in zip(self.columns, pair[:2], strict=True)
        )
        self.file.write(f"    <tu>{variants}</tu>\n")

    def close(self) -> None:
        self.file.write("  </body>\n</tmx>\n")
        super().close()


@OUTPUT_FORMATS.register("xliff")
class XLIFFWriter(TextWriter):
    """XLIFF 1.2"""

    suffixes = (".xlf", ".xliff")

    def __init__(self, path: Path, name: str, languages: NamePair | None = None) -> None:
        if languages is None:
            raise RegardError(
                f"{name}: XLIFF needs language codes; pass --languages, for example en,de"
            )
        super().__init__(path, name, languages)
        self.number = 0
        self.file.write(
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            '<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2">\n'
            f'<file original="regard" datatype="plaintext" source-language={quoteattr(languages[0])}'
            f" target-language={quoteattr(languages[1])}>\n<body>\n"
        )

    def write(self, pair: Pair) -> None:
        self.number += 1
        source, target = (_xml_text(text, self.name) for text in pair[:2])
        self.file.write(
            f'<trans-unit id="{self.number}" xml:space="preserve"><source>{source}</source>'
            f"<target>{target}</target></trans-unit>\n"
        )

    def close(self) -> None:
        self.file.write("</body>\n</file>\n</xliff>\n")
        super().close()


def _xml_text(text: str, name: str) -> str:
    for character in text:
        if (character < " " and character not in "\t\n\r") or character in "\ufffe\uffff":
            raise RegardError(f"{name}: XML cannot represent a character in {abbreviate(text)}")
    return escape(text)


@OUTPUT_FORMATS.register("xlsx")
class XLSXWriter(PairWriter):
    """a spreadsheet with a header: the languages, or source and target (needs openpyxl)"""

    suffixes = (".xlsx",)
    is_text = False

    def __init__(self, path: Path, name: str, languages: NamePair | None = None) -> None:
        try:
            from openpyxl import Workbook
        except ImportError:
            raise RegardError(f"{name}: needs openpyxl: pip install 'regard[formats]'") from None
        super().__init__(path, name, languages)
        self.book = Workbook(write_only=True)
        self.sheet: Any = self.book.create_sheet()
        self.sheet.append([*self.columns])

    def write(self, pair: Pair) -> None:
        from openpyxl.cell import WriteOnlyCell
        from openpyxl.utils.exceptions import IllegalCharacterError

        try:
            cells = [WriteOnlyCell(self.sheet, text) for text in pair[:2]]
        except IllegalCharacterError:
            raise RegardError(
                f"{self.name}: a spreadsheet cannot contain {abbreviate(pair.source)}"
            ) from None
        for cell in cells:
            cell.data_type = "s"  # a text that begins with = is no formula
        self.sheet.append(cells)

    def close(self) -> None:
        self.book.save(self.path)


class ParallelWriter(PairWriter):
    """two line-parallel text files"""

    def __init__(self, paths: Sequence[Path], names: Sequence[str]) -> None:
        super().__init__(paths[0], " and ".join(names))
        self.files = [open_text(path, name) for path, name in zip(paths, names, strict=True)]

    def write(self, pair: Pair) -> None:
        for file, text in zip(self.files, pair[:2], strict=True):
            if "\n" in text or "\r" in text:
                raise RegardError(f"{self.name}: {abbreviate(text)} contains a line break")
            file.write(text + "\n")

    def close(self) -> None:
        for file in self.files:
            file.close()


def output_format(path: Path) -> type[PairWriter]:
    """The format of a file by its name."""
    name = uncompressed_name(path).lower()
    for format_class in OUTPUT_FORMATS.values():
        if name.endswith(format_class.suffixes) and (
            format_class.is_text or path.name.lower() == name
        ):
            return format_class
    suffixes = ", ".join(
        suffix for format_class in OUTPUT_FORMATS.values() for suffix in format_class.suffixes
    )
    raise RegardError(f"--output {path}: unknown format; the name must end in one of {suffixes}")
