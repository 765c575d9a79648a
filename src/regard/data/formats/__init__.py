"""Input formats: each class reads pairs of text out of files of one format. ``writers`` has the output formats.

    base              the registry INPUT_FORMATS, the base classes, the options of reading
    plain_text        line-parallel text files, text without targets, a pair per line; CoNLL-U
    tables            TSV, CSV, XLSX, JSON lines, JSON, Parquet
    localization      TMX, XLIFF, PO: files of translation memories and other translation tools
    file_collections  folders, patterns and zip archives of files in these formats
    writers           the registry OUTPUT_FORMATS, and a class for each format that is written

To add a format, write a class in the file where it belongs and register it:

    @INPUT_FORMATS.register("bitext")
    class Bitext(LineFormat):
        '''source ||| target'''
        suffixes = (".bitext",)

        def parse(self, line: str) -> Pair: ...

Files of ``data.train.pairs`` with that suffix, also compressed, are then read by it, and ``regard train`` accepts them
on the command line. Readers stream: a corpus is never in memory as a whole. A reader whose files name languages yields
``TaggedPair``. A line that cannot be read raises an error with its file and number, or is counted and skipped if the
user says so; nothing is repaired.
"""

# Importing these modules registers their formats. The order is that of lists of formats.
# isort: off
from regard.data.formats import localization, tables, file_collections, plain_text  # noqa: F401

# isort: on
from regard.data.formats.base import (
    INPUT_FORMATS as INPUT_FORMATS,
    InputFormat as InputFormat,
    ReadOptions as ReadOptions,
    Skipped as Skipped,
    abbreviate as abbreviate,
    is_pattern as is_pattern,
    pair_format as pair_format,
    pair_suffixes as pair_suffixes,
)
from regard.data.formats.file_collections import folder_files as folder_files
from regard.data.formats.plain_text import (
    LineFormat as LineFormat,
    read_conllu as read_conllu,
    read_parses as read_parses,
)
