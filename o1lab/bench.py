"""Benches by name: ``python -m o1lab bench kv --device cuda``; what follows the name goes to the bench.

Each prints its table and, with ``--json FILE``, writes it; none of them judges anything.
"""

from __future__ import annotations

import argparse
import importlib

BENCHES = {
    "chains": ("o1lab.chains.accuracy", "whole chains right of a model, by family and length of LTC-Bench"),
    "attention": ("o1lab.attention.bench", "paged decode attention beside SDPA and FlexAttention, and the copy rate"),
    "kv": ("o1lab.kv.bench", "page pool latency, inserts against native allocation, replay of traffic"),
    "decode": ("o1lab.kv.decode_bench", "decode steps of whole models by kind of cache, share of the roofline"),
    "products": ("o1lab.kv.product_bench", "the products of a decode step beside torch's, share of the copy rate"),
    "writeback": ("o1lab.kv.writeback_bench", "copies to the host and back, evictions, and what they cost decoding"),
    "faults": ("o1lab.kv.faults", "faults injected into copies of pages, and which checks catch them"),
    "leaks": ("o1lab.memory.accuracy", "how far the leak probe can be trusted: nulls, catalogue, floor, power"),
    "tools": ("o1lab.memory.head_to_head", "the same leaks through the tools people use"),
}  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    width = max(map(len, BENCHES))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(f"{name:<{width}}  {summary}" for name, (_, summary) in BENCHES.items())
    parser.add_argument("bench", choices=BENCHES, help="which one; `bench NAME --help` lists its options")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the bench")


def command(options: argparse.Namespace) -> int:
    """Run it; its own exit code."""
    module = importlib.import_module(BENCHES[options.bench][0])
    return int(module.main(options.options) or 0)
