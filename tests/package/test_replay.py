"""Cache designs under the same traffic: every byte by hand, against the allocator simulator, and with real memory."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from o1lab.errors import EstimateError
from o1lab.kv import bench
from o1lab.kv.backing import Bytes, Modelled, OnDevice
from o1lab.kv.compare import compare, needed_bytes
from o1lab.kv.designs import Growing, KVShape, Paged, Static
from o1lab.kv.insertion import inserts
from o1lab.kv.latency import quantile
from o1lab.kv.pool import PoolError
from o1lab.kv.replay import as_trace, replay
from o1lab.kv.traffic import Request, Traffic, long_cot
from o1lab.memory import trace
from o1lab.memory.allocator import CachingAllocator
from o1lab.memory.allocator_settings import MIB, Settings
from o1lab.memory.simulate import simulate

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=32, item_bytes=2)  # 512 B a token
PAGE = 2048  # 8 tokens of one layer
SOME = long_cot(12, concurrent=4, median_tokens=60, most_tokens=150, prompt_tokens=20)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def paged(capacity=1 << 20, shape=SHAPE, memory=None, **more):
    return Paged(shape, memory, capacity_bytes=capacity, page_bytes=PAGE, chunk_bytes=32 * PAGE, **more)


def traffic(*lengths, concurrent=8, **more):
    return Traffic(
        tuple(Request(i, 0.0, prompt, output, **more) for i, (prompt, output) in enumerate(lengths)), concurrent
    )


# --- accounts by hand ------------------------------------------------------------------------------------------------


def test_the_growing_cache_holds_old_and_new_at_once():
    memory = Modelled(Bytes())
    found = replay(traffic((8, 2)), Growing(SHAPE, memory))
    first = [(event.action, event.size) for event in memory.events[:7]]
    half = SHAPE.half_bytes
    assert first == [("alloc", 8 * half)] * 4 + [("alloc", 9 * half), ("free", 8 * half), ("alloc", 9 * half)]
    assert (found.finished, found.decoded_tokens, len(found.running)) == (1, 2, 2)
    assert found.live_bytes.tolist() == [9 * SHAPE.token_bytes, 10 * SHAPE.token_bytes]
    # 9 · 128 B take 1,536 after rounding to 512; three tensors of 10 tokens, one of 9, and the new one of 10
    assert found.used_bytes.tolist() == [4 * 1536, 4 * 1536]
    assert found.peak_reserved_bytes == 5 * 1536


def test_the_static_cache_takes_the_longest_length():
    found = replay(traffic((8, 2), (3, 1)), Static(SHAPE, most_tokens=100))
    assert found.used_bytes.tolist() == [2 * 100 * SHAPE.token_bytes, 100 * SHAPE.token_bytes]
    assert found.tail_waste == pytest.approx(1 - (9 + 4 + 10) / 300)


def test_a_sequence_longer_than_the_static_cache_is_lost_not_cut():
    found = replay(traffic((8, 2), (90, 20), (8, 2)), Static(SHAPE, most_tokens=100))
    assert (found.finished, found.failures, found.refusals) == (2, 1, 0)


@pytest.mark.parametrize("stride", [1, 7, 64])
def test_the_pool_uses_exactly_the_pages_of_the_closed_form(stride):
    class Watched(Paged):
        def grow(self, number, tokens):
            grown = super().grow(number, tokens)
            pages = sum(self.shape.pages(count, PAGE) for count in self._tokens.values() if count)
            assert self.used_bytes == pages * PAGE
            self.pool.check()
            return grown

        def end(self, number):
            super().end(number)
            del self._tokens[number]

    design = Watched(SHAPE, capacity_bytes=1 << 20, page_bytes=PAGE, chunk_bytes=32 * PAGE)
    found = replay(SOME, design, stride=stride)
    assert found.clean
    assert found.finished == 12
    assert design.pool.stats().used == 0


@pytest.mark.parametrize("make", [Growing, lambda shape: Static(shape, most_tokens=4300), lambda shape: paged(4 << 20)])
def test_whatever_is_taken_comes_back(make):
    design = make(SHAPE)
    found = replay(long_cot(20, concurrent=5, median_tokens=60, most_tokens=150, abort_share=0.4), design)
    assert found.finished + found.aborted == 20
    assert found.aborted > 3
    assert design._held == {}
    live = {event.block for event in design.memory.events if event.action == "alloc"}
    gone = [event.block for event in design.memory.events if event.action == "free"]
    assert len(gone) == len(set(gone))
    assert live - set(gone) == ({1} if isinstance(design, Paged) else set())  # the pool itself


def test_an_aborted_request_decodes_up_to_its_abort():
    found = replay(Traffic((Request(0, 0.0, 5, 50, aborted_after=7),)), paged())
    assert (found.aborted, found.finished, found.decoded_tokens) == (1, 0, 7)


def test_requests_wait_for_their_arrival_and_for_a_place():
    late = Traffic((Request(0, 0.0, 4, 4), Request(1, 0.0, 4, 4), Request(2, 9.0, 4, 4)), concurrent=1)
    assert replay(late, paged()).running.tolist() == [1] * 12
    assert replay(late, paged(), step_s=5.0).running.tolist() == [1] * 12
    both = Traffic((Request(0, 0.0, 4, 4), Request(1, 0.05, 4, 4)), concurrent=2)
    assert replay(both, paged()).running.tolist() == [1, 1, 1, 2, 1, 1, 1]


def test_a_prompt_may_take_several_steps():
    found = replay(traffic((20, 3)), paged(), prefill=8)
    assert (found.live_bytes // SHAPE.token_bytes).tolist() == [16, 20, 21, 22, 23]
    assert found.decoded_tokens == 3


# --- prefixes --------------------------------------------------------------------------------------------------------


def test_a_common_prefix_is_held_once_while_somebody_needs_it():
    shared = Traffic(tuple(Request(i, 0.0, 40, 8, None, "system", 32) for i in range(4)), concurrent=4)
    apart = Traffic(tuple(Request(i, 0.0, 40, 8) for i in range(4)), concurrent=4)
    with_, without = paged(), paged()
    one, other = replay(shared, with_), replay(apart, without)
    saved = 3 * SHAPE.pages(32, PAGE) * PAGE
    assert other.peak_used_bytes - one.peak_used_bytes == saved
    assert other.peak_live_bytes - one.peak_live_bytes == 3 * 32 * SHAPE.token_bytes
    assert (with_.saved_tokens, with_._prefixes, with_.pool.stats().used) == (0, {}, 0)


def test_the_first_holder_of_a_prefix_may_leave_first():
    requests = tuple(Request(i, 0.0, 40, 4 + 4 * i, None, "system", 32) for i in range(3))
    design = paged()
    found = replay(Traffic(requests, concurrent=3), design)
    assert found.finished == 3
    assert found.live_bytes.min() > 0
    assert np.all(found.live_bytes <= found.used_bytes)
    design.pool.check()


# --- when memory is out ----------------------------------------------------------------------------------------------


def test_a_request_waits_when_there_is_no_room_and_runs_later():
    found = replay(traffic((24, 4), (24, 4)), paged(8 * PAGE))  # one takes 6 pages, and 8 at its end
    assert (found.finished, found.failures, found.refusals) == (2, 0, 4)
    assert found.running.tolist() == [1] * 8
    assert not found.clean


def test_a_sequence_that_cannot_grow_is_lost():
    found = replay(traffic((16, 40), (16, 40)), paged(16 * PAGE))
    assert (found.finished, found.failures) == (1, 1)


def test_a_request_that_never_fits_is_lost_and_the_rest_is_served():
    found = replay(traffic((300, 1), (8, 8)), paged(8 * PAGE))
    assert (found.finished, found.failures) == (1, 1)


def test_a_static_cache_that_is_half_reserved_gives_back_what_it_took():
    memory = Modelled(Bytes(3 * 100 * SHAPE.half_bytes))
    design = Static(SHAPE, memory, most_tokens=100)
    assert replay(traffic((8, 8)), design).failures == 1
    assert memory.allocated_bytes == 0


def test_preempting_the_newest_serves_everybody_and_says_what_it_cost():
    found = replay(traffic((16, 40), (16, 40), (16, 40)), paged(20 * PAGE), when_full="youngest")
    assert (found.finished, found.failures) == (3, 0)
    assert found.preemptions > 0
    assert found.recomputed_tokens >= 16 * found.preemptions


def test_a_replay_that_gets_nowhere_ends():
    found = replay(traffic((16, 1000)), paged(), most_steps=10)
    assert (found.finished, found.failures, len(found.running)) == (0, 1, 10)


@pytest.mark.parametrize(
    "settings",
    [{"stride": 0}, {"prefill": 0}, {"stride": 1.5}, {"most_steps": 0}, {"when_full": "me"}, {"admit_whole": True}],
)
def test_settings_that_cannot_be_are_refused(settings):
    with pytest.raises(PoolError, match=next(iter(settings))):
        replay(SOME, Growing(SHAPE), **settings)


@pytest.mark.parametrize("shape", [{"layers": 0}, {"item_bytes": 0.5}])
def test_a_shape_that_cannot_be_is_refused(shape):
    with pytest.raises(PoolError, match=next(iter(shape))):
        KVShape(**shape)


def test_a_page_smaller_than_a_token_is_refused():
    with pytest.raises(PoolError, match="holds no token"):
        Paged(KVShape(), capacity_bytes=1 << 20, page_bytes=1024, chunk_bytes=4096)


# --- against the allocator simulator ---------------------------------------------------------------------------------


@pytest.mark.parametrize("expandable", [False, True])
def test_an_allocator_passed_in_and_the_trace_replayed_agree_to_the_byte(expandable):
    """The same requests through the rules of torch's allocator, once live and once as a recorded trace."""
    big = KVShape(layers=2, kv_heads=8, head_dim=128)
    load = long_cot(10, concurrent=4, median_tokens=400, most_tokens=900)
    memory = Modelled(CachingAllocator(Settings(expandable_segments=expandable)))
    found = replay(load, Growing(big, memory), stride=16)
    recorded = trace.from_snapshot({"segments": [], "device_traces": [as_trace(memory.events)]})
    again = simulate(recorded, expandable_segments=expandable)
    assert again.peak_reserved_bytes == found.peak_reserved_bytes
    assert again.allocated[-1] == 0
    assert found.peak_reserved_bytes > 1.2 * found.peak_live_bytes  # what is to be shown
    assert again.num_ooms == 0


def test_a_capped_allocator_fails_where_the_ideal_one_does_not():
    big = KVShape(layers=2, kv_heads=8, head_dim=128)
    load = long_cot(10, concurrent=4, median_tokens=400, most_tokens=900)
    capacity, _ = needed_bytes(lambda capacity: Growing(big, Modelled(Bytes(capacity))), load, stride=16)
    capped = replay(load, Growing(big, Modelled(CachingAllocator(Settings(capacity_bytes=capacity)))), stride=16)
    assert not capped.clean
    assert capped.peak_live_bytes < capacity - 2 * MIB  # it is not for want of bytes


def test_needed_bytes_are_the_least_that_are_enough():
    make = lambda capacity: paged(capacity)  # noqa: E731
    needed, found = needed_bytes(make, SOME, step_bytes=PAGE)
    assert found.clean
    assert needed == found.peak_used_bytes
    assert not replay(SOME, paged(needed - PAGE)).clean
    with pytest.raises(PoolError, match="are not enough"):
        needed_bytes(make, traffic((5000, 1)), step_bytes=PAGE, most_bytes=100 * PAGE)


def test_the_comparison_says_what_each_design_needs():
    found = compare(SOME, SHAPE, page_bytes=PAGE, step_bytes=4096, stride=4)
    assert list(found.needed) == ["growing cat, ideal", "static, ideal", "paged pool"]
    assert found.ratio("static, ideal") > 1.5 > found.ratio("growing cat, ideal")
    assert 0 < found.all_in_waste("paged pool") < 0.3 < found.all_in_waste("static, ideal")
    assert "paged pool" in str(found)


def test_long_chains_waste_little_in_pages_and_much_in_the_longest_length():
    """The default shape and traffic: half a page of 64 tokens a layer in chains of 3,000."""
    most = max(one.prompt_tokens + one.output_tokens for one in long_cot(16))
    tails = replay(long_cot(16), Paged(KVShape(), capacity_bytes=2 << 30), stride=8)
    static = replay(long_cot(16), Static(KVShape(), most_tokens=most), stride=64)
    assert 0.002 < tails.tail_waste < 0.02
    assert static.tail_waste > 0.4
    assert tails.not_live.shape == tails.running.shape
    assert "served" in str(tails)


# --- with real memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [lambda memory: Growing(SHAPE, memory), lambda memory: Static(SHAPE, memory, most_tokens=300),
     lambda memory: paged(memory=memory)],
)  # fmt: skip
def test_a_real_run_asks_for_the_same_bytes(make):
    modelled, real = replay(SOME, make(Modelled())), replay(SOME, make(OnDevice("cpu", 1 << 20)))
    assert np.array_equal(modelled.live_bytes, real.live_bytes)
    assert np.array_equal(modelled.running, real.running)
    assert np.all(np.abs(modelled.used_bytes - real.used_bytes) <= 512 * 4 * 4)  # but for rounding to 512
    assert (real.append_us > 0).all()


def test_real_tokens_are_written_where_they_belong():
    design = paged(memory=OnDevice("cpu", 1 << 16))
    design.pool.arena.zero_()
    assert design.admit(Request(0, 0.0, 11, 5), 11)
    assert int(design.pool.arena.sum()) == 11 * SHAPE.token_bytes
    assert design.grow(0, 14)
    assert int(design.pool.arena.sum()) == 14 * SHAPE.token_bytes
    growing = Growing(SHAPE, OnDevice("cpu", 1 << 16))
    assert growing.admit(Request(0, 0.0, 11, 5), 11)
    assert growing.grow(0, 14)
    assert sum(int(tensor.sum()) for tensor in growing._held[0]) == 14 * SHAPE.token_bytes


def test_memory_that_is_out_on_the_device_is_no_crash(monkeypatch):
    memory = OnDevice("cpu", 1024)

    def refuse(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(torch, "cat", refuse)
    assert memory.new(64) is None
    assert memory.extend(torch.ones(4, dtype=torch.uint8), 8) is None
    assert memory.allocated_bytes == 0


def test_append_quantiles_come_with_intervals():
    found = replay(
        long_cot(4, concurrent=2, median_tokens=300, most_tokens=400), paged(memory=OnDevice("cpu", 1 << 20))
    )
    assert found.append(0.5).low <= found.append(0.5).value <= found.append(0.5).high
    with pytest.raises(EstimateError, match="measure more"):
        replay(traffic((4, 4)), paged()).append(0.99)
    with pytest.raises(EstimateError):
        quantile(range(100), 1.0, "s")


def test_the_interval_of_a_quantile_covers_it():
    rng = np.random.default_rng(0)
    found = [quantile(rng.exponential(size=600), 0.99, "s") for _ in range(400)]
    covered = sum(one.low <= -np.log(0.01) <= one.high for one in found)
    assert 0.92 <= covered / 400 <= 0.99


# --- the commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 7])
def test_inserts_are_timed_in_pairs(blocks):
    found = inserts(60, threads=3, blocks=blocks, block_bytes=4096, keep=4, repeats=6)
    assert found.speedup.n == found.native.n == 6
    assert found.pool.value > 0
    assert "60 inserts" in str(found)


@pytest.mark.parametrize(
    "wrong", [{"repeats": 3}, {"threads": 0}, {"native": "jemalloc"}, {"native": "cudaMalloc", "write": False}]
)
def test_inserts_that_cannot_be_are_refused(wrong):
    with pytest.raises(PoolError, match=next(iter(wrong))):
        inserts(**wrong)


def test_latencies_are_measured_in_a_pool_that_stays_full():
    found = bench.latency(3, times=4000, threads=2, pool_bytes=64 << 20)
    assert set(found) == {"allocate", "free", "clock"}
    assert found["allocate"].quantiles["p50"].value > found["clock"].quantiles["p50"].value
    assert found["allocate"].quantiles["p99.9"].n == 4000


def test_the_command_prints_and_writes_its_tables(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "TABLES", {"latency": lambda device, quick: print("row") or {"quick": quick}})
    assert bench.main(["--quick", "--json", str(tmp_path / "found.json")]) == 0
    assert "row" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text()) == {"latency": {"quick": True}}
    with pytest.raises(SystemExit):
        bench.main(["nothing"])


def test_the_command_runs_the_designs_with_real_memory():
    found = bench.designs(SOME, "cpu", SHAPE, pool_bytes=8 << 20)
    assert [one.design for one in found] == ["growing cat", "static", "paged pool"]
    assert all(one.clean for one in found)
