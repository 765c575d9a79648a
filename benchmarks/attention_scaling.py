"""Attention over long texts: time and peak memory of every pattern from 1k to 64k tokens, with fitted exponents.

    python benchmarks/attention_scaling.py    # writes attention_scaling.json and docs/images/attention_scaling.svg
    python benchmarks/attention_scaling.py --longest 8192 --kinds window bigbird    # keeps the figures of other kinds
    python benchmarks/attention_scaling.py --device cuda --json "$OUT/scaling.json" --plot "$OUT/scaling.svg"

Only attention is measured, from queries, keys and values to the outputs of the heads: the projections are the same for
every pattern. Sizes are those of the paper's base model: 8 heads of 64, one text.

On a CPU each point is a fresh process with one thread that keeps the memory it frees. Time is CPU time, so other load
on the machine changes it little; memory is the growth of the peak resident memory. On a GPU values are bfloat16 and
memory is PyTorch's own count. The exponent is the slope of log time over log T, by least squares over the larger half
of the lengths.
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
from reporting import growth_exponent
from torch import Tensor
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from regard.nn.attention import Attention
from regard.nn.attention_mask import AttentionMask
from regard.nn.attention_patterns import PATTERNS, BigBird, SlidingWindow
from regard.nn.kv_cache import KeyValue
from regard.nn.positions import AttentionPosition
from regard.recipe import ModelConfig, make_recipe

HEADS, D_MODEL = 8, 512
WINDOW = BLOCK = 64
FLEX_BLOCK = 128
"""block size of FlexAttention, the smallest that its backward pass supports"""
LENGTHS = [1024 * 2**n for n in range(7)]
MAX_BYTES = {"cpu": 4e9, "cuda": 80e9}
"""limit for the matrices of unfused attention"""
MAX_SECONDS = {"cpu": 12.0, "cuda": 2.0}
"""after a call that takes longer, longer texts are skipped"""

MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "1000000000000",
}
"""for glibc: keep freed memory, because otherwise large sizes would include the time to clear new pages"""

Call = Callable[[], Tensor]


class HeadInputs(NamedTuple):
    query: Tensor
    kv: KeyValue
    section: ModelConfig

    @property
    def leaves(self) -> list[Tensor]:
        return [self.query, *self.kv]


# ---------------------------------------------------------------------------------------------
# Kinds of attention


def regard_pattern(name: str, given: HeadInputs) -> Call:
    """A pattern of recipes, with fused kernels."""
    pattern = PATTERNS[name](given.section, "encoder").to(given.query)
    attend = Attention(given.section, AttentionPosition(given.section)).eval()
    return lambda: pattern(attend, given.query, pattern.project_kv(given.kv, None), AttentionMask())


def without_fusion(given: HeadInputs) -> Call:
    """Full attention with explicit matrices."""
    fused = regard_pattern("full", given)

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return fused()

    return call


def gathered(given: HeadInputs) -> Call:
    """Window attention as on devices without a kernel for it."""
    pattern = SlidingWindow(given.section, "encoder").to(given.query)
    attend = Attention(given.section, AttentionPosition(given.section)).eval()
    return lambda: pattern.blockwise_attention(attend, given.query, given.kv, AttentionMask())


def flex_window(given: HeadInputs) -> Call:
    blocks = torch.arange(given.query.shape[2] // FLEX_BLOCK, device=given.query.device)
    near = (blocks - blocks[:, None]).abs() <= math.ceil(WINDOW / FLEX_BLOCK)
    return flex(given, near, lambda _b, _h, i, j: (i - j).abs() <= WINDOW)


def flex_bigbird(given: HeadInputs) -> Call:
    pattern = BigBird(given.section, "encoder")
    length = given.query.shape[2]
    chosen = pattern.visible_blocks(
        torch.ones(1, length, dtype=torch.bool, device=given.query.device)
    )[0]
    blocks = torch.arange(len(chosen), device=chosen.device)
    attended = (chosen[..., None] == blocks).any(1) | (blocks < pattern.global_blocks)[:, None]
    larger, ratio = len(attended) * BLOCK // FLEX_BLOCK, FLEX_BLOCK // BLOCK
    merged = attended.view(larger, ratio, larger, ratio).any(3).any(1)
    return flex(given, merged, lambda _b, _h, i, j: attended[i // BLOCK, j // BLOCK])


def flex(given: HeadInputs, attended: Tensor, mask_mod: Callable[..., Tensor]) -> Call:
    """PyTorch's FlexAttention over the attended blocks; mask_mod selects pairs of positions inside a block."""
    order = attended.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    some = attended.sum(1).to(torch.int32), order
    mask = flex_attention.BlockMask.from_kv_blocks(
        *(one[None, None] for one in some), BLOCK_SIZE=FLEX_BLOCK, mask_mod=mask_mod
    )
    torch._dynamo.reset()  # because of the limit of recompilations
    compiled = torch.compile(flex_attention.flex_attention, dynamic=False)
    return lambda: compiled(given.query, *given.kv, block_mask=mask)


KINDS: dict[str, Callable[[HeadInputs], Call]] = {
    "full": partial(regard_pattern, "full"),
    "window": partial(regard_pattern, "window"),
    "linformer": partial(regard_pattern, "linformer"),
    "bigbird": partial(regard_pattern, "bigbird"),
    "full, not fused": without_fusion,
    "window, gathered": gathered,
    "window, FlexAttention": flex_window,
    "bigbird, FlexAttention": flex_bigbird,
}
ON_GPU = ("window, gathered", "window, FlexAttention", "bigbird, FlexAttention")
"""kinds that are measured on a GPU only"""
COLOURS = {"full": "#000000", "window": "#0072b2", "linformer": "#009e73", "bigbird": "#cc79a7"}
DASHES = {"": "none", "not fused": "7 3", "gathered": "7 3", "FlexAttention": "2 3"}
"""line style, by the second part of a kind's name"""


def head_inputs(length: int, device: str) -> HeadInputs:
    values = {"d_model": D_MODEL, "heads": HEADS, "dropout": 0.0}
    section = make_recipe({"data": {"train": {"pairs": "x"}}, "model": values}, "benchmark").model
    # Set here because a recipe refuses options that its own pattern does not use.
    sizes = {"window_size": WINDOW, "block_size": BLOCK}
    attention = section.attention.model_copy(update=sizes)
    section = section.model_copy(update={"max_length": length, "attention": attention})
    torch.manual_seed(1)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tensors = [
        torch.randn(1, HEADS, length, D_MODEL // HEADS, device=device, dtype=dtype)
        for _ in range(3)
    ]
    return HeadInputs(tensors[0], KeyValue(*tensors[1:]), section)


# ---------------------------------------------------------------------------------------------
# Measurement


class Meter:
    """Time and peak memory on one device."""

    def __init__(self, device: str) -> None:
        self.gpu = device == "cuda"

    def seconds(self) -> float:
        if self.gpu:
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def peak_bytes(self) -> float:
        """Peak memory so far."""
        if self.gpu:
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def reset_peak(self) -> float:
        """Reset the peak memory of the GPU to the memory in use now."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return self.peak_bytes()


def measure(kind: str, length: int, device: str) -> dict[str, Any]:
    """Seconds and bytes of one kind at one length, forward and forward + backward."""
    meter = Meter(device)
    small, given = (head_inputs(size, device) for size in (BLOCK * 4, length))
    if "Flex" not in kind:  # warm-up; a compiled kernel works for one length only
        forward_backward(KINDS[kind](small), small)
    call = KINDS[kind](given)
    result: dict[str, Any] = {"kind": kind, "length": length}
    before = meter.peak_bytes()
    for name, task in (
        ("forward", partial(forward, call)),
        ("both", partial(forward_backward, call, given)),
    ):
        if "Flex" in kind:
            task()  # compiles
        if meter.gpu:  # only there can the peak be reset
            before = meter.reset_peak()
        start = meter.seconds()
        task()
        first = meter.seconds() - start
        memory = meter.peak_bytes() - before
        times = list(repeat(task, meter, first))
        result[f"{name}_seconds"] = round(median(times), 6)
        result[f"{name}_megabytes"] = round(memory / 2**20, 1)
    return result


def repeat(task: Callable[[], None], meter: Meter, first: float) -> Iterator[float]:
    """The times of further calls: 2 to 20, about 1.5 seconds in total."""
    if first > 1:  # long enough for the start-up not to matter
        yield first
    for _ in range(max(2, min(20, int(1.5 / first)))):
        start = meter.seconds()
        task()
        yield meter.seconds() - start


def forward(call: Call) -> None:
    with torch.no_grad():
        call()


def forward_backward(call: Call, given: HeadInputs) -> None:
    for leaf in given.leaves:
        leaf.requires_grad_().grad = None
    call().sum().backward()


def measure_in_process(kind: str, length: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--point", kind, str(length)]
    found = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, **MALLOC}
    )
    result: dict[str, Any] = json.loads(found.stdout)
    return result


def points(device: str, kind: str, lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One kind at each length, up to the limits of memory and time."""
    size = 4 if device == "cpu" else 2
    for length in lengths:
        if kind == "full, not fused" and 5 * HEADS * length**2 * size > MAX_BYTES[device]:
            return
        try:
            gpu = device == "cuda"
            point = measure(kind, length, device) if gpu else measure_in_process(kind, length)
        except Exception as error:  # the other kinds are still measured
            print(f"{kind} at {length}: {type(error).__name__}: {error}", file=sys.stderr)
            return
        print(point, flush=True)
        yield point
        if point["both_seconds"] > MAX_SECONDS[device]:
            return


def exponent(found: Sequence[dict[str, Any]], key: str) -> float | None:
    """The growth exponent of a figure over the larger half of the lengths."""
    half = sorted(found, key=lambda point: point["length"])[len(found) // 2 :]
    if len(half) < 2:
        return None
    values = [max(0.1, point[key]) if "bytes" in key else point[key] for point in half]
    return round(growth_exponent([point["length"] for point in half], values), 3)


def exponents(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    kinds = {
        point["kind"]: [other for other in found if other["kind"] == point["kind"]]
        for point in found
    }
    keys = ("forward_seconds", "both_seconds", "both_megabytes")
    return {kind: {key: exponent(some, key) for key in keys} for kind, some in kinds.items()}


# ---------------------------------------------------------------------------------------------
# The plot

PANEL, LEFT, TOP, GAP = (330, 240), 70, 40, 90


def plot(results: dict[str, Any]) -> str:
    """An SVG of time and memory over T, both axes logarithmic; a row for each device."""
    width = LEFT + 2 * PANEL[0] + GAP + 30
    height = len(results) * (PANEL[1] + 80) + TOP + 20 * math.ceil(len(KINDS) / 4)
    shapes = [f'<rect width="{width}" height="{height}" fill="white"/>', legend(results)]
    for row, (device, result) in enumerate(results.items()):
        y = TOP + 20 * math.ceil(len(KINDS) / 4) + row * (PANEL[1] + 80)
        for column, (key, unit) in enumerate(
            (("both_seconds", "seconds"), ("both_megabytes", "megabytes"))
        ):
            title = f"{unit}, forward and backward · {device}"
            shift = f"translate({LEFT + column * (PANEL[0] + GAP)} {y})"
            shapes.append(f'<g transform="{shift}">{panel(result["points"], key, title)}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def line_style(kind: str) -> str:
    """A colour for the pattern, dashes for the implementation."""
    pattern, _, implementation = kind.partition(", ")
    return f'fill="none" stroke="{COLOURS[pattern]}" stroke-width="2" stroke-dasharray="{DASHES[implementation]}"'


def legend(results: dict[str, Any]) -> str:
    used = [
        kind
        for kind in KINDS
        if any(point["kind"] == kind for result in results.values() for point in result["points"])
    ]
    shapes = []
    for n, kind in enumerate(used):
        x, y = LEFT + n % 4 * 185, 20 + n // 4 * 20
        shapes.append(f'<path d="M{x} {y - 4}h28" {line_style(kind)}/>')
        shapes.append(f'<text x="{x + 34}" y="{y}">{kind}</text>')
    return "".join(shapes)


def panel(found: Sequence[dict[str, Any]], key: str, title: str) -> str:
    found = [point for point in found if point[key] > 0]
    low, high = (math.log10(edge(point[key] for point in found)) for edge in (min, max))
    low, high = math.floor(low), math.ceil(high)
    first, last = (math.log2(edge(point["length"] for point in found)) for edge in (min, max))

    def position(length: float, value: float) -> tuple[float, float]:
        x = (math.log2(length) - first) / max(1e-9, last - first)
        y = (math.log10(value) - low) / (high - low)
        return round(x * PANEL[0], 1), round((1 - y) * PANEL[1], 1)

    shapes = [f'<text x="0" y="-8" font-weight="bold">{title}</text>']
    for power in range(low, high + 1):
        _, y = position(2**first, 10.0**power)
        shapes.append(f'<path d="M0 {y}H{PANEL[0]}" stroke="#ddd"/>')
        shapes.append(f'<text x="-6" y="{y + 4}" text-anchor="end">{10.0**power:g}</text>')
    for power in range(round(first), round(last) + 1):
        x, _ = position(2**power, 10.0**low)
        shapes.append(f'<path d="M{x} {PANEL[1]}v4" stroke="#000"/>')
        label = f"{2**power // 1024}k"
        shapes.append(f'<text x="{x}" y="{PANEL[1] + 18}" text-anchor="middle">{label}</text>')
    shapes.append(f'<text x="{PANEL[0] / 2}" y="{PANEL[1] + 36}" text-anchor="middle">T</text>')
    for kind in dict.fromkeys(point["kind"] for point in found):
        colour = COLOURS[kind.partition(",")[0]]
        line = [position(point["length"], point[key]) for point in found if point["kind"] == kind]
        path = " ".join(f"{x},{y}" for x, y in line)
        shapes.append(f'<polyline points="{path}" {line_style(kind)}/>')
        shapes += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in line]
    return "".join(shapes)


# ---------------------------------------------------------------------------------------------
# The command


def main() -> None:
    here = Path(__file__).resolve()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, metavar="KIND")
    parser.add_argument("--shortest", type=int, default=LENGTHS[0])
    parser.add_argument("--longest", type=int, default=LENGTHS[-1])
    parser.add_argument("--json", type=Path, default=here.with_suffix(".json"))
    parser.add_argument(
        "--plot", type=Path, default=here.parents[1] / "docs/images/attention_scaling.svg"
    )
    parser.add_argument("--only-plot", action="store_true", help="only plot the JSON file")
    parser.add_argument("--point", nargs=2, metavar=("KIND", "T"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point:
        torch.set_num_threads(1)
        print(json.dumps(measure(given.point[0], int(given.point[1]), "cpu")))
        return
    results: dict[str, Any] = json.loads(given.json.read_text()) if given.json.exists() else {}
    if not given.only_plot:
        kinds = given.kinds or [n for n in KINDS if given.device == "cuda" or n not in ON_GPU]
        lengths = [length for length in LENGTHS if given.shortest <= length <= given.longest]
        if not lengths:
            parser.error(f"no length from {given.shortest} to {given.longest} among {LENGTHS}")
        for kind in kinds:  # written after each, so that an interruption loses little
            found = list(points(given.device, kind, lengths))
            results[given.device] = replace_kind(
                results.get(given.device), given.device, kind, found
            )
            given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    given.plot.write_text(plot(results), encoding="utf-8")
    for device, result in results.items():
        for kind, slopes in result["exponents"].items():
            print(device, kind, slopes)


def replace_kind(
    old: dict[str, Any] | None, device: str, kind: str, found: list[dict[str, Any]]
) -> dict[str, Any]:
    """The results of one device with the points of one kind replaced."""
    every = [point for point in (old or {"points": []})["points"] if point["kind"] != kind] + found
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "one thread",
        "torch": torch.__version__,
        "exponents": exponents(every),
        "points": every,
    }


if __name__ == "__main__":
    main()
