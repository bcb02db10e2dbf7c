"""Estimates with 95 % intervals, thin over scipy. Every measured number in the lab is an :class:`Estimate`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from o1lab.errors import EstimateError


def readable(number: float, digits: int = 4) -> str:
    """A number for a person: ``digits`` significant ones, thousands separated, no exponent between 1e-4 and 1e12.

    Examples
    --------
    >>> readable(785880.4), readable(0.00064), readable(4.2363e12), readable(-14.161)
    ('785,900', '0.00064', '4.236e+12', '-14.16')
    """
    rounded = float(f"{number:.{digits}g}")
    if 1000 <= abs(rounded) < 1e12:
        return f"{rounded:,.0f}" if rounded == int(rounded) else f"{rounded:,}"
    return f"{rounded:.{digits}g}"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measured number with its 95 % interval.

    Parameters
    ----------
    value, low, high : float
        Point estimate and the ends of its 95 % interval, ``low <= value <= high``, all finite, in ``unit``.
    n : int
        How many independent observations it rests on (at least 1).
    unit : str
        The unit as shown to a reader, e.g. ``"B/request"``.

    Raises
    ------
    EstimateError
        If a bound is not finite, the order is wrong, ``n < 1`` or the unit is empty.

    Examples
    --------
    >>> print(Estimate(64.0, 64.0, 70.5, n=12, unit="B/request"))
    64 [64, 70.5] B/request (n=12)
    """

    value: float
    low: float
    high: float
    n: int
    unit: str

    def __post_init__(self) -> None:
        for name in ("value", "low", "high"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
                raise EstimateError(f"{name}={number!r} is not a finite number; record no estimate instead of a guess")
        if not self.low <= self.value <= self.high:
            raise EstimateError(f"interval [{self.low}, {self.high}] does not hold the value {self.value}")
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise EstimateError(f"n={self.n!r} must be a whole number of observations, at least 1")
        if not self.unit:
            raise EstimateError("an estimate needs a unit; write '1' for a pure number")

    def __str__(self) -> str:
        value, low, high = (readable(number) for number in (self.value, self.low, self.high))
        return f"{value} [{low}, {high}]{'' if self.unit == '1' else ' ' + self.unit} (n={self.n})"

    def to_dict(self) -> dict[str, float | int | str]:
        """Return the five fields as a plain dictionary."""
        return asdict(self)

    def shifted(self, by: float) -> Estimate:
        """Return the estimate with ``by`` (a known constant, in the same unit) added to each bound."""
        return Estimate(self.value + by, self.low + by, self.high + by, self.n, self.unit)

    def scaled(self, factor: float, unit: str) -> Estimate:
        """Return the estimate in another unit: every bound times ``factor`` (a negative factor swaps the bounds)."""
        ends = sorted((self.low * factor, self.high * factor))
        return Estimate(self.value * factor, ends[0], ends[1], self.n, unit)


def proportion(successes: int, n: int, unit: str = "1") -> Estimate:
    """Share of successes with the Wilson score interval (Wilson 1927).

    Examples
    --------
    >>> print(proportion(20, 20))
    1 [0.8389, 1] (n=20)
    """
    from scipy.stats import binomtest

    if n < 1 or not 0 <= successes <= n:
        raise EstimateError(f"{successes} successes of {n} trials is no proportion")
    interval = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    share = successes / n
    return Estimate(share, float(min(interval.low, share)), float(max(interval.high, share)), n, unit)


def mean(values: Sequence[float], unit: str) -> Estimate:
    """Mean with Student's t interval; for fewer than two values there is no interval and it raises.

    Examples
    --------
    >>> print(mean([1.0, 2.0, 3.0], "s"))
    2 [-0.4841, 4.484] s (n=3)
    """
    import numpy as np
    from scipy.stats import t

    data = np.asarray(values, dtype=float)
    if data.size < 2:
        raise EstimateError(f"{data.size} observations give no interval; measure at least two")
    centre = float(data.mean())
    half = float(t.ppf(0.975, data.size - 1) * data.std(ddof=1) / math.sqrt(data.size))
    return Estimate(centre, centre - half, centre + half, int(data.size), unit)


def median(values: Sequence[float], unit: str) -> Estimate:
    """Median with the distribution-free order-statistic interval (at least 95 % coverage, Conover 1999, §3.2).

    Below six observations no pair of order statistics covers 95 %; it raises.

    Examples
    --------
    >>> print(median([64, 64, 64, 65, 64, 64, 90, 64], "B"))
    64 [64, 90] B (n=8)
    """
    import numpy as np
    from scipy.stats import binom

    data = np.sort(np.asarray(values, dtype=float))
    n = int(data.size)
    if n < 6:
        raise EstimateError(f"{n} observations give no 95 % interval of a median; measure at least six")
    below = int(binom.ppf(0.025, n, 0.5))
    while below > 0 and binom.cdf(below - 1, n, 0.5) > 0.025:
        below -= 1
    low, high = float(data[max(below - 1, 0)]), float(data[min(n - below, n - 1)])
    return Estimate(float(np.median(data)), low, high, n, unit)


def theil_sen(
    x: Sequence[float], y: Sequence[float], unit: str, *, block: int | None = None, draws: int = 499, seed: int = 0
) -> Estimate:
    """Theil–Sen slope of ``y`` over ``x`` with a moving-block bootstrap interval for correlated residuals.

    Parameters
    ----------
    x, y : sequence of float, shape (n,)
        Sample positions (e.g. seconds or requests) and readings; n ≥ 8.
    block : int, optional
        Block length in samples; default ``ceil(n ** (1/3))`` (Künsch 1989's order).

    Examples
    --------
    >>> print(theil_sen(range(10), [2.0 * x for x in range(10)], "B/request"))
    2 [2, 2] B/request (n=10)
    """
    import numpy as np
    from scipy.stats import theilslopes

    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    n = int(xs.size)
    if n != ys.size or n < 8:
        raise EstimateError(f"a slope needs two series of equal length, at least 8 samples; got {n} and {ys.size}")
    slope, intercept, _, _ = theilslopes(ys, xs)
    residual = ys - (intercept + slope * xs)
    length = min(n, block or math.ceil(n ** (1 / 3)))
    random = np.random.default_rng(seed)
    first, second = np.triu_indices(n, 1)
    apart = xs[second] - xs[first]
    first, second, apart = first[apart != 0], second[apart != 0], apart[apart != 0]
    offsets = np.arange(length)
    blocks = math.ceil(n / length)
    slopes = np.empty(draws)
    for draw in range(draws):
        starts = random.integers(0, n - length + 1, size=blocks)
        again = intercept + slope * xs + residual[(starts[:, None] + offsets).ravel()[:n]]
        slopes[draw] = np.median((again[second] - again[first]) / apart)
    low, high = np.quantile(slopes, [0.025, 0.975])
    return Estimate(float(slope), float(min(low, slope)), float(max(high, slope)), n, unit)
