"""Tools that follow torch's CUDA allocator. Each needs a CUDA device."""

from __future__ import annotations

import gc
import unittest
import warnings

from o1lab.memory.rivals import Finding, Workload


def stormlog(work: Workload) -> Finding:
    """Every request through ``GPUMemoryProfiler.profile_function``, then ``MemoryAnalyzer`` at its thresholds."""
    from stormlog import GPUMemoryProfiler, MemoryAnalyzer

    profiler = GPUMemoryProfiler()
    work.warm()
    for _ in range(work.requests):
        profiler.profile_function(work.one)
    analyzer = MemoryAnalyzer(profiler)
    patterns = {pattern.pattern_type for pattern in analyzer.analyze_memory_patterns()}
    insights = {insight.title for insight in analyzer.generate_performance_insights()}
    return read_stormlog(patterns, insights)


def read_stormlog(patterns: set[str], insights: set[str]) -> Finding:
    """Stormlog's two answers to growth, its leak pattern and its trend; and its pattern for fragmentation.

    Examples
    --------
    >>> read_stormlog({"repeated_allocations"}, {"Memory Growth Trend"}).found
    True
    """
    said = sorted((patterns & {"memory_leak", "fragmentation"}) | (insights & {"Memory Growth Trend"}))
    kind = "fragmentation" if said == ["fragmentation"] else ""
    return Finding(bool(said), ", ".join(said) or "no leak pattern and no trend", kind)


def torch_cycles(work: Workload) -> Finding:
    """``observe_tensor_cycles``, under ``warn_tensor_cycles``: a call for each garbage cycle with CUDA tensors."""
    from torch.utils.viz._cycles import observe_tensor_cycles

    work.warm()
    gc.collect()
    pages: list[int] = []
    stop = observe_tensor_cycles(lambda page: pages.append(len(page)))
    work.serve()
    gc.collect()
    (lambda: None)()  # the observer runs at the next Python call after a collection
    stop()
    said = f"{len(pages)} reports of cycles" if pages else "no cycle with a CUDA tensor"
    return Finding(bool(pages), said, "lazy gc" if pages else "")


def torch_leak_check(work: Workload) -> Finding:
    """``CudaMemoryLeakCheck``, which wraps PyTorch's own CUDA tests, around the requests."""
    from torch.testing._internal.common_utils import CudaMemoryLeakCheck, TestCase

    class Requests(TestCase):
        def runTest(self) -> None:
            work.serve()

    work.warm()
    test: unittest.TestCase = Requests()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            with CudaMemoryLeakCheck(test, work.name):
                work.serve()
        except RuntimeError as error:
            if "confirmed a leak" not in str(error):
                raise
            return Finding(True, "error: the driver confirms it")
    unsure = any("reports a memory leak not" in str(warning.message) for warning in seen)
    return Finding(unsure, "warning: the driver does not see it" if unsure else "allocated memory is back where it was")
