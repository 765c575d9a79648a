"""Translation speed: sentences per second, compared with other engines with the same weights in the same run.

All engines get ids or pieces, so that tokenization is not timed, and use the same stopping rule. They take turns, so
that other load on the machine affects all of them equally; each figure is a median. CTranslate2 is measured in two
configurations: its default (``ctranslate2``), with all threads in one batch, and with one batch per thread, which is
usually faster.
"""

from __future__ import annotations

import json
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

from regard.data.corpus import read_pairs
from regard.data.pairs import Pair
from regard.data.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.inference.engine import Request
from regard.inference.worker_pool import on_one_core
from regard.interop.base import require_package
from regard.interop.convert import export_model
from regard.interop.huggingface import quiet
from regard.nn.network import named_weights
from regard.nn.transformer import Transformer
from regard.recipe import Device, Precision, Preset, make_recipe, override_decoding, suggest
from regard.storage.run_dir import RunDir
from regard.tasks import Translator

Ids = list[list[int]]

VOCAB_SIZE = 8_000
"""of a random model"""
TOKENS = 20
"""of each source and each translation of a random model: the same for all engines, whatever the weights are"""
SEED = 1
GPU_BATCHES = (2_048, 1_024, 512, 256)
"""sizes of the batches that CTranslate2 is measured with on a GPU, besides all sentences in one batch"""
NEG_INF = -1e4
"""the logit of tokens that a random model never generates: EOS, so that all translations have one length, and others"""
LENGTH_PENALTY = 0.0
"""no length penalty, because its form differs between the engines"""


# ---------------------------------------------------------------------------------------------
# What is translated


@dataclass(frozen=True)
class Workload:
    """A run folder and the sources to translate."""

    run: Path
    sources: Ids
    length: int | None
    """the exact number of tokens of every translation; None: until EOS"""


def run_workload(run: Path, sentences: int) -> Workload:
    """A run and the first sentences of its test data."""
    recipe = RunDir(run).recipe()
    if not recipe.is_seq2seq:
        raise RegardError(f"{run}: its task is {recipe.task}; bench translate needs translation")
    if recipe.data.test is None:
        raise RegardError(f"{run}: its recipe has no data.test to take sentences from")
    if recipe.data.targets:
        raise RegardError(f"{run}: a multilingual model; bench translate needs one target language")
    pairs = islice(read_pairs(recipe.data.test, recipe.data, "data.test"), sentences)
    texts = [pair.source for pair in pairs]
    tokenizer = RunDir(run).tokenizer(recipe)
    return Workload(run, tokenizer.source.encode(texts), None)


def preset_workload(
    folder: Path, preset: Preset, sentences: int, vocab_size: int = VOCAB_SIZE
) -> Workload:
    """A run folder with random weights of a preset's size, and random sources."""
    words = [f"w{number}" for number in range(vocab_size - len(SPECIAL_TOKENS))]
    recipe = make_recipe(
        {
            "data": {"train": {"pairs": ["none.tsv"]}, "languages": ["source", "target"]},
            "tokenizer": {"kind": "word", "vocab_size": vocab_size},
            "model": {"preset": preset, "output_bias": True},
            "decoding": {"max_length": TOKENS},
        },
        "bench",
    )
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: (Pair(word, word) for word in words))
    torch.manual_seed(SEED)
    with on_one_core():  # workers can be forked only from a process without threads
        network = Translator.build(recipe, tokenizer)
    assert isinstance(network, Transformer)
    assert network.projection.bias is not None
    with torch.no_grad():
        network.projection.bias[[EOS, *tokenizer.target.suppressed_tokens]] = NEG_INF
    folder.mkdir()
    run = RunDir(folder)
    run.write_recipe(recipe)
    tokenizer.save(folder)
    run.write_weights(named_weights(network))
    rng = random.Random(SEED)
    sources = [
        [rng.randrange(len(SPECIAL_TOKENS), tokenizer.source.size) for _ in range(TOKENS)]
        for _ in range(sentences)
    ]
    return Workload(folder, sources, TOKENS)


@dataclass(frozen=True)
class TranslateSetting:
    """What all engines are measured with."""

    workload: Workload
    precision: Precision
    beam: int
    threads: int
    device: Device


# ---------------------------------------------------------------------------------------------
# Engines


class BenchEngine(ABC):
    name: str
    precision: str
    settings: str
    """in words"""

    @abstractmethod
    def translate(self, sources: Ids) -> Ids: ...

    @property
    def cpu_seconds(self) -> float:
        """CPU time so far."""
        return time.process_time()


class RegardEngine(BenchEngine):
    name = "regard"

    def __init__(self, setting: TranslateSetting, packed: bool = True) -> None:
        self.model = Translator.load(
            setting.workload.run, setting.device, setting.precision, setting.threads
        )
        if not packed:
            self.model.engine.packed = None
        self.model.start_workers()
        self.precision, self.settings = self.model.precision, self.model.engine.summary
        # CTranslate2's rule stops earliest, so all engines do the least work.
        rule = {"length_penalty": LENGTH_PENALTY, "length_normalization": "ctranslate2"}
        options = {"beam": setting.beam, **rule}
        self.decoding = override_decoding(self.model.recipe.decoding, options)

    def translate(self, sources: Ids) -> Ids:
        nbest_lists = self.model.engine.generate([Request(ids) for ids in sources], self.decoding)
        return [best.tokens for best, *_ in nbest_lists]

    @property
    def cpu_seconds(self) -> float:
        return self.model.engine.cpu_seconds


class CTranslate2Engine(BenchEngine):
    name = "ctranslate2"

    def __init__(
        self,
        setting: TranslateSetting,
        folder: Path,
        inter_threads: int = 1,
        max_batch: int | None = None,
    ) -> None:
        ctranslate2 = require_package("ctranslate2")
        gpu, int8 = setting.device == "cuda", setting.precision == "int8"
        half = gpu and setting.precision == "bf16"
        self.precision = "int8" if int8 else "fp16" if half else "fp32"
        out = folder / f"ctranslate2-{self.precision}"
        if not out.exists():
            export_model(setting.workload.run, "ctranslate2-int8" if int8 else "ctranslate2", out)
        run = RunDir(setting.workload.run)
        tokenizer = run.tokenizer(run.recipe())
        self.pieces = tokenizer.source.pieces
        target = tokenizer.target
        self.ids = {piece: i for i, piece in enumerate(target.pieces(range(target.size)))}
        options = json.loads((out / "translate.json").read_text())
        if setting.workload.length is not None:  # a random model never generates what is suppressed
            options = {"max_decoding_length": setting.workload.length}
        self.options = {**options, "beam_size": setting.beam, "length_penalty": LENGTH_PENALTY}
        intra_threads = setting.threads // inter_threads
        self.settings = f"inter_threads {inter_threads}, intra_threads {intra_threads}"
        self.max_batch = max_batch or -(-len(setting.workload.sources) // inter_threads)
        if gpu:
            self.settings = f"max_batch_size {self.max_batch}"
        self.model = ctranslate2.Translator(
            str(out),
            device="cuda" if gpu else "cpu",
            compute_type="int8" if int8 else "float16" if half else "float32",
            inter_threads=inter_threads,
            intra_threads=intra_threads,
        )

    @classmethod
    def configurations(cls, setting: TranslateSetting, folder: Path) -> list[BenchEngine]:
        """On a CPU, one batch at a time on all threads, which is the default, and one batch per thread.

        On a GPU, all sentences in one batch, and in smaller batches.
        """
        if setting.device == "cuda":
            sizes = [size for size in GPU_BATCHES if size < len(setting.workload.sources)]
            default, *others = (cls(setting, folder, max_batch=size) for size in (None, *sizes))
        else:
            threads = sorted({1, setting.threads})
            default, *others = (cls(setting, folder, inter) for inter in threads)
        for other in others:
            other.name = f"{cls.name} ({other.settings})"
        return [default, *others]

    def translate(self, sources: Ids) -> Ids:
        results = self.model.translate_batch(
            [self.pieces(row) for row in sources],
            max_batch_size=self.max_batch,
            **self.options,
        )
        return [[self.ids[piece] for piece in result.hypotheses[0]] for result in results]


class MarianEngine(BenchEngine):
    """MarianMT in Hugging Face's transformers."""

    name = "marian"
    precision = "fp32"

    def __init__(self, setting: TranslateSetting, folder: Path) -> None:
        transformers = require_package("transformers")
        out = folder / "huggingface"
        if not out.exists():
            export_model(setting.workload.run, "huggingface", out)
        self.device = "cuda" if setting.device == "cuda" else "cpu"
        with quiet(transformers):
            self.model = transformers.MarianMTModel.from_pretrained(out).eval().to(self.device)
        if setting.precision == "bf16":
            self.model, self.precision = self.model.bfloat16(), "bf16"
        self.options: dict[str, Any] = {"num_beams": setting.beam}
        if setting.beam > 1:
            self.options["length_penalty"] = LENGTH_PENALTY
        if setting.workload.length is not None:
            limit = {"max_new_tokens": setting.workload.length, "max_length": None}
            self.options |= {**limit, "bad_words_ids": None}
        self.threads = setting.threads
        self.settings = f"generate, torch on {self.threads} threads"

    @torch.inference_mode()
    def translate(self, sources: Ids) -> Ids:
        max_source_length = max(map(len, sources))
        rows = [[*row, EOS, *[PAD] * (max_source_length - len(row))] for row in sources]
        ids = torch.tensor(rows, device=self.device)
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        mask = (ids != PAD).long()
        outputs = self.model.generate(input_ids=ids, attention_mask=mask, **self.options)
        torch.set_num_threads(threads)
        return [[i for i in row if i not in (PAD, BOS, EOS)] for row in outputs.tolist()]


PEERS: dict[str, Callable[[TranslateSetting, Path], list[BenchEngine]]] = {
    "ctranslate2": CTranslate2Engine.configurations,
    "marian": lambda setting, folder: [MarianEngine(setting, folder)],
}
"""the other engines by name, each in all its configurations"""


# ---------------------------------------------------------------------------------------------
# Measurement


@dataclass(frozen=True)
class TranslateRow:
    """The figures of one engine."""

    name: str
    precision: str
    beam: int
    batch: int
    threads: int
    sentences_per_second: float
    """wall-clock time"""
    sentences_per_cpu_second: float
    """CPU time of its processes, which other load on the machine changes less"""
    agreement: float
    """fraction of the translations that equal those of the plain network in float32, token by token"""
    settings: str
    """in words"""


@dataclass(frozen=True)
class Timing:
    seconds: float
    cpu_seconds: float
    outputs: Ids


def time_translation(engine: BenchEngine, sources: Ids) -> Timing:
    clock, cpu = time.perf_counter(), engine.cpu_seconds
    outputs = engine.translate(sources)
    return Timing(time.perf_counter() - clock, engine.cpu_seconds - cpu, outputs)


def measure(
    settings: Sequence[TranslateSetting], peers: Sequence[str], folder: Path, repeats: int
) -> list[TranslateRow]:
    """Regard in each setting, and the peers in the last one. The settings differ only in precision."""
    for peer in peers:
        if peer not in PEERS:
            raise RegardError(f"--peer {peer}: no such peer{suggest(peer, PEERS)}")
    last = settings[-1]
    sources = last.workload.sources
    ours = [RegardEngine(setting) for setting in settings]
    resolved = replace(last, precision=ours[-1].model.precision)  # what auto resolved to
    theirs = [engine for peer in peers for engine in PEERS[peer](resolved, folder)]
    engines: list[BenchEngine] = [*ours, *theirs]
    timings: dict[BenchEngine, list[Timing]] = {engine: [] for engine in engines}
    for repeat in range(repeats + 1):
        for engine, engine_timings in timings.items():
            timing = time_translation(engine, sources)
            if repeat:  # the first is a warm-up
                engine_timings.append(timing)
    plain = RegardEngine(replace(last, precision="fp32"), packed=False)
    expected = plain.translate(sources)
    return [
        _row(engine, engine_timings, expected, last) for engine, engine_timings in timings.items()
    ]


def _row(
    engine: BenchEngine, timings: Sequence[Timing], expected: Ids, setting: TranslateSetting
) -> TranslateRow:
    count = len(expected)
    same = [
        ours == expected_output
        for ours, expected_output in zip(timings[-1].outputs, expected, strict=True)
    ]
    return TranslateRow(
        name=engine.name,
        precision=engine.precision,
        beam=setting.beam,
        batch=count,
        threads=setting.threads,
        sentences_per_second=count / median(timing.seconds for timing in timings),
        sentences_per_cpu_second=count / median(timing.cpu_seconds for timing in timings),
        agreement=sum(same) / count,
        settings=engine.settings,
    )


def table(rows: Sequence[TranslateRow]) -> list[str]:
    """The rows as lines of text; ratio: the speed of the first row over that of this row."""
    first = rows[0].sentences_per_second
    lines = [f"{'':12} {'':5} {'sentences/s':>12} {'per cpu s':>10} {'ratio':>6}  {'as fp32':>7}"]
    lines += [
        f"{row.name.split()[0]:12} {row.precision:5} {row.sentences_per_second:12.1f} "
        f"{row.sentences_per_cpu_second:10.1f} {first / row.sentences_per_second:5.2f}x  "
        f"{row.agreement:7.0%}  {row.settings}"
        for row in rows
    ]
    return lines
