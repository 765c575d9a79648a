"""Training history: positions, learning rates, labels, log and checkpoints of a model, as values for the page to draw.

Every value comes from the function that training itself uses: the position encoding, the learning rate of each step,
the smoothed labels, the run's log and its checkpoints. A model without its run folder has the first three.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch

from regard.errors import RegardError
from regard.inference.engine import Request
from regard.inspection.hooks import Head, observe
from regard.inspection.page_data import lenses_for, model_info
from regard.inspection.teacher_forcing import check_supported
from regard.inspection.trace import Trace, pack, pack_uint8, trace
from regard.nn.loss import smoothed_target
from regard.nn.network import Network, copy_weights
from regard.nn.positions import NoPosition
from regard.storage.run_dir import RunDir
from regard.tasks import Translator
from regard.training.checkpoint import checkpoint_files, checkpoint_step, checkpoint_weights
from regard.training.optimizers import learning_rate

if TYPE_CHECKING:
    from regard.data.dependency_trees import ParsedSentence
    from regard.recipe import DecodingOptions

POSITIONS = 64
"""rows of the position map"""
SCHEDULE_POINTS = 240
"""points of the learning rate curve"""
EXAMPLE_CLASSES = 5
"""classes of the small example of label smoothing"""
CACHED_ALIGNMENTS = 64


def trace_with_history(
    model: Translator,
    text: str,
    *,
    prefix: str = "",
    forced: Sequence[int] = (),
    mute: Sequence[Head] = (),
    parse: ParsedSentence | None = None,
    length: int | None = None,
    checkpoints: bool = False,
    lenses: bool = False,
    against: str | None = None,
    **options: Unpack[DecodingOptions],
) -> Trace:
    """A trace with the training history of its model.

    prefix, forced, mute, parse, length, options: as for ``trace``. checkpoints: add the alignment at each checkpoint of
    the run. lenses: add what the model would predict after each layer, and what each prediction depends on. against:
    another sentence, to find what makes the two translations differ (adds the lenses).
    """
    if lenses or against is not None:
        check_supported(model)
    traced = trace(
        model, text, prefix=prefix, forced=forced, mute=mute, parse=parse, length=length, **options
    )
    name = model.run.folder.resolve().name if model.run else "model"
    history = {**training_history(model), "model": model_info(model, name)}
    if checkpoints:
        request = model.request(text, parse)
        outputs = [token.id for token in traced.outputs]
        past = PastCheckpoints(model)
        if not past.steps():
            raise RegardError(f"{model.run}: the run has no checkpoints")
        history["alignments"] = [past.alignment(step, request, outputs) for step in past.steps()]
    computed = None
    if lenses or against is not None:
        computed = lenses_for(model, text, [token.id for token in traced.outputs], against)
    return replace(traced, history=history, lenses=computed)


def training_history(model: Translator) -> dict[str, Any]:
    """All of it. If the run is still training, its curves end at the current step."""
    return {
        "positions": positions(model),
        "schedule": schedule(model),
        "smoothing": smoothing(model),
        "curves": curves(model.run) if model.run else None,
        "checkpoints": PastCheckpoints(model).steps(),
    }


@torch.inference_mode()
def positions(model: Translator) -> dict[str, Any]:
    """The position encoding, and the dot products of two of its rows by their distance."""
    d_model, position_encoding = model.recipe.model.d_model, model.recipe.model.position
    modules = [module for module in model.network.modules() if isinstance(module, NoPosition)]
    # Some kinds act inside attention instead, and tree positions depend on the sentence.
    if position_encoding == "tree" or not modules or type(modules[0]) is NoPosition:
        return {"kind": position_encoding, "map": None}
    length = min(POSITIONS, model.network.max_length or POSITIONS)
    zeros = torch.zeros(1, length, d_model, device=model.device)
    encoding = modules[0](zeros)[0].double().cpu().numpy()
    products = encoding @ encoding.T
    distances = range(1 - length, length)
    by_distance = [np.diagonal(products, distance) for distance in distances]
    return {
        "kind": position_encoding,
        "map": pack(encoding.astype(np.float32)),
        "distances": list(distances),
        "mean": [float(row.mean()) for row in by_distance],
        "min": [float(row.min()) for row in by_distance],
        "max": [float(row.max()) for row in by_distance],
    }


def schedule(model: Translator) -> dict[str, Any]:
    """The learning rate over the steps of the recipe."""
    training, d_model = model.recipe.training, model.recipe.model.d_model
    steps = sorted({round(step) for step in np.linspace(1, training.steps, SCHEDULE_POINTS)})
    if 1 <= training.warmup <= training.steps:
        steps = sorted({*steps, training.warmup})
    return {
        "kind": training.schedule,
        "d_model": d_model,
        "learning_rate": training.learning_rate,
        "warmup": training.warmup,
        "steps": steps,
        "learning_rates": [learning_rate(step, training, d_model) for step in steps],
    }


def smoothing(model: Translator) -> dict[str, Any]:
    """The smoothed target distribution by both conventions, for a few classes and for the whole vocabulary."""
    training, size = model.recipe.training, model.tokenizer.target.size
    return {
        "epsilon": training.label_smoothing,
        "over": training.label_smoothing_over,
        "targets": [
            {"over": over, "classes": classes, "correct": correct, "other": other}
            for over in ("all", "others")
            for classes in (EXAMPLE_CLASSES, size)
            for correct, other in [smoothed_target(training.label_smoothing, classes, over)]
        ],
    }


def curves(run: RunDir) -> dict[str, Any]:
    """The values of the log by step. If training was resumed and a step was logged twice, the later line counts."""
    events = run.log()
    finite = [event for event in events if isfinite(event.get("loss", 0.0))]  # JSON has no NaN
    train = {event["step"]: event for event in finite if event["event"] == "step"}
    valid = {event["step"]: event for event in finite if event["event"] == "valid"}
    starts = [event for event in events if event["event"] == "start"]
    others = ("step", "event", "time", "best", "seconds", "loss", "perplexity")
    metric = next((name for name in next(iter(valid.values()), {}) if name not in others), None)
    return {
        "finished": run.card_file.is_file(),
        "steps": starts[-1]["steps"] if starts else None,
        "metric": metric,
        "train": [
            {name: event[name] for name in ("step", "loss", "learning_rate")}
            for _, event in sorted(train.items())
        ],
        "valid": [
            {
                "step": step,
                "loss": event["loss"],
                "score": event.get(metric or ""),
                "best": event["best"],
            }
            for step, event in sorted(valid.items())
        ],
    }


class PastCheckpoints:
    """The model at the checkpoints of its run. One network is used for all of them."""

    def __init__(self, model: Translator) -> None:
        self.model = model
        self.network: Network | None = None
        self.alignments: dict[tuple[int, ...], dict[str, Any]] = {}

    def files(self) -> dict[int, Path]:
        """The checkpoint files by step, oldest first; none for a bundle."""
        run = self.model.run
        return (
            {checkpoint_step(path): path for path in checkpoint_files(run.checkpoints)}
            if run
            else {}
        )

    def steps(self) -> list[int]:
        return list(self.files())

    @torch.inference_mode()
    def alignment(self, step: int, request: Request, outputs: Sequence[int]) -> dict[str, Any]:
        """The cross-attention at a step, averaged over the heads of each layer, and the outputs' probabilities.

        The outputs are those of the finished model (teacher forcing), so that the rows of all steps are the same.
        """
        key = (step, len(request.source), *request.source, *outputs)
        if key not in self.alignments:
            observation = observe(
                self._at(step), request, self.model.network.decoder_input(outputs)
            )
            probabilities = observation.logits.float().softmax(-1)
            if len(self.alignments) >= CACHED_ALIGNMENTS:
                del self.alignments[next(iter(self.alignments))]
            cross = observation.weights["cross_attention"].mean(1, keepdims=True)
            self.alignments[key] = {
                "step": step,
                "cross_attention": pack_uint8(cross),
                "probabilities": probabilities[range(len(outputs)), list(outputs)].tolist(),
            }
        return self.alignments[key]

    def _at(self, step: int) -> Translator:
        model, files = self.model, self.files()
        if step not in files:
            raise RegardError(
                f"no checkpoint of step {step}; the run has checkpoints of steps {list(files)}"
            )
        self.network = self.network or deepcopy(model.network)
        copy_weights(self.network, checkpoint_weights(files[step]), str(files[step]))
        return Translator(
            model.recipe, model.tokenizer, self.network, model.device, model.precision
        )
