"""How long chains stay right: survival to the first faulty step, and what a constant per-step error predicts.

``first`` is always one entry per chain: the 1-based step of its first fault, or ``None`` if there was none; ``steps``
says how far that chain was watched (its length, or the last readable step where it was cut off): one number for all
or one per chain. A chain without a fault is *censored* there: nothing is known of later steps.
What drives the hazard is in :mod:`o1lab.chains.hazard`, which curve it follows in :mod:`o1lab.chains.curves`.

>>> first, steps = [None, 3, None, 7, 2, None, 8, None], 8
>>> print(kaplan_meier(first, steps).at(8))
0.5 [0.152, 0.7749] (n=8)
>>> print(predict(Estimate(0.826, 0.80, 0.85, 1024, "1"), 32, 128))
0.4655 [0.4096, 0.522] (n=1024)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from o1lab.errors import EstimateError
from o1lab.stats import Estimate, proportion

if TYPE_CHECKING:
    import pandas as pd

Z = 1.959963984540054


@dataclass(frozen=True)
class Survival:
    """Kaplan–Meier curve of chains that are right so far.

    Attributes
    ----------
    steps : ndarray of int, shape (m,)
        Steps at which a chain first went wrong or stopped being watched, ascending.
    at_risk, faults : ndarray of int, shape (m,)
        Chains right up to the step before and watched in it; how many of them went wrong in it.
    share, low, high : ndarray of float, shape (m,)
        Share right through the step, with its 95 % interval.
    n : int
        Chains.
    """

    steps: np.ndarray = field(repr=False)
    at_risk: np.ndarray = field(repr=False)
    faults: np.ndarray = field(repr=False)
    share: np.ndarray = field(repr=False)
    low: np.ndarray = field(repr=False)
    high: np.ndarray = field(repr=False)
    n: int

    def at(self, step: int) -> Estimate:
        """Share of chains right through ``step``; past the last step watched it raises EstimateError."""
        if not 1 <= step <= self.steps[-1]:
            raise EstimateError(f"step={step!r}: no chain was watched there; they were from 1 to {self.steps[-1]}")
        place = int(np.searchsorted(self.steps, step, side="right")) - 1
        if place < 0:
            return proportion(self.n, self.n)
        return Estimate(float(self.share[place]), float(self.low[place]), float(self.high[place]), self.n, "1")

    @property
    def half(self) -> int | None:
        """First step through which at most half the chains are right; ``None`` if more than half are to the end."""
        below = np.flatnonzero(self.share <= 0.5)
        return int(self.steps[below[0]]) if below.size else None

    def frame(self) -> pd.DataFrame:
        """One row per step: ``step, at_risk, faults, share, low, high``."""
        import pandas as pd

        names = ("at_risk", "faults", "share", "low", "high")
        return pd.DataFrame({"step": self.steps, **{name: getattr(self, name) for name in names}})

    def __str__(self) -> str:
        half = f"half are wrong by step {self.half}" if self.half else "more than half are right to the end"
        return f"{self.n} chains, {self.faults.sum()} faults; right through step {self.steps[-1]}: " + (
            f"{self.at(int(self.steps[-1]))}; {half}"
        )


def watched(first: Sequence[int | None], steps: int | Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Times (last step watched) as int and faults as bool, both of shape (n,), from ``first`` and ``steps``.

    Raises
    ------
    EstimateError
        No chain, unequal lengths, a step that is no positive whole number, or a fault past the last step watched.

    Examples
    --------
    >>> watched([2, None], 4)
    (array([2, 4]), array([ True, False]))
    """
    n = len(first)
    if n == 0:
        raise EstimateError("no chains: survival needs at least one")
    limits = [steps] * n if isinstance(steps, (int, np.integer)) else list(steps)
    if len(limits) != n:
        raise EstimateError(f"{n} first faults and {len(limits)} numbers of steps: give one per chain")
    times = np.empty(n, dtype=np.int64)
    for place, (fault, limit) in enumerate(zip(first, limits, strict=True)):
        for name, value in (("steps", limit), ("first fault", limit if fault is None else fault)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise EstimateError(f"chain {place}: {name}={value!r} is no step, a whole number from 1")
        if fault is not None and fault > limit:
            raise EstimateError(f"chain {place}: its first fault is at step {fault}, past the {limit} that it has")
        times[place] = limit if fault is None else fault
    return times, np.array([fault is not None for fault in first])


def kaplan_meier(first: Sequence[int | None], steps: int | Sequence[int]) -> Survival:
    """Kaplan–Meier (1958) estimate of the share of chains right through each step, log-log Greenwood intervals.

    Where no chain has failed yet, or all have, Greenwood's variance is zero or undefined: the Wilson interval of the
    chains at risk stands there.

    Parameters
    ----------
    first, steps
        As the module says.

    Examples
    --------
    >>> print(kaplan_meier([None] * 20, 16))
    20 chains, 0 faults; right through step 16: 1 [0.8389, 1] (n=20); more than half are right to the end
    """
    times, faulty = watched(first, steps)
    at = np.unique(times)
    faults = np.array([int((times[faulty] == step).sum()) for step in at])
    ends = np.sort(times)
    risk = times.size - np.searchsorted(ends, at, side="left")
    share = np.cumprod(1 - faults / risk)
    with np.errstate(divide="ignore", invalid="ignore"):
        greenwood = np.sqrt(np.cumsum(faults / (risk * (risk - faults))))
        spread = np.exp(Z * greenwood / np.abs(np.log(share)))
        low, high = share**spread, share ** (1 / spread)
    for place in np.flatnonzero((share == 1) | (share == 0)):
        end = proportion(round(float(share[place])) * int(risk[place]), int(risk[place]))
        low[place], high[place] = end.low, end.high
    return Survival(at, risk, faults, share, np.minimum(low, share), np.maximum(high, share), int(times.size))


def per_step(first: Sequence[int | None], steps: int | Sequence[int]) -> Estimate:
    """Share of steps taken that were right, up to and with the first fault (Wilson): the constant-hazard estimate.

    Examples
    --------
    >>> print(per_step([None, 4], 8))
    0.9167 [0.6461, 0.9851] (n=12)
    """
    times, faulty = watched(first, steps)
    taken = int(times.sum())
    return proportion(taken - int(faulty.sum()), taken)


def predict(accuracy: Estimate, steps: int, to: int) -> Estimate:
    """Whole-chain accuracy at ``to`` steps that a constant per-step error predicts from that at ``steps``.

    ``accuracy ** (to / steps)``, the bounds likewise; ``steps=1`` starts from a per-step accuracy. It is the null
    model: an accuracy that falls as it says needs no cause that grows with length.

    Examples
    --------
    >>> print(predict(Estimate(0.994, 0.993, 0.995, 4096, "1"), 1, 128))
    0.4629 [0.4069, 0.5264] (n=4096)
    """
    for name, value in (("steps", steps), ("to", to)):
        if isinstance(value, bool) or not isinstance(value, (int, float, np.integer)) or not 1 <= value < math.inf:
            raise EstimateError(f"{name}={value!r} is no number of steps, at least 1")
    if not 0 <= accuracy.low <= accuracy.high <= 1:
        raise EstimateError(f"accuracy {accuracy} is no share between 0 and 1")
    value, low, high = (bound ** (to / steps) for bound in (accuracy.value, accuracy.low, accuracy.high))
    return Estimate(value, low, high, accuracy.n, accuracy.unit)
