"""Workloads that look like leaks and are none: the right answer about each is "none" (or "warm-up")."""

from __future__ import annotations

import functools
import re
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from o1lab.memory.catalogue import QUIET, Step, case
from o1lab.memory.catalogue.python_objects import activation


def null(source: str, **fields: Any) -> Any:
    """A case that leaks in neither form."""
    return case(source, QUIET, group="null", **fields)


@null("https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management")
def lazy_buffers(leak: bool) -> Iterator[Step]:
    """Warm-up: each of the first requests makes a buffer that all later ones use."""
    buffers: dict[int, Any] = {}
    yield lambda number: buffers.setdefault(min(number // 16, 4), activation())


@null("https://sourceware.org/glibc/manual/latest/html_node/The-GNU-Allocator.html")
def allocator_steps(leak: bool) -> Iterator[Step]:
    """Requests of very different size: the heap grows in steps, in use at a round's end is nothing."""
    import torch

    yield lambda number: torch.ones(1 << (8 + number * 7 % 11)).sum()


@null("https://docs.python.org/3/library/functools.html#functools.lru_cache", requests_per_round=32)
def bounded_cache(leak: bool) -> Iterator[Step]:
    """An LRU cache that fills up and then stays at its size."""

    @functools.lru_cache(maxsize=48)
    def embed(number: int) -> Any:
        return activation()

    yield embed
    embed.cache_clear()


@null("https://docs.python.org/3/library/gc.html")
def collector_saw_tooth(leak: bool) -> Iterator[Step]:
    """Small cycles: memory rises until the collector runs, and falls."""

    class Node:
        pass

    def step(number: int) -> None:
        for _ in range(20):
            node = Node()
            node.self = node

    yield step


@null("https://github.com/pytorch/pytorch/issues/27971")
def primitive_cache_full(leak: bool) -> Iterator[Step]:
    """oneDNN's cache with as many shapes as the bucket list has: filled in the first round."""
    import torch

    layer = torch.nn.Conv2d(16, 16, 3)

    def step(number: int) -> None:
        with torch.inference_mode():
            layer(torch.ones(1, 16, 64, 64 + 8 * (number % 4)))

    yield step


@null("https://docs.python.org/3/library/concurrent.futures.html#threadpoolexecutor")
def thread_pool(leak: bool) -> Iterator[Step]:
    """A pool with its threads started: each request hops through a worker."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda number: activation().sum(), range(8)))
        yield lambda number: float(pool.submit(lambda: activation().sum()).result())


@null("https://docs.python.org/3/library/sys.html#sys.intern")
def interned_strings(leak: bool) -> Iterator[Step]:
    """Strings interned per request: the table lets go of them with their last use."""
    yield lambda number: sys.intern(f"request-{number}") and None


@null("https://docs.python.org/3/library/collections.html#collections.deque")
def full_window(leak: bool) -> Iterator[Step]:
    """A window of the last requests: it grows until it is full."""
    window: deque[Any] = deque(maxlen=40)
    yield lambda number: window.append(activation())


@null("https://docs.python.org/3/library/re.html#re.compile", inputs=range(64))
def pattern_cache(leak: bool) -> Iterator[Step]:
    """``re`` caches the patterns it has compiled; there are 64 of them."""
    yield lambda number: re.match(f"[a-z]{{{number}}}x", "abc")
    re.purge()


@null("https://docs.python.org/3/faq/design.html#how-are-lists-implemented-in-cpython")
def list_capacity(leak: bool) -> Iterator[Step]:
    """A queue that is filled and drained: lists keep spare room and give it back."""
    queue: list[Any] = []

    def step(number: int) -> None:
        queue.append(number)
        if len(queue) >= 50:
            queue.clear()

    yield step


@null("https://github.com/huggingface/transformers", requests_per_round=8, rounds=12)
def generate(leak: bool) -> Iterator[Step]:
    """``generate()`` of the tiny Llama, prompts of several lengths: what a healthy server does."""
    from o1lab import models
    from o1lab.memory.serving_loop import ServingLoop

    model = models.load("tiny", "cpu")
    loop = ServingLoop(model)
    prompts = [model.encode(prompt) for prompt in model.prompts(8)]
    yield lambda number: loop(prompts[number % len(prompts)])


@null("https://github.com/pytorch/pytorch/issues/112090", requests_per_round=4)
def recompiles_to_the_limit(leak: bool) -> Iterator[Step]:
    """Dynamo compiles eight lengths and then runs eagerly: growth that ends at ``recompile_limit``."""
    import logging

    import torch

    log = logging.getLogger("torch._dynamo")
    level = log.level
    log.setLevel(logging.ERROR)
    compiled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    yield lambda number: compiled(torch.ones(number + 2))
    torch._dynamo.reset()
    log.setLevel(level)
