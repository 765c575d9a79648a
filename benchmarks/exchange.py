"""How many translations stay the same when a model goes elsewhere: regard against the engines of an exported run.

    python benchmarks/exchange.py RUN TEXTS

Each engine gets the text, cuts it by the tokenizer that was exported with the model, and searches by itself: greedily,
with the run's beam and no length penalty, and with the run's beam and alpha, where ours searches in its manner.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch

from regard.decoding.beam_search import beam_search
from regard.errors import RegardError
from regard.interop.convert import export_model
from regard.interop.onnx import session
from regard.recipe import Manner
from regard.tasks import Translation, Translator

Engine = Callable[[list[str], int, float], list[str]]
BATCH = 32
LONGEST = 98
"""tokens of a translation, the same limit for all"""


def huggingface(folder: Path) -> Engine:
    transformers: Any = importlib.import_module("transformers")
    warnings.simplefilter("ignore")
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)

    def translate(texts: list[str], beam: int, alpha: float) -> list[str]:
        given = tokenizer(texts, return_tensors="pt", padding=True)
        # Theirs counts BOS too.
        options = {"num_beams": beam, "length_penalty": alpha, "max_length": LONGEST + 1}
        with torch.inference_mode():
            said = model.generate(**given, **options)
        return list(tokenizer.batch_decode(said, skip_special_tokens=True))

    return translate


def ctranslate2(folder: Path) -> Engine:
    import ctranslate2 as engine

    translator = engine.Translator(str(folder), intra_threads=torch.get_num_threads())
    options = json.loads((folder / "translate.json").read_text())
    source, target = (
        sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
        for side in ("source", "target")
    )

    def translate(texts: list[str], beam: int, alpha: float) -> list[str]:
        pieces = source.encode(texts, out_type=str)
        asked = {
            **options,
            "beam_size": beam,
            "length_penalty": alpha,
            "max_decoding_length": LONGEST,
        }
        said = translator.translate_batch(pieces, **asked)
        return [str(target.decode_pieces(one.hypotheses[0])) for one in said]

    return translate


class State:
    """Keys and values of the graphs, for a search of ours."""

    def __init__(self, feed: dict[str, Any]) -> None:
        self.feed = feed

    def select(self, rows: torch.Tensor) -> State:
        beams = self.feed["keys"].shape[2]
        sentences, kept = (rows[:, 0] // beams).numpy(), (rows % beams).numpy()
        feed = {name: self.feed[name][:, sentences] for name in ("memory_keys", "memory_values")}
        feed["real"] = self.feed["real"][sentences]
        for name in ("keys", "values"):
            feed[name] = self.feed[name][:, sentences[:, None], kept]
        return State(feed)


def onnx(folder: Path) -> Engine:
    encoder, decoder = session(folder / "encoder.onnx"), session(folder / "decoder.onnx")
    marks = json.loads((folder / "config.json").read_text())
    source, target = (
        sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
        for side in ("source", "target")
    )

    def step(tokens: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        batch = state.feed["real"].shape[0]
        feed = {**state.feed, "tokens": tokens.view(batch, -1).numpy()}
        logits, keys, values = decoder.run(None, feed)
        flat = torch.from_numpy(logits).flatten(0, 1)
        return flat, State({**state.feed, "keys": keys, "values": values})

    def translate(texts: list[str], beam: int, alpha: float) -> list[str]:
        rows = [[*ids, marks["end"]] for ids in source.encode(texts, out_type=int)]
        longest = max(map(len, rows))
        given = np.array([row + [marks["pad"]] * (longest - len(row)) for row in rows])
        feed = dict(
            zip(
                ("memory_keys", "memory_values", "real"),
                encoder.run(None, {"source": given}),
                strict=True,
            )
        )
        shape = marks["layers"], len(rows), 1, marks["heads"], 0
        feed["keys"] = np.zeros((*shape, marks["d_k"]), np.float32)
        feed["values"] = np.zeros((*shape, marks["d_v"]), np.float32)
        found = beam_search(
            step,
            State(feed),
            limits=[LONGEST] * len(rows),
            start=marks["start"],
            end=marks["end"],
            beam=beam,
            alpha=alpha,
            banned=marks["never"],
        )
        return [str(target.decode(best.tokens)) for best, *_ in found]

    return translate


ENGINES: dict[str, tuple[Callable[[Path], Engine], Manner]] = {
    "huggingface": (huggingface, "transformers"),
    "ctranslate2": (ctranslate2, "ctranslate2"),
    "ctranslate2-int8": (ctranslate2, "ctranslate2"),
    "onnx": (onnx, "paper"),
}
"""and the manner of our search that is theirs; onnx brings none of its own"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("texts", type=Path, help="one a line")
    parser.add_argument("--sentences", type=int, default=1000, help="how many of them")
    given = parser.parse_args()
    texts = given.texts.read_text(encoding="utf-8").splitlines()[: given.sentences]
    model = Translator.load(given.run, "cpu")
    search = model.recipe.decoding.model_copy(
        update={"max_length": LONGEST, "extra_length": LONGEST}
    )
    model.recipe = model.recipe.model_copy(update={"search": search})
    ours: dict[tuple[Any, ...], list[Translation]] = {}
    for name, (open_engine, manner) in ENGINES.items():
        ways: list[tuple[int, float, Manner]]
        ways = [
            (1, 0.0, "paper"),
            (search.beam, 0.0, "paper"),
            (search.beam, search.length_penalty, manner),
        ]
        with tempfile.TemporaryDirectory() as scratch:
            try:
                lines = export_model(given.run, name, Path(scratch) / "out")[:-1]
                print(name, *lines, sep=": ", flush=True)
            except RegardError as error:
                print(name, error, sep=": ")
                continue
            engine = open_engine(Path(scratch) / "out")
            for way in ways:
                beam, alpha, kind = way
                if way not in ours:
                    found = model.search(texts, beam=beam, alpha=alpha, manner=kind)
                    ours[way] = [best for best, *_ in found]
                said = []
                begin = time.perf_counter()
                for start in range(0, len(texts), BATCH):
                    said += engine(texts[start : start + BATCH], beam, alpha)
                seconds = time.perf_counter() - begin
                told = f"beam {beam}, alpha {alpha:g}, manner {kind}"
                print(f"  {told}: {_same(said, ours[way])} ({seconds:.0f} s)", flush=True)


def _same(said: list[str], ours: list[Translation]) -> str:
    same = [a.strip() == one.text.strip() for a, one in zip(said, ours, strict=True)]
    cut = sum(not one.finished for one, equal in zip(ours, same, strict=True) if not equal)
    rest = f", {cut} of the others cut at the limit" if cut else ""
    return f"{sum(same)} of {len(same)} the same{rest}"


if __name__ == "__main__":
    main()
