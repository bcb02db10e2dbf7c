"""A detector of the first fault that sees only the model: how sure it was of the tokens of each step it wrote.

Every step up to the first fault is one observation (right, or faulty), and a logistic model of them is a discrete
hazard ``h``. So the first fault is at step k with probability ``h_k`` times the product of ``1 - h_j`` over the steps
before, and the detector names the most probable step, or none. Nothing is tuned by hand; chains are split by problem.
What it is given is in :mod:`o1lab.chains.features`.

>>> import numpy as np
>>> random = np.random.default_rng(0)
>>> first = [1 + number % 6 if number % 2 else None for number in range(200)]
>>> marks = [random.normal(size=(8, 1)) + 6.0 * (np.arange(1, 9) == (fault or 0))[:, None] for fault in first]
>>> detection = evaluate(marks, first)
>>> detection.auroc.value > 0.99, detection.exact.value > 0.8
(True, True)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from o1lab.chains.survival import Z, watched
from o1lab.errors import EstimateError
from o1lab.stats import Estimate, proportion

FEWEST_FAULTS = 10
"""Fewest faulty chains that a detector is fitted to, or judged on."""


@dataclass(frozen=True)
class Detector:
    """A fitted logistic model of "this step is the first fault".

    Attributes
    ----------
    weights, centre, scale : ndarray, shape (features,)
        For features with ``centre`` subtracted, divided by ``scale``.
    bias : float
    """

    weights: np.ndarray
    bias: float
    centre: np.ndarray = field(repr=False)
    scale: np.ndarray = field(repr=False)

    def hazard(self, features: np.ndarray) -> np.ndarray:
        """Probability of each step of one chain to be the first fault if there was none before; shape (steps,)."""
        rows = np.asarray(features, dtype=float)
        if rows.ndim != 2 or rows.shape[1] != self.weights.size:
            raise EstimateError(f"features of shape {rows.shape} do not fit {self.weights.size} weights")
        return 1 / (1 + np.exp(-np.clip((rows - self.centre) / self.scale @ self.weights + self.bias, -700, 700)))

    def first(self, features: np.ndarray, faulty: bool = False) -> int | None:
        """Most probable step (1-based) of the first fault of one chain, or ``None``.

        With ``faulty`` it is known that there is one, and the answer is a step.
        """
        hazard = np.clip(self.hazard(features), 1e-300, 1 - 1e-16)
        still = np.concatenate([[0.0], np.cumsum(np.log1p(-hazard))])
        at = np.log(hazard) + still[:-1]
        step = int(np.argmax(at)) + 1
        return step if faulty or at[step - 1] > still[-1] else None


@dataclass(frozen=True)
class Detection:
    """How well a detector finds first faults of problems that it was not fitted to.

    Attributes
    ----------
    auroc : Estimate
        Of single steps up to the first fault: a faulty step ranks above a right one (interval clustered by problem).
    exact : Estimate
        Share of all test chains judged exactly: the first faulty step, or none where there is none.
    given_faulty : Estimate
        Share of faulty test chains whose step is named exactly if it is told that there is a fault.
    found, alarms : Estimate or None
        Share of faulty chains judged exactly without being told; share of right chains in which it sees a fault.
    detector : Detector
    scores, faulty : ndarray, shape (steps judged,)
        Hazard of every step up to the first faults, and whether it is one: what the AUROC is of.
    said : tuple of int or None
        The step named for each test chain without being told, in their order.
    """

    auroc: Estimate
    exact: Estimate
    given_faulty: Estimate
    found: Estimate
    alarms: Estimate | None
    detector: Detector = field(repr=False)
    scores: np.ndarray = field(repr=False)
    faulty: np.ndarray = field(repr=False)
    said: tuple[int | None, ...] = field(repr=False)

    def roc(self) -> tuple[np.ndarray, np.ndarray]:
        """False-alarm rate and hit rate of single steps at every threshold, from (0, 0) to (1, 1)."""
        order = np.argsort(-self.scores, kind="stable")
        ends = np.append(np.flatnonzero(np.diff(self.scores[order])), order.size - 1)
        hits, alarms = (np.cumsum(side[order])[ends] / side.sum() for side in (self.faulty, ~self.faulty))
        return np.concatenate([[0.0], alarms]), np.concatenate([[0.0], hits])

    def __str__(self) -> str:
        rows = [
            f"AUROC per step {self.auroc}",
            f"exact step of the first fault, told that there is one: {self.given_faulty}; not told: {self.found}",
            f"chains judged exactly, right ones with them: {self.exact}",
        ]
        return "\n".join(rows + ([f"right chains in which it sees a fault: {self.alarms}"] if self.alarms else []))


def fit(features: Sequence[np.ndarray], first: Sequence[int | None], *, ridge: float = 1.0) -> Detector:
    """Fit a detector on chains: penalised logistic regression by Newton's method.

    Parameters
    ----------
    features : sequence of ndarray, shape (steps, features) each
        One array per chain, one row per produced step, e.g. of
        :func:`o1lab.chains.features.step_features`; hidden-state probes are further columns.
    first
        1-based step of the first fault of each chain, or ``None``. Later steps of a faulty chain are not used: what a
        model says after it has gone wrong is not about a *first* fault.
    ridge : float
        Half of this times the sum of squared weights (of standardised features) is the penalty; above 0.

    Raises
    ------
    EstimateError
        Lengths or shapes that do not fit, features that are not finite, a fault past the last step, fewer than 10
        faulty chains or no right step.
    """
    if not np.isfinite(ridge) or ridge <= 0:
        raise EstimateError(f"ridge={ridge!r} must be above 0")
    rows, faulty, _ = _stacked(features, first)
    _enough(faulty)
    centre, scale = rows.mean(0), rows.std(0)
    scale = np.where(scale > 0, scale, 1.0)
    design = np.column_stack([np.ones(len(rows)), (rows - centre) / scale])
    penalty = np.diag([0.0] + [float(ridge)] * rows.shape[1])
    weights = np.zeros(design.shape[1])
    weights[0] = np.log(faulty.mean() / (1 - faulty.mean()))

    def loss(w: np.ndarray) -> float:
        z = design @ w
        return float(np.logaddexp(0, z).sum() - z[faulty].sum() + w @ penalty @ w / 2)

    now = loss(weights)
    for _ in range(100):
        chance = 1 / (1 + np.exp(-np.clip(design @ weights, -700, 700)))
        slope = design.T @ (chance - faulty) + penalty @ weights
        curve = (design * (chance * (1 - chance))[:, None]).T @ design + penalty
        step = np.linalg.lstsq(curve, slope, rcond=None)[0]
        size = 1.0
        while size > 1e-6 and loss(weights - size * step) > now:
            size /= 2
        weights = weights - size * step
        before, now = now, loss(weights)
        if before - now < 1e-9 * max(1.0, abs(now)):
            break
    return Detector(weights[1:], float(weights[0]), centre, scale)


def evaluate(
    features: Sequence[np.ndarray],
    first: Sequence[int | None],
    *,
    problems: Sequence[Any] | None = None,
    train: float = 0.5,
    ridge: float = 1.0,
    seed: int = 0,
) -> Detection:
    """Fit a detector on some problems and judge it on the others.

    Parameters
    ----------
    features, first, ridge
        As :func:`fit`.
    problems
        One id per chain: all chains of a problem fall on the same side. Default: every chain its own.
    train : float
        Share of problems to fit to, between 0 and 1; ``seed`` draws which.
    """
    if not 0 < train < 1:
        raise EstimateError(f"train={train!r} must lie between 0 and 1")
    ids = _ids(features, first, problems)
    order = np.random.default_rng(seed).permutation(int(ids.max()) + 1)
    fitted = np.isin(ids, order[: max(1, round(train * order.size))])
    train_at, test_at = np.flatnonzero(fitted), np.flatnonzero(~fitted)
    detector = fit([features[i] for i in train_at], [first[i] for i in train_at], ridge=ridge)
    return _judged([features[i] for i in test_at], [first[i] for i in test_at], ids[test_at], [detector] * test_at.size,
                   detector)  # fmt: skip


def crossfit(
    features: Sequence[np.ndarray],
    first: Sequence[int | None],
    *,
    problems: Sequence[Any] | None = None,
    folds: int = 5,
    ridge: float = 1.0,
    seed: int = 0,
) -> Detection:
    """Judge every chain by a detector that was fitted to other problems only.

    Problems are dealt into ``folds`` parts, those with a fault evenly (else a part rich in faults would be judged by a
    detector that expects few); each part is judged by a detector of all the others. The detector in the
    result is fitted to everything, for use, and judged nothing here.

    Parameters
    ----------
    features, first, problems, ridge, seed
        As :func:`evaluate`.
    folds : int
        At least 2.

    Examples
    --------
    >>> random = np.random.default_rng(0)
    >>> first = [1 + number % 6 if number % 2 else None for number in range(100)]
    >>> marks = [random.normal(size=(8, 1)) + 6.0 * (np.arange(1, 9) == (fault or 0))[:, None] for fault in first]
    >>> found = crossfit(marks, first)
    >>> len(found.said), found.auroc.value > 0.99
    (100, True)
    """
    if isinstance(folds, bool) or not isinstance(folds, int) or folds < 2:
        raise EstimateError(f"folds={folds!r} must be a whole number, at least 2")
    ids = _ids(features, first, problems)
    faulty = np.zeros(int(ids.max()) + 1, dtype=bool)
    faulty[ids[[fault is not None for fault in first]]] = True
    order = np.random.default_rng(seed).permutation(faulty.size)
    part = np.empty(faulty.size, dtype=int)
    part[order[np.argsort(faulty[order], kind="stable")]] = np.arange(faulty.size) % folds
    part = part[ids]
    detectors: list[Any] = [None] * len(first)
    for fold in np.unique(part):
        others = np.flatnonzero(part != fold)
        detector = fit([features[i] for i in others], [first[i] for i in others], ridge=ridge)
        for place in np.flatnonzero(part == fold):
            detectors[place] = detector
    return _judged(features, first, ids, detectors, fit(features, first, ridge=ridge))


def _ids(features: Sequence[np.ndarray], first: Sequence[int | None], problems: Sequence[Any] | None) -> np.ndarray:
    """A number for the problem of each chain."""
    if problems is not None and len(problems) != len(first):
        raise EstimateError(f"{len(first)} chains and {len(problems)} problems: give one per chain")
    _stacked(features, first)
    return np.unique(np.arange(len(first)) if problems is None else np.asarray(problems), return_inverse=True)[1]


def _judged(
    features: Sequence[np.ndarray], first: Sequence[int | None], ids: np.ndarray, detectors: Sequence[Detector],
    detector: Detector,
) -> Detection:  # fmt: skip
    """What the detector of each chain, which has not seen its problem, makes of it."""
    _, faulty, chain = _stacked(features, first)
    _enough(faulty)
    times = np.bincount(chain)
    scores = np.concatenate([d.hazard(f[:t]) for d, f, t in zip(detectors, features, times, strict=True)])
    area = auroc(scores, faulty, ids[chain])
    tested = list(zip(detectors, features, first, strict=True))
    named = tuple(each.first(rows) for each, rows, _ in tested)
    said = [name == fault for name, fault in zip(named, first, strict=True)]
    told = [each.first(rows, faulty=True) == fault for each, rows, fault in tested if fault is not None]
    found = [hit for hit, fault in zip(said, first, strict=True) if fault is not None]
    calm = [hit for hit, fault in zip(said, first, strict=True) if fault is None]
    alarms = proportion(calm.count(False), len(calm)) if calm else None
    shares = (proportion(sum(hits), len(hits)) for hits in (said, told, found))
    return Detection(area, *shares, alarms, detector, scores, faulty, named)


def auroc(scores: Any, positive: Any, clusters: Any = None) -> Estimate:
    """Area under the ROC curve (ties count half) with an interval for observations in clusters (Obuchowski 1997).

    The interval is symmetric in the log-odds of the area. Simulated coverage of the nominal 95 %: 94.5 % with 60
    clusters of 10 like scores and an area of 0.84, where a percentile bootstrap over clusters has 91.5 %.

    Parameters
    ----------
    scores, positive, clusters : array, shape (n,)
        Score of each observation, whether it is a positive, and what it belongs to (default: each its own).

    Returns
    -------
    Estimate
        ``n`` counts clusters.

    Examples
    --------
    >>> auroc([0.1, 0.4, 0.35, 0.8], [False, False, True, True]).value
    0.75
    """
    from scipy.stats import rankdata

    values, truth = np.asarray(scores, dtype=float), np.asarray(positive, dtype=bool)
    ids = np.arange(values.size) if clusters is None else np.asarray(clusters)
    if values.ndim != 1 or not values.shape == truth.shape == ids.shape:
        raise EstimateError(f"scores {values.shape}, positives {truth.shape} and clusters {ids.shape} do not match")
    if not np.isfinite(values).all():
        raise EstimateError(f"a score is {values[~np.isfinite(values)][0]}: give finite numbers")
    if not truth.any() or truth.all():
        raise EstimateError(f"{int(truth.sum())} positives of {truth.size}: an AUROC needs both kinds")
    ids = np.unique(ids, return_inverse=True)[1]
    count, ranks, beaten = int(ids.max()) + 1, rankdata(values), np.empty(values.size)
    for side in (truth, ~truth):
        beaten[side] = (ranks[side] - rankdata(values[side])) / (~side).sum()
    beaten[~truth] = 1 - beaten[~truth]
    area = float(beaten[truth].mean())
    if area in (0.0, 1.0):
        fewest = min(np.unique(ids[side]).size for side in (truth, ~truth))
        end = proportion(round(area) * fewest, fewest)
        return Estimate(area, end.low, end.high, count, "1")
    weight = np.where(truth, 1 / truth.sum(), 1 / (~truth).sum())
    sums = np.bincount(ids, weights=(beaten - area) * weight)
    spread = float(np.sqrt((sums @ sums) * count / max(count - 1, 1))) / (area * (1 - area))
    odds = float(np.log(area / (1 - area)))
    low, high = (1 / (1 + np.exp(-(odds + sign * Z * spread))) for sign in (-1, 1))
    return Estimate(area, float(min(low, area)), float(max(high, area)), count, "1")


def _stacked(features: Sequence[np.ndarray], first: Sequence[int | None]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of all chains up to their first faults, whether each is one, and the chain's number."""
    if len(features) != len(first):
        raise EstimateError(f"features of {len(features)} chains and {len(first)} first faults: give one of each")
    arrays = [np.asarray(each, dtype=float) for each in features]
    for number, each in enumerate(arrays):
        if each.ndim != 2 or each.shape[1] != arrays[0].shape[-1] or not each.size:
            raise EstimateError(
                f"chain {number}: features of shape {each.shape}; give (steps, features), the same for all"
            )
        if not np.isfinite(each).all():
            raise EstimateError(f"chain {number}: a feature is {each[~np.isfinite(each)][0]}; leave such chains out")
    times, faulty = watched(first, [len(each) for each in arrays])
    ends = np.cumsum(times) - 1
    truth = np.zeros(int(times.sum()), dtype=bool)
    truth[ends] = faulty
    rows = np.concatenate([each[:time] for each, time in zip(arrays, times, strict=True)])
    return rows, truth, np.repeat(np.arange(times.size), times)


def _enough(faulty: np.ndarray) -> None:
    if faulty.sum() < FEWEST_FAULTS or faulty.all():
        raise EstimateError(
            f"{int(faulty.sum())} first faults and {int((~faulty).sum())} right steps on one side: a detector "
            f"needs {FEWEST_FAULTS} faults and some right steps on either"
        )
