"""The catalogue of leaks through the tools people use, beside the probe: found? false alarm? kind? place? seconds.

``python -m o1lab.memory.head_to_head`` makes the table. Each tool meets the leaking and the cured form of each case in
a process of its own, which has only imported torch before, and serves the same requests after the same warm-up. Which
rule decides for which tool, and where its documentation says so, is in :mod:`o1lab.memory.rivals`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from o1lab.errors import ProbeError
from o1lab.memory.rivals import TOOLS, Tool, case_names, find_case, tool
from o1lab.memory.rivals.cell import MISSING, run
from o1lab.memory.rivals.view import figure, summary, text

if TYPE_CHECKING:
    import pandas as pd

    from o1lab.memory.catalogue import Case

SECONDS = 120.0
RAN = "ran"

__all__ = ["Cell", "Comparison", "compare", "figure", "main", "summary", "text"]


def forms(case: Case) -> tuple[str, ...]:
    """The forms to run: one where both are the same (a workload that never leaked)."""
    return ("leaking",) if case.group == "null" else ("leaking", "cured")


@dataclass(frozen=True)
class Cell:
    """What one tool said about one form of one case.

    Attributes
    ----------
    tool, version, case, group, form : str
        ``version`` is empty if the tool is not installed; ``form`` is ``"leaking"`` or ``"cured"``.
    status : str
        ``"ran" | "not installed" | "not its job" | "needs CUDA" | "timed out" | "crashed"``; ``reason`` says more.
    found, alarm : bool or None
        Growth reported; and whether that is a false alarm (``None`` where a leak is to be found).
    kind, kind_right, place, names, place_right
        Kind and place as the tool names them, where it does, and whether they are right; ``names`` says whether the
        place is an ``"owner"`` or the allocating ``"line"``.
    seconds, served : float, int
        Wall time of the tool on this form, warm-up included; requests served.
    """

    tool: str
    version: str
    case: str
    group: str
    form: str
    status: str
    reason: str = ""
    found: bool | None = None
    alarm: bool | None = None
    kind: str = ""
    kind_right: bool | None = None
    place: str = ""
    names: str = ""
    place_right: bool | None = None
    seconds: float = 0.0
    served: int = 0


@dataclass(frozen=True)
class Comparison:
    """All cells and where they were measured (``about``: versions, machine, date, requests)."""

    cells: tuple[Cell, ...]
    about: dict[str, Any]

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        record = {"about": self.about, "cells": [asdict(cell) for cell in self.cells]}
        Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        """Read what :meth:`save` wrote.

        Raises
        ------
        ProbeError
            The file holds something else.
        """
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(tuple(Cell(**cell) for cell in record["cells"]), record["about"])
        except (ValueError, KeyError, TypeError) as error:
            raise ProbeError(f"{path} is no comparison ({error}); make one with --json") from error

    def table(self) -> pd.DataFrame:
        """One row per tool and case: what :func:`text` and :func:`figure` take."""
        import pandas as pd

        pairs: dict[tuple[str, str], dict[str, Cell]] = {}
        for cell in self.cells:
            pairs.setdefault((cell.tool, cell.case), {})[cell.form] = cell
        return pd.DataFrame([_row(list(both.values())) for both in pairs.values()])


def _row(cells: list[Cell]) -> dict[str, Any]:
    """The forms of one case by one tool as a row."""
    leaking = cells[0]
    failed = [cell for cell in cells if cell.status != RAN]
    is_leak = leaking.group == "leak"
    alarms = [cell.alarm for cell in cells if cell.alarm is not None]
    return {
        "tool": leaking.tool,
        "version": leaking.version,
        "case": leaking.case,
        "group": leaking.group,
        "status": failed[0].status if failed else RAN,
        "reason": failed[0].reason if failed else "; ".join(f"{cell.form}: {cell.reason}" for cell in cells),
        "found": leaking.found if is_leak and not failed else None,
        "false_alarm": any(alarms) if alarms and not failed else None,
        "kind": leaking.kind,
        "kind_right": leaking.kind_right,
        "names": leaking.names,
        "place": leaking.place,
        "place_right": leaking.place_right,
        "seconds": sum(cell.seconds for cell in cells),
    }


def compare(
    cases: Sequence[str] | None = None, tools: Sequence[str] | None = None, *, requests: int | None = None,
    seconds: float = SECONDS, jobs: int = 2,
) -> Comparison:  # fmt: skip
    """Run every tool on both forms of every case.

    Parameters
    ----------
    cases, tools : sequence of str, optional
        Names; all by default. A case may be ``"module:name"``.
    requests : int, optional
        Requests to judge, at least; by default as many as the case's settings give the probe at most.
    seconds : float
        Time limit of a cell in seconds; above it the cell is ended and says so.
    jobs : int
        Cells at a time. CUDA cells run one at a time in any case: several would see each other's device memory.

    Raises
    ------
    UnknownName
        A case or a tool that does not exist.
    """
    from o1lab.progress import progress

    found = {name: find_case(name) for name in cases or case_names()}
    chosen = [tool(name) for name in tools] if tools else list(TOOLS)
    cuda = _has_cuda()
    todo = [(name, case, one, form) for name, case in found.items() for one in chosen for form in forms(case)]
    device = threading.Lock()
    begun = time.perf_counter()
    with _preloaded() as context, ThreadPoolExecutor(max(1, jobs)) as pool:
        futures = {
            pool.submit(_cell, context, *one, requests, seconds, cuda, device): number
            for number, one in enumerate(todo)
        }
        done = progress(as_completed(futures), total=len(todo), label="head to head")
        cells = {futures[future]: future.result() for future in done}
    about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "device": cuda or platform.machine(),
        "requests": requests or "as suits each case",
        "seconds": round(time.perf_counter() - begun, 1),
        "rules": {one.name: f"{one.rule} ({one.source})" for one in chosen},
    }
    return Comparison(tuple(cells[number] for number in range(len(todo))), about)


def _has_cuda() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


@contextmanager
def _preloaded() -> Iterator[Any]:
    """Start processes from a server that has imported torch (where the system can fork), on one thread each."""
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    can_fork = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if can_fork else "spawn")
    if can_fork:
        context.set_forkserver_preload(["torch", "scipy.stats", "o1lab.memory.rivals.cell", "o1lab.memory.probe"])
    try:
        yield context
    finally:
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads


def _cell(
    context: Any, name: str, case: Case, one: Tool, form: str, requests: int | None, seconds: float, cuda: str,
    device: threading.Lock,
) -> Cell:  # fmt: skip
    version = one.version
    base: dict[str, Any] = {
        "tool": one.name, "version": version or "", "case": case.name, "group": case.group, "form": form,
    }  # fmt: skip
    if case.where == "cuda" and not cuda:
        return Cell(**base, status="needs CUDA", reason="the case needs a CUDA device")
    if one.sees == "cuda" and case.where != "cuda":
        return Cell(**base, status="not its job", reason="follows torch's CUDA allocator; this grows on the host")
    if one.kinds and case.group == "leak" and not set(one.kinds) & set(case.kinds):
        return Cell(**base, status="not its job", reason=f"looks for {' or '.join(one.kinds)} only")
    if version is None:
        return Cell(**base, status="not installed", reason=f"pip install {one.package}")
    if case.where == "cuda":
        with device:
            return _start(context, base, name, one.name, form, requests, seconds)
    return _start(context, base, name, one.name, form, requests, seconds)


def _start(
    context: Any, base: dict[str, Any], name: str, tool_name: str, form: str, requests: int | None, seconds: float
) -> Cell:
    """Run one cell in a process of its own and read what it wrote; end it, and what it started, after ``seconds``."""
    import psutil

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        out, log = Path(folder) / "found.json", Path(folder) / "log.txt"
        process = context.Process(target=run, args=(tool_name, name, form, requests, str(out), str(log)))
        begun = time.perf_counter()
        process.start()
        process.join(seconds)
        took = time.perf_counter() - begun
        if process.is_alive():
            try:
                children = psutil.Process(process.pid).children(recursive=True)
            except psutil.NoSuchProcess:  # it ended meanwhile
                children = []
            process.kill()
            for child in children:
                child.kill()
            process.join()
            return Cell(**base, status="timed out", reason=f"ended after {seconds:.0f} s", seconds=took)
        if process.exitcode == 0 and out.exists():
            said = json.loads(out.read_text(encoding="utf-8"))
            return Cell(**base, status=RAN, reason=said.pop("evidence"), **said)
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {process.exitcode}")
        status = "not installed" if process.exitcode == MISSING else "crashed"
        return Cell(**base, status=status, reason=last[:300], seconds=took)


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 1 if a cell crashed or timed out."""
    parser = argparse.ArgumentParser(prog="python -m o1lab.memory.head_to_head", description=__doc__)
    parser.add_argument("--cases", nargs="+", help="names of the catalogue (default: all)")
    parser.add_argument("--tools", nargs="+", help="of " + ", ".join(one.name for one in TOOLS))
    parser.add_argument("--requests", type=int, help="to judge, the same for every tool (default: as suits the case)")
    parser.add_argument("--timeout", type=float, default=SECONDS, help="seconds for a cell (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the record there")
    options = parser.parse_args(argv)
    found = compare(options.cases, options.tools, requests=options.requests, seconds=options.timeout, jobs=options.jobs)
    if options.json:
        found.save(options.json)
    print(text(found.table()))
    return int(any(cell.status in ("crashed", "timed out") for cell in found.cells))


if __name__ == "__main__":
    sys.exit(main())
