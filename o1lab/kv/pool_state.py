"""A pool's memory, and what it says about itself: bitmaps at one moment, counts, whether its books are right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from o1lab.kv import pages as bits

if TYPE_CHECKING:
    import torch

    from o1lab.kv.pool import PagePool

NOBODY = object()
"""Holder of a free page."""


def reserve(size: int, device: str | torch.device) -> tuple[torch.Tensor, Any]:
    """One allocation of ``size`` bytes; on CUDA in a memory pool of its own, which no other request is cut from."""
    import torch

    from o1lab.kv.pool import PoolError

    try:
        where = torch.device(device)
        if where.type != "cuda":
            return torch.empty(size, dtype=torch.uint8, device=where), None
        with torch.cuda.device(torch.cuda.current_device() if where.index is None else where.index):
            memory = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(memory):
                return torch.empty(size, dtype=torch.uint8, device=where), memory
    except TypeError as error:
        raise PoolError(f"device={device!r}: a text such as 'cuda', or a torch.device") from error
    except (RuntimeError, AssertionError) as error:  # torch.OutOfMemoryError is one; a build without CUDA asserts
        reason = str(error).partition("\n")[0]
        raise PoolError(f"no pool of {size / 2**30:.2f} GiB on {device}: {reason}") from error


@dataclass(frozen=True)
class PoolState:
    """Bitmaps of a pool's chunks at one moment, with the sizes in bytes that give them meaning."""

    bitmaps: tuple[int, ...]
    page_bytes: int
    bytes: int


@dataclass(frozen=True)
class PoolStats:
    """Counts of a pool at one moment, and since it was made.

    Attributes
    ----------
    pages, used, free, shared, peak_used, largest_run : int
        In pages; ``shared`` have several holders, ``largest_run`` is the longest run of free pages in one chunk.
    references : int
        Holders of all used pages together.
    allocations, failures, scattered : int
        Requests served and refused; requests for a run that were served with single pages.
    """

    pages: int
    used: int
    free: int
    shared: int
    peak_used: int
    largest_run: int
    references: int
    allocations: int
    failures: int
    scattered: int
    page_bytes: int

    @property
    def occupancy(self) -> float:
        """Share of the pages in use."""
        return self.used / self.pages

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use."""
        return self.used * self.page_bytes

    def __str__(self) -> str:
        return (
            f"{self.used:,} of {self.pages:,} pages in use ({self.occupancy:.1%}, peak {self.peak_used:,}), "
            f"{self.shared:,} shared; longest free run {self.largest_run}; "
            f"{self.allocations:,} requests served ({self.scattered:,} scattered), {self.failures:,} refused"
        )


def counts(pool: PagePool) -> PoolStats:
    """Counts of a pool whose lock is held."""
    space = pool._space
    longest = max((length for bitmap in set(space.bitmaps) for _, length in bits.runs(bitmap)), default=0)
    used, more = pool.pages - space.count, sum(map(len, pool._sharers.values()))
    return PoolStats(
        pool.pages, used, space.count, len(pool._sharers), pool.pages - pool._least_free, longest, used + more,
        pool._allocations, pool._failures, space.scattered, pool.page_bytes,
    )  # fmt: skip


def faults(pool: PagePool) -> list[str]:
    """What is wrong in the books of a pool whose lock is held; empty for a sound one.

    Free and held pages must add up to all pages, in the bitmaps, in the list of holders and in the count; each chunk
    with a free page must stand where a request looks.
    """
    space, holders, chunk_pages = pool._space, pool._holder, pool.chunk_pages
    found, free = [], 0
    for chunk, bitmap in enumerate(space.bitmaps):
        first, unheld = chunk * chunk_pages, 0
        for place, holder in enumerate(holders[first : first + chunk_pages]):
            if holder is NOBODY:
                unheld |= 1 << place
        if unheld != bitmap:
            wrong = [first + place for place in bits.indices(unheld ^ bitmap)]
            found.append(f"pages {wrong[:8]} are free in the bitmap and held, or neither")
        if bitmap and not space.single.listed[chunk]:
            found.append(f"chunk {chunk} has free pages that no request would find")
        free += bitmap.bit_count()
    if free != space.count:
        found.append(f"{free} pages are free, {space.count} are counted")
    for page, sharers in pool._sharers.items():
        if holders[page] is NOBODY or not sharers:
            found.append(f"page {page} is shared by {len(sharers)} without being held")
    for length, room in space.rooms.items():
        if sorted(room.stack) != [chunk for chunk, flag in enumerate(room.listed) if flag]:
            found.append(f"the free list for runs of {length} disagrees with its flags")
    return found
