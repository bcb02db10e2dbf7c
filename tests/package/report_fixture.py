"""A run's folder for tests of the report, written through the real API: two notebooks ran, one failed, one waits."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from o1lab import plots, records
from o1lab.claims import Verdict, decide, load
from o1lab.stats import Estimate

RUN = "20260102-030405-beef"
EVIL = "<script>document.title='owned'</script>"
"""Put wherever a text comes from outside; a page that runs it has its title changed."""
ENVIRONMENT = {
    "python": "3.12.1", "torch": "2.13.0", "cuda_usable": False, "devices": [], "ram_bytes": 8 * 2**30,
    "libraries": {"plotly": "7.1.0"},
}  # fmt: skip


def figure(title: str = "One float keeps a whole row alive"):
    return plots.broken_vs_fixed(
        [0, 100, 200], [0, 50, 101], [0, 1, 1], title=title, x_title="requests", y_title="growth (KiB)",
        ideal=[0, 50, 100], labels={"broken": "keeps a view", "fixed": "keeps a mean"},
    )  # fmt: skip


def make_record(folder: Path, notebook: str, run_id: str, judged: dict, *, title: str, figures: list, **changes):
    """Write a record whose verdicts and estimates are ``judged``: claim → (outcome, reason, needs, estimate)."""
    record = records.Record(
        run_id=run_id, notebook=notebook, title=title, preset="smoke", seed=0, device="cpu · Test CPU",
        started="2026-01-02T03:04:05.000+00:00", finished="2026-01-02T03:04:17.000+00:00", seconds=12.0,
        parameters={"requests": 100}, environment=ENVIRONMENT, figures=figures,
        estimates={claim: item[3] for claim, item in judged.items() if item[3]},
        verdicts={claim: Verdict(claim, *item) for claim, item in judged.items()},
        **changes,
    )  # fmt: skip
    return records.write_record(folder, record)


def reason(claim: str, estimate: Estimate) -> str:
    return decide(load()[claim], estimate, set(load()[claim].needs)).reason


def keep_figure(folder: Path, notebook: str, name: str, title: str, caption: str, *, png: bool, signature=True) -> dict:
    drawn = figure(title)
    stem = f"figures/{notebook}--{name}"
    records.atomic_write(folder / f"{stem}.json", drawn.to_json())
    if png:
        records.atomic_write(folder / f"{stem}.png", PNG)
    return {
        "name": name, "title": title, "caption": caption, "json": f"{stem}.json",
        "png": f"{stem}.png" if png else None, "signature": signature,
    }  # fmt: skip


PNG = bytes.fromhex(  # one grey pixel
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c636800000082008177cd72b60000"
    "000049454e44ae426082"
)


def notebook_file(folder: Path, name: str, heading: str, outputs: list, *, source: str = "lab.run()") -> None:
    """Save an executed notebook of a heading, a wide table, and one code cell."""
    wide = "| " + " | ".join(f"column_{i}" for i in range(14)) + " |\n|" + "---|" * 14 + "\n|" + " a_value |" * 14
    cell = v4.new_code_cell(source, outputs=outputs, execution_count=1)
    nb = v4.new_notebook(cells=[v4.new_markdown_cell(f"# {heading}\n\n{wide}"), cell])
    records.atomic_write(folder / "notebooks" / f"{name}.ipynb", nbformat.writes(nb))


def shown(caption: str, name: str) -> dict:
    """The display output of a figure as :func:`o1lab.plots.show` publishes it, without a picture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("O1LAB_BROWSER", "none")
        return v4.new_output(
            "display_data", plots.show(figure(), caption), metadata={"o1lab": {"figure": name, "name": name}}
        )


def build(folder: Path, run_id: str = RUN, *, evil: str = "", png: bool = True, **manifest) -> Path:
    """Make a whole run in ``folder`` and return it."""
    size = Estimate(786_432.0, 700_000.0, 800_000.0, 10, "B/graph")
    none = Estimate(1.0, -6.0, 29.0, 12, "B/request")
    caption = f"1,444 B per request with the view, 12 with the mean.{evil}"
    leak = keep_figure(folder, "01_memory_leak", "leak", f"A view keeps 1,444 B{evil}", caption, png=png)
    other = keep_figure(folder, "01_memory_leak", "other", "Not the signature", "A second figure.", png=False,
                        signature=False)  # fmt: skip
    graphs = keep_figure(folder, "00_start_here", "graphs", "8 graphs", "8 graphs by default.", png=False)
    make_record(
        folder, "01_memory_leak", run_id, title=f"01 · Find a leak{evil}", figures=[leak, other],
        notes=[f"Smaller model here.{evil}"],
        judged={
            "leak-cause/host": ("supported", reason("leak-cause/host", size), (), size),
            "leak-rate": ("not evaluated", "needs an NVIDIA GPU that torch can use", ("cuda",), None),
            "leak-rate/host": ("refuted", reason("leak-rate/host", none) + evil, (), none),
            "gone-claim": ("inconclusive", "the interval holds the bound", (), None),
        },
    )  # fmt: skip
    count = Estimate(8, 8, 8, 3, "graphs")
    make_record(
        folder, "00_start_here", run_id, title="00 · Start here", figures=[graphs],
        judged={"leak-cause/default-limit": ("refuted", reason("leak-cause/default-limit", count), (), count)},
    )  # fmt: skip
    error = v4.new_output(
        "error", ename="ValueError", evalue=f"bad{evil}", traceback=[f"\x1b[31mValueError\x1b[0m: {evil}"]
    )
    log = [v4.new_output("stream", name="stderr", text=f"warning {i}{evil}\n") for i in range(3)]
    html = v4.new_output("display_data", {"text/html": f"<b>bold</b>{evil}", "text/plain": "bold"})
    notebook_file(folder, "00_start_here", "00 · Start here", [shown("8 graphs by default.", "graphs")])
    notebook_file(folder, "01_memory_leak", f"01 · Find a leak{evil}", [*log, shown(caption, "leak"), html],
                  source=f"print('{evil}')")  # fmt: skip
    notebook_file(folder, "02_broken", f"02 · Broken{evil}", [error])
    ok = {"status": "ok", "detail": "", "parameters": {"requests": 100}}
    content = {
        "schema": 1, "run_id": run_id, "started": "2026-01-02T03:04:05.000+00:00",
        "finished": "2026-01-02T03:10:05.000+00:00", "preset": "smoke", "device": f"cpu · Test CPU{evil}",
        "lab": {"version": "0.1.0", "commit": "0123456789abcdef0123", "dirty": True}, "environment": ENVIRONMENT,
        "notebooks": [
            {"name": "00_start_here", "seconds": 12.0, **ok},
            {"name": "01_memory_leak", "seconds": 84.1, **ok},
            {"name": "02_broken", "status": "failed", "seconds": 3.0, "parameters": {},
             "detail": f"cell 2/2 (Reproduce): ValueError: bad{evil}"},
            {"name": "03_never", "status": "pending", "seconds": 0.0, "detail": "", "parameters": {}},
        ],
        **manifest,
    }  # fmt: skip
    records.write_json(folder / "run.json", content)
    return folder
