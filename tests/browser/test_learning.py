"""How the model learned, the story, a notebook's cell, a server with keys: what is shown is what there is."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from regard.inspection.history import course
from regard.inspection.trace import Trace
from regard.storage.run_dir import RunDir
from regard.tasks import Translator
from tests.browser.conftest import served
from tests.browser.pages import Open, rows_of, synthetic, texts, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

DOG = [
    "▁The",
    "▁dog",
    "▁did",
    "n't",
    "▁cross",
    "▁the",
    "▁street",
    "▁because",
    "▁it",
    "▁was",
    "▁too",
]
HOSTILE = "</script><img src=x onerror=window.struck=1><b>▁"


@pytest.fixture(scope="module")
def learned(trained_run: Path) -> Trace:
    return Translator.load(trained_run, "cpu").trace("ein Hund", beam=2, checkpoints=True)


def tables(page: Page) -> dict[str, list[list[str]]]:
    """All tables of the view, by caption."""
    for button in page.locator("button:visible", has_text="Show as table").all()[::-1]:
        button.click()
    script = """all => all.map(table => [table.caption.textContent,
      [...table.rows].map(row => [...row.cells].map(cell => cell.textContent))])"""
    return dict(page.locator("table:visible").evaluate_all(script))


def test_the_numbers_drawn_are_those_of_training(look: Open, learned: Trace) -> None:
    page = look(learned, "#view=learning&step=2")
    until(page, "document.querySelector('#forming').d_model > 0")
    told = learned.course
    assert told is not None
    shown = tables(page)
    head, *rows = shown["What is added at each position, by dimension"]
    waves = np.array([row[1:] for row in rows], dtype=float)
    assert waves.shape == (64, 16)
    assert waves[4, 0] == pytest.approx(np.sin(4), abs=0.51e-3)
    plots = page.locator(".plot").evaluate_all("all => all.map(one => one.clientWidth)")
    assert len(plots) == 4
    assert min(plots) > 450, "as wide as their cards"
    size = "canvas => [canvas.d_model, canvas.height]"
    assert page.locator("#positions").evaluate(size) == [16, 64]
    _, *rows = shown["Dot product by distance"]
    assert [float(row[1]) for row in rows] == pytest.approx(told["positions"]["mean"], abs=1e-4)
    head, *rows = shown["Learning rate by step"]
    assert [float(row[1]) for row in rows] == pytest.approx(told["schedule"]["rates"], rel=1e-4)
    head, *rows = shown["The log, by step"]
    assert head == ["step", "loss", "learning_rate", "validation loss", "BLEU"]
    assert rows[1] == ["2", "2.0000", "2.000e-1", "2.5000", "50.00"]
    head, *rows = shown["Targets under label smoothing"]
    targets = [(one["right"], one["other"]) for one in told["smoothing"]["targets"]]
    assert [(float(row[2]), float(row[3])) for row in rows] == [
        pytest.approx(one, rel=1e-3) for one in targets
    ]


def test_charts_can_be_read(look: Open, learned: Trace) -> None:
    """On a phone nothing is cut off or runs into another; numbers are written as in sentences."""
    told = learned.course
    assert told is not None
    valid = [
        {"step": 500 * i, "loss": 1.0, "score": score, "best": False}
        for i, score in enumerate((90.0, 98.0, 99.5), 1)
    ]
    curves = {**told["curves"], "valid": valid}
    page = look(
        replace(learned, course={**told, "curves": curves}),
        "#view=learning",
        viewport={"d_model": 390, "height": 844},
    )
    until(page, "document.querySelectorAll('.chart .unit').length === 4")
    inside = """all => all.map(one => one.closest("svg").getBoundingClientRect().bottom
      - one.getBoundingClientRect().bottom)"""
    assert min(page.locator(".chart .unit").evaluate_all(inside)) >= 0
    aside = """all => all.map(one => [one, one.parentElement].map(each => each.getBoundingClientRect()))
      .map(([a, b]) => Math.abs(a.y + a.height / 2 - b.y - b.height / 2))"""
    assert max(page.locator(".lines-key .stroke").evaluate_all(aside)) < 2
    score = page.locator(".chart", has=page.locator("svg[aria-label='BLEU by step']"))
    assert score.locator(".tick.x").all_text_contents() == ["500", "1,000", "1,500", "step"]
    assert min(float(one) for one in score.locator(".tick.y").all_text_contents()) >= 80
    bars = """all => all.map(bars => [...bars.querySelectorAll("span")].map(one => {
      const range = document.createRange();
      range.selectNodeContents(one);
      const { left, right } = range.getBoundingClientRect();
      return [left, right];
    }))"""
    for labels in page.locator(".bars").evaluate_all(bars):
        assert all(a[1] < b[0] for a, b in pairwise(labels))


def test_the_slider_goes_through_the_checkpoints(look: Open, learned: Trace) -> None:
    page = look(learned, "#view=learning")
    where = page.get_by_label("Checkpoint", exact=True)
    assert texts(page, ".where") == ["step 4"]
    where.focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("location.hash") == "#view=learning&step=2"
    until(page, "document.querySelector('.beside .quiet').textContent.includes('After 2 steps')")
    rows = rows_of(page)
    said, source = len(learned.said), len(learned.source)
    assert (len(rows), len(rows[0])) == (said + 1, source + 2)
    evenly = np.array([row[2:] for row in rows[1:]], dtype=float)
    np.testing.assert_allclose(evenly, 1 / source, atol=0.004)  # that network was all zeros


def test_a_page_without_a_past_says_so(look: Open, finished_run: Path) -> None:
    page = look(synthetic(), "#view=learning")
    assert "without its run" in texts(page, ".learning")[0]
    page = look(Translator.load(finished_run, "cpu").trace("ein Hund"), "#view=learning")
    assert "keeps no checkpoints" in texts(page, ".learning")[0]
    assert "no log beside this model" in texts(page, ".learning")[0]


@pytest.mark.parametrize("view", ["learning", "story"])
def test_a_phone_and_hostile_text(look: Open, finished_run: Path, view: str) -> None:
    shown = synthetic(source=[HOSTILE, "▁a"], said=[HOSTILE, "▁b"])
    told = {**course(Translator.load(finished_run, "cpu")), "checkpoints": [1]}
    rows = [
        {
            "step": 1,
            "cross_attention": shown.to_json()["cross_attention"],
            "probabilities": [0.5, 0.5, 0.5],
        }
    ]
    page = look(
        replace(shown, text=HOSTILE, course={**told, "alignments": rows}),
        f"#view={view}&story=1&arrive=1",
        viewport={"d_model": 390, "height": 844},
        color_scheme="dark",
    )
    page.locator(".guide .tale").wait_for()
    page.evaluate("view => { location.hash = `#view=${view}&story=1` }", view)
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("window.struck") is None
    assert page.locator("main img, main b").count() == 0


# ---------------------------------------------------------------------------------------------
# The story


def step(page: Page) -> str:
    return page.locator(".guide .tale").text_content() or ""


def test_the_story_counts_what_it_claims(look: Open) -> None:
    shown = synthetic(source=[*DOG, "▁tired", "▁."])
    text = "The dog didn't cross the street because it was too tired."
    shown = replace(shown, text=text)
    page = look(shown, "#view=story")
    titles = texts(page, ".contents li a")
    page.locator(".contents a").first.click()
    page.locator(".guide h2").wait_for()
    assert re.search(r"into 14 tokens and wrote 6.*least sure of ▁Der: 20%", step(page))
    assert page.locator(".line.target .word[aria-pressed=true]").text_content() == "Der"
    seen = []
    while True:
        title = page.locator(".guide h2").text_content()
        seen.append(title)
        if title == "Heads have habits":
            share = np.array([np.diagonal(shown.encoder, k, 2, 3).mean(-1) for k in (-1, 0, 1)])
            _, layer, head = np.unravel_index(share.argmax(), share.shape)
            until(page, "document.querySelector('.which')?.textContent.startsWith('Encoder')")
            assert texts(page, ".which") == [f"Encoder, layer {layer + 1}, head {head + 1}"]
            assert f"{round(100 * share.max())}%" in step(page)
        if title == "It cannot look ahead":
            assert "is exactly 0" in step(page)
        if title == "Too tired":
            it, dog, street = 8, 1, 6
            row = shown.cross_attention[:, :, :-1, it].max((0, 1)).argmax()
            nouns = shown.cross_attention[:, :, row][:, :, [dog, street]]
            layer, head = np.unravel_index(nouns.max(2).argmax(), nouns.shape[:2])
            numbers = [f"{weight:.2f}" for weight in nouns[layer, head]]
            where = f"head {head + 1} of layer {layer + 1} (cross attention), the most decided"
            assert where in step(page)
            assert f"The word that looks most at it is {shown.said[row].text}." in step(page)
            assert f"dog {numbers[0]}, street {numbers[1]}" in step(page)
            assert f"&layer={layer}&head={head}" in page.evaluate("location.hash")
        following = page.locator(".guide button", has_text="Next")
        if not following.count():
            break
        following.click()
        until(page, f"document.querySelector('.guide h2').textContent !== {json.dumps(title)}")
    assert seen[:-1] == titles, "the last sentence is not in this file"
    assert 'regard look RUN "The dog' in step(page)
    page.get_by_role("button", name="Leave the story").click()
    assert not page.locator(".guide").is_visible()


def test_the_word_for_it_is_where_two_translations_part(browser: Browser, address: str) -> None:
    """Not where attention to “it” is strongest: heads that look at the noun need not look at it."""
    with browser.new_context() as context:
        page = context.new_page()

        def answer(route: Route) -> None:
            text = json.loads(route.request.post_data or "{}")["q"]
            last, pronoun, other = (
                ("tired", "er", "müde") if "tired" in text else ("wide", "sie", "breit")
            )
            shown = synthetic(
                [*DOG, f"▁{last}", "▁."], ["▁weil", f"▁{pronoun}", "▁zu", f"▁{other}"]
            )
            cross = shown.cross_attention.copy()
            cross[1, 2, 1] = 0
            cross[1, 2, 1, 1 if last == "tired" else 6] = 1
            route.fulfill(json=replace(shown, text=text, cross=cross).to_json("file"))

        page.route("**/v1/trace", answer)
        text = "The dog didn't cross the street because it was too tired."
        page.goto(f"{address}/#view=heads&story=10&arrive=1&q={text}")
        page.locator(".guide .tale").wait_for()
        told = step(page)
        assert "Here it became ▁er, the first word that wide at the end would change." in told
        assert re.search(
            r"head 3 of layer 2 .*, gave dog 1\.00, street 0\.00; with wide, it became ▁sie", told
        )
        assert told.endswith("turned its eyes from one noun to the other.")


# ---------------------------------------------------------------------------------------------
# A notebook


def test_a_notebook_shows_it_in_a_frame_that_can_touch_nothing(
    browser: Browser, learned: Trace
) -> None:
    troubles: list[str] = []
    with browser.new_context(viewport={"d_model": 1000, "height": 900}) as context:
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.set_content(f"<!doctype html><p>Out[1]:</p>{learned._repr_html_()}")
        (frame,) = page.frames[1:]
        frame.locator("#tab-heads").click()
        frame.locator(".thumb[aria-label='Cross, layer 1, head 2']").click()
        assert frame.locator(".which").text_content() == "Cross, layer 1, head 2"
        frame.locator("#tab-story").click()
        frame.locator(".contents a").nth(4).click()
        frame.locator(".guide h2").wait_for()
        assert frame.locator("#view-beam").is_visible()
        frame.locator("#tab-learning").click()
        frame.locator("#forming").wait_for()
        assert (
            frame.evaluate("(() => { try { return parent.document.title } catch { return 0 } })()")
            == 0
        )
        box = page.locator("iframe").bounding_box()
        assert box is not None
        assert (box["d_model"], box["height"]) == (984, 768)
        assert page.url == "about:blank"
    assert troubles == []


# ---------------------------------------------------------------------------------------------
# Served


@pytest.fixture(scope="module")
def learning_run(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is not finished."""
    run = RunDir(shutil.copytree(trained_run, tmp_path_factory.mktemp("runs") / "learning"))
    run.card_file.unlink()
    return run.folder


@pytest.fixture(scope="module")
def locked(learning_run: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REGARD_API_KEYS", "sesame")
        with served(learning_run) as place:
            yield place


def test_a_key_is_asked_for_once_and_a_run_is_watched(
    browser: Browser, locked: str, learning_run: Path
) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{locked}/#q=ein+Hund&view=learning")
        key = page.get_by_label("API key")
        key.fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("That key is not one of this server's.").wait_for()
        key.fill("sesame")
        page.keyboard.press("Enter")
        page.locator("#view-learning .where", has_text="step 4").wait_for()
        assert not key.is_visible()
        page.reload()
        page.locator("#view-learning .where", has_text="step 4").wait_for()
        assert not key.is_visible(), "it was kept for this tab"
        assert page.evaluate("localStorage.length") == 0

        # The run goes on, and the page with it.
        assert "Still learning, or stopped: 2 of 4" in texts(page, ".learning")[0]
        line = {"event": "step", "step": 4, "loss": 1.0, "learning_rate": 0.1}
        with RunDir(learning_run).log_file.open("a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps(line)}\n")
        page.get_by_text("4 of 4 steps so far").wait_for(timeout=20_000)

        # What is typed is translated while it is typed.
        page.get_by_label("Text").fill("ein")
        page.get_by_label("Text").press_sequentially(" Hund", delay=20)
        growing = page.locator(".growing")
        growing.wait_for()
        (translation,) = Translator.load(learning_run, "cpu").translate(["ein Hund"])
        until(page, f"document.querySelector('.growing').textContent === {json.dumps(translation)}")
        page.keyboard.press("Enter")
        growing.wait_for(state="hidden")
