"""A lane whose workers begin several jobs before they wait for the first: order, depth, failures, and what is kept."""

from __future__ import annotations

import gc
import json
import threading

import pytest
import torch

from o1lab.kv import courier
from o1lab.kv import writeback_bench as bench
from o1lab.kv.checksum import PARTS, checksums, sum_into
from o1lab.kv.designs import KVShape
from o1lab.kv.eviction import EvictingPool
from o1lab.kv.lane import DEPTH, CopyFailed, Job, Lane, host_pool
from o1lab.kv.pool import PagePool, PoolError
from o1lab.kv.ranking import Policy

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = 256


class Script:
    """A copy that waits at its first call until it is told to go on, and then does what is written for each call."""

    def __init__(self, **spoils):
        self.begun, self.open, self.calls, self.spoils = threading.Event(), threading.Event(), [], spoils

    def __call__(self, target, source):
        self.calls.append(len(source))
        number = len(self.calls) - 1
        self.begun.set()
        assert self.open.wait(10)
        target.copy_(source)
        spoil = self.spoils.get(f"at_{number}")
        if isinstance(spoil, BaseException):
            raise spoil
        if spoil == "damage":
            target[0, 5] ^= 1


class Seen(Lane):
    """A lane that writes down what begins and ends; jobs are known by their first page."""

    def _begin(self, job, courier):
        self.events.append(f"begin {job.pages[0]}")
        return super()._begin(job, courier)

    def _end(self, job, courier, flight):
        super()._end(job, courier, flight)
        self.events.append(f"end {job.pages[0]}")


def lane_of(copy, depth=None, pages=8, kind=Seen, **how):
    pool = PagePool(pages * PAGE, device="cpu", page_bytes=PAGE, chunk_bytes=pages * PAGE)
    pool.arena.random_()
    lane = kind(pool, host_pool(pool, pages * PAGE), copy=copy, **how)
    lane.events, lane.depth = [], depth or lane.depth
    return lane


def send(lane, script, n, to_host=True):
    """``n`` jobs of one page, all of them waiting before the first goes on."""
    jobs = [lane.submit(Job(to_host, [([page], [0], [page])])) for page in range(n)]
    assert script.begun.wait(10)
    script.open.set()
    for job in jobs:
        lane.wait(job, 10)
    return jobs


@pytest.mark.parametrize(("depth", "expected"), [
    (None, "begin 0, end 0, begin 1, end 1, begin 2, end 2, begin 3, end 3"),  # the CPU's
    (3, "begin 0, begin 1, begin 2, end 0, begin 3, end 1, end 2, end 3"),
    (9, "begin 0, begin 1, begin 2, begin 3, end 0, end 1, end 2, end 3"),
])  # fmt: skip
def test_the_oldest_job_ends_when_as_many_as_may_be_are_under_way_or_no_other_waits(depth, expected):
    lane = lane_of(script := Script(), depth)
    jobs = send(lane, script, 4)
    lane._jobs.put(None)
    lane._threads[0].join(10)
    assert ", ".join(lane.events) == expected
    sums = checksums(lane.device_pages).tolist()
    assert [job.target for job in jobs] == [job.source for job in jobs] == [[one] for one in sums[:4]]
    assert DEPTH > 1


@pytest.mark.parametrize("readback", [False, True, "direct"])
def test_one_job_of_several_that_fails_or_is_damaged_takes_no_other_with_it(readback):
    lane = lane_of(script := Script(at_1="damage", at_3=RuntimeError("no DMA")), 5, readback=readback)
    jobs = send(lane, script, 5)
    assert [job.source == job.target for job in jobs] == [True, False, True, True, True]  # none of the fourth's
    assert [job.error is None for job in jobs] == [True, True, True, False, True]
    with pytest.raises(CopyFailed, match="copying 1 pages failed, they stay: RuntimeError: no DMA"):
        raise jobs[3].error


def test_all_that_a_dying_thread_had_in_hand_is_found_and_the_rest_goes_on():
    lane = lane_of(script := Script(at_2=SystemExit()), 4)
    jobs = send(lane, script, 5)
    assert [job.error is None for job in jobs] == [False, False, False, True, True]
    assert {str(job.error) for job in jobs[:3]} == {"the thread that copied 1 pages died: they stay where they are"}
    assert jobs[0].worker is jobs[2].worker is not jobs[3].worker


def test_a_fault_while_a_job_ends_is_that_jobs():
    class Breaks(Seen):
        def host_sums(self, slots):
            if slots == [1]:
                raise OSError("bus")
            return super().host_sums(slots)

    lane = lane_of(script := Script(), 3, kind=Breaks)
    assert [job.error is None for job in send(lane, script, 3)] == [True, False, True]


@pytest.mark.parametrize("readback", [False, True, "direct"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_job_goes_in_pieces_and_its_sums_are_those_of_its_pages(monkeypatch, readback, workers):
    monkeypatch.setattr(courier, "PIECE_BYTES", 2 * PAGE + 7)
    script = Script()
    script.open.set()
    lane = lane_of(script, workers=workers, readback=readback)
    pages, slots = [0, 1, 2, 3, 4, 7], [1, 2, 3, 4, 5, 0]
    out = lane.submit(Job(True, [(pages, [0] * 6, slots)]))
    lane.wait(out, 10)
    expected = checksums(lane.device_pages)[pages].tolist()
    assert (out.source, out.target) == (expected, expected)
    assert script.calls == [2, 2, 1, 1]
    lane.device_pages.zero_()
    back = lane.submit(Job(False, [(pages, [0] * 6, slots)]))
    lane.wait(back, 10)
    assert (back.source, back.target) == ([], expected)
    assert checksums(lane.device_pages)[pages].tolist() == expected


def test_what_is_read_back_lands_in_two_pieces_of_memory_and_no_more(monkeypatch):
    monkeypatch.setattr(courier, "PIECE_BYTES", 2 * PAGE)
    script = Script()
    script.open.set()
    lane = lane_of(script, readback=True)
    made = courier.Courier(lane.where)
    for _ in range(3):
        made.begin(lane, Job(True, [([*range(8)], [0] * 8, [*range(8)])]))
    assert [room.shape for room in made._landing if room is not None] == [(2, PAGE)] * 2


def test_a_lane_that_does_not_verify_takes_no_sums(monkeypatch):
    monkeypatch.setattr(courier, "sum_into", None)
    lane = lane_of(script := Script(), 2, verify=False)
    assert [(job.source, job.target, job.error) for job in send(lane, script, 3)] == [([], [], None)] * 3


def test_a_thread_that_is_told_to_stop_ends_what_it_has_begun():
    lane = lane_of(script := Script(), 9)
    jobs = [lane.submit(Job(True, [([page], [0], [page])])) for page in range(3)]
    lane._jobs.put(None)
    script.open.set()
    lane._threads[0].join(10)
    assert [(job.done.is_set(), job.error) for job in jobs] == [(True, None)] * 3


def test_a_forgotten_lane_with_jobs_behind_it_ends_its_thread():
    lane = lane_of(script := Script(), 3)
    send(lane, script, 5)
    (thread,) = lane._threads
    del lane
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def tiers_of(pages, script, depth, **how):
    pool = PagePool(pages * PAGE, device="cpu", page_bytes=PAGE, chunk_bytes=pages * PAGE)
    host = host_pool(pool, 4 * pages * PAGE)
    lane = Lane(pool, host, copy=script, **how)
    lane.depth = depth
    return EvictingPool(pool, host, Policy(copy_at=float("inf"), evict_at=0.0, shield=None, batch_pages=1), lane=lane)


def fill(tiers, owner, n):
    pages = [tiers.allocate(1, owner)[0] for _ in range(n)]
    for page in pages:
        tiers.pool.page(page).random_()
        tiers.seal([page], owner)
    tiers.rest(owner)
    return [tiers.pool.page(page).clone() for page in pages]


def evict_all(tiers):
    tiers.allocate(tiers.pool.pages, "new")
    tiers.release("new")
    tiers.pool.arena.zero_()


def same(tiers, owner, content):
    found = tiers.restore(owner)
    return all(torch.equal(tiers.pool.page(page), one) for page, one in zip(found, content, strict=True))


@pytest.mark.parametrize("spoil", [SystemExit(), RuntimeError("no DMA"), "damage"])
def test_nothing_is_lost_when_one_of_several_copies_under_way_goes_wrong(spoil):
    script = Script(at_2=spoil)
    tiers = tiers_of(4, script, 4)
    content = fill(tiers, "old", 4)
    tiers.write_back()
    assert script.begun.wait(10)
    script.open.set()
    tiers.settle(wait=True)
    assert tiers.states() == ({"CLEAN": 1, "SEALED": 3} if isinstance(spoil, SystemExit) else {"CLEAN": 3, "SEALED": 1})
    tiers.check()
    tiers.write_back(wait=True)
    evict_all(tiers)
    assert same(tiers, "old", content)
    assert tiers.counts.unverified_pages == 0


def test_pages_come_back_while_others_are_on_their_way_out():
    script = Script()
    script.open.set()
    tiers = tiers_of(6, script, 3)
    first = fill(tiers, "first", 3)
    tiers.write_back(wait=True)
    evict_all(tiers)
    script.open.clear()
    script.begun.clear()
    second = fill(tiers, "second", 3)
    tiers.write_back()
    assert script.begun.wait(10)
    assert same(tiers, "first", first)  # the other lane does not wait for this one
    assert tiers.copying_pages == 3
    script.open.set()
    tiers.settle(wait=True)
    assert tiers.states() == {"CLEAN": 6}
    tiers.rest("first")
    tiers.release("first")
    evict_all(tiers)
    assert same(tiers, "second", second)


def test_a_way_to_verify_that_is_none_is_refused():
    with pytest.raises(PoolError, match="readback='host': one of None, False, True, 'direct'"):
        lane_of(None, readback="host")


def test_pages_that_the_summing_device_cannot_read_are_a_plain_error():
    with pytest.raises(RuntimeError, match="meta cannot sum pages in host memory: they are not pinned"):
        sum_into(torch.empty((1, PARTS), dtype=torch.int64, device="meta"), torch.zeros(1, PAGE, dtype=torch.uint8))


def test_the_sweep_names_the_best_that_slows_little_enough(monkeypatch, capsys, tmp_path):
    class Value(float):
        def to_dict(self):
            return {"value": float(self)}

    known = {(1, 64): (0.5, 1.0), (2, 64): (0.9, 9.0), (1, 128): (0.8, 2.5)}

    def rate(at, rounds):
        if at.readback == "direct":
            raise CopyFailed("no such way")
        return {"ratio": Value(known[at.workers, at.batch_pages][0])}

    def slowdown(at, rounds):
        return {"slowdown": Value(known[at.workers, at.batch_pages][1])}

    small = bench.Setting("cpu", KVShape(2, 2, 32), 128, 4096, 1 << 16)
    monkeypatch.setattr(bench, "setting", lambda device, quick, **options: small)
    monkeypatch.setattr(bench, "SWEEP", [(*one, "device") for one in known] + [(1, 64, "direct")])
    with monkeypatch.context() as faked:
        faked.setattr(bench, "rate", rate)
        faked.setattr(bench, "slowdown", slowdown)
        assert bench.main(["--sweep", "--device", "cpu", "--json", str(tmp_path / "sweep.json")]) == 0
        found = json.loads((tmp_path / "sweep.json").read_text())["sweep"]
        assert found["best"] == "--workers 1 --batch 128 --verify-on device"
        assert len(found) == 4
        assert "no such way" in capsys.readouterr().out
        known.update({one: (ratio, 5 + slower) for one, (ratio, slower) in known.items()})
        assert bench.sweep(small)["best"] == "--workers 1 --batch 64 --verify-on device"
    found = bench.sweep(small)  # as it is
    assert set(found) == {"best", *(f"--workers {w} --batch {b} --verify-on {way}" for w, b, way in bench.SWEEP)}
