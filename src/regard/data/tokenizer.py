"""Text to numbers and back.

SentencePiece learns the pieces. Around it stands what makes ``decode(encode(text))`` give back the
normalised text exactly, whatever the text: SentencePiece by itself turns U+2581 into a space, loses
spaces, and leaves lines with U+2585 out of its training.
"""

from __future__ import annotations

import io
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import sentencepiece

from regard import recipe
from regard.data.corpus import Pair
from regard.data.special_tokens import BOS, EOS, MASK, PAD, SPACE_SYMBOL, SPECIAL_TOKENS, UNK
from regard.data.words import joins
from regard.errors import RegardError
from regard.recipe import Registry

UNK_SYMBOL = "⁇"
SILENT = {PAD, BOS, EOS, MASK}
"""tags are silent too, without our doing: SentencePiece calls them control symbols"""

Side = Literal["source", "target"]

TRAINABLE = ("unigram", "bpe", "char", "word")
"""the kinds that SentencePiece trains, by its own names"""
LETTERS_TO_LEARN_FROM = 20_000_000
"""of all texts: some four million words. More change the pieces little, but cost unigram 30 bytes
of memory each and, in text without spaces, 15 seconds a million"""
LETTERS_OF_ONE_TEXT = 2_000
"""of each text: long stretches without a space are slow to learn from"""
MANY_LETTERS = 256
"""an alphabet up to this size gets an entry for every letter"""
COVERAGE_OF_MANY_LETTERS = 0.9995
"""else as SentencePiece's manual has it for Chinese and Japanese; the rest is spelled in bytes"""
BYTES = 256
THREADS = 4
"""fixed: sums of floats, and so the model, depend on how many threads share the work"""

# SentencePiece's own signs, and one to stand before their names. U+FDD0 is a noncharacter: Unicode
# promises it no meaning ever, and if it comes all the same it is spelled out like the others.
_ESCAPE = "\ufdd0"
_SPELLINGS = {_ESCAPE: _ESCAPE + "0", SPACE_SYMBOL: _ESCAPE + "1", "\u2585": _ESCAPE + "2"}
_MEANINGS = {spelling: sign for sign, spelling in _SPELLINGS.items()}
_SIGN = re.compile("[" + "".join(_SPELLINGS) + "]")
_SPELLING = re.compile(_ESCAPE + "[012]")
_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""may be part of a letter"""


class Vocabulary:
    """The pieces of one side, or of both when they share."""

    def __init__(self, model: bytes, normalization: str) -> None:
        self.model = model
        """as SentencePiece wrote it"""
        self.normalization = normalization
        self._processor = sentencepiece.SentencePieceProcessor()
        self._processor.LoadFromSerializedProto(model)
        self.tags = self._find_tags()
        """what can stand before a source, and its id"""

    def _find_tags(self) -> dict[str, int]:
        found = {}
        for i in range(len(SPECIAL_TOKENS), self._processor.get_piece_size()):
            if not self._processor.is_control(i):
                break
            found[self._processor.id_to_piece(i).strip("<>")] = i
        return found

    @property
    def size(self) -> int:
        """Entries, the marks among them."""
        return int(self._processor.get_piece_size())

    @property
    def marks(self) -> int:
        """How many ids, the first ones, stand for no text: those all vocabularies have, and tags."""
        return len(SPECIAL_TOKENS) + len(self.tags)

    @property
    def line_breaks(self) -> list[int]:
        """Bytes that would break a line; no text that was learned from has one."""
        found = (self._processor.piece_to_id(piece) for piece in ("<0x0A>", "<0x0D>"))
        return [int(i) for i in found if i != UNK]

    @property
    def suppressed_tokens(self) -> tuple[int, ...]:
        """What search may not put into a text."""
        return (PAD, BOS, UNK, MASK, *self.tags.values(), *self.line_breaks)

    def normalize(self, text: str) -> str:
        return normalize(text, self.normalization)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without BOS and EOS."""
        assert not isinstance(texts, str), "a list of texts"
        spelled = [_spell(text, self.normalization) for text in texts]
        return list(self._processor.encode(spelled, out_type=int)) if spelled else []

    def tagged(self, ids: list[int], tags: Sequence[str]) -> list[int]:
        """The ids of a source with those of its tags in front."""
        for tag in tags:
            if tag not in self.tags:
                known = ", ".join(f"<{name}>" for name in self.tags) or "none"
                raise RegardError(
                    f"the vocabulary has no entry <{tag}>; of this kind it has: {known}"
                )
        return [*(self.tags[tag] for tag in tags), *ids]

    def spelled(self, text: str) -> str:
        """The text as SentencePiece cuts it, with its sign for blanks."""
        return _spell(text, self.normalization).decode("utf-8").replace(" ", SPACE_SYMBOL)

    def scores(self) -> dict[str, tuple[int, float]]:
        """Every piece of text with its id and score; marks and bytes are none."""
        known = self._processor
        texts = (i for i in range(self.marks, known.get_piece_size()) if not known.is_byte(i))
        return {known.id_to_piece(i): (i, known.get_score(i)) for i in texts}

    @property
    def byte_ids(self) -> list[int]:
        """The id of each byte; UNK where it has none."""
        return [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(BYTES)]

    def inside(self, text: str) -> list[int]:
        """The ids of a text that follows on another with no blank between."""
        spelled = _spell(text, self.normalization).removeprefix(b" ")
        return list(self._processor.encode(spelled, out_type=int))

    def decode(self, ids: Iterable[Sequence[int]]) -> list[str]:
        """The text of each row of ids; marks are silent, but UNK shows as ⁇."""
        rows = [[i for i in map(int, row) if i not in SILENT] for row in ids]
        return [_unspell(text) for text in self._processor.decode(rows)] if rows else []

    def starts(self, text: str) -> list[int]:
        """How many letters, white space not counted, stand before each piece of a text."""
        spelled = _spell(text, self.normalization)
        before: list[int] = []  # for each byte of the spelled text
        letters = 0
        for sign in spelled.decode("utf-8"):
            before += [letters] * len(sign.encode("utf-8"))
            letters += not sign.isspace()
        places = accumulate(self._sizes(spelled), initial=0)
        return [before[place] for place in places if place < len(before)]

    def _sizes(self, spelled: bytes) -> list[int]:
        """How many bytes of the spelled text each piece stands for."""
        ids: list[int] = self._processor.encode(spelled, out_type=int)
        pieces: list[str] = self._processor.encode(spelled, out_type=str)
        return [
            1
            if self._processor.is_byte(i)
            else len(piece.replace(SPACE_SYMBOL, " ").encode("utf-8"))
            for i, piece in zip(ids, pieces, strict=True)
        ]

    def letters(self, text: str) -> int:
        """How many there are as ``starts`` counts them."""
        return sum(not sign.isspace() for sign in _spell(text, self.normalization).decode("utf-8"))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each id as something to look at: ``▁`` is a space, ``<0xC3>`` a byte."""
        return [SPECIAL_TOKENS.get(int(i)) or str(self._processor.id_to_piece(int(i))) for i in ids]

    def borders(self) -> tuple[list[bool], list[bool]]:
        """Which pieces open a word, so that the one before has ended, and which close one."""
        pieces = self.pieces(range(self.size))
        plain = [piece if _BYTE.fullmatch(piece) is None else "x" for piece in pieces]
        opens = [not piece[:1] or not joins(piece[0]) for piece in plain]
        closes = [not piece[:1] or not joins(piece[-1]) for piece in plain]
        return opens, closes

    def files(self, stem: str) -> dict[str, bytes]:
        """All that must be kept of it, by file name."""
        return {f"{stem}.model": self.model}


@dataclass(frozen=True)
class Tokenizer:
    source: Vocabulary
    target: Vocabulary
    """the same object as source when they share one vocabulary"""

    @classmethod
    def train(
        cls,
        section: recipe.Tokenizer,
        pairs: Callable[[], Iterable[Pair]],
        labels: bool = False,
        tags: Sequence[str] = (),
    ) -> Tokenizer:
        """Learn the pieces; ``pairs`` is called for each reading, so that none need be kept.

        labels: the targets are labels, blanks between them; each is an entry as it stands. tags: what can stand before
        a source, each an entry that no text is ever cut into.
        """
        if section.kind not in TRAINABLE:
            raise RegardError(
                f"tokenizer.kind {section.kind} comes with an imported model and cannot be learned; "
                f"learned are {', '.join(TRAINABLE)}"
            )
        if labels:
            return cls(_learn(section, pairs, ("source",)), learn_labels(pairs))
        if section.shared:
            both = _learn(section, pairs, ("source", "target"), tags)
            return cls(both, both)
        source = _learn(section, pairs, ("source",), tags)
        return cls(source, _learn(section.of_target, pairs, ("target",)))

    @property
    def shared(self) -> bool:
        return self.source is self.target

    @property
    def plain(self) -> Tokenizer:
        """The one that leaves nothing to chance."""
        return self

    def save(self, folder: Path) -> list[Path]:
        """Write the file(s) and say which. Those of another tokenizer go: what is there belongs to the model."""
        vocabularies = [self.source] if self.shared else [self.source, self.target]
        files: dict[str, bytes] = {}
        for stem, vocabulary in zip(side_names(self.shared), vocabularies, strict=True):
            files |= vocabulary.files(stem)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        for other in folder.glob("tokenizer*"):
            if other.name not in files:
                other.unlink()
        return [folder / name for name in files]

    @classmethod
    def load(cls, folder: Path, section: recipe.Tokenizer, labels: bool = False) -> Tokenizer:
        forms: list[str] = [section.normalize] * 2
        if labels:
            forms[1] = LABELS.normalize
        files = [folder / f"{stem}.model" for stem in side_names(section.shared)]
        found = [_load(path, form) for path, form in zip(files, forms, strict=False)]
        return cls(found[0], found[-1])


Loader = Callable[[Path, recipe.Tokenizer, bool], Tokenizer]
"""Loads the tokenizer of a run folder; the flag tells that the targets are labels."""
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
def _load_marian(folder: Path, section: recipe.Tokenizer, labels: bool) -> Tokenizer:
    """the tokenizer of an imported Marian (OPUS-MT) model"""
    from regard.data.marian_vocabulary import load_marian

    return load_marian(folder, section, labels)


def load_tokenizer(folder: Path, section: recipe.Tokenizer, labels: bool = False) -> Tokenizer:
    """The tokenizer of a run folder. labels: the targets are labels, each an entry of the vocabulary."""
    return TOKENIZERS[section.kind](folder, section, labels)


NORMALIZATIONS: Registry[Callable[[str], str]] = Registry("tokenizer.normalize")


@NORMALIZATIONS.register("nfc")
def nfc(text: str) -> str:
    """Unicode NFC: composed characters, nothing else changes."""
    return unicodedata.normalize("NFC", text)


@NORMALIZATIONS.register("nfkc")
def nfkc(text: str) -> str:
    """Unicode NFKC: also folds ligatures, full-width forms and superscripts."""
    return unicodedata.normalize("NFKC", text)


@NORMALIZATIONS.register("lower")
def lower(text: str) -> str:
    """Lower case, then NFC."""
    return unicodedata.normalize("NFC", text.lower())


@NORMALIZATIONS.register("none")
def unchanged(text: str) -> str:
    """No normalization."""
    return text


LABELS = recipe.Tokenizer(kind="word", vocab_size=100_000, shared=False, normalize="none")


def learn_labels(pairs: Callable[[], Iterable[Pair]]) -> Vocabulary:
    """Every label of the targets is an entry."""
    return _learn(LABELS, pairs, ("target",))


def normalize(text: str, normalization: str) -> str:
    return NORMALIZATIONS[normalization](text)


def side_names(shared: bool) -> list[str]:
    """How the names of a tokenizer's files begin."""
    return ["tokenizer"] if shared else ["tokenizer.source", "tokenizer.target"]


def read_model(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise RegardError(f"{path}: no such file; the tokenizer is missing") from None
    except OSError as error:
        raise RegardError(f"{path}: cannot be read: {error.strerror}") from None


def _load(path: Path, normalization: str) -> Vocabulary:
    model = read_model(path)
    try:
        vocabulary = Vocabulary(model, normalization)
        marks = [vocabulary._processor.id_to_piece(mark) for mark in SPECIAL_TOKENS]
    except (RuntimeError, IndexError):
        raise RegardError(f"{path}: damaged, or not a SentencePiece model") from None
    if marks != list(SPECIAL_TOKENS.values()):
        raise RegardError(
            f"{path}: not made by Regard: its first entries are {marks}, not {list(SPECIAL_TOKENS.values())}"
        )
    return vocabulary


# ---------------------------------------------------------------------------------------------
# Spelling: what SentencePiece sees in place of the text


def _spell(text: str, normalization: str) -> bytes:
    text = normalize(text, normalization)
    text = _SIGN.sub(lambda sign: _SPELLINGS[sign[0]], text)
    # One space in front, so that a word is the same piece at the start of a text as inside it.
    # SentencePiece can do this itself, but then no longer tells "" from " ".
    return b" " + utf8(text) if text else b""


def utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RegardError(
            f"{text[error.start]!a} in {text!a} is half of a surrogate pair, no character"
        ) from None


def _unspell(spelled: str) -> str:
    return _SPELLING.sub(lambda spelling: _MEANINGS[spelling[0]], spelled.removeprefix(" "))


# ---------------------------------------------------------------------------------------------
# Learning


def _learn(
    section: recipe.Tokenizer,
    pairs: Callable[[], Iterable[Pair]],
    sides: Sequence[Side],
    tags: Sequence[str] = (),
) -> Vocabulary:
    """Train one vocabulary of at most ``section.vocab_size`` entries on these sides of the pairs."""
    # Words are cut at blanks anyway; of the others long texts are not learned from to their end.
    most = None if section.kind == "word" else LETTERS_OF_ONE_TEXT
    found = _survey(pairs(), sides, section.normalize, most)
    if found.letters == 0:
        raise RegardError(
            f"no text to learn a vocabulary from: the {' and '.join(sides)} of "
            f"all {found.pairs:,} pairs are empty"
        )
    size = section.vocab_size
    if section.kind == "char" and size < len(SPECIAL_TOKENS) + len(tags) + BYTES:
        raise _too_small(section, sides, len(SPECIAL_TOKENS) + len(tags) + BYTES)
    options = _options(section, found.alphabet)
    options["control_symbols"] = [SPECIAL_TOKENS[MASK], *(f"<{tag}>" for tag in tags)]
    while True:
        sample = (
            _spell(getattr(pair, side)[:most], section.normalize)
            for pair in _evenly(pairs(), LETTERS_TO_LEARN_FROM / found.letters)
            for side in sides
        )
        try:
            model = _run_sentencepiece(sample, vocab_size=size, **options)
        except RuntimeError as error:
            if enough := re.search(r"required_chars. \d+ vs (\d+)", str(error)):
                raise _too_small(section, sides, int(enough[1])) from None
            if not (largest := re.search(r"set it to a value <= (\d+)", str(error))):
                raise
            size = int(largest[1])  # the data give no more pieces than this
        else:
            return Vocabulary(model, section.normalize)


class Survey(NamedTuple):
    pairs: int
    letters: int
    """in all"""
    alphabet: int
    """different ones"""


def _survey(
    pairs: Iterable[Pair],
    sides: Sequence[Side],
    normalization: str,
    most: int | None,
) -> Survey:
    """Count before learning.

    This reads everything once, so whatever is wrong in a file is reported here: SentencePiece
    would turn the error of an iterator into one of its own.
    """
    count, letters, alphabet = 0, 0, set[str]()
    for pair in pairs:
        count += 1
        for side in sides:
            text = normalize(getattr(pair, side), normalization)[:most]
            letters += len(text)
            alphabet.update(text)
    return Survey(count, letters, len(alphabet))


def _evenly(pairs: Iterable[Pair], share: float) -> Iterator[Pair]:
    """A share of the pairs, evenly spread, the first always among them.

    SentencePiece can sample too, but draws differently in every process.
    """
    taken = 0
    for place, pair in enumerate(pairs):
        if taken <= place * share:
            taken += 1
            yield pair


def _options(section: recipe.Tokenizer, alphabet: int) -> dict[str, Any]:
    """What SentencePiece is told of this vocabulary in particular."""
    # If each of many letters had an entry of its own, rare ones would crowd out the pieces.
    # A vocabulary of characters is nothing but letters, and its size says how many.
    crowded = alphabet > max(MANY_LETTERS, section.vocab_size // 4) and section.kind != "char"
    return {
        "model_type": section.kind,
        "byte_fallback": section.kind != "word",
        "character_coverage": COVERAGE_OF_MANY_LETTERS if crowded else 1.0,
        # Not hard: the size is an upper limit. Only unigram can be told so; others are asked again.
        "hard_vocab_limit": section.kind != "unigram",
    }


def _run_sentencepiece(texts: Iterator[bytes], **options: Any) -> bytes:
    """Train on spelled texts and return the model; all that is the same for every vocabulary."""
    model = io.BytesIO()
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
        max_sentence_length=1 << 20,  # bytes; longer ones would be left out
        num_threads=THREADS,
        minloglevel=2,  # errors only
        **options,
    )
    return model.getvalue()


def _too_small(section: recipe.Tokenizer, sides: Sequence[Side], smallest: int) -> RegardError:
    return RegardError(
        f"tokenizer.vocab_size {section.vocab_size} is too small for {section.kind} of {' and '.join(sides)}: "
        f"{len(SPECIAL_TOKENS)} marks, {BYTES} bytes and the letters need at least {smallest}"
    )
