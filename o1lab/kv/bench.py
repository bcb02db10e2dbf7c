"""The pool's figures on this machine: ``python -m o1lab.kv.bench [latency | inserts | replay] [--device cuda]``.

``latency`` times single allocations and frees in a pool that is 90 % full; ``inserts`` compares with native allocation;
``replay`` serves the same reasoning traffic with each cache design, with real memory, and says what each needs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from o1lab.kv.backing import OnDevice
from o1lab.kv.compare import compare
from o1lab.kv.designs import Design, Growing, KVShape, Paged, Static
from o1lab.kv.insertion import inserts
from o1lab.kv.latency import quantile
from o1lab.kv.pool import PagePool
from o1lab.kv.replay import Outcome, replay
from o1lab.kv.traffic import Traffic, long_cot
from o1lab.options import device, ended, new_file, whole
from o1lab.stats import Estimate

QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
LEAST_TIMES = 4000
"""Below, P99.9 has no interval."""


@dataclass(frozen=True)
class Latency:
    """Latencies of one operation in µs: estimates by quantile (``"p50"``, ``"p99"``, ``"p99.9"``)."""

    operation: str
    pages: int
    threads: int
    quantiles: dict[str, Estimate]

    def __str__(self) -> str:
        found = "  ".join(f"{name} {value}" for name, value in self.quantiles.items())
        return f"{self.operation:<8} {self.pages:>2} page(s), {self.threads} thread(s): {found}"


def latency(
    pages: int = 1, *, device: str = "meta", times: int = 50_000, threads: int = 1, pool_bytes: int = 4 << 30,
    full: float = 0.9, seed: int = 0,
) -> dict[str, Latency]:  # fmt: skip
    """Time ``allocate(pages)`` and ``free`` one by one, lock and clock included, in a pool that stays ``full``.

    Parameters
    ----------
    pages : int
        Of one request.
    times : int
        Requests timed in all, spread over ``threads``; at least 4,000.
    full : float
        Share of the pool in use, in places that chance left free.

    Returns
    -------
    dict
        ``"allocate"``, ``"free"`` and ``"clock"``, which is what timing nothing takes.
    """
    pool = PagePool(pool_bytes, device=device)
    held = [pool.allocate(pages) for _ in range(int(full * pool.pages) // pages)]
    random.Random(seed).shuffle(held)
    found: dict[str, list[int]] = {"allocate": [], "free": [], "clock": []}
    begin = threading.Barrier(threads)

    def work(number: int) -> None:
        mine, chance, now = held[number::threads], random.Random(f"{seed} {number}").randrange, time.perf_counter_ns
        allocated, freed, nothing = [], [], []
        begin.wait()
        for _ in range(-(-max(times, LEAST_TIMES) // threads)):
            place = chance(len(mine))
            old = mine[place]
            start = now()
            pool.free(old)
            middle = now()
            mine[place] = pool.allocate(pages)
            end = now()
            freed.append(middle - start)
            allocated.append(end - middle)
            nothing.append(now() - end)
        for name, values in (("allocate", allocated), ("free", freed), ("clock", nothing)):
            found[name] += values

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    pool.check()
    return {
        name: Latency(
            name,
            pages,
            threads,
            {label: quantile(values, q, "ns").scaled(1e-3, "µs") for label, q in QUANTILES.items()},
        )
        for name, values in found.items()
    }


def designs(traffic: Traffic, device: str, shape: KVShape, *, stride: int = 1, pool_bytes: int) -> list[Outcome]:
    """Serve ``traffic`` with real memory on ``device``, by each design in turn."""
    most = max(request.prompt_tokens + request.output_tokens for request in traffic)
    makers = (
        lambda: Growing(shape, OnDevice(device)), lambda: Static(shape, OnDevice(device), most_tokens=most),
        lambda: Paged(shape, OnDevice(device), capacity_bytes=pool_bytes),
    )  # fmt: skip
    found = []
    for make in makers:
        design: Design = make()
        found.append(replay(traffic, design, stride=stride))
        del design
    return found


def print_latency(device: str, quick: bool) -> dict[str, Any]:
    """The table of latencies."""
    found = {}
    for pages, threads in ((1, 1), (28, 1), (1, 8)):
        for name, one in latency(pages, threads=threads, times=LEAST_TIMES if quick else 100_000).items():
            if name != "clock" or (pages, threads) == (1, 1):
                print(one)
                found[f"{name}, {pages} pages, {threads} threads"] = asdict(one)
    return found


def print_inserts(device: str, quick: bool) -> dict[str, Any]:
    """Inserts against native allocation."""
    found = {}
    for blocks, write in ((1, False), (1, True), (28, False), (28, True)):
        count = (500 if quick else 10_000) // (1 if blocks == 1 else 10)
        one = inserts(count, device=device, blocks=blocks, write=write, keep=32 if blocks == 1 else 4)
        print(one)
        found[f"{blocks} blocks, {one.what}"] = asdict(one)
    if device.startswith("cuda"):
        one = inserts(500 if quick else 10_000, device=device, write=False, native="cudaMalloc")
        print(one)
        found["cudaMalloc"] = asdict(one)
    return found


def print_replay(device: str, quick: bool) -> dict[str, Any]:
    """What each design needs in theory, and its appends with real memory."""
    compared = compare(long_cot(16 if quick else 60))
    print(compared)
    middle, shape = (300, KVShape(1, 2, 64)) if quick else (800, KVShape(4, 4, 64))
    traffic = long_cot(8, concurrent=4, prompt_tokens=50, median_tokens=middle, most_tokens=3 * middle)
    found: dict[str, Any] = {"needed_bytes": dict(compared.needed)}
    for one in designs(traffic, device, shape, pool_bytes=64 << 20):
        times = {name: one.append(q) for name, q in QUANTILES.items() if name != "p99.9"}
        print(one, *(f"append {name} {value}" for name, value in times.items()), sep="\n  ")
        found[one.design] = {name: value.to_dict() for name, value in times.items()}
    return found


TABLES = {"latency": print_latency, "inserts": print_inserts, "replay": print_replay}


@ended
def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables that are asked for, all by default."""
    parser = argparse.ArgumentParser(prog="o1lab.kv.bench", description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", help=", ".join(TABLES))
    parser.add_argument("--device", type=device, default="cpu", help="cpu or cuda; latency keeps books only")
    parser.add_argument("--torch-threads", type=whole(1, 1024), default=1, help="threads of one copy on a CPU (1)")
    parser.add_argument("--quick", action="store_true", help="few repeats: to see that it runs")
    parser.add_argument("--json", type=new_file, help="also write the figures into this file")
    options = parser.parse_args(argv)
    unknown = [name for name in options.tables if name not in TABLES]
    if unknown:
        parser.error(f"no table {unknown[0]!r}; there are {', '.join(TABLES)}")
    import torch

    torch.set_num_threads(options.torch_threads)
    found = {}
    for name in options.tables or TABLES:
        print(f"-- {name}")
        found[name] = TABLES[name](options.device, options.quick)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
