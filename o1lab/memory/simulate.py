"""What would the allocator have reserved under other settings? Replay a trace through its rules.

``print(simulate(trace, expandable_segments=True))`` shows a recorded workload as it was and as it would have been.
Requests, frees and the moments at which other streams were done are taken from the trace; finding, splitting, growing
and giving back are simulated (:mod:`o1lab.memory.allocator`). With the settings as recorded, segments get their
recorded addresses, so that ties between equal blocks fall as they fell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from o1lab.memory import trace as t
from o1lab.memory.allocator import CachingAllocator
from o1lab.memory.allocator_blocks import Block, segment_bytes
from o1lab.memory.allocator_settings import MIB, Settings, SettingsError
from o1lab.memory.allocator_start import lay_start
from o1lab.memory.trace import Trace

__all__ = ["Settings", "SettingsError", "Simulation", "simulate"]


@dataclass(frozen=True)
class Simulation:
    """Outcome of one replay; series have one value per entry of the trace, in bytes.

    Attributes
    ----------
    allocated, reserved : numpy.ndarray, shape (n,)
        After each entry.
    recorded_reserved : numpy.ndarray, shape (n,)
        What the real allocator had reserved after the same entry.
    served : numpy.ndarray of bool, shape (n,)
        Entries that are requests or frees: the two series can be compared there.
    num_ooms, num_retries, segments : int
        Failed requests, requests tried again after giving back the cache, segments at the end.
    stuck_bytes : int
        Free at the end, but in segments or pages in use, so that ``empty_cache`` cannot give them back.
    as_recorded : Simulation or None
        The replay under the recorded settings, where others were asked for.
    notes : tuple of str
        What the trace does not tell and how it was taken.
    """

    settings: Settings
    allocated: np.ndarray
    reserved: np.ndarray
    recorded_reserved: np.ndarray
    served: np.ndarray
    time_us: np.ndarray
    num_ooms: int
    num_retries: int
    segments: int
    stuck_bytes: int
    notes: tuple[str, ...] = ()
    as_recorded: Simulation | None = field(default=None, repr=False)

    def _of(self, series: np.ndarray, what: str) -> float:
        values = series[self.served]
        if not len(values):
            return 0.0
        if what == "peak":
            return int(values.max())
        return float(values.mean()) if what == "mean" else int(values[-1])

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes in blocks handed out."""
        return int(self._of(self.allocated, "peak"))

    @property
    def peak_reserved_bytes(self) -> int:
        """Most bytes taken from the device."""
        return int(self._of(self.reserved, "peak"))

    @property
    def mean_reserved_bytes(self) -> float:
        """Mean over requests and frees, each of equal weight: comparable between runs of different speed."""
        return self._of(self.reserved, "mean")

    @property
    def fragmentation(self) -> float:
        """Share of the reserved bytes at the end that is free and cannot be given back."""
        last = self._of(self.reserved, "last")
        return self.stuck_bytes / last if last else 0.0

    @property
    def error(self) -> tuple[float, float]:
        """Deviation of reserved peak and mean from the real allocator's, as fractions (recorded settings only)."""
        pairs = [(self._of(self.reserved, what), self._of(self.recorded_reserved, what)) for what in ("peak", "mean")]
        peak, mean = (abs(mine - real) / real if real else float(mine != real) for mine, real in pairs)
        return peak, mean

    def __str__(self) -> str:
        base = self.as_recorded or self
        rows = [
            ("peak allocated", base.peak_allocated_bytes, self.peak_allocated_bytes),
            ("peak reserved", self._of(self.recorded_reserved, "peak"), self.peak_reserved_bytes),
            ("mean reserved", self._of(self.recorded_reserved, "mean"), self.mean_reserved_bytes),
            ("reserved at the end", self._of(self.recorded_reserved, "last"), self._of(self.reserved, "last")),
            ("stuck at the end", base.stuck_bytes, self.stuck_bytes),
        ]
        lines = [f"{'MiB':<20}{'as recorded':>12}{'simulated':>12}"]
        for name, real, mine in rows:
            change = f"{(mine - real) / real:+9.1%}" if real else ""
            lines.append(f"{name:<20}{real / MIB:>12.1f}{mine / MIB:>12.1f}{change}")
        for name in ("segments", "num_retries", "num_ooms"):
            lines.append(f"{name.replace('num_', ''):<20}{getattr(base, name):>12}{getattr(self, name):>12}")
        changed = [f"{name}={value}" for name, value in _changes(base.settings, self.settings)]
        head = f"settings: {', '.join(changed) or 'as recorded'}"
        return "\n".join([head, *lines, *(f"note: {note}" for note in self.notes)])


def _changes(old: Settings, new: Settings) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(new).items() if value != getattr(old, name)]


def simulate(
    trace: Trace, settings: Settings | None = None, *, emptied: Sequence[int] = (), **changes: Any
) -> Simulation:
    """Replay ``trace`` as recorded, or under other settings.

    Parameters
    ----------
    trace : Trace
        From :func:`o1lab.memory.trace.record` or :func:`~o1lab.memory.trace.load`.
    settings : Settings, optional
        Default: as recorded.
    emptied : sequence of int
        Entries before which the program called ``empty_cache`` where that found nothing to give back: such a call
        leaves no entry, but under other settings it may find something.
    **changes
        Single settings to change (see :class:`Settings`): ``expandable_segments``, ``max_split_size_mb``,
        ``max_non_split_rounding_mb``, ``garbage_collection_threshold``, ``roundup_power2_divisions``,
        ``large_segment_size_mb``, ``capacity_bytes``, ``no_split``.

    Raises
    ------
    SettingsError
        An unknown setting or a value that torch would refuse.
    ProbeError
        The trace contradicts itself.

    Examples
    --------
    >>> entry = {"action": "alloc", "addr": 4096, "size": 3 << 20, "stream": 0, "time_us": 1}
    >>> trace = t.from_snapshot({"segments": [], "device_traces": [[entry]]})
    >>> simulate(trace, large_segment_size_mb=32).peak_reserved_bytes >> 20
    32
    """
    recorded = Settings.recorded(trace.settings, trace.capacity_bytes)
    wanted = (settings or recorded).but(changes)
    base = simulate(trace, recorded, emptied=emptied) if wanted != recorded else None
    return _Replay(trace, wanted, recorded).run(base, frozenset(emptied))


class _Replay:
    def __init__(self, trace: Trace, wanted: Settings, recorded: Settings) -> None:
        self.trace, self.settings, self.recorded = trace, wanted, recorded
        self.exact = wanted.layout() == recorded.layout()
        self.allocator = CachingAllocator(wanted, trace.pools)
        self.live: dict[int, Block | None] = {}
        self.notes: list[str] = list(trace.notes)
        if wanted.garbage_collection_threshold and wanted.capacity_bytes is None:
            self.notes.append(
                f"garbage_collection_threshold={wanted.garbage_collection_threshold:g} has no effect without a "
                "capacity: it is a share of it, and torch collects only under a memory fraction; name capacity_bytes"
            )

    def run(self, base: Simulation | None, emptied: frozenset[int]) -> Simulation:
        trace, allocator, live = self.trace, self.allocator, self.live
        self._begin()
        releases = self._releases()
        count = len(trace)
        allocated, reserved = np.empty(count, "i8"), np.empty(count, "i8")
        columns = (trace.action, trace.address, trace.size, trace.stream, trace.pool)
        action, address, size, stream, pool = (column.tolist() for column in columns)
        skipped = 0
        for row in range(count):
            code, place = action[row], address[row]
            if row in emptied:
                allocator.release_cached()
            if code == t.ALLOC:
                live[place] = allocator.allocate(size[row], stream[row], pool[row])
                allocator.next_segment = None
            elif code == t.FREE_REQUESTED:
                block = live.get(place)
                if block is not None and block.held:
                    at_once = row + 1 < count and action[row + 1] == t.FREE_COMPLETED and address[row + 1] == place
                    allocator.free(block, wait=not at_once)
                    block.ticket = row
                    live[place] = block if not at_once else None
            elif code == t.FREE_COMPLETED:
                block = live.pop(place, None)
                if block is not None and block.waiting:
                    allocator.complete(block)
            elif code in (t.SEGMENT_ALLOC, t.SEGMENT_MAP):
                if self.exact:
                    allocator.next_segment = (size[row], place)
            elif row in releases:
                allocator.release_cached(releases[row])
            elif code == t.OOM:
                if self.settings.capacity_bytes is None:
                    skipped += 1
                else:
                    extra = allocator.allocate(size[row], stream[row], pool[row])
                    if extra is not None:
                        allocator.free(extra)
            allocated[row], reserved[row] = allocator.allocated_bytes, allocator.reserved_bytes
        if skipped:
            self.notes.append(
                f"{skipped} requests that ran out of memory are left out: name capacity_bytes to replay them"
            )
        return Simulation(
            self.settings, allocated, reserved, trace.reserved(), trace.action <= t.FREE_COMPLETED, trace.time_us,
            allocator.num_ooms, allocator.num_retries, allocator.segments, allocator.stuck_bytes(), tuple(self.notes),
            base,
        )  # fmt: skip

    def _begin(self) -> None:
        """Blocks that were live before the first entry: as they lay, or allocated anew under other settings."""
        trace, allocator = self.trace, self.allocator
        if not self.exact:
            for row in trace.start_blocks:
                block = allocator.allocate(int(row["requested"]), int(row["stream"]), int(row["pool"]))
                self._keep(row, block)
            return
        for row, block in lay_start(trace, allocator):
            self._keep(row, block)

    def _keep(self, row: np.void, block: Block | None) -> None:
        self.live[int(row["address"])] = block
        if row["waiting"] and block is not None:
            self.allocator.free(block, wait=True)

    def _releases(self) -> dict[int, set[int]]:
        """Entries at which the program itself gave memory back (``empty_cache``, the end of a pool): row → pools.

        Segments that the allocator gave back on its own, because memory ran out or its collection ran, are no input:
        the simulated allocator decides that itself.
        """
        trace, found = self.trace, {}
        giving = (trace.action == t.SEGMENT_FREE) | (trace.action == t.SEGMENT_UNMAP)
        rows = np.flatnonzero(giving)
        for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1):
            if len(run) and not self._own(run):
                found[int(run[-1])] = set(trace.pool[run].tolist())
        return found

    def _own(self, run: np.ndarray) -> bool:
        trace, after = self.trace, int(run[-1]) + 1
        if after >= len(trace) or trace.action[after] not in (t.SEGMENT_ALLOC, t.SEGMENT_MAP, t.OOM):
            return False
        sites = {trace.sites[site] for site in trace.site[run].tolist() if site >= 0}
        if sites:
            return not any(site.endswith("(empty_cache)") for site in sites)
        capacity = self.recorded.capacity_bytes
        if capacity is None:
            return False
        reserved = int(trace.reserved()[run[0]] + trace.size[run[0]])
        asks = after + np.flatnonzero((trace.action[after:] == t.ALLOC) | (trace.action[after:] == t.OOM))
        size = self.recorded.rounded(int(trace.size[asks[0]])) if len(asks) else 0
        segment = segment_bytes(size, self.recorded.large_segment_size_mb * MIB)
        threshold = self.recorded.garbage_collection_threshold
        return reserved + segment > capacity or (threshold > 0 and reserved > int(threshold * capacity))
