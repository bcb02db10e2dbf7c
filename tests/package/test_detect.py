"""The article's cosine rule as written, and the detector that sees only how sure the model was."""

from __future__ import annotations

import dataclasses
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

from o1lab import chains, models
from o1lab.chains import cosine, detect, given, plant, render
from o1lab.chains.cosine import compare_rules, cosine_rule, cosine_scores
from o1lab.chains.detect import auroc, evaluate, fit
from o1lab.chains.evaluate import judge
from o1lab.chains.faults import localise
from o1lab.chains.features import observations, step_ends, step_features
from o1lab.errors import ChainError, EstimateError, ModelError, UnknownName
from o1lab.stats import proportion


def test_the_articles_example_breaks_at_step_3_in_both_readings():
    scores = [0.92, 0.87, 0.41, 0.33, 0.29]
    assert [cosine_rule(scores, reading) for reading in cosine.READINGS] == [3, 3]


@pytest.mark.parametrize(
    ("scores", "run", "earliest"),
    [
        ([], None, None),
        ([0.9, 0.5], None, None),
        ([0.4999], 1, 1),
        ([0.1, 0.9], None, 1),
        ([0.1, 0.9, 0.2, 0.3], 3, 1),
        ([-1.0, -0.5], 1, 1),
    ],
)
def test_walking_backwards_by_hand(scores, run, earliest):
    assert (cosine_rule(scores), cosine_rule(scores, "earliest")) == (run, earliest)


def test_the_rule_refuses_what_it_cannot_judge():
    with pytest.raises(ChainError, match="step 2 is nan"):
        cosine_rule([0.9, math.nan], "earliest")
    with pytest.raises(ChainError, match="forwards"):
        cosine_rule([0.9], "forwards")
    with pytest.raises(ChainError, match="no cosine"):
        cosine.cosine([1.0, 2.0], [1.0])


def test_cosines_of_bags_and_vectors():
    bag = cosine.one_hot_bag
    assert cosine.cosine(bag("1 2 3"), bag("3 2 1")) == pytest.approx(1)  # order is not seen
    assert cosine.cosine(bag("1 2 3"), bag("1 2 4")) == pytest.approx(2 / 3)
    assert cosine.cosine(bag("5"), bag("7")) == 0
    assert cosine.cosine(np.array([3.0, 4.0]), [-3.0, -4.0]) == pytest.approx(-1)
    assert cosine.cosine({}, {"a": 1.0}) == 0


def digits(text: str) -> tuple:
    sample = chains.make("arithmetic", 4, 1, seed=0, variant="digits")[0]
    return sample, render.parse(sample, text or sample.gold)


def test_what_is_missing_or_cannot_be_read_scores_0():
    sample, parsed = digits("")
    assert cosine_scores(sample, parsed) == pytest.approx([1, 1, 1, 1])
    words = sample.gold.split()
    assert cosine_scores(sample, render.parse(sample, " ".join(words[:12]))) == pytest.approx([1, 0, 0, 0])
    extra = render.parse(sample, f"{sample.gold} {sample.gold}")
    assert len(cosine_scores(sample, extra)) == 4


def test_the_comparison_counts_what_the_rule_finds_and_what_it_cannot_see():
    sample, gold = digits("")
    words = sample.gold.split()
    slip, label = list(words), list(words)
    right = words[13:16]
    other = [str((int(digit) + 5) % 10) for digit in right]
    slip[13:16] = other if not set(other) & set(right) else ["9" if "9" not in right else "8"] * 3
    label[8] = "s511"
    parsed = [gold, *(render.parse(sample, " ".join(each)) for each in (slip, label, words[:16]))]
    found = compare_rules([sample] * 4, parsed, reading="earliest")
    kinds = [localise(sample, each).kind for each in parsed[1:]]
    assert kinds == ["arithmetic", "label", "stopped early"]
    assert (found.exact.value, found.missed.value) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert {kind: share.value for kind, share in found.kinds.items()} == {
        "arithmetic": 0,
        "label": 1,
        "stopped early": 0,
    }
    assert found.alarms.value == 0
    assert found.early.value + found.late.value + found.exact.value + found.missed.value == pytest.approx(1)
    assert "label, not seen: 1" in str(found)
    words[8:16] = [*label[8:13], *slip[13:16]]
    words[0] = "s511"  # not seen at step 1, and a break that is seen at step 2
    assert compare_rules([sample], [render.parse(sample, " ".join(words))], reading="earliest").late.value == 1
    run = compare_rules([sample] * 2, parsed[:2], reading="run")
    assert run.missed.value == 1  # the chain is fine again at its end
    with pytest.raises(EstimateError, match="no chain has a fault"):
        compare_rules([sample], [gold])
    with pytest.raises(EstimateError, match="2 samples, 1 chains"):
        compare_rules([sample] * 2, [gold])


def test_a_models_hidden_states_embed_a_state():
    embed = cosine.hidden_state(models.load("tiny", device="cpu", dtype="float32"))
    assert embed("1 2 3").shape == (64,)
    assert cosine.cosine(embed("1 2 3"), embed("1 2 3")) == pytest.approx(1)
    assert cosine.cosine(embed("1 2 3"), embed("9 9 9")) < 0.999
    sample, gold = digits("")
    assert cosine_scores(sample, gold, embed) == pytest.approx([1, 1, 1, 1])
    with pytest.raises(ChainError, match="layer=9"):
        cosine.hidden_state(models.load("tiny", device="cpu"), layer=9)("1")


def synthetic(n: int, apart: float, seed: int, steps: int = 12):
    """Chains whose faulty step has its one feature shifted by ``apart`` standard deviations; half are right."""
    random = np.random.default_rng(seed)
    first = [int(random.integers(1, steps + 1)) if random.random() < 0.5 else None for _ in range(n)]
    features = [random.normal(size=(steps, 1)) for _ in range(n)]
    for rows, fault in zip(features, first, strict=True):
        if fault:
            rows[fault - 1] += apart
    return features, first


@pytest.mark.parametrize("apart", [0.5, 1.5, 3.0])
def test_the_auroc_is_the_known_one(apart):
    """Two normals ``apart`` have an AUROC of Φ(apart / √2)."""
    found = evaluate(*synthetic(1200, apart, 1))
    assert found.auroc.low <= NormalDist().cdf(apart / math.sqrt(2)) <= found.auroc.high
    assert found.auroc.high - found.auroc.low < 0.1


def test_shuffled_faults_cannot_be_detected():
    hits = 0
    for seed in range(20):
        features, first = synthetic(300, 3.0, seed)
        shuffled = [first[place] for place in np.random.default_rng(seed).permutation(len(first))]
        area = evaluate(features, shuffled, seed=seed).auroc
        hits += area.low <= 0.5 <= area.high
    assert hits >= 16  # 95 % of 20 is 19; fewer than 16 happens by chance in 3 of 1,000


def test_the_interval_of_the_auroc_covers_the_truth_although_steps_of_a_chain_are_alike():
    truth, clustered, naive, runs = NormalDist().cdf(1.0), 0, 0, 400
    for seed in range(runs):
        random = np.random.default_rng(seed)
        ids, positive = np.repeat(np.arange(60), 10), np.repeat(random.random(60) < 0.5, 10)
        scores = np.repeat(random.normal(size=60), 10) + positive * math.sqrt(2) + 1e-9 * random.normal(size=600)
        some, alone = auroc(scores, positive, ids), auroc(scores, positive)
        clustered += some.low <= truth <= some.high
        naive += alone.low <= truth <= alone.high
    assert clustered / runs > 0.95 - 3.3 * math.sqrt(0.95 * 0.05 / runs)
    assert naive / runs < 0.6


def test_a_perfect_area_still_has_an_interval():
    estimate = auroc([1.0, 2.0, 3.0, 4.0], [False, False, True, True])
    assert (estimate.value, estimate.high) == (1, 1)
    assert estimate.low == proportion(2, 2).low


def test_auroc_is_the_share_of_pairs():
    random = np.random.default_rng(2)
    scores, positive = random.integers(0, 6, 80).astype(float), random.random(80) < 0.4
    up, down = scores[positive][:, None], scores[~positive][None, :]
    assert auroc(scores, positive).value == pytest.approx(((up > down) + 0.5 * (up == down)).mean())


def test_the_exact_step_is_named_and_right_chains_are_left_alone():
    found = evaluate(*synthetic(600, 9.0, 3))
    assert found.given_faulty.value > 0.99
    assert found.found.value > 0.97
    assert found.alarms.value < 0.03
    assert found.exact.value > 0.97
    assert "AUROC per step" in str(found)
    blind = evaluate(*synthetic(600, 0.0, 3))
    assert blind.given_faulty.low <= 1 / 12 + 0.06
    assert blind.exact.value == pytest.approx(0.5, abs=0.12)  # it says none: half of the chains have none


def test_what_comes_after_the_first_fault_changes_nothing():
    features, first = synthetic(300, 2.0, 4)
    spoiled = [rows.copy() for rows in features]
    for rows, fault in zip(spoiled, first, strict=True):
        rows[slice(fault, None) if fault else slice(0, 0)] = 1e6
    one, other = fit(features, first), fit(spoiled, first)
    np.testing.assert_allclose(one.weights, other.weights)
    assert evaluate(features, first).auroc == evaluate(spoiled, first).auroc


def test_all_chains_of_a_problem_are_on_one_side_of_the_split():
    """Features that name the problem, faults that depend on the problem alone: only a leak would find them."""
    random = np.random.default_rng(5)
    marks = random.normal(size=(40, 30))
    which = np.repeat(np.arange(40), 6)
    fault = [1 if random.random() < 0.5 else None for _ in range(40)]
    features, first = [marks[p][None, :] for p in which], [fault[p] for p in which]
    kept = evaluate(features, first, problems=which.tolist(), ridge=0.01)
    leaky = evaluate(features, first, ridge=0.01)
    assert leaky.auroc.value > 0.9
    assert kept.auroc.value < 0.8
    assert kept.auroc.n == 20


def test_the_most_probable_step_is_that_of_a_first_fault():
    detector = detect.Detector(np.array([1.0]), 0.0, np.zeros(1), np.ones(1))

    def rows(*hazards):
        return np.array([[math.log(h / (1 - h))] for h in hazards])

    assert detector.hazard(rows(0.6, 0.9)) == pytest.approx([0.6, 0.9])
    assert detector.first(rows(0.6, 0.9)) == 1  # 0.6 against 0.4 × 0.9
    assert detector.first(rows(0.3, 0.9)) == 2  # 0.3 against 0.7 × 0.9
    assert detector.first(rows(0.2, 0.3)) is None  # 0.8 × 0.7
    assert detector.first(rows(0.2, 0.3), faulty=True) == 2


def test_the_fit_is_the_penalised_maximum_and_follows_the_scale():
    features, first = synthetic(400, 1.0, 6)
    wide = [np.column_stack([rows[:, 0] * 1000 - 7, np.ones(len(rows))]) for rows in features]
    one, other = fit(features, first), fit(wide, first)
    np.testing.assert_allclose(one.hazard(features[0]), other.hazard(wide[0]), rtol=1e-6)
    (rows, faulty, _), one = detect._stacked(features, first), fit(features, first, ridge=50.0)

    def loss(weight, bias):
        z = (rows[:, 0] - one.centre[0]) / one.scale[0] * weight + bias
        return np.logaddexp(0, z).sum() - z[faulty].sum() + 50 * weight**2 / 2

    best = loss(one.weights[0], one.bias)
    assert all(
        loss(one.weights[0] + dw, one.bias + db) > best for dw, db in [(0.01, 0), (-0.01, 0), (0, 0.01), (0, -0.01)]
    )


def test_perfect_separation_has_finite_weights():
    features, first = synthetic(200, 1e4, 7)
    detector = fit(features, first)
    assert np.isfinite(detector.weights).all()
    assert [detector.first(rows) for rows in features] == first


def test_step_features_take_the_worst_token_of_each_step():
    made = step_features([5, 1, 4, 9], [0.1, 0.2, 0.7, 0.3], [1, 3], top1=[0.9, 0.5, 0.75, 0.1])
    np.testing.assert_allclose(made, [[5, math.log(0.1), math.log(9)], [1, math.log(0.7), 0]])
    assert np.isfinite(step_features([0.0], [0.0], [1], top1=[1.0])).all()
    made = step_features([5, 1, 4, 9], [0.1, 0.2, 0.7, 0.3], [1, 3], surprise=[0.5, 3, 2, 8])
    np.testing.assert_allclose(made, [[5, math.log(0.1), 0.5], [1, math.log(0.7), 3]])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (([1.0], [1.0, 2.0], [1]), "shapes"),
        (([1.0], [1.0], [2]), "from 1 to 1"),
        (([1.0, 1.0], [1.0, 1.0], [2, 1]), "ascending"),
        (([1.0], [1.0], []), "ascending"),
        (([-1.0], [1.0], [1]), "margin=-1.0"),
        (([1.0], [math.nan], [1]), "entropy=nan"),
        (([1.0], [1.0], [1], [1.5]), "top1=1.5"),
        (([1.0], [1.0], [1], None, [-0.5]), "surprise=-0.5"),
    ],
)
def test_features_of_nonsense_are_refused_by_name(arguments, named):
    with pytest.raises(EstimateError, match=named):
        step_features(*arguments)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"first": [1, None]}, "40 chains and 2"),
        ({"first": [99] + [None] * 39}, "past the 12"),
        ({"first": [None] * 40}, "0 first faults"),
        ({"features": [np.zeros((12, 1))] * 39 + [np.zeros((12, 2))]}, "chain 39"),
        ({"features": [np.full((12, 1), math.nan)] * 40}, "a feature is nan"),
        ({"features": [np.zeros((0, 1))] * 40}, "chain 0"),
        ({"ridge": 0}, "ridge=0"),
    ],
)
def test_a_detector_of_nonsense_is_refused_by_name(change, named):
    features, first = synthetic(40, 1.0, 8)
    given = {"features": features, "first": first} | change
    with pytest.raises(EstimateError, match=named):
        fit(**given)
    with pytest.raises(EstimateError, match=named):
        evaluate(**given)


def test_splits_and_areas_of_nonsense_are_refused_by_name():
    features, first = synthetic(60, 1.0, 9)
    for settings, named in (({"train": 1.0}, "train=1.0"), ({"problems": [1]}, "60 chains and 1")):
        with pytest.raises(EstimateError, match=named):
            evaluate(features, first, **settings)
    for scores, positive, named in (
        ([1, 2], [True], "match"),
        ([1, 2], [True, True], "both"),
        ([1, math.inf], [True, False], "inf"),
    ):
        with pytest.raises(EstimateError, match=named):
            auroc(scores, positive)
    with pytest.raises(EstimateError, match="do not fit 1 weights"):
        fit(features, first).hazard(np.zeros((3, 2)))


def result(sample, text: str, **scores):
    """A result as evaluate gives it."""
    return judge(sample, {"text": text, "ended": "stop", **scores}, "tokens")


def test_observations_of_results():
    samples = chains.make("hops", 3, 4, seed=1)
    gold = samples[0].gold.split()
    wrong = " ".join([*gold[:3], "s500", *gold[4:]])
    sure = {"margins": (9.0,) * 10, "entropies": (0.1,) * 10}  # the end mark is a token too
    results = [
        result(samples[0], samples[0].gold, **sure),
        result(samples[0], wrong, **sure),
        result(samples[1], samples[1].gold),  # no scores
        result(samples[2], " ".join(samples[2].gold.split()[:6]), **sure),  # stopped early
        result(samples[3], f"{samples[3].gold} s3 r0 e1", margins=(9.0,) * 13, entropies=(0.1,) * 13),  # ran over
        result(samples[3], samples[3].gold, margins=(math.nan,) * 10, entropies=(0.1,) * 10),
        result(samples[3], f"e1 {samples[3].gold}", margins=(9.0,) * 11, entropies=(0.1,) * 11),  # junk before
    ]
    features, first, problems = observations(results)
    assert (first, problems) == ([None, 2], [samples[0].id] * 2)
    assert [each.shape for each in features] == [(3, 2), (3, 2)]
    assert step_ends("", render.parse(samples[0], "")) is None
    with pytest.raises(EstimateError, match="keep scores"):
        observations(results[2:])


@pytest.fixture(scope="module")
def tiny():
    """Random weights over the 256 bytes: a token a byte."""
    return models.load("tiny", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def reasoner():
    return models.load("reasoner", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def planted(reasoner):
    """What the reasoner shows of 96 pairs of chains."""
    return given.read(reasoner, plant.pairs(96, 8, 1), "tokens")


def test_each_step_of_a_text_has_the_surprise_of_its_own_tokens(tiny):
    texts = [text for text in plant.pairs(4, 2, style="language") if text.sample.variant != "hops"]
    seen = given.read(tiny, texts)
    assert (seen.texts, seen.left_out) == (texts, 0)
    for text, rows in zip(texts, seen.features, strict=True):
        before, chain = render.prompt(text.sample, "language").encode(), text.text.encode()
        ids = tiny.tokenizer(before.decode() + chain.decode()).input_ids
        assert len(ids) == len(before) + len(chain)
        known = tiny.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        surprise = [-float(known[place - 1, ids[place]]) for place in range(len(before), len(ids))]
        at = np.cumsum([0, *(len(line) for line in chain.splitlines(keepends=True))])  # the answer line is no step
        assert rows[:, 2] == pytest.approx([max(surprise[a:b]) for a, b in zip(at[:-2], at[1:-1], strict=True)])


def test_a_chat_template_frames_the_chain_as_the_answer(tiny, monkeypatch):
    texts = plant.pairs(1, 2, style="language")
    bare = given.read(tiny, texts).features
    monkeypatch.setattr(tiny.tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
    np.testing.assert_allclose(given.read(tiny, texts).features, bare)
    monkeypatch.setattr(tiny.tokenizer, "chat_template", "{% for m in messages %}Q {{ m.content }} A {% endfor %}")
    assert not np.allclose(given.read(tiny, texts).features, bare)


def test_right_and_faulty_texts_have_one_form():
    for style in render.STYLES:
        texts = plant.pairs(120, 5, 3, style)
        for right, faulty in zip(texts[::2], texts[1::2], strict=True):
            assert right.sample == faulty.sample
            assert (right.step, right.kind, localise(right.sample, right.text, style)) == (None, plant.RIGHT, None)
            assert localise(faulty.sample, faulty.text, style).step == faulty.step
            assert len(right.text.splitlines()) == len(faulty.text.splitlines())
            assert style == "language" or len(right.text.split()) == len(faulty.text.split())
        assert {text.kind for text in texts} == {plant.RIGHT, *plant.ALIKE}
    assert plant.pairs(3, 5, 3, "language") == texts[:6]
    with pytest.raises(ChainError, match="'loop' is planted in tokens only"):
        plant.plant(texts[0].sample, "loop", 3, chains.chance.Chance(0), "language")


def test_a_misused_premise_is_shown_in_language():
    reused = [text for text in plant.pairs(60, 5, 3, "language") if text.kind == "premise reuse"]
    for text in reused:
        if text.sample.task == "arithmetic":
            fault = localise(text.sample, text.text, "language")
            assert "premise reuse" in (fault.kind, *fault.also)
            line = text.text.splitlines()[text.step - 1]
            before = [text.sample.start, *(step.state for step in text.sample.steps[: text.step - 2])]
            said = chains.samples.FAMILIES[text.sample.variant].say_state
            assert line.split()[2] in {said(state) for state in before}


def test_the_reasoner_is_surprised_by_planted_faults(planted):
    found = detect.crossfit(planted.features, planted.first, problems=planted.problems)
    assert found.given_faulty.low > 0.8
    assert found.found.low > 0.8
    assert found.alarms.high < 0.2
    blind = detect.crossfit([rows[:, :2] for rows in planted.features], planted.first, problems=planted.problems)
    assert blind.given_faulty.high < 0.5  # what stands there is not yet seen in margins and entropies


def test_faults_dealt_to_other_chains_are_not_found(planted):
    dealt = [planted.first[k] for k in np.random.default_rng(0).permutation(len(planted.first))]
    control = detect.crossfit(planted.features, dealt, problems=planted.problems)
    assert control.given_faulty.low < 1 / 8 < control.given_faulty.high + 0.05
    assert control.auroc.low < 0.5 < control.auroc.high + 0.05


def test_chains_of_one_family(planted):
    hops = planted.of("hops")
    assert len(hops.features) == len(hops.texts) == 48
    assert {problem.split("-")[0] for problem in hops.problems} == {"hops"}


def test_chains_with_logits_that_are_no_numbers_are_left_out_and_counted(tiny, monkeypatch):
    texts, forward = plant.pairs(1, 2, style="language"), tiny.model.forward
    calls = iter([math.nan, 0.0])

    def spoiled(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits + next(calls, math.nan)
        return out

    monkeypatch.setattr(tiny.model, "forward", spoiled)
    seen = given.read(tiny, texts)
    assert (seen.left_out, seen.first) == (1, [texts[1].step])
    with pytest.raises(EstimateError, match="no text has finite logits"):
        given.read(tiny, texts)


def test_texts_that_cannot_be_read_are_refused_by_name(tiny, reasoner, monkeypatch):
    right, faulty = texts = plant.pairs(1, 2, style="language")
    with pytest.raises(EstimateError, match="0 of 0 texts"):
        given.read(tiny, [])
    for some, named in (([right], "0 of 1"), ([faulty], "1 of 1")):
        with pytest.raises(EstimateError, match=named):
            given.read(tiny, some)
    joined = faulty._replace(text=faulty.text.replace("\n", " "))
    for wrong in (joined, faulty._replace(step=3), faulty._replace(text="")):
        with pytest.raises(EstimateError, match="cannot be aligned"):
            given.read(tiny, [right, wrong])
    with pytest.raises(EstimateError, match="in the tokens of tiny"):
        given.read(tiny, plant.pairs(1, 2), "tokens")
    with pytest.raises(EstimateError, match="in the tokens of reasoner"):
        given.read(reasoner, texts, "tokens")
    with pytest.raises(UnknownName, match="verse"):
        given.read(tiny, texts, "verse")
    with pytest.raises(ModelError, match="does not fit"):
        given.read(tiny, plant.pairs(1, 64, style="language"))


def test_a_tokenizer_without_offsets_is_refused(tiny):
    texts = plant.pairs(1, 2, style="language")

    class Slow:
        """Gives ids alone."""

        chat_template = None

        def __call__(self, text, return_offsets_mapping=False, **settings):
            if return_offsets_mapping:
                raise NotImplementedError("return_offset_mapping is not available")
            return tiny.tokenizer(text, **settings)

    with pytest.raises(EstimateError, match="gives no offsets"):
        given.read(dataclasses.replace(tiny, tokenizer=Slow()), texts)
    with pytest.raises(EstimateError, match="no tokenizer"):
        given.read(dataclasses.replace(tiny, tokenizer=None), texts)
