"""Eviction and write-back on a real GPU: sums agree with the CPU's, streams keep their order, nothing waits for all."""

from __future__ import annotations

import random
import threading
import time

import pytest

from o1lab.kv import faults
from o1lab.kv import writeback_bench as bench
from o1lab.kv.checksum import checksums
from o1lab.kv.eviction import EvictingPool
from o1lab.kv.lane import DEPTH, CopyFailed, Job, Lane, host_pool
from o1lab.kv.pool import PagePool
from o1lab.kv.ranking import Policy
from o1lab.kv.tiers import DamagedCopy

pytestmark = pytest.mark.gpu

PAGE, CHUNK = 256 << 10, 64 << 20
WAYS = [True, False, "direct"]


def tiers_of(pages=256, host_pages=1024, *, readback=None, copy=None, back=None, workers=2, **policy):
    pool = PagePool(pages * PAGE, device="cuda", page_bytes=PAGE, chunk_bytes=CHUNK)
    host = host_pool(pool, host_pages * PAGE)
    policy = Policy(**{"copy_at": float("inf"), "shield": None, **policy})
    lane = Lane(pool, host, workers=workers, readback=readback, copy=copy)
    return EvictingPool(pool, host, policy, lane=lane, back=back and Lane(pool, host, copy=back))


def fill(tiers, owner, n, group=8):
    pages = []
    for _ in range(n // group):
        new = tiers.allocate(group, owner, after=pages[-1] if pages else None)
        for page in new:
            tiers.pool.page(page).random_()
        tiers.seal(new, owner)
        pages += new
    tiers.rest(owner)
    return [tiers.pool.page(page).cpu() for page in pages]


def evict_all(tiers):
    for page in tiers.allocate(tiers.pool.pages, "other"):
        tiers.pool.page(page).random_()
    tiers.release("other")


def same(tiers, owner, content):
    import torch

    found = tiers.restore(owner)
    return all(torch.equal(tiers.pool.page(page).cpu(), one) for page, one in zip(found, content, strict=True))


def test_the_sums_are_the_cpus_for_any_page_and_any_way_to_compute_them(monkeypatch):
    import torch

    from o1lab.kv import checksum

    for page_bytes in (PAGE, 4 * 4097, 64):
        pages = torch.randint(0, 256, (5, page_bytes), dtype=torch.uint8)
        expected = checksums(pages).tolist()
        assert checksums(pages.cuda()).tolist() == expected
        with monkeypatch.context() as patched:
            patched.setattr(checksum, "_kernel", lambda: None)
            assert checksums(pages.cuda()).tolist() == expected


def test_sums_make_nobody_wait():
    import torch

    pages = torch.zeros(8, PAGE, dtype=torch.uint8, device="cuda")
    checksums(pages)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        checksums(pages)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_every_bit_of_a_word_anywhere_counts():
    import torch

    page = torch.randint(0, 256, (1, PAGE), dtype=torch.uint8, device="cuda")
    flipped = page.repeat(256, 1)
    for number in range(256):
        flipped[number, random.Random(number).randrange(PAGE)] ^= 1 << number % 8
    assert not (checksums(flipped) == checksums(page)).any()


def test_host_memory_is_pinned_and_of_the_size_that_was_asked_for():
    import torch

    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    pool = PagePool(8 * PAGE, device="cuda", page_bytes=PAGE, chunk_bytes=CHUNK)
    host = host_pool(pool, 1000 * PAGE)
    assert host.arena.is_pinned()
    assert host.arena.numel() == 1000 * PAGE
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == before


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("readback", WAYS)
def test_pages_go_and_come_back_as_they_were(readback, workers):
    tiers = tiers_of(readback=readback, workers=workers, batch_pages=48)
    content = fill(tiers, "old", 256)
    assert tiers.write_back(wait=True) == 256
    evict_all(tiers)
    assert tiers.counts.evicted_pages == 256
    assert tiers.counts.unverified_pages == 0
    assert same(tiers, "old", content)
    tiers.check()


@pytest.mark.parametrize("readback", WAYS)
@pytest.mark.parametrize("kind", ["bit flip", "swap", "zeroed"])
def test_damage_on_the_way_out_is_caught(readback, kind):
    bad = faults.Saboteur(random.Random(kind))
    tiers = tiers_of(16, 64, readback=readback, copy=bad)

    def spoil(target, source):
        target.copy_(source)  # waits: the damage comes after the bytes
        if bad.kind:
            bad.kind = ""
            faults.damage(kind, target.view(-1), bad.chance)

    tiers.lane.copy = spoil
    content = fill(tiers, "old", 16)
    bad.kind = kind
    with pytest.raises(CopyFailed, match="is not what was read"):
        tiers.write_back(wait=True)
    tiers.write_back(wait=True)
    evict_all(tiers)
    assert same(tiers, "old", content)


def test_a_host_copy_that_rots_is_not_handed_out():
    tiers = tiers_of(16, 64)
    fill(tiers, "old", 16)
    tiers.write_back(wait=True)
    evict_all(tiers)
    tiers.host.page(tiers._owners["old"].entries[1].slots[3])[99] ^= 4
    with pytest.raises(DamagedCopy, match="group 1 of 'old'"):
        tiers.restore("old")


def test_a_thread_that_dies_loses_nothing():
    bad = faults.Saboteur(random.Random(0))
    tiers = tiers_of(16, 64, copy=bad)
    content = fill(tiers, "old", 16)
    bad.kind = "killed thread"
    with pytest.raises(CopyFailed, match="died"):
        tiers.write_back(wait=True)
    tiers.write_back(wait=True)
    evict_all(tiers)
    assert same(tiers, "old", content)


def jobs_of(n, pages=40):
    """``n`` jobs, each longer than one piece."""
    places = [[*range(pages * number, pages * (number + 1))] for number in range(n)]
    return [Job(True, [(numbers, [0] * pages, numbers)]) for numbers in places]


def lane_of(pages, **how):
    pool = PagePool(pages * PAGE, device="cuda", page_bytes=PAGE, chunk_bytes=pages * PAGE)
    pool.arena.random_()
    return Lane(pool, host_pool(pool, pages * PAGE), **how)


@pytest.mark.parametrize("readback", WAYS)
def test_a_worker_begins_several_jobs_before_the_first_is_over(readback):
    import torch

    lane, begun = lane_of(40 * 6, readback=readback), []
    lane.copy = lambda target, source: (begun.append(len(source)), target.copy_(source, non_blocking=True))
    for job in [lane.submit(job) for job in jobs_of(6)]:  # compiles, and makes what later ones use again
        lane.wait(job)
    del begun[:]
    torch.cuda._sleep(1_000_000_000)  # the copies are behind this
    jobs = jobs_of(6)
    for job in jobs:
        job.after.append(lane.mark())
        lane.submit(job)
    until = time.monotonic() + 5
    while sum(begun) < 40 * DEPTH and time.monotonic() < until:
        time.sleep(0.001)
    assert not torch.cuda.current_stream().query(), "the pause was too short for this test"
    assert sum(begun) == 40 * DEPTH
    assert not any(job.done.is_set() for job in jobs)
    for job in jobs:
        lane.wait(job)
    expected = checksums(lane.device_pages).tolist()
    assert (
        [job.source for job in jobs]
        == [job.target for job in jobs]
        == [expected[40 * number : 40 * (number + 1)] for number in range(6)]
    )
    assert torch.equal(lane.device_pages.cpu(), lane.host_pages)


@pytest.mark.parametrize("readback", WAYS)
@pytest.mark.parametrize("spoil", ["damage", "raises", "dies"])
def test_of_three_jobs_under_way_only_the_spoilt_one_is_rejected(readback, spoil):
    import torch

    lane = lane_of(120, readback=readback)

    def copy(target, source):
        target.copy_(source, non_blocking=True)
        if source.data_ptr() == lane.device_pages[40].data_ptr() and spoil:
            if spoil == "damage":
                torch.cuda.current_stream().synchronize()
                target[3, 99] ^= 1
            else:
                raise RuntimeError("no DMA") if spoil == "raises" else SystemExit

    lane.copy = copy
    jobs = [lane.submit(job) for job in jobs_of(3)]
    for job in jobs:
        lane.wait(job)
    good = [job.error is None and job.source == job.target for job in jobs]
    if spoil == "damage":
        assert good == [True, False, True]
        assert [a == b for a, b in zip(jobs[1].source, jobs[1].target, strict=True)].index(False) == 3
        assert jobs[1].error is None
    else:
        assert not good[1]
        assert good[2]
        assert good[0] or spoil == "dies"
        assert "no DMA" in str(jobs[1].error) or "died" in str(jobs[1].error)
    spoil = ""
    again = [lane.submit(job) for job in jobs_of(3)]
    for job in again:
        lane.wait(job)
    assert all(job.error is None and job.source == job.target for job in again)
    assert torch.equal(lane.device_pages.cpu(), lane.host_pages)


@pytest.mark.parametrize("readback", WAYS)
def test_neither_the_caller_nor_its_stream_waits_for_copies(readback):
    import torch

    tiers = tiers_of(readback=readback, workers=1, batch_pages=64)
    fill(tiers, "old", 256)
    tiers.write_back(wait=True)  # compiles
    tiers.release("old")
    content = fill(tiers, "old", 256)
    beside, gate = torch.zeros(1 << 20, device="cuda"), threading.Event()
    torch.cuda.synchronize()
    tiers.lane.copy = lambda target, source: (gate.wait(10), target.copy_(source, non_blocking=True))
    tiers.write_back()
    for _ in range(10):
        beside += 1
    torch.cuda.current_stream().synchronize()  # while no copy has even begun
    assert tiers.copying_pages == 256
    gate.set()
    tiers.settle(wait=True)
    assert float(beside.min()) == 10
    evict_all(tiers)
    assert same(tiers, "old", content)


def test_memory_that_the_device_cannot_read_is_a_failed_copy():
    pool = PagePool(8 * PAGE, device="cuda", page_bytes=PAGE, chunk_bytes=CHUNK)
    plain = PagePool(8 * PAGE, device="cpu", page_bytes=PAGE, chunk_bytes=CHUNK)
    lane = Lane(pool, plain, readback="direct")
    job = lane.submit(Job(True, [([0, 1], [0, 0], [0, 1])]))
    lane.wait(job)
    with pytest.raises(CopyFailed, match="not pinned"):
        raise job.error


def test_a_store_waits_for_the_step_that_fills_the_page():
    import torch

    tiers = tiers_of(16, 64)
    pages = tiers.allocate(16, "step")
    torch.cuda._sleep(200_000_000)  # the step is still running when its pages are sealed
    for page in pages:
        tiers.pool.page(page).fill_(7)
    tiers.seal(pages, "step")
    tiers.rest("step")
    tiers.write_back(wait=True)
    assert set(tiers.host.page(tiers._owners["step"].entries[0].slots[0]).tolist()) == {7}


def test_a_load_waits_for_the_last_reader_of_its_pages():
    import torch

    tiers = tiers_of(16, 64)
    fill(tiers, "old", 16)
    tiers.write_back(wait=True)
    for page in (pages := tiers.allocate(16, "reader")):
        tiers.pool.page(page).fill_(3)
    read = torch.empty(16 * PAGE, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(200_000_000)
    read.copy_(tiers.pool.arena)  # under way when the reader is released
    tiers.release("reader")
    tiers.restore("old")
    torch.cuda.synchronize()
    assert len(pages) == 16
    assert bool((read == 3).all())


def test_the_bench_runs_and_its_ratios_are_of_one_run():
    at = bench.setting("cuda", quick=True)
    found = {name: bench.TABLES[name](at) for name in ("rate", "slowdown", "evict", "restore")}
    assert found["rate"]["ratio"].value > 0
    assert found["restore"]["ratio"].n == found["slowdown"]["slowdown"].n == bench.ROUNDS
    assert found["evict"]["clean, p50"].value < found["evict"]["as written, p50"].value
