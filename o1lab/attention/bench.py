"""``python -m o1lab.attention.bench``: how near each body comes to the device's own copy rate, and how exact it is.

Rates count keys and values once, whatever a body really moves, and are held against a copy measured in the same run. On
CUDA every body is replayed from a CUDA graph where it can be captured, so that no launch from Python is timed. Errors
are against float64, as a ratio to SDPA's in the same type. Without CUDA a small table of the CPU bodies is shown.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from o1lab.attention import counted
from o1lab.attention.checks import AttentionError
from o1lab.attention.resources import Multiprocessor, Resources, resources
from o1lab.attention.rivals import Case, Step, kernel_step, rivals, sdpa
from o1lab.attention.splits import Blocks, choose, multiprocessors
from o1lab.attention.traffic import Workload
from o1lab.ceilings import event_clock, rates, wall_clock
from o1lab.options import ended, new_file, seconds, whole
from o1lab.stats import Estimate, mebibytes, readable

TARGET_SHAPES, CPU_SHAPES = "8x16384,64x2048,1x131072", "2x2048"
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Row:
    """One body on one workload: ``rate`` in B/s of keys and values, ``error`` against SDPA's (1 is equal)."""

    name: str
    rate: Estimate | None
    copy: Estimate
    error: float | None = None
    note: str = ""

    def line(self, work: Workload) -> str:
        """The row of the table."""
        if self.rate is None:
            return f"{self.name:<32}{'':>44}  {self.note}"
        span = f"[{readable(self.rate.low / 1e9)}, {readable(self.rate.high / 1e9)}]"
        error = "" if self.error is None else f"{self.error:.2f}"
        return (
            f"{self.name:<32}{work.kv_bytes / self.rate.value * 1e6:>11,.1f}{readable(self.rate.value / 1e9):>9}"
            f"{span:>16}{self.rate.value / self.copy.value:>8.1%}{error:>8}  {self.note}"
        )


def copy_rate(device: Any, size: int, budget_s: float) -> Estimate:
    """Bytes read and written per second by ``Tensor.copy_`` between two buffers of ``size`` bytes."""
    import torch

    source = torch.empty(size // 4, device=device).normal_()
    target = torch.empty_like(source)
    clock = event_clock(device) if device.type == "cuda" else wall_clock
    return rates(lambda: target.copy_(source), 2.0 * size, "B/s", clock, 31, budget_s)


def rate(step: Step, work: Workload, device: Any, budget_s: float) -> tuple[Estimate, str]:
    """Rate of a step in B/s of keys and values, from a captured graph of several steps on CUDA; and a remark."""
    import torch

    if device.type != "cuda":
        return rates(step, work.kv_bytes, "B/s", wall_clock, 31, budget_s), ""
    step()  # compiles
    torch.cuda.synchronize()
    several, graph = 10, torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(several):
                step()
    except RuntimeError as error:
        torch.cuda.synchronize()
        note = f"launched from Python: {str(error).splitlines()[0][:60]}"
        return rates(step, work.kv_bytes, "B/s", event_clock(device), 31, budget_s), note
    return rates(graph.replay, several * work.kv_bytes, "B/s", event_clock(device), 31, budget_s), ""


def rms(value: Any, exact: Any) -> float:
    """Root mean square of the difference."""
    return float((value.double() - exact).pow(2).mean().sqrt())


def table(case: Case, device: Any, budget_s: float) -> list[Row]:
    """Measure every rival on one case."""
    copied = copy_rate(device, min(case.work.kv_bytes, 2**31 - 2**20), budget_s)
    steps, exact = rivals(case), {bias: case.exact(bias) for bias in (False, True)}
    base = {bias: rms(sdpa(case, bias=bias)(), exact[bias]) for bias in (False, True)}
    rows = []
    for name, step in steps.items():
        try:
            error = rms(step(), exact["bias" in name]) / base["bias" in name]
            found, note = rate(step, case.work, device, budget_s)
        except (RuntimeError, AttentionError) as problem:  # torch's own refusals are RuntimeErrors
            rows.append(Row(name, None, copied, note=f"not run: {str(problem).splitlines()[0][:90]}"))
            continue
        rows.append(Row(name, found, copied, error, note))
    return rows


def shown(rows: Sequence[Row], work: Workload, what: str, dtype: str, page_tokens: int = 64) -> str:
    """The rows as a table with its heading."""
    head = (
        f"{what}, {work.q_heads}/{work.kv_heads} heads of {work.head_dim}, {dtype}, pages of "
        f"{page_tokens}: {mebibytes(work.kv_bytes)} MiB of keys and values; "
        f"copy {readable(rows[0].copy.value / 1e9)} GB/s\n"
        f"{'body':<32}{'µs':>11}{'GB/s':>9}{'95 %':>16}{'of copy':>8}{'error':>8}"
    )
    return "\n".join([head, *(row.line(work) for row in rows)])


def compiled(case: Case) -> tuple[Resources, Multiprocessor, int]:
    """What the compiled kernel takes, what a multiprocessor of the case's device has, and the splits. Needs CUDA."""
    from o1lab.attention import launch
    from o1lab.attention.dispatch import workspace

    work, out = workspace(case.q, case.pages, case.table), case.q.clone()
    ran = launch.decode(*case.given, case.sizes, 1.0, None, None, out, work)
    return resources(ran), Multiprocessor.of(case.q.device), work.splits


def footprint(case: Case) -> str:
    """Registers, spills, shared memory and warps of the compiled kernel, and the article's rule of two warps."""
    found, sm, splits = compiled(case)
    warps = found.warps_per_sm(sm)
    return (
        f"kernel: {splits} splits, {found.registers} registers and {found.spilled_bytes} spilled bytes a thread, "
        f"{found.shared_bytes:,} B shared memory, {found.warps} warps a program, {warps} warps a multiprocessor "
        f"({'two or more fit' if warps >= 2 else 'FEWER THAN TWO FIT'})"
    )


def tune(case: Case, device: Any, seconds: float) -> list[tuple[float, str]]:
    """Try block sizes, warps, stages, splits and both merges for ``seconds``; best first, rate in B/s."""
    found, until, size = [], time.perf_counter() + seconds, case.pages.element_size()
    for block_n in (64, 32, 128):
        for warps in (4, 2, 8):
            for stages in (3, 4, 2, 5):
                shape = Blocks(block_n, warps, stages)
                base = choose(case.sizes, size, case.q.element_size(), multiprocessors(device), shape)
                for number in sorted({base, 2 * base, max(1, base // 2)}):
                    for fused in (False, True)[: 1 + (number > 1)]:
                        if time.perf_counter() > until:
                            return sorted(found, reverse=True)
                        name = f"{shape} splits={number} {'merged within' if fused else 'two launches'}"
                        try:
                            step = kernel_step(case, number=number, shape=shape, fused=fused)
                            found.append((rate(step, case.work, device, 0.1)[0].value, name))
                        except RuntimeError as problem:  # out of shared memory or registers
                            print(f"{name}: {str(problem).splitlines()[0][:80]}", file=sys.stderr)
    return sorted(found, reverse=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(prog="python -m o1lab.attention.bench", description=__doc__.partition("\n")[0])
    out.add_argument("--shapes", help=f"sequences x tokens; {TARGET_SHAPES} on CUDA, else {CPU_SHAPES}")
    for name, value in (("q-heads", 32), ("kv-heads", 8), ("head-dim", 128), ("page-tokens", 64)):
        out.add_argument(f"--{name}", type=whole(1), default=value)
    out.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    out.add_argument("--budget", type=seconds, default=0.5, help="seconds for each timed row")
    out.add_argument("--tune", type=seconds, metavar="SECONDS", help="try other cuts of the kernel (CUDA)")
    out.add_argument("--ncu", action="store_true", help="count bytes with Nsight Compute too (CUDA)")
    out.add_argument("--json", type=new_file, metavar="FILE", help="write the rows there")
    out.add_argument("--once", metavar="NAME", help=argparse.SUPPRESS)  # what --ncu runs in the profiled process
    return out


@ended
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 0 unless the arguments fit nothing."""
    import torch

    asked = (line := parser()).parse_args(arguments)
    cuda, dtype = torch.cuda.is_available(), getattr(torch, asked.dtype)
    if asked.q_heads % asked.kv_heads:
        line.error(f"--q-heads {asked.q_heads} is no multiple of --kv-heads {asked.kv_heads}: they cannot share them")
    for name in ("tune", "ncu", "once"):
        if getattr(asked, name) and not cuda:
            line.error(f"--{name} needs a CUDA device, and there is none here")
    shapes = (asked.shapes or (TARGET_SHAPES if cuda else CPU_SHAPES)).split(",")
    works = [_workload(text, asked, dtype.itemsize) for text in shapes]
    device = torch.device("cuda" if cuda else "cpu", torch.cuda.current_device() if cuda else None)
    if not cuda:
        print("No CUDA device: the kernel and its targets cannot be measured here. CPU bodies on a small workload:\n")
    records = []
    for text, work in zip(shapes, works, strict=True):
        with torch.inference_mode():
            try:
                case = Case.make(work, dtype, device, asked.page_tokens)
            except RuntimeError as error:  # memory is out
                raise AttentionError(f"{text} cannot be made on {device}: {str(error).splitlines()[0]}") from error
            if asked.once:
                counted.run_once(rivals(case)[asked.once])
                return 0
            records += _report(case, text, asked, device)
        del case
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(records, file, indent=1)
    return 0


def _workload(text: str, asked: argparse.Namespace, element_bytes: int) -> Workload:
    try:
        batch, tokens = (int(part) for part in text.split("x"))
    except ValueError:
        raise AttentionError(f"{text!r} is no workload: write sequences x tokens, such as 8x16384") from None
    if batch < 1 or tokens < 1 or tokens % asked.page_tokens:
        raise AttentionError(f"{text}: at least 1 sequence, and tokens a multiple of the {asked.page_tokens} in a page")
    return Workload(batch, tokens, 1, asked.q_heads, asked.kv_heads, asked.head_dim, element_bytes)


def _report(case: Case, text: str, asked: argparse.Namespace, device: Any) -> list[dict[str, Any]]:
    work = case.work
    rows = table(case, device, asked.budget)
    print(shown(rows, work, f"{text} tokens", asked.dtype, asked.page_tokens))
    print(
        f"bytes by arithmetic, MiB: one pass over pages {mebibytes(work.fused())}, gather + SDPA "
        f"{mebibytes(work.gathered())}, three stages {mebibytes(work.three_stage())}"
    )
    if device.type == "cuda":
        print(footprint(case))
        for best, name in tune(case, device, asked.tune)[:10] if asked.tune else []:
            print(f"  {best / 1e9:8,.0f} GB/s  {best / rows[0].copy.value:6.1%}  {name}")
        if asked.ncu:
            print(counted.report(text, asked))
    print()
    return [{"shape": text, "dtype": asked.dtype, "name": row.name, **asdict(row)} for row in rows]


if __name__ == "__main__":
    sys.exit(main())
