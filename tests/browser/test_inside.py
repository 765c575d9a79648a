"""Looking inside and interfering: one number, occlusion, a node's attention, and what a change does."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from regard import trace as module
from regard.inspection.hooks import Head
from regard.inspection.trace import Occlusion, Trace, trace
from regard.tasks import Translator
from tests.browser.pages import Open, patience, rows_of, says, synthetic, texts, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TEXT = "ein Hund dog"
HOSTILE = "</script><img src=x onerror=window.struck=1><b>▁"


@pytest.fixture(scope="module")
def model(finished_run: Path) -> Translator:
    return Translator.load(finished_run, "cpu")


@pytest.fixture(scope="module")
def traced(model: Translator) -> Trace:
    return trace(model, TEXT, beam=3, alpha=0.6, prefix="a dog")


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Of a server. At the end: nothing was complained of."""
    troubles: list[str] = []
    with browser.new_context(viewport={"d_model": 1280, "height": 900}) as context:
        opened = context.new_page()
        opened.on("console", lambda message: troubles.append(message.text))
        opened.on("pageerror", lambda error: troubles.append(str(error)))
        yield opened
    assert troubles == []


def number(text: str | None) -> float:
    return float((text or "").replace("−", "-"))


# ---------------------------------------------------------------------------------------------
# One number


@pytest.mark.parametrize("place", ["encoder", "decoder", "cross_attention"])
def test_one_number_is_followed_with_the_models_numbers(
    look: Open, traced: Trace, place: str
) -> None:
    page = look(traced, f"#view=number&pane={place}&layer=1&head=1&query=1&key=0")
    until(page, "document.querySelectorAll('.step-card').length === 6")
    parts, weights = traced.parts[place], getattr(traced, place)[1, 1]  # type: ignore[index]
    q, k, v, w_o = (
        part[1][1].astype(np.float64)
        for part in (parts.query, parts.key, parts.value, parts.output)
    )
    last = [one.locator("strong").last for one in page.locator(".step-card").all()]
    product, head = q[1] @ k[0], weights[1] @ v
    expected = [product, product * parts.scale, product * parts.scale, weights[1, 0], head[0]]
    found = [number(one.text_content()) for one in last]
    np.testing.assert_allclose(found, [*expected, (head @ w_o)[0]], atol=0.6e-4)
    assert page.locator(".value strong").text_content() == f"{weights[1, 0]:.4f}"
    told = page.locator(".check-sum").text_content() or ""
    assert re.search(r"the rounding of float32|The same to the last bit", told)
    _, *rows = rows_of(page)
    computed = np.array([[float(cell) for cell in row[-2:]] for row in rows])
    np.testing.assert_allclose(computed[:, 0], computed[:, 1], atol=2e-6)
    np.testing.assert_allclose(computed[:, 1], weights[1], atol=0.51e-6)
    # A few terms of the sum are written out: they are q and k.
    terms = page.locator(".step-card").first.locator(".formula").nth(1).text_content() or ""
    first = [number(one) for one in re.findall(r"−?[0-9]+[.][0-9]{4}", terms)[:2]]
    np.testing.assert_allclose(first, [q[1, 0], k[0, 0]], atol=0.51e-4)


def test_a_later_word_is_masked(look: Open, traced: Trace) -> None:
    page = look(traced, "#view=number&pane=decoder&layer=0&head=0&query=0&key=1")
    until(page, "document.querySelectorAll('.step-card').length === 6")
    assert "may not be seen" in (page.locator(".step-card").nth(2).text_content() or "")
    assert page.locator(".value strong").text_content() == "0.0000"


def test_a_cell_is_chosen_by_click_and_by_key(look: Open, traced: Trace) -> None:
    page = look(traced, "#view=number&pane=cross&layer=0&head=0&query=0&key=0")
    until(page, "document.querySelectorAll('.step-card').length === 6")
    box = page.locator(".number-view .map canvas").bounding_box()
    assert box is not None
    cell = box["d_model"] / len(traced.source)
    page.mouse.click(box["x"] + 1.5 * cell, box["y"] + 2.5 * cell)
    assert page.evaluate("location.hash").endswith("query=2&key=1")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("location.hash").endswith("query=2&key=0")
    assert (
        page.locator(".value strong").text_content() == f"{traced.cross_attention[0, 0, 2, 0]:.4f}"
    )


def test_a_cell_of_a_head_leads_to_its_number(look: Open, traced: Trace) -> None:
    page = look(traced, "#view=heads&pane=cross&layer=1&head=1")
    until(page, f"document.querySelector('#map').d_model === {len(traced.source)}")
    page.locator(".heads .cells").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.step-card').length === 6")
    assert (
        page.locator(".result strong").text_content() == f"{traced.cross_attention[1, 1, 1, 1]:.4f}"
    )


BOX = "one => { const { x, y, width, height } = one.getBoundingClientRect(); return [x, y, width, height]; }"


def test_the_chosen_row_and_column_are_framed(look: Open, traced: Trace) -> None:
    page = look(traced, "#view=number&pane=cross&layer=0&head=0&query=1&key=2")
    until(page, "document.querySelectorAll('.step-card').length === 6")
    assert_framed(page, ".number-view", traced, row=1, column=2)
    page.locator("#tab-heads").click()
    until(page, f"document.querySelector('#map').d_model === {len(traced.source)}")
    page.locator(".heads .cells").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert_framed(page, ".heads", traced, row=1, column=1)


def assert_framed(page: Page, view: str, traced: Trace, row: int, column: int) -> None:
    """The frames lie over the whole row and the whole column of a map of cross attention."""
    x, y, width, height = page.locator(f"{view} .map canvas").evaluate(BOX)
    cell = width / len(traced.source)
    across, down = [x, y + row * cell, width, cell], [x + column * cell, y, cell, height]
    assert page.locator(f"{view} .light.row").evaluate(BOX) == pytest.approx(across, abs=1)
    assert page.locator(f"{view} .light.column").evaluate(BOX) == pytest.approx(down, abs=1)


def test_what_is_left_out_of_a_file_is_said_so(
    look: Open, traced: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WHOLE_BYTES", "NODES_BYTES", "PARTS_BYTES"):
        monkeypatch.setattr(module, name, 0)
    page = look(traced, "#view=number")
    says(page, ".result", "regard serve RUN")
    page.locator("#tab-beam").click()
    says(page, ".looked", "regard serve RUN")
    page.locator("#tab-heads").click()
    says(page, ".legend", "rounded to 8 bits")
    assert page.locator(".status.wrong:visible").count() == 0


@pytest.mark.parametrize("view", ["number", "beam", "translate"])
def test_on_a_phone_with_hostile_text(look: Open, traced: Trace, view: str) -> None:
    hostile = replace(
        traced,
        source=[token._replace(text=HOSTILE) for token in traced.source],
        read=[token._replace(text=HOSTILE) for token in traced.read],
        said=[token._replace(text=HOSTILE) for token in traced.said],
        tokens={i: token._replace(text=HOSTILE) for i, token in traced.tokens.items()},
    )
    page = look(hostile, f"#view={view}&said=1", viewport={"d_model": 390, "height": 844})
    for button in page.locator("button:visible", has_text="Show as table").all()[::-1]:
        button.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("window.struck") is None
    assert page.locator("main img, main b").count() == 0


# ---------------------------------------------------------------------------------------------
# Occlusion


def test_occlusion_stands_beside_attention(look: Open) -> None:
    shown = synthetic()
    without = np.tile(np.array(shown.probabilities, dtype=np.float32), (4, 1))
    without[2, 1] = 0.01  # Hund needs sleeps
    page = look(
        replace(shown, occlusion=Occlusion([[0], [1], [2, 3], [4]], without)),
        "#said=1&light=occlusion",
    )
    assert "Attention is not an explanation by itself" in "".join(texts(page, ".needs h3"))
    before = round(shown.probabilities[1] * 100)
    falls = {
        row.locator(".token").text_content(): row.locator(".number").last.text_content()
        for row in page.locator(".need:not(.heading)").all()
    }
    assert falls["sleeps"] == f"{before}% → 1.0%"
    assert falls["The"] == f"{before}% → {before}%"
    assert texts(page, ".need.heading .lost") == ["probability of ▁Hund lost without it"]
    colours = page.locator(".source .word").evaluate_all(
        "all => all.map(one => one.style.backgroundColor !== '')"
    )
    assert colours == [False, False, True, True, False, False]


# ---------------------------------------------------------------------------------------------
# Beam


def test_any_node_shows_where_it_looked(look: Open, traced: Trace) -> None:
    pruned = next(node for node in traced.beam[::-1] if node.state == "pruned")
    assert pruned.parent is not None
    page = look(traced, f"#view=beam&node={pruned.id}&at=0")
    until(page, "document.querySelector('.looked canvas').height === 3")
    page.locator(".looked button", has_text="Show as table").click()
    rows = page.locator(".looked table").evaluate(
        "table => [...table.rows].slice(1).map(row => [...row.cells].slice(1).map(c => +c.textContent))"
    )
    heads = traced.rows[pruned.parent][0]
    np.testing.assert_allclose(rows, [heads.mean(0), *heads], atol=0.51e-4)
    says(page, ".penalty", "length penalty")


# ---------------------------------------------------------------------------------------------
# Models that are otherwise


def test_a_place_without_attention_and_keys_that_are_no_words(look: Open) -> None:
    shown = synthetic()
    none = np.zeros((0, 0, 0, 0), dtype=np.float32)
    other = replace(
        shown, encoder=none, cross=shown.cross_attention[..., :3], mixed={"cross_attention"}
    )
    page = look(other, "#view=heads&pane=cross&layer=0&head=0")
    until(page, "document.querySelector('#map').d_model === 3")
    assert texts(page, ".pane .quiet")[1] == "This model has none here."
    assert texts(page, ".map .columns > div") == ["1", "2", "3"]
    page.locator("#tab-translate").click()
    page.locator(".line.target .word").first.hover()
    says(page, ".lines", "no attention to source words")
    page.locator("#tab-number").click()
    says(page, "#view-number", "no attention made of products")
    page.locator("#tab-beam").click()
    says(page, ".looked", "no attention to the source")


# ---------------------------------------------------------------------------------------------
# Interfere


def test_a_file_says_calmly_that_it_has_no_model(look: Open) -> None:
    page = look(synthetic(), "#view=interfere&mute=cross_attention.0.0")
    said = page.locator("#view-interfere .card").text_content()
    assert said == "Interfere needs a model: regard serve RUN serves this page with one."


def test_before_and_after(page: Page, address: str, model: Translator) -> None:
    page.goto(f"{address}/#q={TEXT}&prefix=a&view=interfere")
    page.locator(".interfere button.word").nth(0).click()
    assert page.get_by_text("Nothing is changed yet.").is_visible()
    page.get_by_label("Another word").fill("dog")
    page.keyboard.press("Enter")
    page.locator(".compare").first.wait_for()
    before, after = trace(model, TEXT, prefix="a"), trace(model, TEXT, prefix="dog")
    shown = [part.text_content() or "" for part in page.locator(".two .line").all()]
    assert [re.sub(r"\s*</s>", "", text) for text in shown] == [
        before.translation,
        after.translation,
    ]
    assert texts(page, ".two mark")[-1] == "dog"
    # By the keyboard: the first head of the encoder is muted too.
    page.locator(".switch").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    muted = trace(model, TEXT, prefix="dog", mute=[Head("encoder", 0, 1)])
    (_, *_), *rows = rows_of_comparison(page, f"{muted.probabilities[0]:.4f}")
    found = [row[3] for row in rows if row[3] != "–"]
    assert found == [f"{one:.4f}" for one in muted.probabilities]
    assert "mute=encoder.0.1" in page.evaluate("location.hash")
    # The difference of the chosen head's attention, of rows that both have: the encoder's has all.
    page.locator(".outcome").get_by_label("Layer").select_option(label="2")
    rows = page.locator(".outcome .beside ~ .tabular").evaluate(
        """place => { place.querySelector("button").click();
        return [...place.querySelectorAll("tbody tr")].map(row =>
          [...row.querySelectorAll("td")].map(cell => +cell.textContent.replace("−", "-"))); }"""
    )
    np.testing.assert_allclose(rows, muted.encoder[1, 1] - before.encoder[1, 1], atol=0.51e-3)
    page.get_by_role("button", name="Undo all").click()
    assert page.get_by_text("Nothing is changed yet.").is_visible()


def rows_of_comparison(page: Page, wanted: str) -> list[list[str]]:
    page.locator(".outcome > .tabular button").click()
    page.locator(".outcome > .tabular td", has_text=wanted).first.wait_for()
    script = "table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent))"
    rows: list[list[str]] = page.locator(".outcome > .tabular table").evaluate(script)
    return rows


def test_a_temperature_draws_by_its_seed(page: Page, address: str, model: Translator) -> None:
    page.goto(f"{address}/#q={TEXT}&view=interfere&heat=2&seed=7")
    page.locator(".compare").first.wait_for()
    drawn = trace(model, TEXT, temperature=2.0, seed=7)
    shown = page.locator(".two .line").nth(1).text_content() or ""
    assert re.sub(r"\s*</s>", "", shown) == drawn.translation


# ---------------------------------------------------------------------------------------------
# Long sentences


def test_256_tokens_come_layer_by_layer(page: Page, large_address: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    source, said = "a b " * 127 + "a", "c d " * 127 + "c"
    page.goto(f"{large_address}/#q={source}&prefix={said}&view=translate")
    page.locator(".line.target .word").nth(255).wait_for(timeout=60_000)
    assert page.locator(".line.source .word").count() == 256
    waits = {}
    for name, click, drawn in [
        ("heads", "#tab-heads", "document.querySelector('#map')?.d_model === 256"),
        (
            "another layer",
            ".pane[data-kind=encoder] .thumb",
            "document.querySelector('.which').textContent.startsWith('Encoder')",
        ),
        ("one number", "#tab-number", "document.querySelectorAll('.step-card').length === 6"),
        ("a node", "#tab-beam", "document.querySelector('.looked canvas')?.d_model === 256"),
    ]:
        start = time.monotonic()
        page.locator(click).first.click()
        until(page, drawn)
        page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
        waits[name] = round(time.monotonic() - start, 2)
    print(f"from click to picture, in seconds: {waits}")
    assert max(waits.values()) < patience(2)
    layers = [
        url
        for url in asked
        if re.search(r"/v1/trace/\w+/(encoder|decoder|cross_attention)/\d$", url)
    ]
    assert len(layers) == len(set(layers)), "each layer is asked for once"
