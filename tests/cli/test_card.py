"""The card of a run has the size of the network, the time of each phase, and sentences to try."""

import json
from pathlib import Path

from tests.cli.commands import inside, write, write_recipe, write_task


def test_a_card_has_the_size_of_the_network_and_the_time_of_each_phase(tmp_path: Path) -> None:
    write_task(tmp_path, list, 40)
    sentences = [f"a b c d e f g h a b {letter}" for letter in "abcdefg"]
    write(tmp_path / "test.src", ["a b", *sentences])
    write(tmp_path / "test.tgt", ["a b", *sentences])
    test = {"source": "test.src", "target": "test.tgt"}
    training = {"steps": 4, "warmup": 1, "validate_every": 2}
    write_recipe(tmp_path, data={"test": test}, training=training)
    done = inside("train", "recipe.yaml", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    card = json.loads((tmp_path / "run/card.json").read_text())
    assert card["layers"] == {"encoder": 1, "decoder": 1}
    assert card["d_model"] == 64
    phases = [card[f"{phase}seconds"] for phase in ("", "preparing_", "scoring_")]
    assert all(0 <= seconds < 60 for seconds in phases)
    assert card["seconds"] > 0
    assert card["scoring_seconds"] > 0
    # They are there when the data are not, for example in a container.
    assert card["examples"] == sentences[:4]
