"""The commands. Each one reads its arguments, calls one function of the package, and prints the result."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.model import Translation, Translator
    from regard.recipe import Manner, Recipe

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The Transformer, whole: pairs of text in; a trained, scored translator out.",
)

LINES_AT_ONCE = 1024

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Beam = Annotated[int | None, typer.Option(help="Beam size; 1 is greedy (default: the recipe's).")]
Alpha = Annotated[float | None, typer.Option(help="Length penalty (default: the recipe's).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


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
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts; else standard input.")
    ] = None,
    input: Annotated[Path | None, typer.Option(help="Translate the lines of this file.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write to this file.")] = None,
    beam: Beam = None,
    alpha: Alpha = None,
    manner: Annotated[
        str | None,
        typer.Option(
            help="Whose beam search: paper, transformers, ctranslate2 (default: the recipe's)."
        ),
    ] = None,
    nbest: Annotated[
        int, typer.Option(min=1, help="So many of each line, as: line number, score, translation.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Translate texts, a file, or standard input: one line in, one line out, in order."""
    from regard.model import Translator

    if texts and input:
        raise RegardError("give either texts or --input, not both")
    kind = _manner(manner)
    model = Translator.load(run)
    lines = _lines(texts, input)
    if output is None:
        for line in _translated(model, lines, beam, alpha, kind, nbest, as_json):
            print(line, flush=True)
        return
    from regard.run import write_whole

    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            for line in _translated(model, lines, beam, alpha, kind, nbest, as_json):
                file.write(line + "\n")

    write_whole(output, write)


def _manner(name: str | None) -> Manner | None:
    from regard.recipe import nearest
    from regard.search import MANNERS

    found = [manner for manner in MANNERS if manner == name]
    if name is not None and not found:
        raise RegardError(f"--manner {name}: no such manner{nearest(name, list(MANNERS))}")
    return found[0] if found else None


def _lines(texts: list[str] | None, input: Path | None) -> Iterator[list[str]]:
    """What to translate, in portions: as much as is there, so that a person at a terminal never waits."""
    from regard.background import portions
    from regard.text.corpus import read_lines

    if texts:
        return iter([texts])
    return portions(read_lines(input) if input else _standard_input(), LINES_AT_ONCE)


def _standard_input() -> Iterator[str]:
    if sys.stdin.isatty():
        typer.echo("Type a line to translate it; Ctrl-D ends.", err=True)
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
    portions: Iterator[list[str]],
    beam: int | None,
    alpha: float | None,
    manner: Manner | None,
    nbest: int,
    as_json: bool,
) -> Iterator[str]:
    if beam is None:
        beam = max(model.recipe.search.beam, nbest)
    before = 0
    for portion in portions:
        found = model.search(portion, beam=beam, alpha=alpha, manner=manner, nbest=nbest)
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
def evaluate(
    run: RunFolder,
    source: Annotated[Path, typer.Option(help="Texts, one a line.")],
    reference: Annotated[Path, typer.Option(help="Their true translations.")],
    against: Annotated[
        Path | None, typer.Option(metavar="RUN2", help="Another run, compared by a paired test.")
    ] = None,
    beam: Beam = None,
    alpha: Alpha = None,
    as_json: AsJson = False,
) -> None:
    """Score a model: each figure with its 95% interval and signature."""
    from regard.model import Translator
    from regard.recipe import Data, Texts
    from regard.score import compare, score
    from regard.text.corpus import read_pairs

    texts = Texts(source=(str(source),), target=(str(reference),))
    pairs = list(read_pairs(texts, Data(root=".", train=texts), section=""))
    sources, references = [pair.source for pair in pairs], [pair.target for pair in pairs]
    model = Translator.load(run)
    measures, tokenize = model.recipe.score.measures, model.recipe.score.tokenize
    ours = model.translate(sources, beam=beam, alpha=alpha)
    results = score(measures, ours, references, sources, tokenize=tokenize)
    comparisons = []
    if against is not None:
        theirs = Translator.load(against).translate(sources, beam=beam, alpha=alpha)
        comparisons = compare(measures, ours, theirs, references, sources, tokenize=tokenize)
    if as_json:
        answer: dict[str, Any] = {"run": str(run), "sentences": len(pairs)}
        answer["scores"] = [result.to_json() for result in results]
        if against is not None:
            answer["against"] = str(against)
            answer["comparisons"] = [comparison.to_json() for comparison in comparisons]
        print(json.dumps(answer, indent=2, ensure_ascii=False))
        return
    for line in [*results, *comparisons]:
        print(line)


@app.command()
def look(
    run: RunFolder,
    text: Annotated[str, typer.Argument(help="One sentence.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("look.html"),
    beam: Beam = None,
    alpha: Alpha = None,
) -> None:
    """See one sentence pass: every head, every candidate, the beam; one HTML file that needs nothing else."""
    from regard.look import page
    from regard.model import Translator
    from regard.run import write_text
    from regard.trace import trace

    write_text(out, page(trace(Translator.load(run), text, beam=beam, alpha=alpha)))
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
        print(f"{name:16} {first.removeprefix('#').strip()}")


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
