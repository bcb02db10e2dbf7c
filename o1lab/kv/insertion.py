"""Ten thousand concurrent inserts into a KV cache: each from a native allocator, or each from the pool.

The same threads insert the same blocks and drop the oldest ones; only where a block comes from differs. Runs are paired
and in random order, so that a slow moment of the machine meets both alike.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from o1lab import stats
from o1lab.kv.pool import PAGE_BYTES, PagePool, PoolError
from o1lab.stats import Estimate

if TYPE_CHECKING:
    import torch

NATIVE = ("torch", "cudaMalloc")


@dataclass(frozen=True)
class Inserts:
    """Times of one arm each, in ms for all inserts, and of their ratio; medians over paired runs."""

    native: Estimate
    pool: Estimate
    speedup: Estimate
    count: int
    threads: int
    blocks: int
    block_bytes: int
    device: str
    what: str

    def __str__(self) -> str:
        size = f"{self.blocks} × {self.block_bytes / 1024:.0f} KiB"
        return (
            f"{self.count:,} inserts of {size} by {self.threads} threads on {self.device}, {self.what}: "
            f"native {self.native}, pool {self.pool}, speedup {self.speedup}"
        )


def inserts(
    count: int = 10_000, *, device: str | torch.device = "cpu", threads: int = 8, blocks: int = 1,
    block_bytes: int = PAGE_BYTES, keep: int = 32, write: bool = True, native: str = "torch", repeats: int = 7,
    seed: int = 0,
) -> Inserts:  # fmt: skip
    """Time ``count`` inserts from a native allocator and from a :class:`~o1lab.kv.pool.PagePool`.

    Parameters
    ----------
    count, threads : int
        Inserts in all, spread over the threads.
    blocks, block_bytes : int
        Blocks of one insert (one per layer) and their size; the pool hands them out in one call.
    keep : int
        Inserts that each thread keeps; the oldest is dropped for the next.
    write : bool
        Also write every block, which on a CPU is when native memory really comes into being.
    native : {"torch", "cudaMalloc"}
        ``torch.empty`` (on a CPU ``malloc``, on CUDA the caching allocator), or the driver's own allocation for each
        block, without any cache; the latter on CUDA and without writing.
    repeats : int
        Paired runs, at least 6, after one of each that does not count.

    Raises
    ------
    PoolError
        Numbers out of range, or a native allocator that is not there.

    Examples
    --------
    >>> found = inserts(200, threads=2, block_bytes=4096, repeats=6)
    >>> found.speedup.unit, found.speedup.n
    ('×', 6)
    """
    import torch

    for name, value, least in (("count", count, 1), ("threads", threads, 1), ("blocks", blocks, 1), ("keep", keep, 1),
                               ("repeats", repeats, 6)):  # fmt: skip
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise PoolError(f"{name}={value!r}: a whole number, at least {least}")
    where = torch.device(device)
    if native not in NATIVE or (native == "cudaMalloc" and (where.type != "cuda" or write)):
        raise PoolError(
            f"native={native!r}, write={write} on {where}: 'torch', or on CUDA 'cudaMalloc' without writing"
        )
    source = torch.ones(block_bytes, dtype=torch.uint8, device=where) if write else None
    chunk = block_bytes * max(256, blocks)
    pool = PagePool(
        threads * (keep + 1) * blocks * block_bytes, device=where, page_bytes=block_bytes, chunk_bytes=chunk
    )
    pool.arena.zero_()  # on a CPU memory is only there once it is touched
    make = _torch if native == "torch" else _driver
    arms = {
        "native": make(blocks, block_bytes, where),
        "pool": _Arm(lambda: pool.allocate(blocks), lambda pages: [pool.page(page) for page in pages], pool.free),
    }
    times: dict[str, list[float]] = {"native": [], "pool": []}
    chance = random.Random(f"inserts {seed}")
    for repeat in range(repeats + 1):
        for name in chance.sample(sorted(arms), 2):
            taken = _run(arms[name], count, threads, keep, source, where)
            if repeat:
                times[name].append(taken)
    pool.check()
    ratios = [slow / fast for slow, fast in zip(times["native"], times["pool"], strict=True)]
    return Inserts(
        stats.median(times["native"], "ms"), stats.median(times["pool"], "ms"), stats.median(ratios, "×"), count,
        threads, blocks, block_bytes, str(where),
        f"{'written' if write else 'not written'}, native is {'torch.empty' if native == 'torch' else native}",
    )  # fmt: skip


class _Arm(NamedTuple):
    """Take the blocks of one insert, get them as tensors, give them back."""

    take: Callable[[], Any]
    tensors: Callable[[Any], list[torch.Tensor]]
    drop: Callable[[Any], Any]


def _torch(blocks: int, block_bytes: int, device: torch.device) -> _Arm:
    import torch

    def take() -> list[torch.Tensor]:
        return [torch.empty(block_bytes, dtype=torch.uint8, device=device) for _ in range(blocks)]

    return _Arm(take, lambda tensors: tensors, lambda tensors: None)


def _driver(blocks: int, block_bytes: int, device: torch.device) -> _Arm:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise PoolError("native='cudaMalloc' needs cuda-bindings: pip install cuda-bindings") from error

    def block() -> int:
        error, address = runtime.cudaMalloc(block_bytes)
        if int(error):
            raise PoolError(f"cudaMalloc of {block_bytes} bytes failed: {error}")
        return address

    return _Arm(
        lambda: [block() for _ in range(blocks)], lambda addresses: [],
        lambda addresses: [runtime.cudaFree(address) for address in addresses],
    )  # fmt: skip


def _run(arm: _Arm, count: int, threads: int, keep: int, source: torch.Tensor | None, device: torch.device) -> float:
    """Milliseconds from the moment all threads start until the last insert is there."""
    import torch

    failed: list[str] = []
    begin, end = threading.Barrier(threads + 1), threading.Barrier(threads + 1)

    def work(share: int) -> None:
        kept: deque[Any] = deque()
        left = share
        begin.wait()
        try:
            for _ in range(share):
                if len(kept) == keep:
                    arm.drop(kept.popleft())
                taken = arm.take()
                if source is not None:
                    for tensor in arm.tensors(taken):
                        tensor.copy_(source)
                kept.append(taken)
                left -= 1
        finally:
            if left:
                failed.append(f"{left} of {share}")
            end.wait()
            for taken in kept:
                arm.drop(taken)

    shares = [count // threads + (number < count % threads) for number in range(threads)]
    workers = [threading.Thread(target=work, args=(share,)) for share in shares]
    for worker in workers:
        worker.start()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin.wait()
    begun = time.perf_counter()
    end.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    taken = time.perf_counter() - begun
    for worker in workers:
        worker.join()
    if failed:
        raise PoolError(f"a thread ended with {failed[0]} inserts undone; its traceback is above")
    return 1000 * taken
