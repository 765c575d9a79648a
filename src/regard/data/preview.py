"""What is understood of training files, before anything is trained: formats, languages, counts and samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from regard.data.bilingual_formats import how_to_choose_languages, language_names
from regard.data.corpus import data_paths, read_options, read_pairs
from regard.data.formats import INPUT_FORMATS, InputFormat, Skipped, pair_format
from regard.data.input_format import Layout, Two, format_name
from regard.data.pairs import Pair
from regard.errors import RegardError
from regard.recipe import DataConfig, DataFiles

SAMPLES = 3


class CorpusPreview:
    """Reads training files once and remembers what they are."""

    def __init__(self, files: DataFiles, data: DataConfig) -> None:
        self.files, self.data = files, data
        self.skipped = Skipped()
        self.count = 0
        self.samples: list[Pair] = []
        self.layouts = list(self._layouts())
        self.languages = self._languages()

    def pairs(self) -> Iterator[Pair]:
        """All pairs; those that pass are counted."""
        for pair in read_pairs(self.files, self.data, "", self.skipped):
            self.count += 1
            if len(self.samples) < SAMPLES and pair.source.strip() and pair.target.strip():
                self.samples.append(pair)
            yield pair

    def lines(self) -> list[str]:
        """What was understood, one line each; complete after all pairs have passed."""
        lines = []
        for names, kind, layout in self.layouts:
            lines.append(f"{names}: {format_name(kind)}")
            lines += [f"  {detail}" for detail in layout.details[:20]]
            if len(layout.details) > 20:
                lines.append(f"  and {len(layout.details) - 20:,} more files")
        languages = "languages not named (--languages names them)"
        if self.languages:
            languages = language_names(self.languages)
        lines.append(f"{self.count:,} pairs, {languages}; the first:")
        lines += [f"  {_shorten(source)}  →  {_shorten(target)}" for source, target in self.samples]
        return [*lines, *self.skipped.messages()]

    def _layouts(self) -> Iterator[tuple[str, InputFormat, Layout]]:
        paths = data_paths(self.files, self.data, "")
        options = read_options(self.files, self.data)
        for path in paths.get("pairs", []):
            kind = pair_format(path, options)
            yield _name(path), kind, kind.layout(path)
        if "source" in paths:
            for both in zip(paths["source"], paths["target"], strict=True):
                kind = INPUT_FORMATS["parallel"](options)
                yield " and ".join(map(_name, both)), kind, Layout()

    def _languages(self) -> Two | None:
        """The languages of source and target, if all files name the same ones."""
        if self.data.languages:
            return self.data.languages
        if self.files.source:
            return self.data.language_pair if self.data.named else None
        named = {layout.languages: names for names, _, layout in self.layouts if layout.languages}
        if len(named) > 1:
            found = ", ".join(f"{names} is {language_names(two)}" for two, names in named.items())
            raise RegardError(
                f"several pairs of languages: {found}; {how_to_choose_languages(*min(named))}"
            )
        return next(iter(named), None)


def _name(path: Path) -> str:
    """A path as the user gave it, if it is below the current folder."""
    current = Path.cwd()
    return str(path.relative_to(current)) if path.is_relative_to(current) else str(path)


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 56 else text[:55] + "…"
