"""How a worker of a lane moves a job's pages: all of it is enqueued at once, and waited for later.

On CUDA a worker has five streams, so that one piece's copy, the read-back of the piece before and the sums of both run
beside one another, and the next job's behind them without a gap: nothing in the order of one stream waits for more than
it has to. Elsewhere the same code runs in order, in the calling thread.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from o1lab.kv.checksum import PARTS, sum_into

if TYPE_CHECKING:
    import torch

    from o1lab.kv.lane import Job, Lane

PIECE_BYTES = 8 << 20
"""What is copied, read back and summed as one. A worker reads back into at most two pieces of this size."""


def runs(pages: list[int], slots: list[int], most: float = float("inf")) -> list[tuple[int, int, int]]:
    """Stretches that are consecutive on both sides, as (first page, first slot, length): one copy each.

    Examples
    --------
    >>> runs([4, 5, 6, 9], [0, 1, 7, 8])
    [(4, 0, 2), (6, 7, 1), (9, 8, 1)]
    >>> runs([0, 1, 2, 3, 4], [5, 6, 7, 8, 9], most=2)
    [(0, 5, 2), (2, 7, 2), (4, 9, 1)]
    """
    found: list[tuple[int, int, int]] = []
    for page, slot in zip(pages, slots, strict=True):
        first, begin, n = found[-1] if found else (0, 0, most)
        if n < most and (page, slot) == (first + n, begin + n):
            found[-1] = (first, begin, n + 1)
        else:
            found.append((page, slot, 1))
    return found


@dataclass
class Flight:
    """A job under way: where its sums arrive, (source or target, pages, parts), and the event behind all of it."""

    sums: torch.Tensor | None
    has_source: bool
    has_target: bool
    event: Any
    kept: Any = None

    def land(self) -> tuple[list[int], list[int]]:
        """Wait, asleep and without the interpreter's lock; the sums of what was read and of what arrived."""
        if self.event is not None:
            self.event.synchronize()
        if self.sums is None:
            return [], []
        source, target = self.sums.sum(-1).tolist()
        return source if self.has_source else [], target if self.has_target else []


class Courier:
    """The streams of one worker, and the memory in which it reads back.

    Parameters
    ----------
    where : torch.device
    own : bool
        With streams of its own, or on the caller's.
    """

    def __init__(self, where: torch.device, own: bool = True) -> None:
        self.where, self.cuda = where, where.type == "cuda"
        streams: list[Any] = [None] * 5
        if self.cuda:
            import torch

            streams = [torch.cuda.Stream(where) if own else torch.cuda.current_stream(where) for _ in streams]
        self.look, self.move, self.close, *self.back = streams
        self._landing: list[Any] = [None for _ in self.back]

    def settle(self) -> None:
        """Wait for everything that was enqueued."""
        if self.cuda:
            for stream in (self.look, self.move, *self.back, self.close):
                stream.synchronize()

    def begin(self, lane: Lane, job: Job) -> Flight:
        """Enqueue a job: sums of what is read, then piece by piece its copy and, behind that, sums of what arrived."""
        import torch

        pages, slots = job.pages, job.slots
        has_source = lane.verify and job.to_host
        has_target = lane.verify and bool(lane.readback or not job.to_host)
        if self.cuda:
            for event in job.after:
                (self.look if has_source else self.move).wait_event(event)
        sums = None
        if lane.verify:
            with self._on(self.look):
                sums = torch.empty((2, len(pages), PARTS), dtype=torch.int64, device=self.where)
        if has_source:
            with self._on(self.look):
                done = 0
                for page, _, n in runs(pages, pages):
                    sum_into(sums[0, done : done + n], lane.device_pages[page : page + n])
                    done += n
            self._behind(self.move, self.look)
        pieces = runs(pages, slots, max(1, PIECE_BYTES // lane.device_pages.shape[1]))
        copied: list[Any] = []
        with self._on(self.move):
            for page, slot, n in pieces:
                device, host = lane.device_pages[page : page + n], lane.host_pages[slot : slot + n]
                lane.copy(host, device) if job.to_host else lane.copy(device, host)
                copied.append((device, host, self.move.record_event() if self.cuda and has_target else None))
        if has_target:
            places = sums[1].split([n for _, _, n in pieces])
            for side in range(len(self.back)):  # two, in turn: while one sums, the other reads back
                self._sum_arrived(side, lane, job, [*zip(places, copied, strict=True)][side :: len(self.back)])
        return self._close(sums, has_source, has_target)

    def _sum_arrived(self, side: int, lane: Lane, job: Job, pieces: list[Any]) -> None:
        with self._on(self.back[side]):
            for place, (device, host, event) in pieces:
                if event is not None:
                    self.back[side].wait_event(event)
                if not job.to_host:
                    arrived = device
                elif lane.readback == "direct":
                    arrived = host
                else:
                    arrived = self._room(side, device)[: len(host)].copy_(host, non_blocking=True)
                sum_into(place, arrived)

    def _room(self, side: int, like: torch.Tensor) -> torch.Tensor:
        """Memory that one stream reuses in its own order, so that nobody has to wait for it to be free."""
        if self._landing[side] is None:
            most = max(1, PIECE_BYTES // like.shape[1])
            self._landing[side] = like.new_empty((most, like.shape[1]))
        return self._landing[side]

    def _close(self, sums: torch.Tensor | None, has_source: bool, has_target: bool) -> Flight:
        """All sums to the host in one small copy, on a stream that no later copy waits for."""
        if not self.cuda:
            return Flight(sums, has_source, has_target, None)
        import torch

        for stream in (self.move, *self.back):
            self._behind(self.close, stream)
        event, found = torch.cuda.Event(blocking=True), None
        with torch.cuda.stream(self.close):
            if sums is not None:
                found = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)
            event.record()
        return Flight(found, has_source, has_target, event, kept=sums)

    def _on(self, stream: Any) -> Any:
        if not self.cuda:
            return nullcontext()
        import torch

        return torch.cuda.stream(stream)

    def _behind(self, later: Any, earlier: Any) -> None:
        if self.cuda and later != earlier:
            later.wait_stream(earlier)
