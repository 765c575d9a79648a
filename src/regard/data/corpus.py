"""Pairs of text from files.

Everything streams: a corpus is never in memory as a whole. A line that cannot be read as it was
meant stops the reading with its file and number; nothing is repaired or skipped in silence.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import chain, tee, zip_longest
from pathlib import Path
from typing import NamedTuple

from regard.data.conllu import ParsedSentence, read_conllu
from regard.data.dependency_trees import check_parse
from regard.data.text_files import read_error, read_lines as read_lines
from regard.errors import RegardError
from regard.recipe import Data, DataFiles


class Pair(NamedTuple):
    source: str
    target: str


class ParsedPair(Pair):
    """A pair whose source comes with its parse; to those who do not ask, a pair like any other."""

    parse: ParsedSentence | None
    """None only where the source is blank"""

    @classmethod
    def of(cls, pair: Pair, parse: ParsedSentence | None) -> ParsedPair:
        made = cls(*pair)
        made.parse = parse
        return made


class TaggedPair(Pair):
    """A pair with what stands before its source: the language wanted, or where it comes from."""

    tags: tuple[str, ...]

    @classmethod
    def of(cls, pair: Pair, tags: tuple[str, ...]) -> TaggedPair:
        made = cls(*pair)
        made.tags = tags
        return made


def tags_of(pair: Pair) -> tuple[str, ...]:
    return pair.tags if isinstance(pair, TaggedPair) else ()


def language_of(pair: Pair) -> str | None:
    """The language asked for, if one is."""
    return next((tag[1:] for tag in tags_of(pair) if tag.startswith("2")), None)


def by_language(pairs: Iterable[Pair]) -> dict[str | None, list[Pair]]:
    """The pairs of each language asked for, each in its order."""
    found: dict[str | None, list[Pair]] = {}
    for pair in pairs:
        found.setdefault(language_of(pair), []).append(pair)
    return found


def parse_of(pair: Pair) -> ParsedSentence | None:
    return pair.parse if isinstance(pair, ParsedPair) else None


def read_pairs(texts: DataFiles, data: Data, section: str = "data.train") -> Iterator[Pair]:
    """The pairs of all files, one file after another.

    That the files are there is checked now, before the first pair is asked for.
    """
    paths = paths_of(texts, data, section)
    if texts.text is not None:
        return (Pair(line.strip(), "") for path in paths["text"] for line in read_lines(path))
    if texts.conllu is not None:
        return (pair for path in paths["conllu"] for pair in _tagged(path))
    sources = paths["source" if texts.pairs is None else "pairs"]
    if texts.pairs is None:
        twos = zip(sources, paths["target"], strict=True)
        files = [_parallel(source, target) for source, target in twos]
    else:
        files = [_paired(path) for path in sources]
    if "parses" in paths:
        threes = zip(files, sources, paths["parses"], strict=True)
        files = [_with_parses(*three) for three in threes]
    tagged = map(_with_tags, files, texts.tags)
    return chain.from_iterable(tagged)


def train_pairs(data: Data) -> Iterator[Pair]:
    """The pairs to learn from; without ``data.valid`` a share of them is held out."""
    pairs = read_pairs(data.train, data, "data.train")
    if data.valid is not None:
        return pairs
    return (pair for pair in pairs if not held_out(pair.source, data.hold_out))


def valid_pairs(data: Data) -> Iterator[Pair]:
    """The pairs to validate by: ``data.valid``, or what is held out."""
    if data.valid is not None:
        return read_pairs(data.valid, data, "data.valid")
    pairs = read_pairs(data.train, data, "data.train")
    return (pair for pair in pairs if held_out(pair.source, data.hold_out))


def read_parses(lines: Iterable[str], path: Path, of: str) -> Iterator[ParsedSentence | None]:
    """The tree of each line, which it must fit; a blank line has none. ``of`` says where the lines stand."""
    trees = read_conllu(path)
    number = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            yield None
            continue
        tree = next(trees, None)
        if tree is None:
            raise RegardError(f"{path}: no tree is left for line {number} of {of}")
        check_parse(line, tree, f"{path}:{tree.line}, line {number} of {of}")
        yield tree
    if tree := next(trees, None):
        raise RegardError(f"{path}:{tree.line}: a tree too many: {of} has only {number} lines")


def held_out(source: str, share: float) -> bool:
    """Whether a pair is kept from training; its source text alone decides, on any machine.

    So all translations of one source stay on one side, and no held-out source was ever trained on, however it is
    written.
    """
    digest = hashlib.blake2b(_folded(source).encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _folded(source: str) -> str:
    """The same for all sources that a model may read as one, whatever ``tokenizer.normalize`` is."""
    plain = unicodedata.normalize("NFKC", source).casefold()
    # To fold the case may take a letter apart, or two marks out of their order.
    return unicodedata.normalize("NFKC", plain).strip()


def fingerprint(texts: DataFiles, data: Data) -> str:
    """SHA-256 over the files as they lie on disk, their order, roles and tags; not their names."""
    whole = hashlib.sha256()
    for tags in texts.tags if any(texts.tags) else ():
        whole.update(" ".join(tags).encode() + b"\0")
    for role, paths in paths_of(texts, data, "data").items():
        for path in paths:
            whole.update(role.encode() + b"\0")
            try:
                with path.open("rb") as file:
                    whole.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise read_error(path, error) from None
    return whole.hexdigest()


# ---------------------------------------------------------------------------------------------
# Pairs


def paths_of(texts: DataFiles, data: Data, section: str) -> dict[str, list[Path]]:
    """The files by role (source, target, pairs …); all of them exist."""
    roles = {"source": texts.source, "target": texts.target, "pairs": texts.pairs}
    roles |= {"conllu": texts.conllu, "text": texts.text, "parses": texts.parses}
    paths = {role: [data.path(name) for name in names] for role, names in roles.items() if names}
    for role, files in paths.items():
        for path in files:
            if path.exists():
                continue
            if not section:  # named on the command line, by its full name
                raise RegardError(f"{path}: no such file")
            raise RegardError(
                f"{section}.{role}: no such file: {path.absolute()} "
                "(the folder is set by --set data.root=DIR or $REGARD_DATA)"
            )
    return paths


def _parallel(source_path: Path, target_path: Path) -> Iterator[Pair]:
    sources, targets = read_lines(source_path), read_lines(target_path)
    for read, (source, target) in enumerate(zip_longest(sources, targets)):
        if source is None or target is None:
            longer = read + 1 + sum(1 for _ in (targets if source is None else sources))
            counts = (read, longer) if source is None else (longer, read)
            raise RegardError(
                f"{source_path} has {counts[0]:,} lines but {target_path} has {counts[1]:,}: "
                "line n of one must translate line n of the other"
            )
        yield Pair(source, target)


def _with_parses(pairs: Iterator[Pair], source: Path, parses: Path) -> Iterator[Pair]:
    ours, theirs = tee(pairs)
    trees = read_parses((pair.source for pair in theirs), parses, str(source))
    # The trees first: at the end they are asked once more, and tell if there are too many.
    return (ParsedPair.of(pair, tree) for tree, pair in zip(trees, ours, strict=True))


def _with_tags(pairs: Iterator[Pair], tags: tuple[str, ...]) -> Iterator[Pair]:
    return (TaggedPair.of(pair, tags) for pair in pairs) if tags else pairs


def _tagged(path: Path) -> Iterator[Pair]:
    """The words of each sentence and their tags. A blank inside a word, which some languages have, becomes _."""
    for sentence in read_conllu(path):
        words = (word.replace(" ", "_") for word in sentence.words)
        yield Pair(" ".join(words), " ".join(sentence.tags))


def _paired(path: Path) -> Iterator[Pair]:
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    parse = _from_json if name.endswith(".jsonl") else _from_tsv
    for number, line in enumerate(read_lines(path), start=1):
        try:
            yield parse(line)
        except ValueError as error:
            raise RegardError(f"{path}:{number}: {error}") from None


def _from_tsv(line: str) -> Pair:
    """The first two fields; Tatoeba and others put the licence in a third."""
    fields = line.split("\t", maxsplit=2)
    if len(fields) < 2:
        raise ValueError(f"no tab in {shortened(line)}; a line is source, tab, target")
    return Pair(fields[0], fields[1])


def _from_json(line: str) -> Pair:
    wanted = 'a line is {"source": "…", "target": "…"}'
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"not JSON: {shortened(line)}; {wanted}") from None
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object: {shortened(line)}; {wanted}")
    for key in ("source", "target"):
        if not isinstance(record.get(key), str):
            found = shortened(record[key]) if key in record else "nothing"
            raise ValueError(f'"{key}" must be a string, found {found}; {wanted}')
        if any("\ud800" <= letter <= "\udfff" for letter in record[key]):
            # JSON can spell half a surrogate pair, which is no text and has no UTF-8 form.
            raise ValueError(f'"{key}" holds half of a surrogate pair: {shortened(record[key])}')
    return Pair(record["source"], record["target"])


def shortened(value: object) -> str:
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
