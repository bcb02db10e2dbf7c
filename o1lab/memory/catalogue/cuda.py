"""Growth in the CUDA machinery: graphs, pools, kernels, histories, memory outside torch's allocator."""

from __future__ import annotations

import contextlib
import itertools
from array import array
from collections.abc import Iterator
from typing import Any

from o1lab.memory.catalogue import Step
from o1lab.memory.catalogue.device_tensors import MIB, activation, cuda_case
from o1lab.memory.catalogue.python_objects import KIB


@cuda_case(
    "https://github.com/pytorch/pytorch/issues/128424",
    "keyed growth",
    bytes_per_request=2 * MIB,
    owner="graphs",
    requests_per_round=4,
    note="1 MiB of static input and 1 MiB of output per graph; the graph's own launch data come on top, on both sides",
)
def graph_per_length(leak: bool) -> Iterator[Step]:
    """A CUDA graph and its static tensors are recorded and kept per length. Cure: pad to a few lengths."""
    import torch

    graphs: dict[int, Any] = {}

    def step(number: int) -> None:
        length = number if leak else number % 2
        if length not in graphs:
            static = torch.ones(256 * KIB + length, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = static * 2
            graphs[length] = (graph, static, out)
        graphs[length][0].replay()

    step(0)  # the first capture sets up streams and pools
    step(1)
    yield step


@cuda_case(
    "https://github.com/pytorch/pytorch/pull/188913",
    "keyed growth",
    requests_per_round=2,
    rounds=8,
    warm_up=3,
    slow=True,
    note="torch's own graph trees: one compile for all lengths, one recording for each, without a limit",
)
def compiled_graph_per_length(leak: bool) -> Iterator[Step]:
    """``mode="reduce-overhead"`` records a CUDA graph per length it meets. Cure: pad, or capture sizes."""
    import torch

    layer = torch.nn.Linear(256, 256, device="cuda")
    compiled = torch.compile(layer, mode="reduce-overhead", dynamic=True)

    def step(number: int) -> None:
        x = torch.ones(2 + (number if leak else number % 2), 256, device="cuda")
        for _ in range(3):  # warm-up, recording, replay
            torch.compiler.cudagraph_mark_step_begin()
            compiled(x)

    with torch.inference_mode():
        yield step
    torch._dynamo.reset()


@cuda_case(
    "https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.MemPool.html",
    "per-call leak",
    bytes_per_request=2 * MIB,
    counter="device_reserved",
    owner="pools",
    requests_per_round=2,
    note="reserved grows, allocated does not; empty_cache() leaves a pool alone that is still referenced",
)
def pool_per_request(leak: bool) -> Iterator[Step]:
    """A ``MemPool`` made per request and kept holds its segment, though all its tensors died. Cure: one pool."""
    import torch

    pools: list[Any] = []

    def step(number: int) -> None:
        if leak or not pools:
            pools.append(torch.cuda.MemPool())
        with torch.cuda.use_mem_pool(pools[-1]):
            torch.ones(64, device="cuda")

    yield step


@cuda_case(
    "https://github.com/triton-lang/triton/issues/9244",
    "keyed growth",
    counter="host_in_use",
    requests_per_round=1,
    rounds=6,
    warm_up=3,
    slow=True,
    note="compiles some twenty kernels, which stay in Triton's cache on disk as well",
)
def constexpr_per_value(leak: bool) -> Iterator[Step]:
    """A ``tl.constexpr`` that varies with the request compiles and keeps a kernel per value. Cure: a plain argument."""
    import torch

    from o1lab.memory.catalogue.triton_kernel import scale

    x = torch.ones(64, device="cuda")
    yield lambda number: scale[(1,)](x, SIZE=64, TIMES=number if leak else 3)
    scale.device_caches.clear()


@cuda_case(
    "https://docs.pytorch.org/docs/stable/torch_cuda_memory.html",
    "driver",
    bytes_per_request=2 * MIB,
    counter="device_used",
    requests_per_round=4,
    note="NCCL, CUDA modules and other libraries take memory the same way",
)
def outside_the_allocator(leak: bool) -> Iterator[Step]:
    """A library calls ``cudaMalloc`` itself and forgets ``cudaFree``: torch's counters see nothing. Cure: free it."""
    import torch
    from cuda.bindings import runtime

    torch.ones(1, device="cuda")
    taken, place = array("Q", bytes(8 * 4096)), itertools.count()  # made once: noting an address costs nothing more

    def step(number: int) -> None:
        error, address = runtime.cudaMalloc(2 * MIB)
        if int(error):
            raise MemoryError(f"cudaMalloc of 2 MiB failed: {error}")
        taken[next(place)] = address
        if not leak:
            runtime.cudaFree(address)

    yield step
    for address in filter(None, taken if leak else ()):
        runtime.cudaFree(address)


@cuda_case(
    "https://docs.pytorch.org/docs/stable/torch_cuda_memory.html#torch.cuda.memory._record_memory_history",
    "per-call leak",
    counter="host_in_use",
    requests_per_round=16,
    note="two events per tensor, with their stacks; `max_entries` is unbounded by default",
)
def history_without_end(leak: bool) -> Iterator[Step]:
    """torch's memory history is left on and keeps every event with its stack. Cure: ``max_entries``."""
    import torch

    torch.cuda.memory._record_memory_history(stacks="python", **({} if leak else {"max_entries": 50}))

    def step(number: int) -> None:
        for _ in range(4):
            activation(1)

    yield step
    torch.cuda.memory._record_memory_history(enabled=None)


@cuda_case(
    "https://github.com/pytorch/pytorch/pull/190348",
    "per-call leak",
    bytes_per_request=2 * MIB,
    counter="device_reserved",
    requests_per_round=2,
    note="reserved grows, allocated does not, empty_cache() gets nothing back. The last case: the allocator goes on "
    "believing that captures are under way",
)
def failed_capture(leak: bool) -> Iterator[Step]:
    """A capture that fails leaves its private pool behind for good. Cure: capture what does not synchronise, once."""
    import torch

    side, captured = torch.cuda.Stream(), []

    def step(number: int) -> None:
        if captured:
            captured[0].replay()
            return
        graph, x = torch.cuda.CUDAGraph(), torch.ones(64, device="cuda")
        torch.cuda.synchronize()
        with contextlib.suppress(RuntimeError), torch.cuda.stream(side):
            graph.capture_begin()
            try:
                y = x * 2
                if leak:
                    y.item()  # synchronises, which a capture forbids
            finally:
                graph.capture_end()
            captured.append(graph)

    yield step
