"""Does serving a request leave memory behind? Rounds of equal work, exact counters at quiet round ends.

The measurement, not the p-value, tells a leak from the normal life of a server (warm-up, allocator steps, caches,
collector saw-tooth): every round does the same amount of work and ends quiet; growth must show in nearly every round;
a replay of the last round's inputs separates growth per call from growth per *new* input, and further interventions
(``empty_cache``, cuBLAS workspaces, eager execution, ``torch._dynamo.reset``, ``malloc_trim``) each name what they get
back. Design after BLeak (Vilk and Berger 2018) and Matias et al. 2014; its accuracy is measured by
``python -m o1lab.memory.accuracy``.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from o1lab.errors import ProbeError
from o1lab.memory import counters
from o1lab.memory.judge import Judge
from o1lab.memory.leak_report import FLOOR, LeakReport
from o1lab.memory.rounds import Rounds, check_counts, check_floor, quiet_process

REPLAY_ROUNDS = 7  # the first settles what meeting a batch twice costs
OWNER_ROUNDS = 2
EMPTIED_ROUNDS = 3


def probe(
    step: Any,
    *,
    inputs: Iterable[Any] | None = None,
    rounds: int = 12,
    requests_per_round: int = 32,
    warm_up: int = 8,
    floor: float = FLOOR,
    owners: bool = True,
    interventions: bool = True,
    progress: bool = False,
) -> LeakReport:
    """Serve requests in rounds and report what each leaves behind, what kind of growth it is, and who holds it.

    Parameters
    ----------
    step : callable, o1lab Model or transformers model
        ``step(x)`` serves one request; its result is dropped. A model serves by ``generate`` (two new tokens);
        its ``inputs`` are then prompts (texts only for an o1lab :class:`~o1lab.models.Model`) or token ids (1, T).
    inputs : iterable, optional
        The requests, taken in order and cycled; of a generator only as many are drawn as the rounds need. Without it
        ``x`` is the request's number 0, 1, 2, …
    rounds : int
        Judged rounds, at least 6 (fewer give no 95 % interval of a median). If something only begins to grow in the
        last of them, or only in a few of them, as many again are served and judged instead.
    requests_per_round : int
        Equal work in each round; a leak smaller than ``floor`` per request stays unseen.
    warm_up : int
        At most this many rounds are spent waiting for two quiet rounds in a row before judging starts.
    floor : float
        Growth at or below this many bytes per request counts as none.
    owners : bool
        If something grows, serve two more rounds and name who holds what came (seconds in a large process).
    interventions : bool
        If something grows, also clear cuBLAS workspaces, run compiled code eagerly for some rounds, and reset Dynamo
        (compiled code is compiled again at its next call). Replay, ``empty_cache`` and ``malloc_trim`` are always used.
    progress : bool
        Show rounds as they pass.

    Returns
    -------
    LeakReport

    Raises
    ------
    ProbeError
        Too few rounds, no inputs, a probe inside a probe, a lost device, a step that raised (chained) or forked;
        nothing global stays changed.

    Examples
    --------
    >>> from o1lab.memory import HostPlant, probe
    >>> with HostPlant(200) as leak:
    ...     report = probe(lambda x: leak(), rounds=6, requests_per_round=50)
    >>> report.kind, round(report.host.value, -1)
    ('per-call leak', 210.0)
    """
    check_counts(rounds=rounds, requests_per_round=requests_per_round, warm_up=warm_up)
    check_floor(floor)
    if rounds < 6:
        raise ProbeError(f"rounds={rounds} cannot be judged: a 95 % interval of a median needs at least 6")
    serve, source = _as_step(
        step,
        inputs,
        (2 * rounds + warm_up + 1 + 2 * REPLAY_ROUNDS + OWNER_ROUNDS + EMPTIED_ROUNDS) * requests_per_round,
    )
    with quiet_process():
        return _Probe(serve, source, rounds, requests_per_round, warm_up, floor, owners, interventions, progress).run()


def _as_step(step: Any, inputs: Iterable[Any] | None, needed: int) -> tuple[Callable[[Any], Any], Iterator[Any]]:
    """A callable and an endless source of requests, whatever the caller has."""
    requests: Any = None
    if isinstance(inputs, (str, bytes)) or (inputs is not None and not isinstance(inputs, Iterable)):
        raise ProbeError(f"inputs is a {type(inputs).__name__}; give a list, a tuple or a generator of requests")
    if inputs is not None:
        requests = inputs if isinstance(inputs, Sequence) else list(itertools.islice(inputs, needed))
        if not requests:
            raise ProbeError("inputs is empty: give at least one request")
    if hasattr(step, "generate") or hasattr(getattr(step, "model", None), "generate"):
        from o1lab.memory.serving_loop import generating

        if requests is None:
            raise ProbeError("a model needs inputs: prompts, or token ids of shape (1, T)")
        step, requests = generating(step, requests)
    if not callable(step):
        raise ProbeError(f"step is a {type(step).__name__}; give a callable step(x), or a model with inputs")
    if requests is None:
        return step, itertools.count()
    return step, (requests[number % len(requests)] for number in itertools.count())  # itertools.cycle keeps a copy


class _Probe:
    def __init__(
        self, step: Callable[[Any], Any], source: Iterator[Any], rounds: int, requests_per_round: int, warm_up: int,
        floor: float, owners: bool, interventions: bool, progress: bool,
    ) -> None:  # fmt: skip
        self.step, self.source, self.judged, self.per_round = step, source, rounds, requests_per_round
        self.max_warm_up, self.floor, self.progress = warm_up, floor, progress
        self.want_owners, self.interventions = owners, interventions
        self.batch: list[Any] = []
        self.served = 0
        self.rounds = Rounds(2 * rounds + warm_up + 3 * REPLAY_ROUNDS + 4, requests_per_round)

    def requests(self, *, replay: bool = False) -> None:
        """The requests of one round."""
        if not replay:
            self.batch = list(itertools.islice(self.source, self.per_round))
        for number, request in enumerate(self.batch):
            try:
                answer = self.step(request)
                if inspect.isawaitable(answer) or inspect.isgenerator(answer) or inspect.isasyncgen(answer):
                    if inspect.iscoroutine(answer):
                        answer.close()
                    raise ProbeError(
                        f"step returned a {type(answer).__name__} that nothing has run yet: give a step that serves "
                        "the whole request, e.g. lambda x: asyncio.run(step(x)) or lambda x: list(step(x))"
                    )
                del answer
            except ProbeError:
                raise
            except Exception as error:
                raise ProbeError(
                    f"step raised {type(error).__name__} at request {self.served + number}: {error}; "
                    "a probe needs steps that succeed (catch what your server catches)"
                ) from error
        self.served += len(self.batch)

    def serve(self, *, replay: bool = False) -> int:
        """One round and its quiet reading; returns its number."""
        self.requests(replay=replay)
        self.rounds.end()
        return self.rounds.count - 1

    def run(self) -> LeakReport:
        begun = time.perf_counter()
        self.serve()
        while self.rounds.count <= self.max_warm_up and self.rounds.settled(self.floor) == self.rounds.count:
            self.serve()
        warm = self.rounds.count - 1
        steps: Iterable[int] = range(self.judged)
        if self.progress:
            from o1lab.progress import progress

            steps = progress(steps, total=self.judged, label="leak probe, rounds")
        for _ in steps:
            self.serve()
        judge = Judge(self.rounds, warm, range(warm + 1, self.rounds.count), self.floor)
        if judge.late() or judge.jumped():
            jumped, warm = judge.jumped(), self.rounds.count - 1
            for _ in range(self.judged):
                self.serve()
            judge = Judge(self.rounds, warm, range(warm + 1, self.rounds.count), self.floor)
            judge.rare = jumped and judge.jumped()
        if judge.needs_replay():
            again = [self.serve(replay=True) for _ in range(REPLAY_ROUNDS)]
            judge.replay = again[1:]
        if judge.grew("device_reserved"):
            self.empty(judge)
        if self.interventions and judge.grown():
            self.intervene(judge)
        judge.decide()
        if self.want_owners and (judge.grown() or judge.kind == "lazy gc"):
            self.find_owners(judge)
        if self.interventions and judge.grown() and _compiled():
            judge.returned["dynamo.reset"] = _freed(_reset_dynamo)
        return judge.report(time.perf_counter() - begun)

    def empty(self, judge: Judge) -> None:
        """Empty the allocator's cache, serve some more rounds, empty it again: what stays could not be given back."""
        import torch

        before = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        first = torch.cuda.memory_reserved()
        judge.returned["empty_cache"] = before - first
        for _ in range(EMPTIED_ROUNDS):
            self.requests()
        torch.cuda.empty_cache()
        judge.stuck = (torch.cuda.memory_reserved() - first) / (EMPTIED_ROUNDS * self.per_round)

    def intervene(self, judge: Judge) -> None:
        """Clear cuBLAS workspaces; run the same kind of rounds with compiled code switched off."""
        if counters.cuda_ready():
            import torch

            judge.returned["workspaces"] = _freed(torch._C._cuda_clearCublasWorkspaces)
        if _compiled():
            import torch

            with torch.compiler.set_stance("force_eager"):
                numbers = [self.serve() for _ in range(REPLAY_ROUNDS)]
            judge.eager = judge.both(numbers[1:])

    def find_owners(self, judge: Judge) -> None:
        from o1lab.memory import owners

        mark = owners.mark()
        with _collector_off(judge.kind == "lazy gc"):
            for _ in range(OWNER_ROUNDS):
                self.requests()
            if judge.kind != "lazy gc":
                gc.collect()  # garbage is no owner
            found = owners.grown(mark, top=1000)
        judge.owners = found
        if judge.total is not None and judge.kind != "lazy gc":
            owned = sum(owner.bytes for owner in found) / (OWNER_ROUNDS * self.per_round)
            judge.unattributed = judge.total.shifted(-owned)


def _compiled() -> bool:
    """Whether Dynamo has compiled anything in this process (asking does not load it)."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["stats"].get("unique_graphs", 0) > 0


def _reset_dynamo() -> None:
    import torch

    torch._dynamo.reset()


def _freed(action: Callable[[], Any]) -> int:
    """Bytes in use, host and device, that an action gives back."""
    before = counters.read()
    action()
    gap = before - counters.read()
    return (gap.host_in_use or 0) + (gap.device_allocated or 0)


@contextlib.contextmanager
def _collector_off(off: bool) -> Iterator[None]:
    was = gc.isenabled()
    if off:
        gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
