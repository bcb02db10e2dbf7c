"""Device-memory bytes as Nsight Compute counts them, for the bodies of the bench."""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from typing import Any

from o1lab.attention.checks import AttentionError
from o1lab.stats import mebibytes

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
UNITS = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9}
NAMES = ("paged kernel", "gather + SDPA", "three stages, contiguous")


def run_once(step: Any) -> None:
    """Warm up, then run the step once between the profiler's start and stop."""
    import torch

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    step()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def total(text: str) -> tuple[int, int]:
    """Bytes read and written, summed over the kernels of ``ncu --csv`` output.

    Examples
    --------
    >>> total('==PROF== x\\n"ID","Metric Name","Metric Unit","Metric Value"\\n'
    ...       '"0","dram__bytes_read.sum","Mbyte","1,536.5"\\n"0","dram__bytes_write.sum","byte","64"\\n')
    (1536500000, 64)
    """
    lines = text.splitlines()
    heads = [place for place, line in enumerate(lines) if line.startswith('"ID"')]
    if not heads:
        raise AttentionError(f"ncu wrote no table; it said: {' '.join(lines[-3:])[:300]}")
    sums = dict.fromkeys(METRICS, 0.0)
    for row in csv.DictReader(io.StringIO("\n".join(lines[heads[0] :]))):
        if row["Metric Name"] in sums:
            sums[row["Metric Name"]] += float(row["Metric Value"].replace(",", "")) * UNITS[row["Metric Unit"]]
    return int(sums[METRICS[0]]), int(sums[METRICS[1]])


def count(name: str, shape: str, asked: argparse.Namespace) -> tuple[int, int]:
    """Bytes that the body ``name`` of the bench reads and writes for one call, counted in a process of its own.

    Raises
    ------
    AttentionError
        ncu is not on the PATH or refuses, as it does where performance counters are closed to users.
    """
    tool = shutil.which("ncu")
    if tool is None:
        raise AttentionError("ncu (Nsight Compute) is not on the PATH; bytes are known by arithmetic only")
    options = [f"--{key}={getattr(asked, key.replace('-', '_'))}" for key in
               ("q-heads", "kv-heads", "head-dim", "page-tokens", "dtype")]  # fmt: skip
    command = [
        tool, "--csv", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off",
        "--metrics", ",".join(METRICS), sys.executable, "-m", "o1lab.attention.bench", "--shapes", shape, *options,
        "--once", name,
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return total(ran.stdout + ran.stderr)


def report(shape: str, asked: argparse.Namespace) -> str:
    """A line for each body that ncu could count, or the reason why not."""
    lines = []
    for name in NAMES:
        try:
            read, written = count(name, shape, asked)
        except (AttentionError, subprocess.SubprocessError) as error:
            return "\n".join([*lines, f"ncu: {error}"])
        lines.append(f"ncu, {name}: {mebibytes(read)} MiB read, {mebibytes(written)} MiB written")
    return "\n".join(lines)
