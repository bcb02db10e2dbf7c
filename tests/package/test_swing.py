"""Memory read while traffic is served, the figures of the pool, and the rules of notebook 10 with each fix off."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest
import torch

from o1lab import claims, host, plots, stats
from o1lab.errors import EstimateError
from o1lab.kv import Growing, KVShape, Paged, PoolError, Static, faults, long_cot, pool_view, swing, writeback_bench
from o1lab.kv.backing import limited
from o1lab.kv.replay import replay

LEDGER = claims.load()
SHAPE = KVShape(2, 2, 64)
TRAFFIC = {"concurrent": 3, "median_tokens": 200, "most_tokens": 400, "prompt_tokens": 16}


def paged(memory):
    return Paged(SHAPE, memory, capacity_bytes=8 << 20, page_bytes=1 << 14, chunk_bytes=1 << 20)


def test_the_swing_is_half_the_range_under_full_load():
    taken, running = [1, 80, 90, 110, 100, 5], [1, 2, 2, 2, 2, 1]
    assert swing.swing(taken, running, warm_up=0) == pytest.approx(100 * 15 / 95)
    assert swing.swing(taken, running, warm_up=0.25) == pytest.approx(10.0)
    assert swing.swing([7, 7], [1, 1]) == 0
    for nothing in (([], []), ([0, 0], [1, 1])):
        with pytest.raises(PoolError, match="no swing"):
            swing.swing(*nothing)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells files from memory of one's own")
def test_pages_of_files_that_the_system_takes_back_are_no_memory_given_back(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(64 << 20))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0  # all of it is resident now

        def make(memory):
            mapped.madvise(mmap.MADV_DONTNEED)
            return paged(memory)

        found = swing.watch(long_cot(4, **TRAFFIC), make, "cpu", stride=16)
    assert found.taken_bytes.min() > 7 << 20
    assert found.swing < 20


@pytest.mark.skipif(not host.mallinfo2(), reason="only glibc hands free heap back")
def test_memory_that_the_heap_holds_free_does_not_hide_what_is_taken():
    np.ones(24 << 20, dtype=np.uint8)  # if malloc mapped this block, it takes such blocks from its heap from now on
    hole, wall = np.ones(20 << 20, dtype=np.uint8), np.ones(1 << 20, dtype=np.uint8)  # the wall keeps the heap's end up
    full = host.rss_bytes()
    del hole
    assert full - host.rss_bytes() < 4 << 20  # freed, and still resident
    found = swing.watch(long_cot(4, **TRAFFIC), paged, "cpu", stride=16)
    assert found.taken_bytes.min() > 7 << 20
    assert wall.all()


@pytest.mark.parametrize("make", [paged, lambda memory: Growing(SHAPE, memory)], ids=["paged", "growing"])
def test_real_memory_is_read_once_a_step(make):
    found = swing.watch(long_cot(6, **TRAFFIC), make, "cpu", stride=16)
    assert len(found.taken_bytes) == len(found.outcome.running) > 0
    assert found.outcome.clean
    assert found.outcome.finished == 6


class FakeCuda:
    """Stands for torch.cuda: what is reserved follows from a growing cache's own count."""

    def __init__(self, monkeypatch):
        self.fractions, self.reads = [], 0
        for name in ("memory_reserved", "set_per_process_memory_fraction", "current_device", "get_device_properties"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def memory_reserved(self, device=None):
        self.reads += 1
        return 1000 + self.reads

    def set_per_process_memory_fraction(self, fraction, index):
        assert index == 0
        self.fractions.append(fraction)

    def current_device(self):
        return 0

    def get_device_properties(self, index):
        return type("Properties", (), {"total_memory": 10_000})


def test_the_limit_is_set_for_the_run_and_taken_back_after_an_error(monkeypatch):
    fake = FakeCuda(monkeypatch)
    memory = type("Memory", (), {"device": torch.device("cuda")})
    limit = limited(memory, 2999)
    limit.__enter__()
    assert fake.fractions == [pytest.approx(0.4)]
    assert not limit.__exit__(MemoryError, MemoryError(), None)
    assert fake.fractions[1:] == [1.0]


def test_what_torch_has_reserved_is_what_is_read_on_cuda(monkeypatch):
    FakeCuda(monkeypatch)
    memory = swing._Read("cpu")
    memory._cuda, memory._before = True, 1001
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    memory.settle(), memory.settle()
    assert memory.read == [0, 1]


def test_only_cuda_memory_can_be_limited():
    with pytest.raises(PoolError, match="only CUDA"):
        swing.watch(long_cot(1, **TRAFFIC), paged, "cpu", limit_bytes=1)


def test_no_peak_of_memory_is_lost_in_the_figure():
    live = np.zeros(5000)
    live[3210] = 7 * 2**30
    figure = pool_view.memory(live, {"broken": live, "fixed": live[:4000]}, {}, title="It peaks")
    assert max(figure.data[-1].y) == 7
    plots.check(figure)


def test_pauses_are_shares_that_waited_longer():
    figure = pool_view.pauses({"broken": [400, 100, 200, 300], "fixed": [1]}, {"broken": "late"}, 100, title="It waits")
    assert list(figure.data[0].x) == [100, 200, 300, 400]
    assert list(figure.data[0].y) == [100, 75, 50, 25]
    plots.check(figure)
    for wrong in ({"broken": []}, {"nobody": [1]}):
        with pytest.raises(EstimateError, match="pauses"):
            pool_view.pauses(wrong, {}, 100, title="")


def test_pauses_of_both_policies_are_taken_alike():
    at = writeback_bench.Setting("cpu", KVShape(2, 2, 16), 64, 4096, 1 << 12)
    found = writeback_bench.pauses(at, least=8)
    assert set(found) == {"clean", "as written"}
    assert min(map(len, found.values())) >= 8


def test_faults_by_place_are_all_faults():
    rows = faults.inject(34, "copy")
    places = faults.by_place(rows)
    assert list(places) == ["out", "host", "back"]
    assert sum(share.n for share in places.values()) == 34
    assert places["host"].value == 0


@pytest.mark.parametrize("claim", ["lazy-eviction/integrity", "lazy-eviction/verified"])
def test_without_checks_the_rule_of_integrity_refutes(claim):
    found = {verify: faults.detection(faults.inject(170, verify)) for verify in ("none", "copy")}
    for verify, share in found.items():
        assert claims.decide(LEDGER[claim], share, {"cpu"}).outcome == "refuted", verify


def test_without_pages_the_rule_of_waste_refutes():
    """On the traffic that notebook 10 draws in a smoke run."""
    traffics, waste = [long_cot(32, seed) for seed in range(5)], {}
    makers = {
        "pool": lambda: Paged(KVShape(), capacity_bytes=8 << 30),
        "none": lambda: Static(KVShape(), most_tokens=12_288),
    }
    for name, make in makers.items():
        waste[name] = stats.mean([100 * replay(one, make(), stride=7).tail_waste for one in traffics], "%")
    outcomes = {name: claims.decide(LEDGER["kv-pool/tail-waste"], one, {"cpu"}).outcome for name, one in waste.items()}
    assert outcomes == {"pool": "supported", "none": "refuted"}


def test_without_the_pool_the_rule_of_swing_does_not_pass():
    found = [
        swing.watch(long_cot(8, seed, **TRAFFIC), lambda memory: Growing(KVShape(), memory), "cpu", stride=32)
        for seed in range(3)
    ]
    swings = [swing.swing(one.outcome.reserved_bytes, one.outcome.running) for one in found]
    assert claims.decide(LEDGER["kv-pool/swing"], stats.mean(swings, "%"), {"cuda"}).outcome != "supported"
