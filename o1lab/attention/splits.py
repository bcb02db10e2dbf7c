"""How the kernel is cut: block sizes by type and head dimension, splits by shape, and the buffers that splits need.

Nothing here looks at lengths, so the same shapes always give the same launch: it can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from o1lab.attention.checks import AttentionError, Problem

if TYPE_CHECKING:
    from torch import Tensor

FEWEST_BLOCKS = 4
"""A split walks at least so many blocks when full: below, filling and draining its pipeline is most of the time."""
MOST_GROUP, MOST_HEAD_DIM = 64, 256


@dataclass(frozen=True, slots=True)
class Blocks:
    """One shape of the kernel: tokens a block, warps a program, stages of the software pipeline."""

    block_n: int
    warps: int
    stages: int


SHARED_BYTES = 227 << 10
"""Shared memory that a program may have at compute capability 9.0; at 8.6 and 8.9 it is 99 KiB."""


def blocks(page_bytes: int, query_bytes: int, head_dim: int, shared: int = SHARED_BYTES) -> Blocks:
    """Block sizes for the element sizes of pages and queries and a head dimension: by bytes in flight, not by tokens.

    A block of K and one of V are 16 KiB each for 2-byte pages (64 tokens of 128). fp32, whose products need registers,
    gets as many bytes in fewer tokens; int8, whose conversion does, fewer bytes and more stages. Compiled for compute
    capability 9.0 with up to 16 query heads per KV head none of these spills, save fp32 on int8 at heads of 256 (72 B).
    Where a program may have less ``shared`` memory the pipeline has a stage less.
    """
    block_d = power_of_two(max(head_dim, 16))
    if page_bytes == 1:
        return Blocks(max(16, (2048 if query_bytes == 4 else 4096) // block_d), 4, 5)
    if query_bytes == 4:
        return Blocks(max(16, 4096 // block_d), 8, 3)
    return Blocks(max(16, 8192 // block_d), 4, 4 if shared >= 106 << 10 else 3)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def unsupported(sizes: Problem, q: Tensor, pages: Tensor) -> str:
    """Why the Triton kernel does not take these sizes and types, or an empty string."""
    import torch

    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"q is {q.dtype}; the kernel takes float32, bfloat16 and float16"
    if sizes.head_dim % 8 or not 8 <= sizes.head_dim <= MOST_HEAD_DIM:
        return f"head dimension {sizes.head_dim} is not a multiple of 8 up to {MOST_HEAD_DIM}"
    if sizes.group > MOST_GROUP:
        return f"{sizes.group} query heads on one KV head; the kernel packs {MOST_GROUP}"
    if sizes.batch > 65535:
        return f"{sizes.batch} sequences; a grid holds 65535"
    if pages.stride(4) != 1 or q.stride(-1) != 1:
        return f"the numbers of a head must be contiguous; strides are q {q.stride()}, pages {pages.stride()}"
    return ""


def choose(
    sizes: Problem, page_bytes: int, query_bytes: int, multiprocessors: int, shape: Blocks | None = None
) -> int:  # fmt: skip
    """Splits per sequence: the fewest whose programs fill whole waves of multiprocessors to 95 % of the best filling.

    One program with a deep pipeline keeps a multiprocessor's share of the memory busy: on one H200, bf16, that was
    faster than two or more with shallow ones (102.6, 101.2, 102.4 % of the copy rate at 8 × 16k, 64 × 2k, 1 × 128k,
    against 99.9, 94.5, 97.7 %; tried with ``python -m o1lab.attention.bench --tune``).

    From the table's capacity, not from the lengths, which only the device knows. Each sequence is cut evenly by its own
    length in the kernel, so no split idles unless the sequence has fewer blocks than splits.

    Examples
    --------
    >>> choose(Problem(8, 1, 32, 8, 128, 64, 4096, 256), 2, 2, 132)   # 8 sequences of 16k tokens on an H200
    2
    >>> choose(Problem(1, 1, 32, 8, 128, 64, 4096, 2048), 2, 2, 132)  # one of 128k
    16
    """
    shape = shape or blocks(page_bytes, query_bytes, sizes.head_dim)
    programs = max(1, sizes.batch * sizes.kv_heads)
    most = min(sizes.capacity // (FEWEST_BLOCKS * shape.block_n), math.ceil(8 * multiprocessors / programs))

    def filling(splits: int) -> float:
        waves = programs * splits / multiprocessors
        return waves / math.ceil(waves)

    candidates = range(1, max(1, most) + 1)
    enough = 0.95 * max(map(filling, candidates))
    return next(splits for splits in candidates if filling(splits) >= enough)


@cache
def multiprocessors(device: object) -> int:
    """Multiprocessors of a CUDA device; 4 for a CPU, where Triton's interpreter has none, so that there are splits."""
    import torch

    if torch.device(device).type == "cpu":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_bytes(device: object) -> int:
    """Shared memory that a program may have on a device; for a CPU, that of compute capability 9.0."""
    import torch

    if torch.device(device).type == "cpu":
        return SHARED_BYTES
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 99 << 10)


@dataclass(frozen=True)
class Workspace:
    """Buffers between the two stages, (rows, splits, D) and (rows, splits) fp32, and counters.

    A call makes its own unless one is passed; pass one to keep addresses fixed or to allocate nothing per step. One
    serves one stream at a time.
    """

    splits: int
    partials: Tensor
    stats: Tensor
    arrivals: Tensor

    @classmethod
    def make(cls, sizes: Problem, splits: int, device: object) -> Workspace:
        """Allocate for ``sizes`` and ``splits``; with one split nothing is needed and nearly nothing is taken."""
        import torch

        if isinstance(splits, bool) or not isinstance(splits, int) or not 1 <= splits <= 65535:
            raise AttentionError(f"splits={splits!r} must be a whole number from 1 to 65535")
        rows = sizes.batch * sizes.q_heads if splits > 1 else 0
        partials = torch.empty((rows, splits, sizes.head_dim), dtype=torch.float32, device=device)
        stats = torch.empty((rows, splits), dtype=torch.float32, device=device)
        groups = sizes.batch * sizes.kv_heads if splits > 1 else 0
        return cls(splits, partials, stats, torch.zeros(groups, dtype=torch.int32, device=device))

    def check(self, sizes: Problem, device: object) -> None:
        """Raise AttentionError unless the buffers are those of ``sizes`` on ``device``."""
        rows = sizes.batch * sizes.q_heads if self.splits > 1 else 0
        if self.partials.shape != (rows, self.splits, sizes.head_dim) or self.partials.device != device:
            raise AttentionError(
                f"the workspace holds {tuple(self.partials.shape)} on {self.partials.device}; this call needs "
                f"({rows}, {self.splits}, {sizes.head_dim}) on {device}: make one with workspace(q, pages, block_table)"
            )
