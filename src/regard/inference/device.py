"""The device to compute on: a GPU or the CPU."""

from __future__ import annotations

import torch

from regard.errors import RegardError
from regard.recipe import Device


def default_device() -> torch.device:
    """What ``auto`` means for devices: a GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_device(device: Device) -> torch.device:
    """The device to compute on."""
    if device == "auto":
        return default_device()
    if device == "cuda" and not torch.cuda.is_available():
        raise RegardError("device cuda: torch finds no GPU; use device cpu or auto")
    return torch.device(device)
