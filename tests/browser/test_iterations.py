"""The page of a non-autoregressive model: iterations instead of a beam."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from regard.data.special_tokens import MASK
from regard.inspection.trace import Trace
from regard.tasks import Translator
from tests.browser.pages import Open, rows_of, texts

TEXT = "the dog sees the old house"


@pytest.fixture(scope="module")
def shown(make_run: Callable[..., Path]) -> Trace:
    model = Translator.load(make_run(model={"architecture": "non_autoregressive"}), "cpu")
    return model.trace(TEXT, iterations=3, length=6)


def test_each_iteration_is_a_row(open_file: Open, shown: Trace) -> None:
    page = open_file(shown, "#view=iterations")
    assert "Beam" not in texts(page, "[role=tab]")
    rows = page.locator(".iterations tbody tr")
    assert rows.count() == 3
    for number, one in enumerate(shown.iterations):
        cells = rows.nth(number).locator("td")
        assert cells.all_text_contents() == [token.text for token in one.outputs]
        classes = cells.evaluate_all("all => all.map(cell => cell.className)")
        assert classes == ["predicted" if token.id == MASK else "" for token in one.inputs]


def test_heads_and_candidates_are_those_of_the_trace(open_file: Open, shown: Trace) -> None:
    page = open_file(shown, "#view=heads&site=decoder&layer=1&head=1")
    (_, *keys), *rows = rows_of(page)
    assert keys == [token.text for token in shown.inputs]
    assert float(rows[0][-1]) == pytest.approx(shown.decoder[1, 1, 0, -1], abs=0.51e-4)
    page = open_file(shown, "#view=translate&output=2")
    assert texts(page, ".candidates h3") == ["Most probable tokens at position 3"]
    assert texts(page, ".candidates .token")[0] == shown.candidates[2][0].token.text


def test_the_tour_fits_the_model(open_file: Open, shown: Trace) -> None:
    page = open_file(shown, "#view=tour")
    titles = texts(page, ".tour-contents a")
    assert "Tokens are revised" in titles
    assert "No looking ahead" not in titles
    assert "Several hypotheses at once" not in titles
    page.get_by_role("link", name="Tokens are revised").click()
    assert page.locator(".iterations").is_visible()
    text = page.locator(".tour-text").text_content() or ""
    assert text.startswith("All 6 tokens were predicted in the first of 3 iterations")
