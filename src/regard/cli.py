"""The commands. Each one reads its arguments, calls one function of the package, and prints the result."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import chain, islice, tee
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.model import Model, Translation, Translator
    from regard.recipe import Manner, Recipe, Texts
    from regard.text.conllu import Parsed
    from regard.text.corpus import Pair

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The Transformer, whole: pairs of text in; a trained, scored model out.",
)

LINES_AT_ONCE = 1024

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Beam = Annotated[int | None, typer.Option(help="Beam size; 1 is greedy (default: the recipe's).")]
Alpha = Annotated[float | None, typer.Option(help="Length penalty (default: the recipe's).")]
Trees = Annotated[
    Path | None, typer.Option(help="CoNLL-U, a tree for each line; for position: tree.")
]
Rounds = Annotated[
    int | None,
    typer.Option(
        help="Of a parallel model: rounds; 1 says all words once (default: the recipe's)."
    ),
]
Candidates = Annotated[
    int | None,
    typer.Option(help="Of a parallel model: lengths to try (default: the recipe's)."),
]
To = Annotated[
    str | None, typer.Option(metavar="LANGUAGE", help="Of a model that knows several: which.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Given = Annotated[
    list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts; else standard input.")
]
Input = Annotated[Path | None, typer.Option(help="Take the lines of this file.")]
Output = Annotated[Path | None, typer.Option(help="Write to this file.")]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Run folder.")] = Path("runs/demo"),
) -> None:
    """Train, score and try a small English-German translator in about three minutes."""
    from regard.demo import demo as show

    show(out)


@app.command()
def train(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE | SOURCE TARGET | PAIRS",
            help="A recipe (file or name), or two parallel text files, or one TSV or JSONL file.",
        ),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Change a value of the recipe; repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder (default: runs/NAME).")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="End, cleanly, within this time.")
    ] = None,
) -> None:
    """Train a model, or go on with one that was interrupted."""
    from regard.learn.train import Interrupted
    from regard.learn.train import train as learn

    recipe, name = _recipe(what, changes or [])
    try:
        learn(recipe, out or Path("runs") / name, minutes)
    except Interrupted:
        raise typer.Exit(130) from None


def _recipe(what: list[str], changes: list[str]) -> tuple[Recipe, str]:
    """The recipe that the arguments of ``train`` mean, and a name for its run."""
    from regard.learn.choose import choose
    from regard.recipe import Texts, load_recipe

    name = Path(what[0]).name.split(".")[0]
    if len(what) > 2:
        raise RegardError(
            f"{len(what)} files given: train takes a recipe, two parallel files, or one"
        )
    pairs = (".tsv", ".jsonl", ".txt")
    if len(what) == 1 and not what[0].removesuffix(".gz").removesuffix(".zst").endswith(pairs):
        path = Path(what[0])
        if path.is_file() and path.suffix not in (".yaml", ".yml"):
            raise RegardError(
                f"{path}: a recipe ends in .yaml, a file of pairs in .tsv or .jsonl; "
                "for two parallel files give both"
            )
        return load_recipe(what[0], changes), name
    texts = (
        Texts(pairs=(what[0],)) if len(what) == 1 else Texts(source=(what[0],), target=(what[1],))
    )
    recipe, reasons = choose(texts, str(Path.cwd()), changes)
    typer.echo("No recipe given, so this was chosen from the data:", err=True)
    for reason in reasons:
        typer.echo(f"  {reason}", err=True)
    return recipe, name


@app.command()
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
    parses: Trees = None,
    to: To = None,
    as_json: AsJson = False,
) -> None:
    """Translate texts, a file, or standard input: one line in, one line out, in order."""
    from regard.model import Translator

    _one_way_in(texts, input)
    model = Translator.load(run).into(to)
    options = {"beam": beam, "alpha": alpha, "manner": _manner(manner), "nbest": nbest}
    options |= {"rounds": rounds, "candidates": candidates, "length": length}
    lines = _with_trees(_lines(texts, input), parses, str(input or "the texts"))
    _tell(_translated(model, lines, options, as_json), output)


def _one_way_in(texts: list[str] | None, input: Path | None) -> None:
    if texts and input:
        raise RegardError("give either texts or --input, not both")


def _tell(lines: Iterator[str], output: Path | None) -> None:
    """To standard output as they come, or to a file that is there whole or not at all."""
    if output is None:
        for line in lines:
            print(line, flush=True)
        return
    from regard.run import write_whole

    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)

    write_whole(output, write)


def _manner(name: str | None) -> Manner | None:
    from regard.recipe import nearest
    from regard.search import MANNERS

    found = [manner for manner in MANNERS if manner == name]
    if name is not None and not found:
        raise RegardError(f"--manner {name}: no such manner{nearest(name, list(MANNERS))}")
    return found[0] if found else None


def _lines(texts: list[str] | None, input: Path | None) -> Iterator[list[str]]:
    """What to work on, in portions: as much as is there, so that a person at a terminal never waits."""
    from regard.background import portions
    from regard.text.corpus import read_lines

    if texts:
        return iter([texts])
    return portions(read_lines(input) if input else _standard_input(), LINES_AT_ONCE)


def _with_trees(
    portions: Iterator[list[str]], parses: Path | None, of: str
) -> Iterator[tuple[list[str], list[Parsed | None] | None]]:
    """Each portion with the trees of its lines, if there are any."""
    from regard.text.corpus import read_parses

    if parses is None:
        yield from ((portion, None) for portion in portions)
        return
    ours, theirs = tee(portions)
    trees = read_parses(chain.from_iterable(theirs), parses, of)
    for portion in ours:
        yield portion, list(islice(trees, len(portion)))
    for _ in trees:  # none is left, or this tells so
        pass


def _standard_input() -> Iterator[str]:
    if sys.stdin.isatty():
        typer.echo("Type a line and Enter; Ctrl-D ends.", err=True)
    for number, line in enumerate(_raw_lines(), 1):
        try:
            yield line.decode("utf-8").rstrip("\r")
        except UnicodeDecodeError:
            raise RegardError(f"standard input, line {number}: not UTF-8 text") from None


def _raw_lines() -> Iterator[bytes]:
    """Read from the descriptor: a thread that waits inside sys.stdin cannot be ended cleanly."""
    rest = b""
    while block := os.read(0, 65536):
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _translated(
    model: Translator,
    portions: Iterator[tuple[list[str], list[Parsed | None] | None]],
    options: dict[str, Any],
    as_json: bool,
) -> Iterator[str]:
    before, nbest = 0, options["nbest"]
    for portion, parses in portions:
        found = model.search(portion, **options, parses=parses)
        for number, (text, translations) in enumerate(zip(portion, found, strict=True), before + 1):
            yield from _shown(number, text, translations, nbest, as_json)
        before += len(portion)


def _shown(
    number: int, text: str, found: list[Translation], nbest: int, as_json: bool
) -> Iterator[str]:
    if as_json:
        yield json.dumps(
            {"source": text, "translations": [one._asdict() for one in found]}, ensure_ascii=False
        )
    elif nbest == 1:
        yield found[0].text
    else:
        for one in found:
            yield f"{number}\t{one.score:.4f}\t{one.text}"


@app.command()
def tag(
    run: RunFolder,
    texts: Given = None,
    input: Input = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Tag the words of texts, as word/TAG; words stand between blanks, full stops too."""
    from regard.model import Tagger

    _one_way_in(texts, input)
    model = Tagger.load(run)

    def lines() -> Iterator[str]:
        for portion in _lines(texts, input):
            for found in model.tag(portion):
                both = zip(found.words, found.tags, strict=True)
                yield _json(found._asdict()) if as_json else " ".join(map("/".join, both))

    _tell(lines(), output)


@app.command()
def classify(
    run: RunFolder,
    texts: Given = None,
    input: Input = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Classify texts: the label and its probability."""
    from regard.model import Classifier

    _one_way_in(texts, input)
    model = Classifier.load(run)

    def lines() -> Iterator[str]:
        for portion in _lines(texts, input):
            for found in model.classify(portion):
                plain = f"{found.label}\t{found.probability:.4f}"
                yield _json(found._asdict()) if as_json else plain

    _tell(lines(), output)


@app.command()
def fill(
    run: RunFolder,
    text: Annotated[str, typer.Argument(help="A text with [MASK] where a word is to be guessed.")],
    best: Annotated[int, typer.Option(min=1, help="So many guesses for each [MASK].")] = 5,
    as_json: AsJson = False,
) -> None:
    """Guess hidden words: probability and word, best first."""
    from regard.model import Filler

    gaps = Filler.load(run).fill(text, best)
    if as_json:
        print(_json({"text": text, "gaps": [[one._asdict() for one in gap] for gap in gaps]}))
        return
    for number, gap in enumerate(gaps, 1):
        which = f"{number}\t" if len(gaps) > 1 else ""
        for filling in gap:
            print(f"{which}{filling.probability:.4f}\t{filling.text}")


@app.command("continue")
def go_on(
    run: RunFolder,
    text: Annotated[str, typer.Argument(help="How it begins.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens more.")] = 50,
    temperature: Annotated[
        float,
        typer.Option(min=0.0, help="Below 1 is safer, above 1 wilder; 0 takes the likeliest."),
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest of this share.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Another seed, another text.")] = 1,
) -> None:
    """Continue a text, to the end of its line at most."""
    from regard.model import Continuer

    model = Continuer.load(run)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    print(model.go_on(text, tokens, **options))  # type: ignore[arg-type]


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


@app.command()
def distill(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The teacher: a run folder.")],
    input: Annotated[
        Path | None,
        typer.Option(help="Texts, one a line (default: the sources the run was trained on)."),
    ] = None,
    output: Annotated[
        Path, typer.Option(help="The pairs to write; the name ends in .tsv or .jsonl.")
    ] = Path("distilled.tsv"),
    beam: Beam = None,
    alpha: Alpha = None,
    to: To = None,
    turned: Annotated[
        bool,
        typer.Option("--turned", help="Write each pair turned round: a back-translation."),
    ] = False,
) -> None:
    """Let a model translate its training sources, or other texts: pairs to learn from."""
    from functools import partial

    from regard.distill import distill as write
    from regard.model import Translator

    model = Translator.load(run).into(to)
    tell = partial(typer.echo, err=True)
    count = write(model, output, input, tell, turned, beam=beam, alpha=alpha)
    print(f"{output}: {count:,} pairs; a student learns from them with  regard train")


@app.command()
def evaluate(
    run: RunFolder,
    source: Annotated[Path | None, typer.Option(help="Texts, one a line …")] = None,
    reference: Annotated[Path | None, typer.Option(help="… and what is right for each.")] = None,
    pairs: Annotated[Path | None, typer.Option(help="Or both in a TSV or JSONL file.")] = None,
    conllu: Annotated[Path | None, typer.Option(help="Or tagged sentences.")] = None,
    text: Annotated[Path | None, typer.Option(help="Or text alone: for mask and continue.")] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="RUN2", help="Another run, compared by a paired test.")
    ] = None,
    beam: Beam = None,
    alpha: Alpha = None,
    rounds: Rounds = None,
    candidates: Candidates = None,
    parses: Trees = None,
    to: To = None,
    as_json: AsJson = False,
) -> None:
    """Score a model on the files given, or on its recipe's data.test: each figure with its 95% interval."""
    from regard.model import Model

    files = {"source": source, "target": reference, "pairs": pairs, "conllu": conllu, "text": text}
    files["parses"] = parses
    model = Model.load(run)
    named = {role: str(file) for role, file in files.items() if file}
    ways = {"beam": beam, "alpha": alpha, "rounds": rounds, "candidates": candidates}
    _search_by(model, ways)
    scored = _scored_on(model, named, to)
    comparisons: list[Any] = []
    if against is None:
        results = model.evaluate(scored)
    else:
        other = type(model).load(against)
        _search_by(other, ways)
        results, comparisons = model.compare(other, scored)
    if as_json:
        answer: dict[str, Any] = {"run": str(run), "sentences": len(scored)}
        answer["scores"] = [result.to_json() for result in results]
        if against is not None:
            answer["against"] = str(against)
            answer["comparisons"] = [comparison.to_json() for comparison in comparisons]
        print(json.dumps(answer, indent=2, ensure_ascii=False))
        return
    for line in [*results, *comparisons]:
        print(line)


def _search_by(model: Model, ways: dict[str, Any]) -> None:
    """Change how a translator searches."""
    from regard.model import Translator

    asked = {name: value for name, value in ways.items() if value is not None}
    if asked and not isinstance(model, Translator):
        raise RegardError(f"--{next(iter(asked))} is for models to translate, not to {model.task}")
    model.search_by(**asked)


def _scored_on(model: Model, files: dict[str, str], to: str | None) -> list[Pair]:
    """The pairs of the files named, or of the recipe's test, or those of one language."""
    from pydantic import ValidationError

    from regard.recipe import Data, Texts
    from regard.text.corpus import language_of, read_pairs

    data = model.recipe.data
    if to and files:
        files["to"] = to
    if not files:
        if data.test is None:
            raise RegardError(
                "nothing to score: the recipe has no data.test; give --source and --reference, "
                "--pairs, --conllu or --text"
            )
        pairs = read_pairs(data.test, data, "data.test")
        return [pair for pair in pairs if to is None or language_of(pair) == to]
    try:
        texts: Texts = Texts.model_validate(files)
    except ValidationError:
        raise RegardError(
            "give either --source and --reference, or --pairs, or --conllu, or --text"
        ) from None
    return list(read_pairs(texts, Data(root=".", train=texts), section=""))


@app.command()
def look(
    run: RunFolder,
    text: Annotated[str, typer.Argument(help="One sentence.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("look.html"),
    beam: Beam = None,
    alpha: Alpha = None,
    checkpoints: Annotated[
        bool,
        typer.Option("--checkpoints", help="Show also how the alignment formed while it learned."),
    ] = False,
    to: To = None,
) -> None:
    """See one sentence pass: every head, every candidate, the beam; one HTML file that needs nothing else."""
    from regard.look import page
    from regard.model import Translator
    from regard.run import write_text

    found = (
        Translator.load(run).into(to).trace(text, beam=beam, alpha=alpha, checkpoints=checkpoints)
    )
    write_text(out, page(found))
    print(f"{out}: open it in a browser")


@app.command()
def serve(
    run: RunFolder,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    api_keys: Annotated[
        str,
        typer.Option(envvar="REGARD_API_KEYS", help="Keys that may use it, with commas between."),
    ] = "",
) -> None:
    """Serve a model over HTTP; clients of LibreTranslate work unchanged."""
    try:
        from regard.serve.run import serve as listen
        from regard.serve.settings import Settings
    except ModuleNotFoundError as error:
        raise RegardError(f"serve needs {error.name}: pip install 'regard[serve]'") from None
    keys = tuple(filter(None, map(str.strip, api_keys.split(","))))
    listen(run, host, port, Settings(api_keys=keys))


@app.command()
def average(
    run: RunFolder,
    out: Annotated[Path, typer.Option(help="Folder for the new model.")],
    last: Annotated[
        int | None, typer.Option(min=1, help="Only the last so many (default: all kept).")
    ] = None,
) -> None:
    """Average the checkpoints kept in a run into a new model."""
    from regard.learn.checkpoint import average_run

    steps = average_run(run, out, last)
    print(f"{out}: the average of {len(steps)} checkpoints (steps {', '.join(map(str, steps))})")


@app.command("import")
def import_(
    what: Annotated[Path, typer.Argument(metavar="FOLDER | FILE", help="A model from elsewhere.")],
    kind: Annotated[str, typer.Option("--from", help="huggingface (MarianMT, OPUS-MT) or torch.")],
    out: Annotated[Path, typer.Option(help="Run folder to write.")],
    like: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="For torch: where recipe and tokenizer are taken from."),
    ] = None,
) -> None:
    """Make a run folder of a model from elsewhere, after proving that it is the same function."""
    from regard.exchange.convert import import_model

    for line in import_model(what, kind, out, like):
        print(line)


@app.command()
def export(
    run: RunFolder,
    kind: Annotated[
        str,
        typer.Option(
            "--to", help="huggingface, ctranslate2, ctranslate2-int8, onnx, torch or bundle."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Write a model for others to open, after proving that it is the same function there."""
    from regard.exchange.convert import export_model

    for line in export_model(run, kind, out):
        print(line)


@app.command()
def recipes() -> None:
    """List the recipes that come with Regard."""
    from regard.recipe import shipped_recipes

    for name, path in shipped_recipes().items():
        first = path.read_text(encoding="utf-8").split("\n", 1)[0]
        print(f"{name:26} {first.removeprefix('#').strip()}")


@app.command()
def info(run: RunFolder, as_json: AsJson = False) -> None:
    """What a run is, where it came from, how good it is."""
    from regard.run import Run

    folder = Run(run)
    recipe, card = folder.recipe(), folder.card()
    if as_json:
        print(json.dumps({"recipe": recipe.model_dump(mode="json"), "card": card}, indent=2))
        return
    for line in folder.describe(recipe, card):
        print(line)


def main() -> None:
    """Run a command; a RegardError becomes one line and exit status 2."""
    # Threads that wait asleep: threads that spin can cost ten times the speed beside other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except RegardError as error:
        print(f"regard: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(0)
