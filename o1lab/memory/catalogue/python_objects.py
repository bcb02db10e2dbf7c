"""Growth that plain Python objects hold: lists, dictionaries, caches, frames, generators, cycles."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

from o1lab.memory.catalogue import Step, case

KIB = 1024
KV_BYTES = 32 * KIB
"""What a request leaves: a float32 tensor of shape (8, 1024). Its headers of about 0.5 KiB are within the 5 %."""


def activation(rows: int = 8) -> Any:
    """A float32 tensor of shape (rows, 1024) on the CPU: what a request computes in these cases."""
    import torch

    return torch.ones(rows, 1024)


@case("https://github.com/vllm-project/vllm/pull/44490", "per-call leak", bytes_per_request=KV_BYTES, owner="finished")
def finished_list(leak: bool) -> Iterator[Step]:
    """An engine notes each finished request in a list that nobody drains. Cure: take it out once it is answered."""
    finished: list[Any] = []

    def step(number: int) -> None:
        finished.append({"id": number, "hidden": activation()})
        if not leak:
            finished.pop()

    yield step


@case("https://github.com/vllm-project/vllm/issues/15597", "keyed growth", bytes_per_request=KV_BYTES, owner="sessions")
def session_dict(leak: bool) -> Iterator[Step]:
    """KV kept per session id and never evicted. Cure: a bound with eviction of the least recently used."""
    sessions: OrderedDict[int, Any] = OrderedDict()

    def step(number: int) -> None:
        sessions[number] = activation()
        while not leak and len(sessions) > 4:
            sessions.popitem(last=False)

    yield step


@case("https://github.com/sgl-project/sglang/issues/6888", "per-call leak", bytes_per_request=KV_BYTES, owner="pool")
def kv_slots(leak: bool) -> Iterator[Step]:
    """A paged pool grows by a page when none is free; aborted requests never return theirs. Cure: return on abort."""
    pool: dict[str, list[Any]] = {"pages": [], "free": []}

    def step(number: int) -> None:
        if not pool["free"]:
            pool["pages"].append(activation())
            pool["free"].append(len(pool["pages"]) - 1)
        page = pool["free"].pop()  # … and the client goes away here
        if not leak:
            pool["free"].append(page)

    yield step


@case("https://github.com/pytorch/pytorch/issues/27600", "per-call leak", bytes_per_request=KV_BYTES, owner="errors")
def kept_exception(leak: bool) -> Iterator[Step]:
    """A log keeps exceptions, each its traceback, each of its frames' locals. Cure: keep the text."""
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


@case("https://github.com/vllm-project/vllm/pull/35676", "per-call leak", bytes_per_request=KV_BYTES, owner="lru_cache")
def lru_cache_method(leak: bool) -> Iterator[Step]:
    """``lru_cache`` on a method has ``self`` as a key and pins it. Cure: cache on the object (``cached_property``)."""

    class Adapter:
        def __init__(self) -> None:
            self.weight = activation()

        @functools.cache  # noqa: B019 - the cause under study
        def pinning(self) -> int:
            return int(self.weight.numel())

        @functools.cached_property
        def size(self) -> int:
            return int(self.weight.numel())

    yield lambda number: Adapter().pinning() if leak else Adapter().size
    Adapter.pinning.cache_clear()


@case(
    "https://github.com/huggingface/transformers/issues/45412",
    "per-call leak",
    bytes_per_request=KV_BYTES,
    owner="lru_cache|rotary",
    note="transformers' own helper; its cache holds 128 models by default, here it has no limit",
)
def transformers_lru_cache(leak: bool) -> Iterator[Step]:
    """Transformers' ``lru_cache`` for methods pins the model that it decorates. Cure: clear it with the model."""
    from transformers.pytorch_utils import compile_compatible_method_lru_cache

    class Rotary:
        def __init__(self) -> None:
            self.inverse_frequencies = activation()

        @compile_compatible_method_lru_cache(maxsize=None)
        def rotary(self) -> int:
            return 8

    cache = next(cell.cell_contents for cell in Rotary.rotary.__closure__ if hasattr(cell.cell_contents, "cache_clear"))

    def step(number: int) -> None:
        Rotary().rotary()
        if not leak:
            cache.cache_clear()

    yield step
    cache.cache_clear()


@case("https://github.com/vllm-project/vllm/issues/15597", "per-call leak", bytes_per_request=KV_BYTES, owner="streams")
def open_streams(leak: bool) -> Iterator[Step]:
    """A cancelled stream is a generator paused in the middle; kept, it holds its locals. Cure: close it."""
    streams: list[Any] = []

    def stream() -> Iterator[int]:
        hidden = activation()
        yield from range(len(hidden))

    def step(number: int) -> None:
        tokens = stream()
        next(tokens)
        streams.append(tokens)
        if not leak:
            streams.pop().close()

    yield step


@case("https://github.com/pytorch/pytorch/issues/128211", "lazy gc", owner=None)
def reference_cycle(leak: bool) -> Iterator[Step]:
    """``self.act = self.relu`` makes a cycle: a dead module waits for the collector. Cure: no bound method on self."""
    import torch

    class Block:
        def __init__(self) -> None:
            self.weight = torch.ones(64, 1024)
            self.act = self.relu if leak else type(self).relu

        def relu(self) -> Any:
            return self.weight.relu()

    yield lambda number: None if Block().act is None else None


@case(
    "https://github.com/EleutherAI/gpt-neox/pull/383",
    "keyed growth",
    bytes_per_request=4144 + 64,
    owner="cache",
    requests_per_round=64,
    note="malloc's chunk of the ids, the prompt; the dictionary grows in rare leaps",
)
def tokenizer_cache(leak: bool) -> Iterator[Step]:
    """A tokenizer remembers every prompt that it has cut into tokens. Cure: ``lru_cache`` with a size."""
    cache: dict[str, bytes] = {}

    def step(number: int) -> None:
        prompt = f"prompt {number}"
        if prompt not in cache:
            cache[prompt] = bytes(4096)
        if not leak and len(cache) > 8:
            del cache[next(iter(cache))]

    yield step


@case(
    "https://github.com/flashinfer-ai/flashinfer/pull/3709",
    "per-call leak",
    bytes_per_request=KV_BYTES,
    owner="repacked",
)
def weights_by_id(leak: bool) -> Iterator[Step]:
    """Views of weights, cached under their address, outlive the adapter they came from. Cure: evict when it goes."""
    repacked: dict[int, Any] = {}

    def step(number: int) -> None:
        weight = activation()
        repacked[weight.data_ptr()] = weight.view(-1)
        if not leak:
            repacked.pop(weight.data_ptr())

    yield step


@case(
    "https://docs.python.org/3/library/collections.html#collections.deque",
    "per-call leak",
    bytes_per_request=KV_BYTES,
    owner="recent",
)
def unbounded_deque(leak: bool) -> Iterator[Step]:
    """A window of recent requests for monitoring, without a length. Cure: ``deque(maxlen=…)``."""
    recent: deque[Any] = deque(maxlen=None if leak else 8)
    yield lambda number: recent.append(activation())
