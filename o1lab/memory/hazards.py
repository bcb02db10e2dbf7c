"""Device memory that is reused, freed or touched at the wrong time, found in a trace.

A trace alone shows what the allocator was told: double frees, frees of nothing, blocks that overlap, segments given
back in use, blocks never freed, blocks of a graph's private pool freed outside its capture. It does not show which
kernels ran. Races between streams are therefore judged from *marks* that the caller gives: each :class:`Use` of memory
by a stream and each :class:`Wait` between streams, in the order in which the host enqueued them. Nothing is guessed:
without marks no race is reported, and work is only taken as done when a wait orders it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from o1lab.memory import trace as t
from o1lab.memory.ranges import Ranges
from o1lab.memory.stream_order import Order, Use, Wait
from o1lab.memory.trace import Trace


@dataclass(frozen=True)
class Hazard:
    """One finding. ``severity``: "error" (no right program does this) or "note" (worth knowing, may be meant).

    ``row`` is the entry of the trace at which it shows (−1: a mark, or the end), ``time_us`` its time.
    """

    kind: str
    severity: str
    row: int
    time_us: float
    address: int
    size: int
    stream: int
    text: str

    def __str__(self) -> str:
        return (
            f"{self.severity}: {self.kind} at {self.address:#x} ({self.size} bytes, stream {self.stream}): {self.text}"
        )


class _Block:
    __slots__ = (
        "address", "alarms", "before", "freed", "pool", "reads", "recorded", "row", "size", "stream", "used", "writes",
    )  # fmt: skip

    def __init__(self, address: int, size: int, stream: int, pool: int, row: int) -> None:
        self.address, self.size, self.stream, self.pool, self.row = address, size, stream, pool, row
        self.freed, self.used = -1, False
        self.reads: dict[int, int] = {}  # stream: number of its last piece of work that reads the block
        self.writes: dict[int, int] = {}
        self.recorded: set[int] = set()
        self.before: list[tuple[_Block, dict[int, int]]] = []  # who had this memory, with work not known to be done
        self.alarms: list[Hazard] = []

    @property
    def end(self) -> int:
        return self.address + max(self.size, 1)


def hazards(
    trace: Trace, uses: Sequence[Use] = (), waits: Sequence[Wait] = (),
    captures: Sequence[tuple[tuple[int, int], float, float]] = (),
) -> list[Hazard]:  # fmt: skip
    """Everything in the trace and its marks that is wrong or worth knowing, in the order of time.

    Parameters
    ----------
    uses, waits : sequence
        Marks (see :class:`Use`, :class:`Wait`). At equal microseconds a mark counts after allocations and before frees.
    captures : sequence of (pool id, begin_us, end_us)
        When CUDA graphs were captured into which pool. Default: from the first to the last allocation of each private
        pool.

    Returns
    -------
    list of Hazard
        Errors: ``double free``, ``free without allocation``, ``free on another stream``, ``completed without request``,
        ``overlap``, ``outside any segment``, ``segment freed in use``, ``use after free``, ``reuse race``,
        ``unordered use``. Notes: ``never freed``, ``never completed``, ``freed outside the capture``, ``freed inside a
        capture``.

    Examples
    --------
    >>> row = {"addr": 512, "size": 100, "stream": 0}
    >>> actions = ("alloc", "free_requested", "free_completed", "alloc")
    >>> entries = [row | {"action": action, "time_us": time} for time, action in enumerate(actions)]
    >>> trace = t.from_snapshot({"segments": [], "device_traces": [entries]})
    >>> [h.kind for h in hazards(trace, uses=[Use(7, 512, 100, time_us=0.5)]) if h.severity == "error"]
    ['reuse race']
    """
    return _Walk(trace, captures).run(uses, waits)


class _Walk:
    def __init__(self, trace: Trace, captures: Sequence[tuple[tuple[int, int], float, float]]) -> None:
        self.trace, self.found = trace, list[Hazard]()
        self.live: dict[int, _Block] = {}
        self.starts: list[int] = []  # of blocks live or waiting
        self.gone: dict[int, _Block] = {}  # last block that began at an address
        self.ghosts: list[tuple[int, int, _Block]] = []  # begin, end, and who left work there; sorted, apart
        self.order = Order()
        self.windows = self._windows(captures)
        self.segments = Ranges()
        for segment in trace.start_segments:
            self.segments.add(int(segment["address"]), int(segment["address"] + segment["size"]))

    def _windows(
        self, captures: Sequence[tuple[tuple[int, int], float, float]]
    ) -> list[tuple[int, float, float, bool]]:
        trace = self.trace
        if captures:
            number = {pool: index for index, pool in enumerate(trace.pools)}
            return [(number.get(tuple(pool), -1), begin, end, True) for pool, begin, end in captures]  # type: ignore[call-overload]
        spans = []
        for pool in range(1, len(trace.pools)):
            times = trace.time_us[(trace.action == t.ALLOC) & (trace.pool == pool)]
            if len(times):
                spans.append((pool, float(times[0]), float(times[-1]), False))
        return spans

    def run(self, uses: Sequence[Use], waits: Sequence[Wait]) -> list[Hazard]:
        trace = self.trace
        marks: list[tuple[float, int, Any]] = [(use.time_us, 2, use) for use in uses]
        for wait in waits:
            marks.append((wait.time_us, 1, wait))
            if wait.recorded_us is not None:
                marks.append((wait.recorded_us, 0, wait))
        marks.sort(key=lambda mark: mark[:2])
        for row in trace.start_blocks:
            block = _Block(*(int(row[name]) for name in ("address", "size", "stream", "pool")), row=-1)
            block.freed = 0 if row["waiting"] else -1
            self._enter(block)
        names = ("action", "address", "size", "stream", "time_us", "pool")
        rows = list(zip(*(getattr(trace, name).tolist() for name in names), strict=True))
        spot = 0
        for number, row in enumerate(rows):
            freeing = row[0] in (t.FREE_REQUESTED, t.FREE_COMPLETED)
            while spot < len(marks) and (marks[spot][0] < row[4] or (freeing and marks[spot][0] == row[4])):
                self._mark(marks[spot])
                spot += 1
            self._entry(number, row, rows)
        for mark in marks[spot:]:
            self._mark(mark)
        last = float(rows[-1][4]) if rows else 0.0
        for block in sorted(self.live.values(), key=lambda block: block.row):
            self._settle(block)
            kind = "never freed" if block.freed < 0 else "never completed"
            text = "live at the end of the trace" if block.freed < 0 else "its free still waits for another stream"
            self._say(kind, "note", -1, last, block, text)
        return sorted(self.found, key=lambda hazard: hazard.time_us)

    def _say(self, kind: str, severity: str, row: int, time_us: float, block: Any, text: str) -> None:
        self.found.append(Hazard(kind, severity, row, float(time_us), block.address, block.size, block.stream, text))

    # entries of the trace

    def _entry(self, number: int, row: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> None:
        action, address, size, stream, time_us, pool = row
        block = self.live.get(address)
        this = _Block(address, size, stream, pool, number)
        if action == t.ALLOC:
            self._alloc(this, time_us)
        elif action == t.FREE_REQUESTED:
            if block is None or block.freed >= 0:
                again = block is not None or address in self.gone
                text = "the block was freed already" if again else "no block was ever allocated here"
                self._say("double free" if again else "free without allocation", "error", number, time_us, this, text)
                return
            if (block.stream, block.pool) != (stream, pool):
                text = f"allocated on stream {block.stream} in pool {self.trace.pools[block.pool]}"
                self._say("free on another stream", "error", number, time_us, this, text)
            block.freed = number
            self._captured(number, time_us, block)
        elif action == t.FREE_COMPLETED:
            if block is None or block.freed < 0:
                if block is not None or number == 0 or not self._repeats(rows, number):
                    self._say("completed without request", "error", number, time_us, this, "its free was not requested")
                return
            self._leave(block)
        elif action in (t.SEGMENT_ALLOC, t.SEGMENT_MAP):
            self.segments.add(address, address + size)
        elif action in (t.SEGMENT_FREE, t.SEGMENT_UNMAP):
            inside = self.starts[bisect_left(self.starts, address) : bisect_left(self.starts, address + size)]
            if inside:
                text = f"{len(inside)} blocks in it are in use, the first at {inside[0]:#x}"
                self._say("segment freed in use", "error", number, time_us, this, text)
            self.segments.remove(address, address + size)

    @staticmethod
    def _repeats(rows: list[tuple[Any, ...]], number: int) -> bool:
        """The completion of a free that was already reported as wrong."""
        before = rows[number - 1]
        return before[0] == t.FREE_REQUESTED and before[1] == rows[number][1]

    def _alloc(self, block: _Block, time_us: float) -> None:
        spot = bisect_left(self.starts, block.address)
        near = self.starts[max(0, spot - 1) : bisect_left(self.starts, block.end)]
        for other in (self.live[start] for start in near):
            if other.end > block.address:
                text = f"overlaps a block of {other.size} bytes at {other.address:#x} that is in use"
                self._say("overlap", "error", block.row, time_us, block, text)
        if len(self.segments) and not self.segments.covers(block.address, block.end):
            self._say("outside any segment", "error", block.row, time_us, block, "no segment of the trace holds it")
        low, high = bisect_left(self.ghosts, (block.address,)), bisect_left(self.ghosts, (block.end,))
        low -= low > 0 and self.ghosts[low - 1][1] > block.address
        keep = []
        for begin, end, ghost in self.ghosts[low:high]:
            block.before.append((ghost, {**ghost.reads, **ghost.writes}))
            pieces = ((begin, block.address), (block.end, end))
            keep += [(left, right, ghost) for left, right in pieces if right > left]
        self.ghosts[low:high] = keep
        self._enter(block)
        block.alarms = self._races(block, block.stream, block.row, time_us)

    def _enter(self, block: _Block) -> None:
        if block.address not in self.live:
            insort(self.starts, block.address)
        self.live[block.address] = block

    def _leave(self, block: _Block) -> None:
        self._settle(block)
        del self.live[block.address], self.starts[bisect_left(self.starts, block.address)]
        self.gone[block.address] = block
        for stream in block.recorded:  # record_stream: the allocator saw these streams reach the free
            block.reads.pop(stream, None)
            block.writes.pop(stream, None)
        if block.reads or block.writes:
            insort(self.ghosts, (block.address, block.end, block))

    def _settle(self, block: _Block) -> None:
        """A block that no mark uses was perhaps used by its own stream: what its allocation raised stands."""
        if not block.used:
            self.found += block.alarms
        block.alarms = []

    def _captured(self, number: int, time_us: float, block: _Block) -> None:
        for pool, begin, end, given in self.windows:
            inside = begin <= time_us <= end
            if pool == block.pool and pool > 0 and not inside:
                text = "freed after its graph's capture: replays still write here, and only its pool can use it again"
                self._say("freed outside the capture", "note", number, time_us, block, text)
                return
            if given and inside and pool != block.pool:
                text = "freed while a graph was captured: if the graph uses it, replays touch memory given to others"
                self._say("freed inside a capture", "note", number, time_us, block, text)
                return

    # marks

    def _mark(self, mark: tuple[float, int, Any]) -> None:
        _, order, what = mark
        if order == 0:
            self.order.record(what)
        elif order == 1:
            self.order.wait(what)
        else:
            self._use(what)

    def _use(self, use: Use) -> None:
        spot = bisect_right(self.starts, use.address) - 1
        block = self.live[self.starts[spot]] if spot >= 0 else None
        if block is None or use.address >= block.end or block.freed >= 0:
            text = f"{use.label or 'work'} is enqueued on memory that no block holds, or that was freed"
            self._say("use after free", "error", -1, use.time_us, use, text)
            if block is None or use.address >= block.end:
                return
        known = self.order.before(use.stream)
        rivals = {**block.writes, **(block.reads if use.writes else {})}
        late = [stream for stream, number in rivals.items() if stream != use.stream and known.get(stream, 0) < number]
        if late:
            text = f"{use.label or 'work'} on stream {use.stream} is not ordered after work on {late} on the same block"
            self._say("unordered use", "error", -1, use.time_us, use, text)
        self.found += self._races(block, use.stream, -1, use.time_us)
        block.used, block.alarms = True, []
        (block.writes if use.writes else block.reads)[use.stream] = self.order.work(use.stream)
        if use.recorded:
            block.recorded.add(use.stream)

    def _races(self, block: _Block, stream: int, row: int, time_us: float) -> list[Hazard]:
        """Earlier owners of this memory whose work on other streams may still run when ``stream`` touches it."""
        known, found = self.order.before(stream), []
        for ghost, work in block.before:
            late = sorted(other for other, number in work.items() if other != stream and known.get(other, 0) < number)
            if late:
                text = f"given out again while streams {late} may still work on its earlier block (entry {ghost.row})"
                found.append(
                    Hazard("reuse race", "error", row, float(time_us), block.address, block.size, stream, text)
                )
        if found and row < 0:
            block.before = []  # said once
        return found
