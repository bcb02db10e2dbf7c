"""What goes first: the policy, the states of a group of pages, and an order that costs O(log n) to keep.

Coldness is ``age / τ − log₂(1 + uses) + w · [TTL has passed]``: least recently used first, each doubling of the uses
worth τ of age, an expired time-to-live worth ``w`` τ. All ages grow alike, so the order changes only when an entry is
used or expires, and a heap keeps it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from o1lab.kv.asked import span
from o1lab.kv.pool import PoolError

CHECKS = ("none", "copy", "full")


class State(Enum):
    """Where a group of pages is. Pages not yet sealed are written to and have no state."""

    SEALED = "full and unchanging, on the device only"
    COPYING = "being copied to the host"
    CLEAN = "on the device, with a verified copy on the host"
    HOST = "on the host only"
    RESTORING = "being copied back"


@dataclass(frozen=True)
class Policy:
    """When to copy and to evict, and what to check.

    Parameters
    ----------
    evict_at : float
        Share of the pages in use from which a failed request may evict.
    copy_at : float
        Share from which sealed pages are copied in the background; ``inf``: only when they are to be evicted.
    copy_active : bool
        Copy pages of active owners as well, after all others: they may have to go at short notice.
    age, overdue : float
        τ in units of the clock, and the weight of an expired time-to-live in τ.
    shield : float or None
        Idle owners are spared for this long after their last use, and until their time-to-live has passed, unless
        nothing else is left; ``None`` spares nobody. Active owners are always spared.
    verify : {"full", "copy", "none"}
        ``"copy"`` compares contents when a page has been copied; ``"full"`` also owner, place and generation, and all
        of it again when the page comes back; ``"none"`` takes a copy for made however it ended: a control.
    batch_pages, in_flight_pages : int
        Pages of one job, and most that are copied at a time.
    patience_s : float
        Longest wait for one copy.
    """

    evict_at: float = 0.95
    copy_at: float = 0.8
    copy_active: bool = True
    age: float = 60.0
    overdue: float = 4.0
    shield: float | None = 1.0
    verify: str = "full"
    batch_pages: int = 128
    in_flight_pages: int = 512
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        if self.verify not in CHECKS:
            raise PoolError(f"verify={self.verify!r}: one of {', '.join(CHECKS)}")
        for name in ("evict_at", "copy_at", "age", "patience_s", "overdue"):
            span(name, getattr(self, name))
        if self.shield is not None:
            span("shield", self.shield)
        if not 0 <= self.evict_at <= 1 or not self.copy_at >= 0 or not 0 < self.age < math.inf:
            raise PoolError(f"evict_at={self.evict_at!r}, copy_at={self.copy_at!r}, age={self.age!r}: out of range")
        for name in ("batch_pages", "in_flight_pages"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PoolError(f"{name}={value!r}: a whole number of pages, at least 1")

    @classmethod
    def as_written(cls, **changes: object) -> Policy:
        """The article's: copies and verifies while the failed request waits, spares nobody who is idle."""
        return cls(**{"copy_at": math.inf, "copy_active": False, "shield": None, "verify": "copy", **changes})


@dataclass(eq=False)
class Entry:
    """A group of pages that is copied, evicted and restored as one: a token group of all layers, or a single page.

    Attributes
    ----------
    index : int
        Place among its owner's groups.
    generations, sealed : list of int
        Of the pages now, and of those that were copied.
    slots : list of int
        Pages of the host pool with its verified copy.
    last_use, expiry : float
    uses : int
        Timestamp and access counter, and the end of the time-to-live.
    written : torch.cuda.Event or None
        After which the pages are whole.
    """

    owner: Hashable
    index: int
    pages: list[int]
    generations: list[int]
    last_use: float
    expiry: float | None = None
    uses: int = 0
    state: State = State.SEALED
    slots: list[int] = field(default_factory=list)
    sealed: list[int] = field(default_factory=list)
    stamp: int = 0
    written: Any = None
    released: bool = False
    fault: PoolError | None = None


READY, SHIELDED, ACTIVE = range(3)
LEAST_ITEMS = 256
"""Of a heap that is cleared of what is gone."""


class Ranking:
    """Entries from the coldest to the most precious; of one owner's, the last first.

    An entry stands in one ranking at most: a change of its ``stamp`` takes it out of wherever it was.

    Examples
    --------
    >>> ranking = Ranking(Policy(shield=None))
    >>> for index, last_use in enumerate([3.0, 1.0, 1.0]):
    ...     ranking.put(Entry("a", index, [index], [0], last_use), now=5.0)
    >>> [ranking.pop(5.0).index for _ in range(3)]
    [2, 1, 0]
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._ready: list[tuple[float, int, int, int, Entry]] = []
        self._waiting: list[tuple[float, int, int, int, Entry]] = []
        self._count, self._most = 0, [LEAST_ITEMS, LEAST_ITEMS]

    def put(self, entry: Entry, now: float, active: bool = False) -> None:
        """Rank an entry anew."""
        entry.stamp += 1
        policy = self.policy
        until = math.inf if active else -math.inf if entry.expiry is None else entry.expiry
        if policy.shield is not None:
            until = max(until, entry.last_use + policy.shield)
        if until > now:
            self._push(self._waiting, until, entry)
        if until <= now or (policy.shield is None and not active):
            self._rank(entry, now)

    def pop(self, now: float, level: int = READY) -> Entry | None:
        """Take out the coldest; shielded ones and those of active owners only when no other is left, and asked for."""
        waiting = self._waiting
        while waiting and (waiting[0][0] <= now or self._gone(waiting[0])):
            item = heapq.heappop(waiting)
            if not self._gone(item):
                self._rank(item[-1], now)
        while self._ready:
            item = heapq.heappop(self._ready)
            if not self._gone(item):
                item[-1].stamp += 1
                return item[-1]
        if waiting and level >= (ACTIVE if waiting[0][0] == math.inf else SHIELDED):
            entry = heapq.heappop(waiting)[-1]
            entry.stamp += 1
            return entry
        return None

    def _rank(self, entry: Entry, now: float) -> None:
        expired = entry.expiry is not None and entry.expiry <= now
        key = entry.last_use + self.policy.age * (math.log2(1 + entry.uses) - self.policy.overdue * expired)
        self._push(self._ready, key, entry)

    def _push(self, heap: list[tuple[float, int, int, int, Entry]], key: float, entry: Entry) -> None:
        self._count += 1
        heapq.heappush(heap, (key, -entry.index, self._count, entry.stamp, entry))
        if len(heap) >= self._most[heap is self._ready]:  # what was ranked anew has left its old items behind
            heap[:] = [item for item in heap if not self._gone(item)]
            heapq.heapify(heap)
            self._most[heap is self._ready] = 2 * len(heap) + LEAST_ITEMS

    @staticmethod
    def _gone(item: tuple[float, int, int, int, Entry]) -> bool:
        return item[3] != item[-1].stamp
