"""How long each block of device memory lived: allocations paired with their frees, and what waited for other streams.

A free has two moments. *Requested*: the program let go. *Completed*: the block can be given out again. Between them
the block is *parked*, because ``record_stream`` named another stream that may still be using it (or because a CUDA
graph was being captured); it counts as free to the program and as taken to everybody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from o1lab.memory import trace as t
from o1lab.memory.hazards import Hazard, Use, Wait, hazards
from o1lab.memory.trace import Trace

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["Hazard", "Lifetimes", "Parking", "Use", "Wait", "figure", "hazards", "lifetimes"]


@dataclass(frozen=True)
class Parking:
    """Blocks freed while another stream might still use them.

    ``blocks``: how many; ``bytes_us``: bytes × microseconds parked; ``peak_bytes``: most parked at once.
    """

    blocks: int
    bytes_us: float
    longest_us: float
    peak_bytes: int


@dataclass(frozen=True)
class Lifetimes:
    """One row per block that lived while the trace ran, in the order of allocation.

    Attributes
    ----------
    address, size, stream : numpy.ndarray of int64, shape (m,)
        ``size`` in bytes as requested.
    pool, site : numpy.ndarray of int32, shape (m,)
        Index into ``pools`` and ``sites`` (−1: no stack recorded); ``site`` is where it was allocated.
    allocated_us, requested_us, completed_us : numpy.ndarray of float64, shape (m,)
        Microseconds since 1970; NaN where the trace does not hold the moment.
    parked : numpy.ndarray of bool, shape (m,)
        Whether anything happened between the request and the completion of the free: it waited for another stream.
    begin_us, end_us : float
        First and last entry of the trace.
    before : int
        Blocks that were live before the first entry (their allocation is not in the trace).
    never_freed, never_completed : int
        Blocks whose free was not requested, or was and did not complete, until the last entry.
    frees_without_block : int
        Frees of an address at which no block of that pool and stream was live.
    notes : tuple of str
        Those of the trace; among them, that no history was recorded.
    """

    address: np.ndarray
    size: np.ndarray
    stream: np.ndarray
    pool: np.ndarray
    site: np.ndarray
    allocated_us: np.ndarray
    requested_us: np.ndarray
    completed_us: np.ndarray
    parked: np.ndarray
    begin_us: float
    end_us: float
    before: int
    never_freed: int
    never_completed: int
    frees_without_block: int
    pools: tuple[tuple[int, int], ...] = ((0, 0),)
    sites: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.address)

    @property
    def lived_us(self) -> np.ndarray:
        """Microseconds from allocation to the request of the free, within the trace; shape (m,)."""
        return np.nan_to_num(self.requested_us, nan=self.end_us) - np.nan_to_num(self.allocated_us, nan=self.begin_us)

    @property
    def parked_us(self) -> np.ndarray:
        """Microseconds from the request of the free to its completion (0 where it did not wait); shape (m,)."""
        gap = np.nan_to_num(self.completed_us, nan=self.end_us) - self.requested_us
        return np.where(self.parked, gap, 0.0)

    @property
    def parking(self) -> Parking:
        """What was parked, all together."""
        gap, size = self.parked_us, self.size
        if not self.parked.any():
            return Parking(0, 0.0, 0.0, 0)
        begin = self.requested_us[self.parked]
        moments = np.concatenate([begin, begin + gap[self.parked]])
        change = np.concatenate([size[self.parked], -size[self.parked]])
        running = np.cumsum(change[np.lexsort((change, moments))])
        return Parking(int(self.parked.sum()), float((gap * size).sum()), float(gap.max()), int(running.max()))

    def __str__(self) -> str:
        parking = self.parking
        return (
            f"{len(self)} blocks: {self.before} from before the trace, {self.never_freed} never freed, "
            f"{self.never_completed} freed and still waited for, {self.frees_without_block} frees without a block; "
            f"{parking.blocks} parked for other streams, {parking.bytes_us / 1e12:.3g} MB·s, "
            f"longest {parking.longest_us / 1e3:.3g} ms, at most {parking.peak_bytes} bytes at once"
            + "".join(f"\nnote: {note}" for note in self.notes)
        )


def lifetimes(trace: Trace) -> Lifetimes:
    """Pair each allocation with the request and the completion of its free, by pool, stream and address.

    Examples
    --------
    >>> row = {"addr": 512, "size": 100, "stream": 0}
    >>> actions = ("alloc", "free_requested", "free_completed")
    >>> entries = [row | {"action": action, "time_us": time} for time, action in enumerate(actions)]
    >>> lives = lifetimes(t.from_snapshot({"segments": [], "device_traces": [entries]}))
    >>> len(lives), lives.lived_us.tolist(), lives.never_freed
    (1, [1.0], 0)
    """
    live: dict[tuple[int, int, int], int] = {}
    waiting: dict[tuple[int, int, int], int] = {}
    rows: list[list[float]] = []  # address, size, stream, pool, site, rows of the three moments
    orphans = before = 0
    for block in trace.start_blocks:
        key = (int(block["pool"]), int(block["stream"]), int(block["address"]))
        (waiting if block["waiting"] else live)[key] = len(rows)
        rows.append([key[2], int(block["requested"]), key[1], key[0], int(block["site"]), -1, -1, -1])
        before += 1
    columns = (trace.action, trace.address, trace.size, trace.stream, trace.pool, trace.site)
    entries = zip(*(column.tolist() for column in columns), strict=True)
    for number, (action, address, size, stream, pool, site) in enumerate(entries):
        key = (pool, stream, address)
        if action == t.ALLOC:
            live[key] = len(rows)
            rows.append([address, size, stream, pool, site, number, -1, -1])
        elif action == t.FREE_REQUESTED:
            row = live.pop(key, None)
            if row is None:
                orphans += 1
            else:
                rows[row][6] = number
                waiting[key] = row
        elif action == t.FREE_COMPLETED:
            row = waiting.pop(key, None)
            if row is not None:
                rows[row][7] = number
            elif key not in live:
                orphans += 1
    table = np.array(rows, "i8").reshape(-1, 8)
    moments = np.append(trace.time_us.astype(float), np.nan)
    requested, completed = table[:, 6], table[:, 7]
    early = np.zeros(len(table), bool)  # freed before the trace and waited for when it began
    early[:before] = trace.start_blocks["waiting"]
    parked = early | (requested >= 0) & (completed != requested + 1) & (requested != len(trace) - 1)
    begin, end = (float(moments[0]), float(moments[-2])) if len(trace) else (0.0, 0.0)
    return Lifetimes(
        table[:, 0], table[:, 1], table[:, 2], table[:, 3].astype("i4"), table[:, 4].astype("i4"),
        moments[table[:, 5]], np.where(early, begin, moments[requested]), moments[completed], parked, begin, end,
        before, len(live), len(waiting), orphans, trace.pools, trace.sites, trace.notes,
    )  # fmt: skip


def figure(lives: Lifetimes) -> go.Figure:
    """Memory over time by how long its blocks lived, above the blocks that held most for longest."""
    from o1lab.memory.lifetimes_view import drawn

    return drawn(lives)
