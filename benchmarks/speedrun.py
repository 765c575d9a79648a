"""Seconds from two text files to 41.0 validation BLEU on multi30k en-de: tokenizer, compilation, training, validation.

    python benchmarks/speedrun.py                       # all attempts, into speedrun.json
    python benchmarks/speedrun.py 3000-steps --cold     # one attempt, without compiled kernels of earlier runs
    python benchmarks/speedrun.py --table               # the table of docs/training.md

Every attempt is ``regard train`` with ``multi30k.yaml`` and a few changed keys, in a process of its own. The clock
starts before the process and stops with the first validation on all 1,014 pairs that reaches the score, or with the
average of the checkpoints if it is the first to reach it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reporting import markdown_table, replace_section

HERE = Path(__file__).parent
RESULTS = HERE / "speedrun.json"
PAGE = HERE.parent / "docs" / "training.md"
BEGIN, END = "<!-- begin speedrun -->\n", "<!-- end speedrun -->\n"
GOAL = 41.0
COMMON = ["data.test=null", "evaluation.metrics=[bleu]"]
MUON = ["training.optimizer=muon"]
WIDE = ["model.preset=base", "model.encoder_layers=3", "model.decoder_layers=3"]


class Attempt(NamedTuple):
    """Changes of ``multi30k.yaml``, and what they are, in words."""

    words: str
    changes: list[str]


def schedule(steps: int, validations: int = 4) -> list[str]:
    """A shorter schedule with a few validations."""
    every = steps // validations
    return [
        *(f"training.steps={steps}", f"training.warmup={steps // 10}"),
        *(f"training.validate_every={every}", f"training.checkpoint_every={every}"),
    ]


ATTEMPTS = {
    "recipe": Attempt("`multi30k.yaml` as it is: 10,000 steps", []),
    "4000-steps": Attempt("4,000 steps", schedule(4_000)),
    "3000-steps": Attempt("3,000 steps", schedule(3_000)),
    "wide-2500": Attempt(
        "2,500 steps of 3+3 layers of 512, R-Drop 3",
        [*schedule(2_500), *WIDE, "training.learning_rate=0.001", "training.rdrop=3"],
    ),
    "wide-1500": Attempt(
        "1,500 steps of 3+3 layers of 512, R-Drop 3",
        [*schedule(1_500), *WIDE, "training.learning_rate=0.001", "training.rdrop=3"],
    ),
    "muon-1500": Attempt(
        "1,500 steps of 3+3 layers of 512, R-Drop 3, Muon",
        [*schedule(1_500, 2), *WIDE, *MUON, "training.learning_rate=0.003", "training.rdrop=3"],
    ),
    "muon-1500-faster": Attempt(
        "1,500 steps of 3+3 layers of 512, R-Drop 3, Muon, twice the learning rate",
        [*schedule(1_500, 2), *WIDE, *MUON, "training.learning_rate=0.006", "training.rdrop=3"],
    ),
    "muon-2500": Attempt(
        "2,500 steps of 3+3 layers of 512, without R-Drop, Muon",
        [*schedule(2_500, 2), *WIDE, *MUON, "training.learning_rate=0.003", "training.rdrop=0"],
    ),
    "muon-4096": Attempt(
        "2,500 steps of 3+3 layers of 512, R-Drop 3, Muon, batches of 4,096 tokens",
        [
            *(*schedule(2_500, 2), *WIDE, *MUON, "training.learning_rate=0.003"),
            *("training.rdrop=3", "training.tokens_per_batch=4096"),
        ],
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("attempts", nargs="*", metavar="ATTEMPT", help=", ".join(ATTEMPTS))
    parser.add_argument("--cold", action="store_true", help="with an empty compilation cache")
    parser.add_argument("--set", action="append", default=[], help="more changes of the recipe")
    parser.add_argument("--goal", type=float, default=GOAL)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="write the table and end")
    given = parser.parse_args(arguments)
    if given.table:
        text = PAGE.read_text(encoding="utf-8")
        content = table(json.loads(given.out.read_text()))
        PAGE.write_text(replace_section(PAGE, text, BEGIN, END, content), encoding="utf-8")
        return
    results = json.loads(given.out.read_text()) if given.out.exists() else []
    for name in given.attempts or ATTEMPTS:
        results.append(run(name, given.cold, given.goal, given.set))
        print(results[-1], flush=True)
        given.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def run(name: str, cold: bool, goal: float, more: Sequence[str]) -> dict[str, Any]:
    """The figures of one attempt; ``seconds`` is None if it does not reach the goal.

    ``steps``: seconds and step when training starts, when it has compiled, and at the last step.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if cold:
            environment |= {
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
                "TRITON_CACHE_DIR": f"{folder}/triton",
            }
        out = Path(folder, "run")
        options = [f"--set={one}" for one in (*COMMON, *ATTEMPTS[name].changes, *more)]
        command = [sys.executable, "-m", "regard", "train", "multi30k", "--out", str(out)]
        start = time.time()
        with Path(folder, "output").open("w") as output:
            subprocess.run([*command, *options], env=environment, check=True, stdout=output)
        events = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        card = json.loads((out / "card.json").read_text())
        scores = [(one["time"] - start, score(one)) for one in events if score(one) is not None]
        steps = [
            [round(one["time"] - start, 1), one["step"]]
            for one in events
            if one["event"] in ("start", "step")
        ]
        return {
            "attempt": name,
            "cold": cold,
            "goal": goal,
            "hardware": card["hardware"],
            "seconds": next((round(at, 1) for at, bleu in scores if bleu >= goal), None),
            "best": round(max(bleu for _, bleu in scores), 2),
            "preparing_seconds": card["preparing_seconds"],
            "steps": [*steps[:2], steps[-1]],
            "training_seconds": card["seconds"],
            "validations": [[round(at, 1), round(bleu, 2)] for at, bleu in scores],
        }


def score(event: dict[str, Any]) -> Any:
    """The validation BLEU of an event of the log, if it has one."""
    if event["event"] == "valid":
        return event.get("bleu")
    return -event["objective"] if event["event"] == "average" else None


def table(results: Sequence[dict[str, Any]]) -> str:
    """One row for each attempt, slowest first."""
    order = sorted(results, key=lambda one: one["seconds"] or float("inf"), reverse=True)
    rows = [
        [
            ATTEMPTS[one["attempt"]].words,
            "empty" if one["cold"] else "filled",
            one["hardware"],
            f"not in {one['validations'][-1][0]:.0f}"
            if one["seconds"] is None
            else f"{one['seconds']:.0f}",
            f"{one['best']:.1f}",
        ]
        for one in order
    ]
    head = ["change", "compilation cache", "hardware", "seconds", "best validation BLEU"]
    return "\n".join(markdown_table(head, rows)) + "\n"


if __name__ == "__main__":
    main()
