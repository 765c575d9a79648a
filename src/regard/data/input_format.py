"""What all input formats have in common: the registry, the options of reading, language codes, and error reports."""

from __future__ import annotations

import re
import zipfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from regard.data.pairs import Pair
from regard.data.remote_files import RemoteFile
from regard.data.text_files import BadLine, DataFile, decoded_lines, uncompressed_name
from regard.errors import RegardError
from regard.recipe import Registry

# ---------------------------------------------------------------------------------------------
# Language codes as they occur in headers, keys, ``xml:lang`` and file names


_TWO_LETTERS = """
aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo
es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg ki
kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no
nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta te
tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
"""
_THREE_LETTERS = """
afr amh ara arb asm ast azj bel ben bos bul cat ceb ces ckb cmn cym dan deu dsb ell eng epo est eus fas fil fin fra fry
gla gle glg guj hat hau heb hin hrv hsb hun hye ibo ind isl ita jav jpn kab kan kat kaz khm kin kir kmr kor kur lao
lat lav lin lit ltz lug lvs mal mar mkd mlt mon mri msa mya nds nep nld nno nob nor npi nya oci ory pan pbt pes pol por
prs pus ron rus san sin slk slv sme smo sna snd som sot spa sqi srp sun swa swe swh szl tam tat tel tgk tgl tha tir tsn
tuk tur uig ukr urd uzb uzn vec vie wol xho yid yor yue zho zsm zul
"""
KNOWN_CODES = frozenset((_TWO_LETTERS + _THREE_LETTERS).split())
"""ISO 639-1, and the codes of ISO 639-3 that parallel corpora use"""

_NAMES = """
afrikaans af, albanian sq, arabic ar, armenian hy, basque eu, belarusian be, bengali bn, bosnian bs, bulgarian bg,
catalan ca, chinese zh, croatian hr, czech cs, danish da, dutch nl, english en, esperanto eo, estonian et, finnish fi,
french fr, galician gl, georgian ka, german de, greek el, gujarati gu, hebrew he, hindi hi, hungarian hu, icelandic
is, indonesian id, irish ga, italian it, japanese ja, kazakh kk, korean ko, latin la, latvian lv, lithuanian lt,
macedonian mk, malay ms, maltese mt, mongolian mn, nepali ne, norwegian no, persian fa, polish pl, portuguese pt,
romanian ro, russian ru, serbian sr, slovak sk, slovenian sl, spanish es, swahili sw, swedish sv, tamil ta, thai th,
turkish tr, ukrainian uk, urdu ur, vietnamese vi, welsh cy, yiddish yi
"""
LANGUAGE_NAMES = dict(entry.split() for entry in _NAMES.split(","))
"""English names, which spreadsheets have as headings"""

_CODE = re.compile(r"([A-Za-z]{2,3})(?:[-_][A-Za-z]{4})?(?:[-_](?:[A-Za-z]{2}|\d{3}))?")
"""a language, perhaps with a script and a region: de, de-AT, zh_Hans_CN, deu_Latn"""


def language_code(text: str) -> str | None:
    """The language code that a heading, a key or a suffix is; None if it is none.

    ``de``, ``DE``, ``de-AT``, ``deu_Latn`` and ``German`` are language codes, ``id`` as the name of a column is not.
    """
    text = text.strip()
    if code := LANGUAGE_NAMES.get(text.casefold()):
        return code
    match = _CODE.fullmatch(text)
    return text if match and match[1].lower() in KNOWN_CODES else None


def normalized_code(code: str) -> str:
    """A code as it is compared: lower case, with hyphens."""
    return code.strip().casefold().replace("_", "-")


@lru_cache(maxsize=1024)  # a large file asks for every text
def is_language(code: str, wanted: str) -> bool:
    """Whether a code is the wanted language, or a variant of it: ``de-AT`` is ``de``, but not the reverse."""
    code, wanted = normalized_code(code), normalized_code(wanted)
    return code == wanted or code.startswith(f"{wanted}-")


# ---------------------------------------------------------------------------------------------
# Options of reading


OnBadLine = Literal["error", "skip"]
Two = tuple[str, str]
"""names of columns, or codes of languages, of source and target"""


class Skipped:
    """Counts what was left out, by reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        """the first one of each reason"""

    def add(self, reason: str, example: str) -> None:
        self.counts[reason] += 1
        self.examples.setdefault(reason, example)

    def messages(self) -> list[str]:
        """One line for each reason."""
        return [
            f"{reason}: {count:,} (the first: {self.examples[reason]})"
            for reason, count in self.counts.items()
        ]


BAD_LINES = "bad lines skipped"
HOW_TO_SKIP = "--on-bad-line skip leaves out such lines; in a recipe: on_bad_line"


@dataclass(frozen=True)
class ReadOptions:
    """What the user said about files of pairs."""

    columns: Two | None = None
    """names or numbers (from 1) of the columns of source and target, or their keys or languages"""
    languages: Two | None = None
    on_bad_line: OnBadLine = "error"
    skipped: Skipped = field(default_factory=Skipped)

    @property
    def wanted_languages(self) -> Two | None:
        """The languages to read from a file that names languages instead of columns."""
        return self.columns or self.languages


class Layout(NamedTuple):
    """How a file is read: what was found in it, or what the user said."""

    details: tuple[str, ...] = ()
    """what to tell the user, one line each"""
    languages: Two | None = None
    key: str = ""
    """identifies a layout that is not the default of the format"""


class InputFormat(ABC):
    """A format of input files."""

    keys: ClassVar[tuple[str, ...]] = ("pairs",)
    """the recipe keys under ``data.train`` that name its files; ``read`` gets one path for each"""
    suffixes: ClassVar[tuple[str, ...]] = ()
    """how the names of its files end, before ``.gz``, ``.zst`` or ``.xz``"""

    def __init__(self, options: ReadOptions | None = None) -> None:
        self.options = options or ReadOptions()

    @abstractmethod
    def read(self, *paths: DataFile) -> Iterator[Pair]:
        """The pairs of one file, or of the files that belong together."""

    def layout(self, *paths: DataFile) -> Layout:
        """How the file is read; looks only at its beginning."""
        return Layout()

    def bad(self, place: str, problem: str) -> None:
        """Raise an error for a line that cannot be read, or count it if such lines are to be skipped."""
        if self.options.on_bad_line == "error":
            raise RegardError(f"{place}: {problem} ({HOW_TO_SKIP})")
        self.options.skipped.add(BAD_LINES, f"{place}: {problem}")

    def lines(self, path: DataFile) -> Generator[tuple[int, str], None, None]:
        """The lines of a text file with their numbers, without bad ones."""
        for number, line in enumerate(decoded_lines(path), start=1):
            if isinstance(line, BadLine):
                self.bad(f"{path}:{number}", line.problem)
            else:
                yield number, line


class LineFormat(InputFormat):
    """A format with one pair per line."""

    def read(self, *paths: DataFile) -> Iterator[Pair]:
        (path,) = paths
        for number, line in self.lines(path):
            try:
                pair = self.parse(line)
            except ValueError as error:
                self.bad(f"{path}:{number}", str(error))
            else:
                yield pair

    @abstractmethod
    def parse(self, line: str) -> Pair:
        """The pair of a line; raises ValueError."""


INPUT_FORMATS: Registry[type[InputFormat]] = Registry("data.train")


def pair_suffixes() -> tuple[str, ...]:
    """The suffixes of files with both sides of a pair, which ``data.train.pairs`` can name."""
    formats = (kind for kind in INPUT_FORMATS.values() if kind.keys == ("pairs",))
    return tuple(suffix for kind in formats for suffix in kind.suffixes)


def pair_format(path: DataFile, options: ReadOptions | None = None) -> InputFormat:
    """The format of a file of ``data.train.pairs``, by its suffix; TSV if the suffix is not known.

    A folder or a pattern such as ``*.tmx`` stands for the files in it.
    """
    if not isinstance(path, zipfile.Path) and (path.is_dir() or is_pattern(path)):
        return INPUT_FORMATS["folder"](options)
    return (suffix_format(path) or INPUT_FORMATS["tsv"])(options)


def suffix_format(path: DataFile) -> type[InputFormat] | None:
    """The format of a file of pairs by its suffix, if it is known."""
    name = uncompressed_name(path).lower()
    for kind in INPUT_FORMATS.values():
        if kind.keys == ("pairs",) and name.endswith(kind.suffixes):
            return kind
    return None


def is_pattern(path: Path | RemoteFile) -> bool:
    """Whether a name is a pattern such as ``*.tmx``, and not the name of a file."""
    return any(character in str(path) for character in "*?[") and not path.exists()


def format_name(kind: InputFormat) -> str:
    """The name under which a format is registered."""
    return next(name for name, value in INPUT_FORMATS.items() if value is type(kind))


def abbreviate(value: object) -> str:
    """A value as it is shown in an error message, at most 60 characters long."""
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def one_line(text: str) -> str:
    """A text with its line breaks, and the indentation after them, replaced by spaces."""
    text = text.strip(" \t\r\n")
    if "\n" not in text and "\r" not in text:
        return text
    return re.sub(r"[ \t]*[\r\n]+[ \t\r\n]*", " ", text)
