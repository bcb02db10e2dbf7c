"""Append and decode as operators that ``torch.compile`` takes into its graph unread.

``torch.ops.o1lab.append(pages, block_table, lengths, keys, values)`` writes each sequence's newest token, which
``lengths`` counts already: keys and values are (B, Hkv, 1, D). ``torch.ops.o1lab.decode(q, pages, block_table, lengths,
scale)`` is :func:`o1lab.attention.paged_decode` of q (B, Hq, D). Importing this module registers both.

Not for int8 pages: they share memory with their scales, and torch takes no mutation of inputs that alias in two types.
"""

from __future__ import annotations

import torch
from torch import Tensor

from o1lab.attention import launch
from o1lab.attention.dispatch import paged_decode
from o1lab.attention.pages import store
from o1lab.attention.splits import power_of_two


@torch.library.custom_op("o1lab::append", mutates_args=("pages",))
def append(pages: Tensor, block_table: Tensor, lengths: Tensor, keys: Tensor, values: Tensor) -> None:
    """One kernel on CUDA, plain indexing elsewhere."""
    tokens, kv_heads, head_dim = pages.shape[2:]
    if pages.stride(4) == 1 and not launch.missing(pages.device):
        from o1lab.attention import kernel

        keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in (keys, values))
        strides = (*pages.stride()[:4], block_table.stride(0), *keys.stride()[:2], *values.stride()[:2])
        kernel.append[(kv_heads, len(lengths))](
            pages, block_table, lengths, keys, values, *strides, T=tokens, D=head_dim, BLOCK_D=power_of_two(head_dim),
            num_warps=1,
        )  # fmt: skip
        return
    at = (lengths - 1).long()
    numbers = block_table.gather(1, torch.div(at, tokens, rounding_mode="floor")[:, None]).long()
    store(pages, None, numbers, at[:, None] % tokens, keys, values)


@torch.library.custom_op("o1lab::decode", mutates_args=())
def decode(q: Tensor, pages: Tensor, block_table: Tensor, lengths: Tensor, scale: float | None) -> Tensor:
    """As :func:`o1lab.attention.paged_decode`; what it allocates, it allocates by shape."""
    return paged_decode(q, pages, block_table, lengths, scale=scale)


@append.register_fake
def _(*given: Tensor) -> None:
    """Nothing is returned."""


@decode.register_fake
def _(q: Tensor, *rest: object) -> Tensor:
    return q.new_empty(q.shape)
