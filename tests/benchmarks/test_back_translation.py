"""benchmarks/back.py: half of the pairs stay pairs, of the others only the target is used."""

import gzip
import json
from pathlib import Path

from tests.scripts import load_script


def test_the_rest_is_translated_back_by_a_model_that_knows_only_the_half(
    tmp_path: Path,
) -> None:
    back = load_script("benchmarks/back.py")
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
    }
    small |= {"training.validate_sentences": 2, "search.beam": 1, "search.extra_length": 2}
    sets = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    back.main(["--run", str(tmp_path / "run"), *sets])

    half = [json.loads(line) for line in (folder / "half.jsonl").read_text().splitlines()]
    assert [(pair["source"], pair["target"]) for pair in half] == pairs[::2]
    found = [json.loads(line) for line in (folder / "rest-back.jsonl").read_text().splitlines()]
    assert [pair["target"] for pair in found] == [de for _, de in pairs[1::2]]
    learned = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "half-turned.jsonl" in learned
