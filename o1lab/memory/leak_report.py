"""What a probe found: kind, rate, owners, balance, time to out-of-memory, advice."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from o1lab.errors import ProbeError
from o1lab.memory.counters import Reading
from o1lab.stats import Estimate, readable

if TYPE_CHECKING:
    import pandas as pd

    from o1lab.memory.owners import OwnerPath

FLOOR = 16.0  # B/request: half of glibc's smallest chunk, i.e. one 32-byte chunk every second request
NOTEWORTHY = 4096  # bytes: less that an intervention gives back is noise
ADVICE = {
    "none": "Nothing grows by {floor:g} B/request or more, the floor. Longer rounds lower what could still hide.",
    "per-call leak": "Every request leaves memory behind, also when inputs repeat: look for what each call appends to, "
    "registers or keeps alive (lists, hooks, exceptions, autograd history, native code), or for a bounded buffer "
    "that is not full yet.",
    "keyed growth": "Only new inputs grow it: a cache keyed by the input with no limit seen. Bound it, bucket or pad "
    "the keys (sequence lengths, shapes, session ids).",
    "warm-up": "Growth stopped within the rounds: one-off costs. Probe again with more warm-up to be sure.",
    "lazy gc": "The collector gets it all back: reference cycles. Break them, or collect at a quiet moment.",
    "fragmentation": "In-use memory is flat while held memory grows: free blocks in the wrong places. Returning them "
    "helped (malloc_trim or empty_cache); reuse buffers or allocate survivors early.",
    "driver": "The device's used memory grows outside torch's allocator: other processes, NCCL, CUDA modules, graphs.",
    "inconclusive": "The rounds do not agree. Use more requests per round, more rounds, or stop background threads.",
}
REASONS = {  # of kinds that need another word than their own
    "shrinks": "In-use memory falls round after round: something filled earlier is released. Let it settle.",
    "threads": "Threads started by the step outlive it, so rounds end unquiet. Join them in the step.",
    "rare": "It grows in jumps: some rounds do, most do not. A few requests leak, an error path perhaps, or a table "
    "doubles. Use many more requests per round, so that every round holds several of them.",
    "cause": "It grows, but not one round repeated the inputs of the round before, so a leak per call cannot be told "
    "from a cache keyed by the input. End some rounds with round(replay=True).",
    "held": "The allocator holds more after every request and gives nothing back (pools of CUDA graphs or of failed "
    "captures, or blocks that live on in every segment): release the pools, or share one.",
    "bounded": "What grows most is an lru_cache below its maxsize: it stops growing once it is full. Work out whether "
    "that many entries fit into memory, and lower maxsize if they do not.",
    "compiled": "Eager execution stops the growth: torch.compile keeps it. Bucket or pad shapes, mark_dynamic the "
    "varying dimension, or lower torch._dynamo.config.recompile_limit.",
    "resident": "Resident memory grows while nothing in use does and malloc_trim does not get it back: memory mapped "
    "outside malloc, or noise. More rounds will tell.",
}


class Horizon(NamedTuple):
    """Hours until memory is full at the ends and the middle of the rate's interval; ``inf`` where it does not grow."""

    soonest: float
    expected: float
    latest: float

    def __str__(self) -> str:
        if math.isinf(self.soonest):
            return "never, at this rate"
        latest = "never" if math.isinf(self.latest) else f"{readable(self.latest, 3)} h"
        return f"{readable(self.soonest, 3)} h to {latest}"


@dataclass(frozen=True, repr=False)
class LeakReport:
    """What :func:`~o1lab.memory.probe` found.

    Attributes
    ----------
    kind : str
        ``"none" | "per-call leak" | "keyed growth" | "warm-up" | "lazy gc" | "fragmentation" | "driver"``, or
        ``"inconclusive"`` when the rounds contradict each other; ``advice`` then says what to change.
    host, device : Estimate or None
        In-use growth in bytes per request: median over the judged rounds with its distribution-free 95 % interval.
        ``None`` where the machine has no exact counter (host: not glibc; device: no CUDA).
    total : Estimate or None
        Host and device together, round by round.
    rss, reserved, driver : Estimate or None
        Slopes of what is held: resident memory, torch's reserved bytes, the device's used bytes (all processes).
    replay_host, replay_device : Estimate or None
        Growth while the last round's inputs were replayed; measured only if something grew.
    eager : Estimate or None
        Growth, host and device together, with compiled code switched off; only where something was compiled and grew.
    owners : list of OwnerPath
        Who holds what grew, largest first: a path from a name that a person can edit.
    unattributed : Estimate or None
        Growth that no Python object holds, in bytes per request (native code, C++ bodies of tensors; below zero where
        objects report more than the heap gave them); ``None`` where owners were not looked for.
    returned : dict of str to int
        Bytes that an intervention got back: ``gc``, ``empty_cache``, ``workspaces``, ``malloc_trim``,
        ``dynamo.reset``.
    readings : tuple of Reading
        One quiet reading per round end, warm-up rounds first; ``warm_up`` says how many of the rounds were warm-up.
    pending_bytes : int
        Host plus device bytes that the collector freed at the end of the last judged round.
    requests_per_round, seconds, advice, floor
        Requests in a round, time taken in seconds, a sentence of what to do, and the bytes per request that count as
        growth. Garbage in cycles is worth a "lazy gc" from 1 MiB a round on.
    """

    kind: str
    host: Estimate | None
    device: Estimate | None
    total: Estimate | None
    rss: Estimate | None
    reserved: Estimate | None
    driver: Estimate | None
    replay_host: Estimate | None
    replay_device: Estimate | None
    eager: Estimate | None
    readings: tuple[Reading, ...]
    warm_up: int
    requests_per_round: int
    pending_bytes: int
    seconds: float
    advice: str
    returned: dict[str, int] = field(default_factory=dict)
    owners: list[OwnerPath] = field(default_factory=list)
    unattributed: Estimate | None = None
    floor: float = FLOOR

    def __repr__(self) -> str:
        return str(self)

    @property
    def requests(self) -> int:
        """Requests served in the judged rounds."""
        return (len(self.readings) - self.warm_up - 1) * self.requests_per_round

    @property
    def grows(self) -> bool:
        """Whether memory in use grows for certain, whatever the cause."""
        return any(e is not None and e.low >= self.floor for e in (self.host, self.device)) and self.kind != "warm-up"

    @property
    def balance(self) -> Reading:
        """Growth of every counter over the judged rounds, in bytes."""
        return self.readings[-1] - self.readings[self.warm_up]

    def balances(self) -> pd.DataFrame:
        """The balance of every round, in bytes grown since the first judged reading, each line closing with a rest.

        Host: ``rss = host_in_use + host_free + host_rest`` (the rest: mappings outside malloc, stacks, untouched
        pages). Device: ``device_used = device_outside + device_reserved`` (the rest: driver, context, other
        processes) and ``device_reserved = device_allocated + device_cached``. One row a round end, warm-up included.
        """
        import pandas as pd

        first = self.readings[self.warm_up]
        rows = []
        for number, reading in enumerate(self.readings):
            gap = reading - first
            row: dict[str, float | None] = {"requests": (number - self.warm_up) * self.requests_per_round}
            row |= {name: getattr(gap, name) for name in ("rss", "host_in_use", "host_free")}
            if gap.host_in_use is not None and gap.host_free is not None:
                row["host_rest"] = gap.rss - gap.host_in_use - gap.host_free
            if gap.device_reserved is not None and gap.device_allocated is not None:
                row |= {name: getattr(gap, name) for name in ("device_used", "device_reserved", "device_allocated")}
                row["device_cached"] = gap.device_reserved - gap.device_allocated
                row["device_outside"] = (gap.device_used or 0) - gap.device_reserved
            rows.append(row)
        return pd.DataFrame(rows)

    def series(self, counter: str) -> tuple[list[int], list[int]]:
        """Requests served and bytes grown since the first judged reading, for one counter of :class:`Reading`."""
        judged = self.readings[self.warm_up :]
        first = getattr(judged[0], counter)
        if first is None:
            raise ProbeError(f"this machine has no counter {counter!r}")
        steps = [index * self.requests_per_round for index in range(len(judged))]
        return steps, [getattr(reading, counter) - first for reading in judged]

    def hours_to_oom(
        self, requests_per_second: float, *, free_bytes: float | None = None, where: str | None = None
    ) -> Horizon:
        """Hours until ``free_bytes`` are used up at a request rate, as the range that the rate's interval gives.

        Parameters
        ----------
        free_bytes : float, optional
            Default: what is available now (device: free on the current GPU; host: available memory of the machine or
            the container).
        where : {"host", "device"}, optional
            Default: whichever is full first.

        Raises
        ------
        ProbeError
            A request rate that is not positive, or no such counter on this machine.
        """
        from o1lab import host

        rates = {"host": self.host, "device": self.device}
        if where not in (None, *rates):
            raise ProbeError(f"where={where!r}: a horizon is for 'host' or 'device'")
        if not requests_per_second > 0 or (free_bytes is not None and not free_bytes > 0):
            raise ProbeError(f"{requests_per_second=} and {free_bytes=} must be positive")
        if where is None:
            known = [name for name, rate in rates.items() if rate is not None]
            every = [self.hours_to_oom(requests_per_second, free_bytes=free_bytes, where=name) for name in known]
            if not every:
                raise ProbeError("this machine has no exact counter, so there is no rate to go by")
            return min(every)
        rate = rates[where]
        if rate is None:
            raise ProbeError(f"where={where!r} has no rate here: no such counter on this machine")
        if free_bytes is None and where == "device":
            import torch

            free_bytes = torch.cuda.mem_get_info()[0]
        elif free_bytes is None:
            free_bytes = host.host().available_bytes
        hours = [
            math.inf if speed <= 0 else free_bytes / (speed * requests_per_second * 3600)
            for speed in (rate.high, rate.value, rate.low)
        ]
        return Horizon(*hours)

    def __str__(self) -> str:
        lines = [f"{self.kind} · {self.requests} requests in {self.seconds:.1f} s"]
        for name in ("host", "device", "replay_host", "replay_device", "eager", "unattributed"):
            value = getattr(self, name)
            if value is not None:
                lines.append(f"  {name.replace('_', ' '):<14} {value}")
        lines += [f"  {name} gave back {size:,} B" for name, size in self.returned.items() if size > NOTEWORTHY]
        lines += [
            f"  held by        {owner.path} · {owner.bytes:,} B in {owner.count} {owner.what}"
            for owner in self.owners[:3]
        ]
        return "\n".join([*lines, textwrap.fill(self.advice, 88, initial_indent="  ", subsequent_indent="  ")])
