"""Watch a loop that is not ours: the caller ends the rounds, the same judge reads them."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from o1lab.errors import ProbeError
from o1lab.memory.judge import Judge
from o1lab.memory.leak_report import FLOOR, LeakReport
from o1lab.memory.rounds import Rounds, check_counts, check_floor, quiet_process

LEAST = 8  # rounds: two of warm-up at least, six to judge


class watch:
    """Judge a loop from inside: ``w.round()`` after every ``requests_per_round`` requests, ``w.report`` at the end.

    Parameters
    ----------
    requests_per_round : int
        Requests that the loop serves between two calls of ``round``: equal work, or the rounds will not agree.
    capacity : int
        Most rounds that are kept; their memory is allocated at the start. Later rounds are not measured.
    floor : float
        Growth at or below this many bytes per request counts as none.
    owners : bool
        Name, at the end, who holds what came since the start.

    Raises
    ------
    ProbeError
        Inside another probe; when ``report`` is asked for with fewer than 8 rounds; when the device is lost.

    Examples
    --------
    >>> kept = []
    >>> with watch(requests_per_round=10) as w:
    ...     for request in range(200):
    ...         kept.append(bytearray(1000))
    ...         if request % 10 == 9:
    ...             w.round()
    >>> w.report.kind, w.report.grows  # no round repeated its inputs, so a leak cannot be told from a cache
    ('inconclusive', True)
    """

    def __init__(
        self, requests_per_round: int = 1, *, capacity: int = 4096, floor: float = FLOOR, owners: bool = True
    ) -> None:
        check_counts(requests_per_round=requests_per_round, capacity=capacity)
        check_floor(floor)
        if capacity < LEAST + 1:
            raise ProbeError(f"{capacity=} rounds cannot be judged: at least {LEAST + 1}")
        self.rounds = Rounds(capacity, requests_per_round)
        self.replayed = bytearray(capacity)
        self.floor, self.want_owners = floor, owners
        self._report: LeakReport | None = None
        self._begun = 0.0

    def __enter__(self) -> Self:
        from o1lab.memory import owners

        self._quiet = quiet_process()
        self._quiet.__enter__()
        self._begun = time.perf_counter()
        self._mark = owners.mark() if self.want_owners else None
        self.rounds.end()
        return self

    def round(self, *, replay: bool = False) -> None:
        """End a round; ``replay`` says that it served the very inputs of the round before."""
        if not self.rounds.count:
            raise ProbeError("round() outside the with block: nothing is measured there")
        if self.rounds.count < self.rounds.capacity:
            self.replayed[self.rounds.count] = replay
            self.rounds.end()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.rounds.count > LEAST:
                self._report = self._judge()
        finally:
            self._mark = None
            self._quiet.__exit__(kind, error, trace)

    @property
    def report(self) -> LeakReport:
        """What the rounds say, once the block has ended."""
        if self._report is None:
            raise ProbeError(
                f"{self.rounds.count - 1} rounds were ended; a judgement needs {LEAST}, six of them with new inputs, "
                "and the end of the with block. Call round() more often"
            )
        return self._report

    def _judge(self) -> LeakReport | None:
        fresh = [number for number in range(1, self.rounds.count) if not self.replayed[number]]
        if len(fresh) < 6:
            return None
        warm = min(self.rounds.settled(self.floor), fresh[-6] - 1)
        fresh = [number for number in fresh if number > warm]
        again = [number for number in range(warm + 1, self.rounds.count) if self.replayed[number]]
        judge = Judge(self.rounds, warm, fresh, self.floor)
        judge.replay = again if len(again) >= 6 else None
        judge.rare = judge.jumped()
        judge.decide()
        if self._mark is not None and judge.grown():
            from o1lab.memory import owners

            judge.owners = owners.grown(self._mark, top=1000)
        return judge.report(time.perf_counter() - self._begun)
