"""A browser, and the page in it: from a file and from a server.

Needs Playwright and Chromium ($CHROMIUM, or on the path). Tests are skipped with the reason if either is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from regard.data.pairs import Pair
from regard.data.tokenizer import Tokenizer
from regard.inspection.html_page import page as page_of
from regard.inspection.trace import Trace
from regard.nn.network import named_weights
from regard.recipe import Recipe
from regard.storage.run_dir import RunDir
from regard.tasks import build_network
from tests.browser.pages import Open

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(
    scope="package"
)  # closed before other tests run, because Playwright holds an event loop
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"]
    found = next(filter(None, map(shutil.which, filter(None, names))), None)
    if found is None:
        pytest.skip("Chromium not found: neither $CHROMIUM nor on the path")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_file(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens a trace saved as a file. At the end it checks that the page logged nothing and requested nothing."""
    problems: list[str] = []
    contexts = []

    def open_page(trace: Trace, link: str = "", **options: Any) -> Page:
        path = tmp_path / "page.html"
        path.write_text(page_of(trace), encoding="utf-8")
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        opened = context.new_page()
        opened.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.on(
            "request",
            lambda request: (
                None
                if request.url.split("#")[0] in (path.as_uri(), "data:,")
                else problems.append(f"request for {request.url}")
            ),
        )
        opened.goto(f"{path.as_uri()}{link}")
        return opened

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@contextmanager
def served(run: Path) -> Iterator[str]:
    """Serve a run in a process of its own; yields the address."""
    sources = str(Path(__file__).parents[2] / "src")
    server = subprocess.Popen(
        [sys.executable, "-m", "regard", "serve", str(run), "--port", "0"],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": sources,
        },
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1]
    finally:
        server.terminate()
        server.communicate(timeout=60)


@pytest.fixture(scope="package")
def address(finished_run: Path) -> Iterator[str]:
    with served(finished_run) as url:
        yield url


@pytest.fixture(scope="package")
def large_address(
    small_recipe: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A model with as many layers and heads as the paper's base model, so that its attention is large."""
    run = RunDir(tmp_path_factory.mktemp("runs") / "large")
    run.folder.mkdir()
    recipe = small_recipe(
        tokenizer={"kind": "word", "vocab_size": 60},
        model={"encoder_layers": 6, "decoder_layers": 6, "heads": 8},
        decoding={"beam": 1, "extra_length": 1},
    )
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: [Pair("a b", "c d")] * 5)
    run.write_recipe(recipe)
    tokenizer.save(run.folder)
    run.write_weights(named_weights(build_network(recipe, tokenizer)))
    run.write_card({"note": "for tests"})
    with served(run.folder) as url:
        yield url
