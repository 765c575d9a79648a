"""Translation of documents: office files, Markdown, subtitles and others keep their structure and formatting.

Modules in import order; each imports only from those above it:

    markup                 sentences with inline markup; inline tags follow their words in the translation
    base                   what all formats have in common: the registry, slots, archives, safe XML
    text_formats           plain text, HTML, tables
    markdown               Markdown
    subtitles              SubRip, WebVTT
    office_formats         DOCX, PPTX, ODT
    localization_formats   PO, XLIFF, TMX, JSON, YAML, Java properties
    translation_memory     exact and fuzzy matches in earlier translations
    worker                 a process that reads or writes one document of a client
"""

# A file is of the first format that recognizes it, so the order of these imports matters.
from regard.documents import localization_formats, office_formats, text_formats

# isort: split
from regard.documents import markdown, subtitles
from regard.documents.base import (
    DOCUMENT_FORMATS,
    DocumentOptions,
    ParsedDocument,
    format_of_content,
    format_of_name,
    read_document,
)

__all__ = [
    "DOCUMENT_FORMATS",
    "DocumentOptions",
    "ParsedDocument",
    "format_of_content",
    "format_of_name",
    "localization_formats",
    "markdown",
    "office_formats",
    "read_document",
    "subtitles",
    "text_formats",
]
