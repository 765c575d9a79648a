"""The screenshots in docs/inspection.md: every view, in the light and the dark theme.

    python -m tests.browser.screenshots runs/demo                                # writes docs/images/page-*.png
    python -m tests.browser.screenshots --iterations RUN           # the view of a non-autoregressive model

Both runs are trained on the demo's corpus, so that they can translate the sentence.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image

from tests.browser.conftest import FLAGS, served
from tests.browser.pages import until

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
TEXT = "The dog didn't cross the street because it was too tired."
VIEWS = {
    "translate": "#output=8",
    "architecture": "#view=architecture&stage=decoder.1.cross_attention&output=8",
    "heads": "#view=heads&site=cross_attention&layer=1&head=0",
    "beam": "#view=beam",
    "intervene": "#view=intervene&mute=cross_attention.1.2,cross_attention.1.0",
    "lenses": "#view=lenses&output=8&against=The+dog+didn't+cross+the+street+because+it+was+too+wide.",
    "weight": "#view=weight&site=cross_attention&layer=1&head=0&query=8&key=1",
    "training": "#view=training&step=500",
    "tour": "#view=heads&tour=11&arrive=1",
}
"""the link of each view"""
ITERATIONS = {"iterations": "#view=iterations"}
"""the view that only non-autoregressive models have"""
WIDTH, HEIGHT, TALLEST, MARGIN = 1200, 900, 1700, 10
CARDS = """all => all.map(one => one.getBoundingClientRect())
  .map(box => [box.top + scrollY, box.bottom + scrollY])"""
"""top and bottom of each card"""
IDLE = """![...document.querySelectorAll(".status")].some(one => one.checkVisibility() && one.textContent)"""
"""nothing is being computed"""
COLOURS = 256
"""few enough for small files, enough for the colour scale"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--iterations", action="store_true", help="the model is non-autoregressive")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    text, views = TEXT, ITERATIONS if options.iterations else VIEWS
    with sync_playwright() as running, served(options.run) as address:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for scheme in ("light", "dark"):
            size = {"width": WIDTH, "height": HEIGHT}
            page = browser.new_context(viewport=size, color_scheme=scheme).new_page()  # type: ignore[arg-type]
            for name, link in views.items():
                page.goto("about:blank")
                page.goto(f"{address}/{link}&q={text.replace(' ', '+')}")
                page.locator(".view:not([hidden]) *").first.wait_for()
                page.wait_for_timeout(1000)
                until(page, IDLE)
                for y in (
                    "document.body.scrollHeight",
                    "0",
                ):  # what is below is drawn when it is seen
                    page.evaluate(f"scrollTo({{ top: {y}, behavior: 'instant' }})")
                    page.wait_for_timeout(500)
                until(page, IDLE)
                page.wait_for_timeout(1000)  # until layers are loaded and colours have faded in
                shown = page.screenshot(full_page=True)
                top = 0 if name == "translate" else page.locator("main").bounding_box()["y"] - 6  # type: ignore[index]
                cards = page.locator(".view:not([hidden]) .card").evaluate_all(CARDS)
                bottom = end(cards, top + TALLEST) + MARGIN
                write(shown, int(top), int(bottom), IMAGES / f"page-{name}-{scheme}.png")
        browser.close()


def end(cards: list[tuple[float, float]], lowest: float) -> float:
    """The lowest bottom edge of a card above this limit that does not cut through another card."""
    ends = [end for _, end in cards if end <= lowest]
    return max(one for one in ends if not any(top < one < end for top, end in cards))


def write(shown: bytes, top: int, bottom: int, path: Path) -> None:
    picture = Image.open(io.BytesIO(shown)).convert("RGB")
    picture = picture.crop((0, top, WIDTH, min(picture.height, bottom)))
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
