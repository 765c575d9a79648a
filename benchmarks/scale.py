"""Scale: every figure about large corpora, large models and several processes, in one file, benchmarks/scale.json.

    python benchmarks/scale.py prepare --pairs 1000000 10000000 40000000
    torchrun --nproc-per-node 2 benchmarks/scale.py step multi30k --folder FOLDER
    python benchmarks/scale.py report             # prints all figures, and writes them into docs/scale.md

The first argument is the part to measure: ``python benchmarks/scale.py --help`` lists the parts, and
``python benchmarks/scale.py PART --help`` its options. Each part is a file in ``benchmarks/scaling/`` with the
functions ``add_arguments``, ``measure`` and ``figures``. A measurement replaces an earlier one of the same command and
hardware. ``--json FILE`` writes into another file.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from reporting import markdown_table, replace_section

HERE = Path(__file__).parent
RESULTS = HERE / "scale.json"
PAGE = HERE.parent / "docs" / "scale.md"
BEGIN, END = "<!-- begin scale -->\n", "<!-- end scale -->\n"
REPORT = "report"
PARTS = {
    "prepare": "memory and CPU time of `regard data prepare`",
    "rate": "pairs per CPU second, without the training of the tokenizer",
    "plan": "start of an epoch; padding and randomness of its batches",
    "memory": "peak memory of `regard train`",
    "step": "a packed training step, and how much of the exchange of gradients computation hides",
    "shared-gpu": "two processes that share one GPU against one process",
    "sharded": "one step of a sharded model: what each process holds",
    "elastic": "seconds until training continues when a machine dies, returns or loses the network",
    "largest": "the largest model whose training step fits into the memory of a GPU",
    "cost-model": "`regard plan --kind cpu` against measured steps",
    "ray": "Ray Data against a plain loop",
}
"""the parts, in the order of the report; part a-b is the module scaling.a_b"""

Results = dict[str, list[dict[str, Any]]]
"""the measurements of each part"""


def main(arguments: Sequence[str] | None = None) -> None:
    names = "\n".join(f"  {name:<12}{summary}" for name, summary in PARTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0] if __doc__ else None,
        epilog=f"parts:\n{names}\n  {REPORT:<12}print all figures, and write them into docs/scale.md",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=[*PARTS, REPORT], metavar="PART")
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = parser.parse_args(words[:1]).part
    if name == REPORT:
        argparse.ArgumentParser(prog=f"{parser.prog} {REPORT}").parse_args(words[1:])
        print(table(read(RESULTS)))
        PAGE.write_text(page(), encoding="utf-8")
        return
    module = import_module(f"scaling.{name.replace('-', '_')}")
    of_part = argparse.ArgumentParser(prog=f"{parser.prog} {name}", description=PARTS[name])
    of_part.add_argument("--json", type=Path, default=RESULTS, help="file for the figures")
    module.add_arguments(of_part)
    options = of_part.parse_args(words[1:])
    found = module.measure(options)
    if found is None:
        return  # another process writes the figures
    record = {
        "command": command(name, words[1:], options),
        "hardware": found.pop("hardware", None) or cpu_name(),
        "load": round(os.getloadavg()[0], 1),
        **found,
    }
    print(json.dumps(record, indent=2))
    store(options.json, name, record)


# ---------------------------------------------------------------------------------------------
# Results


def read(path: Path) -> Results:
    results: Results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return results


def store(path: Path, part: str, record: dict[str, Any]) -> None:
    """Add a measurement; it replaces those of the same command and hardware."""
    results, keys = read(path), ("command", "hardware")
    others = [one for one in results.get(part, []) if any(one[key] != record[key] for key in keys)]
    results[part] = [*others, record]
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def command(part: str, words: Sequence[str], options: argparse.Namespace) -> str:
    """The command line, without ``--json``, and with names for the paths of this machine."""
    paths = {str(value): key for key, value in vars(options).items() if isinstance(value, Path)}
    shown, rest = ["benchmarks/scale.py", part], iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option == "--json":
            if not equals:
                next(rest)
        elif equals and str(Path(value)) in paths:
            shown.append(f"{option}={paths[str(Path(value))].upper()}")
        else:
            shown.append(paths[str(Path(word))].upper() if str(Path(word)) in paths else word)
    processes = os.environ.get("WORLD_SIZE")
    start = ["torchrun", "--nproc-per-node", processes] if processes else ["python"]
    return shlex.join([*start, *shown])


def cpu_name() -> str:
    from torch import device

    from regard.training.model_card import hardware

    return hardware(device("cpu"))


# ---------------------------------------------------------------------------------------------
# Report


def table(results: Results) -> str:
    """All figures; above those of a measurement, the command, the hardware and the load of the machine."""
    rows = []
    for part in PARTS:
        module = import_module(f"scaling.{part.replace('-', '_')}")
        for record in results.get(part, []):
            load = f", load {record['load']}" if "load" in record else ""
            rows.append((f"**{part}**: `{record['command']}`; {record['hardware']}{load}", ""))
            rows += module.figures(record)
    return "\n".join(markdown_table(["figure", "value"], rows)) + "\n"


def page() -> str:
    """docs/scale.md with the figures of scale.json."""
    text = PAGE.read_text(encoding="utf-8")
    return replace_section(PAGE, text, BEGIN, END, table(read(RESULTS)))


if __name__ == "__main__":
    main()
