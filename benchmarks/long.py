"""Self-attention over long texts: time and peak memory of every pattern from 1k to 64k words, with fitted exponents.

    python benchmarks/long.py                     # writes benchmarks/long.json and docs/images/long.svg
    python benchmarks/long.py --longest 8192 --kinds window bigbird    # the other kinds' figures are kept
    python benchmarks/long.py --device cuda --json "$OUT/long.json" --plot "$OUT/long.svg"

What is measured is attention alone, from the heads' queries, keys and values to their outputs: the projections before
and after are the same for every pattern. Sizes are those of the paper's base model: 8 heads of 64, one text.

On a CPU each point is a fresh process with one thread that keeps the memory it frees. Time is CPU time, so other users
of the machine count for little; memory is how far the highest resident memory rose above its height before the first
call. On a GPU numbers are bfloat16 and memory is torch's own count. The exponent is the slope of log time over log T,
by least squares over the larger half of the T.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from regard.nn.attention import Attention, KeyValue, Mask
from regard.nn.positions import AttentionPosition
from regard.nn.sparse_attention import PATTERNS, BigBird, Window
from regard.recipe import Model, Pattern, make_recipe

HEADS, WIDTH = 8, 512
REACH = BLOCK = 64
FLEX_BLOCK = 128
"""of FlexAttention: it knows no smaller ones on the way back"""
ALL = [1024 * 2**n for n in range(7)]
ROOM = {"cpu": 4e9, "cuda": 80e9}
"""bytes a matrix of all with all, and what is computed from it, may take"""
PATIENCE = {"cpu": 12.0, "cuda": 2.0}
"""after a call of so many seconds no longer text is tried"""

KEEP = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1000000000000"}
"""for glibc: freed memory is kept, else the kernel's clearing of pages is timed above some size"""

Call = Callable[[], Tensor]


class Inputs(NamedTuple):
    query: Tensor
    seen: KeyValue
    section: Model

    @property
    def leaves(self) -> list[Tensor]:
        return [self.query, *self.seen]


# The kinds


def ours(name: Pattern, given: Inputs) -> Call:
    """A pattern as a recipe would have it, by the fast way."""
    pattern = PATTERNS[name](given.section, "encoder").to(given.query)
    attend = Attention(given.section, AttentionPosition(given.section)).eval()
    return lambda: pattern(attend, given.query, pattern.condense(given.seen, None), Mask())


def without_fusion(given: Inputs) -> Call:
    """Full attention with its matrices written out."""
    fused = ours("full", given)

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return fused()

    return call


def gathered(given: Inputs) -> Call:
    """A window as where there is no kernel for it."""
    pattern = Window(given.section, "encoder").to(given.query)
    attend = Attention(given.section, AttentionPosition(given.section)).eval()
    return lambda: pattern.in_blocks(attend, given.query, given.seen, Mask())


def flex_window(given: Inputs) -> Call:
    blocks = torch.arange(given.query.shape[2] // FLEX_BLOCK, device=given.query.device)
    near = (blocks - blocks[:, None]).abs() <= math.ceil(REACH / FLEX_BLOCK)
    return flex(given, near, lambda _b, _h, i, j: (i - j).abs() <= REACH)


def flex_bigbird(given: Inputs) -> Call:
    pattern = BigBird(given.section, "encoder")
    length = given.query.shape[2]
    chosen = pattern.chosen(torch.ones(1, length, dtype=torch.bool, device=given.query.device))[0]
    blocks = torch.arange(len(chosen), device=chosen.device)
    seen = (chosen[..., None] == blocks).any(1) | (blocks < pattern.globals)[:, None]
    larger, side = len(seen) * BLOCK // FLEX_BLOCK, FLEX_BLOCK // BLOCK
    some = seen.view(larger, side, larger, side).any(3).any(1)
    return flex(given, some, lambda _b, _h, i, j: seen[i // BLOCK, j // BLOCK])


def flex(given: Inputs, seen: Tensor, inside: Callable[..., Tensor]) -> Call:
    """torch's FlexAttention over the blocks seen; inside says which pairs of a block count."""
    order = seen.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    some = seen.sum(1).to(torch.int32), order
    mask = flex_attention.BlockMask.from_kv_blocks(
        *(part[None, None] for part in some), BLOCK_SIZE=FLEX_BLOCK, mask_mod=inside
    )
    torch._dynamo.reset()  # else the eighth length would no longer be compiled
    compiled = torch.compile(flex_attention.flex_attention, dynamic=False)
    return lambda: compiled(given.query, *given.seen, block_mask=mask)


KINDS: dict[str, Callable[[Inputs], Call]] = {
    "full": partial(ours, "full"),
    "window": partial(ours, "window"),
    "linformer": partial(ours, "linformer"),
    "bigbird": partial(ours, "bigbird"),
    "full, not fused": without_fusion,
    "window, gathered": gathered,
    "window, FlexAttention": flex_window,
    "bigbird, FlexAttention": flex_bigbird,
}
ON_GPU = ("window, gathered", "window, FlexAttention", "bigbird, FlexAttention")
"""what differs from the others, or runs, on a GPU only"""
COLOURS = {"full": "#000000", "window": "#0072b2", "linformer": "#009e73", "bigbird": "#cc79a7"}
DASHES = {"": "none", "not fused": "7 3", "gathered": "7 3", "FlexAttention": "2 3"}
"""of what a kind is called after the comma"""


def inputs(length: int, device: str) -> Inputs:
    sizes = {"d_model": WIDTH, "heads": HEADS, "max_length": length, "dropout": 0.0}
    options = {"window_size": REACH, "block_size": BLOCK}
    values = {"data": {"train": {"pairs": "x"}, "clean": {"max_tokens": 1}}}
    recipe = make_recipe({**values, "model": {**sizes, "attention": options}}, "long")
    torch.manual_seed(1)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    parts = [
        torch.randn(1, HEADS, length, WIDTH // HEADS, device=device, dtype=dtype) for _ in range(3)
    ]
    return Inputs(parts[0], KeyValue(*parts[1:]), recipe.model)


# Measuring


class Clock:
    """Time and memory on one kind of device."""

    def __init__(self, device: str) -> None:
        self.gpu = device == "cuda"

    def seconds(self) -> float:
        if self.gpu:
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def height(self) -> float:
        """The highest memory so far, in bytes."""
        if self.gpu:
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def forget(self) -> float:
        """Count the highest memory of the GPU afresh, from what is held now."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return self.height()


def measure(kind: str, length: int, device: str) -> dict[str, Any]:
    """Seconds and bytes of one pattern at one length, forward alone and with backward."""
    clock = Clock(device)
    small, given = (inputs(size, device) for size in (BLOCK * 4, length))
    if "Flex" not in kind:  # libraries load their parts; a compiled kernel is made for one length
        work(KINDS[kind](small), small)
    call = KINDS[kind](given)
    result: dict[str, Any] = {"kind": kind, "length": length}
    before = clock.height()
    for name, task in (("forward", partial(only, call)), ("both", partial(work, call, given))):
        if "Flex" in kind:
            task()  # compiles
        if clock.gpu:  # only there can the highest memory be counted afresh
            before = clock.forget()
        start = clock.seconds()
        task()
        first = clock.seconds() - start
        memory = clock.height() - before
        times = list(repeat(task, clock, first))
        result[f"{name}_seconds"] = round(median(times), 6)
        result[f"{name}_megabytes"] = round(memory / 2**20, 1)
    return result


def repeat(task: Callable[[], None], clock: Clock, first: float) -> Iterator[float]:
    """The times of some more calls: at least 2, at most 20, a second or two in all if that is enough."""
    if first > 1:  # too long for its beginning to weigh
        yield first
    for _ in range(max(2, min(20, int(1.5 / first)))):
        start = clock.seconds()
        task()
        yield clock.seconds() - start


def only(call: Call) -> None:
    with torch.no_grad():
        call()


def work(call: Call, given: Inputs) -> None:
    for part in given.leaves:
        part.requires_grad_().grad = None
    call().sum().backward()


def in_a_process(kind: str, length: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--point", kind, str(length)]
    found = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, **KEEP}
    )
    result: dict[str, Any] = json.loads(found.stdout)
    return result


def points(device: str, kind: str, lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One kind at each length, as far as memory and patience go."""
    size = 4 if device == "cpu" else 2
    for length in lengths:
        if kind == "full, not fused" and 5 * HEADS * length**2 * size > ROOM[device]:
            return
        try:
            gpu = device == "cuda"
            at = measure(kind, length, device) if gpu else in_a_process(kind, length)
        except Exception as error:  # one kind that fails must not take the others with it
            print(f"{kind} at {length}: {type(error).__name__}: {error}", file=sys.stderr)
            return
        print(at, flush=True)
        yield at
        if at["both_seconds"] > PATIENCE[device]:
            return


def exponent(found: Sequence[dict[str, Any]], key: str) -> float | None:
    """The slope of log time over log T, over the larger half of the T."""
    half = sorted(found, key=lambda at: at["length"])[len(found) // 2 :]
    if len(half) < 2:
        return None
    x = [math.log(at["length"]) for at in half]
    y = [math.log(max(0.1, at[key]) if "bytes" in key else at[key]) for at in half]
    middle = sum(x) / len(x)
    slope = sum((a - middle) * b for a, b in zip(x, y, strict=True))
    return round(slope / sum((a - middle) ** 2 for a in x), 3)


def exponents(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    kinds = {at["kind"]: [other for other in found if other["kind"] == at["kind"]] for at in found}
    keys = ("forward_seconds", "both_seconds", "both_megabytes")
    return {kind: {key: exponent(at, key) for key in keys} for kind, at in kinds.items()}


# The picture

PANEL, LEFT, TOP, GAP = (330, 240), 70, 40, 90


def picture(results: dict[str, Any]) -> str:
    """Time and memory over T, both axes logarithmic; a row for each device."""
    width = LEFT + 2 * PANEL[0] + GAP + 30
    height = len(results) * (PANEL[1] + 80) + TOP + 20 * math.ceil(len(KINDS) / 4)
    parts = [f'<rect width="{width}" height="{height}" fill="white"/>', legend(results)]
    for row, (device, result) in enumerate(results.items()):
        y = TOP + 20 * math.ceil(len(KINDS) / 4) + row * (PANEL[1] + 80)
        for column, (key, unit) in enumerate(
            (("both_seconds", "seconds"), ("both_megabytes", "megabytes"))
        ):
            title = f"{unit}, forward and backward · {device}"
            shift = f"translate({LEFT + column * (PANEL[0] + GAP)} {y})"
            parts.append(f'<g transform="{shift}">{panel(result["points"], key, title)}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def pen(kind: str) -> str:
    """A pattern has one colour, a way to compute it one kind of line."""
    pattern, _, way = kind.partition(", ")
    return (
        f'fill="none" stroke="{COLOURS[pattern]}" stroke-width="2" stroke-dasharray="{DASHES[way]}"'
    )


def legend(results: dict[str, Any]) -> str:
    used = [
        kind
        for kind in KINDS
        if any(at["kind"] == kind for result in results.values() for at in result["points"])
    ]
    words = []
    for n, kind in enumerate(used):
        x, y = LEFT + n % 4 * 185, 20 + n // 4 * 20
        words.append(f'<path d="M{x} {y - 4}h28" {pen(kind)}/>')
        words.append(f'<text x="{x + 34}" y="{y}">{kind}</text>')
    return "".join(words)


def panel(found: Sequence[dict[str, Any]], key: str, title: str) -> str:
    found = [at for at in found if at[key] > 0]
    low, high = (math.log10(edge(at[key] for at in found)) for edge in (min, max))
    low, high = math.floor(low), math.ceil(high)
    first, last = (math.log2(edge(at["length"] for at in found)) for edge in (min, max))

    def place(length: float, value: float) -> tuple[float, float]:
        x = (math.log2(length) - first) / max(1e-9, last - first)
        y = (math.log10(value) - low) / (high - low)
        return round(x * PANEL[0], 1), round((1 - y) * PANEL[1], 1)

    parts = [f'<text x="0" y="-8" font-weight="bold">{title}</text>']
    for power in range(low, high + 1):
        _, y = place(2**first, 10.0**power)
        parts.append(f'<path d="M0 {y}H{PANEL[0]}" stroke="#ddd"/>')
        parts.append(f'<text x="-6" y="{y + 4}" text-anchor="end">{10.0**power:g}</text>')
    for power in range(round(first), round(last) + 1):
        x, _ = place(2**power, 10.0**low)
        parts.append(f'<path d="M{x} {PANEL[1]}v4" stroke="#000"/>')
        label = f"{2**power // 1024}k"
        parts.append(f'<text x="{x}" y="{PANEL[1] + 18}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{PANEL[0] / 2}" y="{PANEL[1] + 36}" text-anchor="middle">T</text>')
    for kind in dict.fromkeys(at["kind"] for at in found):
        colour = COLOURS[kind.partition(",")[0]]
        line = [place(at["length"], at[key]) for at in found if at["kind"] == kind]
        path = " ".join(f"{x},{y}" for x, y in line)
        parts.append(f'<polyline points="{path}" {pen(kind)}/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in line]
    return "".join(parts)


# The command


def main() -> None:
    here = Path(__file__).resolve()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, metavar="KIND")
    parser.add_argument("--shortest", type=int, default=ALL[0])
    parser.add_argument("--longest", type=int, default=ALL[-1])
    parser.add_argument("--json", type=Path, default=here.with_suffix(".json"))
    parser.add_argument("--plot", type=Path, default=here.parents[1] / "docs/images/long.svg")
    parser.add_argument("--only-plot", action="store_true", help="draw what the JSON file holds")
    parser.add_argument("--point", nargs=2, metavar=("KIND", "T"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.point:
        torch.set_num_threads(1)
        print(json.dumps(measure(asked.point[0], int(asked.point[1]), "cpu")))
        return
    results: dict[str, Any] = json.loads(asked.json.read_text()) if asked.json.exists() else {}
    if not asked.only_plot:
        kinds = asked.kinds or [n for n in KINDS if asked.device == "cuda" or n not in ON_GPU]
        lengths = [length for length in ALL if asked.shortest <= length <= asked.longest]
        if not lengths:
            parser.error(f"no length from {asked.shortest} to {asked.longest} among {ALL}")
        for kind in kinds:  # written down after each, so that an end in between loses little
            found = list(points(asked.device, kind, lengths))
            results[asked.device] = with_new(results.get(asked.device), asked.device, kind, found)
            asked.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    asked.plot.write_text(picture(results), encoding="utf-8")
    for device, result in results.items():
        for kind, slopes in result["exponents"].items():
            print(device, kind, slopes)


def with_new(
    old: dict[str, Any] | None, device: str, kind: str, found: list[dict[str, Any]]
) -> dict[str, Any]:
    """The results of one device with those of a kind put in place of its old ones."""
    every = [at for at in (old or {"points": []})["points"] if at["kind"] != kind] + found
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "one thread",
        "torch": torch.__version__,
        "exponents": exponents(every),
        "points": every,
    }


if __name__ == "__main__":
    main()
