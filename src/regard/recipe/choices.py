"""Choices that no component implements: names that recipes and options share."""

from typing import Literal

Preset = Literal["tiny", "small", "fast", "base", "big"]
Batching = Literal["padded", "packed"]
Average = Literal["best", "last", "none"]
BestCheckpointMetric = Literal["loss", "score"]
Device = Literal["auto", "cpu", "cuda"]
TrainingPrecision = Literal["auto", "fp32", "bf16"]
Precision = Literal[TrainingPrecision, "int8"]
AttentionSite = Literal["encoder", "decoder", "cross_attention"]
"""where attention is used: self-attention of either stack, or cross-attention"""
