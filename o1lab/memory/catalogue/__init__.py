"""Known causes of memory growth, each as a small function with a leaking and a cured form that share one interface.

A case is a generator function of one argument, ``leak``: it sets the scene, yields ``step`` (which serves request
number ``n``) and cleans up. The leaking and the cured form differ in one line. Beside its source a case says what a
right answer is, known from arithmetic and not from a tool: the kind of growth, bytes per request, the owner. So the
catalogue measures any leak finder, this package's own included (``python -m o1lab.memory.accuracy``).
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from o1lab.errors import UnknownName

if TYPE_CHECKING:
    from o1lab.memory.probe import LeakReport

MODULES = (
    "python_objects", "interpreter", "torch_host", "notebook", "native", "device_tensors", "cuda", "nulls",
)  # fmt: skip
QUIET = ("none", "warm-up")
CHUNK_BYTES = 32
"""One malloc chunk: glibc's smallest, and the granularity within which a small rate counts as right."""

Step = Callable[[int], Any]
Build = Callable[[bool], Iterator[Step]]


@dataclass(frozen=True)
class Case:
    """One cause of growth (or one thing that looks like a cause) and the right answer about it.

    Attributes
    ----------
    name, what : str
        The function's name and the first paragraph of its docstring: mechanism and cure.
    source : str
        A public report or the documentation of the mechanism.
    where : str
        ``"cpu"`` or ``"cuda"``: what the case needs.
    kinds : tuple of str
        The kinds (see :class:`~o1lab.memory.LeakReport`) that are right for the leaking form.
    bytes_per_request : float or None
        Growth by arithmetic in B/request; ``None`` where only the library's internals decide it.
    counter : str
        The field of :class:`~o1lab.memory.Reading` that ``bytes_per_request`` is about.
    owner : str or None
        Regular expression for the path (or the kind) of the first owner named; ``None``: no Python object owns it.
    group : str
        ``"leak"``, ``"fixed"`` (once a leak, cured upstream: a control) or ``"null"`` (never was one).
    requests_per_round, rounds, warm_up : int
        Settings for :func:`~o1lab.memory.probe` that suit what a request costs here.
    inputs : sequence of int or None
        Requests to cycle through; ``None`` for 0, 1, 2, …
    note : str
        What stays after the case, or what else to know.
    slow : bool
        Takes more than about five seconds.
    fresh : bool
        What a process did before decides whether the case shows, so :meth:`probe` runs it in a new one.
    """

    name: str
    what: str
    build: Build
    source: str
    where: str
    kinds: tuple[str, ...]
    bytes_per_request: float | None
    counter: str
    owner: str | None
    group: str
    requests_per_round: int
    rounds: int
    warm_up: int
    inputs: tuple[int, ...] | None
    note: str
    slow: bool
    fresh: bool

    @contextmanager
    def open(self, *, leak: bool = True) -> Iterator[Step]:
        """Set the scene, hand out ``step`` and clean up, also after an exception.

        Examples
        --------
        >>> from o1lab.memory import catalogue
        >>> with catalogue.load("finished_list").open() as step:
        ...     step(0)
        """
        scene = self.build(leak)
        try:
            yield next(scene)
        finally:
            next(scene, None)
            scene.close()
            gc.collect()

    def probe(self, *, leak: bool = True, **settings: Any) -> LeakReport:
        """Probe the leaking (or the cured) form with the case's own settings, which ``settings`` override.

        A :attr:`fresh` case runs in a process of its own; its ``settings`` must be picklable then.
        """
        if self.fresh:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                return process.submit(_probe_named, self.name, leak, settings).result()
        return self.probe_here(leak=leak, **settings)

    def probe_here(self, *, leak: bool = True, **settings: Any) -> LeakReport:
        """Probe in this process, whatever its past."""
        from o1lab.memory.probe import probe

        own = {"requests_per_round": self.requests_per_round, "rounds": self.rounds, "warm_up": self.warm_up}
        with self.open(leak=leak) as step:
            return probe(step, **{"inputs": self.inputs, **own, **settings})

    def kind_right(self, report: LeakReport, *, leak: bool = True) -> bool:
        """Whether the report's kind is right for this form."""
        return report.kind in (self.kinds if leak else QUIET)

    def rate(self, report: LeakReport) -> float | None:
        """What the report says about the counter of this case, in B/request."""
        known = {"host_in_use": "host", "device_allocated": "device", "device_reserved": "reserved", "rss": "rss"}
        estimate = getattr(report, known.get(self.counter, ""), None)
        if estimate is not None:
            return float(estimate.value)
        grown = getattr(report.balance, self.counter, None)
        return None if grown is None else grown / report.requests

    def rate_right(self, report: LeakReport) -> bool | None:
        """Whether the rate is within 5 % or one malloc chunk of the truth; ``None`` where arithmetic gives none."""
        if self.bytes_per_request is None:
            return None
        said = self.rate(report)
        allowed = max(0.05 * self.bytes_per_request, CHUNK_BYTES)
        return said is not None and abs(said - self.bytes_per_request) <= allowed

    def owner_right(self, owners: list[Any]) -> bool | None:
        """Whether the first owner named is the right one; ``None`` where no Python object owns the growth."""
        if self.owner is None:
            return None
        return bool(owners) and re.search(self.owner, f"{owners[0].path} · {owners[0].kind}") is not None


def _probe_named(name: str, leak: bool, settings: dict[str, Any]) -> LeakReport:
    """What the new process of a fresh case runs; one thread, as its caller's threads do not come along."""
    import torch

    torch.set_num_threads(1)
    return load(name).probe_here(leak=leak, **settings)


_cases: dict[str, Case] = {}


def case(
    source: str, kind: str | tuple[str, ...], *, bytes_per_request: float | None = None, owner: str | None = None,
    where: str = "cpu", counter: str = "host_in_use", group: str = "leak", requests_per_round: int = 32,
    rounds: int = 12, warm_up: int = 8, inputs: range | None = None, note: str = "", slow: bool = False,
    fresh: bool = False,
) -> Callable[[Build], Build]:  # fmt: skip
    """Register a generator function as a :class:`Case`; the arguments are the case's fields."""

    def register(build: Build) -> Build:
        what = " ".join((build.__doc__ or "").split("\n\n")[0].split())
        kinds = (kind,) if isinstance(kind, str) else kind
        _cases[build.__name__] = Case(
            build.__name__, what, build, source, where, kinds, bytes_per_request, counter, owner, group,
            requests_per_round, rounds, warm_up, None if inputs is None else tuple(inputs), note, slow, fresh,
        )  # fmt: skip
        return build

    return register


def cases(*, where: str | None = None, group: str | None = None) -> list[Case]:
    """All cases in order, or those that need ``where`` and belong to ``group``; imports neither torch nor CUDA parts.

    Examples
    --------
    >>> len(cases(group="leak")) >= 24, len(cases(group="null")) >= 8
    (True, True)
    """
    for module in MODULES:
        importlib.import_module(f"{__name__}.{module}")
    found = (one for one in _cases.values() if where in (None, one.where))
    return [one for one in found if group in (None, one.group)]


def load(name: str) -> Case:
    """The case of this name.

    Raises
    ------
    UnknownName
        There is none; the message lists near ones.
    """
    known = {one.name: one for one in cases()}
    if name not in known:
        raise UnknownName("case", name, list(known))
    return known[name]
