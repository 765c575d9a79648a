"""Presets: model sizes by name. A preset only fills in the keys that a recipe leaves out."""

from typing import Any, Literal

Preset = Literal["tiny", "small", "fast", "base", "big", "huge"]

PRESETS: dict[Preset, dict[str, Any]] = {
    "tiny": {"encoder_layers": 4, "decoder_layers": 4, "d_model": 128, "d_ff": 256}
    | {"heads": 4, "dropout": 0.3},
    "small": {"encoder_layers": 6, "decoder_layers": 6, "d_model": 256, "d_ff": 1024}
    | {"heads": 4, "dropout": 0.3},
    "fast": {"encoder_layers": 8, "decoder_layers": 1, "d_model": 256, "d_ff": 1024}
    | {"heads": 4, "dropout": 0.3},
    "base": {"encoder_layers": 6, "decoder_layers": 6, "d_model": 512, "d_ff": 2048}
    | {"heads": 8, "dropout": 0.1},
    "big": {"encoder_layers": 6, "decoder_layers": 6, "d_model": 1024, "d_ff": 4096}
    | {"heads": 16, "dropout": 0.3},
    "huge": {"encoder_layers": 24, "decoder_layers": 24, "d_model": 1024, "d_ff": 8192}
    | {"heads": 16, "dropout": 0.1},
}
"""``base`` and ``big`` are the paper's (table 3). ``fast`` has a deep encoder and a shallow decoder: the encoder runs
once for each sentence, the decoder once for each token and hypothesis (Kasai et al. 2021). ``huge`` has the layers of
NLLB-200 1.3B (NLLB Team 2022): 1.1 billion parameters with 32,000 vocabulary entries."""

BATCH_TOKENS: dict[Preset, int] = {
    "tiny": 4_096,
    "small": 8_192,
    "fast": 8_192,
    "base": 25_000,
    "big": 25_000,
    "huge": 100_000,
}
"""The batch of ``training.tokens_per_batch: auto``: the paper's for its models, less for smaller ones."""
