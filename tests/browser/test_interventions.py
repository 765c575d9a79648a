"""One attention weight, occlusion, the attention of a search node, and interventions."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from regard.inspection.hooks import Head
from regard.inspection.trace import Occlusion, Trace, trace
from regard.tasks import Translator
from tests.browser.pages import Open, patience, rows_of, synthetic, texts, until, wait_for_text

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TEXT = "ein Hund dog"
HOSTILE = "</script><img src=x onerror=window.struck=1><b>▁"


@pytest.fixture(scope="module")
def model(finished_run: Path) -> Translator:
    return Translator.load(finished_run, "cpu")


@pytest.fixture(scope="module")
def traced(model: Translator) -> Trace:
    return trace(model, TEXT, beam=3, length_penalty=0.6, prefix="a dog")


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of the server. At the end it checks that the page logged nothing."""
    problems: list[str] = []
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        opened = context.new_page()
        opened.on("console", lambda message: problems.append(message.text))
        opened.on("pageerror", lambda error: problems.append(str(error)))
        yield opened
    assert problems == []


def number(text: str | None) -> float:
    return float((text or "").replace("−", "-"))


# ---------------------------------------------------------------------------------------------
# One weight


@pytest.mark.parametrize("site", ["encoder", "decoder", "cross_attention"])
def test_a_weight_is_computed_from_the_models_projections(
    open_file: Open, traced: Trace, site: str
) -> None:
    page = open_file(traced, f"#view=weight&site={site}&layer=1&head=1&query=1&key=0")
    until(page, "document.querySelectorAll('.step-card').length === 6")
    projections, weights = traced.projections[site], getattr(traced, site)[1, 1]  # type: ignore[index]
    q, k, v, w_o = (
        part[1][1].astype(np.float64)
        for part in (projections.query, projections.key, projections.value, projections.output)
    )
    last = [one.locator("strong").last for one in page.locator(".step-card").all()]
    product, head = q[1] @ k[0], weights[1] @ v
    expected = [
        product,
        product * projections.scale,
        product * projections.scale,
        weights[1, 0],
        head[0],
    ]
    found = [number(one.text_content()) for one in last]
    np.testing.assert_allclose(found, [*expected, (head @ w_o)[0]], atol=0.6e-4)
    assert page.locator(".value strong").text_content() == f"{weights[1, 0]:.4f}"
    comparison = page.locator(".comparison").text_content() or ""
    assert re.search(r"is float32 rounding|identical to the last bit", comparison)
    _, *rows = rows_of(page)
    computed = np.array([[float(cell) for cell in row[-2:]] for row in rows])
    np.testing.assert_allclose(computed[:, 0], computed[:, 1], atol=2e-6)
    np.testing.assert_allclose(computed[:, 1], weights[1], atol=0.51e-6)
    # The first terms of the sum are written out: components of q and k.
    terms = page.locator(".step-card").first.locator(".formula").nth(1).text_content() or ""
    first = [number(one) for one in re.findall(r"−?[0-9]+[.][0-9]{4}", terms)[:2]]
    np.testing.assert_allclose(first, [q[1, 0], k[0, 0]], atol=0.51e-4)


def test_a_later_token_is_masked(open_file: Open, traced: Trace) -> None:
    page = open_file(traced, "#view=weight&site=decoder&layer=0&head=0&query=0&key=1")
    until(page, "document.querySelectorAll('.step-card').length === 6")
    assert "This key is masked" in (page.locator(".step-card").nth(2).text_content() or "")
    assert page.locator(".value strong").text_content() == "0.0000"


def test_a_cell_is_selected_by_click_and_by_key(open_file: Open, traced: Trace) -> None:
    page = open_file(traced, "#view=weight&site=cross_attention&layer=0&head=0&query=0&key=0")
    until(page, "document.querySelectorAll('.step-card').length === 6")
    box = page.locator(".weight-view .map canvas").bounding_box()
    assert box is not None
    cell = box["width"] / len(traced.source)
    page.mouse.click(box["x"] + 1.5 * cell, box["y"] + 2.5 * cell)
    assert page.evaluate("location.hash").endswith("query=2&key=1")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("location.hash").endswith("query=2&key=0")
    assert (
        page.locator(".value strong").text_content() == f"{traced.cross_attention[0, 0, 2, 0]:.4f}"
    )


def test_a_cell_of_a_head_leads_to_its_weight(open_file: Open, traced: Trace) -> None:
    page = open_file(traced, "#view=heads&site=cross_attention&layer=1&head=1")
    until(page, f"document.querySelector('#map').width === {len(traced.source)}")
    page.locator(".heads .cells").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.step-card').length === 6")
    assert (
        page.locator(".result strong").text_content() == f"{traced.cross_attention[1, 1, 1, 1]:.4f}"
    )


BOX = "one => { const { x, y, width, height } = one.getBoundingClientRect(); return [x, y, width, height]; }"


def test_the_selected_row_and_column_are_framed(open_file: Open, traced: Trace) -> None:
    page = open_file(traced, "#view=weight&site=cross_attention&layer=0&head=0&query=1&key=2")
    until(page, "document.querySelectorAll('.step-card').length === 6")
    assert_framed(page, ".weight-view", traced, row=1, column=2)
    page.locator("#tab-heads").click()
    until(page, f"document.querySelector('#map').width === {len(traced.source)}")
    page.locator(".heads .cells").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert_framed(page, ".heads", traced, row=1, column=1)


def assert_framed(page: Page, view: str, traced: Trace, row: int, column: int) -> None:
    """The frames lie over the whole row and the whole column of a map of cross-attention."""
    x, y, width, height = page.locator(f"{view} .map canvas").evaluate(BOX)
    cell = width / len(traced.source)
    across, down = [x, y + row * cell, width, cell], [x + column * cell, y, cell, height]
    assert page.locator(f"{view} .highlight.row").evaluate(BOX) == pytest.approx(across, abs=1)
    assert page.locator(f"{view} .highlight.column").evaluate(BOX) == pytest.approx(down, abs=1)


def test_the_page_says_what_was_left_out_of_the_file(
    open_file: Open, traced: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MAX_FLOAT_BYTES", "MAX_NODE_BYTES", "MAX_PROJECTION_BYTES"):
        monkeypatch.setattr(f"regard.inspection.trace.{name}", 0)
    page = open_file(traced, "#view=weight")
    wait_for_text(page, ".result", "regard serve RUN")
    page.locator("#tab-beam").click()
    wait_for_text(page, ".node-attention", "regard serve RUN")
    page.locator("#tab-heads").click()
    wait_for_text(page, ".legend", "quantized to 8 bits")
    assert page.locator(".status.wrong:visible").count() == 0


@pytest.mark.parametrize("view", ["number", "beam", "translate"])
def test_a_phone_and_markup_in_text(open_file: Open, traced: Trace, view: str) -> None:
    hostile = replace(
        traced,
        source=[token._replace(text=HOSTILE) for token in traced.source],
        inputs=[token._replace(text=HOSTILE) for token in traced.inputs],
        outputs=[token._replace(text=HOSTILE) for token in traced.outputs],
        tokens={i: token._replace(text=HOSTILE) for i, token in traced.tokens.items()},
    )
    page = open_file(hostile, f"#view={view}&output=1", viewport={"width": 390, "height": 844})
    for button in page.locator("button:visible", has_text="Show as table").all()[::-1]:
        button.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("window.struck") is None
    assert page.locator("main img, main b").count() == 0


# ---------------------------------------------------------------------------------------------
# Occlusion


def test_occlusion_is_compared_with_attention(open_file: Open) -> None:
    shown = synthetic()
    without = np.tile(np.array(shown.probabilities, dtype=np.float32), (4, 1))
    without[2, 1] = 0.01  # Hund depends on sleeps
    page = open_file(
        replace(shown, occlusion=Occlusion([[0], [1], [2, 3], [4]], without)),
        "#output=1&colour=occlusion",
    )
    assert "Attention alone is not an explanation" in "".join(texts(page, ".occlusion h3"))
    before = round(shown.probabilities[1] * 100)
    changes = {
        row.locator(".token").text_content(): row.locator(".number").last.text_content()
        for row in page.locator(".occlusion-row:not(.heading)").all()
    }
    assert changes["sleeps"] == f"{before}% → 1.0%"
    assert changes["The"] == f"{before}% → {before}%"
    assert texts(page, ".occlusion-row.heading .drop") == [
        "probability that ▁Hund loses without it"
    ]
    colours = page.locator(".source .word").evaluate_all(
        "all => all.map(one => one.style.backgroundColor !== '')"
    )
    assert colours == [False, False, True, True, False, False]


# ---------------------------------------------------------------------------------------------
# Beam


def test_any_node_shows_its_attention(open_file: Open, traced: Trace) -> None:
    pruned = next(node for node in traced.beam[::-1] if node.state == "pruned")
    assert pruned.parent is not None
    page = open_file(traced, f"#view=beam&node={pruned.id}&cross_layer=0")
    until(page, "document.querySelector('.node-attention canvas').height === 3")
    page.locator(".node-attention button", has_text="Show as table").click()
    rows = page.locator(".node-attention table").evaluate(
        "table => [...table.rows].slice(1).map(row => [...row.cells].slice(1).map(c => +c.textContent))"
    )
    heads = traced.node_attention[pruned.parent][0]
    np.testing.assert_allclose(rows, [heads.mean(0), *heads], atol=0.51e-4)
    wait_for_text(page, ".penalty", "length penalty")


# ---------------------------------------------------------------------------------------------
# Other architectures


def test_a_site_without_attention_and_keys_that_are_not_tokens(open_file: Open) -> None:
    shown = synthetic()
    none = np.zeros((0, 0, 0, 0), dtype=np.float32)
    other = replace(
        shown,
        encoder=none,
        cross_attention=shown.cross_attention[..., :3],
        compressed={"cross_attention"},
    )
    page = open_file(other, "#view=heads&site=cross_attention&layer=0&head=0")
    until(page, "document.querySelector('#map').width === 3")
    assert texts(page, ".pane .quiet")[1] == "This model has none."
    assert texts(page, ".map .columns > div") == ["1", "2", "3"]
    page.locator("#tab-translate").click()
    page.locator(".line.target .word").first.hover()
    wait_for_text(page, ".lines", "no attention to source words")
    page.locator("#tab-weight").click()
    wait_for_text(page, "#view-weight", "no attention that is computed from products")
    page.locator("#tab-beam").click()
    wait_for_text(page, ".node-attention", "no attention to the source")


# ---------------------------------------------------------------------------------------------
# Interventions


def test_a_file_says_that_it_has_no_model(open_file: Open) -> None:
    page = open_file(synthetic(), "#view=intervene&mute=cross_attention.0.0")
    text = page.locator("#view-intervene .card").text_content()
    assert (
        text == "Interventions need a model: regard serve RUN serves this page together with one."
    )


def test_before_and_after(page: Page, address: str, model: Translator) -> None:
    page.goto(f"{address}/#q={TEXT}&prefix=a&view=intervene")
    page.locator(".intervene button.word").nth(0).click()
    assert page.get_by_text("Nothing is changed yet").is_visible()
    page.get_by_label("Another word").fill("dog")
    page.keyboard.press("Enter")
    page.locator(".compare").first.wait_for()
    before, after = trace(model, TEXT, prefix="a"), trace(model, TEXT, prefix="dog")
    shown = [part.text_content() or "" for part in page.locator(".before-after .line").all()]
    assert [re.sub(r"\s*</s>", "", text) for text in shown] == [
        before.translation,
        after.translation,
    ]
    assert texts(page, ".before-after mark")[-1] == "dog"
    # With the keyboard, mute the second head of the encoder, too.
    page.locator(".switch").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    muted = trace(model, TEXT, prefix="dog", mute=[Head("encoder", 0, 1)])
    (_, *_), *rows = rows_of_comparison(page, f"{muted.probabilities[0]:.4f}")
    found = [row[3] for row in rows if row[3] != "–"]
    assert found == [f"{one:.4f}" for one in muted.probabilities]
    assert "mute=encoder.0.1" in page.evaluate("location.hash")
    # The difference of the selected head's attention, for common rows: in the encoder, all rows.
    page.locator(".outcome").get_by_label("Layer").select_option(label="2")
    rows = page.locator(".outcome .beside ~ .tabular").evaluate(
        """place => { place.querySelector("button").click();
        return [...place.querySelectorAll("tbody tr")].map(row =>
          [...row.querySelectorAll("td")].map(cell => +cell.textContent.replace("−", "-"))); }"""
    )
    np.testing.assert_allclose(rows, muted.encoder[1, 1] - before.encoder[1, 1], atol=0.51e-3)
    page.get_by_role("button", name="Undo all").click()
    assert page.get_by_text("Nothing is changed yet").is_visible()


def rows_of_comparison(page: Page, text: str) -> list[list[str]]:
    page.locator(".outcome > .tabular button").click()
    page.locator(".outcome > .tabular td", has_text=text).first.wait_for()
    script = "table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent))"
    rows: list[list[str]] = page.locator(".outcome > .tabular table").evaluate(script)
    return rows


def test_sampling_uses_the_seed(page: Page, address: str, model: Translator) -> None:
    page.goto(f"{address}/#q={TEXT}&view=intervene&temperature=2&seed=7")
    page.locator(".compare").first.wait_for()
    sampled = trace(model, TEXT, temperature=2.0, seed=7)
    shown = page.locator(".before-after .line").nth(1).text_content() or ""
    assert re.sub(r"\s*</s>", "", shown) == sampled.translation


# ---------------------------------------------------------------------------------------------
# Long sentences


def test_256_tokens_are_fetched_layer_by_layer(page: Page, large_address: str) -> None:
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    source, prefix = "a b " * 127 + "a", "c d " * 127 + "c"
    page.goto(f"{large_address}/#q={source}&prefix={prefix}&view=translate")
    page.locator(".line.target .word").nth(255).wait_for(timeout=60_000)
    assert page.locator(".line.source .word").count() == 256
    waits = {}
    for name, click, drawn in [
        ("heads", "#tab-heads", "document.querySelector('#map')?.width === 256"),
        (
            "another layer",
            ".pane[data-site=encoder] .thumb",
            "document.querySelector('.which').textContent.startsWith('Encoder')",
        ),
        ("one weight", "#tab-weight", "document.querySelectorAll('.step-card').length === 6"),
        ("a node", "#tab-beam", "document.querySelector('.node-attention canvas')?.width === 256"),
    ]:
        start = time.monotonic()
        page.locator(click).first.click()
        until(page, drawn)
        page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
        waits[name] = round(time.monotonic() - start, 2)
    print(f"seconds from click to picture: {waits}")
    assert max(waits.values()) < patience(2)
    layers = [
        url
        for url in requested
        if re.search(r"/v1/trace/\w+/(encoder|decoder|cross_attention)/\d$", url)
    ]
    assert len(layers) == len(set(layers)), "each layer is requested for once"
