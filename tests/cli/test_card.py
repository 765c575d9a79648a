"""A training writes a card that says what it was, for whoever makes a table of such cards."""

import json
from pathlib import Path

from tests.cli.commands import inside, write_recipe, write_task


def test_a_card_says_how_large_the_network_is_and_where_the_time_went(tmp_path: Path) -> None:
    write_task(tmp_path, list, 40)
    test = {"source": "valid.src", "target": "valid.tgt"}
    training = {"steps": 4, "validate_every": 2}
    write_recipe(tmp_path, data={"test": test}, training=training)
    done = inside("train", "recipe.yaml", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    card = json.loads((tmp_path / "run/card.json").read_text())
    assert card["layers"] == {"encoder": 1, "decoder": 1}
    assert card["d_model"] == 64
    parts = [card[f"{part}seconds"] for part in ("", "preparing_", "scoring_")]
    assert all(0 <= seconds < 60 for seconds in parts)
    assert card["seconds"] > 0
    assert card["scoring_seconds"] > 0
