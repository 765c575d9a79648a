"""To translate: texts, standard input, or a file of any size, which goes on where it was when it is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice, tee
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from regard.cli.options import (
    Alpha,
    AsJson,
    Beam,
    Candidates,
    Changes,
    Given,
    Input,
    Output,
    Overwrite,
    PrecisionName,
    Rounds,
    RunFolder,
    Threads,
    To,
    Trees,
    precision_of,
)
from regard.cli.text_io import given_lines, one_way_in, portions_of
from regard.data.sentence_splitter import count_sentences, split_text
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.data.conllu import ParsedSentence
    from regard.data.glossary import Glossary
    from regard.tasks import Translation, Translator

Line = tuple[str, "ParsedSentence | None"]
"""a text and its tree, if the model asks for one"""


def translate(
    run: RunFolder,
    texts: Given = None,
    input: Input = None,
    output: Output = None,
    beam: Beam = None,
    alpha: Alpha = None,
    manner: Annotated[
        str | None,
        typer.Option(
            help="Whose beam search: paper, transformers, ctranslate2 (default: the recipe's)."
        ),
    ] = None,
    rounds: Rounds = None,
    candidates: Candidates = None,
    length: Annotated[
        int | None, typer.Option(help="Of a parallel model: tokens of each translation.")
    ] = None,
    nbest: Annotated[
        int, typer.Option(min=1, help="So many of each line, as: line number, score, translation.")
    ] = 1,
    glossary: Annotated[
        Path | None,
        typer.Option(help="Lines of source term, tab, target term: each is said where it is due."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="What passes untouched: placeholders, numbers; repeatable."),
    ] = None,
    no_repeat_ngram: Annotated[
        int | None, typer.Option(help="So many tokens in a row never come twice.")
    ] = None,
    mbr: Annotated[
        int | None, typer.Option(help="Minimum Bayes risk: draw so many, take the most typical.")
    ] = None,
    sentences: Annotated[
        bool,
        typer.Option("--sentences", help="Each sentence of a line by itself, then one line again."),
    ] = False,
    changes: Changes = None,
    parses: Trees = None,
    to: To = None,
    alignment: Annotated[
        Path | None, typer.Option(help="Write which word came from which, as 0-0 1-2 (Pharaoh).")
    ] = None,
    precision: PrecisionName = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
    overwrite: Overwrite = False,
) -> None:
    """Translate texts, a file, or standard input: one line in, one line out, in order.

    A line is translated as a whole; with --sentences, each of its sentences by itself.
    With --input and --output a killed translation goes on where it was, by the same command.
    """
    from regard.data.glossary import Glossary
    from regard.recipe import decoding_overrides
    from regard.storage.resumable_output import ResumableOutput
    from regard.storage.run_dir import check_distinct_files
    from regard.tasks import Translator

    one_way_in(texts, input)
    if sentences:
        _refuse_beside_sentences(
            nbest=nbest > 1, alignment=alignment, parses=parses, length=length is not None
        )
    if alignment and nbest > 1:
        raise RegardError(f"--nbest {nbest}: an alignment is of one translation")
    read = {"--input": input, "--parses": parses, "--glossary": glossary}
    check_distinct_files({**read, "--output": output, "--alignment": alignment})
    given: dict[str, Any] = {
        "beam": beam,
        "length_penalty": alpha,
        "length_normalization": manner,
        "iterations": rounds,
    }
    given |= {
        "candidates": candidates,
        "keep": keep,
        "no_repeat_ngram": no_repeat_ngram,
        "mbr": mbr,
    }
    options = {name: value for name, value in given.items() if value is not None}
    options |= decoding_overrides(changes or [])
    terms = Glossary.read(glossary) if glossary else None
    model = Translator.load(run, precision=precision_of(precision), threads=threads)
    if not texts:  # those of a command line are few
        model.start_workers()
    model = model.into(to)
    others: dict[str, Any] = {"nbest": nbest, "length": length}
    # What cannot be asked is refused before a file is touched: all terms are asked for, of a blank text.
    model.search(
        [""],
        constraints=[list(terms.terms.values())] if terms else None,
        parses=[None] if parses else None,
        **options,
        **others,
    )
    job = Job(
        model, options, others, terms, as_json, bool(alignment), parses is not None, sentences
    )
    files = [path for path in (output, alignment) if path]
    asked = job.asked(input, parses) if input and output else None
    with ResumableOutput(files, asked, overwrite) if files else nullcontext() as journal:
        done = journal.done if journal else 0
        if journal and done:
            typer.echo(f"{output}: goes on after line {done:,}", err=True)
        if journal and journal.whole:
            return
        typer.echo(f"Computing in {model.engine.summary}.", err=True)
        lines = _with_trees(given_lines(texts, input), parses, str(input or "the texts"))
        rest = islice(lines, done, None)
        for portion in portions_of(rest, streamed=not texts and not input):
            shown, aligned = job.work(portion, done)
            done += len(portion)
            if output is None:
                print(shown, end="", flush=True)
            written = ([shown] if output else []) + ([aligned] if alignment else [])
            if journal:
                journal.add(len(portion), written)


def _refuse_beside_sentences(**options: object) -> None:
    given = [f"--{name}" for name, value in options.items() if value]
    if given:
        raise RegardError(
            f"--sentences: does not go with {', '.join(given)}, made for a line as a whole"
        )


def _with_trees(lines: Iterator[str], parses: Path | None, of: str) -> Iterator[Line]:
    from regard.data.corpus import read_parses

    if parses is None:
        return ((line, None) for line in lines)
    ours, theirs = tee(lines)
    trees = read_parses(theirs, parses, of)
    # The trees first: at the end they are asked once more, and tell if there are too many.
    return ((line, tree) for tree, line in zip(trees, ours, strict=True))


class Joined(NamedTuple):
    """The translation of a line whose sentences were translated each by itself."""

    text: str
    sentences: list[dict[str, Any]]
    """each with its source"""


class Job:
    """How the lines are to be translated, and told."""

    def __init__(
        self,
        model: Translator,
        search: dict[str, Any],
        others: dict[str, Any],
        glossary: Glossary | None,
        as_json: bool,
        aligned: bool,
        parsed: bool,
        by_sentence: bool,
    ) -> None:
        from regard.data.protected_spans import ProtectedSpans

        self.model = model
        self.search, self.others = search, others
        self.glossary = glossary
        self.as_json = as_json
        self.aligned = aligned
        self.parsed = parsed
        self.by_sentence = by_sentence
        self.kept = ProtectedSpans(search.get("protect", model.recipe.decoding.protect))
        data = model.recipe.data
        self.source = next(
            source for source, to in data.language_pairs if model.language in (None, to)
        )
        # Who cuts long sources has learned from texts, not from sentences; a tree is of one sentence.
        self.told = by_sentence or data.clean.truncate or parsed
        """whether a person knows of lines that are too much at once, or need not know"""

    def asked(self, input: Path, parses: Path | None) -> dict[str, Any]:
        """All that the translation depends on."""
        from regard.data.text_files import read_error
        from regard.storage.resumable_output import asked_of
        from regard.storage.run_dir import sha256

        try:
            content = {"input": sha256(input), "parses": sha256(parses) if parses else None}
        except OSError as error:
            raise read_error(Path(error.filename or input), error) from None
        return {
            **content,
            **asked_of(self.model),
            "options": {
                **self.search,
                **self.others,
                "json": self.as_json,
                "aligned": self.aligned,
                "sentences": self.by_sentence,
            },
            "glossary": self.glossary and self.glossary.terms,
        }

    def work(self, portion: Sequence[Line], before: int) -> tuple[str, str]:
        """What is shown of a portion, and its alignment; before says how many lines came before it."""
        lines, parses = [line for line, _ in portion], [tree for _, tree in portion]
        self._tell(lines, before)
        found: Sequence[Sequence[Translation | Joined]] = (
            self._by_sentence(lines) if self.by_sentence else self._search(lines, parses)
        )
        shown: list[str] = []
        aligned: list[str] = []
        for number, (line, some) in enumerate(zip(lines, found, strict=True), before + 1):
            self._check(number, line, some)
            shown += self._shown(number, line, some)
            aligned += [self._alignment(line, some[0].text)] if self.aligned else []
        return _joined(shown), _joined(aligned)

    def _tell(self, lines: Sequence[str], before: int) -> None:
        """Say once that a line is more than the model has learned to translate at once."""
        for number, line in enumerate(lines, before + 1):
            if self.told:
                return
            if what := self._too_much(line):
                self.told = True
                typer.echo(f"line {number} has {what}", err=True)

    def _too_much(self, line: str) -> str | None:
        whole = self.aligned or self.others["nbest"] > 1 or self.others["length"] is not None
        count = count_sentences(line, self.source)
        if count > 1:
            advice = "" if whole else "; --sentences translates each by itself"
            return f"{count} sentences and is translated as one{advice}"
        most = self.model.recipe.data.clean.max_tokens
        if len(line.encode(errors="replace")) <= most:  # and hardly a token is less than a byte
            return None
        tokens = len(self.model.tokenizer.source.encode([line])[0])
        if tokens <= most:
            return None
        advice = "" if whole else "; --sentences cuts it"
        return f"{tokens:,} tokens, and the model learned from {most:,} at most: some may be lost{advice}"

    def _by_sentence(self, lines: Sequence[str]) -> list[list[Joined]]:
        parts = [split_text(line, self.source) for line in lines]
        every = [sentence for some in parts for sentence in some.sentences]
        found = iter(self._search(every, [None] * len(every)))
        joined = []
        for some in parts:
            best = [next(found)[0] for _ in some.sentences]
            text = some.join([one.text for one in best])
            told = [
                {"source": sentence, **one._asdict()}
                for sentence, one in zip(some.sentences, best, strict=True)
            ]
            joined.append([Joined(text, told)])
        return joined

    def _search(
        self, texts: Sequence[str], parses: Sequence[ParsedSentence | None]
    ) -> list[list[Translation]]:
        return self.model.search(
            texts,
            **self.search,
            **self.others,
            constraints=list(map(self._terms, texts)) if self.glossary else None,
            parses=parses if self.parsed else None,
        )

    def _terms(self, text: str) -> list[str]:
        return self.glossary.asked_by(text) if self.glossary else []

    def _check(self, number: int, line: str, found: Sequence[Translation | Joined]) -> None:
        """Say what could not be kept, on standard error."""
        from regard.data.words import as_words

        terms = self._terms(line)
        for one in found:
            lost = self.kept.lost(line, one.text)
            lost += [f"{term} is missing" for term in terms if not as_words(term).search(one.text)]
            for what in lost:
                typer.echo(f"line {number}: {what}", err=True)

    def _alignment(self, text: str, translation: str) -> str:
        from regard.inspection.alignment import pharaoh

        return pharaoh(self.model, text, translation)

    def _shown(
        self, number: int, text: str, found: Sequence[Translation | Joined]
    ) -> Iterator[str]:
        if self.as_json:
            every = [one._asdict() for one in found]
            yield json.dumps({"source": text, "translations": every}, ensure_ascii=False)
        elif self.others["nbest"] == 1:
            yield found[0].text
        else:
            for one in found:
                assert not isinstance(one, Joined), "a sentence has others, a line has not"
                yield f"{number}\t{one.score:.4f}\t{one.text}"


def _joined(lines: Sequence[str]) -> str:
    return "".join(line + "\n" for line in lines)
