"""benchmarks/back_translation_data.py: half of the pairs stay pairs; of the others only the target is used."""

import gzip
import json
from pathlib import Path

from tests.scripts import load_script


def test_the_rest_is_back_translated_by_a_model_trained_on_the_half(
    tmp_path: Path,
) -> None:
    benchmark = load_script("benchmarks/back_translation_data.py")
    pairs = [(f"a dog number {number}", f"ein\tHund Nummer {number}") for number in range(24)]
    folder = tmp_path / "multi30k"
    folder.mkdir()
    for language, texts in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        lines = "".join(f"{text}\n" for text in texts)
        (folder / f"train.{language}.gz").write_bytes(gzip.compress(lines.encode()))
        (folder / f"valid.{language}").write_text(lines)

    small = {
        "data.root": tmp_path,
        "tokenizer.vocab_size": 290,
        "model.d_model": 16,
        "training.steps": 2,
        "training.warmup": 1,
    }
    small |= {"training.validate_sentences": 2, "decoding.beam": 1, "decoding.extra_length": 2}
    arguments = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    benchmark.main(["--run", str(tmp_path / "run"), *arguments])

    half = [json.loads(line) for line in (folder / "half.jsonl").read_text().splitlines()]
    assert [(pair["source"], pair["target"]) for pair in half] == pairs[::2]
    found = [json.loads(line) for line in (folder / "rest-back.jsonl").read_text().splitlines()]
    assert [pair["target"] for pair in found] == [de for _, de in pairs[1::2]]
    recipe = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "half-reversed.jsonl" in recipe
