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


BLOCK, DRAWS = 64, 1000
"""Latencies that are drawn together, as neighbours share their cause, and draws of a bootstrap."""


def ratio(
    values: Sequence[float], base: Sequence[float], q: float = 0.99, base_q: float | None = None, *, seed: int = 0
) -> Estimate:
    """Quantile ``q`` of ``values`` as a multiple of quantile ``base_q`` (``q``) of ``base``, by a bootstrap of blocks.

    Blocks are 64 neighbours from random places, the end joined to the beginning; series of the same length are drawn at
    the same places, so that ``ratio(steps, steps, 0.99, 0.5)`` is the tail against the median of the same steps.

    Raises
    ------
    EstimateError
        Fewer than ten blocks.

    Examples
    --------
    >>> print(ratio([4.0] * 1000, [2.0] * 1000))
    2 [2, 2] × (n=1000)
    """
    import numpy as np

    found, drawn = [], []
    for series, share in ((values, q), (base, q if base_q is None else base_q)):
        data = np.asarray(series, dtype=float)
        if data.size < 10 * BLOCK:
            raise EstimateError(f"{data.size} latencies are too few for a bootstrap of blocks: at least {10 * BLOCK}")
        begins = np.random.default_rng(seed).integers(0, data.size, size=(DRAWS, -(-data.size // BLOCK), 1))
        places = (begins + np.arange(BLOCK)).reshape(DRAWS, -1)[:, : data.size] % data.size
        at = int(share * data.size)
        found.append(float(np.partition(data, at)[at]))
        drawn.append(np.partition(data[places], at, axis=1)[:, at])
    value, (low, high) = found[0] / found[1], np.quantile(drawn[0] / drawn[1], [0.025, 0.975])
    return Estimate(value, min(float(low), value), max(float(high), value), min(len(values), len(base)), "×")
