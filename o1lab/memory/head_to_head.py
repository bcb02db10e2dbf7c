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
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from o1lab import paths
from o1lab.errors import O1labError
from o1lab.memory.rivals import TOOLS, Tool, case_names, find_case, tool
from o1lab.memory.rivals.cell import MISSING, run
from o1lab.memory.rivals.record import RAN, Cell, Comparison
from o1lab.memory.rivals.view import figure, summary, text
from o1lab.options import new_file, seconds, whole

if TYPE_CHECKING:
    from o1lab.memory.catalogue import Case

SECONDS = 120.0
SHIPPED = paths.PACKAGE.parent / "results" / "reference" / "2026-11-30-leak-tools" / "cpu.json"

__all__ = ["Cell", "Comparison", "compare", "figure", "main", "summary", "text"]


def forms(case: Case) -> tuple[str, ...]:
    """The forms to run: one where both are the same (a workload that never leaked)."""
    return ("leaking",) if case.group == "null" else ("leaking", "cured")


def compare(
    cases: Sequence[str] | None = None, tools: Sequence[str] | None = None, *, requests: int | None = None,
    seconds: float = SECONDS, jobs: int = 2,
) -> Comparison:  # fmt: skip
    """Run every tool on both forms of every case. A script calls it under ``if __name__ == "__main__":``.

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


def shipped() -> Comparison | None:
    """The comparison recorded on two CPU cores that comes with the repository; ``None`` where only the package is."""
    return Comparison.load(SHIPPED) if SHIPPED.is_file() else None


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 1 if a cell crashed or timed out, 2 if a name is unknown."""
    parser = argparse.ArgumentParser(prog="python -m o1lab.memory.head_to_head", description=__doc__)
    parser.add_argument("--cases", nargs="+", help="names of the catalogue (default: all)")
    parser.add_argument("--tools", nargs="+", help="of " + ", ".join(one.name for one in TOOLS))
    parser.add_argument(
        "--requests", type=whole(1), help="to judge, the same for all tools (default: as suits the case)"
    )
    parser.add_argument("--timeout", type=seconds, default=SECONDS, help="seconds for a cell (default: %(default)s)")
    parser.add_argument("--jobs", type=whole(1), default=2, help="cells at a time (default: %(default)s)")
    parser.add_argument("--json", type=new_file, help="write the record there")
    options = parser.parse_args(argv)
    settings = {"requests": options.requests, "seconds": options.timeout, "jobs": options.jobs}
    try:
        found = compare(options.cases, options.tools, **settings)
    except O1labError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        found.save(options.json)
    print(text(found.table()))
    return int(any(cell.status in ("crashed", "timed out") for cell in found.cells))


if __name__ == "__main__":
    sys.exit(main())
