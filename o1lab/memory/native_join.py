"""Joining three records of device memory on one time axis: driver allocations, torch's blocks, and kernels.

Pure functions over the records that :mod:`o1lab.memory.native` takes; :mod:`o1lab.memory.native_view` asks questions of
the result. Article §3.2.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from o1lab.errors import ProbeError

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


def to_wall(first: tuple[int, int], last: tuple[int, int]) -> Callable[[int], int]:
    """How CUPTI's times become ns of the time of day, from one pair (CUPTI's, time of day) at each end.

    They are that already, unless another profiler of this process has given CUPTI a clock of its own: torch.profiler
    makes it count processor ticks, and that cannot be undone without taking CUPTI from it.
    """
    if abs(first[0] - first[1]) < 1_000_000_000 and abs(last[0] - last[1]) < 1_000_000_000:
        return int
    ticks, ns = max(1, last[0] - first[0]), last[1] - first[1]
    return lambda time: first[1] + (time - first[0]) * ns // ticks


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
        time = 1000 * entry["time_us"] + round(clock.offset_ns)  # whole numbers: a float holds no ns since 1970
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
    first: tuple[int, int], last: tuple[int, int], max_history: int, streams: Mapping[int, int],
) -> Trace:  # fmt: skip
    """Join CUPTI's records and torch's history into a :class:`Trace` (pure: no GPU is asked).

    ``first`` and ``last`` are CUPTI's time and the time of day in ns, at the beginning and end of what is recorded.
    """
    wall = to_wall(first, last)
    begin_ns, end_ns = wall(first[0]), wall(last[0])
    before, after = ([(wall(a), wall(b)) for a, b in brackets] for brackets in (before, after))
    allocs = [entry for entry in history if entry["action"] == "alloc"]
    whole = len(history) < max_history  # else the first brackets' entries may have been overwritten
    known = [(bracket, entry["time_us"]) for bracket, entry in zip(before, allocs, strict=False)] if whole else []
    known += [(bracket, entry["time_us"]) for bracket, entry in zip(after[::-1], allocs[::-1], strict=False)]
    if allocs:
        clock = align([bracket for bracket, _ in known], [time for _, time in known])
    else:  # another allocator backend than torch's own keeps no history: there is nothing to align
        clock = Clock(0.0, 0.0, 0, False)

    def inside(time: int) -> bool:
        return begin_ns <= time <= end_ns

    launched: dict[int, int] = {}
    for correlation, start in store.get("call", ()):
        launched[correlation] = min(wall(start), launched.get(correlation, wall(start)))
    marked = dict(store.get("external", ()))
    natives = [
        Native(wall(time), address, size, operation == 1, MEMORY_KINDS[kind], stream, process, correlation, pool,
               marked.get(correlation, 0))
        for time, address, size, operation, kind, stream, process, correlation, pool in store.get("memory", ())
        if kind in MEMORY_KINDS and inside(wall(time))
    ]  # fmt: skip
    names = {1: "created", 2: "destroyed", 3: "trimmed"}
    pools = [
        PoolEvent(wall(time), names.get(operation, "?"), address, size, used, process)
        for time, operation, address, size, used, process in store.get("pool", ())
        if inside(wall(time))
    ]
    work = [
        Work(name, launched.get(correlation, wall(start)), wall(start), wall(end), stream, correlation, grid, node)
        for name, start, end, stream, correlation, grid, node in store.get("work", ())
    ]
    lost = {sort: count - len(store[sort]) for sort, count in seen.items() if count > len(store[sort])}
    unknown = sum(record[4] not in launched for record in store.get("work", ()) if inside(wall(record[1])))
    if unknown:
        lost["launch times"] = unknown  # their start on the device stands in, which is later
    if not whole:
        lost["history"] = len(history)  # at least one entry was overwritten; torch does not say how many
    return Trace(
        tuple(sorted(natives, key=lambda native: native.time_ns)), tuple(pools),
        tuple(sorted((w for w in work if inside(w.launch_ns)), key=lambda w: w.launch_ns)),
        tuple(b for b in pair(history, clock, streams, segments=False) if inside(b.start_ns)),
        tuple(b for b in pair(history, clock, streams, segments=True) if inside(b.start_ns)),
        clock, dict(marks), lost, begin_ns, end_ns,
    )  # fmt: skip
