"""Products of a decode step: few rows (a token of each sequence) with large weights, and what surrounds them.

:func:`product` is one kernel on CUDA for root-mean-square norm, product, bias, SiLU gate and residual sum; elsewhere it
is the same in plain torch. :func:`rotate` turns queries and keys and writes keys and values into their pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from o1lab.attention import launch
from o1lab.attention.pages import store
from o1lab.attention.splits import SHARED_BYTES, multiprocessors, power_of_two, shared_bytes
from o1lab.errors import CacheError

MOST_ROWS = 64
"""Sequences that a kernel takes at once; the accumulators of more do not fit beside the pipeline."""
AHEAD_BYTES = 64 << 10
"""Weights that a program asks for before it waits: all programs' together must stay in the second-level cache."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """One shape of the kernel: weight rows and inner elements of a block, splits of the inner dimension."""

    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int

    def fits(self, inner: int) -> bool:
        """Whether every split has something to do."""
        return self.splits <= -(-inner // self.block_k)


def cuts(
    columns: int, inner: int, rows: int, gated: bool, itemsize: int, programs: int, *, norm: bool = False,
    shared: int = SHARED_BYTES,
) -> Cuts:  # fmt: skip
    """The shape for a product: the largest block of weight rows, and splits, that give ``programs`` work each.

    Untimed: chosen so that a program has 16 KiB of weights in a stage of its pipeline. With many rows the inputs are
    read again by every block of columns, so blocks are larger then and the inner dimension is split instead. With
    ``norm`` a block of inputs passes through registers in float32: a longer one than 256 spills. ``shared`` are the
    bytes of shared memory that a program may have.

    Examples
    --------
    >>> cuts(2048, 8192, 1, False, 2, 132)
    Cuts(block_n=16, block_k=512, splits=1, warps=4, stages=4)
    >>> cuts(2048, 8192, 32, False, 2, 132)
    Cuts(block_n=64, block_k=128, splits=4, warps=4, stages=4)
    >>> cuts(2048, 8192, 1, False, 2, 132, shared=99 << 10)
    Cuts(block_n=16, block_k=512, splits=1, warps=4, stages=3)
    """
    least = 16 if rows <= 16 else 64
    block_n = next((size for size in (64, 32, 16) if -(-columns // size) >= 0.9 * programs), least)
    block_n = max(block_n, least)
    block_k = 16384 // itemsize // block_n // (2 if gated else 1)
    stages = 6 if norm and block_k > 256 else 4
    block_k = max(32, min(block_k, 256 if norm else 512, power_of_two(inner)))
    element = itemsize * (block_n * (2 if gated else 1) + max(16, power_of_two(rows)) + norm)  # of a stage's BLOCK_K
    while stages * block_k * element > shared and (block_k > 32 or stages > 2):
        if stages > 3 or block_k == 32:
            stages -= 1
        else:
            block_k //= 2
    blocks = -(-columns // block_n)
    splits = max(1, min(round(programs / blocks), inner // (2 * block_k)))
    return Cuts(block_n, block_k, splits, 4, stages)


def cuts_on(
    device: torch.device, columns: int, inner: int, rows: int, gated: bool, itemsize: int, norm: bool
) -> Cuts:  # fmt: skip
    """:func:`cuts` for what a device has."""
    programs, shared = multiprocessors(device), shared_bytes(device)
    return cuts(columns, inner, rows, gated, itemsize, programs, norm=norm, shared=shared)


@dataclass(frozen=True)
class Scratch:
    """What the splits of one product leave for each other; one serves one stream at a time."""

    partials: Tensor
    squares: Tensor
    arrivals: Tensor

    @classmethod
    def make(cls, columns: int, rows: int, gated: bool, shape: Cuts, device: torch.device) -> Scratch:
        """Allocate; with one split nearly nothing."""
        blocks = -(-columns // shape.block_n)
        split = shape.splits > 1
        partials = torch.empty(shape.splits * (2 if gated else 1) * rows * columns if split else 1, device=device)
        squares = torch.empty(blocks * shape.splits * max(16, power_of_two(rows)) if split else 1, device=device)
        return cls(partials, squares, torch.zeros(blocks, dtype=torch.int32, device=device))


def product(
    x: Tensor, weight: Tensor, *, gain: Tensor | None = None, epsilon: float = 0.0, bias: Tensor | None = None,
    residual: Tensor | None = None, gated: bool = False, out: Tensor | None = None, shape: Cuts | None = None,
    scratch: Scratch | None = None, overlap: bool = False,
) -> Tensor:  # fmt: skip
    """``residual + act(norm(x) @ weight.T + bias)``, each part where it is asked for.

    Parameters
    ----------
    x : Tensor, shape (B, K)
        At most 64 rows for the kernel; float32 or bfloat16, as the weight.
    weight : Tensor, shape (N, K), contiguous; (2 N, K) if ``gated``
    gain : Tensor, shape (K,), optional
        Of a root-mean-square norm of x, with ``epsilon`` in it.
    gated : bool
        The first N columns through SiLU, times the second N.
    residual, out : Tensor, shape (B, N)
        Added at the end; written in place of a new tensor. They may be the same.
    shape, scratch : optional
        How the kernel is cut, and its buffers, in place of those by :func:`cuts`.
    overlap : bool
        Begin while the kernel before this one still runs (programmatic dependent launch), and wait for it before
        anything but the weight is read.

    Raises
    ------
    CacheError
        Shapes, types or devices that do not belong together.

    Examples
    --------
    >>> x, weight = torch.ones(1, 4), torch.ones(2, 4)
    >>> product(x, weight, residual=torch.ones(1, 2)).tolist()
    [[5.0, 5.0]]
    """
    columns = _check(x, weight, gain, bias, residual, gated, out)
    if launch.missing(x.device):
        answer = _plain(x, weight, gain, epsilon, bias, residual, gated)
        return answer if out is None else out.copy_(answer)
    if len(x) > MOST_ROWS or x.dtype not in (torch.float32, torch.bfloat16) or x.stride(1) != 1:
        raise CacheError(f"x is {tuple(x.shape)} {x.dtype} with strides {x.stride()}: the kernel takes at most "
                         f"{MOST_ROWS} contiguous rows of float32 or bfloat16")  # fmt: skip
    inner = x.shape[1]
    shape = shape or cuts_on(x.device, columns, inner, len(x), gated, weight.element_size(), gain is not None)
    if not shape.fits(inner):
        raise CacheError(f"{shape}: more splits than blocks of {inner} inner elements")
    scratch = scratch or Scratch.make(columns, len(x), gated, shape, x.device)
    target = x.new_empty(len(x), columns) if out is None else out
    if launch.interpreted():  # its casts to bf16 cut bits off in place of rounding
        out = torch.empty(target.shape)
    else:
        out = target
    run(*arguments(x, weight, gain, epsilon, bias, residual, gated, out, shape, scratch, overlap))
    return out if out is target else target.copy_(out)


def arguments(
    x: Tensor, weight: Tensor, gain: Tensor | None, epsilon: float, bias: Tensor | None, residual: Tensor | None,
    gated: bool, out: Tensor, shape: Cuts, scratch: Scratch, overlap: bool,
) -> tuple[tuple[int, int], list[Any], dict[str, Any]]:  # fmt: skip
    """Grid, positional arguments and options of one launch, for :func:`run`."""
    import triton.language as tl

    rows, inner = x.shape
    columns, line = out.shape[1], 128 // weight.element_size()
    share = math.ceil(math.ceil(inner / shape.block_k) / shape.splits) * shape.block_k
    lines = min(power_of_two(math.ceil(share / line)), max(1, AHEAD_BYTES // 128 // shape.block_n // (1 + gated)))
    dot = tl.bfloat16 if x.dtype == torch.bfloat16 and not launch.interpreted() else tl.float32
    options: dict[str, Any] = {
        "N": columns, "K": inner, "NORM": gain is not None, "GATED": gated, "ADD": residual is not None,
        "BIAS": bias is not None, "SPLITS": shape.splits, "BLOCK_B": max(16, power_of_two(rows)),
        "BLOCK_N": shape.block_n, "BLOCK_K": shape.block_k, "DOT": dot, "LINE": line,
        "LINES": lines, "OVERLAP": overlap, "num_warps": shape.warps,
        "num_stages": shape.stages, **launch.early(overlap),
    }  # fmt: skip
    blank = x  # stands where an option is off and nothing is read
    given = [
        x, weight, blank if gain is None else gain, blank if bias is None else bias,
        blank if residual is None else residual, out, scratch.partials, scratch.squares, scratch.arrivals, epsilon,
        rows, x.stride(0),
    ]  # fmt: skip
    return (-(-columns // shape.block_n), shape.splits), given, options


def run(grid: tuple[int, int], given: list[Any], options: dict[str, Any]) -> Any:
    """Launch the product; returns the compiled kernel (None if interpreted). CacheError if it does not compile."""
    from triton.errors import TritonError

    from o1lab.kv import product_kernel

    try:
        with launch.on(given[0].device):
            return product_kernel.product[grid](*given, **options)
    except TritonError as error:  # out of shared memory or registers, say
        raise CacheError(f"the kernel does not run with {options}: {error}") from error


def rotate(
    qkv: Tensor, cosines: Tensor, sines: Tensor, pages: Tensor, block_table: Tensor, lengths: Tensor, heads: int,
    *, out: Tensor | None = None, overlap: bool = False,
) -> Tensor:  # fmt: skip
    """Rotate the newest token's queries and keys, and write its keys and values into their pages.

    Parameters
    ----------
    qkv : Tensor, shape (B, (Hq + 2 Hkv) · D), contiguous
    cosines, sines : Tensor, shape (positions, D)
        Of the rotary embedding, by position.
    pages : Tensor, shape (P, 2, T, Hkv, D)
    block_table, lengths : Tensor, int32, shapes (B, max_pages) and (B,)
        ``lengths`` counts the token already; its position is ``lengths − 1``.
    heads : int
        Hq.

    Returns
    -------
    Tensor, shape (B, Hq, D)
        The rotated queries.
    """
    tokens, kv_heads, width = pages.shape[2:]
    if qkv.shape != (len(lengths), (heads + 2 * kv_heads) * width) or not qkv.is_contiguous():
        raise CacheError(f"qkv is {tuple(qkv.shape)} with strides {qkv.stride()}; it must be contiguous and "
                         f"({len(lengths)}, ({heads} + 2 · {kv_heads}) · {width})")  # fmt: skip
    if cosines.shape != sines.shape or cosines.shape[1:] != (width,):
        raise CacheError(f"cosines are {tuple(cosines.shape)}, sines {tuple(sines.shape)}: need (positions, {width})")
    queries = qkv.new_empty(len(qkv), heads, width) if out is None else out
    if launch.missing(qkv.device):
        at = (lengths - 1).long()
        parts = qkv.view(len(qkv), -1, width)
        turned, values = parts[:, : heads + kv_heads], parts[:, heads + kv_heads :]
        left, right = turned.chunk(2, -1)
        turned = turned * cosines[at][:, None] + torch.cat([-right, left], -1) * sines[at][:, None]
        numbers = block_table.gather(1, torch.div(at, tokens, rounding_mode="floor")[:, None]).long()
        store(pages, None, numbers, at[:, None] % tokens, turned[:, heads:, None], values[:, :, None])
        return queries.copy_(turned[:, :heads])
    from o1lab.kv import product_kernel

    with launch.on(qkv.device):
        product_kernel.rotate[(heads + 2 * kv_heads, len(qkv))](
            qkv, cosines, sines, pages, block_table, lengths, queries, *pages.stride()[:4], block_table.stride(0),
            Q=heads, KV=kv_heads, T=tokens, D=width, HALF_2=power_of_two(width // 2), OVERLAP=overlap, num_warps=1,
            **launch.early(overlap),
        )  # fmt: skip
    return queries


def _check(
    x: Tensor, weight: Tensor, gain: Tensor | None, bias: Tensor | None, residual: Tensor | None, gated: bool,
    out: Tensor | None,
) -> int:  # fmt: skip
    """N; raises CacheError where something does not fit."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or not weight.is_contiguous():
        raise CacheError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} (strides {weight.stride()}) have no "
                         "product: they must be (B, K) and a contiguous (N, K)")  # fmt: skip
    columns, odd = divmod(len(weight), 2 if gated else 1)
    if odd or not len(x):
        raise CacheError(f"weight {tuple(weight.shape)}, x {tuple(x.shape)}: a gated weight has two halves, x has rows")
    wanted = {"gain": (gain, (x.shape[1],)), "bias": (bias, (len(weight),))}
    wanted |= {"residual": (residual, (len(x), columns)), "out": (out, (len(x), columns))}
    for name, (tensor, shape) in {"weight": (weight, tuple(weight.shape)), **wanted}.items():
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype != x.dtype or tensor.device != x.device or not tensor.is_contiguous():
            raise CacheError(f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; it must be {shape} "
                             f"{x.dtype} on {x.device}, and contiguous")  # fmt: skip
    return columns


def _plain(
    x: Tensor, weight: Tensor, gain: Tensor | None, epsilon: float, bias: Tensor | None, residual: Tensor | None,
    gated: bool,
) -> Tensor:  # fmt: skip
    if gain is not None:
        exact = x.float()
        x = gain * (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)
    y = functional.linear(x, weight, bias)
    if gated:
        gate, up = y.chunk(2, -1)
        y = functional.silu(gate) * up
    return y if residual is None else residual + y
