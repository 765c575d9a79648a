"""A model in an HTML file, opened from disk: it translates what is typed, and all views work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from regard.inspection.hooks import Head
from regard.inspection.trace import trace
from regard.interop.convert import export_model
from regard.tasks import Translator
from tests.browser.pages import rows_of, until, wait_for_text
from tests.unit.interop.test_html_export import rounded_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TEXT = "The dog sleeps."
VIEWS = ("heads", "beam", "intervene", "weight", "training", "tour")
TIMEOUT = 60_000


@pytest.fixture(scope="module")
def run(make_run: Callable[..., Path]) -> Path:
    return make_run(
        tokenizer={"kind": "word", "vocab_size": 300}, decoding={"beam": 3, "extra_length": 2}
    )


@pytest.fixture(scope="module")
def model(run: Path) -> Translator:
    return rounded_model(run)


@pytest.fixture(scope="module")
def file(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("html") / "model.html"
    export_model(run, "html", out)
    return out


@pytest.fixture
def page(browser: Browser, file: Path) -> Iterator[Page]:
    """A page at the size of a phone. At the end it checks that it logged nothing and requested only its own parts."""
    problems: list[str] = []
    with browser.new_context(viewport={"width": 390, "height": 844}) as context:
        opened = context.new_page()
        opened.set_default_timeout(TIMEOUT)
        opened.on("console", lambda message: problems.append(message.text))
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.on("request", lambda request: requested.append(request.url.split("#")[0]))
        requested: list[str] = []
        yield opened
    assert problems == []
    assert {url for url in requested if not url.startswith("blob:null/")} <= {
        file.as_uri(),
        "data:,",
    }


def test_what_is_typed_is_translated(page: Page, file: Path, model: Translator) -> None:
    page.goto(file.as_uri())
    page.get_by_label("Text").press_sequentially(TEXT, delay=5)
    translation = model.translate([TEXT])[0]
    wait_for_text(page, ".live", translation.split()[0])
    page.get_by_role("button", name="Translate").first.click()
    page.locator(".line.target .word").first.wait_for()
    shown = page.locator(".line.target").text_content() or ""
    assert re.sub(r"\s*</s>", "", shown) == translation
    for view in VIEWS:
        page.locator(f"#tab-{view}").click()
        page.locator(f"#view-{view}:not([hidden])").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
    page.evaluate("new Promise(done => setTimeout(done, 200))")
    assert page.locator(".status.wrong:visible").count() == 0


def test_attention_and_interventions_are_those_of_the_model(
    page: Page, file: Path, model: Translator
) -> None:
    page.goto(f"{file.as_uri()}#q={TEXT}&view=heads&site=cross_attention&layer=1&head=1")
    ours = trace(model, TEXT)
    until(page, f"document.querySelector('#map')?.width === {len(ours.source)}")
    _, *rows = rows_of(page)
    values = np.array([row[1:] for row in rows], dtype=float)
    np.testing.assert_allclose(values, ours.cross_attention[1, 1], atol=1e-3)
    page.locator("#tab-intervene").click()
    page.locator(".switch").first.click()
    page.locator(".compare").first.wait_for(state="attached")  # in a closed card
    muted = trace(model, TEXT, mute=[Head("encoder", 0, 0)])
    after = page.locator(".before-after .line").nth(1).text_content() or ""
    assert re.sub(r"\s*</s>", "", after) == muted.translation


def test_a_blank_text_is_refused(page: Page, file: Path) -> None:
    page.goto(f"{file.as_uri()}#q=%20")
    wait_for_text(page, ".status.wrong", "Write a sentence")
