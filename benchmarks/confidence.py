"""How well the confidence of translations predicts bad ones: ROC-AUC, Brier score and calibration error.

    python benchmarks/confidence.py RUN SOURCE REFERENCE [RUN SOURCE REFERENCE ...] [--sentences N] [--device cuda]

A translation is bad if its sentence chrF is below 30. The area under the ROC curve is given for

    confidence    as `regard translate --confidence` prints it; if the texts are those it was calibrated on, it is a
                  little optimistic
    geometric     the geometric mean of the token probabilities, which a model without calibration uses
    new, 5 folds  a calibration fitted to the other four fifths of these texts

and for each feature alone. The Brier score and the expected calibration error (ten bins) are those of the confidence.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import regard
from regard.data.text_files import read_lines
from regard.inference.confidence import (
    FEATURES,
    GOOD_CHRF,
    Floats,
    cross_validated,
    features,
    geometric_mean,
    roc_auc,
)
from regard.metrics.sacrebleu import sentence_chrf
from regard.recipe import Device

BINS = 10


def calibration_error(confidences: Floats, good: Any) -> float:
    """Expected calibration error: mean difference between confidence and share of good translations in each bin."""
    bins = np.minimum((confidences * BINS).astype(int), BINS - 1)
    gaps = [
        abs(float((confidences - good)[bins == number].mean())) * float((bins == number).mean())
        for number in range(BINS)
        if (bins == number).any()
    ]
    return sum(gaps)


def measure(
    run: str, source: Path, reference: Path, sentences: int | None, device: Device
) -> dict[str, Any]:
    """Translate the texts of a file and compare confidence with sentence chrF."""
    model = regard.load(run, device=device)
    sources = list(read_lines(source))[:sentences]
    references = list(read_lines(reference))[:sentences]
    found = [best for best, *_ in model.search(sources)]
    chrf = np.array([*map(sentence_chrf, (one.text for one in found), references)])
    good = chrf >= GOOD_CHRF
    lengths = map(len, model.encode(sources))
    rows = np.array([*map(features, (one.token_log_probabilities for one in found), lengths)])
    confidences = np.array([one.confidence for one in found])
    answer = {
        "run": run,
        "source": str(source),
        "sentences": len(found),
        "bad": int((~good).sum()),
        "mean_chrf": float(chrf.mean()),
        "calibrated": model.calibration is not None,
    }
    if good.all() or not good.any():
        return answer
    means = [geometric_mean(one.token_log_probabilities) for one in found]
    return answer | {
        "auc": {
            "confidence": roc_auc(confidences, good),
            "geometric": roc_auc(means, good),
            "new, 5 folds": roc_auc(cross_validated(rows, good), good),
            **{name: roc_auc(rows[:, n], good) for n, name in enumerate(FEATURES)},
        },
        "brier": float(((confidences - good) ** 2).mean()),
        "calibration_error": calibration_error(confidences, good),
        "mean_confidence": float(confidences.mean()),
        "good_share": float(good.mean()),
    }


def report(results: Sequence[dict[str, Any]]) -> None:
    for one in results:
        state = "calibrated" if one["calibrated"] else "not calibrated"
        print(
            f"{one['run']}, {one['source']}: {one['bad']} of {one['sentences']} are bad, mean chrF "
            f"{one['mean_chrf']:.1f}, {state}"
        )
        if "auc" not in one:
            print("  all are good, or all are bad: the area is not defined")
            continue
        for name, value in one["auc"].items():
            print(f"  ROC-AUC {name:26} {value:.3f}")
        print(
            f"  Brier score {one['brier']:.3f}, calibration error {one['calibration_error']:.3f}, mean confidence "
            f"{one['mean_confidence']:.3f}, share of good translations {one['good_share']:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", metavar="RUN SOURCE REFERENCE")
    parser.add_argument("--sentences", type=int)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    given = parser.parse_args()
    if len(given.files) % 3:
        parser.error("give RUN SOURCE REFERENCE, once or several times")
    groups = zip(*(iter(given.files),) * 3, strict=True)
    results = [
        measure(run, Path(source), Path(reference), given.sentences, given.device)
        for run, source, reference in groups
    ]
    report(results)
    if given.out:
        given.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
