"""Which curve the accuracy of chains follows as they get longer: three null models, compared on chains held out.

* *geometric*: the same error at every step, ``p ** k`` with ``p = exp(-1 / scale)``;
* *Weibull*: an error rate that rises (shape above 1) or falls with the step, ``exp(-(k / scale) ** shape)``;
* *Raju–Netrapalli*: noise that adds up over ``q`` error directions until it crosses a threshold (arXiv 2601.14175),
  ``1 - Γ(q/2, q / (2 r k²)) / Γ(q/2)``: a flat shoulder, then a tail that falls as ``k ** -q``. For large ``q`` it is
  a cliff at ``k = r ** -0.5``.

>>> print(RAJU_NETRAPALLI.share(128, 0.0001, 6.0).round(3), RAJU_NETRAPALLI.share(1, 0.0001, 6.0))
0.278 1.0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from o1lab.chains.survival import per_step, watched
from o1lab.errors import EstimateError
from o1lab.stats import Estimate, mean

if TYPE_CHECKING:
    import pandas as pd

FEWEST_FAULTS = 10
"""Fewest faults that curves are told apart by."""
TINY = 1e-300
SHAPES = (0.05, 20.0)
"""Weibull shapes that are looked for."""


@dataclass(frozen=True)
class Form:
    """A family of survival curves.

    Attributes
    ----------
    name, names
        Of the curve, of its parameters (all positive).
    wrong : callable
        ``wrong(k, *parameters)``, share of chains wrong by step ``k`` (precise near 0).
    share : callable
        ``share(k, *parameters)``, share right through step ``k`` (precise near 0).
    starts : callable
        ``starts(k)`` for a typical step of the first fault, a list of parameters to begin fitting with.
    """

    name: str
    names: tuple[str, ...]
    wrong: Callable[..., Any] = field(repr=False)
    share: Callable[..., Any] = field(repr=False)
    starts: Callable[[float], list[tuple[float, ...]]] = field(repr=False)


def _hazard(k: Any, scale: float, shape: float = 1.0) -> Any:
    return (np.asarray(k, dtype=float) / scale) ** shape


def _ratio(k: Any, r: float, q: float) -> Any:
    with np.errstate(divide="ignore", over="ignore"):
        return q / (2 * r * np.asarray(k, dtype=float) ** 2)


def _upper(k: Any, r: float, q: float) -> Any:
    from scipy.special import gammaincc

    return gammaincc(q / 2, _ratio(k, r, q))


def _lower(k: Any, r: float, q: float) -> Any:
    from scipy.special import gammainc

    return gammainc(q / 2, _ratio(k, r, q))


def _wrong(k: Any, scale: float, shape: float = 1.0) -> Any:
    return -np.expm1(-_hazard(k, scale, shape))


def _right(k: Any, scale: float, shape: float = 1.0) -> Any:
    return np.exp(-_hazard(k, scale, shape))


GEOMETRIC = Form("geometric", ("scale",), _wrong, _right, lambda k: [(k,)])
WEIBULL = Form("Weibull", ("scale", "shape"), _wrong, _right, lambda k: [(k, 1.0)])
RAJU_NETRAPALLI = Form(
    "Raju–Netrapalli", ("r", "q"), _upper, _lower, lambda k: [(k**-2.0, q) for q in (0.7, 4.0, 20.0)]
)
FORMS = (GEOMETRIC, WEIBULL, RAJU_NETRAPALLI)


@dataclass(frozen=True)
class Curve:
    """A fitted curve: ``parameters`` by name, ``log_likelihood`` on the chains that it was fitted to."""

    form: Form
    parameters: dict[str, float]
    log_likelihood: float

    def at(self, step: float | Sequence[float]) -> Any:
        """Share of chains right through ``step``: a float, or an array for several."""
        share = self.form.share(step, *self.parameters.values())
        return float(share) if np.ndim(share) == 0 else np.asarray(share)


@dataclass(frozen=True)
class Curves:
    """Curves fitted to the same chains, compared on chains held out.

    Attributes
    ----------
    curves : dict of str to Curve
        Fitted to all chains, by name.
    held_out : dict of str to float
        Sum of log-likelihoods of chains, each under the fit to the other folds; more is better.
    behind : dict of str to Estimate
        Nats per problem that a curve loses against the best one; not given for the best.
    best : str
        Name of the curve with the greatest ``held_out``.
    """

    curves: dict[str, Curve]
    held_out: dict[str, float]
    behind: dict[str, Estimate]
    best: str
    n: int

    @property
    def decided(self) -> bool:
        """Whether the best one is better than each other one beyond its interval."""
        return all(loss.low > 0 for loss in self.behind.values())

    def frame(self, steps: Sequence[int]) -> pd.DataFrame:
        """Share right through each of ``steps``, one column per curve."""
        import pandas as pd

        return pd.DataFrame({"step": list(steps), **{name: curve.at(steps) for name, curve in self.curves.items()}})

    def __str__(self) -> str:
        rows = [f"{self.n} chains: {self.best} {'is best' if self.decided else 'is ahead, not beyond chance'}"]
        for name, curve in self.curves.items():
            parameters = ", ".join(f"{key} {value:.4g}" for key, value in curve.parameters.items())
            loss = f", behind by {self.behind[name]} nats per problem" if name in self.behind else ""
            rows.append(f"  {name:<16} {parameters}; held-out log-likelihood {self.held_out[name]:.1f}{loss}")
        return "\n".join(rows)


@dataclass(frozen=True)
class ConstantHazard:
    """Likelihood-ratio test of a constant hazard against a discrete Weibull.

    ``shape`` is 1 if the hazard is constant, above 1 if it rises with the step; ``p_value`` of the test.
    """

    shape: Estimate
    p_value: float
    per_step: Estimate
    faults: int

    def __str__(self) -> str:
        return f"hazard shape {self.shape} (1 is constant), p = {self.p_value:.2g}; per step right {self.per_step}"


def fit_curves(
    first: Sequence[int | None],
    steps: int | Sequence[int],
    *,
    by: str = "step",
    problems: Sequence[Any] | None = None,
    folds: int = 5,
    seed: int = 0,
) -> Curves:
    """Fit the three curves and compare them by the likelihood of problems held out.

    Parameters
    ----------
    first, steps
        As in :mod:`o1lab.chains.survival`.
    by : str
        ``"step"``: the curve is the survival to the first fault, of chains alike (one length, or a hazard that does
        not depend on it). ``"length"``: it is whole-chain accuracy as a function of the length ``steps``, two lengths
        at least; the step of the fault is not used.
    problems
        One id per chain: a problem is held out with all its chains. Default: every chain its own.
    folds : int
        From 2.

    Raises
    ------
    EstimateError
        As :func:`o1lab.chains.survival.watched`; fewer than 10 faults, fewer problems than folds, unknown ``by``.
    """
    times, faulty = watched(first, steps)
    if by not in ("step", "length"):
        raise EstimateError(f"by={by!r} is neither 'step' nor 'length'")
    if faulty.sum() < FEWEST_FAULTS:
        raise EstimateError(f"{faulty.sum()} faults do not tell curves apart: {FEWEST_FAULTS} at least")
    if by == "length":
        times = watched([None] * times.size, steps)[0]
        if np.unique(times).size < 2:
            raise EstimateError(f"all chains have length {times[0]}: by='length' needs two lengths at least")
    if problems is not None and len(problems) != times.size:
        raise EstimateError(f"{times.size} chains and {len(problems)} problems: give one per chain")
    ids = np.unique(np.arange(times.size) if problems is None else np.asarray(problems), return_inverse=True)[1]
    count = int(ids.max()) + 1
    if not 2 <= folds <= count:
        raise EstimateError(f"folds={folds!r} must be from 2 to the number of problems, {count}")
    fold = (np.random.default_rng(seed).permutation(count) % folds)[ids]
    curves, losses = {}, {}
    for form in FORMS:
        held = np.empty(times.size)
        for out in range(folds):
            curve = _fit(form, times[fold != out], faulty[fold != out], by)
            held[fold == out] = _terms(form, list(curve.parameters.values()), times, faulty, by)[fold == out]
        curves[form.name] = _fit(form, times, faulty, by)
        losses[form.name] = np.bincount(ids, weights=held)
    best = max(losses, key=lambda name: losses[name].sum())
    behind = {name: mean(losses[best] - each, "1") for name, each in losses.items() if name != best}
    return Curves(curves, {name: float(each.sum()) for name, each in losses.items()}, behind, best, int(times.size))


def constant_hazard(first: Sequence[int | None], steps: int | Sequence[int]) -> ConstantHazard:
    """Test that the hazard of the first fault is the same at every step, by the likelihood of whole steps.

    Chains of several lengths or families whose hazards differ look like a falling hazard: the weak ones go first.
    Test one at a time. Simulated size at a nominal 5 %, 1,024 chains of 128 steps: 5.1 % (a continuous Weibull on
    whole steps has 12 %).

    Raises
    ------
    EstimateError
        As :func:`o1lab.chains.survival.watched`; fewer than 10 faults; all of them at one step.
    """
    times, faulty = watched(first, steps)
    if faulty.sum() < FEWEST_FAULTS:
        raise EstimateError(f"{faulty.sum()} faults say nothing of their hazard's shape: {FEWEST_FAULTS} at least")
    if np.unique(times[faulty]).size < 2:
        raise EstimateError(f"all faults are at step {times[faulty][0]}: their hazard has no shape to estimate")
    bent, p_value = _likelihood_ratio(times, faulty)
    shape = bent.parameters["shape"]
    ends = [_profile_end(times, faulty, bent, bound) for bound in SHAPES]
    interval = Estimate(shape, min(ends[0], shape), max(ends[1], shape), int(times.size), "1")
    return ConstantHazard(interval, p_value, per_step(first, steps), int(faulty.sum()))


def _likelihood_ratio(times: np.ndarray, faulty: np.ndarray) -> tuple[Curve, float]:
    """The Weibull curve, and the p-value of the likelihood-ratio test that its shape is 1."""
    from scipy.stats import chi2

    bent, faults, taken = _fit(WEIBULL, times, faulty, "step"), int(faulty.sum()), int(times.sum())
    flat = faults * math.log(faults / taken) + (taken - faults) * math.log1p(-faults / taken)
    return bent, float(chi2.sf(max(0.0, 2 * (bent.log_likelihood - flat)), 1))


def _profile_end(times: np.ndarray, faulty: np.ndarray, bent: Curve, bound: float) -> float:
    """The shape on the way to ``bound`` whose best log-likelihood is 1.92 below the greatest."""
    from scipy.optimize import brentq
    from scipy.stats import chi2

    half, top = float(chi2.ppf(0.95, 1)) / 2, bent.parameters["shape"]

    def short(log_shape: float) -> float:
        shape = math.exp(log_shape)
        form = Form("", ("scale",), lambda k, s: _wrong(k, s, shape), lambda k, s: _right(k, s, shape),
                    lambda k: [(bent.parameters["scale"],)])  # fmt: skip
        return bent.log_likelihood - _fit(form, times, faulty, "step").log_likelihood - half

    if short(math.log(bound)) < 0:
        return bound
    return math.exp(brentq(short, *sorted((math.log(top), math.log(bound))), xtol=1e-4))


def _terms(form: Form, parameters: Sequence[float], times: np.ndarray, faulty: np.ndarray, by: str) -> np.ndarray:
    """Log-likelihood of each chain."""
    wrong, share = form.wrong(times, *parameters), form.share(times, *parameters)
    if by == "step":
        before = np.maximum(times - 1, 0)
        rise, fall = wrong - form.wrong(before, *parameters), form.share(before, *parameters) - share
        wrong = np.where(wrong < 0.5, rise, fall)
    return np.log(np.maximum(np.where(faulty, wrong, share), TINY))


def _fit(form: Form, times: np.ndarray, faulty: np.ndarray, by: str) -> Curve:
    """Greatest likelihood over positive parameters, from each of the form's starts."""
    from scipy.optimize import minimize

    kinds, weight = np.unique(np.stack([times, faulty]), axis=1, return_counts=True)
    at, wrong = kinds[0], kinds[1].astype(bool)

    def minus(logs: np.ndarray) -> float:
        return -float(weight @ _terms(form, np.exp(np.clip(logs, -60, 60)), at, wrong, by))

    typical = float(times.sum() / max(1, faulty.sum()))
    options = {"xatol": 1e-5, "fatol": 1e-6, "maxiter": 2000}
    found = [minimize(minus, np.log(start), method="Nelder-Mead", options=options) for start in form.starts(typical)]
    best = min(found, key=lambda result: result.fun)
    return Curve(form, dict(zip(form.names, np.exp(best.x).tolist(), strict=True)), -float(best.fun))
