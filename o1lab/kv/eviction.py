"""A pool that moves idle pages to host memory when a request fails, and back when they are asked for.

Eviction happens only when at least 95 % of the pages are in use and a request has failed, and only for what is missing.
Pages that are full do not change any more, so they are copied before that, in the background; a page may go only once
its copy has been summed and found equal. Then eviction is a matter of books. Owners are active or idle; only what idle
ones hold can go.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Iterable

from o1lab.kv.asked import span
from o1lab.kv.eviction_state import faults
from o1lab.kv.lane import CopyFailed
from o1lab.kv.pool import ForeignPage, PagePool, PoolError, PoolExhausted
from o1lab.kv.ranking import ACTIVE, READY, SHIELDED, Entry, State
from o1lab.kv.tiers import DamagedCopy, Owner, Tiers


class EvictionRefused(PoolExhausted):
    """A failed request for which nothing was evicted, or not enough could be; says which condition was not met."""

    def __init__(self, asked: int, pool: PagePool, why: str) -> None:
        super().__init__(asked, pool.free_pages, pool.pages, pool.state())
        self.why = why
        self.args = (f"{self.args[0]}; nothing more is evicted: {why}",)


class EvictingPool(Tiers):
    """Pages on a device backed by a pool in host memory; safe for several threads.

    Parameters
    ----------
    pool, host : PagePool
        Pages of one size; from now on used through this object only. ``host`` as :func:`o1lab.kv.lane.host_pool` makes.
    policy : Policy, optional
    clock : callable, optional
        Time of last uses and time-to-live; default ``time.monotonic``.
    lane, back : Lane, optional
        Where copies to the host and back run; default: a thread each, and one more to the host on a CPU.

    Attributes
    ----------
    counts : Counts
    errors : deque of PoolError
        The last copies that were rejected, and why. The pages of each stayed where they were.

    Examples
    --------
    >>> from o1lab.kv.lane import host_pool
    >>> pool = PagePool(4 << 12, device="cpu", page_bytes=1 << 12, chunk_bytes=1 << 14)
    >>> tiers = EvictingPool(pool, host_pool(pool, 8 << 12))
    >>> pages = tiers.allocate(3, "first")
    >>> _ = pool.page(pages[0]).fill_(7)
    >>> tiers.seal(pages, "first")
    >>> tiers.rest("first")
    >>> tiers.allocate(2, "second")  # 75 % in use: the request fails and nothing is evicted
    Traceback (most recent call last):
    o1lab.kv.eviction.EvictionRefused: asked for 2 pages ...; nothing more is evicted: 75% of the pages are in use, ...
    >>> more = tiers.allocate(1, "second"), tiers.allocate(1, "second")  # the other one evicts
    >>> tiers.release("second")
    >>> pool.page(tiers.restore("first")[0])[:2].tolist()
    [7, 7]
    """

    def allocate(self, n: int, owner: Hashable, *, contiguous: bool = True, after: int | None = None) -> list[int]:
        """Hand out ``n`` pages to an owner; a new one is active. Evicts what is missing where the policy allows it.

        Raises
        ------
        EvictionRefused
            Too little is free, and eviction is not allowed or would not be enough; nothing was handed out.
        CopyFailed
            Copies that the request had to wait for failed twice.
        """
        if owner is None:
            raise PoolError("owner=None: pages that may be evicted need an owner to be restored for")
        with self._lock:
            self._settle()
            if isinstance(n, int) and n > self.pool.free_pages:
                self._make_room(n)
            pages = self.pool.allocate(n, owner, contiguous=contiguous, after=after)
            self._owners.setdefault(owner, Owner()).open += pages
            self._copy_early()
        return pages

    def seal(self, pages: Iterable[int], owner: Hashable) -> None:
        """Declare pages full, written by the current stream; from now on they go and come as one group.

        Nothing may write to them again: a change between copy and eviction goes unseen, and is lost.
        """
        with self._lock:
            record, numbers = self._open(pages, owner)
            record.open = [page for page in record.open if page not in numbers]
            generations = [self.pool.generation(page) for page in numbers]
            entry = Entry(owner, len(record.entries), numbers, generations, self.clock(), written=self.lane.mark())
            record.entries.append(entry)
            record.resident += len(numbers)
            self._at[numbers[0]] = entry
            self._place(entry)
            self._settle()
            self._copy_early()

    def trim(self, pages: Iterable[int], owner: Hashable) -> None:
        """Give back open pages, such as those of tokens that were taken back."""
        with self._lock:
            record, numbers = self._open(pages, owner)
            self.pool.free(numbers, owner)
            record.open = [page for page in record.open if page not in numbers]

    def rest(self, owner: Hashable, ttl: float | None = None) -> None:
        """One use of the owner ends; after the last one it is idle, and its sealed pages can be evicted.

        Parameters
        ----------
        ttl : float, optional
            Time for which it is likely to come back: shielded until then, and among the first to go afterwards.
        """
        if ttl is not None:
            span("ttl", ttl)
        with self._lock:
            record = self._owner(owner)
            if not record.active:
                raise PoolError(f"{owner!r} is idle already: rest ends one restore, or the first allocation")
            record.active -= 1
            for entry in record.entries:
                entry.last_use, entry.expiry = self.clock(), None if ttl is None else self.clock() + ttl
                self._place(entry)

    def touch(self, owner: Hashable) -> None:
        """Count a use and note its time."""
        with self._lock:
            for entry in self._owner(owner).entries:
                entry.last_use, entry.uses = self.clock(), entry.uses + 1
                self._place(entry)

    def restore(self, owner: Hashable) -> list[int]:
        """Make an owner active (one use more), all its pages on the device, and return them in order.

        Raises
        ------
        EvictionRefused
            There is no room for them; the owner stays as it was.
        CopyFailed
            They could not be copied back, twice; the owner stays as it was, its host copies are whole.
        DamagedCopy
            A host copy is not what was written: release the owner and compute its tokens again.
        """
        with self._lock:
            record = self._owner(owner)
            record.active += 1  # nothing of it may go while the rest is on its way
            self.touch(owner)
        try:
            error = self._bring(owner, record)
            if error is not None and not isinstance(error, DamagedCopy):
                error = self._bring(owner, record)
            if error is not None:
                raise error
        except PoolError:
            with self._lock:
                record.active -= 1
                for entry in record.entries if self._owners.get(owner) is record else ():
                    self._place(entry)
            raise
        with self._lock:
            return [page for entry in record.entries for page in entry.pages] + record.open

    def _bring(self, owner: Hashable, record: Owner) -> PoolError | None:
        with self._lock:
            self._settle()
            job = record.loading
            damaged = any(isinstance(entry.fault, DamagedCopy) for entry in record.entries)
            if job is None and not damaged and self._owners.get(owner) is record:
                need = sum(len(entry.slots) for entry in record.entries if entry.state is State.HOST)
                if need > self.pool.free_pages:
                    self._make_room(need)
                job = self._load(owner, record)
        if job is not None:
            self.back.wait(job, self.policy.patience_s)
        with self._lock:
            self._settle()
            if self._owners.get(owner) is not record:
                return ForeignPage(f"{owner!r} was released while it was being restored")
            away = [entry for entry in record.entries if entry.state is State.HOST]
            found = [entry.fault for entry in away if entry.fault is not None]
            found.sort(key=lambda fault: not isinstance(fault, DamagedCopy))
            return (found or [CopyFailed(f"{owner!r} is not back yet: restore it again")])[0] if away else None

    def release(self, owner: Hashable) -> None:
        """Give back all that an owner has, on both sides; what a copy still touches goes when the copy is done."""
        with self._lock:
            self._settle()
            record = self._owner(owner)
            del self._owners[owner]
            self.pool.free(record.open, owner)
            for entry in record.entries:
                entry.stamp, entry.released = entry.stamp + 1, True
                if entry.state is not State.RESTORING:
                    if entry.pages:
                        self._leave_device(entry)
                    self._drop_copy(entry)

    def write_back(self, *, wait: bool = False) -> int:
        """Copy all sealed pages now, whatever is in use; returns how many pages were put under way.

        With ``wait`` until they are done; the first copy that failed is raised then, after all have ended.
        """
        with self._lock:
            self._settle()
            jobs = self._copy(self.pool.pages, ACTIVE)
        if wait:
            for job in jobs:
                self.lane.wait(job, self.policy.patience_s)
                self.settle()  # while the next ones are on their way
            for job in jobs:
                if job.error is not None:
                    raise job.error
        return sum(len(job.pages) for job in jobs)

    def settle(self, *, wait: bool = False) -> None:
        """Take note of copies that have ended, as every call does that needs it; with ``wait``, of all of them."""
        while jobs := list(self._jobs) if wait else ():
            for job in jobs:
                (self.lane if job.to_host else self.back).wait(job, self.policy.patience_s)
            with self._lock:
                self._settle()
        with self._lock:
            self._settle()

    @property
    def copying_pages(self) -> int:
        """Pages on their way to the host or back, as far as noted by :meth:`settle`."""
        return sum(len(job.pages) for job in tuple(self._jobs))

    def states(self) -> Counter[str]:
        """Pages of the device by state, ``"FREE"`` and ``"OPEN"`` (still written to) among them; ``"HOST"`` beside."""
        with self._lock:
            found = Counter(FREE=self.pool.free_pages)
            found["OPEN"] = sum(len(record.open) for record in self._owners.values())
            for entry in self._at.values():
                found[entry.state.name] += len(entry.pages)
            for record in self._owners.values():
                found["HOST"] += sum(len(entry.slots) for entry in record.entries if entry.state is State.HOST)
            return +found

    def __contains__(self, owner: Hashable) -> bool:
        return owner in self._owners

    def check(self) -> None:
        """Conservation on both sides: each page is free, open, or in just one group, and each group has what it needs.

        Raises
        ------
        PoolError
            The books are wrong.
        """
        with self._lock:
            self.pool.check()
            self.host.check()
            if wrong := faults(self):
                raise PoolError(f"the books of the evicting pool are wrong: {'; '.join(wrong)}")

    # eviction

    def _make_room(self, n: int) -> None:
        """Evict what is missing for a request of ``n`` pages that has failed, and keep count of it."""
        begin, counts, copied = time.perf_counter_ns(), self.counts, self.counts.copied_pages
        counts.failed_requests += 1
        counts.refusals += 1  # until it is served
        try:
            self._evict_for(n)
        finally:
            counts.late_pages += counts.copied_pages - copied
        counts.refusals -= 1
        counts.stalls_us.append((time.perf_counter_ns() - begin) / 1000)

    def _evict_for(self, n: int) -> None:
        pool, least = self.pool, self.policy.evict_at
        use = 1 - pool.free_pages / pool.pages
        held, failures = sum(record.resident for record in self._owners.values() if not record.active), 0
        if use < least:
            raise EvictionRefused(n, pool, f"{use:.0%} of the pages are in use, eviction begins at {least:.0%}")
        if held < n - pool.free_pages:
            raise EvictionRefused(n, pool, f"idle owners hold {held} pages in full groups, all others are in use")
        for level in (READY, SHIELDED):
            while (short := n - pool.free_pages) > 0:
                entry = self._clean.pop(self.clock(), level)
                if entry is not None:
                    self._evict(entry)
                    continue
                copying = [job for job in self._jobs if self._helps(job)] or self._copy(short, level)
                if not copying:
                    break
                self.lane.wait(copying[0], self.policy.patience_s)
                self._settle()
                failures += copying[0].error is not None
                if failures > 1:
                    raise copying[0].error
        if n > pool.free_pages:
            raise EvictionRefused(n, pool, f"the host has {self.host.free_pages} free pages for what has no copy yet")
