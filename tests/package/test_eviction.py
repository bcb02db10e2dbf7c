"""Eviction and write-back: only what the policy allows goes, nothing goes unverified, nothing is lost."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from o1lab.kv import courier, faults, lane
from o1lab.kv import writeback_bench as bench
from o1lab.kv.backing import OnDevice
from o1lab.kv.checksum import checksums, keys
from o1lab.kv.designs import KVShape
from o1lab.kv.eviction import DamagedCopy, EvictingPool, EvictionRefused
from o1lab.kv.lane import CopyFailed, Lane, host_pool, runs
from o1lab.kv.offload import Offloading, compare_policies
from o1lab.kv.pool import ForeignPage, PagePool, PoolError, PoolExhausted, StalePage
from o1lab.kv.ranking import ACTIVE, SHIELDED, Entry, Policy, Ranking, State
from o1lab.kv.replay import replay
from o1lab.kv.traffic import Request, Traffic, long_cot

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = 256


class Clock:
    """A clock that stands still until it is told to go on."""

    now = 0.0

    def __call__(self):
        return self.now


def tiers_of(pages=8, host_pages=32, *, device="cpu", lane=None, back=None, clock=None, **policy):
    pool = PagePool(pages * PAGE, device=device, page_bytes=PAGE, chunk_bytes=8 * PAGE)
    host = host_pool(pool, host_pages * PAGE)
    policy = Policy(**policy)
    lane = lane and Lane(pool, host, copy=lane, verify=policy.verify != "none")
    back = back and Lane(pool, host, copy=back, verify=policy.verify == "full")
    return EvictingPool(pool, host, policy, clock=clock or Clock(), lane=lane, back=back)


def fill(tiers, owner, n, group=1, rest=True):
    """An owner with ``n`` random pages in sealed groups, idle; returns their content."""
    pages = []
    for _ in range(n // group):
        new = tiers.allocate(group, owner)
        for page in new:
            tiers.pool.page(page).copy_(torch.randint(0, 256, (PAGE,), dtype=torch.uint8))
        tiers.seal(new, owner)
        pages += new
    content = [tiers.pool.page(page).clone() for page in pages]
    if rest:
        tiers.rest(owner)
    return content


def same(tiers, owner, content):
    pages = tiers.restore(owner)
    tiers.rest(owner)
    return len(pages) == len(content) and all(
        torch.equal(tiers.pool.page(page), one) for page, one in zip(pages, content, strict=True)
    )


# --- the checksum ----------------------------------------------------------------------------------------------------


def page_of(words):
    return torch.tensor(words, dtype=torch.int32).view(1, -1).view(torch.uint8)


def weighted(page):
    """The pair of sums weighted by position that the checksum is better than: over 64-bit words."""
    words = page.view(torch.int64).flatten()
    return int(words.sum()), int((words * (2 * torch.arange(len(words)) + 1)).sum())


def test_every_single_bit_changes_the_sum():
    page = torch.randint(0, 256, (1, 64), dtype=torch.uint8)
    flipped = page.repeat(512, 1)
    for bit in range(512):
        flipped[bit, bit // 8] ^= 1 << bit % 8
    assert not (checksums(flipped) == checksums(page)).any()
    assert len(set(checksums(flipped).tolist())) == 512


@pytest.mark.parametrize("kind", ["swap", "permute", "rotate", "zero", "truncate", "two bits"])
def test_other_damage_changes_the_sum(kind):
    chance = random.Random(kind)
    pages = torch.randint(0, 256, (500, 1024), dtype=torch.uint8)
    damaged = pages.clone()
    for page in damaged.view(torch.int32):
        first, second = sorted(chance.sample(range(256), 2))
        if kind == "swap":
            page[[first, second]] = page[[second, first]]
        elif kind == "permute":
            page[:] = page[torch.randperm(256)]
        elif kind == "rotate":
            page[:] = page.roll(first + 1)
        elif kind == "zero":
            page[first:second] = 0
        elif kind == "truncate":
            page[second:] = page[:1]
        else:
            page[[first, second]] ^= 1 << chance.randrange(31)
    changed = (damaged != pages).any(1)
    assert changed.sum() > 490
    assert not (checksums(damaged) == checksums(pages))[changed].any()


def test_it_finds_what_sums_weighted_by_position_miss():
    page = torch.randint(0, 256, (1, 1024), dtype=torch.uint8)
    signs = page.clone()
    signs[0, [7, 8 * 40 + 7]] ^= 128  # the signs of two 16-bit floats
    assert weighted(signs) == weighted(page)
    assert checksums(signs) != checksums(page)
    full, empty = torch.zeros(2, 1, 1 << 18, dtype=torch.uint8)
    full[0, 7::8] = 0x40  # every fourth of its 16-bit floats is 2.0
    assert weighted(full) == weighted(empty)
    assert checksums(full) != checksums(empty)


def test_keys_are_odd_fixed_and_not_repeated():
    assert (keys(1000) & 1).all()
    assert len(set(keys(1000).tolist())) == 1000
    assert keys(1000)[0] == -4416419835384380725


def test_sums_do_not_depend_on_how_many_pages_are_summed():
    pages = torch.randint(0, 256, (9, 96), dtype=torch.uint8)
    assert checksums(pages).tolist() == [int(checksums(page[None])) for page in pages]
    with pytest.raises(PoolError, match="words of 4 bytes"):
        checksums(pages[:, :95].contiguous())


KERNEL = """
import torch
from o1lab.kv.checksum import checksums, keys
from o1lab.kv.checksum_kernel import sum_words
words = torch.randint(-(2**31), 2**31 - 1, (3, 700), dtype=torch.int32)
parts = torch.empty((3, 4), dtype=torch.int64)
sum_words[(3, 4)](words, torch.from_numpy(keys(700)), parts, 700, 4, BLOCK=128)
assert parts.sum(1).tolist() == checksums(words.view(torch.uint8)).tolist()
print("equal")
"""


def test_the_kernel_sums_as_the_cpu_does():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


# --- the order -------------------------------------------------------------------------------------------------------


def order(policy, now, *entries, level=ACTIVE, active=()):
    ranking = Ranking(policy)
    for name, changes in enumerate(entries):
        entry = Entry(name, 0, [name], [0], **{"last_use": 0.0, **changes})
        ranking.put(entry, 0.0, active=name in active)
    found = []
    while (entry := ranking.pop(now, level)) is not None:
        found.append(entry.owner)
    return found


def test_the_least_recently_used_goes_first_and_uses_count():
    plain = Policy(shield=None, age=10.0)
    assert order(plain, 100, {"last_use": 3.0}, {"last_use": 1.0}, {"last_use": 2.0}) == [1, 2, 0]
    assert order(plain, 100, {"uses": 3}, {"last_use": 15.0}, {"last_use": 25.0}) == [1, 0, 2]  # 3 uses: 2 τ


def test_an_expired_time_to_live_goes_first_and_one_that_runs_is_shielded():
    policy = Policy(shield=0.0, age=10.0, overdue=4.0)
    lived = ({"last_use": 0.0}, {"last_use": 30.0, "expiry": 50.0})
    assert order(policy, 40, *lived) == [0, 1]  # shielded until 50
    assert order(policy, 40, *lived, level=0) == [0]
    assert order(policy, 60, *lived, level=0) == [1, 0]  # overdue: worth 40 of age
    assert order(Policy(shield=None, age=10.0), 40, {"last_use": 9.0, "expiry": 90.0}, {"last_use": 10.0}) == [0, 1]
    assert order(Policy(shield=None, age=10.0), 95, {"last_use": 9.0}, {"last_use": 30.0, "expiry": 90.0}) == [1, 0]


def test_recent_use_shields_and_active_owners_come_last():
    policy = Policy(shield=5.0)
    entries = ({"last_use": 9.0}, {"last_use": 0.0}, {"last_use": 1.0})
    assert order(policy, 10, *entries, level=0) == [1, 2]
    assert order(policy, 10, *entries, level=SHIELDED, active={1}) == [2, 0]
    assert order(policy, 10, *entries, active={1}) == [2, 0, 1]


def test_what_was_ranked_anew_is_not_found_twice():
    ranking = Ranking(Policy(shield=None))
    first, second = Entry("a", 0, [0], [0], 0.0), Entry("b", 0, [1], [0], 1.0)
    for entry in (first, second):
        ranking.put(entry, 2.0)
    first.last_use = 5.0
    ranking.put(first, 5.0)
    second.stamp += 1  # gone elsewhere
    assert ranking.pop(9.0) is first
    assert ranking.pop(9.0) is None


def test_ranking_anew_for_ever_keeps_the_heaps_small():
    ranking, entries = Ranking(Policy(shield=2.0)), [Entry(name, 0, [name], [0], 0.0) for name in range(40)]
    for turn in range(200):
        for entry in entries:
            entry.last_use = float(turn)
            ranking.put(entry, float(turn))
    assert len(ranking._waiting) + len(ranking._ready) < 1000
    assert len({ranking.pop(1000.0).owner for _ in entries}) == 40
    assert ranking.pop(1000.0) is None


@pytest.mark.parametrize("wrong", [{"verify": "some"}, {"evict_at": 1.5}, {"copy_at": -1}, {"age": 0}], ids=str)
def test_a_policy_that_cannot_be_is_refused(wrong):
    with pytest.raises(PoolError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))!r}"):
        Policy(**wrong)


# --- when something goes, and what -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Policy(), Policy.as_written()], ids=["ours", "as written"])
def test_nothing_goes_without_both_a_failed_request_and_95_percent(policy):
    tiers = tiers_of(20, **vars(policy))
    content = fill(tiers, "old", 18)
    with pytest.raises(EvictionRefused, match="90% of the pages are in use, eviction begins at 95%"):
        tiers.allocate(3, "new")
    tiers.allocate(2, "new")  # 100 %, and no request has failed
    assert tiers.counts.evicted_pages == 0
    tiers.allocate(1, "new")
    assert tiers.counts.evicted_pages == 1
    tiers.check()
    tiers.release("new")
    assert same(tiers, "old", content)


def test_only_the_shortfall_goes_and_of_a_sequence_the_last_page():
    tiers = tiers_of(8)
    fill(tiers, "old", 6)
    tiers.allocate(2, "new")
    tiers.release("new")
    tiers.allocate(1, "first")
    with pytest.raises(EvictionRefused, match="asked for 3"):
        tiers.allocate(3, "first")  # 7 of 8 pages: 88 %
    tiers.allocate(1, "first")
    tiers.allocate(3, "first")
    assert tiers.counts.evicted_pages == 3
    assert [entry.state for entry in tiers._owners["old"].entries] == [State.CLEAN] * 3 + [State.HOST] * 3


def test_the_active_and_the_open_never_go_and_a_refusal_evicts_nothing():
    tiers = tiers_of(8)
    fill(tiers, "idle", 2)
    fill(tiers, "active", 4, rest=False)
    tiers.allocate(2, "open")
    tiers.rest("open")
    with pytest.raises(EvictionRefused, match="idle owners hold 2 pages in full groups") as caught:
        tiers.allocate(3, "new")
    assert isinstance(caught.value, PoolExhausted)
    assert (caught.value.asked, caught.value.free, caught.value.short) == (3, 0, 3)
    assert tiers.counts.evicted_pages == 0
    assert (tiers.counts.failed_requests, tiers.counts.refusals) == (1, 1)
    assert "new" not in tiers
    tiers.allocate(2, "new")
    tiers.settle(wait=True)
    assert tiers.states() == {"OPEN": 4, "CLEAN": 4, "HOST": 2}


def test_the_coldest_owner_goes_and_a_touch_or_a_time_to_live_saves_it():
    def gone(save):
        clock = Clock()
        tiers = tiers_of(6, clock=clock, shield=0.5)
        for owner in "abc":
            clock.now += 1
            fill(tiers, owner, 2, rest=False)
            tiers.rest(owner, 100.0 if save == "ttl" and owner == "a" else None)
        clock.now += 1
        if save == "touch":
            tiers.touch("a")
        clock.now += 1
        tiers.allocate(2, "new")
        return [owner for owner in "abc" if tiers._owners[owner].entries[0].state is State.HOST]

    assert (gone("nothing"), gone("touch"), gone("ttl")) == (["a"], ["b"], ["b"])


def test_early_copies_leave_nothing_to_copy_when_a_request_fails_and_late_ones_all():
    found = {}
    for name, policy in (("ours", Policy()), ("as written", Policy.as_written())):
        tiers = tiers_of(8, **vars(policy))
        fill(tiers, "old", 8)
        tiers.settle(wait=True)
        before = tiers.counts.copied_pages
        tiers.allocate(3, "new")
        found[name] = before, tiers.counts.late_pages
        assert len(tiers.counts.stalls_us) == 1
    assert found == {"ours": (8, 0), "as written": (0, 3)}


def test_copying_starts_at_80_percent_with_the_coldest_and_with_active_ones_last():
    tiers = tiers_of(10, batch_pages=1, in_flight_pages=1)
    fill(tiers, "active", 4, rest=False)
    fill(tiers, "idle", 3)
    assert tiers.counts.copied_pages == 0
    tiers.allocate(1, "more")
    tiers.settle(wait=True)
    assert [tiers._owners[owner].entries[-1].state.name for owner in ("idle", "active")] == ["CLEAN", "SEALED"]


# --- copies ----------------------------------------------------------------------------------------------------------


class Gate:
    """A copy that waits to be let go, and counts."""

    def __init__(self):
        self.begun, self.open, self.count = threading.Event(), threading.Event(), 0

    def __call__(self, target, source):
        self.count += 1
        target.copy_(source)
        self.begun.set()
        assert self.open.wait(10)


def test_a_host_page_stays_taken_until_its_copy_has_ended():
    gate = Gate()
    tiers = tiers_of(8, 8, lane=gate)
    fill(tiers, "aborted", 4)
    tiers.write_back()
    assert gate.begun.wait(10)
    tiers.release("aborted")
    assert (tiers.pool.free_pages, tiers.host.free_pages) == (8, 4)
    tiers.check()
    content = fill(tiers, "next", 4)  # the same pages
    gate.open.set()
    tiers.settle(wait=True)
    assert tiers.host.free_pages == 8
    assert tiers.counts.stale_copies == 4
    tiers.check()
    tiers.allocate(4, "filler")
    tiers.allocate(4, "filler")
    tiers.release("filler")
    assert same(tiers, "next", content)


def test_a_copy_of_released_pages_that_somebody_writes_to_is_no_failure():
    begun, go_on = threading.Event(), threading.Event()

    def late(target, source):  # the sum of the source has been taken
        begun.set()
        assert go_on.wait(10)
        target.copy_(source)

    tiers = tiers_of(2, lane=late, copy_at=float("inf"))
    fill(tiers, "released", 2)
    tiers.write_back()
    assert begun.wait(10)
    tiers.release("released")
    content = fill(tiers, "next", 2)
    go_on.set()
    tiers.settle(wait=True)
    assert (tiers.counts.stale_copies, tiers.counts.rejected_copies, len(tiers.errors)) == (2, 0, 0)
    tiers.allocate(2, "new")
    tiers.release("new")
    assert same(tiers, "next", content)


def test_a_page_under_restore_goes_to_nobody_else_before_the_copy_has_ended():
    gate = Gate()
    tiers = tiers_of(4, back=gate)
    fill(tiers, "aborted", 2)
    tiers.allocate(2, "filler")
    tiers.allocate(2, "filler")
    tiers.release("filler")
    errors = []

    def restore():
        try:
            tiers.restore("aborted")
        except ForeignPage as error:
            errors.append(str(error))

    thread = threading.Thread(target=restore)
    thread.start()
    assert gate.begun.wait(10)
    tiers.release("aborted")
    tiers.check()
    assert tiers.pool.free_pages == 2  # what is being written to is not free
    gate.open.set()
    thread.join(10)
    assert errors == ["'aborted' was released while it was being restored"]
    assert (tiers.pool.free_pages, tiers.host.free_pages) == (4, 32)
    tiers.check()


def test_two_threads_that_ask_for_the_same_owner_bring_it_back_once():
    gate = Gate()
    tiers = tiers_of(4, back=gate)
    content = fill(tiers, "shared", 2)
    tiers.allocate(2, "filler")
    tiers.allocate(2, "filler")
    tiers.release("filler")
    found = []
    threads = [threading.Thread(target=lambda: found.append(tiers.restore("shared"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert gate.begun.wait(10)
    gate.open.set()
    for thread in threads:
        thread.join(10)
    assert len(found) == 2
    assert found[0] == found[1]
    assert tiers.counts.restored_pages == 2
    tiers.rest("shared")
    tiers.rest("shared")
    with pytest.raises(PoolError, match="idle already"):
        tiers.rest("shared")
    assert same(tiers, "shared", content)


def once(spoil):
    """A copy whose first call is spoilt."""
    state = iter([True])

    def copy(target, source):
        if next(state, False):
            spoil(target, source)
        else:
            target.copy_(source)

    return copy


def raises(error):
    def copy(target, source):
        raise error

    return copy


FAILURES = {
    "raises": (raises(RuntimeError("no DMA")), "RuntimeError: no DMA"),
    "dies": (raises(SystemExit()), "the thread that copied 2 pages died"),
    "does nothing": (lambda target, source: None, "is not what was read"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_copy_that_fails_on_the_way_out_loses_nothing_and_says_so(how):
    spoil, message = FAILURES[how]
    tiers = tiers_of(2, lane=once(spoil), copy_at=float("inf"))
    content = fill(tiers, "old", 2, group=2)
    tiers.host.arena.zero_()
    with pytest.raises(CopyFailed, match=message):
        tiers.write_back(wait=True)
    tiers.check()
    assert (tiers.states(), tiers.host.free_pages) == ({"SEALED": 2}, 32)
    assert (tiers.counts.rejected_copies, len(tiers.errors)) == (1, 1)
    tiers.allocate(2, "new")  # waits for a second copy
    tiers.release("new")
    assert tiers.counts.unverified_pages == 0
    assert same(tiers, "old", content)


def test_of_several_groups_copied_together_only_the_damaged_one_is_rejected():
    def second(target, source):
        target.copy_(source)
        target[1, 3] ^= 1

    tiers = tiers_of(4, lane=once(second), copy_at=float("inf"))
    fill(tiers, "old", 4)
    with pytest.raises(CopyFailed, match=r"the copy of pages \[1\] of 'old' is not what was read"):
        tiers.write_back(wait=True)
    assert tiers.states() == {"CLEAN": 3, "SEALED": 1}
    assert tiers.counts.rejected_copies == 1


@pytest.mark.parametrize("how", FAILURES)
def test_a_copy_that_fails_on_the_way_back_is_tried_again(how):
    tiers = tiers_of(2, back=once(FAILURES[how][0]))
    content = fill(tiers, "old", 2, group=2)
    (page, _) = tiers.allocate(2, "new")
    tiers.pool.page(page).zero_()
    tiers.release("new")
    assert same(tiers, "old", content)
    assert tiers.counts.rejected_restores == 1
    tiers.check()


def test_a_copy_that_always_fails_refuses_the_request_and_stops_trying_in_the_background():
    tiers = tiers_of(4, lane=raises(RuntimeError("no DMA")))
    fill(tiers, "old", 4)
    with pytest.raises(CopyFailed, match="no DMA"):
        tiers.allocate(1, "new")
    assert tiers.counts.evicted_pages == 0
    for _ in range(20):
        tiers.touch("old")
        with pytest.raises(CopyFailed):
            tiers.allocate(1, "new")
        tiers.settle(wait=True)
    assert tiers.states() == {"SEALED": 4}
    sent = tiers.counts.copied_pages
    tiers.release("old")
    fill(tiers, "other", 4)
    tiers.settle(wait=True)
    assert tiers.counts.copied_pages == sent
    tiers.check()


def test_a_copy_that_hangs_is_given_up_after_a_while_and_counts_when_it_ends():
    gate = Gate()
    tiers = tiers_of(2, lane=gate, patience_s=0.05)
    content = fill(tiers, "old", 2)
    with pytest.raises(CopyFailed, match=r"not done after 0.05 s"):
        tiers.allocate(1, "new")
    tiers.check()
    gate.open.set()
    tiers.settle(wait=True)
    tiers.allocate(1, "new")
    tiers.release("new")
    assert same(tiers, "old", content)


@pytest.mark.parametrize("verify", ["full", "copy"])
def test_a_host_copy_that_rots_is_handed_out_only_by_who_does_not_look(verify):
    tiers = tiers_of(2, verify=verify)
    fill(tiers, "old", 2)
    tiers.allocate(2, "new")
    tiers.release("new")
    entry = tiers._owners["old"].entries[1]
    tiers.host.page(entry.slots[0])[17] ^= 1
    if verify == "copy":
        tiers.restore("old")
        return
    for _ in range(2):  # nor at the second attempt
        with pytest.raises(DamagedCopy, match="group 1 of 'old': its host pages .* have changed; release it"):
            tiers.restore("old")
        tiers.check()
    tiers.release("old")
    assert (tiers.pool.free_pages, tiers.host.free_pages) == (2, 32)


def test_equal_bytes_of_somebody_else_are_not_taken_for_ones_own():
    tiers = tiers_of(4, copy_at=float("inf"))  # nothing is copied while the pages are written here
    fill(tiers, "a", 2)
    fill(tiers, "b", 2)
    for page in range(4):
        tiers.pool.page(page).fill_(5)
    tiers.allocate(4, "new")
    tiers.release("new")
    one, other = (tiers._owners[owner].entries[0] for owner in "ab")
    one.slots, other.slots = other.slots, one.slots
    with pytest.raises(DamagedCopy, match=r"hold \('b', 0, 0, 0\)"):
        tiers.restore("a")


def test_neighbours_are_copied_in_one_piece():
    gate = Gate()
    gate.open.set()
    tiers = tiers_of(8, lane=gate, copy_at=float("inf"))
    fill(tiers, "old", 8)
    assert tiers.write_back(wait=True) == 8
    assert gate.count == 1
    assert runs([0, 1, 9], [4, 5, 6]) == [(0, 4, 2), (9, 6, 1)]


def test_lanes_that_do_not_look_are_refused_where_the_policy_asks_for_it():
    pool = PagePool(4 * PAGE, device="cpu", page_bytes=PAGE, chunk_bytes=4 * PAGE)
    host = host_pool(pool, 4 * PAGE)
    blind = Lane(pool, host, verify=False)
    for lanes in ({"lane": blind}, {"back": blind}):
        with pytest.raises(PoolError, match="verify='full' needs lanes that take checksums"):
            EvictingPool(pool, host, **lanes)
    EvictingPool(pool, host, Policy(verify="copy"), back=blind)


def test_a_failed_request_does_not_wait_for_copies_of_what_is_in_use():
    gate = Gate()
    tiers = tiers_of(4, lane=gate, copy_at=float("inf"), shield=None)
    fill(tiers, "idle", 2)
    gate.open.set()
    tiers.write_back(wait=True)
    gate.open.clear()
    fill(tiers, "active", 2, rest=False)
    tiers.write_back()
    tiers.allocate(2, "new")  # would wait for the gate
    assert tiers.counts.evicted_pages == 2
    assert tiers.copying_pages == 2
    gate.open.set()


def test_pages_that_somebody_took_behind_its_back_are_not_given_away():
    tiers = tiers_of(2)
    fill(tiers, "old", 2)
    tiers.settle(wait=True)
    tiers.pool.free([1], "old")
    assert tiers.pool.allocate(1, "thief") == [1]
    with pytest.raises(StalePage, match="belongs to 'thief'"):
        tiers.allocate(1, "new")
    assert tiers.pool.owners()["thief"] == 1
    with pytest.raises(PoolError, match=r"group 1 of 'old', CLEAN, has pages that somebody else holds"):
        tiers.check()


def test_a_pool_that_is_forgotten_ends_its_threads():
    before = set(threading.enumerate())
    tiers = tiers_of(4)
    fill(tiers, "old", 4)
    tiers.settle(wait=True)
    started = set(threading.enumerate()) - before
    assert {thread.name for thread in started} == {"kv copy"}
    del tiers
    gc.collect()
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()


# --- the host pool ---------------------------------------------------------------------------------------------------


def test_a_host_pool_has_the_size_that_was_asked_for():
    pool = PagePool(4 * PAGE, device="cpu", page_bytes=PAGE, chunk_bytes=4 * PAGE)
    assert host_pool(pool, 9 * PAGE).arena.numel() == 9 * PAGE  # not 16
    with pytest.raises(PoolError, match="do not go into pages of 512"):
        Lane(pool, PagePool(4096, device="cpu", page_bytes=512, chunk_bytes=512))


def test_a_full_host_pool_leaves_pages_where_they_are_and_says_so():
    tiers = tiers_of(8, 3)
    content = fill(tiers, "old", 8)
    tiers.settle(wait=True)
    assert tiers.states() == {"CLEAN": 3, "SEALED": 5}
    assert tiers.counts.host_full == 1  # and it is not tried again for every request
    tiers.touch("old")
    tiers.allocate(3, "new")
    with pytest.raises(EvictionRefused, match="the host has 0 free pages for what has no copy yet"):
        tiers.allocate(1, "new")
    tiers.check()
    tiers.release("new")
    assert same(tiers, "old", content)


def test_copies_of_what_is_in_use_make_room_for_those_of_what_has_to_go():
    tiers = tiers_of(8, 4)
    fill(tiers, "active", 4, rest=False)
    tiers.write_back(wait=True)
    content = fill(tiers, "idle", 4)
    tiers.allocate(4, "new")
    assert tiers.counts.evicted_pages == 4
    tiers.check()
    tiers.release("new")
    assert same(tiers, "idle", content)


@pytest.mark.parametrize("ask", ["seal", "trim", "rest", "touch", "restore", "release"])
def test_strangers_are_refused(ask):
    tiers = tiers_of(4)
    pages = [tiers.allocate(1, "known")] if ask in ("seal", "trim") else []
    with pytest.raises(ForeignPage, match="'unknown' holds no pages"):
        getattr(tiers, ask)(*pages, "unknown")
    tiers.check()


def test_only_open_pages_are_sealed_or_trimmed():
    tiers = tiers_of(4)
    pages = tiers.allocate(2, "one")
    tiers.seal(pages[:1], "one")
    for wrong in (tiers.seal, tiers.trim):
        with pytest.raises(ForeignPage, match="not all open pages"):
            wrong(pages, "one")
        with pytest.raises(ForeignPage, match="not all open pages"):
            wrong([pages[1], pages[1]], "one")
    tiers.trim(pages[1:], "one")
    assert tiers.pool.free_pages == 3
    with pytest.raises(PoolError, match="owner=None"):
        tiers.allocate(1, None)
    tiers.check()


# --- whatever happens ------------------------------------------------------------------------------------------------


CHOICE = st.integers(0, 23)
SEEN = Counter()


class TiersMachine(RuleBasedStateMachine):
    """An evicting pool beside a dictionary of owner → content; copies and some requests run in threads."""

    pool_type = EvictingPool

    @initialize(
        host_pages=st.sampled_from([40, 6, 2]), copy_at=st.sampled_from([0.0, 0.8, float("inf")]),
        evict_at=st.sampled_from([0.0, 0.5, 0.95]), shield=st.sampled_from([None, 0.0, 2.0]),
        group=st.sampled_from([1, 2]),
    )  # fmt: skip
    def begin(self, host_pages, copy_at, evict_at, shield, group):
        pool = PagePool(8 * PAGE, device="cpu", page_bytes=PAGE, chunk_bytes=4 * PAGE)
        policy = Policy(copy_at=copy_at, evict_at=evict_at, shield=shield, batch_pages=2)
        self.clock, self.group = Clock(), group
        self.tiers = self.pool_type(pool, host_pool(pool, host_pages * PAGE), policy, clock=self.clock)
        self.content, self.active, self.count = {}, {}, 0
        for groups, resting in ((1, False), (2, True), (1, True)):  # nearly full, so that something has to go
            self.allocate(1, groups, False, resting)
            self.clock.now += 1

    def on_host(self, owner):
        return any(entry.state is State.HOST for entry in self.tiers._owners[owner].entries)

    def some(self, choice):
        """An owner; drawn by number, as what there is depends on how quick the copies are."""
        owners = sorted(self.content)
        return owners[choice % len(owners)] if owners else None

    @rule(
        choice=CHOICE, groups=st.integers(1, 5), elsewhere=st.booleans(), resting=st.sampled_from([True, True, False])
    )
    def allocate(self, choice, groups, elsewhere, resting):
        owner = self.some(choice) if choice % 3 == 0 else None
        if owner is None or not self.active[owner]:
            owner = self.count = self.count + 1
        for _ in range(groups):
            if not self.one(owner, elsewhere):
                break
        if resting and self.active.get(owner):
            self.rest(choice, None, owner)

    def one(self, owner, elsewhere):
        found = []

        def work():
            try:
                found.append(self.tiers.allocate(self.group, owner))
            except EvictionRefused:
                found.append(None)

        if elsewhere:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(20)
        else:
            work()
        if found[0] is None:
            return False
        self.active.setdefault(owner, 1)
        for page in found[0]:
            self.count += 1
            self.tiers.pool.page(page).view(torch.int32).copy_(torch.arange(PAGE // 4) + 1000 * self.count)
            self.content.setdefault(owner, []).append(self.tiers.pool.page(page).clone())
        self.tiers.seal(found[0], owner)
        return True

    @rule(choice=CHOICE, ttl=st.sampled_from([None, 1.0, 5.0]))
    def rest(self, choice, ttl, owner=None):
        owner = owner or self.some(choice)
        if owner and self.active[owner]:
            self.tiers.rest(owner, ttl)
            self.active[owner] -= 1

    @rule(choice=CHOICE, make_way=st.booleans())
    def restore(self, choice, make_way):
        away = [owner for owner in self.content if self.on_host(owner)]
        for other in list(self.content) if make_way and choice % 2 else ():
            if other not in away and len(self.content) > 2:
                self.release(choice, other)
        if (owner := away[choice % len(away)] if away else self.some(choice)) is None:
            return
        for other in self.content if make_way else ():
            self.rest(choice, None, other)
        try:
            pages = self.tiers.restore(owner)
        except EvictionRefused:
            return
        self.active[owner] += 1
        for page, content in zip(pages, self.content[owner], strict=True):
            assert torch.equal(self.tiers.pool.page(page), content)

    @rule(choice=CHOICE)
    def release(self, choice, owner=None):
        if owner := owner or self.some(choice):
            self.tiers.release(owner)
            del self.content[owner], self.active[owner]

    @rule(choice=CHOICE, seconds=st.integers(0, 3))
    def touch(self, choice, seconds):
        self.clock.now += seconds
        if owner := self.some(choice):
            self.tiers.touch(owner)

    @rule(trimmed=st.booleans())
    def open_and_give_back(self, trimmed):
        try:
            pages = self.tiers.allocate(1, "open")
        except EvictionRefused:
            return
        if trimmed:
            self.tiers.trim(pages, "open")
        self.tiers.release("open")

    @rule(wait=st.booleans())
    def write_back(self, wait):
        self.tiers.write_back(wait=wait)

    @invariant()
    def conserved(self):
        if hasattr(self, "tiers"):
            self.tiers.check()
            states = self.tiers.states()
            assert sum(states.values()) - states["HOST"] == 8
            assert sum(states.values()) - states["FREE"] == sum(map(len, self.content.values()))
            assert self.tiers.counts.unverified_pages == self.tiers.counts.rejected_copies == 0
            for owner, times in self.active.items():  # what is in use is on the device, and is what it was
                pages = [page for entry in self.tiers._owners[owner].entries for page in entry.pages]
                if times:
                    for page, content in zip(pages, self.content[owner], strict=True):
                        assert torch.equal(self.tiers.pool.page(page), content)

    def teardown(self):
        if hasattr(self, "tiers"):
            SEEN.update(evicted=self.tiers.counts.evicted_pages, restored=self.tiers.counts.restored_pages)
            for owner in list(self.content):
                self.tiers.release(owner)
            self.tiers.settle(wait=True)
            assert (self.tiers.pool.free_pages, self.tiers.host.free_pages) == (8, self.tiers.host.pages)


SOME = settings(
    max_examples=80, stateful_step_count=40, deadline=None, database=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip


class TestTiers(TiersMachine.TestCase):
    """The machine, and that it got somewhere."""

    settings = SOME

    def runTest(self):
        super().runTest()
        assert min(SEEN["evicted"], SEEN["restored"]) > 20, SEEN


class EvictsActive(EvictingPool):
    """Ranks pages of active owners like all others."""

    def _place(self, entry):
        super()._place(entry)
        if entry.state is State.CLEAN:
            self._clean.put(entry, self.clock())


class ForgetsHostPages(EvictingPool):
    """Keeps the host copy of what is released while it is on the host."""

    def _drop_copy(self, entry):
        if entry.state is not State.HOST:
            super()._drop_copy(entry)


class EvictsUncopied(EvictingPool):
    """Takes what is still being copied for clean."""

    def _submit(self, lane, job):
        done = super()._submit(lane, job)
        for pages, _, _ in job.groups if job.to_host else ():
            entry = self._at[pages[0]]
            entry.state = State.CLEAN
            self._place(entry)
        return done


class Stale(EvictingPool):
    """Believes copies that were begun for the pages' last holder."""

    def _stored(self, job, error, group, part):
        pages, _, slots = group
        super()._stored(job, error, (pages, [self.pool.generation(page) for page in pages], slots), part)


@pytest.mark.parametrize("broken", [EvictsActive, ForgetsHostPages, EvictsUncopied])
def test_the_machine_finds_planted_faults(broken):
    class BrokenMachine(TiersMachine):
        pool_type = broken

        def teardown(self):
            pass

    once = settings(SOME, max_examples=200, print_blob=False, phases=[Phase.generate], report_multiple_bugs=False)
    BrokenMachine.TestCase.settings = once
    with pytest.raises((PoolError, AssertionError, ValueError, Flaky)):  # flaky: threads decide when it shows
        BrokenMachine.TestCase("runTest").runTest()


def test_a_late_copy_of_the_last_holder_is_what_the_generation_keeps_out():
    found = []
    for kind in (EvictingPool, Stale):
        gate = Gate()
        tiers = tiers_of(2, lane=gate, copy_at=float("inf"))
        tiers.__class__ = kind
        fill(tiers, "a", 2)
        tiers.write_back()
        assert gate.begun.wait(10)
        tiers.release("a")
        content = fill(tiers, "a", 2)  # the same name, the same pages
        gate.open.set()
        tiers.settle(wait=True)
        tiers.allocate(2, "new")
        tiers.release("new")
        found.append(same(tiers, "a", content))
    assert found == [True, False]


def test_threads_that_do_everything_at_once_lose_nothing():
    tiers = tiers_of(24, 200, copy_at=0.5, evict_at=0.5, shield=0.0, batch_pages=2)
    wrong, refused, restored = [], [], []

    def work(number):
        chance, mine = random.Random(number), {}
        for turn in range(60):
            owner = f"{number} {turn % 6}"
            try:
                if owner not in mine:
                    pages = tiers.allocate(2, owner)
                    mine[owner] = number * 1000 + turn
                    for page in pages:
                        tiers.pool.page(page).view(torch.int32).fill_(mine[owner])
                    tiers.seal(pages, owner)
                else:
                    before = tiers.counts.restored_pages
                    for page in tiers.restore(owner):
                        if set(tiers.pool.page(page).view(torch.int32).tolist()) != {mine[owner]}:
                            wrong.append(owner)
                    restored.append(tiers.counts.restored_pages - before)
                if chance.random() < 0.15:
                    tiers.release(owner)
                    del mine[owner]
                else:
                    tiers.rest(owner)
            except EvictionRefused:
                refused.append(owner)
            tiers.check()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    tiers.settle(wait=True)
    tiers.check()
    assert wrong == []
    assert sum(restored) > 20
    assert tiers.counts.evicted_pages > 20
    assert tiers.counts.unverified_pages == 0


# --- injected faults -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def injected():
    return {verify: faults.inject(180, verify) for verify in faults.POOLS}


def test_every_injected_fault_is_caught_and_none_without_looking(injected):
    assert [sum(row.injected for row in rows) for rows in injected.values()] == [180] * 3
    for ours, off in zip(injected["full"], injected["none"], strict=True):
        assert (ours.missed, ours.unverified) == (0, 0), ours
        assert ours.recomputed == (ours.injected if ours.where == "host" else 0), ours
        assert (off.caught, off.missed) == (0, off.injected), off
        assert off.unverified > 0


def test_comparing_only_what_was_copied_misses_what_comes_later(injected):
    caught = {(row.kind, row.where) for row in injected["copy"] if row.caught}
    missed = {(row.kind, row.where) for row in injected["copy"] if row.missed}
    assert not caught & missed
    assert {where for _, where in caught - {("killed thread", "back")}} == {"out"}
    assert ("stale generation", "out") in missed


def test_the_bound_is_clopper_and_pearsons():
    row = faults.Row("full", "swap", "out", 100, 100, 0, 0, 0)
    assert row.most_missed == pytest.approx(1 - 0.025 ** (1 / 100))
    assert faults.detection([row]).low == pytest.approx(100 / (100 + 1.959964**2))


def test_the_command_prints_each_kind_and_fails_when_one_is_missed(tmp_path, capsys, monkeypatch):
    path = tmp_path / "faults.json"
    assert faults.main(["--n", "18", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    for kind in faults.KINDS:
        assert kind in printed
    assert "ours: 1 [0.8241, 1] (n=18) caught; 0 pages evicted unverified" in printed
    assert "no check: 0 [" in printed
    assert {len(rows) for rows in json.loads(path.read_text()).values()} == {18}
    assert faults.main(["--n", "3"]) == 2
    assert "at least 18" in capsys.readouterr().err
    monkeypatch.setattr(faults, "POOLS", {"full": "ours"})
    monkeypatch.setattr(lane, "checksums", lambda pages: torch.zeros(len(pages), dtype=torch.int64))
    monkeypatch.setattr(courier, "sum_into", lambda parts, pages: parts.zero_())
    assert faults.main(["--n", "18"]) in (1, 2)  # missed; or, once in a while, damage that stops the harness itself


# --- with traffic ----------------------------------------------------------------------------------------------------

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=32, item_bytes=2)  # 256 bytes a token and layer
SIZES = {"page_bytes": 4096, "chunk_bytes": 1 << 16}  # 16 tokens a page
LOAD = long_cot(12, concurrent=6, median_tokens=120, most_tokens=300, prompt_tokens=30, prefixes=2, prefix_tokens=40)


def served(memory=None, **settings):
    return compare_policies(LOAD, SHAPE, capacity_bytes=60 * 4096, host_bytes=400 * 4096, sizes=SIZES, memory=memory,
                            **settings)  # fmt: skip


@pytest.mark.parametrize("memory", [None, lambda: OnDevice("cpu", 1 << 16)], ids=["books", "real"])
def test_both_policies_serve_the_same_traffic_and_compute_nothing_twice(memory):
    written, ours = served(memory)
    for one in (written, ours):
        assert (one.outcome.finished, one.outcome.failures) == (12, 0)
        assert one.outcome.preemptions > 5
        assert one.restored_pages > 0
        assert one.hit_rate == 1.0
        assert 0 < one.device_hit_rate < 1
    assert written.late_bytes == written.out_bytes > 0
    assert ours.out_bytes > written.out_bytes  # what it costs: copies of pages that nobody had to evict
    if memory is None:
        assert ours.late_bytes == 0  # and what it buys
    assert "as written" in str(written)


def test_without_a_host_pool_worth_the_name_requests_wait_and_are_still_served():
    found = compare_policies(LOAD, SHAPE, capacity_bytes=60 * 4096, host_bytes=2 * 4096, sizes=SIZES, most_steps=3000)
    for one in found:
        assert one.outcome.finished + one.outcome.failures == 12
        assert one.refusals > 0


def test_a_prefix_comes_back_from_the_host():
    requests = [Request(n, 10.0 * n, 48, 16, prefix=name, prefix_tokens=32) for n, name in enumerate("abcab")]
    design = Offloading(SHAPE, capacity_bytes=12 * 4096, host_bytes=100 * 4096, policy=Policy(evict_at=0), **SIZES)
    outcome = replay(Traffic(tuple(requests), 1), design)
    assert (outcome.finished, outcome.failures) == (5, 0)
    assert design.tiers.counts.restored_pages > 0
    assert (design.reused_tokens, design.reusable_tokens) == (64, 64)
    assert design.restored_tokens == 64
    assert design.saved_tokens == 0
    design.tiers.check()


def test_tokens_that_two_sequences_share_are_counted_once():
    requests = [Request(n, 0.0, 48, 16, prefix="a", prefix_tokens=32) for n in range(2)]
    design = Offloading(SHAPE, capacity_bytes=64 * 4096, host_bytes=64 * 4096, **SIZES)
    outcome = replay(Traffic(tuple(requests), 2), design)
    assert outcome.peak_live_bytes == (2 * 64 - 32) * SHAPE.token_bytes
    assert design.saved_tokens == 0


# --- the bench -------------------------------------------------------------------------------------------------------


def test_the_bench_prints_its_tables_and_writes_them(tmp_path, capsys, monkeypatch):
    small = bench.Setting("cpu", KVShape(2, 2, 32), 128, 4096, 1 << 16)
    monkeypatch.setattr(bench, "setting", lambda device, quick, **options: small)
    path = tmp_path / "bench.json"
    monkeypatch.setattr(bench, "prefill", lambda at: bench.np.zeros)
    assert bench.main(["rate", "slowdown", "evict", "restore", "--device", "cpu", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert list(found) == ["rate", "slowdown", "evict", "restore"]
    assert found["restore"]["ratio"]["n"] == found["rate"]["ratio"]["n"] == bench.ROUNDS
    assert found["evict"]["clean, p99"]["n"] >= 400
    assert "recompute" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["rates"])


def test_a_recomputation_may_be_passed_in():
    asked = []
    small = bench.Setting("cpu", KVShape(2, 2, 32), 64, 4096, 1 << 16)
    assert bench.restore(small, asked.append)["ratio"].n == bench.ROUNDS
    assert asked == [64] * (bench.ROUNDS + 1)


# --- public reports of offloading that went wrong, each seen to happen and then cured --------------------------------


def schedules(*streams):
    """Every order in which the operations of some streams can run, each stream keeping its own order.

    An operation is a function of the state, or ``("record", event)`` or ``("wait", event)``; a wait lets its stream go
    on only when the event has been recorded.
    """
    orders = [((0,) * len(streams), frozenset(), ())]
    while orders:
        places, events, done = orders.pop()
        if len(done) == sum(map(len, streams)):
            yield done
        for number, stream in enumerate(streams):
            if places[number] < len(stream):
                operation = stream[places[number]]
                if isinstance(operation, tuple) and operation[0] == "wait" and operation[1] not in events:
                    continue
                new = events | {operation[1]} if isinstance(operation, tuple) and operation[0] == "record" else events
                further = tuple(place + (other == number) for other, place in enumerate(places))
                orders.append((further, new, (*done, operation)))


def outcomes(*streams):
    found = set()
    for order_of_all in schedules(*streams):
        state = {"page": "old", "host": None, "read": None}
        for operation in order_of_all:
            if callable(operation):
                operation(state)
        found.add((state["read"], state["host"]))
    return found


def put(target, source):
    return lambda state: state.update({target: state.get(source, source)})


# 12 · vllm#45704: the store stream reads a page before the step that fills it is done


def test_a_store_waits_for_the_step_that_fills_the_page():
    fills, stores = [put("page", "new")], [put("host", "page")]
    assert {host for _, host in outcomes(fills, stores)} == {"old", "new"}
    assert {host for _, host in outcomes([*fills, ("record", 1)], [("wait", 1), *stores])} == {"new"}


@pytest.mark.parametrize("verify", ["none", "full"])
def test_a_page_that_is_filled_while_it_is_copied_is_copied_again(verify):
    def torn(target, source):
        target[:, : PAGE // 2].copy_(source[:, : PAGE // 2])
        source.fill_(9)  # the step's writes arrive only now
        target[:, PAGE // 2 :].copy_(source[:, PAGE // 2 :])

    tiers = tiers_of(2, lane=once(torn), verify=verify, copy_at=float("inf"))
    fill(tiers, "sequence", 1)
    if verify == "full":
        with pytest.raises(CopyFailed, match="is not what was read"):
            tiers.write_back(wait=True)
    tiers.write_back(wait=True)
    assert (set(tiers.host.page(0).tolist()) == {9}) == (verify == "full")


# 11 · transformers 5.17, and 12 · vllm#47282: a load overwrites what the running step still reads


def test_a_load_waits_for_the_last_reader_and_the_next_reader_for_the_load():
    reads, loads = [put("read", "page")], [put("page", "next layer")]
    assert {read for read, _ in outcomes(reads, loads)} == {"old", "next layer"}
    after = outcomes([*reads, ("record", 1), ("wait", 2), put("host", "page")], [("wait", 1), *loads, ("record", 2)])
    assert after == {("old", "next layer")}
    one_way = outcomes([*reads, ("wait", 2), put("host", "page")], [*loads, ("record", 2)])  # what 5.17 does
    assert one_way == {("old", "next layer"), ("next layer", "next layer")}


@pytest.mark.parametrize("active", [False, True])
def test_a_load_does_not_take_the_pages_that_a_step_still_reads(active):
    tiers = tiers_of(4, shield=None)
    fill(tiers, "gone", 2)
    tiers.allocate(2, "filler")
    tiers.allocate(2, "filler")
    tiers.release("filler")
    content = fill(tiers, "reader", 4, rest=not active)  # a scheduler that ends the use too early, and one that waits
    pages = [page for entry in tiers._owners["reader"].entries for page in entry.pages]
    try:
        tiers.restore("gone")
    except EvictionRefused:
        assert active
    read = all(torch.equal(tiers.pool.page(page), one) for page, one in zip(pages, content, strict=True))
    assert read == active


# vllm#39702: what a lookup has found is evicted before it is used


@pytest.mark.parametrize("pinned", [False, True])
def test_what_a_lookup_finds_is_held_from_then_on(pinned):
    tiers = tiers_of(4, shield=None)
    content = fill(tiers, "prefix", 4)
    found = tiers.restore("prefix")
    if not pinned:
        tiers.rest("prefix")
    try:
        for page in tiers.allocate(2, "other"):
            tiers.pool.page(page).zero_()
    except EvictionRefused:
        assert pinned
    assert all(torch.equal(tiers.pool.page(page), one) for page, one in zip(found, content, strict=True)) == pinned


# vllm-ascend#16315: pages on their way out do not count as coming, so more and more is preempted


def test_a_request_waits_for_copies_under_way_and_starts_no_others():
    gate = Gate()
    tiers = tiers_of(4, lane=gate, copy_at=float("inf"), batch_pages=2)
    fill(tiers, "victim", 2)
    fill(tiers, "spared", 2, rest=False)
    tiers.write_back()
    tiers.rest("spared")
    assert gate.begun.wait(10)
    sent = tiers.counts.copied_pages
    thread = threading.Thread(target=tiers.allocate, args=(2, "new"))
    thread.start()
    gate.open.set()
    thread.join(10)
    assert tiers.counts.copied_pages == sent
    assert tiers.counts.evicted_pages == 2
    tiers.check()


# transformers 5.24, a TODO in its source: entries leak when the copy to the device raises


def test_nothing_leaks_when_the_copy_to_the_device_raises():
    tiers = tiers_of(4, back=raises(RuntimeError("no DMA")))
    fill(tiers, "sequence", 4)
    tiers.allocate(4, "new")
    tiers.release("new")
    before = tiers.pool.free_pages, tiers.host.free_pages
    for _ in range(3):
        with pytest.raises(CopyFailed, match="no DMA"):
            tiers.restore("sequence")
        assert (tiers.pool.free_pages, tiers.host.free_pages) == before
        tiers.check()
    tiers.release("sequence")
    assert (tiers.pool.free_pages, tiers.host.free_pages) == (4, 32)


# vllm#57727: a reset of the cache leaves the copies on the host, which come back as if nothing had been


def test_a_release_reaches_the_host_as_well():
    tiers = tiers_of(4)
    fill(tiers, "weights v1", 4)
    tiers.allocate(4, "new")
    tiers.release("new")
    tiers.release("weights v1")
    assert tiers.host.free_pages == 32
    with pytest.raises(ForeignPage):
        tiers.restore("weights v1")
    content = fill(tiers, "weights v1", 4)  # the same name
    tiers.allocate(4, "new")
    tiers.release("new")
    assert same(tiers, "weights v1", content)


# vllm#31210, dynamo#5068, sglang#27504: restored caches are garbled and nobody notices


@pytest.mark.parametrize(("verify", "noticed"), [("none", False), ("copy", False), ("full", True)])
def test_a_garbled_restore_is_noticed(verify, noticed):
    def garbled(target, source):
        target.copy_(source.roll(1, 0))

    tiers = tiers_of(4, back=garbled, verify=verify)
    fill(tiers, "sequence", 4, group=4)
    tiers.allocate(4, "new")
    tiers.release("new")
    if noticed:
        with pytest.raises(CopyFailed, match="damaged on its way back; the host copy is whole"):
            tiers.restore("sequence")
    else:
        tiers.restore("sequence")


def test_the_default_recomputation_makes_a_cache_of_the_same_shape():
    cache = bench.prefill(bench.Setting("cpu", KVShape(2, 2, 32), 48, 4096, 1 << 16))(40).past_key_values
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(1, 2, 40, 32)] * 2


@pytest.mark.parametrize("wrong", [
    {"batch_pages": 0}, {"batch_pages": -3}, {"batch_pages": 1.5}, {"in_flight_pages": 0}, {"in_flight_pages": True},
    {"patience_s": -1.0}, {"patience_s": float("nan")}, {"overdue": float("nan")}, {"shield": -1.0},
])  # fmt: skip
def test_a_policy_that_could_not_work_is_refused(wrong):
    with pytest.raises(PoolError, match=f"{next(iter(wrong))}="):
        Policy(**wrong)


def test_pools_that_could_not_hold_copies_are_refused():
    pool = PagePool(1 << 20, device="cpu", page_bytes=1 << 16, chunk_bytes=1 << 20)
    for wrong in (None, pool):
        with pytest.raises(PoolError, match="host is a NoneType|are the same"):
            EvictingPool(pool, wrong)
