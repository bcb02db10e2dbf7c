"""Draws that come out the same on every platform and every version of Python.

Only the sequence of ``random.Random(text).random()`` is used: Python's documentation guarantees it across versions
(https://docs.python.org/3/library/random.html#notes-on-reproducibility), unlike ``shuffle``, ``choice`` and ``sample``.

>>> chance = Chance("o1lab", 0)
>>> [chance.below(10) for _ in range(8)]
[0, 7, 0, 1, 7, 6, 5, 6]
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


class Chance:
    """A stream of draws, named by its parts: the same parts give the same stream.

    Parameters
    ----------
    *parts : str or int
        What the stream is for, e.g. ``Chance("facts", seed, number)``.
    """

    def __init__(self, *parts: str | int) -> None:
        self._next = random.Random(" ".join(str(part) for part in parts)).random

    def below(self, n: int) -> int:
        """A whole number from 0 to ``n - 1``, each equally likely."""
        return int(self._next() * n)

    def pick(self, items: Sequence[Item]) -> Item:
        """One of ``items``, each equally likely."""
        return items[int(self._next() * len(items))]

    def shuffled(self, items: Iterable[Item]) -> list[Item]:
        """The items in an order drawn at random (Fisher and Yates, from the end)."""
        order = list(items)
        for last in range(len(order) - 1, 0, -1):
            other = int(self._next() * (last + 1))
            order[last], order[other] = order[other], order[last]
        return order
