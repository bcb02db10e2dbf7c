"""A checksum of pages, computed where they lie, and what it can promise.

A page is read as ``W`` signed 32-bit words ``x``; its sum is ``Σ xᵢ kᵢ mod 2⁶⁴`` with ``W`` odd 64-bit keys drawn once
(multilinear hashing, Lemire & Kaser 2014). The order of addition does not matter, so CPU and GPU agree to the bit.

- Damage within one word (a flipped bit, say) always changes the sum: ``d kᵢ`` with ``0 < |d| < 2³²`` and ``kᵢ`` odd is
  no multiple of 2⁶⁴.
- Any other damage (swapped or permuted words, zeroed or truncated parts, another page) goes unseen with a chance of at
  most 2⁻³² over the drawn keys, as long as it does not depend on them: of no ``dᵢ ≠ 0`` is 2³² a divisor.
- Two pages of equal content have equal sums: owner, place and generation have to be compared beside it. And whoever
  knows the keys can make collisions: this finds accidents, not attackers.

Sums weighted by position instead of by random keys (``Σ xᵢ`` and ``Σ (2i+1) xᵢ`` over 64-bit words) miss two flipped
top bits, which in 16-bit floats are two signs.
"""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING

from o1lab.kv.pool import PoolError

if TYPE_CHECKING:
    import numpy as np
    import torch

SEED = 20_266
PARTS = 4
"""Programs that share one page on a GPU, each with its own sum: few, so that decoding beside them keeps the rest."""


@cache
def keys(words: int) -> np.ndarray:
    """Odd keys of a page of ``words`` words, int64 of shape (words,); the same on every machine and version."""
    import numpy as np

    return np.frombuffer(random.Random(SEED).randbytes(8 * words), np.dtype("<i8")) | 1


@cache
def _keys_on(words: int, device: torch.device) -> torch.Tensor:
    import torch

    return torch.from_numpy(keys(words)).to(device)


def checksums(pages: torch.Tensor) -> torch.Tensor:
    """Sum of each page, int64 of shape (n,), on the pages' device and there on the current stream: nothing waits.

    Parameters
    ----------
    pages : torch.Tensor, uint8, shape (n, page_bytes)
        Contiguous; ``page_bytes`` a multiple of 4. On ``"meta"`` the sums are 0, on the CPU.

    Raises
    ------
    PoolError
        Pages that are no whole number of words.

    Examples
    --------
    >>> import torch
    >>> page = torch.arange(64, dtype=torch.uint8).view(1, 64)
    >>> swapped = page.view(torch.int32).flip(1).view(torch.uint8)
    >>> bool(checksums(page) == checksums(page.clone())), bool(checksums(page) == checksums(swapped))
    (True, False)
    """
    import torch

    if pages.device.type == "meta":
        whole_words(pages)
        return torch.zeros(len(pages), dtype=torch.int64)
    parts = torch.empty((len(pages), PARTS), dtype=torch.int64, device=pages.device)
    sum_into(parts, pages)
    return parts.sum(1)


def whole_words(pages: torch.Tensor) -> torch.Tensor:
    """The pages' words, int32 of shape (n, W); raises PoolError where a page is no whole number of them."""
    import torch

    if pages.shape[1] % 4:
        raise PoolError(f"pages of {pages.shape[1]} bytes: a checksum is taken over words of 4 bytes")
    return pages.view(torch.int32)


def sum_into(parts: torch.Tensor, pages: torch.Tensor) -> None:
    """Write what adds up (mod 2⁶⁴) to each page's sum to ``parts``, int64 of shape (n, PARTS): one launch on a GPU.

    The device of ``parts`` computes. On a GPU it reads pages in pinned host memory where they lie, over the bus.

    Raises
    ------
    RuntimeError
        Pages in host memory that a GPU cannot read: not pinned, or there is no Triton.
    """
    import numpy as np
    import torch

    words = whole_words(pages)
    n = words.shape[1]
    kernel = _kernel() if parts.device.type == "cuda" else None
    if parts.device != pages.device and (kernel is None or not pages.is_pinned()):
        raise RuntimeError(f"{parts.device} cannot sum pages in host memory: they are not pinned, or Triton is missing")
    if kernel is not None:
        kernel[(len(words), PARTS)](words, _keys_on(n, parts.device), parts, n, PARTS, BLOCK=1024)
        return
    parts.zero_()
    if pages.device.type == "cpu":
        found = np.einsum("pw,w->p", words.numpy(), keys(n), dtype=np.int64, casting="safe")
        parts[:, 0] = torch.from_numpy(found)
    else:  # one page at a time: the products take twice its bytes
        weights = _keys_on(n, pages.device)
        for place, page in enumerate(words):
            parts[place, 0] = (page * weights).sum()


@cache
def _kernel():
    """One pass over the words, products in registers; ``None`` where Triton is missing."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    from o1lab.kv.checksum_kernel import sum_words

    return sum_words
