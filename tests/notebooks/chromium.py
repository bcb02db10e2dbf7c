"""A headless browser for tests: skipped with a reason where there is none, a failure where CI promises one."""

import os

import pytest

from o1lab import plots

OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    path = plots.find_browser()
    if path is None:
        missing = "no Chromium or Chrome found; install one, or name it in O1LAB_BROWSER"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is in the extra dev")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=list(OPTIONS))
        yield opened
        opened.close()


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    yield context.new_page()
    context.close()
