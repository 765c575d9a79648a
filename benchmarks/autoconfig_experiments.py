"""The experiments behind the rules of ``training/autoconfig.py``: models and regularization at equal training time.

    python benchmarks/autoconfig_experiments.py --speeds                 # tokens per second of each setting
    python benchmarks/autoconfig_experiments.py --jobs 8                 # the same command resumes
    python benchmarks/autoconfig_experiments.py --only ibo-40 --list     # what would be run

An experiment trains one recipe on one corpus for a fixed number of steps and scores the test set once. Steps are chosen
so that the recipes of a group take the same time: seconds on a GPU that runs nothing else, by the measured speeds, or
the time in which a CPU trains the preset tiny on so many tokens. Two AMD cores process 20 million tokens in 15 minutes.
Because steps are fixed, many experiments can share a GPU. Results are added to autoconfig_experiments.json.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from autoconfig import data_files, hand_recipe, write_data

RESULTS = Path(__file__).with_suffix(".json")


class Setting(NamedTuple):
    """A model, its regularization and batch, and how fast it trains."""

    model: dict[str, Any]
    dropout: float
    rdrop: float
    learning_rate: float
    tokens_per_batch: int
    vocab_size: int = 4_000
    cpu_cost: float = 0.0
    """time per token on a CPU relative to the preset tiny"""
    training: dict[str, Any] | None = None
    """further keys of the section"""
    data: dict[str, Any] | None = None
    """further keys of the section"""


WIDE = {"preset": "base", "encoder_layers": 3, "decoder_layers": 3}
DEEP = {"preset": "base", "d_ff": 1024}
SHALLOW = {"preset": "small", "encoder_layers": 3, "decoder_layers": 3}
SMALL, TINY = {"preset": "small"}, {"preset": "tiny"}
MEDIUM = {"preset": "tiny", "d_model": 192, "heads": 6, "d_ff": 768}

MUON = {"optimizer": "muon"}
BOTH = {"bidirectional": True}

SETTINGS = {
    "wide-r2": Setting(WIDE, 0.3, 2.0, 0.001, 4_096),
    "wide-r5": Setting(WIDE, 0.3, 5.0, 0.001, 4_096),
    "wide-d3": Setting(WIDE, 0.3, 0.0, 0.001, 4_096),
    "wide-d1": Setting(WIDE, 0.1, 0.0, 0.001, 4_096),
    "deep-r2": Setting(DEEP, 0.3, 2.0, 0.001, 4_096),
    "deep-r5": Setting(DEEP, 0.3, 5.0, 0.001, 4_096),
    "wide-r5-s3": Setting(WIDE, 0.3, 5.0, 0.001, 4_096, training={"subword_sampling": 0.3}),
    "wide-r2-both": Setting(WIDE, 0.3, 2.0, 0.001, 4_096, data=BOTH),
    "wide-r5-both": Setting(WIDE, 0.3, 5.0, 0.001, 4_096, data=BOTH),
    "wide-r5-s3-both": Setting(
        WIDE, 0.3, 5.0, 0.001, 4_096, training={"subword_sampling": 0.3}, data=BOTH
    ),
    "tiny-d2-both": Setting(TINY, 0.2, 0.0, 0.010, 4_096, cpu_cost=0.95, training=MUON, data=BOTH),
    "medium-r2-both": Setting(
        MEDIUM, 0.2, 2.0, 0.010, 4_096, cpu_cost=4.4, training=MUON, data=BOTH
    ),
    "small-d1": Setting(SMALL, 0.1, 0.0, 0.002, 4_096),
    "small-r5": Setting(SMALL, 0.3, 5.0, 0.002, 8_192, 8_000),
    "tiny": Setting(TINY, 0.1, 0.0, 0.003, 2_048, cpu_cost=1.0),
    "shallow": Setting(SHALLOW, 0.1, 0.0, 0.002, 2_048, cpu_cost=2.4),
    "shallow-r2": Setting(SHALLOW, 0.3, 2.0, 0.002, 1_024, cpu_cost=4.6),
    "small": Setting(SMALL, 0.1, 0.0, 0.002, 1_024, cpu_cost=4.6),
    "wide": Setting(WIDE, 0.1, 0.0, 0.001, 1_024, cpu_cost=8.3),
    "tiny-4k": Setting(TINY, 0.1, 0.0, 0.003, 4_096, cpu_cost=1.0),
    "shallow-4k": Setting(SHALLOW, 0.1, 0.0, 0.002, 4_096, cpu_cost=2.4),
    "small-4k": Setting(SMALL, 0.1, 0.0, 0.002, 4_096, cpu_cost=4.6),
    "wide-4k": Setting(WIDE, 0.1, 0.0, 0.001, 4_096, cpu_cost=7.7),
    "shallow-1k": Setting(SHALLOW, 0.1, 0.0, 0.001, 1_024, cpu_cost=2.4),
    "tiny-muon6": Setting(TINY, 0.1, 0.0, 0.006, 2_048, cpu_cost=1.2, training=MUON),
    "tiny-muon10": Setting(TINY, 0.1, 0.0, 0.010, 2_048, cpu_cost=1.2, training=MUON),
    "tiny-muon10-d3": Setting(TINY, 0.3, 0.0, 0.010, 2_048, cpu_cost=1.2, training=MUON),
    "tiny-muon10-r2": Setting(TINY, 0.2, 2.0, 0.010, 2_048, cpu_cost=2.4, training=MUON),
    "tiny-muon10-s3": Setting(
        TINY, 0.1, 0.0, 0.010, 2_048, cpu_cost=1.2, training={**MUON, "subword_sampling": 0.3}
    ),
    "tiny-muon10-s5": Setting(
        TINY, 0.1, 0.0, 0.010, 2_048, cpu_cost=1.2, training={**MUON, "subword_sampling": 0.5}
    ),
    "shallow-d3": Setting(SHALLOW, 0.3, 0.0, 0.002, 1_024, cpu_cost=2.3),
    "shallow-muon4": Setting(SHALLOW, 0.1, 0.0, 0.004, 2_048, cpu_cost=3.4, training=MUON),
    "shallow-muon8": Setting(SHALLOW, 0.1, 0.0, 0.008, 2_048, cpu_cost=3.4, training=MUON),
    "tiny-muon10-4k": Setting(TINY, 0.1, 0.0, 0.010, 4_096, cpu_cost=0.95, training=MUON),
    "tiny-muon10-d2-4k": Setting(TINY, 0.2, 0.0, 0.010, 4_096, cpu_cost=0.95, training=MUON),
    "medium-muon10": Setting(MEDIUM, 0.1, 0.0, 0.010, 4_096, cpu_cost=2.2, training=MUON),
    "medium-muon10-d2": Setting(MEDIUM, 0.2, 0.0, 0.010, 4_096, cpu_cost=2.2, training=MUON),
    "medium-muon10-r2": Setting(MEDIUM, 0.2, 2.0, 0.010, 4_096, cpu_cost=4.4, training=MUON),
    "shallow-muon8-4k": Setting(SHALLOW, 0.1, 0.0, 0.008, 4_096, cpu_cost=2.8, training=MUON),
    "shallow-d3-muon8-4k": Setting(SHALLOW, 0.3, 0.0, 0.008, 4_096, cpu_cost=2.8, training=MUON),
    "shallow-r2-muon8-4k": Setting(SHALLOW, 0.3, 2.0, 0.008, 4_096, cpu_cost=5.4, training=MUON),
    "shallow-r2-4k": Setting(SHALLOW, 0.3, 2.0, 0.002, 4_096, cpu_cost=4.4),
    "small-muon8-4k": Setting(SMALL, 0.1, 0.0, 0.008, 4_096, cpu_cost=5.0, training=MUON),
    "wide-muon4-4k": Setting(WIDE, 0.1, 0.0, 0.004, 4_096, cpu_cost=7.3, training=MUON),
    "wide-d3-muon4-4k": Setting(WIDE, 0.3, 0.0, 0.004, 4_096, cpu_cost=7.3, training=MUON),
    "wide-r2-muon2": Setting(WIDE, 0.3, 2.0, 0.002, 4_096, training=MUON),
    "wide-r2-muon4": Setting(WIDE, 0.3, 2.0, 0.004, 4_096, training=MUON),
    "wide-d1-muon2": Setting(WIDE, 0.1, 0.0, 0.002, 4_096, training=MUON),
    "wide-d3-muon4": Setting(WIDE, 0.3, 0.0, 0.004, 4_096, training=MUON),
}


class Experiment(NamedTuple):
    group: str
    """corpus and time; its experiments take equally long"""
    corpus: str
    setting: str
    seconds: float = 0.0
    """training time on a GPU; 0 if ``cpu_tokens`` are given"""
    cpu_tokens: float = 0.0
    """millions of target tokens that the preset tiny would process on a CPU in the same time"""

    def steps(self, speeds: dict[str, float]) -> int:
        """The steps that take the time, given the tokens per second of each setting on a GPU."""
        setting = SETTINGS[self.setting]
        tokens = self.seconds * speeds.get(self.setting, 0.0)
        if self.cpu_tokens:
            tokens = 1e6 * self.cpu_tokens / setting.cpu_cost
        return int(tokens / setting.tokens_per_batch)

    @property
    def name(self) -> str:
        return f"{self.group}-{self.setting}"


def on_gpu(corpus: str, seconds: float, settings: Sequence[str]) -> list[Experiment]:
    return [Experiment(f"{corpus}-{seconds:g}s", corpus, name, seconds) for name in settings]


def on_cpu(corpus: str, tokens: float, settings: Sequence[str]) -> list[Experiment]:
    """Equally long trainings on a CPU: the preset tiny would process so many millions of tokens in this time."""
    group = f"{corpus}-{tokens:g}M-cpu"
    return [Experiment(group, corpus, name, 0.0, tokens) for name in settings]


SHORT = ["tiny", "tiny-muon10", "tiny-muon10-4k", "medium-muon10", "shallow-muon8-4k"]
LONG = [
    *("tiny-muon10-4k", "medium-muon10", "medium-muon10-d2", "shallow-4k", "shallow-muon8-4k"),
    *("shallow-d3-muon8-4k", "small-muon8-4k", "wide-muon4-4k"),
]
REPEATED = ["medium-muon10-r2", "shallow-r2-muon8-4k", "shallow-r2-4k", "wide-d3-muon4-4k"]
"""only for corpora that are read many times"""
SMALL_CORPUS = [
    *("tiny-muon10", "tiny-muon10-r2", "tiny-muon10-d3", "shallow-d3", "shallow-r2"),
    *("tiny-muon10-s3", "tiny-muon10-s5"),
]

EXPERIMENTS = [
    *on_gpu("multi30k-5k", 28, ["wide-r2"]),
    *on_gpu("multi30k-5k", 45, ["deep-r5", "small-r5", "wide-r5", "wide-r5-both"]),
    *on_gpu("multi30k-2k", 11, ["wide-r2"]),
    *on_gpu("multi30k-2k", 22, ["deep-r5", "small-r5", "wide-r5", "wide-r5-both", "wide-r5-s3"]),
    *on_gpu("en-ibo", 60, ["deep-r5", "wide-r5"]),
    *on_gpu("zul-en", 30, ["deep-r5", "wide-r2", "wide-r5"]),
    *on_gpu("l10n-30k", 40, ["wide-r2-both"]),
    *on_gpu("multi30k", 40, ["wide-r2-both"]),
    *on_gpu("en-ibo", 40, ["wide-r2-both", "wide-r5-both"]),
    *on_gpu("zul-en", 30, ["wide-r2-both"]),
    *on_cpu("en-ibo", 80, ["medium-r2-both"]),
    *on_gpu("multi30k-5k", 28, ["wide-r2-both", "wide-r5-s3-both", "wide-r5-s3"]),
    *on_gpu("multi30k-2k", 22, ["wide-r2-both", "wide-r5-s3-both"]),
    *on_cpu("en-ibo", 20, ["tiny-d2-both"]),
    *on_cpu("multi30k-5k", 10, ["tiny-muon10-d2-4k", "tiny-d2-both"]),
    *on_cpu("multi30k", 80, [*LONG, *REPEATED]),
    *on_cpu("en-ibo", 80, [*LONG, *REPEATED]),
    *on_cpu("tatoeba-ende", 80, LONG),
    *on_gpu("multi30k", 40, ["wide-r2", "wide-d3", "wide-r2-muon2", "wide-r2-muon4"]),
    *on_gpu("en-ibo", 40, ["wide-r2", "wide-r2-muon2", "wide-r2-muon4"]),
    *on_cpu("multi30k", 20, SHORT),
    *on_cpu("en-ibo", 20, [*SHORT, "tiny-muon10-d2-4k", "medium-muon10-d2"]),
    *on_cpu("tatoeba-ende", 20, SHORT),
    *on_gpu("l10n-30k", 30, ["wide-d1", "wide-d1-muon2", "wide-d3-muon4", "wide-r2"]),
    *on_cpu("l10n-30k", 80, LONG),
    *on_cpu("l10n-30k", 20, SHORT),
    *on_gpu("l10n-30k", 40, ["wide-d3", "small-r5", "small-d1", "deep-r2"]),
    *on_gpu("en-ibo", 40, ["wide-r5", "wide-d3", "small-r5"]),
    *on_cpu("tatoeba-ende", 26.01, ["tiny", "shallow", "small", "wide"]),
    *on_cpu("multi30k", 26.01, ["tiny", "shallow", "small", "wide", "shallow-r2"]),
    *on_cpu("en-ibo", 26.01, ["tiny", "shallow", "small", "wide", "shallow-r2"]),
    *on_cpu("tatoeba-ende", 26.01, ["small-4k", "shallow-4k", "wide-4k", "tiny-4k"]),
    *on_cpu("en-ibo", 26.01, ["shallow-4k"]),
    *on_cpu("multi30k", 6.5025, ["tiny", "tiny-muon6", "tiny-muon10", "shallow", "shallow-muon8"]),
    *on_cpu("l10n-30k", 6.5025, ["tiny", "tiny-muon10"]),
    *on_cpu("tatoeba-ende", 6.5025, ["tiny", "tiny-muon10"]),
    *on_cpu("en-ibo", 6.5025, ["tiny", "tiny-muon10"]),
    *on_cpu("multi30k-2k", 4, SMALL_CORPUS),
    *on_cpu("multi30k-5k", 10, SMALL_CORPUS),
]


def recipe(experiment: Experiment, steps: int, folder: Path) -> dict[str, Any]:
    setting = SETTINGS[experiment.setting]
    files = data_files(experiment.corpus, "train", folder)
    test_source, test_target = data_files(experiment.corpus, "test", folder)
    values = hand_recipe("small", *files, "cuda")
    values["data"]["test"] = {"source": str(test_source), "target": str(test_target)}
    values["data"] |= setting.data or {}
    values["tokenizer"] = {"kind": "unigram", "vocab_size": setting.vocab_size}
    if files[1].suffix == ".zh" or files[0].suffix == ".zh":
        values["tokenizer"]["vocab_size"] += 4_000
    values["model"] = {"norm_order": "pre", "dropout": setting.dropout, **setting.model}
    values["training"] |= {
        "steps": steps,
        "tokens_per_batch": setting.tokens_per_batch,
        "learning_rate": setting.learning_rate,
        "warmup": min(1_000, steps // 10),
        "rdrop": setting.rdrop,
        "validate_every": steps // 10,
        "checkpoint_every": steps // 10,
        "validate_sentences": 300,
        **(setting.training or {}),
    }
    if experiment.cpu_tokens:
        values["training"]["precision"] = "bf16"
    return values


def run(experiment: Experiment, steps: int, folder: Path) -> dict[str, Any]:
    """Train, and return the scores of the test set."""
    out, file = folder / experiment.name, folder / f"{experiment.name}.yaml"
    file.write_text(yaml.safe_dump(recipe(experiment, steps, folder)))
    command = [sys.executable, "-m", "regard", "train", str(file), "--out", str(out)]
    start = time.monotonic()
    with (folder / f"{experiment.name}.log").open("ab") as log:
        subprocess.run(command, stdout=log, stderr=log, check=False)
    group = f"equal time, {experiment.group}"
    result = {"name": experiment.name, "experiment": group, **experiment._asdict(), "steps": steps}
    if not (out / "card.json").exists():
        return result | {"error": "no card"}
    card = json.loads((out / "card.json").read_text())
    scores = {one["metric"]: round(one["value"], 2) for one in card["test"]}
    keys = ("parameters", "epochs", "target_tokens")
    seconds = round(time.monotonic() - start, 1)
    return result | scores | {key: card[key] for key in keys} | {"total_seconds": seconds}


def measure_speed(name: str, folder: Path) -> float:
    """Target tokens per second of a setting; only one process at a time measures."""
    from regard.recipe import make_recipe
    from regard.training.distributed import process_group
    from regard.training.planner import measure_steps
    from regard.training.prepare_data import open_prepared
    from regard.training.run import prepare_data
    from regard.training.trainer import Trainer

    values = recipe(Experiment("speed", "en-ibo", name), 1_000, folder)
    complete = make_recipe(values, name)
    run = prepare_data(complete, folder / f"speed-{name}")
    with process_group("auto") as group:
        trainer = Trainer(run, complete, open_prepared(run, complete), group)
        measure_steps(trainer, 0.0)  # compiles, beside the other processes
        with (folder / "speed.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            times = [measure_steps(trainer, 100.0) for _ in range(3)]
    return max(one.tokens / one.seconds for one in times)


def measure_speeds(names: Sequence[str], folder: Path) -> dict[str, float]:
    """The speed of some settings, each in a process of its own, so that they compile at the same time."""
    command = [sys.executable, __file__, "--folder", str(folder), "--speed"]
    processes = {
        name: subprocess.Popen([*command, name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for name in names
    }
    outputs = {name: process.communicate()[0] for name, process in processes.items()}
    return {name: json.loads(text.split(b"\n")[-2]) for name, text in outputs.items() if text}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--speeds", action="store_true", help="measure their speeds and end")
    parser.add_argument("--speed", choices=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="experiments whose names contain this")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--folder", type=Path, default=Path("runs/experiments"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--list", action="store_true", help="print the experiments and end")
    given = parser.parse_args(arguments)
    folder, speeds = given.folder, {}
    folder.mkdir(parents=True, exist_ok=True)
    if given.speed:
        print(json.dumps(round(measure_speed(given.speed, folder))))
        return
    results = json.loads(given.out.read_text()) if given.out.exists() else []
    done = {one["name"] for one in results if "error" not in one}
    waiting = [one for one in EXPERIMENTS if given.only in one.name and one.name not in done]
    if given.speeds:
        write_data("en-ibo", folder)
        names = dict.fromkeys(one.setting for one in waiting if not one.cpu_tokens)
        speeds = measure_speeds([*names], folder)
        (folder / "speeds.json").write_text(json.dumps(speeds, indent=1) + "\n")
        print(json.dumps(speeds, indent=1))
        return
    if (folder / "speeds.json").exists():
        speeds = json.loads((folder / "speeds.json").read_text())
    if given.list:
        print(*(f"{one.name}: {one.steps(speeds):,} steps" for one in waiting), sep="\n")
        return
    for corpus in dict.fromkeys(one.corpus for one in waiting):
        write_data(corpus, folder)
    with ThreadPoolExecutor(given.jobs) as pool:
        for future in as_completed(
            pool.submit(run, one, one.steps(speeds), folder) for one in waiting
        ):
            results.append(future.result())
            print(json.dumps(results[-1]), flush=True)
            given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
