"""The commands of ``regard bench``, which compare speed with other libraries, and ``regard selftest``."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, get_args

import typer

from regard.cli.options import AsJson, Group
from regard.errors import RegardError

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Measure the speed of translation or training, and compare it with other libraries.",
)


@app.command()
def translate(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN", help="Run folder of a model (default: a preset with random weights)."
        ),
    ] = None,
    preset: Annotated[
        str, typer.Option(metavar="NAME", help="Without RUN: size of the random model.")
    ] = "base",
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Library to compare with: ctranslate2 or marian; repeatable (default: none).",
        ),
    ] = None,
    beam: Annotated[
        int, typer.Option(metavar="N", min=1, help="Beam size; 1 is greedy search.")
    ] = 5,
    batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of sentences to translate.")
    ] = 32,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Precision: auto, fp32, bf16 or int8; repeatable. Other libraries use the last one "
            "(default: auto).",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Number of CPU threads (default: the number of cores)."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="Device to run on: cpu, cuda or auto.")
    ] = "cpu",
    repeats: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of repetitions; the median is reported.")
    ] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure how many sentences are translated per second, and how often the translations agree.

    Other libraries translate the same sentences with the same weights.
    """
    try:
        from regard.bench.translate import (
            TranslateSetting,
            measure,
            preset_workload,
            run_workload,
            table,
        )
    except ModuleNotFoundError as error:
        raise RegardError(f"bench needs {error.name}: pip install 'regard[interop]'") from None
    from regard.inference.device import choose_device
    from regard.inference.worker_pool import available_cores
    from regard.recipe import PRESETS, Device, Precision, parse_choice

    size = parse_choice(PRESETS, preset, "--preset")
    device_name = parse_choice(get_args(Device), device, "--device")
    choose_device(device_name)
    precisions = [
        parse_choice(get_args(Precision), name, "--precision") for name in precision or ["auto"]
    ]
    count = threads or available_cores()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        workload = (
            preset_workload(folder / "run", size, batch)
            if run is None
            else run_workload(run, batch)
        )
        settings = [
            TranslateSetting(workload, choice, beam, count, device_name) for choice in precisions
        ]
        rows = measure(settings, peer or [], folder, repeats)
    load = os.getloadavg()[0]
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "load": load}, indent=2))
        return
    name = str(run) if run else f"random {preset}, 20 tokens in and out"
    print(f"{name}; {batch} sentences, beam {beam}, {count} threads, load {load:.1f}")
    for line in table(rows):
        print(line)


@app.command()
def train(
    preset: Annotated[str, typer.Option(metavar="NAME", help="Size of the model.")] = "base",
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Library to compare with: marian or torch; repeatable (default: none).",
        ),
    ] = None,
    sentences: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Sentence pairs per batch (default: 768 on a GPU, 32 on a CPU).",
        ),
    ] = None,
    length: Annotated[
        int,
        typer.Option(metavar="N", min=2, help="Number of tokens in each sentence, on both sides."),
    ] = 32,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=10, help="Vocabulary size (default: 32,768 on a GPU, 8,000 on a CPU)."
        ),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Use the training data of this run, with its sentence lengths (default: random sentences).",
        ),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Precision: fp32 or bf16; repeatable (default: bf16 on a GPU; on a CPU fp32, and bf16 if the CPU "
            "has instructions for it).",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="Device to run on: cpu, cuda or auto.")
    ] = "auto",
    repeats: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of repetitions; the median is reported.")
    ] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure a training step: target tokens per second, memory, and fraction of the peak speed."""
    from regard.bench import train as bench
    from regard.data.token_dataset import TokenDataset
    from regard.inference.device import choose_device
    from regard.recipe import PRESETS, Device, parse_choice
    from regard.storage.run_dir import RunDir

    size = parse_choice(PRESETS, preset, "--preset")
    torch_device = choose_device(parse_choice(get_args(Device), device, "--device"))
    gpu = torch_device.type == "cuda"
    count = sentences or (768 if gpu else 32)
    vocab_size = vocabulary or (32_768 if gpu else 8_000)
    peers = [parse_choice(bench.PEERS, name, "--peer") for name in peer or []]
    precisions = [
        parse_choice(get_args(bench.TrainPrecision), name, "--precision")
        for name in precision or []
    ]
    with tempfile.TemporaryDirectory() as temporary:
        if lengths is None:
            dataset = bench.random_dataset(Path(temporary) / "texts", count, length, vocab_size)
        else:
            tokenizer = RunDir(lengths).tokenizer(RunDir(lengths).recipe())
            vocab_size = max(vocab_size, tokenizer.source.size, tokenizer.target.size)
            dataset = TokenDataset(RunDir(lengths).data / "train.arrow")
        setting = bench.TrainSetting(size, vocab_size, dataset, count * length, torch_device)
        rows = bench.measure(setting, peers, 10 if gpu else 3, repeats, precisions)
    load = os.getloadavg()[0]
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "load": load}, indent=2))
        return
    texts = f"texts of {lengths}" if lengths else f"{count} sentences of {length} tokens"
    print(
        f"{preset}, {vocab_size:,} vocabulary entries, {texts}, on {torch_device}; load {load:.1f}"
    )
    for line in bench.table(rows):
        print(line)


def selftest(
    device: Annotated[
        str, typer.Option(metavar="NAME", help="Device to test: cpu, cuda or auto.")
    ] = "auto",
) -> None:
    """Check that the fast paths give correct results on this machine, and that training works.

    Kernels, packed batches, CUDA graphs and lower precisions are compared with reference implementations. Each check
    prints one line: ok, failed or skipped. The exit status is 1 if a check failed.
    """
    import torch

    from regard.bench.selftest import run_checks
    from regard.inference.device import choose_device
    from regard.recipe import Device, parse_choice
    from regard.training.model_card import hardware

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
