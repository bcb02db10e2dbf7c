"""Prefill over pages with FlexAttention: the block mask is the page table, nothing is gathered.

The pool is seen as one long sequence of rows, ``(2 P T, Hkv, D)``. K of page p starts at row ``2 p T``, V one page
later, so both are views of the pool. The mask lists blocks ``2 p`` of T rows; a map for each sequence leads from a
block back to its place in the sequence, for the causal mask and the bias.

Two devices want opposite masks: on a CPU, Inductor's code for a mask without full blocks does not compile (torch
2.13), with none of them it does; on CUDA, flex-decoding shares work evenly only if there is no list of full blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from o1lab.attention.bias import PositionBias
from o1lab.attention.checks import AttentionError, Problem
from o1lab.attention.reference import positions

if TYPE_CHECKING:
    from torch import Tensor

QUERY_BLOCK = 128
SHAPES = 64
"""Most shapes that FlexAttention is compiled for in a process."""


def unsupported(sizes: Problem, pages: Tensor) -> str:
    """Why FlexAttention does not take these pages, or an empty string."""
    import torch

    tokens = sizes.page_tokens
    if pages.dtype == torch.int8:
        return "pages are int8; FlexAttention takes floating point"
    if tokens < 16 or tokens & (tokens - 1):
        return f"pages of {tokens} tokens; a block of FlexAttention is a power of two from 16"
    if not pages.is_contiguous():
        return f"the pool must be contiguous to be seen as rows; its strides are {pages.stride()}"
    return ""


@cache
def compiled() -> Any:
    """``torch.compile`` of FlexAttention; the first call of a new kind compiles (25 s on a slow CPU)."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def clean_tails(pages: Tensor, block_table: Tensor, lengths: Tensor) -> None:
    """Zero what is not finite behind the last token of each sequence's last page, in place, without a host sync.

    FlexAttention multiplies such a slot by a weight of zero, and 0 · NaN is NaN: fresh memory may hold any bits.
    """
    import torch

    count, _, tokens, _, _ = pages.shape
    some = (lengths > 0).to(torch.int32).argmax()  # an empty sequence repeats the work of one that is not
    row = torch.where(lengths > 0, torch.arange(len(lengths), device=lengths.device), some)
    length = lengths.long()[row]
    last = torch.div(length - 1, tokens, rounding_mode="floor").clamp_min(0)
    number = block_table[row, last].long().clamp(0, count - 1)
    behind = torch.arange(tokens, device=lengths.device)[None, :] >= (length - last * tokens)[:, None]
    found = pages[number]
    found.masked_fill_(behind[:, None, :, None, None] & ~found.isfinite(), 0)
    pages[number] = found


def block_mask(block_table: Tensor, lengths: Tensor, sizes: Problem) -> tuple[Any, Tensor]:
    """Mask over the pool's rows, and the map from a block of rows to its page in the sequence (−1: not of it)."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    tokens, device = sizes.page_tokens, block_table.device
    place = torch.arange(sizes.max_pages, device=device)
    needed = torch.div(lengths + tokens - 1, tokens, rounding_mode="floor")
    used = place[None, :] < needed[:, None]
    blocks = torch.where(used, 2 * block_table, 2 * sizes.pages)
    logical = torch.full((sizes.batch, 2 * sizes.pages + 1), -1, dtype=torch.int32, device=device)
    logical.scatter_(1, blocks.long(), place.to(torch.int32).expand(sizes.batch, -1))

    def seen(b: Tensor, _h: Tensor, i: Tensor, row: Tensor) -> Tensor:
        page = logical[b, row // tokens]
        at = page * tokens + row % tokens
        return (page >= 0) & (at <= lengths[b] - sizes.queries + i)

    rows = -(-sizes.queries // QUERY_BLOCK)
    last = positions(lengths, sizes.queries)[:, [min((n + 1) * QUERY_BLOCK, sizes.queries) - 1 for n in range(rows)]]
    counts = torch.div(last.clamp_min(-1) + tokens, tokens, rounding_mode="floor").to(torch.int32)[:, None]
    indices = torch.where(used, 2 * block_table, 0)[:, None, None].expand(-1, 1, rows, -1).contiguous()
    full: tuple[Tensor | None, Tensor | None] = (None, None)
    if device.type == "cpu":
        indices = torch.nn.functional.pad(indices, (0, max(0, 2 * sizes.pages - 1 - sizes.max_pages)))
        full = (torch.zeros_like(counts), torch.zeros_like(indices))
    options: dict[str, Any] = {}
    if "compute_q_blocks" in inspect.signature(BlockMask.from_kv_blocks).parameters:
        options["compute_q_blocks"] = False  # the transposed lists are for the backward pass, and need host-known sizes
    mask = BlockMask.from_kv_blocks(
        counts, indices, *full, BLOCK_SIZE=(QUERY_BLOCK, tokens), mask_mod=seen,
        seq_lengths=(sizes.queries, (2 * sizes.pages - 1) * tokens), **options,
    )  # fmt: skip
    return mask, logical


def prefill(
    q: Tensor, pages: Tensor, block_table: Tensor, lengths: Tensor, sizes: Problem, scale: float,
    bias: Tensor | PositionBias | None = None, *, compile: bool = True,
) -> Tensor:  # fmt: skip
    """(B, Hq, S, D) → (B, Hq, S, D). Uncompiled it is exact and slow, and it reads the whole pool."""
    clean_tails(pages, block_table, lengths)
    mask, logical = block_mask(block_table, lengths, sizes)
    return masked(q, pages, lengths, sizes, scale, bias, mask, logical, compile=compile)


def masked(
    q: Tensor, pages: Tensor, lengths: Tensor, sizes: Problem, scale: float, bias: Tensor | PositionBias | None,
    mask: Any, logical: Tensor, *, compile: bool = True,
) -> Tensor:  # fmt: skip
    """The attention itself, for a mask that :func:`block_mask` made: one may serve all layers of a step."""
    from torch.nn.attention.flex_attention import flex_attention

    tokens, queries = sizes.page_tokens, sizes.queries
    flat = pages.view(2 * sizes.pages * tokens, sizes.kv_heads, sizes.head_dim)
    keys, values = (flat[first : first + (2 * sizes.pages - 1) * tokens] for first in (0, tokens))
    keys, values = (part.transpose(0, 1)[None] for part in (keys, values))

    def added(score: Tensor, b: Tensor, _h: Tensor, i: Tensor, row: Tensor) -> Tensor:
        at = (logical[b, row // tokens] * tokens + row % tokens).clamp_min(0)
        if isinstance(bias, PositionBias):
            distance = (lengths[b] - queries + i - at + 1).clamp_min(1)
            return score - bias.alpha * distance.float().log() * bias.weights[b, at]
        return score + bias[b, at]

    attention = compiled() if compile else flex_attention
    options = {"BLOCK_N": min(tokens, 64)} if q.device.type == "cuda" else None
    with _room_for_shapes():
        return attention(
            q, keys, values, score_mod=None if bias is None else added, block_mask=mask, scale=scale,
            enable_gqa=sizes.group > 1, kernel_options=options,
        )  # fmt: skip


@contextmanager
def _room_for_shapes() -> Iterator[None]:
    """Room for more shapes than Dynamo's default, and an error past it.

    Past the limit Dynamo runs the function as it is: FlexAttention then reads the whole pool, and any NaN in it.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    changes = {"recompile_limit": max(SHAPES, config.recompile_limit), "fail_on_recompile_limit_hit": True}
    try:
        with config.patch(changes):
            yield
    except FailOnRecompileLimitHit as error:
        raise AttentionError(
            f"FlexAttention has been compiled for {changes['recompile_limit']} shapes in this process: pad queries to "
            'fewer lengths, or take body="gather"'
        ) from error
