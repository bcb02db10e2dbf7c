"""Estimates: what is refused, and that the intervals cover the truth as often as they say, by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from o1lab import stats
from o1lab.errors import EstimateError
from o1lab.stats import Estimate

REAL = st.floats(-1e9, 1e9, allow_nan=False)


def binomial_floor(runs: int, nominal: float = 0.95) -> float:
    """Share of covering intervals below which chance alone explains it once in a thousand (exact binomial)."""
    from scipy.stats import binom

    return float(binom.ppf(0.001, runs, nominal)) / runs


@pytest.mark.parametrize("field", ["value", "low", "high"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None, "1", True])
def test_bounds_must_be_finite_numbers(field, bad):
    numbers = {"value": 1.0, "low": 0.0, "high": 2.0} | {field: bad}
    with pytest.raises(EstimateError, match=field):
        Estimate(**numbers, n=3, unit="s")


@pytest.mark.parametrize(("value", "low", "high"), [(3, 1, 2), (0, 1, 2), (1, 2, 0)])
def test_the_interval_holds_the_value(value, low, high):
    with pytest.raises(EstimateError, match="does not hold"):
        Estimate(value, low, high, 3, "s")


@pytest.mark.parametrize("n", [0, -1, 2.0, True, None])
def test_n_is_a_whole_number_of_observations(n):
    with pytest.raises(EstimateError, match="at least 1"):
        Estimate(1.0, 1.0, 1.0, n, "s")


def test_a_unit_is_needed():
    with pytest.raises(EstimateError, match="unit"):
        Estimate(1.0, 1.0, 1.0, 1, "")


def test_an_estimate_is_frozen_and_an_estimate_error_is_a_value_error():
    with pytest.raises(AttributeError):
        Estimate(1.0, 1.0, 1.0, 1, "s").value = 2.0
    assert issubclass(EstimateError, ValueError)


@given(REAL, st.floats(0, 1e6), st.floats(0, 1e6), st.floats(-1e3, 1e3))
def test_scaling_keeps_order_and_count(value, below, above, factor):
    scaled = Estimate(value, value - below, value + above, 5, "B").scaled(factor, "KiB")
    assert scaled.low <= scaled.value <= scaled.high
    assert (scaled.n, scaled.unit) == (5, "KiB")


def test_dictionary_and_text():
    estimate = Estimate(1.5, 1.0, 2.0, 4, "ms")
    assert Estimate(**estimate.to_dict()) == estimate
    assert str(estimate) == "1.5 [1, 2] ms (n=4)"


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (-1, 5), (6, 5)])
def test_no_proportion(successes, n):
    with pytest.raises(EstimateError):
        stats.proportion(successes, n)


def test_wilson_by_its_formula():
    z, n, k = 1.959963984540054, 40, 7
    centre = (k / n + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(k / n * (1 - k / n) / n + z * z / (4 * n * n))
    estimate = stats.proportion(k, n)
    assert estimate.low == pytest.approx(centre - half, abs=1e-12)
    assert estimate.high == pytest.approx(centre + half, abs=1e-12)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
def test_wilson_covers_about_95_per_cent_exactly_computed(share):
    from scipy.stats import binom

    n = 40
    intervals = [stats.proportion(k, n) for k in range(n + 1)]
    covered = sum(binom.pmf(k, n, share) for k, e in enumerate(intervals) if e.low <= share <= e.high)
    assert 0.92 < covered < 0.99  # a score interval covers 95 % on average, not at every share (Agresti & Coull 1998)


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_for_a_mean(count):
    with pytest.raises(EstimateError, match="at least two"):
        stats.mean([1.0] * count, "s")


def test_mean_covers_95_per_cent():
    random, runs = np.random.default_rng(1), 2000
    estimates = [stats.mean(random.normal(3.0, 2.0, size=8), "s") for _ in range(runs)]
    covered = np.mean([e.low <= 3.0 <= e.high for e in estimates])
    assert binomial_floor(runs) <= covered <= 0.97


@pytest.mark.parametrize("count", [0, 5])
def test_too_few_for_a_median(count):
    with pytest.raises(EstimateError, match="at least six"):
        stats.median([1.0] * count, "s")


@pytest.mark.parametrize("n", range(6, 60))
def test_the_median_interval_is_the_shortest_of_its_kind(n):
    from scipy.stats import binom

    estimate = stats.median([float(i) for i in range(1, n + 1)], "1")
    rank = int(estimate.low)  # the data are their own ranks
    assert estimate.high == n + 1 - rank
    assert 2 * binom.cdf(rank - 1, n, 0.5) <= 0.05, "covers at least 95 %"
    assert 2 * binom.cdf(rank, n, 0.5) > 0.05, "and one rank less would not"


def test_median_covers_a_skewed_law():
    random, runs = np.random.default_rng(2), 2000
    estimates = [stats.median(random.exponential(1.0, size=15), "s") for _ in range(runs)]
    covered = np.mean([e.low <= math.log(2) <= e.high for e in estimates])
    assert binomial_floor(runs) <= covered


def noisy(random, n: int, correlation: float) -> np.ndarray:
    error = random.normal(size=n)
    error[0] /= math.sqrt(1 - correlation**2)
    for i in range(1, n):
        error[i] += correlation * error[i - 1]
    return error


def share_covering(correlation: float, runs: int, n: int, draws: int = 199, truth: float = 0.3) -> float:
    random, x, found = np.random.default_rng(3), np.arange(n), 0
    for run in range(runs):
        estimate = stats.theil_sen(x, 5.0 + 0.3 * x + noisy(random, n, correlation), "B/s", draws=draws, seed=run)
        found += estimate.low <= truth <= estimate.high
    return found / runs


def test_a_line_without_noise_is_found_exactly():
    estimate = stats.theil_sen(range(10), [2.0 * i for i in range(10)], "B/s")
    assert (estimate.value, estimate.n) == (2.0, 10)
    assert estimate.low == pytest.approx(2.0)
    assert estimate.high == pytest.approx(2.0)


def test_one_wild_reading_does_not_move_the_slope():
    y = [2.0 * i for i in range(21)]
    y[10] = 1e6
    assert stats.theil_sen(range(21), y, "B/s").value == pytest.approx(2.0)


def test_a_long_series_is_averaged_in_groups_and_says_how_many_samples_it_had():
    x = np.arange(5000)
    estimate = stats.theil_sen(x, 2.0 * x + np.random.default_rng(5).normal(size=5000), "B/s")
    assert estimate.n == 5000
    assert estimate.low <= 2.0 <= estimate.high
    assert estimate.high - estimate.low < 1e-4


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_the_slope_covers_95_per_cent(correlation):
    runs = 200
    assert share_covering(correlation, runs, n=60) >= binomial_floor(runs)


def test_another_truth_is_not_covered():
    assert share_covering(0.6, 50, n=60, truth=0.6) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("correlation", "n", "measured"),
    # shares of 1000 series of 60 samples and 400 of 200, as the docstring says them
    [(0.0, 60, 0.95), (0.6, 60, 0.944), (0.9, 60, 0.916), (0.0, 200, 0.95), (0.6, 200, 0.955), (0.9, 200, 0.962)],
)
def test_the_slope_covers_what_its_docstring_says(correlation, n, measured):
    runs = 400 if n == 60 else 100
    covered = share_covering(correlation, runs, n)
    assert covered >= binomial_floor(runs, min(measured, 0.95))
    assert covered >= (0.93 if correlation < 0.9 else 0.9) - 2 * math.sqrt(0.95 * 0.05 / runs)


def test_correlated_noise_widens_the_interval():
    random = np.random.default_rng(6)
    widths = [
        np.median([e.high - e.low for e in (stats.theil_sen(range(60), noisy(random, 60, c), "1") for _ in range(20))])
        for c in (0.0, 0.9)
    ]
    assert widths[1] > 5 * widths[0]


@pytest.mark.parametrize(("x", "y"), [(range(7), range(7)), (range(9), range(8)), ([], [])])
def test_a_slope_needs_two_equal_series(x, y):
    with pytest.raises(EstimateError, match="at least 8"):
        stats.theil_sen(x, y, "B/s")


def test_the_seed_decides_the_interval():
    random = np.random.default_rng(4)
    y = random.normal(size=20)
    one, same, other = (stats.theil_sen(range(20), y, "1", draws=99, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_samples_at_one_place_have_no_slope():
    with pytest.raises(EstimateError, match="same place"):
        stats.theil_sen([3.0] * 9, range(9), "B/s")


def test_change_point_leaves_lines_flats_saws_and_staircases_whole():
    t, random = np.arange(200), np.random.default_rng(7)
    assert stats.change_point(5e8 + 65_536.5 * t) == 0
    assert stats.change_point([7.0] * 50) == 0
    assert stats.change_point(list(range(8))) == 0
    assert stats.change_point(t % 13) == 0
    assert stats.change_point(2e6 * np.floor(0.07 * t)) == 0
    cuts = [stats.change_point(3.0 * t + random.normal(size=200)) for _ in range(50)]
    assert sum(cut > 0 for cut in cuts) <= 2


@pytest.mark.parametrize(("turn", "noise"), [(20, 0.0), (60, 0.0), (60, 3.0), (120, 3.0)])
def test_change_point_finds_where_a_filling_ends(turn, noise):
    t, random = np.arange(200.0), np.random.default_rng(8)
    cut = stats.change_point(np.minimum(t, turn) + noise * random.normal(size=200))
    assert abs(cut - turn) <= 5 * noise


def test_change_point_cuts_after_the_last_of_a_few_steps_and_keeps_a_fifth():
    t = np.arange(100)
    assert stats.change_point(1.0 * (t >= 10) + 3.0 * (t >= 47)) == 47
    assert stats.change_point(1.0 * (t >= 10) + 3.0 * (t >= 95)) == 10


def test_change_point_cuts_a_warm_up_but_not_the_leak_behind_it():
    t, random = np.arange(200.0), np.random.default_rng(9)
    y = 1000 * (1 - np.exp(-t / 10)) + 2.0 * t + random.normal(size=200)
    cut = stats.change_point(y)
    assert 20 <= cut <= 120
    late = stats.theil_sen(t[cut:], y[cut:], "1")
    assert late.low <= 2.0 <= late.high or late.value == pytest.approx(2.0, rel=0.02)
