"""A model in an HTML file compared with the same model in Python: texts, attention, size and speed.

    python benchmarks/html_export.py runs/demo test.en      # writes an entry of benchmarks/html_export.json

The first 200 lines of the file are translated by ``Translator.translate`` in fp32, which is
``regard translate --precision fp32``, and by the exported file in node. They are also compared with Python
with the rounded weights of the file: what differs from fp32 but not from these differs because of rounding. Attention
is compared for all texts, with the decoder reading the output of the file. Times are those of Chromium, which opens the
file from disk.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from operator import eq
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from regard.inspection.hooks import SITES, observe
from regard.interop import html_export as html
from regard.nn.network import copy_weights, named_weights
from regard.tasks import Translator

NODE = Path(__file__).with_suffix(".mjs")
RESULTS = Path(__file__).with_suffix(".json")
TIMED, ROUNDS = 20, 5
"""sentences that Chromium translates for the timing, and how often; the fastest time of each counts"""
FIRST_TEXT = """
new MutationObserver((_, observer) => {
  if (!document.querySelector(".live")?.textContent) return;
  window.firstText = performance.now();
  observer.disconnect();
}).observe(document, { childList: true, subtree: true, characterData: true });
"""


def in_node(file: Path, requests: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The results of the model in an exported file; the first one is about loading it."""
    command = ["node", str(NODE), str(file)]
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stdin:
        stdin.write(lines)
        stdin.seek(0)
        with subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, encoding="utf-8"
        ) as node:
            assert node.stdout is not None
            yield from map(json.loads, node.stdout)
        if node.returncode != 0:
            sys.exit(f"node ended with status {node.returncode}")


@torch.inference_mode()
def attention_error(model: Translator, result: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The absolute differences of all attention weights of one sentence."""
    trace = result["trace"]
    inputs = [token["id"] for token in trace["inputs"]]
    ours = observe(model, model.request(trace["text"]), inputs)
    differences = [
        np.abs(ours.weights[site] - np.array(result["arrays"][site]).reshape(trace[site]["shape"]))
        for site in SITES
    ]
    return np.concatenate([one.ravel() for one in differences])


def rounded(run: Path, bits: int) -> Translator:
    """The model in Python with the weights that are in the file."""
    model = Translator.load(run, "cpu", precision="fp32")
    packed = html.pack_weights(named_weights(model.network), bits)
    copy_weights(model.network, packed.restored(), "rounded weights")
    model.freeze()
    return model


def compare(
    model: Translator, same_weights: Translator, file: Path, texts: Sequence[str]
) -> dict[str, Any]:
    """Texts and attention in Python and in node. same_weights: the model with the weights of the file."""
    expected, with_same_weights = model.translate(texts), same_weights.translate(texts)
    requests = [{"trace": {"q": text}, "arrays": "attention"} for text in texts]
    differences, errors, found = [], [], []
    results = in_node(file, requests)
    next(results)  # about loading
    for text, ours, result in zip(texts, expected, results, strict=True):
        errors.append(attention_error(model, result))
        theirs = result["trace"]["translation"]
        found.append(theirs)
        if theirs != ours:
            differences.append({"text": text, "python": ours, "html": theirs})
    every = np.concatenate(errors)
    return {
        "sentences": len(texts),
        "same_text": len(texts) - len(differences),
        "same_text_as_python_with_the_same_weights": sum(map(eq, found, with_same_weights)),
        "differences": differences,
        "attention_max": float(every.max()),
        "attention_99.9_percent": float(np.quantile(every, 0.999)),
        "attention_mean": float(every.mean()),
    }


def cpu_seconds(file: Path, texts: Sequence[str]) -> float:
    """The median CPU time of a translation in node, which does not depend on the load of the machine."""
    _, _, *results = in_node(file, [{"translate": text} for text in texts[: TIMED + 1]])
    return median(result["cpu_seconds"] for result in results)


def times(file: Path, texts: Sequence[str]) -> dict[str, float]:
    """Seconds in Chromium: until the first translation, and the median of the sentences afterwards."""
    from playwright.sync_api import sync_playwright

    found = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=found, args=["--no-sandbox"])
        first, rounds = [], []
        for _ in range(ROUNDS):
            page = browser.new_page()
            page.add_init_script(FIRST_TEXT)
            page.goto(f"{file.as_uri()}#q={texts[0]}")
            page.locator(".tabs").wait_for(timeout=120_000)
            first.append(page.evaluate("window.firstText") / 1000)
            rounds.append(page.evaluate(TIME_EACH, list(texts[:TIMED])))
            page.close()
        browser.close()
    each = [min(times) / 1000 for times in zip(*rounds, strict=True)]
    return {"first_translation_seconds": min(first), "seconds_per_sentence": median(each)}


TIME_EACH = """async (texts) => {
  const [model, weights, code] = ["model", "weights", "worker"].map((id) => document.getElementById(id).textContent);
  const worker = new Worker(URL.createObjectURL(new Blob([code], { type: "text/javascript" })));
  const call = (method, parameters) => new Promise((resolve) => {
    worker.onmessage = ({ data }) => resolve(data.result);
    worker.postMessage({ id: 0, method, parameters });
  });
  await call("load", [JSON.parse(model), weights]);
  const times = [];
  for (const text of texts) {
    const start = performance.now();
    await call("translate", [text]);
    times.push(performance.now() - start);
  }
  worker.terminate();
  return times;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("texts", type=Path, help="a file with one source text per line")
    parser.add_argument(
        "--bits", type=int, choices=html.BITS, help="store weights with so many bits"
    )
    parser.add_argument("--times-only", action="store_true", help="do not compare translations")
    parser.add_argument("--name", help="name of the entry; the run folder's name by default")
    options = parser.parse_args()
    if options.bits:
        html.BITS = (options.bits,)
    texts = options.texts.read_text(encoding="utf-8").splitlines()[:200]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.html"
        lines = html.export_html(options.run, file)
        bits = int(lines[0].split()[3])
        model = Translator.load(options.run, "cpu", precision="fp32")
        entry = {
            "parameters": sum(one.numel() for one in model.network.parameters()),
            "bits": bits,
            "megabytes": file.stat().st_size / 1e6,
            **(
                {}
                if options.times_only
                else compare(model, rounded(options.run, bits), file, texts)
            ),
            "cpu_seconds_per_sentence": cpu_seconds(file, texts),
            **times(file, texts),
        }
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    results[options.name or options.run.resolve().name] = entry
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(entry, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
