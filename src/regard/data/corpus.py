"""The pairs of a recipe's data: training, validation and test split, held-out pairs, file fingerprints, a preview."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator
from itertools import chain, islice, tee
from pathlib import Path

from regard.data.formats import (
    INPUT_FORMATS,
    InputFormat,
    ReadOptions,
    Skipped,
    folder_files,
    is_pattern,
    pair_format,
    read_parses,
)
from regard.data.formats.base import (
    Layout,
    NamePair,
    format_name,
    how_to_choose_languages,
    language_names,
)
from regard.data.pairs import ContextPair, Pair, ParsedPair, TaggedPair, previous_sentences
from regard.data.text_files import RemoteFile, read_error
from regard.errors import RegardError, shorten
from regard.recipe import DataConfig, DataFiles, Recipe, is_url

FILE_KEYS = ("source", "target", "pairs", "conllu", "text", "parses")
"""the keys of ``data.train`` that name files"""


def read_pairs(
    files: DataFiles, data: DataConfig, section: str = "data.train", skipped: Skipped | None = None
) -> Iterator[Pair]:
    """The pairs of all files, one file after another.

    The existence of the files is checked by the call itself, before the first pair is requested. ``skipped`` counts
    what is left out.
    """
    paths = data_paths(files, data, section)
    options = read_options(files, data, skipped)
    if "pairs" in paths:
        sources = paths["pairs"]
        streams = [pair_format(path, options).read(path) for path in sources]
    else:
        format_class = next(
            format_class for format_class in INPUT_FORMATS.values() if format_class.keys[0] in paths
        )
        sources = paths[format_class.keys[0]]
        groups = zip(*(paths[key] for key in format_class.keys), strict=True)
        streams = [format_class(options).read(*group) for group in groups]
    if files.on_bad_line == "skip":
        streams = [_counted(pairs, options.skipped) for pairs in streams]
    if "parses" in paths:
        streams = list(map(_with_parses, streams, sources, paths["parses"]))
    tagged = list(map(_with_tags, streams, files.tags))
    if data.context:
        tagged = [_with_context(pairs, data.context) for pairs in tagged]
    return chain.from_iterable(tagged)


def read_options(files: DataFiles, data: DataConfig, skipped: Skipped | None = None) -> ReadOptions:
    """What the recipe says about how files are read."""
    return ReadOptions(files.columns, data.languages, files.on_bad_line, skipped or Skipped())


def train_pairs(data: DataConfig, skipped: Skipped | None = None) -> Iterator[Pair]:
    """The training pairs, without those that are held out for validation; in both directions if the recipe says so."""
    return select_train_pairs(read_pairs(data.train, data, "data.train", skipped), data)


def select_train_pairs(pairs: Iterator[Pair], data: DataConfig) -> Iterator[Pair]:
    """The training pairs among pairs of ``data.train``."""
    pairs = _without_held_out(pairs, data)
    # The target of a pair can be the source of another one, which is held out.
    return _without_held_out(_both_directions(pairs), data) if data.bidirectional else pairs


def one_direction_pairs(data: DataConfig) -> Iterator[Pair]:
    """The training pairs from source to target only."""
    return _without_held_out(read_pairs(data.train, data, "data.train"), data)


def _without_held_out(pairs: Iterator[Pair], data: DataConfig) -> Iterator[Pair]:
    if data.valid is not None:
        return pairs
    return (pair for pair in pairs if not is_held_out(pair.source, data.hold_out))


def _both_directions(pairs: Iterator[Pair]) -> Iterator[Pair]:
    for pair in pairs:
        yield pair
        yield Pair(pair.target, pair.source)


def valid_pairs(data: DataConfig, skipped: Skipped | None = None) -> Iterator[Pair]:
    """The validation pairs: those of ``data.valid``, or the held-out training pairs."""
    if data.valid is not None:
        return read_pairs(data.valid, data, "data.valid", skipped)
    pairs = read_pairs(data.train, data, "data.train")
    return (pair for pair in pairs if is_held_out(pair.source, data.hold_out))


def is_held_out(source: str, fraction: float) -> bool:
    """Whether a pair is held out for validation; this depends only on its source text, on every machine.

    So all translations of a source are in the same split, and no held-out source occurs in training, not even in
    another Unicode form or case.
    """
    digest = hashlib.blake2b(_fold(source).encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _fold(source: str) -> str:
    """The same string for all sources that a model may read as the same, whatever ``tokenizer.normalize`` is."""
    folded = unicodedata.normalize("NFKC", source).casefold()
    # Case folding may decompose a character, or leave two combining marks in the wrong order.
    return unicodedata.normalize("NFKC", folded).strip()


def fingerprint(files: DataFiles, data: DataConfig) -> str:
    """SHA-256 over the files' contents, their order, recipe keys and tags, and how they are read; not their names."""
    digest = hashlib.sha256()
    for tags in files.tags if any(files.tags) else ():
        digest.update(" ".join(tags).encode() + b"\0")
    for key, paths in data_paths(files, data, "data").items():
        for path in _all_files(paths) if key == "pairs" else paths:
            digest.update(key.encode() + b"\0")
            if path.exists() and not path.is_file() and not path.is_dir():
                raise RegardError(
                    f"{path}: not a regular file; training reads its data several times"
                )
            try:
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise read_error(path, error) from None
    digest.update(_layout_key(files, data).encode())
    return digest.hexdigest()


def _all_files(paths: list[Path | RemoteFile]) -> Iterator[Path | RemoteFile]:
    """The files, those in folders included."""
    for path in paths:
        if path.is_dir() or is_pattern(path):
            yield from folder_files(path)
        else:
            yield path


def _layout_key(files: DataFiles, data: DataConfig) -> str:
    """Identifies how files are read; empty for the defaults, so that older fingerprints stay valid."""
    options = read_options(files, data)
    paths = data_paths(files, data, "data").get("pairs", [])
    keys = [pair_format(path, options).layout(path).key for path in paths]
    skips = "" if files.on_bad_line == "error" else files.on_bad_line
    return "\0".join([*keys, skips]) if any(keys) or skips else ""


def data_path(location: str) -> Path | RemoteFile:
    """The file with this path or URL."""
    return RemoteFile(location) if is_url(location) else Path(location)


def data_paths(
    files: DataFiles, data: DataConfig, section: str
) -> dict[str, list[Path | RemoteFile]]:
    """The files by recipe key (source, target, pairs …), after checking that all of them exist.

    ``section`` is named in the error message; it is empty if the file was given on the command line.
    """
    named = {key: getattr(files, key) for key in FILE_KEYS}
    paths = {
        key: [data_path(data.location(name)) for name in names]
        for key, names in named.items()
        if names
    }
    for key, key_paths in paths.items():
        for path in key_paths:
            if path.exists() or (key == "pairs" and is_pattern(path) and folder_files(path)):
                continue
            if not section:
                raise RegardError(f"{path}: no such file")
            if isinstance(path, RemoteFile):
                raise RegardError(f"{section}.{key}: no such file: {path}")
            raise RegardError(
                f"{section}.{key}: no such file: {path.absolute()} "
                "(set the folder with --set data.root=DIR or $REGARD_DATA)"
            )
    return paths


def _counted(pairs: Iterator[Pair], skipped: Skipped) -> Iterator[Pair]:
    for pair in pairs:
        skipped.read += 1
        yield pair


def _with_parses(
    pairs: Iterator[Pair], source: Path | RemoteFile, parses: Path | RemoteFile
) -> Iterator[Pair]:
    pairs_to_yield, pairs_to_parse = tee(pairs)
    trees = read_parses((pair.source for pair in pairs_to_parse), parses, str(source))
    # The trees come first in the zip: at the end it requests one more of them, so superfluous trees are noticed.
    return (
        ParsedPair.from_pair(pair, tree) for tree, pair in zip(trees, pairs_to_yield, strict=True)
    )


def _with_context(pairs: Iterator[Pair], sentences: int) -> Iterator[Pair]:
    """Each pair with the sources before it in its document; a blank pair ends a document and is left out."""
    previous: list[str] = []
    for pair in pairs:
        (context,) = previous_sentences([pair.source], sentences, previous)
        if pair.source.strip() or pair.target.strip():
            yield ContextPair.with_context(pair, context)
        previous = [*previous, pair.source][-sentences:]


def _with_tags(pairs: Iterator[Pair], tags: tuple[str, ...]) -> Iterator[Pair]:
    return (TaggedPair.from_pair(pair, tags) for pair in pairs) if tags else pairs


# ---------------------------------------------------------------------------------------------
# Preview: what is understood of training files before training: formats, languages, counts and samples


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
        """All pairs. They are counted while they are read."""
        for pair in read_pairs(self.files, self.data, "", self.skipped):
            self.count += 1
            if len(self.samples) < SAMPLES and pair.source.strip() and pair.target.strip():
                self.samples.append(pair)
            yield pair

    def lines(self, known_languages: NamePair | None = None) -> list[str]:
        """What was understood, one line each; complete after all pairs have been read.

        known_languages: those of the data if their files do not name any.
        """
        lines = []
        for names, input_format, layout in self.layouts:
            is_parallel = isinstance(input_format, INPUT_FORMATS["parallel"])
            lines.append(
                f"{names}: {'parallel text' if is_parallel else format_name(input_format)}"
            )
            lines += [f"  {detail}" for detail in layout.details[:20]]
            if len(layout.details) > 20:
                lines.append(f"  and {len(layout.details) - 20:,} more files")
        languages = "languages unknown (use --languages to name them)"
        if known := self.languages or known_languages:
            languages = language_names(known)
        lines.append(f"{self.count:,} pairs, {languages}; the first:")
        lines += [f"  {_shorten(source)}  →  {_shorten(target)}" for source, target in self.samples]
        return [*lines, *self.skipped.messages()]

    def _layouts(self) -> Iterator[tuple[str, InputFormat, Layout]]:
        paths = data_paths(self.files, self.data, "")
        options = read_options(self.files, self.data)
        for path in paths.get("pairs", []):
            input_format = pair_format(path, options)
            yield _name(path), input_format, input_format.layout(path)
        if "source" in paths:
            for path_pair in zip(paths["source"], paths["target"], strict=True):
                input_format = INPUT_FORMATS["parallel"](options)
                yield " and ".join(map(_name, path_pair)), input_format, Layout()

    def _languages(self) -> NamePair | None:
        """The languages of source and target, if all files name the same ones."""
        if self.data.languages:
            return self.data.languages
        if self.files.source:
            return self.data.language_pair if self.data.named else None
        named = {layout.languages: names for names, _, layout in self.layouts if layout.languages}
        if len(named) > 1:
            descriptions = ", ".join(
                f"{names} is {language_names(languages)}" for languages, names in named.items()
            )
            raise RegardError(
                f"several pairs of languages: {descriptions}; {how_to_choose_languages(*min(named))}"
            )
        return next(iter(named), None)


def _name(path: Path | RemoteFile) -> str:
    """A path as the user gave it, if it is below the current folder."""
    current = Path.cwd()
    if isinstance(path, RemoteFile) or not path.is_relative_to(current):
        return str(path)
    return str(path.relative_to(current))


def _shorten(text: str) -> str:
    return shorten(" ".join(text.split()), 56)


# ---------------------------------------------------------------------------------------------
# Example sentences: a few sources that show what a model does


EXAMPLES = 4
"""example sentences on the page"""
EXAMPLE_CHARACTERS = range(20, 121)
"""length of a good example"""


def example_sources(recipe: Recipe) -> list[str]:
    """A few sources to try: of the test data, else of the validation or training data; none if no file is there."""
    for split in ("test", "valid", "train"):
        files = recipe.data.splits.get(split)
        if files is None:
            continue
        try:
            pairs = islice(read_pairs(files, recipe.data, f"data.{split}"), 100)
            suitable = (pair.source for pair in pairs if len(pair.source) in EXAMPLE_CHARACTERS)
            return list(islice(dict.fromkeys(suitable), EXAMPLES))
        except RegardError:
            continue
    return []
