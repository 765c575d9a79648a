"""The page in a browser, from a file and served: it shows what the trace contains."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from regard.inspection.trace import trace
from regard.storage.run_dir import RunDir
from regard.tasks import Translator
from tests.browser.conftest import served
from tests.browser.pages import (
    OUTPUTS,
    SOURCE,
    Open,
    patience,
    rows_of,
    synthetic,
    texts,
    until,
    wait_for_text,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser

STOPS = {
    "light": ("#f3f2ed", "#6f9fd4", "#16245c"),
    "dark": ("#23262d", "#4a78bd", "#f2f6ff"),
}
HOSTILE = "</script><img src=x onerror=window.struck=1><b>▁"

# ---------------------------------------------------------------------------------------------
# Heads


@pytest.mark.parametrize("site", ["encoder", "decoder", "cross_attention"])
def test_the_table_has_the_weights_with_queries_in_rows(open_file: Open, site: str) -> None:
    shown = synthetic()
    page = open_file(shown, f"#view=heads&site={site}&layer=1&head=2")
    (_, *keys), *rows = rows_of(page)
    reads = [f"{a.text} → {b.text}" for a, b in zip(shown.inputs, shown.outputs, strict=True)]
    sources = [token.text for token in shown.source]
    assert keys == ([token.text for token in shown.inputs] if site == "decoder" else sources)
    assert [row[0] for row in rows] == (sources if site == "encoder" else reads)
    assert texts(page, ".map .rows > div") == [row[0] for row in rows]
    assert texts(page, ".map .columns > div") == keys
    values = np.array([row[1:] for row in rows], dtype=float)
    np.testing.assert_allclose(values, getattr(shown, site)[1, 2], atol=0.51e-4)


@pytest.mark.parametrize("mode", ["average", "max"])
def test_heads_can_be_aggregated(open_file: Open, mode: str) -> None:
    shown = synthetic()
    _, *rows = rows_of(open_file(shown, f"#view=heads&site=cross_attention&layer=0&heads={mode}"))
    expected = (
        shown.cross_attention[0].mean(0) if mode == "average" else shown.cross_attention[0].max(0)
    )
    values = np.array([row[1:] for row in rows], dtype=float)
    np.testing.assert_allclose(values, expected, atol=0.51e-4)


def test_special_tokens_can_be_hidden(open_file: Open) -> None:
    shown = synthetic()
    page = open_file(shown, "#view=heads&site=cross_attention&layer=0&head=0")
    page.get_by_label("Hide special tokens").check()
    (_, *keys), *rows = rows_of(page)
    assert keys == SOURCE
    assert rows[0][0] == "<s> → ▁Der", "the row that predicts the first word stays"
    values = np.array([row[1:] for row in rows], dtype=float)
    np.testing.assert_allclose(values, shown.cross_attention[0, 0, :-1, :-1], atol=0.51e-4)


def scale(stops: Sequence[str]) -> npt.NDArray[np.float64]:
    """[256, 3]: a polyline through the stops in OKLab, in steps of equal length."""
    to_lms = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    to_lab = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    rgb = np.array([[int(stop[i : i + 2], 16) / 255 for i in (1, 3, 5)] for stop in stops])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    labs = np.cbrt(linear @ to_lms.T) @ to_lab.T
    far = np.concatenate([[0], np.linalg.norm(np.diff(labs, axis=0), axis=1).cumsum()])
    steps = np.linspace(0, far[-1], 256)
    lab = np.stack([np.interp(steps, far, labs[:, i]) for i in range(3)], axis=1)
    back = np.linalg.inv(to_lms) @ ((np.linalg.inv(to_lab) @ lab.T) ** 3)
    back = back.T.clip(0, 1)
    srgb = np.where(back <= 0.0031308, back * 12.92, 1.055 * back ** (1 / 2.4) - 0.055)
    return np.asarray(srgb * 255)


PIXELS = """canvas => {
  const { width, height } = canvas;
  const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
  const box = canvas.getBoundingClientRect();
  return { width, height, data: [...data], ratio: [box.width / width, box.height / height] };
}"""


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_pixels_have_the_colours_of_the_scale(open_file: Open, colours: str) -> None:
    shown = synthetic()
    page = open_file(shown, "#view=heads&site=cross_attention&layer=1&head=1", color_scheme=colours)
    until(page, "document.querySelector('#map').width === 6")
    for where in ("#map", ".pane[data-site=cross_attention] .thumb[aria-pressed=true] canvas"):
        drawn_canvas = page.locator(where).evaluate(PIXELS)
        drawn = np.array(drawn_canvas["data"]).reshape(
            drawn_canvas["height"], drawn_canvas["width"], 4
        )
        expected = scale(STOPS[colours])[np.round(shown.cross_attention[1, 1] * 255).astype(int)]
        np.testing.assert_allclose(drawn[..., :3], expected, atol=1)
        assert (drawn[..., 3] == 255).all()
        across, down = drawn_canvas["ratio"]
        assert where != "#map" or across == down == int(across), "cells are squares of whole pixels"


def test_the_lightness_of_the_scale_is_monotonic() -> None:
    for stops, sign in ((STOPS["light"], -1), (STOPS["dark"], 1)):
        grey = scale(stops) @ [0.2126, 0.7152, 0.0722]
        assert (np.diff(grey) * sign > 0).all()


def test_pointing_at_a_cell_shows_its_value_and_highlights_the_row_everywhere(
    open_file: Open,
) -> None:
    shown = synthetic()
    page = open_file(shown, "#view=heads&site=cross_attention&layer=1&head=1")
    until(page, "document.querySelector('#map').width === 6")
    box = page.locator("#map").bounding_box()
    assert box is not None
    cell = box["width"] / len(shown.source)
    page.mouse.move(box["x"] + 3.5 * cell, box["y"] + 2.5 * cell)
    assert (
        page.locator(".value strong").text_content() == f"{shown.cross_attention[1, 1, 2, 3]:.4f}"
    )
    assert texts(page, ".map .lit") == ["s", "▁Hund → ▁schläf"]
    lit = page.locator(".pane.lit-row").evaluate_all("all => all.map(one => one.dataset.site)")
    assert lit == ["decoder", "cross_attention"]
    page.mouse.move(0, 0)
    assert page.locator(".lit-row").count() == 0


# ---------------------------------------------------------------------------------------------
# Translate


def test_a_word_highlights_what_it_attends_to(open_file: Open) -> None:
    shown = synthetic()
    page = open_file(shown)
    assert "".join(texts(page, ".line.source")) == "The dog sleeps . </s>"
    assert "".join(texts(page, ".line.target")) == "Der Hund schläft . </s>"
    page.locator(".line.target .word").nth(1).hover()
    average = shown.cross_attention[-1].mean(0)
    colours = scale(STOPS["light"])
    drawn_at = "getComputedStyle(document.querySelectorAll('.source .word')[{}]).backgroundColor"
    none, lit = "rgba(0, 0, 0, 0)", drawn_at.format(int(average[1].argmax()))
    until(page, f"{lit} !== '{none}' && !document.getAnimations().length")  # colours fade in
    for place, weight in enumerate(average[1]):
        drawn = page.evaluate(drawn_at.format(place))
        if weight < 0.02:
            assert drawn == none
        else:
            parts = [float(part) for part in drawn.removeprefix("rgb(").rstrip(")").split(",")]
            np.testing.assert_allclose(parts, colours[round(float(weight) * 255)], atol=1)


def test_a_selected_word_shows_its_candidates(open_file: Open) -> None:
    shown = synthetic()
    page = open_file(shown)
    page.locator(".line.target .word").first.click()
    assert texts(page, ".candidates .token") == ["▁Der", "▁anders"]
    assert texts(page, ".candidates .number") == ["20%", "1.0%"]
    assert texts(page, ".candidates h3") == ["Most probable first tokens"]
    assert texts(page, ".candidates .space-note") == ["▁ marks the beginning of a word."]
    assert page.evaluate("location.hash") == "#output=0"
    page.locator(".line.target .word").nth(1).click()
    assert texts(page, ".candidates h3") == ["Most probable tokens after “Der”"]


def test_warnings_are_marked(open_file: Open) -> None:
    shown = synthetic(outputs=["▁der", "▁der", "▁Hund"])
    cross = shown.cross_attention.copy()
    cross[..., 2:4] = 0.001
    page = open_file(replace(shown, cross_attention=cross))
    notes = texts(page, ".warnings li")
    assert any(note.startswith("der has a probability of only 20%") for note in notes)
    assert any(note.startswith("der repeats") for note in notes)
    assert any(note.startswith("sleeps received almost no attention") for note in notes)
    assert texts(page, ".word.warning") == ["sleep", "s", "der", "der"]


def test_the_direction_of_text(open_file: Open) -> None:
    page = open_file(synthetic(source=["▁我", "们", "吃饭"], outputs=["▁مرحبا", "▁بالعالم"]))
    direction = "element => getComputedStyle(element).direction"
    assert page.locator(".line.source").evaluate(direction) == "ltr"
    assert page.locator(".line.target").evaluate(direction) == "rtl"
    assert page.locator(".line.source").text_content() == "我们吃饭 </s>"


def test_a_token_that_is_a_space_is_shown_as_a_space(open_file: Open) -> None:
    page = open_file(synthetic(source=["▁the", "▁", "G", "reen"]))
    assert page.locator(".line.source").text_content() == "the Green </s>"


# ---------------------------------------------------------------------------------------------
# Beam


def test_the_tree_has_the_nodes_of_the_search(open_file: Open, finished_run: Path) -> None:
    model = Translator.load(finished_run, "cpu")
    for shown in (synthetic(), trace(model, "ein Hund dog", beam=3, length_penalty=0.6)):
        page = open_file(shown, "#view=beam")
        for state in ("kept", "pruned", "finished"):
            ids = page.locator(f".node.{state}").evaluate_all(
                "all => all.map(one => Number(one.dataset.id))"
            )
            assert ids == [node.id for node in shown.beam if node.state == state]
        best = texts(page, ".node.best .piece")
        assert best == [token.text for token in [shown.inputs[0], *shown.outputs]]
        _, *rows = rows_of(page)
        assert [row[-1] for row in rows] == [node.state for node in shown.beam[1:]]
        scores = [float(row[-2].replace("−", "-")) for row in rows]
        np.testing.assert_allclose(scores, [node.score for node in shown.beam[1:]], atol=0.51e-3)


def test_a_node_explains_its_state(open_file: Open) -> None:
    shown = synthetic()
    page = open_file(shown, "#view=beam")
    wait_for_text(page, ".explanation", "so it is the translation")
    pruned = next(node for node in shown.beam if node.state == "pruned" and node.token == 400)
    page.locator(f".node[data-id='{pruned.id}']").click()
    assert page.locator(".explanation").text_content() == (
        "Ranked 3 of the 3 candidates of step 1. The beam of 1 was filled by better candidates."
    )
    assert page.locator(".detail h3 bdi").text_content() == "anders"
    assert page.evaluate("location.hash") == f"#view=beam&node={pruned.id}"


# ---------------------------------------------------------------------------------------------
# The whole page


def test_the_keyboard_is_enough(open_file: Open) -> None:
    page = open_file(synthetic())
    focused = (
        "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"
    )
    page.keyboard.press("Tab")  # the theme button
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "Translate"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "New here? Take the tour →"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "The"
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert texts(page, ".candidates .chosen .token") == ["▁Hund"]
    for _ in range(3):
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowRight")
    assert page.locator("#view-architecture").is_visible()
    page.keyboard.press("ArrowRight")
    assert page.locator("#view-heads").is_visible()
    for _ in range(3):
        page.keyboard.press("Tab")
    assert page.evaluate(focused) == "Cross-attention, layer 2, head 1"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == "Cross-attention, layer 1, head 2"
    assert page.locator(".which").text_content() == "Cross-attention, layer 1, head 2"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    assert page.locator(".which").text_content() == "Decoder, layer 1, head 1"
    page.locator("#tab-heads").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className").startswith("node finished best")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".detail .state").text_content() == "kept"


def test_the_least_certain_word_is_selected_at_first(open_file: Open) -> None:
    """So that the first screen shows attention, alternatives and legends, and not how to get them."""
    page = open_file(synthetic())
    assert texts(page, ".line.target .word[aria-pressed=true]") == ["Der"]
    assert texts(page, ".candidates .chosen .token") == ["▁Der"]
    assert page.locator(".line.source .word[style*=background]").count() > 0
    assert texts(page, ".colour-key .legend") == ["01attention weight", "probability of the word"]
    page.get_by_role("button", name="Take the tour").click()
    page.get_by_role("button", name="Start the tour").click()
    assert page.locator(".tour-step h2").text_content() == "A sentence is translated"


def test_every_state_has_a_link(open_file: Open) -> None:
    page = open_file(synthetic(), "#view=heads&site=encoder&layer=0&head=2&heads=max")
    assert page.locator(".which").text_content() == "Encoder, layer 1, maximum of 3 heads"
    page.evaluate("location.hash = '#view=beam&node=3'")
    assert page.locator(".node[aria-pressed=true]").get_attribute("data-id") == "3"


def test_light_and_dark_theme(open_file: Open) -> None:
    page = open_file(synthetic(), color_scheme="dark")
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    assert page.evaluate(paper) == "rgb(21, 23, 27)"
    page.get_by_role("button", name="Light / dark").click()
    assert page.evaluate(paper) == "rgb(250, 249, 246)"


@pytest.mark.parametrize("view", ["translate", "heads", "beam"])
def test_a_phone_needs_no_horizontal_scrolling(open_file: Open, view: str) -> None:
    size = {"width": 390, "height": 844}
    page = open_file(synthetic(), f"#view={view}&output=1", viewport=size)
    page.locator("button:visible", has_text="Show as table").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


def test_scrolling_elements_fade_where_there_is_more(open_file: Open) -> None:
    page = open_file(synthetic(source=[f"▁w{i}" for i in range(30)]), "#view=heads", **PHONE)
    until(page, "document.querySelector('#map').width === 31")
    more = "document.querySelector('.heads .map').matches('.more-right')"
    until(page, more)
    page.evaluate("document.querySelector('.heads .map').scrollTo(9999, 0)")
    until(page, f"!{more}")


def test_instructions_for_touch_screens(open_file: Open) -> None:
    page = open_file(synthetic(), "#view=heads", **PHONE)
    wait_for_text(page, ".heads .value", "Touch a cell")
    wait_for_text(page, ".heads .space-note", "▁ marks the beginning of a word.")
    assert "double click" not in (page.locator("#view-heads").text_content() or "")


def test_the_tree_opens_at_the_selected_node(open_file: Open) -> None:
    """Also after switching views: a hidden element forgets its scroll position. Without a selection, at its start."""
    page = open_file(synthetic(), "#view=beam", **PHONE)
    page.locator(".node").first.wait_for()
    page.wait_for_timeout(100)
    assert page.locator(".tree").evaluate("tree => tree.scrollLeft") == 0
    page = open_file(synthetic(), "#view=beam&node=12", **PHONE)
    visible = """(() => {
      const [node, tree] = [".node[aria-pressed=true]", ".tree"]
        .map(one => document.querySelector(one).getBoundingClientRect());
      return node.left >= tree.left && node.right <= tree.right;
    })()"""
    until(page, visible)
    page.locator("#tab-heads").click()
    page.locator("#tab-beam").click()
    until(page, visible)


DRAWN = {
    "translate": "document.querySelectorAll('.target .word').length === 256",
    "heads": "document.querySelector('#map').width === 256 && "
    "[...document.querySelectorAll('.thumb canvas')].every(one => one.width === 64)",
    "beam": "document.querySelectorAll('.node').length > 700",
}


@pytest.mark.parametrize("view", DRAWN)
def test_256_tokens_are_drawn_in_two_seconds(open_file: Open, view: str) -> None:
    long = [f"▁w{i % 50}" for i in range(255)]
    shown = synthetic(long, long, layers=6, heads=8)
    page = open_file(shown, f"#view={'beam' if view == 'translate' else 'translate'}")
    assert not page.evaluate(f"document.querySelector('#view-{view}').hasChildNodes()")
    start = time.monotonic()
    page.evaluate("view => { location.hash = `#view=${view}` }", view)
    until(page, f"document.querySelector('#view-{view} *') && {DRAWN[view]}")
    page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
    assert time.monotonic() - start < patience(2)


@pytest.mark.parametrize("view", ["translate", "heads", "beam"])
def test_markup_in_text_is_not_interpreted(open_file: Open, view: str) -> None:
    shown = synthetic(source=[HOSTILE, *SOURCE], outputs=[HOSTILE, *OUTPUTS])
    page = open_file(replace(shown, text=HOSTILE, translation=HOSTILE), f"#view={view}&output=0")
    page.locator("button:visible", has_text="Show as table").first.click()
    page.wait_for_timeout(100)
    assert page.evaluate("window.struck") is None
    assert page.locator("main img, main b").count() == 0


# ---------------------------------------------------------------------------------------------
# Served


def test_the_served_page_sends_requests_to_its_own_server_only(
    browser: Browser, address: str
) -> None:
    problems: list[str] = []
    requested: list[str] = []
    with browser.new_context() as context:
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requested.append(request.url))
        page.goto(address)
        page.get_by_label("Text").fill(f"ein Hund {HOSTILE}")
        page.get_by_text("Options").click()
        page.get_by_label("Beam").fill("2")
        page.keyboard.press("Tab")
        page.get_by_role("button", name="Translate").click()
        page.locator("#tab-beam").click()
        page.locator(".node").nth(2).wait_for()
        finished = page.locator(".node").count()
        assert page.evaluate("window.struck") is None
        # The link restores the sentence and the view.
        link = page.evaluate("location.href")
        page.goto("about:blank")
        page.goto(link)
        page.locator("#view-beam").wait_for()
        assert page.locator(".node").count() == finished
        assert problems == []
        page.get_by_label("Text").fill("ein Hund " * 1000)
        page.keyboard.press("Enter")
        page.locator(".status.wrong").wait_for()
        wait_for_text(page, ".status", "characters")
    requested = [url for url in requested if not url.startswith(("data:,", "about:"))]
    assert {url.split("/")[2] for url in requested} == {address.split("/")[2]}


INFO = {
    "name": "my-model",
    "languages": {"source": "English", "target": "German"},
    "parameters": 852_000,
    "scores": ["BLEU 99.4"],
    "examples": ["ein Hund", "ein Hund ein Hund"],
    "lenses": True,
}


@pytest.mark.parametrize("named", [True, False])
def test_the_served_page_names_the_languages(browser: Browser, address: str, named: bool) -> None:
    languages = INFO["languages"] if named else {"source": None, "target": None}
    info = {**INFO, "languages": languages, "examples": []}
    with browser.new_context() as context:
        page = context.new_page()
        page.route("**/v1/model", lambda route: route.fulfill(json=info))
        page.goto(address)
        pair = " · English to German" if named else ""
        wait_for_text(page, ".about", f"my-model{pair} · 852 thousand parameters · BLEU 99.4")
        assert page.title() == "my-model · Regard"
        wait_for_text(page, "button.primary", "Translate into German" if named else "Translate")
        placeholder = page.get_by_label("Text").get_attribute("placeholder")
        assert placeholder == ("A sentence in English" if named else "A sentence to translate")


def test_an_example_is_translated_when_the_page_opens(browser: Browser, address: str) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.route("**/v1/model", lambda route: route.fulfill(json=INFO))
        page.goto(address)
        page.locator(".line.target .word").first.wait_for()
        assert page.get_by_label("Text").input_value() == "ein Hund"
        assert texts(page, ".example") == INFO["examples"]
        page.locator(".example").nth(1).click()
        until(page, "document.querySelectorAll('.line.source .word').length === 5")
        # A link to a sentence, as it is written by hand.
        page.goto(f"{address}/?text=ein+Hund+dog")
        until(page, "document.querySelectorAll('.line.source .word').length === 4")
        assert page.get_by_label("Text").input_value() == "ein Hund dog"


def test_the_first_page_shows_the_model_and_an_example_without_the_data(
    browser: Browser, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    """The whole way: from the card of a run folder, whose data are not there, through the server to the page."""
    data = {"train": {"pairs": "none.tsv"}, "languages": ["en", "de"]}
    run = tmp_path / "my-run"
    shutil.copytree(make_run(data=data), run)
    examples = ["The dog is in the house.", "A cat sleeps."]
    RunDir(run).write_card({"examples": examples, "test": [{"name": "BLEU", "value": 42.71}]})
    with served(run) as url, browser.new_context() as context:
        page = context.new_page()
        page.goto(url)
        page.locator(".line.target .word").first.wait_for()
        about = page.locator(".about").inner_text()
        assert re.fullmatch(
            r"my-run · English to German · [\d.]+ thousand parameters · BLEU 42\.7", about
        )
        assert page.get_by_label("Text").input_value() == examples[0]
        assert texts(page, ".example") == examples
        page.goto(f"{url}/?text=A+cat+%26+a+dog.")
        page.locator(".line.target .word").first.wait_for()
        assert page.get_by_label("Text").input_value() == "A cat & a dog."


def test_the_form_leaves_the_screen_to_the_view(browser: Browser, address: str) -> None:
    """Less than a quarter of the screen of a small laptop, and less than a third of a phone's."""
    for size, most in (((1280, 800), 190), ((390, 844), 270)):
        viewport = {"width": size[0], "height": size[1]}
        with browser.new_context(viewport=viewport) as context:  # type: ignore[arg-type]
            page = context.new_page()
            page.route("**/v1/model", lambda route: route.fulfill(json=INFO))
            page.goto(f"{address}/#q=ein+Hund&view=heads")
            page.locator("#view-heads .help").wait_for()
            box = page.locator("#view-heads .help").bounding_box()
            assert box is not None
            assert box["y"] <= most
