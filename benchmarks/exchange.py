"""How many translations stay the same when a model goes elsewhere: regard against the engines of an exported run.

    python benchmarks/exchange.py RUN TEXTS [SENTENCES]

Each engine gets the text, cuts it by the tokenizer that was exported with the model, and searches by itself: greedily,
and with the run's beam and no length penalty, where all of them must find the same. "recipe" is the run's own beam and
alpha, whose penalty has another form in other engines.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch

from regard.errors import RegardError
from regard.exchange.convert import EXPORTS, export_model
from regard.exchange.onnx import session
from regard.model import Translator
from regard.search import beam_search

Engine = Callable[[list[str], int, float], list[str]]
BATCH = 32


def huggingface(folder: Path) -> Engine:
    import transformers

    warnings.simplefilter("ignore")
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)

    def translate(texts: list[str], beam: int, alpha: float) -> list[str]:
        given = tokenizer(texts, return_tensors="pt", padding=True)
        options = {"num_beams": beam, "length_penalty": alpha, "max_length": 100}
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
        asked = {**options, "beam_size": beam, "length_penalty": alpha, "max_decoding_length": 98}
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
        feed["keys"] = np.zeros((*shape, marks["key_width"]), np.float32)
        feed["values"] = np.zeros((*shape, marks["value_width"]), np.float32)
        found = beam_search(
            step,
            State(feed),
            limits=[len(row) - 1 + marks["extra_length"] for row in rows],
            start=marks["start"],
            end=marks["end"],
            beam=beam,
            alpha=alpha,
            banned=marks["never"],
        )
        return [str(target.decode(best.tokens)) for best, *_ in found]

    return translate


ENGINES: dict[str, Callable[[Path], Engine]] = {
    "huggingface": huggingface,
    "ctranslate2": ctranslate2,
    "ctranslate2-int8": ctranslate2,
    "onnx": onnx,
}


def main(run: Path, file: Path, count: int) -> None:
    texts = file.read_text(encoding="utf-8").splitlines()[:count]
    model = Translator.load(run, "cpu")
    search = model.recipe.search
    ways = {"greedy": (1, 0.0), f"beam {search.beam}, alpha 0": (search.beam, 0.0)}
    ways[f"recipe: beam {search.beam}, alpha {search.alpha:g}"] = (search.beam, search.alpha)
    ours = {
        way: model.translate(texts, beam=beam, alpha=alpha) for way, (beam, alpha) in ways.items()
    }
    for name in ENGINES:
        assert name in EXPORTS
        with tempfile.TemporaryDirectory() as scratch:
            try:
                print(
                    name, *export_model(run, name, Path(scratch) / "out")[:-1], sep=": ", flush=True
                )
            except RegardError as error:
                print(name, error, sep=": ")
                continue
            engine = ENGINES[name](Path(scratch) / "out")
            for way, (beam, alpha) in ways.items():
                begin, said = time.perf_counter(), []
                for start in range(0, len(texts), BATCH):
                    said += engine(texts[start : start + BATCH], beam, alpha)
                seconds = time.perf_counter() - begin
                same = sum(a.strip() == b.strip() for a, b in zip(said, ours[way], strict=True))
                print(f"  {way}: {same} of {len(texts)} the same ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1000)
