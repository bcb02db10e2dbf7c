"""The page pool: what it hands out, what it refuses, and that its books balance after every operation."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from o1lab import kv
from o1lab.kv import pages as bits
from o1lab.kv.pages import FreePages
from o1lab.kv.pool import DoubleFree, ForeignPage, PagePool, PoolError, PoolExhausted, StalePage

PAGE = 64


def make(pages=32, chunk_pages=8, device="meta"):
    return PagePool(pages * PAGE, device=device, page_bytes=PAGE, chunk_bytes=chunk_pages * PAGE)


# --- bitmaps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 20))
def test_runs_are_found_where_they_are(n):
    rng = random.Random(n)
    for _ in range(200):
        free = rng.getrandbits(64) & rng.getrandbits(64) if n > 4 else rng.getrandbits(64)
        free |= bits.full(n) << rng.randrange(40) if rng.random() < 0.5 else 0
        text = bin(free)[:1:-1]
        expected = [i for i in range(len(text)) if text[i : i + n] == "1" * n]
        assert bits.indices(bits.run_starts(free, n)) == expected
        assert bits.lowest(bits.run_starts(free, n)) == (expected[0] if expected else -1)
        assert sum(length for _, length in bits.runs(free)) == free.bit_count()


def test_more_lengths_of_run_than_are_remembered_are_found_too():
    free = FreePages(64, 32)
    for n in [*range(1, 16), *range(15, 0, -1)]:
        pages = free.take(n)
        assert pages == list(range(pages[0], pages[0] + n))
        free.give(pages)
    assert free.count == 64
    assert len(free.rooms) <= bits.MOST_LENGTHS


# --- what it hands out -----------------------------------------------------------------------------------------------


def test_the_default_sizes_are_those_of_the_design():
    pool = PagePool(128 << 20, device="meta")
    assert (pool.page_bytes, pool.chunk_pages, pool.pages) == (256 << 10, 256, 512)
    assert pool.arena.numel() == 128 << 20
    assert PagePool((64 << 20) + 300_000, device="meta").pages == 257  # the last chunk holds one page


def test_a_group_is_one_run_in_one_chunk_and_follows_the_group_before():
    pool = make()
    first = pool.allocate(3)
    other = pool.allocate(2)
    assert (first, other) == ([0, 1, 2], [3, 4])
    pool.free(other)
    assert pool.allocate(3, after=2) == [3, 4, 5]
    assert pool.allocate(3, after=5)[0] // 8 != 0  # two are left in the chunk: a run goes elsewhere
    assert pool.stats().scattered == 0


def test_single_pages_serve_where_no_run_is_left():
    pool = make(16)
    pool.allocate(16)
    pool.free([1, 3, 5, 9, 11])
    assert pool.stats().largest_run == 1
    assert sorted(pool.allocate(4)) != sorted(pool.allocate(1))
    assert pool.stats().scattered == 1
    pool.check()


def test_more_pages_than_a_chunk_has_are_served():
    pool = make()
    assert sorted(pool.allocate(32)) == list(range(32))
    pool.check()


def test_a_run_is_found_again_once_its_pages_are_back():
    pool = make(16)
    held = pool.allocate(16)
    pool.free(held[:2])
    with pytest.raises(PoolExhausted):
        pool.allocate(4)
    scattered = pool.allocate(2, contiguous=True)
    pool.free(scattered)
    pool.free(held[2:4])
    assert pool.allocate(4) == held[:4]


def test_pages_are_views_of_one_arena_and_all_of_them_one_tensor():
    pool = make(device="cpu")
    pool.arena.zero_()
    (page,) = pool.allocate()
    pool.page(page).fill_(7)
    whole = pool.view(torch.float16, (2, 4, 2, 2))
    assert whole.shape == (32, 2, 4, 2, 2)
    assert whole.data_ptr() == pool.arena.data_ptr()
    assert int((pool.arena == 7).sum()) == PAGE
    with pytest.raises(PoolError, match="64 bytes is not"):
        pool.view(torch.float16, (3, 4))


# --- what it refuses -------------------------------------------------------------------------------------------------


def test_exhaustion_says_how_many_are_short_and_changes_nothing():
    pool = make(8)
    held = pool.allocate(6, "a")
    before = pool.state()
    with pytest.raises(PoolExhausted, match=r"asked for 5 pages .* 2 of 8 are free: give back or evict 3") as caught:
        pool.allocate(5)
    assert (caught.value.asked, caught.value.free, caught.value.short) == (5, 2, 3)
    assert pool.state() == before
    pool.free(held)  # the measures stay those of the failure
    assert caught.value.fragmentation.allocated_bytes == 6 * PAGE
    assert caught.value.fragmentation.unserviceable(3 * PAGE).share == 1.0
    with pytest.raises(PoolExhausted, match="never holds that many"):
        pool.allocate(9)
    assert pool.stats().failures == 2


@pytest.mark.parametrize(
    ("kind", "act"),
    [
        (DoubleFree, lambda pool, held: pool.free([held[0], 20])),
        (DoubleFree, lambda pool, held: pool.free([held[0], held[0]])),
        (ForeignPage, lambda pool, held: pool.free([held[0], 32])),
        (ForeignPage, lambda pool, held: pool.free([-1])),
        (ForeignPage, lambda pool, held: pool.free([held[0], 0.5])),
        (ForeignPage, lambda pool, held: pool.free([held[0]], "b")),
        (ForeignPage, lambda pool, held: pool.free(held, "b")),
        (ForeignPage, lambda pool, held: pool.page(32)),
        (StalePage, lambda pool, held: pool.share([held[0], 20])),
        (StalePage, lambda pool, held: pool.references(20)),
        (StalePage, lambda pool, held: pool.writable(20)),
        (StalePage, lambda pool, held: pool.free(held, generations=[0, 1, 0])),
        (PoolError, lambda pool, held: pool.free(held, generations=[0])),
        (PoolError, lambda pool, held: pool.allocate(0)),
        (PoolError, lambda pool, held: pool.allocate("3")),
        (PoolError, lambda pool, held: pool.allocate(2.0)),
        (PoolError, lambda pool, held: pool.release(None)),
    ],
)  # fmt: skip
def test_misuse_is_refused_and_changes_nothing(kind, act):
    pool = make()
    held = pool.allocate(3, "a")
    before = pool.state(), pool.owners()
    with pytest.raises(kind):
        act(pool, held)
    assert (pool.state(), pool.owners()) == before
    pool.check()


def test_an_old_number_is_told_from_a_new_page():
    pool = make(4, 4)
    (page,) = pool.allocate(1, "old")
    old = pool.generation(page)
    pool.free([page])
    assert pool.allocate(1, "new") == [page]
    for use in (
        lambda: pool.page(page, old), lambda: pool.free([page], generations=[old]),
        lambda: pool.share([page], generations=[old]),
    ):  # fmt: skip
        with pytest.raises(
            StalePage, match=f"page {page} of generation 0 was given back; generation 1 belongs to 'new'"
        ):
            use()
    assert pool.page(page, pool.generation(page)).numel() == PAGE


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"bytes": 0}, "bytes=0"), ({"bytes": 10.5}, "whole number"), ({"bytes": 32}, "does not hold one page"),
        ({"page_bytes": 100}, "not a multiple"), ({"page_bytes": True}, "page_bytes=True"),
        ({"device": "nowhere"}, "no pool of"), ({"bytes": 1 << 60, "device": "cpu"}, "no pool of 1073741824.00 GiB"),
    ],
)  # fmt: skip
def test_a_pool_that_cannot_be_made_says_why(sizes, message):
    with pytest.raises(PoolError, match=message):
        PagePool(**{"bytes": 1024, "device": "meta", "page_bytes": PAGE, "chunk_bytes": 512} | sizes)


# --- owners and sharing ----------------------------------------------------------------------------------------------


def test_a_shared_page_stays_until_its_last_holder_lets_go():
    pool = make()
    pages = pool.allocate(3, "a")
    pool.share(pages[:2], "b")
    assert pool.owners() == {"a": 3, "b": 2}
    assert [pool.references(page) for page in pages] == [2, 2, 1]
    pool.free(pages, "a")
    assert pool.owners() == {"b": 2}
    assert pool.stats().used == 2
    with pytest.raises(ForeignPage):
        pool.free(pages[:1], "a")
    pool.free(pages[:2], "b")
    assert pool.stats().used == 0
    pool.check()


def test_without_a_name_the_newest_holder_lets_go():
    pool = make()
    pages = pool.allocate(1, "a")
    pool.share(pages, "b")
    pool.free(pages)
    assert pool.owners() == {"a": 1}


def test_writing_to_a_shared_page_makes_a_copy():
    pool = make(2, 2, device="cpu")
    (page,) = pool.allocate(1, "a")
    pool.page(page).fill_(5)
    assert pool.writable(page, "a") == page
    pool.share([page], "b")
    copy = pool.writable(page, "b")
    pool.page(copy).fill_(9)
    assert (copy != page, int(pool.page(page)[0]), pool.owners()) == (True, 5, {"a": 1, "b": 1})
    pool.share([page], "c")
    before = pool.owners()
    with pytest.raises(PoolExhausted):
        pool.writable(page, "c")
    pool.free([copy])
    with pytest.raises(ForeignPage):
        pool.writable(page, "nobody")
    assert pool.owners() == before - Counter("b")
    pool.check()


def test_an_aborted_request_gives_everything_back():
    pool = make()
    pages = pool.allocate(3, "a")
    pool.allocate(2, "b")
    pool.share(pages, "b")
    pool.share(pages[:1], "a")
    assert pool.release("a") == 4
    assert pool.owners() == {"b": 5}
    assert pool.release("b") == 5
    assert pool.stats().used == 0
    pool.check()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda pool: pool._space.bitmaps.__setitem__(0, 0),
        lambda pool: pool._holder.__setitem__(9, "ghost"),
        lambda pool: setattr(pool._space, "count", 7),
        lambda pool: pool._sharers.__setitem__(20, ["x"]),
        lambda pool: pool._space.single.listed.__setitem__(1, 0),
        lambda pool: pool._space.rooms[3].stack.append(0),
    ],
)  # fmt: skip
def test_books_that_do_not_balance_are_found(spoil):
    pool = make()
    pool.allocate(3)
    pool.check()
    spoil(pool)
    with pytest.raises(PoolError, match="books are wrong"):
        pool.check()


# --- at random, against a model --------------------------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """A pool beside a dictionary of page → holders; the two must agree whatever happens."""

    pool_type = PagePool

    @initialize(pages=st.integers(1, 40), chunk_pages=st.sampled_from([1, 3, 8]))
    def begin(self, pages, chunk_pages):
        self.pool = self.pool_type(pages * PAGE, device="meta", page_bytes=PAGE, chunk_bytes=chunk_pages * PAGE)
        self.held: dict[int, list[int]] = {}
        self.stale: list[tuple[int, int]] = []
        self.next = 0

    def owners(self):
        return sorted({owner for owners in self.held.values() for owner in owners})

    @rule(n=st.integers(1, 12), contiguous=st.booleans(), after=st.none() | st.integers(-1, 40))
    def allocate(self, n, contiguous, after):
        owner, free = self.next, self.pool.pages - len(self.held)
        if after is not None and not 0 <= after < self.pool.pages:
            with pytest.raises(ForeignPage, match=f"after={after} is no page"):
                self.pool.allocate(n, owner, contiguous=contiguous, after=after)
            return
        if n > free:
            with pytest.raises(PoolExhausted) as caught:
                self.pool.allocate(n, owner, contiguous=contiguous, after=after)
            assert (caught.value.asked, caught.value.free) == (n, free)
            return
        pages = self.pool.allocate(n, owner, contiguous=contiguous, after=after)
        assert len(set(pages)) == n
        assert not set(pages) & set(self.held)
        self.held |= {page: [owner] for page in pages}
        self.next += 1

    def gone(self, page, owner):
        self.held[page].remove(owner)
        if not self.held[page]:
            self.stale.append((page, self.pool.generation(page)))
            del self.held[page]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        page = data.draw(st.sampled_from(sorted(self.held)))
        owner = data.draw(st.sampled_from(self.held[page]))
        pages = [page for page, owners in self.held.items() if owner in owners][: data.draw(st.integers(1, 5))]
        for page in pages:
            self.gone(page, owner)
        self.pool.free(pages, owner)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(self.owners()))
        pages = [page for page, owners in self.held.items() if parent in owners]
        self.pool.share(pages, self.next)
        for page in pages:
            self.held[page].append(self.next)
        self.next += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def write(self, data):
        page = data.draw(st.sampled_from(sorted(self.held)))
        owner = data.draw(st.sampled_from(self.held[page]))
        shared = len(self.held[page]) > 1
        if shared and len(self.held) == self.pool.pages:
            with pytest.raises(PoolExhausted):
                self.pool.writable(page, owner)
            return
        found = self.pool.writable(page, owner)
        assert (found != page) == shared
        if shared:
            self.held[found] = [owner]
            self.gone(page, owner)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def abort(self, data):
        owner = data.draw(st.sampled_from(self.owners()))
        pages = [page for page, owners in self.held.items() for other in owners if other == owner]
        for page in pages:
            self.gone(page, owner)
        assert self.pool.release(owner) == len(pages)

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def use_after_free(self, data):
        page, generation = data.draw(st.sampled_from(self.stale))
        with pytest.raises((StalePage, DoubleFree)):
            self.pool.free([page], generations=[generation])
        with pytest.raises(StalePage):
            self.pool.page(page, generation)

    @invariant()
    def books_balance(self):
        if hasattr(self, "held"):
            self.pool.check()
            assert self.pool.free_pages == self.pool.pages - len(self.held)
            assert self.pool.owners() == Counter(owner for owners in self.held.values() for owner in owners)


SOME = settings(max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestPool = PoolMachine.TestCase
TestPool.settings = SOME


@pytest.mark.parametrize("fault", ["leaks a page on abort", "frees a shared page", "forgets the free list"])
def test_the_machine_finds_planted_faults(fault):
    class Broken(PagePool):
        def release(self, owner):
            if fault != "leaks a page on abort":
                return super().release(owner)
            held = [page for page, holder in enumerate(self._holder) if holder == owner]
            self.free(held[1:], owner)
            return len(held)

        def _let_go(self, page, owner):
            return super()._let_go(page, owner) or fault == "frees a shared page"

        def _give(self, pages):
            super()._give(pages)
            if fault == "forgets the free list" and pages:
                self._space.single.listed[pages[0] // self.chunk_pages] = 0

    class BrokenMachine(PoolMachine):
        pool_type = Broken

    once = settings(SOME, database=None, print_blob=False, phases=[Phase.generate], report_multiple_bugs=False)
    BrokenMachine.TestCase.settings = once
    with pytest.raises((PoolError, AssertionError, KeyError)):
        BrokenMachine.TestCase("runTest").runTest()


# --- threads ---------------------------------------------------------------------------------------------------------


def hammer(pool, threads=8, rounds=400):
    """Allocate, mark, look again, free, from several threads; the pages whose mark somebody else changed."""
    clashes: list[int] = []
    marks = [None] * pool.pages
    start = threading.Barrier(threads)

    def work(number):
        rng, held = random.Random(number), []
        start.wait()
        for step in range(rounds):
            n = rng.choice((1, 1, 3))
            try:
                pages = pool.allocate(n, number)
            except PoolExhausted:
                pages = []
            for page in pages:
                marks[page] = (number, step)
            held += [(page, (number, step)) for page in pages]
            clashes.extend(page for page, mark in held if marks[page] != mark)
            if len(held) > 12 or not pages:
                rng.shuffle(held)
                pool.free([page for page, _ in held[:6]], number)
                del held[:6]
        pool.free([page for page, _ in held], number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(switch)
    return clashes


def test_threads_never_get_the_same_page():
    pool = make(64, 16)
    assert hammer(pool) == []
    pool.check()
    assert pool.stats().used == 0


def test_the_threads_would_find_a_pool_without_a_lock():
    class Unlocked(FreePages):
        def one(self):
            chunk = next(chunk for chunk, free in enumerate(self.bitmaps) if free)
            free = self.bitmaps[chunk]
            switched.wait(0.001)  # another thread takes its turn here
            self.bitmaps[chunk] = free & (free - 1)
            self.count -= 1
            return chunk * self.chunk_pages + bits.lowest(free)

    class NoLock:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    switched = threading.Event()
    pool = make(64, 16)
    pool._space = Unlocked(64, 16)
    pool._lock = NoLock()
    seen: list[int] = []
    workers = [threading.Thread(target=lambda: seen.extend(pool.allocate())) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(set(seen)) < len(seen)


# --- the package -----------------------------------------------------------------------------------------------------


def test_the_package_is_light():
    import subprocess

    code = "import sys, o1lab.kv; print(sorted({'torch', 'transformers', 'pandas', 'plotly'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
    assert kv.PagePool is PagePool
    assert callable(kv.fragmentation)
    with pytest.raises(AttributeError, match="nonsense"):
        kv.nonsense  # noqa: B018
