"""Paired comparisons: against independent computations, and their size, coverage and power over all outcomes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from o1lab import paired
from o1lab.errors import EstimateError


def arms(both: int, lost: int, gained: int, neither: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two arms with these counts, in a random order."""
    a = np.repeat([True, True, False, False], [both, lost, gained, neither])
    b = np.repeat([True, False, True, False], [both, lost, gained, neither])
    order = np.random.default_rng(seed).permutation(a.size)
    return a[order], b[order]


UNHURRIED = settings(deadline=None, max_examples=60)
COUNTS = st.tuples(*[st.integers(0, 40)] * 4).filter(lambda counts: sum(counts) > 0)


@UNHURRIED
@given(COUNTS, st.integers(0, 9))
def test_counts_come_back_whatever_the_order(counts, seed):
    assert paired.pairs(*arms(*counts, seed=seed)) == paired.Pairs(*counts)


@UNHURRIED
@given(COUNTS)
def test_swapping_the_arms_turns_the_difference_and_keeps_the_p_values(counts):
    a, b = arms(*counts)
    here, there = paired.paired_difference(a, b), paired.paired_difference(b, a)
    assert here.value == -there.value
    assert here.low == pytest.approx(-there.high, abs=1e-9)
    assert paired.mcnemar(a, b).p_value == paired.mcnemar(b, a).p_value
    assert paired.tost_paired(a, b, 0.1).p_value == pytest.approx(paired.tost_paired(b, a, 0.1).p_value)


@UNHURRIED
@given(COUNTS)
def test_the_interval_holds_the_value_and_stays_within_one(counts):
    estimate = paired.paired_difference(*arms(*counts))
    assert -1 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert estimate.high - estimate.low > 0


@pytest.mark.parametrize(("lost", "gained", "p"), [(0, 0, 1.0), (0, 5, 2 / 32), (1, 9, 22 / 1024), (5, 5, 1.0)])
def test_mcnemar_is_the_exact_binomial(lost, gained, p):
    assert paired.mcnemar(*arms(7, lost, gained, 3)).p_value == pytest.approx(p)


def test_mcnemar_agrees_with_statsmodels():
    from statsmodels.stats.contingency_tables import mcnemar

    for lost, gained in [(3, 14), (20, 31), (1, 1), (40, 12)]:
        theirs = mcnemar([[50, lost], [gained, 9]], exact=True).pvalue
        assert paired.mcnemar(*arms(50, lost, gained, 9)).p_value == pytest.approx(theirs)


@pytest.mark.parametrize(("gained", "lost", "n", "delta"), [(18, 2, 64, 0.1), (5, 9, 300, -0.01), (0, 4, 50, 0.02)])
def test_the_score_takes_the_likeliest_share_under_the_difference(gained, lost, n, delta):
    from scipy.optimize import minimize_scalar

    def minus_log_likelihood(share):  # share of lost pairs, given that gained - lost = delta
        more, rest = share + delta, 1 - 2 * share - delta
        return -(gained * math.log(more) + lost * math.log(share) + (n - gained - lost) * math.log(rest))

    bounds = (max(0.0, -delta) + 1e-9, (1 - delta) / 2 - 1e-9)
    share = minimize_scalar(minus_log_likelihood, bounds=bounds, method="bounded", options={"xatol": 1e-10}).x
    spread = math.sqrt(n * (2 * share + delta - delta**2))
    assert paired._score(gained, lost, n, delta) == pytest.approx((gained - lost - n * delta) / spread, rel=1e-4)


def test_the_ends_of_the_interval_are_where_the_score_test_turns():
    estimate = paired.paired_difference(*arms(30, 2, 18, 14))
    assert paired._score(18, 2, 64, estimate.low) == pytest.approx(1.959964, abs=1e-5)
    assert paired._score(18, 2, 64, estimate.high) == pytest.approx(-1.959964, abs=1e-5)


@pytest.mark.parametrize("n", [64, 256, 1024])
@pytest.mark.parametrize(
    ("discordance", "difference"), [(0.02, 0.0), (0.02, 0.02), (0.1, 0.05), (0.3, 0.0), (0.3, 0.2)]
)
def test_the_interval_covers_the_truth(n, discordance, difference):
    """Drawn at random and counted: 4,000 data sets, the share that covers within chance of at least 94.3 %."""
    chances = [(discordance + difference) / 2, (discordance - difference) / 2, 1 - discordance]
    drawn = np.random.default_rng(n).multinomial(n, chances, size=4000)
    scores = paired._score(drawn[:, 0], drawn[:, 1], n, difference)
    assert (np.abs(scores) <= 1.959964).mean() > 0.943 - 3.3 * math.sqrt(0.05 * 0.95 / 4000)


@pytest.mark.parametrize("n", [128, 512, 1024])
@pytest.mark.parametrize("margin", [0.01, 0.02, 0.05])
@pytest.mark.parametrize("times", [1.0, 1.5, 4.0])
def test_equivalence_is_claimed_of_arms_that_differ_by_the_margin_in_at_most_5_percent(n, margin, times):
    assert paired.tost_power(n, margin, margin * times, difference=margin) <= 0.05
    assert paired.tost_power(n, margin, margin * times, difference=-margin) <= 0.05


def test_the_sum_over_outcomes_is_what_a_simulation_counts():
    n, margin, more, less = 512, 0.03, 0.04, 0.01
    drawn = np.random.default_rng(5).multinomial(n, [more, less, 1 - more - less], size=20_000)
    counted = (paired._tost_p(drawn[:, 0], drawn[:, 1], n, margin) <= 0.05).mean()
    summed = paired.tost_power(n, margin, more + less, difference=more - less)
    assert counted == pytest.approx(summed, abs=4 * math.sqrt(summed * (1 - summed) / 20_000))


def test_without_the_correction_equivalence_would_be_claimed_too_often():
    from scipy.stats import binom, norm

    gained = np.arange(40)
    p = norm.cdf(paired._score(gained, 0, 1024, 0.01))
    assert binom.pmf(gained, 1024, 0.01)[p <= 0.05].sum() > 0.055


def test_equal_arms_are_shown_equal_and_different_ones_are_not():
    assert paired.tost_paired(*arms(500, 2, 2, 520), margin=0.01).equivalent
    assert not paired.tost_paired(*arms(500, 2, 22, 500), margin=0.01).equivalent
    assert not paired.tost_paired(*arms(30, 0, 0, 34), margin=0.01).equivalent  # too few to say


def test_connor_and_the_power_of_both_tests_at_their_sample_sizes():
    known = {(0.05, 0.1): 312, (0.05, 0.2): 626, (0.05, 0.3): 940, (0.05, 0.4): 1254, (0.02, 0.2): 3923}
    assert {pair: paired.mcnemar_n(*pair) for pair in known} == known
    n = paired.mcnemar_n(0.05, 0.2)
    drawn = np.random.default_rng(1).multinomial(n, [0.125, 0.075, 0.8], size=3000)
    p = [paired.mcnemar(*arms(n - g - s, s, g, 0)).p_value for g, s in drawn[:400, :2]]
    assert np.mean(np.asarray(p) <= 0.05) == pytest.approx(0.78, abs=0.07)
    for margin, discordance in [(0.01, 0.02), (0.02, 0.05)]:
        n = paired.tost_n(margin, discordance)
        assert 0.8 <= paired.tost_power(n, margin, discordance) < 0.83
        assert paired.tost_power(int(n * 0.9), margin, discordance) < 0.8
    assert paired.tost_n(0.02, 0.05, difference=0.01) > 2 * paired.tost_n(0.02, 0.05)


@UNHURRIED
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_what_statsmodels_says(p_values):
    from statsmodels.stats.multitest import multipletests

    np.testing.assert_allclose(paired.holm(p_values), multipletests(p_values, method="holm")[1], atol=1e-12)


def test_holm_keeps_names_in_their_order_and_takes_none():
    assert list(paired.holm({"b": 0.5, "a": 0.001})) == ["b", "a"]
    assert paired.holm({}) == {}
    assert paired.holm([]) == []


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ([1, 0], [1], "2 and 1"),
        ([], [], "at least one"),
        ([[1, 0]], [[1, 0]], "shape"),
        ([1, 2], [1, 0], "2 is no outcome"),
        ([1.0, math.nan], [1, 0], "nan is no outcome"),
        (["yes", "no"], [1, 0], "'yes'"),
        ([1, None], [1, 0], "None is no outcome"),
        ([0.5, 1], [1, 0], "0.5"),
    ],
)
def test_arms_that_are_none_are_refused_by_name(first, second, named):
    for call in (paired.pairs, paired.mcnemar, paired.paired_difference, lambda a, b: paired.tost_paired(a, b, 0.01)):
        with pytest.raises(EstimateError, match=named):
            call(first, second)


@pytest.mark.parametrize("margin", [0, -0.01, 1, math.nan, True, None, "0.01"])
def test_a_margin_lies_between_0_and_1(margin):
    with pytest.raises(EstimateError, match="margin"):
        paired.tost_paired([1], [1], margin)
    with pytest.raises(EstimateError, match="margin"):
        paired.tost_n(margin, 0.1)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: paired.holm([0.1, 1.2]), "1.2"),
        (lambda: paired.holm({"x": -0.1}), "'x'"),
        (lambda: paired.holm([math.nan]), "nan"),
        (lambda: paired.mcnemar_n(0.0, 0.1), "difference=0.0"),
        (lambda: paired.mcnemar_n(0.2, 0.1), "difference=0.2"),
        (lambda: paired.mcnemar_n(0.05, 1.1), "discordance"),
        (lambda: paired.mcnemar_n(0.05, 0.1, power=1), "power"),
        (lambda: paired.tost_n(0.01, 0.1, difference=0.01), "no number of pairs"),
        (lambda: paired.tost_n(0.1, 0.01, difference=0.05), "exceeds"),
        (lambda: paired.tost_power(0, 0.1, 0.1), "n=0"),
        (lambda: paired.tost_paired([1], [1], 0.1, alpha=0.5), "alpha"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(call, named):
    with pytest.raises(EstimateError, match=named):
        call()


def test_results_read_as_sentences():
    a, b = arms(500, 0, 0, 524)
    assert str(paired.tost_paired(a, b, 0.01)).startswith("equal within ±0.01: difference 0 [-0.0037")
    assert "p < 0.0001" in str(paired.mcnemar(*arms(0, 0, 30, 0)))
