"""A text or an HTML document: its sentences, and what stands between them.

A model translates sentences. Whatever else a text has - spaces, line breaks, tags, rows of dashes - stays where
and as it is, so that a text whose sentences are left alone is the same text again, whatever it was.

Everything here takes time in proportion to the text: it runs on texts that strangers send. This is also why tags
are found by a pattern and not by ``html.parser``, which needs time in proportion to the square of some texts.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LONGEST = 600
"""Characters of a sentence. A longer one is cut between two words: models have seen no such sentences."""

_LINE = re.compile(r"[^\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")
# Where a sentence may end. Always matched whole: a pattern that looks at what follows would try
# each of ten thousand dots.
_END = re.compile(
    r"""(?P<wide> [。！？｡]++ ["”’」』）】》]*+ ) | [.!?…؟।]++ ["'”’“‘»«›‹)\]}」』）】]*+""",
    re.VERBOSE,
)
_WORD_BEFORE = re.compile(r"(\w+)\.\Z")
_BREAK = re.compile(r"\s+|(?<=[，、；：])")

_ABBREVIATIONS = {
    "": "dr prof st vs vol fig",
    "en": "mr mrs ms messrs jr sr gen col sgt capt lt rev hon sen rep gov pres inc ltd corp mt "
    "jan feb mar apr jun jul aug sep sept oct nov dec",
    "de": "hr fr frl nr bzw ca evtl ggf inkl str tel abb bd vgl sog geb gest dipl ing mag",
    "fr": "mm mme mmes mlle mgr me av env",
    "es": "sr sra srta dra ud uds av pág núm",
    "it": "sig dott ing avv pag",
    "nl": "dhr mevr mr drs ir nr blz",
    "pt": "sr sra dra av pág",
}
"""Words that end in a dot and stand before a name or a number. Those that stand elsewhere need no
place here: a sentence does not begin with a small letter."""
_ORDINALS = {"cs", "da", "de", "et", "fi", "hr", "hu", "lv", "nb", "nn", "no", "pl", "sk", "sl"}
"""Languages in which ``3.`` is “third”."""


@dataclass
class Document:
    """Sentences, and what stands before, between and after them: always one more than sentences."""

    sentences: list[str] = field(default_factory=list)
    between: list[str] = field(default_factory=lambda: [""])
    write: Callable[[str], str] = str
    """how a sentence is written in this kind of document"""

    def join(self, translations: Sequence[str]) -> str:
        """The document with each sentence exchanged for its translation."""
        assert len(translations) == len(self.sentences)
        return "".join([*map(self.part, range(len(translations)), translations), self.between[-1]])

    def part(self, index: int, translation: str) -> str:
        """One translation, with what stands before it."""
        return self.between[index] + self.write(translation)

    def add(self, sentence: str) -> None:
        self.sentences.append(sentence)
        self.between.append("")

    def keep(self, text: str) -> None:
        self.between[-1] += text


def split_text(text: str, language: str = "") -> Document:
    """The sentences of a plain text. language is a code such as ``en``; it decides on dots only."""
    document = Document()
    _add_text(document, text, language)
    return document


def _add_text(document: Document, text: str, language: str) -> None:
    done = 0
    for start, end in _sentences(text, language):
        document.keep(document.write(text[done:start]))
        document.add(text[start:end])
        done = end
    document.keep(document.write(text[done:]))


def _sentences(text: str, language: str) -> Iterator[tuple[int, int]]:
    """Where each sentence begins and ends, white space left out."""
    for line in _LINE.finditer(text):
        start = line.start()
        for end in [*_ends(text, line.start(), line.end(), language), line.end()]:
            yield from _cut(text, start, end)
            start = end


def _ends(text: str, start: int, stop: int, language: str) -> Iterator[int]:
    """Where the sentences of a line end, the last one apart."""
    for end in _END.finditer(text, start, stop):
        if end["wide"]:
            yield end.end()
        elif text[end.end() : end.end() + 1].isspace():
            following = text[end.end() : end.end() + 8].lstrip()[:1]
            if not following.islower() and not _is_abbreviated(text, end.start() + 1, language):
                yield end.end()


def _is_abbreviated(text: str, end: int, language: str) -> bool:
    """Whether the word that ends here does so in a dot of its own: ``Dr.``, ``J.``, ``U.S.``, ``3.``"""
    word = _WORD_BEFORE.search(text[max(0, end - 16) : end])
    if word is None:
        return False
    said, language = word[1].casefold(), language.split("-")[0]
    if said.isdigit():
        return len(said) <= 2 and language in _ORDINALS
    known = _ABBREVIATIONS[""] + " " + _ABBREVIATIONS.get(language, "")
    is_initial = len(said) == 1 and (word[1].isupper() or word[1].islower())
    return is_initial or said in known.split()


def _cut(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The sentence without the space around it, in pieces if it is too long, none if it says nothing."""
    while start < end:
        while start < end and text[start].isspace():
            start += 1
        stop = end
        if end - start > LONGEST:
            breaks = [found.start() for found in _BREAK.finditer(text, start + 1, start + LONGEST)]
            stop = breaks[-1] if breaks else start + LONGEST
        piece = text[start:stop].rstrip()
        if any(map(str.isalnum, piece)):
            yield start, start + len(piece)
        start = stop


# ---------------------------------------------------------------------------------------------
# HTML

_MARKUP = re.compile(
    r"""
    <!-- (?: -?> | .*? --> | .* )                       # a comment; one left open goes on to the end
    | < [!?] (?: [^>]* > | .* )                         # a declaration
    | < (?P<close>/)? (?P<name>[a-zA-Z][^\s/>]*+)       # a tag
      (?P<attributes>
        (?: =\s*"[^"]*" | =\s*'[^']*' | =(?!\s*["']) | [^>=]++ )*+
      ) (?: > | .* )
    | </ (?: [^>]* > | .* )
    """,
    re.VERBOSE | re.DOTALL,
)
_TRANSLATE_NO = re.compile(r"""(?<![\w-])translate\s*=\s*["']?no\b""", re.IGNORECASE)
RAW = {"script", "style", "textarea", "xmp", "iframe", "noembed", "noframes", "plaintext"}
"""Inside these, ``<`` begins no tag; their text is no prose."""
UNTOUCHED = {"code", "kbd", "samp", "var"}
"""What these hold is not to be translated; nor is what an element with ``translate="no"`` holds."""
_VOID = {
    "area",
    "base",
    "br",
    "col",
    "embed",
    "hr",
    "img",
    "input",
    "link",
    "meta",
    "source",
    "wbr",
}


def split_html(source: str, language: str = "") -> Document:
    """The sentences of an HTML document or of a piece of one.

    Each stretch of text between two tags is split by itself: ``a <b>big</b> dog`` is three sentences to the model,
    so that no tag can be lost or moved. All tags, comments and attributes stay letter by letter. In text that is
    translated, entities are decoded, and ``& < >`` and the unbreakable space are written as entities again.
    """
    document = Document(write=_write_html)
    inside, depth = (
        "",
        0,
    )  # the element entered that is not translated, and how often it holds itself
    for text, tag, is_prose in _html(source):
        if is_prose and not depth:
            _add_html_text(document, text, language)
            continue
        document.keep(text)
        if tag is None or tag["attributes"].endswith("/"):
            continue
        name = tag["name"].lower()
        if depth:
            depth += (-1 if tag["close"] else 1) * (name == inside)
        elif not tag["close"] and name not in _VOID and _is_untouched(name, tag["attributes"]):
            inside, depth = name, 1
    return document


class Stretch(NamedTuple):
    """A part of a document: a tag, or text that may be translated, or neither."""

    text: str
    tag: re.Match[str] | None = None
    is_prose: bool = False


def _html(source: str) -> Iterator[Stretch]:
    done = 0
    while found := _MARKUP.search(source, done):
        yield Stretch(source[done : found.start()], is_prose=True)
        yield Stretch(found[0], tag=found if found["name"] else None)
        done = found.end()
        name = (found["name"] or "").lower()
        if name in RAW and not found["close"]:
            close = re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE).search(source, done)
            end = close.start() if close else len(source)
            yield Stretch(source[done:end])
            done = end
    yield Stretch(source[done:], is_prose=True)


def _is_untouched(name: str, attributes: str) -> bool:
    return name in UNTOUCHED or _TRANSLATE_NO.search(attributes) is not None


def _add_html_text(document: Document, text: str, language: str) -> None:
    try:
        decoded = html.unescape(text)
    except ValueError:  # a number of thousands of digits
        decoded = ""
    if any(map(str.isalnum, decoded)):
        _add_text(document, decoded, language)
    else:
        document.keep(text)


def _write_html(text: str) -> str:
    return html.escape(text, quote=False).replace("\xa0", "&nbsp;")
