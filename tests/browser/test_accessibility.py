"""Every view passes axe-core's checks for WCAG 2.1 AA, in both themes, and no view is too long for a phone."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from regard.inspection.head_ablation import ablate_heads
from regard.inspection.html_page import page as page_of
from regard.tasks import Translator
from tests.browser.pages import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

AXE = "axe-core@4.10.3"
VIEWS = (
    *("translate", "architecture", "heads", "beam", "intervene", "lenses", "weight", "training"),
    "tour",
)
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}
LONGEST = 2600
"""pixels of a view on a phone: about three screens"""
TARGETS = "button:not(.word, .thumb, .token-choice, .node), select, summary, .check"
"""what a finger must hit; words and thumbnails lie side by side, and a neighbour does no harm"""
TOO_LOW = """all => all.filter(one => one.checkVisibility() && one.getBoundingClientRect().height < 44)
  .map(one => one.outerHTML.slice(0, 120))"""


@pytest.fixture(scope="session")
def axe(request: pytest.FixtureRequest) -> str:
    """The source of axe-core, downloaded once from the npm registry."""
    cache = request.config.cache
    assert cache is not None
    folder = cache.mkdir("axe-core")
    script = folder / f"{AXE}.js"
    if not script.is_file():
        if shutil.which("npm") is None:
            pytest.skip("axe-core is not here, and npm, which downloads it, is not installed")
        command = ["npm", "pack", AXE, "--silent", "--pack-destination", str(folder)]
        result = subprocess.run(command, capture_output=True, timeout=120, check=False)
        if result.returncode != 0:
            pytest.skip(f"{AXE} could not be downloaded from the npm registry")
        with tarfile.open(next(folder.glob("*.tgz"))) as archive:
            source = archive.extractfile("package/axe.min.js")
            assert source is not None
            script.write_bytes(source.read())
    return script.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def file(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything in it."""
    model = Translator.load(finished_run, "cpu")
    table = ablate_heads(model, ["ein Hund", "Hund"], ["a dog", "dog"])
    trace = replace(model.trace("ein Hund dog", lenses=True), head_table=table)
    path = tmp_path_factory.mktemp("pages") / "page.html"
    path.write_text(page_of(trace), encoding="utf-8")
    return path


def violations(page: Page, axe: str) -> list[str]:
    page.evaluate(f"{axe}; 0")
    found: dict[str, Any] = page.evaluate("rules => axe.run(document, rules)", RULES)
    return [
        f"{one['id']}: {node['html'][:120]} {' '.join(node['failureSummary'].split())[:200]}"
        for one in found["violations"]
        for node in one["nodes"]
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_views_are_accessible(browser: Browser, file: Path, axe: str, theme: Any) -> None:
    with browser.new_context(color_scheme=theme) as context:
        page = context.new_page()
        problems = {}
        for view in VIEWS:
            page.goto("about:blank")
            page.goto(f"{file.as_uri()}#view={view}&output=1")
            page.locator(f"#view-{view} > *").nth(1).wait_for()
            page.wait_for_timeout(200)
            if found := violations(page, axe):
                problems[view] = found
        assert not problems, problems


def test_the_served_page_is_accessible(browser: Browser, address: str, axe: str) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{address}/?text=ein+Hund#view=intervene&mute=encoder.0.0")
        page.locator(".compare").first.wait_for()
        assert violations(page, axe) == []
        page.goto(f"{address}/?text=ein+Hund#view=tour")
        page.locator(".tour-contents a").first.click()
        page.locator(".tour-step h2").wait_for()
        assert violations(page, axe) == []


@pytest.mark.parametrize("view", VIEWS)
def test_no_view_is_long_or_wide_on_a_phone(browser: Browser, file: Path, view: str) -> None:
    viewport = {"width": 390, "height": 844}
    with browser.new_context(viewport=viewport, has_touch=True, is_mobile=True) as context:  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(f"{file.as_uri()}#view={view}&output=1")
        page.locator(f"#view-{view} > *").nth(1).wait_for()
        until(page, "document.fonts.status === 'loaded'")
        width, height = page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        )
        assert width <= 390
        assert height <= LONGEST
        assert page.locator(TARGETS).evaluate_all(TOO_LOW) == []
