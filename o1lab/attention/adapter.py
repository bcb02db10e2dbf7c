"""The article's FlashAttention adapter (§4.3): align lengths, reorder the cache, unpack int8, call a flash kernel.

Its three steps in front of the kernel write K and V once and read them twice more than a kernel that reads pages; that
is what the comparison in :mod:`o1lab.attention.traffic` is about. Where torch has a registry of implementations
(``activate_flash_attention_impl``, torch 2.11 and later), FA3 or FA4 can stand in for the built-in kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from o1lab.attention.checks import AttentionError, problem
from o1lab.attention.pages import gather

if TYPE_CHECKING:
    from torch import Tensor

MODULES = {"FA3": ("flash_attn_interface", 9), "FA4": ("flash_attn.cute", 9)}
"""Implementation → module that brings it, and the lowest compute capability (major)."""


def implementations() -> dict[str, str]:
    """Each implementation that torch knows, with the reason why it cannot be used here, or an empty string.

    Examples
    --------
    >>> all(isinstance(reason, str) for reason in implementations().values())
    True
    """
    import torch
    from torch.nn import attention

    if not hasattr(attention, "activate_flash_attention_impl"):
        return {}
    found = {}
    for name in attention.list_flash_attention_impls():
        module, capability = MODULES.get(name, ("", 0))
        found[name] = ""
        if module and not _installed(module):
            found[name] = f"the module {module} is not installed"
        elif not torch.cuda.is_available():
            found[name] = "torch finds no CUDA device"
        elif torch.cuda.get_device_capability()[0] < capability:
            found[name] = f"it needs compute capability {capability}.0"
    return found


def _installed(module: str) -> bool:
    parent = module.partition(".")[0]
    return find_spec(parent) is not None and find_spec(module) is not None


@contextmanager
def activated(name: str) -> Iterator[None]:
    """Use implementation ``name`` for flash attention inside the block, and what was used before after it.

    Raises
    ------
    AttentionError
        Unknown here, not installed, or no device for it; the message lists every implementation with its reason.
    """
    known = implementations()
    if known.get(name, "unknown"):
        listed = "; ".join(f"{key}: {reason or 'usable'}" for key, reason in known.items())
        listed = listed or "this torch has no registry of implementations"
        raise AttentionError(
            f"flash attention {name!r} cannot be used here ({listed}); paged_decode needs none of them"
        )
    from torch.nn import attention

    before = attention.current_flash_attention_impl()
    attention.activate_flash_attention_impl(name)
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()
        if before is not None:
            attention.activate_flash_attention_impl(before)


@dataclass(frozen=True)
class Packed:
    """Keys and values of all sequences one after the other: (tokens, Hkv, D) each, contiguous.

    ``offsets`` (B + 1,) int32 says where each sequence begins; ``longest`` is the longest one's length.
    """

    keys: Tensor
    values: Tensor
    offsets: Tensor
    longest: int


def packed(
    q: Tensor, pages: Tensor, block_table: Tensor, lengths: Tensor, *, scales: Tensor | None = None
) -> Packed:  # fmt: skip
    """The three steps: lengths to offsets, pages to packed rows, int8 to q's type. Waits for the device.

    Arguments as in :func:`o1lab.attention.paged_decode`.
    """
    import torch

    sizes = problem(q, pages, block_table, lengths, None, scales)
    keys, values = gather(pages, block_table, sizes, q.dtype, scales)
    live = torch.arange(sizes.capacity, device=q.device)[None, :] < lengths[:, None]
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return Packed(keys[live], values[live], offsets, int(lengths.max()) if len(lengths) else 0)


def flash_decode(
    q: Tensor, pages: Tensor, block_table: Tensor, lengths: Tensor, *, scale: float | None = None,
    scales: Tensor | None = None, implementation: str = "FA3",
) -> Tensor:  # fmt: skip
    """The article's adapter in front of a flash kernel: (B, Hq, D) → (B, Hq, D). No bias, and every length at least 1.

    The query heads of a KV head are passed as its queries, so that the kernel reads K and V once for all of them.

    Raises
    ------
    AttentionError
        ``implementation`` cannot be used here; the message says why.
    """
    import torch

    with activated(implementation):
        from torch.nn.attention.varlen import varlen_attn

        rows = packed(q, pages, block_table, lengths, scales=scales)
        batch, heads, head_dim = q.shape
        kv_heads = pages.shape[3]
        group = heads // kv_heads
        queries = q.reshape(batch, kv_heads, group, head_dim).transpose(1, 2).reshape(-1, kv_heads, head_dim)
        starts = torch.arange(0, (batch + 1) * group, group, dtype=torch.int32, device=q.device)
        if scale is not None:  # varlen_attn of torch 2.11 may know only the default scale
            queries = queries * (scale * head_dim**0.5)
        out = varlen_attn(queries, rows.keys, rows.values, starts, rows.offsets, group, rows.longest)
    return out.reshape(batch, group, kv_heads, head_dim).transpose(1, 2).reshape(q.shape)
