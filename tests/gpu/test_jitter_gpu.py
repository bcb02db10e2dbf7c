"""Fragmentation taken away alone on a real GPU: each process has its own settings, and the rules say what it needs."""

from __future__ import annotations

import pytest

from o1lab.kv import Growing, KVShape, Modelled, jitter, long_cot
from o1lab.kv.compare import needed_bytes
from o1lab.kv.jitter import DEFAULT, EXPANDABLE, READY
from o1lab.kv.replay import replay
from o1lab.memory.allocator import CachingAllocator
from o1lab.memory.allocator_settings import Settings

pytestmark = pytest.mark.gpu

SHAPE = KVShape(layers=4)
LOAD = long_cot(12, concurrent=6, median_tokens=600, most_tokens=1600)


def ruled(**settings):
    return replay(LOAD, Growing(SHAPE, Modelled(CachingAllocator(Settings(**settings))))).peak_reserved_bytes


def test_each_arm_reserves_what_the_rules_of_its_settings_say():
    found = jitter.removed(LOAD, SHAPE, rounds=6)
    assert {one.peak_reserved_bytes for one in found.played[DEFAULT]} == {ruled()}
    assert {one.peak_reserved_bytes for one in found.played[EXPANDABLE]} == {ruled(expandable_segments=True)}
    assert all(one.lost == 0 for rounds in found.played.values() for one in rounds)
    assert all(one.device_allocs == 0 for one in found.played[READY])


def test_the_memory_that_the_replay_calls_enough_is_enough():
    enough, _ = needed_bytes(
        lambda capacity: Growing(SHAPE, Modelled(CachingAllocator(Settings(capacity_bytes=capacity)))), LOAD
    )
    found = jitter.removed(LOAD, SHAPE, capacity_bytes=enough, rounds=6)
    assert all(one.lost == 0 for one in found.played[DEFAULT])
    assert all(one.peak_reserved_bytes <= enough for one in found.played[DEFAULT])
