"""Growth in native code and in the allocator below it: no Python object owns these bytes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from o1lab.memory.catalogue import Step, case
from o1lab.memory.plants import HostPlant


@case(
    "https://github.com/pytorch/pytorch/issues/191340",
    "per-call leak",
    bytes_per_request=64,
    requests_per_round=64,
    note="48 bytes and malloc's 8-byte header, rounded up to 16",
)
def native_string(leak: bool) -> Iterator[Step]:
    """An operator in C++ makes a 48-byte string per call and never deletes it. Cure: delete it."""
    with HostPlant(48, on=leak) as plant:
        yield lambda number: plant()


@case(
    "https://github.com/pytorch/pytorch/issues/32596",
    "keyed growth",
    note="oneDNN keeps 1024 primitives (ONEDNN_PRIMITIVE_CACHE_CAPACITY): growth ends there. They stay after the case",
    requests_per_round=8,
    rounds=8,
    warm_up=3,
)
def primitive_per_shape(leak: bool) -> Iterator[Step]:
    """oneDNN compiles and caches a kernel per shape, up to a cap that takes hours to reach. Cure: pad the shapes."""
    import torch

    layer = torch.nn.Conv2d(16, 16, 3)

    def step(number: int) -> None:
        with torch.inference_mode():
            layer(torch.ones(1, 16, 64 + (number % 64 if leak else 0), 64 + (number // 64 if leak else 0)))

    yield step


@case(
    "https://sourceware.org/glibc/wiki/MallocInternals",
    "fragmentation",
    requests_per_round=64,
    counter="rss",
    bytes_per_request=4096,
    note="one result of 4 bytes in 64 requests is kept: 7 B/request in use, below the floor; its hole has 256 KiB",
    fresh=True,  # free blocks of the past would fill the holes' place for a while
)
def holes_in_the_heap(leak: bool) -> Iterator[Step]:
    """A survivor is placed behind a big block; the block's hole is too small for the next. Cure: reuse one buffer."""
    import torch

    kept: list[Any] = []
    buffer = torch.empty(64, 1024)

    def serve(number: int) -> None:
        mean = (torch.ones(64, 1024) if leak else buffer.fill_(1)).mean()
        if number % 64 == 0:
            kept.append(mean)

    with ThreadPoolExecutor(1) as worker:  # a thread has a heap of its own
        worker.submit(serve, 0).result()
        yield lambda number: worker.submit(serve, number).result()
