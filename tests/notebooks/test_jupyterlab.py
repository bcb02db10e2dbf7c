"""A person's first minutes: JupyterLab opens 00_start_here, all cells run, the figure is drawn, nothing goes wrong."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest
from notebooks.chromium import browser, page  # noqa: F401 (fixtures)

from o1lab import paths, records

NOTEBOOK = "00_start_here"
START_SECONDS, RUN_SECONDS = 60, 100
FIGURE = ".jp-RenderedPlotly svg.main-svg"
"""What JupyterLab draws where plotly's extension is on; a picture from the bundle is a figure too."""
PICTURE = ".jp-OutputArea-output img[src^='data:image/png']"
ERROR = ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']"
QUIET = {"@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


@pytest.fixture
def lab(tmp_path):
    """A JupyterLab of this interpreter on loopback, with settings, data and results of its own."""
    root = tmp_path / "notebooks"
    root.mkdir()
    for notebook in (paths.PACKAGE.parent / "notebooks").glob("*.ipynb"):
        shutil.copy(notebook, root)
    for name, setting in QUIET.items():
        file = tmp_path / "settings" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(setting))
    own = {
        "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces", "IPYTHONDIR": "ipython",
        "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime",
        "O1LAB_RESULTS": "results", "O1LAB_NOTEBOOKS": "notebooks",
    }  # fmt: skip
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("O1LAB_", "JUPYTER"))}
    kept |= {key: value for key, value in os.environ.items() if key in ("O1LAB_BROWSER", "O1LAB_CACHE")}
    port = free_port()
    words = [
        "--no-browser", "--allow-root", "--IdentityProvider.token=", "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={root}",
    ]  # fmt: skip
    log = tmp_path / "jupyter.log"
    with log.open("w") as stream:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyter", "lab", *words], stdout=stream, stderr=subprocess.STDOUT, cwd=root,
            env={**kept, **{name: str(tmp_path / folder) for name, folder in own.items()}}, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START_SECONDS
        while not answers(f"{url}/api/status"):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.3)
        yield url, tmp_path
    finally:
        server.send_signal(signal.SIGTERM)  # the server ends its kernels
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(5)


def scroll_through(page, seen) -> None:  # noqa: F811
    """Walk down the notebook, which only holds the cells near the window, and call ``seen`` at each stop."""
    panel = page.locator(".jp-WindowedPanel-outer:visible").first
    panel.hover()
    page.mouse.wheel(0, -100_000)
    before = None
    for _ in range(80):
        page.wait_for_timeout(300)
        seen()
        at = panel.evaluate("panel => [panel.scrollTop, panel.scrollHeight]")
        if at == before:
            return
        before = at
        page.mouse.wheel(0, 450)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="servers are stopped by POSIX signals here")
def test_run_all_cells_in_jupyterlab(lab, page):  # noqa: F811
    url, folder = lab
    elsewhere, broken = [], []
    page.on(
        "request", lambda r: elsewhere.append(r.url) if not r.url.startswith((url, "data:", "blob:", "ws:")) else None
    )
    page.on("pageerror", lambda error: broken.append(str(error)))
    page.goto(f"{url}/lab/tree/{NOTEBOOK}.ipynb")
    page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=START_SECONDS * 1000)
    page.locator("#jp-main-statusbar", has_text=re.compile(r"\| Idle")).wait_for(timeout=START_SECONDS * 1000)

    page.get_by_role("menuitem", name="Run", exact=True).click()
    whole = page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$"))
    page.locator(".lm-Menu-item:not(.lm-mod-disabled)", has=whole).click()

    end, idle = time.monotonic() + RUN_SECONDS, 0
    while not list((folder / "results").glob(f"*/records/{NOTEBOOK}.json")):
        assert not page.locator(".jp-Dialog").count(), page.locator(".jp-Dialog").first.inner_text()
        assert not page.locator(ERROR).count(), page.locator(ERROR).first.inner_text()
        idle = idle + 1 if page.locator("#jp-main-statusbar", has_text="| Idle").count() else 0
        assert idle < 40, "the kernel is idle, but the last cell wrote no record: a cell failed or never ran"
        assert time.monotonic() < end, "the last cell wrote no record in time"
        page.wait_for_timeout(300)
    page.locator(".jp-NotebookPanel .jp-Notebook-ExecutionIndicator[data-status='idle']").wait_for(timeout=20_000)

    found = {"drawn": 0, "pictures": 0, "errors": 0, "ledger": 0}

    def look() -> None:
        for name, selector in (("drawn", FIGURE), ("pictures", PICTURE), ("errors", ERROR)):
            found[name] += page.locator(selector).filter(visible=True).count()
        ledger = page.locator(".jp-OutputArea-output table", has_text="leak-cause/default-limit")
        found["ledger"] += ledger.filter(has_text="verdict").filter(visible=True).count()

    scroll_through(page, look)
    assert found["drawn"] or found["pictures"], f"no figure that a person would see: {found}"
    assert found["errors"] == 0
    assert found["ledger"], "the last cell shows no ledger"
    assert page.locator(".jp-Dialog").count() == 0
    assert elsewhere == [], "JupyterLab asked the network"
    assert broken == []

    page.keyboard.press("Control+s")
    saved = saved_notebook(folder / "notebooks" / f"{NOTEBOOK}.ipynb", page)
    code = [cell for cell in saved.cells if cell.cell_type == "code" and cell.source.strip()]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    [record] = (folder / "results").glob(f"*/records/{NOTEBOOK}.json")
    verdicts = records.read_record(record).verdicts
    assert verdicts["leak-cause/default-limit"].outcome in ("supported", "refuted")


def saved_notebook(path: Path, page) -> nbformat.NotebookNode:  # noqa: F811
    """The notebook once JupyterLab has saved it with its outputs."""
    for _ in range(40):
        notebook = nbformat.read(path, as_version=4)
        if notebook.cells[-1].get("outputs"):
            return notebook
        page.wait_for_timeout(250)
    raise AssertionError("JupyterLab did not save the notebook")
