"""The commands of ``regard bench``."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, get_args

import typer

from regard.errors import RegardError

app = typer.Typer(
    no_args_is_help=True, help="MetricName how fast it is, beside others, in one run."
)


@app.command()
def translate(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="A run folder (default: random weights of a preset)."),
    ] = None,
    preset: Annotated[str, typer.Option(help="Sizes of the random model.")] = "base",
    peer: Annotated[
        list[str] | None, typer.Option(help="ctranslate2 or marian; may be given twice.")
    ] = None,
    beam: Annotated[int, typer.Option(min=1, help="Beam size; 1 is greedy.")] = 5,
    batch: Annotated[int, typer.Option(min=1, help="Sentences given at once.")] = 32,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="auto, fp32, bf16, int8; may be given several times. Peers take the last."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Default: all available_cores.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    repeats: Annotated[int, typer.Option(min=1, help="Turns; the median counts.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Sentences a second, beside other engines with the same weights, and whether they say the same."""
    try:
        from regard.bench.subject import of_preset, of_run
        from regard.bench.translate import Setting, measure, table
    except ModuleNotFoundError as error:
        raise RegardError(f"bench needs {error.name}: pip install 'regard[exchange]'") from None
    from regard.inference.worker_pool import available_cores
    from regard.recipe import PRESETS, Device, Precision, parse_choice

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if run is None:
            subject = of_preset(folder / "run", parse_choice(PRESETS, preset, "--preset"), batch)
        else:
            subject = of_run(run, batch)
        count = threads or available_cores()
        place = parse_choice(get_args(Device), device, "--device")
        asked = [
            parse_choice(get_args(Precision), one, "--precision") for one in precision or ["auto"]
        ]
        settings = [Setting(subject, one, beam, count, place) for one in asked]
        rows = measure(settings, peer or [], folder, repeats)
    load = os.getloadavg()[0]
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "load": load}, indent=2))
        return
    what = str(run) if run else f"random {preset}, 20 tokens in and out"
    print(f"{what}; {batch} sentences, beam {beam}, {count} threads, load {load:.1f}")
    for line in table(rows):
        print(line)


@app.command()
def train(
    preset: Annotated[str, typer.Option(help="Sizes of the model.")] = "base",
    peer: Annotated[
        list[str] | None, typer.Option(help="marian or torch; may be given twice.")
    ] = None,
    sentences: Annotated[
        int | None, typer.Option(min=1, help="In a batch (default: 768 on a GPU, 32 on a CPU).")
    ] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each, on both sides.")] = 32,
    vocabulary: Annotated[
        int | None, typer.Option(min=10, help="Entries (default: 32,768 on a GPU, 8,000 on a CPU).")
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="The texts of this run, as long as they are, instead."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Turns; the median counts.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Target tokens a second of one training step, beside others, with memory and share of the peak."""
    from regard.bench import train as bench
    from regard.data.dataset import TokenDataset
    from regard.inference.precision import choose_device
    from regard.recipe import PRESETS, Device, parse_choice
    from regard.storage.run_dir import RunDir

    place = choose_device(parse_choice(get_args(Device), device, "--device"))
    gpu = place.type == "cuda"
    count = sentences or (768 if gpu else 32)
    words = vocabulary or (32_768 if gpu else 8_000)
    peers = [parse_choice(bench.PEERS, name, "--peer") for name in peer or []]
    with tempfile.TemporaryDirectory() as made:
        if lengths is None:
            store = bench.random_dataset(Path(made) / "texts", count, length, words)
        else:
            tokenizer = RunDir(lengths).tokenizer(RunDir(lengths).recipe())
            words = max(words, tokenizer.source.size, tokenizer.target.size)
            store = TokenDataset(RunDir(lengths).data / "train.arrow")
        size = parse_choice(PRESETS, preset, "--preset")
        setting = bench.Setting(size, words, store, count * length, place)
        rows = bench.measure(setting, peers, 10 if gpu else 3, repeats)
    if as_json:
        print(
            json.dumps(
                {"rows": [asdict(row) for row in rows], "load": os.getloadavg()[0]}, indent=2
            )
        )
        return
    what = f"texts of {lengths}" if lengths else f"{count} sentences of {length} tokens"
    print(f"{preset}, {words:,} entries, {what}, on {place}; load {os.getloadavg()[0]:.1f}")
    for line in bench.table(rows):
        print(line)
