"""What write-back costs on this machine: ``python -m o1lab.kv.writeback_bench [--device cuda] [--json FILE]``.

``rate`` compares verified write-back with a plain copy of the same pages over the same bus, ``slowdown`` times a
decode-like loop without and with write-back beside it, ``evict`` times the failed request that evicts clean pages,
``restore`` brings 8k tokens back and computes them anew, ``policies`` serves the same traffic as the article has it and
as we do. ``--sweep`` tries ``rate`` and ``slowdown`` with some numbers of workers, sizes of a copy and ways to verify,
and names the best. Without a GPU all of it runs small, to show that it runs: its ratios say nothing about a bus.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from o1lab.kv.backing import OnDevice
from o1lab.kv.designs import KVShape
from o1lab.kv.eviction import EvictingPool
from o1lab.kv.lane import Lane, host_pool
from o1lab.kv.latency import quantile
from o1lab.kv.offload import HEAD, compare_policies
from o1lab.kv.pool import PagePool, PoolError
from o1lab.kv.ranking import Policy
from o1lab.kv.traffic import long_cot
from o1lab.options import device, ended, new_file, whole
from o1lab.stats import Estimate, mebibytes, median

ROUNDS = 8
WAYS: dict[str, bool | str] = {"device": True, "direct": "direct", "host": False}
"""Where host copies are summed, as :class:`~o1lab.kv.lane.Lane` takes it."""
SWEEP = (*product((1, 2), (64, 128, 256), ("device", "direct")), (1, 128, "host"))
"""Workers, pages of one copy, way to verify."""
MOST_SLOWER = 3.0
"""Slowdown in % that decoding may suffer."""


@dataclass(frozen=True)
class Setting:
    """Sizes of one run: the cache's shape, pages of one pass, bytes that the decode-like loop moves a step."""

    device: str
    shape: KVShape
    tokens: int
    page_bytes: int
    loop_bytes: int
    readback: bool | str | None = None
    workers: int = 1
    batch_pages: int = 128

    @property
    def pages(self) -> int:
        """Pages of ``tokens`` tokens."""
        return self.shape.pages(self.tokens, self.page_bytes)

    def tiers(self, **policy: Any) -> EvictingPool:
        """A pool just large enough, with twice as much behind it."""
        pool = PagePool(self.pages * self.page_bytes, device=self.device, page_bytes=self.page_bytes)
        pool.arena.random_()
        host = host_pool(pool, 2 * pool.bytes)
        lane = Lane(pool, host, workers=self.workers, readback=self.readback)
        chosen = Policy(copy_at=float("inf"), batch_pages=self.batch_pages, **policy)
        return EvictingPool(pool, host, chosen, lane=lane)

    def settle(self) -> None:
        """Wait until the device is done."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()


def setting(device: str, quick: bool, **options: Any) -> Setting:
    """An 8k-token cache of a 1B Llama on a GPU; on a CPU, or quick, a small one."""
    if device.startswith("cuda") and not quick:
        return Setting(device, KVShape(16, 8, 64), 8192, 256 << 10, 1 << 30, **options)
    return Setting(device, KVShape(4, 4, 64), 2048, 64 << 10, 8 << 20, **options)


def _timed(work: Callable[[], Any], settle: Callable[[], None]) -> float:
    settle()
    begin = time.perf_counter()
    work()
    settle()
    return time.perf_counter() - begin


def _fill(tiers: EvictingPool, owner: Any, pages: int, group: int, rest: bool = True) -> None:
    last = None
    for _ in range(pages // group):
        new = tiers.allocate(group, owner, after=last)
        tiers.seal(new, owner)
        last = new[-1]
    if rest:
        tiers.rest(owner)


def rate(at: Setting, rounds: int = ROUNDS) -> dict[str, Estimate]:
    """Bytes per second of verified write-back and of a plain asynchronous copy of the same pages, and their ratio."""
    tiers, found = at.tiers(), {"copy": [], "write-back": [], "ratio": []}
    host = tiers.host.arena[: tiers.pool.bytes]
    for _ in range(rounds + 1):
        _fill(tiers, "one", at.pages, at.shape.layers)
        plain = _timed(lambda: host.copy_(tiers.pool.arena, non_blocking=True), at.settle)
        checked = _timed(lambda: tiers.write_back(wait=True), at.settle)
        tiers.release("one")
        moved = at.pages * at.page_bytes / 1e9
        for name, value in (("copy", moved / plain), ("write-back", moved / checked), ("ratio", plain / checked)):
            found[name].append(value)
    return {name: median(values[1:], "1" if name == "ratio" else "GB/s") for name, values in found.items()}


def slowdown(at: Setting, steps: int = 100, rounds: int = ROUNDS) -> dict[str, Estimate]:
    """How much longer a bandwidth-bound step on the main stream takes while pages are written back, in %.

    A step copies ``loop_bytes / 2`` on the device and is waited for, as a decode step is. Rounds alternate: ``steps``
    alone, then as many as fit while all pages of the pool are on their way.
    """
    tiers, found = at.tiers(), {"slowdown": [], "write-back": []}
    source = torch.ones(at.loop_bytes // 2, dtype=torch.uint8, device=at.device)
    target = torch.empty_like(source)

    def step() -> float:
        begin = time.perf_counter()
        target.copy_(source)
        if at.device.startswith("cuda"):
            torch.cuda.current_stream().synchronize()
        return time.perf_counter() - begin

    for _ in range(rounds + 1):
        _fill(tiers, "one", at.pages, at.shape.layers)
        at.settle()
        alone, begin = [step() for _ in range(steps)], time.perf_counter()
        tiers.write_back()
        beside = [step()]
        while tiers.copying_pages:
            beside.append(step())
            tiers.settle()
        seconds = time.perf_counter() - begin
        tiers.release("one")
        found["slowdown"].append(100 * (np.median(beside) / np.median(alone) - 1))
        found["write-back"].append(at.pages * at.page_bytes / seconds / 1e9)
    units = {"slowdown": "%", "write-back": "GB/s"}
    return {name: median(values[1:], units[name]) for name, values in found.items()}


def pauses(at: Setting, least: int = 400) -> dict[str, list[float]]:
    """Times of failed requests for one group of pages, in µs: with clean pages to evict, and with none copied yet."""
    found = {}
    for name, early in (("clean", True), ("as written", False)):
        tiers, times = at.tiers(shield=None, verify="full" if early else "copy"), []
        while len(times) < least:
            _fill(tiers, "old", at.pages, at.shape.layers)
            if early:
                tiers.write_back(wait=True)
            while tiers.pool.pages - tiers.states()["OPEN"] >= at.shape.layers:
                begin = time.perf_counter_ns()
                tiers.allocate(at.shape.layers, "new")
                times.append((time.perf_counter_ns() - begin) / 1000)
            tiers.release("old"), tiers.release("new")
        found[name] = times
    return found


def evict(at: Setting, least: int = 400) -> dict[str, Estimate]:
    """Quantiles of :func:`pauses`."""
    quantiles = (("p50", 0.5), ("p99", 0.99))
    return {
        f"{name}, {label}": quantile(times, q, "µs")
        for name, times in pauses(at, least).items()
        for label, q in quantiles
    }


def restore(at: Setting, recompute: Callable[[int], Any] | None = None) -> dict[str, Estimate]:
    """Time to bring ``tokens`` tokens back, to compute them, and how many times longer the latter takes.

    Parameters
    ----------
    recompute : callable(tokens), optional
        Computes the cache of so many tokens; default: one prefill of a random Llama of the same cache shape.
    """
    tiers, recompute = at.tiers(shield=None), recompute or prefill(at)
    found: dict[str, list[float]] = {"restore": [], "recompute": [], "ratio": []}
    for _ in range(ROUNDS + 1):
        _fill(tiers, "one", at.pages, at.shape.layers)
        tiers.write_back(wait=True)
        tiers.allocate(at.pages, "other")
        tiers.release("other")
        back = _timed(lambda: tiers.restore("one"), at.settle)
        again = _timed(lambda: recompute(at.tokens), at.settle)
        tiers.release("one")
        for name, value in (("restore", 1e3 * back), ("recompute", 1e3 * again), ("ratio", again / back)):
            found[name].append(value)
    return {name: median(values[1:], "×" if name == "ratio" else "ms") for name, values in found.items()}


def prefill(at: Setting) -> Callable[[int], Any]:
    """A random Llama with the cache shape of ``at``, of 1B parameters for the full one; computes a prompt's cache."""
    from transformers import LlamaConfig, LlamaModel

    shape, wide = at.shape, at.shape.layers > 4
    config = LlamaConfig(
        vocab_size=128_256 if wide else 256, hidden_size=2048 if wide else 256, head_dim=shape.head_dim,
        intermediate_size=8192 if wide else 512, num_hidden_layers=shape.layers, num_key_value_heads=shape.kv_heads,
        num_attention_heads=32 if wide else shape.kv_heads, max_position_embeddings=at.tokens,
    )  # fmt: skip
    with torch.device(at.device):
        model = LlamaModel(config).to(torch.bfloat16 if at.device.startswith("cuda") else torch.float32).eval()
    ids = torch.zeros((1, at.tokens), dtype=torch.int64, device=at.device)
    return torch.inference_mode()(lambda tokens: model(ids[:, :tokens], use_cache=True))


def policies(at: Setting) -> dict[str, Any]:
    """The same traffic under the policy as written and under ours, with real memory."""
    shape, page = at.shape, at.page_bytes
    traffic = long_cot(24, concurrent=8, median_tokens=600, most_tokens=1500, prefixes=3)
    chosen = {"as written": Policy.as_written(), "ours": Policy(), "ours, idle only": Policy(copy_active=False)}
    found = compare_policies(
        traffic, shape, capacity_bytes=shape.pages(3500, page) * page, host_bytes=shape.pages(40_000, page) * page,
        policies=chosen, memory=lambda: OnDevice(at.device, 8 << 20), sizes={"page_bytes": page}, stride=4,
    )  # fmt: skip
    print(HEAD, *found, sep="\n")
    return {
        one.policy: {"out_bytes": one.out_bytes, "late_bytes": one.late_bytes, "back_bytes": one.back_bytes,
                     "restored_pages": one.restored_pages, "refusals": one.refusals, "hit_rate": one.hit_rate,
                     "device_hit_rate": one.device_hit_rate,
                     "stalls_us": one.stalls_us.tolist()}
        for one in found
    }  # fmt: skip


TABLES: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "rate": rate, "slowdown": slowdown, "evict": evict, "restore": restore, "policies": policies,
}  # fmt: skip


def sweep(at: Setting, rounds: int = 6) -> dict[str, Any]:
    """:func:`rate`'s ratio and :func:`slowdown` for each of :data:`SWEEP`, printed, and the best of them.

    The best has the highest ratio of those that slow decoding by at most :data:`MOST_SLOWER` %; if none does, it is the
    one that slows it least.
    """
    found: dict[str, Any] = {}
    for workers, batch, way in SWEEP:
        name = f"--workers {workers} --batch {batch} --verify-on {way}"
        one = replace(at, workers=workers, batch_pages=batch, readback=WAYS[way])
        try:
            ratio, slower = rate(one, rounds)["ratio"], slowdown(one, rounds=rounds)["slowdown"]
        except PoolError as error:
            print(f"{name:<46}{error}", flush=True)
            continue
        print(f"{name:<46}ratio {ratio}, slowdown {slower}", flush=True)
        found[name] = {"ratio": ratio.to_dict(), "slowdown": slower.to_dict()}

    def merit(name: str) -> tuple[bool, float]:
        slower = found[name]["slowdown"]["value"]
        return slower <= MOST_SLOWER, found[name]["ratio"]["value"] if slower <= MOST_SLOWER else -slower

    if found:
        found["best"] = max(found, key=merit)
        print(f"best: {found['best']}")
    return found


@ended
def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables that are asked for; by default all, with ``--sweep`` none."""
    parser = argparse.ArgumentParser(prog="python -m o1lab.kv.writeback_bench", description=__doc__)
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)}; default: all")
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="small sizes, as without a GPU")
    parser.add_argument(
        "--verify-on",
        choices=WAYS,
        help="where host copies are summed: read back to the device "
        "(default there), read by it where they lie, or on the host",
    )
    parser.add_argument("--workers", type=whole(0, 64), default=1, help="threads that copy to the host (%(default)s)")
    parser.add_argument("--batch", type=whole(1), default=128, help="pages of one copy (%(default)s)")
    parser.add_argument("--sweep", action="store_true", help="try several of these three settings, and name the best")
    parser.add_argument("--json", type=new_file, help="write the figures there")
    options = parser.parse_args(argv)
    if unknown := set(options.tables) - set(TABLES):
        parser.error(f"no table {unknown.pop()!r}; there are {', '.join(TABLES)}")
    torch.set_num_threads(1)
    readback = WAYS.get(options.verify_on)
    chosen = {"readback": readback, "workers": options.workers, "batch_pages": options.batch}
    at, found = setting(options.device, options.quick, **chosen), {}
    for name in options.tables or (() if options.sweep else TABLES):
        print(f"-- {name}: {mebibytes(at.pages * at.page_bytes)} MiB on {at.device}", flush=True)
        found[name] = TABLES[name](at)
        for label, value in found[name].items():
            if isinstance(value, Estimate):
                print(f"{label:<16}{value}")
                found[name][label] = value.to_dict()
    if options.sweep:
        print(f"-- sweep: {mebibytes(at.pages * at.page_bytes)} MiB on {at.device}", flush=True)
        found["sweep"] = sweep(at)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
