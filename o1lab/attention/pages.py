"""Pages to contiguous tensors and back: gathering, and int8 with scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

from o1lab.attention.checks import AttentionError, Problem

if TYPE_CHECKING:
    from torch import Tensor


def quantise(pages: Tensor, per: str = "token") -> tuple[Tensor, Tensor]:
    """Round pages to int8 with symmetric scales, ``x ≈ int8 · scale``, ``|error| ≤ scale / 2``.

    Parameters
    ----------
    pages : Tensor, shape (P, 2, T, Hkv, D), floating point
    per : {"token", "page"}
        One scale for each (page, K or V, token, head), shape (P, 2, T, Hkv), 4 B per D bytes; or one for each (page,
        K or V, head), shape (P, 2, 1, Hkv): less to read, but a page must be complete before it is rounded.

    Returns
    -------
    int8 pages and fp32 scales, as :func:`o1lab.attention.paged_decode` takes them.

    Examples
    --------
    >>> import torch
    >>> whole, scales = quantise(torch.ones(1, 2, 4, 1, 8), per="page")
    >>> int(whole.max()), tuple(scales.shape)
    (127, (1, 2, 1, 1))
    """
    import torch

    if per not in ("token", "page"):
        raise AttentionError(f"per={per!r} is no granularity; use 'token' or 'page'")
    wide = pages.float()
    largest = wide.abs().amax(-1) if per == "token" else wide.abs().amax((-1, 2)).unsqueeze(2)
    scales = (largest / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scales.unsqueeze(-1)).round_().clamp_(-127, 127).to(torch.int8), scales


def dequantised(part: Tensor, scales: Tensor | None, dtype: object) -> Tensor:
    """Pages or part of them (…, T, Hkv, D) in ``dtype``; ``scales`` (…, T or 1, Hkv) if they are int8."""
    if scales is None:
        return part.to(dtype)
    return (part.float() * scales.float().unsqueeze(-1)).to(dtype)


def store(
    pages: Tensor, scales: Tensor | None, numbers: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> None:  # fmt: skip
    """Write (B, Hkv, S, D) keys and values to the pages and slots (B, S) of their tokens; int8 pages get scales too."""
    import torch

    new = torch.stack((keys, values), 1).transpose(2, 3)  # (B, 2, S, Hkv, D), as pages are
    if scales is not None:
        new, rounded = quantise(new)
        for side in (0, 1):
            scales.select(1, side)[numbers, slots] = rounded[:, side]
    for side in (0, 1):
        pages.select(1, side)[numbers, slots] = new[:, side]


def gather(
    pages: Tensor, numbers: Tensor, sizes: Problem, dtype: object, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Copy the pages named by ``numbers`` (…, n) into K and V of shape (…, n · T, Hkv, D), in ``dtype``.

    A number that no page has is taken as the nearest one: such entries belong to tokens that a caller must mask.
    """
    flat = numbers.reshape(-1).long().clamp(0, sizes.pages - 1)
    shape = (*numbers.shape[:-1], numbers.shape[-1] * sizes.page_tokens, sizes.kv_heads, sizes.head_dim)
    out = []
    for side in (0, 1):
        part = pages.select(1, side).index_select(0, flat)
        scale = None if scales is None else scales.select(1, side).index_select(0, flat)
        out.append(dequantised(part, scale, dtype).reshape(shape))
    return out[0], out[1]
