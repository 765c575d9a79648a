"""Translation with Ray Data: actors with one model each, on any number of machines.

    import ray
    import regard.ray

    rows = ray.data.read_parquet("in/")
    rows = rows.map_batches(
        regard.ray.Translate,
        fn_constructor_kwargs={"run": "runs/big", "beam": 4},
        batch_size=1024,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=8),
    )
    rows.write_parquet("out/")

With a minimum of one actor, translation continues when machines are lost. Ray runs a batch again if its machine is
lost, and a file that is written twice has the same name, so no row is lost or written twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from regard.errors import RegardError
from regard.recipe import DecodingOptions, Device, Precision
from regard.tasks import Translator

Batch: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""the columns of some rows, as Ray Data passes them by default"""


class Translate:
    """A class for ``map_batches``: adds the columns ``translation`` and ``confidence``."""

    def __init__(
        self,
        run: str | PathLike[str] | Sequence[str | PathLike[str]],
        column: str = "source",
        to: str | None = None,
        device: Device = "auto",
        precision: Precision = "auto",
        threads: int | None = None,
        **options: Unpack[DecodingOptions],
    ) -> None:
        """run: a run folder that all machines can read, or several for an ensemble.

        column: the column with the texts. to: the target language of a multilingual model.
        threads: the number of batches to process at a time on a CPU; by default the ``num_cpus`` of the actor.
        options: override the decoding section of the recipe.
        """
        self.column, self.options = column, options
        model = Translator.load(run, device, precision, threads or assigned_cores())
        self.model = model.with_target_language(to)

    def __call__(self, batch: Batch) -> dict[str, npt.NDArray[Any]]:
        if self.column not in batch:
            raise RegardError(
                f"no column {self.column}; choose one with column=: {', '.join(batch) or 'there is none'}"
            )
        # As ``regard translate`` reads Parquet: missing texts are empty, and line breaks become spaces.
        texts = [" ".join((text or "").splitlines()) for text in batch[self.column].tolist()]
        best_translations = [best for best, *_ in self.model.search(texts, **self.options)]
        return {
            **batch,
            "translation": np.array(
                [translation.text for translation in best_translations], object
            ),
            "confidence": np.array(
                [translation.confidence for translation in best_translations], np.float64
            ),
        }


def assigned_cores() -> int:
    """The number of cores that Ray gives to the present actor or task, at least one."""
    try:
        import ray
    except ImportError:
        raise RegardError("regard.ray needs ray: pip install 'regard[ray]'") from None
    assigned = ray.get_runtime_context().get_assigned_resources()
    return max(1, int(assigned.get("CPU", 1)))
