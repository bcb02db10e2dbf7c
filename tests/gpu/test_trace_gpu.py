"""Traces recorded on a real GPU: the history is off again, the replay is exact, streams and pools are seen."""

from __future__ import annotations

import inspect

import pytest

from o1lab.errors import ProbeError
from o1lab.memory import trace
from o1lab.memory.lifetimes import hazards, lifetimes
from o1lab.memory.simulate import simulate

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh():
    import torch

    torch.cuda.init()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def empty(size):
    import torch

    return torch.empty(int(size), dtype=torch.uint8, device="cuda")


def churn(count=600, seed=0):
    import random

    rng, live = random.Random(seed), []
    for _ in range(count):
        if live and rng.random() < 0.48:
            live.pop(rng.randrange(len(live)))
        else:
            live.append(empty(min(2**26, rng.lognormvariate(13, 2))))
    return live


def test_a_recording_is_bounded_exact_and_off_again():
    import torch

    torch.cuda.reset_peak_memory_stats()
    with trace.record(stacks=None) as recording:
        kept = churn()
    assert not torch._C._cuda_isHistoryEnabled()
    found = simulate(recording.trace)
    stats = torch.cuda.memory_stats()
    assert found.error == (0, 0)
    assert found.allocated[-1] == stats["allocated_bytes.all.current"]
    assert found.peak_reserved_bytes == stats["reserved_bytes.all.peak"]
    assert recording.trace.overflowed is False
    assert lifetimes(recording.trace).frees_without_block == 0
    assert not [hazard for hazard in hazards(recording.trace) if hazard.severity == "error"]
    del kept


def test_a_full_recording_says_so_and_is_replayed_from_what_was_live():
    with trace.record(max_entries=300, stacks=None) as recording:
        kept = churn()
    assert (len(recording.trace), recording.trace.overflowed) == (300, True)
    assert max(simulate(recording.trace).error) < 0.01
    del kept


def test_stacks_name_this_file():
    with trace.record() as recording:
        kept = empty(5 << 20)
    (site,) = recording.trace.site[recording.trace.action == trace.ALLOC]
    assert recording.trace.sites[site].startswith("test_trace_gpu.py:")
    del kept


def test_the_history_is_off_after_an_exception_and_left_alone_where_it_was_on():
    import torch

    with pytest.raises(ZeroDivisionError), trace.record():
        1 / 0  # noqa: B018
    assert not torch._C._cuda_isHistoryEnabled()
    torch.cuda.memory._record_memory_history(max_entries=10)
    try:
        with pytest.raises(ProbeError, match="on already"), trace.record():
            pass
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)


def test_a_dump_is_read_without_running_it(tmp_path):
    import torch

    torch.cuda.memory._record_memory_history(max_entries=1000)
    try:
        kept = churn(100)
        torch.cuda.memory._dump_snapshot(str(tmp_path / "dump.pickle"))
    finally:
        torch.cuda.memory._record_memory_history(None)
    found = trace.load(tmp_path / "dump.pickle")
    assert (found.action == trace.ALLOC).sum() >= len(kept)
    assert found.reserved()[-1] == torch.cuda.memory_reserved()


def test_a_block_used_by_another_stream_is_parked():
    import torch

    other = torch.cuda.Stream()
    busy = torch.ones(1 << 26, device="cuda")
    with trace.record(stacks=None) as recording:
        block = empty(8 << 20)
        with torch.cuda.stream(other):
            for _ in range(50):
                busy.mul_(1.0)
        block.record_stream(other)
        del block
        kept = empty(8 << 20)  # before the other stream is done
        torch.cuda.synchronize()
        later = empty(1 << 20)
    lives = lifetimes(recording.trace)
    assert lives.parking.blocks == 1
    assert lives.parking.peak_bytes == 8 << 20
    del kept, later


def test_a_pool_that_is_not_split_is_replayed():
    import torch

    if "no_split" not in inspect.signature(torch.cuda.MemPool.__init__).parameters:
        pytest.skip("this torch has no MemPool(no_split=True)")
    pool, live = torch.cuda.MemPool(no_split=True), []
    with trace.record(stacks=None) as recording, torch.cuda.use_mem_pool(pool):
        for size in (3, 30, 7, 1):
            live.append(empty(size << 20))
        live.pop(0)
        live.append(empty(2 << 20))
    (name,) = recording.trace.pools[1:]
    assert simulate(recording.trace, no_split=(name,)).error == (0, 0)
