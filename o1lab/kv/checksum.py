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
"""Programs that share one page on a GPU: few, so that decoding beside them keeps its multiprocessors."""


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
    import numpy as np
    import torch

    if pages.shape[1] % 4:
        raise PoolError(f"pages of {pages.shape[1]} bytes: a checksum is taken over words of 4 bytes")
    if pages.device.type == "meta":
        return torch.zeros(len(pages), dtype=torch.int64)
    words = pages.view(torch.int32)
    if pages.device.type == "cpu":
        found = np.einsum("pw,w->p", words.numpy(), keys(words.shape[1]), dtype=np.int64, casting="safe")
        return torch.from_numpy(found)
    weights = _keys_on(words.shape[1], pages.device)
    kernel = _kernel() if pages.device.type == "cuda" else None
    if kernel is None:  # one page at a time: the products take twice its bytes
        return torch.stack([(page * weights).sum() for page in words])
    parts = torch.empty((len(words), PARTS), dtype=torch.int64, device=pages.device)
    kernel[(len(words), PARTS)](words, weights, parts, words.shape[1], PARTS, BLOCK=1024)
    return parts.sum(1)


@cache
def _kernel():
    """One pass over the words, products in registers; ``None`` where Triton is missing."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    from o1lab.kv.checksum_kernel import sum_words

    return sum_words
