"""The largest Transformer whose training step fits into the memory of a GPU, with and without activation checkpointing.

    python benchmarks/largest_model.py --json benchmarks/largest_model.json

The models have layers of width 2,048 and feed-forward width 8,192, as many in the encoder as in the decoder, and Adam.
Their number is found by bisection. A batch has ``--sentences`` sentences of 32 random tokens on each side.
"""

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch

from regard.data.batching import Batch
from regard.nn.architectures import ARCHITECTURES
from regard.nn.loss import Seq2SeqLoss
from regard.nn.network import checkpoint_activations
from regard.recipe import make_recipe
from regard.training.optimizers_and_schedules import OPTIMIZERS
from regard.training.train_step import StepScalars, TrainStep, is_out_of_memory

WIDTH, TOKENS, VOCABULARY = 2_048, 32, 32_000


def train_steps(
    layers: int, sentences: int, checkpointing: bool, device: torch.device
) -> dict[str, Any]:
    """Two steps of a model with this many layers on each side: its size, peak memory, and time of the second step."""
    sizes = {"d_model": WIDTH, "heads": WIDTH // 64, "d_ff": 4 * WIDTH}
    model = {**sizes, "encoder_layers": layers, "decoder_layers": layers, "norm_order": "pre"}
    recipe = make_recipe({"data": {"train": {"pairs": "x"}}, "model": model}, "largest_model")
    with torch.device("meta"):
        network = ARCHITECTURES["transformer"](recipe.model, VOCABULARY, VOCABULARY)
    loss_fn = Seq2SeqLoss(network, recipe.training)
    loss_fn.to_empty(device=device)
    for parameter in loss_fn.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if checkpointing:
        checkpoint_activations(network)
    optimizer = OPTIMIZERS["adam"](loss_fn.parameters(), recipe.training)
    step = TrainStep(loss_fn, optimizer, recipe.training, device)
    ids = torch.randint(10, VOCABULARY, (sentences, TOKENS), device=device)
    for _ in range(2):
        start = time.monotonic()
        loss = float(step([Batch(ids, ids, ids)], StepScalars(1 / ids.numel(), 1e-4)))
    assert loss > 0, "the step has no loss"
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        "layers": layers,
        "parameters": sum(one.numel() for one in network.parameters()),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--sentences", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--most", type=int, default=63, help="largest number of layers to try")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    result: dict[str, Any] = {"device": name, "tokens_per_batch": given.sentences * TOKENS}
    for checkpointing in (False, True):
        key = "with" if checkpointing else "without"
        found = largest(given.sentences, checkpointing, device, given.most)
        result[f"{key} activation checkpointing"] = found
    print(json.dumps(result, indent=2))
    if given.json:
        given.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
