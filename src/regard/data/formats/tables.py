"""Tables of pairs: TSV, CSV, XLSX, JSON lines, JSON, Parquet.

The columns of source and target follow from a header or from keys, see ``choose_columns``, or from what the user says.
"""

from __future__ import annotations

import csv
import json
import re
from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, ClassVar

from regard.data.formats.base import (
    INPUT_FORMATS,
    InputFormat,
    Layout,
    ReadOptions,
    abbreviate,
    one_line,
)
from regard.data.language_identification import is_language, language_code
from regard.data.pairs import Pair
from regard.data.text_files import MAX_LINE_BYTES, DataFile, read_error, read_lines
from regard.errors import RegardError

# ---------------------------------------------------------------------------------------------
# Columns: which columns of a table, or keys of its records, are source and target


_SOURCE_NAMES = """
source src source_text src_text source_sentence source_segment input sentence text
"""
SOURCE_NAMES = frozenset(_SOURCE_NAMES.split())
_TARGET_NAMES = """
target tgt trg target_text tgt_text target_sentence target_segment output translation reference ref label
"""
TARGET_NAMES = frozenset(_TARGET_NAMES.split())
TEXT_NAMES = SOURCE_NAMES | TARGET_NAMES
_OTHER_NAMES = """
id idx index # nr line line_id line_number number key guid doc doc_id document segment_id sentence_id score similarity
quality domain corpus dataset url licence license attribution date notes note comment comments context split
reason rank source_lang src_lang source_language target_lang tgt_lang target_language direction
"""
OTHER_NAMES = frozenset(_OTHER_NAMES.split())
"""names of columns that are neither"""
LICENCE = re.compile(r"CC[- ]?(BY|0)\b")
"""what Tatoeba's third column begins with"""


def choose_columns(
    names: Sequence[str], options: ReadOptions, noun: str = "columns"
) -> tuple[int, int]:
    """The columns of source and target among those with these names; raises ValueError if it is not certain."""
    if options.columns:
        source, target = (_named_column(name, names, noun) for name in options.columns)
        if source == target:
            raise ValueError(f"--columns {','.join(options.columns)} names one column twice")
        return source, target
    if options.languages:
        source_language, target_language = options.languages
        matches = _columns_of(source_language, names), _columns_of(target_language, names)
        if len(matches[0]) == len(matches[1]) == 1 and matches[0] != matches[1]:
            return matches[0][0], matches[1][0]
    keys = [_heading(name)[0] for name in names]
    roles = [
        [number for number, key in enumerate(keys) if key in role_names]
        for role_names in (SOURCE_NAMES, TARGET_NAMES)
    ]
    languages = [number for number, name in enumerate(names) if _names_language(name, len(names))]
    by_role, by_language = all(len(role) == 1 for role in roles), len(languages) == 2
    if by_role and {*languages} <= {*chain(*roles)}:
        return roles[0][0], roles[1][0]
    if by_language and not by_role:
        return languages[0], languages[1]
    candidates = ", ".join(map(abbreviate, names[:12])) + ", …" * (len(names) > 12)
    examples = (
        [names[number] for number in languages[:2]] if len(languages) > 1 else list(names[:2])
    )
    raise ValueError(
        f"which {noun} are source and target? Candidates: {candidates}; {how_to_choose(examples)}"
    )


def _likely_texts(fields: Sequence[str]) -> list[str]:
    """The numbers of the first two columns that are not numbers, identifiers and the like."""
    flags = [field.isdecimal() or _key(field) in OTHER_NAMES for field in fields]
    texts = [str(number) for number, is_other in enumerate(flags, 1) if not is_other]
    return texts[:2] if len(texts) > 1 else ["1", "2"]


def how_to_choose(examples: Sequence[str]) -> str:
    """How to name the columns, in a command or in a recipe."""
    example = f"{','.join(examples)} " if len(examples) == 2 else "SOURCE,TARGET "
    return f"name them with --columns, for example --columns {example}(in a recipe: columns)"


def is_header(cells: Sequence[str]) -> bool:
    """Whether all cells are known names of columns or languages, or blank, and two of them name texts."""
    cells = [cell for cell in cells if cell.strip()]  # spreadsheets write empty columns, too
    keys = [_key(cell) for cell in cells]
    texts = [_heading(cell)[0] in TEXT_NAMES or _names_language(cell, len(cells)) for cell in cells]
    all_known = all(text or key in OTHER_NAMES for text, key in zip(texts, keys, strict=True))
    return all_known and sum(texts) >= 2 and len({*keys}) == len(keys)


def column_languages(names: Sequence[str]) -> tuple[str, str] | None:
    """The languages that two columns are named after."""
    source, target = (_heading(name)[1] for name in names)
    return (source, target) if source and target else None


def _named_column(column: str, names: Sequence[str], noun: str) -> int:
    for matches in (
        [number for number, name in enumerate(names) if name == column],
        [number for number, name in enumerate(names) if _leaf(name) == column],
        [number for number, name in enumerate(names) if _key(name) == _key(column)],
        _columns_of(column, names) if language_code(column) else [],
    ):
        if len(matches) == 1:
            return matches[0]
    if column.isdecimal() and 1 <= int(column) <= len(names):
        return int(column) - 1
    known_names = ", ".join(map(abbreviate, names[:12]))
    raise ValueError(f"no column {abbreviate(column)} among the {noun} {known_names}")


def _columns_of(language: str, names: Sequence[str]) -> list[int]:
    codes = [_heading(name)[1] for name in names]
    return [number for number, code in enumerate(codes) if code and is_language(code, language)]


def _names_language(name: str, columns: int) -> bool:
    """Whether a column is named after a language; ``id`` is Indonesian only beside a single other column."""
    named = _heading(name)[1] is not None
    return named and (columns == 2 or _key(name) not in OTHER_NAMES)


def _heading(name: str) -> tuple[str, str | None]:
    """What a column is named after, and its language: ``source`` and ``en`` of ``source_en``, of ``English source``."""
    words = re.split(r"[\s_-]+", _leaf(name).strip())
    for cut in range(1, len(words)):
        for text, language in ((words[:cut], words[cut:]), (words[cut:], words[:cut])):
            key, code = _key("_".join(text)), language_code("-".join(language))
            if key in TEXT_NAMES and code and _key(code) not in OTHER_NAMES:
                return key, code
    return _key(name), language_code(_leaf(name))


def _leaf(name: str) -> str:
    """``en`` of ``translation.en``."""
    return name.rpartition(".")[2]


def _key(name: str) -> str:
    return re.sub(r"[\s_-]+", "_", _leaf(name).strip().casefold())


# ---------------------------------------------------------------------------------------------
# TSV and CSV


@dataclass(frozen=True)
class TableLayout:
    """Which fields of a record are source and target."""

    columns: tuple[int, int]
    names: tuple[str, ...] = ()
    """of all columns, if the first record is a header"""
    first_line: int = 0
    """the number of the line with the first record"""
    width: int = 2
    """number of fields of the first record"""

    def describe(self, options: ReadOptions, default: tuple[int, int] = (0, 1)) -> Layout:
        """The layout as the user sees it."""
        if not self.names:
            numbers = f"{self.columns[0] + 1} and {self.columns[1] + 1} of {self.width}"
            key = "" if self.columns == default else f"columns {self.columns}"
            details = (f"columns {numbers}, without a header",) if self.width > 2 or key else ()
            return Layout(details, options.languages, key)
        source, target = (self.names[column] for column in self.columns)
        names = ", ".join(filter(None, self.names))
        details = (f"columns {names}; source {source}, target {target}",)
        languages = options.languages or column_languages((source, target))
        return Layout(details, languages, f"named {source!r} {target!r}")


class DelimitedFormat(InputFormat):
    """A table of text fields, with or without a header."""

    @abstractmethod
    def records(self, path: DataFile) -> Generator[tuple[int, list[str]], None, None]:
        """The fields of each record, with the number of its line."""

    def layout(self, *paths: DataFile) -> Layout:
        return self.find_layout(paths[0]).describe(self.options)

    def find_layout(self, path: DataFile) -> TableLayout:
        """The layout of a file, from its first record with two fields."""
        # Bad lines are counted when the file is read, not here as well.
        quiet = type(self)(ReadOptions(on_bad_line=self.options.on_bad_line))
        with closing(quiet.records(path)) as records:
            for number, fields in records:
                if len(fields) < 2:
                    self.check_width(path, number, fields)
                    continue
                try:
                    return _table_layout(number, fields, self.options)
                except ValueError as error:
                    raise RegardError(f"{path}: {error}") from None
        raise RegardError(f"{path}: no line has two columns")

    def read(self, *paths: DataFile) -> Iterator[Pair]:
        (path,) = paths
        layout = self.find_layout(path)
        source, target = layout.columns
        for number, fields in self.records(path):
            if layout.names and number == layout.first_line:
                continue
            # A record as wide as the first one, as most are, has no problem in any format.
            if len(fields) != layout.width and (problem := self.problem(fields, layout)):
                self.bad(self.location(path, number), problem)
            else:
                yield Pair(self.text(fields[source]), self.text(fields[target]))

    def problem(self, fields: list[str], layout: TableLayout) -> str | None:
        """Why a record cannot be read, or None."""
        min_columns = max(layout.columns) + 1
        return self.too_few(fields, min_columns) if len(fields) < min_columns else None

    def location(self, path: DataFile, number: int) -> str:
        """How a record is named in messages."""
        return f"{path}:{number}"

    def text(self, field: str) -> str:
        """The text of a field, which may have several lines."""
        return one_line(field)

    def check_width(self, path: DataFile, number: int, fields: list[str]) -> None:
        """Raise if the first record has fewer than two fields, unless bad lines are skipped."""
        if self.options.on_bad_line == "error":
            self.bad(f"{path}:{number}", self.too_few(fields, 2))

    def too_few(self, fields: list[str], min_columns: int) -> str:
        columns = "1 column" if len(fields) == 1 else f"{len(fields)} columns"
        return f"{columns} in {abbreviate(' '.join(fields))}; at least {min_columns} are needed"


def _table_layout(number: int, fields: Sequence[str], options: ReadOptions) -> TableLayout:
    """The layout of a table with this first record."""
    fields = [field.strip() for field in fields]
    named = options.columns is not None and not all(name.isdecimal() for name in options.columns)
    if named or is_header(fields):
        columns = choose_columns(fields, options)
        return TableLayout(columns, tuple(fields), number, len(fields))
    width = len(fields)
    if options.columns is not None:
        columns = choose_columns([str(column) for column in range(1, width + 1)], options)
        return TableLayout(columns, (), number, width)
    if width > 2 and not all(LICENCE.match(field) for field in fields[2:3]):
        listing = ", ".join(
            f"{column} {abbreviate(text[:30])}" for column, text in enumerate(fields[:8], 1)
        )
        raise ValueError(
            f"{width} columns without known names: {listing}; {how_to_choose(_likely_texts(fields))}; "
            "use names if the first line is a header"
        )
    return TableLayout((0, 1), (), number, width)


@INPUT_FORMATS.register("tsv")
class TSV(DelimitedFormat):
    """tab-separated values, with or without a header; of two columns or without names, source is the first"""

    suffixes = (".tsv",)

    def text(self, field: str) -> str:
        return field

    def records(self, path: DataFile) -> Generator[tuple[int, list[str]], None, None]:
        for number, line in self.lines(path):
            yield number, line.split("\t")

    def problem(self, fields: list[str], layout: TableLayout) -> str | None:
        if len(fields) > layout.width and not LICENCE.match(fields[layout.width]):
            # A tab inside a text must not cut it.
            return f"{len(fields)} columns, but the first line has {layout.width}"
        return super().problem(fields, layout)

    def too_few(self, fields: list[str], min_columns: int) -> str:
        if len(fields) < 2:
            return f"no tab in {abbreviate(fields[0])}; a line is source, tab, target"
        return super().too_few(fields, min_columns)


@INPUT_FORMATS.register("csv")
class CSV(DelimitedFormat):
    """comma-separated values, also with semicolons as spreadsheets write them, with or without a header"""

    suffixes = (".csv",)
    delimiters = ",;\t|"

    def problem(self, fields: list[str], layout: TableLayout) -> str | None:
        if len(fields) == layout.width:
            return None
        # An unquoted comma must not cut a text.
        return f"{len(fields)} fields, but the first line has {layout.width}"

    def records(self, path: DataFile) -> Generator[tuple[int, list[str]], None, None]:
        numbers = [0]
        reader = csv.reader(
            self._numbered(path, numbers), delimiter=self.delimiter(path), strict=True
        )
        while True:
            begins = numbers[0] + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                self.bad(f"{path}:{begins}", f"not CSV: {error}")
                continue
            if fields:  # blank lines are no records
                yield begins, fields

    def delimiter(self, path: DataFile) -> str:
        """The character that divides the first records into the same number of fields, at least two."""
        quiet = type(self)(ReadOptions(on_bad_line="skip"))
        with closing(quiet.lines(path)) as lines:
            sample = [line + "\n" for _, line in islice(lines, 50)]
        possible = {}
        for delimiter in self.delimiters:
            try:
                records = [fields for fields in csv.reader(sample, delimiter=delimiter) if fields]
            except csv.Error:
                continue
            if records and is_header(records[0]):
                return delimiter
            # The last record may continue after the sample.
            widths = {len(fields) for fields in records[:-1] or records}
            if len(widths) == 1 and min(widths) > 1:
                possible[delimiter] = min(widths)
        if len(possible) > 1 and not {"\t"} & {*possible}:
            choices = " or ".join(
                f"{candidate!r} ({width} columns)" for candidate, width in possible.items()
            )
            raise RegardError(
                f"{path}: are fields separated by {choices}? Add a header such as en{self.delimiters[0]}de"
            )
        return "\t" if "\t" in possible else next(iter(possible), ",")

    def _numbered(self, path: DataFile, numbers: list[int]) -> Iterator[str]:
        for number, line in self.lines(path):
            numbers[0] = number
            yield line + "\n"


@INPUT_FORMATS.register("xlsx")
class XLSX(DelimitedFormat):
    """a spreadsheet (XLSX): the first sheet, with or without a header"""

    suffixes = (".xlsx",)

    def location(self, path: DataFile, number: int) -> str:
        return f"{path}, row {number}"

    def records(self, path: DataFile) -> Generator[tuple[int, list[str]], None, None]:
        try:
            from openpyxl import load_workbook
        except ImportError:
            raise RegardError(
                f"{path}: spreadsheets need openpyxl: pip install 'regard[formats]'"
            ) from None
        try:
            with path.open("rb") as file:
                book = load_workbook(file, read_only=True, data_only=True)
                rows = book.worksheets[0].iter_rows(values_only=True)
                for number, row in enumerate(rows, 1):
                    fields = ["" if cell is None else str(cell) for cell in row]
                    if any(fields):
                        yield number, fields
        except FileNotFoundError as error:
            raise read_error(path, error) from None
        except RegardError:
            raise
        except Exception as error:  # what it raises for a damaged file is not documented
            raise RegardError(f"{path}: damaged, or not XLSX: {_first_line(error)[:200]}") from None


# ---------------------------------------------------------------------------------------------
# JSON lines


@INPUT_FORMATS.register("jsonl")
class JSONL(InputFormat):
    """JSON lines: objects with keys such as source and target, en and de, or translation: {en, de}"""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")
    expected = 'a line is {"source": "…", "target": "…"}'
    default = (("source",), ("target",))

    def read(self, *paths: DataFile) -> Iterator[Pair]:
        (path,) = paths
        keys = self.find_keys(path)
        for location, record in self.records(path):
            try:
                source, target = (self.text(record, key) for key in keys)
            except ValueError as error:
                self.bad(location, str(error))
            else:
                yield Pair(source, target)

    def records(self, path: DataFile) -> Generator[tuple[str, dict[str, Any]], None, None]:
        """The objects of a file, each with its location; bad ones are left out."""
        for number, line in self.lines(path):
            try:
                yield f"{path}:{number}", self.parse(line)
            except ValueError as error:
                self.bad(f"{path}:{number}", str(error))

    def layout(self, *paths: DataFile) -> Layout:
        keys = self.find_keys(paths[0])
        if keys == self.default:
            return Layout((), self.options.languages)
        source, target = map(".".join, keys)
        languages = self.options.languages or column_languages((source, target))
        return Layout((f"source {source}, target {target}",), languages, f"{source} {target}")

    def find_keys(self, path: DataFile) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The keys of source and target, from the first record."""
        quiet = type(self)(ReadOptions(on_bad_line=self.options.on_bad_line))
        with closing(quiet.records(path)) as records:
            for location, record in records:
                keys = list(_flat_keys(record))
                if not self.options.columns and {"source", "target"} <= {*record}:
                    return self.default
                try:
                    source, target = choose_columns(
                        [".".join(key) for key in keys], self.options, "keys"
                    )
                except ValueError as error:
                    raise RegardError(f"{location}: {error}") from None
                return keys[source], keys[target]
        raise RegardError(f"{path}: no line is a JSON object")

    def parse(self, line: str) -> dict[str, Any]:
        """The object of a line; raises ValueError."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(f"not JSON: {abbreviate(line)}; {self.expected}") from None
        if not isinstance(record, dict):
            raise ValueError(f"not a JSON object: {abbreviate(line)}; {self.expected}")
        return record

    def text(self, record: dict[str, Any], key: tuple[str, ...]) -> str:
        """The text of a key; raises ValueError."""
        value: Any = record
        for subkey in key:
            exists = isinstance(value, dict) and subkey in value
            value = value[subkey] if exists else None
        name = ".".join(key)
        if not isinstance(value, str):
            actual = json.dumps(value)[:60] if exists else "nothing"
            expected = f"; {self.expected}" if key in self.default else ""
            raise ValueError(f'"{name}" must be a string, found {actual}{expected}')
        if any("\ud800" <= character <= "\udfff" for character in value):
            # JSON can escape half of a surrogate pair, which is not text and has no UTF-8 form.
            raise ValueError(f'"{name}" contains an unpaired surrogate: {abbreviate(value)}')
        return value


@INPUT_FORMATS.register("json")
class JSONArray(JSONL):
    """a JSON array of objects as in JSON lines; also JSON lines in a file named .json"""

    suffixes = (".json",)
    expected = 'a record is {"source": "…", "target": "…"}'

    def records(self, path: DataFile) -> Generator[tuple[str, dict[str, Any]], None, None]:
        first_text = next((line.strip() for line in read_lines(path) if line.strip()), "")
        if not first_text.startswith("["):
            yield from super().records(path)
            return
        number = 0
        for number, value in enumerate(array_items(path), 1):
            location = f"{path}, record {number}"
            if isinstance(value, dict):
                yield location, value
            else:
                self.bad(location, f"not a JSON object: {abbreviate(value)}; {self.expected}")
        if number == 0:
            raise RegardError(f"{path}: no records")


def array_items(path: DataFile) -> Iterator[Any]:
    """The items of a JSON array, one at a time: the array is never in memory as a whole."""
    decoder, text = json.JSONDecoder(), ""
    chunks = (line + "\n" for line in read_lines(path))
    expected = "["
    while True:
        text = text.lstrip()
        while not text:
            chunk = next(chunks, None)
            if chunk is None:
                raise RegardError(f"{path}: not JSON: the file ends within the array")
            text = chunk.lstrip()
        if text[0] not in expected:
            raise RegardError(f"{path}: not JSON: {abbreviate(text[:40])}, expected {expected[0]}")
        if text[0] == "]":
            break
        if text[0] in "[,":
            text, expected = text[1:], '{"0123456789-tfn[' + "]" * (text[0] == "[")
            continue
        value, text = _next_value(path, decoder, text, chunks)
        yield value
        expected = ",]"


def _next_value(
    path: DataFile, decoder: json.JSONDecoder, text: str, chunks: Iterator[str]
) -> tuple[Any, str]:
    """The value at the beginning of a text, and what follows it; more is read until it is complete."""
    lines = [text]
    size = tried_size = len(text)
    while True:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError) as error:
            # Joined again only when it is half as long again, so that a long record takes linear time.
            while size < 1.5 * tried_size and (chunk := next(chunks, None)) is not None:
                lines.append(chunk)
                size += len(chunk)
            if size == tried_size or size > MAX_LINE_BYTES:
                raise RegardError(f"{path}: not JSON: {str(error)[:80]}") from None
            text, tried_size = "".join(lines), size
            lines = [text]
        else:
            return value, text[end:]


def _flat_keys(record: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The keys of a record; those of an object in it follow its own key, at any depth."""
    for key, value in record.items():
        if isinstance(value, dict) and value:
            yield from ((key, *subkeys) for subkeys in _flat_keys(value))
        else:
            yield (key,)


# ---------------------------------------------------------------------------------------------
# Parquet


@INPUT_FORMATS.register("parquet")
class Parquet(InputFormat):
    """Parquet, as Hugging Face datasets are stored, with columns such as en and de or translation: {en, de}"""

    suffixes = (".parquet",)
    rows = 4096
    """in memory at a time"""

    def read(self, *paths: DataFile) -> Iterator[Pair]:
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile

        (path,) = paths
        number = 0
        try:
            with path.open("rb") as file, ParquetFile(file) as table:
                names = self.choose(path, table.schema_arrow)
                for batch in table.iter_batches(self.rows, columns=list(names)):
                    flat = pa.Table.from_batches([batch]).flatten()
                    columns = (flat.column(name).to_pylist() for name in names)
                    for source, target in zip(*columns, strict=True):
                        number += 1
                        if isinstance(source, str) and isinstance(target, str):
                            yield Pair(source, target)
                        else:
                            name, value = (
                                (names[1], target)
                                if isinstance(source, str)
                                else (names[0], source)
                            )
                            self.bad(
                                f"{path}, row {number}",
                                f"{name} must be a string, found {'nothing' if value is None else abbreviate(value)}",
                            )
        except FileNotFoundError as error:
            raise read_error(path, error) from None
        except (pa.ArrowException, OSError, ValueError) as error:
            raise RegardError(f"{path}: damaged, or not Parquet: {_first_line(error)}") from None
        if number == 0:
            raise RegardError(f"{path}: the file is empty")

    def layout(self, *paths: DataFile) -> Layout:
        import pyarrow as pa
        from pyarrow.parquet import read_schema

        (path,) = paths
        try:
            with path.open("rb") as file:
                names = self.choose(path, read_schema(file))
        except FileNotFoundError as error:
            raise read_error(path, error) from None
        except (pa.ArrowException, OSError, ValueError) as error:
            raise RegardError(f"{path}: damaged, or not Parquet: {_first_line(error)}") from None
        languages = self.options.languages or column_languages(names)
        details = (f"source {names[0]}, target {names[1]}",)
        return Layout(details, languages, f"{names[0]} {names[1]}")

    def choose(self, path: DataFile, schema: Any) -> tuple[str, str]:
        """The names of the columns of source and target; those of a struct follow its own name."""
        import pyarrow as pa

        names: list[str] = []
        for column in schema:
            if pa.types.is_struct(column.type):
                names += [f"{column.name}.{field.name}" for field in column.type]
            else:
                names.append(column.name)
        try:
            source, target = choose_columns(names, self.options)
        except ValueError as error:
            raise RegardError(f"{path}: {error}") from None
        return names[source], names[target]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
