"""Growth of tensors and buffers on a CUDA device, and what only looks like it."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any

from o1lab.memory.catalogue import QUIET, Step, case
from o1lab.memory.catalogue.python_objects import KIB, KV_BYTES

MIB = 1024 * KIB
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

    torch.cuda.init()
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
