"""Growth that needs a CUDA device: kept tensors, graph pools, pinned buffers, kernels, memory outside the allocator."""

from __future__ import annotations

import contextlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any

from o1lab.memory.catalogue import QUIET, Step, case
from o1lab.memory.catalogue.python_objects import KIB

MIB = 1024 * KIB
KV_BYTES = 32 * KIB
cuda_case = partial(case, where="cuda", counter="device_allocated", requests_per_round=8)


def activation(rows: int = 8) -> Any:
    """A float32 tensor of shape (rows, 1024) on the device: 4 KiB a row, whole blocks of the caching allocator."""
    import torch

    return torch.ones(rows, 1024, device="cuda")


@cuda_case(
    "https://docs.pytorch.org/docs/stable/tensor_view.html", "per-call leak", bytes_per_request=KV_BYTES, owner="kept"
)
def view_of_device_logits(leak: bool) -> Iterator[Step]:
    """``logits[-1, :1]`` of the device keeps the whole storage there. Cure: ``.clone()``, or a Python number."""
    kept: list[Any] = []

    def step(number: int) -> None:
        logits = activation()
        kept.append(logits[-1, :1] if leak else logits[-1, :1].item())
        if not leak:
            kept.clear()

    yield step


@cuda_case(
    "https://github.com/vllm-project/vllm/issues/15597", "keyed growth", bytes_per_request=KV_BYTES, owner="sessions"
)
def device_sessions(leak: bool) -> Iterator[Step]:
    """KV on the device per session id, never evicted. Cure: a bound with eviction of the least recently used."""
    sessions: OrderedDict[int, Any] = OrderedDict()

    def step(number: int) -> None:
        sessions[number] = activation()
        while not leak and len(sessions) > 4:
            sessions.popitem(last=False)

    yield step


@cuda_case(
    "https://github.com/pytorch/pytorch/issues/10348", "per-call leak", bytes_per_request=KV_BYTES, owner="errors"
)
def device_exception(leak: bool) -> Iterator[Step]:
    """A kept exception holds the device tensors of its frames; ``empty_cache()`` cannot help. Cure: keep the text."""
    errors: list[Any] = []

    def handle(number: int) -> None:
        hidden = activation()
        raise ValueError(f"request {number} of shape {tuple(hidden.shape)} is too long")

    def step(number: int) -> None:
        try:
            handle(number)
        except ValueError as error:
            errors.append(error if leak else str(error)[:8])
        if not leak:
            errors.clear()

    yield step


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
    "https://github.com/sgl-project/sglang/pull/36562",
    "per-call leak",
    bytes_per_request=64 * KIB,
    counter="pinned",
    owner="staging",
    note="40 KiB asked for; the pinned allocator rounds up to a power of two (pytorch#95823)",
)
def pinned_buffers(leak: bool) -> Iterator[Step]:
    """A pinned staging buffer is made per request and kept, 60 % larger than asked. Cure: one buffer, reused."""
    import torch

    staging: list[Any] = []

    def step(number: int) -> None:
        if leak or not staging:
            staging.append(torch.empty(40 * KIB, dtype=torch.uint8, pin_memory=True))
        staging[-1].fill_(number % 256)

    yield step
    staging.clear()
    with contextlib.suppress(AttributeError):  # 2.11 has it, under a private name
        torch._C._host_emptyCache()


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
    "https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management",
    "fragmentation",
    counter="device_reserved",
    requests_per_round=1,
    rounds=8,
    warm_up=2,
    note="each segment stays cached; empty_cache() gets them all back",
)
def ever_longer(leak: bool) -> Iterator[Step]:
    """Each request is a little longer than any before: no cached block fits. Cure: pad to the longest."""
    import torch

    torch.cuda.empty_cache()
    yield lambda number: torch.ones((20 + 2 * (number if leak else 60)) * MIB, dtype=torch.uint8, device="cuda").sum()
    torch.cuda.empty_cache()


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


device_null = partial(case, kind=QUIET, where="cuda", group="null", requests_per_round=8)


@device_null("https://github.com/pytorch/pytorch/issues/95668")
def blas_workspace(leak: bool) -> Iterator[Step]:
    """cuBLAS takes a workspace with the first product on each stream; ``memory_allocated`` counts it, once."""
    import torch

    weight, streams = torch.ones(64, 64, device="cuda"), [torch.cuda.Stream() for _ in range(2)]

    def step(number: int) -> None:
        with torch.cuda.stream(streams[number % 2]):
            weight @ weight

    yield step
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()


@device_null("https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html")
def parked_by_record_stream(leak: bool) -> Iterator[Step]:
    """``record_stream`` parks a freed block until the other stream is done: active above allocated, until a sync."""
    import torch

    side = torch.cuda.Stream()

    def step(number: int) -> None:
        hidden = activation()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            hidden.sum()
        hidden.record_stream(side)

    yield step
    torch.cuda.synchronize()


@device_null("https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management")
def cached_blocks(leak: bool) -> Iterator[Step]:
    """Requests of a few lengths: reserved rises until the cache has a block for each, allocated never."""
    yield lambda number: activation(1 << (number % 8)).sum()


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
    """A capture that fails leaves its private pool behind for good. Cure: no synchronisation in what is captured."""
    import torch

    side = torch.cuda.Stream()

    def step(number: int) -> None:
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

    yield step
