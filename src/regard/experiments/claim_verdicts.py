"""``regard lab``: runs the experiments of claims, and computes their verdicts from the numbers.

All claims share the training runs of one folder: the recipe of the lab itself is trained once per seed for all of them.
Training runs with the same seed see the same batches in the same order, so variants are compared seed by seed. The
noise is estimated from all training runs of the lab together (``results.block_deviation``), in the logarithm of the
loss, because seeds change a loss by a factor. A verdict is *confirmed* if the 95% interval of the difference lies on
the side that the claim says, *contradicted* if it lies on the other side, and *not at this size* if it does not tell.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from regard.demo.corpus import Split, generate, write_pairs
from regard.errors import RegardError
from regard.experiments.claims import CLAIMS, AblationScores, Claim, ClaimMetric, Expectation
from regard.experiments.experiment import (
    CORPUS,
    THE_RECIPE,
    Design,
    Variant,
    check_failures,
    check_variants,
    run_experiment,
)
from regard.experiments.report import Curve, IntervalRow, curve_plot, interval_plot, mean_curve
from regard.experiments.results import (
    Estimate,
    block_deviation,
    block_difference,
    contrast,
    describe_difference,
    mean_over_seeds,
)
from regard.recipe import suggest
from regard.storage.atomic_files import write_text

CONFIRMED, NOT_AT_THIS_SIZE, CONTRADICTED = "confirmed", "not at this size", "contradicted"
SEEDS = 3
VOCABULARY = 500
"""tokens of the lab's tokenizer"""
DIVERGED: dict[ClaimMetric, float] = {"loss": math.log(VOCABULARY), "BLEU": 0.0}
"""what a training run that diverged counts as: the loss of a model that knows nothing"""
SHARE = 80
"""fewer than one in this many sentences of the grammar would be too few for the corpus of the lab"""
FEW = 500
"""pairs of the small training data, for the claim about dropout"""
LINEAR, QUADRATIC = 1.25, 1.75
"""exponents of the length below and above which growth counts as linear and as quadratic"""


@dataclass(frozen=True)
class LabSize:
    """How large the models and the corpus of the lab are."""

    description: str
    words: int
    """the corpus has the sentences of the built-in grammar that consist of its most frequent words"""
    longest: int
    """words of the longest sentence"""
    pairs: Mapping[Split, int]
    changes: tuple[str, ...]
    """of the recipe ``demo``"""


COMMON = (
    *("evaluation.metrics=[bleu]", "decoding.beam=1", "model.heads=4"),
    f"tokenizer.vocab_size={VOCABULARY}",
    *("training.average=none", "training.validate_sentences=0", "training.validate_every=50"),
    "training.best_checkpoint_metric=loss",
)
SIZES = {
    "cpu": LabSize(
        "2+2 layers of 64, 300 steps of 520 tokens, 8,000 pairs of the built-in grammar with 100 English words",
        words=100,
        longest=12,
        pairs={"train": 8_000, "valid": 500, "test": 200},
        changes=(
            *COMMON,
            *("model.d_model=64", "training.steps=300", "training.tokens_per_batch=520"),
            *("training.learning_rate=0.006", "training.warmup=40"),
            "training.checkpoint_every=300",
        ),
    ),
    "cuda": LabSize(
        "2+2 layers of 128, 700 steps of 1,280 tokens, 20,000 pairs of the built-in grammar with 150 English words",
        words=150,
        longest=14,
        pairs={"train": 20_000, "valid": 500, "test": 200},
        changes=(*COMMON, "training.steps=700", "training.warmup=100"),
    ),
}
"""by device"""


def write_lab_corpus(folder: Path, size: LabSize) -> None:
    """Write the sentences of the built-in grammar that consist of its most frequent words.

    A model learns this part of the grammar within seconds, so seeds differ little. ``few`` has the first training
    pairs. test.de is written last, so its existence means that all files are complete.
    """
    sample = generate("train", 20_000)
    counts = Counter(word for pair in sample for word in _words(pair.source))
    frequent_words = {word for word, _ in counts.most_common(size.words)}
    folder.mkdir(parents=True, exist_ok=True)
    for split, number in size.pairs.items():
        simple = (
            pair
            for pair in generate(split, SHARE * number)
            if len(pair.source.split()) <= size.longest and {*_words(pair.source)} <= frequent_words
        )
        pairs = list(islice(simple, number))
        assert len(pairs) == number, (split, len(pairs))
        write_pairs(folder / split, pairs)
        if split == "train":
            write_pairs(folder / "few", pairs[:FEW])


def _words(text: str) -> list[str]:
    return re.findall(r"[\w']+|[^\w\s]", text.lower())


# ---------------------------------------------------------------------------------------------
# Evidence and verdicts


@dataclass(frozen=True)
class CheckedExpectation:
    """One expectation of a claim, compared with the numbers."""

    text: str
    """the difference in words, with its interval"""
    expected: str
    verdict: str
    difference: Estimate


@dataclass(frozen=True)
class Evidence:
    """Numbers that a claim was checked with, and the verdict."""

    setting: str
    command: str
    verdict: str
    facts: list[str]
    """one sentence for each comparison"""
    groups: dict[ClaimMetric, dict[str, list[float]]]
    """for each metric, the values of the seeds of each variant; empty for measurements"""
    checked: list[CheckedExpectation]
    figures: dict[str, str]
    """SVG by name"""
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """steps and mean validation loss of each variant"""

    def to_json(self) -> dict[str, Any]:
        """Without the figures, which can be drawn again."""
        return {name: value for name, value in asdict(self).items() if name != "figures"}


def judge(expectation: Expectation, difference: Estimate) -> str:
    """The verdict for the difference of system and baseline. A low loss is better, and a high BLEU."""
    low, high, margin = difference.low, difference.high, expectation.margin
    if low is None or high is None:
        return NOT_AT_THIS_SIZE
    if (expectation.metric == "loss") != (expectation.relation == "worse than"):
        low, high = -high, -low
    if expectation.relation in ("better than", "worse than"):
        holds, fails = low > 0, high < 0
    elif expectation.relation == "no worse than":
        holds, fails = low > -margin, high < -margin
    else:
        holds, fails = -margin < low and high < margin, low > margin or high < -margin
    return CONFIRMED if holds else CONTRADICTED if fails else NOT_AT_THIS_SIZE


def overall(verdicts: Sequence[str]) -> str:
    """Confirmed if all are, contradicted if one is, else not at this size."""
    if CONTRADICTED in verdicts:
        return CONTRADICTED
    return CONFIRMED if {*verdicts} == {CONFIRMED} else NOT_AT_THIS_SIZE


def score_evidence(
    title: str,
    setting: str,
    command: str,
    groups: Mapping[ClaimMetric, Mapping[str, Sequence[float]]],
    expectations: Sequence[Expectation],
    curves: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    noise: tuple[float, int] | None = None,
    paired: bool = True,
) -> Evidence:
    """Evidence from several seeds.

    noise: the deviation of the logarithm of the loss, and its degrees of freedom. paired: BLEU of all variants is of
    the same seeds in the same order.
    """
    checked = []
    for expectation in expectations:
        ours, theirs = (
            groups[expectation.metric][expectation.system],
            groups[expectation.metric][expectation.baseline],
        )
        if expectation.metric == "loss":
            first, second = ([math.log(value) for value in values] for values in (ours, theirs))
            deviation, freedom = noise or block_deviation([first, second])
            difference = block_difference(first, second, deviation, freedom)
            text = describe_ratio(expectation.system, difference)
        else:
            pairs: list[tuple[float, Sequence[float]]] = [(1.0, ours), (-1.0, theirs)]
            if paired:
                pairs = [(1.0, [a - b for a, b in zip(ours, theirs, strict=True)])]
            difference = contrast(pairs)
            text = describe_difference(expectation.system, difference, "BLEU")
        expected = f"{expectation.system} {expectation.relation} {expectation.baseline} in {expectation.metric}"
        verdict = judge(expectation, difference)
        checked.append(
            CheckedExpectation(
                f"{text}, against {expectation.baseline}", expected, verdict, difference
            )
        )
    metrics = dict.fromkeys(expectation.metric for expectation in expectations)
    stored = {
        metric: {label: list(values) for label, values in scores.items()}
        for metric, scores in groups.items()
    }
    curve_points = {label: list(points) for label, points in (curves or {}).items()}
    return Evidence(
        setting,
        command,
        overall([expectation.verdict for expectation in checked]),
        [expectation.text for expectation in checked],
        stored,
        checked,
        score_figures(title, {metric: stored[metric] for metric in metrics}, curve_points),
        curve_points,
    )


def describe_ratio(name: str, difference: Estimate) -> str:
    """A difference of logarithms of losses in words, for example "1 head: loss × 1.60, worse (1.35 to 1.90)"."""
    ratio = f"{math.exp(difference.value):.2f}"
    if difference.low is None or difference.high is None:
        return f"{name}: loss × {ratio} (one seed, so no interval)"
    interval = f"{math.exp(difference.low):.2f} to {math.exp(difference.high):.2f}"
    if difference.significant:
        word = "worse" if difference.value > 0 else "better"
        return f"{name}: loss × {ratio}, {word} ({interval})"
    return f"{name}: no clear difference, loss × {ratio} ({interval})"


AXES: dict[ClaimMetric, str] = {
    "loss": "validation loss, nats per token",
    "BLEU": "validation BLEU",
}


def score_figures(
    title: str,
    groups: Mapping[ClaimMetric, Mapping[str, Sequence[float]]],
    curves: Mapping[str, Sequence[tuple[float, float]]],
) -> dict[str, str]:
    """For each metric the seeds of each variant with their mean, and the loss during training.

    BLEU has intervals. Those of a loss would be misleading, because seeds are compared with each other.
    """
    figures: dict[str, str] = {}
    for metric, scores in groups.items():
        estimates = {label: mean_over_seeds(values) for label, values in scores.items()}
        if metric == "loss":
            estimates = {label: Estimate(estimate.value) for label, estimate in estimates.items()}
        caption = "Seeds and mean" if metric == "loss" else "Seeds, mean and 95% interval"
        rows = [
            IntervalRow(label, estimate, scores[label]) for label, estimate in estimates.items()
        ]
        figures[metric] = interval_plot(f"{title} {caption}", AXES[metric], rows, zero=True)
    if curves and "loss" in groups:
        lines = [Curve(label, points) for label, points in curves.items()]
        figures["curves"] = curve_plot(
            f"{title} Mean over seeds", "training step", AXES["loss"], lines, zero=True
        )
    return figures


# ---------------------------------------------------------------------------------------------
# Experiments


def lab_design(claims: Sequence[Claim], out: Path, device: str, seeds: int) -> Design:
    """One design for all claims, so that they share training runs. The first variant is the recipe of the lab."""
    names = dict.fromkeys(tuple(changes) for claim in claims for changes in claim.variants.values())
    variants = [Variant(variant_name(changes), changes) for changes in ((), *names) if changes]
    changes = (
        *SIZES[device].changes,
        *(f"training.device={device}", f"data.root={(out / CORPUS).resolve()}"),
    )
    numbers = tuple(range(1, seeds + 1))
    return check_variants(Design("demo", changes, (), (Variant(THE_RECIPE), *variants), numbers))


def variant_name(changes: Sequence[str]) -> str:
    return " ".join(changes) or THE_RECIPE


def run_lab(
    names: Sequence[str],
    out: Path,
    *,
    device: str = "cpu",
    seeds: int = SEEDS,
    minutes: float | None = None,
    jobs: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Evidence]:
    """Run the experiments of claims and judge them; returns the evidence of those that are complete.

    The results of each claim are written to ``out/results``.
    """
    claims = find_claims(names)
    if device not in SIZES:
        raise RegardError(f"--device {device}: must be {' or '.join(SIZES)}")
    pointless = [claim.name for claim in claims if not claim.variants]
    if pointless:
        raise RegardError(
            f"{', '.join(pointless)}: measured by a benchmark, not by training; see docs/lab"
        )
    folder = out / device
    if not (folder / CORPUS / "test.de").exists():
        write_lab_corpus(folder / CORPUS, SIZES[device])
    design = lab_design(claims, folder, device, seeds)
    is_complete = {*names} == {claim.name for claim in CLAIMS.values() if claim.variants}
    arguments = "--all" if is_complete else " ".join(dict.fromkeys(names))
    command = f"regard lab run {arguments} --device {device} --seeds {seeds}"
    content = run_experiment(
        design, folder, minutes=minutes, jobs=jobs, command=command, report=report
    )
    variants = {variant.name for variant in design.variants}
    evidence_by_claim = {}
    for claim in claims:
        evidence = judge_experiment(claim, content, device, seeds, variants, command)
        if evidence is not None:
            evidence_by_claim[claim.name] = evidence
            write_claim(folder / "results", claim.name, {"experiment": evidence.to_json()})
            for figure_name, figure in evidence.figures.items():
                write_text(folder / "results" / f"{claim.name}-{figure_name}.svg", figure)
    check_failures(content)
    return evidence_by_claim


def find_claims(names: Sequence[str]) -> list[Claim]:
    """The claims with these names; one error names all that are unknown."""
    unknown = [name for name in names if name not in CLAIMS]
    if unknown:
        raise RegardError("; ".join(f"no claim {name}{suggest(name, CLAIMS)}" for name in unknown))
    return [CLAIMS[name] for name in dict.fromkeys(names)]


def judge_experiment(
    claim: Claim,
    content: Mapping[str, Any],
    device: str,
    seeds: int,
    known: Collection[str],
    command: str = "",
) -> Evidence | None:
    """The evidence of a claim from the results of the lab's experiment; None if training runs are missing.

    known: the names of the variants of the design; a variant of the claim that is not there equals the recipe.
    command: what was run.
    """
    groups: dict[ClaimMetric, dict[str, list[float]]] = {"loss": {}, "BLEU": {}}
    curves = {}
    for label, changes in claim.variants.items():
        name = variant_name(changes) if variant_name(changes) in known else THE_RECIPE
        runs = [run for run in content["trainings"] if run["variant"] == name]
        runs.sort(key=lambda run: int(run["seed"]))
        if len(runs) < seeds:
            return None
        groups["BLEU"][label] = [_or_diverged(run["score"], "BLEU") for run in runs]
        groups["loss"][label] = [_or_diverged(run["details"].get("loss"), "loss") for run in runs]
        curves[label] = mean_curve(content, name)
    where = ", ".join(
        dict.fromkeys(
            run["details"]["hardware"]
            for run in content["trainings"]
            if "hardware" in run["details"]
        )
    )
    return score_evidence(
        claim.question,
        f"{SIZES[device].description}; {seeds} seeds; {where}",
        command or f"regard lab run {claim.name} --device {device}",
        groups,
        claim.expectations,
        {label: points for label, points in curves.items() if len(points) > 1},
        seed_noise(content, seeds),
    )


def seed_noise(content: Mapping[str, Any], seeds: int) -> tuple[float, int]:
    """The deviation of the logarithm of the loss over all variants of the lab, and its degrees of freedom."""
    logs: dict[str, dict[int, float]] = {}
    for run in content["trainings"]:
        loss = _or_diverged(run["details"].get("loss"), "loss")
        logs.setdefault(run["variant"], {})[int(run["seed"])] = math.log(loss)
    complete = {
        tuple(by_seed[seed] for seed in sorted(by_seed))
        for by_seed in logs.values()
        if len(by_seed) >= seeds
    }  # a set, because variants that share a training run count once
    return block_deviation([*complete])


def _or_diverged(value: float | None, metric: ClaimMetric) -> float:
    return DIVERGED[metric] if value is None else value


# ---------------------------------------------------------------------------------------------
# Benchmarks whose numbers are in the repository


def benchmark_evidence(claim: Claim, benchmarks: Path) -> Evidence | None:
    """The evidence from the committed numbers of a benchmark; None if the claim has none."""
    if claim.ablation is not None:
        results = _read(benchmarks / "ablation.json")
        return ablation_evidence(claim, claim.ablation, results["results"])
    if claim.measurement is not None:
        return MEASUREMENTS[claim.measurement](claim, benchmarks)
    return None


def _read(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def ablation_evidence(
    claim: Claim, ablation: AblationScores, results: Mapping[str, Any]
) -> Evidence:
    """Three seeds of each variant of multi30k-tiny."""
    groups = {
        label: [result["valid"] for key, result in results.items() if key.rpartition("/")[0] == row]
        for label, row in ablation.variants.items()
    }
    where = ", ".join(dict.fromkeys(result["hardware"] for result in results.values()))
    seeds = min(map(len, groups.values()))
    return score_evidence(
        claim.question,
        f"multi30k-tiny: 4+4 layers of 128, multi30k English to German, validation; {seeds} seeds; {where}",
        "python benchmarks/ablation.py",
        {"BLEU": groups},
        ablation.expectations,
        paired=False,
    )


def _measured(
    setting: str, command: str, verdicts: Sequence[str], facts: list[str], figure: str
) -> Evidence:
    return Evidence(setting, command, overall(verdicts), facts, {}, [], {"measured": figure})


def path_length(claim: Claim, benchmarks: Path) -> Evidence:
    """Steps from the first token to the last."""
    paths = _read(benchmarks / "baselines.json")["path"]
    curves = [
        Curve(name, [(int(length), steps) for length, steps in steps_by_length.items()])
        for name, steps_by_length in paths.items()
        if name != "window attention"
    ]
    max_length = max(paths["recurrent"], key=int)
    ours, others = paths["self-attention"], [paths["recurrent"], paths["convolution"]]
    facts = [
        f"{name}: {steps_by_length[max_length]} for {max_length} tokens"
        for name, steps_by_length in paths.items()
    ]
    holds = {*ours.values()} == {1} and all(
        steps_by_length[max_length] > 10 for steps_by_length in others
    )
    return _measured(
        "exact, from gradients in float64: the smallest number of layers, for an LSTM of steps, between the first "
        "token and the last",
        "python benchmarks/baselines.py",
        [CONFIRMED if holds else CONTRADICTED],
        facts,
        curve_plot(claim.question, "tokens", "layers or steps", curves, log=True),
    )


def _scaling(
    claim: Claim,
    benchmarks: Path,
    key: str,
    kinds: Sequence[str],
    linear: bool = False,
    others: Sequence[str] = (),
) -> Evidence:
    """How time or memory grows with the length, on a CPU and on a GPU.

    key: the measured quantity. linear: the claim is that it grows linearly, not quadratically. others: kinds of
    attention that are shown but not judged.
    """
    measurements, facts, curves = _read(benchmarks / "attention_scaling.json"), [], []
    name, unit = ("time", "seconds") if key == "both_seconds" else ("memory", "megabytes")
    for device, measurement in measurements.items():
        for pattern in (*kinds, *others):
            exponent = measurement["exponents"][pattern][key]
            facts.append(
                f"{pattern}, {measurement['device']}: {name} grows as length^{exponent:.2f}"
            )
            points = [
                (point["length"], point[key])
                for point in measurement["points"]
                if point["kind"] == pattern and point.get(key)
            ]
            curves.append(Curve(f"{pattern}, {device}", points))
    exponents = [
        measurement["exponents"][pattern][key]
        for measurement in measurements.values()
        for pattern in kinds
    ]
    is_linear, is_quadratic = max(exponents) < LINEAR, min(exponents) > QUADRATIC
    holds, fails = (is_linear, is_quadratic) if linear else (is_quadratic, is_linear)
    verdict = CONFIRMED if holds else CONTRADICTED if fails else NOT_AT_THIS_SIZE
    unjudged = f"; not judged: {', '.join(others)}" if others else ""
    return _measured(
        f"one attention layer, forward and backward, lengths from 1,024; full is torch's fused kernel{unjudged}",
        "python benchmarks/attention_scaling.py",
        [verdict],
        facts,
        curve_plot(
            claim.question, "length", unit, [curve for curve in curves if curve.points], log=True
        ),
    )


def quadratic_time(claim: Claim, benchmarks: Path) -> Evidence:
    """Of the fused kernel."""
    return _scaling(claim, benchmarks, "both_seconds", ["full"])


def quadratic_memory(claim: Claim, benchmarks: Path) -> Evidence:
    """Of the fused kernel, which does not store the weights; without it, memory is quadratic."""
    return _scaling(claim, benchmarks, "both_megabytes", ["full"], others=["full, not fused"])


def linear_patterns(claim: Claim, benchmarks: Path) -> Evidence:
    """Of all sparse patterns."""
    kinds = ["window", "bigbird", "linformer"]
    return _scaling(claim, benchmarks, "both_seconds", kinds, linear=True, others=["full"])


def parallel_training(claim: Claim, benchmarks: Path) -> Evidence:
    """Training speed of an LSTM relative to a Transformer of the same size, on a GPU."""
    speeds = _read(benchmarks / "baselines.json")["speed_cuda"]
    ratios = {
        int(length): speeds_of_length["recurrent"]["to_transformer"]
        for length, speeds_of_length in speeds["lengths"].items()
    }
    facts = [
        f"sentences of {length} tokens: an LSTM trains {ratio:.2f} times as fast as a Transformer"
        for length, ratio in ratios.items()
    ]
    verdicts = [CONFIRMED if ratio < 1 else NOT_AT_THIS_SIZE for ratio in ratios.values()]
    if min(ratios.values()) > 1:
        verdicts = [CONTRADICTED]
    curve = Curve("LSTM, tokens per second relative to the Transformer", list(ratios.items()))
    return _measured(
        f"13 M weights each, batches of {speeds['tokens_per_batch']:,} tokens, {speeds['hardware']}",
        "python benchmarks/baselines.py --part speed --device cuda",
        verdicts,
        facts,
        curve_plot(claim.question, "tokens per sentence", "relative speed", [curve]),
    )


def transformer_or_lstm(claim: Claim, benchmarks: Path) -> Evidence:
    """Test BLEU of networks of equal size, trained once each; intervals are over sentences."""
    scores = _read(benchmarks / "baselines.json")["scores"]
    estimates = {
        name: Estimate(
            model_scores["bleu"]["value"], model_scores["bleu"]["low"], model_scores["bleu"]["high"]
        )
        for name, model_scores in scores.items()
    }
    ours, theirs = estimates["Transformer"], estimates["recurrent"]
    difference = _independent_difference(ours, theirs)
    expectation = Expectation("Transformer", "better than", "LSTM", "BLEU")
    return _measured(
        "multi30k English to German, test 2016; 13 M weights each; one training run each on an H200; intervals over "
        "sentences only",
        "python benchmarks/baselines.py --part scores --runs runs",
        [judge(expectation, difference)],
        [f"{describe_difference('Transformer', difference, 'BLEU')}, against LSTM"],
        interval_plot(
            claim.question,
            "BLEU",
            [
                IntervalRow({"recurrent": "LSTM"}.get(name, name), estimate)
                for name, estimate in estimates.items()
            ],
        ),
    )


def _independent_difference(ours: Estimate, theirs: Estimate) -> Estimate:
    """The difference of two scores with independent intervals."""
    value = ours.value - theirs.value
    halves = []
    for estimate in (ours, theirs):
        assert estimate.low is not None
        assert estimate.high is not None
        halves.append((estimate.high - estimate.low) / 2)
    half = math.hypot(*halves)
    return Estimate(value, value - half, value + half)


MEASUREMENTS: dict[str, Callable[[Claim, Path], Evidence]] = {
    measurement.__name__: measurement
    for measurement in (
        *(path_length, quadratic_time, quadratic_memory, linear_patterns),
        *(parallel_training, transformer_or_lstm),
    )
}
"""functions that judge the numbers of benchmarks, by name"""


# ---------------------------------------------------------------------------------------------
# Stored results


def write_claim(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    """Write the results of a claim as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{name}.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def results_folder() -> Path:
    """The results that come with Regard, from the installed package or from the repository."""
    package = Path(__file__).parents[1]
    packaged, in_repository = (
        package / "lab_results",
        package.parents[1] / "docs" / "lab" / "results",
    )
    return packaged if packaged.is_dir() else in_repository


def stored_results(folder: Path | None = None) -> dict[str, dict[str, Any]]:
    """The stored evidence of each claim by kind: ``experiment`` and ``benchmark``; empty if there is none."""
    folder = folder or results_folder()
    return {
        name: _read(folder / f"{name}.json") if (folder / f"{name}.json").is_file() else {}
        for name in CLAIMS
    }
