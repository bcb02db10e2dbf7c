"""Who holds what: the path from something a person can edit to the objects that grew, or to one object.

``mark`` remembers which objects exist; ``grown`` names the holders of what came since and stayed; ``owners_of`` names
every holder of one object. Nothing is changed and nothing is kept: the search holds the whole heap only while it runs.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import time
from typing import Any

import numpy as np

from o1lab.memory import counters
from o1lab.memory.growth import Growth, Mark
from o1lab.memory.heap import OWN, Heap
from o1lab.memory.holding import OUTSIDE, OwnerPath, words
from o1lab.memory.sizes import Sizes, same_storage

__all__ = ["Mark", "OwnerPath", "grown", "mark", "owners_of"]

SEARCHED_PATHS = 5000
SEARCH_SECONDS = 60.0
"""How long a search may take by default; an idle core needs two to three seconds for half a million objects."""
FROZEN_BY_USER = 10_000  # Python itself starts with a few hundred frozen objects since 3.12


def _quieten() -> tuple[bool, bool]:
    """No collection from here on, and frozen objects visible. (No context manager: it would be on the heap itself.)"""
    was = gc.isenabled(), counters._freezes > 0 or gc.get_freeze_count() > FROZEN_BY_USER
    gc.disable()
    if was[1]:
        gc.unfreeze()
    return was


def _restore(was: tuple[bool, bool]) -> None:
    enabled, frozen = was
    if frozen:
        gc.collect()
        gc.freeze()
    if enabled:
        gc.enable()


def mark(*, seconds: float = SEARCH_SECONDS) -> Mark:
    """Remember which objects exist now; give the result to :func:`grown` after some work.

    Examples
    --------
    >>> kept = []
    >>> before = mark()
    >>> kept += [bytearray(1000) for _ in range(20)]
    >>> grown(before)[0].path
    'kept[…]'
    """
    gc.collect()  # garbage would die later, and its addresses would be taken by new objects
    was = _quieten()
    heap = Heap(gc.get_objects(), time.monotonic() + seconds, edges=False)
    try:
        return Mark.of(heap)
    finally:
        heap.close()
        _restore(was)


def grown(mark: Mark, *, top: int = 10, seconds: float = SEARCH_SECONDS) -> list[OwnerPath]:
    """Objects that came since ``mark`` and are still there, by the path that holds them, largest first.

    What only took the place of something equally large (``self.last = output``) is no growth and is left out. Call it
    before ``gc.collect()`` to see garbage in cycles (kind ``"cycle"``).

    Parameters
    ----------
    mark : Mark
        From :func:`mark`.
    top : int
        Paths returned at most.
    seconds : float
        After this long no more of the heap is read; what is not reached by then is ``"unknown"``.
    """
    was = _quieten()
    heap = Heap(gc.get_objects(), time.monotonic() + 0.6 * seconds)
    try:
        return Growth(mark, heap).paths(top)
    finally:
        heap.close()
        _restore(was)


def owners_of(obj: Any, *, top: int = 5, seconds: float = SEARCH_SECONDS) -> list[OwnerPath]:
    """Every way by which ``obj`` is held, shortest first: one path per root and direct holder.

    The caller's own variable is one of them. Without any path it is garbage (kind ``"cycle"``) or held by C++ or a
    running frame's stack (``"unknown"``).

    Examples
    --------
    >>> box = {"a": bytearray(100)}
    >>> owners_of(box["a"])[0].path
    "box['a']"
    """
    deadline = time.monotonic() + seconds
    was = _quieten()
    heap = Heap(gc.get_objects(), time.monotonic() + 0.6 * seconds, (obj,))
    try:
        heap.search()
        return _ways(heap, obj, top, deadline)
    finally:
        heap.close()
        _restore(was)


def _ways(heap: Heap, obj: Any, top: int, deadline: float) -> list[OwnerPath]:
    target = int(heap.index_of(np.array([id(obj)], np.int64))[0])
    size, what = Sizes().own(obj), Sizes().what(obj)
    edges = heap.passable & (heap.level[heap.source] >= 0) & ~heap.hidden[heap.source]
    order = np.argsort(heap.target[edges], kind="stable")
    source, into = heap.source[edges][order], heap.target[edges][order]
    begin = np.searchsorted(into, np.arange(len(heap.objects) + 1))
    queue: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, (target,))]
    found: list[OwnerPath] = []
    seen: set[Any] = set()
    ticket = itertools.count(1)
    for _ in range(SEARCHED_PATHS):
        if not queue or len(found) >= top or time.monotonic() > deadline:
            break
        _, _, path = heapq.heappop(queue)
        head = path[0]
        root = heap.root_of.get(head)
        if root is not None and len(path) > 1:
            nodes = [heap.objects[index] for index in path]
            said = words(nodes, root)
            ends = (path[1], path[-2])
            if (
                ends not in seen
                and (said.exact, said.where) not in seen
                and not any(type(node).__module__ in OWN for node in nodes)
            ):
                seen.update((ends, said.exact, (said.exact, said.where)))
                found.append(OwnerPath(said.exact, said.kind, size, 1, what, said.where))
            continue
        for before in set(source[begin[head] : begin[head + 1]].tolist()) - set(path):
            heapq.heappush(queue, (len(path) + int(heap.level[before]), next(ticket), (before, *path)))
    found += _saved_ways(heap, obj, top - len(found), deadline)
    return found or [_unheld(heap, target, size, what)]


def _unheld(heap: Heap, target: int, size: int, what: str) -> OwnerPath:
    """The one thing to say of an object that no root reaches."""
    into = heap.source[heap.target == target].tolist()
    if into and heap.whole and all(heap.path(index)[0] in (index, target) for index in into):
        return OwnerPath(f"garbage waiting for the collector: {what}", "cycle", size, 1, what)
    return OwnerPath(OUTSIDE.format(what), "unknown", size, 1, what)


def _saved_ways(heap: Heap, obj: Any, top: int, deadline: float) -> list[OwnerPath]:
    """Tensors whose autograd history saved ``obj`` for the backward pass: C++ holds it, where no referrer is seen."""
    sizes, found = Sizes(), []
    if not sizes.is_tensor(type(obj)):
        return found
    size, what = sizes.storage(obj), sizes.what(obj)
    for index in np.flatnonzero(heap.level >= 0).tolist():
        tensor = heap.objects[index]
        if not sizes.is_tensor(type(tensor)) or heap.hidden[heap.path(index)[0]]:
            continue
        for node in sizes.history(tensor):
            if time.monotonic() > deadline or len(found) == top:
                return found
            if any(same_storage(one, obj) for one in sizes.saved_by(node)):
                at = heap.path(index)
                said = words([heap.objects[step] for step in at], heap.root_of.get(at[0]))
                path = f"{said.exact}.grad_fn → {type(node).__name__}"
                found.append(OwnerPath(path, said.kind, size, 1, what, said.where))
                break
    return found
