"""Remedies on the same problems: arms in one pass and decoded, their comparison, stop rules past the end, figures."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from o1lab import chains, models, plots
from o1lab.chains.report import ChainReport, Result
from o1lab.decoding import Outcome, log_n, rates, remedy_figures, stop_bench, trials
from o1lab.decoding.segments import Segmented
from o1lab.decoding.stopping import BROKEN
from o1lab.errors import DecodingError
from o1lab.models import coupled, coupled_layout, reasoner, vocabulary

pytestmark = pytest.mark.usefixtures("one_thread")


def problems(steps: int, n: int, variant: str = "modular") -> list[chains.Sample]:
    return chains.make("symbols" if variant == "symbols" else "arithmetic", steps, n, 3, variant=variant)


def arm(right, steps=None, tokens=10.0) -> trials.Trial:
    right = np.array(right, dtype=bool)
    return trials.Trial(right, np.array(right[:, None] if steps is None else steps, dtype=bool), tokens)


class Knowing:
    """A network that predicts the next token of what it is given, but for the columns in ``wrong`` (from the end)."""

    config = SimpleNamespace(vocab_size=len(vocabulary.TOKENS))
    device = torch.device("cpu")

    def __init__(self, samples, wrong=()):
        texts = [vocabulary.encode(f"{s.prompt} {s.gold} <eos>") for s in samples]
        self.after = {tuple(text[:-1]): text[1:] for text in texts}
        self.wrong = wrong

    def __call__(self, ids, use_cache, logits_to_keep):
        rows = torch.tensor([self.after[tuple(row)] for row in ids.tolist()])
        for column in self.wrong:
            rows[:, -column] = vocabulary.PAD
        return SimpleNamespace(logits=torch.nn.functional.one_hot(rows, len(vocabulary.TOKENS))[:, -logits_to_keep:])


@pytest.mark.parametrize("variant", ["modular", "symbols"])
def test_a_wrong_token_makes_its_step_wrong_and_the_end_belongs_to_none(variant):
    samples, device = problems(3, 2, variant), torch.device("cpu")
    size = samples[0].tokens_per_step
    for wrong, steps in (((), [1, 1, 1]), ((1,), [1, 1, 1]), ((2,), [1, 1, 0]), ((2 + 2 * size,), [0, 1, 1])):
        made = trials.forced(SimpleNamespace(model=Knowing(samples, wrong), device=device), samples)
        assert made.right.tolist() == [not wrong] * 2
        assert made.steps.tolist() == [[bool(step) for step in steps]] * 2
        assert made.tokens == len(samples[0].prompt.split()) + 3 * size + 1


def test_one_pass_and_decoding_agree_on_the_sibling():
    model, samples = coupled.load(device="cpu", dtype="float32"), problems(80, 8)
    forced, (decoded, texts) = trials.forced(model, samples), trials.decoded(model, samples)
    assert (forced.right == decoded.right).all()
    assert 0 < forced.right.mean() < 1
    assert forced.steps.shape == (8, 80)
    assert decoded.steps.shape == (8, 0)
    assert forced.right.tolist() == forced.steps.all(1).tolist()
    assert not any(trials.changed(texts, texts))
    with log_n(model, coupled_layout.tokens(12)):
        assert trials.forced(model, samples).right.mean() > forced.right.mean()


def test_a_model_with_other_words_is_refused():
    with pytest.raises(DecodingError, match="the reasoner's words"):
        trials.forced(models.load("tiny", device="cpu"), problems(2, 1))


def test_differences_are_paired_and_never_certain_of_a_few_chains():
    first, second = arm([1, 0, 0, 0], np.eye(4)), arm([1, 1, 1, 0], np.ones((4, 4)))
    assert trials.difference(first, second).value == 50
    assert trials.step_difference(first, second).value == 75
    same = trials.step_difference(first, first)
    assert same.low < 0 < same.high
    assert trials.again(first, first).value == 100
    assert trials.again(first, second).value == 0
    assert trials.again(second, first) is None


def test_the_table_pairs_an_arm_with_the_first_problems_and_adjusts_all_rows_together():
    base = arm([0] * 20 + [1] * 20)
    found = trials.table(
        {("a", "nothing"): base, ("a", "cure"): arm([1] * 10, tokens=20), ("a", "idle"): arm([0] * 20 + [1] * 20)}
    ).set_index("remedy")
    assert found.loc["cure", ["n", "before", "after", "difference", "tokens"]].tolist() == [10, 0, 100, 100, 2]
    assert found.loc["cure", "Holm p"] == pytest.approx(2 * found.loc["cure", "p"])
    assert found.loc["idle", "p"] == 1
    assert remedy_figures.best(found.reset_index(), "a") == ["cure"]


def test_tokens_of_chains_that_broke_off_do_not_make_a_remedy_cheap():
    samples = problems(4, 3)
    results = tuple(
        Result(sample=sample, text="", tokens=count, right=count > 5)
        for sample, count in zip(samples, (20, 20, 2), strict=True)
    )
    found = Segmented(ChainReport(results, "m", "tokens", 1.0), 60, 42, 6, None)
    assert trials.token_ratio(found, plain=20, segments=2).value == 2.0
    assert trials.segmented(found).tokens == 34
    assert trials.segmented(found).right.tolist() == [True, True, False]


def test_time_is_taken_for_every_remedy():
    model = models.Model(
        reasoner.build("tiny").eval(), reasoner.tokenizer(), "r", "r", torch.device("cpu"), torch.float32, 1, 4096
    )
    spent = trials.milliseconds(model, problems(1, 2), {"nothing": ExitStack, "idle": ExitStack}, rounds=1)
    assert list(spent) == ["nothing", "idle"]
    assert all(0 < took < 1000 for took in spent.values())


def texts(count: int = 8, variant: str = "modular", sure: float = 0.0) -> list[stop_bench.Text]:
    """Right chains that go on past their end with their own first tokens; the entropy is ``sure`` up to the end."""
    made = []
    for sample in problems(6, count, variant):
        ids = vocabulary.encode(f"{sample.gold} <eos> {sample.gold}")
        end = len(sample.gold.split())
        entropies = tuple([sure] * (end + 1) + [3.0] * (len(ids) - end - 1))
        made.append(stop_bench.Text(sample, tuple(ids), entropies, end))
    return made


@pytest.mark.parametrize("variant", ["modular", "symbols"])
def test_each_fault_ends_answers_as_its_report_says(variant):
    made = texts(16, variant)
    assert all(stop_bench.exact(stop_bench.run(made, "right")))
    kinds = [outcome.kind for outcome in stop_bench.run(made, "broken")]
    by_fault = {how: set(kinds[place::4]) for place, how in enumerate(BROKEN)}
    assert by_fault["end of turn missing"] == {"overrun"}
    assert by_fault["prompt read"] == {"premature"}
    assert by_fault["pieces"] <= {"premature", "exact"}
    assert "premature" in by_fault["pieces"]
    assert "premature" not in by_fault["checked late"]
    with pytest.raises(DecodingError, match="'rightt'"):
        stop_bench.run(made, "rightt")


def test_the_articles_rule_stops_right_where_its_id_is_right_and_late_where_only_entropy_can_tell():
    kinds = [outcome.kind for outcome in stop_bench.run(texts(), "article", threshold=1.0)]
    for place, how in enumerate(BROKEN):
        assert set(kinds[place::4]) == ({"overrun"} if how == "end of turn missing" else {"exact"}), how


def test_the_threshold_is_one_of_the_quantiles_and_the_best_of_them():
    made = texts(8, sure=0.5)
    threshold, quantile = stop_bench.best_threshold(made)
    assert quantile in stop_bench.QUANTILES
    assert threshold == pytest.approx(0.5)


def test_figures_pass_the_labs_checks_and_hold_every_number():
    frame = pd.DataFrame([
        {"decay": decay, "remedy": name, "difference": value, "low": value - 5, "high": value + 5, "Holm p": 0.01}
        for decay, name, value in (("a", "cure", 50.0), ("a", "written", 0.0), ("b", "cure", -10.0))
    ])  # fmt: skip
    forest = remedy_figures.forest(frame, {"written": "as written", "cure": "ours", "other": "control"}, "title")
    assert sorted(x for trace in forest.data for x in trace.x) == [-10, 0, 50]
    assert [note.text for note in forest.layout.annotations].count("–") == 1
    value = trials.step_difference(arm([1, 0]), arm([1, 1]))
    harm = remedy_figures.harm({"within": {0.0: value, 0.3: value}, "beyond": {0.0: value}}, "title")
    shares = {"right": rates([Outcome("exact", 3, 3)] * 4)}
    stopping = remedy_figures.stopping(shares, "title")
    assert [trace.x[0] for trace in stopping.data] == [100, 0, 0]
    for figure in (forest, harm, stopping):
        plots.check(figure)
