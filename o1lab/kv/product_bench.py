"""``python -m o1lab.kv.product_bench``: how near the products of a decode step come to the device's copy rate.

For each product of a Llama-like model: the bytes of its weight per second, with norm, gate and sum inside, beside the
bare product by ``torch.nn.functional.linear``. Each launch of a captured graph has a weight of its own, so that none is
in the second-level cache from the launch before it. ``--tune`` tries other cuts. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import torch

from o1lab.attention.bench import copy_rate
from o1lab.attention.splits import multiprocessors
from o1lab.ceilings import event_clock, rates
from o1lab.errors import O1labError
from o1lab.kv.decode_bench import SIZES
from o1lab.kv.products import Cuts, Scratch, cuts_on, product
from o1lab.options import ended, new_file, whole
from o1lab.stats import Estimate
from o1lab.storage import write_json

COLD_BYTES = 320 << 20
"""Weights that a captured graph walks through; several times the second-level cache."""


@dataclass(frozen=True)
class Product:
    """One product of a model: columns, inner dimension, and what is folded in."""

    name: str
    columns: int
    inner: int
    norm: bool = False
    gated: bool = False
    add: bool = False

    @property
    def weight_bytes(self) -> int:
        """In bfloat16."""
        return 2 * self.rows * self.inner

    @property
    def rows(self) -> int:
        """Of the weight."""
        return self.columns * (2 if self.gated else 1)

    @property
    def cold(self) -> int:
        """Weights that make up :data:`COLD_BYTES`."""
        return -(-COLD_BYTES // self.weight_bytes)


@dataclass(frozen=True)
class Row:
    """One way to compute one product: ``rate`` in B/s of weights, ``share`` of the copy rate."""

    product: str
    batch: int
    way: str
    rate: float
    share: float

    def __str__(self) -> str:
        return f"{self.product:<8}{self.batch:>6}{self.rate / 1e9:>9,.0f}{self.share:>9.1%}  {self.way}"


HEADER = "product  batch     GB/s  of copy  way"


def of_model(name: str) -> list[Product]:
    """The products of one of ``decode_bench.SIZES``.

    >>> [(one.name, one.columns, one.inner) for one in of_model("llama")][:2]
    [('qkv', 3072, 2048), ('output', 2048, 2048)]
    """
    hidden, _, heads, kv_heads, width, mlp, words = SIZES[name]
    return [
        Product("qkv", (heads + 2 * kv_heads) * width, hidden, norm=True),
        Product("output", hidden, heads * width, add=True),
        Product("gate+up", mlp, hidden, norm=True, gated=True),
        Product("down", hidden, mlp, add=True),
        Product("head", words, hidden, norm=True),
    ]


def candidates(one: Product, batch: int, programs: int) -> list[Cuts]:
    """Cuts worth trying: 8 to 32 KiB of weights in a stage, enough programs, a pipeline that fits."""
    halves, found = 2 if one.gated else 1, []
    for block_n, block_k, splits in itertools.product((16, 32, 64, 128), (64, 128, 256, 512), (1, 2, 4, 8)):
        shape = Cuts(block_n, block_k, splits, 4, 4)
        stage = 2 * block_k * (block_n * halves + max(16, batch))
        launched = -(-one.columns // block_n) * splits
        if not (8192 <= 2 * block_n * block_k * halves <= 32768 and 4 * stage <= 200 << 10):
            continue
        if 0.9 * programs <= launched <= max(8 * programs, one.columns // 64) and shape.fits(one.inner):
            found.append(shape)
    return found


def step(one: Product, batch: int, shape: Cuts | None, overlap: bool, device: Any, count: int) -> Callable[[], None]:
    """One pass over ``count`` weights; ``shape`` None: the bare product by torch."""
    make = {"device": device, "dtype": torch.bfloat16}
    weights = [torch.randn(one.rows, one.inner, **make) * one.inner**-0.5 for _ in range(count)]
    x, gain = torch.randn(batch, one.inner, **make), torch.ones(one.inner, **make)
    out = torch.zeros(batch, one.rows if shape is None else one.columns, **make)
    if shape is None:
        return lambda: [torch.mm(x, weight.T, out=out) for weight in weights] and None
    scratch = Scratch.make(one.columns, batch, one.gated, shape, torch.device(device))
    how = {"gain": gain if one.norm else None, "epsilon": 1e-5, "gated": one.gated}
    how |= {"residual": torch.zeros_like(out) if one.add else None, "out": out, "shape": shape, "scratch": scratch}
    return lambda: [product(x, weight, overlap=overlap, **how) for weight in weights] and None


def measure(
    one: Product, batch: int, way: str, shape: Cuts | None, overlap: bool, device: Any, copy: Estimate, budget_s: float
) -> Row:  # fmt: skip
    """Time one way from a captured graph."""
    run = step(one, batch, shape, overlap, device, one.cold)
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    found = rates(graph.replay, one.weight_bytes * one.cold, "B/s", event_clock(device), 15, budget_s)
    return Row(one.name, batch, way, found.value, found.value / copy.value)


def _compile(one: Product, batch: int, shape: Cuts, overlap: bool) -> None:
    """Leave the compiled kernel in Triton's cache on disk; run in a process of its own."""
    step(one, batch, shape, overlap, "cuda", 1)()


def tune(
    one: Product, batch: int, overlap: bool, device: Any, copy: Estimate, pool: ProcessPoolExecutor | None
) -> list[Row]:  # fmt: skip
    """All candidates, best first; those that do not run are left out."""
    shapes = candidates(one, batch, multiprocessors(device))
    if pool is not None:
        for done in [pool.submit(_compile, one, batch, shape, overlap) for shape in shapes]:
            done.exception()
    rows = []
    for shape in shapes:
        try:
            rows.append(measure(one, batch, str(shape), shape, overlap, device, copy, 0.05))
        except (RuntimeError, O1labError) as error:  # out of shared memory or registers
            print(f"{shape}: {str(error).splitlines()[0][-80:]}", file=sys.stderr)
    return sorted(rows, key=lambda row: -row.rate)


@ended
def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="o1lab.kv.product_bench", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SIZES), default="llama", help="whose products (llama)")
    parser.add_argument("--batch", nargs="+", type=whole(1, 64), default=[1, 32], help="sequences (1 32)")
    parser.add_argument("--tune", action="store_true", help="try other cuts and print the best five")
    parser.add_argument("--workers", type=whole(0), default=8, help="processes that compile for --tune (8)")
    parser.add_argument("--json", type=new_file, help="also write the figures into this file")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise O1labError("the products of a decode step are timed on a CUDA device, and there is none here")
    device = torch.device("cuda", torch.cuda.current_device())
    copy = copy_rate(device, 1 << 30, 1.0)
    able = torch.cuda.get_device_capability(device) >= (9, 0)
    print(
        f"copy rate {copy.value / 1e9:,.0f} GB/s, bfloat16, {multiprocessors(device)} multiprocessors", HEADER, sep="\n"
    )
    rows = []
    tuned = options.tune and options.workers
    pool = ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) if tuned else None
    try:
        for one, batch in itertools.product(of_model(options.model), options.batch):
            shape = cuts_on(device, one.columns, one.inner, batch, one.gated, 2, one.norm)
            ways = [("torch, the bare product", None, False), (f"{shape} in turn", shape, False)]
            ways += [(f"{shape} overlapping", shape, True)] if able else []
            found = [measure(one, batch, *way, device, copy, 0.3) for way in ways]
            if options.tune:
                found += tune(one, batch, able, device, copy, pool)[:5]
            for row in found:
                print(row, flush=True)
            rows += found
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    if options.json:
        write_json(options.json, {"copy": asdict(copy), "rows": list(map(asdict, rows))})
    return 0


if __name__ == "__main__":
    sys.exit(main())
