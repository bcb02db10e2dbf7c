"""How memory that is reserved comes to be useless, measure by measure: each a function of one line.

No single number says it. ``external`` is high in healthy allocators too; what decides is whether the free blocks can
serve the request at hand, which is what :meth:`Fragmentation.unserviceable` says in the words of the out-of-memory
message. All measures come from torch's own statistics, from its snapshots, from a :class:`~o1lab.kv.pool.PagePool` or
from a simulated allocator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from o1lab.kv import pages as bits
from o1lab.kv.pool import PoolError
from o1lab.kv.pool_state import PoolState

CHURN = ("num_device_alloc", "num_device_free", "num_alloc_retries", "num_sync_all_streams", "num_ooms")
"""Counters of ``torch.cuda.memory_stats`` that stand still in a steady state."""


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def rounding(requested_bytes: int, allocated_bytes: int) -> float:
    """Internal, by rounding: ``1 − requested / allocated``.

    Examples
    --------
    >>> round(rounding(1000, 1024), 3)
    0.023
    """
    return _share(allocated_bytes - requested_bytes, allocated_bytes)


def page_tail(live_bytes: int, used_pages: int, page_bytes: int) -> float:
    """Internal, by half-filled pages: ``1 − live / (used pages · page bytes)``."""
    return _share(used_pages * page_bytes - live_bytes, used_pages * page_bytes)


def over_reservation(live_bytes: int, reserved_bytes: int) -> float:
    """Reserved without holding anything live: ``1 − live / reserved``, of all measures the one that costs money."""
    return _share(reserved_bytes - live_bytes, reserved_bytes)


def stranded(reserved_bytes: int, active_bytes: int, releasable_bytes: int) -> int:
    """Bytes free, but in segments in use: ``reserved − active − releasable``; torch's ``inactive_split_bytes``."""
    return reserved_bytes - active_bytes - releasable_bytes


def external(free_blocks: Sequence[int]) -> float:
    """The classic: ``1 − largest free block / all free bytes``. Alone it is a bad alarm."""
    return 1 - max(free_blocks) / total if (total := sum(free_blocks)) else 0.0


def unserviceable(free_blocks: Sequence[int], n_bytes: int) -> float:
    """Share of the free bytes that cannot serve a request: ``Σ blocks < n / Σ blocks``.

    Examples
    --------
    >>> unserviceable([4, 4, 8], 6)
    0.5
    """
    return _share(sum(block for block in free_blocks if block < n_bytes), sum(free_blocks))


def awaiting_free(active_bytes: int, allocated_bytes: int) -> int:
    """Bytes freed by the program that another stream may still use: ``active − allocated``."""
    return active_bytes - allocated_bytes


def churn(before: Mapping[str, int], after: Mapping[str, int], tokens: int) -> dict[str, float]:
    """Slow paths taken per 1,000 tokens: ``1000 · Δ counter / tokens`` for each of :data:`CHURN`.

    Parameters
    ----------
    before, after : mapping
        ``torch.cuda.memory_stats()`` at two moments; a counter that this torch lacks counts as 0.
    tokens : int
        Decoded between them.

    Examples
    --------
    >>> churn({"num_ooms": 1}, {"num_ooms": 3}, 4000)["num_ooms"]
    0.5
    """
    if tokens < 1:
        raise PoolError(f"tokens={tokens}: count the tokens decoded between the two readings, at least 1")
    return {name: 1000 * (after.get(name, 0) - before.get(name, 0)) / tokens for name in CHURN}


def pinned_bytes(requested_bytes: int) -> int:
    """Bytes that torch's pinned-memory cache takes for one tensor: the next power of two.

    ``rounding(requested, pinned_bytes(requested))`` is what is lost; ``cudaHostRegister`` on ordinary memory, or
    ``pinned_max_round_threshold_mb`` where torch has it, keeps to the size asked for.

    Examples
    --------
    >>> pinned_bytes(int(2.083 * 2**30)) / 2**30
    4.0
    """
    return 1 << (requested_bytes - 1).bit_length() if requested_bytes > 0 else 0


@dataclass(frozen=True)
class Unserviceable:
    """A request against the free blocks, in bytes; prints what the out-of-memory message leaves out."""

    asked_bytes: int
    share: float
    free_bytes: int
    largest_bytes: int
    allocated_bytes: int
    stranded_bytes: int

    def __str__(self) -> str:
        return (
            f"Tried to allocate {size_text(self.asked_bytes)}. Of the reserved memory "
            f"{size_text(self.allocated_bytes)} is in use, and {size_text(self.free_bytes)} is reserved but "
            f"unallocated; {self.share:.1%} of that lies in blocks smaller than the request (the largest has "
            f"{size_text(self.largest_bytes)}), and {size_text(self.stranded_bytes)} is in segments in use, so that "
            "emptying the cache does not give it back."
        )


@dataclass(frozen=True)
class Fragmentation:
    """The measures of one allocator at one moment, in bytes and shares of 0 to 1.

    Attributes
    ----------
    source : str
        What was read: ``"torch"``, ``"snapshot"``, ``"statistics"``, ``"pool"`` or ``"simulated allocator"``.
    reserved_bytes, active_bytes, allocated_bytes : int
        Taken from the device; in blocks that cannot be handed out; in blocks that the program holds.
    requested_bytes : int or None
        What the program asked for; ``None`` where the source does not say.
    stranded_bytes : int
        Free, in segments in use.
    free_blocks : tuple of int or None
        Sizes of the free blocks, largest first; of a pool, of its runs of free pages. ``None`` from statistics alone.
    live_bytes : int or None
        What holds tokens, as the caller said.
    page_bytes : int or None
        Of a pool: every free page serves every request of that size.
    """

    source: str
    reserved_bytes: int
    active_bytes: int
    allocated_bytes: int
    requested_bytes: int | None
    stranded_bytes: int
    free_blocks: tuple[int, ...] | None
    live_bytes: int | None = None
    page_bytes: int | None = None

    @property
    def free_bytes(self) -> int:
        """Reserved bytes in blocks that could be handed out."""
        return self.reserved_bytes - self.active_bytes

    @property
    def rounding(self) -> float | None:
        """See :func:`rounding`; ``None`` where the source does not say what was asked for."""
        return None if self.requested_bytes is None else rounding(self.requested_bytes, self.allocated_bytes)

    @property
    def page_tail(self) -> float | None:
        """See :func:`page_tail`; of a pool whose live bytes were given."""
        if self.page_bytes is None or self.live_bytes is None:
            return None
        return page_tail(self.live_bytes, self.allocated_bytes // self.page_bytes, self.page_bytes)

    @property
    def over_reservation(self) -> float:
        """See :func:`over_reservation`; without live bytes, what is allocated counts as live."""
        return over_reservation(
            self.allocated_bytes if self.live_bytes is None else self.live_bytes, self.reserved_bytes
        )

    @property
    def external(self) -> float | None:
        """See :func:`external`; 0 for a pool, as no request for pages needs them side by side."""
        return 0.0 if self.page_bytes else self.scatter

    @property
    def scatter(self) -> float | None:
        """:func:`external` of the free runs, of a pool as well: how far copies fall into small pieces."""
        return None if self.free_blocks is None else external(self.free_blocks)

    @property
    def awaiting_free_bytes(self) -> int:
        """See :func:`awaiting_free`."""
        return awaiting_free(self.active_bytes, self.allocated_bytes)

    def unserviceable(self, n_bytes: int) -> Unserviceable:
        """What a request of ``n_bytes`` finds: the sentence that belongs into an out-of-memory message.

        Raises
        ------
        PoolError
            The blocks are not known.
        """
        if self.free_blocks is None:
            raise PoolError("statistics alone do not list the free blocks: give fragmentation() the snapshot as well")
        share = unserviceable(self.free_blocks, n_bytes)
        largest = max(self.free_blocks, default=0)
        return Unserviceable(n_bytes, share, self.free_bytes, largest, self.active_bytes, self.stranded_bytes)

    def __str__(self) -> str:
        rows: list[tuple[str, float | None, int | None]] = [
            ("over-reservation", self.over_reservation, None), ("internal, rounding", self.rounding, None),
            ("internal, page tail", self.page_tail, None), ("external", self.external, None),
            ("scatter of free runs", self.scatter if self.page_bytes else None, None),
            ("stranded", None, self.stranded_bytes), ("awaiting free", None, self.awaiting_free_bytes),
        ]  # fmt: skip
        lines = [f"{name:<22}{share:>10.1%}" for name, share, _ in rows if share is not None]
        lines += [f"{name:<22}{size_text(size):>10}" for name, _, size in rows if size is not None]
        sizes = f"{size_text(self.reserved_bytes)} reserved, {size_text(self.allocated_bytes)} allocated"
        blocks = "" if self.free_blocks is None else f", {len(self.free_blocks)} free blocks"
        return "\n".join([f"{self.source}: {sizes}{blocks}", *lines])


def size_text(n_bytes: int) -> str:
    """Bytes as torch prints them in its message.

    Examples
    --------
    >>> size_text(20 << 20), size_text(3 << 29)
    ('20.00 MiB', '1.50 GiB')
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= size:
            return f"{n_bytes / size:.2f} {unit}"
    return f"{n_bytes} B"


def fragmentation(source: Any = None, *, live_bytes: int | None = None) -> Fragmentation:
    """Read every measure from ``source``.

    Parameters
    ----------
    source : optional
        ``None``: torch's CUDA allocator, now. A :class:`~o1lab.kv.pool.PagePool`. A snapshot:
        ``torch.cuda.memory._snapshot()`` or ``torch.cuda.memory_snapshot()``; or ``torch.cuda.memory_stats()``, which
        lists no blocks. An object with ``segments`` whose members have ``blocks`` (attributes named as in a snapshot),
        or a simulated allocator with ``pools`` of free blocks, ``reserved_bytes``, ``active_bytes`` and
        ``allocated_bytes``.
    live_bytes : int, optional
        Bytes that hold tokens: makes ``page_tail`` known and ``over_reservation`` strict.

    Raises
    ------
    PoolError
        No CUDA device for ``None``; nothing of the above.

    Examples
    --------
    >>> held, free = {"size": 512, "requested_size": 400, "state": "active_allocated"}, {"size": 1536}
    >>> found = fragmentation([{"total_size": 2048, "blocks": [held, free]}])
    >>> found.rounding, found.stranded_bytes, found.unserviceable(4096).share
    (0.21875, 1536, 1.0)
    """
    if source is None:
        import torch

        if not torch.cuda.is_available():
            raise PoolError("no CUDA device: give fragmentation() a pool, a snapshot or a simulated allocator")
        return _from_segments(torch.cuda.memory_snapshot(include_traces=False), "torch", live_bytes)
    if isinstance(state := source.state() if hasattr(source, "state") else source, PoolState):
        return _from_pool(state, live_bytes)
    if hasattr(source, "pools") and hasattr(source, "reserved_bytes"):
        return _from_simulated(source, live_bytes)
    if isinstance(source, Mapping) and "reserved_bytes.all.current" in source:
        return _from_stats(source, live_bytes)
    segments = source if isinstance(source, Sequence) else _field(source, "segments")
    if isinstance(segments, Iterable) and not isinstance(segments, str):
        return _from_segments(segments, "snapshot", live_bytes)
    raise PoolError(f"cannot read fragmentation from {type(source).__name__}: give a pool, a snapshot or an allocator")


def _field(thing: Any, name: str, default: Any = None) -> Any:
    return thing.get(name, default) if isinstance(thing, Mapping) else getattr(thing, name, default)


def _from_segments(segments: Iterable[Any], source: str, live_bytes: int | None) -> Fragmentation:
    reserved = allocated = active = requested = releasable = 0
    free: list[int] = []
    for segment in segments:
        blocks = _field(segment, "blocks")
        if blocks is None:
            raise PoolError("a segment of the snapshot has no 'blocks': this is no snapshot of torch's allocator")
        before = active
        for block in blocks:
            size, state = _field(block, "size"), _field(block, "state", "inactive")
            if state == "inactive":
                free.append(size)
                continue
            active += size
            if state == "active_allocated":
                allocated += size
                requested += _field(block, "requested_size", size)
        size = _field(segment, "total_size")
        reserved += size
        releasable += size if active == before else 0
    return Fragmentation(
        source, reserved, active, allocated, requested, stranded(reserved, active, releasable),
        tuple(sorted(free, reverse=True)), live_bytes,
    )  # fmt: skip


def _from_stats(stats: Mapping[str, int], live_bytes: int | None) -> Fragmentation:
    names = ("reserved_bytes", "active_bytes", "allocated_bytes", "requested_bytes", "inactive_split_bytes")
    return Fragmentation("statistics", *(stats[f"{name}.all.current"] for name in names), None, live_bytes)


def _from_pool(state: PoolState, live_bytes: int | None) -> Fragmentation:
    free = sorted(
        (length * state.page_bytes for bitmap in state.bitmaps for _, length in bits.runs(bitmap)), reverse=True
    )
    used = state.bytes - sum(free)
    return Fragmentation("pool", state.bytes, used, used, None, 0, tuple(free), live_bytes, state.page_bytes)


def _from_simulated(allocator: Any, live_bytes: int | None) -> Fragmentation:
    rows = [row for pool in allocator.pools.values() for row in pool.free.values()]
    blocks = [block for row in rows for *_, block in row]
    whole = sum(block.size for block in blocks if block.before is None and block.after is None)
    reserved, active = allocator.reserved_bytes, allocator.active_bytes
    return Fragmentation(
        "simulated allocator", reserved, active, allocator.allocated_bytes, None, stranded(reserved, active, whole),
        tuple(sorted((block.size for block in blocks), reverse=True)), live_bytes,
    )  # fmt: skip
