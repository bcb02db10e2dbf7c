"""The rules by which torch's CUDA caching allocator finds, splits, merges and gives back memory, without a device.

Small requests (up to 1 MiB) are cut from segments of 2 MiB, requests up to 10 MiB from segments of 20 MiB, larger ones
get a segment of their own, rounded to 2 MiB. A free block serves its own pool, stream and class only; the smallest that
fits is taken. Out of memory, cached blocks are given back and the request is tried again.

Source: the behaviour of torch 2.11, read in ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

from o1lab.memory.allocator_blocks import SMALL_SEGMENT, SMALL_SIZE, WHOLE, Block, Pool, room, segment_bytes
from o1lab.memory.allocator_settings import MIB, MIN_BLOCK, Settings
from o1lab.memory.driver_addresses import DriverAddresses
from o1lab.memory.ranges import Ranges

__all__ = ["Block", "CachingAllocator", "Pool", "segment_bytes"]


class CachingAllocator:
    """The allocator of one device under ``settings``; pools are numbered, 0 is the default pool.

    Examples
    --------
    >>> allocator = CachingAllocator(Settings())
    >>> block = allocator.allocate(3 * MIB, stream=0)
    >>> allocator.free(block)
    >>> allocator.allocated_bytes, allocator.reserved_bytes // MIB
    (0, 20)
    """

    def __init__(self, settings: Settings, pools: tuple[tuple[int, int], ...] = ((0, 0),)) -> None:
        self.settings = settings
        self.max_split = float("inf") if settings.max_split_size_mb is None else settings.max_split_size_mb * MIB
        self.rounding = settings.max_non_split_rounding_mb * MIB
        self.large_segment = settings.large_segment_size_mb * MIB
        capacity = settings.capacity_bytes
        self.capacity = float("inf") if capacity is None else capacity
        self.collects = capacity is not None and settings.garbage_collection_threshold > 0
        split = settings.no_split
        self.whole = {n for n, name in enumerate(pools) if (split is True or (split and tuple(name) in split))}
        self.pools: dict[tuple[int, bool], Pool] = {}
        self.freeable: set[int] = set()
        self.waiting: dict[int, Block] = {}
        self.allocated_bytes = self.reserved_bytes = self.active_bytes = 0
        self.num_ooms = self.num_retries = self.segments = 0
        self.next_segment: tuple[int, int] | None = None
        self._driver, self.taken, self._whole_spaces = DriverAddresses(), Ranges(), 0

    def pool(self, number: int, small: bool) -> Pool:
        """The free lists of one pool and class."""
        found = self.pools.get((number, small))
        if found is None:
            found = self.pools[number, small] = Pool(number, small)
        return found

    # requests

    def allocate(self, requested: int, stream: int, pool: int = 0) -> Block | None:
        """A block for the request, or ``None`` where memory is out (counted in ``num_ooms``)."""
        size = self.settings.rounded(requested)
        own = self.pool(pool, size <= SMALL_SIZE)
        segment = segment_bytes(size, self.large_segment)
        block = self._find(own, stream, size)
        if block is None:
            if self.collects:
                self._collect()
            block = self._new(own, stream, size, segment)
            if block is None and self._release_enough(own, stream, size):
                block = self._new(own, stream, size, segment)
            if block is None and pool == 0:  # while another pool is in use nothing is given back
                self.release_cached()
                self.num_retries += 1
                block = self._new(own, stream, size, segment)
            if block is None:
                self.num_ooms += 1
                return None
        rest = block.size - size
        if pool in self.whole:
            split = False
        elif own.small or self.settings.expandable_segments:
            split = rest >= MIN_BLOCK
        else:
            split = size < self.max_split and rest > SMALL_SIZE
        if split:
            head = Block(block.address, size, own, stream, block.base)
            head.link(block.before, block)
            block.address += size
            block.size = rest
            own.put(block)
            block = head
        block.held, block.requested = True, requested
        self.allocated_bytes += block.size
        self.active_bytes += block.size
        return block

    def free(self, block: Block, wait: bool = False) -> None:
        """The program lets go of the block; with ``wait`` another stream may use it until :meth:`complete`."""
        block.held = False
        self.allocated_bytes -= block.size
        if wait:
            block.waiting = True
            self.waiting[id(block)] = block
        else:
            self._return(block)

    def complete(self, block: Block) -> None:
        """The other streams are done with a waiting block."""
        del self.waiting[id(block)]
        block.waiting = False
        self._return(block)

    def release_cached(self, pools: frozenset[int] | set[int] = frozenset({0})) -> None:
        """Give back what is free: ``empty_cache``. ``pools``: the default pool, or private pools that ended."""
        if 0 in pools:
            for block in list(self.waiting.values()):
                self.complete(block)
        self.freeable |= pools - {0}
        for (number, _), pool in sorted(self.pools.items(), key=lambda item: item[0]):
            if number in pools or (0 in pools and number in self.freeable):
                for row in list(pool.free.values()):
                    for _, _, block in list(row):
                        if block.base is not None:
                            self._unmap(block)
                        elif block.before is None and block.after is None:
                            self._release(block)

    # searching

    def _find(self, pool: Pool, stream: int, size: int) -> Block | None:
        pool.calls += self.collects
        row = pool.free.get(stream)
        if not row:
            return None
        spot = bisect_left(row, (size,))
        if spot == len(row):
            return None
        block = row[spot][2]
        if block.base is not None:  # best fit by what each could grow to, not by what it is
            while spot + 1 < len(row) and row[spot][2].base is not None and room(row[spot + 1][2]) < room(row[spot][2]):
                spot += 1
            block = row[spot][2]
        if size < self.max_split <= block.size or (size >= self.max_split and block.size >= size + self.rounding):
            return None
        del row[spot]
        return block

    def _new(self, pool: Pool, stream: int, size: int, segment: int) -> Block | None:
        if self.reserved_bytes + segment > self.capacity:
            return None
        if self.settings.expandable_segments:
            return self._grow(pool, stream, size)
        block = Block(self._address(segment), segment, pool, stream, None)
        self.reserved_bytes += segment
        self.segments += 1
        return block

    def _address(self, size: int) -> int:
        """Where the driver puts a segment: as recorded where the replay says so, else the lowest place that fits."""
        if self.next_segment is not None and self.next_segment[0] == size:
            address = self.next_segment[1]
            if not self.taken.overlaps(address, address + size):  # it may, once the replay went another way
                self.taken.add(address, address + size)
                return address
        return self._driver.take(size)

    # giving back

    def _return(self, block: Block) -> None:
        self.active_bytes -= block.size
        self._merge(block)
        block.pool.put(block)

    def _merge(self, block: Block) -> None:
        for beside in (block.before, block.after):
            if beside is None or beside.held or beside.waiting or beside.mapped != block.mapped:
                continue
            if beside.mapped:
                beside.pool.drop(beside)
            else:
                self._forget_unmapped(beside)
            if beside is block.before:
                block.address = beside.address
                block.link(beside.before, block.after)
            else:
                block.link(block.before, beside.after)
            block.size += beside.size

    def _release(self, block: Block) -> None:
        block.pool.drop(block)
        self.reserved_bytes -= block.size
        self.segments -= 1
        self._driver.give(block.address, block.size)
        self.taken.remove(block.address, block.address + block.size)

    def _release_enough(self, pool: Pool, stream: int, size: int) -> bool:
        """Give back oversize blocks, and only as many as the request needs (with ``max_split_size_mb`` set)."""
        if self.settings.max_split_size_mb is None:
            return False
        need = max(size, int(self.max_split))
        row = pool.free.get(stream, [])
        spot = bisect_left(row, (need,))
        if spot < len(row) and row[spot][2].base is None:
            self._release(row[spot][2])
            return True
        released = 0
        for _, _, block in reversed(row[:spot]):
            if released >= need or block.size < self.max_split:
                break
            if block.base is None:
                released += block.size
                self._release(block)
        return released >= need

    def _collect(self) -> None:
        """Give back large blocks that were passed over for longer than the average, until below the threshold."""
        threshold = int(self.settings.garbage_collection_threshold * self.capacity)
        target, pool = self.reserved_bytes - threshold, self.pool(0, False)
        rows = [block for row in pool.free.values() for _, _, block in row if block.before is block.after is None]
        age, count, reclaimed, freed = sum(pool.calls - block.born for block in rows), len(rows), 0, True
        rows = [block for block in rows if block.base is None]
        while target > 0 and reclaimed < target and freed and count > 0:
            limit, freed, kept = age / count, False, []
            for block in rows:
                if pool.calls - block.born >= limit:
                    freed = True
                    reclaimed += block.size
                    age -= pool.calls - block.born
                    count -= 1
                    self._release(block)
                else:
                    kept.append(block)
            rows = kept

    # expandable segments

    def _grow(self, pool: Pool, stream: int, size: int) -> Block | None:
        spot = self._room_for(pool, stream, size)
        if not spot.mapped:
            self._map(spot, min(spot.size, size))
        while spot.size < size:
            after: Any = spot.after
            self._map(after, min(size - spot.size, after.size))
            spot = after
        pool.drop(spot)
        return spot

    def _room_for(self, pool: Pool, stream: int, size: int) -> Block:
        """The lowest block, free or not yet mapped, from which ``size`` bytes of address space are free."""
        for _, block in pool.unmapped.get(stream, ()):
            before = block.before
            first = before if before is not None and not before.held and not before.waiting else block
            room, walk = 0, first
            while room < size and walk is not None and not walk.held and not walk.waiting:
                room += walk.size
                walk = walk.after  # type: ignore[assignment]
            if room >= size:
                return first
        self._whole_spaces += 1
        return self.reserve(pool, stream, self.next_segment[1] if self.next_segment else self._whole_spaces << 57)

    def stuck_bytes(self) -> int:
        """Free bytes that ``empty_cache`` would not give back now, because their segment or page is in use."""
        total = 0
        for pool in self.pools.values():
            for row in pool.free.values():
                for size, address, block in row:
                    if block.base is not None:
                        page, base = self._page(pool), block.base
                        begin, end = -(-(address - base) // page) * page, (address + size - base) // page * page
                        total += size - max(0, end - begin)
                    elif block.before is not None or block.after is not None:
                        total += size
        return total

    def reserve(self, pool: Pool, stream: int, base: int) -> Block:
        """A new expandable segment with nothing mapped."""
        block = Block(base, WHOLE, pool, stream, base)
        block.mapped = False
        pool.unmapped.setdefault(stream, []).append((base, block))
        self.segments += 1
        return block

    def _page(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool.small else self.large_segment

    def _forget_unmapped(self, block: Block) -> None:
        row = block.pool.unmapped[block.stream]
        del row[bisect_left(row, (block.address,))]

    def _map(self, block: Block, size: int) -> None:
        page = self._page(block.pool)
        size = -(-size // page) * page
        self._forget_unmapped(block)
        block.mapped = True
        if size < block.size:
            rest = Block(block.address + size, block.size - size, block.pool, block.stream, block.base)
            rest.mapped = False
            rest.link(block, block.after)
            insort(block.pool.unmapped[block.stream], (rest.address, rest))
            block.size = size
        self._merge(block)
        block.pool.put(block)
        self.reserved_bytes += size

    def _unmap(self, block: Block) -> None:
        """Give back the pages that lie wholly inside a free block."""
        page, base = self._page(block.pool), block.base or 0
        begin = base + -(-(block.address - base) // page) * page
        end = base + (block.address + block.size - base) // page * page
        if begin >= end:
            return
        block.pool.drop(block)
        for address, size in ((block.address, begin - block.address), (end, block.address + block.size - end)):
            if size > 0:
                rest = Block(address, size, block.pool, block.stream, block.base)
                rest.link(*((block.before, block) if address < begin else (block, block.after)))
                block.pool.put(rest)
        block.address, block.size, block.mapped = begin, end - begin, False
        self._merge(block)
        insort(block.pool.unmapped.setdefault(block.stream, []), (block.address, block))
        self.reserved_bytes -= end - begin
        if block.before is None and block.after is None:
            self._forget_unmapped(block)
            self.segments -= 1
