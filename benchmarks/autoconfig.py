"""Training without a recipe against hand-set recipes, on the same data, device and time.

    python benchmarks/autoconfig.py --minutes 2 --device cuda       # all corpora and recipes; the same command resumes
    python benchmarks/autoconfig.py --minutes 15 --corpora en-ibo,multi30k-5k --recipes auto,wide

Every training run is ``regard train`` with ``--minutes``. Training pairs are a cut of the corpus, of which Regard
holds out a part for validation; the test set is scored once, after training. Results are added to autoconfig.json, and
``--table`` writes the table of docs/autoconfig.md from it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import combining, normalize

import yaml
from reporting import markdown_table, replace_section

HERE = Path(__file__).parent
RESULTS = HERE / "autoconfig.json"
PAGE = HERE.parent / "docs" / "autoconfig.md"
BEGIN, END = "<!-- begin autoconfig -->\n", "<!-- end autoconfig -->\n"


def with_typos(text: str, draw: random.Random) -> str:
    """A fifth of the words of three or more letters get a typo: swapped, missing, additional or wrong letters."""
    words = text.split(" ")
    for number, word in enumerate(words):
        if len(word) > 2 and draw.random() < 0.2:
            place, kind = draw.randrange(len(word) - 1), draw.randrange(4)
            start, first, second, end = (
                word[:place],
                word[place],
                word[place + 1],
                word[place + 2 :],
            )
            letter = draw.choice("abcdefghijklmnopqrstuvwxyz")
            words[number] = (
                start + second + first + end,
                start + second + end,
                start + letter + first + second + end,
                start + letter + second + end,
            )[kind]
    return " ".join(words)


def without_diacritics(text: str, _: random.Random) -> str:
    return "".join(letter for letter in normalize("NFD", text) if not combining(letter))


class Corpus(NamedTuple):
    """Training and test files of a data set, in the direction source, target."""

    train: str
    test: str
    """several files are separated by blanks"""
    source: str
    target: str
    pairs: int | None = None
    """a random cut of the training data"""
    noise: float = 0.0
    """share of the training pairs whose target belongs to another source"""
    damage: Callable[[str, random.Random], str] | None = None
    """text repair: the sources are the targets, damaged by this function"""


CORPORA = {
    "en-hau": Corpus("lafand/en-hau.train", "lafand/en-hau.test", "en", "hau"),
    "en-ibo": Corpus("lafand/en-ibo.train", "lafand/en-ibo.test", "en", "ibo"),
    "zul-en": Corpus("lafand/en-zul.train", "lafand/en-zul.test", "zul", "en"),
    "fr-wol": Corpus("lafand/fr-wol.train", "lafand/fr-wol.test", "fr", "wol"),
    "multi30k-2k": Corpus("multi30k/train", "multi30k/test_2016_flickr", "en", "fr", 2_000),
    "multi30k-5k": Corpus("multi30k/train", "multi30k/test_2016_flickr", "en", "de", 5_000),
    "multi30k": Corpus("multi30k/train", "multi30k/test_2016_flickr", "de", "en"),
    "multi30k-noisy": Corpus("multi30k/train", "multi30k/test_2016_flickr", "en", "de", None, 0.2),
    "l10n-30k": Corpus(
        "l10n_enzh/train",
        "l10n_enzh/valid_game l10n_enzh/valid_office l10n_enzh/valid_pydoc",
        "zh",
        "en",
        30_000,
    ),
    "3am": Corpus("3am_enzh/train", "3am_enzh/test", "en", "zh"),
    "tatoeba-enfr": Corpus("tatoeba_enfr/train", "tatoeba_enfr/test", "fr", "en"),
    "tatoeba-ende": Corpus("tatoeba_ende/train", "tatoeba_ende/valid", "en", "de"),
    "typos": Corpus(
        "multi30k/train", "multi30k/test_2016_flickr", "typos", "en", damage=with_typos
    ),
    "diacritics": Corpus(
        "lafand/en-ibo.train", "lafand/en-ibo.test", "plain", "ibo", damage=without_diacritics
    ),
}


def _recipe(
    vocab: int, model: dict[str, Any], tokens: int, steps: int, rate: float, rdrop: float = 0.0
) -> dict[str, Any]:
    return {
        "tokenizer": {"kind": "bpe", "vocab_size": vocab},
        "model": {"norm_order": "pre", **model},
        "training": {
            "steps": steps,
            "tokens_per_batch": tokens,
            "schedule": "cosine",
            "learning_rate": rate,
            "warmup": steps // 10,
            "rdrop": rdrop,
            "validate_every": steps // 10,
            "checkpoint_every": steps // 10,
        },
        "decoding": {"beam": 5, "length_penalty": 1.0},
    }


_SHALLOW = {"preset": "small", "encoder_layers": 3, "decoder_layers": 3}
_WIDE = {"preset": "base", "encoder_layers": 3, "decoder_layers": 3}
RECIPES: dict[str, dict[str, Any]] = {
    "multi30k": _recipe(8_000, {"preset": "small", "dropout": 0.3}, 8_192, 10_000, 0.002, 5.0),
    "tatoeba": _recipe(
        8_000, {"preset": "base", "d_ff": 1024, "dropout": 0.3}, 16_384, 15_000, 0.001, 5.0
    ),
    "wide": _recipe(4_000, {**_WIDE, "dropout": 0.3}, 4_096, 10_000, 0.001, 2.0),
    "shallow": _recipe(4_000, {**_SHALLOW, "dropout": 0.1}, 1_024, 10_000, 0.002),
    "small": _recipe(8_000, {"preset": "small", "dropout": 0.1}, 4_096, 20_000, 0.002),
    "tiny": _recipe(6_000, {"preset": "tiny", "dropout": 0.1}, 2_048, 20_000, 0.003),
    "paper": {
        "tokenizer": {"kind": "bpe", "vocab_size": 8_000},
        "model": {"preset": "base"},
        "training": {"steps": 20_000, "tokens_per_batch": 8_192, "warmup": 4_000},
    },
    "iwslt": {
        "tokenizer": {"kind": "bpe", "vocab_size": 8_000},
        "model": {"preset": "base", "d_ff": 1024, "heads": 4, "dropout": 0.3},
        "training": {
            "steps": 20_000,
            "tokens_per_batch": 4_096,
            "warmup": 4_000,
            "optimizer": "adamw",
            "weight_decay": 0.0001,
        },
    },
}
"""Hand-set recipes: the best ones of this repository, the paper's, and fairseq's for small corpora."""


AUTO = {
    "auto": [],
    "auto-simcut": ["--set", "training.rdrop=0", "--set", "training.simcut=3"],
    "auto-char": ["--set", "tokenizer.kind=char"],
}
"""Training runs without a recipe: the rules as they are, and changes that were tried."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--corpora", default=",".join(CORPORA))
    parser.add_argument("--recipes", default=",".join(["auto", *RECIPES]))
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--folder", type=Path, help="folder for data and runs (default: temporary)")
    parser.add_argument("--table", action="store_true", help="write the table and end")
    given = parser.parse_args(arguments)
    if given.table:
        text = PAGE.read_text(encoding="utf-8")
        content = table(json.loads(given.out.read_text()))
        PAGE.write_text(replace_section(PAGE, text, BEGIN, END, content), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        jobs = [
            (corpus, recipe)
            for corpus in given.corpora.split(",")
            for recipe in given.recipes.split(",")
        ]
        run_all(jobs, folder, given)


def run_all(jobs: Sequence[tuple[str, str]], folder: Path, given: argparse.Namespace) -> None:
    """Train and score all jobs that have no result yet, some at a time, and add each result to the file."""
    results = json.loads(given.out.read_text()) if given.out.exists() else []
    device = device_name(given.device)
    keys = ("corpus", "recipe", "minutes", "device", "jobs")
    done = {tuple(result[key] for key in keys) for result in results}
    waiting = [job for job in jobs if (*job, given.minutes, device, given.jobs) not in done]
    for corpus in dict.fromkeys(corpus for corpus, _ in waiting):
        write_data(corpus, folder)
    with ThreadPoolExecutor(given.jobs) as pool:
        running = [pool.submit(train_and_score, *job, folder, given) for job in waiting]
        for future in as_completed(running):
            result = {"minutes": given.minutes, "device": device, "jobs": given.jobs}
            results.append(result | future.result())
            print(json.dumps(results[-1]), flush=True)
            given.out.write_text(json.dumps(results, indent=1) + "\n")


def device_name(device: str) -> str:
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    cores = len(os.sched_getaffinity(0))
    return f"{cores} CPU core{'s' * (cores > 1)}"


def train_and_score(
    corpus: str, recipe: str, folder: Path, given: argparse.Namespace
) -> dict[str, Any]:
    """Train with ``regard train --minutes``, and score the test set, which training does not see."""
    source, target = data_files(corpus, "train", folder)
    out = folder / f"{corpus}-{recipe}-{given.minutes:g}"
    command = [sys.executable, "-m", "regard", "train"]
    if recipe in AUTO:
        command += [str(source), str(target), *AUTO[recipe]]
    else:
        file = folder / f"{corpus}-{recipe}.yaml"
        file.write_text(yaml.safe_dump(hand_recipe(recipe, source, target, given.device)))
        command.append(str(file))
    command += ["--minutes", str(given.minutes), "--out", str(out)]
    command += ["--set", f"training.device={given.device}"]
    begun = time.monotonic()
    log = folder / f"{out.name}.log"
    with log.open("wb") as stream:
        subprocess.run(command, stdout=stream, stderr=stream, check=False)
    seconds = round(time.monotonic() - begun, 1)
    result: dict[str, Any] = {"corpus": corpus, "recipe": recipe, "seconds": seconds}
    if not (out / "card.json").exists():
        return result | {"error": log.read_text(errors="replace").strip().split("\n")[-1][:300]}
    return result | score(corpus, out, folder)


def hand_recipe(name: str, source: Path, target: Path, device: str) -> dict[str, Any]:
    """A hand-set recipe for these files, with the batches and the precision that are fastest on the device."""
    import torch

    from regard.training.cpu_kernels import fastest_batches

    recipe: dict[str, Any] = json.loads(json.dumps(RECIPES[name]))
    count = sum(1 for _ in source.open(encoding="utf-8"))
    recipe["data"] = {
        "train": {"source": str(source), "target": str(target)},
        "hold_out": round(min(0.05, max(1_000 / count, 0.001)), 4),
    }
    recipe["evaluation"] = {"metrics": ["chrf", "bleu"]}
    if target.suffix == ".zh":
        recipe["evaluation"]["tokenize"] = "zh"
    on_gpu = device != "cpu" and torch.cuda.is_available()
    batching, precision = fastest_batches(torch.device("cuda" if on_gpu else "cpu"))
    recipe["training"] |= {"batching": batching, "precision": precision}
    return recipe


def data_files(name: str, part: str, folder: Path) -> tuple[Path, Path]:
    """The source and target files of a corpus; ``part`` is train or test."""
    corpus = CORPORA[name]
    stem = name if part == "train" else f"{name}.{part}"
    return folder / f"{stem}.{corpus.source}", folder / f"{stem}.{corpus.target}"


def write_data(name: str, folder: Path) -> None:
    """Write the training and test files of a corpus; test pairs that share a side with training pairs are left out."""
    corpus = CORPORA[name]
    draw = random.Random(1)
    pairs = read_pairs(corpus.train, corpus, draw)
    sides = [set(side) for side in zip(*pairs, strict=True)]
    test = [
        pair
        for stem in corpus.test.split()
        for pair in read_pairs(stem, corpus, draw)
        if not any(text in side for text, side in zip(pair, sides, strict=True))
    ]
    if corpus.pairs:
        pairs = draw.sample(pairs, corpus.pairs)
    noisy = draw.sample(range(len(pairs)), int(corpus.noise * len(pairs)))
    targets = [pairs[index][1] for index in noisy]
    for index, other in zip(noisy, [*targets[1:], *targets[:1]], strict=True):
        pairs[index] = pairs[index][0], other
    for part, some in (("train", pairs), ("test", test)):
        for file, texts in zip(
            data_files(name, part, folder), zip(*some, strict=True), strict=True
        ):
            file.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")


def read_pairs(stem: str, corpus: Corpus, draw: random.Random) -> list[tuple[str, str]]:
    targets = lines(stem, corpus.target)
    if corpus.damage:
        return [(corpus.damage(target, draw), target) for target in targets]
    return list(zip(lines(stem, corpus.source), targets, strict=True))


def lines(stem: str, language: str) -> list[str]:
    root = Path(os.environ.get("REGARD_DATA", HERE.parent.parent / "shared" / "data"))
    plain, packed = root / f"{stem}.{language}", root / f"{stem}.{language}.gz"
    content = plain.read_bytes() if plain.exists() else gzip.decompress(packed.read_bytes())
    return content.decode("utf-8").split("\n")[:-1]


def score(corpus: str, run: Path, folder: Path) -> dict[str, Any]:
    """Scores of a finished training on the test set, and what it did: also step, loss and chrF of its validations."""
    source, reference = (str(file) for file in data_files(corpus, "test", folder))
    command = [sys.executable, "-m", "regard", "evaluate", str(run), "--source", source]
    command += ["--reference", reference, "--json"]
    output = subprocess.run(command, capture_output=True, check=True).stdout
    values = {one["metric"]: round(one["value"], 2) for one in json.loads(output)["scores"]}
    card = json.loads((run / "card.json").read_text())
    log = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    validations = [
        [one["step"], round(one["loss"], 3), one.get("chrf") and round(one["chrf"], 2)]
        for one in log
        if one["event"] == "valid"
    ]
    return {
        "bleu": values["bleu"],
        "chrf": values["chrf"],
        "steps": card["steps"],
        "parameters": card["parameters"],
        "reason": card["reason_stopped"],
        "validations": validations,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """BLEU of each corpus and time: without a recipe, and the best hand-set recipe."""
    groups: dict[tuple[str, float, str], dict[str, dict[str, Any]]] = defaultdict(dict)
    for result in results:
        if "bleu" in result:  # only those that shared the device with as many others are compared
            device = f"{result['device']}, {result['jobs']} at once"
            groups[device, result["minutes"], result["corpus"]][result["recipe"]] = result
    rows: list[list[str]] = []
    gaps: dict[str, list[float]] = defaultdict(list)
    for (device, minutes, corpus), by_recipe in sorted(groups.items()):
        hand = {n: r["bleu"] for n, r in by_recipe.items() if not n.startswith("auto")}
        best = max(hand, key=lambda name: hand[name], default="")
        for name, result in by_recipe.items():
            if name in hand:
                continue
            gap = result["bleu"] - hand[best] if hand else None
            gaps[name] += [] if gap is None else [gap]
            rows.append(
                [
                    device,
                    f"{minutes:g}",
                    corpus,
                    name,
                    f"{result['bleu']:.1f}",
                    f"{hand[best]:.1f} ({best}, of {len(hand)})" if hand else "",
                    "" if gap is None else f"{gap:+.1f}",
                    f"{result['seconds']:.0f}",
                ]
            )
    head = ["device", "minutes", "corpus", "recipe", "BLEU", "best hand-set", "gap", "seconds"]
    text = "\n".join(markdown_table(head, rows, left=4)) + "\n"
    for name, values in gaps.items():
        if values:
            mean = sum(values) / len(values)
            text += f"\nMean gap of {name}: {mean:+.2f} BLEU, worst {min(values):+.2f}.\n"
    return text


if __name__ == "__main__":
    main()
