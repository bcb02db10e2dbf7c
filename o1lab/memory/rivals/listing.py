"""Tools that look at the process from inside: the probe, resident memory, and lists of what is alive."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Sequence
from typing import Any

from o1lab.memory.rivals import PER_REQUEST, Finding, Workload

FRAMES = 25  # as in tracemalloc's documentation
CHAIN_SECONDS = 15.0  # objgraph looks through every object's referrers for a chain; it can take many minutes
GROWN_TYPES = 5  # a reader would try the first few
ALARMS = ("per-call leak", "keyed growth", "lazy gc", "fragmentation", "driver")


def probe(work: Workload) -> Finding:
    """:func:`o1lab.memory.probe` at its defaults. It may serve as many requests as the others, replays included."""
    from o1lab.memory import probe as run

    case = work.case
    step = work.step

    def counted(number: Any) -> None:
        step(number)
        work.served += 1

    report = run(
        counted, inputs=case.inputs, rounds=case.rounds, requests_per_round=work.per_round, warm_up=case.warm_up
    )
    owners = getattr(report, "owners", None) or []
    place = f"{owners[0].path} · {owners[0].kind}" if owners else ""
    evidence = f"{report.kind}, host {report.host}" + ("" if report.device is None else f", device {report.device}")
    return Finding(report.kind in ALARMS, evidence, report.kind, place, "owner" if place else "")


def rss_ols(work: Workload) -> Finding:
    """The monitoring rule: a straight line through resident memory, as psutil or a dashboard samples it."""
    import psutil
    from scipy import stats

    process = psutil.Process()
    seen = array("q", bytes(8 * work.requests))  # made beforehand: a growing list of samples would be a trend itself
    work.warm()
    for index in range(work.requests):
        work.one()
        seen[index] = process.memory_info().rss
    if len(set(seen)) == 1:
        return Finding(False, "resident memory did not move")
    line = stats.linregress(range(len(seen)), seen)
    found = bool(line.slope > 0 and abs(line.rvalue) > 0.5 and line.pvalue < 0.05)
    return Finding(found, f"slope {line.slope:,.0f} B/request, r = {line.rvalue:.2f}, p = {line.pvalue:.2g}")


def tracemalloc(work: Workload) -> Finding:
    """Two snapshots compared, with 25 frames a trace and tracemalloc's own memory filtered out, as documented.

    It starts after the warm-up: tracing the import of torch takes minutes.
    """
    import tracemalloc as tool

    work.warm()
    tool.start(FRAMES)
    before = tool.take_snapshot()
    work.serve()
    after = tool.take_snapshot()
    tool.stop()
    own = [tool.Filter(False, tool.__file__)]
    grown = after.filter_traces(own).compare_to(before.filter_traces(own), "traceback")
    return grown_most(
        work,
        [(s.count_diff, s.size_diff, [(f.filename, f.lineno) for f in reversed(s.traceback)]) for s in grown],
    )


def grown_most(work: Workload, sites: Sequence[tuple[int, int, Sequence[tuple[str, int]]]]) -> Finding:
    """The largest site ``(count, bytes, frames)`` that meets the reader's rule; the innermost frame comes first."""
    leaks = [site for site in sites if site[0] >= PER_REQUEST * work.requests and site[1] > 0]
    if not leaks:
        return Finding(False, "no site kept an allocation every second request")
    count, size, frames = max(leaks, key=lambda site: site[1])
    return Finding(True, f"{size:,} B in {count:,} allocations", "", work.line(frames), "line")


def objgraph(work: Workload) -> Finding:
    """``objgraph.growth`` around the requests, then a chain of references to the newest object of the grown type."""
    import objgraph as tool

    work.warm()
    tool.growth(limit=None)
    work.serve()
    grown = [row for row in tool.growth(limit=None) if row[2] >= PER_REQUEST * work.requests]
    if not grown:
        return Finding(False, "no type grew by an object every second request")
    until = time.monotonic() + CHAIN_SECONDS

    def root(candidate: Any) -> bool:
        if time.monotonic() > until:
            raise TimeoutError
        return bool(tool.is_proper_module(candidate))

    chain: list[Any] = []
    with contextlib.suppress(TimeoutError):
        for kind, *_ in grown[:GROWN_TYPES]:
            if len(chain) < 2:
                chain = tool.find_backref_chain(tool.by_type(kind)[-1], root)
    place = chain_text(chain) if len(chain) > 1 else ""
    name, _, more = grown[0]
    said = f"{more:,} more objects of type {name}" + ("" if place else ", no chain from a module to one of them")
    return Finding(True, said, "", place, "owner" if place else "")


def chain_text(chain: Sequence[Any]) -> str:
    """A chain of references as text: the module, the key or attribute that leads on at each link, the object's type.

    Examples
    --------
    >>> import sys
    >>> chain_text([sys, vars(sys), sys.path])
    'sys → path → list'
    """
    names = [getattr(chain[0], "__name__", type(chain[0]).__name__)]
    for holder, held in zip(chain, chain[1:], strict=False):
        if isinstance(holder, dict):
            names += [str(key) for key, value in list(holder.items()) if value is held][:1]
        elif hasattr(held, "__name__"):
            names.append(str(held.__name__))
    return " → ".join([*names, type(chain[-1]).__name__])


def pytorch_memlab(work: Workload) -> Finding:
    """``MemReporter`` before and after: tensors listed, and bytes by its own count (in blocks of 512 B)."""
    from pytorch_memlab import MemReporter

    reporter = MemReporter()

    def listed() -> tuple[int, int]:
        reporter.collect_tensor()
        reporter.get_stats()
        rows = [row for rows in reporter.device_tensor_stat.values() for row in rows]
        return len(rows), sum(row[3] for row in rows)

    work.warm()
    before = listed()
    work.serve()
    after = listed()
    tensors, size = after[0] - before[0], after[1] - before[1]
    found = tensors >= PER_REQUEST * work.requests or size >= 512 * PER_REQUEST * work.requests
    return Finding(found, f"{tensors:+,} tensors, {size:+,} B by its count")
