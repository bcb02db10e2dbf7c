"""Launch of the Triton kernels."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from o1lab.attention.checks import AttentionError, Problem
from o1lab.attention.splits import Blocks, Workspace, blocks, power_of_two, shared_bytes

if TYPE_CHECKING:
    from torch import Tensor


def missing(device: Any) -> str:
    """Why Triton kernels cannot run on ``device``, or an empty string."""
    from importlib.util import find_spec

    if find_spec("triton") is None:
        return "the package triton is not installed; CUDA wheels of torch bring it (Linux)"
    if device.type != "cuda" and not interpreted():
        return f"tensors are on {device}; the kernel needs a CUDA device (or TRITON_INTERPRET=1 at the start)"
    return ""


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors; it is chosen when triton is first imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def on(device: Any) -> AbstractContextManager[Any]:
    """Inside, ``device`` is the current one: Triton launches there, whatever its tensors are on."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def early(overlap: bool) -> dict[str, bool]:
    """The launch option of a kernel that begins while the one before it runs (programmatic dependent launch)."""
    return {"launch_pdl": True} if overlap else {}


def products(q: Tensor, scales: Tensor | None) -> dict[str, Any]:
    """Types and precision of the two products: q's type; for V, with int8 pages and half-precision queries, bf16.

    int8 values are exact in bf16, and fp16 would flush small weight × scale products; fp32 queries meet them in three
    TF32 products, since fp32 ones spill registers. The interpreter gets fp32: it multiplies the bit patterns of bf16.
    """
    import torch
    import triton.language as tl

    types = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    if interpreted():
        return {"DOT_K": tl.float32, "DOT_V": tl.float32, "PRECISION": "ieee"}
    if scales is None or q.dtype == torch.float32:
        return {"DOT_K": types[q.dtype], "DOT_V": types[q.dtype], "PRECISION": "ieee" if scales is None else "tf32x3"}
    return {"DOT_K": types[q.dtype], "DOT_V": tl.bfloat16, "PRECISION": "ieee"}


def arguments(
    q: Tensor, pages: Tensor, block_table: Tensor, lengths: Tensor, sizes: Problem, scale: float,
    bias: Tensor | None, scales: Tensor | None, out: Tensor, work: Workspace, shape: Blocks, fused: bool,
    overlap: bool = False,
) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Positional arguments, compile-time constants and launch options of the first kernel."""
    block_d, two = power_of_two(max(sizes.head_dim, 16)), power_of_two(work.splits)
    s_token = 0 if scales is None or scales.shape[2] == 1 else scales.stride(2)
    s_page, s_side, s_head = (0, 0, 0) if scales is None else (scales.stride(0), scales.stride(1), scales.stride(3))
    page, side, token, head, _ = pages.stride()
    positional = [
        q, pages, block_table, lengths, q if scales is None else scales, q if bias is None else bias, out,
        work.partials, work.stats, work.arrivals, scale * 1.4426950408889634,
        q.stride(0), q.stride(1), page, side, token, head, block_table.stride(0), 0 if bias is None else bias.stride(0),
        s_page, s_side, s_token, s_head,
    ]  # fmt: skip
    constants = dict(
        GROUP=sizes.group, BLOCK_M=max(16, power_of_two(sizes.group)), D=sizes.head_dim, BLOCK_D=block_d,
        T=sizes.page_tokens, BLOCK_N=shape.block_n, SPLITS=work.splits, SPLITS_2=two, CHUNK=min(32, two),
        HAS_BIAS=bias is not None, QUANTISED=scales is not None, FUSED=fused, OVERLAP=overlap, **products(q, scales),
    )  # fmt: skip
    return positional, constants, {"num_warps": shape.warps, "num_stages": shape.stages, **early(overlap)}


def decode(
    q: Tensor, pages: Tensor, block_table: Tensor, lengths: Tensor, sizes: Problem, scale: float,
    bias: Tensor | None, scales: Tensor | None, out: Tensor, work: Workspace, *, shape: Blocks | None = None,
    fused: bool = False, overlap: bool = False,
) -> Any:  # fmt: skip
    """Run the kernel and, with more than one split, the merge; returns the compiled first kernel (None if interpreted).

    ``fused`` lets the last program to finish a group of heads do the merge in place of a second launch; ``overlap``
    launches while the kernel before still runs, on compute capability 9.0 and newer.
    """
    reason = missing(q.device)
    if reason:
        raise AttentionError(f"body='triton' cannot run: {reason}")
    import torch

    from o1lab.attention import kernel

    shape = shape or blocks(pages.element_size(), q.element_size(), sizes.head_dim, shared_bytes(q.device))
    target = out
    if interpreted():  # its casts to bf16 cut bits off in place of rounding
        out = torch.full(target.shape, float("nan"))
    positional, constants, options = arguments(
        q, pages, block_table, lengths, sizes, scale, bias, scales, out, work, shape, fused, overlap
    )
    rows = sizes.batch * sizes.q_heads
    with on(q.device):
        compiled = kernel.decode[(sizes.kv_heads, work.splits, sizes.batch)](*positional, **constants, **options)
        if work.splits > 1 and not fused:
            wanted = {name: constants[name] for name in ("D", "BLOCK_D", "SPLITS", "SPLITS_2", "CHUNK", "OVERLAP")}
            kernel.merge[(rows,)](work.stats, work.partials, out, **wanted, num_warps=4, **early(overlap))
    if out is not target:
        target.copy_(out)
    return compiled
