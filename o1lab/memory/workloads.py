"""Allocation workloads to record on a GPU: the same calls every time, so that one can be recorded under two settings.

``python -m o1lab.memory.workloads cat --settings expandable_segments:True --into cat-expandable.trace`` records one.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from o1lab import paths
from o1lab.errors import O1labError, ProbeError, UnknownName

if TYPE_CHECKING:
    from o1lab.memory.simulate import Simulation
    from o1lab.memory.trace import Trace

MOST_ENTRIES = 400_000
SHIPPED = paths.PACKAGE.parent / "results" / "reference" / "2026-11-30-h200-traces"


def _bytes(size: float) -> Any:
    import torch

    return torch.empty(max(1, int(size)), dtype=torch.uint8, device="cuda")


def _churn(
    chance: random.Random, calls: int, most: int, size: Callable[[], float], after: Callable[[int], None]
) -> None:
    """Allocate and free at random with at most ``most`` blocks alive."""
    live: list[Any] = []
    for call in range(calls):
        if live and (len(live) > most or chance.random() < 0.48):
            live.pop(chance.randrange(len(live)))
        else:
            live.append(_bytes(size()))
        after(call)


def mixed(chance: random.Random) -> None:
    """Blocks of log-normal sizes, from bytes to 256 MiB, allocated and freed at random."""
    _churn(chance, 12_000, 400, lambda: min(2**28, chance.lognormvariate(12.5, 2.2)), lambda call: None)


def emptied(chance: random.Random) -> None:
    """The same with smaller blocks, and ``empty_cache`` every 701 calls."""
    import torch

    _churn(
        chance, 5000, 120, lambda: min(2**27, chance.lognormvariate(14, 2)),
        lambda call: torch.cuda.empty_cache() if call % 701 == 700 else None,
    )  # fmt: skip


def cat(chance: random.Random) -> None:
    """A KV cache grown by ``torch.cat``: 24 sequences that come and go, four layers each, 16 tokens a step."""
    import torch

    token = 8 * 128 * 2 * 8
    kept: dict[int, list[Any]] = {}
    left: dict[int, int] = {}
    for step in range(400):
        for lane in range(24):
            if lane not in kept:
                if chance.random() < 0.2:
                    prompt = chance.randrange(50, 400)
                    kept[lane], left[lane] = (
                        [_bytes(prompt * token) for _ in range(4)],
                        int(chance.lognormvariate(4.5, 0.7)),
                    )
                continue
            if step % 4 == lane % 4:
                kept[lane] = [torch.cat([layer, _bytes(16 * token)]) for layer in kept[lane]]
            left[lane] -= 1
            if left[lane] <= 0:
                del kept[lane], left[lane]


def streams(chance: random.Random) -> None:
    """Blocks made on three streams, every fifth used on another one (``record_stream``)."""
    import torch

    side = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    live: list[Any] = []
    for call in range(4000):
        with torch.cuda.stream(side[call % 3]):
            block = _bytes(chance.lognormvariate(13, 1.8))
        if call % 5 == 0:
            block.record_stream(side[1 if call % 3 == 2 else 2])
        live.append(block)
        del block
        if len(live) > 150:
            live.pop(chance.randrange(len(live)))
    torch.cuda.synchronize()


def graphs(chance: random.Random) -> Any:
    """Four CUDA graphs with a private pool each, replayed; they live on until the recording has ended."""
    import torch

    linear = torch.nn.Linear(1024, 1024, device="cuda")
    kept = []
    for rows in (64, 256, 1024, 4096):
        x = torch.randn(rows, 1024, device="cuda")
        linear(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = torch.relu(linear(x))
            out = (y @ y.T).sum()
        kept.append((graph, x, out))
        graph.replay()
        del y, out, graph
    return kept


def capped(chance: random.Random) -> None:
    """Large blocks under a cap of 2 GiB: the allocator has to flush, retry and refuse."""
    import torch

    cap = 2 << 30
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(0).total_memory)
    live: list[Any] = []
    for _ in range(3000):
        if live and (sum(block.numel() for block in live) > 0.8 * cap or chance.random() < 0.45):
            live.pop(chance.randrange(len(live)))
            continue
        try:
            live.append(_bytes(min(2**29, chance.lognormvariate(16.5, 1.6))))
        except torch.cuda.OutOfMemoryError:
            live.pop(chance.randrange(len(live)))


def generate(chance: random.Random) -> None:
    """``generate()`` of a small random Llama on prompts of changing length."""
    import torch

    from o1lab import models

    model = models.load("tiny", "cuda")
    for _ in range(24):
        ids = torch.randint(0, model.model.config.vocab_size, (4, chance.randrange(16, 400)), device="cuda")
        with torch.inference_mode():
            model.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip


WORKLOADS = {function.__name__: function for function in (cat, mixed, emptied, streams, graphs, capped, generate)}


def record(workload: str, *, seed: int = 0) -> Trace:
    """Record one workload in this process, under the settings it was started with.

    Raises
    ------
    UnknownName, ProbeError
        No such workload; no CUDA.
    """
    import torch

    from o1lab.memory import trace

    if workload not in WORKLOADS:
        raise UnknownName("workload", workload, tuple(WORKLOADS))
    if not torch.cuda.is_available():
        raise ProbeError("a trace is recorded by torch's CUDA allocator; this machine has none")
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with trace.record(max_entries=MOST_ENTRIES, stacks=None) as recording:
        alive = WORKLOADS[workload](random.Random(seed))
    del alive
    return recording.trace


def record_all(
    jobs: Sequence[tuple[str, str]], folder: str | Path, *, workers: int = 4, seconds: float = 300.0
) -> list[Path]:
    """Record each (workload, settings) in a process of its own and return the files, named after both.

    ``settings`` is what ``PYTORCH_ALLOC_CONF`` takes, e.g. ``"expandable_segments:True"``; empty for torch's defaults.

    Raises
    ------
    ProbeError
        A recording failed; the message carries its last line.
    """
    from o1lab.progress import progress

    Path(folder).mkdir(parents=True, exist_ok=True)

    def run(job: tuple[str, str]) -> Path:
        workload, settings = job
        name = "".join(letter if letter.isalnum() else "-" for letter in settings or "default")
        file = Path(folder) / f"{workload}-{name}.trace"
        command = [
            sys.executable,
            "-m",
            "o1lab.memory.workloads",
            workload,
            "--settings",
            settings,
            "--into",
            str(file),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ProbeError(f"recording {workload!r} under {settings or 'the defaults'!r} failed: {last}")
        return file

    with ThreadPoolExecutor(max_workers=workers) as pool:
        futures = [pool.submit(run, job) for job in jobs]
        return [future.result() for future in progress(futures, total=len(futures), label="recordings")]


def compare(replay: Simulation, real: Simulation | None = None) -> dict[str, float]:
    """Reserved bytes of a replay beside real ones, peak and mean over requests and frees, and the relative errors.

    ``real`` is a replay of the run to compare with (only its recorded series counts); default ``replay`` itself.
    """
    truth = replay if real is None else real
    measured = truth.recorded_reserved[truth.served]
    peak, mean = float(measured.max()), float(measured.mean())
    return {
        "real_peak_mib": peak / 2**20, "replayed_peak_mib": replay.peak_reserved_bytes / 2**20,
        "peak_error": replay.peak_reserved_bytes / peak - 1, "mean_error": replay.mean_reserved_bytes / mean - 1,
    }  # fmt: skip


def shipped() -> dict[str, Path]:
    """Traces recorded on an H200 that come with the repository, by name; empty where only the package is installed."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.trace"))}


def main(argv: Sequence[str] | None = None) -> int:
    """Record one workload under allocator settings and save the trace."""
    parser = argparse.ArgumentParser(prog="o1lab.memory.workloads", description=__doc__.splitlines()[0])
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--settings", default="", help="as PYTORCH_ALLOC_CONF takes them")
    parser.add_argument("--into", required=True, type=Path, help="file to write")
    options = parser.parse_args(argv)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # read when CUDA starts: the older name wins
        os.environ.pop(name, None)
        if options.settings:
            os.environ[name] = options.settings
    try:
        found = record(options.workload)
    except O1labError as error:
        print(f"o1lab: {error}", file=sys.stderr)
        return 2
    found.save(options.into)
    print(f"{options.workload}: {len(found)} entries, {found.reserved().max() / 2**20:.1f} MiB reserved at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
