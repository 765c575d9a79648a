"""The command translate, for texts, standard input, files of any size and documents; it can be resumed."""

from __future__ import annotations

import json
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, tee
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from regard.cli.options import (
    DECODING,
    INPUT_OUTPUT,
    NON_AUTOREGRESSIVE,
    AsJson,
    Input,
    OutputOrFolder,
    Overwrite,
    Parses,
    PrecisionName,
    RunFolders,
    ShardOption,
    TargetLanguage,
    TextsOrDocuments,
    Threads,
    parse_precision,
    run_folders,
    with_decoding_options,
)
from regard.cli.text_io import (
    CHUNK_LINES,
    check_input,
    chunks,
    count_lines,
    input_lines,
    is_parquet,
    total_lines,
)
from regard.data.sentence_splitter import count_sentences, split_text
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.data.dependency_trees import ParsedSentence
    from regard.data.glossary import Glossary
    from regard.data.protected_spans import ProtectedSpans
    from regard.documents.translation_memory import Match, TranslationMemory
    from regard.inference.hallucinations import OutputChecker, Problem
    from regard.storage.resumable_output import ResumableOutput
    from regard.tasks import Translation, Translator

MAX_FLAGGED_LINES = 20
"""suspicious translations that are reported individually; the others are only counted"""

Line = tuple[str, "ParsedSentence | None"]
"""a text and its dependency tree, if the model uses one"""


@with_decoding_options
def translate(
    run: RunFolders,
    texts: TextsOrDocuments = None,
    input: Input = None,
    output: OutputOrFolder = None,
    to: TargetLanguage = None,
    sentences: Annotated[
        bool,
        typer.Option(
            "--sentences",
            help="Split each line into sentences, translate them separately, and join the translations.",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = False,
    nbest: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Print the N best translations of each line, or N samples, as tab-separated fields: line number, "
            "score, translation (with --confidence: line number, score, confidence, translation).",
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
    confidence: Annotated[
        bool,
        typer.Option(
            "--confidence",
            help="Print the confidence of each translation (0 to 1) before it, separated by a tab.",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = False,
    parses: Parses = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Columns to translate in a CSV or TSV document, by name or number, for example title,text; or "
            "the column to translate in a Parquet file given as --input.",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = None,
    as_json: AsJson = False,
    shard: ShardOption = None,
    overwrite: Overwrite = False,
    memory: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Translation memory, for example tm.tmx: exact matches are used as translations, and fuzzy "
            "matches are reported.",
            rich_help_panel=DECODING,
        ),
    ] = None,
    fuzzy: Annotated[
        float | None,
        typer.Option(
            metavar="SCORE",
            min=0.0,
            max=1.0,
            help="Minimum score of the fuzzy matches to report; 1 reports none (default: 0.75).",
            rich_help_panel=DECODING,
        ),
    ] = None,
    glossary: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Glossary file with one entry per line: source term, tab, target term. Where a source term occurs, "
            "its target term is used.",
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
    """Translate texts, documents, or the lines of a file or of standard input.

    Lines are translated in order: one line in, one line out.

    Documents (DOCX, PPTX, ODT, Markdown, HTML, SRT, VTT, PO, XLIFF, TMX, JSON, YAML, properties, CSV, text) keep
    their structure and formatting. A Parquet file is translated row by row, and the output is a Parquet file.

    With --shard I/N, several machines each translate a part of --input and write OUTPUT-0000I-of-0000N. Concatenated
    in order, these files equal the output of a single process.

    To resume an interrupted translation with --output, run the same command again.
    """
    from regard.cli.documents import (
        Destination,
        find_documents,
        refuse_document_as_lines,
        translate_documents,
    )
    from regard.storage.atomic_files import check_distinct_files
    from regard.storage.resumable_output import WHOLE, Shard
    from regard.tasks import Translator
    from regard.training.progress import ProgressLine

    check_input(texts, input)
    documents = find_documents(texts or [])
    whole_lines = {
        "nbest": nbest > 1,
        "alignment": alignment,
        "parses": parses,
        "length": length is not None,
        "prefix": prefix,
    }
    destination = None
    if documents:
        refused = {**whole_lines, "sentences": sentences, "confidence": confidence}
        refuse_options("documents", refused)
        destination = Destination.of(documents, output, as_json)
    elif columns and not is_parquet(input):
        raise RegardError(f"--columns {columns}: only for CSV and TSV documents, and for Parquet")
    elif input and not is_parquet(input):
        refuse_document_as_lines(run, input)
    if memory is None and fuzzy is not None:
        raise RegardError(f"--fuzzy {fuzzy:g}: has no effect without --memory")
    if memory is not None:
        refuse_options(
            "--memory", {name: whole_lines[name] for name in whole_lines if name != "alignment"}
        )
    if sentences:
        refuse_options("--sentences", whole_lines)
    if alignment and nbest > 1:
        raise RegardError(f"--nbest {nbest}: cannot be combined with --alignment")
    inputs = {"--input": input, "--parses": parses, "--glossary": glossary, "--memory": memory}
    check_distinct_files({**inputs, "--output": output, "--alignment": alignment})
    share = WHOLE
    if shard is not None:
        share = Shard.parse(shard)
        if not (input and input.is_file() and output):
            raise RegardError(f"--shard {shard}: needs --input with a regular file, and --output")
        output, alignment = share.path(output), alignment and share.path(alignment)
    if is_parquet(output):
        refuse_options("--output with Parquet", {**whole_lines, "json": as_json})
        as_json = True
    terms = _read_glossary(glossary) if glossary else None
    model = Translator.load(run_folders(run), precision=parse_precision(precision), threads=threads)
    if alignment and len(model.runs) > 1:
        raise RegardError(
            f"--alignment {alignment}: not supported for an ensemble; use a single run"
        )
    if not texts or documents:  # texts of a command line are too few for worker processes
        model.start_workers()
    model = model.with_target_language(to)
    job = Job(
        model=model,
        decoding=decoding,
        nbest=nbest,
        length=length,
        prefix=prefix or None,
        glossary=terms,
        as_json=as_json,
        with_confidence=confidence,
        with_alignment=alignment is not None,
        with_parses=parses is not None,
        by_sentence=sentences,
        memory=_read_memory(model, memory),
        fuzzy=DEFAULT_FUZZY if fuzzy is None else fuzzy,
    )
    job.check_options()
    if destination:
        translate_documents(job, destination, columns, overwrite)
        return
    files = [path for path in (output, alignment) if path]
    # What is read from a device or pipe is gone, and a device may have no end.
    key = job.resume_key(input, parses) if input and output and input.is_file() else None
    first, last = 0, count_lines(input)
    if key is not None and input and share != WHOLE:
        first, last = share.bounds(total_lines(input, columns), CHUNK_LINES)
        key["shard"] = str(share)
    if key is not None and columns:
        key["columns"] = columns
    with _open_output(files, key, overwrite) if files else nullcontext() as resumable:
        done = resumable.done if resumable else 0
        if resumable and done:
            typer.echo(f"{output}: resuming after line {done:,}", err=True)
        if resumable and resumable.complete:
            return
        typer.echo(f"Computing in {model.engine.summary}.", err=True)
        if confidence or as_json:
            typer.echo(job.describe_confidence(), err=True)
        where = str(input or "the texts")
        lines = _with_parses(input_lines(texts, input, columns), parses, where)
        # The lines that are done are skipped, but the last of them may be context.
        skipped = deque(islice(lines, first + done), maxlen=model.recipe.data.context)
        job.previous = [line for line, _ in skipped]
        # Where translations go to the terminal, they are the progress.
        hidden = output is None and sys.stdout.isatty()
        progress = ProgressLine("Lines: ", None if last is None else last - first, done)
        if share != WHOLE and last is not None:
            lines = islice(lines, last - first - done)
        for chunk in chunks(lines, streamed=not texts and not input):
            translated, aligned = job.translate(chunk, first + done)
            done += len(chunk)
            if not hidden:
                progress.advance(done)
            if output is None:
                print(translated, end="", flush=True)
            if resumable:
                written = ([translated] if output else []) + ([aligned] if alignment else [])
                resumable.add(len(chunk), written)
        progress.close()
        job.report_flagged_lines()


def _open_output(files: list[Path], key: dict[str, Any] | None, overwrite: bool) -> ResumableOutput:
    """The output files: lines of text, or one Parquet file that is written from them at the end."""
    from regard.storage.resumable_output import ResumableOutput, ResumableRecords

    if not is_parquet(files[0]):
        return ResumableOutput(files, key, overwrite)
    if key is None:
        raise RegardError(f"--output {files[0]}: Parquet needs --input with a file")
    return ResumableRecords(files[0], key, _to_parquet, overwrite)


def _to_parquet(lines: list[str]) -> bytes:
    """A Parquet file with one row for each line of JSON output."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    found = [json.loads(line) for line in lines]
    best = [one["translations"][0] for one in found]
    columns = {
        "source": pa.array([one["source"] for one in found], pa.string()),
        "translation": pa.array([one["text"] for one in best], pa.string()),
        "confidence": pa.array([one["confidence"] for one in best], pa.float64()),
    }
    sink = pa.BufferOutputStream()
    write_table(pa.table(columns), sink)
    return bytes(sink.getvalue())


def refuse_options(what: str, options: Mapping[str, object]) -> None:
    """Refuse options that apply to whole lines."""
    given = [f"--{name}" for name, value in options.items() if value]
    if given:
        raise RegardError(
            f"{what}: cannot be combined with {', '.join(given)}, which apply to whole lines"
        )


def _with_parses(lines: Iterator[str], parses: Path | None, where: str) -> Iterator[Line]:
    """Each line with its dependency tree. ``where`` names the lines in error messages."""
    if parses is None:
        return ((line, None) for line in lines)
    from regard.data.formats import read_parses

    texts, copies = tee(lines)
    trees = read_parses(copies, parses, where)
    # The trees come first in zip: their reader must run to its end to report superfluous trees.
    return ((line, tree) for tree, line in zip(trees, texts, strict=True))


DEFAULT_FUZZY = 0.75


def _read_glossary(path: Path) -> Glossary:
    from regard.data.glossary import Glossary

    return Glossary.read(path)


def _read_memory(model: Translator, path: Path | None) -> TranslationMemory | None:
    if path is None:
        return None
    from regard.documents.translation_memory import TranslationMemory

    return TranslationMemory.read(path, languages_of(model))


def languages_of(model: Translator) -> tuple[str, str] | None:
    """The language codes of source and target; None if the model does not name its languages."""
    data = model.recipe.data
    pairs = [pair for pair in data.language_pairs if model.language in (None, pair[1])]
    return pairs[0] if data.named else None


class JoinedTranslation(NamedTuple):
    """The translation of a line whose sentences were translated separately."""

    text: str
    sentences: list[dict[str, Any]]
    """the translation of each sentence, with its source"""
    confidence: float
    """the lowest of its sentences"""


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
        found = self._search(sentences, [None] * len(sentences), terms, contexts)
        return [best for best, *_ in found]

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

    def translate(self, chunk: Sequence[Line], done: int) -> tuple[str, str]:
        """The output for a chunk and its alignment, as lines of text. done: the number of lines before the chunk."""
        from regard.data.pairs import previous_sentences

        lines, parses = [line for line, _ in chunk], [tree for _, tree in chunk]
        self._refuse_long_lines(lines, done)
        self._warn_of_long_lines(lines, done)

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
        for number, (line, translations) in enumerate(zip(lines, results, strict=True), done + 1):
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

        known = [self.memory.exact(text) if self.memory else None for text in texts]
        if any(known):
            rest = [row for row, match in enumerate(known) if match is None]
            found = iter(
                self._search(
                    [texts[row] for row in rest],
                    [parses[row] for row in rest],
                    [terms[row] for row in rest],
                    [contexts[row] for row in rest] if contexts else None,
                )
            )
            return [
                [EMPTY._replace(text=match.target)] if match else next(found) for match in known
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
        contexts = [one for text in texts for one in previous_sentences(text.sentences, count)]
        found = iter(self._search(sentences, [None] * len(sentences), terms, contexts))
        joined = []
        for text in texts:
            best = [next(found)[0] for _ in text.sentences]
            details = [
                {"source": sentence, **translation._asdict(), **self.memory_entry(sentence)}
                for sentence, translation in zip(text.sentences, best, strict=True)
            ]
            whole = text.join([translation.text for translation in best])
            confidence = min((translation.confidence for translation in best), default=1.0)
            joined.append([JoinedTranslation(whole, details, confidence)])
        return joined

    def _units(self, line: str) -> list[str]:
        """What is looked up in the memory: the line or its sentences."""
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

    def _refuse_long_lines(self, lines: Sequence[str], done: int) -> None:
        """Refuse a line whose translation as one text would take too much time and memory."""
        if self.by_sentence or self.model.recipe.data.clean.truncate:
            return
        limit = self.model.max_text_tokens
        for number, line in enumerate(lines, done + 1):
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
            advice = "" if whole else "; use --sentences to translate each separately"
            return f"{count} sentences and is translated as one{advice}"
        longest = self.model.recipe.data.clean.max_tokens
        if len(line.encode(errors="replace")) <= longest:  # a token has at least about one byte
            return None
        tokens = self._count_tokens(line)
        if tokens <= longest:
            return None
        advice = "" if whole else "; use --sentences to split it"
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
        for one in translations:
            problems = self._protected.mismatches(line, one.text)
            problems += [
                f"glossary term {term} is missing"
                for term in terms
                if not whole_word_pattern(term).search(one.text)
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
        parts = (
            translation.sentences
            if isinstance(translation, JoinedTranslation)
            else [{"source": line, **translation._asdict()}]
        )
        found = [
            problem
            for one in parts
            if one["source"].strip() and (one["tokens"] or not one["text"])  # not of the memory
            for problem in self._checker.problems(
                one["source"],
                one["text"],
                (self._source_length(one["source"]), len(one["tokens"])),
                one["finished"],
            )
        ]
        return list(dict.fromkeys(found))

    def _source_length(self, text: str) -> int:
        """The number of tokens that the model reads."""
        clean, tokens = self.model.recipe.data.clean, self._count_tokens(text)
        return min(tokens, clean.max_tokens) if clean.truncate else tokens

    def report_flagged_lines(self) -> None:
        """Report the total number of suspicious translations, if there are several."""
        if self.flagged.total() > 1:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.flagged.most_common())
            typer.echo(
                f"{self.flagged.total():,} of {self.lines:,} translations look suspicious: {kinds}",
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
            found = [one._asdict() for one in translations]
            line = {"source": text, "translations": found, "problems": problems}
            if not self.by_sentence:  # there, each sentence has its match
                line |= self.memory_entry(text)
            yield json.dumps(line, ensure_ascii=False)
            return
        for one in translations:
            columns = [f"{one.confidence:.4f}"] if self.with_confidence else []
            if self.nbest > 1:
                assert not isinstance(one, JoinedTranslation), "--sentences allows no --nbest"
                columns = [str(number), f"{one.score:.4f}", *columns]
            yield "\t".join([*columns, one.text])


def describe_match(match: Match) -> str:
    """A match of the memory, in one line."""
    return f"{match.score:.0%} match in the translation memory: {match.source} => {match.target}"


def _join_lines(lines: Sequence[str]) -> str:
    return "".join(line + "\n" for line in lines)
