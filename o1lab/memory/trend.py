"""Whether sampled memory goes on growing: warm-up and steps cut off, a slope with its interval, and a second look.

For series that nobody can quieten (another process's resident memory, NVML). Such a series shows a trend and never its
cause: the words are always *trend, unproven*. :func:`alarm_table` says how often they are wrong.

Simulated, 40 series of each of six shapes, 200 readings: no false alarm in 240, and a leak of 64 KiB a reading found in
all 240. Garbage that is collected late hides a leak until that has grown by more than the garbage does: of 16 KiB a
reading, 3 MiB in all, none is found beneath a saw-tooth of 8 MiB, and all beneath the other shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from o1lab.stats import Estimate, change_point, readable, theil_sen

if TYPE_CHECKING:
    import pandas as pd

KIB, MIB = 2**10, 2**20
TREND, NO_TREND, TOO_SHORT = "trend, unproven", "no trend", "too short"
FEWEST = 20
"""Readings below which nothing is said: the interval of a slope wants 8 in each half of the steady part."""
SHAPES = ("flat", "slow noise", "warm-up", "steps", "saw-tooth", "cache fill")
NEXT = (
    "Watching from outside shows a trend, unproven, and no cause. Next: run o1lab.memory.probe(step) inside the"
    " process; it says what grows, by how much per request, and who holds it."
)


@dataclass(frozen=True)
class Growth:
    """What one series of readings does after its change point.

    Attributes
    ----------
    verdict : str
        ``"trend, unproven"``, ``"no trend"`` or ``"too short"``.
    slope : Estimate or None
        Bytes per second of the steady part; ``None`` if too short.
    start : int
        Index of the first reading of the steady part.
    before_bytes : int
        Growth before the steady part: warm-up, first fill, allocator steps.
    grown_bytes : int
        Last reading minus first.
    note : str
        Why the verdict is what it is, where that needs saying.
    """

    verdict: str
    slope: Estimate | None
    start: int
    before_bytes: int
    grown_bytes: int
    note: str = ""

    def hours_to(self, free_bytes: int) -> tuple[float, float] | None:
        """Hours (soonest, latest) until ``free_bytes`` are gone by the slope's interval; ``None`` without a trend."""
        if self.verdict != TREND or self.slope is None:
            return None
        return free_bytes / self.slope.high / 3600, free_bytes / self.slope.low / 3600


def judge(
    seconds: Sequence[float], values: Sequence[float], *, grain_bytes: int = 64 * KIB, draws: int = 499, seed: int = 0
) -> Growth:
    """Judge one series: cut (:func:`o1lab.stats.change_point`), slope of the rest, and the same of its later half.

    It is a trend if the interval of the slope lies above zero, the later half's does so too, at no less than half the
    rate (a warm-up that is not quite over decays), and the growth exceeds ``grain_bytes``, the grain of the readings.

    Parameters
    ----------
    seconds, values : sequence, shape (n,)
        When, in seconds, and what was read, in bytes.

    Examples
    --------
    >>> judge(range(60), [1e8 + 1e6 * t for t in range(60)]).verdict
    'trend, unproven'
    >>> judge(range(60), [1e8 + 1e6 * min(t, 20) for t in range(60)]).verdict
    'no trend'
    """
    n = len(values)
    grown = int(values[-1] - values[0]) if n else 0
    if n < FEWEST:
        return Growth(TOO_SHORT, None, 0, 0, grown, f"{n} readings say nothing; {FEWEST} are the least")
    start = change_point(values)
    at, late = seconds[start:], start + (n - start) // 2
    slope = theil_sen(at, values[start:], "B/s", draws=draws, seed=seed)

    def answer(verdict: str, note: str = "") -> Growth:
        return Growth(verdict, slope, start, int(values[start] - values[0]), grown, note)

    if slope.low <= 0:
        return answer(NO_TREND)
    if slope.value * (at[-1] - at[0]) < grain_bytes:
        return answer(NO_TREND, "it rises by less than the readings can tell")
    if n - late >= 8:
        again = theil_sen(seconds[late:], values[late:], "B/s", draws=draws, seed=seed)
        if again.low <= 0 or again.value < slope.value / 2:
            return answer(NO_TREND, "it rises, but its later half does not bear that out: watch it longer")
    return answer(TREND)


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading; bytes, ``None`` where it was not taken this time or is not allowed.

    ``own_bytes`` is resident memory without mapped files; ``device_bytes`` as :attr:`Trend.device_whose` says.
    """

    seconds: float
    rss_bytes: int
    own_bytes: int
    threads: int
    files: int | None = None
    uss_bytes: int | None = None
    pss_bytes: int | None = None
    device_bytes: int | None = None


@dataclass(frozen=True)
class Trend:
    """What was seen of a process, and whether it goes on growing.

    Attributes
    ----------
    host, device : Growth
        Of ``own_bytes`` and ``device_bytes``; ``device`` is ``None`` where NVML gives nothing (``device_reason``).
    device_whose : str
        ``"this process"`` or ``"all processes"`` of the device; empty without a reading.
    ended : str
        How the process went, if it did while it was watched.
    host_free_bytes, device_free_bytes : int or None
        Room left at the end.
    sample_ms : float
        Median cost of a sample in milliseconds, all readings included.
    """

    pid: int
    name: str
    processes: int
    samples: tuple[Sample, ...]
    host: Growth
    device: Growth | None
    device_whose: str
    device_reason: str
    ended: str
    host_free_bytes: int
    device_free_bytes: int | None
    sample_ms: float
    requests_per_second: float | None = None

    @property
    def seconds(self) -> float:
        """Time watched, in seconds."""
        return self.samples[-1].seconds - self.samples[0].seconds if self.samples else 0.0

    def series(self, name: str) -> tuple[list[float], list[int]]:
        """Seconds and values of one field of the samples, where it was read."""
        pairs = [(s.seconds, getattr(s, name)) for s in self.samples if getattr(s, name) is not None]
        return [at for at, _ in pairs], [value for _, value in pairs]

    def caption(self) -> str:
        """What was found, in one or two sentences for a figure."""
        parts = []
        for where, growth in (("Host", self.host), ("Device", self.device)):
            if growth is not None:
                slope = f", {growth.slope.scaled(3600 / MIB, 'MiB/hour')}" if growth.slope else ""
                parts.append(f"{where}: {growth.verdict}{slope}.")
        grey = " Grey: left out as warm-up or steps." if self.host.start or (self.device and self.device.start) else ""
        return " ".join(parts) + grey + " Next: o1lab.memory.probe(step) inside the process."

    @property
    def kind(self) -> str:
        """The verdict on host and device together: a trend in either counts, and too short only if both are."""
        said = [growth.verdict for growth in (self.host, self.device) if growth is not None]
        return next((verdict for verdict in (TREND, NO_TREND) if verdict in said), TOO_SHORT)

    def to_dict(self) -> dict[str, Any]:
        """Everything, JSON-able."""
        return {"kind": self.kind, "next": NEXT, **asdict(self), "seconds": self.seconds}

    def __str__(self) -> str:
        others = f" and {self.processes - 1} children" if self.processes > 1 else ""
        lines = [
            f"{self.name} (PID {self.pid}){others} · {self.seconds:.0f} s · {len(self.samples)} readings of "
            f"{self.sample_ms:.2g} ms" + (f" · {self.ended}" if self.ended else "")
        ]
        if self.samples:
            lines.append("host    " + " · ".join(self._now()))
        lines += ["        " + line for line in self._verdict(self.host, "own_bytes", self.host_free_bytes)]
        if self.device is None:
            lines.append(f"device  no reading: {self.device_reason}")
        else:
            last = self.series("device_bytes")[1][-1]
            why = f" ({self.device_reason})" if self.device_whose == "all processes" else ""
            lines.append(f"device  {mib(last)} of {self.device_whose}{why}")
            lines += ["        " + line for line in self._verdict(self.device, "device_bytes", self.device_free_bytes)]
        return "\n".join([*lines, NEXT])

    def _now(self) -> Iterator[str]:
        first, last = self.samples[0], self.samples[-1]
        yield f"{mib(last.rss_bytes)} resident, {mib(last.own_bytes)} of it not mapped files"
        for name, label in (("uss_bytes", "USS"), ("pss_bytes", "PSS")):
            values = self.series(name)[1]
            yield f"{label} {mib(values[-1])}" if values else f"{label} not allowed or not known here"
        yield f"{last.threads} threads ({last.threads - first.threads:+d})"
        files = self.series("files")[1]
        if files:
            yield f"{files[-1]} files open ({files[-1] - files[0]:+d})"

    def _verdict(self, growth: Growth, name: str, free: int | None) -> Iterator[str]:
        if growth.slope is None:
            yield f"{growth.verdict}: {growth.note}"
            return
        at = self.series(name)[0]
        unit, size = ("KiB/s", 1024) if abs(growth.slope.high) < MIB else ("MiB/s", MIB)
        text = f"{growth.verdict}: {growth.slope.scaled(1 / size, unit)}"
        if self.requests_per_second:
            text += f" · {growth.slope.scaled(1 / self.requests_per_second, 'B/request')}"
        yield text + (f" · {growth.note}" if growth.note else "")
        if growth.start:
            cut = at[growth.start] - at[0]
            yield f"left out as warm-up or steps: the first {cut:.0f} s ({mib(growth.before_bytes, '+')})"
        if free is not None and (hours := growth.hours_to(free)):
            soon, late = (readable(value, 2) for value in hours)
            yield f"at this rate {mib(free)} that are free last {soon} to {late} hours"


def mib(size: float, sign: str = "") -> str:
    """Bytes as MiB for a person, e.g. ``'+1.5 MiB'`` with ``sign="+"``."""
    return f"{size / MIB:{sign},.{1 if abs(size) < 100 * MIB else 0}f} MiB"


def simulated(shape: str, leak_bytes: float = 0.0, *, n: int = 200, seed: int = 0) -> Any:
    """Resident memory in bytes, shape (n,), of a process that lives normally, plus ``leak_bytes`` per reading.

    ``shape`` is one of :data:`SHAPES`: constant with independent noise of 64 KiB; the same with AR(1) noise (0.9);
    40 MiB of warm-up with a time constant of 3 to 10 % of the series; four steps of 2 to 8 MiB in its first
    60 %; garbage that grows to 8 MiB and is collected every 8 to 25 readings; a cache that fills until 20 to 60 %.
    """
    import numpy as np

    random, t = np.random.default_rng(seed), np.arange(n)
    noise = random.normal(size=n) * 64 * KIB
    if shape == "slow noise":
        noise[0] /= np.sqrt(1 - 0.9**2)
        for place in range(1, n):
            noise[place] += 0.9 * noise[place - 1]
    elif shape == "warm-up":
        noise += 40 * MIB * (1 - np.exp(-t / (n * random.uniform(0.03, 0.1))))
    elif shape == "steps":
        noise = sum((t >= at) * 2.0 * MIB * random.integers(1, 5) for at in random.uniform(0.02, 0.6, 4) * n)
    elif shape == "saw-tooth":
        noise += 8 * MIB * ((t / random.uniform(8, 25) + random.random()) % 1)
    elif shape == "cache fill":
        noise += np.minimum(t, random.uniform(0.2, 0.6) * n) * 512 * KIB
    return 500.0 * MIB + noise + leak_bytes * t


def alarm_table(runs: int = 40, *, n: int = 200, leak_bytes: float = 64 * KIB, draws: int = 199) -> pd.DataFrame:
    """How often :func:`judge` says *trend* of clean series and of the same with a leak planted.

    One row per shape of :data:`SHAPES`: ``shape, runs, false_alarms, found`` (counts) and ``slope_kib``, the median
    slope found with the leak planted, in KiB per reading (true: ``leak_bytes`` / 1024).
    """
    import numpy as np
    import pandas as pd

    rows = []
    for shape in SHAPES:
        clean, leaky = (
            [judge(range(n), simulated(shape, leak, n=n, seed=seed), draws=draws) for seed in range(runs)]
            for leak in (0.0, leak_bytes)
        )
        alarms, found = (sum(growth.verdict == TREND for growth in some) for some in (clean, leaky))
        slope = float(np.median([growth.slope.value for growth in leaky if growth.slope])) / KIB
        rows.append({"shape": shape, "runs": runs, "false_alarms": alarms, "found": found, "slope_kib": slope})
    return pd.DataFrame(rows)
