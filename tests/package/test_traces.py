"""What a model writes and shows, loops, planted faults, shares of kinds, and detectors that judge other problems."""

from __future__ import annotations

import numpy as np
import pytest

from o1lab import chains, models, plots
from o1lab.chains import cosine, detect, fault_tables, faults, features, kinds, loops, plant, render, traces
from o1lab.chains.chance import Chance
from o1lab.chains.evaluate import judge
from o1lab.chains.faults import Fault, localise
from o1lab.chains.report import ChainReport
from o1lab.errors import ChainError, EstimateError, UnknownName
from o1lab.models import Model, reasoner

TASKS = [("arithmetic", "modular"), ("arithmetic", "digits"), ("symbols", "symbols"), ("hops", "hops")]


@pytest.fixture(scope="module")
def sharp() -> Model:
    """A reasoner that was not trained, made sure of itself, so that it writes long nonsense."""
    network = reasoner.build("tiny", seed=3).eval()
    for weight in network.parameters():
        weight.data *= 3
    return Model(network, reasoner.tokenizer(), "sharp", "untrained", network.device, network.dtype, 0, 4096)


def test_what_is_written_is_what_greedy_decoding_writes(sharp):
    samples = [one for task, kind in TASKS for one in chains.make(task, 3, 3, 0, variant=kind)]
    plain = chains.evaluate(sharp, samples, scores=True, progress=False)
    quick = traces.write(sharp, samples)
    for one, other in zip(plain.results, quick.results, strict=True):
        assert one.text.split()[: len(other.text.split())] == other.text.split()[: len(one.text.split())]
        assert one.fault == other.fault
        count = min(len(one.margins), len(other.margins))
        np.testing.assert_allclose(one.margins[:count], other.margins[:count], atol=1e-3)
        np.testing.assert_allclose(one.entropies[:count], other.entropies[:count], atol=1e-3)


def told(chain: list[int], network):
    """A model whose logits, after each prefix of ``chain``, favour its next token."""
    import torch
    from torch import nn

    class Head(nn.Module):
        def forward(self, hidden):
            return hidden

    class Body(nn.Module):
        def forward(self, input_ids, use_cache=False):
            logits = torch.zeros(*input_ids.shape, network.config.vocab_size)
            for row, ids in enumerate(input_ids.tolist()):
                for place in range(len(ids) - 1):
                    logits[row, place, chain[place + 1] if place + 1 < len(chain) else 0] = 5.0 + place
                if len(ids) < len(chain):
                    logits[row, len(ids) - 1, chain[len(ids)]] = 4.0 + len(ids)
            return type("Out", (), {"last_hidden_state": logits})

    return type("Net", (), {"model": Body(), "lm_head": Head(), "config": network.config})()


def test_the_pass_reads_each_token_at_the_place_that_predicts_it(sharp):
    sample = chains.make("hops", 3, 1, 0)[0]
    prompt = sharp.encode(sample.prompt)[0].tolist()
    chain = sharp.encode(f"{sample.gold} <eos>")[0].tolist()
    model = Model(told(prompt + chain, sharp.model), sharp.tokenizer, "told", "", sharp.device, sharp.dtype, 0, 4096)
    made = traces.write(model, [sample])
    assert made.report.accuracy.value == 1
    assert made.first == [None]
    begin = len(prompt) - 1
    np.testing.assert_allclose(
        made.results[0].margins, [5.0 + begin + k for k in range(len(chain) - 1)] + [4.0 + begin + len(chain)]
    )
    np.testing.assert_allclose(made.sure[0][:, 0], [5.0 + begin, 8.0 + begin, 11.0 + begin])
    assert made.hidden[0].shape == (3, sharp.model.config.vocab_size)
    assert made.both[0].shape == (3, 3 + sharp.model.config.vocab_size)


def test_a_family_is_learnt_if_short_chains_come_out_right(sharp, monkeypatch):
    """A stand-in for the passes, which is right in all of hops, in half of symbols and in less of the rest."""
    told = {"hops": 1.0, "symbols": 0.5, "modular": 0.4, "digits": 0.0}

    def passes(model, prompts, gold):
        names = [name for name in ("modular", "digits", "symbols", "hops") for _ in range(10)]
        rows = []
        for place, (name, row) in enumerate(zip(names, gold, strict=True)):
            wrong = place % 10 >= 10 * told[name]
            rows.append(traces._Tokens(np.array(row) + wrong, *[np.empty(0)] * 4))
        return rows

    monkeypatch.setattr(traces, "_passes", passes)
    assert traces.learnt(sharp, n=10) == [("symbols", "symbols"), ("hops", "hops")]
    assert traces.learnt(sharp, n=10, least=0.6) == [("hops", "hops")]


def test_padding_on_the_right_changes_nothing(sharp):
    samples = [chains.make("symbols", steps, 1, 0)[0] for steps in (2, 5)]
    rows = [[sharp.encode(text)[0].tolist() for text in (one.prompt, one.gold)] for one in samples]
    together = traces._passes(sharp, *zip(*rows, strict=True))
    for row, seen in zip(rows, together, strict=True):
        (alone,) = traces._passes(sharp, [row[0]], [row[1]])
        np.testing.assert_array_equal(alone.best, seen.best)
        np.testing.assert_allclose(alone.hidden, seen.hidden, atol=1e-4)


def test_writing_refuses_what_it_cannot_do(sharp):
    with pytest.raises(ChainError, match="no samples"):
        traces.write(sharp, [])
    with pytest.raises(ChainError, match="does not speak"):
        traces.write(models.load("tiny", device="cpu"), chains.make("hops", 2, 1, 0))


@pytest.mark.parametrize(
    ("items", "found"),
    [
        ("", None),
        ("abcdef", None),
        ("abcabc", None),  # two rounds
        ("xabcabcabc", (1, 3, 3)),
        ("xabababa", (1, 2, 3)),  # a part of a round at the end
        ("aaaa", (0, 1, 4)),  # the shortest period, not 2
        ("aaaab", None),  # it went on
        ("ccabbabbabb", (2, 3, 3)),
    ],
)
def test_a_cycle_runs_to_the_end_in_its_shortest_period(items, found):
    assert loops.cycle(items) == found


def text_of(sample, places) -> str:
    """The gold steps at these places (1-based), in the tokens of the reasoner."""
    width = sample.tokens_per_step
    words = sample.gold.split()
    return " ".join(word for place in places for word in words[(place - 1) * width : place * width])


@pytest.mark.parametrize(("task", "variant"), TASKS)
def test_a_loop_is_named_where_its_second_round_begins(task, variant):
    sample = chains.make(task, 8, 1, 4, variant=variant)[0]
    fault = localise(sample, text_of(sample, [1, 2, 3, 4, 3, 4, 3, 4, 3]))
    assert (fault.step, fault.kind, fault.past_end) == (5, "loop", False)
    assert "repeats the same 2, 3 times over" in fault.evidence
    assert faults.first_steps([fault]) == [5]
    once = localise(sample, text_of(sample, [1, 2, 3, 4, 3, 4, 5, 6, 7, 8]))
    assert (once.step, once.kind) == (5, "label")
    assert localise(sample, text_of(sample, [1, 2, 3, 2, 3])).kind == "label"  # two rounds are no loop


def test_a_loop_after_the_last_step_is_past_the_end():
    sample = chains.make("hops", 4, 1, 4)[0]
    fault = localise(sample, text_of(sample, [1, 2, 3, 4, 4, 4]))
    assert (fault.step, fault.kind, fault.past_end) == (5, "loop", True)
    assert faults.first_steps([fault]) == [None]
    ran = localise(sample, text_of(sample, [1, 2, 3, 4, 4]))
    assert (ran.kind, ran.past_end) == ("ran over", True)


def test_another_fault_before_the_loop_stays_the_first():
    sample = chains.make("arithmetic", 6, 1, 2, variant="digits")[0]
    words = text_of(sample, [1, 2, 3, 2, 3, 2, 3]).split()
    words[5] = "9" if words[5] != "9" else "8"
    fault = localise(sample, " ".join(words))
    assert fault.step == 1
    assert fault.kind != "loop"


def test_words_that_repeat_inside_an_unreadable_step_are_a_loop():
    sample = chains.make("hops", 4, 1, 4)[0]
    start = text_of(sample, [1])
    assert localise(sample, f"{start} s{sample.steps[1].label} r1 " + "e1 e2 " * 20).kind == "loop"
    assert localise(sample, f"{start} s{sample.steps[1].label} r1 " + "e1 e2 " * 4).kind == "format"


def test_loops_in_language_are_named():
    sample = chains.make("symbols", 4, 1, 4)[0]
    lines = render.gold(sample, "language").split("\n")
    fault = localise(sample, "\n".join(lines[:2] + [lines[1]] * 4), "language")
    assert (fault.step, fault.kind) == (3, "loop")


def test_replay_finds_every_planted_fault_at_its_step():
    planted = plant.many(360, 10, seed=5)
    assert {one.kind for one in planted} == set(plant.PLANTED)
    assert {one.sample.variant for one in planted} == {name for _, name in TASKS}
    for one in planted:
        fault = localise(one.sample, one.text)
        assert fault is not None
        assert fault.step == one.step, (one, fault)
        if one.kind not in ("wrong result", "premise reuse"):
            assert fault.kind == one.kind
    reused = [one for one in planted if one.kind == "premise reuse"]
    named = [localise(one.sample, one.text) for one in reused]
    assert all("premise reuse" in (fault.kind, *fault.also) for fault in named)


def test_planting_is_repeatable_and_says_where_it_cannot():
    assert plant.many(20, 6, seed=1) == plant.many(20, 6, seed=1)
    assert plant.many(20, 6, seed=1) != plant.many(20, 6, seed=2)
    sample = chains.make("hops", 4, 1, 0)[0]
    assert plant.plant(sample, "loop", 1, Chance(0)) is None
    assert plant.plant(sample, "premise reuse", 1, Chance(0)) is None
    assert plant.plant(sample, "operand fetch", 2, Chance(0)) is None
    with pytest.raises(UnknownName, match="typo"):
        plant.plant(sample, "typo", 1, Chance(0))


def test_the_shares_of_misused_premises_and_overflows():
    other = [Fault(3, "operand fetch", "1", "2", "…")] * 50
    reuse = [Fault(3, "premise reuse", "1", "2", "…", 0, chance=0.0)] * 50
    share = kinds.misused_share(reuse + other + [None])
    assert (share.value, share.n, share.unit) == (50, 100, "%")
    assert 35 < share.low < 45 < 55 < share.high < 65
    assert kinds.misused_share(other).value == 0
    by_accident = [Fault(3, "premise reuse", "1", "2", "…", 0, chance=0.5)] * 25
    by_accident += [Fault(3, "arithmetic", "1", "2", "…", chance=0.5)] * 25
    assert kinds.misused_share(by_accident).low == 0
    both = Fault(3, "carry", "1", "2", "…", also=("premise reuse",))
    last = Fault(3, "premise reuse", "1", "2", "…", also=("carry",))
    assert kinds.overflow_share([both, last, *other[:2]]).value == 50
    for share in (kinds.misused_share, kinds.overflow_share):
        with pytest.raises(EstimateError, match="no fault"):
            share([None])


def marked(n: int, apart: float, seed: int = 0):
    """Chains of 10 steps, half of them with a faulty one that is ``apart`` standard deviations off."""
    random = np.random.default_rng(seed)
    first = [int(random.integers(1, 11)) if random.random() < 0.5 else None for _ in range(n)]
    rows = [random.normal(size=(10, 1)) for _ in range(n)]
    for each, fault in zip(rows, first, strict=True):
        if fault:
            each[fault - 1] += apart
    return rows, first


def test_cross_fitting_judges_every_chain_and_agrees_with_a_split():
    rows, first = marked(800, 3.0)
    crossed, split = detect.crossfit(rows, first), detect.evaluate(rows, first)
    assert crossed.given_faulty.n == sum(fault is not None for fault in first)
    assert len(crossed.said) == 800
    assert crossed.auroc.low < split.auroc.value < crossed.auroc.high
    assert crossed.auroc.value == pytest.approx(detect.auroc(crossed.scores, crossed.faulty).value)
    alarms, hits = crossed.roc()
    assert np.trapezoid(hits, alarms) == pytest.approx(crossed.auroc.value, abs=1e-9)
    assert (alarms[0], hits[0], alarms[-1], hits[-1]) == (0, 0, 1, 1)


def test_no_problem_is_both_fitted_to_and_judged():
    """Features that only name the problem separate perfectly where a problem is on both sides, and not at all here."""
    random = np.random.default_rng(0)
    problems = np.repeat(np.arange(60), 4)
    bad = random.random(60) < 0.5
    rows = [np.eye(60)[[problem]] for problem in problems]
    first = [1 if bad[problem] else None for problem in problems]
    leaky = detect.crossfit(rows, first, ridge=0.01)
    apart = detect.crossfit(rows, first, problems=problems, ridge=0.01)
    assert leaky.auroc.value > 0.9
    assert apart.auroc.low < 0.5


@pytest.mark.parametrize("folds", [1, 2.0, True])
def test_folds_of_nonsense_are_refused(folds):
    with pytest.raises(EstimateError, match="folds="):
        detect.crossfit(*marked(100, 3.0), folds=folds)


class Words:
    """A tokenizer of words with offsets."""

    def __call__(self, text: str, **_):
        spans, at = [], 0
        for word in text.split():
            begin = text.index(word, at)
            spans.append((begin, at := begin + len(word)))
        return type("Coded", (), {"offset_mapping": spans})


def test_lines_of_language_are_the_steps():
    sample = chains.make("symbols", 3, 1, 0)[0]
    text = render.gold(sample, "language")
    read = render.parse(sample, text, "language")
    words = [len(line.split()) for line in text.split("\n")]
    ends = list(np.cumsum(words)[:3])
    assert features.line_ends(text, read, Words(), sum(words)) == ends
    assert features.line_ends(text, read, Words(), sum(words) + 1) == ends  # an end mark
    assert features.line_ends(text, read, Words(), sum(words) + 5) is None
    assert features.line_ends(text.replace("\n", " ", 1), read, Words(), sum(words)) is None


def test_figures_can_be_read():
    rows, first = marked(200, 3.0)
    found = detect.crossfit(rows, first)
    some = [Fault(2, "carry", "1", "2", "…"), Fault(3, "label", "s1", "s2", "…"), None]
    drawn = [
        kinds.rules_figure([0.9, 0.4, 0.3], 2, 3, "a title that is so long that it must be wrapped somewhere here"),
        kinds.rules_figure([0.9, 0.9], 2, None, "none"),
        kinds.confusion_figure([1, 2, 3], [1, None, 2], "steps"),
        kinds.roc_figure({"sure": found}, found, "areas"),
        kinds.kinds_figure({"one": some, "two": some[:1]}, {"premise reuse": 38.0}, "kinds"),
    ]
    for figure in drawn:
        plots.check(figure)
    assert [trace.name for trace in drawn[2].data] == ["exact", "exact step (1)", "another step, or none (2)"]
    assert list(drawn[4].data[0].x) == ["carry", "label", "premise reuse"]


def test_the_cosine_rule_and_a_loop():
    sample = chains.make("hops", 4, 1, 4)[0]
    text = text_of(sample, [1, 2, 2, 2, 2])
    found = cosine.compare_rules([sample], [render.parse(sample, text)])
    assert set(found.kinds) == {"loop"}


def judged(sample, text: str):
    """A result as an evaluation gives it."""
    return judge(sample, {"text": text, "ended": "stop"}, "tokens")


def test_tables_of_faults():
    planted = plant.many(72, 8, seed=2)
    results = [judged(one.sample, one.text.removesuffix(" <eos>")) for one in planted]
    broken = [one for one in results if one.fault and one.sample.variant != "digits"]
    samples = [one.sample for one in results]
    seen = fault_tables.sight(samples, broken).set_index("family")
    assert set(seen.index) == {name for _, name in TASKS}
    assert seen.predicted["modular"] == seen.predicted["hops"] == 1  # one token: alike or not at all
    assert 0 < seen.predicted["symbols"] < seen.predicted["digits"] < 1
    assert np.isnan(seen.measured["digits"])
    assert seen.faults["digits"] == 0
    assert {step.state for step in broken[0].sample.steps} <= set(fault_tables.states(broken))
    judged_rules = fault_tables.readings(broken, {"bag": cosine.one_hot_bag})
    assert set(judged_rules) == {("bag", "run"), ("bag", "earliest")}
    assert judged_rules["bag", "run"].exact.n == len(broken)
    right = judged(samples[0], samples[0].gold)
    reports = {"some": broken, "all": results, "none": [right]}
    reports = {name: ChainReport(tuple(some), name, "tokens", 0.0) for name, some in reports.items()}
    table = fault_tables.shares(reports).set_index("model")
    assert list(table.columns) == ["premise misused", "overflow", "wrong fetch"]
    assert list(table.index) == ["some", "all"]
    assert table.overflow["some"] == "–"
    digits = [one for one in results if one.sample.variant == "digits" and one.fault]
    assert f"(n={len(digits)})" in table.overflow["all"]
    assert fault_tables.summary(reports).chains.tolist() == [len(broken), 72, 1]


def test_three_rules_on_planted_faults():
    planted = plant.many(144, 8, seed=3)
    hits = fault_tables.planted(planted)
    assert hits.replay.all()
    by_kind = hits.groupby("kind")[["cosine", "states"]].mean()
    assert by_kind.loc["label"].tolist() == [0, 0]  # every state is right
    assert by_kind.loc["ran over"].tolist() == [0, 0]
    assert by_kind.loc["stopped early"].tolist() == [1, 1]
    assert by_kind.states["wrong result"] == 1
    assert by_kind.cosine["wrong result"] < 1
    plots.check(kinds.planted_figure(hits))


def test_states_embedded_at_once_are_those_embedded_alone(sharp):
    states = ["A B C D E", "F A B C D", "7", "30", "e1"]
    together, alone = cosine.hidden_state(sharp, states=states), cosine.hidden_state(sharp)
    for state in states:
        np.testing.assert_allclose(together(state), alone(state), atol=1e-4)
    assert together(states[0]).shape == (64,)
