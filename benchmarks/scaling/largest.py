"""The largest Transformer whose training step fits into the memory of a GPU, with and without activation checkpointing.

The models have layers of width 2,048 and feed-forward width 8,192, as many in the encoder as in the decoder, and Adam.
Their number is found by bisection. A batch has ``--sentences`` sentences of 32 random tokens on each side.
"""

import argparse
import gc
import time
from typing import Any

import torch

from regard.nn.loss import Seq2SeqLoss
from regard.nn.network import checkpoint_activations
from regard.recipe import make_recipe
from regard.training.model_card import hardware
from regard.training.out_of_memory import is_out_of_memory
from regard.training.train_step import StepScalars
from scaling.random_model import VOCABULARY, RandomModel

WIDTH, TOKENS = 2_048, 32


def train_steps(
    layers: int, sentences: int, checkpointing: bool, device: torch.device
) -> dict[str, Any]:
    """Two steps of a model with this many layers on each side: its size, peak memory, and time of the second step."""
    sizes = {"d_model": WIDTH, "heads": WIDTH // 64, "d_ff": 4 * WIDTH}
    model = {**sizes, "encoder_layers": layers, "decoder_layers": layers, "norm_order": "pre"}
    recipe = make_recipe({"data": {"train": {"pairs": "x"}}, "model": model}, "largest")

    def change(loss_fn: Seq2SeqLoss) -> None:
        if checkpointing:
            checkpoint_activations(loss_fn.network)

    random_model = RandomModel.of(recipe, device, change)
    ids = torch.randint(10, VOCABULARY, (sentences, TOKENS), device=device)
    for _ in range(2):
        start = time.monotonic()
        loss = float(random_model.train(ids, StepScalars(1 / ids.numel(), 1e-4)))
    assert loss > 0, "the step has no loss"
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        "layers": layers,
        "parameters": sum(one.numel() for one in random_model.loss_fn.parameters()),
        "seconds_per_step": round(time.monotonic() - start, 3),
        "peak_gigabytes": round(memory / 1e9, 1),
    }


def largest(sentences: int, checkpointing: bool, device: torch.device, most: int) -> dict[str, Any]:
    """The result of the largest number of layers that fits, at most ``most``."""
    fits, fails, found = 0, most + 1, {}
    while fails - fits > 1:
        layers = (fits + fails) // 2
        try:
            found, fits = train_steps(layers, sentences, checkpointing, device), layers
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            fails = layers
        print(f"{layers} layers: {'fit' if fits == layers else 'do not fit'}", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sentences", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--most", type=int, default=63, help="largest number of layers to try")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    found: dict[str, Any] = {
        "hardware": hardware(device),
        "tokens_per_batch": options.sentences * TOKENS,
    }
    for checkpointing in (False, True):
        key = "with" if checkpointing else "without"
        found[f"{key} activation checkpointing"] = largest(
            options.sentences, checkpointing, device, options.most
        )
    return found


def figures(record: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("tokens of a batch", f"{record['tokens_per_batch']:,}")]
    for key in ("without", "with"):
        name = f"{key} activation checkpointing"
        found = record[name]
        rows += [
            (f"parameters, {name}", f"{found['parameters']:,}"),
            (f"layers, {name}", f"{found['layers']} + {found['layers']}"),
            (f"peak memory, {name}", f"{found['peak_gigabytes']} GB"),
            (f"step, {name}", f"{found['seconds_per_step']} s"),
        ]
    return rows
