"""Sentences a second, beside other engines with the same weights, in one run.

All sides are given ids or pieces, so that none is timed cutting text, and stop by the same rule. They take turns, so
that whatever else the machine does meanwhile meets all of them alike; each figure is a median. CTranslate2 is shown
both ways: as it comes (``ctranslate2``), threads inside one batch, and with a batch for each thread, mostly faster.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from regard.bench.subject import Subject
from regard.data.special_tokens import BOS, EOS, PAD
from regard.errors import RegardError
from regard.inference.engine import Request
from regard.interop.convert import export_model
from regard.interop.files import need
from regard.interop.huggingface import quiet
from regard.recipe import Device, Precision, override_decoding, suggest
from regard.storage.run_dir import RunDir
from regard.tasks import Translator

Ids = list[list[int]]
LENGTH_PENALTY = 0.0
"""no length penalty: its form differs between the engines"""


@dataclass(frozen=True)
class Setting:
    """What all sides are to do."""

    subject: Subject
    precision: Precision
    beam: int
    threads: int
    device: Device


@dataclass(frozen=True)
class Row:
    """One engine's figures."""

    name: str
    precision: str
    beam: int
    batch: int
    threads: int
    sentences_per_second: float
    """by the clock"""
    sentences_per_cpu_second: float
    """by the time its processes had a core: other work on the machine changes it less"""
    agreement: float
    """share of the translations that are, token for token, those of the plain network in float32"""
    settings: str
    """in words"""


class Engine(ABC):
    name: str
    precision: str
    settings: str

    @abstractmethod
    def translate(self, sources: Ids) -> Ids: ...

    @property
    def cpu_seconds(self) -> float:
        """The time it has had a core so far."""
        return time.process_time()


class Ours(Engine):
    name = "regard"

    def __init__(self, setting: Setting, packed: bool = True) -> None:
        self.beam = setting.beam
        self.model = Translator.load(
            setting.subject.run, setting.device, setting.precision, setting.threads
        )
        if not packed:
            self.model.engine.packed = None
        self.model.start_workers()
        self.precision, self.settings = self.model.precision, self.model.engine.summary
        # CTranslate2's rule stops first, and so has the least to do.
        rule = {"length_penalty": LENGTH_PENALTY, "length_normalization": "ctranslate2"}
        self.decoding = override_decoding(self.model.recipe.decoding, {"beam": self.beam, **rule})

    def translate(self, sources: Ids) -> Ids:
        found = self.model.engine.generate([Request(ids) for ids in sources], self.decoding)
        return [best.tokens for best, *_ in found]

    @property
    def cpu_seconds(self) -> float:
        return self.model.engine.cpu_seconds


class CTranslate2(Engine):
    name = "ctranslate2"

    def __init__(self, setting: Setting, folder: Path, inter: int) -> None:
        engine = need("ctranslate2")
        eight = setting.precision == "int8"
        self.precision = "int8" if eight else "fp32"
        out = folder / f"ctranslate2-{self.precision}"
        if not out.exists():
            export_model(setting.subject.run, "ctranslate2-int8" if eight else "ctranslate2", out)
        run = RunDir(setting.subject.run)
        tokenizer = run.tokenizer(run.recipe())
        self.pieces = tokenizer.source.pieces
        target = tokenizer.target
        self.ids = {piece: i for i, piece in enumerate(target.pieces(range(target.size)))}
        options = json.loads((out / "translate.json").read_text())
        if setting.subject.longest is not None:  # such a model never says what is suppressed
            options = {"max_decoding_length": setting.subject.longest}
        self.options = {**options, "beam_size": setting.beam, "length_penalty": LENGTH_PENALTY}
        self.inter, intra = inter, setting.threads // inter
        self.settings = f"inter_threads {inter}, intra_threads {intra}"
        self.model = engine.Translator(
            str(out),
            device="cuda" if setting.device == "cuda" else "cpu",
            compute_type="int8" if eight else "float32",
            inter_threads=inter,
            intra_threads=intra,
        )

    @classmethod
    def both(cls, setting: Setting, folder: Path) -> list[Engine]:
        """As it comes, one batch at a time on all threads; and a batch on each thread."""
        usual, *others = (cls(setting, folder, inter) for inter in sorted({1, setting.threads}))
        for other in others:
            other.name = f"{cls.name} ({other.settings})"
        return [usual, *others]

    def translate(self, sources: Ids) -> Ids:
        found = self.model.translate_batch(
            [self.pieces(row) for row in sources],
            max_batch_size=-(-len(sources) // self.inter),
            **self.options,
        )
        return [[self.ids[piece] for piece in one.hypotheses[0]] for one in found]


class Marian(Engine):
    name = "marian"
    precision = "fp32"

    def __init__(self, setting: Setting, folder: Path) -> None:
        transformers = need("transformers")
        out = folder / "huggingface"
        if not out.exists():
            export_model(setting.subject.run, "huggingface", out)
        self.device = "cuda" if setting.device == "cuda" else "cpu"
        with quiet(transformers):
            self.model = transformers.MarianMTModel.from_pretrained(out).eval().to(self.device)
        if setting.precision == "bf16":
            self.model, self.precision = self.model.bfloat16(), "bf16"
        self.options: dict[str, Any] = {"num_beams": setting.beam}
        if setting.beam > 1:
            self.options["length_penalty"] = LENGTH_PENALTY
        if setting.subject.longest is not None:
            exact = {"max_new_tokens": setting.subject.longest, "max_length": None}
            self.options |= {**exact, "bad_words_ids": None}
        self.threads = setting.threads
        self.settings = f"generate, torch on {self.threads} threads"

    @torch.inference_mode()
    def translate(self, sources: Ids) -> Ids:
        longest = max(map(len, sources))
        rows = [[*row, EOS, *[PAD] * (longest - len(row))] for row in sources]
        ids = torch.tensor(rows, device=self.device)
        usual = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        mask = (ids != PAD).long()
        said = self.model.generate(input_ids=ids, attention_mask=mask, **self.options)
        torch.set_num_threads(usual)
        return [[i for i in row if i not in (PAD, BOS, EOS)] for row in said.tolist()]


PEERS: dict[str, Callable[[Setting, Path], list[Engine]]] = {
    "ctranslate2": CTranslate2.both,
    "marian": lambda setting, folder: [Marian(setting, folder)],
}
"""each in all the ways it may be set"""


@dataclass(frozen=True)
class Turn:
    seconds: float
    cpu_seconds: float
    said: Ids


def timed(engine: Engine, sources: Ids) -> Turn:
    clock, cpu = time.perf_counter(), engine.cpu_seconds
    said = engine.translate(sources)
    return Turn(time.perf_counter() - clock, engine.cpu_seconds - cpu, said)


def measure(
    settings: Sequence[Setting], peers: Sequence[str], folder: Path, repeats: int
) -> list[Row]:
    """Regard in each of the settings, which differ in precision only, beside the peers in the last of them."""
    for peer in peers:
        if peer not in PEERS:
            raise RegardError(f"--peer {peer}: no such peer{suggest(peer, PEERS)}")
    last = settings[-1]
    sources = last.subject.sources
    ours = [Ours(setting) for setting in settings]
    alike = replace(last, precision=ours[-1].model.precision)  # what auto has come to
    theirs = [engine for peer in peers for engine in PEERS[peer](alike, folder)]
    engines: list[Engine] = [*ours, *theirs]
    turns: dict[Engine, list[Turn]] = {engine: [] for engine in engines}
    for number in range(repeats + 1):
        for engine, own in turns.items():
            turn = timed(engine, sources)
            if number:  # the first warms up
                own.append(turn)
    right = _plain(last).translate(sources)
    return [_row(engine, own, right, last) for engine, own in turns.items()]


def _plain(setting: Setting) -> Ours:
    plain = Setting(setting.subject, "fp32", setting.beam, setting.threads, setting.device)
    return Ours(plain, packed=False)


def _row(engine: Engine, turns: Sequence[Turn], right: Ids, setting: Setting) -> Row:
    count = len(right)
    same = [ours == theirs for ours, theirs in zip(turns[-1].said, right, strict=True)]
    return Row(
        name=engine.name,
        precision=engine.precision,
        beam=setting.beam,
        batch=count,
        threads=setting.threads,
        sentences_per_second=count / median(turn.seconds for turn in turns),
        sentences_per_cpu_second=count / median(turn.cpu_seconds for turn in turns),
        agreement=sum(same) / count,
        settings=engine.settings,
    )


def table(rows: Sequence[Row]) -> list[str]:
    """For a person; ratio: how many times as fast the first is."""
    first = rows[0].sentences_per_second
    lines = [f"{'':12} {'':5} {'sentences/s':>12} {'per cpu s':>10} {'ratio':>6}  {'as fp32':>7}"]
    lines += [
        f"{row.name.split()[0]:12} {row.precision:5} {row.sentences_per_second:12.1f} "
        f"{row.sentences_per_cpu_second:10.1f} {first / row.sentences_per_second:5.2f}x  "
        f"{row.agreement:7.0%}  {row.settings}"
        for row in rows
    ]
    return lines
