"""Compare cache designs by the bytes they need for the same traffic: the least at which nothing goes wrong."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from o1lab.kv.backing import Bytes, Modelled
from o1lab.kv.designs import Design, Growing, KVShape, Paged, Static
from o1lab.kv.pool import PAGE_BYTES, PoolError
from o1lab.kv.replay import Outcome, replay
from o1lab.kv.traffic import Traffic


def needed_bytes(
    make: Callable[[int], Design], traffic: Traffic, *, step_bytes: int = 2 << 20, most_bytes: int = 1 << 40,
    **settings: Any,
) -> tuple[int, Outcome]:  # fmt: skip
    """Smallest capacity at which nothing fails, waits or is preempted, and the replay at it.

    Parameters
    ----------
    make : callable
        The design for a capacity in bytes.
    step_bytes : int
        Resolution.
    **settings
        Of :func:`replay`.

    Raises
    ------
    PoolError
        Not even ``most_bytes`` are enough.
    """
    low, high = 0, 64  # in steps; at `low` it fails, at `high` it will be found not to
    while not (found := replay(traffic, make(high * step_bytes), **settings)).clean:
        low, high = high, 2 * high
        if high * step_bytes > most_bytes:
            raise PoolError(f"{found.design}: {low * step_bytes / 2**30:.1f} GiB are not enough; {found}")
    while high - low > 1:
        middle = (low + high) // 2
        outcome = replay(traffic, make(middle * step_bytes), **settings)
        low, high, found = (low, middle, outcome) if outcome.clean else (middle, high, found)
    return high * step_bytes, found


@dataclass(frozen=True)
class Comparison:
    """Bytes that each design needs for the same traffic, and the replays at those capacities."""

    traffic: str
    needed: Mapping[str, int]
    outcomes: Mapping[str, Outcome]

    def ratio(self, name: str, to: str = "paged pool") -> float:
        """How many times the bytes of ``to`` the design ``name`` needs."""
        return self.needed[name] / self.needed[to]

    def all_in_waste(self, name: str) -> float:
        """``1 − peak live / needed``."""
        return 1 - self.outcomes[name].peak_live_bytes / self.needed[name]

    def __str__(self) -> str:
        head = f"{'':<24}{'needs MiB':>10}{'live MiB':>10}{'× pool':>8}{'in taken':>10}{'all in':>8}"
        rows = [
            f"{name:<24}{needed / 2**20:>10.0f}{self.outcomes[name].peak_live_bytes / 2**20:>10.0f}"
            f"{self.ratio(name, list(self.needed)[-1]):>8.2f}{self.outcomes[name].tail_waste:>10.1%}"
            f"{self.all_in_waste(name):>8.1%}"
            for name, needed in self.needed.items()
        ]
        return "\n".join([textwrap.fill(self.traffic.partition("\n")[0], 100), head, *rows])


def compare(
    traffic: Traffic, shape: KVShape | None = None, *, allocators: Mapping[str, Callable[[int], Any]] | None = None,
    stride: int = 32, page_bytes: int = PAGE_BYTES, step_bytes: int = 2 << 20,
) -> Comparison:  # fmt: skip
    """What each design needs to serve ``traffic`` with nothing failing and nobody waiting for memory.

    Parameters
    ----------
    shape : KVShape, optional
    allocators : mapping of name to callable, optional
        An allocator for a capacity in bytes, e.g.
        ``{"torch": lambda capacity: CachingAllocator(Settings(capacity_bytes=capacity))}``; the growing and the static
        cache are served by each, the pool by none: it asks once. Default: an ideal allocator.
    stride, step_bytes
        See :func:`replay` and :func:`needed_bytes`.

    Examples
    --------
    >>> from o1lab.kv.traffic import long_cot
    >>> found = compare(long_cot(8, concurrent=4, median_tokens=300, most_tokens=900))
    >>> found.ratio("static, ideal") > found.ratio("growing cat, ideal") > found.ratio("paged pool")
    True
    """
    shape = shape or KVShape()
    most = max(request.prompt_tokens + request.output_tokens for request in traffic)
    makers: dict[str, Callable[[int], Design]] = {}
    for name, allocator in (allocators or {"ideal": Bytes}).items():
        makers[f"growing cat, {name}"] = lambda capacity, served=allocator: Growing(shape, Modelled(served(capacity)))
        makers[f"static, {name}"] = lambda capacity, served=allocator: Static(
            shape, Modelled(served(capacity)), most_tokens=most
        )
    makers["paged pool"] = lambda capacity: Paged(shape, capacity_bytes=capacity, page_bytes=page_bytes)
    needed, outcomes = {}, {}
    for name, make in makers.items():
        step = page_bytes if name == "paged pool" else step_bytes
        needed[name], outcomes[name] = needed_bytes(make, traffic, step_bytes=step, stride=stride)
    return Comparison(str(traffic), needed, outcomes)
