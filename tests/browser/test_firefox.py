"""A model in an HTML file, opened from disk in Firefox: it translates what is typed, and the views work."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from regard.inspection.attribution import attribute_token
from regard.inspection.teacher_forcing import force_ids
from regard.inspection.trace import trace
from regard.interop.convert import export_model
from tests.browser.marionette import Marionette, firefox
from tests.browser.pages import patience
from tests.browser.test_model_in_file import TEXT, VIEWS
from tests.unit.interop.test_html_export import rounded_model

FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
pytestmark = pytest.mark.skipif(
    FIREFOX is None, reason="Firefox not found: neither firefox-esr nor firefox on the path"
)
SECONDS = 30
PROBLEMS = (
    "return [...document.querySelectorAll('.status.wrong:not(:empty)')].map(one => one.textContent)"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Marionette]:
    assert FIREFOX is not None
    with firefox(FIREFOX, tmp_path_factory.mktemp("profile")) as running:
        yield running


def test_what_is_typed_is_translated(
    browser: Marionette, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run(
        tokenizer={"kind": "word", "vocab_size": 300}, decoding={"beam": 3, "extra_length": 2}
    )
    file = tmp_path / "model.html"
    export_model(run, "html", file)
    model = rounded_model(run)
    expected = trace(model, TEXT)
    seconds = patience(SECONDS)

    browser.open(file.as_uri())
    source, target = (f"document.querySelector('.line.{one}')" for one in ("source", "target"))
    browser.until("document.querySelector('textarea') !== null", seconds)
    browser.type("textarea", TEXT)
    browser.click("form.ask button.primary")
    browser.until(f"{source}?.textContent.startsWith('The dog')", seconds)
    shown = browser.run(f"return {target}.textContent")
    assert re.sub(r"\s*</s>", "", shown) == expected.translation

    for view in VIEWS:
        browser.click(f"#tab-{view}")
        browser.until(f"document.querySelector('#view-{view}:not([hidden])') !== null", seconds)
    assert browser.run(PROBLEMS) == []
    browser.open(f"{file.as_uri()}#q={TEXT}&view=lenses&output=0")
    finding = browser.until("document.querySelector('.attribution .finding')?.textContent", seconds)
    forced = force_ids(model, model.request(TEXT), [token.id for token in expected.outputs])
    ours = attribute_token(model, forced, 0, methods=["integrated_gradients"])
    assert f"by {ours.difference:.1f} in logits" in finding
    total = ours.scores["integrated_gradients"].sum()
    assert f"add up to {total:.2f}".replace("-", "−") in finding.replace("-", "−")
    assert browser.run(PROBLEMS) == []
