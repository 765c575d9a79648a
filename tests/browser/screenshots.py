"""The pictures of docs/page.md: every view, by day and by night.

    python -m tests.browser.screenshots runs/demo                                # writes docs/images/page-*.png
    python -m tests.browser.screenshots --rounds runs/multi30k-parallel          # the view of all words at once

The run is the demo's: it can translate the sentence.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
TEXT = "The dog didn't cross the street because it was too tired."
VIEWS = {
    "translate": "#said=8",
    "heads": "#view=heads&pane=cross&layer=1&head=0",
    "beam": "#view=beam",
    "interfere": "#view=interfere&mute=cross_attention.1.2,cross_attention.1.0",
    "number": "#view=number&pane=cross&layer=1&head=0&query=8&key=1",
    "learning": "#view=learning&step=500",
    "story": "#view=heads&story=10&arrive=1",
}
"""where each view is at its best"""
CAPTION = "Two young men are playing football in the snow while a brown dog watches them."
ROUNDS = {"iterations": "#view=rounds"}
"""of a model that says all words at once, which has no beam"""
WIDTH, HEIGHT, TALLEST, MARGIN = 1200, 900, 1500, 10
CARDS = """all => all.map(one => one.getBoundingClientRect())
  .map(box => [box.top + scrollY, box.bottom + scrollY])"""
"""where each card begins and ends"""
COLOURS = 256
"""few enough for small files, enough for a scale of weights"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", action="store_true", help="the run says all words at once")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    from browser.conftest import FLAGS, served
    from playwright.sync_api import sync_playwright

    text, views = (CAPTION, ROUNDS) if options.iterations else (TEXT, VIEWS)
    with sync_playwright() as running, served(options.run) as address:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for scheme in ("light", "dark"):
            size = {"d_model": WIDTH, "height": HEIGHT}
            page = browser.new_context(viewport=size, color_scheme=scheme).new_page()  # type: ignore[arg-type]
            for name, where in views.items():
                page.goto("about:blank")
                page.goto(f"{address}/{where}&q={text.replace(' ', '+')}")
                page.locator(".view:not([hidden]) *").first.wait_for()
                page.wait_for_timeout(2000)  # until layers have come and colours have faded in
                shown = page.screenshot(full_page=True)
                top = 0 if name == "translate" else page.locator("main").bounding_box()["y"] - 16  # type: ignore[index]
                cards = page.locator(".view:not([hidden]) .card").evaluate_all(CARDS)
                bottom = end(cards, top + TALLEST) + MARGIN
                write(shown, int(top), int(bottom), IMAGES / f"page-{name}-{scheme}.png")
        browser.close()


def end(cards: list[tuple[float, float]], lowest: float) -> float:
    """The lowest end of a card that is not below, and not inside of another card."""
    ends = [end for _, end in cards if end <= lowest]
    return max(one for one in ends if not any(top < one < end for top, end in cards))


def write(shown: bytes, top: int, bottom: int, path: Path) -> None:
    picture = Image.open(io.BytesIO(shown)).convert("RGB")
    picture = picture.crop((0, top, WIDTH, min(picture.height, bottom)))
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
