"""What a native trace answers: which allocations have their free, stack and kernel, and one figure of all three."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from o1lab.memory.native_join import Block, NativeError, Trace, Work
from o1lab.stats import Estimate, proportion


@dataclass(frozen=True, slots=True)
class Matched:
    """Of ``n`` allocations: for how many the free, the stack, the kernel, and all three were found.

    ``cupti_alone``: how many of them CUPTI's own records show; ``alive``: those not freed by the end, which are in
    ``n`` and count as without a free.
    """

    n: int
    freed: int
    stack: int
    kernel: int
    all_three: int
    cupti_alone: int
    alive: int

    @property
    def share(self) -> Estimate:
        """The metric ``matched_share``: all three found, Wilson interval."""
        return proportion(self.all_three, self.n)

    def table(self) -> str:
        """The counts as text, one a line."""
        rows = [("free", self.freed), ("stack", self.stack), ("kernel", self.kernel), ("all three", self.all_three)]
        rows += [("seen by CUPTI alone", self.cupti_alone), ("not freed by the end", self.alive)]
        return "\n".join(f"{name:<22}{count:>8} of {self.n}" for name, count in rows)


def first_work(block: Block, starts: Sequence[int], work: Sequence[Work], error_ns: float, end_ns: int) -> Work | None:
    """The first work launched on the block's stream while the block was held: the kernel that it was made for.

    ``starts``: the launch times of ``work``, sorted.
    """
    last = end_ns if block.free_ns is None else block.free_ns + error_ns
    for index in range(bisect.bisect_left(starts, block.start_ns - error_ns), len(work)):
        if work[index].launch_ns > last:
            return None
        if block.stream in (-1, work[index].stream):
            return work[index]
    return None


def matched(trace: Trace, work: Sequence[Work] | None = None) -> Matched:
    """Count the allocations whose free, Python stack and kernel are all found.

    The allocations are torch's blocks and the driver allocations made outside torch (each of torch's segments is
    the source of blocks and is not counted again). A kernel is found if one was launched on the block's stream between
    allocation and free; times count to within the error of the clocks' alignment.

    Parameters
    ----------
    work : sequence of Work, optional
        Kernels from elsewhere (Nsight Compute), in order of launch, on the same clock; default the trace's own.
    """
    work = trace.work if work is None else work
    starts = [w.launch_ns for w in work]
    ours = {segment.address for segment in trace.segments}
    slack = trace.clock.error_ns + 1000
    shown: dict[int, list[int]] = {}
    items: list[tuple[Block, bool]] = []
    for native in trace.natives:
        if native.alloc:
            shown.setdefault(native.address, []).append(native.time_ns)
    for native in outside(trace, ours):
        items.append((native, True))
    for block in trace.blocks:
        seen = any(abs(time - block.start_ns) <= slack + 100_000 for time in shown.get(block.address, ()))
        items.append((block, seen))
    freed = [b.end_ns is not None for b, _ in items]
    stack = [bool(b.stack) for b, _ in items]
    kernel = [first_work(b, starts, work, slack, trace.end_ns) is not None for b, _ in items]
    return Matched(
        len(items), sum(freed), sum(stack), sum(kernel), sum(map(all, zip(freed, stack, kernel, strict=True))),
        sum(seen for _, seen in items), len(items) - sum(freed),
    )  # fmt: skip


def outside(trace: Trace, segments: set[int]) -> list[Block]:
    """Driver allocations in device memory that are not torch's, paired with their release by address."""
    opened: dict[int, int] = {}
    rows: list[Block] = []
    for native in trace.natives:
        if native.kind not in ("device", "managed") or native.address in segments:
            continue
        if native.alloc:
            stream = native.stream if native.pool else -1  # a synchronous allocation belongs to no stream
            opened[native.address] = len(rows)
            stack = trace.marks.get(native.mark, ())
            rows.append(Block(native.address, native.bytes, stream, native.time_ns, None, None, stack))
        elif native.address in opened:
            index = opened.pop(native.address)
            old = rows[index]
            rows[index] = Block(
                old.address, old.bytes, old.stream, old.start_ns, native.time_ns, native.time_ns, old.stack
            )
    return rows


def timeline_figure(trace: Trace) -> Any:
    """Segments, blocks and kernels over one time axis, as a plotly figure.

    Dashed: MiB that torch's allocator got from the driver meanwhile; blue: MiB in its blocks; grey, below zero: when
    the device was busy. More than 500 busy spans are drawn merged.
    """
    import numpy as np
    import plotly.graph_objects as go

    from o1lab import plots

    if not trace.blocks and not trace.segments:
        raise NativeError("the trace holds no allocation: there is nothing to draw")

    def level(blocks: Sequence[Block]) -> tuple[np.ndarray, np.ndarray]:
        steps = [(b.start_ns, b.bytes) for b in blocks] + [(b.end_ns, -b.bytes) for b in blocks if b.end_ns is not None]
        steps = [(trace.begin_ns, 0), *sorted(steps), (trace.end_ns, 0)]
        times = np.array([(time - trace.begin_ns) / 1e6 for time, _ in steps])
        return plots.downsample(times, np.cumsum([size for _, size in steps]) / 2**20)

    figure = go.Figure()
    tops = [0.0]
    for name, role, blocks in (("segments", "ideal", trace.segments), ("blocks", "fixed", trace.blocks)):
        x, y = level(blocks)
        style = plots.STYLES[role]
        line = {"color": style.colour, "dash": style.dash, "shape": "hv", "width": 2}
        figure.add_scatter(x=x, y=y, name=name, mode="lines", line=line)
        tops.append(float(y.max()))
    lane = -0.06 * (max(tops) or 1.0)
    spans = busy([(w.start_ns, w.end_ns) for w in trace.work], most=500)
    xs = [value for a, b in spans for value in ((a - trace.begin_ns) / 1e6, (b - trace.begin_ns) / 1e6, None)]
    ys = [value for _ in spans for value in (lane, lane, None)]
    control = plots.COLOURS["control"]
    figure.add_scatter(x=xs, y=ys, name="kernels", mode="lines", line={"color": control, "width": 9})
    kernel_ms = sum(b - a for a, b in spans) / 1e6
    figure.update_layout(
        template="o1lab", showlegend=True, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        margin={"t": 150, "r": 40},
        title_text=f"{len(trace.blocks):,} blocks; new segments: {len(trace.segments):,};<br>"
        f"device busy {kernel_ms:,.1f} of {(trace.end_ns - trace.begin_ns) / 1e6:,.1f} ms",
    )  # fmt: skip
    figure.update_xaxes(
        title_text="time since the recording began (ms)", range=[0, (trace.end_ns - trace.begin_ns) / 1e6]
    )
    figure.update_yaxes(title_text="device memory (MiB)")
    return figure


def busy(spans: Iterable[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """Merge overlapping spans, then those with the smallest gaps between, until at most ``most`` are left.

    Examples
    --------
    >>> busy([(0, 2), (1, 3), (4, 5), (90, 99)], most=2)
    [(0, 5), (90, 99)]
    """
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    if len(merged) <= most:
        return merged
    gaps = sorted(b[0] - a[1] for a, b in zip(merged, merged[1:], strict=False))
    limit = gaps[len(merged) - most - 1]
    out = [merged[0]]
    for start, end in merged[1:]:
        near = start - out[-1][1] <= limit
        out[-1:] = [(out[-1][0], end)] if near else [out[-1], (start, end)]
    return out[:most]
