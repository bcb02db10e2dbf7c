"""A set of address ranges that grows and shrinks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort


class Ranges:
    """Disjoint half-open ranges; touching ranges become one.

    Examples
    --------
    >>> ranges = Ranges()
    >>> ranges.add(0, 4); ranges.add(4, 8); ranges.remove(2, 3)
    >>> ranges.covers(3, 8), ranges.covers(0, 4), len(ranges)
    (True, False, 2)
    """

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._begins)

    def add(self, begin: int, end: int) -> None:
        """Take in ``begin`` to ``end``."""
        for other in self._touching(begin, end):
            begin, end = min(begin, other), max(end, self._ends[other])
            self._drop(other)
        insort(self._begins, begin)
        self._ends[begin] = end

    def remove(self, begin: int, end: int) -> None:
        """Leave out ``begin`` to ``end``, of whatever ranges hold parts of it."""
        for other in self._touching(begin, end):
            last = self._ends[other]
            self._drop(other)
            for left, right in ((other, min(begin, last)), (max(end, other), last)):
                if right > left:
                    insort(self._begins, left)
                    self._ends[left] = right

    def covers(self, begin: int, end: int) -> bool:
        """Whether one range holds all of ``begin`` to ``end``."""
        spot = bisect_right(self._begins, begin) - 1
        return spot >= 0 and self._ends[self._begins[spot]] >= end

    def overlaps(self, begin: int, end: int) -> bool:
        """Whether any range holds a part of ``begin`` to ``end``."""
        spot = bisect_left(self._begins, end) - 1
        return spot >= 0 and self._ends[self._begins[spot]] > begin

    def _touching(self, begin: int, end: int) -> list[int]:
        spot = bisect_left(self._begins, begin)
        if spot and self._ends[self._begins[spot - 1]] >= begin:
            spot -= 1
        return self._begins[spot : bisect_right(self._begins, end)]

    def _drop(self, begin: int) -> None:
        del self._begins[bisect_left(self._begins, begin)], self._ends[begin]
