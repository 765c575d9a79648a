"""The tables of results match the cards, and a card has what the tables need."""

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from regard.nn.architectures import ARCHITECTURES
from regard.recipe import ModelConfig, load_recipe
from regard.training.model_card import count_layers
from tests.scripts import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results() -> ModuleType:
    return load_script("benchmarks/results.py")


def score(metric: str, name: str, value: float, *interval: float) -> dict[str, Any]:
    low, high = interval or (None, None)
    signature = "nrefs:1|bs:1000|seed:12345|case:mixed|tok:zh"
    return {
        "metric": metric,
        "name": name,
        "value": value,
        "low": low,
        "high": high,
        "signature": signature,
    }


OLD = {
    "reason_stopped": "all 5 steps are done",
    "seconds": 90.0,
    "processes": 1,
    "hardware": "NVIDIA H200",
    "parameters": 13_000_000,
    "valid": {"best_loss": 1.5, "best_perplexity": 4.48, "best_bleu": 40.16},
    "test": [],
    "command": "regard train some",
}
NEW = OLD | {
    "layers": {"encoder": 8, "decoder": 1},
    "d_model": 256,
    "preparing_seconds": 12.0,
    "scoring_seconds": 18.0,
    "test": [
        score("bleu", "BLEU to de", 41.06, 39.29, 42.71),
        score("chrf", "chrF2 to de", 64.4),
        score("bleu", "BLEU to fr", 60.04),
    ],
}


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_a_page_matches_the_cards(results: ModuleType, page: str) -> None:
    written = (ROOT / page).read_text(encoding="utf-8")
    assert written == results.document(ROOT / page), "run  python benchmarks/results.py"


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_links_of_a_page_exist(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8"))
    assert links
    assert not [link for link in links if not (path.parent / link).exists()]


def test_the_readme_shows_a_few_rows_and_the_results_page_all(results: ModuleType) -> None:
    published = json.loads(results.PUBLISHED.read_text("utf-8"))
    shown = [name for name, entry in published.items() if entry.get("readme")]
    assert first_cells(results.table(results.README)) == shown
    assert sorted(first_cells(results.table(results.ALL))) == sorted(
        path.stem for path in results.CARDS.glob("*.json")
    )


def first_cells(table: str) -> list[str]:
    return re.findall(r"^\| \[([^]]+)\]", table, re.MULTILINE)


def test_every_row_has_a_recipe(results: ModuleType) -> None:
    named = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert {path.stem for path in results.CARDS.glob("*.json")} <= named
    assert set(json.loads(results.PUBLISHED.read_text("utf-8"))) <= named


def test_a_row_matches_its_card(results: ModuleType) -> None:
    entry = {"what": "captions", "published": "40.0", "before": ["regard distill …"]}
    assert results.row("all", NEW, entry) == [
        "[all](recipes/all.yaml): captions",
        "8+1 layers of 256, 13.0 M",
        "BLEU to de 41.1 (39.3–42.7), BLEU to fr 60.0",
        "40.0",
        "H200, 1.5 min (2.0 in total)",
        "`regard distill …`, `regard train some`",
    ]
    assert results.row("old", OLD, {})[1:5] == [
        "13.0 M",
        "validation: BLEU 40.2",
        "",
        "H200, 1.5 min",
    ]


def test_a_row_says_if_time_ran_out_and_omits_the_minutes(
    results: ModuleType,
) -> None:
    card = OLD | {"reason_stopped": "the time limit was reached", "steps": 9_851}
    command = "regard train multi30k --minutes 7 --set training.steps=12000"
    *_, where, shown = results.row("multi30k", card | {"command": command}, {})
    assert where == "H200, 1.5 min; stopped at step 9,851 of 12,000"
    assert shown == "`regard train multi30k --set training.steps=12000`"
    steps = load_recipe("multi30k").training.steps
    *_, where, _ = results.row("multi30k", card, {})
    assert where.endswith(f"of {steps:,}")


def test_published_may_replace_the_command(results: ModuleType) -> None:
    assert results.row("some", OLD, {"command": "regard train other"})[-1] == "`regard train other`"


def test_rows_follow_the_order_of_published_then_the_rest(
    results: ModuleType,
) -> None:
    cards = dict.fromkeys("abcd", NEW)
    lines = results.section(cards, {"c": {}, "absent": {}, "b": {}}).split("\n")
    assert [line[3] for line in lines[2:6]] == ["c", "b", "a", "d"]
    assert lines[-2] == "BLEU is computed with sacreBLEU, `nrefs:1|case:mixed|tok:zh`."


def test_a_card_is_copied_without_local_paths(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "CARDS", tmp_path)
    run = tmp_path / "some"
    run.mkdir()
    command = "regard train some --out /scratch/some --minutes 7 --set model.dropout=0.2"
    (run / "card.json").write_text(json.dumps(OLD | {"command": command}))
    copied = json.loads(results.copy_card(run).read_text())
    assert copied == OLD | {"command": "regard train some --minutes 7 --set model.dropout=0.2"}
    elsewhere = f"{command} --set data.root=/scratch/data"
    (run / "card.json").write_text(json.dumps(OLD | {"command": elsewhere}))
    with pytest.raises(SystemExit, match=r"data\.root=/scratch/data"):
        results.copy_card(run)


@pytest.mark.parametrize(
    ("architecture", "stacks"),
    [
        ("transformer", {"encoder": 3, "decoder": 2}),
        ("lstm", {"encoder": 3, "decoder": 2}),
        ("convolution", {"encoder": 3, "decoder": 2}),
        ("decoder_only", {"decoder": 2}),
    ],
)
def test_layers_are_counted_in_the_network(architecture: str, stacks: dict[str, int]) -> None:
    section: ModelConfig = load_recipe("multi30k").model
    small = section.model_copy(update={"encoder_layers": 3, "decoder_layers": 2})
    with torch.device("meta"):
        network = ARCHITECTURES[architecture](small, 9, 9)
    assert count_layers(network) == stacks
