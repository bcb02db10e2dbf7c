"""A cache design that keeps what it had to give up: preempted sequences and idle prefixes go to the host and come back.

Served by :func:`o1lab.kv.replay.replay` like every design. A sequence that is preempted, and a prefix that nobody uses,
stay until a request fails; when they are asked for again they are taken up, or restored, instead of computed anew.
:func:`compare_policies` serves the same traffic with the policy as written and with ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from o1lab.kv.designs import KVShape, Paged
from o1lab.kv.eviction import EvictingPool
from o1lab.kv.lane import host_pool
from o1lab.kv.pool import PoolExhausted
from o1lab.kv.ranking import Policy
from o1lab.kv.replay import Outcome, replay
from o1lab.kv.tiers import DamagedCopy
from o1lab.kv.traffic import Request, Traffic


class Offloading(Paged):
    """Paged, with a host pool behind it.

    Parameters
    ----------
    host_bytes : int
    policy : Policy, optional
        Times in it are steps of the replay.

    Attributes
    ----------
    tiers : EvictingPool
    reusable_tokens, reused_tokens, restored_tokens : int
        Tokens that had been computed before when their sequence was admitted, those of them that were still there on
        either side, and those of the latter that had to be brought back first.
    """

    name = "paged, offloading"

    def __init__(
        self, shape: KVShape, memory: Any = None, *, capacity_bytes: int, host_bytes: int,
        policy: Policy | None = None, **sizes: int,
    ) -> None:  # fmt: skip
        super().__init__(shape, memory, capacity_bytes=capacity_bytes, **sizes)
        self.tiers = EvictingPool(self.pool, host_pool(self.pool, host_bytes), policy, clock=lambda: self.memory.step)
        self.reusable_tokens = self.reused_tokens = self.restored_tokens = 0
        self._whole: dict[int, int] = {}  # length at which a sequence is finished
        self._length: dict[Any, int] = {}  # tokens that each owner's pages hold: of a sequence, or of a prefix
        self._parts: dict[int, list[Any]] = {}  # owners that a running sequence keeps active

    def admit(self, request: Request, tokens: int) -> bool:
        """Take up what is left of its prefix and of the sequence itself, then grow to ``tokens``."""
        number, full = request.number, request.prefix_tokens // self.page_tokens * self.page_tokens
        parts = [(f"prefix {request.prefix}", full)] * bool(request.prefix and full) + [(number, tokens)]
        self._held[number], self._parts[number], self._tokens[number] = [], [], 0
        self._whole[number] = request.tokens
        known, reused = sum(self._length.get(owner, 0) for owner, _ in parts), 0
        restored = self.tiers.counts.restored_pages
        try:
            for owner, end in parts:
                reused += self._take_up(number, owner)
                self._extend(number, owner, end)
        except PoolExhausted:
            self.end(number)
            return False
        self.reusable_tokens, self.reused_tokens = self.reusable_tokens + known, self.reused_tokens + reused
        pages = self.tiers.counts.restored_pages - restored
        self.restored_tokens += pages // self.shape.layers * self.page_tokens
        return True

    def grow(self, number: int, tokens: int) -> bool:
        """Groups of pages behind the last; each that is full is sealed."""
        try:
            self._extend(number, number, tokens)
        except PoolExhausted:
            return False
        return True

    def end(self, number: int) -> None:
        """Give a finished sequence's pages back; what may be asked for again stays, idle."""
        for owner in self._parts.pop(number):
            if owner == number and self._tokens[number] >= self._whole[number]:
                self.tiers.release(owner)
                del self._length[owner]
            else:
                self.tiers.rest(owner)
                if owner != number and owner in self._running():
                    self.saved_tokens -= self._length[owner]
        del self._held[number]

    def _running(self) -> set[Any]:
        return {owner for parts in self._parts.values() for owner in parts}

    def _take_up(self, number: int, owner: Any) -> int:
        """Tokens of an owner's that are there again."""
        if owner not in self.tiers:
            return 0
        try:
            pages = self.tiers.restore(owner)
        except DamagedCopy:
            self.tiers.release(owner)
            del self._length[owner]
            return 0
        if owner != number and owner in self._running():
            self.saved_tokens += self._length[owner]
        self._parts[number].append(owner)
        self._held[number] += pages
        self._tokens[number] += self._length[owner]
        return self._length[owner]

    def _extend(self, number: int, owner: Any, end: int) -> None:
        """Grow a sequence to ``end`` tokens with pages of ``owner``; all or nothing."""
        held, layers, size, begin = self._held[number], self.shape.layers, self.page_tokens, self._tokens[number]
        new: list[int] = []
        try:
            while (len(held) + len(new)) * size < end * layers:
                new += self.tiers.allocate(layers, owner, after=(held + new or [None])[-1])
        except PoolExhausted:
            if new:
                self.tiers.trim(new, owner)
            if owner not in self._length and owner in self.tiers:
                self.tiers.release(owner)
            raise
        if end <= begin:
            return
        held += new
        if owner not in self._length:
            self._parts[number].append(owner)
        if self.memory.device != "meta":
            self._write(held, begin, end)
        for group in range(begin // size, end // size):
            self.tiers.seal(held[group * layers : (group + 1) * layers], owner)
        self._tokens[number] = end
        self._length[owner] = self._length.get(owner, 0) + end - begin


@dataclass(frozen=True)
class Served:
    """Traffic served under one policy.

    Attributes
    ----------
    outcome : Outcome
    out_bytes, back_bytes, late_bytes : int
        Copied to the host and back, and those of the former for which a failed request had to wait.
    evictions, restored_pages, refusals : int
        Pages evicted and brought back; failed requests that eviction did not help.
    hit_rate, device_hit_rate : float
        Share of the tokens computed before that did not have to be computed again, and of those that had not even left
        the device.
    stalls_us : numpy.ndarray
        Time in which room was made for each failed request, in µs; means something with real memory only.
    """

    policy: str
    outcome: Outcome
    out_bytes: int
    back_bytes: int
    late_bytes: int
    evictions: int
    restored_pages: int
    refusals: int
    hit_rate: float
    device_hit_rate: float
    stalls_us: np.ndarray

    def __str__(self) -> str:
        stall = f"{np.median(self.stalls_us):,.0f}/{self.stalls_us.max():,.0f}" if self.stalls_us.size else "-"
        return (
            f"{self.policy:<22}{self.outcome.finished:>7}{self.outcome.failures:>6}{self.outcome.preemptions:>9}"
            f"{self.out_bytes / 2**20:>9.1f}{self.late_bytes / 2**20:>9.1f}{self.back_bytes / 2**20:>9.1f}"
            f"{self.evictions:>9}{self.restored_pages:>9}{self.refusals:>9}{self.hit_rate:>8.1%}{self.device_hit_rate:>8.1%}{stall:>16}"
        )


HEAD = (
    f"{'policy':<22}{'served':>7}{'lost':>6}{'preempt':>9}{'out MiB':>9}{'late MiB':>9}{'back MiB':>9}"
    f"{'evicted':>9}{'restored':>9}{'refused':>9}{'hits':>8}{'on dev':>8}{'stall µs, max':>16}"
)


def compare_policies(
    traffic: Traffic, shape: KVShape | None = None, *, capacity_bytes: int, host_bytes: int,
    policies: Mapping[str, Policy] | None = None, memory: Callable[[], Any] | None = None,
    sizes: Mapping[str, int] | None = None, **settings: Any,
) -> list[Served]:  # fmt: skip
    """Serve the same traffic under each policy; default: as the article has it, and ours.

    Parameters
    ----------
    memory : callable, optional
        The memory of each design, e.g. ``lambda: OnDevice("cpu")``; default: books only, in which copies take no time.
    sizes
        ``page_bytes`` and ``chunk_bytes`` of the pools.
    **settings
        Of :func:`o1lab.kv.replay.replay`; by default the youngest sequence is preempted.

    Examples
    --------
    >>> from o1lab.kv.traffic import long_cot
    >>> written, ours = compare_policies(long_cot(12, concurrent=6, median_tokens=900, most_tokens=2000),
    ...                                  capacity_bytes=96 << 20, host_bytes=1 << 30)
    >>> ours.late_bytes < written.late_bytes
    True
    """
    found = []
    for name, policy in (policies or {"as written": Policy.as_written(), "ours": Policy()}).items():
        design = Offloading(
            shape or KVShape(), memory() if memory else None, capacity_bytes=capacity_bytes, host_bytes=host_bytes,
            policy=policy, **(sizes or {}),
        )  # fmt: skip
        outcome = replay(traffic, design, **{"when_full": "youngest", **settings})
        design.tiers.settle(wait=True)
        design.tiers.check()
        counts, page = design.tiers.counts, design.pool.page_bytes
        known, there = max(design.reusable_tokens, 1), design.reused_tokens
        hits = there / known, (there - design.restored_tokens) / known
        found.append(
            Served(name, outcome, counts.copied_pages * page, counts.restored_pages * page, counts.late_pages * page,
                   counts.evicted_pages, counts.restored_pages, counts.refusals, *hits, np.array(counts.stalls_us))
        )  # fmt: skip
    return found
