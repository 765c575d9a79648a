"""The training history, the tour, the page in a notebook, and a server with API keys."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from regard.inspection.trace import Occlusion, Trace
from regard.inspection.training_history import training_history
from regard.storage.run_dir import RunDir
from regard.tasks import Translator
from tests.browser.conftest import served
from tests.browser.pages import Open, rows_of, synthetic, texts, until, wait_for_text

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


def test_the_values_are_those_of_training(open_file: Open, learned: Trace) -> None:
    page = open_file(learned, "#view=training&step=2")
    until(page, "document.querySelector('#alignment').width > 0")
    history = learned.history
    assert history is not None
    shown = tables(page)
    head, *rows = shown["Position encoding by position and dimension"]
    waves = np.array([row[1:] for row in rows], dtype=float)
    assert waves.shape == (64, 16)
    assert waves[4, 0] == pytest.approx(np.sin(4), abs=0.51e-3)
    plots = page.locator(".plot").evaluate_all("all => all.map(one => one.clientWidth)")
    assert len(plots) == 4
    assert min(plots) > 450, "as wide as their cards"
    size = "canvas => [canvas.width, canvas.height]"
    assert page.locator("#positions").evaluate(size) == [16, 64]
    _, *rows = shown["Dot product by distance"]
    assert [float(row[1]) for row in rows] == pytest.approx(history["positions"]["mean"], abs=1e-4)
    head, *rows = shown["Learning rate by step"]
    assert [float(row[1]) for row in rows] == pytest.approx(
        history["schedule"]["learning_rates"], rel=1e-4
    )
    head, *rows = shown["The log, by step"]
    assert head == ["step", "loss", "learning rate", "validation loss", "BLEU"]
    assert rows[1] == ["2", "2.0000", "2.000e-1", "2.5000", "50.00"]
    head, *rows = shown["Targets with label smoothing"]
    targets = [(one["correct"], one["other"]) for one in history["smoothing"]["targets"]]
    assert [(float(row[2]), float(row[3])) for row in rows] == [
        pytest.approx(one, rel=1e-3) for one in targets
    ]


def test_charts_are_readable_on_a_phone(open_file: Open, learned: Trace) -> None:
    """Nothing is cut off or overlaps, and numbers are grouped."""
    history = learned.history
    assert history is not None
    valid = [
        {"step": 500 * i, "loss": 1.0, "score": score, "best": False}
        for i, score in enumerate((90.0, 98.0, 99.5), 1)
    ]
    curves = {**history["curves"], "valid": valid}
    page = open_file(
        replace(learned, history={**history, "curves": curves}),
        "#view=training",
        viewport={"width": 390, "height": 844},
    )
    page.locator("#view-training details").nth(1).wait_for()
    closed = page.locator("#view-training details:not([open]) > summary")
    while closed.count():  # on a phone, only the first card is open
        closed.first.click()
    until(page, "document.querySelectorAll('.chart .unit').length === 4")
    inside = """all => all.map(one => one.closest("svg").getBoundingClientRect().bottom
      - one.getBoundingClientRect().bottom)"""
    assert min(page.locator(".chart .unit").evaluate_all(inside)) >= 0
    aside = """all => all.map(one => [one, one.parentElement].map(each => each.getBoundingClientRect()))
      .map(([a, b]) => Math.abs(a.y + a.height / 2 - b.y - b.height / 2))"""
    assert max(page.locator(".lines-key .stroke").evaluate_all(aside)) < 2
    score = page.locator(".chart", has=page.locator("svg[aria-label='BLEU by step']"))
    assert score.locator(".tick.x").all_text_contents() == ["0", "500", "1,000", "1,500", "step"]
    assert score.locator(".tick.y").first.text_content() == "0", (
        "an axis that begins at 80 exaggerates"
    )
    bars = """all => all.map(bars => [...bars.querySelectorAll("span")].map(one => {
      const range = document.createRange();
      range.selectNodeContents(one);
      const { left, right } = range.getBoundingClientRect();
      return [left, right];
    }))"""
    for labels in page.locator(".bars").evaluate_all(bars):
        assert all(a[1] < b[0] for a, b in pairwise(labels))


def test_the_slider_moves_through_the_checkpoints(open_file: Open, learned: Trace) -> None:
    page = open_file(learned, "#view=training")
    where = page.get_by_label("Checkpoint", exact=True)
    assert texts(page, ".where") == ["step 4"]
    where.focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("location.hash") == "#view=training&step=2"
    until(page, "document.querySelector('.beside .quiet').textContent.includes('after 2 steps')")
    rows = rows_of(page)
    outputs, source = len(learned.outputs), len(learned.source)
    assert (len(rows), len(rows[0])) == (outputs + 1, source + 2)
    uniform = np.array([row[2:] for row in rows[1:]], dtype=float)
    np.testing.assert_allclose(
        uniform, 1 / source, atol=0.004
    )  # the weights of that checkpoint are zeros


def test_a_page_without_history_says_so(open_file: Open, finished_run: Path) -> None:
    page = open_file(synthetic(), "#view=training")
    assert "without the training history" in texts(page, ".training")[0]
    page = open_file(Translator.load(finished_run, "cpu").trace("ein Hund"), "#view=training")
    assert "kept no checkpoints" in texts(page, ".training")[0]
    assert "no training log" in texts(page, ".training")[0]


@pytest.mark.parametrize("view", ["training", "tour"])
def test_a_phone_and_markup_in_text(open_file: Open, finished_run: Path, view: str) -> None:
    shown = synthetic(source=[HOSTILE, "▁a"], outputs=[HOSTILE, "▁b"])
    history = {**training_history(Translator.load(finished_run, "cpu")), "checkpoints": [1]}
    rows = [
        {
            "step": 1,
            "cross_attention": shown.to_json()["cross_attention"],
            "probabilities": [0.5, 0.5, 0.5],
        }
    ]
    page = open_file(
        replace(shown, text=HOSTILE, history={**history, "alignments": rows}),
        f"#view={view}&tour=1&arrive=1",
        viewport={"width": 390, "height": 844},
        color_scheme="dark",
    )
    page.locator(".tour-step .tour-text").wait_for()
    page.evaluate("view => { location.hash = `#view=${view}&tour=1` }", view)
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("window.struck") is None
    assert page.locator("main img, main b").count() == 0


# ---------------------------------------------------------------------------------------------
# The tour


def step(page: Page) -> str:
    return page.locator(".tour-step .tour-text").text_content() or ""


def head_patterns(shown: Trace) -> dict[str, list[Any]]:
    """The mean weight of each pattern, for each site: [layer, head]."""
    encoder, below, cross = shown.encoder, shown.decoder[:, :, 1:], shown.cross_attention
    rows = np.arange(cross.shape[2])
    diagonal = np.floor(rows * (cross.shape[3] - 1) / (len(rows) - 1) + 0.5).astype(int)
    marks = [i for i, token in enumerate(shown.source) if token.text in ("▁.", "'", "▁'")]
    at_end = [
        (array[..., -1].mean(-1), array[..., marks].sum(-1).mean(-1)) for array in (encoder, cross)
    ]
    dots = [i for i, token in enumerate(shown.inputs) if token.text == "▁."]
    return {
        "Encoder": [np.diagonal(encoder, k, 2, 3).mean(-1) for k in (-1, 0, 1)] + [*at_end[0]],
        "Decoder": [np.diagonal(below, k, 2, 3).mean(-1) for k in (0, 1)]
        + [below[..., 0].mean(-1), shown.decoder[..., dots].sum(-1).mean(-1)],
        "Cross-attention": [cross[:, :, rows, diagonal].mean(-1), *at_end[1]],
    }


def test_the_numbers_of_the_tour_are_those_of_the_trace(open_file: Open) -> None:
    shown = synthetic(source=[*DOG, "▁tired", "▁."])
    text = "The dog didn't cross the street because it was too tired."
    shown = replace(shown, text=text)
    page = open_file(shown, "#view=tour")
    titles = texts(page, ".tour-contents li a")
    page.locator(".tour-contents a").first.click()
    page.locator(".tour-step h2").wait_for()
    assert re.search(r"into 14 tokens and wrote 6.*least certain of Der: 20%", step(page))
    assert page.locator(".line.target .word[aria-pressed=true]").text_content() == "Der"
    visited = []
    while True:
        title = page.locator(".tour-step h2").text_content()
        visited.append(title)
        if title == "Heads have patterns":
            means = head_patterns(shown)
            site = max(means, key=lambda one: np.max(means[one]))
            share = np.array(means[site])
            _, layer, head = np.unravel_index(share.argmax(), share.shape)
            until(page, f"document.querySelector('.which')?.textContent.startsWith('{site}')")
            assert texts(page, ".which") == [f"{site}, layer {layer + 1}, head {head + 1}"]
            assert f"{round(100 * share.max())}%" in step(page)
        if title == "No looking ahead":
            assert "is exactly 0" in step(page)
        if title == "Too tired":
            it, dog, street = 8, [0, 1], [5, 6]  # the nouns with their articles
            row = shown.cross_attention[:, :, :-1, it].max((0, 1)).argmax()
            weights = shown.cross_attention[:, :, row]
            nouns = np.stack([weights[:, :, noun].sum(-1) for noun in (dog, street)], axis=-1)
            layer, head = np.unravel_index(nouns.max(2).argmax(), nouns.shape[:2])
            numbers = [f"{weight:.2f}" for weight in nouns[layer, head]]
            where = f"cross-attention head {head + 1} of layer {layer + 1}, the head with the largest weight"
            assert where in step(page)
            name = shown.outputs[row].text.lstrip("▁")
            assert f"The token that attends most to it is {name}." in step(page)
            assert f"the dog {numbers[0]}, the street {numbers[1]}" in step(page)
            assert f"&layer={layer}&head={head}" in page.evaluate("location.hash")
        if title == "Too wide":
            assert 'regard look RUN "The dog' in step(page)
        following = page.locator(".tour-step button", has_text="Next")
        if not following.count():
            break
        following.click()
        until(page, f"document.querySelector('.tour-step h2').textContent !== {json.dumps(title)}")
    assert "Too wide" in visited, "this sentence is not in this file"
    assert [one for one in visited if one != "Too wide"] == titles
    assert "regard serve RUN can tell" in step(page)
    page.get_by_role("button", name="Leave the tour").click()
    assert not page.locator(".tour-step").is_visible()


@pytest.mark.parametrize("turns", [True, False])
def test_the_evidence_about_it_is_chosen_by_measurement(
    browser: Browser, address: str, turns: bool
) -> None:
    """The head that turns from one noun to the other, if there is one; else the words that the pronoun depends on."""
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
            if turns:
                cross[0, 1, 1] = 0  # one head reads the adjective,
                cross[0, 1, 1, len(DOG)] = 1
                cross[1, 2, 1] = 0  # another one turns to the noun
                cross[1, 2, 1, 1 if last == "tired" else 6] = 1
            else:
                cross[:, :, 1] = cross.mean((0, 1))[1]
            words = [[i] for i in range(len(shown.source) - 1)]
            left_out = np.full((len(words), len(shown.outputs)), 0.5, np.float32)
            left_out[len(DOG), 1] = 0.125
            answer = replace(
                shown,
                text=text,
                cross_attention=cross,
                encoder=np.full_like(shown.encoder, 0.01),
                occlusion=Occlusion(words, left_out),
            )
            route.fulfill(json=answer.to_json("file"))

        page.route("**/v1/trace", answer)
        text = "The dog didn't cross the street because it was too tired."
        page.goto(f"{address}/#view=heads&tour=10&arrive=1&q={text}")
        page.locator(".tour-step .tour-text").wait_for()
        content = step(page)
        assert content.startswith("Here it became er.")
        if turns:
            assert "First, cross-attention head 2 of layer 1 reads tired (1.00)." in content
            assert re.search(
                r"head 3 of layer 2 looks at the noun that fits: the dog 1\.00, the street 0\.00\. With wide, "
                r"where the model wrote sie, the same head gives the dog 0\.00, the street 1\.00",
                content,
            )
            assert content.endswith("moves its attention from one noun to the other.")
            assert "&layer=1&head=2" in page.evaluate("location.hash")
        else:
            assert "No head of this model switches from one noun to the other" in content
            assert "Without tired only 13%" in content
            assert "colour=occlusion" in page.evaluate("location.hash")


def test_the_tour_ends_if_the_translations_do_not_show_what_it_refers_to(
    browser: Browser, address: str
) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        translations = {"tired": ["▁a", "▁b"], "wide": ["▁c", "▁d", "▁e"]}

        def answer(route: Route) -> None:
            text = json.loads(route.request.post_data or "{}")["q"]
            last = "tired" if "tired" in text else "wide"
            shown = synthetic([*DOG, f"▁{last}", "▁."], translations[last])
            route.fulfill(json=replace(shown, text=text).to_json("file"))

        page.route("**/v1/trace", answer)
        text = "The dog didn't cross the street because it was too tired."
        for outputs, expected in (
            (["▁c", "▁d", "▁e"], "this model writes “c d e”."),
            (["▁a", "▁b"], "the same translation if it ends in wide."),
        ):
            translations["wide"] = outputs
            page.goto("about:blank")
            page.goto(f"{address}/#view=translate&tour=9&arrive=1&q={text}")
            page.locator(".tour-step .tour-text").wait_for()
            assert page.locator(".tour-step h2").text_content() == "What does “it” refer to?"
            assert expected in step(page)
            assert page.locator(".tour-step .count").text_content() == "Tour, step 9 of 9"
            assert not page.locator(".tour-step button", has_text="Next").count()


@pytest.mark.parametrize("difference", [2.5, -0.25])
def test_the_tour_explains_the_least_certain_token(
    browser: Browser, address: str, difference: float
) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        trace = replace(synthetic(), text="The dog sleeps.")
        page.route("**/v1/trace", lambda route: route.fulfill(json=trace.to_json("file")))
        shares = {"integrated_gradients": [0.5, 2.0, -3.0], "occlusion": [0.1, 1.0, -2.0]}
        token, foil = trace.outputs[0]._asdict(), trace.outputs[1]._asdict()
        found = {"token": token, "foil": foil, "position": 0, "difference": difference}
        found |= {"source_words": ["The", "dog", "sleeps"], "target_words": [], "scores": shares}
        found |= {"agreement": [], "completeness": 0.001}
        page.route("**/v1/lens/attribution", lambda route: route.fulfill(json=found))
        page.goto(f"{address}/#view=lenses&tour=8&arrive=1&q={trace.text}")
        page.locator(".tour-step .tour-text").wait_for()
        smaller, larger = "whose logit is smaller by 2.5", "larger by 0.3; the whole translation"
        assert "least certain of Der. The other candidate was Hund, " in step(page)
        assert (smaller in step(page), larger in step(page)) == (difference > 0, difference < 0)
        assert "agree on the strongest reason: “dog”." in step(page)
        assert "output=0" in page.evaluate("location.hash")


def test_the_keyboard_stays_on_the_tour_while_a_step_is_computed(
    browser: Browser, address: str
) -> None:
    """The focus remains on Next, also if the step needs time or another sentence, so Enter alone leads on."""
    with browser.new_context() as context:
        page = context.new_page()
        waiting: list[Route] = []

        def answer(route: Route) -> None:
            text = json.loads(route.request.post_data or "{}")["q"]
            last = "wide" if "wide" in text else "tired"
            outputs = ["▁sie", "▁zu", "▁breit"] if last == "wide" else ["▁er", "▁zu", "▁müde"]
            shown = synthetic([*DOG, f"▁{last}", "▁."], ["▁weil", *outputs])
            route.fulfill(json=replace(shown, text=text).to_json("file"))

        page.route("**/v1/trace", answer)
        page.route("**/v1/lens/attribution", lambda route: waiting.append(route))
        page.goto(f"{address}/#view=training&tour=7&arrive=1&q=The dog sleeps.")
        page.locator(".tour-step .tour-text").wait_for()
        page.locator(".tour-step button", has_text="Next").focus()
        focused = page.locator(".tour-step button:focus", has_text="Next")
        page.keyboard.press("Enter")  # to a step that is not computed yet
        wait_for_text(page, ".tour-step", "Computing…")
        focused.wait_for(timeout=5000)
        for route in waiting:
            route.fulfill(status=400, json={"error": "no"})
        page.locator(".tour-step .tour-text").wait_for()
        focused.wait_for(timeout=5000)
        page.keyboard.press("Enter")  # to a step about another sentence
        wait_for_text(page, ".tour-step .count", "step 9")
        page.locator(".tour-step .tour-text").wait_for()
        focused.wait_for(timeout=5000)


@pytest.mark.parametrize("needed", [True, False])
def test_the_tour_says_whether_a_muted_head_was_needed(
    browser: Browser, address: str, needed: bool
) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        asked: list[list[str]] = []

        def answer(route: Route) -> None:
            request = json.loads(route.request.post_data or "{}")
            shown = replace(synthetic(), text=request["q"])
            if request.get("mute"):
                asked.append(request["mute"])
                shown = replace(shown, translation="Anders" if needed else shown.translation)
            route.fulfill(json=shown.to_json("file"))

        page.route("**/v1/trace", answer)
        page.goto(f"{address}/#view=intervene&tour=6&arrive=1&q=The dog sleeps.")
        page.locator(".tour-step .tour-text").wait_for()
        weights = synthetic().cross_attention[:, :, :-1, :-1]
        layer, head = np.unravel_index(weights.argmax(), weights.shape)[:2]
        assert asked[0] == [f"cross_attention.{layer}.{head}"]
        found = "becomes “Anders”: for this sentence, the model needs that head"
        assert (found if needed else "stays the same") in step(page)


# ---------------------------------------------------------------------------------------------
# A notebook


def test_a_notebook_shows_the_page_in_a_sandboxed_frame(browser: Browser, learned: Trace) -> None:
    problems: list[str] = []
    with browser.new_context(viewport={"width": 1000, "height": 900}) as context:
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.set_content(f"<!doctype html><p>Out[1]:</p>{learned._repr_html_()}")
        (frame,) = page.frames[1:]
        frame.locator("#tab-heads").click()
        frame.locator(".thumb[aria-label='Cross-attention, layer 1, head 2']").click()
        assert frame.locator(".which").text_content() == "Cross-attention, layer 1, head 2"
        frame.locator("#tab-tour").click()
        frame.locator(".tour-contents a").nth(4).click()
        frame.locator(".tour-step h2").wait_for()
        assert frame.locator("#view-beam").is_visible()
        frame.locator("#tab-training").click()
        frame.locator("#alignment").wait_for()
        assert (
            frame.evaluate("(() => { try { return parent.document.title } catch { return 0 } })()")
            == 0
        )
        box = page.locator("iframe").bounding_box()
        assert box is not None
        assert (box["width"], box["height"]) == (984, 768)
        assert page.url == "about:blank"
    assert problems == []


# ---------------------------------------------------------------------------------------------
# Served


@pytest.fixture(scope="module")
def learning_run(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is still training."""
    run = RunDir(shutil.copytree(trained_run, tmp_path_factory.mktemp("runs") / "learning"))
    run.card_file.unlink()
    return run.folder


@pytest.fixture(scope="module")
def locked(learning_run: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REGARD_API_KEYS", "sesame")
        with served(learning_run) as url:
            yield url


def test_the_api_key_is_asked_for_once_and_a_running_training_is_followed(
    browser: Browser, locked: str, learning_run: Path
) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{locked}/#q=ein+Hund&view=training")
        key = page.get_by_label("API key")
        key.fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("This server does not accept that key.").wait_for()
        key.fill("sesame")
        page.keyboard.press("Enter")
        page.locator("#view-training .where", has_text="step 4").wait_for()
        assert not key.is_visible()
        page.reload()
        page.locator("#view-training .where", has_text="step 4").wait_for()
        assert not key.is_visible(), "it is stored for this tab"
        assert page.evaluate("localStorage.length") == 0

        # The page follows the run.
        assert "Still training, or interrupted: 2 of 4" in texts(page, ".training")[0]
        line = {"event": "step", "step": 4, "loss": 1.0, "learning_rate": 0.1}
        with RunDir(learning_run).log_file.open("a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps(line)}\n")
        page.get_by_text("4 of 4 steps so far").wait_for(timeout=20_000)

        # Text is translated while it is typed.
        page.get_by_label("Text").fill("ein")
        page.get_by_label("Text").press_sequentially(" Hund", delay=20)
        live = page.locator(".live")
        live.wait_for()
        (translation,) = Translator.load(learning_run, "cpu").translate(["ein Hund"])
        until(page, f"document.querySelector('.live').textContent === {json.dumps(translation)}")
        page.keyboard.press("Enter")
        live.wait_for(state="hidden")
