"""What a paged call must look like. Shapes and dtypes are always checked; contents only where reading them is free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from o1lab.errors import O1labError

if TYPE_CHECKING:
    from torch import Tensor


class AttentionError(O1labError, ValueError):
    """A paged attention call that cannot be answered; the message names the value and says what would fit."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The sizes of one call: B sequences, S queries each (1 in decode), Hq query heads on Hkv KV heads of D numbers.

    ``capacity`` is the most tokens that a sequence's row of the block table can hold: pages × ``page_tokens``.
    """

    batch: int
    queries: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    pages: int
    max_pages: int

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def capacity(self) -> int:
        """Tokens that one row of the block table can hold."""
        return self.max_pages * self.page_tokens


def _need(true: bool, message: str) -> None:
    if not true:
        raise AttentionError(message)


def tensors(**given: object) -> None:
    """AttentionError unless all are tensors."""
    from torch import Tensor

    for name, one in given.items():
        if not isinstance(one, Tensor):
            raise AttentionError(f"{name} is a {type(one).__name__}; it must be a tensor")


def problem(
    q: Tensor, pages: Tensor, block_table: Tensor, lengths: Tensor, bias: Tensor | None = None,
    scales: Tensor | None = None, *, prefill: bool = False,
) -> Problem:  # fmt: skip
    """Check shapes, dtypes and devices and return the sizes.

    Raises
    ------
    AttentionError
        Naming the first thing that does not fit. A table of another pool of the same size looks like a right one and
        is not seen here.

    Examples
    --------
    >>> import torch
    >>> q, pages = torch.zeros(2, 4, 8), torch.zeros(3, 2, 16, 2, 8)
    >>> table, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    >>> problem(q, pages, table, lengths).capacity
    48
    """
    import torch

    tensors(q=q, pages=pages, block_table=block_table, lengths=lengths)
    tensors(**{name: one for name, one in (("bias", bias), ("scales", scales)) if one is not None})
    form, size = ("(B, Hq, S, D)", 4) if prefill else ("(B, Hq, D)", 3)
    _need(q.dim() == size, f"q has shape {tuple(q.shape)}; it must be {form}")
    _need(
        pages.dim() == 5 and pages.shape[1] == 2 and min(pages.shape) > 0,
        f"pages has shape {tuple(pages.shape)}; it must be (P, 2, T, Hkv, D), keys at [:, 0] and values at [:, 1]",
    )
    count, _, page_tokens, kv_heads, head_dim = pages.shape
    batch, q_heads = q.shape[:2]
    _need(
        q.shape[-1] == head_dim, f"q has heads of {q.shape[-1]}, pages of {head_dim}: the head dimensions must be equal"
    )
    _need(
        q_heads % kv_heads == 0 and q_heads > 0,
        f"{q_heads} query heads cannot share {kv_heads} KV heads: Hq must be a multiple of Hkv",
    )
    _need(q.dtype.is_floating_point, f"q is {q.dtype}; it must be a floating-point type")
    _need(
        block_table.dim() == 2 and block_table.shape[0] == batch and block_table.shape[1] > 0,
        f"block_table has shape {tuple(block_table.shape)}; it must be ({batch}, max_pages)",
    )
    _need(lengths.shape == (batch,), f"lengths has shape {tuple(lengths.shape)}; it must be ({batch},)")
    for name, whole in (("block_table", block_table), ("lengths", lengths)):
        _need(whole.dtype == torch.int32, f"{name} is {whole.dtype}; it must be torch.int32")
    found = Problem(
        batch, 1 if not prefill else q.shape[2], q_heads, kv_heads, head_dim, page_tokens, count, block_table.shape[1]
    )
    if pages.dtype == torch.int8:
        shapes = [(count, 2, tokens, kv_heads) for tokens in (page_tokens, 1)]
        _need(
            scales is not None and tuple(scales.shape) in shapes and scales.dtype.is_floating_point,
            f"int8 pages need scales of shape {shapes[0]} or {shapes[1]}, floating point; "
            f"got {None if scales is None else (tuple(scales.shape), scales.dtype)}",
        )
    else:
        _need(pages.dtype == q.dtype, f"q is {q.dtype}, pages are {pages.dtype}; they must be equal, or pages int8")
        _need(scales is None, f"scales belong to int8 pages; these are {pages.dtype}")
    if bias is not None:
        _need(
            bias.dim() == 2 and bias.shape[0] == batch and bias.shape[1] >= found.capacity,
            f"bias has shape {tuple(bias.shape)}; it must be ({batch}, n) with n ≥ {found.capacity}, "
            f"the tokens that {found.max_pages} pages of {page_tokens} hold",
        )
        _need(bias.dtype == torch.float32, f"bias is {bias.dtype}; it must be torch.float32")
    for name, other in (
        ("pages", pages), ("block_table", block_table), ("lengths", lengths), ("bias", bias), ("scales", scales)
    ):  # fmt: skip
        if other is not None:
            _need(other.device == q.device, f"{name} is on {other.device}, q on {q.device}")
    return found


def factor(scale: float | None, sizes: Problem) -> float:
    """The factor of the scores, ``D ** -0.5`` by default; AttentionError unless it is a finite number."""
    if scale is None:
        return sizes.head_dim**-0.5
    try:
        number = math.nan if isinstance(scale, str) else float(scale)
    except (TypeError, ValueError):
        number = math.nan
    _need(math.isfinite(number), f"scale={scale!r}; it must be a finite number, or None for {sizes.head_dim}**-0.5")
    return number


def contents(sizes: Problem, block_table: Tensor, lengths: Tensor) -> None:
    """Check lengths and the used part of the table. Reads them on the host: on a GPU that waits for the stream.

    Entries of the table past a sequence's last page are never read and may hold anything.

    Raises
    ------
    AttentionError
        A length below zero or past the table, or a page number that no page has.
    """
    import torch

    for row, length in enumerate(lengths.tolist()):
        if not 0 <= length <= sizes.capacity:
            raise AttentionError(
                f"lengths[{row}] = {length} does not fit: {sizes.max_pages} pages of {sizes.page_tokens} tokens hold "
                f"0 to {sizes.capacity}"
            )
    needed = torch.div(lengths.long() + sizes.page_tokens - 1, sizes.page_tokens, rounding_mode="floor")
    used = torch.arange(sizes.max_pages, device=lengths.device)[None, :] < needed[:, None]
    wrong = (used & ((block_table < 0) | (block_table >= sizes.pages))).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise AttentionError(
            f"block_table[{row}, {column}] = {int(block_table[row, column])} names no page: there are {sizes.pages}"
        )
