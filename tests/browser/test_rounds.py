"""The page of a model that says all words at once: rounds in place of a beam."""

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
    return model.trace(TEXT, rounds=3, length=6)


def test_each_round_is_a_row(look: Open, shown: Trace) -> None:
    page = look(shown, "#view=rounds")
    assert "Beam" not in texts(page, "[role=tab]")
    rows = page.locator(".rounds tbody tr")
    assert rows.count() == 3
    for number, one in enumerate(shown.rounds):
        cells = rows.nth(number).locator("td")
        assert cells.all_text_contents() == [token.text for token in one.said]
        framed = cells.evaluate_all("all => all.map(cell => cell.className)")
        assert framed == ["again" if token.id == MASK else "" for token in one.read]


def test_heads_and_candidates_are_those_of_the_trace(look: Open, shown: Trace) -> None:
    page = look(shown, "#view=heads&pane=decoder&layer=1&head=1")
    (_, *keys), *rows = rows_of(page)
    assert keys == [token.text for token in shown.read]
    assert float(rows[0][-1]) == pytest.approx(shown.decoder[1, 1, 0, -1], abs=0.51e-4)
    page = look(shown, "#view=translate&said=2")
    assert texts(page, ".others h3") == ["At place 3 the model could say"]
    assert texts(page, ".others .token")[0] == shown.candidates[2][0].token.text


def test_the_story_tells_what_there_is(look: Open, shown: Trace) -> None:
    page = look(shown, "#view=story")
    titles = texts(page, ".contents a")
    assert "It changes its mind" in titles
    assert "It cannot look ahead" not in titles
    assert "It keeps several in mind" not in titles
    page.get_by_role("link", name="It changes its mind").click()
    assert page.locator(".rounds").is_visible()
    tale = page.locator(".tale").text_content() or ""
    assert tale.startswith("All 6 words were said in the first of 3 rounds")
