"""The bitmap of a chunk: one Python integer, bit ``i`` is set while page ``i`` is free.

An integer of 256 bits is four machine words; and, shift and complement run in C on all of them at once, so that finding
a free page, or a run of them, costs a handful of operations whatever the chunk looks like.
"""

from __future__ import annotations


def full(pages: int) -> int:
    """Bitmap of a chunk of ``pages`` pages that are all free.

    Examples
    --------
    >>> bin(full(4))
    '0b1111'
    """
    return (1 << pages) - 1


def run_starts(free: int, n: int) -> int:
    """Bitmap of the places at which a run of at least ``n`` free pages begins; ⌈log₂ n⌉ shifts.

    Examples
    --------
    >>> bin(run_starts(0b1110110, 2))
    '0b110010'
    """
    have = 1
    while have < n and free:
        step = min(have, n - have)
        free &= free >> step
        have += step
    return free


def lowest(bits: int) -> int:
    """Index of the lowest set bit; −1 where none is set.

    Examples
    --------
    >>> lowest(0b1000), lowest(0)
    (3, -1)
    """
    return (bits & -bits).bit_length() - 1


def runs(free: int) -> list[tuple[int, int]]:
    """Every maximal run of free pages as (first page, length), in order.

    Examples
    --------
    >>> runs(0b1110011)
    [(0, 2), (4, 3)]
    """
    found, base = [], 0
    while free:
        skip = lowest(free)
        free >>= skip
        length = lowest(~free)
        found.append((base + skip, length))
        free >>= length
        base += skip + length
    return found


def indices(bits: int) -> list[int]:
    """Indices of the set bits, in order.

    Examples
    --------
    >>> indices(0b10110)
    [1, 2, 4]
    """
    return [index for first, length in runs(bits) for index in range(first, first + length)]


MOST_LENGTHS = 8
"""Lengths of runs for which it is remembered where one may be found."""


class _Room:
    """Chunks in which a run of one length may be found: a stack, and a flag for each chunk that stands in it."""

    __slots__ = ("listed", "stack")

    def __init__(self, chunks: int) -> None:
        self.stack = list(range(chunks - 1, -1, -1))
        self.listed = bytearray(b"\1") * chunks


class FreePages:
    """Numbers of free pages: a bitmap per chunk, and for each length of run the stack of chunks that may hold one.

    A chunk leaves a stack when a search in it fails and returns when one of its pages does, so that finding a page, or
    a run, takes constant time on average however full the pool is. Not thread-safe: the pool has the lock.

    Examples
    --------
    >>> free = FreePages(6, chunk_pages=4)
    >>> free.take(3), free.take(2), free.count
    ([0, 1, 2], [4, 5], 1)
    >>> free.give([1]), free.take(2, contiguous=False)
    (None, [1, 3])
    """

    __slots__ = ("bitmaps", "chunk_pages", "count", "pages", "rooms", "scattered", "single")

    def __init__(self, pages: int, chunk_pages: int) -> None:
        whole, rest = divmod(pages, chunk_pages)
        self.pages, self.chunk_pages, self.count, self.scattered = pages, chunk_pages, pages, 0
        self.bitmaps = [full(chunk_pages)] * whole + ([full(rest)] if rest else [])
        self.single = _Room(len(self.bitmaps))
        self.rooms = {1: self.single}

    def one(self) -> int:
        """Take one page; there must be one."""
        stack, bitmaps = self.single.stack, self.bitmaps
        while not (free := bitmaps[stack[-1]]):
            self.single.listed[stack.pop()] = 0
        chunk, bit = stack[-1], free & -free
        bitmaps[chunk] = free ^ bit
        self.count -= 1
        return chunk * self.chunk_pages + bit.bit_length() - 1

    def take(self, n: int, contiguous: bool = True, after: int | None = None) -> list[int]:
        """Take ``n`` pages: behind page ``after``, else as one run, else singly; there must be as many."""
        first = self._behind(after, n) if after is not None else None
        if first is None and contiguous and n <= self.chunk_pages:
            first = self._run(n)
        if first is None:
            self.scattered += contiguous and n <= self.chunk_pages
            return self._singles(n)
        self.bitmaps[first // self.chunk_pages] ^= full(n) << first % self.chunk_pages
        self.count -= n
        return list(range(first, first + n))

    def give(self, pages: list[int]) -> None:
        """Take pages back that were handed out; a run costs little more than one page."""
        n, first = len(pages), pages[0]
        if n == 1:
            self._back(first // self.chunk_pages, 1 << first % self.chunk_pages)
        elif pages[-1] - first == n - 1 and first % self.chunk_pages + n <= self.chunk_pages and is_run(pages):
            self._back(first // self.chunk_pages, full(n) << first % self.chunk_pages)
        else:
            masks: dict[int, int] = {}
            for page in pages:
                chunk, place = divmod(page, self.chunk_pages)
                masks[chunk] = masks.get(chunk, 0) | 1 << place
            for chunk, mask in masks.items():
                self._back(chunk, mask)
        self.count += n

    def _back(self, chunk: int, mask: int) -> None:
        self.bitmaps[chunk] |= mask
        for room in self.rooms.values():
            if not room.listed[chunk]:
                room.listed[chunk] = 1
                room.stack.append(chunk)

    def _behind(self, after: int, n: int) -> int | None:
        chunk, place = divmod(after + 1, self.chunk_pages)
        if not 0 <= after < self.pages - n or place + n > self.chunk_pages:
            return None
        run = full(n) << place
        return after + 1 if self.bitmaps[chunk] & run == run else None

    def _run(self, n: int) -> int | None:
        room = self.rooms.get(n)
        if room is None:
            if len(self.rooms) == MOST_LENGTHS:
                del self.rooms[next(length for length in self.rooms if length > 1)]
            room = self.rooms[n] = _Room(len(self.bitmaps))
        while room.stack:
            chunk = room.stack[-1]
            starts = run_starts(self.bitmaps[chunk], n)
            if starts:
                return chunk * self.chunk_pages + lowest(starts)
            room.listed[room.stack.pop()] = 0
        return None

    def _singles(self, n: int) -> list[int]:
        pages: list[int] = []
        while len(pages) < n:
            first = self.one()
            chunk = first // self.chunk_pages
            pages.append(first)
            found = indices(self.bitmaps[chunk])[: n - len(pages)]
            for place in found:
                self.bitmaps[chunk] ^= 1 << place
            pages += [chunk * self.chunk_pages + place for place in found]
            self.count -= len(found)
        return pages


def is_run(pages: list[int]) -> bool:
    """Whether the numbers follow one another.

    Examples
    --------
    >>> is_run([4, 5, 6]), is_run([4, 6, 5])
    (True, False)
    """
    return pages == list(range(pages[0], pages[0] + len(pages)))
