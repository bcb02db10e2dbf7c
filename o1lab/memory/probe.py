"""Does serving a request leave memory behind? Rounds of equal work, exact counters at quiet round ends.

The measurement, not the p-value, tells a leak from the normal life of a server (warm-up, allocator steps, caches,
collector saw-tooth): every round does the same amount of work and ends quiet; growth must show in nearly every round;
a replay of the last round's inputs separates growth per call from growth per *new* input. Design after BLeak (Vilk and
Berger 2018) and Matias et al. 2014; the numbers behind it are in the notebook 01.
"""

from __future__ import annotations

import contextlib
import itertools
import textwrap
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from o1lab.errors import ProbeError
from o1lab.memory import counters
from o1lab.memory.counters import Reading
from o1lab.stats import Estimate, median

UNIT = "B/request"
FLOOR = 16.0  # B/request: half of glibc's smallest chunk, i.e. one 32-byte chunk every second request
RSS_FLOOR = 256.0  # B/request: resident memory moves in 4 KiB pages, so it needs a coarser floor
DRIVER_FLOOR = 4096.0  # B/request: other processes on the device move the driver's figure too
SHRINK_FLOOR = 64.0  # B/request: type objects and free lists may give a little back for a while
LAZY_BYTES = 1 << 20  # garbage in cycles at a round's end: any Python program has some, a MiB of it is worth a word
REPLAY_ROUNDS = 7
COUNTERS = tuple(Reading.__dataclass_fields__)
ABSENT = -(1 << 62)
ADVICE = {
    "none": f"Nothing grows by {FLOOR:g} B/request or more, the floor. Longer rounds lower what could still hide.",
    "per-call leak": "Every request leaves memory behind, also when inputs repeat: look for what each call appends to, "
    "registers or keeps alive (lists, hooks, exceptions, autograd history, native code), or for a bounded buffer "
    "that is not full yet.",
    "shrinks": "In-use memory falls round after round: something filled earlier is released. Let it settle.",
    "threads": "Threads started by the step outlive it, so rounds end unquiet. Join them in the step.",
    "keyed growth": "Only new inputs grow it: a cache keyed by the input with no limit seen. Bound it, bucket or pad "
    "the keys (sequence lengths, shapes, session ids).",
    "warm-up": "Growth stopped within the rounds: one-off costs. Probe again with more warm-up to be sure.",
    "lazy gc": "The collector gets it all back: reference cycles. Break them, or collect at a quiet moment.",
    "fragmentation": "In-use memory is flat while held memory grows: free blocks in the wrong places. Returning them "
    "helped (malloc_trim or empty_cache); reuse buffers or allocate survivors early.",
    "driver": "The device's used memory grows outside torch's allocator: other processes, NCCL, CUDA modules, graphs.",
    "inconclusive": "The rounds do not agree. Use more requests per round, more rounds, or stop background threads.",
}


@dataclass(frozen=True)
class LeakReport:
    """What :func:`probe` found.

    Attributes
    ----------
    kind : str
        ``"none" | "per-call leak" | "keyed growth" | "warm-up" | "lazy gc" | "fragmentation" | "driver"``, or
        ``"inconclusive"`` when the rounds contradict each other.
    host, device : Estimate or None
        In-use growth in bytes per request: median over the judged rounds with its distribution-free 95 % interval.
        ``None`` where the machine has no exact counter (host: not glibc; device: no CUDA).
    total : Estimate or None
        Host and device together, round by round.
    rss, reserved : Estimate or None
        The same for resident memory and for the allocator's reserved bytes: what outside tools watch.
    replay_host, replay_device : Estimate or None
        Growth while the last round's inputs were replayed; measured only if something grew.
    readings : tuple of Reading
        One quiet reading per round end, warm-up rounds first; ``warm_up`` says how many of the rounds were warm-up.
    pending_bytes : int
        Host plus device bytes that the collector freed at the end of the last judged round.
    requests_per_round, seconds, advice
        Requests in a round, time taken in seconds, and one sentence of what to do.
    """

    kind: str
    host: Estimate | None
    device: Estimate | None
    total: Estimate | None
    rss: Estimate | None
    reserved: Estimate | None
    replay_host: Estimate | None
    replay_device: Estimate | None
    readings: tuple[Reading, ...]
    warm_up: int
    requests_per_round: int
    pending_bytes: int
    seconds: float
    advice: str
    returned: dict[str, int] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        """Requests served in the judged rounds."""
        return (len(self.readings) - self.warm_up - 1) * self.requests_per_round

    @property
    def balance(self) -> Reading:
        """Growth of every counter over the judged rounds, in bytes."""
        return self.readings[-1] - self.readings[self.warm_up]

    def series(self, counter: str) -> tuple[list[int], list[int]]:
        """Requests served and bytes grown since the first judged reading, for one counter of :class:`Reading`."""
        judged = self.readings[self.warm_up :]
        first = getattr(judged[0], counter)
        if first is None:
            raise ProbeError(f"this machine has no counter {counter!r}")
        steps = [index * self.requests_per_round for index in range(len(judged))]
        return steps, [getattr(reading, counter) - first for reading in judged]

    def __str__(self) -> str:
        lines = [f"{self.kind} · {self.requests} requests in {self.seconds:.1f} s"]
        for name in ("host", "device", "replay_host", "replay_device"):
            value = getattr(self, name)
            if value is not None:
                lines.append(f"  {name.replace('_', ' '):<14} {value}")
        lines += [f"  {name} gave back {size:,} B" for name, size in self.returned.items()]
        return "\n".join([*lines, textwrap.fill(self.advice, 88, initial_indent="  ", subsequent_indent="  ")])


def probe(
    step: Callable[[Any], Any],
    *,
    inputs: Iterable[Any] | None = None,
    rounds: int = 12,
    requests_per_round: int = 32,
    warm_up: int = 8,
    floor: float = FLOOR,
    progress: bool = False,
) -> LeakReport:
    """Serve requests in rounds and report what each leaves behind.

    Parameters
    ----------
    step : callable
        ``step(x)`` serves one request; its result is dropped.
    inputs : iterable, optional
        The requests, taken in order and cycled. Without it ``x`` is the request's number 0, 1, 2, …
    rounds : int
        Judged rounds, at least 6 (fewer give no 95 % interval of a median).
    requests_per_round : int
        Equal work in each round; a leak smaller than ``floor`` per request stays unseen.
    warm_up : int
        At most this many rounds are spent waiting for two quiet rounds in a row before judging starts.
    floor : float
        Growth at or below this many bytes per request counts as none.
    progress : bool
        Show rounds as they pass.

    Returns
    -------
    LeakReport

    Raises
    ------
    ProbeError
        Too few rounds, no inputs, a probe inside a probe, or ``step`` raised (chained; nothing global stays changed).

    Examples
    --------
    >>> from o1lab.memory import HostPlant, probe
    >>> with HostPlant(200) as leak:
    ...     report = probe(lambda x: leak(), rounds=6, requests_per_round=50)
    >>> report.kind, round(report.host.value, -1)
    ('per-call leak', 210.0)
    """
    if rounds < 6:
        raise ProbeError(f"rounds={rounds} cannot be judged: a 95 % interval of a median needs at least 6")
    if requests_per_round < 1 or warm_up < 1:
        raise ProbeError(f"requests_per_round={requests_per_round} and warm_up={warm_up} must be at least 1")
    with _quiet_process():
        return _Probe(step, inputs, rounds, requests_per_round, warm_up, floor, progress).run()


_running = False


@contextlib.contextmanager
def _quiet_process() -> Iterator[None]:
    """One probe at a time, and only what it makes itself is collected."""
    global _running
    if _running:
        raise ProbeError("a probe inside a probe would measure the outer one; probe the inner step alone")
    _running = True
    try:
        with counters.frozen():
            yield
    finally:
        _running = False


class _Probe:
    def __init__(self, step, inputs, rounds, requests_per_round, warm_up, floor, progress) -> None:  # type: ignore[no-untyped-def]
        self.step, self.rounds, self.per_round = step, rounds, requests_per_round
        self.max_warm_up, self.floor, self.progress = warm_up, floor, progress
        if inputs is None:
            self.source: Iterator[Any] = itertools.count()
        else:
            self.source = itertools.cycle(inputs if isinstance(inputs, (list, tuple)) else list(inputs))
        self.batch: list[Any] = []
        self.served = 0
        # Everything the probe keeps is allocated here, once: its own bookkeeping must not grow while it measures.
        self.ledger = array("q", bytes(8 * len(COUNTERS) * (rounds + warm_up + REPLAY_ROUNDS + 4)))
        self.pending = array("q", bytes(8 * (rounds + warm_up + REPLAY_ROUNDS + 4)))
        self.round = 0
        self.threads = threading.active_count()

    def serve(self, *, replay: bool = False) -> None:
        """One round: the requests, then a quiet reading; garbage waiting for the collector is measured on the way."""
        if not replay:
            self.batch = list(itertools.islice(self.source, self.per_round))
            if not self.batch:
                raise ProbeError("inputs is empty: give at least one request")
        for number, request in enumerate(self.batch):
            try:
                self.step(request)
            except Exception as error:
                raise ProbeError(
                    f"step raised {type(error).__name__} at request {self.served + number}: {error}; "
                    "a probe needs steps that succeed (catch what your server catches)"
                ) from error
        self.served += len(self.batch)
        noisy = counters.read(collect=False, driver=False)
        quiet = counters.read()
        base = self.round * len(COUNTERS)
        for index, name in enumerate(COUNTERS):
            value = getattr(quiet, name)
            self.ledger[base + index] = ABSENT if value is None else value
        self.pending[self.round] = (noisy.host_in_use or 0) + (noisy.device_allocated or 0)
        self.pending[self.round] -= (quiet.host_in_use or 0) + (quiet.device_allocated or 0)
        self.round += 1

    def value(self, round_number: int, counter: str) -> int | None:
        found = self.ledger[round_number * len(COUNTERS) + COUNTERS.index(counter)]
        return None if found == ABSENT else found

    def rate(self, first: int, last: int, *names: str) -> Estimate | None:
        """Median growth per request over the round ends ``first`` … ``last``, of the sum of the named counters."""
        series = [[self.value(number, name) for number in range(first, last + 1)] for name in names]
        if any(value is None for values in series for value in values):
            return None
        sums = [sum(values) for values in zip(*series, strict=True)]  # type: ignore[arg-type]
        return median([(b - a) / self.per_round for a, b in itertools.pairwise(sums)], UNIT)

    def grew(self, estimate: Estimate | None, floor: float | None = None) -> bool:
        return estimate is not None and estimate.low >= (self.floor if floor is None else floor)

    def run(self) -> LeakReport:
        begun = time.perf_counter()
        warm = self.find_warm_up()
        steps: Iterable[int] = range(self.rounds)
        if self.progress:
            from o1lab.progress import progress

            steps = progress(steps, total=self.rounds, label="leak probe, rounds")
        for _ in steps:
            self.serve()
        last = warm + self.rounds
        rates = {name: self.rate(warm, last, name) for name in COUNTERS}
        host, device = rates["host_in_use"], rates["device_allocated"]
        total = host if device is None else self.rate(warm, last, "host_in_use", "device_allocated")
        replay_host = replay_device = None
        if self.grew(host) or self.grew(device):
            for _ in range(REPLAY_ROUNDS):
                self.serve(replay=True)
            replayed = (last + 1, self.round - 1)  # the first replayed round settles what meeting a batch twice costs
            replay_host = self.rate(*replayed, "host_in_use")
            replay_device = self.rate(*replayed, "device_allocated")
        returned: dict[str, int] = {}
        kind = self.judge(warm, last, rates, replay_host, replay_device, returned)
        readings = tuple(Reading(*(self.value(number, name) for name in COUNTERS)) for number in range(last + 1))  # type: ignore[arg-type]
        advice = ADVICE[kind]
        kind = "inconclusive" if kind in ("shrinks", "threads") else kind
        return LeakReport(
            kind, host, device, total, rates["rss"], rates["device_reserved"], replay_host, replay_device, readings,
            warm, self.per_round, self.pending[last], time.perf_counter() - begun, advice, returned,
        )  # fmt: skip

    def find_warm_up(self) -> int:
        """Serve until two rounds in a row stop growing, or growth is steady, or ``max_warm_up`` is reached."""
        self.serve()
        calm = 0
        while self.round <= self.max_warm_up and calm < 2:
            self.serve()
            calm = calm + 1 if self.growth(self.round - 1) <= self.floor or self.steady() else 0
        return self.round - 1

    def growth(self, number: int) -> float:
        """Growth of round ``number`` in bytes per request, the larger of host and device."""
        gaps = [
            (self.value(number, name) or 0) - (self.value(number - 1, name) or 0)
            for name in ("host_in_use", "device_allocated")
        ]
        return max(gaps) / self.per_round

    def steady(self) -> bool:
        """Three rounds that grew alike (within 10 %): a leak, not a warm-up; waiting longer would not change it."""
        if self.round < 4:
            return False
        late = [self.growth(self.round - back) for back in (1, 2, 3)]
        return min(late) > self.floor and max(late) <= 1.1 * min(late)

    def replayed(self, first: Estimate, again: Estimate | None) -> str:
        """What the replay of the last round's inputs says of a growth ``first``: it went on, it stopped, or neither."""
        if again is None or min(again.low, -again.high) < -2 * first.value and again.low < 0:
            return "inconclusive"
        return "keyed growth" if again.value < max(self.floor, 0.1 * first.value) else "per-call leak"

    def judge(
        self, warm: int, last: int, rates: dict[str, Estimate | None], replay_host: Estimate | None,
        replay_device: Estimate | None, returned: dict[str, int],
    ) -> str:  # fmt: skip
        host, device = rates["host_in_use"], rates["device_allocated"]
        if threading.active_count() > self.threads:
            return "threads"
        if any(e is not None and e.high < -SHRINK_FLOOR for e in (host, device)):
            return "shrinks"  # a fault of the method, not a cure
        if self.grew(host) or self.grew(device):
            half = warm + self.rounds // 2
            late = [self.rate(half, last, name) for name in ("host_in_use", "device_allocated") if last - half >= 6]
            if late and not any(e is not None and e.value >= self.floor for e in late):
                return "warm-up"
            pairs = ((host, replay_host), (device, replay_device))
            answers = {self.replayed(first, again) for first, again in pairs if self.grew(first)}
            return (
                answers.pop()
                if len(answers) == 1
                else "per-call leak"
                if "per-call leak" in answers
                else "inconclusive"
            )
        if any(e is not None and e.value > self.floor for e in (host, device)):
            return "inconclusive"
        if median(self.pending[warm + 1 : last + 1], "B").low > LAZY_BYTES:
            return "lazy gc"
        if self.grew(rates["device_reserved"]):
            import torch

            before = torch.cuda.memory_reserved()
            torch.cuda.empty_cache()
            returned["empty_cache"] = before - torch.cuda.memory_reserved()
            return "fragmentation"
        if self.grew(rates["rss"], RSS_FLOOR):
            returned["malloc_trim"] = counters.trim()
            grown = (self.value(last, "rss") or 0) - (self.value(warm, "rss") or 0)
            return "fragmentation" if returned["malloc_trim"] > 0.5 * grown else "inconclusive"
        if self.grew(rates["device_used"], DRIVER_FLOOR):
            return "driver"
        return "none"
