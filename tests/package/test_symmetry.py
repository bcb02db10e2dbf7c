"""Problems in disguise: every gold state goes over and comes back, and what is shown is another problem."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from o1lab import chains
from o1lab.chains.samples import FAMILIES
from o1lab.chains.symmetry import disguise
from o1lab.errors import ChainError

PAIRS = [(family.task, variant) for variant, family in FAMILIES.items()]


@settings(max_examples=60, deadline=None)
@given(pair=st.sampled_from(PAIRS), steps=st.integers(1, 24), seed=st.integers(0, 10**6), first=st.booleans())
def test_gold_states_go_over_and_come_back(pair, steps, seed, first):
    task, variant = pair
    begin = 1 + steps // 2 if first else 1
    sample = chains.make(task, steps, 1, seed, variant=variant, first=begin)[0]
    other = disguise(sample, seed % 7)
    assert [other.over(step.state) for step in sample.steps] == [step.state for step in other.sample.steps]
    assert [other.back(step.state) for step in other.sample.steps] == [step.state for step in sample.steps]
    assert other.back(other.sample.start) == sample.start
    assert [(e.label, e.operator.isalpha()) for e in other.sample.program] == [
        (e.label, e.operator.isalpha()) for e in sample.program
    ]
    assert chains.localise(other.sample, f"{other.sample.gold} <eos>") is None


@pytest.mark.parametrize(("task", "variant"), PAIRS)
def test_disguises_differ_from_the_problem_and_from_one_another_and_are_drawn_by_seed(task, variant):
    sample = chains.make(task, 12, 1, 3, variant=variant)[0]
    prompts = [disguise(sample, seed).sample.prompt for seed in range(6)]
    assert len({sample.prompt, *prompts}) >= 6  # one in thirty units is 1
    assert prompts == [disguise(sample, seed).sample.prompt for seed in range(6)]
    assert json.loads(json.dumps(disguise(sample, 1).sample.to_dict()))["id"] == f"{sample.id}-disguise1"


def test_products_keep_their_factor_and_exchanges_stay_in_order():
    numbers = disguise(chains.make("arithmetic", 40, 1, 0, variant="modular")[0], 2).sample.program
    plain = chains.make("arithmetic", 40, 1, 0, variant="modular")[0].program
    assert all((one.operand == other.operand) == (one.operator == "*" or one.operand == "0")
               for one, other in zip(plain, numbers, strict=True))  # fmt: skip
    letters = disguise(chains.make("symbols", 60, 1, 0)[0], 2).sample.program
    assert {one.operator for one in letters} <= set(FAMILIES["symbols"].operators)


def test_a_seed_that_is_no_number_is_refused():
    with pytest.raises(ChainError, match="seed"):
        disguise(chains.make("symbols", 3, 1)[0], "one")
