"""Measures of fragmentation: by hand, on snapshots recorded on an H200, on simulated allocators, on the pool."""

from __future__ import annotations

import json
from dataclasses import make_dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from package.trace_fixture import as_snapshot

from o1lab.kv import PagePool, PoolError, fragmentation
from o1lab.kv.fragmentation import (
    awaiting_free,
    churn,
    external,
    over_reservation,
    page_tail,
    pinned_bytes,
    rounding,
    size_text,
    stranded,
    unserviceable,
)
from o1lab.memory import trace
from o1lab.memory.allocator import CachingAllocator
from o1lab.memory.allocator_settings import MIB, Settings

FOLDER = Path(__file__).parents[1] / "data" / "traces"
TRUTH = json.loads((FOLDER / "truth.json").read_text())


@pytest.mark.parametrize(
    ("measure", "value"),
    [
        (lambda: rounding(700, 1024), 324 / 1024),
        (lambda: page_tail(150, 2, 100), 0.25),
        (lambda: over_reservation(30, 120), 0.75),
        (lambda: stranded(100, 60, 25), 15),
        (lambda: external([10, 30, 60]), 0.4),
        (lambda: unserviceable([10, 30, 60], 30), 0.1),
        (lambda: unserviceable([10, 30, 60], 61), 1.0),
        (lambda: awaiting_free(70, 50), 20),
        (lambda: churn({"num_ooms": 2}, {"num_ooms": 5, "num_alloc_retries": 1}, 500)["num_ooms"], 6.0),
        (lambda: churn({"num_ooms": 2}, {"num_ooms": 5, "num_alloc_retries": 1}, 500)["num_alloc_retries"], 2.0),
        (lambda: pinned_bytes((1 << 20) + 1), 2 << 20),
        (lambda: pinned_bytes(1 << 20), 1 << 20),
    ],
)  # fmt: skip
def test_each_measure_is_its_formula(measure, value):
    assert measure() == pytest.approx(value)


@pytest.mark.parametrize(
    "measure",
    [lambda: rounding(0, 0), lambda: page_tail(0, 0, 256), lambda: over_reservation(0, 0), lambda: external([]),
     lambda: unserviceable([], 5), lambda: pinned_bytes(0)],
)  # fmt: skip
def test_of_nothing_nothing_is_wasted(measure):
    assert measure() == 0


@given(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=30), st.integers(1, 1 << 41))
def test_unserviceable_and_external_belong_together(blocks, n):
    share = unserviceable(blocks, n)
    assert 0 <= share <= 1
    assert unserviceable(blocks, n + 1) >= share  # a larger request is never easier
    assert (share == 1) == (n > max(blocks))
    assert unserviceable(blocks, max(blocks)) <= external(blocks) + 1e-12


# --- snapshots -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRUTH)
@pytest.mark.parametrize("form", ["dictionary", "segments"])
def test_a_recorded_snapshot_adds_up_to_what_torch_counted(name, form):
    snapshot = as_snapshot(trace.load(FOLDER / f"{name}.npz"))
    found = fragmentation(snapshot if form == "dictionary" else snapshot["segments"])
    assert found.allocated_bytes == TRUTH[name]["allocated_bytes"]
    assert found.reserved_bytes == TRUTH[name]["reserved_bytes"]
    assert found.free_bytes == sum(found.free_blocks)
    assert 0 <= found.stranded_bytes <= found.free_bytes
    assert 0 <= found.rounding < 0.5


def test_the_recorded_training_run_strands_memory_behind_three_blocks():
    default, expandable = (
        fragmentation(as_snapshot(trace.load(FOLDER / f"train-{name}.npz"))) for name in ("default", "expandable")
    )
    assert default.stranded_bytes > 0
    assert default.over_reservation > expandable.over_reservation > 0.9  # nearly everything is free at the end
    assert "over-reservation" in str(default)


BLOCKS = [
    {"size": 4 * MIB, "requested_size": 3 * MIB, "state": "active_allocated"},
    {"size": 6 * MIB, "requested_size": 0, "state": "inactive"},
    {"size": 10 * MIB, "requested_size": 10 * MIB, "state": "active_awaiting_free"},
]
SEGMENTS = [
    {"total_size": 20 * MIB, "blocks": BLOCKS},
    {"total_size": 2 * MIB, "blocks": [{"size": 2 * MIB, "state": "inactive"}]},
]


def as_objects(segments):
    block = make_dataclass("Block", ["size", "state", ("requested_size", int, 0)])
    segment = make_dataclass("Segment", ["total_size", "blocks"])
    state = make_dataclass("State", ["segments"])
    return state([segment(one["total_size"], [block(**row) for row in one["blocks"]]) for one in segments])


@pytest.mark.parametrize("source", [SEGMENTS, {"segments": SEGMENTS}, as_objects(SEGMENTS)])
def test_every_number_of_a_snapshot_by_hand(source):
    found = fragmentation(source, live_bytes=2 * MIB)
    assert (found.reserved_bytes, found.active_bytes, found.allocated_bytes) == (22 * MIB, 14 * MIB, 4 * MIB)
    assert found.free_blocks == (6 * MIB, 2 * MIB)
    assert (found.stranded_bytes, found.awaiting_free_bytes) == (6 * MIB, 10 * MIB)
    assert (found.rounding, found.external) == (0.25, 0.25)
    assert found.over_reservation == pytest.approx(20 / 22)
    assert found.page_tail is None
    text = str(found.unserviceable(4 * MIB))
    assert "Tried to allocate 4.00 MiB" in text
    assert "8.00 MiB is reserved but unallocated; 25.0% of that lies in blocks smaller than the request" in text
    assert "the largest has 6.00 MiB" in text


def test_statistics_give_all_but_the_blocks():
    names = {"reserved": 100, "active": 60, "allocated": 50, "requested": 40, "inactive_split": 30}
    found = fragmentation({f"{name}_bytes.all.current": value for name, value in names.items()})
    assert (found.rounding, found.stranded_bytes, found.awaiting_free_bytes, found.free_bytes) == (0.2, 30, 10, 40)
    assert found.external is None
    assert "external" not in str(found)
    with pytest.raises(PoolError, match="do not list the free blocks"):
        found.unserviceable(1)


@pytest.mark.parametrize("source", [3, "text", {"other": 1}, [{"total_size": 1}], object()])
def test_what_cannot_be_read_is_refused(source):
    with pytest.raises(PoolError):
        fragmentation(source)


def test_without_cuda_and_without_a_source_it_says_what_to_give(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(PoolError, match="give fragmentation\\(\\) a pool"):
        fragmentation()


# --- simulated allocators --------------------------------------------------------------------------------------------


def test_a_simulated_allocator_is_read_as_its_snapshot_would_be():
    allocator = CachingAllocator(Settings())
    held = [allocator.allocate(3 * MIB, 0) for _ in range(6)]
    whole = allocator.allocate(30 * MIB, 0)
    allocator.free(held[1])
    allocator.free(held[4], wait=True)
    allocator.free(whole)
    found = fragmentation(allocator)
    assert (found.reserved_bytes, found.allocated_bytes, found.active_bytes) == (50 * MIB, 12 * MIB, 15 * MIB)
    assert found.free_blocks == (30 * MIB, 3 * MIB, 2 * MIB)
    assert found.stranded_bytes == allocator.stuck_bytes() == 5 * MIB
    assert found.unserviceable(10 * MIB).share == pytest.approx(5 / 35)


def test_each_refused_request_of_a_recorded_run_was_unserviceable():
    """2 GiB allowed, 46 requests refused: at each of them no free block was large enough, though bytes were free."""
    recorded = trace.load(FOLDER / "capped-default.npz")
    allocator = CachingAllocator(Settings.recorded(recorded.settings, recorded.capacity_bytes))
    live, refused = {}, []
    for code, place, size in zip(recorded.action, recorded.address, recorded.size, strict=True):
        if code == trace.ALLOC:
            live[place] = allocator.allocate(int(size), 0)
        elif code == trace.FREE_REQUESTED and live.get(place) is not None:
            allocator.free(live.pop(place))
        elif code == trace.OOM:
            assert allocator.allocate(int(size), 0) is None
            refused.append(fragmentation(allocator).unserviceable(int(size)))
    assert len(refused) == 46
    assert all(one.share == 1.0 for one in refused)
    assert any(one.free_bytes > one.asked_bytes for one in refused)  # bytes enough, but not in one piece


# --- the pool --------------------------------------------------------------------------------------------------------


def test_a_pool_wastes_only_page_tails():
    pool = PagePool(32 * 1024, device="meta", page_bytes=1024, chunk_bytes=8 * 1024)
    pool.allocate(32)
    pool.free(range(0, 32, 2))
    found = fragmentation(pool, live_bytes=15 * 1024)
    assert (found.external, found.stranded_bytes, found.rounding) == (0, 0, None)
    assert found.unserviceable(1024).share == 0  # every free page serves a request for a page
    assert found.unserviceable(2048).share == 1  # none lies beside another
    assert found.scatter == pytest.approx(15 / 16)
    assert found.page_tail == pytest.approx(1 / 16)
    assert found.over_reservation == pytest.approx(17 / 32)
    assert "internal, page tail" in str(found)
    assert fragmentation(pool.state()).page_tail is None


@pytest.mark.parametrize(("size", "text"), [(5, "5 B"), (2048, "2.00 KiB"), (3 << 29, "1.50 GiB")])
def test_sizes_read_as_torch_prints_them(size, text):
    assert size_text(size) == text
