"""The pool, the measures and the replay on a real GPU: against torch's own counters, and against the simulator."""

from __future__ import annotations

import gc

import pytest

from o1lab.kv import PagePool, PoolError, fragmentation, swing
from o1lab.kv.backing import Modelled, OnDevice
from o1lab.kv.designs import Growing, KVShape, Paged
from o1lab.kv.fragmentation import CHURN, churn
from o1lab.kv.insertion import inserts
from o1lab.kv.replay import replay
from o1lab.kv.traffic import long_cot
from o1lab.memory.allocator import CachingAllocator
from o1lab.memory.allocator_settings import Settings

pytestmark = pytest.mark.gpu

SHAPE = KVShape(layers=4, kv_heads=8, head_dim=128)
LOAD = long_cot(12, concurrent=6, median_tokens=600, most_tokens=1600)


@pytest.fixture(autouse=True)
def fresh():
    import torch

    torch.cuda.init()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def empty(size):
    import torch

    return torch.empty(int(size), dtype=torch.uint8, device="cuda")


def test_a_pool_reserves_its_bytes_once_and_gives_them_back():
    import torch

    before = torch.cuda.memory_reserved()
    pool = PagePool(512 << 20, device="cuda")
    assert torch.cuda.memory_reserved() - before == 512 << 20
    first = torch.cuda.memory_stats()
    for _ in range(2000):
        pool.free(pool.allocate(28))
    assert set(churn(first, torch.cuda.memory_stats(), 2000).values()) == {0.0}
    assert len(CHURN) == 5
    pool.page(7).fill_(3)
    whole = pool.view(torch.bfloat16, (2, 64, 8, 128))
    assert whole.shape == (2048, 2, 64, 8, 128)
    assert whole.device.type == "cuda"
    del pool, whole
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def test_other_tensors_are_never_cut_from_the_pool_s_segment():
    import torch

    pool = PagePool(64 << 20, device="cuda")
    begin, end = pool.arena.data_ptr(), pool.arena.data_ptr() + pool.bytes
    others = [empty(size) for size in (1000, 3 << 20, 30 << 20, 64 << 20)]
    assert not [tensor for tensor in others if begin <= tensor.data_ptr() < end]
    assert torch.cuda.current_device() == pool.arena.device.index


def test_a_pool_larger_than_the_device_is_refused():
    import torch

    _, total = torch.cuda.mem_get_info()
    with pytest.raises(PoolError, match="no pool of"):
        PagePool(2 * total, device="cuda")


def test_the_measures_are_those_of_torch_s_statistics():
    import torch

    held = [empty(size) for size in (1000, 700_000, 3 << 20, 5 << 20, 40 << 20)]
    del held[2]
    found, stats = fragmentation(), fragmentation(torch.cuda.memory_stats())
    for name in ("reserved_bytes", "active_bytes", "allocated_bytes", "requested_bytes", "stranded_bytes"):
        assert getattr(found, name) == getattr(stats, name), name
    assert found.free_bytes == sum(found.free_blocks)
    del held


def test_a_real_refusal_is_explained():
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()  # what earlier tests left would serve the requests below
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (256 << 20)) / total)
    try:
        held = [empty(30 << 20) for _ in range(8)]
        del held[::2]
        keep = [empty(16 << 20) for _ in range(4)]  # cut from the holes, one from each: what is left takes no second
        with pytest.raises(torch.cuda.OutOfMemoryError):
            empty(40 << 20)
        found = fragmentation().unserviceable(40 << 20)
        assert found.free_bytes > found.asked_bytes
        assert found.share == 1.0
        del keep
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_growing_cache_reserves_what_the_simulator_says():
    modelled = replay(LOAD, Growing(SHAPE, Modelled(CachingAllocator(Settings()))), stride=4)
    real = replay(LOAD, Growing(SHAPE, OnDevice("cuda")), stride=4)
    assert (real.used_bytes <= real.reserved_bytes).all()
    assert real.peak_reserved_bytes == pytest.approx(modelled.peak_reserved_bytes, rel=0.03)
    assert (modelled.live_bytes == real.live_bytes).all()


def test_the_paged_cache_asks_the_device_once():
    import torch

    design = Paged(SHAPE, OnDevice("cuda"), capacity_bytes=512 << 20)
    before = torch.cuda.memory_stats()
    found = replay(LOAD, design, stride=4)
    after = torch.cuda.memory_stats()
    assert found.clean
    assert after["num_device_alloc"] == before["num_device_alloc"]
    assert found.append(0.5).value > 0


def test_a_cache_that_runs_out_of_real_memory_loses_requests_and_goes_on():
    import torch

    _, total = torch.cuda.mem_get_info()
    memory = OnDevice("cuda", 4 << 20)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (80 << 20)) / total)
    try:
        found = replay(LOAD, Growing(SHAPE, memory), stride=16)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found.failures + found.refusals > 0
    assert found.finished > 0


@pytest.mark.parametrize("native", ["torch", "cudaMalloc"])
def test_inserts_run_against_native_allocation(native):
    if native == "cudaMalloc":
        pytest.importorskip("cuda.bindings")
    found = inserts(400, device="cuda", threads=4, write=native == "torch", native=native, repeats=6)
    assert found.speedup.n == 6
    assert found.pool.value > 0


def test_pinned_memory_is_rounded_as_the_measure_says():
    import torch

    from o1lab.kv.fragmentation import pinned_bytes

    stats = getattr(torch.cuda, "host_memory_stats", None)
    if stats is None:
        pytest.skip("this torch has no host_memory_stats")
    before = stats()["allocated_bytes.current"]
    kept = torch.empty((5 << 20) + 1, dtype=torch.uint8, pin_memory=True)
    assert stats()["allocated_bytes.current"] - before == pinned_bytes(kept.numel()) == 8 << 20


def test_the_pool_takes_its_memory_once_and_a_growing_cache_feels_a_limit():
    traffic = long_cot(6, concurrent=3, median_tokens=600, most_tokens=900, prompt_tokens=16)
    pool = swing.watch(traffic, lambda memory: Paged(KVShape(), memory, capacity_bytes=128 << 20), "cuda", stride=16)
    assert pool.outcome.clean
    assert pool.swing == 0
    assert pool.taken_bytes[0] >= 128 << 20
    free = swing.watch(traffic, lambda memory: Growing(KVShape(), memory), "cuda", stride=16)
    assert free.outcome.clean
    half = free.outcome.peak_live_bytes // 2
    tight = swing.watch(traffic, lambda memory: Growing(KVShape(), memory), "cuda", stride=16, limit_bytes=half)
    assert not tight.outcome.clean
    assert tight.outcome.peak_reserved_bytes <= half
