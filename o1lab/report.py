"""The report of a run: an offline folder of HTML pages, and two runs side by side. See ``o1lab/templates``."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import jinja2

from o1lab import claims, paths, records, report_pages, report_view
from o1lab.errors import O1labError, RecordError, UnknownName

TEMPLATES = Path(__file__).with_name("templates")


def write(run_dir: str | Path) -> Path:
    """Write the report of a run into its folder; whatever cannot be read is named on the page, the rest is shown.

    Parameters
    ----------
    run_dir : path
        Result folder of a run, finished or not.

    Returns
    -------
    Path
        ``index.html``, which opens from disk without a network.

    Raises
    ------
    RecordError
        If the folder holds no run.
    ResultsError
        If it cannot be written to.
    """
    folder = Path(run_dir)
    run = records.read_run(folder)
    ledger = claims.load()
    problems = [problem.replace(f"{folder}/", "") for problem in run.problems]
    shown = report_view.notebooks(run, ledger)
    pages = {item.name: page for item in shown if (page := _pages(folder, item, shown, problems))}
    sections = [(item, pages.get(item.name), _signatures(folder, item, problems)) for item in shown]
    for item in shown:
        if item.record is None and item.name in run.records:
            problems.append(f"the record of {item.name} is not counted, because the notebook ended as {item.status}")
    _assets(folder)
    rows = [row for item in shown for row in item.rows]
    judged = {row.id for row in rows}
    rest = [claim for claim in ledger.values() if claim.id not in judged and report_view.visible(claim.id, ledger)]
    page = _environment().get_template("index.html")
    html = page.render(
        run=run.manifest,
        run_id=run.manifest.get("run_id") or folder.name,
        sections=sections,
        tally=report_view.tally([row for row in rows if not row.needs]),
        undecided=[row for row in rows if row.needs],
        elsewhere=[claim for claim in rest if claim.notebook_exists()],
        unwritten=[claim for claim in rest if not claim.notebook_exists()],
        environment=report_view.flat(run.manifest.get("environment") or {}),
        problems=problems,
    )
    return records.atomic_write(folder / "index.html", html)


def _pages(
    folder: Path, item: report_view.Notebook, everything: list[report_view.Notebook], problems: list[str]
) -> dict[str, str] | None:
    """Write both pages of a notebook; return its title and their names, or ``None`` if nothing was executed."""
    if not item.executed:
        return None
    try:
        notebook = report_pages.read_notebook(folder / "notebooks" / f"{item.name}.ipynb")
        bodies = {code: report_pages.body(notebook, item.name, folder, code=code) for code in (False, True)}
    except RecordError as error:
        problems.append(str(error))
        return None
    title = report_pages.title_of(notebook, item.title)
    names = {False: f"{item.name}.html", True: f"{item.name}.code.html"}
    linked = [other for other in everything if other.executed]
    place = next(index for index, other in enumerate(linked) if other.name == item.name)
    for code, html in bodies.items():
        page = (
            _environment()
            .get_template("notebook.html")
            .render(
                item=item,
                title=title,
                code=code,
                body=html,
                names=names,
                suffix=".code.html" if code else ".html",
                before=linked[place - 1] if place else None,
                after=linked[place + 1] if place + 1 < len(linked) else None,
            )
        )
        records.atomic_write(folder / names[code], page)
    return {"title": title, "plain": names[False], "code": names[True]}


def _signatures(folder: Path, item: report_view.Notebook, problems: list[str]) -> list[str]:
    """The figures that stand for a notebook, as HTML."""
    drawn = []
    for entry in item.record.figures if item.record else []:
        if entry.get("signature"):
            try:
                drawn.append(report_pages.kept_figure(folder, entry, f"{item.name}--{entry['name']}"))
            except RecordError as error:
                problems.append(str(error))
    return drawn


def _assets(folder: Path) -> None:
    """Put the shared files beside the pages."""
    from plotly.offline import get_plotlyjs

    style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    records.atomic_write(folder / "style.css", f"{style}\n{report_pages.code_style()}\n")
    records.atomic_write(folder / "report.js", (TEMPLATES / "report.js").read_bytes())
    script = get_plotlyjs().encode()
    target = folder / "plotly.min.js"
    if not target.is_file() or target.stat().st_size != len(script):
        records.atomic_write(target, script)


@functools.cache
def _environment() -> jinja2.Environment:
    """Templates with everything escaped unless a template says that it is HTML already."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals |= {"sign": report_view.sign}
    environment.filters |= {"moment": _moment, "duration": _duration, "lab": _lab}
    return environment


def _moment(time: Any) -> str:
    """``2026-11-30 05:24 UTC`` of an ISO time."""
    return f"{time[:10]} {time[11:16]} UTC" if isinstance(time, str) and len(time) >= 16 else "not finished"


def _duration(seconds: float) -> str:
    """``84 s`` or ``6 min 05 s``."""
    whole = round(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60:02d} s"


def _lab(state: dict[str, Any] | None) -> str:
    """Version and commit of the lab in words."""
    state = state or {}
    commit = state.get("commit")
    if not commit:
        return f"o1lab {state.get('version', 'of unknown version')}, commit unknown"
    return f"o1lab {state.get('version')}, commit {commit[:10]}" + (", with uncommitted changes" * bool(state["dirty"]))


def compare(run_a: str | Path, run_b: str | Path, out: str | Path | None = None) -> Path:
    """Write two runs side by side: the same claims, changed verdicts marked, what differs in their environment.

    Parameters
    ----------
    run_a, run_b : path
        Result folders.
    out : path, optional
        The HTML file, whole in itself; default ``compare--<run A>.html`` in B's folder.

    Raises
    ------
    RecordError
        If a folder holds no run.
    ResultsError
        If the page cannot be written.
    """
    ledger = claims.load()
    runs = [records.read_run(path) for path in (run_a, run_b)]
    names = [str(run.manifest.get("run_id") or run.folder.name) for run in runs]
    sides = [{row.id: row for item in report_view.notebooks(run, ledger) for row in item.rows} for run in runs]
    order = [claim for claim in ledger if claim in sides[0] or claim in sides[1]]
    order += sorted({*sides[0], *sides[1]} - set(order))
    pairs = [report_view.Pair(sides[0].get(claim), sides[1].get(claim)) for claim in order]
    html = (
        _environment()
        .get_template("compare.html")
        .render(
            names=names,
            runs=[run.manifest for run in runs],
            pairs=pairs,
            changed=[pair for pair in pairs if pair.changed],
            shared=sum(1 for pair in pairs if pair.a and pair.b),
            differs=report_view.differing([run.manifest for run in runs]),
            problems=[f"{name}: {line}" for name, run in zip(names, runs, strict=True) for line in run.problems],
            style=(TEMPLATES / "style.css").read_text(encoding="utf-8"),
        )
    )
    target = Path(out) if out else Path(run_b) / f"compare--{names[0]}.html"
    return records.atomic_write(target, html)


def find(name: str) -> Path:
    """The folder of a run: a path, a run id below the results folder, or an id's unique beginning.

    Raises
    ------
    UnknownName
        If no run has that name.
    """
    root = paths.results()
    known = sorted(path.parent.name for path in root.glob("*/run.json"))
    if name in known:
        return root / name
    if Path(name).is_dir():
        return Path(name)
    begins = [run for run in known if name and run.startswith(name)]
    if len(begins) == 1:
        return root / begins[0]
    raise UnknownName("run", name, known, f"name a run in {root} or its folder")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``python -m o1lab report``."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="run id or folder (default: the newest finished run)")
    parser.add_argument("other", nargs="?", metavar="RUN_B", help="a second run, to compare with the first")
    parser.add_argument("--out", metavar="FILE", help="where the comparison goes (default: in RUN_B's folder)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def problems_of(run: Path) -> list[str]:
    """What could not be read of a run; the page shows it too."""
    return records.read_run(run).problems


def command(options: argparse.Namespace) -> int:
    """Write the report or the comparison and print where it is; 1 if a part of a run could not be read."""
    if options.out and not options.other:
        raise O1labError("--out is for a comparison; name two runs, or leave it out: a report lies in its run's folder")
    first = find(options.run) if options.run else records.latest_run()
    page = compare(first, find(options.other), options.out) if options.other else write(first)
    print(page)
    problems = [
        line for run in ([first, find(options.other)] if options.other else [first]) for line in problems_of(run)
    ]
    for line in problems:
        print(f"o1lab: {line}", file=sys.stderr)
    if options.open:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
    return 1 if problems else 0
