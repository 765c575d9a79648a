"""The view Lenses, with the lenses in a file and from a server."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from regard.inspection.activations import activations_of, embeddings
from regard.inspection.attribution import Method, attribute_token
from regard.inspection.head_ablation import HeadTable, ablate_heads
from regard.inspection.logit_lens import logit_lens_of
from regard.inspection.teacher_forcing import force_ids
from regard.recipe import Recipe
from regard.storage.run_dir import RunDir
from regard.tasks import Translator
from tests.browser.conftest import served
from tests.browser.pages import Open, texts, wait_for_text
from tests.unit.interop.test_html_export import rounded_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TEXT = "ein Hund dog"
SHOWN: tuple[Method, ...] = ("integrated_gradients", "occlusion", "gradient_x_input", "alti")
"""methods of attribution in the order of the page, without those of attention alone"""


@pytest.fixture(scope="module")
def model(finished_run: Path) -> Translator:
    return Translator.load(finished_run, "cpu")


def check(page: Page, model: Translator, outputs: list[int], text: str = TEXT) -> None:
    """The tables have the values of Python."""
    forced = force_ids(model, model.request(text), outputs)
    lens = logit_lens_of(model, forced)
    page.locator(".depth-table").first.wait_for()
    rows = page.locator(".depth-table").first.locator("tbody tr").all()
    assert [row.locator("th").text_content() for row in rows] == lens.depths[::-1]
    for row, expected in zip(rows, lens.candidates[::-1], strict=True):
        assert texts_of(row) == [shown(one[0].token.text) for one in expected]
    found = attribute_token(model, forced, 0)
    wait_for_text(page, ".attribution .finding", "in logits")
    finding = page.locator(".attribution .finding").text_content() or ""
    token, foil = (shown(one.text).lstrip("▁") for one in (found.token, found.foil))
    assert finding.startswith(f"{token} rather than {foil} by")
    page.locator(".attribution > .tabular button").first.click()
    table = page.locator(".attribution > .tabular table").first
    cells = [texts_of(row) for row in table.locator("tbody tr").all()]
    assert len(cells[0]) == len(found.scores) == 6
    for column, name in enumerate(SHOWN):
        size = float(abs(found.scores[name]).max())
        assert [float(row[column].replace("−", "-")) for row in cells] == pytest.approx(
            found.scores[name].tolist(), abs=1e-3 * max(1, size)
        ), name
    page.locator(".agreement button").first.click()
    rows = page.locator(".agreement table tbody tr").all()
    assert len(rows) == 6
    agreement = found.agreement()
    assert float(texts_of(rows[0])[1].replace("−", "-")) == pytest.approx(
        agreement["integrated_gradients", "occlusion"], abs=0.05
    )


def shown(text: str) -> str:
    """How the page writes a token: a byte as its character, if it is one by itself."""
    byte = re.fullmatch(r"<0x(..)>", text)
    if byte is None:
        return text
    return chr(int(byte[1], 16)) if int(byte[1], 16) < 0x80 else f"byte {byte[1]}"


def texts_of(row: object) -> list[str]:
    return row.locator("td").all_text_contents()  # type: ignore[attr-defined, no-any-return]


def test_lenses_in_a_file(open_file: Open, model: Translator) -> None:
    trace = model.trace(TEXT, lenses=True)
    page = open_file(trace, "#view=lenses&output=0")
    check(page, model, [token.id for token in trace.outputs])
    assert page.locator("select:visible").first.is_disabled(), "a file has one foil for each token"


def test_a_file_without_lenses_says_so(open_file: Open, model: Translator) -> None:
    page = open_file(model.trace(TEXT), "#view=lenses")
    wait_for_text(page, "#view-lenses .card", "--lenses")


def test_lenses_of_a_server(browser: Browser, address: str, model: Translator) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{address}/?text={TEXT}#view=lenses&output=0")
        check(page, model, [token.id for token in model.trace(TEXT).outputs])
        # Another foil.
        options = page.locator(".lenses select").first.locator("option")
        other = options.nth(1).get_attribute("value")
        page.locator(".lenses select").first.select_option(value=other)
        name = (options.first.text_content() or "").strip()
        wait_for_text(page, ".attribution .finding", f"rather than {name}" if name else "rather")
        assert f"foil={other}" in page.evaluate("location.hash")
        # Two sentences that cannot be compared.
        page.get_by_label("Another sentence").fill(f"{TEXT} {TEXT}")
        page.get_by_role("button", name="Compare").click()
        wait_for_text(page, ".lenses .status.wrong", "same number of tokens")


def check_architecture(page: Page, model: Translator, text: str) -> None:
    """The picture has the shapes and the numbers of Python, and opens other views."""
    forced = force_ids(model, model.request(text), [t.id for t in model.trace(text).outputs])
    expected = activations_of(model, forced)
    wait_for_text(page, ".part h3", "Embedding")
    boxes = page.locator(".stage")
    assert boxes.count() == len(expected.encoder.stages) + len(expected.decoder.stages) + 1
    near = embeddings(model).neighbours(forced.source[1].id)
    assert [one.strip() for one in texts(page, ".part .share .token")] == [
        shown(one.token.text) for one in near
    ]
    page.locator(".stage.feed_forward").first.click()
    wait_for_text(page, ".part h3", "Encoder layer 1: feed-forward")
    neurons = expected.encoder.hidden[0, 1]
    wait_for_text(page, ".part", f"{(neurons > 0).sum()} of {len(neurons)} neurons")
    strongest = abs(neurons).argsort()[::-1][0] + 1
    assert texts(page, ".part .share .token")[0] == f"neuron {strongest}"
    moved = expected.changes("encoder")[1, 1]
    percent = re.search(r"\((\d+(?:\.\d)?)%\)", page.locator(".part .change").text_content() or "")
    assert percent
    assert float(percent[1]) == pytest.approx(100 * moved, abs=0.6)
    page.locator(".stage.cross_attention").first.click()
    wait_for_text(page, ".part h3", "Decoder layer 1: cross-attention")
    page.locator(".links button").first.click()
    assert page.locator("#tab-heads").get_attribute("aria-selected") == "true"


def test_the_architecture_in_a_file(open_file: Open, model: Translator) -> None:
    check_architecture(open_file(model.trace(TEXT, lenses=True), "#view=architecture"), model, TEXT)


def test_a_file_without_activations_says_so(open_file: Open, model: Translator) -> None:
    page = open_file(model.trace(TEXT), "#view=architecture")
    wait_for_text(page, "#view-architecture .card", "--lenses")


def test_the_architecture_from_a_server(browser: Browser, address: str, model: Translator) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{address}/?text={TEXT}#view=architecture")
        check_architecture(page, model, TEXT)


def test_a_model_in_a_file_computes_the_same(
    browser: Browser, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    from regard.interop.html_export import export_html

    run = make_run(decoding={"max_length": 8}, model={"output_bias": True})
    export_html(run, tmp_path / "model.html")
    model = rounded_model(run)
    text = "The dog was tired."
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{(tmp_path / 'model.html').as_uri()}?text={text}#view=lenses&output=0")
        check(page, model, [token.id for token in model.trace(text).outputs], text)
        assert texts(page, ".by-depth dd")[0] == (model.translate([text], beam=1)[0] or "(empty)")
        page.locator("#tab-architecture").click()
        check_architecture(page, model, text)


# What each head is worth


def check_heads(page: Page, table: HeadTable) -> None:
    """The most important heads with their changes, all heads on request, and a row selects its head."""
    rows = page.locator(".head-table tbody tr")
    rows.first.wait_for()
    assert page.locator(".head-table tbody tr:visible").count() == min(8, len(table.effects))
    page.get_by_role("button", name=f"Show all {len(table.effects)} heads").click()
    names = {"encoder": "Encoder", "decoder": "Decoder", "cross_attention": "Cross-attention"}
    expected = [
        [
            f"{names[one.head.site]}, layer {one.head.layer + 1}, head {one.head.head + 1}",
            round(one.log_probability.value, 2),
            round(one.bleu.value, 1),
            *([round(one.correct.value, 1)] if one.correct else []),
        ]
        for one in table.ranked
    ]
    found = [
        [
            row.locator("th button").text_content(),
            *(float(b.replace("−", "-")) for b in row.locator(".change b").all_text_contents()),
        ]
        for row in rows.all()
    ]
    assert sorted(map(str, found)) == sorted(map(str, expected))
    assert [row[1] for row in found] == [row[1] for row in expected]
    assert page.locator(".head-table tbody tr:visible").count() == len(table.effects)
    page.locator(".head-table").get_by_role("button", name="Encoder, layer 2, head 1").click()
    wait_for_text(page, ".large .which", "Encoder, layer 2, head 1")


def test_the_worth_of_heads_in_a_file(open_file: Open, model: Translator) -> None:
    table = ablate_heads(model, ["ein Hund", "Hund"], ["a dog", "dog"])
    page = open_file(replace(model.trace(TEXT), head_table=table), "#view=heads")
    check_heads(page, table)
    assert "correct" not in (page.locator(".head-table").text_content() or "")
    table = ablate_heads(
        model,
        ["ein Hund", "Hund"],
        ["a dog", "dog"],
        correct=lambda i, text: i == 0,
        tested="pronouns",
    )
    page = open_file(replace(model.trace(TEXT), head_table=table), "#view=heads")
    check_heads(page, table)
    assert texts(page, ".head-table thead th")[-1] == "correct pronouns, points"
    wait_for_text(page, ".head-worth .finding", "and 1 of 2 pronouns correct with all heads.")
    page = open_file(model.trace(TEXT), "#view=heads")
    wait_for_text(page, ".head-worth", "This file does not have the measurement")


def test_the_worth_of_heads_of_a_server(
    browser: Browser,
    address: str,
    model: Translator,
    run_folder: Path,
    small_recipe: Callable[..., Recipe],
    tmp_path: Path,
) -> None:
    data = tmp_path / "valid.tsv"
    data.write_text("ein Hund\ta dog\nHund\tdog\n", encoding="utf-8")
    run = RunDir(run_folder)
    files = {"pairs": str(data)}
    run.write_recipe(
        small_recipe(
            data={"train": files, "valid": files}, tokenizer={"kind": "word", "vocab_size": 60}
        )
    )
    run.write_card({"note": "for tests"})
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{address}/?text={TEXT}#view=heads")
        wait_for_text(page, ".head-worth", "the validation data of the run are not on this server")
        with served(run_folder) as other:
            page.goto(f"{other}/?text={TEXT}#view=heads")
            page.get_by_role("button", name="What is each head worth?").click()
            check_heads(page, ablate_heads(model, ["ein Hund", "Hund"], ["a dog", "dog"]))
            # The next reader finds it.
            page.reload()
            page.locator(".head-table tbody tr").first.wait_for()
