"""The page in a real browser, as one file from a folder and served: what it shows is what the trace holds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from regard.inspection.trace import trace
from regard.tasks import Translator
from tests.browser.pages import SAID, SOURCE, Open, patience, rows_of, says, synthetic, texts, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

STOPS = {
    "light": ("#f3f2ed", "#6f9fd4", "#16245c"),
    "dark": ("#23262d", "#4a78bd", "#f2f6ff"),
}
HOSTILE = "</script><img src=x onerror=window.struck=1><b>▁"

# ---------------------------------------------------------------------------------------------
# Heads


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross_attention"])
def test_the_table_holds_the_weights_with_queries_on_rows(look: Open, kind: str) -> None:
    shown = synthetic()
    page = look(shown, f"#view=heads&pane={kind}&layer=1&head=2")
    (_, *keys), *rows = rows_of(page)
    reads = [f"{a.text} → {b.text}" for a, b in zip(shown.read, shown.said, strict=True)]
    sources = [token.text for token in shown.source]
    assert keys == ([token.text for token in shown.read] if kind == "decoder" else sources)
    assert [row[0] for row in rows] == (sources if kind == "encoder" else reads)
    assert texts(page, ".map .rows > div") == [row[0] for row in rows]
    assert texts(page, ".map .columns > div") == keys
    values = np.array([row[1:] for row in rows], dtype=float)
    np.testing.assert_allclose(values, getattr(shown, kind)[1, 2], atol=0.51e-4)


@pytest.mark.parametrize("way", ["average", "max"])
def test_heads_together(look: Open, way: str) -> None:
    shown = synthetic()
    _, *rows = rows_of(look(shown, f"#view=heads&pane=cross&layer=0&heads={way}"))
    expected = (
        shown.cross_attention[0].mean(0) if way == "average" else shown.cross_attention[0].max(0)
    )
    values = np.array([row[1:] for row in rows], dtype=float)
    np.testing.assert_allclose(values, expected, atol=0.51e-4)


def test_marks_can_be_hidden(look: Open) -> None:
    shown = synthetic()
    page = look(shown, "#view=heads&pane=cross&layer=0&head=0")
    page.get_by_label("Hide marks").check()
    (_, *keys), *rows = rows_of(page)
    assert keys == SOURCE
    assert rows[0][0] == "<s> → ▁Der", "the row that says the first word stays"
    values = np.array([row[1:] for row in rows], dtype=float)
    np.testing.assert_allclose(values, shown.cross_attention[0, 0, :-1, :-1], atol=0.51e-4)


def scale(stops: Sequence[str]) -> npt.NDArray[np.float64]:
    """[256, 3]: straight lines through the stops in OKLab, walked at an even pace."""
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
  return { width, height, data: [...data], ratio: [box.d_model / width, box.height / height] };
}"""


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_pixels_are_the_scale(look: Open, colours: str) -> None:
    shown = synthetic()
    page = look(shown, "#view=heads&pane=cross&layer=1&head=1", color_scheme=colours)
    until(page, "document.querySelector('#map').d_model === 6")
    for where in ("#map", ".pane[data-kind=cross] .thumb[aria-pressed=true] canvas"):
        seen = page.locator(where).evaluate(PIXELS)
        drawn = np.array(seen["data"]).reshape(seen["height"], seen["d_model"], 4)
        expected = scale(STOPS[colours])[np.round(shown.cross_attention[1, 1] * 255).astype(int)]
        np.testing.assert_allclose(drawn[..., :3], expected, atol=1)
        assert (drawn[..., 3] == 255).all()
        across, down = seen["ratio"]
        assert where != "#map" or across == down == int(across), "cells are squares of whole pixels"


def test_the_scale_goes_one_way() -> None:
    for stops, sign in ((STOPS["light"], -1), (STOPS["dark"], 1)):
        grey = scale(stops) @ [0.2126, 0.7152, 0.0722]
        assert (np.diff(grey) * sign > 0).all()


def test_pointing_at_a_cell_tells_its_value_and_lights_the_row_everywhere(look: Open) -> None:
    shown = synthetic()
    page = look(shown, "#view=heads&pane=cross&layer=1&head=1")
    until(page, "document.querySelector('#map').d_model === 6")
    box = page.locator("#map").bounding_box()
    assert box is not None
    cell = box["d_model"] / len(shown.source)
    page.mouse.move(box["x"] + 3.5 * cell, box["y"] + 2.5 * cell)
    assert (
        page.locator(".value strong").text_content() == f"{shown.cross_attention[1, 1, 2, 3]:.4f}"
    )
    assert texts(page, ".map .lit") == ["s", "▁Hund → ▁schläf"]
    lit = page.locator(".pane.lit-row").evaluate_all("all => all.map(one => one.dataset.kind)")
    assert lit == ["decoder", "cross_attention"]
    page.mouse.move(0, 0)
    assert page.locator(".lit-row").count() == 0


# ---------------------------------------------------------------------------------------------
# Translate


def test_a_word_lights_what_it_looked_at(look: Open) -> None:
    shown = synthetic()
    page = look(shown)
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


def test_a_chosen_word_shows_its_alternatives(look: Open) -> None:
    shown = synthetic()
    page = look(shown)
    page.locator(".line.target .word").first.click()
    assert texts(page, ".others .token") == ["▁Der", "▁anders"]
    assert texts(page, ".others .number") == ["20%", "1.0%"]
    assert texts(page, ".others h3") == ["To begin, the model could say"]
    assert texts(page, ".others .sign") == ["▁ marks the beginning of a word."]
    assert page.evaluate("location.hash") == "#said=0"
    page.locator(".line.target .word").nth(1).click()
    assert texts(page, ".others h3") == ["After “Der” the model could say"]


def test_risks_are_marked(look: Open) -> None:
    shown = synthetic(said=["▁der", "▁der", "▁Hund"])
    cross = shown.cross_attention.copy()
    cross[..., 2:4] = 0.001
    page = look(replace(shown, cross=cross))
    notes = texts(page, ".notes li")
    assert any(note.startswith("der was said with a probability of only 20%") for note in notes)
    assert any(note.startswith("der repeats") for note in notes)
    assert any(note.startswith("sleeps got almost no attention") for note in notes)
    assert texts(page, ".word.risk") == ["sleep", "s", "der", "der"]


def test_the_direction_of_text(look: Open) -> None:
    page = look(synthetic(source=["▁我", "们", "吃饭"], said=["▁مرحبا", "▁بالعالم"]))
    direction = "element => getComputedStyle(element).direction"
    assert page.locator(".line.source").evaluate(direction) == "ltr"
    assert page.locator(".line.target").evaluate(direction) == "rtl"
    assert page.locator(".line.source").text_content() == "我们吃饭 </s>"


def test_a_space_by_itself_is_a_space(look: Open) -> None:
    page = look(synthetic(source=["▁the", "▁", "G", "reen"]))
    assert page.locator(".line.source").text_content() == "the Green </s>"


# ---------------------------------------------------------------------------------------------
# Beam


def test_the_leaves_are_what_the_search_finished(look: Open, finished_run: Path) -> None:
    model = Translator.load(finished_run, "cpu")
    for shown in (synthetic(), trace(model, "ein Hund dog", beam=3, alpha=0.6)):
        page = look(shown, "#view=beam")
        for state in ("kept", "pruned", "finished"):
            ids = page.locator(f".node.{state}").evaluate_all(
                "all => all.map(one => Number(one.dataset.id))"
            )
            assert ids == [node.id for node in shown.beam if node.state == state]
        best = texts(page, ".node.best .piece")
        assert best == [token.text for token in [shown.read[0], *shown.said]]
        _, *rows = rows_of(page)
        assert [row[-1] for row in rows] == [node.state for node in shown.beam[1:]]
        scores = [float(row[-2].replace("−", "-")) for row in rows]
        np.testing.assert_allclose(scores, [node.score for node in shown.beam[1:]], atol=0.51e-3)


def test_a_node_says_why(look: Open) -> None:
    shown = synthetic()
    page = look(shown, "#view=beam")
    says(page, ".why", "and so the translation")
    pruned = next(node for node in shown.beam if node.state == "pruned" and node.token == 400)
    page.locator(f".node[data-id='{pruned.id}']").click()
    assert page.locator(".why").text_content() == (
        "It is number 3 of the 3 continuations looked at in step 1. "
        "The beam has room for 1, taken by better ones."
    )
    assert page.locator(".detail h3 bdi").text_content() == "anders"
    assert page.evaluate("location.hash") == f"#view=beam&node={pruned.id}"


# ---------------------------------------------------------------------------------------------
# All of it


def test_by_keyboard_alone(look: Open) -> None:
    page = look(synthetic())
    focused = (
        "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"
    )
    page.keyboard.press("Tab")  # light and dark
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "Translate"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "The"
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert texts(page, ".others .said .token") == ["▁Hund"]
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowRight")
    assert page.locator("#view-heads").is_visible()
    for _ in range(3):
        page.keyboard.press("Tab")
    assert page.evaluate(focused) == "Cross, layer 2, head 1"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == "Cross, layer 1, head 2"
    assert page.locator(".which").text_content() == "Cross, layer 1, head 2"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    assert page.locator(".which").text_content() == "Decoder, layer 1, head 1"
    page.locator("#tab-heads").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className").startswith("node finished best")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".detail .state").text_content() == "kept"


def test_a_state_has_a_link(look: Open) -> None:
    page = look(synthetic(), "#view=heads&pane=encoder&layer=0&head=2&heads=max")
    assert page.locator(".which").text_content() == "Encoder, layer 1, maximum of 3 heads"
    page.evaluate("location.hash = '#view=beam&node=3'")
    assert page.locator(".node[aria-pressed=true]").get_attribute("data-id") == "3"


def test_light_and_dark(look: Open) -> None:
    page = look(synthetic(), color_scheme="dark")
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    assert page.evaluate(paper) == "rgb(21, 23, 27)"
    page.get_by_role("button", name="Light / dark").click()
    assert page.evaluate(paper) == "rgb(250, 249, 246)"


@pytest.mark.parametrize("view", ["translate", "heads", "beam"])
def test_a_phone_needs_no_scrolling_to_the_side(look: Open, view: str) -> None:
    size = {"d_model": 390, "height": 844}
    page = look(synthetic(), f"#view={view}&said=1", viewport=size)
    page.locator("button:visible", has_text="Show as table").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


PHONE = {"viewport": {"d_model": 390, "height": 844}, "has_touch": True, "is_mobile": True}


def test_what_scrolls_fades_where_there_is_more(look: Open) -> None:
    page = look(synthetic(source=[f"▁w{i}" for i in range(30)]), "#view=heads", **PHONE)
    until(page, "document.querySelector('#map').d_model === 31")
    more = "document.querySelector('.heads .map').matches('.more-right')"
    until(page, more)
    page.evaluate("document.querySelector('.heads .map').scrollTo(9999, 0)")
    until(page, f"!{more}")


def test_a_finger_is_told_to_touch(look: Open) -> None:
    page = look(synthetic(), "#view=heads", **PHONE)
    says(page, ".heads .value", "Touch a cell")
    says(page, ".heads .sign", "▁ marks the beginning of a word.")
    assert "double click" not in (page.locator("#view-heads").text_content() or "")


def test_the_tree_opens_at_the_chosen_node(look: Open) -> None:
    """Also when one comes back: what is hidden forgets where it was scrolled to."""
    page = look(synthetic(), "#view=beam", **PHONE)
    seen = """(() => {
      const [node, tree] = [".node[aria-pressed=true]", ".tree"]
        .map(one => document.querySelector(one).getBoundingClientRect());
      return node.left >= tree.left && node.right <= tree.right;
    })()"""
    until(page, seen)
    page.locator("#tab-heads").click()
    page.locator("#tab-beam").click()
    until(page, seen)


DRAWN = {
    "translate": "document.querySelectorAll('.target .word').length === 256",
    "heads": "document.querySelector('#map').d_model === 256 && "
    "[...document.querySelectorAll('.thumb canvas')].every(one => one.d_model === 64)",
    "beam": "document.querySelectorAll('.node').length > 700",
}


@pytest.mark.parametrize("view", DRAWN)
def test_256_tokens_are_drawn_in_two_seconds(look: Open, view: str) -> None:
    long = [f"▁w{i % 50}" for i in range(255)]
    shown = synthetic(long, long, layers=6, heads=8)
    page = look(shown, f"#view={'beam' if view == 'translate' else 'translate'}")
    assert not page.evaluate(f"document.querySelector('#view-{view}').hasChildNodes()")
    start = time.monotonic()
    page.evaluate("view => { location.hash = `#view=${view}` }", view)
    until(page, f"document.querySelector('#view-{view} *') && {DRAWN[view]}")
    page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
    assert time.monotonic() - start < patience(2)


@pytest.mark.parametrize("view", ["translate", "heads", "beam"])
def test_hostile_text_is_text(look: Open, view: str) -> None:
    shown = synthetic(source=[HOSTILE, *SOURCE], said=[HOSTILE, *SAID])
    page = look(replace(shown, text=HOSTILE, translation=HOSTILE), f"#view={view}&said=0")
    page.locator("button:visible", has_text="Show as table").first.click()
    page.wait_for_timeout(100)
    assert page.evaluate("window.struck") is None
    assert page.locator("main img, main b").count() == 0


# ---------------------------------------------------------------------------------------------
# Served


def test_served_it_asks_this_server_and_no_other(browser: Browser, address: str) -> None:
    troubles: list[str] = []
    asked: list[str] = []
    with browser.new_context() as context:
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        page.get_by_label("Text").fill(f"ein Hund {HOSTILE}")
        page.get_by_label("Beam").fill("2")
        page.keyboard.press("Tab")
        page.get_by_role("button", name="Translate").click()
        page.locator("#tab-beam").click()
        page.locator(".node").nth(2).wait_for()
        finished = page.locator(".node").count()
        assert page.evaluate("window.struck") is None
        # The link brings back the sentence and the view.
        link = page.evaluate("location.href")
        page.goto("about:blank")
        page.goto(link)
        page.locator("#view-beam").wait_for()
        assert page.locator(".node").count() == finished
        assert troubles == []
        page.get_by_label("Text").fill("ein Hund " * 1000)
        page.keyboard.press("Enter")
        page.locator(".status.wrong").wait_for()
        says(page, ".status", "characters")
    asked = [url for url in asked if not url.startswith(("data:,", "about:"))]
    assert {url.split("/")[2] for url in asked} == {address.split("/")[2]}


@pytest.mark.parametrize("named", [True, False])
def test_served_it_says_which_languages(browser: Browser, address: str, named: bool) -> None:
    sides = {"source": ("en", "English"), "target": ("de", "German")}
    told = {
        side: {"code": code, "name": name if named else code}
        for side, (code, name) in sides.items()
    }
    with browser.new_context() as context:
        page = context.new_page()
        page.route("**/frontend/settings", lambda route: route.fulfill(json={"language": told}))
        with page.expect_response("**/frontend/settings"):
            page.goto(address)
        says(page, "button.primary", "Translate into German" if named else "Translate")
        placeholder = page.get_by_label("Text").get_attribute("placeholder")
        assert placeholder == ("A sentence in English" if named else "A sentence to translate")
