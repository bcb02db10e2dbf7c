"""Survival to the first fault: against statsmodels, by simulation, and at values that can be worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from o1lab.chains import curves
from o1lab.chains.curves import GEOMETRIC, RAJU_NETRAPALLI, WEIBULL, constant_hazard, fit_curves
from o1lab.chains.hazard import fit_hazard, onset_ratio
from o1lab.chains.survival import kaplan_meier, per_step, predict, watched
from o1lab.errors import EstimateError
from o1lab.stats import Estimate, proportion


def geometric(n: int, right: float, steps: int, seed: int) -> list[int | None]:
    """First faults of chains with the same error at every step."""
    drawn = np.random.default_rng(seed).geometric(1 - right, n)
    return [int(step) if step <= steps else None for step in drawn]


def from_curve(form, parameters, n: int, steps: int, seed: int) -> list[int | None]:
    """First faults drawn from a survival curve."""
    share = np.asarray(form.share(np.arange(1, steps + 1), *parameters))
    drawn = np.random.default_rng(seed).random(n)
    places = np.searchsorted(-share, -drawn)
    return [int(place) + 1 if place < steps else None for place in places]


CHAINS = st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=2, max_size=40)


@settings(deadline=None, max_examples=60)
@given(CHAINS)
def test_the_curve_is_that_of_statsmodels(chains):
    from statsmodels.duration.survfunc import SurvfuncRight

    first = [time if faulty else None for time, faulty in chains]
    mine = kaplan_meier(first, [time for time, _ in chains])
    theirs = SurvfuncRight([time for time, _ in chains], [int(faulty) for _, faulty in chains])
    for time, share, error in zip(theirs.surv_times, theirs.surv_prob, theirs.surv_prob_se, strict=True):
        estimate = mine.at(int(time))
        assert estimate.value == pytest.approx(share)
        if 0 < share < 1 and error > 0:
            spread = 1.959964 * error / (share * abs(math.log(share)))
            assert estimate.low == pytest.approx(share ** math.exp(spread), abs=1e-6)
            assert estimate.high == pytest.approx(share ** math.exp(-spread), abs=1e-6)
        assert 0 <= estimate.low <= share <= estimate.high <= 1


def test_without_censoring_before_the_end_it_is_the_plain_share():
    first = geometric(500, 0.98, 64, 1)
    curve = kaplan_meier(first, 64)
    assert curve.at(64).value == pytest.approx(sum(fault is None for fault in first) / 500)
    assert curve.at(10).value == pytest.approx(sum(fault is None or fault > 10 for fault in first) / 500)


def test_chains_cut_off_early_do_not_bias_the_curve():
    random = np.random.default_rng(3)
    first, steps = [], []
    for fault in geometric(4000, 0.99, 10_000, 2):
        end = int(random.integers(10, 129))
        first.append(fault if fault and fault <= end else None)
        steps.append(end)
    assert kaplan_meier(first, steps).at(100).value == pytest.approx(0.99**100, abs=0.03)
    naive = sum(fault is None or fault > 100 for fault in first) / 4000
    assert naive > 0.99**100 + 0.05


def test_the_interval_covers_the_truth_as_often_as_it_says():
    random, hits, runs = np.random.default_rng(4), 0, 400
    for _ in range(runs):
        ends = random.integers(8, 65, size=80)
        drawn = random.geometric(0.02, size=80)
        first = [int(fault) if fault <= end else None for fault, end in zip(drawn, ends, strict=True)]
        estimate = kaplan_meier(first, ends.tolist()).at(8)
        hits += estimate.low <= 0.98**8 <= estimate.high
    assert hits / runs > 0.95 - 3.3 * math.sqrt(0.95 * 0.05 / runs)


def test_none_faulty_and_all_faulty_have_wilson_intervals():
    assert kaplan_meier([None] * 20, 5).at(5) == proportion(20, 20)
    curve = kaplan_meier([1, 2, 2, 3], 3)
    assert (curve.at(3).value, curve.at(3).low) == (0, 0)
    assert curve.at(3).high > 0.5
    assert curve.half == 2
    assert kaplan_meier([None, None, 5], 8).half is None


def test_before_the_first_end_all_are_right_and_past_the_last_nothing_is_known():
    curve = kaplan_meier([3, None], 8)
    assert curve.at(2) == proportion(2, 2)
    assert curve.at(8).value == 0.5
    for step in (0, 9, -1):
        with pytest.raises(EstimateError, match=f"step={step}"):
            curve.at(step)
    assert curve.frame()["at_risk"].tolist() == [2, 1]
    assert "1 faults" in str(curve)


@pytest.mark.parametrize(
    ("first", "steps", "named"),
    [
        ([], 4, "no chains"),
        ([1, None], [4], "2 first faults and 1"),
        ([5], 4, "at step 5, past the 4"),
        ([0], 4, "first fault=0"),
        ([1.0], 4, "first fault=1.0"),
        ([True], 4, "first fault=True"),
        ([None], 0, "steps=0"),
        ([None, None], [3, None], "chain 1: steps=None"),
        ([None], [math.nan], "steps=nan"),
    ],
)
def test_chains_that_cannot_be_are_refused_by_name(first, steps, named):
    for call in (watched, kaplan_meier, per_step, fit_hazard, fit_curves, constant_hazard):
        with pytest.raises(EstimateError, match=named):
            call(first, steps)


def test_a_constant_error_alone_predicts_the_fall_from_32_to_128_steps():
    predicted = predict(proportion(846, 1024), 32, 128)
    assert predicted.value == pytest.approx((846 / 1024) ** 4)
    assert round(predict(Estimate(0.826, 0.826, 0.826, 1, "1"), 32, 128).value, 3) == 0.466
    assert predicted.low < 0.466 < predicted.high
    back = predict(predict(Estimate(0.9, 0.8, 0.95, 5, "1"), 16, 64), 64, 16)
    assert (back.low, back.value, back.high) == pytest.approx((0.8, 0.9, 0.95))


@pytest.mark.parametrize(
    ("accuracy", "steps", "to", "named"),
    [((0.9, 0.8, 1.1), 1, 8, "no share"), ((-0.1, -0.2, 0.1), 1, 8, "no share"), ((0.9, 0.8, 1.0), 0, 8, "steps=0"),
     ((0.9, 0.8, 1.0), 8, math.inf, "to=inf"), ((0.9, 0.8, 1.0), True, 8, "steps=True")],
)  # fmt: skip
def test_predictions_from_nonsense_are_refused(accuracy, steps, to, named):
    with pytest.raises(EstimateError, match=named):
        predict(Estimate(*accuracy, 10, "1"), steps, to)


def test_the_interval_of_the_prediction_covers_what_then_happens():
    hits = sum(
        (made := predict(per_step(geometric(300, 0.994, 32, seed), 32), 1, 128)).low <= 0.994**128 <= made.high
        for seed in range(300)
    )
    assert hits / 300 > 0.95 - 3.3 * math.sqrt(0.95 * 0.05 / 300)


def chains_by_length(n: int, seed: int, rate=lambda k, length, family: 0.01, lengths=(8, 32, 96)):
    """First faults, lengths and families of chains with a given hazard."""
    random = np.random.default_rng(seed)
    first, steps, families = [], [], []
    for number in range(n):
        length, family = lengths[number % len(lengths)], "ab"[number // len(lengths) % 2]
        chances = np.array([rate(k, length, family) for k in range(1, length + 1)])
        hit = np.flatnonzero(random.random(length) < chances)
        first.append(int(hit[0]) + 1 if hit.size else None)
        steps.append(length)
        families.append(family)
    return first, steps, families


@pytest.mark.parametrize("link", ["cloglog", "logit"])
def test_length_and_family_are_told_from_the_step(link):
    first, steps, families = chains_by_length(
        3000, 0, lambda k, length, family: 0.0006 * length**0.8 * (2 if family == "b" else 1)
    )
    model = fit_hazard(first, steps, family=families, link=link, onset=48)
    for term, truth in {"log N": 0.8, "family b": math.log(2), "k": 0.0, "k > 48": 0.0}.items():
        assert model.terms[term].low <= truth <= model.terms[term].high, term
    assert model.terms["log N"].low > 0.4
    assert model.ratio("log N", math.log(4)).value == pytest.approx(math.exp(math.log(4) * model.terms["log N"].value))
    assert "log N" in str(model)
    assert model.reference == "a"


def test_a_jump_past_an_onset_is_found_where_there_is_one():
    first, steps, _ = chains_by_length(1500, 1, lambda k, *_: 0.002 if k <= 48 else 0.01)
    jump = fit_hazard(first, steps, onset=48).ratio("k > 48")
    assert jump.low > 1.5
    assert jump.low <= 5 <= jump.high


def test_the_same_problems_worked_twice_say_no_more():
    first, steps, families = chains_by_length(600, 2)
    once = fit_hazard(first, steps, family=families)
    twice = fit_hazard(first * 2, steps * 2, family=families * 2, problems=list(range(600)) * 2)
    naive = fit_hazard(first * 2, steps * 2, family=families * 2)

    def width(model):
        return model.terms["log N"].high - model.terms["log N"].low

    assert width(twice) == pytest.approx(width(once), rel=0.01)
    assert width(naive) == pytest.approx(width(once) / math.sqrt(2), rel=0.01)
    assert twice.terms["log N"].n == 600


def test_a_single_length_leaves_its_term_out():
    model = fit_hazard(geometric(300, 0.98, 32, 0), 32)
    assert model.left_out == ("log N",)
    assert list(model.terms) == ["k"]
    assert "does not vary: log N" in str(model)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"link": "probit"}, "probit"),
        ({"family": ["a"] * 3}, "3 entries in family"),
        ({"problems": [1]}, "1 entries in problems"),
        ({"family": ["a"] * 299 + ["b"]}, "no fault with family 'b'"),
        ({"onset": 500}, "no fault with k > 500"),
        ({"lengths": [1, 2]}, "2 numbers of steps"),
    ],
)
def test_hazards_that_have_no_estimate_are_refused(change, named):
    first = [*geometric(299, 0.98, 32, 0), None]
    with pytest.raises(EstimateError, match=named):
        fit_hazard(first, 32, **change)
    with pytest.raises(EstimateError, match="3 faults are too few"):
        fit_hazard([1, 2, 3, None], 4)
    with pytest.raises(EstimateError, match="no term"):
        fit_hazard(first, 32).ratio("family z")


@pytest.mark.parametrize("link", ["cloglog", "logit"])
@pytest.mark.parametrize("first", [[1] * 20 + [None] * 20, [8] * 20 + [None] * 20, [8] * 15])
def test_a_term_that_separates_has_no_estimate(first, link):
    with pytest.raises(EstimateError, match="'k' tells faulty steps"):
        fit_hazard(first, 8, link=link)


def test_raju_and_netrapalli_is_their_formula_with_its_limits():
    from scipy.special import gamma, gammainc
    from scipy.stats import chi2

    share = RAJU_NETRAPALLI.share
    r, q, c = 0.0003, 5.0, 40.0
    assert share(c, r, q) == pytest.approx(1 - chi2.sf(q / (r * c * c), q))
    assert share(0, r, q) == 1
    assert share(1, r, q) == pytest.approx(1, abs=1e-12)
    assert float(RAJU_NETRAPALLI.wrong(np.float64(8), r, q)) == pytest.approx(chi2.sf(q / (r * 64), q), rel=1e-9)
    assert share(2e5, r, q) / share(1e5, r, q) == pytest.approx(2**-q, rel=1e-3)  # power-law tail
    assert share(1e6, r, q) == pytest.approx((q / (2 * r * 1e12)) ** (q / 2) / gamma(q / 2 + 1), rel=1e-3)
    cliff = 1 / math.sqrt(r)
    assert share(0.9 * cliff, r, 4000.0) > 0.999
    assert share(1.1 * cliff, r, 4000.0) < 0.001
    assert gammainc(1.0, 0.5) == pytest.approx(float(share(1, 2.0, 2.0)))
    shares = np.asarray(share(np.arange(1, 400), r, q))
    assert (np.diff(shares) <= 0).all()


def test_the_three_curves_through_the_articles_two_points_part_at_256_steps():
    from scipy.optimize import fsolve

    def off(logs):
        return [float(RAJU_NETRAPALLI.share(n, *np.exp(logs))) - a for n, a in ((32, 0.826), (128, 0.479))]

    parameters = np.exp(fsolve(off, [math.log(1 / 128**2), 0.0]))
    assert float(RAJU_NETRAPALLI.share(256, *parameters)) == pytest.approx(0.356, abs=0.001)
    assert math.isclose(0.479 ** (256 / 128), 0.229, abs_tol=0.001)


@pytest.mark.parametrize(
    ("form", "parameters"), [(GEOMETRIC, (160.0,)), (WEIBULL, (170.0, 1.6)), (RAJU_NETRAPALLI, (0.00006, 5.0))]
)
def test_the_curve_that_the_chains_were_drawn_from_is_found(form, parameters):
    first = from_curve(form, parameters, 1500, 192, 5)
    found = fit_curves(first, 192)
    assert found.behind.keys() == {"geometric", "Weibull", "Raju–Netrapalli"} - {found.best}
    if form is GEOMETRIC:
        assert found.behind.get("Weibull", found.behind.get("geometric")).value < 0.003
        assert not found.best.startswith("Raju")
    else:
        assert found.best == form.name
        assert found.decided
    fitted = found.curves[form.name].parameters
    assert list(fitted.values()) == pytest.approx(list(parameters), rel=0.25)
    assert found.curves[form.name].at(64) == pytest.approx(float(form.share(64, *parameters)), abs=0.03)
    assert found.frame([1, 64]).shape == (2, 4)
    assert found.best in str(found)


def test_whole_chain_accuracy_by_length_follows_its_own_curve():
    lengths = np.repeat([8, 16, 32, 64, 128, 256], 400)
    right = np.asarray(RAJU_NETRAPALLI.share(lengths, 0.00006, 5.0))
    wrong = np.random.default_rng(6).random(lengths.size) > right
    first = [1 if bad else None for bad in wrong]  # where it went wrong is not used
    found = fit_curves(first, lengths.tolist(), by="length")
    assert found.best == "Raju–Netrapalli"
    assert found.decided
    assert found.curves["Raju–Netrapalli"].at(128) == pytest.approx(
        float(RAJU_NETRAPALLI.share(128, 0.00006, 5.0)), abs=0.06
    )
    with pytest.raises(EstimateError, match="all chains have length 64"):
        fit_curves([1] * 20, 64, by="length")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"by": "token"}, "token"),
        ({"folds": 1}, "folds=1"),
        ({"folds": 999}, "folds=999"),
        ({"problems": [1]}, "1 problems"),
    ],
)
def test_comparisons_that_cannot_be_made_are_refused(change, named):
    with pytest.raises(EstimateError, match=named):
        fit_curves(geometric(200, 0.98, 64, 0), 64, **change)
    with pytest.raises(EstimateError, match="1 faults do not tell"):
        fit_curves([1, None], 4)


def test_the_same_problem_is_never_on_both_sides_of_the_split():
    first = geometric(100, 0.98, 64, 8)
    alone = fit_curves(first, 64)
    doubled = fit_curves(first * 2, 64, problems=list(range(100)) * 2)
    assert doubled.held_out["geometric"] == pytest.approx(2 * alone.held_out["geometric"], rel=1e-6)
    assert doubled.behind.popitem()[1].n == 100


@pytest.mark.parametrize(("right", "steps"), [(0.994, 128), (0.9, 16)])
def test_a_constant_hazard_is_rejected_in_at_most_7_percent_at_a_nominal_5(right, steps):
    """1,024 chains a run, 400 runs: chance alone takes a true 5 % above 7 % in three of a hundred."""
    rejected = sum(
        curves._likelihood_ratio(*watched(geometric(1024, right, steps, seed), steps))[1] <= 0.05 for seed in range(400)
    )
    assert 0.02 <= rejected / 400 <= 0.07


@pytest.mark.parametrize("shape", [0.6, 1.6])
def test_a_hazard_that_falls_or_rises_is_seen(shape):
    found = constant_hazard(from_curve(WEIBULL, (128.0, shape), 500, 128, 1), 128)
    assert found.p_value < 0.001
    assert found.shape.low <= shape <= found.shape.high
    assert (found.shape.high < 1) == (shape < 1)


def test_the_test_and_the_interval_of_the_shape_agree():
    for seed in range(12):
        found = constant_hazard(geometric(300, 0.99, 96, seed), 96)
        assert (found.p_value > 0.05) == (found.shape.low <= 1 <= found.shape.high)
    assert "1 is constant" in str(found)


def test_a_hazard_without_a_shape_is_refused():
    with pytest.raises(EstimateError, match="all faults are at step 7"):
        constant_hazard([7] * 12 + [None] * 5, 9)
    with pytest.raises(EstimateError, match="9 faults"):
        constant_hazard(list(range(1, 10)), 9)


def test_the_ratio_of_hazards_counts_faults_by_steps_taken():
    # steps 1 and 2: 1 + 4 · 2 taken, 2 faults; steps 3 and 4: 1 + 2 · 2 taken, 1 fault
    found = onset_ratio([1, 2, 3, None, None], 4, 2)
    assert found.value == pytest.approx((1 / 5) / (2 / 9))
    assert found.low < found.value < found.high
    with pytest.raises(EstimateError, match="0 faults up to step 2"):
        onset_ratio([3, None], 4, 2)
    with pytest.raises(EstimateError, match="0 steps past it"):
        onset_ratio([1, 2], 4, 2)
    assert onset_ratio([1, None, None], 4, 2).value == 0


def test_the_ratio_of_hazards_covers_the_true_one():
    inside = 0
    for seed in range(200):
        rates = np.where(np.arange(1, 129) <= 96, 0.006, 0.012)
        wrong = np.random.default_rng(seed).random((512, 128)) < rates
        found = onset_ratio([int(row.argmax()) + 1 if row.any() else None for row in wrong], 128, 96)
        inside += found.low <= 2 <= found.high
    assert inside >= 182  # 95 % of 200, less 3 standard deviations
