"""Course: what a model is built on and how it learned, in numbers for the page to draw.

Each number comes from the function that training itself uses, so no picture can say anything else: what the network
adds for a position, the rate of each step, the target that the gradient pulls to, the log and the checkpoints of the
run. A model without its run folder has the first three.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.errors import RegardError
from regard.inference.engine import Request
from regard.inspection.hooks import observe
from regard.inspection.trace import Trace, pack, pack_small, trace
from regard.nn.loss import smoothed_target
from regard.nn.network import Network
from regard.nn.positions import NoPosition
from regard.nn.state_dict import copy_weights
from regard.storage.run_dir import RunDir
from regard.tasks import Translator
from regard.training.checkpoint import checkpoint_files, step_of, weights_in
from regard.training.optimizers import learning_rate

POSITIONS = 64
"""rows of the position map"""
POINTS = 240
"""of the curve of the learning rate"""
FEW = 5
"""classes of the small example of label smoothing"""
REMEMBERED = 64
"""alignments"""


def traced(
    model: Translator,
    text: str,
    *,
    checkpoints: bool = False,
    **options: Any,
) -> Trace:
    """A trace that brings its course along; checkpoints: also how its alignment formed. options: see trace."""
    found = trace(model, text, **options)
    facts = course(model)
    if checkpoints:
        asked, said = model.request(text, options.get("parse")), [token.id for token in found.said]
        then = Checkpoints(model)
        if not then.steps():
            raise RegardError(f"{model.run}: no checkpoints are kept there")
        facts["alignments"] = [then.alignment(step, asked, said) for step in then.steps()]
    return replace(found, course=facts)


def course(model: Translator) -> dict[str, Any]:
    """All of it; the curves of a run that still learns are as they are now."""
    return {
        "positions": positions(model),
        "schedule": schedule(model),
        "smoothing": smoothing(model),
        "curves": curves(model.run) if model.run else None,
        "checkpoints": Checkpoints(model).steps(),
    }


@torch.inference_mode()
def positions(model: Translator) -> dict[str, Any]:
    """What the network adds for each position, and the dot product of two of these by their distance."""
    width, kind = model.recipe.model.d_model, model.recipe.model.position
    parts = [part for part in model.network.modules() if isinstance(part, NoPosition)]
    # Some have their say inside attention; and what a tree adds depends on the sentence.
    if kind == "tree" or not parts or type(parts[0]) is NoPosition:
        return {"kind": kind, "map": None}
    length = min(POSITIONS, model.network.longest or POSITIONS)
    nothing = torch.zeros(1, length, width, device=model.device)
    added = parts[0](nothing)[0].double().cpu().numpy()
    products = added @ added.T
    distances = range(1 - length, length)
    by_distance = [np.diagonal(products, distance) for distance in distances]
    return {
        "kind": kind,
        "map": pack(added.astype(np.float32)),
        "distances": list(distances),
        "mean": [float(row.mean()) for row in by_distance],
        "least": [float(row.min()) for row in by_distance],
        "most": [float(row.max()) for row in by_distance],
    }


def schedule(model: Translator) -> dict[str, Any]:
    training, width = model.recipe.training, model.recipe.model.d_model
    steps = sorted({round(step) for step in np.linspace(1, training.steps, POINTS)})
    if 1 <= training.warmup <= training.steps:
        steps = sorted({*steps, training.warmup})
    return {
        "kind": training.schedule,
        "d_model": width,
        "learning_rate": training.learning_rate,
        "warmup": training.warmup,
        "steps": steps,
        "rates": [learning_rate(step, training, width) for step in steps],
    }


def smoothing(model: Translator) -> dict[str, Any]:
    """What one target becomes, by both conventions, among a few classes and among all of the vocabulary."""
    training, size = model.recipe.training, model.tokenizer.target.size
    ways: tuple[str, ...] = ("all", "others")
    return {
        "epsilon": training.label_smoothing,
        "over": training.label_smoothing_over,
        "targets": [
            {"over": over, "classes": classes, "right": right, "other": other}
            for over in ways
            for classes in (FEW, size)
            for right, other in [smoothed_target(training.label_smoothing, classes, over)]
        ],
    }


def curves(run: RunDir) -> dict[str, Any]:
    """The numbers of the log, by step. Where a training went on from before its end, the later line counts."""
    events = run.log()
    real = [event for event in events if isfinite(event.get("loss", 0.0))]  # JSON has no NaN
    steps = {event["step"]: event for event in real if event["event"] == "step"}
    valid = {event["step"]: event for event in real if event["event"] == "valid"}
    begun = [event for event in events if event["event"] == "start"]
    names = ("step", "event", "time", "best", "loss", "perplexity")
    measure = next((name for name in next(iter(valid.values()), {}) if name not in names), None)
    return {
        "finished": run.card_file.is_file(),
        "steps": begun[-1]["steps"] if begun else None,
        "measure": measure,
        "learned": [
            {name: event[name] for name in ("step", "loss", "learning_rate")}
            for _, event in sorted(steps.items())
        ],
        "valid": [
            {
                "step": step,
                "loss": event["loss"],
                "score": event.get(measure or ""),
                "best": event["best"],
            }
            for step, event in sorted(valid.items())
        ],
    }


class Checkpoints:
    """The model as it was at the checkpoints its run keeps. One network serves for all of them."""

    def __init__(self, model: Translator) -> None:
        self.model = model
        self.network: Network | None = None
        self.known: dict[tuple[int, ...], dict[str, Any]] = {}

    def files(self) -> dict[int, Path]:
        """By step, oldest first; a bundle has none."""
        run = self.model.run
        return {step_of(path): path for path in checkpoint_files(run.checkpoints)} if run else {}

    def steps(self) -> list[int]:
        return list(self.files())

    @torch.inference_mode()
    def alignment(self, step: int, request: Request, said: Sequence[int]) -> dict[str, Any]:
        """Where the model looked at that step while it was made to say this, each layer's heads averaged.

        It must say what was said at the end, so that the rows of all steps are the same.
        """
        this = (step, len(request.source), *request.source, *said)
        if this not in self.known:
            seen = observe(self._at(step), request, self.model.network.reading(said))
            right = seen.logits.float().softmax(-1)[range(len(said)), list(said)]
            if len(self.known) >= REMEMBERED:
                del self.known[next(iter(self.known))]
            self.known[this] = {
                "step": step,
                "cross_attention": pack_small(
                    seen.weights["cross_attention"].mean(1, keepdims=True)
                ),
                "probabilities": right.tolist(),
            }
        return self.known[this]

    def _at(self, step: int) -> Translator:
        model, files = self.model, self.files()
        if step not in files:
            raise RegardError(f"no checkpoint of step {step}: there are those of {list(files)}")
        self.network = self.network or deepcopy(model.network)
        copy_weights(self.network, weights_in(files[step]), str(files[step]))
        return Translator(
            model.recipe, model.tokenizer, self.network, model.device, model.precision
        )
