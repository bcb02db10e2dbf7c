"""A pool of equal pages, reserved once: pages are handed out by flipping bits, so memory cannot fragment or creep.

Chunks of 64 MiB hold pages of 256 KiB each; a bitmap per chunk is the truth, a stack of chunks with room is the free
list, one lock keeps both. Pages are plain numbers, as block tables want them. A page has a holder, or several that
share it (a common prefix), and a generation that grows each time it comes back, so that an old number can be told from
a new one.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from o1lab.errors import O1labError
from o1lab.kv.asked import hashable, one_each, page_number, page_numbers
from o1lab.kv.pages import FreePages, is_run
from o1lab.kv.pool_state import NOBODY, PoolState, PoolStats, counts, faults, reserve

if TYPE_CHECKING:
    import torch

    from o1lab.kv.fragmentation import Fragmentation

PAGE_BYTES, CHUNK_BYTES = 256 << 10, 64 << 20


class PoolError(O1labError):
    """A pool that cannot be made or used as asked; the message names the page and the way out."""


class DoubleFree(PoolError):
    """A page was given back that is free already."""


class ForeignPage(PoolError, LookupError):
    """A number that is no page of this pool, or a page that the named owner does not hold."""


class StalePage(PoolError):
    """A page was used after it had been given back: it is free, or belongs to somebody else by now."""


class PoolExhausted(PoolError):
    """Fewer pages are free than were asked for; nothing was handed out.

    Attributes
    ----------
    asked, free, short : int
        Pages asked for, pages free at that moment, and how many were missing: evict ``short`` pages, not ``asked``.
    """

    def __init__(self, asked: int, free: int, pages: int, state: PoolState) -> None:
        self.asked, self.free, self.short, self._state = asked, free, asked - free, state
        text = f"asked for {asked} pages ({asked * state.page_bytes / 2**20:.2f} MiB), {free} of {pages} are free: "
        if asked > pages:
            text += "the pool never holds that many; make it larger or ask for less at a time"
        else:
            text += f"give back or evict {self.short}, or make the pool larger"
        super().__init__(text)

    @cached_property
    def fragmentation(self) -> Fragmentation:
        """The pool's measures at that moment; worked out when asked for, as the failing request must not pay for it."""
        from o1lab.kv.fragmentation import fragmentation

        return fragmentation(self._state)


class PagePool:
    """Pages of ``page_bytes`` bytes on ``device``, reserved at once and handed out in constant time.

    Parameters
    ----------
    bytes : int
        To reserve; rounded down to whole pages. The last chunk may be smaller than the others.
    device : str or torch.device
        ``"meta"`` keeps the books without memory, which is what a simulation needs.
    page_bytes, chunk_bytes : int
        A chunk is a whole number of pages.

    Attributes
    ----------
    arena : torch.Tensor, uint8, shape (bytes,)
        All chunks, one behind the other in one allocation: a kernel needs one base address. Its content is undefined.
    pages, page_bytes, chunk_pages, bytes : int

    Raises
    ------
    PoolError
        Sizes that do not fit one another, or no memory on the device.

    Examples
    --------
    >>> pool = PagePool(4 << 20, device="cpu", page_bytes=1 << 20)
    >>> pages = pool.allocate(3, owner="request 7")
    >>> pages, pool.page(pages[0]).shape
    ([0, 1, 2], torch.Size([1048576]))
    >>> pool.allocate(2)
    Traceback (most recent call last):
    o1lab.kv.pool.PoolExhausted: asked for 2 pages (2.00 MiB), 1 of 4 are free: give back or evict 1, or make ...
    >>> pool.free(pages, owner="request 7")
    >>> print(pool.stats())
    0 of 4 pages in use (0.0%, peak 3), 0 shared; longest free run 4; 1 requests served (0 scattered), 1 refused
    """

    def __init__(
        self, bytes: int, *, device: str | torch.device, page_bytes: int = PAGE_BYTES, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        for name, value in (("bytes", bytes), ("page_bytes", page_bytes), ("chunk_bytes", chunk_bytes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PoolError(f"{name}={value!r}: a whole number of bytes, at least 1")
        if chunk_bytes % page_bytes:
            raise PoolError(f"chunk_bytes={chunk_bytes} is not a multiple of page_bytes={page_bytes}")
        if bytes < page_bytes:
            raise PoolError(f"bytes={bytes} does not hold one page of {page_bytes} bytes")
        self.page_bytes, self.chunk_pages, self.pages = page_bytes, chunk_bytes // page_bytes, bytes // page_bytes
        self.bytes = self.pages * page_bytes
        self.arena, self._memory = reserve(self.bytes, device)
        self._views = self.arena.view(self.pages, page_bytes)
        self._space = FreePages(self.pages, self.chunk_pages)
        self._holder: list[Any] = [NOBODY] * self.pages
        self._sharers: dict[int, list[Any]] = {}  # holders beyond the first
        self._generation = [0] * self.pages
        self._least_free, self._allocations, self._failures = self.pages, 0, 0
        self._abandoned, self._lock = deque[Hashable](), threading.Lock()

    def __repr__(self) -> str:
        return f"PagePool({self.pages} pages of {self.page_bytes} bytes on {self.arena.device}, {self.free_pages} free)"

    def __reduce_ex__(self, protocol: object) -> str:
        raise PoolError("a pool cannot be copied or pickled: it alone keeps its pages' books; share the pool itself")

    @property
    def free_pages(self) -> int:
        """Pages that are free now."""
        self._sweep()
        return self._space.count

    # handing out and taking back

    def allocate(
        self, n: int = 1, owner: Hashable = None, *, contiguous: bool = True, after: int | None = None
    ) -> list[int]:
        """Hand out ``n`` pages, all or none.

        Parameters
        ----------
        n : int
            Pages; with ``contiguous`` as one run in one chunk where there is such a run, else as single pages.
        owner : hashable, optional
            Who holds them: named in errors and by :meth:`owners`, and checked by ``free(pages, owner)``.
        after : int, optional
            Last page of a run behind which these should follow, if it is free there: longer runs copy faster.

        Raises
        ------
        PoolError
            ``n`` is no number of pages, ``owner`` cannot be hashed, ``after`` is no page; PoolExhausted: too few free.
        """
        try:
            hash(owner)
        except TypeError:
            hashable(owner)  # says so; called only then, as each request would pay for the call
        if self._abandoned:
            self._sweep()
        with self._lock:
            space = self._space
            if n == 1 and n.__class__ is int and after is None and space.count:
                page = space.one()
                self._holder[page] = owner
                pages = [page]
            else:
                pages = self._several(n, owner, contiguous, after)
            self._allocations += 1
            if space.count < self._least_free:
                self._least_free = space.count
            return pages

    def _several(self, n: int, owner: Any, contiguous: bool, after: int | None) -> list[int]:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise PoolError(f"n={n!r}: ask for a whole number of pages, at least 1")
        if after is not None:
            after = page_number(after, self.pages, "after")
        if n > self._space.count:
            self._failures += 1
            state = PoolState(tuple(self._space.bitmaps), self.page_bytes, self.bytes)
            raise PoolExhausted(n, self._space.count, self.pages, state)
        pages = self._space.take(n, bool(contiguous), after)
        for page in pages:
            self._holder[page] = owner
        return pages

    def free(self, pages: Iterable[int], owner: Hashable = None, *, generations: Sequence[int] | None = None) -> None:
        """Give pages back, all or none; a shared page stays with its other holders.

        Parameters
        ----------
        owner : hashable, optional
            Who gives them back: must hold each of them. Without it the newest holder of a shared page lets go.
        generations : sequence of int, optional
            As :meth:`generation` gave them when the pages were handed out: refuses pages that changed hands since.

        Raises
        ------
        DoubleFree, ForeignPage, StalePage
            Nothing is given back then.
        """
        numbers = page_numbers(pages)
        if not numbers:
            return
        with self._lock:
            if generations is not None or not self._plain(numbers, owner):
                self._check(numbers, generations, DoubleFree)
                self._check_holder(numbers, owner)
                numbers = [page for page in numbers if self._let_go(page, owner)]
            self._give(numbers)

    def _give(self, pages: list[int]) -> None:
        for page in pages:
            self._holder[page] = NOBODY
            self._generation[page] += 1
        if pages:
            self._space.give(pages)

    def _plain(self, pages: list[int], owner: Any) -> bool:
        """Whether the pages are one run that nobody shares and that the owner holds: most are, and need no more."""
        first, end = pages[0], pages[0] + len(pages)
        if len(pages) == 1 and 0 <= first < self.pages and first not in self._sharers:
            holder = self._holder[first]
            return holder is not NOBODY and (owner is None or holder == owner)
        if not 0 <= first < end <= self.pages or not is_run(pages) or not self._sharers.keys().isdisjoint(pages):
            return False
        holders = self._holder[first:end]
        return NOBODY not in holders if owner is None else holders.count(owner) == len(holders)

    def _check(self, pages: list[int], generations: Sequence[int] | None, kind: type[PoolError]) -> None:
        for page in pages:
            if not 0 <= page < self.pages:
                raise ForeignPage(f"{page!r} is no page of this pool: its pages are 0 to {self.pages - 1}")
            if self._holder[page] is NOBODY:
                raise kind(f"page {page} is free: it was given back {self._generation[page]} times so far")
        for page, old in zip(pages, one_each(generations, pages), strict=False):
            if self._generation[page] != old:
                raise StalePage(
                    f"page {page} of generation {old} was given back; generation {self._generation[page]} belongs to "
                    f"{self._holder[page]!r}: forget the number when you free the page"
                )

    def _check_holder(self, pages: list[int], owner: Any) -> None:
        for page, times in Counter(pages).items():
            holders = [self._holder[page], *self._sharers.get(page, ())]
            if owner is not None and holders.count(owner) < times:
                raise ForeignPage(f"page {page} is held by {holders}, not {times} times by {owner!r}")
            if len(holders) < times:
                raise DoubleFree(f"page {page} is given back {times} times at once and is held {len(holders)} times")

    def _let_go(self, page: int, owner: Any) -> bool:
        """Take one holder off a page; whether it was the last."""
        sharers = self._sharers.get(page)
        if not sharers:
            return True
        if owner is None:
            sharers.pop()
        elif owner in sharers:
            sharers.remove(owner)
        else:
            self._holder[page] = sharers.pop(0)
        if not sharers:
            del self._sharers[page]
        return False

    def release(self, owner: Hashable) -> int:
        """Give back whatever ``owner`` holds, as an aborted request must; returns how many references that were.

        Looks at every page: for the end of a request, not for each step.
        """
        if owner is None:
            raise PoolError("owner=None: pages without an owner are given back by their numbers, with free")
        with self._lock:
            held = [page for page, holder in enumerate(self._holder) if holder is not NOBODY and holder == owner]
            held += [page for page, sharers in self._sharers.items() for sharer in sharers if sharer == owner]
            self._give([page for page in held if self._let_go(page, owner)])
        return len(held)

    def abandon(self, owner: Hashable) -> None:
        """:meth:`release` at the next request or look: for finalizers, which may run while the pool is locked."""
        self._abandoned.append(owner)

    def _sweep(self) -> None:
        with suppress(IndexError):  # empty, or emptied by another thread
            while self._abandoned:
                self.release(self._abandoned.popleft())

    # sharing

    def share(
        self, pages: Iterable[int], owner: Hashable = None, *, generations: Sequence[int] | None = None
    ) -> list[int]:
        """Let ``owner`` hold pages that somebody holds already: a common prefix, or a copy that is under way.

        A page that is free, changed hands or does not exist raises as in :meth:`free`; nothing is shared then.
        """
        hashable(owner)
        numbers = page_numbers(pages)
        with self._lock:
            self._check(numbers, generations, StalePage)
            for page in numbers:
                self._sharers.setdefault(page, []).append(owner)
        return numbers

    def writable(self, page: int, owner: Hashable = None) -> int:
        """A page with the same content that nobody else holds: ``page`` itself, or a copy of it (copy on write).

        Errors are those of :meth:`allocate` and :meth:`free`, and leave everything as it was.
        """
        if self.references(page) == 1:
            return page
        (copy,) = self.allocate(1, owner)
        self.page(copy).copy_(self.page(page))
        try:
            self.free([page], owner)
        except PoolError:
            self.free([copy], owner)
            raise
        return copy

    # looking

    def page(self, page: int, generation: int | None = None) -> torch.Tensor:
        """View of one page, uint8 of shape (page_bytes,).

        With ``generation`` a page that was given back since raises :class:`StalePage`.
        """
        page = page_number(page, self.pages)
        if generation is not None:
            with self._lock:
                self._check([page], [generation], StalePage)
        return self._views[page]

    def view(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """All pages as one tensor of shape (pages, *shape), e.g. ``(2, T, Hkv, D)`` for paged attention.

        PoolError where a page holds another number of elements, or ``dtype`` or ``shape`` is none.
        """
        try:
            return self.arena.view(dtype).view(self.pages, *shape)
        except (RuntimeError, TypeError) as error:
            raise PoolError(f"a page of {self.page_bytes} bytes is not {shape!r} of {dtype!r}") from error

    def generation(self, page: int) -> int:
        """How often the page was given back so far: while it stays the same, so does the page's holder."""
        try:
            return self._generation[page if page >= 0 else None]
        except (IndexError, TypeError):
            return self._generation[page_number(page, self.pages)]

    def references(self, page: int) -> int:
        """How many hold the page; a free page raises :class:`StalePage`."""
        page = page_number(page, self.pages)
        with self._lock:
            self._check([page], None, StalePage)
            return 1 + len(self._sharers.get(page, ()))

    def owners(self) -> Counter:
        """Pages held by each owner; what a leak is found with."""
        self._sweep()
        with self._lock:
            held = Counter(holder for holder in self._holder if holder is not NOBODY)
            return held + Counter(sharer for sharers in self._sharers.values() for sharer in sharers)

    def state(self) -> PoolState:
        """The bitmaps as they are now."""
        self._sweep()
        with self._lock:
            return PoolState(tuple(self._space.bitmaps), self.page_bytes, self.bytes)

    def stats(self) -> PoolStats:
        """Counts of now and since the start."""
        self._sweep()
        with self._lock:
            return counts(self)

    def check(self) -> None:
        """Conservation: each page is either free or held and counted once, each chunk with room can be found.

        Raises
        ------
        PoolError
            The books are wrong: a fault of the pool, or of something that wrote into them.
        """
        self._sweep()
        with self._lock:
            wrong = faults(self)
        if wrong:
            raise PoolError(f"the pool's books are wrong: {'; '.join(wrong)}")
