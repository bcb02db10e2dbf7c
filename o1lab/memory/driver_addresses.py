"""Where the CUDA driver places segments: it decides which of two equal free blocks is taken, by address.

Seen in recorded traces (H200, driver 580): address space is taken in chunks of 32 MiB multiples, each new chunk below
the one before; a request that fits into the unused rest of a chunk gets the lowest such place; a chunk that is wholly
given back can be taken again.
"""

from __future__ import annotations

from bisect import bisect_right, insort

CHUNK = 32 << 20
TOP = 1 << 56


class DriverAddresses:
    """Addresses for segments, handed out and taken back.

    Examples
    --------
    >>> driver = DriverAddresses()
    >>> first, second, third = (driver.take(size << 20) for size in (20, 24, 2))
    >>> first - second == CHUNK, third - second == 24 << 20
    (True, True)
    """

    def __init__(self) -> None:
        self._low = TOP
        self._chunks: dict[int, tuple[int, list[tuple[int, int]]]] = {}  # begin: (size, holes as (address, size))
        self._order: list[int] = []
        self._spare: list[tuple[int, int]] = []  # address space of chunks given back: (address, size)

    def take(self, size: int) -> int:
        """Address of a new segment of ``size`` bytes."""
        for begin in self._order:
            holes = self._chunks[begin][1]
            for index, (address, room) in enumerate(holes):
                if room >= size:
                    holes[index : index + 1] = [(address + size, room - size)] if room > size else []
                    return address
        whole = -(-size // CHUNK) * CHUNK
        address = self._space(whole)
        self._chunks[address] = (whole, [(address + size, whole - size)] if whole > size else [])
        insort(self._order, address)
        return address

    def give(self, address: int, size: int) -> None:
        """Take a segment back; addresses that were not handed out here (recorded ones) are ignored."""
        spot = bisect_right(self._order, address) - 1
        if spot < 0 or address >= self._order[spot] + self._chunks[self._order[spot]][0]:
            return
        begin = self._order[spot]
        whole, holes = self._chunks[begin]
        insort(holes, (address, size))
        _join(holes)
        if holes == [(begin, whole)]:
            del self._chunks[begin], self._order[spot]
            insort(self._spare, (begin, whole))
            _join(self._spare)

    def _space(self, whole: int) -> int:
        for index in range(len(self._spare) - 1, -1, -1):
            address, room = self._spare[index]
            if room >= whole:
                self._spare[index : index + 1] = [(address, room - whole)] if room > whole else []
                return address + room - whole
        self._low -= whole
        return self._low


def _join(holes: list[tuple[int, int]]) -> None:
    for index in range(len(holes) - 1, 0, -1):
        (low, room), (high, more) = holes[index - 1 : index + 1]
        if low + room == high:
            holes[index - 1 : index + 1] = [(low, room + more)]
