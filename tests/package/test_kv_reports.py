"""Public reports of KV-cache trouble: each reproduced small, so that the test sees it happen, and then cured.

Allocator cases run through the rules of torch's caching allocator, which traces from a real GPU hold to the byte.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import pytest
import torch

from o1lab.kv import PagePool, PoolExhausted, fragmentation
from o1lab.kv.designs import KVShape, Paged
from o1lab.kv.fragmentation import pinned_bytes, rounding
from o1lab.kv.pool import DoubleFree, StalePage
from o1lab.kv.replay import replay
from o1lab.kv.traffic import Request, Traffic
from o1lab.memory.allocator import CachingAllocator
from o1lab.memory.allocator_settings import MIB, Settings

GIB = 1 << 30
PAGE = 2048


def small_pool(pages, device="meta"):
    return PagePool(pages * PAGE, device=device, page_bytes=PAGE, chunk_bytes=16 * PAGE)


# --- 1 · pytorch#35901: out of memory with half of it free -----------------------------------------------------------


@pytest.mark.parametrize(("cure", "ooms"), [("none", 1), ("a pool of their own", 0), ("small ones first", 0)])
def test_a_large_segment_is_not_spoilt_by_small_blocks_that_stay(cure, ooms):
    allocator = CachingAllocator(Settings(capacity_bytes=14 * GIB), ((0, 0), (1, 0)))
    large, small = int(11.6 * GIB), []
    if cure == "small ones first":
        small = [allocator.allocate(16 * MIB, 0) for _ in range(30)]
    allocator.free(allocator.allocate(large, 0))
    if cure != "small ones first":
        small = [allocator.allocate(16 * MIB, 0, 1 if cure == "a pool of their own" else 0) for _ in range(30)]
    for block in small[::2]:
        allocator.free(block)
    found = fragmentation(allocator)
    again = allocator.allocate(large, 0)
    assert allocator.num_ooms == ooms
    assert (again is None) == (ooms == 1)
    if cure == "none":  # nearly all is free, none of it serves, and emptying the cache gives nothing back
        assert found.free_bytes > 0.97 * found.reserved_bytes
        assert found.unserviceable(large).share == 1.0
        assert found.stranded_bytes == found.free_bytes


def test_blocks_from_a_page_pool_leave_the_allocator_alone():
    allocator = CachingAllocator(Settings(capacity_bytes=14 * GIB))
    allocator.allocate(512 * MIB, 0)  # the pool's arena, once, before everything
    pool = PagePool(512 * MIB, device="meta")
    large = int(11.6 * GIB)
    allocator.free(allocator.allocate(large, 0))
    held = [pool.allocate(64) for _ in range(30)]  # 16 MiB each
    for pages in held[::2]:
        pool.free(pages)
    assert allocator.allocate(large, 0) is not None
    assert fragmentation(pool).unserviceable(pool.page_bytes).share == 0


# --- 3 · pytorch#29554: the out-of-memory message does not say whether it is fragmentation ---------------------------


def test_two_states_that_torch_describes_alike_are_told_apart():
    def state(free):
        held = {"size": 100 * MIB, "requested_size": 100 * MIB, "state": "active_allocated"}
        return [{"total_size": 160 * MIB, "blocks": [held, *({"size": size, "state": "inactive"} for size in free)]}]

    whole, crumbs = fragmentation(state([60 * MIB])), fragmentation(state([6 * MIB] * 10))
    in_the_message = [(one.allocated_bytes, one.free_bytes) for one in (whole, crumbs)]
    assert in_the_message[0] == in_the_message[1]  # what torch prints: the same for both
    assert (whole.unserviceable(20 * MIB).share, crumbs.unserviceable(20 * MIB).share) == (0.0, 1.0)
    assert "100.0% of that lies in blocks smaller than the request (the largest has 6.00 MiB)" in str(
        crumbs.unserviceable(20 * MIB)
    )


# --- 5 · segments never merge, and small and large requests never share ----------------------------------------------


def served(sizes, **settings):
    allocator = CachingAllocator(Settings(**settings))
    for count, size in sizes:
        for block in [allocator.allocate(size, 0) for _ in range(count)]:
            allocator.free(block)
    return allocator.reserved_bytes // MIB


def test_growing_sizes_reserve_twice_and_large_first_or_pages_once():
    growing = [(8, 16 * MIB), (4, 32 * MIB)]
    assert served(growing) == 256
    assert served(growing[::-1]) == 128
    assert served(growing, expandable_segments=True) == 140  # grown by pages of 20 MiB
    pool = PagePool(128 * MIB, device="meta")
    for count, size in growing:
        for pages in [pool.allocate(size // pool.page_bytes) for _ in range(count)]:
            pool.free(pages)


def test_a_request_below_a_mebibyte_takes_a_segment_of_its_own():
    assert served([(1, 2 * MIB), (1, MIB // 2)]) == 22
    assert served([(1, 2 * MIB), (1, 2 * MIB)]) == 20


# --- 14 · SGLang#28468: a host slot is freed while it is still being copied ------------------------------------------


@pytest.mark.parametrize("pinned", [False, True])
def test_a_page_under_copy_is_not_given_to_somebody_else(pinned):
    host = small_pool(2, "cpu")
    (page,) = host.allocate(1, "request")
    host.page(page).fill_(1)
    halfway, go_on = threading.Event(), threading.Event()
    copied = torch.zeros(PAGE, dtype=torch.uint8)

    def slow_copy():
        copied[: PAGE // 2].copy_(host.page(page)[: PAGE // 2])
        halfway.set()
        assert go_on.wait(10)
        copied[PAGE // 2 :].copy_(host.page(page)[PAGE // 2 :])

    if pinned:
        host.share([page], "copy")
    copying = threading.Thread(target=slow_copy)
    copying.start()
    assert halfway.wait(10)
    host.free([page], "request")  # the sweep: the request has ended
    for new in host.allocate(1 if pinned else 2, "next"):
        host.page(new).fill_(2)
    go_on.set()
    copying.join()
    assert set(copied.tolist()) == ({1} if pinned else {1, 2})  # torn without the pin
    if pinned:
        host.free([page], "copy")
    host.check()


def test_a_copy_that_ends_late_sees_that_its_page_changed_hands():
    host = small_pool(1)
    (page,) = host.allocate(1, "request")
    begun = host.generation(page)
    host.free([page])
    assert host.allocate(1, "next") == [page]  # the same number again
    with pytest.raises(StalePage, match="belongs to 'next'"):
        host.page(page, begun)


# --- 15 · SGLang#40748: evicts as much as was asked for, not what is missing -----------------------------------------


@pytest.mark.parametrize(("amount", "evicted"), [("asked", 10), ("short", 2)])
def test_only_the_shortfall_is_evicted(amount, evicted):
    pool = small_pool(40)
    cached = OrderedDict((f"old {n}", pool.allocate(1, f"old {n}")) for n in range(32))
    with pytest.raises(PoolExhausted) as caught:
        pool.allocate(10, "new")
    assert (caught.value.asked, caught.value.free) == (10, 8)
    for _ in range(getattr(caught.value, amount)):
        name, pages = cached.popitem(last=False)
        pool.free(pages, name)
    pool.allocate(10, "new")
    assert 32 - len(cached) == evicted


# --- 16 · vllm#18115 and others: preempted sequences starve each other near 100 % ------------------------------------

SHAPE = KVShape(layers=1, kv_heads=2, head_dim=64, item_bytes=2)  # 4 tokens a page
EIGHT = Traffic(tuple(Request(number, 0.0, 8, 120) for number in range(8)), concurrent=8)


def crowded(**settings):
    design = Paged(SHAPE, capacity_bytes=64 * PAGE, page_bytes=PAGE, chunk_bytes=16 * PAGE)  # 2 of 8 fit whole
    found = replay(EIGHT, design, most_steps=4000, prefill=8, **settings)
    design.pool.check()
    return found


def test_preempting_whoever_is_furthest_serves_nobody():
    found = crowded(when_full="oldest")
    assert (found.finished, found.failures) == (0, 8)
    assert found.recomputed_tokens > 100 * 8 * 128  # and computes everything over and over


@pytest.mark.parametrize("settings", [{"when_full": "youngest"}, {"admit_whole": True}], ids=str)
def test_the_oldest_goes_on_or_nobody_is_admitted_who_does_not_fit(settings):
    found = crowded(**settings)
    assert (found.finished, found.failures) == (8, 0)
    assert found.recomputed_tokens < 5 * 8 * 128
    assert (found.recomputed_tokens == 0) == ("admit_whole" in settings)


# --- 17 · SGLang#11970 and others: pages leak or are freed twice on abort --------------------------------------------


class NaiveList:
    """A free list that knows neither owners nor what is free: what the reports had."""

    def __init__(self, pages):
        self.pages = list(range(pages))

    def allocate(self, n):
        found, self.pages = self.pages[:n], self.pages[n:]
        return found

    def free(self, pages):
        self.pages += pages


def test_an_abort_in_the_middle_of_a_page_leaks_no_page():
    tokens, page_tokens = 70, 64  # two pages, of which rounding down frees one
    naive, pool = NaiveList(8), small_pool(8)
    naive.free(naive.allocate(2)[: tokens // page_tokens])
    assert len(naive.pages) == 7
    pages = pool.allocate(2, "aborted")
    pool.free(pages[: tokens // page_tokens], "aborted")
    assert pool.owners() == {"aborted": 1}  # the leak has a name
    assert pool.release("aborted") == 1
    assert pool.free_pages == 8
    pool.check()


def test_a_tail_that_two_paths_free_is_never_handed_out_twice():
    naive, pool = NaiveList(2), small_pool(2)
    tail = naive.allocate(2)
    naive.free(tail)
    naive.free(tail)  # the verifier of a speculative step and the abort
    assert naive.allocate(2) == naive.allocate(2)  # two sequences write to the same pages
    pages = pool.allocate(2, "request")
    pool.free(pages, "request")
    with pytest.raises(DoubleFree):
        pool.free(pages, "request")
    assert set(pool.allocate(1)).isdisjoint(pool.allocate(1))


# --- 18 · vllm#53042 and others: pinned memory rounded up to a power of two ------------------------------------------


def test_pinned_tensors_of_odd_sizes_nearly_double_and_a_pool_does_not():
    asked = int(2.083 * GIB)
    assert pinned_bytes(asked) == 4 * GIB
    assert rounding(asked, pinned_bytes(asked)) == pytest.approx(0.479, abs=0.001)
    pool = PagePool(asked, device="meta")  # ordinary memory, to be registered as it is
    assert 0 <= asked - pool.arena.numel() < pool.page_bytes


# --- 19 · torchrec#4584, #4447: a stash strands memory, record_stream doubles buffers --------------------------------


@pytest.mark.parametrize(("when", "stranded_mib"), [("between", 8 * 212 + 8 * 28), ("before", 0)])
def test_a_stash_that_is_taken_before_strands_nothing(when, stranded_mib):
    allocator, size = CachingAllocator(Settings()), 300 * MIB
    stash = [allocator.allocate(size, 0) for _ in range(8 if when == "before" else 0)]
    for step in range(8):
        allocator.free(allocator.allocate((512 + 8 * step) * MIB, 0))  # each step's buffer is a little longer
        if when == "between":  # cut from the buffer's space, whose rest serves neither the next buffer nor a stash
            stash.append(allocator.allocate(size, 0))
    found = fragmentation(allocator)
    assert len(stash) == 8
    assert found.stranded_bytes == stranded_mib * MIB


@pytest.mark.parametrize(("waits", "buffers"), [(False, 2), (True, 1)])
def test_a_buffer_that_is_waited_for_needs_no_double(waits, buffers):
    allocator = CachingAllocator(Settings())
    parked, most = [], 0
    for _ in range(6):
        while parked and waits:  # the event of the other stream, waited for before the next request
            allocator.complete(parked.pop())
        block = allocator.allocate(512 * MIB, 0)
        while parked:  # without: the other stream is done only after the request
            allocator.complete(parked.pop())
        allocator.free(block, wait=True)
        parked.append(block)
        most = max(most, fragmentation(allocator).awaiting_free_bytes)
    assert allocator.reserved_bytes == buffers * 512 * MIB
    assert most == 512 * MIB
