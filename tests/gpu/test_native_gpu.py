"""Native tracing on a real GPU: driver allocations, torch's blocks and kernels on one clock."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

from o1lab.memory import native, native_join, native_view, nsight

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupti():
    return pytest.importorskip("cupti.cupti")


@pytest.fixture(scope="module")
def planted_trace(cupti):
    native.planted(8)
    with native.trace_native() as recording:
        native.planted(512)
    return recording.trace


def test_every_planted_allocation_is_matched(planted_trace):
    found = native_view.matched(planted_trace)
    assert found.n == 512
    assert found.share.low >= 0.99  # the ledger's bound
    assert found.alive == 0
    assert planted_trace.lost == {}
    assert any("planted native.py" in frame for block in planted_trace.blocks for frame in block.stack)


def test_the_kernel_found_is_the_one_that_filled_the_block(planted_trace):
    starts = [work.launch_ns for work in planted_trace.work]
    slack = planted_trace.clock.error_ns + 1000
    grids = [
        native_view.first_work(block, starts, planted_trace.work, slack, planted_trace.end_ns).grid
        for block in planted_trace.blocks
    ]
    assert grids == sorted(grids)  # the blocks grow by a page each, and so does the grid that fills them
    assert len(set(grids)) > 200


def test_the_clocks_agree_to_a_few_microseconds(planted_trace):
    assert planted_trace.clock.error_ns < 20_000
    assert all(work.launch_ns <= work.start_ns for work in planted_trace.work)


def test_cupti_alone_sees_few_blocks_of_a_caching_allocator(planted_trace):
    assert native_view.matched(planted_trace).cupti_alone < 0.5 * 512


@pytest.mark.parametrize(
    "setting", ["PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync", "PYTORCH_NO_CUDA_MEMORY_CACHING=1"]
)
def test_cupti_sees_every_block_where_torch_caches_none(cupti, setting):
    code = """
from o1lab.memory import native
native.planted(4)
with native.trace_native() as recording, recording.mark():
    native.planted(32)
found = native.matched(recording.trace)
print(found.n, found.cupti_alone, found.all_three)
"""
    name, _, value = setting.partition("=")
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, name: value}, capture_output=True, text=True, check=False
    )
    assert run.stdout.split() == ["32", "32", "32"], run.stderr[-2000:]


def test_without_kernels_nothing_is_matched(planted_trace):
    assert native_view.matched(planted_trace, []).all_three == 0


def test_allocations_outside_torch_carry_their_mark(cupti):
    runtime = pytest.importorskip("cuda.bindings.runtime")
    with native.trace_native() as recording:
        with recording.mark():
            _, address = runtime.cudaMalloc(3 << 20)
            runtime.cudaMemset(address, 0, 3 << 20)
            runtime.cudaFree(address)
        _, unmarked = runtime.cudaMalloc(5 << 20)
        runtime.cudaFree(unmarked)
    blocks = native_view.outside(recording.trace, {s.address for s in recording.trace.segments})
    marked = {block.bytes: block for block in blocks}
    assert "test_allocations_outside_torch_carry_their_mark" in marked[3 << 20].stack[0]
    assert marked[5 << 20].stack == ()
    assert all(block.end_ns is not None for block in marked.values())


def test_the_bounds_hold(cupti):
    with native.trace_native(max_records=10, max_history=200) as recording:
        native.planted(128)
    assert recording.trace.lost["work"] > 0
    assert "history" in recording.trace.lost
    assert len(recording.trace.work) <= 10


def test_torchs_profiler_works_before_under_and_after(cupti):
    from torch.profiler import ProfilerActivity, profile

    def seen():
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            torch.ones(1000, device="cuda").add_(1)
            torch.cuda.synchronize()
            with pytest.raises(native.NativeError, match="torch.profiler is running"), native.trace_native():
                pass
        return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events())

    first = seen()
    assert first > 0
    with native.trace_native() as recording:
        native.planted(4)
    assert len(recording.trace.blocks) == 4
    assert len(recording.trace.work) == 4
    assert seen() == first


def test_an_exception_leaves_nothing_switched_on(cupti):
    with pytest.raises(ValueError, match="mine"), native.trace_native():
        raise ValueError("mine")
    assert not torch._C._cuda_isHistoryEnabled()
    with native.trace_native() as recording:
        native.planted(4)
    assert len(recording.trace.blocks) == 4


def test_the_figure_shows_a_real_trace(planted_trace):
    pytest.importorskip("plotly")
    from o1lab import plots

    plots.check(native_view.timeline_figure(planted_trace))


def test_nsight_compute_is_measured_where_it_is():
    if shutil.which("ncu") is None:
        with pytest.raises(native_join.NativeError, match="Nsight Compute is not here"):
            nsight.measure_ncu(blocks=4)
        pytest.skip("no ncu on the PATH")
    try:
        found = nsight.measure_ncu(blocks=16)
    except native_join.NativeError as error:
        pytest.skip(str(error))
    assert found.run.kernels
    assert found.best.n == 16
    assert found.best.freed == found.best.stack == 16
    assert found.given.all_three <= found.best.all_three < 16
