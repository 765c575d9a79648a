"""How much planted noise ``regard data clean`` finds, how many clean pairs it loses, its speed, and its effect on BLEU.

    python benchmarks/noise.py measure                       # finds, losses and speed, into noise.json
    python benchmarks/noise.py ratios                        # length ratios of real corpora, into noise.json
    python benchmarks/noise.py corpora                       # noisy, cleaned and clean training data, into runs/noise
    python benchmarks/noise.py train --device cuda           # BLEU on these data, added to noise.json
    python benchmarks/noise.py write multi30k noisy.tsv      # one of the corpora, to look at

The data are multi30k and tatoeba_ende of $REGARD_DATA. 30% of the pairs of a noisy corpus are noise: twelve kinds,
equally many of each, and as a thirteenth kind targets that belong to another source. Pairs of the corpora that occur
twice are left out before. Everything is drawn with a fixed seed.

``train`` needs the files of ``corpora``; it writes them if there are none. ``corpora`` needs py3langid. To train on a
machine without it, copy the three files to runs/noise there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, pairwise, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.data.cleaning import encode_pairs
from regard.data.formats import INPUT_FORMATS
from regard.data.language_identification import is_installed
from regard.data.pairs import Pair
from regard.data.quality import RuleSet, exceeds_ratio, make_rules, survey
from regard.data.text_features import TextBatch, batches
from regard.data.tokenizer import Tokenizer
from regard.recipe import TokenizerConfig, load_recipe
from regard.storage.atomic_files import write_text

RESULTS = Path(__file__).with_suffix(".json")
DATA = Path(os.environ.get("REGARD_DATA", Path(__file__).parents[2] / "shared" / "data"))
NOISE = 0.3
"""share of the noisy corpus"""
CLEAN = ""
"""kind of a pair that is not noise"""
CORPORA = ("noisy", "cleaned", "clean")


class Labelled(NamedTuple):
    """A pair and the kind of noise that it is."""

    pair: Pair
    kind: str


# ---------------------------------------------------------------------------------------------
# Corpora


def read(name: str) -> list[str]:
    """The lines of a data file, which may be compressed."""
    path = DATA / name if (DATA / name).exists() else DATA / f"{name}.gz"
    return [pair.source for pair in INPUT_FORMATS["text"]().read(path)]


def clean_pairs(corpus: str) -> list[Pair]:
    """The distinct pairs of a corpus, in random order."""
    files = {
        "multi30k": ("multi30k/train.en", "multi30k/train.de"),
        "tatoeba": ("tatoeba_ende/train.en", "tatoeba_ende/train.de"),
    }[corpus]
    pairs: dict[tuple[str, ...], Pair] = {}
    for source, target in zip(*map(read, files), strict=True):
        key = tuple("".join(filter(str.isalnum, text.lower())) for text in (source, target))
        pairs.setdefault(key, Pair(source, target))
    return random.Random(1).sample([*pairs.values()], min(60_000, len(pairs)))


def other_languages(corpus: str) -> list[str]:
    """Sentences in French and Chinese of the same kind as the corpus."""
    french = "multi30k/train.fr" if corpus == "multi30k" else "tatoeba_enfr/train.fr"
    chinese = "3am_enzh/train.zh" if corpus == "multi30k" else "tatoeba_enzh/train.zh"
    draw = random.Random(2)
    return [text for name in (french, chinese) for text in draw.sample(read(name), 10_000)]


# ---------------------------------------------------------------------------------------------
# Noise: each function makes a noisy pair of a clean one, or None if it cannot


def empty(pair: Pair, draw: random.Random) -> Pair:
    return draw.choice([Pair(pair.source, ""), Pair("", pair.target), Pair(pair.source, "-")])


def mojibake(pair: Pair, draw: random.Random) -> Pair | None:
    if pair.target.isascii():
        return None
    content = pair.target.encode()
    damaged = draw.choice(
        [
            "".join(
                chr(byte) if 0x80 <= byte < 0xA0 else bytes([byte]).decode("latin-1")
                for byte in content
            ),
            content.decode("cp1252", "replace"),
            "".join(one if one.isascii() else "\ufffd" for one in pair.target),
        ]
    )
    return Pair(pair.source, damaged)


def html(pair: Pair, draw: random.Random) -> Pair:
    words = pair.target.split()
    word = draw.randrange(len(words))
    words[word] = draw.choice(
        ["<b>{}</b>", "{}<br/>", "&quot;{}&quot;", "{}&nbsp;", '<a href="x">{}</a>']
    ).format(words[word])
    return Pair(pair.source, " ".join(words))


def control_characters(pair: Pair, draw: random.Random) -> Pair:
    character = draw.choice("\x00\x07\x08\x1b\x85\x9d\ufeff\u2028\ue000")
    place = draw.randrange(len(pair.source))
    return Pair(pair.source[:place] + character + pair.source[place:], pair.target)


def duplicate(pair: Pair, draw: random.Random) -> Pair:
    return pair


def near_duplicate(pair: Pair, draw: random.Random) -> Pair:
    source, target = pair
    change: Callable[[str], str] = draw.choice(
        [
            str.upper,
            str.lower,
            lambda text: text.rstrip(".!?") + " !",
            lambda text: text.replace(" ", "  ", 1),
        ]
    )
    changed = Pair(change(source), change(target))
    return changed if changed != pair else Pair(f"{source} …", f"{target} …")


def copy(pair: Pair, draw: random.Random) -> Pair:
    return Pair(pair.source, pair.source)


def swapped(pair: Pair, draw: random.Random) -> Pair:
    return Pair(pair.target, pair.source)


def ratio(pair: Pair, draw: random.Random) -> Pair:
    words = pair.target.split()
    if draw.random() < 0.5 and len(words) > 6:
        return Pair(pair.source, " ".join(words[: len(words) // 6]))
    return Pair(pair.source, " ".join([pair.target] * 4))


def mismatch(pair: Pair, draw: random.Random) -> Pair:
    first, second = draw.sample(range(2, 1000), 2)
    kind: Callable[[int], str] = draw.choice(
        [str, "https://example.org/{}".format, "{{name{}}}".format, "%{}$s".format]
    )
    return Pair(f"{pair.source} ({kind(first)})", f"{pair.target} ({kind(second)})")


KINDS: dict[str, Callable[[Pair, random.Random], Pair | None]] = {
    function.__name__: function
    for function in (empty, mojibake, html, control_characters, copy, swapped, ratio, mismatch)
}
COPIES: dict[str, Callable[[Pair, random.Random], Pair]] = {
    function.__name__: function for function in (duplicate, near_duplicate)
}
"""of pairs that are in the corpus; a copy comes after its original"""
OTHER_KINDS = ("language", "misaligned")
THIRTEENTH = "unrelated"


def noisy_corpus(
    pairs: Sequence[Pair], others: Sequence[str], noise: float = NOISE
) -> list[Labelled]:
    """The pairs with noise planted among them; all of the twelve kinds are equally frequent."""
    draw = random.Random(3)
    count = round(len(pairs) * noise / (1 - noise) / 13)
    # Noise is made of pairs of its own, so that the clean part is complete.
    needed = count * (len(KINDS) + 4) + 2000
    fresh, clean = list(pairs[:needed]), list(pairs[needed:])
    count = round(len(clean) * noise / (1 - noise) / 13)
    planted: list[Labelled] = []
    for kind, make in KINDS.items():
        made = 0
        while made < count:
            pair = make(fresh.pop(), draw)
            if pair is not None:
                planted.append(Labelled(pair, kind))
                made += 1
    planted += [
        Labelled(Pair(fresh.pop().source, draw.choice(others)), "language") for _ in range(count)
    ]
    targets = [fresh.pop().target for _ in range(count)]
    planted += [Labelled(Pair(fresh.pop().source, target), THIRTEENTH) for target in targets]
    corpus = [Labelled(pair, CLEAN) for pair in clean] + planted
    draw.shuffle(corpus)
    corpus = add_copies(corpus, count, draw)
    return add_stretches(corpus, fresh, count, draw)


def add_copies(corpus: list[Labelled], count: int, draw: random.Random) -> list[Labelled]:
    """Copies of clean pairs, somewhere after them."""
    places: dict[int, list[Labelled]] = {}
    clean = [number for number, one in enumerate(corpus) if one.kind == CLEAN]
    for kind, change in COPIES.items():
        for number in draw.sample(clean, count):
            place = draw.randrange(number + 1, len(corpus) + 1)
            copied = Labelled(change(corpus[number].pair, draw), kind)
            places.setdefault(place, []).append(copied)
    slots = range(len(corpus) + 1)
    return [one for n in slots for one in chain(places.get(n, []), corpus[n : n + 1])]


def add_stretches(
    corpus: list[Labelled], fresh: list[Pair], count: int, draw: random.Random
) -> list[Labelled]:
    """Stretches of 20 to 200 pairs whose targets are those of the next line."""
    stretches: list[list[Labelled]] = []
    while count > 0:
        size = min(count, draw.randint(20, 200))
        block = [fresh.pop() for _ in range(size + 1)]
        stretches.append(
            [Labelled(Pair(one.source, two.target), "misaligned") for one, two in pairwise(block)]
        )
        count -= size
    for stretch in stretches:
        place = draw.randrange(len(corpus))
        corpus[place:place] = stretch
    return corpus


def planted(corpus: str) -> list[Labelled]:
    """The noisy version of a corpus."""
    return noisy_corpus(clean_pairs(corpus), other_languages(corpus))


# ---------------------------------------------------------------------------------------------
# Finds, losses and speed


def rejects(pairs: Sequence[Pair], skip: Sequence[str] = ()) -> list[str]:
    """The reason for which each pair is rejected; empty if it is kept."""
    rules = RuleSet(make_rules(skip=skip), survey(pairs, ("en", "de")))
    reasons = [""] * len(pairs)
    for batch in batches(pairs):
        for name, marks in rules.apply(batch, reports=False):
            for number in np.flatnonzero(marks & ~batch.rejected).tolist():
                reasons[batch.start + number] = name
    return reasons


def measure(corpus: str) -> dict[str, Any]:
    """What is found in a noisy corpus."""
    labelled = planted(corpus)
    pairs = [one.pair for one in labelled]
    reasons = rejects(pairs)
    found: Counter[str] = Counter()
    total: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    for one, reason in zip(labelled, reasons, strict=True):
        total[one.kind] += 1
        found[one.kind] += bool(reason)
        if one.kind == CLEAN and reason:
            lost[reason] += 1
    twelve = [*KINDS, *COPIES, *OTHER_KINDS]
    assert len(twelve) == 12
    return {
        "pairs": len(pairs),
        "noise": round(1 - total[CLEAN] / len(pairs), 4),
        "found": round(
            sum(found[kind] for kind in twelve) / sum(total[kind] for kind in twelve), 4
        ),
        "found_by_kind": {
            kind: round(found[kind] / total[kind], 4) for kind in [*twelve, THIRTEENTH]
        },
        "clean_lost": round(found[CLEAN] / total[CLEAN], 5),
        "clean_lost_by_rule": {rule: round(n / total[CLEAN], 5) for rule, n in lost.most_common()},
        "language_identification": is_installed(),
    }


def speed(corpus: str, repeats: int = 3) -> dict[str, float]:
    """Pairs per second of CPU time, from a TSV file, with both passes; without language identification the median."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "noisy.tsv"
        write_tsv(path, [one.pair for one in planted(corpus)])
        run_rules(path, [])  # loads what every process loads once
        speeds = {}
        for name, skip, times in (("without", ["language"], repeats), ("with", [], 1)):
            runs = []
            for _ in range(times):
                start = time.process_time()
                count = run_rules(path, skip)
                runs.append(count / (time.process_time() - start))
            speeds[f"{name}_language_identification"] = round(statistics.median(runs))
    return speeds


def run_rules(path: Path, skip: Sequence[str]) -> int:
    """What ``regard data clean`` does, without the output."""
    tsv = INPUT_FORMATS["tsv"]()
    rules = RuleSet(make_rules(skip=skip), survey(tsv.read(path), ("en", "de")))
    count = 0
    for batch in batches(tsv.read(path)):
        for _ in rules.apply(batch, reports=False):
            pass
        count += len(batch)
    return count


def write_tsv(path: Path, pairs: Sequence[Pair]) -> None:
    """Pairs as TSV; a pair with a line feed does not occur."""
    lines = (f"{pair.source}\t{pair.target}\n" for pair in pairs)
    path.write_text("".join(lines), encoding="utf-8", newline="")


# ---------------------------------------------------------------------------------------------
# Length ratios of real corpora


def ratios() -> dict[str, dict[str, float]]:
    """How many pairs of real corpora have length ratios above 3 and 9, in percent, by three measures of length.

    Tokens are those of a tokenizer for every n-th pair of a corpus, at most 5,000 of them.
    """
    corpora = {
        "multi30k en-de": ("multi30k/train.en", "multi30k/train.de"),
        "tatoeba en-de": ("tatoeba_ende/train.en", "tatoeba_ende/train.de"),
        "tatoeba en-fr": ("tatoeba_enfr/train.en", "tatoeba_enfr/train.fr"),
        "tatoeba en-zh": ("tatoeba_enzh/train.en", "tatoeba_enzh/train.zh"),
        "l10n en-zh": ("l10n_enzh/train.en", "l10n_enzh/train.zh"),
        "lafand en-hau": ("lafand/en-hau.train.en", "lafand/en-hau.train.hau"),
        "lafand en-ibo": ("lafand/en-ibo.train.en", "lafand/en-ibo.train.ibo"),
        "lafand en-zul": ("lafand/en-zul.train.en", "lafand/en-zul.train.zul"),
        "lafand fr-wol": ("lafand/fr-wol.train.fr", "lafand/fr-wol.train.wol"),
    }
    return {name: ratio_shares(*files) for name, files in corpora.items()}


def ratio_shares(source: str, target: str) -> dict[str, float]:
    pairs = [Pair(*texts) for texts in zip(read(source), read(target), strict=True)]
    sides = [TextBatch([pair[side] for pair in pairs]) for side in (0, 1)]
    some = pairs[:: 1 + len(pairs) // 5_000]
    tokenizer = Tokenizer.train(
        TokenizerConfig(kind="unigram", vocab_size=4_000), lambda: iter(some)
    )
    encoded = [(len(ids.source), len(ids.target)) for ids in encode_pairs(some, tokenizer)]
    lengths = {
        "words": [np.array([len(pair[side].split()) for pair in pairs]) for side in (0, 1)],
        "characters": [side.widths for side in sides],
        "tokens": [np.array([both[side] for both in encoded]) for side in (0, 1)],
    }
    return {
        f"{unit} > {limit}": round(100 * float(exceeds_ratio(*both, limit).mean()), 3)
        for unit, both in lengths.items()
        for limit in (3, 9)
    }


# ---------------------------------------------------------------------------------------------
# What cleaning is worth


def write_corpora(folder: Path, limit: int | None = None) -> None:
    """Write the noisy, the cleaned and the clean training data. limit: only the first pairs, for a test."""
    if not is_installed():
        raise SystemExit("cleaning needs py3langid: pip install 'regard[language-id]'")
    labelled = planted("multi30k")[:limit]
    noisy = [one.pair for one in labelled]
    reasons = rejects(noisy)
    corpora = {
        "noisy": noisy,
        "cleaned": [pair for pair, reason in zip(noisy, reasons, strict=True) if not reason],
        "clean": [one.pair for one in labelled if one.kind == CLEAN],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in corpora.items():
        records = ({"source": pair.source, "target": pair.target} for pair in pairs)
        lines = (f"{json.dumps(record)}\n" for record in records)
        (folder / f"{name}.jsonl").write_text("".join(lines))


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """BLEU of models trained on the noisy, the cleaned and the clean corpus."""
    files = {name: arguments.runs / f"{name}.jsonl" for name in CORPORA}
    if not all(path.exists() for path in files.values()):
        write_corpora(arguments.runs, arguments.pairs)
    jobs = [(name, seed) for name in CORPORA for seed in arguments.seeds]
    bleu: dict[str, list[float]] = {name: [] for name in CORPORA}
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        scores = pool.map(train_one, *zip(*jobs, strict=True), repeat(arguments))
        for (name, seed), value in zip(jobs, scores, strict=True):
            bleu[name].append(value)
            print(f"{name}, seed {seed}: BLEU {value:.1f}", flush=True)
    means = {name: statistics.mean(values) for name, values in bleu.items()}
    lost = means["clean"] - means["noisy"]
    return {
        "recipe": arguments.recipe,
        "seeds": arguments.seeds,
        "pairs": {name: len(path.read_text().splitlines()) for name, path in files.items()},
        "bleu": bleu,
        "mean": {name: round(mean, 2) for name, mean in means.items()},
        "recovered": round((means["cleaned"] - means["noisy"]) / lost, 3) if lost else None,
    }


def train_one(name: str, seed: int, arguments: argparse.Namespace) -> float:
    """Train on one corpus; returns the BLEU on the test set."""
    from regard.training.run import train as train_run

    path = (arguments.runs / f"{name}.jsonl").resolve()
    changes = [
        *(f"data.root={DATA}", "data.train.source=null", "data.train.target=null"),
        *(f"data.train.pairs={path}", f"training.seed={seed}"),
        *(f"training.device={arguments.device}", "evaluation.metrics=[bleu]", *arguments.set),
    ]
    out = arguments.runs / f"{name}-{seed}"
    train_run(load_recipe(arguments.recipe, changes), out)
    return card_bleu(json.loads((out / "card.json").read_text()))


def card_bleu(card: dict[str, Any]) -> float:
    """The BLEU on the test set."""
    return next(float(one["value"]) for one in card["test"] if one["metric"] == "bleu")


# ---------------------------------------------------------------------------------------------


def save(**parts: Any) -> None:
    """Replace parts of the results."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    write_text(RESULTS, json.dumps({**results, **parts}, indent=2, ensure_ascii=False) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("measure")
    commands.add_parser("ratios")
    writing = commands.add_parser("write")
    writing.add_argument("corpus", choices=["multi30k", "tatoeba"])
    writing.add_argument("path", type=Path)
    corpora = commands.add_parser("corpora")
    training = commands.add_parser("train")
    training.add_argument("--device", default="auto")
    training.add_argument("--recipe", default="multi30k-transformer")
    training.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    for one in (corpora, training):
        one.add_argument("--pairs", type=int, help="only the first pairs, for a test")
        one.add_argument("--runs", type=Path, default=Path("runs/noise"))
    training.add_argument("--set", action="append", default=[], help="changes of the recipe")
    training.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    training.add_argument("--no-save", action="store_true", help="print the result only")
    given = parser.parse_args(arguments)
    if given.command == "measure":
        save(corpora={name: measure(name) for name in ("multi30k", "tatoeba")})
        save(pairs_per_second={name: speed(name) for name in ("multi30k", "tatoeba")})
    elif given.command == "ratios":
        save(ratios=ratios())
    elif given.command == "write":
        lines = (
            f"{kind or 'clean'}\t{pair.source}\t{pair.target}\n"
            for pair, kind in planted(given.corpus)
        )
        given.path.write_text("".join(lines), encoding="utf-8", newline="")
        return
    elif given.command == "corpora":
        write_corpora(given.runs, given.pairs)
        return
    else:
        result = train(given)
        print(json.dumps(result, indent=2))
        if not given.no_save:
            earlier = json.loads(RESULTS.read_text())["training"] if RESULTS.exists() else []
            save(training=[*earlier, result])
        return
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
