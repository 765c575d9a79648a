"""Which columns of a table, or keys of its records, are source and target."""

from __future__ import annotations

import re
from collections.abc import Sequence

from regard.data.input_format import ReadOptions, abbreviate
from regard.data.language_codes import is_language, language_code

_SOURCE_NAMES = """
source src source_text src_text source_sentence source_segment input sentence text
"""
SOURCE_NAMES = frozenset(_SOURCE_NAMES.split())
_TARGET_NAMES = """
target tgt trg target_text tgt_text target_sentence target_segment output translation reference ref label
"""
TARGET_NAMES = frozenset(_TARGET_NAMES.split())
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
    names: Sequence[str], options: ReadOptions, what: str = "columns"
) -> tuple[int, int]:
    """The columns of source and target among those with these names; raises ValueError if it is not certain."""
    if options.columns:
        source, target = (_named_column(name, names, what) for name in options.columns)
        if source == target:
            raise ValueError(f"--columns {','.join(options.columns)} names one column twice")
        return source, target
    if options.languages:
        source_language, target_language = options.languages
        found = _columns_of(source_language, names), _columns_of(target_language, names)
        if len(found[0]) == len(found[1]) == 1 and found[0] != found[1]:
            return found[0][0], found[1][0]
    keys = [_key(name) for name in names]
    roles = [
        [number for number, key in enumerate(keys) if key in known]
        for known in (SOURCE_NAMES, TARGET_NAMES)
    ]
    languages = [number for number, name in enumerate(names) if _names_language(name, len(names))]
    by_role, by_language = all(len(role) == 1 for role in roles), len(languages) == 2
    if by_role and not languages:
        return roles[0][0], roles[1][0]
    if by_language and not by_role:
        return languages[0], languages[1]
    candidates = ", ".join(map(abbreviate, names[:12])) + ", …" * (len(names) > 12)
    examples = (
        [names[number] for number in languages[:2]] if len(languages) > 1 else list(names[:2])
    )
    raise ValueError(
        f"which {what} are source and target? Candidates: {candidates}; {how_to_choose(examples)}"
    )


def how_to_choose(examples: Sequence[str]) -> str:
    """How to name the columns, in a command or in a recipe."""
    example = f"{','.join(examples)} " if len(examples) == 2 else "SOURCE,TARGET "
    return f"name them with --columns, such as --columns {example}(in a recipe: columns)"


def is_header(cells: Sequence[str]) -> bool:
    """Whether all cells are known names of columns or languages, and two of them name texts."""
    keys = [_key(cell) for cell in cells]
    texts = [
        key in SOURCE_NAMES | TARGET_NAMES or _names_language(cell, len(cells))
        for key, cell in zip(keys, cells, strict=True)
    ]
    known = all(text or key in OTHER_NAMES for text, key in zip(texts, keys, strict=True))
    return known and sum(texts) >= 2 and len({*keys}) == len(keys)


def column_languages(names: Sequence[str]) -> tuple[str, str] | None:
    """The languages that two columns are named after."""
    source, target = (language_code(_leaf(name)) for name in names)
    return (source, target) if source and target else None


def _named_column(wanted: str, names: Sequence[str], what: str) -> int:
    for matches in (
        [number for number, name in enumerate(names) if name == wanted],
        [number for number, name in enumerate(names) if _leaf(name) == wanted],
        [number for number, name in enumerate(names) if _key(name) == _key(wanted)],
        _columns_of(wanted, names) if language_code(wanted) else [],
    ):
        if len(matches) == 1:
            return matches[0]
    if wanted.isdecimal() and 1 <= int(wanted) <= len(names):
        return int(wanted) - 1
    known = ", ".join(map(abbreviate, names[:12]))
    raise ValueError(f"no column {abbreviate(wanted)} among the {what} {known}")


def _columns_of(language: str, names: Sequence[str]) -> list[int]:
    codes = [language_code(_leaf(name)) for name in names]
    return [number for number, code in enumerate(codes) if code and is_language(code, language)]


def _names_language(name: str, columns: int) -> bool:
    """Whether a column is named after a language; ``id`` is Indonesian only beside a single other column."""
    named = language_code(_leaf(name)) is not None
    return named and (columns == 2 or _key(name) not in OTHER_NAMES)


def _leaf(name: str) -> str:
    """``en`` of ``translation.en``."""
    return name.rpartition(".")[2]


def _key(name: str) -> str:
    return re.sub(r"[\s_-]+", "_", _leaf(name).strip().casefold())
