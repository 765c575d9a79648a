"""The KV cache of step-by-step decoding: keys and values of the tokens decoded so far.

Beam search with packed weights shares keys and values between hypotheses: see ``inference/beam_kv_cache.py``.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class KeyValue(NamedTuple):
    """Keys and values, projected and split into heads."""

    key: Float[Tensor, "B g K dk"]
    value: Float[Tensor, "B g K dv"]

    def select(self, rows: Tensor) -> "KeyValue":
        return KeyValue(self.key.index_select(0, rows), self.value.index_select(0, rows))

    def concat(self, following: "KeyValue") -> "KeyValue":
        """These positions, followed by those of ``following``."""
        return KeyValue(
            torch.cat([self.key, following.key], dim=2),
            torch.cat([self.value, following.value], dim=2),
        )


@dataclass
class KVCache:
    """The KV cache of one self-attention: keys and values of the tokens decoded so far."""

    kv: KeyValue | None = None

    @property
    def length(self) -> int:
        return 0 if self.kv is None else self.kv.key.shape[2]

    def append(self, kv: KeyValue) -> KeyValue:
        """Add the newest positions; returns the keys and values of all positions."""
        self.kv = kv if self.kv is None else self.kv.concat(kv)
        return self.kv

    def select(self, rows: Tensor) -> "KVCache":
        return KVCache(None if self.kv is None else self.kv.select(rows))
