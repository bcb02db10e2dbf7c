"""Joining three records of device memory on one time axis: driver allocations, torch's blocks, and kernels.

Pure functions over records that :mod:`o1lab.memory.native` takes: clocks aligned, allocations paired with their
frees, stacks and kernels, one figure. Article §3.2.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from o1lab.errors import ProbeError
from o1lab.stats import Estimate, proportion

MEMORY_KINDS = {2: "pinned", 3: "device", 4: "array", 5: "managed"}
"""CUPTI's memory kinds that a program asks for; the driver's own static ones (6, 7) are counted and left out."""
FRAMES = 12
"""Frames kept of each stack, innermost first."""


class NativeError(ProbeError):
    """Native tracing cannot run here or now; the message says what to install or stop."""


@dataclass(frozen=True, slots=True)
class Native:
    """One allocation or release as the driver saw it. Times in ns on CUPTI's clock; ``mark`` is the innermost mark."""

    time_ns: int
    address: int
    bytes: int
    alloc: bool
    kind: str
    stream: int
    process: int
    correlation: int
    pool: int = 0
    mark: int = 0


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """A driver memory pool was created, trimmed or destroyed (``operation``); sizes in bytes."""

    time_ns: int
    operation: str
    address: int
    bytes: int
    used_bytes: int
    process: int


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel, copy or fill on the device; ``launch_ns`` is when the call that launched it began on the host."""

    name: str
    launch_ns: int
    start_ns: int
    end_ns: int
    stream: int
    correlation: int
    grid: int = 0
    graph_node: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """A block of torch's allocator; ``free_ns`` is the request, ``end_ns`` when it could be reused; ``None`` = never.

    Times in ns on CUPTI's clock, ``stream`` as CUPTI numbers it (-1: unknown), ``stack`` innermost frame first.
    """

    address: int
    bytes: int
    stream: int
    start_ns: int
    free_ns: int | None
    end_ns: int | None
    stack: tuple[str, ...]
    segment: bool = False


@dataclass(frozen=True, slots=True)
class Clock:
    """Offset of CUPTI's clock over torch's history clock, ± ``error_ns``; ``drifted`` if no one offset fits all."""

    offset_ns: float
    error_ns: float
    samples: int
    drifted: bool


@dataclass(frozen=True)
class Trace:
    """Everything recorded between ``begin_ns`` and ``end_ns``. ``lost`` counts records that the bounds dropped."""

    natives: tuple[Native, ...]
    pools: tuple[PoolEvent, ...]
    work: tuple[Work, ...]
    blocks: tuple[Block, ...]
    segments: tuple[Block, ...]
    clock: Clock
    marks: dict[int, tuple[str, ...]]
    lost: dict[str, int]
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Matched:
    """Of ``n`` allocations: for how many the free, the stack, the kernel, and all three were found.

    ``cupti_alone``: how many of them CUPTI's own records show; ``alive``: those not freed by the end, which are in
    ``n`` and count as without a free.
    """

    n: int
    freed: int
    stack: int
    kernel: int
    all_three: int
    cupti_alone: int
    alive: int

    @property
    def share(self) -> Estimate:
        """The metric ``matched_share``: all three found, Wilson interval."""
        return proportion(self.all_three, self.n)

    def table(self) -> str:
        """The counts as text, one a line."""
        rows = [("free", self.freed), ("stack", self.stack), ("kernel", self.kernel), ("all three", self.all_three)]
        rows += [("seen by CUPTI alone", self.cupti_alone), ("not freed by the end", self.alive)]
        return "\n".join(f"{name:<22}{count:>8} of {self.n}" for name, count in rows)


def align(brackets: Sequence[tuple[int, int]], times_us: Sequence[int]) -> Clock:
    """Offset of CUPTI's clock over torch's, from allocations bracketed by CUPTI times.

    Parameters
    ----------
    brackets : sequence of (int, int)
        CUPTI times in ns before and after each allocation.
    times_us : sequence of int
        The same allocations' times in torch's history, whole µs.

    Examples
    --------
    >>> align([(5_000, 9_000), (14_000, 16_000)], [1, 10])
    Clock(offset_ns=4500.0, error_ns=1500.0, samples=2, drifted=False)
    """
    if not brackets or len(brackets) != len(times_us):
        raise NativeError(f"{len(brackets)} brackets and {len(times_us)} times: the clocks cannot be aligned")
    low = max(first - 1000 * time - 1000 for (first, _), time in zip(brackets, times_us, strict=True))
    high = min(last - 1000 * time for (_, last), time in zip(brackets, times_us, strict=True))
    return Clock((low + high) / 2, abs(high - low) / 2, len(brackets), low > high)


def pair(history: Sequence[dict[str, Any]], clock: Clock, streams: Mapping[int, int], *, segments: bool) -> list[Block]:
    """Pair the allocator's history entries by address into blocks (or segments), in order of allocation."""
    first, request, last = (
        ("segment_alloc", "", "segment_free") if segments else ("alloc", "free_requested", "free_completed")
    )
    opened: dict[int, list[Any]] = {}
    rows: list[list[Any]] = []
    for entry in history:
        action, address = entry["action"], entry["addr"]
        time = round(1000 * entry["time_us"] + clock.offset_ns)
        if action == first:
            stack = tuple(_frame(f) for f in entry.get("frames", ())[:FRAMES])
            stream = streams.get(int(entry.get("stream", 0)), -1)
            opened[address] = [address, entry["size"], stream, time, None, None, stack, segments]
            rows.append(opened[address])
        elif action == request and address in opened:
            opened[address][4] = time
        elif action == last and address in opened:
            row = opened.pop(address)
            row[4], row[5] = row[4] or time, time
    return [Block(*row) for row in rows]


def _frame(frame: dict[str, Any]) -> str:
    return f"{frame['name']} {os.path.basename(frame['filename'])}:{frame['line']}"


def build(
    store: Mapping[str, Sequence[Any]], seen: Mapping[str, int], marks: Mapping[int, tuple[str, ...]],
    history: Sequence[dict[str, Any]], before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]],
    begin_ns: int, end_ns: int, max_history: int, streams: Mapping[int, int],
) -> Trace:  # fmt: skip
    """Join CUPTI's records and torch's history into a :class:`Trace` (pure: no GPU is asked)."""
    allocs = [entry for entry in history if entry["action"] == "alloc"]
    whole = len(history) < max_history  # else the first brackets' entries may have been overwritten
    known = [(bracket, entry["time_us"]) for bracket, entry in zip(before, allocs, strict=False)] if whole else []
    if after and allocs:
        known += list(zip(after, [entry["time_us"] for entry in allocs[-len(after) :]], strict=True))
    clock = align([bracket for bracket, _ in known], [time for _, time in known])

    def inside(time: int) -> bool:
        return begin_ns <= time <= end_ns

    launched: dict[int, int] = {}
    for correlation, start in store.get("call", ()):
        launched[correlation] = min(start, launched.get(correlation, start))
    marked = dict(store.get("external", ()))
    natives = [
        Native(time, address, size, operation == 1, MEMORY_KINDS[kind], stream, process, correlation, pool,
               marked.get(correlation, 0))
        for time, address, size, operation, kind, stream, process, correlation, pool in store.get("memory", ())
        if kind in MEMORY_KINDS and inside(time)
    ]  # fmt: skip
    names = {1: "created", 2: "destroyed", 3: "trimmed"}
    pools = [
        PoolEvent(time, names.get(operation, "?"), address, size, used, process)
        for time, operation, address, size, used, process in store.get("pool", ())
        if inside(time)
    ]
    work = [
        Work(name, launched.get(correlation, start), start, end, stream, correlation, grid, node)
        for name, start, end, stream, correlation, grid, node in store.get("work", ())
    ]
    lost = {sort: count - len(store[sort]) for sort, count in seen.items() if count > len(store[sort])}
    if not whole:
        lost["history"] = len(history)  # at least one entry was overwritten; torch does not say how many
    return Trace(
        tuple(sorted(natives, key=lambda native: native.time_ns)), tuple(pools),
        tuple(sorted((w for w in work if inside(w.launch_ns)), key=lambda w: w.launch_ns)),
        tuple(b for b in pair(history, clock, streams, segments=False) if inside(b.start_ns)),
        tuple(b for b in pair(history, clock, streams, segments=True) if inside(b.start_ns)),
        clock, dict(marks), lost, begin_ns, end_ns,
    )  # fmt: skip


def first_work(block: Block, starts: Sequence[int], work: Sequence[Work], error_ns: float, end_ns: int) -> Work | None:
    """The first work launched on the block's stream while the block was held: the kernel that it was made for.

    ``starts``: the launch times of ``work``, sorted.
    """
    last = end_ns if block.free_ns is None else block.free_ns + error_ns
    for index in range(bisect.bisect_left(starts, block.start_ns - error_ns), len(work)):
        if work[index].launch_ns > last:
            return None
        if block.stream in (-1, work[index].stream):
            return work[index]
    return None


def matched(trace: Trace, work: Sequence[Work] | None = None) -> Matched:
    """Count the allocations whose free, Python stack and kernel are all found.

    The allocations are torch's blocks and the driver allocations made outside torch (each of torch's segments is
    the source of blocks and is not counted again). A kernel is found if one was launched on the block's stream between
    allocation and free; times count to within the error of the clocks' alignment.

    Parameters
    ----------
    work : sequence of Work, optional
        Kernels from elsewhere (Nsight Compute), in order of launch, on the same clock; default the trace's own.
    """
    work = trace.work if work is None else work
    starts = [w.launch_ns for w in work]
    ours = {segment.address for segment in trace.segments}
    slack = trace.clock.error_ns + 1000
    shown: dict[int, list[int]] = {}
    items: list[tuple[Block, bool]] = []
    for native in trace.natives:
        if native.alloc:
            shown.setdefault(native.address, []).append(native.time_ns)
    for native in outside(trace, ours):
        items.append((native, True))
    for block in trace.blocks:
        seen = any(abs(time - block.start_ns) <= slack + 100_000 for time in shown.get(block.address, ()))
        items.append((block, seen))
    freed = [b.end_ns is not None for b, _ in items]
    stack = [bool(b.stack) for b, _ in items]
    kernel = [first_work(b, starts, work, slack, trace.end_ns) is not None for b, _ in items]
    return Matched(
        len(items), sum(freed), sum(stack), sum(kernel), sum(map(all, zip(freed, stack, kernel, strict=True))),
        sum(seen for _, seen in items), len(items) - sum(freed),
    )  # fmt: skip


def outside(trace: Trace, segments: set[int]) -> list[Block]:
    """Driver allocations in device memory that are not torch's, paired with their release by address."""
    opened: dict[int, int] = {}
    rows: list[Block] = []
    for native in trace.natives:
        if native.kind not in ("device", "managed") or native.address in segments:
            continue
        if native.alloc:
            stream = native.stream if native.pool else -1  # a synchronous allocation belongs to no stream
            opened[native.address] = len(rows)
            stack = trace.marks.get(native.mark, ())
            rows.append(Block(native.address, native.bytes, stream, native.time_ns, None, None, stack))
        elif native.address in opened:
            index = opened.pop(native.address)
            old = rows[index]
            rows[index] = Block(
                old.address, old.bytes, old.stream, old.start_ns, native.time_ns, native.time_ns, old.stack
            )
    return rows


def timeline_figure(trace: Trace) -> Any:
    """Segments, blocks and kernels over one time axis, as a plotly figure.

    Dashed: MiB that torch's allocator got from the driver meanwhile; blue: MiB in its blocks; grey, below zero: when
    the device was busy. More than 500 busy spans are drawn merged.
    """
    import numpy as np
    import plotly.graph_objects as go

    from o1lab import plots

    if not trace.blocks and not trace.segments:
        raise NativeError("the trace holds no allocation: there is nothing to draw")

    def level(blocks: Sequence[Block]) -> tuple[np.ndarray, np.ndarray]:
        steps = [(b.start_ns, b.bytes) for b in blocks] + [(b.end_ns, -b.bytes) for b in blocks if b.end_ns is not None]
        steps = [(trace.begin_ns, 0), *sorted(steps), (trace.end_ns, 0)]
        times = np.array([(time - trace.begin_ns) / 1e6 for time, _ in steps])
        return plots.downsample(times, np.cumsum([size for _, size in steps]) / 2**20)

    figure = go.Figure()
    tops = [0.0]
    for name, role, blocks in (("segments", "ideal", trace.segments), ("blocks", "fixed", trace.blocks)):
        x, y = level(blocks)
        style = plots.STYLES[role]
        line = {"color": style.colour, "dash": style.dash, "shape": "hv", "width": 2}
        figure.add_scatter(x=x, y=y, name=name, mode="lines", line=line)
        tops.append(float(y.max()))
    lane = -0.06 * (max(tops) or 1.0)
    spans = busy([(w.start_ns, w.end_ns) for w in trace.work], most=500)
    xs = [value for a, b in spans for value in ((a - trace.begin_ns) / 1e6, (b - trace.begin_ns) / 1e6, None)]
    ys = [value for _ in spans for value in (lane, lane, None)]
    control = plots.COLOURS["control"]
    figure.add_scatter(x=xs, y=ys, name="kernels", mode="lines", line={"color": control, "width": 9})
    kernel_ms = sum(b - a for a, b in spans) / 1e6
    figure.update_layout(
        template="o1lab", showlegend=True, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        title_text=f"{len(trace.blocks):,} blocks in {len(trace.segments):,} new segments,<br>"
        f"device busy {kernel_ms:,.1f} of {(trace.end_ns - trace.begin_ns) / 1e6:,.1f} ms",
    )  # fmt: skip
    figure.update_xaxes(title_text="time since the recording began (ms)")
    figure.update_yaxes(title_text="device memory (MiB)")
    return figure


def busy(spans: Iterable[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """Merge overlapping spans, then those with the smallest gaps between, until at most ``most`` are left.

    Examples
    --------
    >>> busy([(0, 2), (1, 3), (4, 5), (90, 99)], most=2)
    [(0, 5), (90, 99)]
    """
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    if len(merged) <= most:
        return merged
    gaps = sorted(b[0] - a[1] for a, b in zip(merged, merged[1:], strict=False))
    limit = gaps[len(merged) - most - 1]
    out = [merged[0]]
    for start, end in merged[1:]:
        near = start - out[-1][1] <= limit
        out[-1:] = [(out[-1][0], end)] if near else [out[-1], (start, end)]
    return out[:most]
