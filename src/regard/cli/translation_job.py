"""What ``regard translate`` does with its lines and sentences: translate, warn, report, and format the output."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from regard.data.sentence_splitter import count_sentences, split_text
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.data.dependency_trees import ParsedSentence
    from regard.data.glossary import Glossary
    from regard.data.protected_spans import ProtectedSpans
    from regard.documents.translation_memory import Match, TranslationMemory
    from regard.inference.hallucinations import OutputChecker, Problem
    from regard.tasks import Translation, Translator

DEFAULT_FUZZY = 0.75
"""smallest score of the matches of a memory that are reported, by default"""
MAX_FLAGGED_LINES = 20
"""suspicious translations that are reported individually; the others are only counted"""

Line = tuple[str, "ParsedSentence | None"]
"""a text and its dependency tree, if the model uses one"""


class JoinedTranslation(NamedTuple):
    """The translation of a line whose sentences were translated separately."""

    text: str
    sentences: list[dict[str, Any]]
    """the translation of each sentence, with its source"""
    confidence: float
    """the lowest of its sentences"""


@dataclass
class TranslationJob:
    """Translates chunks of lines and formats the output."""

    model: Translator
    decoding: dict[str, Any]
    """decoding options"""
    nbest: int
    length: int | None
    prefix: str | None
    glossary: Glossary | None
    as_json: bool
    with_confidence: bool
    with_alignment: bool
    with_parses: bool
    by_sentence: bool
    memory: TranslationMemory | None = None
    fuzzy: float = DEFAULT_FUZZY
    """smallest score of the matches that are reported"""
    previous: Sequence[str] = ()
    """the lines before the next chunk, for models with context"""
    warned: bool = False
    """whether the warning about long lines was printed"""
    lines: int = 0
    """lines translated so far"""
    flagged: Counter[str] = field(default_factory=Counter)
    """hallucination-like translations so far, by the kind of the first problem of each"""

    def check_options(self) -> None:
        """Refuse unsupported options before a file is written: translate a blank text with every glossary term."""
        terms = list(self.glossary.terms.values()) if self.glossary else []
        self._search([""], [None], [terms])

    def translate_sentences(
        self, sentences: Sequence[str], contexts: Sequence[Sequence[str]]
    ) -> list[Translation]:
        """The best translation of each sentence, from the memory or from the model. contexts: what precedes each."""
        terms = [self._terms(sentence) for sentence in sentences]
        results = self._search(sentences, [None] * len(sentences), terms, contexts)
        return [best for best, *_ in results]

    def match(self, text: str) -> Match | None:
        """The most similar text in the memory, if it is similar enough."""
        return self.memory.best(text, self.fuzzy) if self.memory else None

    def resume_key(self, input: Path, parses: Path | None) -> dict[str, Any]:
        """Everything that the output depends on; an interrupted output is resumed only by a job with the same key."""
        from regard.data.text_files import read_error
        from regard.storage.resumable_output import model_resume_key
        from regard.storage.run_dir import sha256

        try:
            content = {"input": sha256(input), "parses": sha256(parses) if parses else None}
        except OSError as error:
            raise read_error(Path(error.filename or input), error) from None
        return {
            **content,
            **model_resume_key(self.model),
            "options": {
                **self.decoding,
                "nbest": self.nbest,
                "length": self.length,
                "prefix": self.prefix,
                "json": self.as_json,
                "confidence": self.with_confidence,
                "alignment": self.with_alignment,
                "sentences": self.by_sentence,
            },
            "glossary": self.glossary and self.glossary.terms,
            "memory": self.memory and self.memory.fingerprint(),
        }

    def translate(self, chunk: Sequence[Line], start: int) -> tuple[str, str]:
        """The output for a chunk and its alignment, as lines of text. start: the number of lines before the chunk."""
        from regard.data.pairs import previous_sentences

        lines, parses = [line for line, _ in chunk], [tree for _, tree in chunk]
        self._refuse_long_lines(lines, start)
        self._warn_of_long_lines(lines, start)

        results: Sequence[Sequence[Translation | JoinedTranslation]] = (
            self._translate_sentences(lines)
            if self.by_sentence
            else self._search(
                lines,
                parses,
                [self._terms(line) for line in lines],
                previous_sentences(lines, self.model.recipe.data.context, self.previous),
            )
        )
        self.previous = lines
        output: list[str] = []
        aligned: list[str] = []
        for number, (line, translations) in enumerate(zip(lines, results, strict=True), start + 1):
            self._warn_of_violations(f"line {number}", line, translations)
            for text in self._units(line):
                self._report_match(f"line {number}", text)
            problems = self._flag(number, line, translations[0])
            output += self._format(number, line, translations, problems)
            if self.with_alignment:
                aligned.append(self._alignment(line, translations[0].text))
        return _join_lines(output), _join_lines(aligned)

    def _search(
        self,
        texts: Sequence[str],
        parses: Sequence[ParsedSentence | None],
        terms: Sequence[Sequence[str]],
        contexts: Sequence[Sequence[str]] | None = None,
    ) -> list[list[Translation]]:
        """Translate texts. contexts: the sentences before each, for models with context."""
        from regard.tasks.translation import EMPTY

        matches = [self.memory.exact(text) if self.memory else None for text in texts]
        if any(matches):
            unmatched = [row for row, match in enumerate(matches) if match is None]
            translations = iter(
                self._search(
                    [texts[row] for row in unmatched],
                    [parses[row] for row in unmatched],
                    [terms[row] for row in unmatched],
                    [contexts[row] for row in unmatched] if contexts else None,
                )
            )
            return [
                [EMPTY._replace(text=match.target)] if match else next(translations)
                for match in matches
            ]
        return self.model.search(
            texts,
            nbest=self.nbest,
            prefixes=None if self.prefix is None else [self.prefix] * len(texts),
            constraints=terms if self.glossary else None,
            length=self.length,
            parses=parses if self.with_parses else None,
            context=contexts if contexts and any(contexts) else None,
            **self.decoding,
        )

    def _translate_sentences(self, lines: Sequence[str]) -> list[list[JoinedTranslation]]:
        """Translate the sentences of each line separately, and join the translations of a line."""
        from regard.data.pairs import previous_sentences

        texts = [split_text(line, self._source_language) for line in lines]
        sentences = [sentence for text in texts for sentence in text.sentences]
        terms = [self._terms(sentence) for sentence in sentences]
        count = self.model.recipe.data.context
        contexts = [
            context for text in texts for context in previous_sentences(text.sentences, count)
        ]
        results = iter(self._search(sentences, [None] * len(sentences), terms, contexts))
        joined = []
        for text in texts:
            best = [next(results)[0] for _ in text.sentences]
            details = [
                {"source": sentence, **translation._asdict(), **self.memory_entry(sentence)}
                for sentence, translation in zip(text.sentences, best, strict=True)
            ]
            joined_text = text.join([translation.text for translation in best])
            confidence = min((translation.confidence for translation in best), default=1.0)
            joined.append([JoinedTranslation(joined_text, details, confidence)])
        return joined

    def _units(self, line: str) -> list[str]:
        """The texts to look up in the memory: the line or its sentences."""
        if not self.by_sentence:
            return [line]
        return split_text(line, self._source_language).sentences

    @cached_property
    def _source_language(self) -> str:
        pairs = self.model.recipe.data.language_pairs
        return next(source for source, to in pairs if self.model.language in (None, to))

    @cached_property
    def _protected(self) -> ProtectedSpans:
        from regard.data.protected_spans import ProtectedSpans

        return ProtectedSpans(self.decoding.get("protect", self.model.recipe.decoding.protect))

    def _terms(self, text: str) -> list[str]:
        """The target terms that the translation of a text must contain."""
        return self.glossary.target_terms(text) if self.glossary else []

    # Warnings and refusals

    def _refuse_long_lines(self, lines: Sequence[str], start: int) -> None:
        """Refuse a line whose translation as one text would take too much time and memory."""
        if self.by_sentence or self.model.recipe.data.clean.truncate:
            return
        limit = self.model.max_text_tokens
        for number, line in enumerate(lines, start + 1):
            if len(line.encode(errors="replace")) <= limit:  # a token has at least about one byte
                continue
            if (tokens := self._count_tokens(line)) > limit:
                advice = "shorten it" if self._needs_whole_lines else "use --sentences to split it"
                raise RegardError(
                    f"line {number} has {tokens:,} tokens, but at most {limit:,} can be translated as one text; "
                    f"{advice}"
                )

    def _count_tokens(self, line: str) -> int:
        (tokens,) = self.model.count_tokens([line])
        return tokens

    @property
    def _needs_whole_lines(self) -> bool:
        """Whether an option is given that cannot be combined with --sentences."""
        has_line_option = self.with_alignment or self.with_parses or self.nbest > 1
        return has_line_option or self.length is not None or bool(self.prefix)

    def _warn_of_long_lines(self, lines: Sequence[str], start: int) -> None:
        """Warn once of a line with several sentences, or with more tokens than the model was trained on."""
        # A model that truncates its sources was trained on long texts; a dependency tree belongs to one sentence.
        truncates = self.model.recipe.data.clean.truncate
        if self.by_sentence or truncates or self.with_parses:
            return
        for number, line in enumerate(lines, start + 1):
            if self.warned:
                return
            if problem := self._too_long(line):
                self.warned = True
                typer.echo(f"line {number} has {problem}", err=True)

    def _too_long(self, line: str) -> str | None:
        """The warning about a line; None if the line is fine."""
        needs_whole_lines = self._needs_whole_lines
        count = count_sentences(line, self._source_language)
        if count > 1:
            advice = "" if needs_whole_lines else "; use --sentences to translate each separately"
            return f"{count} sentences and is translated as one{advice}"
        longest = self.model.recipe.data.clean.max_tokens
        if len(line.encode(errors="replace")) <= longest:  # a token has at least about one byte
            return None
        tokens = self._count_tokens(line)
        if tokens <= longest:
            return None
        advice = "" if needs_whole_lines else "; use --sentences to split it"
        return (
            f"{tokens:,} tokens, but the model was trained on at most {longest:,}: parts of it may be lost"
            f"{advice}"
        )

    def report(self, where: str, text: str, translation: Translation) -> None:
        """Report what is missing in a translation, and a similar text in the memory."""
        self._warn_of_violations(where, text, [translation])
        self._report_match(where, text)

    def _report_match(self, where: str, text: str) -> None:
        """Report a similar text in the memory, unless the JSON output has it."""
        if not self.as_json and (match := self.match(text)) and match.score < 1:
            typer.echo(f"{where}: {describe_match(match)}", err=True)

    def memory_entry(self, text: str) -> dict[str, Any]:
        """What the JSON output says about the match of a text."""
        match = self.match(text)
        return {"memory": match._asdict()} if match else {}

    def _warn_of_violations(
        self, where: str, line: str, translations: Sequence[Translation | JoinedTranslation]
    ) -> None:
        """Report protected spans and glossary terms that are missing in a translation."""
        from regard.data.words import whole_word_pattern

        terms = self._terms(line)
        for translation in translations:
            problems = self._protected.mismatches(line, translation.text)
            problems += [
                f"glossary term {term} is missing"
                for term in terms
                if not whole_word_pattern(term).search(translation.text)
            ]
            for problem in problems:
                typer.echo(f"{where}: {problem}", err=True)

    # Hallucination-like output

    @cached_property
    def _checker(self) -> OutputChecker:
        return self.model.output_checker()

    def _flag(
        self, number: int, line: str, translation: Translation | JoinedTranslation
    ) -> list[str]:
        """Report a translation that looks like a hallucination. Returns its problems."""
        self.lines += 1
        problems = self._problems(line, translation)
        if not problems:
            return []
        self.flagged[problems[0].kind] += 1
        messages = [problem.message for problem in problems]
        if self.flagged.total() <= MAX_FLAGGED_LINES:
            typer.echo(f"line {number}: suspicious translation: {'; '.join(messages)}", err=True)
        return messages

    def _problems(self, line: str, translation: Translation | JoinedTranslation) -> list[Problem]:
        entries = (
            translation.sentences
            if isinstance(translation, JoinedTranslation)
            else [{"source": line, **translation._asdict()}]
        )
        problems = [
            problem
            for entry in entries
            if entry["source"].strip()
            and (entry["tokens"] or not entry["text"])  # not of the memory
            for problem in self._checker.problems(
                entry["source"],
                entry["text"],
                (self._source_length(entry["source"]), len(entry["tokens"])),
                entry["finished"],
                self.model.count_unknown(self._protected.remove(entry["source"])),
            )
        ]
        return list(dict.fromkeys(problems))

    def _source_length(self, text: str) -> int:
        """The number of tokens that the model reads."""
        clean, tokens = self.model.recipe.data.clean, self._count_tokens(text)
        return min(tokens, clean.max_tokens) if clean.truncate else tokens

    def report_flagged_lines(self) -> None:
        """Report the total number of suspicious translations, if there are several."""
        if self.flagged.total() > 1:
            from regard.inference.hallucinations import KINDS_AFTER_COUNTS

            listing = ", ".join(
                f"{count:,} {KINDS_AFTER_COUNTS.get(kind, kind)}"
                for kind, count in self.flagged.most_common()
            )
            typer.echo(
                f"{self.flagged.total():,} of {self.lines:,} translations look suspicious: {listing}",
                err=True,
            )

    def describe_confidence(self) -> str:
        """What the confidence means."""
        calibration = self.model.calibration
        if calibration is not None:
            return f"The confidence is {calibration.summary}."
        return (
            "The confidence is not calibrated: it is the geometric mean of the token probabilities, not the "
            "probability that a translation is good."
        )

    # Output

    def _alignment(self, text: str, translation: str) -> str:
        from regard.inspection.alignment import pharaoh

        return pharaoh(self.model, text, translation)

    def _format(
        self,
        number: int,
        text: str,
        translations: Sequence[Translation | JoinedTranslation],
        problems: list[str],
    ) -> Iterator[str]:
        """The output lines for one input line; problems: of its best translation."""
        if self.as_json:
            records = [translation._asdict() for translation in translations]
            line = {"source": text, "translations": records, "problems": problems}
            if not self.by_sentence:  # otherwise each sentence has its own match
                line |= self.memory_entry(text)
            yield json.dumps(line, ensure_ascii=False)
            return
        for translation in translations:
            columns = [f"{translation.confidence:.4f}"] if self.with_confidence else []
            if self.nbest > 1:
                assert not isinstance(translation, JoinedTranslation), (
                    "--sentences allows no --nbest"
                )
                columns = [str(number), f"{translation.score:.4f}", *columns]
            yield "\t".join([*columns, translation.text])


def describe_match(match: Match) -> str:
    """A match of the memory, in one line."""
    return f"{match.score:.0%} match in the translation memory: {match.source} => {match.target}"


def _join_lines(lines: Sequence[str]) -> str:
    return "".join(line + "\n" for line in lines)


def languages_of(model: Translator) -> tuple[str, str] | None:
    """The language codes of source and target; None if the model does not name its languages."""
    data = model.recipe.data
    pairs = [pair for pair in data.language_pairs if model.language in (None, pair[1])]
    return pairs[0] if data.named else None
