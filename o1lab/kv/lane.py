"""Copies of pages between a pool on a device and one in host memory, beside the work of the caller's stream.

A :class:`Lane` has worker threads, on CUDA each with streams of its own, which it keeps busy: it begins several jobs
before it waits for the first (:mod:`o1lab.kv.courier`). A :class:`Job` copies pages to host slots or
back and brings the checksums of both sides; what they mean, and who may use the pages meanwhile, is for
:mod:`o1lab.kv.eviction` to decide. A worker touches bytes only, never the books.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from o1lab.kv.asked import a_pool
from o1lab.kv.checksum import checksums
from o1lab.kv.courier import Courier, Flight, runs
from o1lab.kv.pool import PagePool, PoolError

if TYPE_CHECKING:
    import torch


Group = tuple[list[int], list[int], list[int]]
"""Pages that go and come together, their generations, and their host pages."""


class CopyFailed(PoolError):
    """A copy raised, or its thread died or hung; the source is untouched, so that nothing is lost: try again."""


@dataclass
class Job:
    """Pages to copy, in order, each with its host slot; filled in by the lane that takes it.

    Attributes
    ----------
    to_host : bool
        From ``pages`` to ``slots``, or back.
    groups : list of Group
    source, target : list of int
        Checksums of the side that was read, taken before the copy, and of the other one, taken after it.
    after : list of torch.cuda.Event
        What has to be over before the copy may begin.
    error : CopyFailed or None
    """

    to_host: bool
    groups: list[Group]
    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    error: CopyFailed | None = None
    after: list[Any] = field(default_factory=list)
    worker: threading.Thread | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def pages(self) -> list[int]:
        """Pages on the device."""
        return [page for pages, _, _ in self.groups for page in pages]

    @property
    def slots(self) -> list[int]:
        """Pages of the host pool."""
        return [slot for _, _, slots in self.groups for slot in slots]


def host_pool(like: PagePool, bytes: int) -> PagePool:
    """A pool in host memory with the pages of ``like``, pinned as it is when that one is on a GPU.

    ``pin_memory=True`` would take the next power of two; ``cudaHostRegister`` on ordinary memory takes just ``bytes``,
    and costs the time to touch and lock each page of the operating system, once.

    Raises
    ------
    PoolError
        No such memory, or it cannot be locked (``ulimit -l``, or a container's limit).
    """
    import torch

    a_pool("like", like)
    device = "meta" if like.arena.device.type == "meta" else "cpu"
    pool = PagePool(bytes, device=device, page_bytes=like.page_bytes, chunk_bytes=like.chunk_pages * like.page_bytes)
    if like.arena.device.type == "cuda":
        runtime, address = torch.cuda.cudart(), pool.arena.data_ptr()
        code = int(runtime.cudaHostRegister(address, pool.bytes, 0))
        if code:
            raise PoolError(f"{pool.bytes / 2**30:.2f} GiB of host memory could not be pinned: CUDA error {code}")
        weakref.finalize(pool.arena, runtime.cudaHostUnregister, address)
    return pool


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


DEPTH = 4
"""Jobs that a worker has begun and not yet ended, at most: the bus finds the next one when one is through."""
READBACKS = (None, False, True, "direct")
_ERRORS = (RuntimeError, ValueError, OSError, MemoryError)  # anything else ends the thread, and is found


class Lane:
    """Copies jobs in the order of their arrival on each of its workers.

    Parameters
    ----------
    device, host : PagePool
        With pages of one size.
    workers : int
        Threads, started with the first job; 0 copies at once in the calling thread, as books without memory want.
    readback : bool or "direct", optional
        Check what reached the host by copying it back to the device and summing there: no load on the CPU, as many
        bytes again on the other direction of the bus. Default: on CUDA. Without it a CPU core sums some 3 to 6 GB/s.
        With ``"direct"`` the kernel that sums reads host memory itself: nothing lands on the device.
    copy : callable(target, source), optional
        Instead of ``target.copy_(source, non_blocking=True)``; faults are injected here.

    Attributes
    ----------
    depth : int
        Jobs that a worker may have begun at a time: :data:`DEPTH` on CUDA. On the CPU nothing runs by itself: 1.
    """

    def __init__(
        self, device: PagePool, host: PagePool, *, workers: int = 1, readback: bool | str | None = None,
        verify: bool = True, copy: Callable[[Any, Any], None] | None = None,
    ) -> None:  # fmt: skip
        a_pool("device", device)
        a_pool("host", host)
        if device.page_bytes != host.page_bytes:
            raise PoolError(f"pages of {device.page_bytes} bytes do not go into pages of {host.page_bytes}")
        if readback not in READBACKS:
            raise PoolError(f"readback={readback!r}: one of {', '.join(map(repr, READBACKS))}")
        self.cuda = device.arena.device.type == "cuda"
        self.where, self._pools = device.arena.device, (device, host)  # as long as a copy runs, its memory stays
        self.device_pages, self.host_pages = (pool.arena.view(pool.pages, pool.page_bytes) for pool in (device, host))
        self.real = self.where.type != "meta"
        self.workers, self.depth = workers if self.real else 0, DEPTH if self.cuda else 1
        self.readback, self.verify, self.copy = self.cuda if readback is None else readback, verify, copy or _copy
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._hiring = threading.Lock()
        weakref.finalize(self, _stop, self._jobs, self._threads)

    def mark(self) -> Any:
        """An event behind all that the current stream has been given so far; ``None`` without CUDA."""
        if not self.cuda:
            return None
        import torch

        return torch.cuda.current_stream(self.where).record_event()

    def submit(self, job: Job) -> Job:
        """Queue a job; a copy to the device begins behind all that the current stream has been given so far."""
        if not job.to_host:
            job.after.append(self.mark())
        if self.workers:
            self._jobs.put(job)
            self._staff()
        else:
            job.worker = threading.current_thread()
            courier = Courier(self.where, own=False)
            flight = self._begin(job, courier)
            if flight is not None:
                self._end(job, courier, flight)
        return job

    def wait(self, job: Job, most_s: float = 60.0) -> None:
        """Until the job is done, or its thread is found dead; its error is in the job.

        Raises
        ------
        CopyFailed
            It takes longer than ``most_s``. The job goes on, and its pages and slots stay taken.
        """
        end, pause = time.monotonic() + most_s, 0.0005
        while not job.done.wait(pause):
            self.find_dead(job)
            if time.monotonic() > end:
                raise CopyFailed(f"a copy of {len(job.pages)} pages is not done after {most_s:g} s: try again later")
            pause = min(2 * pause, 0.05)

    def find_dead(self, job: Job) -> None:
        """Close the job if the thread that took it is gone."""
        if job.worker is None:
            self._staff()
        elif not job.worker.is_alive() and not job.done.is_set():
            if self.cuda:  # what the thread had started may still be on its way
                import torch

                torch.cuda.synchronize(self.where)
            job.error = CopyFailed(f"the thread that copied {len(job.pages)} pages died: they stay where they are")
            job.done.set()

    def _staff(self) -> None:
        with self._hiring:
            self._threads[:] = [thread for thread in self._threads if thread.is_alive()]
            while len(self._threads) < self.workers:
                args = weakref.ref(self), self._jobs
                self._threads.append(threading.Thread(target=_work, args=args, daemon=True, name="kv copy"))
                self._threads[-1].start()

    def _begin(self, job: Job, courier: Courier) -> Flight | None:
        """Start a job; ``None`` when it has ended already, for better or worse."""
        try:
            if self.real:
                return courier.begin(self, job)
            job.source = job.target = [0] * len(job.pages)
            job.done.set()
        except _ERRORS as error:
            self._fail(job, courier, error)
        return None

    def _end(self, job: Job, courier: Courier, flight: Flight) -> None:
        """Wait for a job that was begun."""
        try:
            job.source, job.target = flight.land()
            if self.verify and job.to_host and not self.readback:
                job.target = self.host_sums(job.slots).tolist()
            job.done.set()
        except _ERRORS as error:
            self._fail(job, courier, error)

    def _fail(self, job: Job, courier: Courier, error: Exception) -> None:
        courier.settle()  # what had been started for it uses its pages
        job.error = CopyFailed(f"copying {len(job.pages)} pages failed, they stay: {type(error).__name__}: {error}")
        job.error.__cause__ = error
        job.done.set()

    def host_sums(self, slots: list[int]) -> torch.Tensor:
        """Checksums of host slots, computed on the CPU in the calling thread; int64 of shape (len(slots),)."""
        import torch

        return torch.cat([checksums(self.host_pages[slot : slot + n]) for slot, _, n in runs(slots, slots)])


def _work(owner: weakref.ref[Lane], jobs: queue.SimpleQueue[Job | None]) -> None:
    """Body of a worker; holds no lane while it has nothing in hand, so that a forgotten one can end."""
    courier: Courier | None = None
    begun: deque[tuple[Lane, Job, Flight]] = deque()
    with suppress(SystemExit):  # the thread is told to end: whoever waits for its jobs finds it gone
        try:
            while (job := _next(jobs, begun, courier)) is not None:
                job.worker = threading.current_thread()
                lane = owner()
                if lane is None:
                    return
                courier = courier or Courier(lane.where)
                flight = lane._begin(job, courier)
                if flight is not None:
                    begun.append((lane, job, flight))
                    if len(begun) >= lane.depth:
                        _end_first(begun, courier)
                del lane, job, flight
            while begun:
                _end_first(begun, courier)
        finally:
            if courier is not None:
                courier.settle()  # before the memory goes, held by begun or a traceback, that copies still use


def _next(jobs: queue.SimpleQueue[Job | None], begun: deque[tuple[Lane, Job, Flight]], courier: Any) -> Job | None:
    """The next job; while none is there, those begun are ended, oldest first."""
    while begun:
        with suppress(queue.Empty):
            return jobs.get_nowait()
        _end_first(begun, courier)
    return jobs.get()


def _end_first(begun: deque[tuple[Lane, Job, Flight]], courier: Courier) -> None:
    lane, job, flight = begun.popleft()
    lane._end(job, courier, flight)


def _stop(jobs: queue.SimpleQueue[Job | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        jobs.put(None)
