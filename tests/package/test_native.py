"""Native tracing, Nsight output, CUDA-graph cases: everything that can be decided without a GPU, on hand-made data."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from o1lab import plots
from o1lab.errors import ProbeError
from o1lab.memory import graph_cases, graph_lifetimes, graph_raw, native, native_join, native_view, nsight
from o1lab.memory.graph_lifetimes import Graph, Node, Truth, derive_lifetimes
from o1lab.memory.native_join import Block, Clock, NativeError, Trace, Work, align
from o1lab.memory.native_view import matched

FRAME = {"name": "serve", "filename": "/somewhere/loop.py", "line": 7}
OFFSET = 1_000_000  # CUPTI's clock is 1 ms ahead of torch's


def entry(action, address, time_us, size=512, frames=(FRAME,), stream=0):
    return {"action": action, "addr": address, "size": size, "stream": stream, "time_us": time_us, "frames": frames}


def history_of(*events):
    """The events between two bracketed allocations, as torch's history has them."""
    first = [entry("alloc", 1, 10), entry("free_requested", 1, 11), entry("free_completed", 1, 11)]
    last = [entry("alloc", 1, 90), entry("free_requested", 1, 91), entry("free_completed", 1, 91)]
    return [*first, *events, *last]


def built(history, *, calls=(), work=(), memory=(), external=(), marks=None, max_history=1000):
    def at(time_us):
        return 1000 * time_us + OFFSET

    store = {
        "call": [(number, at(time)) for number, time in calls],
        "work": [(name, at(start), at(end), stream, number, 1, 0) for number, name, start, end, stream in work],
        "memory": [(at(time), *rest) for time, *rest in memory],
        "external": list(external),
    }
    seen = {sort: len(records) for sort, records in store.items()}
    bracket = [(at(10) + 200, at(10) + 600)], [(at(90) + 300, at(90) + 500)]
    return native_join.build(
        store, seen, marks or {}, history, *bracket, (at(12), at(12)), (at(89), at(89)), max_history, {0: 7, 5: 13}
    )  # fmt: skip


BLOCK = (entry("alloc", 64, 20), entry("free_requested", 64, 40), entry("free_completed", 64, 41))


def test_an_allocation_gets_its_free_stack_and_kernel():
    trace = built(history_of(*BLOCK), calls=[(5, 25)], work=[(5, "fill", 30, 35, 7)])
    assert [(b.bytes, b.stack) for b in trace.blocks] == [(512, ("serve loop.py:7",))]
    found = matched(trace)
    assert (found.n, found.freed, found.stack, found.kernel, found.all_three) == (1, 1, 1, 1, 1)
    assert found.share.value == 1
    assert "all three" in found.table()


@pytest.mark.parametrize(
    ("history", "work", "lost"),
    [
        (BLOCK[:1], [(5, "fill", 30, 35, 7)], "freed"),
        ((entry("alloc", 64, 20, frames=()), *BLOCK[1:]), [(5, "fill", 30, 35, 7)], "stack"),
        (BLOCK, [(6, "fill", 60, 65, 7)], "kernel"),  # launched after the free
        (BLOCK, [(5, "fill", 30, 35, 13)], "kernel"),  # on another stream
        (BLOCK, [], "kernel"),
    ],
)
def test_what_is_missing_is_not_counted(history, work, lost):
    calls = [(5, 25), (6, 60)]
    found = matched(built(history_of(*history), calls=calls, work=work))
    assert {name: getattr(found, name) for name in ("freed", "stack", "kernel")} == {
        name: int(name != lost) for name in ("freed", "stack", "kernel")
    }
    assert found.all_three == 0
    assert found.alive == (lost == "freed")


def test_a_kernel_counts_by_its_launch_not_by_its_run():
    late = built(history_of(*BLOCK), calls=[(5, 25)], work=[(5, "fill", 60, 65, 7)])  # runs after the host freed
    assert matched(late).kernel == 1
    assert late.lost == {}
    unknown = built(history_of(*BLOCK), work=[(5, "fill", 60, 65, 7)])
    assert matched(unknown).kernel == 0
    assert unknown.lost == {"launch times": 1}


def test_an_address_used_twice_gives_two_blocks():
    again = (entry("alloc", 64, 50, size=1024), entry("free_requested", 64, 60), entry("free_completed", 64, 61))
    blocks = built(history_of(*BLOCK, *again)).blocks
    assert [(b.bytes, b.free_ns is not None) for b in blocks] == [(512, True), (1024, True)]
    assert blocks[0].end_ns < blocks[1].start_ns


def test_a_driver_allocation_outside_torch_is_counted_with_its_mark():
    memory = [(20, 4096, 3 << 20, 1, 3, 0xFFFF, 1, 9, 0), (50, 4096, 3 << 20, 2, 3, 0xFFFF, 1, 10, 0)]
    static = [(21, 8192, 64, 1, 6, 0xFFFF, 1, 8, 0)]  # the driver's own
    trace = built(
        history_of(), memory=memory + static, external=[(9, 1)], marks={1: ("mine loop.py:3",)}, calls=[(4, 30)],
        work=[(4, "memset", 31, 32, 7)],
    )  # fmt: skip
    found = matched(trace)
    assert (found.n, found.all_three, found.cupti_alone) == (1, 1, 1)
    unmarked = built(history_of(), memory=memory, calls=[(4, 30)], work=[(4, "memset", 31, 32, 7)])
    assert matched(unmarked).stack == 0


def test_a_segment_of_torchs_is_not_counted_again():
    segment = entry("segment_alloc", 4096, 20, size=2 << 20)
    block = (entry("alloc", 4096, 21), entry("free_requested", 4096, 40), entry("free_completed", 4096, 40))
    trace = built(history_of(segment, *block), memory=[(20, 4096, 2 << 20, 1, 3, 0xFFFF, 1, 9, 0)])
    found = matched(trace)
    assert (found.n, found.cupti_alone) == (1, 1)  # this block happens to begin its segment
    assert len(trace.segments) == 1


def test_the_clocks_offset_holds_the_truth_and_states_its_error():
    brackets = [(1000 * t + OFFSET + 100, 1000 * t + OFFSET + 900) for t in (5, 50, 500)]
    clock = align(brackets, [5, 50, 500])
    assert abs(clock.offset_ns - OFFSET) <= clock.error_ns
    assert clock.error_ns <= 1000
    assert not clock.drifted


def test_drifting_clocks_are_said_to_drift_and_the_error_covers_it():
    clock = align([(1_000_000, 1_000_200), (2_050_000, 2_050_200)], [1000, 2000])
    assert clock.drifted
    assert clock.error_ns > 20_000


def test_a_clock_of_ticks_is_turned_into_ns():
    day = 1_700_000_000_000_000_000
    wall = native_join.to_wall((5_000, day), (9_000, day + 1_000))  # four ticks a ns
    assert [wall(5_000), wall(7_000), wall(9_000)] == [day, day + 500, day + 1_000]
    assert native_join.to_wall((day, day + 9), (day + 50, day + 60))(day + 7) == day + 7


def test_times_since_1970_keep_their_ns():
    day_us = 1_796_024_890_274_979
    entries = [entry("alloc", 64, day_us), entry("free_completed", 64, day_us + 1)]
    (block,) = native_join.pair(entries, Clock(-205.5, 0, 1, False), {}, segments=False)
    assert block.start_ns == 1000 * day_us - 206
    assert block.end_ns - block.start_ns == 1000


def test_a_wrapped_history_is_reported_and_aligned_by_its_end():
    trace = built(history_of(*BLOCK), max_history=9)
    assert "history" in trace.lost
    assert trace.clock.samples == 1


def test_the_bounds_drop_the_oldest_and_count_them():
    recording = native.Recording(max_records=3)
    kernel = SimpleNamespace(
        kind=10, name="fill", start=1, end=2, stream_id=7, correlation_id=1, grid_x=2, grid_y=1, grid_z=1,
        graph_node_id=0,
    )  # fmt: skip
    recording.take([kernel] * 5)
    assert len(recording.store["work"]) == 3
    assert recording.seen["work"] == 5


def test_the_figure_can_be_shown_and_an_empty_one_is_refused():
    events = [event for i in range(3000) for event in (entry("alloc", i, 20), entry("free_completed", i, 40))]
    work = [(i, "fill", 20 + i / 100, 20 + i / 100 + 0.001, 7) for i in range(3000)]
    trace = built(history_of(*events), calls=[], work=work, max_history=10**6)
    figure = native_view.timeline_figure(trace)
    plots.check(figure)
    assert {t.name for t in figure.data} == {"segments", "blocks", "kernels"}
    assert max(figure.data[1].y) == pytest.approx(3000 * 512 / 2**20)
    with pytest.raises(NativeError, match="nothing to draw"):
        native_view.timeline_figure(built(history_of()))


def test_busy_spans_merge_to_the_limit_and_keep_the_ends():
    spans = native_view.busy([(i * 10, i * 10 + (9 if i % 2 else 1)) for i in range(100)], most=7)
    assert len(spans) <= 7
    assert (spans[0][0], spans[-1][1]) == (0, 999)


# --- the recording, with a CUPTI that only counts -------------------------------------------------------------------


class FakeCupti:
    class cuptiError(Exception):
        pass

    def __init__(self, refuse=None):
        self.enabled, self.refuse, self.time = set(), refuse, 0
        self.ActivityKind = SimpleNamespace(**{name: name for name in native.KINDS})

    def activity_register_callbacks(self, requested, completed):
        self.requested = requested

    def activity_enable(self, kind):
        if kind == self.refuse:
            raise self.cuptiError("ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")
        self.enabled.add(kind)

    def activity_disable(self, kind):
        self.enabled.remove(kind)

    def activity_flush_all(self, flag):
        pass

    def get_timestamp(self):
        self.time += 1000
        return self.time


@pytest.fixture
def fake_gpu(monkeypatch):
    """A torch that says it has a GPU, and a list of the calls that switch the allocator history."""
    switched = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *a, **k: switched.append(a[0]))
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: bool(switched) and switched[-1], raising=False)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(native, "_brackets", lambda cupti: [])
    return switched


ON = {*native.KINDS}


def failing(cupti):
    with native.trace_native():
        assert cupti.enabled == ON
        with pytest.raises(NativeError, match="running already"), native.trace_native():
            pass
        assert cupti.enabled == ON  # the refused one has switched nothing off
        raise ValueError("mine")


@pytest.mark.parametrize(("refuse", "error", "says"), [(None, ValueError, "mine"), ("MEMSET", NativeError, "stop any")])
def test_everything_is_disabled_again_after_an_exception(fake_gpu, monkeypatch, refuse, error, says):
    cupti = FakeCupti(refuse)
    monkeypatch.setattr(native, "load_cupti", lambda: cupti)
    with pytest.raises(error, match=says):
        failing(cupti)
    assert cupti.enabled == set()
    assert fake_gpu == ([] if refuse else ["all", None])
    assert native._active is None


def test_a_mark_outside_a_recording_is_refused():
    with pytest.raises(NativeError, match="outside its recording"), native.Recording(5).mark():
        pass


def test_a_history_that_someone_else_records_is_left_alone(fake_gpu, monkeypatch):
    monkeypatch.setattr(native, "load_cupti", FakeCupti)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
    with pytest.raises(NativeError, match="recorded by someone else"), native.trace_native():
        pass
    assert fake_gpu == []
    assert native._active is None


def test_without_a_gpu_or_cupti_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NativeError, match="CUDA device"), native.trace_native():
        pass
    with pytest.raises(graph_raw.GraphError, match="CUDA device"):
        graph_cases.measure(runs=1)
    with pytest.raises(graph_raw.GraphError, match="CUDA device"):
        graph_lifetimes.derivable()
    monkeypatch.setitem(sys.modules, "cupti", None)
    with pytest.raises(ProbeError, match="pip install"):
        native.load_cupti()
    with pytest.raises(NativeError, match="at least 1"), native.trace_native(max_records=0):
        pass


def test_importing_the_modules_imports_no_torch():
    code = (
        "import sys; from o1lab.memory import native, native_join, nsight, graph_cases, graph_lifetimes; "
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# --- Nsight Compute -------------------------------------------------------------------------------------------------

COLUMNS = ["ID", "Process ID", "Kernel Name", "Stream", "Grid Size", "gpu__time_duration.sum", "gpu__time_start.max"]


def ncu_says(*rows):
    """The CSV of ncu between two lines of its own."""
    lines = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in (COLUMNS, *rows)]
    return "\n".join(["==PROF== Connected to process 42", *lines, "==PROF== Disconnected", ""])


NCU = ncu_says(
    ["", "", "", "", "", "us", "ns"],
    ["0", "42", 'fill, then "more"', "7", "(8, 1, 1)", "1,002.5", "1,700,000,000"],
    ["1", "42", "add", "7", "(8, 1, 1)", "3.2", ""],
)


def test_nsight_rows_are_read_with_their_units():
    first, second = nsight.parse_raw(NCU)
    assert first.name == 'fill, then "more"'
    assert (first.process, first.stream, first.duration_ns, first.start_ns) == (42, 7, 1_002_500.0, 1.7e9)
    assert second.start_ns is None
    assert nsight.parse_raw("==ERROR== ERR_NVGPUCTRPERM\n") == ()


def run_fake_ncu(tmp_path, monkeypatch, text, code=0):
    """A program named ncu that prints ``text``."""
    tool = tmp_path / "ncu"
    (tmp_path / "said").write_text(text)
    script = f'[ "$1" = --version ] && echo "Version 2025.3.0.0" || cat {tmp_path}/said'
    tool.write_text(f"#!/bin/sh\n{script}\nexit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return nsight.run_ncu(["true"])


def test_nsight_outcomes_are_told_apart(tmp_path, monkeypatch):
    run = run_fake_ncu(tmp_path, monkeypatch, NCU)
    assert (run.status, run.version, len(run.kernels), run.timed) == ("ok", "2025.3.0.0", 2, 1)
    assert "1 with a start time" in run.table()
    denied = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n"
    assert run_fake_ncu(tmp_path, monkeypatch, denied, 1).status == "no permission"
    assert run_fake_ncu(tmp_path, monkeypatch, "==ERROR== broken\n", 1).status == "failed"
    assert run_fake_ncu(tmp_path, monkeypatch, "==WARNING== No kernels were profiled\n").status == "no kernels"


def test_without_nsight_the_error_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NativeError, match="Nsight Compute is not here"):
        nsight.measure_ncu()


def test_kernels_without_a_time_match_nothing():
    block = Block(64, 512, -1, 1000, 9000, 9000, ("serve loop.py:7",))
    trace = nsight.of_blocks([block], Clock(0, 0, 0, False))
    assert matched(trace, []).all_three == 0
    assert matched(trace, [Work("fill", 5000, 5000, 5100, 7, 0)]).all_three == 1
    assert isinstance(trace, Trace)


def ncu_run(*starts):
    kernels = tuple(nsight.NcuKernel(i, 1, "fill", 7, "", 10.0, start) for i, start in enumerate(starts))
    return nsight.NcuRun("ok", kernels, "2025.3", "")


def test_one_shift_aligns_a_common_axis_and_cannot_align_times_that_each_begin_anew():
    events = [
        event
        for i in range(50)
        for event in (
            entry("alloc", i, 1000 * i),
            entry("free_requested", i, 1000 * i + 9),
            entry("free_completed", i, 1000 * i + 9),
        )
    ]
    common = nsight.put_together(events, ncu_run(*(1e6 * i - 7e9 for i in range(50))))
    assert common.given.all_three == 0
    assert (common.best.all_three, common.run.ordered) == (50, 49)
    anew = nsight.put_together(events, ncu_run(*(1000.0 * (i * 7 % 13) for i in range(50))))
    assert anew.best.all_three <= 2
    assert anew.run.ordered < 49
    untimed = nsight.put_together(events, ncu_run(*[None] * 50))
    assert (untimed.best.all_three, untimed.run.timed) == (0, 0)
    assert "best shift" in untimed.table()


# --- graphs ---------------------------------------------------------------------------------------------------------


def chain(*nodes):
    return Graph(tuple(nodes), tuple((i, i + 1) for i in range(len(nodes) - 1)))


def test_a_chain_gives_each_block_its_own_free_also_at_one_address():
    lives = derive_lifetimes(
        chain(Node("alloc", 64, 8), Node("memset", 64, 8), Node("free", 64), Node("alloc", 64, 16), Node("free", 64))
    )
    assert [(life.bytes, life.alloc, life.free, life.users) for life in lives] == [(8, 0, 2, (1,)), (16, 3, 4, ())]
    assert all(life.safe for life in lives)


def test_a_block_that_leaves_the_graph_has_no_end():
    (life,) = derive_lifetimes(chain(Node("alloc", 64, 8), Node("kernel")))
    assert life.free is None
    assert not life.safe


def test_work_on_another_branch_than_the_free_is_a_hazard():
    nodes = (Node("alloc", 64, 8), Node("kernel"), Node("free", 64))
    joined = derive_lifetimes(Graph(nodes, ((0, 1), (1, 2))))
    forked = derive_lifetimes(Graph(nodes, ((0, 1), (0, 2))))
    assert (joined[0].unordered, forked[0].unordered) == (0, 1)
    assert joined[0].safe
    assert not forked[0].safe


def test_a_free_of_another_graphs_block_is_not_taken_for_ours():
    (life,) = derive_lifetimes(chain(Node("alloc", 64, 8), Node("free", 4096)))
    assert life.free is None
    with pytest.raises(graph_raw.GraphError, match="cycle"):
        derive_lifetimes(Graph((Node("kernel"), Node("kernel")), ((0, 1), (1, 0))))


def test_only_what_agrees_with_the_program_counts():
    leaving = Node("alloc", 128, 8), Node("memset", 128, 8)
    lives = derive_lifetimes(chain(Node("alloc", 64, 8), Node("memset", 64, 8), Node("free", 64), *leaving))
    right, other_size = Truth(64, 8, 1, True), Truth(64, 16, 1, True)
    assert graph_lifetimes.agree(lives, [right]) == 1
    assert graph_lifetimes.agree(lives, [other_size]) == 0
    assert graph_lifetimes.agree(lives, [right, right]) == 1  # one derivation answers for one block
    assert graph_lifetimes.agree(lives, [Truth(128, 8, 1, False)]) == 0  # where it ends is not in the graph
    counts = graph_lifetimes.Derivable((100, 100), (0, 50), (0, 50), 50)
    assert counts.share("inside").value == 1
    assert counts.share().value == 0.5
    assert "100/100" in counts.table()


class FakeRuntime:
    """``cudaMallocAsync`` and ``cudaFreeAsync`` that give out addresses and refuse those in ``refuse``."""

    def __init__(self):
        self.live, self.refuse, self.next = set(), set(), 64

    def cudaMallocAsync(self, size, stream):
        self.next += size
        self.live.add(self.next)
        return Ok(), self.next

    def cudaFreeAsync(self, address, stream):
        if address in self.refuse:
            return (Ok("cudaErrorInvalidValue", 1),)
        self.live.remove(address)
        return (Ok(),)

    def cudaGetLastError(self):
        return (Ok(),)


class Ok:
    def __init__(self, name="cudaSuccess", value=0):
        self.name, self.value = name, value

    def __int__(self):
        return self.value


@pytest.mark.parametrize("on", [True, False])
def test_pairing_frees_what_no_free_reached(on):
    cuda = FakeRuntime()
    books = graph_raw.Pairing(cuda, on=on)
    paired, forgotten, refused = (books.malloc(512, None) for _ in range(3))
    assert books.free(paired, None)
    cuda.refuse.add(refused)
    assert not books.free(refused, None, "g")
    assert books.refused == ["cudaErrorInvalidValue"]
    cuda.refuse.clear()
    assert books.close(None) == [forgotten, refused]
    assert cuda.live == (set() if on else {forgotten, refused})


def test_pairing_follows_blocks_across_graphs_by_launches():
    books = graph_raw.Pairing(FakeRuntime())
    block = books.malloc(512, None, "first")
    assert books.live == {}  # captured, not yet made
    books.free(block, None, "second")
    books.launched("first")
    assert books.live == {block: 512}
    books.launched("second")
    assert books.live == {}


def outcome(*held, error="", overwritten=None):
    stages = ("run", "free and synchronise", "graph gone", "trim")
    return graph_cases.Outcome(dict(zip(stages, held, strict=True)), {}, error, overwritten)


def test_a_case_counts_blocks_held_at_the_end_and_says_when_the_others_came_back():
    outcomes = [outcome(8, 8, 8, 0), outcome(8, 0, 0, 0), outcome(8, 8, 8, 8, error="cudaErrorInvalidValue")]
    case = graph_cases.summarise("free after", "raw", "", outcomes, 8)
    assert (case.n, case.unreclaimed) == (3, 1)
    assert case.reclaimed_at == {"trim": 1, "free and synchronise": 1}
    assert case.errors == {"cudaErrorInvalidValue": 1}
    clean = graph_cases.summarise("inside", "torch", "", [outcome(0, 0, 0, 0, overwritten=True)] * 100, 8)
    assert (clean.unreclaimed, clean.overwritten) == (0, 100)
    assert clean.share.high < 0.05
    cases = graph_cases.Cases((case, clean))
    assert cases.of("free after", "inside") == (1, 103)
    assert cases.of("inside", api="torch") == (0, 100)
    assert "1/3" in cases.table()
    assert "came back" in cases.table()
    with pytest.raises(graph_raw.GraphError, match="no case"):
        cases.of("nowhere")


def test_bad_measurements_are_refused():
    with pytest.raises(graph_raw.GraphError, match="at least one run"):
        graph_cases.measure(runs=0)
    with pytest.raises(graph_raw.GraphError, match="no case"):
        graph_cases.measure(runs=1, names=("nowhere",))
    with pytest.raises(graph_raw.GraphError, match="cudaErrorInvalidValue"):
        graph_raw.call((Ok("cudaErrorInvalidValue", 1), None))
