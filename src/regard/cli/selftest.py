"""The command selftest: check the fast paths on this machine."""

from __future__ import annotations

import time
from collections import Counter
from typing import Annotated, get_args

import typer


def selftest(
    device: Annotated[
        str, typer.Option(metavar="NAME", help="Device to test: cpu, cuda or auto.")
    ] = "auto",
) -> None:
    """Check on this machine that fast paths give the right results and that training learns.

    Kernels, packed batches, CUDA graphs and lower precisions are compared with plain float computations. Each check is
    one line: ok, failed or skipped. The exit status is 1 if a check failed.
    """
    import torch

    from regard.bench.selftest import run_checks
    from regard.inference.precision import choose_device
    from regard.recipe import Device, parse_choice
    from regard.training.run import hardware

    torch_device = choose_device(parse_choice(get_args(Device), device, "--device"))
    print(f"{hardware(torch_device)}, torch {torch.__version__}", flush=True)
    start, counts = time.monotonic(), Counter[str]()
    for result in run_checks(torch_device):
        print(result, flush=True)
        counts[result.status] += 1
    summary = ", ".join(f"{counts[status]} {status}" for status in ("ok", "failed", "skipped"))
    print(f"{summary}, in {time.monotonic() - start:.0f} s")
    if counts["failed"]:
        raise typer.Exit(1)
