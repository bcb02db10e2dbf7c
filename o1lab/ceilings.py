"""The machine's measured ceilings: copy bandwidth, read bandwidth and matmul rate.

A kernel's speed is judged against these, measured in the same run on the same device, not against a data sheet.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from o1lab.stats import Estimate, median

if TYPE_CHECKING:
    import torch

MIB = 2**20
MOST_BYTES = 2**31 - MIB  # one buffer; below 2 GiB a reduction stays one kernel with 32-bit indexing
AT_LEAST_S = 10e-3  # one timed repeat lasts this long, so that the first launch and the clock weigh under 0.2 %


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One measured ceiling; the rate is the median over repeats, with its order-statistic 95 % interval.

    ``rate`` is in B/s (copy: bytes read plus written) or FLOP/s; ``None`` with the reason in ``note`` where it could
    not be measured. ``size`` says on what.
    """

    name: str
    device: str
    rate: Estimate | None
    size: str
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for JSON."""
        rate = self.rate.to_dict() if self.rate else None
        return {"name": self.name, "device": self.device, "rate": rate, "size": self.size, "note": self.note}


def sizes(free_bytes: int, cache_bytes: int, most_bytes: int = MOST_BYTES) -> tuple[int, str]:
    """Bytes of one buffer, and a remark if it is too small to be sure that memory and not the cache is measured.

    Two buffers are made and at most half of the free memory is taken; at most ``most_bytes`` each; memory is
    surely measured from four caches on.

    Examples
    --------
    >>> sizes(free_bytes=140 * 2**30, cache_bytes=60 * 2**20)
    (2146435072, '')
    """
    buffer = max(min(most_bytes, free_bytes // 4) // MIB, 1) * MIB
    if buffer >= 4 * cache_bytes:
        return buffer, ""
    return (
        buffer,
        f"only {buffer // MIB} MiB a buffer, under 4 × the {cache_bytes // MIB} MiB cache: may flatter memory",
    )


def square(free_bytes: int, element_bytes: int, most: int) -> int:
    """Side of the square matrices: the largest power of two up to ``most`` whose three fit in half the free memory.

    Examples
    --------
    >>> square(140 * 2**30, 2, 8192), square(100 * 2**20, 2, 8192)
    (8192, 2048)
    """
    side = most
    while side > 128 and 3 * side * side * element_bytes > free_bytes // 2:
        side //= 2
    return side


def rates(step: Callable[[], Any], work: float, unit: str, clock: Clock, repeats: int, budget_s: float) -> Estimate:
    """Rate of ``step`` (``work`` units each) as a median over at least six timed repeats of several steps.

    Warm-up comes first and sets how many steps make one repeat; ``budget_s`` bounds the timed part in seconds.
    """
    for _ in range(3):
        step()
    once = clock(step, 1)
    inner = max(1, min(1000, math.ceil(AT_LEAST_S / max(once, 1e-7))))
    clock(step, inner)
    deadline = time.perf_counter() + budget_s
    found: list[float] = []
    while len(found) < 6 or (len(found) < repeats and time.perf_counter() < deadline):
        found.append(work * inner / clock(step, inner))
    return median(found, unit)


Clock = Callable[[Callable[[], Any], int], float]


def wall_clock(step: Callable[[], Any], times: int) -> float:
    """Seconds for ``times`` steps on the CPU."""
    start = time.perf_counter()
    for _ in range(times):
        step()
    return time.perf_counter() - start


def event_clock(device: torch.device) -> Clock:
    """Seconds for a number of steps on a CUDA device, between two events on its current stream."""
    import torch

    def clock(step: Callable[[], Any], times: int) -> float:
        stream = torch.cuda.current_stream(device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        for _ in range(times):
            step()
        end.record(stream)
        end.synchronize()
        return start.elapsed_time(end) / 1000  # elapsed_time is in ms

    return clock


def measure(
    device: Any = None, *, repeats: int = 31, budget_s: float = 1.5, stream: TextIO | None = None
) -> list[Ceiling]:
    """Measure copy, read and matmul on one device.

    Parameters
    ----------
    device : torch.device or str, optional
        By default the current CUDA device where torch can use one, else the CPU.
    repeats : int
        Timed repeats at most; at least six are made.
    budget_s : float
        Seconds for the timed part of each ceiling.
    stream : file, optional
        Where the progress line goes; standard error by default.

    Notes
    -----
    Copy counts bytes read and written (``Tensor.copy_`` between two buffers of one device). Read is the sum of one
    fp32 buffer. Matmul is square: bf16 on CUDA (fp16 before Ampere), fp32 on a CPU, on normally distributed data, since
    zeros draw less power and run faster. The interval is that of one run: it does not
    cover differences between runs, which on a shared two-core CPU reached a factor of three (cause not established).
    """
    import torch

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda":
        where = torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)
        properties = torch.cuda.get_device_properties(where)
        free = torch.cuda.mem_get_info(where)[0]
        cache = getattr(properties, "L2_cache_size", 0) or 64 * MIB
        most, side, clock = MOST_BYTES, 8192, event_clock(where)
        dtype = torch.bfloat16 if properties.major >= 8 else torch.float16
    else:
        from o1lab.host import host

        free, cache, most, side, clock, dtype = host().available_bytes, 32 * MIB, 256 * MIB, 1024, wall_clock, None
        dtype = torch.float32
    buffer, note = sizes(free, cache, most)
    side = square(free, dtype.itemsize, side)
    named = str(dtype).removeprefix("torch.")
    report = Progress(stream or sys.stderr, str(where))
    out = []
    plan = (
        ("copy", f"2 buffers of {buffer // MIB} MiB", note, lambda: _copy(where, buffer), "B/s"),
        ("read", f"sum of {buffer // MIB} MiB float32", note, lambda: _read(where, buffer), "B/s"),
        ("matmul", f"{side} × {side} × {side} {named}", "", lambda: _matmul(where, side, dtype), "FLOP/s"),
    )
    with torch.inference_mode(), torch.cuda.device(where) if where.type == "cuda" else nullcontext():
        for name, size, remark, make, unit in plan:
            report(name)
            try:
                step, work = make()
                rate = rates(step, work, unit, clock, repeats, budget_s)
                out.append(Ceiling(name, str(where), rate, size, remark))
            except (RuntimeError, MemoryError) as error:  # torch's out-of-memory errors are RuntimeErrors
                said = str(error).partition(". ")[0].partition("\n")[0]
                out.append(Ceiling(name, str(where), None, size, f"could not be measured: {said}"))
            finally:
                step = None  # the buffers go before the next ones are made
                if where.type == "cuda":
                    torch.cuda.empty_cache()
    report(None)
    return out


def _copy(device: torch.device, size: int) -> tuple[Callable[[], Any], float]:
    import torch

    source = torch.empty(size // 4, device=device).normal_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2.0 * size


def _read(device: torch.device, size: int) -> tuple[Callable[[], Any], float]:
    import torch

    source = torch.empty(size // 4, device=device).normal_()
    return lambda: source.sum(), float(size)


def _matmul(device: torch.device, side: int, dtype: torch.dtype) -> tuple[Callable[[], Any], float]:
    import torch

    left, right = (torch.empty(side, side, device=device, dtype=dtype).normal_() for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out), 2.0 * side**3


class Progress:
    """One line that says what is being measured: rewritten on a terminal, printed once per step elsewhere."""

    def __init__(self, stream: TextIO, device: str) -> None:
        self.stream, self.device, self.live = stream, device, stream.isatty()

    def __call__(self, name: str | None) -> None:
        """Show ``name`` as being measured; ``None`` ends the line."""
        text = f"measuring {name} on {self.device} …" if name else ""
        if self.live:
            self.stream.write(f"\r{text:<40}" + ("" if name else "\r"))
        elif name:
            self.stream.write(text + "\n")
        self.stream.flush()
