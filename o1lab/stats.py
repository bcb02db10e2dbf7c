"""Estimates with 95 % intervals, thin over scipy. Every measured number in the lab is an :class:`Estimate`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

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


def mebibytes(count: float) -> str:
    """Bytes in MiB: whole from 100 MiB on, below with three digits, so that little is not shown as nothing.

    Examples
    --------
    >>> mebibytes(2**31 + 2**20), mebibytes(2**19), mebibytes(4096)
    ('2,049', '0.5', '0.00391')
    """
    value = count / 2**20
    return f"{value:,.0f}" if value >= 99.95 or not value else readable(value, 3)


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


MOST_SAMPLES = 240
"""Longer series are averaged in equal groups before the slope is taken: their pairs grow with the square."""
MOST_PHI = 0.99
"""Largest AR(1) coefficient that an interval is made for: at 1 noise wanders without end and hides any slope."""


def theil_sen(x: Sequence[float], y: Sequence[float], unit: str, *, draws: int = 499, seed: int = 0) -> Estimate:
    """Theil–Sen slope of ``y`` over ``x`` with an interval for correlated residuals (AR(1) sieve bootstrap).

    Residuals are taken as an AR(1) process whose coefficient is corrected for its small-sample bias (Kendall 1954, with
    a trend removed) and drawn anew for each bootstrap series from its own sampling error, because the one estimate says
    too little about slow noise. Innovations are resampled, the slope of each series is taken again, and the interval is
    symmetric: value ± the 95 % quantile of the slopes' distance from the truth. Bühlmann (1997) describes the sieve.

    Simulated coverage of the nominal 95 %, with Gaussian AR(1) noise of coefficient 0, 0.6 and 0.9: 95, 94 and 92 % for
    60 samples (1000 series), 95, 96 and 96 % for 200 (400). Noise of another kind is covered as well as AR(1) fits it.

    Parameters
    ----------
    x, y : sequence of float, shape (n,)
        Sample positions (e.g. seconds or requests) in the order they were taken, about evenly spaced, and readings;
        n ≥ 8. Above 240 samples they are averaged in equal groups first.

    Examples
    --------
    >>> print(theil_sen(range(10), [2.0 * x for x in range(10)], "B/request"))
    2 [2, 2] B/request (n=10)
    """
    import numpy as np

    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    n = count = int(xs.size)
    if n != ys.size or n < 8:
        raise EstimateError(f"a slope needs two series of equal length, at least 8 samples; got {n} and {ys.size}")
    if n > MOST_SAMPLES:
        edges = np.linspace(0, n, MOST_SAMPLES + 1).astype(int)
        xs, ys = (np.add.reduceat(series, edges[:-1]) / np.diff(edges) for series in (xs, ys))
        n = MOST_SAMPLES
    first, second = np.triu_indices(n, 1)
    apart = xs[second] - xs[first]
    first, second, apart = first[apart != 0], second[apart != 0], apart[apart != 0]
    if apart.size == 0:
        raise EstimateError("all samples stand at the same place: there is no slope")
    slope = float(np.median((ys[second] - ys[first]) / apart))
    residual = ys - slope * xs
    phi, innovation = _ar1(residual - residual.mean())
    random = np.random.default_rng(seed)
    phis = np.clip(phi + math.sqrt((1 - phi**2) / n) * random.normal(size=(draws, 1)), 0, MOST_PHI)
    noise = innovation[random.integers(0, innovation.size, size=(draws, n))]
    noise[:, :1] /= np.sqrt(1 - phis**2)  # the first sample has the process's own spread
    for place in range(1, n):
        noise[:, place] += phis[:, 0] * noise[:, place - 1]
    middle, slopes = apart.size // 2, []
    for some in np.array_split(noise.astype(np.float32), max(1, draws // 16)):  # small enough for the cache
        pairs = (some[:, second] - some[:, first]) / apart.astype(np.float32)
        pairs.partition(middle, axis=1)
        slopes.append(pairs[:, middle])
    half = float(np.quantile(np.abs(np.concatenate(slopes)), 0.95))
    return Estimate(slope, slope - half, slope + half, count, unit)


def _ar1(residual: Any) -> tuple[float, Any]:
    """Bias-corrected AR(1) coefficient within [0, 0.99] of residuals around a line, and the innovations it leaves."""
    n, power = residual.size, float((residual[:-1] ** 2).sum())
    raw = float((residual[1:] * residual[:-1]).sum()) / power if power > 0 else 0.0
    phi = min(max((n * raw + 2) / (n - 4), 0.0), MOST_PHI)
    innovation = residual[1:] - phi * residual[:-1]
    return phi, (innovation - innovation.mean()) * math.sqrt(n / (n - 3))


def change_point(y: Sequence[float]) -> int:
    """Index from which a series of readings is steady: its warm-up, first fill or last allocator step lies before.

    Two rules. A few (at most six) jumps upwards and none downwards are steps: cut after the last one. Then, as long as
    two lines fit the rest much better than one, cut where they meet (binary segmentation after a sup-F statistic,
    divided by (1 + φ) / (1 - φ) for AR(1) residuals). At least a fifth of the series, and eight samples, stay.
    A straight line, a saw-tooth or a regular staircase is not cut.

    Examples
    --------
    >>> change_point([float(t) for t in range(50)])
    0
    >>> change_point([min(t, 20.0) for t in range(50)])
    20
    """
    import numpy as np

    ys = np.asarray(y, dtype=float)
    least = max(8, ys.size // 5)
    start = _last_step(ys, least) if ys.size > least else 0
    while ys.size - start > least + 3:
        part = ys[start:] - ys[start:].mean()
        n = part.size
        both, one = _two_lines(part)
        at = 3 + int(np.argmin(both[2 : n - least]))  # the second line begins here
        noise = np.concatenate([_off_line(part[:at]), _off_line(part[at:])])
        if one <= 1e-9 * float(part @ part):  # rounding is all that is left
            break
        phi = min(_ar1(noise)[0], 0.95)
        gain = (one - both[at - 1]) / max(both[at - 1] / (n - 4), 1e-12 * one) * (1 - phi) / (1 + phi)
        if gain < CUT_GAIN:
            break
        start += at
    return start


CUT_GAIN = 20.0
"""Sup-F above which a series is two lines: above the 1 % point of Andrews (1993), as several cuts are tried."""


def _last_step(ys: Any, least: int) -> int:
    import numpy as np

    rises = np.diff(ys)
    off = np.abs(rises - np.median(rises))
    steps = 1 + np.flatnonzero(off > max(8 * 1.4826 * float(np.median(off)), 0.04 * float(np.ptp(ys))))
    if not 1 <= steps.size <= 6 or (rises[steps - 1] < 0).any():
        return 0
    return int(max(steps[steps <= ys.size - least], default=0))


def _off_line(ys: Any) -> Any:
    """Residuals around the least-squares line over the sample numbers."""
    import numpy as np

    xs = np.arange(ys.size) - (ys.size - 1) / 2
    return ys - ys.mean() - xs * (xs @ ys) / max(float(xs @ xs), 1.0)


def _two_lines(ys: Any) -> tuple[Any, float]:
    """Squared residuals of two lines, the first one ending with sample i, for every i; and those of one line."""
    import numpy as np

    xs = np.arange(ys.size) - (ys.size - 1) / 2
    sums = [np.cumsum(term) for term in (np.ones(ys.size), xs, ys, xs * xs, xs * ys, ys * ys)]

    def off(n: Any, x: Any, y: Any, xx: Any, xy: Any, yy: Any) -> Any:
        n = np.maximum(n, 1)
        spread, joint = xx - x * x / n, xy - x * y / n
        return np.maximum(yy - y * y / n - np.where(spread > 1e-9, joint**2 / np.maximum(spread, 1e-9), 0), 0)

    first, second = off(*sums), off(*(total[-1] - total for total in sums))
    return first + second, float(first[-1])
