"""The commands of ``regard experiment`` and ``regard lab``: train variants of a recipe, and check claims."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.options import INTERRUPTED, AsJson, RecipeChanges, RecipeName, default_group
from regard.errors import RegardError

app = typer.Typer(
    cls=default_group("run"),
    help="Train variants of a recipe with several seeds and compare them. "
    "`regard experiment RECIPE --vary …` is short for `regard experiment run RECIPE --vary …`.",
)
lab = typer.Typer(
    cls=default_group("list"),
    help="Check common claims about the Transformer. `regard lab` is short for `regard lab list`.",
)

Minutes = Annotated[
    float | None,
    typer.Option(
        metavar="MINUTES",
        min=1,
        help="Stop after this time and save; run the same command to resume (default: no limit).",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Number of training runs at a time (default: one per CPU core, or as many as fit into GPU memory).",
    ),
]


@app.command("run")
def run(
    recipe: RecipeName,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE",
            help="A key of the recipe and its values, for example model.norm_order=post,pre; repeatable (default: "
            "none; at least one is required). Keys that change together are joined by +: "
            "training.optimizer+training.learning_rate=adam+0.003,sgd+1.0.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for runs, results and report.")
    ] = Path("experiment"),
    seeds: Annotated[
        int, typer.Option(metavar="N", help="Training runs per variant, each with its own seed.")
    ] = 3,
    one_at_a_time: Annotated[
        bool,
        typer.Option(
            "--one-at-a-time",
            help="Change one key at a time, instead of training all combinations.",
        ),
    ] = False,
    changes: RecipeChanges = None,
    on: Annotated[
        str,
        typer.Option(
            metavar="SPLIT",
            help="Data to compare scores on: valid, or test for the final comparison.",
        ),
    ] = "valid",
    minutes: Minutes = None,
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Train all combinations of values with several seeds, and write a table, verdicts, figures and a report.

    To resume, or to add seeds or values, run the command again; finished training runs are kept.
    """
    from regard.experiments.experiment import (
        check_failures,
        demo_changes,
        make_design,
        run_experiment,
    )

    design = make_design(
        recipe,
        vary or [],
        changes=demo_changes(recipe, changes or [], out),
        one_at_a_time=one_at_a_time,
        seeds=seeds,
        split=on,
    )
    content = run_experiment(
        design,
        out,
        minutes=minutes,
        jobs=jobs,
        command=shlex.join(["regard", *sys.argv[1:]]),
        report=_progress,
    )
    _show(content, out, as_json)
    check_failures(content)
    if content["interrupted"]:
        raise typer.Exit(INTERRUPTED)


@app.command("show")
def show(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Output folder of regard experiment.")
    ],
    as_json: AsJson = False,
) -> None:
    """Print the table and the verdicts of an experiment, even while it is running."""
    from regard.experiments.results import read_results

    _show(read_results(folder), folder, as_json)


def _progress(line: str) -> None:
    typer.echo(line, err=True)


def _show(content: dict[str, object], folder: Path, as_json: bool) -> None:
    from regard.experiments.report import REPORT, text_report

    if as_json:
        print(json.dumps(content, indent=2, ensure_ascii=False))
        return
    for line in text_report(content):
        print(line)
    print(f"The report is {folder / REPORT}")


# ---------------------------------------------------------------------------------------------
# Claims


@lab.command("list")
def list_claims(as_json: AsJson = False) -> None:
    """List the claims and the verdicts that come with Regard; claims without a verdict have not been run yet."""
    from regard.experiments.claim_verdicts import stored_results
    from regard.experiments.claims import CLAIMS

    stored = stored_results()
    if as_json:
        claims = [
            {
                "name": claim.name,
                "question": claim.question,
                "told": claim.told,
                "source": claim.source,
            }
            | {"evidence": stored[claim.name]}
            for claim in CLAIMS.values()
        ]
        print(json.dumps(claims, indent=2, ensure_ascii=False))
        return
    width = max(map(len, CLAIMS))
    for claim in CLAIMS.values():
        verdicts = [
            f"{evidence['verdict']} ({evidence_kind})"
            for evidence_kind, evidence in stored[claim.name].items()
        ]
        print(f"{claim.name:{width}}  {claim.question}")
        print(f"{'':{width}}  {', '.join(verdicts) or f'not run yet: regard lab run {claim.name}'}")


@lab.command("run")
def run_claims(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="Claims to check;  regard lab  lists their names."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Check all claims that have an experiment.")
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE", help="Device to train on: cpu, or cuda (with larger models)."
        ),
    ] = "cpu",
    seeds: Annotated[
        int,
        typer.Option(metavar="N", min=2, help="Training runs per variant, each with its own seed."),
    ] = 3,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for runs and results.")
    ] = Path("runs/lab"),
    minutes: Minutes = None,
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Train the models needed to check claims, and compute the verdicts from their scores.

    Claims share training runs. To resume, run the same command again.
    """
    from regard.experiments.claim_verdicts import run_lab
    from regard.experiments.claims import CLAIMS

    if bool(names) == every:
        raise RegardError("expected names of claims, or --all")
    chosen = names or [claim.name for claim in CLAIMS.values() if claim.variants]
    evidence_by_claim = run_lab(
        chosen, out, device=device, seeds=seeds, minutes=minutes, jobs=jobs, report=_progress
    )
    if as_json:
        answer = {name: evidence.to_json() for name, evidence in evidence_by_claim.items()}
        print(json.dumps(answer, indent=2, ensure_ascii=False))
        return
    for name in dict.fromkeys(chosen):
        if name not in evidence_by_claim:
            print(f"{name}: not complete yet; run the same command to resume")
            continue
        print(f"{name}: {evidence_by_claim[name].verdict}")
        print(f"  {CLAIMS[name].told}")
        for fact in evidence_by_claim[name].facts:
            print(f"  - {fact}")
