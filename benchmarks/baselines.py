"""The Transformer against LSTMs and convolutions of equal size: every claim of the paper, measured.

    python benchmarks/baselines.py                                  # steps, path, work, speed on this machine
    python benchmarks/baselines.py --part speed --device cuda       # one part only; under a minute on a GPU
    python benchmarks/baselines.py --part scores --runs runs        # BLEU, from the cards of finished runs

The results are written to benchmarks/baselines.json, next to those of other parts and machines, and from there into the
tables of docs/baselines.md.
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
from reporting import growth_exponent, markdown_table, replace_section
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from regard import recipe
from regard.data.special_tokens import PAD
from regard.inference.precision import autocast
from regard.nn.architectures import ARCHITECTURES
from regard.nn.attention_mask import AttentionMask
from regard.nn.convolution import ConvolutionEncoderLayer
from regard.nn.kv_cache import KeyValue
from regard.nn.layers import EncoderLayer
from regard.nn.loss import Seq2SeqLoss
from regard.nn.lstm import LSTMDecoderLayer
from regard.training.model_card import hardware
from regard.training.optimizers import OPTIMIZERS

RESULTS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[1] / "docs" / "baselines.md"
RECIPES = {
    "Transformer": "multi30k-transformer",
    "recurrent": "multi30k-lstm",
    "convolution": "multi30k-convolution",
}
VOCAB_SIZE = 8000
KERNEL, WINDOW = 3, 8
LENGTHS = [8, 16, 32, 64, 128, 256, 512]

Layer = Callable[[Tensor], Tensor]
"""from a sequence [1, T, d] to another"""


def section(**model: Any) -> recipe.ModelConfig:
    """A small model without dropout, with post-norm, whose gradients do not underflow."""
    sizes = {"preset": "tiny", "d_model": 16, "heads": 2, "dropout": 0.0, "position": "none"}
    values = {"data": {"train": {"pairs": "none"}}, "model": {**sizes, **model}}
    return recipe.make_recipe(values, "benchmark").model


# ---------------------------------------------------------------------------------------------
# Layers


def attention_layer(number: int, **attention: Any) -> Layer:
    layer = EncoderLayer(section(attention=attention)).double()
    return lambda x: layer(x, AttentionMask())


def window_attention_layer(number: int) -> Layer:
    return attention_layer(number, encoder="window", window_size=WINDOW)


def convolution_layer(number: int) -> Layer:
    layer = ConvolutionEncoderLayer(
        section(architecture="convolution", kernel_size=KERNEL)
    ).double()
    return lambda x: layer(x, AttentionMask(), None)


def dilated_layer(number: int) -> Layer:
    """A causal convolution with dilation kernel^n in layer n, so that n layers reach kernel^n tokens back."""
    layer = ConvolutionEncoderLayer(
        section(architecture="convolution", kernel_size=KERNEL)
    ).double()
    convolution, apart = layer.convolution.convolution, KERNEL**number
    convolution.dilation = (apart,)
    ends = (0, 0, apart * (KERNEL - 1), 0)
    return lambda x: layer.residual(x, lambda y: layer.convolution(F.pad(y, ends)), None)


LAYERS: dict[str, Callable[[int], Layer]] = {
    "self-attention": attention_layer,
    "convolution": convolution_layer,
    "convolution, dilated": dilated_layer,
    "window attention": window_attention_layer,
}


# ---------------------------------------------------------------------------------------------
# Path: layers or steps until the first token influences the last


def influences(first: Tensor, last: Tensor) -> bool:
    """Whether the first token influences the last output: the gradient is not exactly zero."""
    # A random direction, because the features of a normalised output sum to a constant.
    direction = torch.randn(last.shape, dtype=last.dtype)
    (gradient,) = torch.autograd.grad((last * direction).sum(), first, allow_unused=True)
    return gradient is not None and bool(gradient.any())


def smallest(works: Callable[[int], bool], limit: int) -> int:
    """The smallest number from 1 to ``limit`` for which ``works`` is true; it must be monotonic."""
    low, high = 0, 1
    while not works(high):
        low, high = high, 2 * high
        assert low < limit, "no number works"
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high


def layers_to_interact(make: Callable[[int], Layer], length: int) -> int:
    """How many layers it takes until the first of ``length`` tokens influences the last."""
    layers: list[Layer] = []

    def works(count: int) -> bool:
        layers.extend(make(number) for number in range(len(layers), count))
        tokens = torch.randn(1, length, 16, dtype=torch.float64)
        first = tokens[:, :1].clone().requires_grad_()
        x = torch.cat([first, tokens[:, 1:]], dim=1)
        for layer in layers[:count]:
            x = layer(x)
        return influences(first, x[:, -1])

    return smallest(works, length)


def steps_to_interact(length: int) -> int:
    """How many steps of a recurrence it takes until the first of ``length`` tokens influences the last state.

    States before the last ``count`` steps are detached from the gradient.
    """
    lstm = LSTMDecoderLayer(section(architecture="lstm")).lstm.double()

    def works(count: int) -> bool:
        tokens = torch.randn(1, length, 16, dtype=torch.float64)
        first = tokens[:, :1].clone().requires_grad_()
        state = None
        for position in range(length):
            token = first if position == 0 else tokens[:, position : position + 1]
            if state is not None and position < length - count:
                state = tuple(tensor.detach() for tensor in state)
            output, state = lstm(token, state)
        return influences(first, output)

    return smallest(works, length)


def measure_path() -> dict[str, Any]:
    torch.manual_seed(1)
    found = {
        kind: {str(length): layers_to_interact(make, length) for length in LENGTHS}
        for kind, make in LAYERS.items()
    }
    found["recurrent"] = {str(length): steps_to_interact(length) for length in LENGTHS}
    return found


# ---------------------------------------------------------------------------------------------
# Steps: sequential operations


def longest_chain(output: Tensor) -> int:
    """The longest chain of operations in which each depends on the one before."""
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
    """The chains of one layer for each length; in float64, for which PyTorch has no fused LSTM on a CPU."""
    lstm = LSTMDecoderLayer(section(architecture="lstm")).lstm.double()
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


# ---------------------------------------------------------------------------------------------
# Work: how the number of operations grows


class Size(NamedTuple):
    length: int = 256
    d_model: int = 64
    window: int = 8
    """kernel size of a convolution, window of window attention"""


def attention_work(size: Size, **attention: Any) -> Callable[[], Any]:
    module = EncoderLayer(section(d_model=size.d_model, attention=attention)).attention.double()
    query = torch.randn(1, 2, size.length, size.d_model // 2, dtype=torch.float64)
    return lambda: module.pattern(module.attention, query, KeyValue(query, query), AttentionMask())


def window_attention_work(size: Size) -> Callable[[], Any]:
    return attention_work(size, encoder="window", window_size=size.window)


def recurrent_work(size: Size) -> Callable[[], Any]:
    lstm = LSTMDecoderLayer(section(architecture="lstm", d_model=size.d_model)).lstm.double()
    x = torch.randn(1, size.length, size.d_model, dtype=torch.float64)
    return lambda: lstm(x)


def convolution_work(size: Size) -> Callable[[], Any]:
    model = section(architecture="convolution", d_model=size.d_model, kernel_size=size.window)
    window = ConvolutionEncoderLayer(model).convolution.double()
    x = torch.randn(1, size.length + size.window - 1, size.d_model, dtype=torch.float64)
    return lambda: window(x)


WORK: dict[str, Callable[[Size], Callable[[], Any]]] = {
    "self-attention": attention_work,
    "recurrent": recurrent_work,
    "convolution": convolution_work,
    "window attention": window_attention_work,
}


def operations(run: Callable[[], Any]) -> int:
    # The explicit kernel, because matrix products are counted.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def measure_work() -> dict[str, Any]:
    """The exponents of length, d_model and window in the number of operations of one layer."""
    tried = {
        "T": [Size(length=value) for value in (128, 256, 512, 1024)],
        "d": [Size(d_model=value) for value in (32, 64, 128, 256)],
        "window": [Size(window=value) for value in (4, 8, 16, 32)],
    }
    fields = {"T": "length", "d": "d_model", "window": "window"}
    return {
        kind: {
            name: round(
                growth_exponent(
                    [getattr(size, fields[name]) for size in sizes],
                    [operations(make(size)) for size in sizes],
                ),
                3,
            )
            for name, sizes in tried.items()
        }
        for kind, make in WORK.items()
    }


# ---------------------------------------------------------------------------------------------
# Speed: training steps of the recipes, on batches like those of multi30k


class RandomBatch(NamedTuple):
    source: Tensor
    target: Tensor
    labels: Tensor


def random_batch(length: int, tokens: int, device: torch.device) -> RandomBatch:
    """Random tokens in rows of similar length, like batches sorted by length."""
    rows = max(1, tokens // length)
    ids = torch.randint(4, VOCAB_SIZE, (3, rows, length))
    lengths = torch.randint(max(1, length - 2), length + 1, (rows, 1))
    lengths[0] = length
    ids = ids.masked_fill(torch.arange(length) >= lengths, PAD)
    return RandomBatch(*ids.to(device))


class RecipeTrainer:
    """The network of a recipe, with training steps like those of the trainer."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.recipe, self.device = recipe.load_recipe(name), device
        model, training = self.recipe.model, self.recipe.training
        network = ARCHITECTURES[model.architecture](model, VOCAB_SIZE, VOCAB_SIZE).to(device)
        self.loss = Seq2SeqLoss(network, training).train()
        self.optimizer = OPTIMIZERS[training.optimizer](network, training)

    def step(self, given: RandomBatch) -> None:
        with autocast(self.recipe.training.precision, self.device):
            loss = self.loss(*given)
        (loss / (given.labels != PAD).sum()).backward()
        nn.utils.clip_grad_norm_(self.loss.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def tokens_per_second(self, batches: Sequence[RandomBatch]) -> float:
        # A single thread is measured in CPU time, which does not include other load on the machine.
        single_thread = self.device.type == "cpu" and torch.get_num_threads() == 1
        clock = time.process_time if single_thread else time.perf_counter
        self.synchronize()
        start = clock()
        for given in batches:
            self.step(given)
        self.synchronize()
        tokens = sum(int((given.labels != PAD).sum()) for given in batches)
        return tokens / (clock() - start)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Workload(NamedTuple):
    tokens: int
    """per batch"""
    batches: int
    repeats: int
    lengths: list[int]


WORKLOADS = {
    "cpu": Workload(tokens=1024, batches=1, repeats=3, lengths=[16, 128]),
    "cuda": Workload(tokens=8192, batches=10, repeats=5, lengths=[16, 64, 256]),
}
"""16 tokens are a typical sentence of multi30k"""


def measure_speed(device: torch.device) -> dict[str, Any]:
    """Target tokens per second of training. The recipes take turns, so that other load affects all alike."""
    workload = WORKLOADS[device.type]
    torch.manual_seed(1)
    trainers = {name: RecipeTrainer(file, device) for name, file in RECIPES.items()}
    found: dict[str, Any] = {}
    for length in workload.lengths:
        batches = [random_batch(length, workload.tokens, device) for _ in range(workload.batches)]
        for trainer in trainers.values():
            trainer.step(batches[0])  # warm-up: the first use of a shape is slow
        repeated = [
            {name: trainer.tokens_per_second(batches) for name, trainer in trainers.items()}
            for _ in range(workload.repeats)
        ]
        found[str(length)] = {
            name: {
                "tokens_per_second": round(statistics.median(each[name] for each in repeated)),
                "to_transformer": round(
                    statistics.median(each[name] / each["Transformer"] for each in repeated), 2
                ),
            }
            for name in trainers
        }
    return {
        "hardware": hardware(device),
        "torch": torch.__version__,
        "tokens_per_batch": workload.tokens,
        "lengths": found,
    }


# ---------------------------------------------------------------------------------------------
# Scores: from the cards of finished runs


def read_scores(runs: Path) -> dict[str, Any]:
    found = {}
    for name, run in RECIPES.items():
        path = runs / run / "card.json"
        if not path.is_file():
            print(f"{path} does not exist: run  regard train {run}")
            continue
        card = json.loads(path.read_text(encoding="utf-8"))
        bleu = next((result for result in card["test"] if result["metric"] == "bleu"), None)
        assert bleu is not None, f"{path} has no BLEU of the test set"
        keys = ("steps", "seconds", "parameters", "hardware")
        found[name] = {"bleu": bleu} | {key: card[key] for key in keys if key in card}
    return found


# ---------------------------------------------------------------------------------------------
# The page


def at_equal_size(results: dict[str, Any]) -> Iterator[str]:
    speeds = {kind: results[key] for kind in ("cpu", "cuda") if (key := f"speed_{kind}") in results}
    columns = [(kind, length) for kind, speed in speeds.items() for length in speed["lengths"]]
    names = {"cpu": "CPU", "cuda": "GPU"}
    head = ["multi30k", "parameters", "test BLEU", "steps to read T tokens"]
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
    yield from markdown_table(head, rows)
    yield ""
    for kind, speed in speeds.items():
        yield (
            f"{names[kind]}: {speed['hardware']}, torch {speed['torch']}, batches of "
            f"{speed['tokens_per_batch']:,} tokens; in brackets the median ratio to the Transformer."
        )
    yield (
        "All use padded batches in eager mode. Packed batches in CUDA graphs, which only the Transformer supports "
        "([training](training.md#fast-on-a-gpu)), are not used."
    )


KINDS = {
    "self-attention": "O(T² d), O(1), O(1)",
    "recurrent": "O(T d²), O(T), O(T)",
    "convolution": f"O(k T d²), O(1), O(T / k); k = {KERNEL}",
    "convolution, dilated": "O(k T d²), O(1), O(log_k T)",
    "window attention": f"O(r T d), O(1), O(T / r); r = {WINDOW}",
}
"""the paper's Table 1: operations, sequential steps, maximum path length"""


def parameters(model: recipe.ModelConfig) -> int:
    with torch.device("meta"):
        network = ARCHITECTURES[model.architecture](model, VOCAB_SIZE, VOCAB_SIZE)
    return sum(weight.numel() for weight in network.parameters())


def growth(results: dict[str, Any]) -> Iterator[str]:
    head = ["", "the paper: work, steps, path", "measured work"]
    head += [f"chain, T = {length}" for length in ("8", "64", "512")]
    head += [f"path, T = {length}" for length in ("8", "64", "512")]
    rows = []
    for kind, claim in KINDS.items():
        powers = results["work"].get(kind)
        row = [kind, claim, "as above" if powers is None else formula(powers)]
        row += [str(results["steps"][kind][length]) for length in ("8", "64", "512")]
        row += [str(results["path"][kind][length]) for length in ("8", "64", "512")]
        rows.append(row)
    yield from markdown_table(head, rows)


def formula(powers: dict[str, float]) -> str:
    names = {"T": "T", "d": "d", "window": "w"}
    return " ".join(f"{names[key]}^{value:.2f}" for key, value in powers.items() if value)


def claims(results: dict[str, Any]) -> Iterator[str]:
    """Each claim of the paper, with the measurement and whether it holds."""
    steps, path = results["steps"], results["path"]
    chain = growth_exponent(*by_size(steps["recurrent"]))
    others = all(steps[kind]["8"] == steps[kind]["512"] for kind in LAYERS)
    yield verdict(
        "O(T) sequential steps in a recurrent layer, O(1) in the others",
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
            "an LSTM trains "
            + ", ".join(
                f"{ratio:.2f} times as fast at T = {length}" for length, ratio in ratios.items()
            ),
            holds_from(ratios),
        )
    far = growth_exponent(*by_size(path["recurrent"]))
    yield verdict(
        "distant tokens interact after O(T) steps in a recurrent layer, after one layer of self-attention",
        f"the path from the first token to the last is {path['recurrent']['512']} steps for T = 512 and grows "
        f"as T^{far:.2f}; that of self-attention is {path['self-attention']['512']}",
        0.9 < far < 1.1 and set(path["self-attention"].values()) == {1},
    )
    radius = KERNEL // 2
    expected = {length: math.ceil((int(length) - 1) / radius) for length in path["convolution"]}
    yield verdict(
        "convolutions: parallel, but it takes T / window layers to connect distant tokens",
        f"with k = {KERNEL} each layer reaches {radius} token farther: {path['convolution']['512']} layers for "
        f"T = 512; with dilation {path['convolution, dilated']['512']}",
        path["convolution"] == expected and others,
    )


def by_size(by_length: dict[str, int]) -> tuple[list[float], list[float]]:
    return [float(length) for length in by_length], [float(value) for value in by_length.values()]


def holds_from(ratios: dict[str, float]) -> bool | str:
    """Whether an LSTM is slower at every length, at none, or from which length on."""
    slower = [length for length, ratio in ratios.items() if ratio < 1]
    if not slower or len(slower) == len(ratios):
        return bool(slower)
    return f"holds from T = {slower[0]} on"


def verdict(claim: str, measured: str, holds: bool | str) -> str:
    answer = holds if isinstance(holds, str) else "holds" if holds else "does not hold"
    return f"- *{claim}*: **{answer}**; {measured}."


def with_tables(text: str, results: dict[str, Any]) -> str:
    """The text of the page with its tables between the markers."""
    for name, make in (("equal size", at_equal_size), ("growth", growth), ("claims", claims)):
        begin = f"<!-- {name}: written by benchmarks/baselines.py -->\n"
        end = f"<!-- end of {name} -->\n"
        content = "\n".join(["", *make(results), "", ""])
        text = replace_section(PAGE, text, begin, end, content)
    return text


def main() -> None:
    parts = {"path": measure_path, "steps": measure_steps, "work": measure_work}
    parser = argparse.ArgumentParser(description="The Transformer against LSTMs and convolutions")
    parser.add_argument("--part", action="append", choices=[*parts, "speed", "scores"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="for speed")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the scored runs")
    parser.add_argument("--out", type=Path, help="write this JSON file only, not the page")
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
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_tables(text, results), encoding="utf-8")


if __name__ == "__main__":
    main()
