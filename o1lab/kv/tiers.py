"""The books of an evicting pool: which copies are under way, and what becomes of a group when one ends.

Each rule answers a fault that some engine has shipped: a copy counts for the page numbers *and generations* it was
begun with; a host page is freed only when its copy has ended; a page that is being written to from the host is not
given to anybody else; a failed copy leaves its group where it was. All of it runs under the owner's lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from o1lab.kv.asked import a_pool, hashable, page_numbers
from o1lab.kv.eviction_state import Counts
from o1lab.kv.lane import CopyFailed, Group, Job, Lane
from o1lab.kv.pool import ForeignPage, PagePool, PoolError
from o1lab.kv.ranking import ACTIVE, SHIELDED, Entry, Policy, Ranking, State

COPY = "copy"
"""Holder of every host page."""
MOST_STRIKES = 3
"""Failed jobs in a row after which nothing is copied in the background until a copy succeeds."""


class DamagedCopy(PoolError):
    """What lies in host memory is not what was copied there; it is not handed out. Release the owner and recompute."""


@dataclass(eq=False)
class Owner:
    """One owner's groups in order, the pages still written to, uses under way, and pages of groups on the device."""

    entries: list[Entry] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    active: int = 1
    loading: Job | None = None
    resident: int = 0


class Tiers:
    """Base of :class:`o1lab.kv.eviction.EvictingPool`; parameters are described there."""

    def __init__(
        self, pool: PagePool, host: PagePool, policy: Policy | None = None, *,
        clock: Callable[[], float] = time.monotonic, lane: Lane | None = None, back: Lane | None = None,
    ) -> None:  # fmt: skip
        a_pool("pool", pool)
        a_pool("host", host)
        for name, given, kind in (("policy", policy, Policy), ("lane", lane, Lane), ("back", back, Lane)):
            if given is not None and not isinstance(given, kind):
                raise PoolError(f"{name}={given!r}: give a {kind.__name__}, or nothing for ours")
        if not callable(clock):
            raise PoolError(f"clock={clock!r}: give a function that returns the time, or none")
        if pool is host:
            raise PoolError("pool and host are the same: pages need another pool to go to")
        self.pool, self.host, self.policy, self.clock = pool, host, policy or Policy(), clock
        check = self.policy.verify
        workers = 1 if pool.arena.device.type == "cuda" else 2  # there one keeps the bus busy
        self.lane = lane or Lane(pool, host, workers=workers, verify=check != "none")
        self.back = back or Lane(pool, host, verify=check == "full")
        if (check != "none" and not self.lane.verify) or (check == "full" and not self.back.verify):
            raise PoolError(f"verify={check!r} needs lanes that take checksums: make them with verify=True")
        self.counts, self.errors = Counts(), deque[PoolError](maxlen=64)
        self._owners: dict[Hashable, Owner] = {}
        self._at: dict[int, Entry] = {}  # groups on the device, by their first page
        self._seals: dict[int, tuple[Any, ...]] = {}  # by host page: owner, group, place in it, generation, sum
        self._cold, self._clean = Ranking(self.policy), Ranking(self.policy)
        self._jobs: list[Job] = []
        self._strikes, self._no_room = 0, -1
        self._lock = threading.RLock()

    def _owner(self, owner: Hashable) -> Owner:
        hashable(owner)
        if owner not in self._owners:
            raise ForeignPage(f"{owner!r} holds no pages here: it was never given any, or has been released")
        return self._owners[owner]

    def _open(self, pages: Iterable[int], owner: Hashable) -> tuple[Owner, list[int]]:
        record, numbers = self._owner(owner), page_numbers(pages)
        if not numbers or not set(numbers) <= set(record.open) or len(set(numbers)) < len(numbers):
            raise ForeignPage(f"pages {numbers} are not all open pages of {owner!r}, which are {record.open}")
        return record, numbers

    def _place(self, entry: Entry) -> None:
        """Rank a group where its state and its owner put it, and nowhere else."""
        entry.stamp += 1
        active = bool(self._owners[entry.owner].active)
        if entry.state is State.SEALED:
            self._cold.put(entry, self.clock(), active)
        elif entry.state is State.CLEAN and not active:
            self._clean.put(entry, self.clock())

    # to the host

    def _copy_early(self) -> None:
        policy, use = self.policy, 1 - self.pool.free_pages / self.pool.pages
        if use >= policy.copy_at and self._strikes < MOST_STRIKES and self.host.free_pages > self._no_room:
            room = policy.in_flight_pages - sum(len(job.pages) for job in self._jobs)
            if room > 0:
                self._copy(room, ACTIVE if policy.copy_active else SHIELDED)

    def _copy(self, wanted: int, level: int) -> list[Job]:
        """Put copies of at least ``wanted`` cold pages under way, if there are as many and the host has room."""
        jobs, sent = [], 0
        while sent < wanted:
            batch, pages = [], 0
            while pages < min(wanted - sent, self.policy.batch_pages):
                entry = self._cold.pop(self.clock(), level)
                if entry is None:
                    break
                batch.append(entry)
                pages += len(entry.pages)
            groups = self._with_slots(sorted(batch, key=lambda entry: entry.pages[0]))  # neighbours copy as one
            if groups:
                sent += sum(len(pages) for pages, _, _ in groups)
                written = [self._at[pages[0]].written for pages, _, _ in groups]
                jobs.append(self._submit(self.lane, Job(True, groups, after=written)))
            if len(groups) < len(batch):
                self.counts.host_full += 1
                self._no_room = self.host.free_pages  # nothing more in the background until there is more
            if len(groups) < len(batch) or not batch:
                break
        self.counts.copied_pages += sent
        return jobs

    def _with_slots(self, batch: list[Entry]) -> list[Group]:
        groups, after = [], None
        for entry in batch:
            n = len(entry.pages)
            if n > self.host.free_pages and not self._owners[entry.owner].active:
                self._reclaim(n - self.host.free_pages)
            if n > self.host.free_pages:
                self._place(entry)
                continue
            slots = self.host.allocate(n, COPY, after=after)
            after, entry.state = slots[-1], State.COPYING
            groups.append((entry.pages, entry.generations, slots))
        return groups

    def _reclaim(self, short: int) -> None:
        """Drop host copies of pages that active owners have on the device anyway."""
        for record in self._owners.values():
            for entry in record.entries if record.active else ():
                if short <= 0:
                    return
                if entry.state is State.CLEAN:
                    short -= len(entry.slots)
                    self._drop_copy(entry)
                    entry.state = State.SEALED
                    self._place(entry)

    def _submit(self, lane: Lane, job: Job) -> Job:
        self._jobs.append(job)
        lane.submit(job)
        if job.done.is_set():
            self._settle()
        return job

    def _settle(self) -> None:
        for job in list(self._jobs):
            if not job.done.is_set():
                (self.lane if job.to_host else self.back).find_dead(job)
            if job.done.is_set():
                self._jobs.remove(job)
                begin, failure = 0, job.error if self.policy.verify != "none" else None
                for group in job.groups:
                    part = slice(begin, begin + len(group[0]))
                    begin += len(group[0])
                    if job.to_host:
                        self._stored(job, failure, group, part)
                    else:
                        self._loaded(job, failure, group[0], part)
                if job.to_host:
                    self._strikes = 0 if job.error is None else self._strikes + 1

    def _stored(self, job: Job, error: PoolError | None, group: Group, part: slice) -> None:
        """A copy to the host has ended: whose it is is looked up anew, for its pages may have changed hands."""
        pages, generations, slots = group
        entry = self._at.get(pages[0])
        fits = entry is not None and entry.pages == pages and not entry.slots
        stale = [self.pool.generation(page) for page in pages] != generations
        dropped = stale and self.policy.verify == "full"  # whatever was read, it was not for whoever has the pages now
        error = None if dropped else error
        if error is None and not dropped and job.source[part] != job.target[part]:
            who = repr(entry.owner) if fits else "nobody"
            error = CopyFailed(f"the copy of pages {pages} of {who} is not what was read: it is dropped, they stay")
        if error is None and fits and not dropped:
            sums = job.target[part] or [None] * len(pages)
            entry.state, entry.slots, entry.sealed = State.CLEAN, slots, generations
            for place, (slot, generation, found) in enumerate(zip(slots, generations, sums, strict=True)):
                self._seals[slot] = (entry.owner, entry.index, place, generation, found)
            self._place(entry)
            return
        self.host.free(slots, COPY)
        self.counts.stale_copies += stale
        if error is not None:
            self.counts.rejected_copies += 1
            self.errors.append(error)
            job.error = error
        if fits and entry.state is State.COPYING and entry.generations == generations:
            entry.state = State.SEALED
            self._place(entry)

    def _drop_copy(self, entry: Entry) -> None:
        if entry.slots:
            for slot in entry.slots:
                del self._seals[slot]
            self.host.free(entry.slots, COPY)
            entry.slots = []

    def _helps(self, job: Job) -> bool:
        """Whether pages of idle owners are on their way to the host with this job."""
        entries = [self._at.get(pages[0]) for pages, _, _ in job.groups] if job.to_host else []
        return any(entry is not None and not self._owners[entry.owner].active for entry in entries)

    # off the device and back

    def _evict(self, entry: Entry) -> None:
        self._leave_device(entry)
        entry.state = State.HOST
        self.counts.evicted_pages += len(entry.slots)
        self.counts.unverified_pages += sum(self._seals[slot][-1] is None for slot in entry.slots)

    def _leave_device(self, entry: Entry) -> None:
        stale = self.policy.verify == "full" and [*map(self.pool.generation, entry.pages)] != entry.generations
        self.pool.free(entry.pages, entry.owner, generations=entry.generations if stale else None)  # raises if stale
        del self._at[entry.pages[0]]
        if not entry.released:
            self._owners[entry.owner].resident -= len(entry.pages)
        entry.pages, entry.generations = [], []

    def _load(self, owner: Hashable, record: Owner) -> Job | None:
        """Put everything of an owner that is on the host only on its way back; there is room for it."""
        groups, after = [], None
        for entry in record.entries:
            if entry.state is State.HOST:
                entry.pages = self.pool.allocate(len(entry.slots), owner, after=after)
                entry.generations = [self.pool.generation(page) for page in entry.pages]
                entry.state, after = State.RESTORING, entry.pages[-1]
                self._at[entry.pages[0]] = entry
                record.resident += len(entry.pages)
                groups.append((entry.pages, entry.generations, entry.slots))
        if groups:
            job = record.loading = Job(False, groups)
            self.counts.restored_pages += len(job.pages)
            return self._submit(self.back, job)
        return None

    def _loaded(self, job: Job, error: PoolError | None, pages: list[int], part: slice) -> None:
        entry = self._at[pages[0]]
        record = self._owners.get(entry.owner)
        if record is not None and record.loading is job:
            record.loading = None
        if entry.released:
            self._leave_device(entry)
            self._drop_copy(entry)
            return
        entry.fault = error
        if entry.fault is None and self.policy.verify == "full":
            entry.fault = self._judge(entry, job.target[part])
        if entry.fault is None:
            entry.state = State.CLEAN
            self._place(entry)
        else:
            self.counts.rejected_restores += 1
            self.errors.append(entry.fault)
            self._leave_device(entry)
            entry.state = State.HOST

    def _judge(self, entry: Entry, sums: list[int]) -> PoolError | None:
        """Whether what came back is what was sealed, and if not, whether the host copy is still whole."""
        what = f"group {entry.index} of {entry.owner!r}"
        seals = [self._seals[slot] for slot in entry.slots]
        if [seal[:4] for seal in seals] != [(entry.owner, entry.index, *one) for one in enumerate(entry.sealed)]:
            return DamagedCopy(f"{what}: its host pages {entry.slots} hold {seals[0][:4]}; release it and recompute")
        expected = [seal[4] for seal in seals]
        if sums == expected:
            return None
        if self.back.host_sums(entry.slots).tolist() != expected:
            return DamagedCopy(f"{what}: its host pages {entry.slots} have changed; release it and recompute")
        return CopyFailed(f"{what} was damaged on its way back; the host copy is whole: restore it again")
