"""The curriculum by mastery: who climbs, when, and that a resumed run stands where it stood."""

from __future__ import annotations

import torch

from o1lab.models.ladder import FEW, ROWS, Ladder, rungs

CPU = torch.device("cpu")


def ladder(pace=0.6):
    return Ladder(("modular", "hops"), 64, pace, CPU)


def test_the_last_rung_is_the_longest_and_each_is_longer():
    for longest in (1, 4, 16, 17, 24, 64, 128, 192):
        made = rungs(longest)
        assert made[-1] == (longest, 1)
        assert all(one < other for one, other in zip(made, made[1:], strict=False))
        assert [few for n, few in made[:4]] == [*FEW, 1]
    assert max(b / a for (a, _), (b, _) in zip(rungs(192), rungs(192)[1:], strict=False)) < 2.1


def test_a_kind_climbs_alone_and_only_when_most_of_its_longest_chains_are_right():
    steps = ladder()
    steps.saw("modular", 16, torch.ones(ROWS, dtype=torch.bool))
    steps.saw("hops", 16, torch.arange(ROWS) < 0.5 * ROWS)
    steps.climb()
    assert (steps.at("modular"), steps.at("hops")) == ((16, 0.3), (16, 0.15))
    assert steps.at("hops", late=True) == (64, 1)


def test_too_few_and_too_short_chains_decide_nothing():
    steps = ladder()
    steps.saw("modular", 16, torch.ones(ROWS - 1, dtype=torch.bool))
    steps.climb()
    assert steps.at("modular") == (16, 0.15)
    steps.saw("modular", 11, torch.ones(1000, dtype=torch.bool))  # 11 of 16 steps: under 0.7
    steps.climb()
    assert steps.at("modular") == (16, 0.15)
    steps.saw("modular", 12, torch.ones(1, dtype=torch.bool))
    steps.climb()
    assert steps.at("modular") == (16, 0.3)


def test_nobody_climbs_past_the_top():
    steps = ladder()
    for _ in range(20):
        steps.saw("modular", 64, torch.ones(ROWS, dtype=torch.bool))
        steps.climb()
    assert steps.at("modular") == (64, 1)


def test_a_restored_ladder_goes_on_alike():
    steps, other = ladder(), ladder()
    steps.saw("hops", 16, torch.ones(ROWS, dtype=torch.bool))
    steps.climb()
    steps.saw("hops", 16, torch.ones(ROWS - 10, dtype=torch.bool))
    other.restore(steps.state())
    for one in (steps, other):
        one.saw("hops", 16, torch.ones(10, dtype=torch.bool))
        one.climb()
    assert steps.state() == other.state()
    assert other.at("hops") == (16, 0.6)
