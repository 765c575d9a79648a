"""How many translations stay the same after export: Regard against the engines that open an exported run.

    python benchmarks/export_agreement.py RUN TEXTS

Each engine gets the text, tokenizes it with the exported tokenizer, and decodes by itself: greedily, with the run's
beam and no length penalty, and with the run's beam and length penalty, where Regard uses the engine's length
normalization.
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
from regard.tasks import Translation, Translator

TranslateFunction = Callable[[list[str], int, float], list[str]]
BATCH = 32
MAX_LENGTH = 98
"""tokens of a translation, the same limit for all engines"""


def huggingface(folder: Path) -> TranslateFunction:
    transformers: Any = importlib.import_module("transformers")
    warnings.simplefilter("ignore")
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)

    def translate(texts: list[str], beam: int, length_penalty: float) -> list[str]:
        given = tokenizer(texts, return_tensors="pt", padding=True)
        # Their limit includes BOS.
        options = {
            "num_beams": beam,
            "length_penalty": length_penalty,
            "max_length": MAX_LENGTH + 1,
        }
        with torch.inference_mode():
            outputs = model.generate(**given, **options)
        return list(tokenizer.batch_decode(outputs, skip_special_tokens=True))

    return translate


def ctranslate2(folder: Path) -> TranslateFunction:
    import ctranslate2 as engine

    translator = engine.Translator(str(folder), intra_threads=torch.get_num_threads())
    options = json.loads((folder / "translate.json").read_text())
    source, target = (
        sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
        for side in ("source", "target")
    )

    def translate(texts: list[str], beam: int, length_penalty: float) -> list[str]:
        pieces = source.encode(texts, out_type=str)
        arguments = {
            **options,
            "beam_size": beam,
            "length_penalty": length_penalty,
            "max_decoding_length": MAX_LENGTH,
        }
        results = translator.translate_batch(pieces, **arguments)
        return [str(target.decode_pieces(one.hypotheses[0])) for one in results]

    return translate


class GraphState:
    """The KV cache of the graphs, for our beam search."""

    def __init__(self, feed: dict[str, Any]) -> None:
        self.feed = feed

    def select(self, rows: torch.Tensor) -> GraphState:
        beams = self.feed["keys"].shape[2]
        sentences, selected = (rows[:, 0] // beams).numpy(), (rows % beams).numpy()
        feed = {name: self.feed[name][:, sentences] for name in ("cross_keys", "cross_values")}
        feed["source_mask"] = self.feed["source_mask"][sentences]
        for name in ("keys", "values"):
            feed[name] = self.feed[name][:, sentences[:, None], selected]
        return GraphState(feed)


def onnx(folder: Path) -> TranslateFunction:
    encoder, decoder = session(folder / "encoder.onnx"), session(folder / "decoder.onnx")
    config = json.loads((folder / "config.json").read_text())
    source, target = (
        sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
        for side in ("source", "target")
    )

    def step(tokens: torch.Tensor, state: GraphState) -> tuple[torch.Tensor, GraphState]:
        batch = state.feed["source_mask"].shape[0]
        feed = {**state.feed, "tokens": tokens.view(batch, -1).numpy()}
        logits, keys, values = decoder.run(None, feed)
        flat = torch.from_numpy(logits).flatten(0, 1)
        return flat, GraphState({**state.feed, "keys": keys, "values": values})

    def translate(texts: list[str], beam: int, length_penalty: float) -> list[str]:
        rows = [[*ids, config["eos_token_id"]] for ids in source.encode(texts, out_type=int)]
        longest = max(map(len, rows))
        given = np.array([row + [config["pad_token_id"]] * (longest - len(row)) for row in rows])
        feed = dict(
            zip(
                ("cross_keys", "cross_values", "source_mask"),
                encoder.run(None, {"source": given}),
                strict=True,
            )
        )
        shape = config["layers"], len(rows), 1, config["heads"], 0
        feed["keys"] = np.zeros((*shape, config["d_k"]), np.float32)
        feed["values"] = np.zeros((*shape, config["d_v"]), np.float32)
        found = beam_search(
            step,
            GraphState(feed),
            max_lengths=[MAX_LENGTH] * len(rows),
            bos=config["bos_token_id"],
            eos=config["eos_token_id"],
            beam=beam,
            length_penalty=length_penalty,
            suppressed=config["suppressed_token_ids"],
        )
        return [str(target.decode(best.tokens)) for best, *_ in found]

    return translate


ENGINES: dict[str, tuple[Callable[[Path], TranslateFunction], str]] = {
    "huggingface": (huggingface, "transformers"),
    "ctranslate2": (ctranslate2, "ctranslate2"),
    "ctranslate2-int8": (ctranslate2, "ctranslate2"),
    "onnx": (onnx, "gnmt"),
}
"""with the length normalization that matches theirs; ONNX has no beam search of its own, so ours is used"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("texts", type=Path, help="file with one text per line")
    parser.add_argument("--sentences", type=int, default=1000, help="number of texts")
    given = parser.parse_args()
    texts = given.texts.read_text(encoding="utf-8").splitlines()[: given.sentences]
    model = Translator.load(given.run, "cpu")
    model.set_decoding(max_length=MAX_LENGTH, extra_length=MAX_LENGTH)
    decoding = model.recipe.decoding
    ours: dict[tuple[Any, ...], list[Translation]] = {}
    for name, (open_engine, rule) in ENGINES.items():
        cases: list[tuple[int, float, str]] = [
            (1, 0.0, "gnmt"),
            (decoding.beam, 0.0, "gnmt"),
            (decoding.beam, decoding.length_penalty, rule),
        ]
        with tempfile.TemporaryDirectory() as scratch:
            try:
                lines = export_model(given.run, name, Path(scratch) / "out")[:-1]
                print(name, *lines, sep=": ", flush=True)
            except RegardError as error:
                print(name, error, sep=": ")
                continue
            engine = open_engine(Path(scratch) / "out")
            for case in cases:
                beam, penalty, normalization = case
                if case not in ours:
                    found = model.search(
                        texts,
                        beam=beam,
                        length_penalty=penalty,
                        length_normalization=normalization,
                    )
                    ours[case] = [best for best, *_ in found]
                translations = []
                begin = time.perf_counter()
                for start in range(0, len(texts), BATCH):
                    translations += engine(texts[start : start + BATCH], beam, penalty)
                seconds = time.perf_counter() - begin
                options = f"beam {beam}, length_penalty {penalty:g}, {normalization}"
                agreement = _agreement(translations, ours[case])
                print(f"  {options}: {agreement} ({seconds:.0f} s)", flush=True)


def _agreement(theirs: list[str], ours: list[Translation]) -> str:
    same = [text.strip() == one.text.strip() for text, one in zip(theirs, ours, strict=True)]
    cut = sum(not one.finished for one, equal in zip(ours, same, strict=True) if not equal)
    rest = f", {cut} of the others cut off at the limit" if cut else ""
    return f"{sum(same)} of {len(same)} the same{rest}"


if __name__ == "__main__":
    main()
