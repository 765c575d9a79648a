"""Why the Transformer won: LSTMs and windows of words beside it, at equal size, every figure measured.

    python benchmarks/baselines.py                                  # steps, path, work, speed on this machine
    python benchmarks/baselines.py --part speed --device cuda       # one part only; under a minute on a GPU
    python benchmarks/baselines.py --part scores --runs runs        # BLEU, from the cards of finished runs

What is measured goes into benchmarks/baselines.json, beside what stood there from other parts and machines, and from
there into the tables of docs/baselines.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from regard import recipe
from regard.data.special_tokens import PAD
from regard.inference.precision import autocast
from regard.nn.architectures import ARCHITECTURES
from regard.nn.attention import KeyValue, Mask
from regard.nn.convolution import ConvolutionEncoderLayer
from regard.nn.layers import EncoderLayer
from regard.nn.loss import LOSSES
from regard.nn.lstm import LSTMDecoderLayer
from regard.training.optimizers import OPTIMIZERS
from regard.training.run import hardware

RESULTS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[1] / "docs" / "baselines.md"
RECIPES = {
    "Transformer": "multi30k-transformer",
    "recurrent": "multi30k-recurrent",
    "convolution": "multi30k-convolution",
}
VOCABULARY = 8000
KERNEL, REACH = 3, 8
LENGTHS = [8, 16, 32, 64, 128, 256, 512]

Layer = Callable[[Tensor], Tensor]
"""a sequence [1, T, d] in, another out"""


def section(**model: Any) -> recipe.Model:
    """A small model without dropout, its norms after the sums: gradients then stay far from the smallest number."""
    sizes = {"preset": "tiny", "d_model": 16, "heads": 2, "dropout": 0.0, "position": "none"}
    values = {"data": {"train": {"pairs": "none"}}, "model": {**sizes, **model}}
    return recipe.make_recipe(values, "benchmark").model


# Layers: one way of letting words meet each


def attention_layer(number: int, **attention: Any) -> Layer:
    layer = EncoderLayer(section(attention=attention)).double()
    return lambda x: layer(x, Mask())


def window_attention_layer(number: int) -> Layer:
    return attention_layer(number, encoder="window", reach=REACH)


def convolution_layer(number: int) -> Layer:
    layer = ConvolutionEncoderLayer(section(architecture="convolution", kernel=KERNEL)).double()
    return lambda x: layer(x, Mask(), None)


def dilated_layer(number: int) -> Layer:
    """The window that ends at a word, with holes: the taps of layer n stand kernel^n words apart.

    So the layers are the digits of the distance, and n of them reach kernel^n words back.
    """
    layer = ConvolutionEncoderLayer(section(architecture="convolution", kernel=KERNEL)).double()
    convolution, apart = layer.window.convolution, KERNEL**number
    convolution.dilation = (apart,)
    ends = (0, 0, apart * (KERNEL - 1), 0)
    return lambda x: layer.residual(x, lambda y: layer.window(F.pad(y, ends)), None)


LAYERS: dict[str, Callable[[int], Layer]] = {
    "self-attention": attention_layer,
    "convolution": convolution_layer,
    "convolution, dilated": dilated_layer,
    "window attention": window_attention_layer,
}


# Path: how far is it from the first word to the last?


def felt(first: Tensor, last: Tensor) -> bool:
    """Whether the first word has any influence on the last output: a gradient that is not exactly zero."""
    # A random direction, since the features of a normalised output sum to a constant.
    direction = torch.randn(last.shape, dtype=last.dtype)
    (gradient,) = torch.autograd.grad((last * direction).sum(), first, allow_unused=True)
    return gradient is not None and bool(gradient.any())


def smallest(works: Callable[[int], bool], most: int) -> int:
    """The smallest number from 1 to most that works, if all after it do too."""
    low, high = 0, 1
    while not works(high):
        low, high = high, 2 * high
        assert low < most, "nothing works"
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high


def layers_to_meet(make: Callable[[int], Layer], length: int) -> int:
    """How many layers until the first of so many words influences the last."""
    layers: list[Layer] = []

    def works(count: int) -> bool:
        layers.extend(make(number) for number in range(len(layers), count))
        words = torch.randn(1, length, 16, dtype=torch.float64)
        first = words[:, :1].clone().requires_grad_()
        x = torch.cat([first, words[:, 1:]], dim=1)
        for layer in layers[:count]:
            x = layer(x)
        return felt(first, x[:, -1])

    return smallest(works, length)


def steps_to_meet(length: int) -> int:
    """How many steps of a recurrence until the first of so many words influences the last state.

    The states carried over all but the last ``count`` steps are cut out of the gradient.
    """
    lstm = LSTMDecoderLayer(section(architecture="recurrent")).lstm.double()

    def works(count: int) -> bool:
        words = torch.randn(1, length, 16, dtype=torch.float64)
        first = words[:, :1].clone().requires_grad_()
        state = None
        for place in range(length):
            word = first if place == 0 else words[:, place : place + 1]
            if state is not None and place < length - count:
                state = tuple(part.detach() for part in state)
            output, state = lstm(word, state)
        return felt(first, output)

    return smallest(works, length)


def measure_path() -> dict[str, Any]:
    torch.manual_seed(1)
    found = {
        kind: {str(length): layers_to_meet(make, length) for length in LENGTHS}
        for kind, make in LAYERS.items()
    }
    found["recurrent"] = {str(length): steps_to_meet(length) for length in LENGTHS}
    return found


# Steps: what cannot be done at once


def longest_chain(output: Tensor) -> int:
    """The most operations that wait for one another on the way to the output."""
    depth: dict[Any, int] = {}
    waiting = [output.grad_fn]
    while waiting:
        node = waiting[-1]
        before = [other for other, _ in node.next_functions if other is not None]
        missing = [other for other in before if other not in depth]
        if missing:
            waiting += missing
        else:
            depth[node] = 1 + max((depth[other] for other in before), default=0)
            waiting.pop()
    return depth[output.grad_fn]


def measure_steps() -> dict[str, Any]:
    """Of one layer, for texts of every length. In float64, for which torch has no fused LSTM on a CPU."""
    lstm = LSTMDecoderLayer(section(architecture="recurrent")).lstm.double()
    kinds = {kind: make(0) for kind, make in LAYERS.items()}
    kinds["recurrent"] = lambda x: lstm(x)[0]
    return {
        kind: {
            str(length): longest_chain(
                layer(torch.randn(1, length, 16, dtype=torch.float64, requires_grad=True))
            )
            for length in LENGTHS
        }
        for kind, layer in kinds.items()
    }


# Work: how it grows


class Size(NamedTuple):
    length: int = 256
    width: int = 64
    window: int = 8
    """taps of a convolution, reach of window attention"""


def attention_work(size: Size, **attention: Any) -> Callable[[], Any]:
    part = EncoderLayer(section(width=size.d_model, attention=attention)).attention.double()
    query = torch.randn(1, 2, size.length, size.d_model // 2, dtype=torch.float64)
    return lambda: part.pattern(part.attention, query, KeyValue(query, query), Mask())


def window_attention_work(size: Size) -> Callable[[], Any]:
    return attention_work(size, encoder="window", reach=size.window)


def recurrent_work(size: Size) -> Callable[[], Any]:
    lstm = LSTMDecoderLayer(section(architecture="recurrent", width=size.d_model)).lstm.double()
    x = torch.randn(1, size.length, size.d_model, dtype=torch.float64)
    return lambda: lstm(x)


def convolution_work(size: Size) -> Callable[[], Any]:
    model = section(architecture="convolution", width=size.d_model, kernel=size.window)
    window = ConvolutionEncoderLayer(model).window.double()
    x = torch.randn(1, size.length + size.window - 1, size.d_model, dtype=torch.float64)
    return lambda: window(x)


WORK: dict[str, Callable[[Size], Callable[[], Any]]] = {
    "self-attention": attention_work,
    "recurrent": recurrent_work,
    "convolution": convolution_work,
    "window attention": window_attention_work,
}


def operations(run: Callable[[], Any]) -> int:
    # The kernel that is written out in products, which are what is counted.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of a straight line through the logarithms, by least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope


def measure_work() -> dict[str, Any]:
    """The exponents of length, width and window in the number of operations of one layer's own part."""
    tried = {
        "T": [Size(length=value) for value in (128, 256, 512, 1024)],
        "d": [Size(width=value) for value in (32, 64, 128, 256)],
        "window": [Size(window=value) for value in (4, 8, 16, 32)],
    }
    fields = {"T": "length", "d": "d_model", "window": "window"}
    return {
        kind: {
            name: round(
                exponent(
                    [getattr(size, fields[name]) for size in sizes],
                    [operations(make(size)) for size in sizes],
                ),
                3,
            )
            for name, sizes in tried.items()
        }
        for kind, make in WORK.items()
    }


# Speed: the recipes as they are, on batches like those of multi30k


class Batch(NamedTuple):
    source: Tensor
    target: Tensor
    wanted: Tensor


def batch(length: int, tokens: int, device: torch.device) -> Batch:
    """Random words in rows of nearly one length, as batches sorted by length are."""
    rows = max(1, tokens // length)
    ids = torch.randint(4, VOCABULARY, (3, rows, length))
    lengths = torch.randint(max(1, length - 2), length + 1, (rows, 1))
    lengths[0] = length
    ids = ids.masked_fill(torch.arange(length) >= lengths, PAD)
    return Batch(*ids.to(device))


class Trainee:
    """A network of a recipe that takes steps as the trainer does."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.recipe, self.device = recipe.load_recipe(name), device
        model, training = self.recipe.model, self.recipe.training
        network = ARCHITECTURES[model.architecture](model, VOCABULARY, VOCABULARY).to(device)
        self.objective = LOSSES[self.recipe.task](network, training).train()
        self.optimizer = OPTIMIZERS[training.optimizer](network.parameters(), training)

    def step(self, given: Batch) -> None:
        with autocast(self.recipe.training.precision, self.device):
            loss = self.objective(*given)
        (loss / (given.wanted != PAD).sum()).backward()
        nn.utils.clip_grad_norm_(self.objective.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def tokens_per_second(self, batches: Sequence[Batch]) -> float:
        # One thread is timed by the processor time it got, which does not count what others do meanwhile.
        alone = self.device.type == "cpu" and torch.get_num_threads() == 1
        clock = time.process_time if alone else time.perf_counter
        self.wait()
        start = clock()
        for given in batches:
            self.step(given)
        self.wait()
        tokens = sum(int((given.wanted != PAD).sum()) for given in batches)
        return tokens / (clock() - start)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Amount(NamedTuple):
    tokens: int
    """in a batch"""
    batches: int
    rounds: int
    lengths: list[int]


AMOUNTS = {
    "cpu": Amount(tokens=1024, batches=1, rounds=3, lengths=[16, 128]),
    "cuda": Amount(tokens=8192, batches=10, rounds=5, lengths=[16, 64, 256]),
}
"""16 tokens are a usual sentence of multi30k"""


def measure_speed(device: torch.device) -> dict[str, Any]:
    """Target tokens learned from in a second. All take turns, so that a busy machine is busy for all."""
    amount = AMOUNTS[device.type]
    torch.manual_seed(1)
    trainees = {name: Trainee(file, device) for name, file in RECIPES.items()}
    found: dict[str, Any] = {}
    for length in amount.lengths:
        batches = [batch(length, amount.tokens, device) for _ in range(amount.batches)]
        for trainee in trainees.values():
            trainee.step(batches[0])  # the first use of a shape takes long
        rounds = [
            {name: trainee.tokens_per_second(batches) for name, trainee in trainees.items()}
            for _ in range(amount.rounds)
        ]
        found[str(length)] = {
            name: {
                "tokens_per_second": round(statistics.median(each[name] for each in rounds)),
                "to_transformer": round(
                    statistics.median(each[name] / each["Transformer"] for each in rounds), 2
                ),
            }
            for name in trainees
        }
    return {
        "hardware": hardware(device),
        "torch": torch.__version__,
        "tokens_per_batch": amount.tokens,
        "lengths": found,
    }


# Scores: from the cards of finished runs


def read_scores(runs: Path) -> dict[str, Any]:
    found = {}
    for name, run in RECIPES.items():
        path = runs / run / "card.json"
        if not path.is_file():
            print(f"{path} is not there: train it with  regard train {run}")
            continue
        card = json.loads(path.read_text(encoding="utf-8"))
        bleu = next((result for result in card["test"] if result["measure"] == "bleu"), None)
        assert bleu is not None, f"{path} has no BLEU of a test"
        kept = ("steps", "seconds", "parameters", "hardware")
        found[name] = {"bleu": bleu} | {key: card[key] for key in kept if key in card}
    return found


# The page


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" + "|--:" * (len(head) - 1) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def at_equal_size(results: dict[str, Any]) -> Iterator[str]:
    speeds = {kind: results[key] for kind in ("cpu", "cuda") if (key := f"speed_{kind}") in results}
    columns = [(kind, length) for kind, speed in speeds.items() for length in speed["lengths"]]
    names = {"cpu": "CPU", "cuda": "GPU"}
    head = ["multi30k", "parameters", "test BLEU", "steps to read T words"]
    head += [f"tokens/s, {names[kind]}, T = {length}" for kind, length in columns]
    rows = []
    for name, file in RECIPES.items():
        model = recipe.load_recipe(file).model
        layers = model.encoder_layers + model.decoder_layers
        score = results.get("scores", {}).get(name)
        row = [f"{name} (`{file}`)", f"{parameters(model):,}"]
        row.append(f"{score['bleu']['value']:.1f}" if score else "–")
        row.append(f"{layers} T" if name == "recurrent" else f"{layers}")
        for kind, length in columns:
            one = speeds[kind]["lengths"][length][name]
            row.append(f"{one['tokens_per_second']:,} ({one['to_transformer']:.2f} x)")
        rows.append(row)
    yield from table(head, rows)
    yield ""
    for kind, speed in speeds.items():
        yield (
            f"{names[kind]}: {speed['hardware']}, torch {speed['torch']}, batches of "
            f"{speed['tokens_per_batch']:,} tokens; in brackets the median over turns of the ratio to the Transformer."
        )
    yield (
        "All are padded and uncompiled: packed and recorded batches, which only the Transformer can have on a GPU "
        "([training](training.md#fast-on-a-gpu)), are left out."
    )


KINDS = {
    "self-attention": "O(T² d), O(1), O(1)",
    "recurrent": "O(T d²), O(T), O(T)",
    "convolution": f"O(k T d²), O(1), O(T / k); k = {KERNEL}",
    "convolution, dilated": "O(k T d²), O(1), O(log_k T)",
    "window attention": f"O(r T d), O(1), O(T / r); r = {REACH}",
}
"""what the paper says of work, steps and path"""


def parameters(model: recipe.Model) -> int:
    with torch.device("meta"):
        network = ARCHITECTURES[model.architecture](model, VOCABULARY, VOCABULARY)
    return sum(weight.numel() for weight in network.parameters())


def growth(results: dict[str, Any]) -> Iterator[str]:
    head = ["", "the paper: work, steps, path", "work measured"]
    head += [f"chain, T = {length}" for length in ("8", "64", "512")]
    head += [f"path, T = {length}" for length in ("8", "64", "512")]
    rows = []
    for kind, claim in KINDS.items():
        powers = results["work"].get(kind)
        row = [kind, claim, "as above" if powers is None else formula(powers)]
        row += [str(results["steps"][kind][length]) for length in ("8", "64", "512")]
        row += [str(results["path"][kind][length]) for length in ("8", "64", "512")]
        rows.append(row)
    yield from table(head, rows)


def formula(powers: dict[str, float]) -> str:
    names = {"T": "T", "d": "d", "window": "w"}
    return " ".join(f"{names[key]}^{value:.2f}" for key, value in powers.items() if value)


def claims(results: dict[str, Any]) -> Iterator[str]:
    """Each claim of the paper with what was measured, and whether it holds."""
    steps, path = results["steps"], results["path"]
    chain = exponent(*numbers(steps["recurrent"]))
    others = all(steps[kind]["8"] == steps[kind]["512"] for kind in LAYERS)
    yield verdict(
        "O(T) unparallelisable steps in a recurrent layer, O(1) in the others",
        f"the longest chain of operations grows as T^{chain:.2f} in an LSTM, and "
        + ("not at all in the others" if others else "in others too"),
        0.9 < chain < 1.1 and others,
    )
    for kind, name in (("cpu", "CPU"), ("cuda", "GPU")):
        if f"speed_{kind}" not in results:
            continue
        lengths = results[f"speed_{kind}"]["lengths"]
        ratios = {length: one["recurrent"]["to_transformer"] for length, one in lengths.items()}
        yield verdict(
            f"slower to train at equal size ({name})",
            "an LSTM learns "
            + ", ".join(
                f"{ratio:.2f} times as fast at T = {length}" for length, ratio in ratios.items()
            ),
            holds_from(ratios),
        )
    far = exponent(*numbers(path["recurrent"]))
    yield verdict(
        "distant words interact after O(T) steps in a recurrent layer, after one layer of self-attention",
        f"the path from the first word to the last is {path['recurrent']['512']} steps for T = 512 and grows "
        f"as T^{far:.2f}; that of self-attention is {path['self-attention']['512']}",
        0.9 < far < 1.1 and set(path["self-attention"].values()) == {1},
    )
    reach = KERNEL // 2
    wanted = {length: math.ceil((int(length) - 1) / reach) for length in path["convolution"]}
    yield verdict(
        "windows: parallel, but distance = T / window unless layers are stacked",
        f"with k = {KERNEL} a word is heard {reach} farther with each layer: {path['convolution']['512']} layers for "
        f"T = 512; with holes that widen from layer to layer {path['convolution, dilated']['512']}",
        path["convolution"] == wanted and others,
    )


def numbers(by_length: dict[str, int]) -> tuple[list[float], list[float]]:
    return [float(length) for length in by_length], [float(value) for value in by_length.values()]


def holds_from(ratios: dict[str, float]) -> bool | str:
    """Whether an LSTM is slower at every length, at none, or from which on."""
    slower = [length for length, ratio in ratios.items() if ratio < 1]
    if not slower or len(slower) == len(ratios):
        return bool(slower)
    return f"holds from T = {slower[0]} on"


def verdict(claim: str, measured: str, holds: bool | str) -> str:
    told = holds if isinstance(holds, str) else "holds" if holds else "does not hold"
    return f"- *{claim}*: **{told}**; {measured}."


def write_page(results: dict[str, Any]) -> None:
    """Put the tables between the markers of the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, make in (("equal size", at_equal_size), ("growth", growth), ("claims", claims)):
        start, end = (
            f"<!-- {name}: written by benchmarks/baselines.py -->",
            f"<!-- end of {name} -->",
        )
        before, _, rest = text.partition(start)
        _, ended, after = rest.partition(end)
        assert ended, f"{PAGE} has no {start} … {end}"
        text = "\n".join([before + start, "", *make(results), "", end + after])
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parts = {"path": measure_path, "steps": measure_steps, "work": measure_work}
    parser = argparse.ArgumentParser(
        description="LSTMs and windows of words beside the Transformer"
    )
    parser.add_argument("--part", action="append", choices=[*parts, "speed", "scores"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of speed")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs scored")
    parser.add_argument("--out", type=Path, help="write this JSON file, and no page")
    options = parser.parse_args()
    path = options.out or RESULTS
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for part in options.part or [*parts, "speed"]:
        start = time.monotonic()
        if part == "speed":
            results[f"speed_{options.device}"] = measure_speed(torch.device(options.device))
        elif part == "scores":
            results["scores"] = results.get("scores", {}) | read_scores(options.runs)
        else:
            results[part] = parts[part]()
        print(f"{part}: {time.monotonic() - start:.0f} s", flush=True)
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if options.out is None:
        write_page(results)


if __name__ == "__main__":
    main()
