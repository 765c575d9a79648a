"""After training: average the checkpoints if that is better, score the model, write its card."""

from __future__ import annotations

import math
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard import __version__
from regard.data.corpus import example_sources, fingerprint, read_pairs
from regard.data.pairs import Pair
from regard.errors import RegardError
from regard.inference.confidence import MAX_SENTENCES
from regard.inference.hallucinations import OutputStatistics
from regard.metrics import MetricResult
from regard.nn.network import copy_weights
from regard.storage.run_dir import Selection
from regard.tasks import Translator
from regard.training.checkpoint import average_checkpoints, checkpoint_step
from regard.training.evaluation import (
    perplexity,
    score_after_fine_tuning,
    summarize,
    summary_seconds,
    tune_length_penalty,
)
from regard.training.planner import (
    decoding_seconds,
    estimate_validation_time,
    seconds_to_score_test,
)
from regard.training.progress import ProgressReporter
from regard.training.train_test_overlap import OverlapScores
from regard.training.trainer import Trainer

ANNOUNCED_SECONDS = 5.0
"""the final scoring is announced if it takes longer than this"""
MIN_CALIBRATION_PAIRS = 200
"""the confidence is calibrated if there is time to translate this many validation pairs"""


def finish(
    trainer: Trainer,
    reporter: ProgressReporter,
    reason: str,
    deadline: float | None,
    tune_decoding: bool,
) -> None:
    """Average checkpoints if that is better, score the result, write the card.

    reason: why training stopped. tune_decoding: choose the length penalty on the validation pairs.
    """
    start = time.monotonic()
    trainer.model.set_precision("fp32")  # as when the model is loaded
    left_out = deadline is not None and not trainer.examples
    if left_out:  # the plan had no time to translate in each validation, but there may be time now
        trainer.examples = trainer.validation_pairs(
            trainer.run.requested_training().get("validate_sentences", 0)
        )
    if deadline is not None and (left_out or not trainer.validation_seconds):
        estimate_validation_time(trainer, limit=math.inf)  # nothing was translated in this session
    selection = _select_weights(trainer, reporter, deadline)
    if trainer.state.is_start_best and selection.averaged_checkpoints == 1:
        reporter.message(
            f"No checkpoint is better on the validation pairs than the model before fine-tuning: {trainer.run} has the "
            f"weights of {trainer.training.init_from}. Try more pairs, a longer --minutes, --mix 0.5 or a smaller "
            "training.learning_rate"
        )
    trainer.network.eval()
    seconds = summary_seconds(trainer)
    if seconds > ANNOUNCED_SECONDS and (deadline is None or time.monotonic() + seconds < deadline):
        reporter.message("Translating validation pairs to score the model")
    if tune_decoding:
        tune_length_penalty(trainer, reporter, deadline)
    state, prepared = trainer.state, trainer.prepared
    summary = summarize(trainer, deadline)
    card = {
        "regard": __version__,
        "reason_stopped": reason,
        "averaged_checkpoints": selection.averaged_checkpoints,
        "steps": state.step,
        "epochs": state.epoch,
        "target_tokens": state.tokens,
        "seconds": round(state.seconds, 1),
        "preparing_seconds": prepared.metadata.get("seconds"),
        "processes": trainer.group.size,
        "micro_batches": state.micro_batches,
        "out_of_memory": state.out_of_memory,
        "hardware": hardware(trainer.group.device),
        "parameters": sum(p.numel() for p in trainer.network.parameters()),
        "layers": count_layers(trainer.network),
        "d_model": trainer.recipe.model.d_model,
        "vocabulary": {
            "source": prepared.tokenizer.source.size,
            "target": prepared.tokenizer.target.size,
        },
        "data": {
            key: prepared.metadata[key]
            for key in ("identity", "train", "valid", "old")
            if key in prepared.metadata
        },
        "examples": example_sources(trainer.recipe)
        if isinstance(trainer.model, Translator)
        else [],
        "valid": _validation_values(trainer, selection),
        "valid_scores": [result.to_json() for result in summary.results],
        **_score_test(trainer, reporter, deadline),
        **_calibrate(trainer, reporter, deadline),
        "decoding": trainer.recipe.decoding.model_dump(),
        "versions": {name: version(name) for name in ("torch", "sentencepiece", "sacrebleu")},
        "python": platform.python_version(),
        "command": shlex.join(["regard", *sys.argv[1:]]),
    }
    fine_tuning = score_after_fine_tuning(
        trainer.run, trainer.recipe, trainer.model, reporter, deadline
    )
    card |= {"fine_tuning": fine_tuning} if fine_tuning else {}
    card["scoring_seconds"] = round(time.monotonic() - start, 1)
    trainer.run.write_card(card)
    for line in summary.lines():
        reporter.message(line)
    if isinstance(trainer.model, Translator) and not summary.examples:
        reporter.message("No validation pairs were translated")
    language = trainer.recipe.data.targets[:1]
    words = [trainer.model.command, str(trainer.run), *(f"--to {one}" for one in language)]
    reporter.message(f'The run is in {trainer.run}; try  regard {" ".join(words)} "…"')
    if isinstance(trainer.model, Translator) and trainer.recipe.data.test is None:
        evaluate = f"regard evaluate {trainer.run} --source FILE --reference FILE"
        reporter.message(f"To score it on test data:  {evaluate}")


def _select_weights(
    trainer: Trainer, reporter: ProgressReporter, deadline: float | None
) -> Selection:
    """Make the average of the checkpoints the run's model, unless the weights in the file validate better.

    The network then has the weights of the file.
    """
    checkpoints = trainer.selected_checkpoints()
    count = len(checkpoints)
    averaging = trainer.training.average != "none" and count > 1
    current = _validate_selection(trainer, deadline, validations=1 + averaging)
    if not averaging:
        return current
    if _too_late(deadline, trainer.validation_seconds):
        reporter.message("No time left to average the checkpoints")
        return current
    mean = average_checkpoints(checkpoints)
    copy_weights(trainer.network, mean, "the average")
    validation = trainer.validate()
    # The average of the last checkpoints is used as it is, as in the paper, unless it is worse than the model before
    # fine-tuning; that of the best must beat the best.
    as_it_is = trainer.training.average == "last" and validation.sort_key <= trainer.state.start
    used = as_it_is or validation.sort_key < current.sort_key
    steps = [checkpoint_step(path) for path in checkpoints]
    reporter.log("average", checkpoints=steps, objective=validation.objective, used=used)
    if not used:
        single = "model before fine-tuning" if trainer.state.is_start_best else "best checkpoint"
        kept = "earlier average" if current.averaged_checkpoints > 1 else single
        reporter.message(
            f"The average of {count} checkpoints is no better than the {kept}, which is kept"
        )
        copy_weights(trainer.network, trainer.run.weights(), str(trainer.run))
        return current
    reporter.message(f"Using the average of {count} checkpoints")
    trainer.select(mean, Selection(count, *validation.sort_key))
    return Selection(count, *validation.sort_key)


def _validate_selection(trainer: Trainer, deadline: float | None, validations: int) -> Selection:
    """Validate the weights in the run's file; as they validated when they were written if time is short.

    ``validations``: the number of validations for which there must be time.
    """
    weights, recorded = trainer.run.read_weights()
    copy_weights(trainer.network, weights, str(trainer.run))
    if recorded is None:
        raise RegardError(f"{trainer.run.weights_file}: not written by this training; remove it")
    if _too_late(deadline, validations * trainer.validation_seconds):
        return recorded
    return Selection(recorded.averaged_checkpoints, *trainer.validate().sort_key)


def _too_late(deadline: float | None, seconds: float) -> bool:
    return deadline is not None and time.monotonic() + seconds > deadline


def _validation_values(trainer: Trainer, selection: Selection) -> dict[str, float]:
    """Loss and score of the selected weights: those with the best objective, not always with the lowest loss."""
    values = {"loss": selection.loss, "perplexity": perplexity(selection.loss)}
    if trainer.training.best_checkpoint_metric == "score":
        values[trainer.recipe.evaluation.metrics[0]] = abs(selection.objective)
    return values


def _score_test(
    trainer: Trainer, reporter: ProgressReporter, deadline: float | None
) -> dict[str, Any]:
    """Sections of the card: the test scores, the overlap with the training data, where the outputs are."""
    model, run, data = trainer.model, trainer.run, trainer.recipe.data
    if data.test is None:
        return {"test": []}
    pairs = list(read_pairs(data.test, data, "data.test"))
    if deadline is not None and _too_late(deadline, seconds_to_score_test(trainer)):
        reporter.message("No time left to score the test data; run  regard evaluate")
        return {"test": []}
    if trainer.recipe.text_only:
        results = model.evaluate(pairs)
        _report_scores(results, reporter)
        return {"test": [result.to_json() for result in results]}
    outputs = trainer.evaluation.outputs(pairs)
    results = model.score_outputs(outputs, pairs)
    _report_scores(results, reporter)
    overlap = OverlapScores.of(model, run, outputs, pairs)
    for line in overlap.messages() if overlap else ():
        reporter.message(line)
    return {
        "test": [result.to_json() for result in results],
        "test_overlap": overlap.to_json() if overlap else None,
        "test_outputs": run.write_test_outputs(outputs, fingerprint(data.test, data)),
    }


def _report_scores(results: Sequence[MetricResult], reporter: ProgressReporter) -> None:
    for result in results:
        reporter.message(f"Test {result}")


def _calibrate(
    trainer: Trainer, reporter: ProgressReporter, deadline: float | None
) -> dict[str, Any]:
    """Sections of the card of a translation model: its confidence, and what its references look like."""
    if not isinstance(trainer.model, Translator):
        return {}
    valid = trainer.prepared.valid
    pairs = trainer.validation_pairs(MAX_SENTENCES)
    lengths = zip(valid.source_lengths[:].tolist(), valid.target_lengths[:].tolist(), strict=True)
    card: dict[str, Any] = {"references": asdict(OutputStatistics.of(pairs, lengths))}
    if not trainer.examples:  # training.validate_sentences: 0: nothing is translated in validation
        return card
    pairs = _pairs_in_time(trainer, pairs, deadline)
    if not pairs:
        reporter.message("No time left to calibrate the confidence of translations")
        return card
    try:
        calibration = trainer.model.calibrate_confidence(pairs)
    except RegardError as error:  # a text that is too long for the model
        reporter.message(f"The confidence of translations is not calibrated: {error}")
        return card
    if calibration is not None:
        reporter.message(f"Confidence: {calibration.summary}")
        card["confidence"] = calibration.to_json()
    return card


def _pairs_in_time(trainer: Trainer, pairs: list[Pair], deadline: float | None) -> list[Pair]:
    """As many of these pairs as can be translated before the deadline, evenly spaced; none if they are too few."""
    if deadline is None:
        return pairs
    left = max(1e-9, deadline - time.monotonic())
    in_time = pairs[:: max(1, math.ceil(decoding_seconds(trainer, len(pairs)) / left))]
    return in_time if len(in_time) >= min(len(pairs), MIN_CALIBRATION_PAIRS) else []


def count_layers(network: nn.Module) -> dict[str, int]:
    """The number of layers of each stack of a network; an unnamed stack is the decoder."""
    stacks = {name: part for name, part in network.named_modules() if name.endswith("layers")}
    return {
        name.removesuffix("layers").removesuffix(".") or "decoder": len(part)
        for name, part in stacks.items()
        if isinstance(part, nn.ModuleList)
    }


def hardware(device: torch.device) -> str:
    """The name of the GPU, or the CPU and the number of threads used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if line.startswith("model name")
    ]
    threads = torch.get_num_threads()
    return f"{names[0] if names else platform.machine()}, {threads} core{'s' * (threads > 1)}"
