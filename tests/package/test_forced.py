"""One pass over right chains, with and without interventions: the same faults as measured alone, and what moved."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from package.decoding_fixture import build

from o1lab import chains
from o1lab.decoding import forced, quantise_kv, round_kv
from o1lab.errors import DecodingError, ModelError
from o1lab.models import measure, reasoner

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tiny():
    return reasoner.build("tiny").eval()


def test_an_arm_that_changes_nothing_moves_nothing_and_a_lossy_one_does(tiny):
    arms = {"fp32": lambda: round_kv(tiny, torch.float32, own=True), "int2": lambda: quantise_kv(tiny, 2, own=True)}
    made = forced.compare(tiny, "symbols", 4, 70, arms)
    assert list(made) == ["exact", "fp32", "int2"]
    assert made["exact"].shift.shape == made["int2"].changed.shape == (70, 4)
    assert not made["fp32"].shift.any()
    assert not made["fp32"].changed.any()
    assert (made["int2"].shift > 0).all()
    assert made["int2"].onset(2).low > 0
    with pytest.raises(DecodingError, match="nothing to compare"):
        made["fp32"].onset(2)


def test_changed_choices_are_counted_by_step_against_the_exact_arm(tiny, monkeypatch):
    def logits(_, batch):
        made = torch.nn.functional.one_hot(batch.ids[:, batch.start :], 662).float()
        if damaged:
            made[0, 5] = made[0, 5].roll(1, -1)  # second step (4 tokens each): its operator
        return made

    class Damage:
        def __enter__(self):
            damaged.append(1)

        def __exit__(self, *_):
            damaged.clear()

    damaged: list[int] = []
    monkeypatch.setattr(reasoner, "logits", logits)
    made = forced.compare(tiny, "modular", 3, 2, {"bad": Damage})
    assert made["exact"].outcome.right.all()
    assert not made["exact"].changed.any()
    assert made["bad"].changed.tolist() == [[0, 1, 0], [0, 0, 0]]
    assert made["bad"].outcome.kind.tolist() == ["operator", ""]
    assert forced.first_faults(made["bad"].outcome) == [2, None]
    assert np.count_nonzero(made["bad"].shift) == 1


def test_part_of_a_long_program_can_be_asked_for(tiny):
    assert forced.compare(tiny, "modular", 20, 3, asked=2)["exact"].outcome.steps == 2


def test_the_first_n_are_the_same_whatever_n_is(tiny):
    few, many = (forced.compare(tiny, "hops", 2, n)["exact"].outcome.first_fault for n in (3, 70))
    assert few.tolist() == many[:3].tolist()


def test_choices_late_in_a_text_in_language():
    from o1lab import models

    model, samples = models.load("tiny", device="cpu", dtype="float32"), chains.make("symbols", 3, 2)
    arms = {"fp32": lambda: round_kv(model, torch.float32, own=True), "2": lambda: quantise_kv(model, 2, own=True)}
    made = forced.language(model, samples, 2, arms)
    assert made["fp32"].changed.tolist() == [0, 0]
    assert made["fp32"].share.high > 0
    assert made["2"].changed.sum() > 0
    assert made["wrong"].tokens.tolist() == made["2"].tokens.tolist()
    line = chains.render.gold(samples[0], "language").splitlines(keepends=True)[2]
    assert made["wrong"].tokens[0] == len(line)  # a byte a token
    with pytest.raises(DecodingError, match="after=3"):
        forced.language(model, samples, 3, arms)
    with pytest.raises(ModelError, match="does not fit tiny"):
        forced.language(model, chains.make("symbols", 200, 1), 2, arms)


def test_a_wrong_end_is_no_fault_of_a_step():
    made = measure.ended(np.array([[False, True], [True, False]]), 1, ["state"])
    assert forced.first_faults(made) == [None, 1]


def test_the_pass_is_the_model_s_own():
    model, ids = build(), torch.arange(1, 9)[None]
    with torch.no_grad(), round_kv(model, torch.float32, own=True):
        inside = model(ids).logits
    assert torch.equal(inside, model(ids).logits)
