"""Sequences of equal length in pages of a pool: who holds which group, and the tables that tell a kernel.

The host's books are lists of groups (one page for each layer, see :mod:`o1lab.kv.layout`). What a kernel reads are two
tensors on the device, updated in place: ``block_tables`` (L, B, max_pages) and ``lengths`` (B,), int32. Sequences share
groups by the pool's reference counts; a group is copied before one of several holders writes to it.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from weakref import finalize

import torch

from o1lab.errors import CacheError
from o1lab.kv.pool import PagePool

Group = tuple[int, ...]
"""Page numbers of the same tokens, one for each layer."""
_NUMBERS = itertools.count(1)


def whole(name: str, value: int, least: int) -> int:
    """``value`` if it is a whole number from ``least`` on; else CacheError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CacheError(f"{name}={value!r}: a whole number, at least {least}")
    return value


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

    Attributes
    ----------
    rows : list of list of Group
        What each sequence holds, pages that are reserved and not yet written included.
    fixed : bool
        Whether a graph reads the tables, so that they must stay where they are.
    """

    def __init__(self, pool: PagePool, layers: int, page_tokens: int, max_tokens: int | None = None) -> None:
        self.pool, self.layers, self.page_tokens, self.max_tokens = pool, layers, page_tokens, max_tokens
        self.rows: list[list[Group]] = []
        self.length, self.fixed = 0, False
        self.owner = f"PagedCache {next(_NUMBERS)}"
        self.block_tables: torch.Tensor | None = None
        self.lengths: torch.Tensor | None = None
        self._may_share = False  # whether the group that is written next may have other holders
        self._finalizer = finalize(self, pool.abandon, self.owner)

    @property
    def ready(self) -> int:
        """Tokens that each sequence can hold, written ones included, before a page has to be found."""
        if self._may_share:
            return self.length
        return min(min(map(len, self.rows), default=0) * self.page_tokens, self.max_tokens or sys.maxsize)

    @torch.inference_mode(False)  # or the tables could not be written outside it
    def start(self, batch: int) -> None:
        """Make tables for ``batch`` empty sequences; fixed ones stay where they are."""
        if self.fixed and self.lengths.numel() != batch:
            raise CacheError(f"a captured graph reads tables of {self.lengths.numel()} sequences, not {batch}")
        if self.rows:
            self.release()
        if not self.fixed:
            device, columns = self.pool.arena.device, -(-(self.max_tokens or 1) // self.page_tokens)
            self.block_tables = torch.zeros((self.layers, batch, columns), dtype=torch.int32, device=device)
            self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.rows = [[] for _ in range(batch)]

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` more per sequence: pages that nobody else holds, written into the tables.

        Raises
        ------
        PoolExhausted, CacheError
            Too few pages, or more than ``max_tokens``; everything is as before then.
        """
        total, tail = self.length + tokens, self.length // self.page_tokens
        if self.max_tokens is not None and total > self.max_tokens:
            raise CacheError(f"{total} tokens do not fit max_tokens={self.max_tokens}; make the cache with more")
        if total <= self.ready:
            return
        places = self._shared_tails(tail) if self._may_share and self.length % self.page_tokens else []
        copies, end = len(places), -(-total // self.page_tokens)
        places += [(row, column) for row, held in enumerate(self.rows) for column in range(len(held), end)]
        if places:
            pages = self.pool.allocate(len(places) * self.layers, self.owner)
            groups = [tuple(pages[at : at + self.layers]) for at in range(0, len(pages), self.layers)]
            if copies:
                self._copy([self.rows[row][tail] for row, _ in places[:copies]], groups[:copies])
            for (row, column), group in zip(places, groups, strict=True):
                self.rows[row][column : column + 1] = [group]
            self._write(places, groups)
        self._may_share = False

    def step(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Count ``tokens`` that were reserved; returns their pages (layers, B, tokens) and slots (B, tokens).

        On the device alone but for ``length``: fit for a graph, whose replays count on from what lengths say then.
        """
        self.length += tokens
        self.lengths.add_(tokens)
        at = self.lengths.long()[:, None] + torch.arange(-tokens, 0, device=self.lengths.device)
        columns = torch.div(at, self.page_tokens, rounding_mode="floor")
        pages = self.block_tables.gather(2, columns.expand(self.layers, -1, -1)).long()
        return pages, at - columns * self.page_tokens

    def shorten(self, length: int) -> None:
        """Forget all tokens past ``length`` and give back the groups that held only those."""
        keep = -(-length // self.page_tokens)
        self.pool.free([page for held in self.rows for group in held[keep:] for page in group], self.owner)
        for held in self.rows:
            del held[keep:]
        self.length, self._may_share = length, True
        if self.lengths is not None:
            self.lengths.fill_(length)

    @torch.inference_mode(False)
    def select(self, indices: Sequence[int]) -> None:
        """Become the sequences at ``indices``, in that order; one that is named twice is shared by both."""
        batch, used, seen, rows = len(self.rows), -(-self.length // self.page_tokens), set(), []
        self._picked(indices)
        if self.fixed and len(indices) != batch:
            raise CacheError(f"a captured graph reads {batch} sequences; {len(indices)} were selected")
        for index in indices:
            rows.append(self.rows[index][: used if index in seen else None])
            seen.add(index)
        before, after = (Counter(group for held in some for group in held) for some in (self.rows, rows))
        self.pool.share([page for group in (after - before).elements() for page in group], self.owner)
        self.pool.free([page for group in (before - after).elements() for page in group], self.owner)
        self.rows, self._may_share = rows, self._may_share or len(seen) < len(indices)
        chosen = self.block_tables.index_select(1, torch.tensor(indices, device=self.block_tables.device))
        if len(indices) == batch:
            self.block_tables.copy_(chosen)
        else:
            self.block_tables, self.lengths = chosen, self.lengths.new_full((len(indices),), self.length)

    def adopt(self, other: Sequences, indices: Sequence[int], length: int) -> None:
        """Share the first ``length`` tokens of another's sequences; this one must be empty."""
        if other.pool is not self.pool:
            raise CacheError(f"{other.owner} has its pages in {other.pool!r}; {self.owner} reads {self.pool!r}")
        if self.length:
            raise CacheError(f"{self.owner} holds {self.length} tokens already: reset it before it adopts others")
        if not 0 < length <= min(other.length, self.max_tokens or length):
            raise CacheError(f"tokens={length!r}: {other.owner} holds {other.length}, max_tokens={self.max_tokens}")
        other._picked(indices)
        self.start(len(indices))
        used = -(-length // self.page_tokens)
        rows = [other.rows[index][:used] for index in indices]
        self.pool.share([page for held in rows for group in held for page in group], self.owner)
        self.rows, self.length, self._may_share = rows, length, True  # the other writes behind what is read here
        self.lengths.fill_(length)
        places = [(row, column) for row in range(len(rows)) for column in range(used)]
        self._write(places, [rows[row][column] for row, column in places])

    def release(self) -> None:
        """Give every page back; the tables keep their size."""
        self.pool.release(self.owner)
        self.rows, self.length, self._may_share = [], 0, False
        if self.lengths is not None:
            self.lengths.zero_()

    def close(self) -> None:
        """Release for good, tables too."""
        self.release()
        self._finalizer.detach()
        self.block_tables = self.lengths = None

    def _picked(self, indices: Sequence[int]) -> None:
        if not indices or not all(0 <= index < len(self.rows) for index in indices):
            raise CacheError(f"sequences {list(indices)[:8]} were asked for; there are 0 to {len(self.rows) - 1}")

    def _shared_tails(self, column: int) -> list[tuple[int, int]]:
        """Places of the groups at ``column`` that must be copied: those of all holders but one."""
        holders, found = {}, []
        for row, held in enumerate(self.rows):
            group = held[column]
            left = holders.setdefault(group, self.pool.references(group[0]))
            if left > 1:
                holders[group] = left - 1
                found.append((row, column))
        return found

    def _copy(self, old: list[Group], new: list[Group]) -> None:
        pages = self.pool.arena.view(self.pool.pages, self.pool.page_bytes)
        source, target = torch.tensor([old, new], device=pages.device).flatten(1)
        pages.index_copy_(0, target, pages.index_select(0, source))
        self.pool.free([page for group in old for page in group], self.owner)

    @torch.inference_mode(False)
    def _write(self, places: list[tuple[int, int]], groups: list[Group]) -> None:
        numbers = [(*place, *group) for place, group in zip(places, groups, strict=True)]
        moved = torch.tensor(numbers).T.contiguous().to(self.block_tables.device)
        missing = 1 + max(column for _, column in places) - self.block_tables.shape[2]
        if missing > 0:  # doubled at least: few widths, so few launches of the kernel to compile
            self.block_tables = torch.nn.functional.pad(
                self.block_tables, (0, max(missing, self.block_tables.shape[2]))
            )
        self.block_tables[:, moved[0], moved[1]] = moved[2:].to(torch.int32)
