"""Which work on which CUDA stream is known to run after which: the marks, and a clock for each stream.

Each stream runs its work in order. Between streams only waits order anything; the host orders what it enqueues after it
has waited itself. The state of a stream is, for every stream, how much of its work is done before the next work begins.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Use:
    """Work enqueued on ``stream`` at ``time_us`` that touches ``size`` bytes from ``address``.

    ``recorded``: ``record_stream`` was called for it, so the allocator waits for this stream before it gives the block
    out again. ``writes=False``: it only reads.
    """

    stream: int
    address: int
    size: int
    time_us: float
    recorded: bool = False
    writes: bool = True
    label: str = ""


@dataclass(frozen=True)
class Wait:
    """From ``time_us`` on, work enqueued on ``stream`` runs after what was enqueued on ``on``.

    ``stream=None``: the host waits (``synchronize``), so all later work runs after it; ``on=None``: for every stream.
    ``recorded_us``: when the event waited for was recorded (default: at the wait).
    """

    stream: int | None
    on: int | None
    time_us: float
    recorded_us: float | None = None


class Order:
    """Clocks of all streams.

    Examples
    --------
    >>> order = Order()
    >>> order.work(1), order.before(2).get(1, 0)
    (1, 0)
    >>> order.wait(Wait(stream=2, on=1, time_us=0)); order.before(2)[1]
    1
    """

    def __init__(self) -> None:
        self._done: dict[int | None, dict[int, int]] = {None: {}}
        self._count: dict[int, int] = {}
        self._events: dict[int, dict[int, int]] = {}

    def work(self, stream: int) -> int:
        """Enqueue one piece of work; return its number on its stream."""
        self._count[stream] = self._count.get(stream, 0) + 1
        return self._count[stream]

    def before(self, stream: int | None) -> dict[int, int]:
        """For each stream, the number of its last work that is done before the next on ``stream`` begins."""
        known = dict(self._done[None])
        for other, number in self._done.get(stream, {}).items():
            known[other] = max(known.get(other, 0), number)
        if stream is not None:
            known[stream] = self._count.get(stream, 0)
        return known

    def record(self, wait: Wait) -> None:
        """The event that ``wait`` will wait for is recorded now."""
        self._events[id(wait)] = self._state(wait.on)

    def wait(self, wait: Wait) -> None:
        """Order later work of the waiting stream (or of all, where the host waits) after what was waited for."""
        state = self._state(wait.on) if wait.recorded_us is None else self._events.get(id(wait), {})
        target = self._done.setdefault(wait.stream, {})
        for stream, number in state.items():
            target[stream] = max(target.get(stream, 0), number)

    def _state(self, on: int | None) -> dict[int, int]:
        return dict(self._count) if on is None else self.before(on)
