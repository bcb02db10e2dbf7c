"""Run notebooks headless: budgets, a progress line, the success rule, the manifest, and the report at the end."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from o1lab import collection, engine, hardware, lab, lab_view, paths, records
from o1lab.errors import RecordError, RunError
from o1lab.run_view import Line, finish_line, ledger_line, short, status_table


class Budget(NamedTuple):
    """Seconds that one cell and one notebook may take."""

    cell: float
    notebook: float


BUDGETS = {"smoke": Budget(120, 240), "full": Budget(600, 900)}


def run(
    names: Iterable[str] = (),
    *,
    preset: str = "auto",
    parameters: Mapping[str, Any] | None = None,
    results: str | Path | None = None,
    run_id: str | None = None,
    into: str | Path | None = None,
    cell_seconds: float | None = None,
    notebook_seconds: float | None = None,
    stream: TextIO | None = None,
) -> records.Run:
    """Execute notebooks one after another and write their records, the manifest and the report.

    A notebook counts as run only if it ended without exception and its last cell wrote a whole record with this
    run's id. One that does not count never stops the others. Ctrl-C stops the running kernel, keeps what was done,
    marks it and returns.

    Parameters
    ----------
    names : iterable of str
        Names, numbers or unique beginnings; none means every numbered notebook.
    preset : {"auto", "smoke", "full"}
    parameters : mapping, optional
        Values for notebook parameters; each goes to the notebooks that have it. A relative path is one from the
        caller's folder.
    results : path, optional
        Folder for the run's folder; default the lab's results folder.
    run_id : str, optional
        Name of the run's folder; default a new one.
    into : path, optional
        Write into this folder instead, also one of an earlier run: its other notebooks stay.
    cell_seconds, notebook_seconds : float, optional
        Budgets; defaults by preset, see ``BUDGETS``.
    stream : text stream, optional
        Where progress goes; default standard output.

    Returns
    -------
    Run
        As read back from the folder; ``problems`` also names a report that could not be written.

    Raises
    ------
    UnknownName
        Notebook, preset or parameter does not exist; nothing has run then.
    RunError
        A value has the wrong type, or a budget is not positive; nothing has run then.
    ResultsError
        The folder cannot be written to, or another run holds it.
    """
    stream = stream or sys.stdout
    chosen = {name: collection.parameters(name) for name in collection.resolve(names)}
    assigned = collection.assign(chosen, parameters or {})
    given = {name: collection.from_here(name, values) for name, values in assigned.items()}
    resolved = lab.resolve_preset(preset)
    cell, notebook = BUDGETS[resolved]
    budget = Budget(cell_seconds or cell, notebook_seconds or max(notebook, cell_seconds or 0))
    if min(budget) <= 0:
        raise RunError(f"budgets must be more than 0 seconds, not {budget.cell:g} and {budget.notebook:g}")
    folder = Path(into) if into else Path(results or paths.results()) / (run_id or records.new_run_id())
    folder = folder.resolve()
    with records.RunLock(folder):
        manifest = _manifest(folder, resolved, list(chosen))
        records.write_json(folder / "run.json", manifest)
        head = f"run {manifest['run_id']} · preset {resolved} · {manifest['device']} · {short(folder)}"
        print(head, file=stream, flush=True)
        try:
            for name, defaults in chosen.items():
                inject = dict(given[name])
                if preset != "auto" and "preset" in defaults:
                    inject.setdefault("preset", resolved)
                literal = {key: value for key, value in defaults.items() if value is not collection.UNKNOWN}
                _run_one(folder, manifest, name, inject, {**literal, **inject}, budget, stream)
        except KeyboardInterrupt:
            print("interrupted; writing what was done", file=stream)
            manifest["interrupted"] = True
            for entry in manifest["notebooks"]:
                if entry["status"] == "running":
                    entry.update(status="interrupted", detail="stopped by Ctrl-C")
        manifest["finished"] = records.now()
        records.write_json(folder / "run.json", manifest)
        return _conclude(folder, manifest, stream)


def _manifest(folder: Path, preset: str, chosen: list[str]) -> dict[str, Any]:
    """A new manifest, or that of the folder's earlier run with the chosen notebooks pending again."""
    environment = records.plain(hardware.environment())
    before: dict[str, Any] = {}
    if (folder / "run.json").exists():
        before = records.read_manifest(folder)
    kept = [entry for entry in before.get("notebooks", []) if entry.get("name") not in chosen]
    fresh = [{"name": name, "status": "pending", "seconds": 0.0, "detail": "", "parameters": {}} for name in chosen]
    return {
        "schema": records.SCHEMA,
        "run_id": before.get("run_id") or folder.name,
        "started": before.get("started") or records.now(),
        "finished": None,
        "preset": preset,
        "device": lab_view.device_words("cuda:0" if environment["cuda_usable"] else "cpu", environment),
        "lab": records.lab_state(),
        "environment": environment,
        "notebooks": sorted([*kept, *fresh], key=lambda entry: entry["name"]),
    }


def _run_one(
    folder: Path,
    manifest: dict[str, Any],
    name: str,
    inject: dict[str, Any],
    effective: dict[str, Any],
    budget: Budget,
    stream: TextIO,
) -> None:
    """Execute one notebook, judge it by the success rule and write its line of the manifest."""
    entry = next(item for item in manifest["notebooks"] if item["name"] == name)
    entry.update(status="running", parameters=records.plain(effective), started=records.now())
    records.write_json(folder / "run.json", manifest)
    output = folder / "notebooks" / f"{name}.ipynb"
    output.parent.mkdir(parents=True, exist_ok=True)
    records.record_path(folder, name).unlink(missing_ok=True)  # an earlier record must not count for this attempt
    execution = engine.Execution(
        cell_seconds=budget.cell,
        notebook_seconds=budget.notebook,
        environment=_environment(folder, manifest, effective),
        folder=paths.notebooks().resolve(),
        kernel_log=output.with_suffix(".kernel.log"),
    )
    started = time.monotonic()
    interrupted = False
    with Line(name, execution, stream):
        try:
            _execute(name, output, inject, execution)
            status, detail = _judge(folder, manifest["run_id"], name, execution)
        except engine.Stopped as stopped:
            status, detail = stopped.status, str(stopped)
        except KeyboardInterrupt:
            interrupted, status, detail = True, "interrupted", f"{execution.where()}: stopped by Ctrl-C"
    entry.update(status=status, seconds=round(time.monotonic() - started, 1), detail=detail, finished=records.now())
    mark = {"run_id": manifest["run_id"], "status": status, "detail": detail}
    engine.save(output, execution, mark, records.atomic_write)
    if execution.kernel_log.is_file() and not execution.kernel_log.stat().st_size:
        execution.kernel_log.unlink()
    records.write_json(folder / "run.json", manifest)
    print(finish_line(folder, entry), file=stream, flush=True)
    if interrupted:
        raise KeyboardInterrupt


def _environment(folder: Path, manifest: Mapping[str, Any], effective: Mapping[str, Any]) -> dict[str, str]:
    """Environment of the kernel: this process's, absolute folders, and what ties the session to the run."""
    kernel = dict(os.environ)
    for variable in ("O1LAB_NOTEBOOKS", "O1LAB_RESULTS", "O1LAB_CACHE"):
        if kernel.get(variable):  # the kernel runs in the notebooks' folder, a relative path would move with it
            kernel[variable] = os.path.abspath(kernel[variable])
    kernel.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads make a busy machine ten times slower
    return kernel | {
        "O1LAB_RUN_ID": manifest["run_id"],
        "O1LAB_RUN_DIR": str(folder),
        "O1LAB_PRESET": manifest["preset"],
        "O1LAB_HEADLESS": "1",
        "O1LAB_PARAMETERS": json.dumps(records.plain(effective)),
    }


def _execute(name: str, output: Path, inject: dict[str, Any], execution: engine.Execution) -> None:
    """Hand the notebook to papermill; a failing disk becomes a typed error."""
    import papermill

    try:
        papermill.execute_notebook(
            str(paths.notebooks() / f"{name}.ipynb"),
            str(output),
            parameters=inject,
            engine_name=engine.NAME,
            kernel_name="python3",
            language="python",
            progress_bar=False,
            autosave_cell_every=10,
            execution=execution,
        )
    except OSError as error:
        raise records.results_error(output.parent, error) from error


def _judge(folder: Path, run_id: str, name: str, execution: engine.Execution) -> tuple[str, str]:
    """The second half of the success rule: the last cell wrote a whole record that carries this run's id."""
    try:
        record = records.read_record(records.record_path(folder, name), run_id)
    except RecordError as error:
        return "no record", f"ran to its end, but {error}".replace(f"{folder}{os.sep}", "")
    if record.notebook != name:
        return "no record", f"ran to its end, but its record is of {record.notebook}; correct the name in o1lab.start"
    if record.finished < execution.last_started:
        return "no record", "ran to its end, but its last cell wrote no record; lab.finish() belongs in the last cell"
    return "ok", ""


def _conclude(folder: Path, manifest: dict[str, Any], stream: TextIO) -> records.Run:
    """Print the table and the ledger's summary, write the report, and read the run back."""
    done = records.read_run(folder)
    print(f"\n{status_table(done)}\n\n{ledger_line(done)}", file=stream)
    try:
        from o1lab import report

        print(f"report: {short(Path(report.write(folder)))}", file=stream, flush=True)
    except Exception as error:  # noqa: BLE001  (the run is on disk; whatever breaks the report must not lose it)
        problem = f"no report: {type(error).__name__}: {engine.first_line(str(error))}"
        print(f"{problem}; `python -m o1lab report {short(folder)}` tries again", file=stream, flush=True)
        done.problems.append(problem)
    return done


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``python -m o1lab run``."""
    parser.add_argument("names", nargs="*", metavar="NOTEBOOK", help="name, number or unique beginning (default: all)")
    parser.add_argument("--preset", default="auto", metavar="PRESET", help="auto (default), smoke or full")
    parser.add_argument("-p", "--parameter", action="append", default=[], metavar="NAME=VALUE", help="set a parameter")
    parser.add_argument("--model", metavar="NAME", help="short for -p model=NAME: your own model, where one is used")
    parser.add_argument("--seed", metavar="N", help="short for -p seed=N")
    parser.add_argument("--cell-seconds", type=float, metavar="S", help="budget of one cell (smoke 120, full 600)")
    parser.add_argument(
        "--notebook-seconds", type=float, metavar="S", help="budget of a notebook (smoke 240, full 900)"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--run-id", metavar="ID", help="name of the run's folder below the results folder")
    where.add_argument("--into", metavar="DIR", help="write into this folder; an earlier run's other notebooks stay")
    parser.add_argument("--list", action="store_true", help="list the notebooks and their parameters, run nothing")


def command(options: argparse.Namespace) -> int:
    """Run as asked; 0 if every notebook counts and the report is written, 1 if not, 130 after Ctrl-C."""
    if hasattr(sys.stdout, "reconfigure"):  # a terminal that cannot show '·' gets '?', not a traceback
        sys.stdout.reconfigure(errors="replace")
    if options.list:
        for name in collection.resolve(options.names) if options.names else collection.names():
            defaults = collection.parameters(name)
            taken = ", ".join(f"{key}={'…' if v is collection.UNKNOWN else repr(v)}" for key, v in defaults.items())
            print(f"{name}: {lab.notebook_title(name)}" + (f"\n    {taken}" if taken else ""))
        return 0
    given: dict[str, Any] = {}
    for pair in options.parameter:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise RunError(f"-p {pair} is no NAME=VALUE; write for example -p requests=500")
        given[name] = value
    given |= {name: value for name in ("model", "seed") if (value := getattr(options, name)) is not None}
    for wrong in ("cell_seconds", "notebook_seconds"):
        if getattr(options, wrong) is not None and not getattr(options, wrong) > 0:
            raise RunError(f"--{wrong.replace('_', '-')} must be more than 0")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stopped job is concluded like Ctrl-C
    done = run(
        options.names,
        preset=options.preset,
        parameters=given,
        run_id=options.run_id,
        into=options.into,
        cell_seconds=options.cell_seconds,
        notebook_seconds=options.notebook_seconds,
    )
    chosen = set(collection.resolve(options.names))
    statuses = {entry["status"] for entry in done.manifest["notebooks"] if entry["name"] in chosen}
    if done.manifest.get("interrupted"):
        return 130
    return 0 if statuses == {"ok"} and not done.problems else 1
