"""The command translate: texts, standard input, or a file of any size; an interrupted translation can be resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, tee
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from regard.cli.options import (
    DECODING,
    FLAG,
    INPUT_OUTPUT,
    NON_AUTOREGRESSIVE,
    AsJson,
    Input,
    Output,
    Overwrite,
    Parses,
    PrecisionName,
    RunFolder,
    TargetLanguage,
    Texts,
    Threads,
    parse_precision,
    with_decoding_options,
)
from regard.cli.text_io import check_input, chunks, input_lines
from regard.data.segmentation import count_sentences, split_text
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.data.dependency_trees import ParsedSentence
    from regard.data.glossary import Glossary
    from regard.data.protected_spans import ProtectedSpans
    from regard.tasks import Translation, Translator

Line = tuple[str, "ParsedSentence | None"]
"""a text and its dependency tree, if the model uses one"""


@with_decoding_options
def translate(
    run: RunFolder,
    texts: Texts = None,
    input: Input = None,
    output: Output = None,
    to: TargetLanguage = None,
    sentences: Annotated[
        bool,
        typer.Option(
            "--sentences",
            metavar=FLAG,
            help="Split each line into sentences, translate them separately, and join the translations.",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = False,
    nbest: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Print the N best translations of each line, or N samples; each output line is line number, "
            "tab, score, tab, translation.",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = 1,
    alignment: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the word alignment of each line to this file, in Pharaoh format (0-0 1-2).",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = None,
    parses: Parses = None,
    as_json: AsJson = False,
    overwrite: Overwrite = False,
    glossary: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Glossary with lines of source term, tab, target term; where a source term occurs, its "
            "target term is used.",
            rich_help_panel=DECODING,
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help='Text that every translation must begin with, for example "Dear" (default: none).',
            rich_help_panel=DECODING,
        ),
    ] = None,
    *,
    decoding: dict[str, Any],
    length: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of tokens in each translation (default: predicted by the model).",
            rich_help_panel=NON_AUTOREGRESSIVE,
        ),
    ] = None,
    precision: PrecisionName = "auto",
    threads: Threads = None,
) -> None:
    """Translate texts, a file, or standard input: one line in, one line out, in the same order.

    To resume an interrupted translation with --input and --output, run the same command again.
    """
    from regard.data.glossary import Glossary
    from regard.storage.atomic_files import check_distinct_files
    from regard.storage.resumable_output import ResumableOutput
    from regard.tasks import Translator

    check_input(texts, input)
    if sentences:
        _check_sentence_options(
            nbest=nbest > 1,
            alignment=alignment,
            parses=parses,
            length=length is not None,
            prefix=prefix,
        )
    if alignment and nbest > 1:
        raise RegardError(f"--nbest {nbest}: cannot be combined with --alignment")
    inputs = {"--input": input, "--parses": parses, "--glossary": glossary}
    check_distinct_files({**inputs, "--output": output, "--alignment": alignment})
    terms = Glossary.read(glossary) if glossary else None
    model = Translator.load(run, precision=parse_precision(precision), threads=threads)
    if not texts:  # texts of a command line are too few for worker processes
        model.start_workers()
    job = Job(
        model=model.with_target_language(to),
        decoding=decoding,
        nbest=nbest,
        length=length,
        prefix=prefix or None,
        glossary=terms,
        as_json=as_json,
        with_alignment=alignment is not None,
        with_parses=parses is not None,
        by_sentence=sentences,
    )
    job.check_options()
    files = [path for path in (output, alignment) if path]
    # What is read from a device or pipe is gone, and a device may have no end.
    key = job.resume_key(input, parses) if input and output and input.is_file() else None
    with ResumableOutput(files, key, overwrite) if files else nullcontext() as resumable:
        done = resumable.done if resumable else 0
        if resumable and done:
            typer.echo(f"{output}: resuming after line {done:,}", err=True)
        if resumable and resumable.complete:
            return
        typer.echo(f"Computing in {model.engine.summary}.", err=True)
        lines = _with_parses(input_lines(texts, input), parses, str(input or "the texts"))
        rest = islice(lines, done, None)
        for chunk in chunks(rest, streamed=not texts and not input):
            translated, aligned = job.translate(chunk, done)
            done += len(chunk)
            if output is None:
                print(translated, end="", flush=True)
            if resumable:
                written = ([translated] if output else []) + ([aligned] if alignment else [])
                resumable.add(len(chunk), written)


def _check_sentence_options(**options: object) -> None:
    """Refuse options that are about a line as a whole."""
    given = [f"--{name}" for name, value in options.items() if value]
    if given:
        raise RegardError(
            f"--sentences: cannot be combined with {', '.join(given)}, which apply to whole lines"
        )


def _with_parses(lines: Iterator[str], parses: Path | None, where: str) -> Iterator[Line]:
    """Each line with its dependency tree. ``where`` names the lines in error messages."""
    from regard.data.formats import read_parses

    if parses is None:
        return ((line, None) for line in lines)
    texts, copies = tee(lines)
    trees = read_parses(copies, parses, where)
    # The trees come first in zip: their reader must run to its end to report superfluous trees.
    return ((line, tree) for tree, line in zip(trees, texts, strict=True))


class JoinedTranslation(NamedTuple):
    """The translation of a line whose sentences were translated separately."""

    text: str
    sentences: list[dict[str, Any]]
    """the translation of each sentence, with its source"""


@dataclass
class Job:
    """Translates chunks of lines and formats the output."""

    model: Translator
    decoding: dict[str, Any]
    """decoding options"""
    nbest: int
    length: int | None
    prefix: str | None
    glossary: Glossary | None
    as_json: bool
    with_alignment: bool
    with_parses: bool
    by_sentence: bool
    warned: bool = False
    """whether the warning about long lines was printed"""

    def check_options(self) -> None:
        """Refuse unsupported options before a file is written: translate a blank text with every glossary term."""
        terms = list(self.glossary.terms.values()) if self.glossary else []
        self._search([""], [None], [terms])

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
                "alignment": self.with_alignment,
                "sentences": self.by_sentence,
            },
            "glossary": self.glossary and self.glossary.terms,
        }

    def translate(self, chunk: Sequence[Line], done: int) -> tuple[str, str]:
        """The output for a chunk and its alignment, as lines of text. done: the number of lines before the chunk."""
        lines, parses = [line for line, _ in chunk], [tree for _, tree in chunk]
        self._refuse_long_lines(lines, done)
        self._warn_of_long_lines(lines, done)
        results: Sequence[Sequence[Translation | JoinedTranslation]] = (
            self._translate_sentences(lines)
            if self.by_sentence
            else self._search(lines, parses, [self._terms(line) for line in lines])
        )
        output: list[str] = []
        aligned: list[str] = []
        for number, (line, translations) in enumerate(zip(lines, results, strict=True), done + 1):
            self._warn_of_violations(number, line, translations)
            output += self._format(number, line, translations)
            if self.with_alignment:
                aligned.append(self._alignment(line, translations[0].text))
        return _join_lines(output), _join_lines(aligned)

    def _search(
        self,
        texts: Sequence[str],
        parses: Sequence[ParsedSentence | None],
        terms: Sequence[Sequence[str]],
    ) -> list[list[Translation]]:
        return self.model.search(
            texts,
            nbest=self.nbest,
            prefixes=None if self.prefix is None else [self.prefix] * len(texts),
            constraints=terms if self.glossary else None,
            length=self.length,
            parses=parses if self.with_parses else None,
            **self.decoding,
        )

    def _translate_sentences(self, lines: Sequence[str]) -> list[list[JoinedTranslation]]:
        """Translate the sentences of each line separately, and join the translations of a line."""
        texts = [split_text(line, self._source_language) for line in lines]
        sentences = [sentence for text in texts for sentence in text.sentences]
        terms = [self._terms(sentence) for sentence in sentences]
        found = iter(self._search(sentences, [None] * len(sentences), terms))
        joined = []
        for text in texts:
            best = [next(found)[0] for _ in text.sentences]
            details = [
                {"source": sentence, **translation._asdict()}
                for sentence, translation in zip(text.sentences, best, strict=True)
            ]
            whole = text.join([translation.text for translation in best])
            joined.append([JoinedTranslation(whole, details)])
        return joined

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

    def _refuse_long_lines(self, lines: Sequence[str], done: int) -> None:
        """Refuse a line whose translation as one text would take too much time and memory."""
        if self.by_sentence or self.model.recipe.data.clean.truncate:
            return
        limit = self.model.max_text_tokens
        for number, line in enumerate(lines, done + 1):
            if len(line.encode(errors="replace")) <= limit:  # a token has at least about one byte
                continue
            if (tokens := self._count_tokens(line)) > limit:
                advice = "shorten it" if self._needs_whole_lines else "--sentences splits it"
                raise RegardError(
                    f"line {number} has {tokens:,} tokens, and at most {limit:,} are translated as one text; {advice}"
                )

    def _count_tokens(self, line: str) -> int:
        return len(self.model.tokenizer.source.encode([line])[0])

    @property
    def _needs_whole_lines(self) -> bool:
        """Whether an option is given that cannot be combined with --sentences."""
        whole = self.with_alignment or self.with_parses or self.nbest > 1
        return whole or self.length is not None or bool(self.prefix)

    def _warn_of_long_lines(self, lines: Sequence[str], done: int) -> None:
        """Warn once of a line with several sentences, or with more tokens than the model was trained on."""
        # A model that truncates its sources was trained on long texts; a dependency tree belongs to one sentence.
        truncates = self.model.recipe.data.clean.truncate
        if self.by_sentence or truncates or self.with_parses:
            return
        for number, line in enumerate(lines, done + 1):
            if self.warned:
                return
            if problem := self._too_long(line):
                self.warned = True
                typer.echo(f"line {number} has {problem}", err=True)

    def _too_long(self, line: str) -> str | None:
        """What a warning says about a line; None if the line is fine."""
        whole = self._needs_whole_lines
        count = count_sentences(line, self._source_language)
        if count > 1:
            advice = "" if whole else "; --sentences translates each separately"
            return f"{count} sentences and is translated as one{advice}"
        longest = self.model.recipe.data.clean.max_tokens
        if len(line.encode(errors="replace")) <= longest:  # a token has at least about one byte
            return None
        tokens = self._count_tokens(line)
        if tokens <= longest:
            return None
        advice = "" if whole else "; --sentences splits it"
        return (
            f"{tokens:,} tokens, and the model was trained on at most {longest:,}: parts of it may be lost"
            f"{advice}"
        )

    def _warn_of_violations(
        self, number: int, line: str, translations: Sequence[Translation | JoinedTranslation]
    ) -> None:
        """Report protected spans and glossary terms that are missing in a translation."""
        from regard.data.segmentation import whole_word_pattern

        terms = self._terms(line)
        for one in translations:
            problems = self._protected.mismatches(line, one.text)
            problems += [
                f"{term} is missing"
                for term in terms
                if not whole_word_pattern(term).search(one.text)
            ]
            for problem in problems:
                typer.echo(f"line {number}: {problem}", err=True)

    # Output

    def _alignment(self, text: str, translation: str) -> str:
        from regard.inspection.alignment import pharaoh

        return pharaoh(self.model, text, translation)

    def _format(
        self, number: int, text: str, translations: Sequence[Translation | JoinedTranslation]
    ) -> Iterator[str]:
        """The output lines for one input line."""
        if self.as_json:
            found = [one._asdict() for one in translations]
            yield json.dumps({"source": text, "translations": found}, ensure_ascii=False)
        elif self.nbest == 1:
            yield translations[0].text
        else:
            for one in translations:
                assert not isinstance(one, JoinedTranslation), "--sentences allows no --nbest"
                yield f"{number}\t{one.score:.4f}\t{one.text}"


def _join_lines(lines: Sequence[str]) -> str:
    return "".join(line + "\n" for line in lines)
