"""What happens to a block that is allocated and freed in, around and across CUDA graphs: the article's §2.1 measured.

Each case makes one block, runs, takes its graphs and streams down, gives the pools every chance to hand memory back,
and looks whether the block's bytes are still held. ``raw`` cases use the calls that the article names
(``cudaMallocAsync`` and ``cudaFreeAsync``, captured as memory nodes), ``torch`` cases ``torch.cuda.graph``, which makes
no such nodes: its blocks come from a private pool. Source: CUDA programming guide, "Graph memory nodes".

Measured on one H200 (torch 2.11, driver 580, November 2026): no case strands a block that was freed. Memory of graphs
stays parked for the next graph until ``cudaDeviceGraphMemTrim`` (torch: ``empty_cache``). What does happen is an error
(CUDA refuses to capture the free of a block from before) or, with torch, a write into someone else's tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from o1lab.memory import graph_plays as plays
from o1lab.memory.graph_plays import Torch
from o1lab.memory.graph_raw import GraphError, Raw, call
from o1lab.stats import Estimate, proportion

BLOCK_BYTES = 32 << 20
"""Large enough for a segment of its own in either pool."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one case: bytes reserved and in use after each stage, over the start; what CUDA refused, if it did.

    ``overwritten``: whether the graph wrote into a tensor that got the block after it (``None``: not looked for).
    """

    held_bytes: dict[str, int]
    used_bytes: dict[str, int]
    error: str = ""
    overwritten: bool | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One case over ``n`` runs of one block each: ``unreclaimed`` blocks were still held when all else was gone.

    ``reclaimed_at``: the first stage after which the block's bytes had left its pool, most common first.
    """

    name: str
    api: str
    what: str
    n: int
    unreclaimed: int
    bytes_each: int
    reclaimed_at: dict[str, int]
    errors: dict[str, int]
    overwritten: int | None

    @property
    def share(self) -> Estimate:
        """The metric ``unreclaimed_share`` with its Wilson interval."""
        return proportion(self.unreclaimed, self.n)


@dataclass(frozen=True, slots=True)
class Cases:
    """All cases of one measurement."""

    cases: tuple[Case, ...]

    def of(self, *names: str, api: str | None = None) -> tuple[int, int]:
        """Unreclaimed blocks and blocks of the named cases together, for ``stats.proportion``."""
        chosen = [case for case in self.cases if case.name in names and api in (None, case.api)]
        if not chosen:
            raise GraphError(f"no case {names} with api {api}; there are {sorted({c.name for c in self.cases})}")
        return sum(case.unreclaimed for case in chosen), sum(case.n for case in chosen)

    def table(self) -> str:
        """One line a case: unreclaimed of n, upper bound, when the memory came back, what CUDA refused."""
        lines = [f"{'case':<24}{'api':<7}{'unreclaimed':>12}  {'95 % upper':>10}  came back after · refused"]
        for case in self.cases:
            count = f"{case.unreclaimed}/{case.n}"
            back = ", ".join(f"{stage} ({count})" for stage, count in case.reclaimed_at.items()) or "never"
            refused = "".join(f" · {name} ({count})" for name, count in case.errors.items())
            if case.overwritten:
                refused += f" · the graph wrote into another tensor ({case.overwritten})"
            lines.append(f"{case.name:<24}{case.api:<7}{count:>12}  {case.share.high:>10.3f}  {back}{refused}")
        return "\n".join(lines)


CASES: dict[tuple[str, str], tuple[Callable[[Any, int], None], str]] = {
    ("inside", "raw"): (plays.inside, "allocated and freed in one graph on one stream"),
    ("free after", "raw"): (plays.free_after, "allocated in the graph, freed outside it after each replay"),
    ("free inside", "raw"): (plays.free_inside, "allocated before the graph, freed inside it"),
    ("other stream", "raw"): (plays.other_stream, "freed on another stream of the same capture, joined by events"),
    ("other stream, no event", "raw"): (plays.other_stream_no_event, "freed outside on a stream that nothing orders"),
    ("two graphs", "raw"): (plays.two_graphs, "allocated in one graph, freed in another"),
    ("as written", "raw"): (
        plays.as_written,
        "the article's code: both calls outside, the graph only uses the pointer",
    ),
    ("forgotten", "raw"): (plays.forgotten, "control: allocated in the graph, never freed"),
    ("inside", "torch"): (plays.torch_inside, "a temporary of the captured region"),
    ("free after", "torch"): (plays.torch_free_after, "an output dropped after the replays"),
    ("free inside", "torch"): (plays.torch_free_inside, "a tensor from before, dropped during capture"),
    ("other stream", "torch"): (plays.torch_other_stream, "record_stream during capture"),
    ("other stream after", "torch"): (plays.torch_other_stream_after, "an output used and dropped on another stream"),
    ("two graphs", "torch"): (plays.torch_two_graphs, "allocated in one graph, dropped during the capture of another"),
    ("forgotten", "torch"): (plays.torch_forgotten, "control: the output is kept for ever"),
}
OUTSIDE = ("free after", "other stream", "other stream, no event", "other stream after", "two graphs", "as written")
"""The cases of the article's warning: the free is outside the graph or on another stream."""


def once(name: str, api: str, *, size: int = BLOCK_BYTES, pairing: bool = False) -> Outcome:
    """Run one case once on one block of ``size`` bytes and look at what is held after each stage.

    Blocks that nothing reclaimed are freed afterwards, so that runs do not add up.
    """
    function, _ = CASES[name, api]
    run: Raw | Torch = Raw(pairing) if api == "raw" else Torch()
    base_held, base_used = run.held()
    function(run, size)
    held, used = {"run": run.held()[0] - base_held}, {"run": run.held()[1] - base_used}
    for stage in run.down():
        reserved, in_use = run.held()
        held[stage], used[stage] = reserved - base_held, in_use - base_used
    if isinstance(run, Torch):
        run.kept.clear()
        import torch

        torch.cuda.empty_cache()
        return Outcome(held, used, overwritten=run.hazard)
    refused = " + ".join(dict.fromkeys(run.books.refused))
    stream = run.stream()
    for address in list(run.books.live):
        call(run.cudart.cudaFreeAsync(address, stream))
    for _ in run.down():
        pass
    return Outcome(held, used, refused)


def measure(
    *, runs: int = 128, size: int = BLOCK_BYTES, api: tuple[str, ...] = ("raw", "torch"), pairing: bool = False,
    names: tuple[str, ...] | None = None,
) -> Cases:  # fmt: skip
    """Run every case ``runs`` times, each time with fresh graphs and streams.

    Parameters
    ----------
    runs : int
        Blocks per case. With none unreclaimed in 100 the upper 95 % bound of the share is 3.7 %.
    size : int
        Bytes of the block.
    pairing : bool
        With the article's remedy (:class:`~o1lab.memory.graph_raw.Pairing`); raw cases only.

    Raises
    ------
    GraphError
        No CUDA device, no ``cuda-bindings``, or a call that must work failed.

    Examples
    --------
    >>> print(measure(runs=100).table())  # doctest: +SKIP
    """
    if runs < 1 or size < 1 << 20:
        raise GraphError(f"runs={runs}, size={size}: at least one run of a block of 1 MiB or more is needed")
    if pairing and "torch" in api:
        api = ("raw",)  # torch makes no cudaMallocAsync that could be paired
    cases = []
    for (name, kind), (_, what) in CASES.items():
        if kind not in api or (names is not None and name not in names):
            continue
        once(name, kind, size=size, pairing=pairing)  # the first run makes pools and loads kernels
        outcomes = [once(name, kind, size=size, pairing=pairing) for _ in range(runs)]
        cases.append(summarise(name, kind, what, outcomes, size))
    if not cases:
        raise GraphError(f"no case {names} with api {api}; there are {', '.join(sorted({n for n, _ in CASES}))}")
    return Cases(tuple(cases))


def summarise(name: str, api: str, what: str, outcomes: list[Outcome], size: int) -> Case:
    """Count over the runs of one case; a block is unreclaimed if its bytes are still held after the last stage."""
    back: Counter[str] = Counter()
    for outcome in outcomes:
        stages = list(outcome.held_bytes)
        late = [index for index, stage in enumerate(stages) if outcome.held_bytes[stage] >= size]
        if not late:
            back["run"] += 1
        elif late[-1] + 1 < len(stages):
            back[stages[late[-1] + 1]] += 1
    errors = Counter(outcome.error for outcome in outcomes if outcome.error)
    hit = [outcome.overwritten for outcome in outcomes if outcome.overwritten is not None]
    return Case(
        name, api, what, len(outcomes), len(outcomes) - sum(back.values()), size, dict(back.most_common()),
        dict(errors.most_common()), sum(hit) if hit else None,
    )  # fmt: skip


def parked(*, graphs: int = 16, size: int = BLOCK_BYTES) -> list[int]:
    """Bytes still reserved after each of ``graphs`` graphs, one after the other, was destroyed and nothing trimmed.

    A constant says that the next graph takes over what the last has left; a rising line would be a leak.
    """
    base = Raw().held()[0]
    held = []
    for _ in range(graphs):
        run = Raw()
        plays.inside(run, size)
        for stage in run.down():
            if stage == "streams gone":
                held.append(run.held()[0] - base)
                break  # the next stage would trim
    for _ in Raw().down():
        pass
    return held
