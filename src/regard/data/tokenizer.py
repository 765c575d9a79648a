"""Tokenizers and vocabularies: text to token ids and back.

SentencePiece trains the vocabulary. The code around it makes sure that ``decode(encode(text))`` returns the normalized
text exactly, for any text: SentencePiece itself turns U+2581 into a space, drops spaces, and skips training lines with
U+2585. A character without an entry in the vocabulary is encoded as its UTF-8 bytes (byte fallback), except by word
vocabularies.
"""

from __future__ import annotations

import io
import re
import struct
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import sentencepiece

from regard.data.pairs import Pair
from regard.data.special_tokens import BOS, EOS, MASK, PAD, SPACE_SYMBOL, SPECIAL_TOKENS, UNK
from regard.data.words import is_word_character
from regard.errors import RegardError
from regard.recipe.registry import Registry

if TYPE_CHECKING:
    from regard import recipe

UNK_SYMBOL = "⁇"
SKIPPED_TOKENS = {PAD, BOS, EOS, MASK}
"""Special tokens that ``decode`` skips. It also skips tags, which SentencePiece treats as control symbols."""

Side = Literal["source", "target"]

TRAINABLE = ("unigram", "bpe", "char", "word")
"""the kinds that SentencePiece can train, by its own names"""
MAX_TRAINING_CHARACTERS = 20_000_000
"""Characters of training text, about four million words. More text changes the vocabulary little, but for unigram each
character takes 30 bytes of memory and, in text without spaces, each million takes 15 seconds."""
MAX_CHARACTERS_PER_TEXT = 2_000
"""characters of one text used for training; long stretches without a space are slow"""
LARGE_ALPHABET = 256
"""with at most this many distinct characters, each gets an entry"""
LARGE_ALPHABET_COVERAGE = 0.9995
"""character coverage for larger alphabets, as SentencePiece's manual recommends for Chinese and Japanese; other
characters are encoded as bytes"""
COUNTED_PAIRS = 1_024
"""pairs whose characters are counted together"""
NUM_BYTES = 256
NUM_THREADS = 4
"""fixed, because the order of floating-point sums, and so the model, depends on the number of threads"""
FEW_TEXTS = 64
"""fewer texts are encoded and decoded one by one: for a list, SentencePiece starts threads, which takes longer"""

# The symbols that SentencePiece treats specially are escaped: U+FDD0 and a digit. U+FDD0 is a noncharacter, to which
# Unicode will never assign a meaning; if a text has it nevertheless, it is escaped as well.
_ESCAPE = "\ufdd0"
_ESCAPES = {_ESCAPE: _ESCAPE + "0", SPACE_SYMBOL: _ESCAPE + "1", "\u2585": _ESCAPE + "2"}
_UNESCAPES = {escape: symbol for symbol, escape in _ESCAPES.items()}
_SYMBOL = re.compile("[" + "".join(_ESCAPES) + "]")
_ESCAPED_SYMBOL = re.compile(_ESCAPE + "[012]")
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class Vocabulary:
    """The vocabulary of one side, or of both sides if they share it."""

    def __init__(self, model: bytes, normalization: str) -> None:
        """``model``: a serialized SentencePiece model. ``normalization``: a name in ``NORMALIZATIONS``."""
        self.model = model
        self.normalization = normalization
        self._normalize = NORMALIZATIONS[normalization]
        self._processor = sentencepiece.SentencePieceProcessor()
        self._processor.LoadFromSerializedProto(model)
        self.tags = self._find_tags()
        """the tags that can be prepended to a source, with their ids"""

    def _find_tags(self) -> dict[str, int]:
        tags = {}
        for i in range(len(SPECIAL_TOKENS), self._processor.get_piece_size()):
            if not self._processor.is_control(i):
                break
            tags[self._processor.id_to_piece(i).strip("<>")] = i
        return tags

    @property
    def size(self) -> int:
        """The number of entries, including special tokens."""
        return int(self._processor.get_piece_size())

    @property
    def num_special_tokens(self) -> int:
        """The number of ids, at the beginning, that stand for no text: special tokens and tags."""
        return len(SPECIAL_TOKENS) + len(self.tags)

    @property
    def line_break_ids(self) -> list[int]:
        """The bytes that would break a line, which no training text contains."""
        ids = (self._processor.piece_to_id(piece) for piece in ("<0x0A>", "<0x0D>"))
        return [int(i) for i in ids if i != UNK]

    @cached_property
    def byte_ids(self) -> list[int]:
        """The id of each byte; UNK if it has none."""
        return [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(NUM_BYTES)]

    @property
    def suppressed_tokens(self) -> tuple[int, ...]:
        """The tokens that decoding must not generate."""
        return (PAD, BOS, UNK, MASK, *self.tags.values(), *self.line_break_ids)

    # Encoding and decoding

    def normalize(self, text: str) -> str:
        return self._normalize(text)

    def escape(self, text: str) -> str:
        """The text that SentencePiece segments: normalized and escaped, with ``▁`` for spaces."""
        return _escape(text, self.normalization).decode("utf-8").replace(" ", SPACE_SYMBOL)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, without BOS and EOS."""
        assert not isinstance(texts, str), "a list of texts"
        normalize = self._normalize
        escaped = [_escape_symbols(normalize(text)) for text in texts]
        if len(escaped) < FEW_TEXTS:
            return [self._processor.encode(text, out_type=int) for text in escaped]
        # One thread: corpora are prepared by several processes, and threads would take 1.4 times the CPU time.
        return list(self._processor.encode(escaped, out_type=int, num_threads=1))

    def encode_continuation(self, text: str) -> list[int]:
        """The token ids of a text that follows another text without a space between."""
        escaped = _escape(text, self.normalization).removeprefix(b" ")
        return list(self._processor.encode(escaped, out_type=int))

    def prepend_tags(self, ids: list[int], tags: Sequence[str]) -> list[int]:
        """The ids of tags, followed by the ids of a source."""
        for tag in tags:
            if tag not in self.tags:
                known_tags = ", ".join(f"<{name}>" for name in self.tags) or "none"
                raise RegardError(f"the vocabulary has no tag <{tag}>; known tags: {known_tags}")
        return [*(self.tags[tag] for tag in tags), *ids]

    def decode(self, ids: Iterable[Sequence[int]]) -> list[str]:
        """Detokenize: the text of each row of ids. Special tokens are skipped, but UNK becomes ⁇."""
        rows = [[i for i in map(int, row) if i not in SKIPPED_TOKENS] for row in ids]
        if len(rows) < FEW_TEXTS:
            return [_unescape(self._processor.decode(row)) for row in rows]
        return [_unescape(text) for text in self._processor.decode(rows)]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The printable form of each id: ``▁`` is a space, ``<0xC3>`` a byte."""
        return [SPECIAL_TOKENS.get(int(i)) or str(self._processor.id_to_piece(int(i))) for i in ids]

    # Properties of pieces

    def piece_scores(self) -> dict[str, tuple[int, float]]:
        """The id and SentencePiece score of every piece that is text, not a special token or a byte."""
        processor = self._processor
        ids = range(self.num_special_tokens, processor.get_piece_size())
        texts = (i for i in ids if not processor.is_byte(i))
        return {processor.id_to_piece(i): (i, processor.get_score(i)) for i in texts}

    def word_boundaries(self) -> tuple[list[bool], list[bool]]:
        """For every id, whether it starts a new word, and whether it ends a word."""
        pieces = self.pieces(range(self.size))
        # A byte may be part of a letter.
        texts = [piece if _BYTE.fullmatch(piece) is None else "x" for piece in pieces]
        starts = [not piece[:1] or not is_word_character(piece[0]) for piece in texts]
        ends = [not piece[:1] or not is_word_character(piece[-1]) for piece in texts]
        return starts, ends

    def token_starts(self, text: str) -> list[int]:
        """The number of non-whitespace characters of a text before each of its tokens."""
        escaped = _escape(text, self.normalization)
        characters_before: list[int] = []  # for each byte of the escaped text
        count = 0
        for character in escaped.decode("utf-8"):
            characters_before += [count] * len(character.encode("utf-8"))
            count += not character.isspace()
        starts = accumulate(self._byte_lengths(escaped), initial=0)
        return [characters_before[start] for start in starts if start < len(characters_before)]

    def count_characters(self, text: str) -> int:
        """The number of non-whitespace characters of a text, counted as in ``token_starts``."""
        escaped = _escape(text, self.normalization).decode("utf-8")
        return sum(not character.isspace() for character in escaped)

    def _byte_lengths(self, escaped: bytes) -> list[int]:
        """The number of bytes of the escaped text that each token stands for."""
        ids: list[int] = self._processor.encode(escaped, out_type=int)
        pieces: list[str] = self._processor.encode(escaped, out_type=str)
        return [
            1
            if self._processor.is_byte(i)
            else len(piece.replace(SPACE_SYMBOL, " ").encode("utf-8"))
            for i, piece in zip(ids, pieces, strict=True)
        ]

    def files(self, stem: str) -> dict[str, bytes]:
        """The contents of the files to save, by name."""
        return {f"{stem}.model": self.model}

    def split_piece(self, piece: str) -> list[int]:
        """The ids that the text of a piece of another vocabulary is encoded as."""
        text = piece.replace(SPACE_SYMBOL, " ").encode("utf-8")
        return list(self._processor.encode(text, out_type=int))


@dataclass(frozen=True)
class Tokenizer:
    """The vocabularies of both sides."""

    source: Vocabulary
    target: Vocabulary
    """the same object as ``source`` if the vocabulary is shared"""

    @classmethod
    def train(
        cls,
        config: recipe.TokenizerConfig,
        pairs: Callable[[], Iterable[Pair]],
        labels: bool = False,
        tags: Sequence[str] = (),
    ) -> Tokenizer:
        """Train the vocabularies. ``pairs`` is called for each pass over the data, so that none are kept in memory.

        ``labels``: the targets are labels separated by spaces, and each label is an entry. ``tags``: tokens that can be
        prepended to a source; no text is ever encoded as one.
        """
        if config.kind not in TRAINABLE:
            raise RegardError(
                f"tokenizer.kind {config.kind}: is only for imported models and cannot be trained; "
                f"use one of {', '.join(TRAINABLE)}"
            )
        if labels:
            return cls(_train_vocabulary(config, pairs, ("source",)), train_labels(pairs))
        if config.shared:
            shared = _train_vocabulary(config, pairs, ("source", "target"), tags)
            return cls(shared, shared)
        source = _train_vocabulary(config, pairs, ("source",), tags)
        return cls(source, _train_vocabulary(config.of_target, pairs, ("target",)))

    @property
    def shared(self) -> bool:
        return self.source is self.target

    @property
    def deterministic(self) -> Tokenizer:
        """The tokenizer without subword sampling."""
        return self

    def save(self, folder: Path) -> list[Path]:
        """Write the tokenizer's files to a run folder, remove those of any other tokenizer, and return the paths."""
        vocabularies = [self.source] if self.shared else [self.source, self.target]
        files: dict[str, bytes] = {}
        for stem, vocabulary in zip(file_stems(self.shared), vocabularies, strict=True):
            files |= vocabulary.files(stem)
        for name, content in files.items():
            try:
                (folder / name).write_bytes(content)
            except OSError as error:
                raise RegardError(f"{folder / name}: cannot be written: {error.strerror}") from None
        for file in folder.glob("tokenizer*"):
            if file.name not in files:
                file.unlink()
        return [folder / name for name in files]

    @classmethod
    def load(cls, folder: Path, config: recipe.TokenizerConfig, labels: bool = False) -> Tokenizer:
        normalizations: list[str] = [config.normalize] * 2
        if labels:
            normalizations[1] = str(LABELS["normalize"])
        files = [folder / f"{stem}.model" for stem in file_stems(config.shared)]
        vocabularies = list(map(_load_vocabulary, files, normalizations))
        return cls(vocabularies[0], vocabularies[-1])


Loader: TypeAlias = "Callable[[Path, recipe.TokenizerConfig, bool], Tokenizer]"
"""Loads the tokenizer of a run folder; the flag says that the targets are labels."""
TOKENIZERS: Registry[Loader] = Registry("tokenizer.kind")

TOKENIZERS.register("unigram", summary="SentencePiece unigram language model (Kudo 2018)")(
    Tokenizer.load
)
TOKENIZERS.register("bpe", summary="byte-pair encoding (Sennrich et al. 2016)")(Tokenizer.load)
TOKENIZERS.register("char", summary="single characters")(Tokenizer.load)
TOKENIZERS.register("word", summary="words between spaces; unknown words become UNK")(
    Tokenizer.load
)


@TOKENIZERS.register("marian")
def _load_marian(folder: Path, config: recipe.TokenizerConfig, labels: bool) -> Tokenizer:
    """the tokenizer of an imported Marian (OPUS-MT) model"""
    from regard.data.marian_vocabulary import load_marian

    return load_marian(folder, config, labels)


def load_tokenizer(folder: Path, config: recipe.TokenizerConfig, labels: bool = False) -> Tokenizer:
    """The tokenizer of a run folder. ``labels``: the targets are labels, each an entry of the vocabulary."""
    return TOKENIZERS[config.kind](folder, config, labels)


def file_stems(shared: bool) -> list[str]:
    """What the names of a tokenizer's files begin with, for each vocabulary."""
    return ["tokenizer"] if shared else ["tokenizer.source", "tokenizer.target"]


def read_model(path: Path) -> bytes:
    """The contents of a file of the tokenizer."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise RegardError(f"{path}: no such file; the tokenizer is missing") from None
    except OSError as error:
        raise RegardError(f"{path}: cannot be read: {error.strerror}") from None


def _load_vocabulary(path: Path, normalization: str) -> Vocabulary:
    model = read_model(path)
    expected = list(SPECIAL_TOKENS.values())
    try:
        vocabulary = Vocabulary(model, normalization)
        pieces = [vocabulary._processor.id_to_piece(i) for i in range(vocabulary.size)]
        first_pieces = pieces[: len(SPECIAL_TOKENS)]
    except (RuntimeError, IndexError, UnicodeDecodeError):
        raise RegardError(f"{path}: damaged, or not a SentencePiece model") from None
    if first_pieces != expected:
        raise RegardError(
            f"{path}: not created by Regard: its first entries are {first_pieces}, not {expected}"
        )
    return vocabulary


# ---------------------------------------------------------------------------------------------
# Extending a trained vocabulary

ExtendedIds = list[list[int]]
"""For each id of an extended vocabulary, the ids of the original one that it corresponds to: one for an entry that was
there, the ids that it used to be split into for a new piece, those of all other tags (or all pieces) for a new tag."""
MIN_CHARACTER_COUNT = 10
"""how often a character must occur to get an entry of its own in an extended BPE vocabulary"""
_NORMAL, _CONTROL = 1, 3
"""types of pieces in SentencePiece's file format"""


def extend_tokenizer(
    tokenizer: Tokenizer,
    config: recipe.TokenizerConfig,
    pairs: Callable[[], Iterable[Pair]],
    count: int,
    tags: Sequence[str] = (),
) -> Tokenizer:
    """Add to each vocabulary at most ``count`` pieces learned from ``pairs``, and to the source the missing ``tags``.

    Entries keep their order: special tokens, tags (new ones last), pieces (new ones last).
    """
    if tokenizer.shared:
        shared = _extend_vocabulary(tokenizer.source, config, pairs, ("source", "target"), count)
        shared = _add_tags(shared, tags)
        return Tokenizer(shared, shared)
    source = _extend_vocabulary(tokenizer.source, config, pairs, ("source",), count)
    target = _extend_vocabulary(tokenizer.target, config.of_target, pairs, ("target",), count)
    return Tokenizer(_add_tags(source, tags), target)


def extended_ids(original: Vocabulary, extended: Vocabulary) -> ExtendedIds:
    """The ids of the original vocabulary that each id of the extended one corresponds to."""
    original_ids = {piece: i for i, piece in enumerate(original.pieces(range(original.size)))}
    texts = list(range(original.num_special_tokens, original.size))
    tags = list(original.tags.values()) or texts
    new_tags = {*extended.tags.values()}
    return [
        [original_ids[piece]]
        if piece in original_ids
        else (tags if i in new_tags else original.split_piece(piece) or texts)
        for i, piece in enumerate(extended.pieces(range(extended.size)))
    ]


def _extend_vocabulary(
    vocabulary: Vocabulary,
    config: recipe.TokenizerConfig,
    pairs: Callable[[], Iterable[Pair]],
    sides: Sequence[Side],
    count: int,
) -> Vocabulary:
    """Train a vocabulary of the same kind on the pairs and add its best pieces that are new."""
    if count == 0:
        return vocabulary
    text = _count_text(pairs(), sides, config.normalize, MAX_CHARACTERS_PER_TEXT)
    smallest = len(SPECIAL_TOKENS) + NUM_BYTES + text.alphabet
    size = max(vocabulary.size, smallest) + count
    trained = _train_vocabulary(config.model_copy(update={"vocab_size": size}), pairs, sides)
    old_scores, new_scores = vocabulary.piece_scores(), trained.piece_scores()
    new_pieces = [piece for piece in new_scores if piece not in old_scores]
    if config.kind == "bpe":
        return _add_merges(
            vocabulary, new_pieces, _new_characters(pairs(), vocabulary, sides), count
        )
    best_pieces = sorted(new_pieces, key=lambda piece: -new_scores[piece][1])[:count]
    return _add_pieces(vocabulary, {piece: new_scores[piece][1] for piece in best_pieces})


def _new_characters(
    pairs: Iterable[Pair], vocabulary: Vocabulary, sides: Sequence[Side]
) -> list[str]:
    """The characters without an entry that are not rare, most frequent first."""
    counts = Counter[str]()
    for pair in pairs:
        for side in sides:
            counts.update(vocabulary.escape(getattr(pair, side)[:MAX_CHARACTERS_PER_TEXT]))
    entries = vocabulary.piece_scores()
    return [
        character
        for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        if count >= MIN_CHARACTER_COUNT and character not in entries
    ]


def _add_merges(
    vocabulary: Vocabulary, pieces: Sequence[str], characters: Sequence[str], count: int
) -> Vocabulary:
    """Add characters to a BPE vocabulary, at most half of ``count``, and merges.

    The score of a piece is the negative rank of its merge, and new merges follow the old ones. A piece whose characters
    the old merges combine in another way is never produced, and left out.
    """
    lowest = min(score for _, score in vocabulary.piece_scores().values())
    characters = characters[: count // 2]
    merges = [piece for piece in pieces if len(piece) > 1]
    while True:
        added = [*merges[: count - len(characters)], *characters]
        extended = _add_pieces(
            vocabulary, {piece: lowest - rank for rank, piece in enumerate(added, 1)}
        )
        unused = {piece for piece in added if len(extended.split_piece(piece)) != 1}
        if not unused:
            return extended
        merges = [piece for piece in merges if piece not in unused]
        characters = [piece for piece in characters if piece not in unused]


def _add_pieces(vocabulary: Vocabulary, scores: dict[str, float]) -> Vocabulary:
    """Append pieces. In SentencePiece's format (protobuf), appended bytes append to a repeated field."""
    added = b"".join(_serialize_piece(piece, score, _NORMAL) for piece, score in scores.items())
    return Vocabulary(vocabulary.model + added, vocabulary.normalization)


def _add_tags(vocabulary: Vocabulary, tags: Sequence[str]) -> Vocabulary:
    """Insert the tags that are missing after the special tokens and tags."""
    new_tags = [tag for tag in tags if tag not in vocabulary.tags]
    if not new_tags:
        return vocabulary
    model, offset = vocabulary.model, 0
    for _ in range(vocabulary.num_special_tokens):
        assert model[offset] == _PIECES, "a SentencePiece model begins with its pieces"
        assert model[offset + 1] < 0x80, "special tokens and tags are short"
        offset += 2 + model[offset + 1]
    added = b"".join(_serialize_piece(f"<{tag}>", 0.0, _CONTROL) for tag in new_tags)
    return Vocabulary(model[:offset] + added + model[offset:], vocabulary.normalization)


_PIECES = 0x0A
"""tag of the field ``ModelProto.pieces`` and, inside a piece, of its text: field 1, length-delimited"""


def _serialize_piece(piece: str, score: float, piece_type: int) -> bytes:
    """One ``SentencePiece`` message as an element of ``ModelProto.pieces``."""
    text = piece.encode("utf-8")
    message = b"\x0a" + _varint(len(text)) + text + b"\x15" + struct.pack("<f", score)
    message += b"\x18" + _varint(piece_type)
    return bytes([_PIECES]) + _varint(len(message)) + message


def _varint(number: int) -> bytes:
    """An unsigned integer in protobuf's encoding: seven bits per byte, lowest first."""
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


# ---------------------------------------------------------------------------------------------
# Normalization and escaping

NORMALIZATIONS: Registry[Callable[[str], str]] = Registry("tokenizer.normalize")


@NORMALIZATIONS.register("nfc")
def nfc(text: str) -> str:
    """Unicode NFC: composed characters, nothing else changes."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


@NORMALIZATIONS.register("nfkc")
def nfkc(text: str) -> str:
    """Unicode NFKC: also folds ligatures, full-width forms and superscripts."""
    return text if text.isascii() else unicodedata.normalize("NFKC", text)


@NORMALIZATIONS.register("lower")
def lower(text: str) -> str:
    """Lower case, then NFC."""
    return unicodedata.normalize("NFC", text.lower())


@NORMALIZATIONS.register("none")
def unchanged(text: str) -> str:
    """No normalization."""
    return text


def normalize(text: str, normalization: str) -> str:
    return NORMALIZATIONS[normalization](text)


def encode_utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RegardError(
            f"{text[error.start]!a} in {text!a} is an unpaired surrogate, not a character"
        ) from None


def _escape(text: str, normalization: str) -> bytes:
    """Normalize and escape a text, as it is passed to SentencePiece."""
    return _escape_symbols(normalize(text, normalization))


def _escape_symbols(text: str) -> bytes:
    """Escape a normalized text."""
    if not text.isascii():
        text = _SYMBOL.sub(lambda symbol: _ESCAPES[symbol[0]], text)
    # One space in front, so that a word has the same pieces at the start of a text as inside it.
    # SentencePiece can do this itself, but then does not distinguish "" from " ".
    return b" " + encode_utf8(text) if text else b""


def _unescape(escaped: str) -> str:
    return _ESCAPED_SYMBOL.sub(lambda escape: _UNESCAPES[escape[0]], escaped.removeprefix(" "))


# ---------------------------------------------------------------------------------------------
# Training

LABELS = {"kind": "word", "vocab_size": 100_000, "shared": False, "normalize": "none"}
"""the tokenizer section for labels"""


def train_labels(pairs: Callable[[], Iterable[Pair]]) -> Vocabulary:
    """The vocabulary of all labels in the targets."""
    from regard.recipe import TokenizerConfig

    return _train_vocabulary(TokenizerConfig.model_validate(LABELS), pairs, ("target",))


def _train_vocabulary(
    config: recipe.TokenizerConfig,
    pairs: Callable[[], Iterable[Pair]],
    sides: Sequence[Side],
    tags: Sequence[str] = (),
) -> Vocabulary:
    """Train one vocabulary of at most ``config.vocab_size`` entries on these sides of the pairs."""
    # Words are split at spaces anyway. The other kinds do not read long texts to the end.
    max_characters = None if config.kind == "word" else MAX_CHARACTERS_PER_TEXT
    statistics = _count_text(pairs(), sides, config.normalize, max_characters)
    if statistics.characters == 0:
        raise RegardError(
            f"no text to train a vocabulary on: the {' and '.join(sides)} of "
            f"all {statistics.pairs:,} pairs are empty"
        )
    size = config.vocab_size
    if config.kind == "char" and size < len(SPECIAL_TOKENS) + len(tags) + NUM_BYTES:
        raise _size_error(config, sides, len(SPECIAL_TOKENS) + len(tags) + NUM_BYTES)
    options = _training_options(config, statistics.alphabet)
    options["control_symbols"] = [SPECIAL_TOKENS[MASK], *(f"<{tag}>" for tag in tags)]
    while True:
        sample = (
            _escape(getattr(pair, side)[:max_characters], config.normalize)
            for pair in _sample_evenly(pairs(), MAX_TRAINING_CHARACTERS / statistics.characters)
            for side in sides
        )
        try:
            model = _run_sentencepiece(sample, vocab_size=size, **options)
        except RuntimeError as error:
            if smallest := re.search(r"required_chars. \d+ vs (\d+)", str(error)):
                raise _size_error(config, sides, int(smallest[1])) from None
            if not (largest := re.search(r"set it to a value <= (\d+)", str(error))):
                raise
            size = int(largest[1])  # the data have no more pieces than this
        else:
            return Vocabulary(model, config.normalize)


class TextStatistics(NamedTuple):
    pairs: int
    characters: int
    alphabet: int
    """number of distinct characters"""


def _count_text(
    pairs: Iterable[Pair], sides: Sequence[Side], normalization: str, max_characters: int | None
) -> TextStatistics:
    """Count the text before training.

    This reads everything once, so errors in the files are raised here. SentencePiece would replace an exception of its
    input iterator by one of its own.
    """
    import numpy as np

    count, characters, stream = 0, 0, iter(pairs)
    occurs = np.zeros(sys.maxunicode + 1, np.bool_)  # by code point
    normalized = NORMALIZATIONS[normalization]
    while batch := list(islice(stream, COUNTED_PAIRS)):
        count += len(batch)
        for side in sides:
            texts = "".join([normalized(getattr(pair, side))[:max_characters] for pair in batch])
            characters += len(texts)
            occurs[np.frombuffer(texts.encode("utf-32-le", "surrogatepass"), np.uint32)] = True
    return TextStatistics(count, characters, int(occurs.sum()))


def _sample_evenly(pairs: Iterable[Pair], fraction: float) -> Iterator[Pair]:
    """An evenly spaced fraction of the pairs, always including the first.

    SentencePiece can sample, too, but its samples differ from process to process.
    """
    sampled = 0
    for index, pair in enumerate(pairs):
        if sampled <= index * fraction:
            sampled += 1
            yield pair


def _training_options(config: recipe.TokenizerConfig, alphabet: int) -> dict[str, Any]:
    """SentencePiece's options that depend on the vocabulary."""
    # If every character of a large alphabet had an entry, rare ones would leave no room for longer pieces.
    # A char vocabulary consists of characters only, and its size limits their number.
    is_large = alphabet > max(LARGE_ALPHABET, config.vocab_size // 4) and config.kind != "char"
    return {
        "model_type": config.kind,
        "byte_fallback": config.kind != "word",
        "character_coverage": LARGE_ALPHABET_COVERAGE if is_large else 1.0,
        # The size is an upper limit. Only unigram has an option for that; the others are trained again.
        "hard_vocab_limit": config.kind != "unigram",
    }


def _run_sentencepiece(texts: Iterator[bytes], **options: Any) -> bytes:
    """Train on escaped texts and return the serialized model."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=texts,
            model_writer=model,
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            pad_piece=SPECIAL_TOKENS[PAD],
            bos_piece=SPECIAL_TOKENS[BOS],
            eos_piece=SPECIAL_TOKENS[EOS],
            unk_piece=SPECIAL_TOKENS[UNK],
            unk_surface=f" {UNK_SYMBOL}",
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            shuffle_input_sentence=False,
            max_sentence_length=1 << 20,  # bytes; longer texts would be skipped
            num_threads=NUM_THREADS,
            minloglevel=2,  # errors only
            **options,
        )
    except RuntimeError as error:
        if "KeyboardInterrupt" in str(error):  # Ctrl-C while it was reading the texts
            raise KeyboardInterrupt from None
        raise
    return model.getvalue()


def _size_error(
    config: recipe.TokenizerConfig, sides: Sequence[Side], smallest: int
) -> RegardError:
    return RegardError(
        f"tokenizer.vocab_size {config.vocab_size} is too small for {config.kind} of {' and '.join(sides)}: "
        f"{len(SPECIAL_TOKENS)} special tokens, {NUM_BYTES} bytes and the characters need at least {smallest}"
    )
