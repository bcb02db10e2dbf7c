"""Sequences of equal length in pages of a pool: who holds which group, and the tables that tell a kernel.

The host's books are lists of groups (one page for each layer, see :mod:`o1lab.kv.layout`). What a kernel reads are two
tensors on the device, updated in place: ``block_tables`` (L, B, max_pages) and ``lengths`` (B,), int32. Sequences share
groups by the pool's reference counts; a group is copied before one of several holders writes to it.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize

from o1lab.errors import CacheError
from o1lab.kv.pool import PagePool

if TYPE_CHECKING:
    import torch

Group = tuple[int, ...]
"""Page numbers of the same tokens, one for each layer."""
_NUMBERS = itertools.count(1)
_DROPPED: WeakKeyDictionary[PagePool, deque[str]] = WeakKeyDictionary()
"""Owners that went away without releasing; a finalizer may run anywhere, so only the next allocation frees them."""


class Sequences:
    """Groups of ``page_tokens`` tokens for B sequences that are all ``length`` tokens long.

    Parameters
    ----------
    pool : PagePool
    layers, page_tokens : int
        Pages of a group, tokens of a page.
    max_tokens : int, optional
        The tables are made once for so many tokens a sequence and never move: a captured graph may read them.
        Without it they grow.
    """

    def __init__(self, pool: PagePool, layers: int, page_tokens: int, max_tokens: int | None = None) -> None:
        self.pool, self.layers, self.page_tokens, self.max_tokens = pool, layers, page_tokens, max_tokens
        self.rows: list[list[Group]] = []
        self.length = 0
        self.fixed = False
        self.owner = f"PagedCache {next(_NUMBERS)}"
        self.block_tables: torch.Tensor | None = None
        self.lengths: torch.Tensor | None = None
        self._may_share = False  # whether the group that is written next may have other holders
        self._dropped = _DROPPED.setdefault(pool, deque())
        self._finalizer = finalize(self, self._dropped.append, self.owner)

    @property
    def ready(self) -> int:
        """Tokens that each sequence can hold, written ones included, before a page has to be found."""
        if not self.rows or self._may_share:
            return self.length
        return min(map(len, self.rows)) * self.page_tokens

    def start(self, batch: int) -> None:
        """Make tables for ``batch`` empty sequences; fixed ones stay where they are."""
        import torch

        if self.fixed and self.lengths.numel() != batch:
            raise CacheError(f"a captured graph reads tables of {self.lengths.numel()} sequences, not {batch}")
        self.rows = [[] for _ in range(batch)]
        if self.fixed:
            self.lengths.zero_()
            return
        device, columns = self.pool.arena.device, -(-(self.max_tokens or self.page_tokens) // self.page_tokens)
        self.block_tables = torch.zeros((self.layers, batch, columns), dtype=torch.int32, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` more per sequence: pages that nobody else holds, written into the tables.

        Raises
        ------
        PoolExhausted, CacheError
            Too few pages, or more than ``max_tokens``; everything is as before then.
        """
        total = self.length + tokens
        if total <= self.ready:
            return
        if self.max_tokens is not None and total > self.max_tokens:
            raise CacheError(f"{total} tokens do not fit max_tokens={self.max_tokens}; make the cache with more")
        end, tail = -(-total // self.page_tokens), self.length // self.page_tokens
        copies = self._shared_tails(tail) if self._may_share and self.length % self.page_tokens else []
        places = [(row, tail) for row in copies]
        places += [(row, column) for row, held in enumerate(self.rows) for column in range(len(held), end)]
        if places:
            groups = self._groups(len(places))
            old = [self.rows[row][tail] for row in copies]
            if old:
                self._copy(old, groups[: len(old)])
                self.pool.free([page for group in old for page in group], self.owner)
            for (row, column), group in zip(places, groups, strict=True):
                self.rows[row][column : column + 1] = [group]
            self._widen(end)
            self._write(places, groups)
        self._may_share = False

    def extend(self, tokens: int) -> None:
        """Count ``tokens`` more on the host alone: the device has counted already, or is about to."""
        self.length += tokens

    def shorten(self, length: int) -> None:
        """Forget all tokens past ``length`` and give back the groups that held only those."""
        keep = -(-length // self.page_tokens)
        dropped = [page for held in self.rows for group in held[keep:] for page in group]
        self.pool.free(dropped, self.owner)
        for held in self.rows:
            del held[keep:]
        self.length, self._may_share = length, True
        if self.lengths is not None:
            self.lengths.fill_(length)

    def select(self, indices: Sequence[int]) -> None:
        """Become the sequences at ``indices``, in that order; one that is named twice is shared by both."""
        import torch

        batch = len(self.rows)
        if not indices or not all(0 <= index < batch for index in indices):
            raise CacheError(f"indices={list(indices)[:8]} of {len(indices)}: give some of 0 to {batch - 1}")
        if self.fixed and len(indices) != batch:
            raise CacheError(f"a captured graph reads {batch} sequences; {len(indices)} were selected")
        used, seen, rows = -(-self.length // self.page_tokens), set(), []
        for index in indices:
            rows.append(self.rows[index][: used if index in seen else None])
            seen.add(index)
        before, after = (Counter(group for held in some for group in held) for some in (self.rows, rows))
        self.pool.share([page for group in (after - before).elements() for page in group], self.owner)
        self.pool.free([page for group in (before - after).elements() for page in group], self.owner)
        self.rows, self._may_share = rows, self._may_share or len(seen) < len(indices)
        place = torch.tensor(indices, device=self.block_tables.device)
        chosen = self.block_tables.index_select(1, place)
        if len(indices) == batch:
            self.block_tables.copy_(chosen)
        else:
            self.block_tables, self.lengths = chosen, self.lengths.index_select(0, place)

    def adopt(self, other: Sequences, indices: Sequence[int], length: int) -> None:
        """Share the first ``length`` tokens of another's sequences; this one must be empty."""
        if other.pool is not self.pool:
            raise CacheError(f"{other.owner} has its pages in {other.pool!r}; {self.owner} reads {self.pool!r}")
        if self.length or any(self.rows):
            raise CacheError(f"{self.owner} holds {self.length} tokens already: reset it before it adopts others")
        if not indices or not all(0 <= index < len(other.rows) for index in indices):
            raise CacheError(f"rows={list(indices)[:8]}: {other.owner} has sequences 0 to {len(other.rows) - 1}")
        if not 0 < length <= other.length or (self.max_tokens is not None and length > self.max_tokens):
            raise CacheError(
                f"tokens={length}: {other.owner} holds {other.length}, {self.owner} takes {self.max_tokens or 'any'}"
            )
        self.start(len(indices))
        used = -(-length // self.page_tokens)
        self._widen(used)
        rows = [other.rows[index][:used] for index in indices]
        self.pool.share([page for held in rows for group in held for page in group], self.owner)
        self.rows, self._may_share, other._may_share = rows, True, True
        places = [(row, column) for row in range(len(rows)) for column in range(used)]
        self._write(places, [rows[row][column] for row, column in places])
        self.length = length
        self.lengths.fill_(length)

    def release(self) -> None:
        """Give every page back; the tables keep their size."""
        self.pool.release(self.owner)
        self.rows, self.length, self._may_share = [], 0, False
        if self.lengths is not None:
            self.lengths.zero_()

    def close(self) -> None:
        """Release for good."""
        self.release()
        self._finalizer.detach()
        self.block_tables = self.lengths = None

    def _shared_tails(self, column: int) -> list[int]:
        """Rows that must copy their group at ``column``: all holders but one."""
        spare, found = {}, []
        for row, held in enumerate(self.rows):
            group = held[column]
            left = spare.setdefault(group, self.pool.references(group[0]))
            if left > 1:
                spare[group] = left - 1
                found.append(row)
        return found

    def _groups(self, count: int) -> list[Group]:
        while self._dropped:
            self.pool.release(self._dropped.popleft())
        pages = self.pool.allocate(count * self.layers, self.owner)
        return [tuple(pages[first : first + self.layers]) for first in range(0, len(pages), self.layers)]

    def _copy(self, old: list[Group], new: list[Group]) -> None:
        import torch

        whole = self.pool.arena.view(self.pool.pages, self.pool.page_bytes)
        source, target = torch.tensor([old, new], device=whole.device).flatten(1)
        whole.index_copy_(0, target, whole.index_select(0, source))

    def _widen(self, columns: int) -> None:
        import torch

        have = self.block_tables.shape[2]
        if columns > have:
            more = max(columns - have, have)  # doubled: few sizes, so few launches of the kernel to compile
            self.block_tables = torch.nn.functional.pad(self.block_tables, (0, more))

    def _write(self, places: list[tuple[int, int]], groups: list[Group]) -> None:
        import torch

        numbers: Any = [(*place, *group) for place, group in zip(places, groups, strict=True)]
        row, column, *pages = torch.tensor(numbers, dtype=torch.int64).T.contiguous().to(self.block_tables.device)
        self.block_tables[:, row, column] = torch.stack(pages).to(torch.int32)
