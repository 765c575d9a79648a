"""The driver of the fault harness: kills, then other faults, then the tables in docs/reliability.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.faults.processes import preload

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: written by python -m tests.faults --write -->", "<!-- end of faults -->"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="number of kills over all commands")
    parser.add_argument("--seed", type=int, default=1, help="seed of the moments and signals")
    parser.add_argument("--only", help="only commands and faults whose name contains this")
    parser.add_argument(
        "--write", action="store_true", help="write the table of docs/reliability.md"
    )
    arguments = parser.parse_args()
    preload()
    from tests.faults import conditions, kills

    kills.small_chunks()
    with tempfile.TemporaryDirectory(prefix="regard-faults-") as folder:
        data, work = Path(folder) / "data", Path(folder) / "work"
        data.mkdir()
        work.mkdir()
        Path(folder).chmod(0o755)
        kills.write_data(data)
        killed = []
        if arguments.kills:
            killed = kills.run_kills(data, work, arguments.kills, arguments.seed, arguments.only)
        found = conditions.run_conditions(data, work, arguments.only)
    defects = [one for outcome in killed for one in outcome.defects]
    defects += [f"{one.name}: {one.defect}" for one in found if one.defect]
    if arguments.write:
        options = f"--kills {arguments.kills} --seed {arguments.seed}"
        write_tables([kills.summary(one) for one in killed], [one.cells for one in found], options)
    print(f"{sum(one.total for one in killed)} kills, {len(found)} faults, {len(defects)} defects")
    for defect in defects:
        print(f"DEFECT {defect}", file=sys.stderr)
    sys.exit(1 if defects else 0)


def write_tables(kills: list[list[str]], faults: list[list[str]], options: str) -> None:
    """Replace the generated section of docs/reliability.md."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    total = sum(int(row[1]) for row in kills)
    kill_heads = ["command", "kills", "KILL, TERM, INT", "exit statuses", "completed", "files"]
    text = "\n".join(
        [
            BEGIN,
            f"`python -m tests.faults {options} --write`: {total} kills.",
            "",
            *_table(kill_heads, kills),
            "",
            *_table(["fault", "cases", "what the command does", "result"], faults),
            END,
        ]
    )
    PAGE.write_text(before + text + after, encoding="utf-8")


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]
