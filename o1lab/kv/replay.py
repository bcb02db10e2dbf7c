"""Serve traffic with one cache design, step by step, and account for every byte.

One step decodes ``stride`` tokens of each running sequence. What the design asks of memory goes to an allocator's model
or to a real device (:mod:`o1lab.kv.backing`); :func:`as_trace` turns the requests into rows that an allocator simulator
reads. Out of memory at admission a request waits; out of memory while growing it is dropped, or another one is
preempted and its tokens are computed again. A request that would not fit even alone is lost at once.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from o1lab.kv.backing import Event
from o1lab.kv.designs import Design
from o1lab.kv.pool import PoolError
from o1lab.kv.traffic import Request, Traffic

if TYPE_CHECKING:
    import numpy as np

    from o1lab.stats import Estimate

POLICIES = ("drop", "youngest", "oldest")
MOST_STEPS = 1_000_000


@dataclass(frozen=True)
class Outcome:
    """What one replay did; the series have one value per step.

    Attributes
    ----------
    finished, aborted, failures : int
        Requests served whole, ended by their client, and lost for want of memory.
    refusals : int
        Admissions put off for want of memory, counted at each step.
    preemptions, recomputed_tokens : int
        Sequences thrown out for others, and what they had in the cache.
    decoded_tokens : int
    peak_reserved_bytes : int
        Also between steps, while an old and a new tensor are both there.
    live_bytes, used_bytes, reserved_bytes : numpy.ndarray, shape (steps,)
        Bytes that hold tokens, that sequences have taken, that are taken from the device, after each step.
    running : numpy.ndarray, shape (steps,)
    append_us : numpy.ndarray, shape (steps,)
        Time in which all running sequences grew, in µs; only on a real device does it mean anything.
    """

    design: str
    finished: int
    aborted: int
    failures: int
    refusals: int
    preemptions: int
    recomputed_tokens: int
    decoded_tokens: int
    peak_reserved_bytes: int
    live_bytes: np.ndarray
    used_bytes: np.ndarray
    reserved_bytes: np.ndarray
    running: np.ndarray
    append_us: np.ndarray = field(repr=False)

    @property
    def clean(self) -> bool:
        """Whether every request was admitted when its turn came, and none was lost or preempted."""
        return not (self.failures or self.refusals or self.preemptions)

    @property
    def peak_live_bytes(self) -> int:
        """Most bytes that held tokens."""
        return int(self.live_bytes.max(initial=0))

    @property
    def peak_used_bytes(self) -> int:
        """Most bytes that sequences had taken after a step."""
        return int(self.used_bytes.max(initial=0))

    @property
    def tail_waste(self) -> float:
        """``1 − Σ live / Σ used`` over the steps: what sequences had taken and not filled."""
        return _waste(self.live_bytes, self.used_bytes)

    @property
    def waste(self) -> float:
        """``1 − Σ live / Σ reserved`` over the steps: all of it, idle times included."""
        return _waste(self.live_bytes, self.reserved_bytes)

    @property
    def peak_waste(self) -> float:
        """``1 − peak live / peak reserved``: what the fullest moment would have done without."""
        return 1 - self.peak_live_bytes / self.peak_reserved_bytes if self.peak_reserved_bytes else 0.0

    @property
    def not_live(self) -> np.ndarray:
        """Share of the reserved bytes without a token, after each step in which something was reserved."""
        some = self.reserved_bytes > 0
        return 1 - self.live_bytes[some] / self.reserved_bytes[some]

    def append(self, q: float) -> Estimate:
        """Quantile of the times of one step's appends, in µs, over the steps in which something ran."""
        from o1lab.kv.latency import quantile

        return quantile(self.append_us[self.running > 0], q, "µs")

    def __str__(self) -> str:
        gib = 2**30
        return (
            f"{self.design}: {self.finished} served, {self.aborted} aborted, {self.failures} lost, {self.refusals} "
            f"refusals, {self.preemptions} preemptions; {self.peak_live_bytes / gib:.2f} GiB live at most, "
            f"{self.peak_reserved_bytes / gib:.2f} GiB reserved; waste {self.tail_waste:.1%} in what sequences took, "
            f"{self.waste:.1%} in all"
        )


def _waste(live: np.ndarray, held: np.ndarray) -> float:
    total = float(held.sum(dtype=float))
    return 1 - float(live.sum(dtype=float)) / total if total else 0.0


@dataclass
class _Running:
    request: Request
    known: int
    """Tokens of the prompt and of what is decoded: all that has to be computed before the next one."""
    tokens: int = 0
    """Those of them that are in the cache."""


def replay(
    traffic: Traffic, design: Design, *, stride: int = 1, step_s: float = 0.02, when_full: str = "drop",
    admit_whole: bool = False, prefill: int | None = None, most_steps: int = MOST_STEPS,
) -> Outcome:  # fmt: skip
    """Serve ``traffic`` with ``design``.

    Parameters
    ----------
    stride : int
        Tokens that a sequence gains in one step. Above 1 a growing cache copies less often than a real one does.
    step_s : float
        Time that one token takes, for arrivals.
    when_full : {"drop", "youngest", "oldest"}
        Who goes when a sequence cannot grow: itself and for good, or the one admitted last or first, which is put back
        to the head of the queue with all its tokens to compute again.
    prefill : int, optional
        Tokens of a prompt, or of what has to be computed again, that one step computes; default: all at once.
    admit_whole : bool
        Admit a request only if it and all running ones fit at their full length; needs a design with a capacity.
    most_steps : int
        Where a replay that gets nowhere ends; what is then unserved counts as lost.

    Raises
    ------
    PoolError
        A policy that does not exist, a number out of range, or ``admit_whole`` without a known capacity.
    """
    prefill = 1 << 60 if prefill is None else prefill
    for name, value in (("stride", stride), ("most_steps", most_steps), ("prefill", prefill)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PoolError(f"{name}={value!r}: a whole number, at least 1")
    if when_full not in POLICIES:
        raise PoolError(f"when_full={when_full!r}: one of {', '.join(POLICIES)}")
    capacity = design.capacity_bytes
    if admit_whole and capacity is None:
        raise PoolError(f"admit_whole: the capacity of {design.name!r} is not known; give its allocator one")
    whole = capacity if admit_whole else None
    return _Server(traffic, design, stride, prefill, step_s, when_full, whole).run(most_steps)


class _Server:
    def __init__(
        self, traffic: Traffic, design: Design, stride: int, prefill: int, step_s: float, when_full: str,
        whole: int | None,
    ) -> None:  # fmt: skip
        self.design, self.stride, self.prefill, self.step_s = design, stride, prefill, step_s
        self.when_full, self.whole = when_full, whole
        self.concurrent, self.name = traffic.concurrent, design.name
        self.queue = deque(_Running(request, request.prompt_tokens) for request in traffic)
        self.running: list[_Running] = []
        self.counts = dict.fromkeys(
            ("finished", "aborted", "failures", "refusals", "preemptions", "recomputed_tokens", "decoded_tokens"), 0
        )
        self.now = 0.0
        self.series = {name: array("d") for name in ("live", "used", "reserved", "running", "append")}

    def run(self, most_steps: int) -> Outcome:
        import numpy as np

        steps = 0
        while (self.queue or self.running) and steps < most_steps:
            if not self.running and self.queue[0].request.arrival_s > self.now:
                self.now = self.queue[0].request.arrival_s
            self.design.memory.step = steps
            self._admit()
            self.design.memory.settle()
            begun = time.perf_counter_ns()
            for one in list(self.running):
                if one in self.running:
                    self._grow(one)
            self.design.memory.settle()
            taken = time.perf_counter_ns() - begun
            self._note(taken / 1000)
            self._end()
            self.now += self.step_s * self.stride
            steps += 1
        self.counts["failures"] += len(self.queue) + len(self.running)
        for one in self.running:
            self.design.end(one.request.number)
        found = {name: np.frombuffer(values, "f8") for name, values in self.series.items()}
        live, used, reserved, running = (found[name].astype("i8") for name in ("live", "used", "reserved", "running"))
        peak = max(self.design.memory.peak_reserved_bytes, int(reserved.max(initial=0)))
        return Outcome(
            self.name, **self.counts, peak_reserved_bytes=peak, live_bytes=live, used_bytes=used,
            reserved_bytes=reserved, running=running, append_us=found["append"],
        )  # fmt: skip

    def _admit(self) -> None:
        while self.queue and len(self.running) < self.concurrent and self.queue[0].request.arrival_s <= self.now:
            one = self.queue[0]
            possible, first = self.design.fits(one.request.tokens), min(one.known, self.prefill)
            if possible and self._whole(one) and self.design.admit(one.request, first):
                one.tokens = first
                self.running.append(self.queue.popleft())
            elif possible and self.running:
                self.counts["refusals"] += 1
                return
            else:  # even alone there is no room
                self.queue.popleft()
                self.counts["failures"] += 1

    def _whole(self, one: _Running) -> bool:
        every = [*self.running, one]
        return self.whole is None or sum(self.design.needs(other.request.tokens) for other in every) <= self.whole

    def _grow(self, one: _Running) -> None:
        goal, pace = (one.known, self.prefill) if one.tokens < one.known else (one.request.tokens, self.stride)
        tokens = min(one.tokens + pace, goal)
        while not self.design.grow(one.request.number, tokens):
            victim = one if self.when_full == "drop" else self.running[-1 if self.when_full == "youngest" else 0]
            self.running.remove(victim)
            self.design.end(victim.request.number)
            if self.when_full == "drop" or not self.running:
                self.counts["failures"] += 1
            else:
                self.counts["preemptions"] += 1
                self.counts["recomputed_tokens"] += victim.tokens
                victim.tokens = 0
                self.queue.appendleft(victim)
            if victim is one:
                return
        self.counts["decoded_tokens"] += max(0, tokens - one.known)
        one.tokens, one.known = tokens, max(tokens, one.known)

    def _note(self, append_us: float) -> None:
        tokens = sum(one.tokens for one in self.running) - self.design.saved_tokens
        values = (tokens * self.design.shape.token_bytes, self.design.used_bytes, self.design.reserved_bytes,
                  len(self.running), append_us)  # fmt: skip
        for series, value in zip(self.series.values(), values, strict=True):
            series.append(value)

    def _end(self) -> None:
        for one in [one for one in self.running if one.tokens >= one.request.tokens]:
            self.running.remove(one)
            self.design.end(one.request.number)
            self.counts["finished" if one.request.aborted_after is None else "aborted"] += 1


def as_trace(requests: Iterable[Event], *, step_us: int = 1000) -> list[dict[str, Any]]:
    """Requests to an allocator as the rows of a torch snapshot's ``device_traces``.

    ``o1lab.memory.trace.from_snapshot({"segments": [], "device_traces": [as_trace(memory.events)]})`` makes a trace of
    them, which ``o1lab.memory.simulate`` replays under any allocator settings.

    Examples
    --------
    >>> [row["action"] for row in as_trace([Event("alloc", 1, 700, 0), Event("free", 1, 700, 0)])]
    ['alloc', 'free_requested', 'free_completed']
    """
    rows, addresses, top = [], {}, 1 << 40
    for event in requests:
        if event.action == "alloc":
            addresses[event.block] = top
            top += -(-event.size // 512) * 512
        address = addresses[event.block] if event.action == "alloc" else addresses.pop(event.block)
        for action in ("alloc",) if event.action == "alloc" else ("free_requested", "free_completed"):
            rows.append(
                {"action": action, "addr": address, "size": event.size, "stream": 0, "time_us": event.step * step_us}
            )
    return rows
