"""Rules that find noise in parallel data: one class for each kind of noise.

A rule marks pairs in a batch. Its docstring says what the noise is, its fields are thresholds with the field's usual
defaults, ``rejects`` says whether ``regard data clean`` drops the pairs or ``regard data check`` only reports them, and
``advice`` says what to do about it. To add a kind of noise, write a class here and register it:

    @QUALITY_RULES.register("shouting")
    @dataclass
    class Shouting(Rule):
        '''the target ends in three exclamation marks'''
        advice = "edit the targets"

        def find(self, batch: PairBatch) -> Mask:
            return np.array([target.endswith("!!!") for target in batch.target.texts])

Training applies four of the rules (``cleaning.py``): empty sides, exact duplicates, length and length ratio, the last
two in tokens. Everything is computed for thousands of pairs at a time, see ``text_features.py``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, ClassVar, TypeVar

import numpy as np

from regard.data.formats.base import NamePair
from regard.data.language_identification import LanguageIdentifier, is_installed
from regard.data.misalignment import (
    MIN_PAIRS,
    Lexicon,
    LikelihoodRatio,
    PairSample,
    Stretch,
    find_stretches,
)
from regard.data.pairs import Pair
from regard.data.protected_spans import ProtectedSpans
from regard.data.sentence_splitter import count_sentences
from regard.data.text_features import (
    CONTROL,
    LETTER,
    LOWER,
    UPPER,
    WIDE,
    WIDTH,
    Hashes,
    Ints,
    KeyCounter,
    Mask,
    PairBatch,
    TextBatch,
    batches,
    character_set,
    character_table,
    combine_keys,
)
from regard.errors import RegardError
from regard.recipe import Registry

Length = TypeVar("Length", int, Ints)

MAX_RATIO = 3.0
"""of the lengths of the two sides; the default of OpusFilter, and measured in docs/your_data.md"""


# ---------------------------------------------------------------------------------------------
# The corpus as a whole


@dataclass
class CorpusFacts:
    """What rules need to know about the corpus as a whole."""

    languages: NamePair | None = None
    sample: Sequence[Pair] = ()
    """pairs from all over the corpus"""
    held_out: Mapping[str, KeyCounter] = field(default_factory=dict)
    """the folded keys of the sources of valid and test"""
    lexicon: Lexicon | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if len(self.sample) >= MIN_PAIRS:
            self.lexicon = Lexicon(self.sample)


def survey(
    pairs: Iterable[Pair],
    languages: NamePair | None = None,
    held_out: Mapping[str, Iterable[Pair]] | None = None,
) -> CorpusFacts:
    """Read a corpus once, to learn what rules need to know about it."""
    sample = PairSample()
    sample.read(pairs)
    keys: dict[str, KeyCounter] = {}
    for name, split in (held_out or {}).items():
        keys[name] = KeyCounter()
        for batch in batches(split):
            keys[name].add(batch.source.folded_keys)
    return CorpusFacts(languages, sample.pairs, keys)


# ---------------------------------------------------------------------------------------------
# Rules


@dataclass
class Rule(ABC):
    """A kind of noise. Subclasses are dataclasses; their fields are thresholds."""

    rejects: ClassVar[bool] = True
    """whether pairs with it are dropped; otherwise they are only reported"""
    advice: ClassVar[str]
    """what to do about it"""

    def prepare(self, facts: CorpusFacts) -> str | None:
        """Called once before the first batch. Returns why the rule cannot be applied, or None."""
        return None

    @abstractmethod
    def find(self, batch: PairBatch) -> Mask:
        """Marks the pairs with this noise."""

    def explain(self, pair: Pair) -> str:
        """What is wrong with a pair, if its texts do not show it."""
        return ""


QUALITY_RULES: Registry[type[Rule]] = Registry("data clean --set")


@QUALITY_RULES.register("empty")
@dataclass
class EmptySide(Rule):
    """one side is empty"""

    advice = "drop them; many in one place suggest that lines are missing there"

    def find(self, batch: PairBatch) -> Mask:
        return np.fromiter(map(is_empty, batch.pairs), np.bool_, len(batch))


def is_empty(pair: Pair) -> bool:
    """Whether one side of a pair is blank."""
    return not pair.source.strip() or not pair.target.strip()


@QUALITY_RULES.register("no_text")
@dataclass
class NoText(Rule):
    """one side has no letters and no digits"""

    advice = "drop them"

    def find(self, batch: PairBatch) -> Mask:
        sides = (batch.source, batch.target)
        has_no_text = np.logical_or(*(side.letters + side.digits == 0 for side in sides))
        return np.asarray(has_no_text & ~batch.rejected)


# UTF-8 that was decoded as Latin-1 or Windows-1252: a character for the first byte and one for each of the others.
_LATER = "[\x80-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]"
_MOJIBAKE = re.compile(rf"[ÂÃÄÅÐÑÎÏ]{_LATER}|â[\x80€]{_LATER}|[ãäåæçèéï]{_LATER}{{2}}|ð\x9f|ðŸ")
_WEAK_MOJIBAKE = re.compile(rf"[ØÙ×Û]{_LATER}")
"""in languages with other alphabets; one alone may be a symbol and a quotation mark"""
_REPLACED = re.compile(r"\ufffd|[^\W\d_]\?[a-zà-öø-ÿ]")
"""characters that an encoding did not have"""
_FIRST = character_set("ÂÃÄÅÐÑÎÏâãäåæçèéïðØÙ×Û")
_SECOND = character_set([*map(chr, range(0x80, 0xC0)), *_LATER[4:-1]])


@QUALITY_RULES.register("encoding")
@dataclass
class EncodingDamage(Rule):
    """encoding damage: mojibake such as MÃ¤nner, or replaced characters such as M�nner and M?nner"""

    advice = "export the text again as UTF-8; otherwise drop them"

    def find(self, batch: PairBatch) -> Mask:
        candidates = np.logical_or(
            *(self.may_be_damaged(texts) for texts in (batch.source, batch.target))
        )
        return batch.where(
            np.flatnonzero(candidates),
            lambda pair: is_damaged(pair.source) or is_damaged(pair.target),
        )

    def may_be_damaged(self, side: TextBatch) -> Mask:
        """Texts with a replaced character, or with two characters that mojibake consists of."""
        codes, letter, lower = side.codes, side.classes & LETTER > 0, side.classes & LOWER > 0
        marks = codes == 0xFFFD
        marks[:-1] |= _FIRST[codes[:-1]] & _SECOND[codes[1:]]
        marks[1:-1] |= (codes[1:-1] == ord("?")) & letter[:-2] & lower[2:]
        return side.count(marks) > 0


def is_damaged(text: str) -> bool:
    """Whether a text was decoded or encoded in a wrong way."""
    if "�" in text:
        return True
    if _MOJIBAKE.search(text) or len(_WEAK_MOJIBAKE.findall(text)) > 1:
        return True
    return bool(_REPLACED.search(text)) and "://" not in text and "www." not in text


@QUALITY_RULES.register("control_characters")
@dataclass
class ControlCharacters(Rule):
    """control characters, characters without a meaning, or tabs and line breaks within a text"""

    advice = "drop them, or remove the characters"

    def find(self, batch: PairBatch) -> Mask:
        sides = (batch.source, batch.target)
        return np.logical_or(*(side.count(side.classes & CONTROL > 0) > 0 for side in sides))


_HTML = re.compile(
    r"""&(?:[A-Za-z][A-Za-z0-9]{1,10}|\#\d{1,7}|\#[xX][0-9a-fA-F]{1,6});
    |</?(?:a|abbr|b|body|br|button|code|div|em|font|form|h[1-6]|head|hr|html|i|img|input|label|li|link|meta|ol|option
    |p|pre|script|select|small|span|strong|style|sub|sup|table|tbody|td|th|thead|title|tr|tt|u|ul)\b[^<>]{0,200}>
    |<!--""",
    re.VERBOSE | re.IGNORECASE,
)


@QUALITY_RULES.register("html")
@dataclass
class Html(Rule):
    """HTML tags or entities, such as <br> and &nbsp;, that are not the same on both sides"""

    advice = "extract the text again with an HTML parser; otherwise drop them"
    keep_matching: bool = True
    """keep pairs with the same tags and entities on both sides, as in files of programs"""

    def find(self, batch: PairBatch) -> Mask:
        return batch.where(batch.matching(_HTML), self.is_noise)

    def is_noise(self, pair: Pair) -> bool:
        source, target = (Counter(_HTML.findall(text)) for text in (pair.source, pair.target))
        return bool(source or target) and not (self.keep_matching and source == target)


@QUALITY_RULES.register("length")
@dataclass
class TooLong(Rule):
    """one side is very long"""

    advice = "split them into sentences, or drop them"
    max_characters: int = 1_000
    """Chinese, Japanese and Korean characters count as three"""

    def find(self, batch: PairBatch) -> Mask:
        widths = batch.source.widths, batch.target.widths
        return np.asarray(exceeds_length(*widths, self.max_characters))


def exceeds_length(source: Length, target: Length, maximum: float) -> Any:
    """Whether one side is longer than ``maximum``, for numbers or for arrays."""
    return (source > maximum) | (target > maximum)


@QUALITY_RULES.register("ratio")
@dataclass
class LengthRatio(Rule):
    """one side is much longer than the other"""

    advice = "drop them: they are translated only in part, or misaligned"
    max_ratio: float = MAX_RATIO
    """of lengths in characters, where Chinese, Japanese and Korean characters count as three"""
    min_characters: int = 20
    """of the longer side; the ratio of shorter texts says nothing"""

    def find(self, batch: PairBatch) -> Mask:
        source, target = batch.source.widths, batch.target.widths
        is_long = np.maximum(source, target) >= self.min_characters
        return np.asarray(is_long & exceeds_ratio(source, target, self.max_ratio))

    def explain(self, pair: Pair) -> str:
        source, target = (int(TextBatch([text]).widths[0]) for text in pair[:2])
        return f"{source} and {target} characters"


def exceeds_ratio(source: Length, target: Length, maximum: float) -> Any:
    """Whether one side is more than ``maximum`` times as long as the other, for numbers or for arrays."""
    return (source > maximum * target) | (target > maximum * source)


@QUALITY_RULES.register("copy")
@dataclass
class Copy(Rule):
    """the target is a copy of the source, or nearly one"""

    advice = "drop them: a model that sees copies learns to copy"
    max_overlap: float = 0.8
    """share of the words of the shorter side that are also on the other side"""
    min_words: int = 4
    """of the shorter side, for a partial copy"""

    def find(self, batch: PairBatch) -> Mask:
        is_copy = batch.source.folded_keys == batch.target.folded_keys
        is_copy &= batch.source.letters > 1
        source, target = batch.source.words, batch.target.words
        pairs = np.arange(len(batch), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        source_words = np.sort(source.hashes ^ np.repeat(pairs, source.counts))
        target_words = target.hashes ^ np.repeat(pairs, target.counts)
        index = np.minimum(np.searchsorted(source_words, target_words), len(source_words) - 1)
        is_common = (
            source_words[index] == target_words
            if len(source_words)
            else np.zeros(len(target_words), np.bool_)
        )
        texts = np.repeat(np.arange(len(batch)), target.counts)
        common = np.bincount(texts, is_common, len(batch))
        shorter = np.minimum(source.counts, target.counts)
        partial = (common > self.max_overlap * shorter) & (shorter >= self.min_words)
        return np.asarray(is_copy | partial)


@QUALITY_RULES.register("script")
@dataclass
class WrongScript(Rule):
    """letters of a script that this side of the corpus is not written in"""

    advice = "drop them"
    max_share: float = 0.5
    """of the letters of a text, where Chinese, Japanese and Korean ones count as three"""
    min_share: float = 0.1
    """share of the letters of the corpus from which on a script belongs to it"""
    allowed: list[Mask] = field(default_factory=list, init=False, repr=False)

    def prepare(self, facts: CorpusFacts) -> str | None:
        if not facts.sample:
            return "there are no pairs"
        for texts in zip(*facts.sample, strict=True):
            batch = TextBatch(texts)
            scripts = character_table().scripts[batch.codes]
            counts = np.bincount(scripts, minlength=256)
            counts[0] = 0
            allowed = counts >= self.min_share * max(1, counts.sum())
            allowed[0] = True
            self.allowed.append(allowed)
        return None

    def find(self, batch: PairBatch) -> Mask:
        marks = np.zeros(len(batch), np.bool_)
        for side, allowed in zip((batch.source, batch.target), self.allowed, strict=True):
            is_foreign = ~allowed[character_table().scripts[side.codes]]
            is_wide = side.classes & WIDE > 0
            foreign = side.count(is_foreign) + (WIDTH - 1) * side.count(is_foreign & is_wide)
            letters = side.letters + (WIDTH - 1) * side.count(is_wide)
            marks |= foreign > self.max_share * np.maximum(letters, 1)
        return marks


class LexiconRule(Rule):
    """A rule that needs the words of both languages."""

    lexicon: Lexicon | None = None

    def prepare(self, facts: CorpusFacts) -> str | None:
        self.lexicon = facts.lexicon
        if self.lexicon is None:
            return f"it needs at least {MIN_PAIRS} pairs to learn word translations"
        return None

    def find(self, batch: PairBatch) -> Mask:
        assert self.lexicon is not None
        return self.judge(batch, self.lexicon)

    @abstractmethod
    def judge(self, batch: PairBatch, lexicon: Lexicon) -> Mask:
        """Marks the pairs with this noise."""


@QUALITY_RULES.register("swapped")
@dataclass
class SwappedSides(LexiconRule):
    """source and target are swapped: the words of each are those of the other side"""

    advice = "swap them back if they come from one file; otherwise drop them"
    min_log_odds: float = 1.0
    """by which each side looks more like the other, in nats"""

    def judge(self, batch: PairBatch, lexicon: Lexicon) -> Mask:
        source = lexicon.target_log_odds(batch.source.words)
        target = lexicon.target_log_odds(batch.target.words)
        return np.asarray((source > self.min_log_odds) & (target < -self.min_log_odds))


@QUALITY_RULES.register("untranslated")
@dataclass
class SameLanguage(LexiconRule):
    """both sides are in the same language"""

    advice = "drop them"
    min_log_odds: float = 6.0
    """by which a side looks like the wrong language, in nats"""

    def judge(self, batch: PairBatch, lexicon: Lexicon) -> Mask:
        source = lexicon.target_log_odds(batch.source.words)
        target = lexicon.target_log_odds(batch.target.words)
        return np.asarray((source > self.min_log_odds) | (target < -self.min_log_odds))


@QUALITY_RULES.register("language")
@dataclass
class WrongLanguage(Rule):
    """a text, or half of it, is in another language (needs py3langid)"""

    advice = "drop them"
    min_probability: float = 0.5
    """of another language"""
    min_characters: int = 15
    """of a text; shorter texts are not judged, and texts of at least four times this length are judged by halves"""
    identifiers: list[LanguageIdentifier | None] = field(
        default_factory=list, init=False, repr=False
    )

    def prepare(self, facts: CorpusFacts) -> str | None:
        if facts.languages is None:
            return "the languages are unknown; name them with --languages, for example en,de"
        if not is_installed():
            return "it needs py3langid: pip install 'regard[language-id]'"
        self.identifiers = [LanguageIdentifier.create(code) for code in facts.languages]
        if not any(self.identifiers):
            return f"py3langid supports neither {facts.languages[0]} nor {facts.languages[1]}"
        return None

    def find(self, batch: PairBatch) -> Mask:
        marks = np.zeros(len(batch), np.bool_)
        for side, identifier in zip((batch.source, batch.target), self.identifiers, strict=True):
            if identifier is None:
                continue
            # It is slow, so pairs that are rejected anyway are not judged.
            judged = (
                ~batch.rejected & ~marks & (side.letters > 0) & (side.widths >= self.min_characters)
            )
            for number in np.flatnonzero(judged).tolist():
                halves = self.halves(side.texts[number], int(side.widths[number]))
                marks[number] = any(
                    identifier.is_other(half, self.min_probability) for half in halves
                )
        return marks

    def halves(self, text: str, width: int) -> Iterator[str]:
        """A text, or its two halves, divided between words, if they are long enough to be judged."""
        if width < 4 * self.min_characters:
            return iter([text])
        middle = text.find(" ", len(text) // 2)
        middle = len(text) // 2 if middle < 0 else middle
        return iter([text[:middle], text[middle:]])


SWAP_SAMPLE, SWAP_READ = 200, 20_000
"""texts of this many pairs are identified, the first long ones of those that are read"""


def are_sides_swapped(pairs: Iterable[Pair], languages: NamePair) -> bool:
    """Whether the beginning of a corpus is in these languages only if source and target are swapped.

    False if the languages cannot be identified.
    """
    rule = WrongLanguage()
    if rule.prepare(CorpusFacts(languages)) is not None:
        return False

    def is_long(text: str) -> bool:
        return int(TextBatch([text]).widths[0]) >= rule.min_characters

    long = (pair for pair in islice(pairs, SWAP_READ) if all(map(is_long, pair[:2])))
    sample = list(islice(long, SWAP_SAMPLE))
    if not sample:
        return False
    as_given = rule.find(PairBatch(sample)).mean()
    swapped = rule.find(PairBatch([Pair(pair.target, pair.source) for pair in sample])).mean()
    return bool(as_given > 0.5 > swapped)


_NUMBER = re.compile(r"\d+(?:[.,:\u00a0\u202f' ]\d{3}(?!\d))*")


@QUALITY_RULES.register("numbers")
@dataclass
class NumberMismatch(Rule):
    """numbers in digits differ between source and target"""

    advice = "drop them: they are misaligned, or translated wrongly"
    min_similarity: float = 0.5
    """2 * common / all digit sequences, as in OpusFilter's filter of numerals"""

    def find(self, batch: PairBatch) -> Mask:
        candidates = np.flatnonzero((batch.source.digits > 0) & (batch.target.digits > 0))
        return batch.where(candidates, self.is_noise)

    def is_noise(self, pair: Pair) -> bool:
        source, target = digit_sequences(pair.source), digit_sequences(pair.target)
        common = sum((source & target).values())
        return 2 * common < self.min_similarity * (source.total() + target.total())

    def explain(self, pair: Pair) -> str:
        sides = (digit_sequences(text) for text in pair[:2])
        return " and ".join(" ".join(side.elements()) for side in sides)


def digit_sequences(text: str) -> Counter[str]:
    """The numbers of a text, without separators of thousands and leading zeros."""
    stripped = (re.sub(r"\D", "", number).lstrip("0") for number in _NUMBER.findall(text))
    return Counter(str(int(number)) for number in stripped if number)


_PLACEHOLDERS = ProtectedSpans(("placeholders",))
_MAY_BE_PLACEHOLDER = re.compile(r"[{%<@]|://|www\.")


@QUALITY_RULES.register("placeholders")
@dataclass
class PlaceholderMismatch(Rule):
    """URLs, e-mail addresses, tags or placeholders such as {name} and %s differ between source and target"""

    advice = "drop them: a model that sees them loses placeholders"

    def find(self, batch: PairBatch) -> Mask:
        return batch.where(
            batch.matching(_MAY_BE_PLACEHOLDER),
            lambda pair: _PLACEHOLDERS.find(pair.source) != _PLACEHOLDERS.find(pair.target),
        )

    def explain(self, pair: Pair) -> str:
        return "; ".join(_PLACEHOLDERS.mismatches(pair.source, pair.target)[:2])


@QUALITY_RULES.register("misaligned")
@dataclass
class Misaligned(LexiconRule):
    """a block of pairs is misaligned: each source belongs to the target some lines later or earlier"""

    advice = "add or delete the line where the block begins; otherwise drop them"
    max_shift: int = 3
    """lines"""
    min_pairs: int = 8
    """length of a stretch"""
    switch_cost: float = 0.8
    """by how much the scores of a stretch must be better in sum, at each of its ends"""
    stretches: list[Stretch] = field(default_factory=list, init=False, repr=False)

    def judge(self, batch: PairBatch, lexicon: Lexicon) -> Mask:
        marks = np.zeros(len(batch), np.bool_)
        alignment = batch.alignment(lexicon)
        for first, last, shift in find_stretches(
            lexicon, alignment, self.max_shift, self.min_pairs, self.switch_cost
        ):
            marks[first - 1 : last] = True
            self.stretches.append(Stretch(batch.start + first, batch.start + last, shift))
        return marks


@QUALITY_RULES.register("unrelated")
@dataclass
class Unrelated(LexiconRule):
    """by their words, lengths and punctuation, the two sides do not seem to be translations of each other"""

    advice = "look at some of them: they are probably misaligned or very free translations; if so, drop them"
    max_log_odds: float = -5.0
    """of being a translation, in nats"""
    min_precision: float = 0.7
    """share of truly unrelated pairs among those it finds, as estimated from shuffled pairs"""
    likelihood_ratio: LikelihoodRatio | None = field(default=None, init=False, repr=False)

    def prepare(self, facts: CorpusFacts) -> str | None:
        if facts.lexicon is not None:
            self.likelihood_ratio = LikelihoodRatio(facts.lexicon, facts.sample)
            self.likelihood_ratio.set_threshold(self.min_precision, self.max_log_odds)
        return super().prepare(facts)

    def judge(self, batch: PairBatch, lexicon: Lexicon) -> Mask:
        assert self.likelihood_ratio is not None
        return self.likelihood_ratio.log_odds(batch) < self.likelihood_ratio.threshold


@QUALITY_RULES.register("overlap")
@dataclass
class HeldOutOverlap(Rule):
    """the source is also in the validation or test data, up to case and punctuation"""

    advice = "drop them from the training data, or the scores will be too high"
    held_out: Mapping[str, KeyCounter] = field(default_factory=dict, init=False, repr=False)

    def prepare(self, facts: CorpusFacts) -> str | None:
        self.held_out = facts.held_out
        return None if facts.held_out else "neither --valid nor --test was given"

    def find(self, batch: PairBatch) -> Mask:
        keys = batch.source.folded_keys
        overlaps = [counter.contains(keys) for counter in self.held_out.values()]
        has_text = batch.source.letters + batch.source.digits > 0
        return np.asarray(np.logical_or.reduce(overlaps) & has_text)


class CountingRule(Rule):
    """A rule about how often something occurred before among pairs that no rule rejects."""

    def prepare(self, facts: CorpusFacts) -> str | None:
        self.counter = KeyCounter()
        return None

    def occurrences(self, batch: PairBatch, keys: Hashes) -> Ints:
        """How often each key occurred before; 0 for pairs that are rejected."""
        counts = np.zeros(len(batch), np.int64)
        accepted = np.flatnonzero(~batch.rejected)
        counts[accepted] = self.counter.add(keys[accepted])
        return counts


@QUALITY_RULES.register("duplicate")
@dataclass
class Duplicate(CountingRule):
    """the same pair occurred before"""

    advice = "drop them, unless their frequency matters"

    def find(self, batch: PairBatch) -> Mask:
        return self.occurrences(batch, batch.pair_keys) > 0


@QUALITY_RULES.register("near_duplicate")
@dataclass
class NearDuplicate(CountingRule):
    """nearly the same pair occurred before: it differs in case, punctuation or spaces"""

    advice = "drop them"

    def find(self, batch: PairBatch) -> Mask:
        keys = combine_keys(batch.source.folded_keys, batch.target.folded_keys)
        return self.occurrences(batch, keys) > 0


@QUALITY_RULES.register("repeated_source")
@dataclass
class RepeatedSource(CountingRule):
    """the same source occurred before, with another target"""

    rejects = False
    advice = "no action is needed if all translations are correct"

    def find(self, batch: PairBatch) -> Mask:
        return self.occurrences(batch, batch.source.folded_keys) > 0


@QUALITY_RULES.register("repeated_target")
@dataclass
class RepeatedTarget(CountingRule):
    """the same target occurred before, with another source"""

    rejects = False
    advice = "no action is needed if all translations are correct"

    def find(self, batch: PairBatch) -> Mask:
        return self.occurrences(batch, batch.target.folded_keys) > 0


@QUALITY_RULES.register("many_targets")
@dataclass
class ManyTargets(CountingRule):
    """a source with many different targets"""

    rejects = False
    advice = "check them: they are often placeholders such as 'Untitled', or misaligned lines"
    max_targets: int = 20

    def find(self, batch: PairBatch) -> Mask:
        return self.occurrences(batch, batch.source.folded_keys) >= self.max_targets


@QUALITY_RULES.register("all_caps")
@dataclass
class AllCaps(Rule):
    """a side is written in capital letters"""

    rejects = False
    advice = "no action is needed if they are few; otherwise the model does not learn lower case"
    min_share: float = 0.8
    """of the letters that have a case"""
    min_letters: int = 10

    def find(self, batch: PairBatch) -> Mask:
        marks = np.zeros(len(batch), np.bool_)
        for side in (batch.source, batch.target):
            upper = side.count(side.classes & UPPER > 0)
            cased = side.count(side.classes & (UPPER | LOWER) > 0)
            marks |= (upper >= self.min_share * cased) & (cased >= self.min_letters)
        return marks


_MAY_END_SENTENCE = re.compile(r"[.!?…؟।]['\"”’»)]*\s+\S|[。！？｡]")


@QUALITY_RULES.register("several_sentences")
@dataclass
class SeveralSentences(Rule):
    """several sentences on a line"""

    rejects = False
    advice = "no action is needed if your texts are like this; otherwise translate with --sentences"
    languages: NamePair = field(default=("", ""), init=False, repr=False)

    def prepare(self, facts: CorpusFacts) -> str | None:
        self.languages = facts.languages or ("", "")
        return None

    def find(self, batch: PairBatch) -> Mask:
        source, target = self.languages
        return batch.where(
            batch.matching(_MAY_END_SENTENCE),
            lambda pair: (
                max(count_sentences(pair.source, source), count_sentences(pair.target, target)) > 1
            ),
        )


# ---------------------------------------------------------------------------------------------
# All rules together


def make_rules(settings: Sequence[str] = (), skip: Sequence[str] = ()) -> dict[str, Rule]:
    """The rules with their thresholds, by name. ``settings`` are such as ``ratio.max_ratio=4``."""
    for name in skip:
        _check_rule(name, f"--skip {name}")
    rules = {name: rule_class() for name, rule_class in QUALITY_RULES.items() if name not in skip}
    for setting in settings:
        key, equals, value = setting.partition("=")
        name, _, threshold = key.partition(".")
        _check_rule(name, f"--set {setting}")
        thresholds = threshold_names(QUALITY_RULES[name])
        if not equals or threshold not in thresholds:
            allowed = (
                ", ".join(f"{name}.{field_name}" for field_name in thresholds)
                or f"none; --skip {name}"
            )
            raise RegardError(
                f"--set {setting}: expected KEY=VALUE, with one of the keys: {allowed}"
            )
        if name in rules:
            setattr(rules[name], threshold, _parse(setting, value, getattr(rules[name], threshold)))
    return rules


def threshold_names(rule_class: type[Rule]) -> list[str]:
    """The names of a rule's thresholds."""
    return [threshold.name for threshold in fields(rule_class) if threshold.init]


def _check_rule(name: str, option: str) -> None:
    if name not in QUALITY_RULES:
        raise RegardError(f"{option}: unknown rule {name}; rules: {', '.join(QUALITY_RULES)}")


def _parse(setting: str, text: str, default: object) -> object:
    """A value of the type of the default."""
    parsers: dict[type, Callable[[str], object]] = {bool: _parse_bool, int: int, float: float}
    try:
        return parsers[type(default)](text)
    except ValueError:
        name = {bool: "true or false", int: "a whole number", float: "a number"}[type(default)]
        raise RegardError(f"--set {setting}: must be {name}") from None


def _parse_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


class RuleSet:
    """All rules that can be applied to a corpus."""

    def __init__(self, rules: Mapping[str, Rule], facts: CorpusFacts) -> None:
        self.rules: dict[str, Rule] = {}
        self.skipped: dict[str, str] = {}
        """rules that cannot be applied, and why"""
        for name, rule in rules.items():
            if reason := rule.prepare(facts):
                self.skipped[name] = reason
            else:
                self.rules[name] = rule

    def apply(self, batch: PairBatch, reports: bool = True) -> Iterator[tuple[str, Mask]]:
        """The name of each rule and the pairs that it finds, while ``batch.rejected`` marks those of earlier rules.

        Rules that only report are left out unless ``reports`` is set.
        """
        for name, rule in self.rules.items():
            if rule.rejects or reports:
                marks = rule.find(batch)
                yield name, marks
                if rule.rejects:
                    batch.rejected |= marks
