"""The leak finders that people use, each driven as its own documentation says, on one workload that all share.

Every tool serves the same requests of a :class:`~o1lab.memory.catalogue.Case`: first a warm-up that it may ignore, then
the requests that it judges. Tools with a rule of their own decide by it, at its default thresholds. Tools that only
list what is alive (tracemalloc, objgraph, memray, pytorch-memlab) get the reader's rule :data:`PER_REQUEST`.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

import o1lab
from o1lab.errors import UnknownName

if TYPE_CHECKING:
    from o1lab.memory.catalogue import Case, Step

PER_REQUEST = 0.5
"""Where a tool only lists, a reader sees a leak if one line or type of the list grew by one item every second request.

It is the probe's own floor (one smallest chunk every second request), and needs no threshold in bytes.
"""
REPLAYS = 7
"""Rounds that the probe may add to its judged ones; the other tools get their requests as well."""


@dataclass(frozen=True)
class Finding:
    """What a tool said about one form of one case.

    Attributes
    ----------
    found : bool
        Whether it reports growth.
    evidence : str
        What it rests on, in a few words.
    kind : str
        The kind of growth in the probe's words, if the tool tells kinds apart; else empty.
    place, names : str
        What it points at, and what that is: ``"owner"`` (a path that holds the memory) or ``"line"`` (which allocated
        it).
    """

    found: bool
    evidence: str
    kind: str = ""
    place: str = ""
    names: str = ""


@dataclass(frozen=True)
class Tool:
    """One tool: its name, the package with its version, what it can see, its rule, and where that is documented."""

    name: str
    package: str
    module: str
    sees: str  # "cuda": torch's CUDA allocator only; "": any process
    rule: str
    source: str
    starts: bool = False  # it serves the requests in a process that it starts itself
    kinds: tuple[str, ...] = ()  # the kinds of growth that it looks for; empty: any

    @property
    def version(self) -> str | None:
        """Version of the installed package; ``None`` if it is not installed."""
        if self.package == "python":
            return ".".join(map(str, sys.version_info[:3]))
        if self.package == "o1lab":  # also where it runs from its source tree, uninstalled
            return o1lab.__version__
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None

    def watch(self, work: Workload) -> Finding:
        """Serve the workload under this tool and return what it says."""
        module = importlib.import_module(f"{__name__}.{self.module}")
        return getattr(module, self.name.replace("-", "_").replace(".", "_"))(work)


_LISTED = "a reader's rule: one line or type of its list grew by an item every second request or more"
TOOLS = (
    Tool("probe", "o1lab", "listing", "", "o1lab.memory.probe at its defaults", "o1lab/memory/probe.py"),
    Tool(
        "rss-ols", "scipy", "listing", "", "resident memory after each request: OLS slope > 0, |r| > 0.5 and p < 0.05",
        "https://docs.scipy.org/doc/scipy/reference/generated/scipy.stats.linregress.html",
    ),
    Tool("tracemalloc", "python", "listing", "", _LISTED, "https://docs.python.org/3/library/tracemalloc.html"),
    Tool("objgraph", "objgraph", "listing", "", _LISTED, "https://objgraph.readthedocs.io/en/stable/#memory-leak-example"),
    Tool("pytorch-memlab", "pytorch-memlab", "listing", "", _LISTED, "https://github.com/Stonesjtu/pytorch_memlab"),
    Tool("memray", "memray", "tracing", "", _LISTED, "https://bloomberg.github.io/memray/python_allocators.html"),
    Tool(
        "pytest-memray", "pytest-memray", "tracing", "",
        'limit_leaks("1 MB") as in its documentation: one call stack leaked 1 MB or more',
        "https://pytest-memray.readthedocs.io/en/latest/usage.html", True,
    ),
    Tool(
        "scalene", "scalene", "tracing", "",
        "its leak detector: a line 95 % likely to leak (scored while the footprint makes new records above 100 MB)",
        "https://github.com/plasma-umass/scalene", True,
    ),
    Tool(
        "stormlog", "stormlog", "device", "cuda",
        "its analyzer: growth in over 70 % of calls and 100 MiB in all, or a significant upward trend",
        "https://stormlog.readthedocs.io/en/latest/api.html",
    ),
    Tool(
        "torch-cycles", "torch", "device", "cuda", "it reports a reference cycle that holds a CUDA tensor",
        "https://docs.pytorch.org/docs/stable/torch_cuda_memory.html", kinds=("lazy gc",),
    ),
    Tool(
        "torch-leak-check", "torch", "device", "cuda",
        "more CUDA memory allocated after than before: an error if the driver agrees, else a warning",
        "https://github.com/pytorch/pytorch/blob/main/torch/testing/_internal/common_utils.py",
    ),
)  # fmt: skip


def tool(name: str) -> Tool:
    """The tool of this name.

    Examples
    --------
    >>> tool("tracemalloc").version is not None
    True
    """
    for one in TOOLS:
        if one.name == name:
            return one
    raise UnknownName("tool", name, [one.name for one in TOOLS])


INSTEAD = {"native_string": "o1lab.memory.rivals.fair:native_new"}
ADDED = ("o1lab.memory.rivals.fair:device_cycle",)
"""Cases that the comparison replaces or adds; :mod:`~o1lab.memory.rivals.fair` says why."""


def case_names() -> list[str]:
    """The names of all cases to compare: the catalogue's, less those replaced, and those added."""
    from o1lab.memory import catalogue

    return [INSTEAD.get(case.name, case.name) for case in catalogue.cases()] + list(ADDED)


def find_case(name: str) -> Case:
    """A case of the catalogue, or of any module: ``"module:name"``."""
    from o1lab.memory import catalogue

    module, _, short = name.rpartition(":")
    if not module:
        return catalogue.load(name)
    found = getattr(importlib.import_module(module), short, None)
    if not isinstance(found, catalogue.Case):
        raise UnknownName("case", name, hint=f"{module} has no catalogue.Case of that name")
    return found


class Workload:
    """Requests of one form of a case: ``warm()`` serves the warm-up, ``serve()`` what is judged, each counted."""

    def __init__(self, name: str, case: Case, step: Step | None, leak: bool, asked: int | None) -> None:
        self.name, self.case, self.step, self.leak, self.asked = name, case, step, leak, asked
        rounds = case.rounds + REPLAYS
        self.per_round = case.requests_per_round if asked is None else max(1, -(-asked // rounds))
        self.requests = self.per_round * rounds
        self.warm_up = self.per_round * (case.warm_up + 1)
        self.served = 0
        self._inputs = itertools.count() if case.inputs is None else itertools.cycle(case.inputs)

    def one(self) -> None:
        """Serve the next request."""
        self.step(next(self._inputs))  # type: ignore[misc]
        self.served += 1

    def warm(self) -> None:
        """Serve the warm-up: what tools that compare two snapshots need not see."""
        for _ in range(self.warm_up):
            self.one()

    def serve(self) -> None:
        """Serve the requests to judge."""
        for _ in range(self.requests):
            self.one()

    def line(self, frames: Iterable[tuple[str, int]]) -> str:
        """``file:line`` of the innermost frame in the case's own code; of the innermost frame at all if none is."""
        stack = list(frames)
        for file, number in stack:
            if self.owns(file, number):
                return f"{file}:{number}"
        return "{}:{}".format(*stack[0]) if stack else ""

    def owns(self, file: str, number: int) -> bool:
        """Whether a line belongs to this case: its file, and not the body of another case in it."""
        from o1lab.memory import catalogue

        if file != inspect.getsourcefile(self.case.build):
            return False
        for other in catalogue.cases():
            if other.name != self.case.name and inspect.getsourcefile(other.build) == file:
                lines, first = inspect.getsourcelines(other.build)
                if first <= number < first + len(lines):
                    return False
        return True


@contextmanager
def workload(case: str, leak: bool, requests: int | None = None, *, only_name: bool = False) -> Iterator[Workload]:
    """Open one form of a case; ``requests`` to judge, or as many as suit the case. ``only_name`` sets no scene.

    Examples
    --------
    >>> with workload("finished_list", leak=True, requests=40) as work:
    ...     work.warm()
    ...     work.requests, work.served
    (57, 27)
    """
    found = find_case(case)
    if only_name:
        yield Workload(case, found, None, leak, requests)
        return
    with found.open(leak=leak) as step:
        yield Workload(case, found, step, leak, requests)
