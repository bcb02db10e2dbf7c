"""From quiet readings to a kind: which growth is a leak, a cache, garbage, fragmentation or somebody else's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from o1lab import host
from o1lab.memory.leak_report import ADVICE, REASONS, LeakReport
from o1lab.memory.rounds import COUNTERS, IN_USE, Rounds
from o1lab.stats import Estimate, median

RSS_FLOOR = 256.0  # B/request: resident memory moves in 4 KiB pages, so it needs a coarser floor
RESIDENT_FLOOR = 1024.0  # B/request of resident memory while the heap does not grow: below, pages touched again
DRIVER_FLOOR = 4096.0  # B/request: other processes on the device move the driver's figure too
JUMP_BYTES = 16 << 10  # over all rounds: less is what tables of the interpreter take when they double
DWARFED = 20.0  # a segment or a foreign allocation costs a few kB of bookkeeping on the host
SHRINK_FLOOR = 64.0  # B/request: type objects and free lists may give a little back for a while
FLOORS = {"rss": RSS_FLOOR, "host_free": RSS_FLOOR, "device_used": DRIVER_FLOOR}
LAZY_BYTES = 1 << 20  # garbage in cycles at a round's end: any Python program has some, a MiB of it is worth a word


class Judge:
    """From the readings to a kind. ``numbers`` are the judged rounds, ``replay`` those that repeated their inputs."""

    def __init__(self, rounds: Rounds, warm: int, numbers: Sequence[int], floor: float) -> None:
        self.rounds, self.warm, self.numbers, self.floor = rounds, warm, numbers, floor
        self.replay: Sequence[int] | None = None
        self.rates = {name: rounds.rate(numbers, name) for name in COUNTERS}
        self.total = self.both(numbers)
        self.eager: Estimate | None = None
        self.unattributed: Estimate | None = None
        self.owners: list[Any] = []
        self.returned: dict[str, int] = {}
        self.rare = False  # growth in jumps, seen in two sets of rounds
        self.stuck: float | None = None  # growth of reserved bytes per request although the cache is emptied each time
        self.kind, self.advice = "", ""

    def both(self, numbers: Sequence[int]) -> Estimate | None:
        """Growth of host and device together, of those that this machine can count."""
        names = [name for name in IN_USE if self.rates[name] is not None]
        return self.rounds.rate(numbers, *names) if names else None

    def grew(self, name: str) -> bool:
        """Whether a counter grows for certain; what is only held needs a coarser floor than what is in use."""
        floor = FLOORS.get(name, self.floor)
        rate = self.rates[name]
        return rate is not None and rate.low >= floor

    def grown(self) -> list[str]:
        """The in-use counters that grow."""
        return [name for name in IN_USE if self.grew(name)]

    def late(self) -> bool:
        """Whether a counter that shows no growth over all the rounds grew in each of the last three."""
        names = [name for name in (*IN_USE, "host_free", "device_reserved") if self.rates[name] is not None]
        ends = self.numbers[-3:]
        return any(
            not self.grew(name)
            and all(self.rounds.gain(n, name) > FLOORS.get(name, self.floor) * self.rounds.per_round for n in ends)
            for name in names
        )

    def jumped(self) -> bool:
        """Whether memory in use grew by more than the floor on the whole, though not in most rounds."""
        least = max(JUMP_BYTES, self.floor * len(self.numbers) * self.rounds.per_round)
        return any(
            not self.grew(name) and sum(self.rounds.gain(n, name) for n in self.numbers) > least
            for name in IN_USE
            if self.rates[name] is not None
        )

    def needs_replay(self) -> bool:
        """Whether a replay would say more: something in use, or held by torch, grows."""
        return bool(self.grown()) or self.grew("device_reserved")

    def answer(self, names: Sequence[str]) -> str:
        """What the replay says of growth in ``names``: it went on (a leak), it stopped (keyed), or neither."""
        if not self.replay:
            return "cause"
        answers = set()
        for name in names:
            first, again = self.rates[name], self.rounds.rate(self.replay, name)
            assert first is not None
            if again is None or (min(again.low, -again.high) < -2 * first.value and again.low < 0):
                answers.add("inconclusive")
                continue
            least = max(self.floor, 0.1 * first.value)
            served = len(self.replay) * self.rounds.per_round
            mean = sum(self.rounds.gain(n, name) for n in self.replay) / served
            if again.value >= least:
                answers.add("per-call leak")
            else:  # a few requests that leak in a few of the replayed rounds are no proof of a cache
                answers.add("keyed growth" if mean < least else "inconclusive")
        return answers.pop() if len(answers) == 1 else "per-call leak" if "per-call leak" in answers else "inconclusive"

    def decide(self) -> None:
        """Set ``kind`` and ``advice``."""
        reason = self._reason()
        if reason.startswith("held: "):
            reason = reason.removeprefix("held: ")
            self.kind = reason if reason in ADVICE else "inconclusive"
            self.advice = REASONS["cause" if reason == "cause" else "held"]
        else:
            self.kind = reason if reason in ADVICE else "inconclusive"
            self.advice = (REASONS.get(reason) or ADVICE[reason]).format(floor=self.floor)
        if (
            self.eager is not None
            and self.total is not None
            and self.kind in ("per-call leak", "keyed growth")
            and self.eager.value < max(self.floor, 0.1 * self.total.value)
        ):
            self.advice = REASONS["compiled"]

    def _reason(self) -> str:
        last = self.numbers[-1]
        if self.rounds.threads[last] > self.rounds.threads[self.warm]:
            return "threads"
        rates = [self.rates[name] for name in IN_USE]
        if any(rate is not None and rate.high < -SHRINK_FLOOR for rate in rates):
            return "shrinks"  # a fault of the method, not a cure
        names = self.grown()
        if names and self.dwarfed():
            return self._held()
        if names:
            half = self.numbers[len(self.numbers) // 2 :]
            late = [self.rounds.rate(half, name) for name in IN_USE] if len(half) >= 6 else []
            if late and not any(rate is not None and rate.value >= self.floor for rate in late):
                return "warm-up"
            return self.answer(names)
        if self.rare or any(rate is not None and rate.value > self.floor for rate in rates):
            return "rare" if self.rare or self.jumped() else "inconclusive"
        if self.garbage():
            return "lazy gc"
        return self._held()

    def dwarfed(self) -> bool:
        """Whether what is held grows so much faster than what is in use that the latter is only its bookkeeping."""
        assert self.total is not None
        held = [self.rates[name] for name in ("device_reserved", "device_used") if self.grew(name)]
        return any(rate is not None and rate.low > DWARFED * self.total.value for rate in held)

    def garbage(self) -> bool:
        """Whether much garbage waits for the collector at nearly every round's end."""
        return median(list(self.rounds.pending[self.numbers[0] : self.numbers[-1] + 1]), "B").low > LAZY_BYTES

    def _held(self) -> str:
        """Nothing in use grows: does what the process or the allocator *holds*?"""
        first, last = self.warm, self.numbers[-1]
        if self.grew("device_reserved"):
            rate = self.rates["device_reserved"]
            assert rate is not None
            if self.stuck is not None and self.stuck < 0.5 * rate.value:
                return "fragmentation"
            return f"held: {self.answer(['device_reserved'])}"
        if self.grew("host_free"):  # the heap gets longer while what is in it does not get more
            self.returned["malloc_trim"] = host.trim()
            grown = self.rounds.total(last, ["host_free"]) - self.rounds.total(first, ["host_free"])
            if self.returned["malloc_trim"] > 0.5 * grown:
                return "fragmentation"
        if self.grew("rss") and self.rates["rss"].low >= RESIDENT_FLOOR:  # type: ignore[union-attr]
            return "resident"
        return "driver" if self.grew("device_used") else "none"

    def report(self, seconds: float) -> LeakReport:
        """Everything found, once ``decide`` has been called."""
        last = self.numbers[-1]
        again = {name: self.rounds.rate(self.replay, name) if self.replay else None for name in IN_USE}
        if self.owners and "(bounded, maxsize" in self.owners[0].path and self.advice == ADVICE[self.kind]:
            self.advice = REASONS["bounded"]
        self.returned = {"gc": int(self.rounds.pending[last]), **self.returned}
        rates = self.rates
        return LeakReport(
            self.kind, rates["host_in_use"], rates["device_allocated"], self.total, rates["rss"],
            rates["device_reserved"], rates["device_used"], again["host_in_use"], again["device_allocated"], self.eager,
            tuple(self.rounds.reading(number) for number in range(last + 1)), self.warm, self.rounds.per_round,
            int(self.rounds.pending[last]), seconds, self.advice, self.returned, self.owners, self.unattributed,
            self.floor,
        )  # fmt: skip
