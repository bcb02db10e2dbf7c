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
    """A job under way: which of its two rows of sums, (2, pages, parts), are taken, and the event behind all of it."""

    sums: torch.Tensor | None
    taken: tuple[bool, bool]
    event: Any = None
    kept: Any = None

    def land(self) -> list[list[int]]:
        """Wait, asleep and without the interpreter's lock; the sums of what was read and of what arrived."""
        if self.event is not None:
            self.event.synchronize()
        rows = [[], []] if self.sums is None else self.sums.sum(-1).tolist()
        return [row if taken else [] for row, taken in zip(rows, self.taken, strict=True)]


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
        for stream in (self.look, self.move, *self.back, self.close) if self.cuda else ():
            stream.synchronize()

    def begin(self, lane: Lane, job: Job) -> Flight:
        """Enqueue a job: sums of what is read, its copy piece by piece and, behind each, sums of what arrived."""
        import torch

        pages, sums, copied = job.pages, None, []
        taken = lane.verify and job.to_host, lane.verify and bool(lane.readback or not job.to_host)
        for event in job.after if self.cuda else ():
            (self.look if taken[0] else self.move).wait_event(event)
        if lane.verify:
            with self._on(self.look):
                sums = torch.empty((2, len(pages), PARTS), dtype=torch.int64, device=self.where)
                done = 0
                for page, _, n in runs(pages, pages) if taken[0] else ():
                    sum_into(sums[0, done : done + n], lane.device_pages[page : page + n])
                    done += n
            self._behind(self.move, self.look)  # also when only memory for sums was taken there
        pieces = runs(pages, job.slots, self._most(lane))
        with self._on(self.move):
            for page, slot, n in pieces:
                device, host = lane.device_pages[page : page + n], lane.host_pages[slot : slot + n]
                lane.copy(host, device) if job.to_host else lane.copy(device, host)
                copied.append((device, host, self.move.record_event() if self.cuda and taken[1] else None))
        if taken[1]:
            arriving = [*zip(sums[1].split([n for _, _, n in pieces]), copied, strict=True)]
            for side in range(len(self.back)):  # two, in turn: while one sums, the other reads back
                with self._on(self.back[side]):
                    self._sum_arrived(side, lane, job, arriving[side :: len(self.back)])
        return self._close(sums, taken)

    def _sum_arrived(self, side: int, lane: Lane, job: Job, pieces: list[Any]) -> None:
        lands = job.to_host and lane.readback != "direct"
        if lands and self._landing[side] is None:
            self._landing[side] = lane.device_pages.new_empty((self._most(lane), lane.device_pages.shape[1]))
        for place, (device, host, event) in pieces:
            if event is not None:
                self.back[side].wait_event(event)
            arrived = host if job.to_host else device
            if lands:  # the stream's own order says when the memory is free again
                arrived = self._landing[side][: len(host)].copy_(host, non_blocking=True)
            sum_into(place, arrived)

    def _close(self, sums: torch.Tensor | None, taken: tuple[bool, bool]) -> Flight:
        """All sums to the host in one small copy, on a stream that no later copy waits for."""
        if not self.cuda:
            return Flight(sums, taken)
        import torch

        for stream in (self.move, *self.back):
            self._behind(self.close, stream)
        event, found = torch.cuda.Event(blocking=True), None
        with torch.cuda.stream(self.close):
            if sums is not None:
                found = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)
            event.record()
        return Flight(found, taken, event, kept=sums)

    @staticmethod
    def _most(lane: Lane) -> int:
        """Pages of a piece, at least one."""
        return max(1, PIECE_BYTES // lane.device_pages.shape[1])

    def _on(self, stream: Any) -> Any:
        if not self.cuda:
            return nullcontext()
        import torch

        return torch.cuda.stream(stream)

    def _behind(self, later: Any, earlier: Any) -> None:
        if self.cuda:
            later.wait_stream(earlier)
