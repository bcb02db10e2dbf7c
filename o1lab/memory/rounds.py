"""Quiet readings at the ends of rounds, in memory that is allocated before the first one, and what they say."""

from __future__ import annotations

import contextlib
import os
import threading
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from o1lab.errors import ProbeError
from o1lab.memory import counters
from o1lab.memory.counters import Reading
from o1lab.stats import Estimate, median, theil_sen

UNIT = "B/request"
COUNTERS = tuple(Reading.__dataclass_fields__)
IN_USE = ("host_in_use", "device_allocated")
HELD = ("rss", "device_reserved", "device_used")  # these move in steps of pages and segments
ABSENT = -(1 << 62)


def check_counts(**counts: Any) -> None:
    """Refuse what is no whole number of at least 1.

    Raises
    ------
    ProbeError
    """
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ProbeError(f"{name}={value!r} must be a whole number, at least 1")


def check_floor(floor: Any) -> None:
    """Refuse a floor that is no positive number of bytes per request: at 0 any noise would be growth.

    Raises
    ------
    ProbeError
    """
    if isinstance(floor, bool) or not isinstance(floor, (int, float)) or not 0 < floor < float("inf"):
        raise ProbeError(f"floor={floor!r} must be a number of bytes per request above 0")


class Rounds:
    """Readings of up to ``capacity`` round ends; the bookkeeping itself must not grow while it measures."""

    def __init__(self, capacity: int, requests_per_round: int) -> None:
        self.capacity, self.per_round, self.count = capacity, requests_per_round, 0
        self.ledger = array("q", bytes(8 * len(COUNTERS) * capacity))
        self.pending = array("q", bytes(8 * capacity))
        self.threads = array("q", bytes(8 * capacity))
        self.process = os.getpid()

    def end(self) -> None:
        """Read the garbage that waits for the collector, quieten the process, read every counter.

        Raises
        ------
        ProbeError
            The device was lost, or a step forked and this is the child.
        """
        if os.getpid() != self.process:
            raise ProbeError("the step forked and its child came back into the probe; end the child with os._exit")
        try:
            noisy = counters.read(collect=False, driver=False)
            quiet = counters.read()
        except RuntimeError as error:  # torch raises it, or a subclass, when the device has failed
            raise ProbeError(
                f"the device failed after {self.count} rounds ({str(error).splitlines()[0]}); nothing later can be "
                "measured in this process: restart it"
            ) from error
        base = self.count * len(COUNTERS)
        for index, name in enumerate(COUNTERS):
            value = getattr(quiet, name)
            self.ledger[base + index] = ABSENT if value is None else value
        self.pending[self.count] = (noisy.host_in_use or 0) + (noisy.device_allocated or 0)
        self.pending[self.count] -= (quiet.host_in_use or 0) + (quiet.device_allocated or 0)
        self.threads[self.count] = threading.active_count()
        self.count += 1

    def value(self, number: int, counter: str) -> int | None:
        """One counter at the end of round ``number``, in bytes."""
        found = self.ledger[number * len(COUNTERS) + COUNTERS.index(counter)]
        return None if found == ABSENT else found

    def reading(self, number: int) -> Reading:
        """All counters at the end of round ``number``."""
        return Reading(*(self.value(number, name) for name in COUNTERS))  # type: ignore[arg-type]

    def rate(self, numbers: Sequence[int], *names: str) -> Estimate | None:
        """Median growth per request in the rounds ``numbers``, of the sum of the named counters.

        Counters of what is *held* move in steps: where the rounds' median shows no growth, theirs is a Theil–Sen slope
        over the rounds from the first to the last of ``numbers``.
        """
        if any(self.value(numbers[0], name) is None for name in names):
            return None
        found = median([self.gain(n, *names) / self.per_round for n in numbers], UNIT)
        if found.low > 0 or len(numbers) < 8 or not any(name in HELD for name in names):
            return found
        span = range(numbers[0] - 1, numbers[-1] + 1)
        return theil_sen([number * self.per_round for number in span], [self.total(n, names) for n in span], UNIT)

    def total(self, number: int, names: Sequence[str]) -> int:
        """Sum of the named counters at the end of round ``number``, in bytes (an absent counter counts zero)."""
        return sum(self.value(number, name) or 0 for name in names)

    def gain(self, number: int, *names: str) -> int:
        """Bytes that the named counters grew by in round ``number``."""
        return self.total(number, names) - self.total(number - 1, names)

    def growth(self, number: int) -> float:
        """Growth of round ``number`` in bytes per request, the larger of host and device."""
        return max(self.gain(number, name) for name in IN_USE) / self.per_round

    def settled(self, floor: float) -> int:
        """How many rounds at the start are warm-up: those up to two in a row that stop growing or grow alike.

        Three rounds that grow alike (within 10 %) are a leak, not a warm-up; waiting longer would not change it.
        Returns ``count`` if that has not come yet.
        """
        calm = 0
        for number in range(1, self.count):
            late = [self.growth(number - back) for back in range(min(3, number))]
            alike = len(late) == 3 and min(late) > floor and max(late) <= 1.1 * min(late)
            calm = calm + 1 if late[0] <= floor or alike else 0
            if calm == 2:
                return number
        return self.count


_running = False


@contextlib.contextmanager
def quiet_process() -> Iterator[None]:
    """One probe at a time, and only what it makes itself is collected.

    Raises
    ------
    ProbeError
        A probe is running already in this process.
    """
    import scipy.stats  # noqa: F401 - loaded now: a late import would eat the free heap that is to be judged

    global _running
    if _running:
        raise ProbeError("a probe inside a probe would measure the outer one; probe the inner step alone")
    _running = True
    try:
        with counters.frozen():
            yield
    finally:
        _running = False
