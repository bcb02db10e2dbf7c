"""Fragmentation taken away alone: all arms copy the same bytes, the bounds hold both, and no row passes unfixed."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from o1lab import claims, plots, stats
from o1lab.errors import EstimateError
from o1lab.kv import Growing, KVShape, OnDevice, Paged, jitter, jitter_view, latency, long_cot
from o1lab.kv.decode_bench import interleaved
from o1lab.kv.jitter import DEFAULT, EXPANDABLE, READY, Played, Ready, Removed
from o1lab.kv.pool import PoolError
from o1lab.kv.replay import replay

SHAPE = KVShape(2, 2, 32)
CHAIN = long_cot(3, 0, concurrent=2, prompt_tokens=20, median_tokens=100, most_tokens=200)


def test_ready_memory_holds_the_same_bytes_as_cat():
    ready, plain = Ready("cpu", slots=2, slot_bytes=64), OnDevice("cpu", 64)
    ready._source.copy_(torch.arange(64, dtype=torch.uint8))
    plain._source.copy_(ready._source)
    mine, theirs = ready.new(5), plain.new(5)
    ready.write(mine, 0, 5)
    plain.write(theirs, 0, 5)
    for size in (9, 10, 31):
        mine, theirs = ready.extend(mine, size), plain.extend(theirs, size)
        assert torch.equal(ready._buffers[mine.number, mine.side, :size], theirs)
        assert ready.allocated_bytes == plain.allocated_bytes == size
    assert ready.extend(mine, 65) is None
    assert ready.new(1) is not None
    assert ready.new(1) is None
    ready.drop(mine)
    assert ready.new(65) is None
    assert ready.new(64) is not None


def test_every_arm_serves_the_same_traffic():
    one, other = (replay(CHAIN, Growing(SHAPE, memory)) for memory in (
        OnDevice("cpu", 1 << 20), Ready("cpu", slots=2 * 2 * 2, slot_bytes=1 << 16)))  # fmt: skip
    assert one.clean and other.clean  # noqa: PT018
    assert one.live_bytes.tolist() == other.live_bytes.tolist()


def test_processes_take_turns_and_the_table_names_every_arm():
    found = jitter.removed(CHAIN, SHAPE, device="cpu", capacity_bytes=1 << 30, rounds=6)
    assert {arm: len(rounds) for arm, rounds in found.played.items()} == {DEFAULT: 6, EXPANDABLE: 6, READY: 6}
    assert len({len(one.append_us) for rounds in found.played.values() for one in rounds}) == 1
    assert all(one.lost == one.retries == 0 for rounds in found.played.values() for one in rounds)
    assert [line[:18].strip() for line in str(found).splitlines()[1:]] == [DEFAULT, EXPANDABLE, READY]


def test_what_cannot_be_played_is_told():
    with pytest.raises(RuntimeError, match="nonsense"):  # from the other process
        jitter.removed(CHAIN, SHAPE, device="nonsense")
    with pytest.raises(PoolError, match="at least 6"):
        jitter.removed(CHAIN, SHAPE, device="cpu", rounds=5)


def test_settings_are_there_before_torch_is(monkeypatch):
    said = subprocess.run(
        [sys.executable, "-c", "import sys, o1lab.kv.jitter; print('torch' in sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout.strip() == "False"
    for name in jitter.VARIABLES:
        monkeypatch.setenv(name, "backend:native")  # the user's own must not leak into an arm
    jitter._settings("expandable_segments:True")
    assert {os.environ[name] for name in jitter.VARIABLES} == {"expandable_segments:True"}
    jitter._settings("")
    assert not set(jitter.VARIABLES) & set(os.environ)


def rounds(*times):
    return [Played([time] * 100, 0, 1 << 20, 0, 0) for time in times]


def made(expandable, ready, default=(100.0,) * 6):
    return Removed({DEFAULT: rounds(*default), EXPANDABLE: rounds(*expandable), READY: rounds(*ready)})


def test_bounds_hold_what_both_arms_save():
    found = made([90.0] * 6, [60.0] * 6)
    assert (found.saving(EXPANDABLE).value, found.saving(READY).value) == pytest.approx((10, 40))
    bounds = found.bounds()
    assert (bounds.low, bounds.value, bounds.high) == pytest.approx((10, 25, 40))
    rule = claims.load()["kv-jitter"]
    decided = {
        outcome: claims.decide(rule, made(*times).bounds(), {"cuda"}).outcome
        for outcome, times in {
            "refuted": ([99.0] * 6, [85.0] * 6),  # even without an allocator little is saved
            "inconclusive": ([99.0] * 6, [60.0] * 6),  # the arms disagree
            "supported": ([70.0] * 6, [60.0] * 6),
        }.items()
    }
    assert decided == {outcome: outcome for outcome in decided}
    assert claims.decide(rule, found.noise(), {"cuda"}).outcome == "refuted"  # nothing was taken away


def test_with_the_fix_off_no_row_passes():
    ledger, able = claims.load(), {"cpu", "cuda", "cuda-graphs"}
    grown = np.random.default_rng(0).permutation(np.linspace(10, 50, 2000))
    off = {
        "kv-jitter/pool-as-written": latency.ratio(grown, grown[::-1]).scaled(-100, "%").shifted(100),
        "kv-jitter/paged-graph": latency.ratio(grown, grown, 0.99, 0.5),
        "kv-jitter/append": latency.ratio(grown, grown[::-1]),
    }
    assert {claim: claims.decide(ledger[claim], one, able).outcome for claim, one in off.items()} == dict.fromkeys(
        off, "refuted"
    )
    load = long_cot(8, 0, concurrent=4, median_tokens=300, most_tokens=900)
    pool = [100 * replay(load, Paged(KVShape(), capacity_bytes=1 << 30), stride=8).tail_waste] * 2
    assert claims.decide(ledger["kv-jitter/waste"], stats.mean(pool, "%"), able).outcome == "refuted"


def test_the_tail_of_even_steps_passes():
    even = 2 + 0.02 * np.random.default_rng(0).random(10_000)
    found = latency.ratio(even, even, 0.99, 0.5)
    assert 1 < found.low <= found.value <= found.high < 1.02
    assert claims.decide(claims.load()["kv-jitter/paged-graph"], found, {"cuda", "cuda-graphs"}).outcome == "supported"


def test_the_interval_knows_of_neighbours():
    chance = np.random.default_rng(0)
    alone, clusters = np.ones(6400), np.ones(6400)
    alone[chance.choice(6400, 128, replace=False)] = 3
    clusters[:128] = 3  # the same slow steps in one piece
    assert latency.ratio(alone, alone, 0.99, 0.5).low == 3
    found = latency.ratio(clusters, clusters, 0.99, 0.5)
    assert (found.low, found.value) == (1, 3)
    with pytest.raises(EstimateError, match="at least 640"):
        latency.ratio([1.0] * 639, clusters)
    halved = latency.ratio(clusters, 2 * clusters)
    assert (halved.low, halved.value, halved.high) == (0.5, 0.5, 0.5)  # drawn at the same places


def test_steps_of_a_model_by_arm():
    found = interleaved(
        {"dynamic": 64, "paged": 65, "paged + graph": 1}, size="tiny", batch=2, context=16, device="cpu"
    )
    assert {arm: len(taken) for arm, taken in found.items()} == {"dynamic": 64, "paged": 128, "paged + graph": 64}
    assert all(one > 0 for taken in found.values() for one in taken)


def test_tails_are_drawn_as_far_as_they_are_known():
    slow = np.linspace(1, 100, 1001)
    figure = jitter_view.tails(
        {"broken": ("cat", slow), "fixed": ("pages", [1.0] * 5000), "control": ("ready", slow / 2)}, title="It falls"
    )
    assert list(figure.layout.xaxis.ticktext) == ["50 %", "90 %", "99 %", "99.9 %"]
    named = {trace.name: trace for trace in figure.data}
    assert named["cat"].line.color == plots.COLOURS["broken"]
    at = np.argmin(np.abs(np.asarray(named["cat"].x) - 2))  # the slowest hundredth
    assert named["cat"].y[at] == pytest.approx(np.quantile(slow, 0.99), rel=0.02)
    plots.check(plots.captioned(figure, "cat and pages"))
    with pytest.raises(EstimateError, match="20 and more"):
        jitter_view.tails({"broken": ("cat", slow)}, title="alone")
