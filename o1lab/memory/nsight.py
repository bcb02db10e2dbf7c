"""Nsight Compute beside an allocation tracer, as the article's §3.2 has it: what of it can be put on one time axis.

``ncu`` profiles one kernel at a time: it serialises launches, replays each kernel once a pass and flushes caches
between, so its run is not the run that is being explained. Version 2025.3 does give a start time
(``gpu__time_start``), counted from the start of that kernel's own pass: it orders nothing and lies on no common axis.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from o1lab.memory.native_join import Block, Clock, NativeError, Trace, Work, pair
from o1lab.memory.native_view import Matched, matched

START, DURATION = "gpu__time_start", "gpu__time_duration"
"""Metric names without their roll-up (``.max``, ``.sum``)."""
TO_NS = {"s": 1e9, "second": 1e9, "ms": 1e6, "msecond": 1e6, "us": 1e3, "usecond": 1e3, "ns": 1.0, "nsecond": 1.0}


@dataclass(frozen=True, slots=True)
class NcuKernel:
    """One kernel as Nsight Compute reports it; ``start_ns`` is ``None`` where it gives no time."""

    number: int
    process: int
    name: str
    stream: int
    grid: str
    duration_ns: float | None
    start_ns: float | None


@dataclass(frozen=True, slots=True)
class NcuRun:
    """One run under Nsight Compute: ``status`` is ``"ok"``, ``"no permission"``, ``"no kernels"`` or ``"failed"``."""

    status: str
    kernels: tuple[NcuKernel, ...]
    version: str
    message: str

    @property
    def timed(self) -> int:
        """Kernels that carry a start time."""
        return sum(kernel.start_ns is not None for kernel in self.kernels)

    @property
    def ordered(self) -> int:
        """Kernels that start after the one launched before them (on a common axis of one stream: all but the first)."""
        starts = [kernel.start_ns for kernel in self.kernels]
        pairs = zip(starts, starts[1:], strict=False)
        return sum(a is not None and b is not None and b > a for a, b in pairs)

    def table(self) -> str:
        """Status, version, counts and the first line of what ncu said."""
        counts = (
            f"{len(self.kernels)} kernels, {self.timed} with a start time, {self.ordered} later than the one before"
        )
        return f"ncu {self.version}: {self.status}; {counts}; {self.message}"


def find_ncu() -> str:
    """Path of ``ncu``, or a :class:`NativeError` that says how to get it."""
    found = shutil.which("ncu")
    if found is None:
        raise NativeError(
            "Nsight Compute is not here: install it (it comes with the CUDA toolkit) and put ncu on the PATH; "
            "o1lab.memory.native needs only cupti-python"
        )
    return found


def parse_raw(text: str) -> tuple[NcuKernel, ...]:
    """Kernels from the output of ``ncu --csv --page raw``: a header, a row of units, then one row a kernel.

    Lines before the header (those of the program itself, and ncu's own, which begin with ``==``) are skipped.

    Examples
    --------
    >>> text = '"ID","Kernel Name","gpu__time_duration.sum"\\n"","","us"\\n"0","fill","2.5"'
    >>> parse_raw(text)[0].duration_ns
    2500.0
    """
    lines = text.splitlines()
    heads = [at for at, line in enumerate(lines) if line.startswith('"ID",')]
    if not heads:
        return ()
    rows = list(csv.DictReader(line for line in lines[heads[0] :] if line.startswith('"')))
    units = rows[0] if rows and not rows[0]["ID"] else {}
    return tuple(
        NcuKernel(
            int(row["ID"]), int(row.get("Process ID") or 0), row.get("Kernel Name", "?"), int(row.get("Stream") or -1),
            row.get("Grid Size", ""), _time(row, units, DURATION), _time(row, units, START),
        )
        for row in rows
        if row["ID"].isdigit()
    )  # fmt: skip


def _time(row: Mapping[str, Any], units: Mapping[str, Any], metric: str) -> float | None:
    for column, value in row.items():
        if column and column.partition(".")[0] == metric:
            number = (value or "").replace(",", "")
            scale = TO_NS.get((units.get(column) or "ns").strip())
            if scale is not None and number.replace(".", "", 1).replace("e+", "", 1).isdigit():
                return float(number) * scale
    return None


def run_ncu(
    command: Sequence[str], *, seconds: float = 300.0, metrics: Sequence[str] = (f"{DURATION}.sum", f"{START}.max"),
    env: Mapping[str, str] | None = None,
) -> NcuRun:  # fmt: skip
    """Run a command under Nsight Compute and return its kernels.

    Parameters
    ----------
    command : sequence of str
        Program and arguments, e.g. ``[sys.executable, "script.py"]``.
    seconds : float
        After this it is killed and :class:`NativeError` raised.
    metrics : sequence of str
        Asked for in this order; those that this version does not know are left out.

    Raises
    ------
    NativeError
        No ``ncu`` on the PATH, or it did not end in time.
    """
    ncu = find_ncu()
    said = subprocess.run([ncu, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    version = next((line.split()[1] for line in said.splitlines() if line.startswith("Version")), "?")
    asked = [ncu, "--target-processes", "all", "--csv", "--page", "raw", "--metrics", ",".join(metrics), *command]
    try:
        run = subprocess.run(asked, capture_output=True, text=True, timeout=seconds, check=False, env=env)
    except subprocess.TimeoutExpired as error:
        raise NativeError(f"ncu did not end within {seconds:g} s: give it fewer kernels or more seconds") from error
    text = run.stdout + "\n" + run.stderr
    kernels = parse_raw(run.stdout)
    notes = [line for line in text.splitlines() if line.startswith(("==ERROR==", "==WARNING=="))]
    if "ERR_NVGPUCTRPERM" in text:
        status = "no permission"
    elif kernels:
        status = "ok"
    else:
        status = "failed" if run.returncode else "no kernels"
    return NcuRun(status, kernels, version, (notes or [f"exit code {run.returncode}"])[0])


CHILD = "from o1lab.memory.nsight import traced_child; traced_child({path!r}, {blocks})"


def traced_child(path: str, blocks: int) -> None:
    """In the process under ncu: run the planted workload with torch's allocation tracer and write its history."""
    import torch

    from o1lab.memory.native import planted

    planted(4)
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=20 * blocks)
    planted(blocks)
    torch.cuda.synchronize()
    history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(None)
    Path(path).write_text(json.dumps(history))


@dataclass(frozen=True, slots=True)
class Aligned:
    """The article's method measured: matches with ncu's times as they are, and with the one shift that matches most."""

    given: Matched
    best: Matched
    shift_ns: float
    run: NcuRun

    def table(self) -> str:
        """The run, then both counts."""
        rows = (("as given", self.given), (f"best shift ({self.shift_ns / 1e9:,.3f} s)", self.best))
        return "\n".join([self.run.table(), *(f"{name}: {m.all_three} of {m.n} matched" for name, m in rows)])


def measure_ncu(*, blocks: int = 128, seconds: float = 300.0) -> Aligned:
    """The article's method on a workload of known allocations: how many get a free, a stack and a kernel in time.

    torch's history is kept in the process that ncu profiles. Kernels without a time cannot be put on the axis and match
    nothing. ``best.share`` is the method's most generous reading.

    Raises
    ------
    NativeError
        No ``ncu``, no GPU, it may not read counters here, or the traced program left no history.
    """
    find_ncu()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "history.json")
        run = run_ncu([sys.executable, "-c", CHILD.format(path=path, blocks=blocks)], seconds=seconds)
        if run.status != "ok":
            raise NativeError(f"Nsight Compute gave no kernels ({run.status}): {run.message}")
        if not os.path.exists(path):
            raise NativeError(f"the program under ncu left no allocator history: {run.message}")
        history = json.loads(Path(path).read_text())
    return put_together(history, run)


def put_together(history: Sequence[dict[str, Any]], run: NcuRun) -> Aligned:
    """Match the traced program's allocations with ncu's kernels, as given and with the best shift of their times."""
    clock = Clock(0.0, 0.0, 0, False)
    trace = of_blocks(pair(history, clock, {}, segments=False), clock)
    timed = [kernel for kernel in run.kernels if kernel.start_ns is not None]

    def shifted(by: float) -> Matched:
        starts = [(round(k.start_ns + by), k) for k in timed]
        work = [Work(k.name, at, at, at + round(k.duration_ns or 0), k.stream, k.number) for at, k in starts]
        return matched(trace, sorted(work, key=lambda w: w.launch_ns))

    shift = best_shift(trace.blocks, [k.start_ns for k in timed])
    return Aligned(shifted(0.0), shifted(shift), shift, run)


def best_shift(blocks: Sequence[Block], starts: Sequence[float]) -> float:
    """The one shift of all start times that puts a kernel into the lives of the most blocks (0 if there is none).

    Examples
    --------
    >>> blocks = [Block(1, 1, -1, 100, 110, 110, ()), Block(1, 1, -1, 200, 210, 210, ())]
    >>> best_shift(blocks, [5.0, 105.0])
    95.0
    """
    edges = []
    for number, block in enumerate(blocks):
        if block.free_ns is not None:
            for start in starts:
                edges += [(block.start_ns - start, 0, number), (block.free_ns - start, 1, number)]
    inside: dict[int, int] = {}
    best, most = 0.0, 0
    for at, closes, number in sorted(edges):
        inside[number] = inside.get(number, 0) + (-1 if closes else 1)
        if not inside[number]:
            del inside[number]
        if len(inside) > most:
            best, most = at, len(inside)
    return float(best)


def of_blocks(blocks: Sequence[Block], clock: Clock) -> Trace:
    """A trace that holds only torch's blocks."""
    ends = [block.end_ns or block.start_ns for block in blocks]
    first = min((block.start_ns for block in blocks), default=0)
    return Trace((), (), (), tuple(blocks), (), clock, {}, {}, first, max(ends, default=0))
