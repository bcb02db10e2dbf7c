"""The segments and blocks that were there before the first entry of a trace, worked out from those at its end."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import numpy as np

from o1lab.memory import trace as t
from o1lab.memory.allocator_settings import Settings


class Backwards:
    """Undo the entries from the last to the first: from the blocks at the end to the blocks at the start."""

    def __init__(self, segments: np.ndarray, blocks: np.ndarray, settings: Settings) -> None:
        self._rows = {int(row["address"]): list(row.tolist()) for row in segments}
        self._order = sorted(self._rows)
        self._live = {int(row["address"]): list(row.tolist()) for row in blocks}
        self._starts = sorted(self._live)
        self._sure = set(self._live)
        self._ends: dict[int, int] = {}
        self._settings = settings
        self.odd = 0
        self.pools = np.zeros(0, "i4")

    def _at(self, address: int) -> list[Any] | None:
        spot = bisect.bisect_right(self._order, address) - 1
        row = self._rows[self._order[spot]] if spot >= 0 else None
        return row if row is not None and address < row[0] + row[1] else None

    def _add(self, address: int, size: int, stream: int, pool: int, expandable: bool) -> None:
        spot = bisect.bisect_left(self._order, address)
        after = self._order[spot] if spot < len(self._order) else None
        if self._at(address) is not None or (after is not None and after < address + size) or size == 0:
            self.odd += 1
            return
        row = [address, size, stream, pool, size > 2 << 20, expandable]
        if expandable:  # what is mapped side by side is one range: a mapping may have covered several unmappings
            for beside in (self._at(address - 1), self._at(address + size)):
                if beside is not None and beside[5] and beside[2] == stream:
                    row = [min(row[0], beside[0]), row[1] + beside[1], *beside[2:]]
                    del self._rows[beside[0]], self._order[bisect.bisect_left(self._order, beside[0])]
        self._rows[row[0]] = row
        bisect.insort(self._order, row[0])

    def _remove(self, address: int, size: int) -> None:
        row = self._at(address)
        if row is None or address + size > row[0] + row[1]:
            self.odd += 1
            return
        begin, end = row[0], row[0] + row[1]
        del self._rows[begin], self._order[bisect.bisect_left(self._order, begin)]
        for left, right in ((begin, address), (address + size, end)):  # of an expandable segment a part is mapped
            if right > left:
                self._rows[left] = [left, right - left, *row[2:]]
                bisect.insort(self._order, left)

    def run(self, columns: dict[str, np.ndarray], names: Callable[[tuple[int, int]], int]) -> None:
        """Go through all entries; sets ``pools``, the pool of each entry as far as it can be known."""
        private: int | bool = False
        live, self.pools = self._live, np.zeros(len(columns["action"]), "i4")
        rows = list(zip(*(columns[name].tolist() for name in t.COLUMNS), strict=True))
        for index in range(len(rows) - 1, -1, -1):
            action, address, size, stream, _, pool, site = rows[index]
            segment = self._at(address)
            unknown = pool < 0 and segment is None
            if segment is not None and action <= t.FREE_COMPLETED:
                segment[4] = size > 1 << 20  # small and large requests never share a segment
            self.pools[index] = pool = (segment[3] if segment else 0) if pool < 0 else pool
            if action == t.ALLOC:
                if live.pop(address, None) is None:
                    self.odd += 1
                else:
                    del self._starts[bisect.bisect_left(self._starts, address)]
                    self._witness(address, segment)
                self._sure.discard(address)
                self._ends.pop(address, None)
            elif action == t.FREE_COMPLETED:
                if address not in live:
                    bisect.insort(self._starts, address)
                live[address] = [address, 0, stream, size, pool, True, site]
                self._sure.discard(address)
            elif action == t.FREE_REQUESTED:
                if address in live:
                    live[address][5] = False
                else:
                    self.odd += 1
            elif action in (t.SEGMENT_ALLOC, t.SEGMENT_MAP):
                self._remove(address, size)
            elif action in (t.SEGMENT_FREE, t.SEGMENT_UNMAP):
                after = rows[index + 1][0] if index + 1 < len(rows) else t.SNAPSHOT
                if after not in (t.SEGMENT_FREE, t.SEGMENT_UNMAP):  # the last of a run
                    private = after not in (t.SEGMENT_ALLOC, t.SEGMENT_MAP, t.OOM) and self._spared()
                if unknown and private:
                    self.pools[index] = pool = names((-1, len(rows) - index)) if private is True else private
                    private = pool
                self._add(address, size, stream, pool, action == t.SEGMENT_UNMAP)

    def _witness(self, address: int, segment: list[Any] | None) -> None:
        """A block is cut from the beginning of a free one, so the live block before it ends where it begins."""
        spot = bisect.bisect_left(self._starts, address) - 1
        if segment is not None and not segment[5] and spot >= 0 and self._starts[spot] >= segment[0]:
            self._ends[self._starts[spot]] = address

    def _spared(self) -> bool:
        """Whether a whole free segment of the default pool stays: then what is given back is a private pool's."""
        starts = sorted(self._live)
        for begin, size, _, pool, _, expandable in self._rows.values():
            if pool == 0 and not expandable:
                spot = bisect.bisect_left(starts, begin)
                if spot == len(starts) or starts[spot] >= begin + size:
                    return True
        return False

    def segments(self) -> np.ndarray:
        """Segments at the start, by address."""
        return np.array([tuple(self._rows[address]) for address in self._order], t.SEGMENT)

    def blocks(self) -> np.ndarray:
        """Blocks in use at the start, by address; sizes of those freed since are worked out."""
        rows = sorted(row for row in self._live.values() if self._at(row[0]) is not None)
        self.odd += len(self._live) - len(rows)  # freed, but in no segment: never allocated
        for row, after in zip(rows, [*rows[1:], None], strict=False):
            if row[0] in self._sure:
                continue
            begin, size, _, _, large, expandable = self._at(row[0]) or [0, 0, 0, 0, False, True]
            row[1] = self._settings.rounded(row[3])
            room = (min(begin + size, after[0]) if after else begin + size) - row[0]
            unsplit = large and not expandable and row[1] >= (self._settings.max_split_size_mb or 1 << 40) << 20
            if row[0] in self._ends and self._ends[row[0]] <= row[0] + room:
                row[1] = max(row[1], self._ends[row[0]] - row[0])
            elif unsplit or (0 < room - row[1] <= 1 << 20 and large and not expandable):
                row[1] = room  # a rest this small would not have been split off
        return np.array([tuple(row) for row in rows], t.BLOCK)
