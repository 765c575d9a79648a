"""Models for tests of documents: one that copies, and ones whose output is easy to check."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from regard.data.words import word_and_symbol_spans
from regard.documents import DocumentOptions, ParsedDocument, format_of_name
from regard.documents.base import SentenceTranslation
from regard.documents.markup import Floats

OPTIONS = DocumentOptions("en", "de", ("text",))


def parse(name: str, content: str | bytes, options: DocumentOptions = OPTIONS) -> ParsedDocument:
    kind = format_of_name(name)
    assert kind is not None
    return kind(options).parse(content.encode() if isinstance(content, str) else content)


def translate(
    name: str,
    content: str | bytes,
    function: Callable[[str], str],
    options: DocumentOptions = OPTIONS,
) -> bytes:
    document = parse(name, content, options)
    return document.write([SentenceTranslation(function(text)) for text in document.sentences])


def copy(text: str) -> str:
    return text


def reverse(name: str, content: str | bytes) -> bytes:
    """The document with the words of each sentence in reverse order, and the alignment that belongs to it."""
    document = parse(name, content)
    return document.write([reversed_words(text) for text in document.sentences])


def reversed_words(text: str) -> SentenceTranslation:
    words = re.findall(r"\{\d+\}|\w+|[^\w\s]", text)
    translation = " ".join(reversed(words))
    # A placeholder has three units.
    source = [number for number, word in enumerate(words) for _ in word_and_symbol_spans(word)]
    target = [
        len(words) - 1 - number
        for number, word in enumerate(reversed(words))
        for _ in word_and_symbol_spans(word)
    ]
    alignment: Floats = (np.array(target)[:, None] == np.array(source)).astype(np.float32)
    return SentenceTranslation(translation, alignment)
