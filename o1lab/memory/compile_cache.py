"""What ``torch.compile`` keeps when a module meets new shapes, in a fresh process per arm.

Arms run in their own processes because neither Dynamo nor the C++ heap can be put back to a clean start in one: the
order of arms would count for as much as the arms themselves. ``python -m o1lab.memory.compile_cache --help`` runs some.
Sources: ``torch/_dynamo/config.py`` (``recompile_limit``, of which ``cache_size_limit`` is the old name) and
``torch/_dynamo/cache_size.py``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from o1lab.errors import ProbeError
from o1lab.memory import counters
from o1lab.stats import Estimate, median, theil_sen

UNIT = "B/graph"
BACKENDS = ("inductor", "aot_eager", "none")


@dataclass(frozen=True)
class Growth:
    """One arm: a module met ``shapes`` new input lengths.

    Attributes
    ----------
    arm : str
        Label, e.g. ``"limit 8"`` or ``"patch as written"``.
    limit : int
        ``torch._dynamo.config.recompile_limit`` in force.
    graphs : list of int, length ``shapes``
        Graphs compiled so far, after each shape.
    host, device : list of int, length ``shapes + 1``
        Bytes in use, before the first shape and after each (device zero without CUDA).
    reserved : list of int
        Bytes that torch's allocator holds from the driver.
    pools : list of int
        Of these, bytes in private pools: what recorded CUDA graphs hold.
    used : list of int
        Bytes that this process uses on the device, as its driver sees it (NVML); of the whole device, where NVML does
        not tell processes apart, and then meaningful only for an arm that runs alone.
    """

    arm: str
    limit: int
    graphs: list[int]
    host: list[int]
    device: list[int]
    reserved: list[int]
    backend: str
    dynamic: bool | None
    pools: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)

    def per_graph(self, counter: str, *, skip: int = 2) -> Estimate:
        """Median growth per compiled graph in bytes; the first ``skip`` graphs carry one-off costs and are left out."""
        values = getattr(self, counter)
        compiled = [
            values[index + 1] - values[index]
            for index in range(len(self.graphs))
            if self.graphs[index] > max(skip, self.graphs[index - 1] if index else 0)
        ]
        return median(compiled, UNIT)

    def per_shape(self, counter: str) -> Estimate:
        """Median growth per new shape in bytes, compiled or not, over the later half of the shapes (at least six).

        The first ones also fill bounded caches of the kernels' own (135 kB each with oneDNN, for four or five shapes).
        """
        values, skip = getattr(self, counter), len(self.graphs) // 2
        return median([b - a for a, b in itertools.pairwise(values[skip:])], "B/shape")

    def slope(self, counter: str) -> Estimate:
        """Theil–Sen growth per new shape in bytes, later half: for figures that move in steps, such as ``used``."""
        values, skip = getattr(self, counter), len(self.graphs) // 2
        return theil_sen(range(len(values) - skip), values[skip:], UNIT)

    def kept(self, counter: str = "host") -> int:
        """Bytes still in use at the end, over the start."""
        values = getattr(self, counter)
        return values[-1] - values[0]


def default_limits() -> dict[str, int]:
    """Torch's own recompile limits: per function, and accumulated over all of a code object's versions."""
    import torch._dynamo.config as config

    return {name: getattr(config, name) for name in ("recompile_limit", "accumulated_recompile_limit")}


def counting(backend: str) -> tuple[Callable[..., Any], list[int]]:
    """Wrap a compile backend so that each graph it compiles is counted in the returned one-element list."""
    from torch._dynamo import lookup_backend

    inner, count = lookup_backend(backend), [0]

    def compile_and_count(graph: Any, example_inputs: Any, **options: Any) -> Any:
        count[0] += 1
        return inner(graph, example_inputs, **options)

    return compile_and_count, count


def graphs_kept(calls: int = 40, limit: int | None = None, dynamic: bool | None = False) -> list[int]:
    """Graphs that Dynamo has compiled after each of ``calls`` calls of one function with a new shape each time.

    With ``limit=None`` torch's default limit is in force; ``dynamic`` is :func:`torch.compile`'s: ``False`` makes a
    graph per shape, ``None`` is its default. No code is generated: the graphs run eagerly.

    Examples
    --------
    >>> graphs_kept(calls=3)
    [1, 2, 3]
    """
    import torch

    if calls < 1:
        raise ProbeError(f"calls={calls}: at least one call is needed")
    compiler, count = counting("eager")

    def double(x: Any) -> Any:
        return x * 2

    torch._dynamo.reset()
    function = torch.compile(double, backend=compiler, dynamic=dynamic)
    seen = []
    patch = {} if limit is None else {"recompile_limit": limit}
    log = logging.getLogger("torch._dynamo.convert_frame")  # it warns at the limit, which is what is counted here
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with torch._dynamo.config.patch(**patch):
            for length in range(2, calls + 2):
                function(torch.zeros(length))
                seen.append(count[0])
    finally:
        log.setLevel(level)
        torch._dynamo.reset()
    return seen


def _block(width: int) -> Any:
    """A small pre-norm decoder block: attention and a gated MLP, enough for the compiler to have work."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv = torch.nn.RMSNorm(width), torch.nn.Linear(width, 3 * width)
            self.gate, self.up = torch.nn.Linear(width, 2 * width), torch.nn.Linear(width, 2 * width)
            self.down = torch.nn.Linear(2 * width, width)

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, width // 4)).permute(2, 0, 3, 1, 4)
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + attended.transpose(1, 2).flatten(-2)
            return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))

    return Block()


def grow(
    arm: str, *, limit: int | None = None, patch: bool = False, shapes: int = 40, device: str = "cpu",
    backend: str = "inductor", dynamic: bool | None = False, width: int = 64, seed: int = 0,
    cudagraphs: bool = False, cudnn_attention: bool = True,
) -> Growth:  # fmt: skip
    """Run one arm in *this* process: compile a small block and show it ``shapes`` lengths it has not met.

    Parameters
    ----------
    limit : int, optional
        Recompile limit; ``None`` keeps torch's default.
    patch : bool
        Apply the article's three lines as written (§1) instead.
    backend : {"inductor", "aot_eager", "none"}
        ``"none"`` runs the block eagerly: the control, which shows what new shapes cost without any graph.
    dynamic : bool or None
        ``False`` specialises every shape (the worst case), ``None`` is torch's default (automatic dynamic shapes).
    cudagraphs : bool
        Record a CUDA graph per compiled graph, as ``mode="reduce-overhead"`` does (inductor on CUDA only).
    cudnn_attention : bool
        ``False`` keeps attention away from cuDNN, which keeps an execution plan for every shape on the host.
    """
    import torch

    from o1lab.memory.compile_accounting import private_pool_bytes

    if shapes < 1 or backend not in BACKENDS:
        raise ProbeError(f"shapes={shapes}, backend={backend!r}: need at least 1 shape and one of {BACKENDS}")
    torch.manual_seed(seed)
    config = torch._dynamo.config
    if limit is not None:
        config.recompile_limit = limit
    if patch:  # the article's patch, to the letter
        torch._dynamo.config.cache_size_limit = 32
        torch._dynamo.config.suppress_errors = True
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    if cudagraphs:
        torch._inductor.config.triton.cudagraphs = True
    torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
    place = torch.device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    block = _block(width).to(place, dtype).eval()
    count = [0]
    compiled: Callable[[Any], Any] = block  # backend "none": the control, not compiled at all
    if backend != "none":
        compiler, count = counting(backend)
        compiled = torch.compile(block, backend=compiler, dynamic=dynamic)
    lengths = [8 + step for step in range(shapes)]
    inputs = [torch.randn(2, length, width, device=place, dtype=dtype) for length in lengths]
    graphs: list[int] = []
    with counters.frozen(), torch.inference_mode():
        block(inputs[0])  # the eager path's own workspaces are not the compiler's
        readings, pools, used = [counters.read()], [private_pool_bytes()], [_driver_bytes()]
        for x in inputs:
            for _ in range(3 if cudagraphs else 1):  # CUDA-graph trees warm up, record, then replay
                if cudagraphs:
                    torch.compiler.cudagraph_mark_step_begin()
                compiled(x)
            graphs.append(count[0])
            readings.append(counters.read())
            pools.append(private_pool_bytes())
            used.append(_driver_bytes())
    return Growth(
        arm, int(config.recompile_limit), graphs, [r.host_in_use or 0 for r in readings],
        [r.device_allocated or 0 for r in readings], [r.device_reserved or 0 for r in readings], backend, dynamic,
        pools, used,
    )  # fmt: skip


def _driver_bytes() -> int:
    """Device bytes of this process as NVML has them, else of the whole device; 0 without a CUDA context."""
    if not counters.cuda_ready():
        return 0
    import torch

    from o1lab import hardware
    from o1lab.nvml import Unavailable

    view = hardware.nvml()
    own = hardware.process_memory(view, hardware.devices(view))
    if isinstance(own, Unavailable):
        free, total = torch.cuda.mem_get_info()
        return total - free
    return own


def run_arms(
    arms: Sequence[dict[str, Any]], *, workers: int = 2, warm: bool = False, seconds: float = 600.0
) -> list[Growth]:
    """Run each arm (keyword arguments of :func:`grow`) in a fresh process, ``workers`` at a time, with progress.

    Arms for Linux's CPU are forks of ``workers`` processes that have imported torch and Dynamo and done nothing else.

    With ``warm`` the first arm runs alone before the others: it fills inductor's disk cache, without which an arm keeps
    some 30 MiB more on the host, so that all later arms compare like with like.

    Raises
    ------
    ProbeError
        If an arm fails or takes longer than ``seconds``; the message carries the last line it printed.
    """
    from o1lab.progress import progress

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # arms run side by side
    forks = sys.platform == "linux" and not warm and all(arm.get("device", "cpu") == "cpu" for arm in arms)
    groups = [arms[first::workers] for first in range(min(workers, len(arms)))] if forks else [[arm] for arm in arms]

    def run(group: Sequence[dict[str, Any]]) -> list[Growth]:
        command = [sys.executable, "-m", "o1lab.memory.compile_cache", json.dumps(group)]
        limit = seconds * len(group)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, env=environment)
        except subprocess.TimeoutExpired as error:
            names = ", ".join(repr(arm["arm"]) for arm in group)
            raise ProbeError(f"arm {names} took longer than {limit:.0f} s; use fewer shapes") from error
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"arm"')]
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ProbeError(f"arm {group[len(lines)]['arm']!r} failed: {last}")
        return [Growth(**json.loads(line)) for line in lines]

    with ThreadPoolExecutor(max_workers=workers) as pool:
        futures = [pool.submit(run, group) for group in groups[:1]]
        if warm and futures:
            futures[0].result()
        futures += [pool.submit(run, group) for group in groups[1:]]
        done = [future.result() for future in progress(futures, total=len(futures), label="compile arms")]
    return [done[place % len(done)][place // len(done)] for place in range(len(arms))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run arms given as a JSON list of :func:`grow`'s arguments; print the :class:`Growth` of each as a line of JSON.

    Several arms are forks, one after the other, of this process, which does no more than import what they share.
    """
    parser = argparse.ArgumentParser(prog="o1lab.memory.compile_cache", description=__doc__.splitlines()[0])
    parser.add_argument("arms", type=json.loads, help='e.g. \'[{"arm": "limit 8", "limit": 8, "shapes": 12}]\'')
    arms = parser.parse_args(argv).arms
    default_limits()  # imports torch and Dynamo
    for arm in arms:
        child = len(arms) == 1 or os.fork() == 0
        if child:
            print(json.dumps(asdict(grow(**arm))), flush=True)
            break
        if os.wait()[1]:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
