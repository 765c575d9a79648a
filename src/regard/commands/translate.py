"""To translate: texts, standard input, or a file of any size, which goes on where it was when it is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice, tee
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.commands.arguments import (
    Alpha,
    AsJson,
    Beam,
    Candidates,
    Changes,
    Given,
    Input,
    Output,
    PrecisionName,
    Rounds,
    RunFolder,
    Threads,
    To,
    Trees,
    precision_of,
)
from regard.commands.lines import given_lines, one_way_in, portions_of
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.model import Translation, Translator
    from regard.text.conllu import Parsed
    from regard.text.glossary import Glossary

Line = tuple[str, "Parsed | None"]
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
    no_repeat: Annotated[
        int | None, typer.Option(help="So many tokens in a row never come twice.")
    ] = None,
    mbr: Annotated[
        int | None, typer.Option(help="Minimum Bayes risk: draw so many, take the most typical.")
    ] = None,
    changes: Changes = None,
    parses: Trees = None,
    to: To = None,
    alignment: Annotated[
        Path | None, typer.Option(help="Write which word came from which, as 0-0 1-2 (Pharaoh).")
    ] = None,
    precision: PrecisionName = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew where another translation was begun.")
    ] = False,
) -> None:
    """Translate texts, a file, or standard input: one line in, one line out, in order.

    With --input and --output a killed translation goes on where it was, by the same command.
    """
    from regard.journal import Journal
    from regard.model import Translator
    from regard.recipe import search_changes
    from regard.text.glossary import Glossary

    one_way_in(texts, input)
    if alignment and nbest > 1:
        raise RegardError(f"--nbest {nbest}: an alignment is of one translation")
    if alignment and output and alignment.resolve() == output.resolve():
        raise RegardError(
            f"--alignment {alignment}: that is the --output; give it a file of its own"
        )
    given: dict[str, Any] = {"beam": beam, "alpha": alpha, "manner": manner, "rounds": rounds}
    given |= {"candidates": candidates, "keep": keep, "no_repeat": no_repeat, "mbr": mbr}
    options = {name: value for name, value in given.items() if value is not None}
    options |= search_changes(changes or [])
    terms = Glossary.read(glossary) if glossary else None
    model = Translator.load(run, precision=precision_of(precision), threads=threads).into(to)
    others: dict[str, Any] = {"nbest": nbest, "length": length}
    # What cannot be asked is refused before a file is touched: all terms are asked for, of a blank text.
    model.search(
        [""],
        constraints=[list(terms.terms.values())] if terms else None,
        parses=[None] if parses else None,
        **options,
        **others,
    )
    job = Job(model, options, others, terms, as_json, bool(alignment), parses is not None)
    files = [path for path in (output, alignment) if path]
    asked = job.asked(input, parses) if input and output else None
    with Journal(files, asked, overwrite) if files else nullcontext() as journal:
        done = journal.done if journal else 0
        if journal and done:
            typer.echo(f"{output}: goes on after line {done:,}", err=True)
        if journal and journal.whole:
            return
        typer.echo(f"Computing in {model.picked}.", err=True)
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


def _with_trees(lines: Iterator[str], parses: Path | None, of: str) -> Iterator[Line]:
    from regard.text.corpus import read_parses

    if parses is None:
        return ((line, None) for line in lines)
    ours, theirs = tee(lines)
    trees = read_parses(theirs, parses, of)
    # The trees first: at the end they are asked once more, and tell if there are too many.
    return ((line, tree) for tree, line in zip(trees, ours, strict=True))


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
    ) -> None:
        from regard.text.kept import Kept

        self.model = model
        self.search, self.others = search, others
        self.glossary = glossary
        self.as_json = as_json
        self.aligned = aligned
        self.parsed = parsed
        self.kept = Kept(search.get("keep", model.recipe.search.keep))

    def asked(self, input: Path, parses: Path | None) -> dict[str, Any]:
        """All that the translation depends on."""
        from regard.run import sha256
        from regard.text.lines import unreadable
        from regard.version import __version__

        assert self.model.run is not None
        try:
            content = {"input": sha256(input), "parses": sha256(parses) if parses else None}
        except OSError as error:
            raise unreadable(Path(error.filename or input), error) from None
        return {
            **content,
            "model": self.model.run.fingerprint(),
            "options": {
                **self.search,
                **self.others,
                "json": self.as_json,
                "aligned": self.aligned,
            },
            "to": self.model.language,
            "precision": self.model.precision,
            # In int8 neighbours share a scale, so who they are matters.
            "threads": self.model.threads,
            "device": self.model.device.type,
            "glossary": self.glossary and self.glossary.terms,
            "version of regard": __version__,
        }

    def work(self, portion: Sequence[Line], before: int) -> tuple[str, str]:
        """What is shown of a portion, and its alignment; before says how many lines came before it."""
        texts, parses = [line for line, _ in portion], [tree for _, tree in portion]
        terms = [self.glossary.asked_by(text) if self.glossary else [] for text in texts]
        found = self.model.search(
            texts,
            **self.search,
            **self.others,
            constraints=terms if self.glossary else None,
            parses=parses if self.parsed else None,
        )
        shown: list[str] = []
        aligned: list[str] = []
        for number, (text, asked, some) in enumerate(
            zip(texts, terms, found, strict=True), before + 1
        ):
            self._check(number, text, asked, some)
            shown += self._shown(number, text, some)
            aligned += [self._alignment(text, some[0].text)] if self.aligned else []
        return _joined(shown), _joined(aligned)

    def _check(
        self, number: int, text: str, terms: Sequence[str], found: Sequence[Translation]
    ) -> None:
        """Say what could not be kept, on standard error."""
        from regard.text.words import as_words

        for one in found:
            lost = self.kept.lost(text, one.text)
            lost += [f"{term} is missing" for term in terms if not as_words(term).search(one.text)]
            for what in lost:
                typer.echo(f"line {number}: {what}", err=True)

    def _alignment(self, text: str, translation: str) -> str:
        from regard.align import pharaoh

        return pharaoh(self.model, text, translation)

    def _shown(self, number: int, text: str, found: Sequence[Translation]) -> Iterator[str]:
        if self.as_json:
            every = [one._asdict() for one in found]
            yield json.dumps({"source": text, "translations": every}, ensure_ascii=False)
        elif self.others["nbest"] == 1:
            yield found[0].text
        else:
            for one in found:
                yield f"{number}\t{one.score:.4f}\t{one.text}"


def _joined(lines: Sequence[str]) -> str:
    return "".join(line + "\n" for line in lines)
