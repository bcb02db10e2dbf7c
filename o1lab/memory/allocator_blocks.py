"""Blocks of device memory, the lists in which the allocator keeps the free ones, and how large segments are."""

from __future__ import annotations

from bisect import bisect_left, insort

from o1lab.memory.allocator_settings import MIB

SMALL_SIZE, SMALL_SEGMENT, MIN_LARGE, ROUND_LARGE = MIB, 2 * MIB, 10 * MIB, 2 * MIB
WHOLE = 1 << 46
"""Bytes of address space that an expandable segment is given: more than any device has."""


class Block:
    """A range of one segment; ``before`` and ``after`` are its neighbours there."""

    __slots__ = (
        "address", "after", "base", "before", "born", "held", "mapped", "pool", "requested", "size", "stream", "ticket",
        "waiting",
    )  # fmt: skip

    def __init__(self, address: int, size: int, pool: Pool, stream: int, base: int | None) -> None:
        self.address, self.size, self.pool, self.stream, self.base = address, size, pool, stream, base
        self.before: Block | None = None
        self.after: Block | None = None
        self.held = self.waiting = False  # in use; freed but awaited by another stream
        self.mapped, self.requested, self.born, self.ticket = True, 0, 0, -1

    def link(self, before: Block | None, after: Block | None) -> None:
        """Put the block between two neighbours of its segment."""
        self.before, self.after = before, after
        if before is not None:
            before.after = self
        if after is not None:
            after.before = self


class Pool:
    """Free blocks of one memory pool and class, sorted by size and address for each stream."""

    __slots__ = ("calls", "free", "number", "small", "unmapped")

    def __init__(self, number: int, small: bool) -> None:
        self.number, self.small, self.calls = number, small, 0
        self.free: dict[int, list[tuple[int, int, Block]]] = {}
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}

    def put(self, block: Block) -> None:
        """Add a free block; its age counts from now."""
        block.born = self.calls
        insort(self.free.setdefault(block.stream, []), (block.size, block.address, block))

    def drop(self, block: Block) -> None:
        """Take a free block out."""
        row = self.free[block.stream]
        del row[bisect_left(row, (block.size, block.address))]


def room(block: Block) -> int:
    """Bytes of a block in an expandable segment with those that could be mapped right behind it."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def segment_bytes(size: int, large_segment: int = 20 * MIB) -> int:
    """Bytes of the segment that is reserved for a rounded request which no free block can serve."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    return large_segment if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE
