"""What outside tools see: resident memory, NVML per-process memory (``nvidia-smi``), torch's allocation history.

Samples are taken while the loop runs, as a monitoring tool takes them, and not at quiet round ends. The slope is
Theil–Sen with a bootstrap interval; :func:`finds` says when a slope counts as having found a leak.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from o1lab.errors import ProbeError
from o1lab.memory import counters
from o1lab.stats import Estimate, theil_sen

UNIT = "B/request"


@dataclass(frozen=True)
class Sampled:
    """Readings of one loop and the trend in each.

    Attributes
    ----------
    requests : list of int
        Requests served when each sample was taken.
    rss, nvml : list of int or None
        Bytes; ``nvml`` is what ``nvidia-smi --query-compute-apps=used_memory`` shows for this process, or ``None``.
    rss_slope, nvml_slope : Estimate or None
        Bytes per request.
    nvml_reason : str
        Why there is no ``nvml`` series; empty if there is one.
    """

    requests: list[int]
    rss: list[int]
    nvml: list[int] | None
    rss_slope: Estimate
    nvml_slope: Estimate | None
    nvml_reason: str


def finds(slope: Estimate | None, true_bytes: float) -> bool:
    """Whether a slope finds a leak of ``true_bytes`` per request: interval above zero, value within a factor of 2.

    For a clean loop (``true_bytes`` 0) it is a false alarm: the interval lies above zero.

    Examples
    --------
    >>> finds(Estimate(2048, 1900, 2100, 50, "B/request"), 80)
    False
    """
    if slope is None or slope.low <= 0:
        return False
    return true_bytes == 0 or 0.5 * true_bytes <= slope.value <= 2 * true_bytes


def sample(
    step: Callable[[Any], Any], *, inputs: Iterable[Any] | None = None, requests: int = 200, samples: int = 50,
    warm_up: int = 20, seed: int = 0, nvml: bool = True,
) -> Sampled:  # fmt: skip
    """Serve ``requests`` requests and read resident and NVML memory ``samples`` times on the way.

    ``nvml=False`` leaves the device out: NVML takes longer to answer than a small model to serve.

    Raises
    ------
    ProbeError
        Fewer requests than samples, or fewer than 8 samples.
    """
    from o1lab import hardware
    from o1lab.nvml import Unavailable

    if not 8 <= samples <= requests:
        raise ProbeError(f"samples={samples} of requests={requests}: need at least 8, and no more than requests")
    source = itertools.count() if inputs is None else itertools.cycle(list(inputs))
    for _ in range(warm_up):
        step(next(source))
    reason = "not asked for" if not nvml else "" if counters.cuda_ready() else "no CUDA context in this process"
    if not reason:
        view = hardware.nvml()
        devices = hardware.devices(view)
        first = hardware.process_memory(view, devices)
        reason = first.reason if isinstance(first, Unavailable) else ""
    marks = {round((index + 1) * requests / samples) for index in range(samples)}
    at: list[int] = []
    rss: list[int] = []
    device: list[int] = []
    for served in range(1, requests + 1):
        step(next(source))
        if served in marks:
            at.append(served)
            rss.append(counters.rss_bytes())
            if not reason:
                value = hardware.process_memory(view, devices)
                if isinstance(value, Unavailable):
                    reason = value.reason
                else:
                    device.append(value)
    return Sampled(
        at, rss, None if reason else device, theil_sen(at, rss, UNIT, seed=seed),
        None if reason else theil_sen(at, device, UNIT, seed=seed), reason,
    )  # fmt: skip


def live_sites(step: Callable[[Any], Any], *, inputs: Iterable[Any] | None = None, requests: int = 200) -> Counter[str]:
    """Bytes still live on the device after ``requests`` requests, by the Python line that allocated them.

    Uses torch's own memory profiler (``torch.cuda.memory._record_memory_history``), bounded to 100 000 events, and
    switches it off again. A site is ``file.py:line function`` of the innermost Python frame.

    Raises
    ------
    ProbeError
        Without CUDA: torch's profiler follows the CUDA allocator only.
    """
    import torch

    if not torch.cuda.is_available():
        raise ProbeError("torch's memory profiler follows the CUDA allocator; this machine has none")
    source = itertools.count() if inputs is None else itertools.cycle(list(inputs))
    step(next(source))
    torch.cuda.memory._record_memory_history(enabled="all", context="all", stacks="python", max_entries=100_000)
    try:
        for _ in range(requests):
            step(next(source))
        torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    sites: Counter[str] = Counter()
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            frames = block.get("frames") or []
            if block["state"] == "active_allocated" and frames:
                top = frames[0]
                name = top["filename"].replace("\\", "/").rsplit("/", 1)[-1]
                sites[f"{name}:{top['line']} {top['name']}"] += block["size"]
    return sites
