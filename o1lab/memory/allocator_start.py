"""Put an allocator into the state in which a trace begins: segments and blocks where they lay."""

from __future__ import annotations

import numpy as np

from o1lab.errors import ProbeError
from o1lab.memory.allocator import CachingAllocator
from o1lab.memory.allocator_blocks import SMALL_SEGMENT, WHOLE, Block
from o1lab.memory.trace import SEGMENT_MAP, SEGMENT_UNMAP, Trace

NEAR = 64 << 30
"""Bytes: two expandable segments are further apart, as each has the address space of the whole device and more."""


def lay_start(trace: Trace, allocator: CachingAllocator) -> list[tuple[np.void, Block]]:
    """Lay out ``trace.start_segments`` and ``trace.start_blocks``; return each block in use with its row.

    Raises
    ------
    ProbeError
        Segments or blocks overlap.
    """
    groups: dict[tuple[int, ...], list[np.void]] = {}
    for segment in trace.start_segments[np.argsort(trace.start_segments["address"], kind="stable")]:
        key = tuple(int(segment[name]) for name in ("pool", "stream", "large"))
        alone = () if segment["expandable"] else (int(segment["address"]),)  # a stream has one expandable segment
        groups.setdefault(key + alone, []).append(segment)
    return [pair for segments in groups.values() for pair in _Row(trace, allocator, segments).lay(trace.start_blocks)]


class _Row:
    """One segment, or the mapped ranges of one expandable segment with what is not mapped between."""

    def __init__(self, trace: Trace, allocator: CachingAllocator, segments: list[np.void]) -> None:
        first = segments[0]
        self.allocator, self.segments = allocator, segments
        self.pool, self.stream = allocator.pool(int(first["pool"]), not first["large"]), int(first["stream"])
        self.at = int(first["address"])
        self.base: int | None = None
        if first["expandable"]:
            page = SMALL_SEGMENT if self.pool.small else allocator.large_segment
            self.base = self.at = _lowest(trace, self.at, self.stream, page)
        self.last: Block | None = None
        allocator.segments += 1

    def lay(self, blocks: np.ndarray) -> list[tuple[np.void, Block]]:
        allocator, found = self.allocator, []
        for segment in self.segments:
            begin, end = int(segment["address"]), int(segment["address"] + segment["size"])
            if begin < self.at or allocator.taken.overlaps(begin, end):
                raise ProbeError("the trace contradicts itself: segments overlap at its start; it cannot be replayed")
            allocator.taken.add(begin, end)
            allocator.reserved_bytes += end - begin
            if begin > self.at:
                self._unmapped(begin)
            inside = blocks[(blocks["address"] >= begin) & (blocks["address"] < end)]
            for row in inside[np.argsort(inside["address"], kind="stable")]:
                place, after = int(row["address"]), int(row["address"] + row["size"])
                if self.pool.number in allocator.whole and len(inside) == 1:
                    after = end  # never split
                if place < self.at or after > end or after == place:
                    raise ProbeError("the trace contradicts itself: blocks overlap at its start; it cannot be replayed")
                self._free(place)
                block = self._piece(after)
                block.held, block.requested = True, int(row["requested"])
                allocator.allocated_bytes += block.size
                allocator.active_bytes += block.size
                found.append((row, block))
            self._free(end)
        if self.base is not None:
            self._unmapped(self.base + WHOLE)
        return found

    def _piece(self, end: int) -> Block:
        block = Block(self.at, end - self.at, self.pool, self.stream, self.base)
        block.link(self.last, None)
        self.last, self.at = block, end
        return block

    def _free(self, end: int) -> None:
        if end > self.at:
            self.pool.put(self._piece(end))

    def _unmapped(self, end: int) -> None:
        begin, block = self.at, self._piece(end)
        block.mapped = False
        self.pool.unmapped.setdefault(self.stream, []).append((begin, block))


def _lowest(trace: Trace, address: int, stream: int, page: int) -> int:
    """Where an expandable segment begins: pages before its first mapped one may be mapped again later in the trace."""
    mapping = ((trace.action == SEGMENT_MAP) | (trace.action == SEGMENT_UNMAP)) & (trace.stream == stream)
    places = trace.address[mapping]
    near = places[(places < address) & (places > address - NEAR) & ((address - places) % page == 0)]
    return int(near.min(initial=address))
