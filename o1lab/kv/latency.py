"""Quantiles of latencies with their intervals."""

from __future__ import annotations

from collections.abc import Sequence

from o1lab.errors import EstimateError
from o1lab.stats import Estimate


def quantile(values: Sequence[float], q: float, unit: str) -> Estimate:
    """Quantile of ``values`` with the distribution-free order-statistic interval (Conover 1999, §3.2).

    The interval takes the values as independent draws; of latencies that come in clusters it is too narrow.

    Parameters
    ----------
    values : sequence of float, shape (n,)
    q : float
        0 < q < 1; an interval of 95 % needs some 3.7 / (1 − q) values (370 for P99).

    Raises
    ------
    EstimateError
        Too few values for an interval.

    Examples
    --------
    >>> print(quantile(range(1000), 0.99, "µs"))
    990 [982, 996] µs (n=1000)
    """
    import numpy as np
    from scipy.stats import binom

    data = np.sort(np.asarray(values, dtype=float))
    n = int(data.size)
    if not 0 < q < 1:
        raise EstimateError(f"q={q!r}: a quantile lies between 0 and 1")
    low, high = int(binom.ppf(0.025, n, q)), int(binom.ppf(0.975, n, q))
    if n == 0 or low < 1 or high > n - 1:
        raise EstimateError(f"{n} values give no 95 % interval of quantile {q}: measure more")
    value = float(data[min(int(q * n), n - 1)])
    return Estimate(value, float(data[low - 1]), float(data[high]), n, unit)
