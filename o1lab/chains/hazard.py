"""What drives the first fault of a chain: a discrete-time hazard model on the step, the length and the family.

The step index k and the length N are two terms, because they are two causes: an error that accumulates grows with k,
competition among a longer program's entries grows with N at every k.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from o1lab.chains.survival import Z, watched
from o1lab.errors import EstimateError
from o1lab.stats import Estimate

FEWEST_FAULTS = 10
"""Fewest faults that a hazard model is fitted to."""
SEPARATED = 10.0
"""Change of the log-hazard per standard deviation of a term above which the fit runs off to infinity."""


@dataclass(frozen=True)
class Hazard:
    """A discrete-time hazard model.

    Attributes
    ----------
    link : str
        ``"cloglog"`` or ``"logit"``.
    terms : dict of str to Estimate
        Coefficients; a family's is its difference from ``reference``.
    p_values : dict of str to float
        Two-sided, of each term.
    left_out : tuple of str
        Terms that do not vary here.
    rows, faults : int
        Steps taken by all chains, and first faults among them.
    """

    link: str
    terms: dict[str, Estimate]
    p_values: dict[str, float]
    reference: str
    left_out: tuple[str, ...]
    rows: int
    faults: int

    def ratio(self, term: str, by: float = 1.0) -> Estimate:
        """Factor on the hazard (cloglog) or its odds (logit) for ``by`` more of the term."""
        if term not in self.terms:
            raise EstimateError(f"{term!r} is no term of this model; it has {', '.join(self.terms)}")
        bounds = self.terms[term].scaled(by, "1")
        value, low, high = (math.exp(bound) for bound in (bounds.value, bounds.low, bounds.high))
        return Estimate(value, low, high, bounds.n, "1")

    def __str__(self) -> str:
        rows = [f"{self.link} hazard, {self.faults} first faults in {self.rows} steps"]
        rows += [f"  {name:<14} {value}, p = {self.p_values[name]:.2g}" for name, value in self.terms.items()]
        return "\n".join(rows + ([f"  does not vary: {', '.join(self.left_out)}"] if self.left_out else []))


def fit_hazard(
    first: Sequence[int | None],
    steps: int | Sequence[int],
    *,
    lengths: int | Sequence[int] | None = None,
    family: Sequence[str] | None = None,
    problems: Sequence[Any] | None = None,
    onset: int | None = None,
    link: str = "cloglog",
) -> Hazard:
    """Discrete hazard of the first fault on step ``k``, ``log N`` and family; standard errors clustered by problem.

    One row per chain and step taken, one binary outcome each (Singer and Willett 1993); with ``cloglog`` the
    coefficients are those of proportional hazards (Prentice and Gloeckler 1978). A million steps take some ten seconds
    and 1.5 GB.

    Parameters
    ----------
    lengths
        N, the program's length, if it is not how far a chain was watched.
    family
        One name per chain.
    problems
        One id per chain; the same problem worked twice counts as one cluster. Default: every chain its own.
    onset
        Adds the term ``k > onset``: does the hazard jump there?
    link
        ``"cloglog"`` or ``"logit"``.

    Raises
    ------
    EstimateError
        As :func:`watched`; fewer than 10 faults; a family, or a side of ``onset``, without any fault; a
        term that separates faulty steps from right ones; unknown link.

    Examples
    --------
    >>> print(fit_hazard([1, 2, 3, 4, 5, 6, 7, 8, 8, 7, 6, 5], 8).ratio("k"))
    1.62 [1.171, 2.24] (n=12)
    """
    import statsmodels.api as sm

    times, faulty = watched(first, steps)
    n, faults = times.size, int(faulty.sum())
    if faults < FEWEST_FAULTS:
        raise EstimateError(f"{faults} faults are too few for a hazard model: {FEWEST_FAULTS} at least")
    links = {"cloglog": sm.families.links.CLogLog, "logit": sm.families.links.Logit}
    if link not in links:
        raise EstimateError(f"link={link!r} is not one of {', '.join(links)}")
    last = watched([None] * n, steps if lengths is None else lengths)[0]
    chain = np.repeat(np.arange(n), times)
    k = np.arange(chain.size) - np.repeat(np.cumsum(times) - times, times) + 1
    outcome = (k == times[chain]) & faulty[chain]
    terms = {"k": k.astype(float), "log N": np.log(last[chain].astype(float))}
    names = _per_chain("family", family, n) if family is not None else np.array([""] * n)
    reference, *others = sorted(set(names.tolist()))
    terms |= {f"family {name}": (names == name)[chain].astype(float) for name in others}
    groups = {f"family {name!r}": (names == name)[chain] for name in (reference, *others)}
    if onset is not None:
        terms[f"k > {onset}"] = (k > onset).astype(float)
        groups |= {f"k > {onset}": k > onset, f"k <= {onset}": k <= onset}
    for name, rows in groups.items():
        if not outcome[rows].any():
            raise EstimateError(f"no fault with {name}: its hazard has no estimate; leave it out or measure more")
    left_out = tuple(name for name, values in terms.items() if np.ptp(values) == 0)
    kept = {name: values for name, values in terms.items() if name not in left_out}
    centred = [values - values.mean() for values in kept.values()]
    ids = _per_chain("problems", problems, n) if problems is not None else np.arange(n)
    clusters = np.unique(ids, return_inverse=True)[1][chain]
    design = np.column_stack([np.ones(chain.size), *centred])
    model = sm.GLM(outcome.astype(float), design, family=sm.families.Binomial(link=links[link]()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of separation, which is looked for here
        result = model.fit(cov_type="cluster", cov_kwds={"groups": clusters})
    found, spread = result.params[1:], result.bse[1:]
    for name, b, values in zip(kept, found, centred, strict=True):
        if not result.converged or not np.isfinite(result.bse).all() or abs(b) * values.std() > SEPARATED:
            raise EstimateError(
                f"{name!r} tells faulty steps from right ones all but without error: it has no estimate"
            )
    estimates = {
        name: Estimate(float(b), float(b - Z * se), float(b + Z * se), int(clusters.max()) + 1, "1")
        for name, b, se in zip(kept, found, spread, strict=True)
    }
    p_values = dict(zip(kept, map(float, result.pvalues[1:]), strict=True))
    return Hazard(link, estimates, p_values, str(reference), left_out, int(chain.size), faults)


def onset_ratio(first: Sequence[int | None], steps: int | Sequence[int], onset: int) -> Estimate:
    """Hazard past step ``onset`` over the hazard up to it: faults for each step taken, and nothing else in the model.

    The interval is that of a ratio of two proportions (logarithm with half a fault added, Walter 1975); a step taken
    counts once, whichever chain it belongs to.

    Raises
    ------
    EstimateError
        As :func:`watched`; no fault up to ``onset``, or no step past it.

    Examples
    --------
    >>> print(onset_ratio([8, 16, 24, 40, None, None] * 20, 48, 24))
    0.625 [0.3867, 1.043] × (n=120)
    """
    from statsmodels.stats.proportion import confint_proportions_2indep

    times, faulty = watched(first, steps)
    early, late = int(np.minimum(times, onset).sum()), int(np.maximum(times - onset, 0).sum())
    faults = int((faulty & (times <= onset)).sum()), int((faulty & (times > onset)).sum())
    if not faults[0] or not late:
        raise EstimateError(f"{faults[0]} faults up to step {onset} and {late} steps past it: their ratio is unknown")
    value = faults[1] / late / (faults[0] / early)
    ends = confint_proportions_2indep(faults[1], late, faults[0], early, compare="ratio", method="log-adjusted")
    low, high = min(float(ends[0]), value), max(float(ends[1]), value)
    return Estimate(value, low, high, int(times.size), "×")


def _per_chain(name: str, values: Sequence[Any], n: int) -> np.ndarray:
    if len(values) != n:
        raise EstimateError(f"{n} chains and {len(values)} entries in {name}: give one per chain")
    return np.asarray(values)
