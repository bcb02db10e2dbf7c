"""Two arms on the same problems: exact McNemar, the paired difference, equivalence within a margin, Holm, sample sizes.

An arm is one array of outcomes (right or wrong), one per problem, in the same order in both arms. A difference is
always *second minus first*: give the baseline first and the treatment second. What counts is the problems on which
the arms differ; that both solve or both fail says nothing about a difference.

>>> before, after = [1] * 40 + [0] * 24, [1] * 38 + [0] * 8 + [1] * 18
>>> print(mcnemar(before, after))
18 gained, 2 lost of 64 pairs: difference 0.25 [0.1274, 0.378] (n=64), exact McNemar p = 0.0004
>>> print(tost_paired(before, after, margin=0.05))
not shown equal within ±0.05: difference 0.25 [0.1274, 0.378] (n=64), TOST p = 1
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from o1lab.errors import EstimateError
from o1lab.stats import Estimate, proportion

ALPHA = 0.05
PValues = TypeVar("PValues", Mapping[str, float], Sequence[float])


@dataclass(frozen=True)
class Pairs:
    """Counts of paired outcomes: right in ``both`` arms, ``lost`` (first only), ``gained`` (second only), neither."""

    both: int
    lost: int
    gained: int
    neither: int

    @property
    def n(self) -> int:
        """Number of pairs."""
        return self.both + self.lost + self.gained + self.neither

    @property
    def discordance(self) -> Estimate:
        """Share of pairs whose outcomes differ (Wilson); with none of n it still has an upper end."""
        return proportion(self.lost + self.gained, self.n)

    @property
    def difference(self) -> Estimate:
        """Second arm's share of right ones minus the first's, with Tango's score interval."""
        ends = [_tango(self.gained, self.lost, self.n, sign * _z(1 - ALPHA / 2)) for sign in (1, -1)]
        value = (self.gained - self.lost) / self.n
        return Estimate(value, min(ends[0], value), max(ends[1], value), self.n, "1")

    def __str__(self) -> str:
        return f"{self.gained} gained, {self.lost} lost of {self.n} pairs: difference {self.difference}"


@dataclass(frozen=True)
class McNemar:
    """Exact McNemar test: ``p_value`` is two-sided, of gained against lost as of a fair coin."""

    pairs: Pairs
    p_value: float

    def __str__(self) -> str:
        return f"{self.pairs}, exact McNemar {_p(self.p_value)}"


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests: ``equivalent`` if the difference is shown to lie within ±``margin`` at ``alpha``."""

    pairs: Pairs
    margin: float
    p_value: float
    alpha: float

    @property
    def equivalent(self) -> bool:
        """Whether both one-sided tests reject."""
        return self.p_value <= self.alpha

    def __str__(self) -> str:
        said = "equal" if self.equivalent else "not shown equal"
        return f"{said} within ±{self.margin:g}: difference {self.pairs.difference}, TOST {_p(self.p_value)}"


def pairs(first: Any, second: Any) -> Pairs:
    """Count the paired outcomes of two arms of 0/1 or bool, each of shape (n,).

    Raises
    ------
    EstimateError
        Unequal lengths, empty arms, or something that is neither right nor wrong.

    Examples
    --------
    >>> pairs([1, 1, 0, 0], [1, 0, 1, 1])
    Pairs(both=1, lost=1, gained=2, neither=0)
    """
    a, b = outcomes(first, "first arm"), outcomes(second, "second arm")
    if a.size != b.size:
        raise EstimateError(f"arms of {a.size} and {b.size} outcomes are not paired: give both for the same problems")
    return Pairs(int((a & b).sum()), int((a & ~b).sum()), int((~a & b).sum()), int((~a & ~b).sum()))


def outcomes(values: Any, name: str = "outcomes") -> np.ndarray:
    """Right/wrong outcomes as a bool array of shape (n,); anything but 0, 1, True and False is refused by value."""
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0:
        raise EstimateError(f"{name}: shape {array.shape} is not one outcome per problem of at least one problem")
    if array.dtype == bool:
        return array
    wrong = [value for value in array.tolist() if not isinstance(value, Real) or value not in (0, 1)]
    if wrong:
        raise EstimateError(f"{name}: {wrong[0]!r} is no outcome; use True or False, 1 or 0")
    return array.astype(bool)


def mcnemar(first: Any, second: Any) -> McNemar:
    """Exact two-sided McNemar test that the arms are equally often right (McNemar 1947; exact: binomial, half).

    Examples
    --------
    >>> mcnemar([1] * 10, [1] * 10).p_value
    1.0
    """
    from scipy.stats import binomtest

    counts = pairs(first, second)
    differ = counts.gained + counts.lost
    return McNemar(counts, float(binomtest(counts.gained, differ).pvalue) if differ else 1.0)


def paired_difference(first: Any, second: Any) -> Estimate:
    """Second arm's accuracy minus the first's with Tango's (1998) score interval for paired proportions.

    It has a width even where no pair differs. Coverage of the nominal 95 %, summed over all outcomes: 94.4 % at least,
    for 32 to 1,024 pairs, discordance 0.5 to 50 % and differences up to 20 points.

    Examples
    --------
    >>> print(paired_difference([1] * 512, [1] * 512))
    0 [-0.007447, 0.007447] (n=512)
    """
    return pairs(first, second).difference


def tost_paired(first: Any, second: Any, margin: float, alpha: float = ALPHA) -> Equivalence:
    """Equivalence of two paired accuracies: two one-sided score tests (Tango 1998, Nam 1997) at ±``margin``.

    Counts move by whole pairs, so half a pair is taken off the evidence (continuity correction). Without it arms
    that differ by the margin pass in up to 5.8 % of cases at a nominal 5 %; with it in 4.8 % (:func:`tost_power`).

    Parameters
    ----------
    margin : float
        Largest difference that counts as none, as a share: 0.01 is one point. Between 0 and 1, both excluded.

    Raises
    ------
    EstimateError
        As :func:`pairs`; ``margin`` or ``alpha`` out of range.

    Examples
    --------
    >>> tost_paired([1] * 1024, [1] * 1024, margin=0.01).equivalent
    True
    """
    _between("margin", margin, 0, 1)
    _between("alpha", alpha, 0, 0.5)
    counts = pairs(first, second)
    return Equivalence(
        counts, float(margin), float(_tost_p(counts.gained, counts.lost, counts.n, margin)), float(alpha)
    )


def holm(p_values: PValues) -> PValues:
    """P-values adjusted for their number by Holm (1979): compare each with the level for the whole family.

    Examples
    --------
    >>> holm({"cause": 0.01, "remedy": 0.04, "other": 0.03})
    {'cause': 0.03, 'remedy': 0.06, 'other': 0.06}
    >>> holm([0.2])
    [0.2]
    """
    named = dict(p_values) if isinstance(p_values, Mapping) else dict(enumerate(p_values))
    for name, p in named.items():
        if isinstance(p, bool) or not isinstance(p, Real) or not 0 <= p <= 1:
            raise EstimateError(f"p-value {p!r} of {name!r} is not between 0 and 1")
    adjusted, largest = dict.fromkeys(named, 1.0), 0.0
    for rank, name in enumerate(sorted(named, key=named.__getitem__)):
        largest = max(largest, min(1.0, (len(named) - rank) * float(named[name])))
        adjusted[name] = largest
    return adjusted if isinstance(p_values, Mapping) else list(adjusted.values())  # type: ignore[return-value]


def mcnemar_n(difference: float, discordance: float, *, alpha: float = ALPHA, power: float = 0.8) -> int:
    """Pairs needed to find a ``difference`` by McNemar's test where a share ``discordance`` of pairs differs.

    Connor (1987). The exact test has a power of 76 to 79 % there for a nominal 80 %; 10 % more pairs make it up.

    Examples
    --------
    >>> mcnemar_n(0.05, 0.20), mcnemar_n(0.05, 0.20, power=0.9)
    (626, 837)
    """
    _between("alpha", alpha, 0, 1)
    _between("power", power, 0, 1)
    size = abs(_share("difference", difference, -1))
    if not 0 < size <= _share("discordance", discordance, 0):
        raise EstimateError(f"difference={difference!r} must not be 0 nor exceed the discordance {discordance!r}")
    root = _z(1 - alpha / 2) * math.sqrt(discordance) + _z(power) * math.sqrt(discordance - size**2)
    return math.ceil(root**2 / size**2)


def tost_n(
    margin: float, discordance: float, *, difference: float = 0.0, alpha: float = ALPHA, power: float = 0.8
) -> int:
    """Pairs needed to show equality within ±``margin`` if the true difference is ``difference``.

    Searched in steps of 1 % upwards from the normal approximation until :func:`tost_power` is enough: where few pairs
    differ the approximation is far too small (for a margin and a discordance of 1 % it says 857: a power of 54 %).

    Examples
    --------
    >>> tost_n(0.01, 0.01), tost_n(0.02, 0.05)
    (1159, 1178)
    """
    _between("power", power, 0, 1)
    size = _check_tost(margin, discordance, difference, alpha)
    if size >= margin:
        raise EstimateError(f"difference={difference!r} is not within the margin {margin!r}: no number of pairs helps")
    z = _z(1 - alpha) + _z((1 + power) / 2 if size == 0 else power)
    n = max(1, math.ceil(z**2 * (discordance - size**2) / (margin - size) ** 2))
    while tost_power(n, margin, discordance, difference=difference, alpha=alpha) < power:
        n += max(1, n // 100)
    return n


def tost_power(n: int, margin: float, discordance: float, *, difference: float = 0.0, alpha: float = ALPHA) -> float:
    """Chance that :func:`tost_paired` shows equality on ``n`` pairs, summed over all outcomes (no approximation).

    With ``difference`` at the margin it is the size of the test. At a nominal 5 %, 128 to 2,048 pairs, margins of 0.5
    to 5 points and discordance up to 30 % that is 4.8 % at most.

    Examples
    --------
    >>> round(tost_power(1024, 0.01, 0.02, difference=0.01), 3)
    0.034
    """
    from scipy.stats import binom

    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise EstimateError(f"n={n!r} is no number of pairs, at least 1")
    _check_tost(margin, discordance, difference, alpha)
    more, less = (discordance + difference) / 2, (discordance - difference) / 2
    gained, lost = (np.arange(*(binom.ppf([1e-10, 1 - 1e-10], n, share) + [0, 1])) for share in (more, less))
    gained, lost = gained[:, None], lost[None, :]
    chance = binom.pmf(gained, n, more) * binom.pmf(lost, np.maximum(n - gained, 0), less / (1 - more))
    return float(chance[_tost_p(gained, lost, n, margin) <= alpha].sum())


def _check_tost(margin: float, discordance: float, difference: float, alpha: float) -> float:
    """Refuse what makes no sense; return the size of the difference."""
    _between("margin", margin, 0, 1)
    _between("alpha", alpha, 0, 0.5)
    _between("discordance", discordance, 0, 1)
    size = abs(_share("difference", difference, -1))
    if size > discordance:
        raise EstimateError(f"difference={difference!r} exceeds the discordance {discordance!r}")
    return size


def _score(gained: Any, lost: Any, n: int, delta: float, correct: float = 0.0) -> Any:
    """Tango's statistic for the difference ``delta``; the share of lost pairs is its estimate under ``delta``."""
    b = (2 * n - gained + lost) * delta - gained - lost
    c = -lost * delta * (1 - delta)
    share = (np.sqrt(np.maximum(b * b - 8 * n * c, 0)) - b) / (4 * n)
    spread = np.sqrt(np.maximum(n * (2 * share + delta * (1 - delta)), 1e-12))
    return (gained - lost - n * delta + correct) / spread


def _tost_p(gained: Any, lost: Any, n: int, margin: float) -> Any:
    """Larger p-value of the two one-sided tests; works on arrays of counts."""
    from scipy.stats import norm

    above = norm.cdf(_score(gained, lost, n, margin, 0.5))
    below = norm.cdf(_score(lost, gained, n, margin, 0.5))
    return np.maximum(above, below)


def _tango(gained: int, lost: int, n: int, z: float) -> float:
    """End of the score interval where the statistic is ``z``: it falls from the lower to the upper end."""
    from scipy.optimize import brentq

    if (z > 0 and lost == n) or (z < 0 and gained == n):
        return math.copysign(1.0, -z)
    return float(brentq(lambda delta: _score(gained, lost, n, delta) - z, -1 + 1e-12, 1 - 1e-12, xtol=1e-12))


def _z(p: float) -> float:
    from scipy.stats import norm

    return float(norm.ppf(p))


def _p(value: float) -> str:
    return "p < 0.0001" if value < 1e-4 else f"p = {value:.2g}"


def _between(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not low < value < high:
        raise EstimateError(f"{name}={value!r} must lie between {low:g} and {high:g}")


def _share(name: str, value: Any, low: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= value <= 1:
        raise EstimateError(f"{name}={value!r} is no share between {low:g} and 1")
    return float(value)
